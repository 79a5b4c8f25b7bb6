#include "backend/cuda/backend.hpp"
#include "backend/cuda/core/norm_rows.cuh"
#include "backend/cuda/core/queue.hpp"

namespace mla::cuda {

void norm(Stream& stream, const ops::NormArgs& a) {
  for_activation(a.x.dtype(), [&](auto element) {
    using T = decltype(element);
    NormRows<T> rows;
    rows.x = static_cast<const T*>(a.x.data());
    rows.y = static_cast<T*>(a.y.data());
    rows.x_row = a.x.stride<Token>();
    rows.y_row = a.y.stride<Token>();
    rows.rows = a.x.extent<Token>();
    rows.width = static_cast<int32_t>(a.x.extent<In>());
    rows.weight = a.weight.data();
    rows.eps = static_cast<float>(a.eps);
    if (!a.growth.positions.empty()) {
      rows.positions = stream.queue().reads(a.growth.positions, "norm", "positions");
      rows.beta = static_cast<float>(a.growth.beta);
      rows.length = a.growth.length;
    }
    norm_rows<false>(stream.queue(), rows, "norm");
  });
}

}  // namespace mla::cuda
