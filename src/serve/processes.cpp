#include "serve/processes.hpp"

#include <algorithm>
#include <bit>
#include <limits>

namespace mla::serve {
namespace {

class Hash {
 public:
  void add(uint64_t x) {
    hash_ = (hash_ ^ x) * 0x9e3779b97f4a7c15u;
    hash_ ^= hash_ >> 29;
  }
  void add(int64_t x) { add(static_cast<uint64_t>(x)); }
  void add(double x) { add(std::bit_cast<uint64_t>(x)); }
  template <class Enum>
  requires std::is_enum_v<Enum>
  void add(Enum x) { add(static_cast<uint64_t>(x)); }
  void add(std::string_view text) {
    add(uint64_t{text.size()});
    for (const char c : text) add(static_cast<uint64_t>(static_cast<unsigned char>(c)));
  }
  uint64_t value() const { return hash_ | 1; }

 private:
  uint64_t hash_ = 1;
};

// What every rank's schedule, weights and messages follow from.
PlanDigest digest_of(const Trace& t, const Options& o) {
  Hash h;
  int64_t tokens = 0;
  h.add(t.block_tokens);
  for (const TraceRequest& q : t.requests) {
    h.add(q.arrival), h.add(q.input), h.add(q.output), h.add(q.own);
    for (const uint64_t block : q.blocks) h.add(block);
    tokens += q.input + q.output;
  }
  const ModelConfig& m = o.model;
  h.add(std::string_view(m.name));
  for (const int64_t x : {m.hidden, m.heads, m.query_latent, m.latent, m.nope, m.rope, m.value, o.layers, o.interleave,
                          int64_t{o.context_parallel}, o.limits.pages, o.limits.page_size, o.limits.token_budget,
                          o.plan.context_rows, o.plan.reorder_batch_threshold, int64_t{o.plan.tensor_parallel}})
    h.add(x);
  h.add(m.rotary.theta);
  h.add(uint64_t{m.indexer ? static_cast<uint64_t>(m.indexer->topk) : 0});
  h.add(uint64_t{o.limits.prefix_reuse}), h.add(o.seed), h.add(uint64_t{o.plan.index_hadamard});
  h.add(o.weights), h.add(o.absorption), h.add(o.exchange), h.add(o.up), h.add(o.products), h.add(o.format);
  h.add(o.plan.path), h.add(o.plan.split), h.add(o.plan.compute), h.add(o.plan.activations), h.add(o.plan.sparse);
  h.add(o.plan.activation_dtype);
  h.add(o.plan.index_format), h.add(o.plan.index_arithmetic);
  h.add(uint64_t{o.checkpoint.has_value()});
  for (const float scale : o.k_scales) h.add(double{scale});
  const auto shown = [](int64_t n) {
    return static_cast<int32_t>(std::min<int64_t>(n, std::numeric_limits<int32_t>::max()));
  };
  return {h.value(), shown(tokens), shown(std::ssize(t.requests))};
}

}  // namespace

void Processes::agree_on(const Trace& trace, const Options& options) {
  if (group_) group_->barrier({.step = "trace and options", .deadline = patience_, .plan = digest_of(trace, options)});
}

Processes::Decision Processes::decide(Decision own) {
  if (!group_) return own;
  const double mine[] = {own.seconds, own.stop ? 1.0 : 0.0};
  std::vector<double> all(static_cast<size_t>(group_->ranks()) * 2);
  const std::vector<int64_t> bytes(static_cast<size_t>(group_->ranks()), int64_t{sizeof mine});
  group_->all_gather({"time of the step", patience_}, mine, all.data(), bytes);
  Decision d{.seconds = all[0], .stop = false};
  for (size_t r = 0; r < bytes.size(); ++r) d.stop = d.stop || all[2 * r + 1] != 0;
  return d;
}

std::vector<float> Processes::first(std::vector<float> values) {
  if (group_)
    group_->broadcast({"values of rank 0", patience_}, 0, values.data(), std::ssize(values) * int64_t{sizeof(float)});
  return values;
}

void Processes::add_up(std::vector<size_t*> amounts) {
  if (!group_) return;
  const size_t n = amounts.size();
  std::vector<uint64_t> mine, all(static_cast<size_t>(group_->ranks()) * n);
  for (const size_t* amount : amounts) mine.push_back(*amount);
  const std::vector<int64_t> bytes(static_cast<size_t>(group_->ranks()), static_cast<int64_t>(n * sizeof mine[0]));
  group_->all_gather({"memory", patience_}, mine.data(), all.data(), bytes);
  for (size_t i = 0; i < n; ++i) {
    *amounts[i] = 0;
    for (size_t r = 0; r < bytes.size(); ++r) *amounts[i] += static_cast<size_t>(all[r * n + i]);
  }
}

}  // namespace mla::serve
