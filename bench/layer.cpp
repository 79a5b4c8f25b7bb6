#include "bench/layer.hpp"

#include <algorithm>
#include <cstring>

#include "bench/batch.hpp"
#include "cases/compare.hpp"
#include "core/named_buffer.hpp"
#include "layer/reference.hpp"

namespace mla::bench {
namespace {

constexpr uint64_t kSeed = 1;

class LayerCase final : public cases::Case {
 public:
  LayerCase(const LayerModel& model, const LayerStep& step, ThreadPool& pool)
      : model_(model),
        step_(step),
        batch_(std::vector<Lengths>(static_cast<size_t>(step.requests), {step.query_len, step.context}), kPageSize),
        cache_(cache_spec(model.config, step.format, kPageSize), batch_.pages()),
        context_(cases::random_values(step.context * model.config.hidden, kSeed)),
        hidden_(cases::random_values(step.requests * step.query_len * model.config.hidden, kSeed + 1)),
        out_(hidden_.size()) {
    Stream stream(pool);
    cache_.place(pool);
    fill_context(stream);
    plan_ = mla::plan(model.config, cache_.spec(), cache_.pages(), batch_.view(), device_info(stream, model.config),
                      step.plan);
    workspace_ = named_buffer("workspace", plan_.workspace_bytes);
    Profile profile;
    forward_once(stream, &profile);
    for (const Profile::Row& row : profile.rows()) cost_ += {row.bytes, row.flops};
  }

  void run(Stream& stream) override { forward_once(stream, nullptr); }

  // The last token of the last request, which attends to all of its context.
  cases::Verdict verify() override {
    const ModelConfig& m = model_.config;
    const int64_t length = step_.context + step_.query_len, last = step_.requests * step_.query_len - 1;
    std::vector<float> sequence = context_;
    sequence.insert(sequence.end(), hidden_.end() - step_.query_len * m.hidden, hidden_.end());
    const int64_t row = length - 1;
    const reference::Rounding rounding{.weights = model_.weights.dtype,
                                       .compute = step_.plan.compute,
                                       .cache = cache_.spec(),
                                       .path = plan_.requests.back().path,
                                       .q_scale = 0};
    const auto exact =
        reference::output_rows(m, reference::plain_weights(model_.tensors, Dtype::f32), sequence, {&row, 1});
    const auto plain = reference::output_rows(m, reference::plain_weights(model_.tensors, model_.weights.dtype),
                                              sequence, {&row, 1}, &rounding);
    cases::Verdict v;
    v.error = reference::relative_error(std::span(out_).subspan(last * m.hidden, m.hidden), exact);
    v.bound = 2 * reference::relative_error(std::vector<float>(plain.begin(), plain.end()), exact) + kFloor;
    v.ok = v.error <= v.bound;
    v.detail = "token " + std::to_string(last);
    return v;
  }
  ops::Cost cost() const override { return cost_; }

 private:
  static constexpr int64_t kPageSize = 64;
  static constexpr double kFloor = 2e-6;  // another order of f32 sums (docs/numerics.md)

  // Every request has the same context in pages of its own: prefilled once, then copied.
  void fill_context(Stream& stream) {
    if (step_.context == 0) return;
    const ModelConfig& m = model_.config;
    const Lengths prompt{step_.context, 0};
    const OwnedBatch one({&prompt, 1}, kPageSize);  // its pages are the first request's
    const Plan prefill = mla::plan(m, cache_.spec(), cache_.pages(), one.view(), device_info(stream, m));
    const Buffer workspace = named_buffer("workspace of a prefill", prefill.workspace_bytes);
    std::vector<float> out(context_.size());
    forward(stream,
            {prefill, one.view(), model_.weights, model_.rotary, cache_.view(), {workspace.data(), workspace.size()}},
            View<const float, Token, Hidden>(context_.data(), {step_.context, m.hidden}),
            View<float, Token, Hidden>(out.data(), {step_.context, m.hidden}));
    const CacheView cache = cache_.view();
    for (int64_t r = 1; r < step_.requests; ++r)
      for (int64_t p = 0; p < one.pages(); ++p)
        std::memcpy(cache.page(batch_.page(r, p)), cache.page(batch_.page(0, p)), cache.spec.page_bytes());
  }

  void forward_once(Stream& stream, Profile* profile) {
    const ModelConfig& m = model_.config;
    forward(stream,
            {plan_,
             batch_.view(),
             model_.weights,
             model_.rotary,
             cache_.view(),
             {workspace_.data(), workspace_.size()},
             profile},
            View<const float, Token, Hidden>(hidden_.data(), {plan_.tokens, m.hidden}),
            View<float, Token, Hidden>(out_.data(), {plan_.tokens, m.hidden}));
  }

  const LayerModel& model_;
  LayerStep step_;
  OwnedBatch batch_;
  Cache cache_;
  std::vector<float> context_, hidden_, out_;
  Plan plan_;
  Buffer workspace_;
  ops::Cost cost_;
};

}  // namespace

LayerModel::LayerModel(const ModelConfig& c, Dtype dtype, int64_t positions)
    : config(c),
      tensors(random_layer(c, 0, kSeed, Dtype::bf16)),
      weights(prepare(c, tensors, dtype)),
      rotary(c.rotary, c.rope, positions) {}

std::unique_ptr<cases::Case> make_layer_case(const LayerModel& model, const LayerStep& step, ThreadPool& pool) {
  return std::make_unique<LayerCase>(model, step, pool);
}

}  // namespace mla::bench
