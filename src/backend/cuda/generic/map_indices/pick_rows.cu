#include <algorithm>
#include <string>

#include "backend/cuda/backend.hpp"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/queue.hpp"

namespace mla::cuda {
namespace {

__global__ void pick_kernel(const int32_t* positions, int64_t positions_row, const int32_t* rows, int64_t topk,
                            int32_t* picked, int64_t picked_row) {
  const int64_t row = blockIdx.x;
  const int32_t* from = positions + rows[row] * positions_row;
  for (int64_t k = threadIdx.x; k < topk; k += kBlockThreads) picked[row * picked_row + k] = from[k];
}

}  // namespace

void pick_rows(Stream& stream, const ops::PickRowsArgs& a) {
  const Queue& queue = stream.queue();
  const int64_t topk = a.positions.extent<Topk>();
  if (a.rows.empty() || topk == 0) return;
  launch(pick_kernel, {.grid = dim3(static_cast<unsigned>(a.rows.size())), .block = dim3(kBlockThreads)},
         queue.stream(), "map_indices", "pick rows",
         "rows " + std::to_string(a.rows.size()) + ", topk " + std::to_string(topk), a.positions.data(),
         a.positions.stride<Token>(), queue.reads(a.rows, "map_indices", "rows"), topk, a.picked.data(),
         a.picked.stride<Token>());
}

}  // namespace mla::cuda
