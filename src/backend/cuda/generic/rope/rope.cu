// Memory-bound: a thread turns four pairs at a time, sixteen bytes of bf16, of up to four heads. A row of the table
// serves all heads of a token and stays in L1. k's rows have blocks of their own.
#include <algorithm>
#include <string>

#include "backend/cuda/backend.hpp"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/overlap.cuh"
#include "backend/cuda/core/queue.hpp"
#include "backend/cuda/core/rotate.cuh"

namespace mla::cuda {
namespace generic {
namespace {

// Blocks [0, q_blocks): the heads of q. The rest: k.
template <class T, bool wide>
__global__ void __launch_bounds__(256)
    rope_kernel(HeadRows<T> q, HeadRows<T> k, Rotation rotation, const int32_t* positions, int64_t tokens,
                unsigned q_blocks, int rows, int chunks) {
  take_turn();
  if (blockIdx.x < q_blocks) return rotate_heads<wide>(q, rotation, positions, tokens, blockIdx.x, rows, chunks);
  constexpr int m = wide ? 4 : 1;
  const int64_t token =
      (static_cast<int64_t>(blockIdx.x - q_blocks) * blockDim.z + threadIdx.z) * blockDim.y + threadIdx.y;
  if (token >= tokens) return;
  for (int unit = static_cast<int>(threadIdx.x); unit < rotation.pairs / m; unit += static_cast<int>(blockDim.x))
    rotate_pairs<wide, m, 1>(
        k.data + token * k.token, 0, k.data + token * k.token, 0, 1, rotation,
        [&] { return rotation.at(positions[token]); }, unit);
}

template <class T>
void run(const Queue& queue, const HeadRows<T>& q, const HeadRows<T>& k, const ops::RopeArgs& a) {
  const Rotation rotation(*a.table);
  const bool wide = rotation.pairs % 4 == 0 && rows_aligned<T>(q.data, q.token, q.head) &&
                    rows_aligned<T>(k.data, k.token) && rows_aligned<float>(rotation.table);
  const int64_t tokens = static_cast<int64_t>(a.positions.size());
  const RotateShape shape(rotation.pairs, wide ? 4 : 1, q.heads, tokens, wide ? kRotateRows<true> : kRotateRows<false>,
                          queue.multiprocessors());
  const int64_t q_blocks = shape.blocks(tokens), in_block = int64_t{shape.block.y} * shape.block.z,
                blocks = q_blocks + (k.heads > 0 ? (tokens + in_block - 1) / in_block : 0);
  if (blocks == 0) return;
  if (blocks > INT32_MAX)
    throw ShapeError("rope: tokens times heads is too large: " + std::to_string(tokens) + " tokens, " +
                     std::to_string(q.heads) + " heads");
  launch(wide ? rope_kernel<T, true> : rope_kernel<T, false>,
         {.grid = dim3(static_cast<unsigned>(blocks)), .block = shape.block, .overlap = queue.hopper()}, queue.stream(),
         "rope", "rope_kernel", "tokens " + std::to_string(tokens) + ", heads " + std::to_string(q.heads), q, k,
         rotation, queue.reads(a.positions, "rope", "positions"), tokens, static_cast<unsigned>(q_blocks), shape.rows,
         std::max(shape.chunks, 1));
}

}  // namespace
}  // namespace generic

void rope(Stream& stream, const ops::RopeArgs& a) {
  if (!a.table->rotates()) return;
  const Queue& queue = stream.queue();
  const auto call = [&](bool with_q, bool with_k) {
    for_activation(with_q ? a.q.dtype() : a.k.dtype(), [&](auto element) {
      using T = decltype(element);
      HeadRows<T> q, k;
      if (with_q)
        q = {static_cast<T*>(a.q.data()), a.q.stride<Token>(), a.q.stride<Head>(),
             static_cast<int32_t>(a.q.extent<Head>())};
      if (with_k) k = {static_cast<T*>(a.k.data()), a.k.stride<Token>(), 0, 1};
      generic::run<T>(queue, q, k, a);
    });
  };
  if (a.q && a.k && a.q.dtype() != a.k.dtype()) {
    call(true, false);
    call(false, true);
  } else if (a.q || a.k) {
    call(static_cast<bool>(a.q), static_cast<bool>(a.k));
  }
}

}  // namespace mla::cuda
