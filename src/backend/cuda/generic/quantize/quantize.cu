// Memory-bound: a thread reads sixteen neighbours, finds its group's scale with the lanes that share it, and writes
// their codes; a warp covers 512 columns of a row. Bits as ops/quantize/codec.hpp has them. The scales' padding is
// cleared by further blocks of the same launch.
#include <algorithm>
#include <cfloat>
#include <string>

#include "backend/cuda/backend.hpp"
#include "backend/cuda/core/convert.cuh"
#include "backend/cuda/core/divisor.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/queue.hpp"
#include "backend/cuda/core/scale_places.cuh"
#include "backend/cuda/core/warpgroup.cuh"
#include "ops/quantize/codec.hpp"

namespace mla::cuda {
namespace generic {
namespace {

constexpr int kN = 16, kColumns = 32 * kN;

enum class Form : uint8_t { fp8, groups_f32, groups_power, groups_packed, nvfp4, mxfp4 };

// Zeros: all words of rows [first_row, first_row + rows), and the byte places past the last group of used rows.
struct Padding {
  int64_t first_row = 0, rows = 0, used = 0;
  int32_t words = 0, last_bytes = 0;  // of a row; used bytes of its last word
  constexpr int64_t count() const { return rows * words + used; }
  __device__ void clear(const ScalePlaces& scales, int64_t i) const {
    if (i < rows * words) {
      *scales.at(first_row + i % rows, i / rows) = 0;
    } else {
      uint8_t* const last = reinterpret_cast<uint8_t*>(scales.at(i - rows * words, words - 1));
      for (int b = last_bytes; b < 4; ++b) last[b] = 0;
    }
  }
};

struct QuantizeRows {
  const void* x = nullptr;
  int64_t x_row = 0, rows = 0;
  const int32_t* list = nullptr;  // which they are; null: 0, 1, ...
  int32_t width = 0;
  uint32_t chunks = 0;  // of kColumns, in a row
  Divisor by_chunks;
  uint8_t* codes = nullptr;
  int64_t codes_row = 0;
  ScalePlaces scales;
  float number = 1;  // scale or global_scale
  Padding padding;
};

// e2m1 of |q|: least of the roundings to multiples of 1/2, 1 and 2, each counted in codes from where it begins. The sum
// with 1.5 * 2^23 rounds to a whole number, ties to even, in its low bits. Past 6.5 it must be told to saturate.
template <bool saturate>
__device__ inline uint32_t e2m1_bits(float q) {
  constexpr float kMagic = 12582912.0f;
  const float a = fabsf(q), high = __fmaf_rn(a, 0.5f, kMagic + 4);
  return __float_as_uint(
      fminf(fminf(__fmaf_rn(a, 2.0f, kMagic), __fadd_rn(a, kMagic + 2)), saturate ? fminf(high, kMagic + 7) : high));
}

// p / 6 by 1 / 6 in two parts. It may be off by a unit in the last place, but is not where e4m3 would see it: tried
// with every mantissa.
__device__ inline float over_six(float p) { return __fmaf_rn(p, 0x1.555554p-3f, __fmul_rn(p, 0x1.555556p-27f)); }

// Sixteen e2m1 codes of x * g / s in two words, s above 0. plain: no NaN among them, and no quotient above 6.5.
template <bool plain>
__device__ inline void encode_e2m1(const float (&x)[kN], float g, float s, uint32_t (&codes)[2]) {
  const float inverse = __frcp_rn(s);
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    uint32_t word = 0;
#pragma unroll
    for (int e = 7; e >= 0; --e) {
      // NaN becomes the largest; past 6 * 448 all is 6. One step of the remainder puts a quotient on the right side of
      // every boundary: those times s have few bits, and no number lies closer to one than its own last place.
      float p = __fmul_rn(x[8 * w + e], g);
      if constexpr (!plain) p = fmaxf(fminf(p, 4096.0f), -4096.0f);
      float q = __fmul_rn(p, inverse);
      q = __fmaf_rn(__fmaf_rn(-q, s, p), inverse, q);
      word = word << 4 | (e2m1_bits<!plain>(q) & 7u) | (__float_as_uint(p) >> 28 & ~7u);
    }
    codes[w] = word;
  }
}
// amax: the largest magnitude, infinity too. A normal scale that did not saturate lies within 1/16 of g * amax / 6.
__device__ inline void encode_e2m1(const float (&x)[kN], float g, fp8_e4m3 scale, float amax, uint32_t (&codes)[2]) {
  const float s = widen(scale);
  bool odd = !(g * amax <= 6 * 448.0f) || s < 0x1p-6f;
#pragma unroll
  for (int e = 0; e < kN; e += 2) odd |= x[e] != x[e] || x[e + 1] != x[e + 1];
  if (!odd) encode_e2m1<true>(x, g, s, codes);
  else if (s > 0) encode_e2m1<false>(x, g, s, codes);
  else codes[0] = codes[1] = 0;
}

// The same of bf16 numbers two a word, if they are plain: otherwise false, and nothing is done. amax is NaN if one of
// them is.
__device__ inline bool encode_e2m1(const uint32_t (&x)[kN / 2], float g, fp8_e4m3 scale, float amax,
                                   uint32_t (&codes)[2]) {
  const float s = widen(scale);
  if (!(g * amax <= 6 * 448.0f) || s < 0x1p-6f) return false;
  // 1 / s as a sum: the quotient is rounded once, from one that is right to 2^-44. That puts it on the right side of
  // every boundary, for the reason above.
  const float high = reciprocal_approx(s);
  const float low = __fmul_rn(__fmaf_rn(-high, s, 1.0f), high);
  const auto code = [&](float v) {  // in the low byte
    const float p = __fmul_rn(v, g);
    return e2m1_bits<false>(__fmaf_rn(p, high, __fmul_rn(p, low)));
  };
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    const uint32_t* const in = x + 4 * w;
    uint32_t even[4], odd[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      even[i] = code(__uint_as_float(in[i] << 16));
      odd[i] = code(__uint_as_float(in[i] & 0xffff0000u));
    }
    const auto bytes = [](const uint32_t(&c)[4]) {
      return __byte_perm(__byte_perm(c[0], c[1], 0x0040), __byte_perm(c[2], c[3], 0x0040), 0x5410);
    };
    // The high bytes of even elements, which hold their signs, then of odd ones.
    const uint32_t first = __byte_perm(in[0], in[1], 0x7351), second = __byte_perm(in[2], in[3], 0x7351),
                   even_signs = __byte_perm(first, second, 0x5410), odd_signs = __byte_perm(first, second, 0x7632);
    codes[w] = (bytes(even) + 16 * bytes(odd)) | (even_signs >> 4 & 0x08080808u) | (odd_signs & 0x80808080u);
  }
  return true;
}

// A lane's codes from column i on, the first `here` of them.
template <bool wide>
__device__ inline void store_pairs(const uint32_t (&words)[2], uint8_t* codes, int i, int here) {
  if constexpr (wide) {
    if (here > 0) *reinterpret_cast<uint2*>(codes + i / 2) = make_uint2(words[0], words[1]);
  } else {
#pragma unroll
    for (int e = 0; e < kN; e += 2)
      if (e < here) codes[(i + e) / 2] = static_cast<uint8_t>(words[e / 8] >> (e % 8 * 4));
  }
}

template <class T, Form form, int group, bool wide>
__global__ void __launch_bounds__(kBlockThreads) quantize_kernel(QuantizeRows a, unsigned row_blocks) {
  if (blockIdx.x >= row_blocks) {
    const int64_t i = static_cast<int64_t>(blockIdx.x - row_blocks) * kBlockThreads + threadIdx.x;
    if (i < a.padding.count()) a.padding.clear(a.scales, i);
    return;
  }
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int unit = static_cast<int>(blockIdx.x * (kBlockThreads / 32) + threadIdx.x / 32),
            line = a.by_chunks.divide(unit);
  if (line >= a.rows) return;
  const int64_t row = a.list ? a.list[line] : line;
  if (row < 0) return;
  const int i = (unit - line * static_cast<int>(a.chunks)) * kColumns + kN * lane;
  const T* const from = static_cast<const T*>(a.x) + row * a.x_row + i;
  const int here = wide ? i < a.width ? kN : 0 : max(0, min(kN, a.width - i));  // elements of this lane
  float x[kN] = {};
  [[maybe_unused]] uint32_t pairs[kN / 2] = {};
  constexpr bool packed = form == Form::nvfp4 && std::is_same_v<T, bf16> && wide;
  if constexpr (packed) {
    if (here > 0) load<true>(reinterpret_cast<const uint32_t*>(from), pairs);
  } else if constexpr (wide) {
    if (here > 0) {
      T stored[kN];
      load<true>(from, stored);
      widen_all(stored, x);
    }
  } else {
#pragma unroll
    for (int e = 0; e < kN; ++e)
      if (e < here) x[e] = widen(from[e]);
  }
  uint8_t* const codes = a.codes + row * a.codes_row;

  if constexpr (form == Form::mxfp4) {
    uint32_t most = 0;  // bits of the group's largest magnitude, NaN's above infinity's
#pragma unroll
    for (int e = 0; e < kN; ++e) most = max(most, __float_as_uint(x[e]) & 0x7fffffffu);
    const uint32_t exponent = max(most, __shfl_xor_sync(0xffffffffu, most, 1)) >> 23;
    const bool finite = exponent < 255;
    const uint32_t scale = finite ? max(exponent, 2u) - 2 : 255;
    const float inverse = __uint_as_float(finite ? (254 - scale) << 23 : 0);  // exact, and so is a product with it
    uint32_t words[2];
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      uint32_t word = 0;
#pragma unroll
      for (int e = 7; e >= 0; --e) {
        const float q = __fmul_rn(x[8 * w + e], inverse);
        word = word << 4 | (e2m1_bits<true>(q) & 7u) | (__float_as_uint(q) >> 28 & ~7u);
      }
      words[w] = finite ? word : 0;
    }
    store_pairs<wide>(words, codes, i, here);
    uint32_t word = here > 0 && lane % 2 == 0 ? scale << (lane / 2 % 4 * 8) : 0;
    word |= __shfl_xor_sync(0xffffffffu, word, 2);
    word |= __shfl_xor_sync(0xffffffffu, word, 4);
    if (lane % 8 == 0 && here > 0) *a.scales.at(row, i / (4 * group)) = word;
  } else if constexpr (form == Form::nvfp4) {
    fp8_e4m3 scale;
    uint32_t words[2];
    const auto scale_of = [&](float amax) { return narrow<fp8_e4m3>(over_six(a.number * fminf(amax, FLT_MAX))); };
    bool done = false;
    if constexpr (packed) {
      const float most = __uint_as_float(largest_bf16<true>(pairs) & 0xffff0000u);
      scale = scale_of(most);
      done = encode_e2m1(pairs, a.number, scale, most, words);
      if (!done) {
        bf16 stored[kN];
        memcpy(stored, pairs, sizeof(stored));
        widen_all(stored, x);
      }
    }
    if (!done) {
      const float own = largest_of(x);
      scale = scale_of(own);
      encode_e2m1(x, a.number, scale, own, words);
    }
    store_pairs<wide>(words, codes, i, here);
    // Four lanes' scales are a word; those past the row's end hold zeros.
    uint32_t word = here > 0 ? static_cast<uint32_t>(scale.bits) << (lane % 4 * 8) : 0;
    word |= __shfl_xor_sync(0xffffffffu, word, 1);
    word |= __shfl_xor_sync(0xffffffffu, word, 2);
    if (lane % 4 == 0 && here > 0) *a.scales.at(row, i / (4 * kN)) = word;
    return;
  } else {
    const float own = largest_of(x);
    float y[kN];
    if constexpr (form == Form::fp8) {
      divide_all(x, a.number, own, y);
    } else {
      constexpr int lanes = group / kN;
      const float most = largest_in_lanes<lanes>(own), s = group_scale(most);
      const bool writes = lane % lanes == 0 && here > 0;
      if constexpr (form == Form::groups_f32) {
        divide_all(x, s, most, y);
        if (writes) *a.scales.at(row, i / group) = __float_as_uint(s);
      } else {
        const int exponent = ceil_log2(s);
        const float inverse = power_of_two(-exponent);
#pragma unroll
        for (int e = 0; e < kN; ++e) y[e] = x[e] * inverse;
        if constexpr (form == Form::groups_power) {
          if (writes) *a.scales.at(row, i / group) = __float_as_uint(power_of_two(exponent));
        } else {
          uint32_t word = writes ? static_cast<uint32_t>(exponent + 127) << (lane / lanes % 4 * 8) : 0;
          word |= __shfl_xor_sync(0xffffffffu, word, lanes);
          word |= __shfl_xor_sync(0xffffffffu, word, 2 * lanes);
          if (lane % (4 * lanes) == 0 && here > 0) *a.scales.at(row, i / (4 * group)) = word;
        }
      }
    }
    fp8_e4m3 out[kN];
    narrow_all(y, out);
    if constexpr (wide) {
      if (here > 0) store<true>(out, reinterpret_cast<fp8_e4m3*>(codes + i));
    } else {
#pragma unroll
      for (int e = 0; e < kN; ++e)
        if (e < here) codes[i + e] = out[e].bits;
    }
  }
}

__global__ void __launch_bounds__(kBlockThreads) padding_kernel(ScalePlaces scales, Padding padding) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
  if (i < padding.count()) padding.clear(scales, i);
}

// used: rows whose places past the last group are to be cleared.
Padding padding_of(const QuantizedView& y, int64_t used) {
  Padding p;
  const int64_t groups = y.spec.groups(y.width);
  if (groups == 0) return p;
  const bool bytes = bytes_of_groups(y.spec);
  p.first_row = y.tokens;
  p.rows = ops::padded_tokens(y) - y.tokens;
  p.words = static_cast<int32_t>(bytes ? ops::padded_groups(y) / 4 : groups);
  p.last_bytes = static_cast<int32_t>(groups % 4);
  p.used = bytes && p.last_bytes != 0 ? used : 0;
  return p;
}

int64_t blocks_of(int64_t count) { return (count + kBlockThreads - 1) / kBlockThreads; }

template <class T, Form form, int group>
void run(const Queue& queue, const QuantizeRows& a, const ops::QuantizeArgs& args) {
  const auto multiple_of = [](const void* p, int64_t stride, int64_t n) {
    return reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(n) == 0 && stride % n == 0;
  };
  const bool wide = a.width % kN == 0 && multiple_of(a.x, a.x_row * static_cast<int64_t>(sizeof(T)), 16) &&
                    multiple_of(a.codes, a.codes_row, form == Form::nvfp4 || form == Form::mxfp4 ? 8 : 16);
  const int64_t warps = kBlockThreads / 32, row_blocks = (a.rows * a.chunks + warps - 1) / warps,
                blocks = row_blocks + blocks_of(a.padding.count());
  if (blocks == 0) return;
  const std::string what =
      "rows " + std::to_string(a.rows) + ", width " + std::to_string(a.width) + ", output " + to_string(args.y.spec);
  if (blocks > INT32_MAX / warps) throw ShapeError("quantize: too much for one call (" + what + ")");
  launch(wide ? quantize_kernel<T, form, group, true> : quantize_kernel<T, form, group, false>,
         {.grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(kBlockThreads)}, queue.stream(), "quantize",
         "quantize_kernel", what, a, static_cast<unsigned>(row_blocks));
}

template <class T>
void run(const Queue& queue, const ops::QuantizeArgs& args) {
  const OutputSpec& spec = args.y.spec;
  QuantizeRows a;
  a.x = args.x.data();
  a.x_row = args.x.stride<Token>();
  a.rows = args.y.width == 0 ? 0 : ops::rows_of(args);
  a.list = queue.reads(args.rows, "quantize", "rows");
  a.width = static_cast<int32_t>(args.y.width);
  a.chunks = static_cast<uint32_t>((a.width + kColumns - 1) / kColumns);
  a.by_chunks = Divisor(std::max(a.chunks, 1u));
  a.codes = reinterpret_cast<uint8_t*>(args.y.data);
  a.codes_row = args.y.row_stride;
  a.scales = scale_places(args.y);
  a.number = spec.kind == OutputKind::nvfp4 ? spec.global_scale : spec.scale;
  // A row's words are written whole; of rows that the list leaves out, bytes are cleared.
  a.padding = padding_of(args.y, args.rows.empty() ? 0 : args.x.extent<Token>());
  if (spec.kind == OutputKind::fp8) return run<T, Form::fp8, 0>(queue, a, args);
  if (spec.kind == OutputKind::nvfp4) return run<T, Form::nvfp4, 16>(queue, a, args);
  if (spec.kind == OutputKind::mxfp4) return run<T, Form::mxfp4, 32>(queue, a, args);
  const auto by_group = [&](auto group) {
    constexpr int g = decltype(group)::value;
    switch (spec.form) {
      case ScaleForm::f32: return run<T, Form::groups_f32, g>(queue, a, args);
      case ScaleForm::power_of_two: return run<T, Form::groups_power, g>(queue, a, args);
      case ScaleForm::packed_ue8m0: return run<T, Form::groups_packed, g>(queue, a, args);
    }
  };
  if (spec.group == 128) by_group(std::integral_constant<int, 128>{});
  else by_group(std::integral_constant<int, 64>{});
}

}  // namespace
}  // namespace generic

void quantize(Stream& stream, const ops::QuantizeArgs& a) {
  for_activation(a.x.dtype(), [&](auto element) { generic::run<decltype(element)>(stream.queue(), a); });
}

void quantize_padding(Stream& stream, const ops::QuantizePaddingArgs& a) {
  const generic::Padding padding = generic::padding_of(a.y, a.rows);
  const int64_t blocks = generic::blocks_of(padding.count());
  if (blocks == 0) return;
  launch(generic::padding_kernel, {.grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(kBlockThreads)},
         stream.queue().stream(), "quantize_padding", "padding_kernel", "rows " + std::to_string(a.rows),
         scale_places(a.y), padding);
}

}  // namespace mla::cuda
