#include "ops/select_topk/op.hpp"

namespace mla::ops {
namespace {

Cost output(std::span<const IndexItem> items, int64_t topk, double bytes) {
  double rows = 0;
  for (const IndexItem& i : items) rows += i.q_count;
  return {.bytes = rows * static_cast<double>(topk) * bytes, .flops = 0};
}

}  // namespace

Cost cost(const SelectTopkArgs& a) {
  double pairs = 0;
  for (const IndexItem& item : a.items) {
    const IndexItem i = clipped(item, a.first, a.scores.extent<Key>());
    for (int64_t r = 0; r < i.q_count; ++r) pairs += i.columns(r);
  }
  Cost c{.bytes = pairs * (a.positions ? 8 : 4), .flops = 0};
  if (a.indices) c += output(a.items, a.state.topk, 4);
  return c;
}

Cost cost(const FinishTopkArgs& a) { return output(a.items, a.state.topk, a.scores ? 16 : 12); }

Cost cost(const FillTopkArgs& a) { return output(a.items, a.indices.extent<Topk>(), 4); }

}  // namespace mla::ops
