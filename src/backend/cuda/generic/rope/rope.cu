// Memory-bound: a thread turns four pairs at a time, sixteen bytes of bf16. A row of the table serves all heads of a
// token and stays in L1. k is rotated as one more head.
#include <string>

#include "backend/cuda/backend.hpp"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/queue.hpp"
#include "backend/cuda/core/rotate.cuh"

namespace mla::cuda {
namespace generic {
namespace {

template <class T, bool wide>
__global__ void rope_kernel(HeadRows<T> q, HeadRows<T> k, Rotation rotation, const int32_t* positions, int chunks) {
  constexpr int m = wide ? 4 : 1;
  const int64_t token = blockIdx.x / static_cast<unsigned>(chunks);
  const int chunk = static_cast<int>(blockIdx.x % static_cast<unsigned>(chunks));
  const int32_t position = positions[token];
  const int head = chunk * static_cast<int>(blockDim.y) + static_cast<int>(threadIdx.y);
  if (head < q.heads) rotate_row<wide, m>(q.data + token * q.token + head * q.head, rotation, position);
  else if (head < q.heads + k.heads) rotate_row<wide, m>(k.data + token * k.token, rotation, position);
}

template <class T>
void run(const Queue& queue, const HeadRows<T>& q, const HeadRows<T>& k, const ops::RopeArgs& a) {
  const Rotation rotation(*a.table);
  const bool wide = rotation.pairs % 4 == 0 && rows_aligned<T>(q.data, q.token, q.head) &&
                    rows_aligned<T>(k.data, k.token) && rows_aligned<float>(rotation.table);
  const RotateShape shape(rotation.pairs, wide ? 4 : 1, q.heads + k.heads);
  const int64_t blocks = static_cast<int64_t>(a.positions.size()) * shape.chunks;
  if (blocks == 0) return;
  if (blocks > INT32_MAX)
    throw ShapeError("rope: tokens times heads is too large: " + std::to_string(a.positions.size()) + " tokens, " +
                     std::to_string(q.heads) + " heads");
  launch(wide ? rope_kernel<T, true> : rope_kernel<T, false>,
         {.grid = dim3(static_cast<unsigned>(blocks)), .block = shape.block}, queue.stream(), "rope", "rope_kernel",
         "tokens " + std::to_string(a.positions.size()) + ", heads " + std::to_string(q.heads), q, k, rotation,
         queue.staged(a.positions, "rope", "positions"), shape.chunks);
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
