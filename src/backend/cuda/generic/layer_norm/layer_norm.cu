#include "backend/cuda/backend.hpp"
#include "backend/cuda/core/norm_rows.cuh"
#include "backend/cuda/core/queue.hpp"

namespace mla::cuda {

void layer_norm(Stream& stream, const ops::LayerNormArgs& a) {
  NormRows<float> rows;
  rows.x = a.x.data();
  rows.y = a.y.data();
  rows.x_row = a.x.stride<Token>();
  rows.y_row = a.y.stride<Token>();
  rows.rows = a.x.extent<Token>();
  rows.width = static_cast<int32_t>(a.x.extent<In>());
  rows.weight = a.weight.data();
  rows.bias = a.bias.data();
  rows.eps = static_cast<float>(a.eps);
  norm_rows<true>(stream.queue(), rows, "layer_norm");
}

}  // namespace mla::cuda
