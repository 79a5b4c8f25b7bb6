// The schedule of a call, made ahead of it: what each worker begins with.
#include <cstring>
#include <type_traits>

#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/sm90/attention/convert.cuh"
#include "backend/cuda/sm90/attention/kernels.hpp"
#include "backend/cuda/sm90/attention/load.cuh"

namespace mla::cuda::latent {
namespace {

constexpr int warps = 4;  // of a CTA, a worker each

/// All of `to`, which may be longer than `from`: a Begin reads whole units of 16 bytes.
template <class T>
__device__ void put(T& to, const T& from) {
  uint4 v[(sizeof(T) + 15) / 16] = {};
  memcpy(v, &from, sizeof(T));
#pragma unroll
  for (size_t i = 0; i < sizeof v / 16; ++i) reinterpret_cast<uint4*>(&to)[i] = v[i];
}

template <int tile_rows, bool invariant, class Rows>
__global__ void __launch_bounds__(warps * 32) starts_kernel(Params p, Start* starts, bool overlap) {
  constexpr int look_ups = Rows::parts * Rows::look_ups;
  static_assert(look_ups <= Start::most_look_ups);
  if (overlap) allow_next_grid();  // it finds its own, or waits for this one
  const int worker = blockIdx.x * warps + warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  if (worker >= p.workers) return;
  p.box_shift = max(p.box_shift, 0);  // where rows are copied one by one, what boxes would be is not used
  Split split;
  Walk<tile_rows, invariant> walk(p, worker, split);
  Item it{};
  if (!walk.next(p, split, it)) it.blocks = -1;
  const int positions = it.blocks > 0 ? it.positions : 0;
  int pages[look_ups];
#pragma unroll
  for (int i = 0; i < look_ups; ++i) {
    const int first = it.block * block_tokens + i / Rows::look_ups * Rows::part_rows;
    pages[i] = page_of(p, table_of(p, it), positions, Rows::position(p, first, i % Rows::look_ups));
  }
  wait_for_previous_grids();  // they may read what is there
  Start& start = starts[worker];
  if (lane == 0) put(start.item, it), put(start.split, split);
#pragma unroll
  for (int i = 0; i < look_ups; ++i) start.pages[i][lane] = pages[i];
}

}  // namespace

void launch_starts(bool fp8, const AttendLatentChoice& choice, const Params& p, Start* starts, std::string_view shape,
                   cudaStream_t stream) {
  const LaunchConfig config{
      .grid = dim3((choice.workers + warps - 1) / warps), .block = dim3(warps * 32), .overlap = choice.overlap};
  const auto go = [&](auto kernel) {
    launch(kernel, config, stream, "attend_latent", "starts kernel", shape, p, starts, choice.overlap);
  };
  const auto of_split = [&]<bool invariant>(std::bool_constant<invariant>) {
    // fp8_ds_mla's are looked up alike
    using Units = UnitRows<Fp8Rows>;
    if (choice.converts)
      return choice.ctas() == 1 ? go(starts_kernel<64, invariant, PartRows<Fp8Rows, 2>>)
                                : go(starts_kernel<128, invariant, PartRows<Fp8Rows, 1>>);
    switch (choice.tile_rows) {
      case 16: return fp8 ? go(starts_kernel<16, invariant, Units>) : go(starts_kernel<16, invariant, RowCopies<4>>);
      case 32: return fp8 ? go(starts_kernel<32, invariant, Units>) : go(starts_kernel<32, invariant, RowCopies<4>>);
      case 64: return fp8 ? go(starts_kernel<64, invariant, Units>) : go(starts_kernel<64, invariant, BoxRows>);
      default: return go(starts_kernel<128, invariant, BoxRows>);
    }
  };
  choice.split_blocks ? of_split(std::true_type()) : of_split(std::false_type());
}

}  // namespace mla::cuda::latent
