#include "ops/append/op.hpp"

namespace mla::ops {
namespace {

Cost rows(double tokens, Dtype dtype, const CacheSpec& spec) {
  return {
      .bytes = tokens * (static_cast<double>(size_of(dtype)) * static_cast<double>(spec.entry()) + spec.token_bytes()),
      .flops = 0};
}

}  // namespace

Cost cost(const AppendArgs& a) { return rows(static_cast<double>(a.slots.size()), a.kv_c.dtype(), a.cache.spec); }

Cost cost(const RopeAppendArgs& a) {
  const double tokens = static_cast<double>(a.slots.size());
  Cost c = rows(tokens, a.kv_c.dtype(), a.cache.spec);
  const double queries = static_cast<double>(a.query_rows() * a.q_pe.extent<Head>() * a.q_pe.extent<Rope>()),
               keys = tokens * static_cast<double>(a.q_pe.extent<Rope>()),
               size = 2.0 * static_cast<double>(size_of(a.q_pe.dtype()));
  if (a.table->rotates()) c += {.bytes = size * (queries + keys), .flops = 3 * (queries + keys)};
  else if (a.placed.q) c += {.bytes = size * queries, .flops = 0};
  return c;
}

Cost cost(const NormRopeAppendArgs& a) {
  // kv_c is read once.
  const double elements = static_cast<double>(a.slots.size()) * static_cast<double>(a.kv_c.extent<Latent>());
  Cost c = cost(a.norm());
  c += cost(a.rope_append());
  c.bytes -= elements * static_cast<double>(size_of(a.kv_c.dtype()));
  return c;
}

Cost cost(const CopyPagesArgs& a) {
  return {.bytes = 2 * static_cast<double>(a.copies.size()) * static_cast<double>(a.cache.page_bytes), .flops = 0};
}

}  // namespace mla::ops
