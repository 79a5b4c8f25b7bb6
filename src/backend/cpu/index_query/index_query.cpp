#include "backend/cpu/backend.hpp"
#include "backend/cpu/core/convert.hpp"
#include "cache/index/codec.hpp"

namespace mla::cpu {

void index_query(Stream& stream, const ops::IndexQueryArgs& a) {
  const int64_t heads = a.q.extent<IndexHead>(), dim = a.q.extent<IndexDim>();
  stream.pool().run(a.q.extent<Token>(), [&](int64_t t, int) {
    for (int64_t h = 0; h < heads; ++h) {
      const float* row = a.q.data() + a.q.offset(t, h, 0);
      const float scale = cache::index::writer_scale(largest_magnitude(row, dim), /*powers_of_two=*/true);
      convert(row, a.codes.data() + a.codes.offset(t, h, 0), dim, scale);
      a.scaled_weights(t, h) = a.weights(t, h) * scale;
    }
  });
}

}  // namespace mla::cpu
