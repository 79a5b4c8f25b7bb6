#include <algorithm>
#include <vector>

#include "ops/attend_sparse/op.hpp"
#include "ops/attend_sparse/selected.hpp"

namespace mla::ops {

namespace {

// Queries, outputs and slots of an item, and the products with `keys` rows, those of all its query rows together.
Cost rows_and_products(const AttendSparseArgs& a, const SparseItem& item, double keys) {
  const double heads = static_cast<double>(a.q.extent<Head>()), entry = static_cast<double>(a.q.extent<Entry>()),
               width = static_cast<double>(a.out.extent<Value>()), size = static_cast<double>(size_of(a.q.dtype()));
  return {.bytes = item.q_count * (heads * (entry * size + width * static_cast<double>(size_of(a.out.dtype()))) +
                                   4.0 * (item.k_end - item.k_begin)),
          .flops = 2 * keys * heads * (entry + width)};
}

}  // namespace

Cost cost(const AttendSparseArgs& a) {
  // A cached row that several query rows select has to move once.
  std::vector<std::vector<bool>> moved;
  for (const SparseSource& s : a.sources)
    moved.emplace_back(static_cast<size_t>(s.cache.pages * s.cache.spec.page_size));
  Cost c;
  for (const SparseItem& item : a.items) {
    double keys = 0;
    for (int64_t row = item.q_begin; row < item.q_begin + item.q_count; ++row)
      for_selected(a.sources, row, item.k_begin, item.k_end, [&](size_t source, int32_t slot) {
        ++keys;
        if (moved[source][slot]) return;
        moved[source][slot] = true;
        c.bytes += a.sources[source].cache.spec.token_bytes();
      });
    c += rows_and_products(a, item, keys);
  }
  return c;
}

Cost cost_of_full_lists(const AttendSparseArgs& a, double part) {
  Cost c;
  for (const SparseItem& item : a.items) {
    int64_t first = 0;  // of the source's in the rows' lists
    for (const SparseSource& s : a.sources) {
      const int64_t end = first + s.slots.extent<Topk>();
      const int64_t keys =
          std::max<int64_t>(0, std::min<int64_t>(item.k_end, end) - std::max<int64_t>(item.k_begin, first));
      c.bytes += part * static_cast<double>(item.q_count * keys) * s.cache.spec.token_bytes();
      first = end;
    }
    c += rows_and_products(a, item, part * static_cast<double>(item.q_count) * (item.k_end - item.k_begin));
  }
  return c;
}

Cost cost(const MergeSparseArgs& a) {
  const double row = static_cast<double>(a.out.extent<Head>() * a.out.extent<Value>());
  Cost c;
  for (const SplitRows& s : a.items)
    c += {.bytes = 4 * row * s.rows * (s.splits + 1.0), .flops = 3 * row * s.rows * s.splits};
  return c;
}

}  // namespace mla::ops
