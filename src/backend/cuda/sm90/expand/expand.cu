// See expand.hpp. A CTA's tile of D is 128 rows, 64 to each of two warpgroups, by up to 256 columns; a cluster of two
// has 256 rows, and each CTA loads half of B for both. A third warpgroup loads. Every CTA goes through tiles of keys,
// then of values.
#include <cuda_bf16.h>

#include <algorithm>
#include <string>

#include "backend/cuda/core/cluster.cuh"
#include "backend/cuda/core/convert.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/mbarrier.cuh"
#include "backend/cuda/core/reciprocal.hpp"
#include "backend/cuda/core/tensor_map.hpp"
#include "backend/cuda/core/tma.cuh"
#include "backend/cuda/core/warpgroup.cuh"
#include "backend/cuda/core/wgmma.cuh"
#include "backend/cuda/sm90/expand/expand.hpp"

namespace mla::cuda::sm90 {
namespace {

constexpr int kRows = 128, kBlock = 2 * kRows;  // of D: a CTA's, a cluster's; so many latent rows meet at once
constexpr int kColumns = 256, kInputs = 64, kStages = 4, kBox = 128;
constexpr int kThreads = 384, kMathRegisters = 232, kLoadRegisters = 40;
constexpr int kTogether = 8;  // neighbouring blocks of latent rows that all heads meet before the next: they stay in L2

enum class Barrier : int { group_0 = 1, group_1 = 2 };  // of a math warpgroup

struct alignas(1024) Shared {
  uint8_t a[kStages][kRows][2 * kInputs];
  uint8_t b[kStages][kColumns][2 * kInputs];
  uint8_t codes[2][2][64][kBox];  // a warpgroup's, 128 columns each, swizzled
  uint64_t full[kStages], empty[kStages];
};

struct Params {
  CUtensorMap x, key_weights, value_weights;  // [rows, latent], [heads (nope + value), latent]
  CUtensorMap keys, values;                   // [rows, heads, nope], [heads, value, rows]
  const float *key_scales, *value_scales;
  int64_t key_scale_head, value_scale_head;
  int32_t blocks, heads, steps;  // of kBlock rows; of kInputs inputs
};

/// Outputs of a head, and heads of a tile: whole ones where two fit, half of one a CTA otherwise.
template <int nope_, int value_>
struct Form {
  static constexpr int nope = nope_, value = value_, width = nope + value;
  static constexpr int key_heads = kColumns / nope, key_columns = key_heads * nope, value_heads = kBlock / value;
  static_assert(key_heads >= 1 && key_columns % 64 == 0 && value_heads * value == kBlock);
};

/// Of the keys' or the values' product: a block of latent rows, and one head or two.
struct Tile {
  int32_t block, head;
};

/// A cluster's tiles in turn: of keys, then of values.
template <class F, class Keys, class Values>
__device__ __forceinline__ void for_tiles(const Params& p, const Keys& keys, const Values& values) {
  const int32_t clusters = static_cast<int32_t>(gridDim.x) / 2;
  int32_t t = static_cast<int32_t>(blockIdx.x) / 2;
  const auto go_through = [&](int32_t each, const auto& call) {
    const int32_t columns = (p.heads + each - 1) / each, all = p.blocks * columns;
    for (; t < all; t += clusters) {
      const int32_t group = t / (kTogether * columns), rest = t % (kTogether * columns),
                    wide = min(kTogether, p.blocks - group * kTogether);
      call(Tile{group * kTogether + rest % wide, rest / wide * each});
    }
    t -= all;
  };
  go_through(F::key_heads, keys);
  go_through(F::value_heads, values);
}

template <class F>
__device__ __forceinline__ void load(const Params& p, Shared& shared, int rank) {
  int32_t n = 0;
  const auto load_tile = [&](int columns, const auto& of_a, const auto& of_b) {
    for (int32_t step = 0; step < p.steps; ++step, ++n) {
      const int32_t slot = n % kStages, input = step * kInputs;
      const uint32_t full = smem_address(&shared.full[slot]), b = smem_address(shared.b[slot]);
      mbarrier_wait(smem_address(&shared.empty[slot]), n / kStages % 2 ^ 1);
      mbarrier_arrive_expect(full, static_cast<uint32_t>((kRows + columns) * 2 * kInputs));
      of_a(smem_address(shared.a[slot]), full, input);
      of_b(b + static_cast<uint32_t>(rank * columns * kInputs), full, input);
    }
  };
  // Of B each CTA loads half: one head of two, or half of what one has.
  const auto row_of = [&](const Tile& tile) { return tile.block * kBlock + rank * kRows; };
  const auto own = [&](const Tile& tile, int heads, int outputs) {
    return tile.head * F::width + rank * (heads == 2 ? F::width : outputs / 2);
  };
  for_tiles<F>(
      p,
      [&](const Tile& tile) {
        load_tile(
            F::key_columns, [&](uint32_t a, uint32_t full, int at) { tma_load(a, p.x, full, at, row_of(tile)); },
            [&](uint32_t b, uint32_t full, int at) {
              tma_load_multicast(b, p.key_weights, full, 3, at, own(tile, F::key_heads, F::nope));
            });
      },
      [&](const Tile& tile) {
        load_tile(
            kColumns,
            [&](uint32_t a, uint32_t full, int at) {
              tma_load(a, p.value_weights, full, at, own(tile, F::value_heads, F::value) + F::nope);
            },
            [&](uint32_t b, uint32_t full, int at) { tma_load_multicast(b, p.x, full, 3, at, row_of(tile)); });
      });
}

/// Two sums as bf16, over the scale, as codes; the first in the low byte.
__device__ __forceinline__ uint32_t codes_of(float x, float y, const Reciprocal& by) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
  return narrow_pair<fp8_e4m3>(over(by, __uint_as_float(both << 16)), over(by, __uint_as_float(both & 0xffff0000u)));
}

/// Sums as what their codes stand for: of scales that Reciprocal does not serve, as seldom as can be.
__device__ __noinline__ void divide(float* x, int count, float scale) {
  for (int i = 0; i < count; ++i) x[i] = widen(narrow<fp8_e4m3>(widen(narrow<bf16>(x[i])) / scale));
}

template <class F>
class Multiplier {
 public:
  __device__ Multiplier(const Params& p, Shared& shared, int rank, int group)
      : p_(p), shared_(shared), rank_(rank), group_(group), thread_(static_cast<int>(threadIdx.x) % 128) {}

  __device__ __forceinline__ void run() {
    for_tiles<F>(
        p_, [&](const Tile& tile) { go_through<false, F::key_columns>(tile); },
        [&](const Tile& tile) { go_through<true, kColumns>(tile); });
    if (thread_ == 0) bulk_wait<0>();
  }

 private:
  __device__ __forceinline__ void release(int32_t n) const {
    if (thread_ < 2) mbarrier_arrive_remote(smem_address(&shared_.empty[n % kStages]), static_cast<uint32_t>(thread_));
  }

  template <bool values, int columns>
  __device__ __forceinline__ void go_through(const Tile& tile) {
    using Product = Wgmma<columns, __nv_bfloat16>;
    float d[columns / 2];
    for (int32_t step = 0; step < p_.steps; ++step, ++n_) {
      const int32_t slot = warp_uniform(n_ % kStages);
      mbarrier_wait(smem_address(&shared_.full[slot]), n_ / kStages % 2);
      const uint64_t a = operand_128b(smem_address(shared_.a[slot][group_ * 64])),
                     b = operand_128b(smem_address(shared_.b[slot]));
      wgmma_pin(d);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kInputs / 16; ++i)
        Product::ss(d, operand_advance(a, 32 * i), operand_advance(b, 32 * i), step + i > 0);
      wgmma_commit();
      if (step > 0) {
        wgmma_wait<1>();
        wgmma_pin(d);
        release(n_ - 1);
      }
    }
    wgmma_wait<0>();
    wgmma_pin(d);
    release(n_ - 1);
    encode<values, columns>(tile, d);
    store<values>(tile);
  }

  // The tile's sums as codes in shared memory.
  template <bool values, int columns>
  __device__ __forceinline__ void encode(const Tile& tile, float (&d)[columns / 2]) const {
    const auto scale = [&](int head) {
      const float* const scales = values ? p_.value_scales : p_.key_scales;
      const int64_t step = values ? p_.value_scale_head : p_.key_scale_head;
      return scales ? __ldg(scales + min(head, p_.heads - 1) * step) : 1.0f;
    };
    // Columns of keys may be two heads', rows of values a CTA's own.
    const int32_t own = tile.head + (values && F::value_heads == 2 ? rank_ : 0);
    const float scales[2] = {scale(own), scale(own + (!values && F::key_heads == 2))};
    Reciprocal by[2];
    if (Reciprocal::serves(scales[0]) && Reciprocal::serves(scales[1])) {
      by[0] = reciprocal_of(scales[0]), by[1] = reciprocal_of(scales[1]);
    } else {
      float x[columns / 2];
#pragma unroll
      for (int i = 0; i < columns / 2; ++i) x[i] = d[i];
      constexpr int first = kBox / 2;  // of the 128 columns with the first scale
      divide(x, first, scales[0]);
      divide(x + first, columns / 2 - first, scales[1]);
#pragma unroll
      for (int i = 0; i < columns / 2; ++i) d[i] = x[i];
    }
    // The copy engine has read the tile before.
    if (thread_ == 0) bulk_wait_read<0>();
    barrier_sync(static_cast<int>(Barrier::group_0) + group_, 128);
    // Two lanes exchange, so that each has four columns of one row: the even one of row lane / 4, the other 8 below.
    const int lane = thread_ % 32;
    const bool odd = lane % 2;
    const int row = 16 * (thread_ / 32) + lane / 4 + 8 * odd;
#pragma unroll
    for (int j = 0; j < columns / 8; j += 2) {
      uint32_t words[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* const x = d + 4 * (j + i);
        const uint32_t upper = codes_of(x[0], x[1], by[j / 16]), lower = codes_of(x[2], x[3], by[j / 16]);
        const uint32_t other = __shfl_xor_sync(~0u, odd ? upper : lower, 1);
        words[i] = odd ? other | lower << 16 : upper | other << 16;
      }
      // Columns 8 j and 8 j + 8 of a row are one chunk of 16 bytes; lanes of the rows below take them the other way
      // round, so that no two rows touch the same banks.
      uint8_t* const chunk = &shared_.codes[group_][j / 16][row][(j % 16 / 2 ^ row % 8) * 16];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int which = odd ? 1 - i : i;
        *reinterpret_cast<uint32_t*>(chunk + 8 * which + lane % 4 / 2 * 4) = odd ? words[1 - i] : words[i];
      }
    }
  }

  // To memory, by the copy engine; what lies past the rows, the heads or a head's outputs goes nowhere.
  template <bool values>
  __device__ __forceinline__ void store(const Tile& tile) const {
    fence_async_proxy();
    barrier_sync(static_cast<int>(Barrier::group_0) + group_, 128);
    if (thread_ != 0) return;
    const int32_t first = tile.block * kBlock, row = first + rank_ * kRows + group_ * 64;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t from = smem_address(shared_.codes[group_][half]);
      const int32_t rows = first + half * kBox;
      if constexpr (values && F::value_heads == 2) tma_store(p_.values, from, rows, group_ * 64, tile.head + rank_);
      else if constexpr (values) tma_store(p_.values, from, rows, rank_ * kRows + group_ * 64, tile.head);
      else if constexpr (F::key_heads == 2) tma_store(p_.keys, from, 0, tile.head + half, row);
      else tma_store(p_.keys, from, half * kBox, tile.head, row);
    }
    bulk_commit();
  }

  const Params& p_;
  Shared& shared_;
  const int rank_, group_, thread_;
  int32_t n_ = 0;  // steps so far
};

template <class F>
__global__ void __launch_bounds__(kThreads, 1) expand_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char storage[];
  Shared& shared = *reinterpret_cast<Shared*>(storage);
  const int rank = static_cast<int>(cluster_rank());
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(smem_address(&shared.full[i]), 1);
      mbarrier_init(smem_address(&shared.empty[i]), 4);  // two warpgroups of two CTAs
    }
    mbarrier_init_fence();
  }
  cluster_sync();
  const int group = warp_uniform(static_cast<int>(threadIdx.x) / 128);
  if (group == 2) {
    give_registers<kLoadRegisters>();
    if (threadIdx.x == 256) load<F>(p, shared, rank);
    __syncwarp();
  } else {
    take_registers<kMathRegisters>();
    Multiplier<F>(p, shared, rank, group).run();
    __syncwarp();
  }
  cluster_sync();  // the other CTA's copies and arrivals reach into this one
}

template <class F>
void run(cudaStream_t stream, const ExpandCodes& a, int multiprocessors) {
  const auto map = [&](const char* name, MapType type, const void* at, const auto& extents, const auto& strides,
                       const auto& box) {
    return tensor_map("expand", name, type, at, extents, strides, box, Swizzle::b128);
  };
  const auto u = [](int64_t n) { return static_cast<uint64_t>(n); };
  const int64_t rows = a.keys.extent<Key>(), heads = a.keys.extent<Head>(), latent = a.latent;
  const auto inputs = [&](const char* name, const void* at, int64_t high, int64_t stride, uint32_t box_rows) {
    const uint64_t extents[] = {u(latent), u(high)}, strides[] = {u(2 * stride)};
    const uint32_t box[] = {kInputs, box_rows};
    return map(name, MapType::bf16, at, extents, strides, box);
  };
  const auto codes = [&](const char* name, const void* at, const uint64_t(&extents)[3], int64_t next, int64_t last,
                         const uint32_t(&box)[3]) {
    const uint64_t strides[] = {u(next), u(last)};
    return map(name, MapType::u8, at, extents, strides, box);
  };
  // Of one row or head a stride may be anything.
  const auto stride = [](int64_t count, int64_t given) { return count > 1 ? given : 16; };
  const Params p{
      .x = inputs("x", a.x, rows, stride(rows, a.x_row), kRows),
      .key_weights = inputs("weights", a.weights, heads * F::width, latent, F::key_columns / 2),
      .value_weights = inputs("weights", a.weights, heads * F::width, latent, kRows),
      .keys = codes("keys", a.keys.data(), {F::nope, u(heads), u(rows)}, stride(heads, a.keys.stride<Head>()),
                    stride(rows, a.keys.stride<Key>()), {kBox, 1, 64}),
      .values = codes("values", a.values.data(), {u(rows), F::value, u(heads)}, a.values.stride<Value>(),
                      stride(heads, a.values.stride<Head>()), {kBox, 64, 1}),
      .key_scales = a.key_scales.data(),
      .value_scales = a.value_scales.data(),
      .key_scale_head = a.key_scales ? a.key_scales.stride<Head>() : 0,
      .value_scale_head = a.value_scales ? a.value_scales.stride<Head>() : 0,
      .blocks = static_cast<int32_t>((rows + kBlock - 1) / kBlock),
      .heads = static_cast<int32_t>(heads),
      .steps = static_cast<int32_t>(latent / kInputs),
  };
  const auto columns = [&](int each) { return (heads + each - 1) / each; };
  const int64_t tiles = p.blocks * (columns(F::key_heads) + columns(F::value_heads));
  launch(expand_kernel<F>,
         {.grid = dim3(static_cast<unsigned>(2 * std::min<int64_t>(tiles, multiprocessors / 2))),
          .block = dim3(kThreads),
          .shared_bytes = sizeof(Shared),
          .cluster = 2},
         stream, "expand", "expand", "rows " + std::to_string(rows) + ", heads " + std::to_string(heads), p);
}

}  // namespace

void expand(cudaStream_t stream, const ExpandCodes& a, int multiprocessors) {
  if (a.keys.extent<Nope>() == 128) run<Form<128, 128>>(stream, a, multiprocessors);
  else run<Form<192, 256>>(stream, a, multiprocessors);
}

}  // namespace mla::cuda::sm90
