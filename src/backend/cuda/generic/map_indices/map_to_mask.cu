// A CTA makes one row: words in shared memory take the positions in any order, then leave side by side.
#include <algorithm>
#include <string>

#include "backend/cuda/backend.hpp"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/overlap.cuh"
#include "backend/cuda/core/queue.hpp"

namespace mla::cuda {
namespace {

constexpr int64_t kWords = 4096;  // of a CTA's part of a row

__global__ void __launch_bounds__(kBlockThreads)
    mask_kernel(View<const int32_t, Token, Topk> positions, const int32_t* rows, View<uint32_t, Token, Word> mask) {
  __shared__ uint32_t words[kWords];
  take_turn();
  const int32_t to = rows[blockIdx.x];
  if (to < 0) return;
  const int64_t first = blockIdx.y * kWords;
  const int count = static_cast<int>(min(mask.extent<Word>() - first, kWords));
  for (int i = threadIdx.x; i < count; i += kBlockThreads) words[i] = 0;
  __syncthreads();
  const int32_t* const from = positions.data() + blockIdx.x * positions.stride<Token>();
  for (int64_t k = threadIdx.x; k < positions.extent<Topk>(); k += kBlockThreads) {
    const int32_t t = from[k];
    const int64_t word = t / 32 - first;
    if (t >= 0 && word >= 0 && word < count) atomicOr(&words[word], 1u << t % 32);
  }
  __syncthreads();
  uint32_t* const out = mask.data() + to * mask.stride<Token>() + first;
  for (int i = threadIdx.x; i < count; i += kBlockThreads) out[i] = words[i];
}

}  // namespace

void map_to_mask(Stream& stream, const ops::MapToMaskArgs& a) {
  const Queue& queue = stream.queue();
  const int64_t parts = (a.mask.extent<Word>() + kWords - 1) / kWords;
  if (a.rows.empty() || parts == 0) return;
  const std::string what = "rows " + std::to_string(a.rows.size()) + ", topk " +
                           std::to_string(a.positions.extent<Topk>()) + ", words " +
                           std::to_string(a.mask.extent<Word>());
  if (parts > 65535) throw ShapeError("map_to_mask: too many words for one call (" + what + ")");
  launch(mask_kernel,
         {.grid = dim3(static_cast<unsigned>(a.rows.size()), static_cast<unsigned>(parts)),
          .block = dim3(kBlockThreads),
          .overlap = queue.hopper()},
         queue.stream(), "map_indices", "masks", what, a.positions, queue.reads(a.rows, "map_indices", "rows"), a.mask);
}

}  // namespace mla::cuda
