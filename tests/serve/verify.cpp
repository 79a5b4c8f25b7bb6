// The second bound of verification: faults that are smaller than a cache format's own error fail it, and clean runs
// pass it with room, whatever rounds.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "serve/replay.hpp"
#include "support/models.hpp"
#include "support/safetensors_writer.hpp"
#include "support/sanitized.hpp"

namespace mla::serve {
namespace {

// All at once: what is in which step, and so which rows are judged, does not depend on the clock.
const Generated kLengths{.requests = 6, .input = 50, .output = 5, .rate = 0, .seed = 3};

struct Verified {
  Trace trace = generate_trace(kLengths);
  Options options;
  ThreadPool pool{2};
  std::atomic<bool> stop{false};
  Verified() {
    options.model = test::small_deepseek();
    options.model.layers = 1;
    options.model.rotary.mscale = options.model.rotary.mscale_all_dim = 1;
    options.limits = {.pages = 0, .page_size = 16, .token_budget = 50};
    options.verify = 16;
    options.plan.compute = Dtype::bf16;
  }
  Verification judge(const Options& ran) {
    const Result r = replay(trace, ran, pool, stop);
    return verify(trace, options, r.samples, pool, stop);
  }
};

const PathPolicy kPaths[] = {PathPolicy::latent, PathPolicy::expanded};
const CacheFormat kFormats[] = {CacheFormat::f32, CacheFormat::bf16, CacheFormat::f16, CacheFormat::fp8,
                                CacheFormat::fp8_ds_mla};

std::string text(const Verification& v) {
  return std::to_string(v.failed) + " of " + std::to_string(v.rows) + " failed, the second bound is used to " +
         std::to_string(v.tightest) + ", worst is " + v.worst + ", error " + std::to_string(v.worst_error) + " bound " +
         std::to_string(v.worst_bound);
}

// The layer's tensors as a checkpoint; of one head, the rows that make its keys and values are `factor` times as large.
class Folder {
 public:
  Folder(const ModelConfig& m, double factor) {
    test::write_file(folder_ / "config.json",
                     R"({"model_type":"deepseek_v3","hidden_size":)" + std::to_string(m.hidden) +
                         R"(,"num_hidden_layers":1,"num_attention_heads":3,"q_lora_rank":)" +
                         std::to_string(m.query_latent) +
                         R"(,"kv_lora_rank":512,"qk_nope_head_dim":128,"qk_rope_head_dim":64,"v_head_dim":128})");
    const LayerTensors t = random_layer(m, 0, 1, Dtype::bf16);
    test::SafetensorsWriter w;
    const auto add = [&](const char* role, const HostTensor& tensor, int64_t first, int64_t last) {
      std::vector<float> x = tensor.to_f32();
      for (int64_t i = first; i < last; ++i) x[static_cast<size_t>(i)] *= static_cast<float>(factor);
      w.add(std::string("model.layers.0.self_attn.") + role + ".weight", "F32", tensor.shape, x);
    };
    add("q_a_proj", t.query_down, 0, 0);
    add("q_a_layernorm", t.query_norm, 0, 0);
    add("q_b_proj", t.query, 0, 0);
    add("kv_a_proj_with_mqa", t.kv_down, 0, 0);
    add("kv_a_layernorm", t.kv_norm, 0, 0);
    const int64_t head = (m.nope + m.value) * m.latent;
    add("kv_b_proj", t.kv_up, head, 2 * head);
    add("o_proj", t.output, 0, 0);
    w.write(folder_ / "model.safetensors");
  }
  Checkpoint open() const { return Checkpoint(folder_.path()); }

 private:
  test::TempFolder folder_;
};

// What the run did otherwise than what it is verified against.
struct Fault {
  const char* name;
  std::function<void(Options&)> make;
};

TEST(Verify, FaultsBelowAFormatsErrorFail) {
  const Verified usual;
  const ModelConfig model = usual.options.model;
  const Folder right(model, 1), wrong_head(model, 1.02);
  const std::vector<Fault> faults{
      {"eps 1e-2", [](Options& o) { o.model.rms_eps = 1e-2; }},
      // The scale's factor under YaRN is m^2, m = 0.1 mscale ln(40) + 1; both mscales move, so that cos and sin do not.
      {"softmax scale + 1%",
       [](Options& o) {
         const double m = 0.1 * std::log(40.0) + 1, wrong = m * std::sqrt(1.01);
         o.model.rotary.mscale = o.model.rotary.mscale_all_dim = (wrong - 1) / (0.1 * std::log(40.0));
       }},
      {"rope theta + 5%", [](Options& o) { o.model.rotary.theta *= 1.05; }},
      {"one head + 2%", [&](Options& o) { o.checkpoint = wrong_head.open(); }},
  };
  // products 1: fp8 weights; 2: fp8 activations too, which round what bf16 arithmetic left uncertain to 1/16: with f32
  // arithmetic, then.
  test::Sample sample(3);
  for (CacheFormat format : kFormats)
    for (int products = 0; products < (format == CacheFormat::fp8 ? 3 : 1); ++products)
      for (PathPolicy path : kPaths)
        for (const Fault& fault : faults) {
          if (!sample.take()) continue;
          Verified run;
          run.options.checkpoint = right.open();
          run.options.format = format;
          run.options.plan.path = path;
          if (products > 0) run.options.products = WeightFormat::fp8;
          if (products > 1) {
            run.options.plan.activations = Activations::fp8_128;
            run.options.plan.compute = Dtype::f32;
          }
          Options wrong = run.options;
          fault.make(wrong);
          const Verification v = run.judge(wrong);
          EXPECT_GT(v.failed, 0) << fault.name << ", " << to_string(format) << ", products " << products << ", "
                                 << to_string(path) << ": " << text(v);
        }
}

// A bound that clean runs come near would fail one of them some day.
constexpr double kRoom = 0.7;

TEST(Verify, CleanRunsPassWithRoom) {
  struct Arithmetic {
    Dtype weights, compute;
    WeightFormat products;
    Activations activations;
  };
  using enum WeightFormat;
  const std::vector<Arithmetic> all{
      {Dtype::f32, Dtype::f32, plain, Activations::plain},  {Dtype::bf16, Dtype::f32, plain, Activations::plain},
      {Dtype::f32, Dtype::bf16, plain, Activations::plain}, {Dtype::bf16, Dtype::bf16, plain, Activations::plain},
      {Dtype::bf16, Dtype::bf16, fp8, Activations::plain},  {Dtype::bf16, Dtype::bf16, fp8, Activations::fp8_128},
      {Dtype::bf16, Dtype::f32, fp8, Activations::fp8_128}};
  test::Sample sample(3);
  for (CacheFormat format : kFormats)
    for (PathPolicy path : kPaths)
      for (const Arithmetic& a : all) {
        if (!sample.take()) continue;
        Verified run;
        run.options.format = format;
        run.options.plan.path = path;
        run.options.plan.compute = a.compute;
        run.options.weights = a.weights;
        run.options.products = a.products;
        run.options.plan.activations = a.activations;
        run.options.verify = 16;
        const Verification v = run.judge(run.options);
        EXPECT_EQ(v.failed, 0) << to_string(format) << " " << to_string(path) << ": " << text(v);
        EXPECT_LT(v.tightest, kRoom) << to_string(format) << " " << to_string(path) << " weights "
                                     << to_string(a.weights) << " compute " << to_string(a.compute) << " "
                                     << to_string(a.products) << " " << to_string(a.activations) << ": " << text(v);
      }
}

// Whatever the layer rounds, and where: factors of families, what ranks hold, products of weights, few elements a row.
TEST(Verify, CleanRunsOfOtherKindsPassWithRoom) {
  struct Kind {
    const char* name;
    std::function<void(Options&)> make;
  };
  const auto grown = [](ModelConfig& m) { m.query_growth_beta = 0.1, m.query_growth_length = 8; };
  const auto scaled = [](ModelConfig& m) { m.query_scale = 1.3, m.latent_scale = 0.7; };
  const auto ranks_of = [](Options& o, int ranks) {
    o.model.heads = 5;
    o.model.nope = o.model.value = 40;
    o.plan.tensor_parallel = ranks;
  };
  const auto tiny = [](ModelConfig& m) {
    m.hidden = 64, m.query_latent = 16, m.latent = 32, m.heads = 2, m.nope = m.rope = m.value = 16;
  };
  const std::vector<Kind> kinds{
      {"queries grow", [&](Options& o) { grown(o.model); }},
      {"queries grow, f32", [&](Options& o) { grown(o.model), o.plan.compute = Dtype::f32; }},
      {"scaled", [&](Options& o) { scaled(o.model); }},
      {"scaled, absorbed",
       [&](Options& o) { scaled(o.model), o.absorption = Absorption::full, o.plan.path = PathPolicy::latent; }},
      {"2 ranks, maps in fp8", [&](Options& o) { ranks_of(o, 2), o.up = WeightFormat::fp8; }},
      {"3 ranks, products in fp8", [&](Options& o) { ranks_of(o, 3), o.products = WeightFormat::fp8; }},
      {"2 ranks, absorbed in fp8",
       [&](Options& o) {
         ranks_of(o, 2);
         o.absorption = Absorption::full_fp8, o.plan.path = PathPolicy::latent;
       }},
      {"absorbed in fp8, f32",
       [](Options& o) {
         o.absorption = Absorption::full_fp8, o.plan.path = PathPolicy::latent;
         o.plan.compute = o.weights = Dtype::f32;
       }},
      {"narrow", [&](Options& o) { tiny(o.model); }},
      {"narrow, fp8", [&](Options& o) { tiny(o.model), o.format = CacheFormat::fp8; }},
      {"narrow, products in fp8", [&](Options& o) { tiny(o.model), o.products = WeightFormat::fp8; }},
      {"narrow, products of fp8 by fp8",
       [&](Options& o) { tiny(o.model), o.products = WeightFormat::fp8, o.plan.activations = Activations::fp8_128; }}};
  for (const Kind& kind : kinds)
    for (uint64_t seed = 1; seed <= (test::kSanitized ? 1 : 3); ++seed) {
      Verified run;
      kind.make(run.options);
      run.options.seed = seed;
      run.options.verify = 60;
      const Verification v = run.judge(run.options);
      EXPECT_GT(v.rows, 0) << kind.name;
      EXPECT_EQ(v.failed, 0) << kind.name << ", seed " << seed << ": " << text(v);
      EXPECT_LT(v.tightest, 0.85) << kind.name << ", seed " << seed << ": " << text(v);
    }
}

TEST(Verify, CleanRunsPassForAnyNumberOfThreadsAndRealDimensions) {
  for (int threads = 1; threads <= 3; threads += 2)
    for (int i = 0; i < 2; ++i) {
      const bool invariant = i == 1;
      Verified run;
      run.options.model = preset("deepseek-v2-lite");
      run.options.layers = 1;
      run.options.format = invariant ? CacheFormat::fp8_ds_mla : CacheFormat::bf16;
      run.options.plan.split = invariant ? SplitPolicy::batch_invariant : SplitPolicy::fast;
      run.options.verify = 4;
      run.trace = generate_trace({.requests = 2, .input = 24, .output = 3, .rate = 200, .seed = 5});
      ThreadPool pool(threads);
      const Result r = replay(run.trace, run.options, pool, run.stop);
      const Verification v = verify(run.trace, run.options, r.samples, pool, run.stop);
      EXPECT_EQ(v.failed, 0) << threads << " threads: " << text(v);
      EXPECT_LT(v.tightest, kRoom) << threads << " threads: " << text(v);
    }
}

}  // namespace
}  // namespace mla::serve
