// See expand.hpp and README.md. A cluster of two CTAs has 256 rows of D, 64 to each of four warpgroups, whose A stays
// in shared memory while B passes by, 128 columns at a time; each CTA loads half of B for both. A third warpgroup
// loads.
#include <cuda_bf16.h>

#include <algorithm>
#include <cfloat>
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

constexpr int kRows = 128, kBlock = 2 * kRows;  // of D: a CTA's, a cluster's
constexpr int kColumns = 128, kInputs = 64, kSteps = 8, kStages = 5;
constexpr int kLatent = kSteps * kInputs;
constexpr int kSection = 128;  // columns of values that all heads meet before the next: 16 MB of latent rows, in L2
constexpr int kPiece = 16;     // columns whose sums become codes beside one step's products
constexpr int kThreads = 384, kMathRegisters = 232, kLoadRegisters = 40;

enum class Barrier : int { group_0 = 1, group_1 = 2 };  // of a math warpgroup

struct alignas(1024) Shared {
  uint8_t a[kSteps][kRows][2 * kInputs];
  uint8_t b[kStages][kColumns][2 * kInputs];
  uint8_t codes[2][64][kColumns];  // a warpgroup's, swizzled
  uint64_t full_a[kSteps], empty_a[kSteps], full[kStages], empty[kStages];
};

struct Params {
  CUtensorMap key_rows, key_weights, value_weights, value_rows;  // A and B of keys, A and B of values
  CUtensorMap keys, values;                                      // [rows, heads, parts, outputs], [heads, value, rows]
  const float *key_scales, *value_scales;
  int64_t key_scale_head, value_scale_head;
  int32_t blocks, columns, heads;  // of kBlock and of kColumns latent rows
};

/// Outputs of a head: keys are columns of D, as many as there may be; values are rows, of two heads or of one.
template <int nope_, int value_>
struct Form {
  static constexpr int nope = nope_, value = value_, width = nope + value;
  static constexpr int parts = (nope + kColumns - 1) / kColumns, key_columns = nope / parts,
                       value_heads = kBlock / value;
  static_assert(key_columns * parts == nope && key_columns % kPiece == 0 && value_heads * value == kBlock);
};

/// A tile of D: A is the rows' (`outer`), B the columns' (`inner`).
struct Tile {
  int32_t outer, inner;
  bool first, last;  // of those that follow one another with the same A
};

/// A cluster's share of the tiles outers x [begin, begin + inners), those of one A behind one another.
class Share {
 public:
  __device__ Share(int32_t outers, int32_t begin, int32_t inners) : begin_(begin), inners_(inners) {
    const int64_t all = int64_t{outers} * inners, clusters = gridDim.x / 2, cluster = blockIdx.x / 2,
                  from = all * cluster / clusters;
    left_ = static_cast<int32_t>(all * (cluster + 1) / clusters - from);
    outer_ = static_cast<int32_t>(from / inners), inner_ = static_cast<int32_t>(from % inners);
  }
  __device__ bool more() const { return left_ > 0; }
  __device__ Tile next() {
    const bool last = --left_ == 0 || inner_ + 1 == inners_;
    const Tile t{outer_, begin_ + inner_, first_, last};
    first_ = last;
    if (++inner_ == inners_) ++outer_, inner_ = 0;
    return t;
  }

 private:
  int32_t begin_, inners_, outer_, inner_, left_;
  bool first_ = true;
};
/// Keys, then values section by section: `keys` and `values` make a share of each.
template <class F, class Keys, class Values>
__device__ __forceinline__ void for_shares(const Params& p, const Keys& keys, const Values& values) {
  keys(Share(p.blocks, 0, p.heads * F::parts));
  for (int32_t begin = 0; begin < p.columns; begin += kSection)
    values(Share((p.heads + F::value_heads - 1) / F::value_heads, begin, min(kSection, p.columns - begin)));
}

/// The outputs of a value's A that a CTA has.
template <class F>
__device__ __forceinline__ int32_t own_head(int32_t outer, int rank) {
  return F::value_heads == 2 ? 2 * outer + rank : outer;
}
template <class F>
__device__ __forceinline__ int32_t own_output(int rank) {
  return F::value_heads == 2 ? 0 : rank * kRows;
}

template <class F>
__device__ __forceinline__ void load(const Params& p, Shared& shared, int rank) {
  int32_t n = 0, runs = 0;
  const auto load_tiles = [&](int columns, const CUtensorMap& a, const CUtensorMap& b, const auto& a_row,
                              const auto& b_row) {
    return [&, columns, a_row, b_row](Share share) {
      while (share.more()) {
        const Tile t = share.next();
#pragma unroll
        for (int step = 0; step < kSteps; ++step, ++n) {
          const int32_t slot = n % kStages, input = step * kInputs;
          if (t.first) {
            const uint32_t full = smem_address(&shared.full_a[step]);
            mbarrier_wait(smem_address(&shared.empty_a[step]), runs % 2 ^ 1);
            mbarrier_arrive_expect(full, sizeof(shared.a[0]));
            tma_load(smem_address(shared.a[step]), a, full, input, a_row(t.outer));
          }
          const uint32_t full = smem_address(&shared.full[slot]);
          mbarrier_wait(smem_address(&shared.empty[slot]), n / kStages % 2 ^ 1);
          mbarrier_arrive_expect(full, static_cast<uint32_t>(columns * 2 * kInputs));
          // Each CTA loads half for both.
          const int half = columns / 2 * rank;
          tma_load_multicast(smem_address(shared.b[slot][half]), b, full, 3, input, b_row(t.inner) + half);
        }
        runs += t.last;
      }
    };
  };
  for_shares<F>(
      p,
      load_tiles(
          F::key_columns, p.key_rows, p.key_weights, [&](int32_t block) { return block * kBlock + rank * kRows; },
          [](int32_t at) { return at / F::parts * F::width + at % F::parts * F::key_columns; }),
      load_tiles(
          kColumns, p.value_weights, p.value_rows,
          [&](int32_t outer) { return own_head<F>(outer, rank) * F::width + F::nope + own_output<F>(rank); },
          [](int32_t at) { return at * kColumns; }));
}

/// Division by a scale as Reciprocal has it.
struct Inverse {
  float high = 1, low = FLT_MIN;
  Inverse() = default;
  __device__ explicit Inverse(float s) {
    const double exact = 1.0 / static_cast<double>(s);
    high = __double2float_rz(exact);
    low = fmaxf(__double2float_ru(exact - static_cast<double>(high)), FLT_MIN);
  }
  __device__ float times(float x) const { return fmaf(x, high, x * low); }
};

/// Two sums as bf16, over the scale, as codes; the first in the low byte.
__device__ __forceinline__ uint32_t codes_of(float x, float y, const Inverse& by) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
  return narrow_pair<fp8_e4m3>(by.times(__uint_as_float(both << 16)), by.times(__uint_as_float(both & 0xffff0000u)));
}

/// Sums as what their codes stand for: of scales that Reciprocal does not serve, as seldom as can be.
__device__ __noinline__ void divide(float* x, int count, float scale) {
  for (int i = 0; i < count; ++i) x[i] = widen(narrow<fp8_e4m3>(widen(narrow<bf16>(x[i])) / scale));
}

/// A warpgroup's products: while those of a tile's steps run, sums of the tile before become codes.
template <class F>
class Multiplier {
 public:
  __device__ Multiplier(const Params& p, Shared& shared, int rank, int group)
      : p_(p), shared_(shared), rank_(rank), group_(group), thread_(static_cast<int>(threadIdx.x) % 128) {}

  __device__ __forceinline__ void run() {
    for_shares<F>(
        p_, [&](Share share) { make<false, F::key_columns>(share); },
        [&](Share share) { make<true, kColumns>(share); });
    if (thread_ == 0) bulk_wait<0>();
  }

 private:
  template <int columns>
  struct Sums {
    float d[columns / 2];
    Tile tile;
    float scale;
  };

  template <bool values, int columns>
  __device__ __forceinline__ void make(Share& share) {
    if (!share.more()) return;
    Sums<columns> even, odd;
    begin<values>(share.next(), even);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      queue(even, step);
      if (step > 0) {
        wgmma_wait<1>();
        release(step - 1, even.tile.last);
      }
    }
    while (true) {
      if (!share.more()) return finish<values>(even);
      multiply<values>(share.next(), odd, even);
      if (!share.more()) return finish<values>(odd);
      multiply<values>(share.next(), even, odd);
    }
  }

  template <bool values, int columns>
  __device__ __forceinline__ void begin(const Tile& tile, Sums<columns>& now) {
    runs_ += tile.first;
    now.tile = tile;
    now.scale = scale_of<values>(tile);
  }
  template <int columns>
  __device__ __forceinline__ void queue(Sums<columns>& now, int step) {
    using Product = Wgmma<columns, __nv_bfloat16>;
    if (now.tile.first) mbarrier_wait(smem_address(&shared_.full_a[step]), runs_ % 2 ^ 1);
    const int32_t slot = warp_uniform(queued_ % kStages);
    mbarrier_wait(smem_address(&shared_.full[slot]), queued_ / kStages % 2);
    ++queued_;
    const uint64_t a = operand_128b(smem_address(shared_.a[step][group_ * 64])),
                   b = operand_128b(smem_address(shared_.b[slot]));
    wgmma_pin(now.d);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kInputs / 16; ++i)
      Product::ss(now.d, operand_advance(a, 32 * i), operand_advance(b, 32 * i), step + i > 0);
    wgmma_commit();
  }
  // What the oldest step's products have read.
  __device__ __forceinline__ void release(int step, bool of_a) {
    if (thread_ < 2)
      mbarrier_arrive_remote(smem_address(&shared_.empty[done_ % kStages]), static_cast<uint32_t>(thread_));
    ++done_;
    if (of_a && thread_ == 2) mbarrier_arrive(smem_address(&shared_.empty_a[step]));
  }

  template <bool values, int columns>
  __device__ __forceinline__ void multiply(const Tile& tile, Sums<columns>& now, Sums<columns>& before) {
    begin<values>(tile, now);
    queue(now, 0);
    wgmma_wait<1>();
    wgmma_pin(before.d);
    release(kSteps - 1, before.tile.last);
    const Inverse by = begin_codes(before);
    encode(before.d, 0, by);
#pragma unroll
    for (int step = 1; step < kSteps; ++step) {
      queue(now, step);
      wgmma_wait<1>();
      release(step - 1, tile.last);
      if (step < columns / kPiece) encode(before.d, step, by);
    }
    store<values>(before.tile);
  }
  template <bool values, int columns>
  __device__ __forceinline__ void finish(Sums<columns>& last) {
    wgmma_wait<0>();
    wgmma_pin(last.d);
    release(kSteps - 1, last.tile.last);
    const Inverse by = begin_codes(last);
#pragma unroll
    for (int piece = 0; piece < columns / kPiece; ++piece) encode(last.d, piece, by);
    store<values>(last.tile);
  }

  template <bool values>
  __device__ __forceinline__ float scale_of(const Tile& tile) const {
    const int32_t head = values ? own_head<F>(tile.outer, rank_) : tile.inner / F::parts;
    const float* const scales = values ? p_.value_scales : p_.key_scales;
    const int64_t step = values ? p_.value_scale_head : p_.key_scale_head;
    return scales ? __ldg(scales + min(head, p_.heads - 1) * step) : 1.0f;
  }

  template <int columns>
  __device__ __forceinline__ Inverse begin_codes(Sums<columns>& sums) const {
    Inverse by;
    if (Reciprocal::serves(sums.scale)) {
      by = Inverse(sums.scale);
    } else {
      float x[columns / 2];
#pragma unroll
      for (int i = 0; i < columns / 2; ++i) x[i] = sums.d[i];
      divide(x, columns / 2, sums.scale);
#pragma unroll
      for (int i = 0; i < columns / 2; ++i) sums.d[i] = x[i];
    }
    // The copy engine has read the tile before.
    if (thread_ == 0) bulk_wait_read<0>();
    barrier_sync(static_cast<int>(Barrier::group_0) + group_, 128);
    return by;
  }

  // 16 columns as codes in shared memory. Two lanes exchange, so that each has four columns of one row: the even one of
  // row lane / 4, the other 8 below.
  template <int n>
  __device__ __forceinline__ void encode(const float (&d)[n], int piece, const Inverse& by) const {
    const int lane = thread_ % 32;
    const bool odd = lane % 2;
    const int row = 16 * (thread_ / 32) + lane / 4 + 8 * odd;
    uint32_t words[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* const x = d + 8 * piece + 4 * i;
      const uint32_t upper = codes_of(x[0], x[1], by), lower = codes_of(x[2], x[3], by);
      const uint32_t other = __shfl_xor_sync(~0u, odd ? upper : lower, 1);
      words[i] = odd ? other | lower << 16 : upper | other << 16;
    }
    // The piece of a row is a chunk of 16 bytes, its two octets; lanes of the rows below take them the other way round,
    // so that no two rows touch the same banks.
    uint8_t* const chunk = &shared_.codes[group_][row][(piece ^ row % 8) * 16];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int which = odd ? 1 - i : i;
      *reinterpret_cast<uint32_t*>(chunk + 8 * which + lane % 4 / 2 * 4) = odd ? words[1 - i] : words[i];
    }
  }

  // To memory, by the copy engine; what lies past the rows, the heads or a part of a head goes nowhere.
  template <bool values>
  __device__ __forceinline__ void store(const Tile& tile) const {
    fence_async_proxy();
    barrier_sync(static_cast<int>(Barrier::group_0) + group_, 128);
    if (thread_ != 0) return;
    const uint32_t from = smem_address(shared_.codes[group_]);
    if constexpr (values)
      tma_store(p_.values, from, tile.inner * kColumns, own_output<F>(rank_) + group_ * 64,
                own_head<F>(tile.outer, rank_));
    else
      tma_store(p_.keys, from, 0, tile.inner % F::parts, tile.inner / F::parts,
                tile.outer * kBlock + rank_ * kRows + group_ * 64);
    bulk_commit();
  }

  const Params& p_;
  Shared& shared_;
  const int rank_, group_, thread_;
  int32_t queued_ = 0, done_ = 0, runs_ = 0;  // steps, and As so far
};

template <class F>
__global__ void __launch_bounds__(kThreads, 1) expand_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char storage[];
  Shared& shared = *reinterpret_cast<Shared*>(storage);
  const int rank = static_cast<int>(cluster_rank());
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSteps; ++i) {
      mbarrier_init(smem_address(&shared.full_a[i]), 1);
      mbarrier_init(smem_address(&shared.empty_a[i]), 2);  // two warpgroups
    }
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(smem_address(&shared.full[i]), 1);
      mbarrier_init(smem_address(&shared.empty[i]), 4);  // those of two CTAs
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
  const auto u = [](int64_t n) { return static_cast<uint64_t>(n); };
  const int64_t rows = a.keys.extent<Key>(), heads = a.keys.extent<Head>();
  // Of one row or head a stride may be anything.
  const auto stride = [](int64_t count, int64_t given) { return count > 1 ? given : 16; };
  const auto inputs = [&](const char* name, const void* at, int64_t high, int64_t step, uint32_t box_rows) {
    const uint64_t extents[] = {kLatent, u(high)}, strides[] = {u(2 * step)};
    const uint32_t box[] = {kInputs, box_rows};
    return tensor_map("expand", name, MapType::bf16, at, extents, strides, box, Swizzle::b128);
  };
  const auto latent_rows = [&](uint32_t box) { return inputs("x", a.x, rows, stride(rows, a.x_row), box); };
  const auto weights = [&](uint32_t box) { return inputs("weights", a.weights, heads * F::width, kLatent, box); };
  const uint64_t key_extents[] = {F::key_columns, F::parts, u(heads), u(rows)},
                 key_strides[] = {F::key_columns, u(stride(heads, a.keys.stride<Head>())),
                                  u(stride(rows, a.keys.stride<Key>()))},
                 value_extents[] = {u(rows), F::value, u(heads)},
                 value_strides[] = {u(a.values.stride<Value>()), u(stride(heads, a.values.stride<Head>()))};
  constexpr uint32_t key_box[] = {kColumns, 1, 1, 64}, value_box[] = {kColumns, 64, 1};
  const auto codes = [](const char* name, const void* at, const auto& extents, const auto& strides, const auto& box) {
    return tensor_map("expand", name, MapType::u8, at, extents, strides, box, Swizzle::b128);
  };
  const auto parts_of = [](int64_t n, int64_t of) { return static_cast<int32_t>((n + of - 1) / of); };
  const Params p{
      .key_rows = latent_rows(kRows),
      .key_weights = weights(F::key_columns / 2),
      .value_weights = weights(kRows),
      .value_rows = latent_rows(kColumns / 2),
      .keys = codes("keys", a.keys.data(), key_extents, key_strides, key_box),
      .values = codes("values", a.values.data(), value_extents, value_strides, value_box),
      .key_scales = a.key_scales.data(),
      .value_scales = a.value_scales.data(),
      .key_scale_head = a.key_scales ? a.key_scales.stride<Head>() : 0,
      .value_scale_head = a.value_scales ? a.value_scales.stride<Head>() : 0,
      .blocks = parts_of(rows, kBlock),
      .columns = parts_of(rows, kColumns),
      .heads = static_cast<int32_t>(heads),
  };
  const int64_t tiles = std::max<int64_t>(p.blocks * heads * F::parts, p.columns * parts_of(heads, F::value_heads));
  launch(expand_kernel<F>,
         {.grid = dim3(static_cast<unsigned>(2 * std::min<int64_t>(tiles, multiprocessors / 2))),
          .block = dim3(kThreads),
          .shared_bytes = sizeof(Shared),
          .cluster = 2},
         stream, "expand", "expand", "rows " + std::to_string(rows) + ", heads " + std::to_string(heads), p);
}

constexpr bool is_aligned(const void* data, int64_t a, int64_t b) {
  return ((reinterpret_cast<uintptr_t>(data) | static_cast<uint64_t>(a) | static_cast<uint64_t>(b)) & 15) == 0;
}

}  // namespace

bool serves(const backend::GpuModel& gpu, const ops::ExpandArgs& a) {
  const Linear& w = *a.weights;
  const int64_t nope = a.keys.extent<Nope>(), value = a.values.extent<Value>(), rows = ops::rows_of(a),
                heads = a.keys.extent<Head>();
  const bool dims = (nope == 128 && value == 128) || (nope == 192 && value == 256);
  const bool fits = rows < int64_t{1} << 30 && heads < int64_t{1} << 20;
  // Rows that have to be brought together go into the room for products, 16 at least.
  const bool room = a.products.extent<Token>() * w.out * static_cast<int64_t>(size_of(a.products.dtype())) >=
                    2 * w.in * std::min<int64_t>(rows, 16);
  return gpu.hopper && dims && fits && room && w.format == WeightFormat::plain && w.dtype == Dtype::bf16 &&
         a.products.dtype() == Dtype::bf16 && w.in == kLatent && is_aligned(a.products.data(), 0, 0) &&
         (a.values.stride<Key>() == 1 || rows == 1) &&
         is_aligned(a.keys.data(), rows > 1 ? a.keys.stride<Key>() : 0, heads > 1 ? a.keys.stride<Head>() : 0) &&
         is_aligned(a.values.data(), a.values.stride<Value>(), heads > 1 ? a.values.stride<Head>() : 0);
}

void expand(cudaStream_t stream, const ExpandCodes& a, int multiprocessors) {
  if (a.keys.extent<Nope>() == 128) run<Form<128, 128>>(stream, a, multiprocessors);
  else run<Form<192, 256>>(stream, a, multiprocessors);
}

}  // namespace mla::cuda::sm90
