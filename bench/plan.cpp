#include "bench/plan.hpp"

#include <algorithm>

#include "backend/backend.hpp"
#include "bench/batch.hpp"
#include "cases/compare.hpp"

namespace mla::bench {
namespace {

std::vector<Lengths> mixed_requests() {
  cases::Random random(1);
  std::vector<Lengths> requests;
  for (int i = 0; i < 256; ++i) {
    const bool prefill = i % 8 == 0;
    requests.push_back({prefill ? random.integer(16, 512) : 1, random.integer(0, prefill ? 4096 : 16384)});
  }
  return requests;
}

class PlanCase final : public cases::Case {
 public:
  PlanCase(const DeviceInfo& device, SplitPolicy split)
      : model_(preset("deepseek-v2-lite")),
        spec_(cache_spec(model_, CacheFormat::bf16)),
        requests_(mixed_requests()),
        batch_(requests_, spec_.page_size),
        device_(device) {
    options_.split = split;
  }

  void run(Stream&) override { plan_ = mla::plan(model_, spec_, batch_.pages(), batch_.view(), device_, options_); }

  // Every token on exactly one path, and every visible (token, position) pair attended to exactly once.
  cases::Verdict verify() override {
    cases::Verdict v{.error = 0, .bound = 0, .ok = true, .detail = {}};
    auto expect = [&](const char* what, int64_t got, int64_t expected) {
      if (got == expected) return;
      v.ok = false;
      v.error = 1;
      v.detail = std::string(what) + " is " + std::to_string(got) + ", expected " + std::to_string(expected);
    };
    const int64_t tokens = batch_.view().tokens();
    expect("tokens", plan_.tokens, tokens);
    std::vector<int32_t> both = plan_.latent_tokens;
    both.insert(both.end(), plan_.expanded_tokens.begin(), plan_.expanded_tokens.end());
    std::sort(both.begin(), both.end());
    expect("tokens on a path", static_cast<int64_t>(both.size()), tokens);
    for (size_t i = 0; i < both.size(); ++i) expect("token", both[i], static_cast<int64_t>(i));

    int64_t pairs = 0, planned = 0;
    for (const Lengths& r : requests_) pairs += r.query * r.context + r.query * (r.query + 1) / 2;
    for (const LatentItem& i : plan_.latent_items)
      for (int64_t q = 0; q < i.q_count; ++q)
        planned += std::clamp<int64_t>(i.visible + q + 1 - i.kv_begin, 0, i.kv_end - i.kv_begin);
    auto expanded = [&](std::span<const ExpandedItem> items) {
      for (const ExpandedItem& i : items)
        for (int64_t q = 0; q < i.q_count; ++q) planned += std::clamp<int64_t>(i.visible + q + 1, 0, i.k_count);
    };
    expanded(plan_.suffix_items);
    for (const ContextChunk& chunk : plan_.chunks) expanded(chunk.items);
    expect("planned (token, position) pairs", planned, pairs);
    return v;
  }
  ops::Cost cost() const override { return {}; }

 private:
  ModelConfig model_;
  CacheSpec spec_;
  std::vector<Lengths> requests_;
  OwnedBatch batch_;
  DeviceInfo device_;
  PlanOptions options_;
  Plan plan_;
};

}  // namespace

std::unique_ptr<cases::Case> make_plan_case(const DeviceInfo& device, SplitPolicy split) {
  return std::make_unique<PlanCase>(device, split);
}

int64_t planned_splits(const cases::Params& p) {
  ModelConfig model = preset("deepseek-v2-lite");
  model.heads = p.heads;
  model.latent = p.latent;
  model.nope = p.nope;
  model.rope = p.rope;
  model.value = p.value;
  const CacheSpec spec = cache_spec(model, p.format, p.page_size);
  const OwnedBatch batch(std::vector<Lengths>(static_cast<size_t>(p.requests), {p.query_len, p.context}), p.page_size);
  PlanOptions options;
  options.path = PathPolicy::latent;
  options.split = p.batch_invariant ? SplitPolicy::batch_invariant : SplitPolicy::fast;
  options.compute = p.dtype == Dtype::bf16 ? Dtype::bf16 : Dtype::f32;
  const Plan plan =
      mla::plan(model, spec, batch.pages(), batch.view(), device_info(Device{}, /*threads=*/1, model), options);
  int64_t most = 1;
  for (const SplitRows& s : plan.splits) most = std::max<int64_t>(most, s.splits);
  return most;
}

int64_t planned_sparse_splits(const cases::Params& p, int64_t keys) {
  const SplitPolicy policy = p.batch_invariant ? SplitPolicy::batch_invariant : SplitPolicy::fast;
  const SparseWork work = plan_sparse(p.requests * p.query_len, keys, p.heads, policy, kSparseUnits,
                                      p.dtype == Dtype::bf16 ? backend::backend({}).split_keys() : kSplitKeys);
  if (work.part_keys > 0) return std::max<int64_t>(1, (keys + work.part_keys - 1) / work.part_keys);
  return work.splits.empty() ? 1 : work.splits[0].splits;
}

}  // namespace mla::bench
