#include <algorithm>
#include <limits>
#include <vector>

#include "cache/format.hpp"
#include "ops/attend_latent/op.hpp"
#include "ops/attention_row.hpp"

namespace mla::ops {

void reference(const AttendLatentArgs& a, View<double, Token, Head, Value> out, View<double, Token, Head> lse) {
  const CacheSpec& spec = a.cache.spec;
  const int64_t entry = spec.entry(), width = a.out.extent<Value>();
  const double q_scale = a.q.dtype() == Dtype::fp8_e4m3 ? a.q_scale : 1.0;
  std::vector<float> rows;
  for (const LatentItem& item : a.items) {
    rows.resize(static_cast<size_t>((item.kv_end - item.kv_begin) * entry));
    for (int64_t j = item.kv_begin; j < item.kv_end; ++j)
      cache::format(spec.format)
          .decode(spec, a.cache.page(a.block_table(item.request, j / spec.page_size)), j % spec.page_size, 1,
                  rows.data() + (j - item.kv_begin) * entry, entry);
    for (int64_t i = 0; i < item.q_count; ++i)
      for (int64_t h = 0; h < a.q.extent<Head>(); ++h) {
        const int64_t row = item.q_begin + i;
        const int64_t count = std::clamp<int64_t>(static_cast<int64_t>(item.visible) + i + 1 - item.kv_begin, 0,
                                                  item.kv_end - item.kv_begin);
        bool usable = true;
        for (int64_t d = 0; d < entry; ++d) usable = usable && a.q(row, h, d) < std::numeric_limits<float>::infinity();
        const AttentionRow result(
            usable, count, width,
            [&](int64_t j) {
              double s = 0;
              for (int64_t d = 0; d < entry; ++d) s += static_cast<double>(a.q(row, h, d)) * rows[j * entry + d];
              return s * q_scale * a.scale;
            },
            [&](int64_t j, int64_t d) { return rows[j * entry + d]; });
        for (int64_t d = 0; d < width; ++d) out(row, h, d) = result.out[d];
        lse(row, h) = result.lse;
      }
  }
}

}  // namespace mla::ops
