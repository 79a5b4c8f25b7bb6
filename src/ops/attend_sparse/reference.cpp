#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cache/format.hpp"
#include "ops/attend_sparse/op.hpp"
#include "ops/attend_sparse/selected.hpp"
#include "ops/attention_row.hpp"

namespace mla::ops {
namespace {

constexpr double kNone = -std::numeric_limits<double>::infinity();

/// What a row of softmax sum e^lse keeps beside its sink.
double kept(std::span<const float> sinks, int64_t head, double lse) {
  return sinks.empty() || lse == kNone ? 1.0 : 1.0 / (1.0 + std::exp(sinks[head] - lse));
}

}  // namespace

void reference(const AttendSparseArgs& a, View<double, Token, Head, Value> out, View<double, Token, Head> lse,
               View<double, Token, Head> max_logits) {
  const int64_t entry = a.q.extent<Entry>(), width = a.out.extent<Value>();
  const double q_scale = a.q.dtype() == Dtype::fp8_e4m3 ? a.q_scale : 1.0;
  std::vector<float> keys;
  for (const SparseItem& item : a.items)
    for (int64_t row = item.q_begin; row < item.q_begin + item.q_count; ++row) {
      int64_t count = 0;
      for_selected(a.sources, row, item.k_begin, item.k_end, [&](size_t source, int32_t slot) {
        const CacheView& cache = a.sources[source].cache;
        keys.resize(static_cast<size_t>((count + 1) * entry));
        cache::format(cache.spec.format)
            .decode(cache.spec, cache.page(slot / cache.spec.page_size), slot % cache.spec.page_size, 1,
                    keys.data() + count++ * entry, entry);
      });
      for (int64_t h = 0; h < a.q.extent<Head>(); ++h) {
        bool usable = true;
        std::vector<double> q;
        for (int64_t d = 0; d < entry; ++d) {
          usable = usable && a.q(row, h, d) < std::numeric_limits<float>::infinity();
          q.push_back(a.q(row, h, d) * q_scale);
        }
        const AttentionRow result(
            usable, count, width,
            [&](int64_t j) {
              double s = 0;
              for (int64_t d = 0; d < entry; ++d) s += q[d] * keys[j * entry + d];
              return s * a.scale;
            },
            [&](int64_t j, int64_t d) { return keys[j * entry + d]; });
        max_logits(row, h) = result.max;
        lse(row, h) = result.lse;
        for (int64_t d = 0; d < width; ++d) out(row, h, d) = kept(a.sinks, h, result.lse) * result.out[d];
      }
    }
}

void reference(const MergeSparseArgs& a, View<double, Token, Head, Value> out, View<double, Token, Head> lse,
               View<double, Token, Head> max_logits) {
  auto usable = [](float x) {
    return std::isnan(x) || x == std::numeric_limits<float>::infinity() ? kNone : static_cast<double>(x);
  };
  for (const SplitRows& s : a.items)
    for (int64_t r = 0; r < s.rows; ++r)
      for (int64_t h = 0; h < a.out.extent<Head>(); ++h) {
        double m = kNone, sum = 0, largest = kNone;
        bool nan = false;
        auto part = [&](int64_t i) { return s.partial + i * s.rows + r; };
        for (int64_t i = 0; i < s.splits; ++i) {
          nan = nan || nan_part(
                           a.partial_lse(part(i), h), [&](int64_t d) { return a.partial_out(part(i), h, d); },
                           a.out.extent<Value>());
          m = std::max(m, usable(a.partial_lse(part(i), h)));
          if (a.max_logits && !std::isnan(largest))
            largest = std::isnan(a.partial_max(part(i), h)) ? AttentionRow::kNaN
                                                            : std::max<double>(largest, a.partial_max(part(i), h));
        }
        std::vector<double> x(static_cast<size_t>(a.out.extent<Value>()));
        for (int64_t i = 0; i < s.splits; ++i) {
          const double l = usable(a.partial_lse(part(i), h));
          if (l == kNone) continue;
          sum += std::exp(l - m);
          for (size_t d = 0; d < x.size(); ++d) x[d] += std::exp(l - m) * a.partial_out(part(i), h, d);
        }
        max_logits(s.row + r, h) = largest;
        if (nan) {
          lse(s.row + r, h) = AttentionRow::kNaN;
          for (size_t d = 0; d < x.size(); ++d) out(s.row + r, h, d) = AttentionRow::kNaN;
          continue;
        }
        const double l = lse(s.row + r, h) = m == kNone ? m : m + std::log(sum);
        for (size_t d = 0; d < x.size(); ++d)
          out(s.row + r, h, d) = m == kNone ? 0.0 : kept(a.sinks, h, l) * x[d] / sum;
      }
}

}  // namespace mla::ops
