#include "bench/rehearsal.hpp"

#include <algorithm>

#include "cases/compare.hpp"
#include "core/named_buffer.hpp"
#include "core/threads.hpp"
#include "mla/index_cache.hpp"
#include "mla/layer.hpp"

namespace mla::bench {
namespace {

constexpr uint64_t kSeed = 1;
constexpr int kRepeats = 3;

// Bytes that are numbers of about 1 in every format of a cache, scales included.
void fill(std::span<std::byte> memory, cases::Random& random) {
  for (std::byte& b : memory) b = static_cast<std::byte>(0x38 + random.next() % 8);
}

template <class View>
void fill_pages(const View& cache, int64_t pages, size_t bytes, cases::Random& random) {
  for (int64_t p = 0; p < pages; ++p) fill({cache.page(p), bytes}, random);
}

}  // namespace

std::vector<RehearsedStep> rehearse(const ModelConfig& model, const PrepareOptions& prepared, const CacheSpec& spec,
                                    int64_t pages, const Batch& batch, const PlanOptions& options, int threads) {
  Rehearsal rehearsal(threads);
  Stream stream(rehearsal.pool());
  const Plan p = plan(model, spec, pages, batch, device_info(stream, model), options);
  const LayerWeights weights = prepare(model, random_layer(model, 0, kSeed, Dtype::bf16), prepared);
  int64_t positions = 1;
  for (const int32_t length : batch.seq_lens) positions = std::max<int64_t>(positions, length);
  const RotaryTable rotary(model.rotary, model.rope, positions);
  cases::Random random(kSeed);
  Cache cache(spec, pages);
  fill_pages(cache.view(), pages, spec.page_bytes(), random);
  IndexCache index;
  RotaryTable index_rotary;
  if (model.indexer) {
    index = IndexCache(p.index_cache, pages);
    fill_pages(index.view(), pages, p.index_cache.page_bytes(), random);
    index_rotary = RotaryTable(model.index_rotary(), model.rope, positions);
  }
  Buffer workspace = named_buffer("workspace", p.workspace_bytes), selection(p.selection_bytes);
  const std::vector<float> hidden = cases::random_values(p.tokens * model.hidden, kSeed);
  std::vector<float> out(hidden.size());

  std::vector<RehearsedStep> best;
  for (int repeat = 0; repeat <= kRepeats; ++repeat) {  // the first for what is made once
    std::vector<RehearsedStep> steps;
    Profile profile;
    profile.observe([&](const Profile::Call& call) {
      RehearsedStep s{.op = std::string(call.op), .alone = call.seconds, .shared = call.seconds};
      for (const Rehearsal::Run& run : rehearsal.take()) {
        s.tasks += static_cast<int64_t>(run.size());
        for (const double seconds : run) {
          s.shared -= seconds;  // what is left is no task's
          s.longest = std::max(s.longest, seconds);
        }
        s.shared += Rehearsal::shared(run, threads);
      }
      steps.push_back(std::move(s));
    });
    forward(stream,
            {.plan = p,
             .batch = batch,
             .weights = weights,
             .rotary = rotary,
             .cache = cache.view(),
             .workspace = {workspace.data(), workspace.size()},
             .profile = &profile,
             .index_cache = index.view(),
             .index_rotary = &index_rotary,
             .selection = {selection.data(), selection.size()}},
            View<const float, Token, Hidden>(hidden.data(), {p.tokens, model.hidden}),
            View<float, Token, Hidden>(out.data(), {p.tokens, model.hidden}));
    if (repeat == 0) continue;
    if (best.empty()) best = std::move(steps);
    else
      for (size_t i = 0; i < steps.size(); ++i)
        if (steps[i].alone < best[i].alone) best[i] = std::move(steps[i]);
  }
  return best;
}

}  // namespace mla::bench
