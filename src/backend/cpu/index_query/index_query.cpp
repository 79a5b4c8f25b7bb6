#include <algorithm>
#include <vector>

#include "backend/cpu/backend.hpp"
#include "backend/cpu/core/convert.hpp"
#include "backend/cpu/core/rotate.hpp"
#include "cache/index/codec.hpp"

namespace mla::cpu {

void index_query(Stream& stream, const ops::IndexQueryArgs& a) {
  const int64_t heads = a.q.extent<IndexHead>(), dim = a.q.extent<IndexDim>();
  stream.pool().run(a.q.extent<Token>(), [&](int64_t t, int) {
    constexpr int64_t kUsual = 512;  // elements; every model's query fits
    float usual[kUsual];
    std::vector<float> longer(a.rotates() && dim > kUsual ? static_cast<size_t>(dim) : 0);
    float* const rotated = longer.empty() ? usual : longer.data();
    for (int64_t h = 0; h < heads; ++h) {
      const float* row = a.q.data() + a.q.offset(t, h, 0);
      if (a.rotates()) {
        std::copy_n(row, dim, rotated);
        const int64_t p = a.positions[static_cast<size_t>(t)];
        rotate_row(rotated, a.table->cos(p), a.table->sin(p), a.table->pairs(), a.table->interleaved());
        row = rotated;
      }
      const float scale = cache::index::writer_scale(largest_magnitude(row, dim), /*powers_of_two=*/true);
      convert(row, a.codes.data() + a.codes.offset(t, h, 0), dim, scale);
      a.scaled_weights(t, h) = a.weights(t, h) * scale;
    }
  });
}

}  // namespace mla::cpu
