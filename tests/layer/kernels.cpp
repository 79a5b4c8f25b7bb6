// What a survey of a step's kernels notes is what the step then runs: the same ops, as often.
#include "layer/kernels.hpp"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <string_view>

#include "support/batches.hpp"
#include "support/engine.hpp"
#include "support/models.hpp"

namespace mla::test {
namespace {

using Calls = std::map<std::string, int64_t>;
using Work = std::map<std::string, std::pair<double, double>>;  // bytes and FLOPs

struct StepCase {
  std::string name;
  ModelConfig model;
  PrepareOptions weights;
  PlanOptions plan;
  CacheFormat format = CacheFormat::bf16;
};

std::vector<StepCase> step_cases() {
  const PrepareOptions bf16{.dtype = Dtype::bf16};
  const auto plan = [](PlanOptions o) {
    o.compute = Dtype::bf16;
    return o;
  };
  return {
      {"by_length", small_deepseek(), bf16, plan({.path = PathPolicy::by_length, .reorder_batch_threshold = 2})},
      {"latent_f32", small_deepseek(), {}, {.path = PathPolicy::latent}, CacheFormat::f32},
      {"invariant", small_deepseek(), bf16, plan({.path = PathPolicy::latent, .split = SplitPolicy::batch_invariant})},
      {"chunks", small_deepseek(), bf16, plan({.path = PathPolicy::expanded, .context_rows = 64})},
      {"absorbed",
       small_deepseek(),
       {.dtype = Dtype::bf16, .absorption = Absorption::full_fp8},
       plan({.absorbed = true})},
      {"fp8_query", small_deepseek(), bf16, plan({.path = PathPolicy::latent, .fp8_query = true, .q_scale = 0.125f}),
       CacheFormat::fp8},
      {"sparse", small_sparse(), bf16, plan({.index_hadamard = true})},
      {"masked", small_sparse(), bf16, plan({.sparse = SparsePolicy::masked}), CacheFormat::fp8_ds_mla},
      {"upconvert", small_sparse(), bf16, plan({.sparse = SparsePolicy::upconvert}), CacheFormat::fp8_ds_mla},
      {"fp8_products",
       small_deepseek(),
       {.dtype = Dtype::bf16, .products = WeightFormat::fp8},
       plan({.path = PathPolicy::by_length, .reorder_batch_threshold = 2, .activations = Activations::fp8_128})},
      {"no_rope", odd_nope(), {}, {.path = PathPolicy::by_length, .reorder_batch_threshold = 2}, CacheFormat::f32},
  };
}

TEST(Kernels, ASurveyNotesTheCallsThatAStepMakes) {
  for (const StepCase& c : step_cases()) {
    const LayerWeights weights = prepare(c.model, random_layer(c.model, 0, 1, Dtype::f32), c.weights, kDevice);
    const std::vector<float> hidden = cases::random_values(200 * c.model.hidden, 3);
    Engine engine(weights, cache_spec(c.model, c.format), {.plan = c.plan});
    const int64_t first = engine.add(hidden), second = engine.add(hidden);
    engine.run_alone(first, 130, 130);
    Profile profile;
    engine.profile = &profile;
    const std::vector<Engine::Piece> pieces{{first, 1}, {second, 40}};
    engine.step(pieces);
    Calls ran, noted;
    Work done, expected;
    for (const Profile::Row& row : profile.rows()) {
      ran[std::string(row.op)] = row.calls;
      if (row.op != "attend_sparse") done[std::string(row.op)] = {row.bytes, row.flops};
    }

    const Made made({1, 40}, {130, 0}, engine.cache().spec().page_size);
    // A GPU's plan counts activations of 16 bits, this step's are the test's own f32.
    const std::set<std::string_view> callers = {"kv_down",         "query_down", "output",
                                                "absorbed_output", "index_key",  "index_weights"};
    if (kOnGpu)
      for (const std::string_view op : callers)
        if (const auto at = done.find(std::string(op)); at != done.end()) at->second.first = 0;
    for (const layer::KernelUse& u : layer::kernels(engine.last_plan, made.batch(), c.weights)) {
      noted[std::string(u.op)] += u.calls;
      EXPECT_GT(u.seconds, 0) << c.name << " " << u.op;
      if (u.op != "attend_sparse") {
        if (!kOnGpu || !callers.contains(u.op)) expected[std::string(u.op)].first += u.bytes;
        expected[std::string(u.op)].second += u.flops;
      }
      EXPECT_EQ(u.kernel.starts_with(kOnGpu ? "cuda/" : "cpu"), true) << c.name << " " << u.op << " " << u.kernel;
    }
    EXPECT_EQ(noted, ran) << c.name;
    EXPECT_EQ(expected, done) << c.name;
    EXPECT_GT(noted.size(), 5u) << c.name;
  }
}

TEST(Kernels, AQuantisedOutputIsTheAttentionForms) {
  const ModelConfig m = small_deepseek();
  const Made made({1, 40}, {30, 0}, 64);
  const PlanOptions options{.output = parse_output_spec("fp8_128_tma")};
  const Plan p =
      plan(m, cache_spec(m, CacheFormat::bf16), made.pages, made.batch(), device_info(kDevice, 2, m), options);
  Calls noted;
  for (const layer::KernelUse& u : layer::kernels(p, made.batch(), {})) noted[std::string(u.op)] += u.calls;
  EXPECT_EQ(noted.count("query"), 0u);
  EXPECT_EQ(noted.count("append"), 1u);
  // On a GPU the latent request's heads are.
  const bool on_gpu = kDevice.kind == DeviceKind::cuda;
  EXPECT_TRUE(p.fused_output);
  EXPECT_EQ(noted.count("scale_padding"), on_gpu ? 0u : 1u);
  EXPECT_EQ(noted.count("quantize"), on_gpu ? 1u : 0u);
}

TEST(Kernels, WeightsThatThePlanIsNotForAreRefused) {
  const ModelConfig m = small_deepseek();
  const Made made({1}, {30}, 64);
  const Plan p = plan(m, cache_spec(m, CacheFormat::bf16), made.pages, made.batch(), device_info(kDevice, 2, m));
  EXPECT_THROW(layer::kernels(p, made.batch(), {.absorption = Absorption::full}), UnsupportedError);
  EXPECT_THROW(layer::kernels(p, made.batch(), {.up = WeightFormat::mxfp4}), UnsupportedError);
}

}  // namespace
}  // namespace mla::test
