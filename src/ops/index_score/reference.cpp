#include <vector>

#include "cache/index/codec.hpp"
#include "ops/index_score/op.hpp"

namespace mla::ops {

void reference(const IndexScoreArgs& a, View<double, Token, Key> scores) {
  const IndexCacheSpec& spec = a.cache.spec;
  const int64_t heads = a.q.extent<IndexHead>();
  std::vector<float> key(static_cast<size_t>(spec.dim));
  std::vector<double> q;
  for (const IndexItem& whole : a.items) {
    const IndexItem item = clipped(whole, a.first, scores.extent<Key>());
    q.clear();
    for (int64_t i = 0; i < item.q_count; ++i)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t d = 0; d < spec.dim; ++d) q.push_back(static_cast<double>(a.q(item.q_begin + i, h, d)));
    for (int64_t j = item.kv_begin; j < item.kv_end; ++j) {
      bool decoded = false;  // a position that no row sees is not read
      for (int64_t i = 0; i < item.q_count; ++i) {
        if (j - item.kv_begin >= item.columns(i)) continue;
        if (!decoded)
          cache::index::decode(spec, a.cache.page(a.block_table(item.request, j / spec.page_size)), j % spec.page_size,
                               key.data());
        decoded = true;
        double sum = 0;
        for (int64_t h = 0; h < heads; ++h) {
          const double* row = q.data() + (i * heads + h) * spec.dim;
          double product = 0;
          for (int64_t d = 0; d < spec.dim; ++d) product += row[d] * static_cast<double>(key[d]);
          sum += static_cast<double>(a.weights(item.q_begin + i, h)) * (product < 0 ? 0.0 : product);
        }
        scores(item.row + i, j - item.kv_begin) = sum * a.scale;
      }
    }
  }
}

}  // namespace mla::ops
