#include <algorithm>
#include <limits>

#include "ops/attend_latent/op.hpp"
#include "ops/attention_items.hpp"
#include "ops/require.hpp"

namespace mla::ops {

void check(const AttendLatentArgs& a) {
  constexpr std::string_view op = "attend_latent";
  const CacheSpec& spec = a.cache.spec;
  require_pages(op, "cache", a.cache);
  require_view(op, "block_table", a.block_table);
  require_view(op, "q", a.q);
  require_view(op, "out", a.out);
  require_view(op, "lse", a.lse);
  require_view(op, "partial_out", a.partial_out);
  require_view(op, "partial_lse", a.partial_lse);
  require_equal(op, "q Entry", a.q.extent<Entry>(), "cache latent + rope", spec.entry());
  require_equal(op, "out Value", a.out.extent<Value>(), "cache value width", spec.value_width());
  require_same<Head>(op, "out", a.out, "q", a.q);
  require_same<Head>(op, "lse", a.lse, "q", a.q);
  require_dense<Entry>(op, "q", a.q);
  require_dense<Value>(op, "out", a.out);
  require_dtype(op, "out", a.out.dtype(), {Dtype::f32, Dtype::bf16});
  require_dtype(op, "q", a.q.dtype(), {Dtype::f32, Dtype::bf16, Dtype::fp8_e4m3});
  const int64_t rows = std::min({a.q.extent<Token>(), a.out.extent<Token>(), a.lse.extent<Token>()});
  for (const LatentItem& i : a.items) {
    require_query_rows(op, i, a.q.extent<Token>());
    if (i.q_count == 0) continue;  // nothing of it is looked at
    require_range(op, "item request", i.request, 0, a.block_table.extent<Request>());
    require_range(op, "item kv_begin", i.kv_begin, 0, int64_t{1} << 31);
    require_range(op, "item kv_end", i.kv_end, i.kv_begin, a.block_table.extent<Page>() * spec.page_size + 1);
    if (i.kv_end > i.kv_begin)
      for (int64_t page = i.kv_begin / spec.page_size; page <= (i.kv_end - 1) / spec.page_size; ++page)
        require_range(op, "page id", a.block_table(i.request, page), 0, a.cache.pages);
    require_place(op, a, i, rows);
  }
  if (!a.scratch.data && !a.items.empty()) throw ShapeError("attend_latent: no scratch");
  if (!a.schedule.empty())
    require_equal(op, "schedule bytes", std::ssize(a.schedule), "a schedule's", int64_t{kLatentScheduleBytes});
}

void check(const ScheduleLatentArgs& a) {
  constexpr std::string_view op = "schedule_latent";
  require_view(op, "block_table", a.block_table);
  require_range(op, "heads", a.heads, 1, std::numeric_limits<int32_t>::max());
  for (const LatentItem& i : a.items) {
    require_query_rows(op, i, a.tokens);
    if (i.q_count > 0) require_range(op, "item request", i.request, 0, a.block_table.extent<Request>());
  }
  require_equal(op, "schedule bytes", std::ssize(a.schedule), "a schedule's", int64_t{kLatentScheduleBytes});
}

}  // namespace mla::ops
