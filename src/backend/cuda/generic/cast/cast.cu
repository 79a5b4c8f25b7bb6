// Memory-bound: a thread moves sixteen bytes of the wider side where both lie at multiples of it.
#include <algorithm>
#include <cstdint>
#include <string>

#include "backend/cuda/backend.hpp"
#include "backend/cuda/core/convert.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/overlap.cuh"
#include "backend/cuda/core/queue.hpp"
#include "backend/cuda/generic/cast/cast.hpp"

namespace mla::cuda {
namespace generic {
namespace {

// Element groups of `n`, numbered through row, head and group.
template <class X, class Y, int n>
__global__ void copy_kernel(const X* x, Y* y, int64_t rows, int64_t heads, int64_t groups, int64_t x_row,
                            int64_t x_head, int64_t y_row, int64_t y_head, int64_t y_in, const int32_t* x_rows,
                            const int32_t* y_rows, const float* scales, int64_t scales_head, float one_scale,
                            bool through_e4m3) {
  take_turn();
  const int64_t count = rows * heads * groups, step = static_cast<int64_t>(gridDim.x) * kBlockThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x; i < count; i += step) {
    const int64_t g = i % groups, h = i / groups % heads, t = i / groups / heads;
    const int64_t from = x_rows ? x_rows[t] : t, to = y_rows ? y_rows[t] : t;
    if (to < 0) continue;
    const float scale = scales ? __ldg(scales + h * scales_head) : one_scale;
    const auto in = *reinterpret_cast<const Pack<X, n>*>(x + from * x_row + h * x_head + g * n);
    Pack<Y, n> out;
#pragma unroll
    for (int e = 0; e < n; ++e) {
      float value = scale == 1.0f ? widen(in.at[e]) : widen(in.at[e]) / scale;
      if (through_e4m3) value = widen(from_float<fp8_e4m3>(value));
      out.at[e] = from_float<Y>(value);
    }
    *reinterpret_cast<Pack<Y, n>*>(y + to * y_row + h * y_head + g * n * y_in) = out;
  }
}

template <class X, class Y>
void run(const Queue& queue, const CopyRows& c, std::string_view op) {
  constexpr int n = 16 / std::max(sizeof(X), sizeof(Y));
  const int64_t heads = c.x.extent<Head>(), width = c.x.extent<In>();
  const auto fits = [](const auto& v, size_t size, int64_t elements) {
    return reinterpret_cast<uintptr_t>(v.data()) % (size * static_cast<size_t>(elements)) == 0 &&
           v.template stride<Token>() % elements == 0 && v.template stride<Head>() % elements == 0;
  };
  const bool wide = width % n == 0 && c.y.stride<In>() == 1 && fits(c.x, sizeof(X), n) && fits(c.y, sizeof(Y), n);
  const int64_t groups = wide ? width / n : width, count = c.rows * heads * groups;
  if (count == 0) return;
  const std::string shape =
      "rows " + std::to_string(c.rows) + ", heads " + std::to_string(heads) + ", width " + std::to_string(width);
  LaunchConfig config = strided(count, kBlockThreads, int64_t{queue.multiprocessors()} * 32);
  config.overlap = queue.hopper();
  launch(wide ? copy_kernel<X, Y, n> : copy_kernel<X, Y, 1>, config, queue.stream(), op, "copy of rows", shape,
         static_cast<const X*>(c.x.data()), static_cast<Y*>(c.y.data()), c.rows, heads, groups, c.x.stride<Token>(),
         c.x.stride<Head>(), c.y.stride<Token>(), c.y.stride<Head>(), c.y.stride<In>(), c.x_rows, c.y_rows, c.scales,
         c.scales_head, c.scale, c.through_e4m3);
}

// Codes of bf16 numbers, for which the index arithmetic above would take longer than memory does.
struct Codes {
  const bf16* x;
  uint8_t* y;
  int64_t x_row, x_head, y_row, y_head, y_in;
  const float* scales;
  int64_t scales_head;
  float scale;
  int32_t rows, width;
  __device__ float scale_of(int head) const { return scales ? __ldg(scales + head * scales_head) : scale; }
};

/// Of e4m3, four numbers of bf16, two a word, over scale; the first in the low byte.
__device__ __forceinline__ uint32_t codes_of(uint32_t a, uint32_t b, float scale) {
  const auto pair = [&](uint32_t w) {
    const float2 x{__uint_as_float(w << 16) / scale, __uint_as_float(w & 0xffff0000u) / scale};
    return static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(x, __NV_SATFINITE, __NV_E4M3));
  };
  return pair(a) | pair(b) << 16;
}

/// A thread has 16 neighbouring numbers of a row of one head.
__global__ void __launch_bounds__(kBlockThreads) codes_kernel(const Codes c) {
  const int pieces = c.width / 16, rows = kBlockThreads / pieces, row = static_cast<int>(threadIdx.x) / pieces,
            piece = static_cast<int>(threadIdx.x) % pieces, head = static_cast<int>(blockIdx.y);
  const int64_t t = static_cast<int64_t>(blockIdx.x) * rows + row;
  if (row >= rows || t >= c.rows) return;
  const float scale = c.scale_of(head);
  const auto* x = reinterpret_cast<const uint4*>(c.x + t * c.x_row + head * c.x_head + piece * 16);
  const uint4 a = __ldg(x), b = __ldg(x + 1);
  *reinterpret_cast<uint4*>(c.y + t * c.y_row + head * c.y_head + piece * 16) = {
      codes_of(a.x, a.y, scale), codes_of(a.z, a.w, scale), codes_of(b.x, b.y, scale), codes_of(b.z, b.w, scale)};
}

constexpr int kTurned = 128;  // rows and columns of a block that turns them

/// The same with a head's rows innermost: codes of four rows are put together in registers, and a warp stores 128 of
/// them side by side.
__global__ void __launch_bounds__(kBlockThreads) turned_codes_kernel(const Codes c) {
  __shared__ uint32_t words[kTurned][kTurned / 4];
  const int head = static_cast<int>(blockIdx.y), first_column = static_cast<int>(blockIdx.z) * kTurned;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kTurned;
  const int octets = min(c.width - first_column, kTurned) / 8;
  const float scale = c.scale_of(head);
  for (int i = static_cast<int>(threadIdx.x); i < octets * (kTurned / 4); i += kBlockThreads) {
    const int octet = i % octets, quad = i / octets;
    uint32_t code[4][2];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int64_t t = first + 4 * quad + r;
      uint4 x{};
      if (t < c.rows)
        x = __ldg(reinterpret_cast<const uint4*>(c.x + t * c.x_row + head * c.x_head + first_column + octet * 8));
      code[r][0] = codes_of(x.x, x.y, scale);
      code[r][1] = codes_of(x.z, x.w, scale);
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const auto byte = [&](int r) { return code[r][e / 4] >> 8 * (e % 4) & 0xff; };
      // Turned about by the octet, so that a warp's words lie in different banks.
      words[octet * 8 + e][quad ^ octet * 2 % (kTurned / 4)] = byte(0) | byte(1) << 8 | byte(2) << 16 | byte(3) << 24;
    }
  }
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t at = first + 4 * lane;
  for (int column = static_cast<int>(threadIdx.x) / 32; column < octets * 8; column += kBlockThreads / 32) {
    const uint32_t word = words[column][lane ^ column / 8 * 2 % (kTurned / 4)];
    uint8_t* const to = c.y + head * c.y_head + (first_column + column) * c.y_in + at;
    if (at + 4 <= c.rows) {
      *reinterpret_cast<uint32_t*>(to) = word;
    } else {
      for (int r = 0; at + r < c.rows; ++r) to[r] = static_cast<uint8_t>(word >> 8 * r);
    }
  }
}

/// Whether one of those two took the copy.
bool copy_codes(const Queue& queue, const CopyRows& c, std::string_view op) {
  const int64_t heads = c.x.extent<Head>(), width = c.x.extent<In>();
  if (c.x.dtype() != Dtype::bf16 || c.y.dtype() != Dtype::fp8_e4m3 || c.x_rows || c.y_rows || c.rows == 0 ||
      width == 0 || heads == 0 || heads > 65535 || c.rows > INT32_MAX)
    return false;
  const auto address = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
  if ((address(c.x.data()) | static_cast<uint64_t>(2 * (c.x.stride<Token>() | c.x.stride<Head>()))) % 16 != 0)
    return false;
  const Codes codes{.x = static_cast<const bf16*>(c.x.data()),
                    .y = static_cast<uint8_t*>(c.y.data()),
                    .x_row = c.x.stride<Token>(),
                    .x_head = c.x.stride<Head>(),
                    .y_row = c.y.stride<Token>(),
                    .y_head = c.y.stride<Head>(),
                    .y_in = c.y.stride<In>(),
                    .scales = c.scales,
                    .scales_head = c.scales_head,
                    .scale = c.scale,
                    .rows = static_cast<int32_t>(c.rows),
                    .width = static_cast<int32_t>(width)};
  const uint64_t to = address(c.y.data()) | static_cast<uint64_t>(codes.y_head);
  const std::string shape =
      "rows " + std::to_string(c.rows) + ", heads " + std::to_string(heads) + ", width " + std::to_string(width);
  const auto blocks = [&](int64_t rows) { return static_cast<unsigned>((c.rows + rows - 1) / rows); };
  const auto h = static_cast<unsigned>(heads);
  if (codes.y_in == 1 && width % 16 == 0 && width <= 16 * kBlockThreads &&
      (to | static_cast<uint64_t>(codes.y_row)) % 16 == 0) {
    launch(codes_kernel, {.grid = dim3(blocks(kBlockThreads / (width / 16)), h), .block = dim3(kBlockThreads)},
           queue.stream(), op, "codes of rows", shape, codes);
    return true;
  }
  if (codes.y_row == 1 && width % 8 == 0 && width <= 65535 * kTurned &&
      (to | static_cast<uint64_t>(codes.y_in)) % 4 == 0) {
    launch(turned_codes_kernel,
           {.grid = dim3(blocks(kTurned), h, static_cast<unsigned>((width + kTurned - 1) / kTurned)),
            .block = dim3(kBlockThreads)},
           queue.stream(), op, "codes of rows, turned", shape, codes);
    return true;
  }
  return false;
}

template <class X>
void to_any(const Queue& queue, const CopyRows& c, std::string_view op) {
  switch (c.y.dtype()) {
    case Dtype::f32: return run<X, float>(queue, c, op);
    case Dtype::bf16: return run<X, bf16>(queue, c, op);
    case Dtype::f16: return run<X, f16>(queue, c, op);
    case Dtype::fp8_e4m3: return run<X, fp8_e4m3>(queue, c, op);
  }
}

}  // namespace

void copy_rows(const Queue& queue, const CopyRows& c, std::string_view op) {
  if (copy_codes(queue, c, op)) return;
  if (c.x.dtype() == Dtype::f32) to_any<float>(queue, c, op);
  else if (c.x.dtype() == Dtype::f16) to_any<f16>(queue, c, op);
  else to_any<bf16>(queue, c, op);
}

}  // namespace generic

void cast(Stream& stream, const ops::CastArgs& a) {
  const Queue& queue = stream.queue();
  generic::copy_rows(queue,
                     {.x = a.x,
                      .y = a.y,
                      .x_rows = queue.reads(a.x_rows, "cast", "x_rows"),
                      .y_rows = queue.reads(a.y_rows, "cast", "y_rows"),
                      .rows = ops::rows_of(a),
                      .scale = a.scale,
                      .scales = a.scales.data(),
                      .scales_head = a.scales ? a.scales.stride<Head>() : 0,
                      .through_e4m3 = a.through_e4m3},
                     "cast");
}

}  // namespace mla::cuda
