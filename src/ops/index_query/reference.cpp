#include <vector>

#include "cache/index/codec.hpp"
#include "ops/index_query/op.hpp"

namespace mla::ops {

void reference(const IndexQueryArgs& a) {
  std::vector<float> row(static_cast<size_t>(a.q.extent<IndexDim>()));
  for (int64_t t = 0; t < a.q.extent<Token>(); ++t)
    for (int64_t h = 0; h < a.q.extent<IndexHead>(); ++h) {
      for (size_t d = 0; d < row.size(); ++d) row[d] = a.q(t, h, d);
      if (a.rotates()) {  // in float64, then rounded: codes may be next to a backend's
        const int64_t pairs = a.table->pairs(), p = a.positions[static_cast<size_t>(t)];
        for (int64_t i = 0; i < pairs; ++i) {
          float& x = row[static_cast<size_t>(a.table->interleaved() ? 2 * i : i)];
          float& y = row[static_cast<size_t>(a.table->interleaved() ? 2 * i + 1 : i + pairs)];
          const double c = a.table->cos(p)[i], s = a.table->sin(p)[i], u = x, v = y;
          x = static_cast<float>(u * c - v * s), y = static_cast<float>(v * c + u * s);
        }
      }
      const float scale = cache::index::writer_scale(
          cache::largest_magnitude(row.data(), static_cast<int64_t>(row.size())), /*powers_of_two=*/true);
      for (size_t d = 0; d < row.size(); ++d) a.codes(t, h, d) = to_fp8_e4m3(row[d] / scale);
      a.scaled_weights(t, h) = a.weights(t, h) * scale;
    }
}

}  // namespace mla::ops
