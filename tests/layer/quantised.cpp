// The attention form with a quantised output: the bits of quantising what the plain form gives, for every format and
// width of heads, in mixed batches, whatever the neighbours; and its refusals. On a GPU this program's host arrays are
// the GPU's to read.
#include "support/quantised.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "cases/compare.hpp"
#include "mla/mla.hpp"
#include "support/count_allocations.hpp"
#include "support/device.hpp"
#include "support/message.hpp"
#include "support/models.hpp"

namespace mla::test {
namespace {

ModelConfig model_of(int64_t heads, int64_t value) {
  ModelConfig m = small_deepseek();
  m.heads = heads;
  if (value == 128) return m;  // the dimensions that kernels are tuned for
  m.latent = 40;
  m.nope = 24;
  m.rope = 8;
  m.value = value;
  return m;
}

std::vector<std::byte> as_dtype(const std::vector<float>& x, Dtype dtype) {
  std::vector<std::byte> bytes(x.size() * size_of(dtype));
  for (size_t i = 0; i < x.size(); ++i) store_float(dtype, bytes.data(), static_cast<int64_t>(i), x[i]);
  return bytes;
}

struct Request {
  int64_t query, context;
};

// Requests in any order over a cache of random rows, each with inputs of its own whatever its neighbours.
class Step {
 public:
  Step(const ModelConfig& m, const LayerWeights& w, std::vector<int64_t> ids, int threads)
      : m_(m),
        w_(w),
        ids_(std::move(ids)),
        pool_(threads),
        stream_(stream_on_device(pool_)),
        // Hopper's kernels read none of f32.
        cache_(cache_spec(m, m.latent == 512 ? CacheFormat::bf16 : CacheFormat::f32, 16), 64, kDevice) {
    const std::vector<float> rows = cases::random_values(64 * 16 * m.entry(), 3);
    const Dtype stored = cache_.spec().format == CacheFormat::bf16 ? Dtype::bf16 : Dtype::f32;
    const std::vector<std::byte> bytes = as_dtype(rows, stored);
    copy(stream_, cache_.view().data, bytes.data(), bytes.size());
    stream_.synchronize();
    for (int64_t id : ids_) {
      const Request& r = kRequests[id];
      for (int64_t p = 0; p < kPagesEach; ++p) table_.push_back(static_cast<int32_t>(id * kPagesEach + p));
      lengths_.push_back(static_cast<int32_t>(r.context + r.query));
      starts_.push_back(starts_.back() + static_cast<int32_t>(r.query));
      for (int64_t i = 0; i < r.query; ++i)
        slots_.push_back(static_cast<int32_t>(id * kPagesEach * 16 + r.context + i));
      auto append = [&](std::vector<float>& to, int64_t width, uint64_t seed) {
        const auto x = cases::random_values(r.query * width, seed + static_cast<uint64_t>(id) * 10);
        to.insert(to.end(), x.begin(), x.end());
      };
      append(q_, m.heads * m.query_key(), 4);
      append(kv_c_, m.latent, 5);
      append(k_pe_, m.rope, 6);
    }
  }

  int64_t tokens() const { return starts_.back(); }
  int64_t first_token(size_t request) const { return starts_[request]; }
  Plan plan(const PlanOptions& o) {
    return mla::plan(m_, cache_.spec(), cache_.pages(), batch(), device_info(stream_, m_), o);
  }
  template <class Out>
  void attend(const Plan& plan, const Out& out, Profile* profile = nullptr) {
    const Buffer workspace = filled(plan.workspace_bytes, std::byte{0xff});
    const Batch b = batch();
    const LayerContext context{plan, b, w_, rotary_, cache_.view(), {workspace.data(), workspace.size()}, profile};
    const Dtype act = plan.activations();
    const auto q = as_dtype(q_, act), kv_c = as_dtype(kv_c_, act), k_pe = as_dtype(k_pe_, act);
    const int64_t t = tokens(), before = allocation_count();
    mla::attend(stream_, context, AnyView<Token, Head, QueryKey>(act, q.data(), {t, m_.heads, m_.query_key()}),
                AnyView<Token, Latent>(act, kv_c.data(), {t, m_.latent}),
                AnyView<Token, Rope>(act, k_pe.data(), {t, m_.rope}), out);
    EXPECT_TRUE(profile || allocation_count() == before);
    stream_.synchronize();
  }
  void forward(const Plan& plan) {
    const Buffer workspace(plan.workspace_bytes, kDevice);
    const Batch b = batch();
    std::vector<float> hidden(tokens() * m_.hidden), out(hidden.size());
    mla::forward(stream_, {plan, b, w_, rotary_, cache_.view(), {workspace.data(), workspace.size()}},
                 View<const float, Token, Hidden>(hidden.data(), {tokens(), m_.hidden}),
                 View<float, Token, Hidden>(out.data(), {tokens(), m_.hidden}));
  }
  /// The plain form's rows, with `padding` more that it must not touch.
  std::vector<float> plain(PlanOptions o, int64_t padding) {
    o.output = {};
    const Plan p = plan(o);
    std::vector<float> out((tokens() + padding) * m_.heads * m_.value, kSentinel);
    attend(p, View<float, Token, Head, Value>(out.data(), {tokens() + padding, m_.heads, m_.value}));
    return out;
  }

  static constexpr float kSentinel = -3e30f;
  static constexpr int64_t kPagesEach = 8;
  // Decodes, prefills with and without context, and one of several chunks, by id.
  static constexpr Request kRequests[] = {{1, 40}, {20, 0}, {17, 90}, {1, 0}, {3, 9}, {2, 61}};

 private:
  Batch batch() const {
    return {starts_, lengths_, {table_.data(), {static_cast<int64_t>(ids_.size()), kPagesEach}}, slots_};
  }
  const ModelConfig& m_;
  const LayerWeights& w_;
  std::vector<int64_t> ids_;
  ThreadPool pool_;
  Stream stream_;
  Cache cache_;
  RotaryTable rotary_{m_.rotary, m_.rope, 256, kDevice};
  std::vector<int32_t> starts_{0}, lengths_, table_, slots_;
  std::vector<float> q_, kv_c_, k_pe_;
};

OutputSpec with_scales(OutputSpec spec) {
  spec.scale = 0.0071f;
  spec.global_scale = 448.0f * 6.0f / 3.3f;
  return spec;
}

PlanOptions options(PathPolicy path, SplitPolicy split, Dtype compute) {
  return {.path = path, .reorder_batch_threshold = 2, .split = split, .compute = compute, .context_rows = 48};
}

class QuantisedOutput : public testing::TestWithParam<std::pair<int64_t, int64_t>> {
 protected:
  ModelConfig m_ = model_of(GetParam().first, GetParam().second);
  LayerTensors tensors_ = random_layer(m_, 0, 1, Dtype::f32);
  LayerWeights f32_ = prepare(m_, tensors_, Dtype::f32, kDevice), bf16_ = prepare(m_, tensors_, Dtype::bf16, kDevice);
  int64_t width_ = m_.heads * m_.value;
};

TEST_P(QuantisedOutput, HasTheBitsOfQuantisingThePlainOne) {
  constexpr int64_t kPadding = 3;
  for (PathPolicy path : {PathPolicy::latent, PathPolicy::expanded, PathPolicy::by_length})
    for (SplitPolicy split : {SplitPolicy::fast, SplitPolicy::batch_invariant})
      for (Dtype compute : {Dtype::f32, Dtype::bf16}) {
        const PlanOptions base = options(path, split, compute);
        const LayerWeights& w = compute == Dtype::f32 ? f32_ : bf16_;
        Step step(m_, w, {2, 0, 4, 1, 5, 3}, 2);
        const std::vector<float> plain = step.plain(base, kPadding);
        ASSERT_TRUE(
            std::all_of(plain.end() - kPadding * width_, plain.end(), [](float x) { return x == Step::kSentinel; }));
        for (const OutputSpec& named : output_specs()) {
          if (named.kind == OutputKind::none) continue;
          const OutputSpec spec = with_scales(named);
          PlanOptions o = base;
          o.output = named;
          const Plan plan = step.plan(o);
          EXPECT_EQ(plan.fused_output,
                    (spec.group_size() == 0 || m_.value % spec.group_size() == 0) && (!kOnGpu || plan.expands()));
          QuantisedMemory got(spec, step.tokens() + kPadding, width_), right(spec, step.tokens() + kPadding, width_);
          two_step(plain, step.tokens(), right.view());
          step.attend(plan, got.view());
          const std::string what = to_string(spec) + ", " + std::string(to_string(path)) + ", " +
                                   std::string(to_string(split)) + ", " + std::string(to_string(compute));
          EXPECT_TRUE(got.codes == right.codes) << what << ": codes";
          EXPECT_TRUE(got.scales == right.scales) << what << ": scales";
        }
      }
}

TEST_P(QuantisedOutput, ThreadsAndNeighboursDoNotChangeBits) {
  for (PathPolicy path : {PathPolicy::latent, PathPolicy::expanded, PathPolicy::by_length})
    for (const char* name : {"fp8", "fp8_128_tma", "fp8_64_packed", "nvfp4", "mxfp4"}) {
      const OutputSpec spec = with_scales(parse_output_spec(name));
      PlanOptions o = options(path, SplitPolicy::batch_invariant, Dtype::f32);
      o.output = spec;
      auto run = [&](std::vector<int64_t> ids, int threads) {
        Step step(m_, f32_, std::move(ids), threads);
        QuantisedMemory memory(spec, step.tokens(), width_);
        step.attend(step.plan(o), memory.view());
        return memory;
      };
      QuantisedMemory all = run({5, 2, 3, 0, 1, 4}, 1), threads = run({5, 2, 3, 0, 1, 4}, 3);
      EXPECT_TRUE(all.codes == threads.codes && all.scales == threads.scales) << name << " " << to_string(path);
      for (int64_t id : {0, 1, 2, 4}) {
        const std::vector<int64_t> order{5, 2, 3, 0, 1, 4};
        int64_t first = 0;
        for (int64_t other : order) {
          if (other == id) break;
          first += Step::kRequests[other].query;
        }
        QuantisedMemory alone = run({id}, 2);
        for (int64_t t = 0; t < Step::kRequests[id].query; ++t) {
          EXPECT_EQ(std::memcmp(alone.view().codes(t), all.view().codes(first + t), spec.row_bytes(width_)), 0)
              << name << " " << to_string(path) << " request " << id << " token " << t;
          for (int64_t g = 0; g < spec.groups(width_); ++g)
            EXPECT_EQ(*alone.view().scale(t, g), *all.view().scale(first + t, g));
        }
      }
    }
}

// The attention form's plain output: heads of a request alone, and beside others, some with cached context.
TEST_P(QuantisedOutput, NorDoNeighboursChangePlainBits) {
  const std::vector<int64_t> order{5, 2, 3, 0, 1, 4};
  for (PathPolicy path : {PathPolicy::latent, PathPolicy::expanded, PathPolicy::by_length, PathPolicy::automatic})
    for (Dtype compute : {Dtype::f32, Dtype::bf16}) {
      const PlanOptions o = options(path, SplitPolicy::batch_invariant, compute);
      const LayerWeights& w = compute == Dtype::f32 ? f32_ : bf16_;
      Step together(m_, w, order, 2);
      const std::vector<float> all = together.plain(o, 0);
      for (size_t i = 0; i < order.size(); ++i) {
        Step single(m_, w, {order[i]}, 2);
        const std::vector<float> alone = single.plain(o, 0);
        EXPECT_TRUE(std::equal(alone.begin(), alone.end(), all.begin() + together.first_token(i) * width_))
            << to_string(path) << " " << to_string(compute) << " request " << order[i];
      }
    }
}

INSTANTIATE_TEST_SUITE_P(Heads, QuantisedOutput,
                         testing::Values(std::pair{3, 20}, std::pair{3, 64}, std::pair{2, 128}, std::pair{2, 256}),
                         [](const auto& i) {
                           return std::to_string(i.param.first) + "_heads_of_" + std::to_string(i.param.second);
                         });

class Refusals : public testing::Test {
 protected:
  ModelConfig m_ = model_of(2, 64);
  LayerWeights w_ = prepare(m_, random_layer(m_, 0, 1, Dtype::f32), Dtype::f32, kDevice);
  Step step_{m_, w_, {0, 1}, 2};
  Plan plan_for(const char* name) {
    PlanOptions o;
    o.output = parse_output_spec(name);
    return step_.plan(o);
  }
};

TEST_F(Refusals, APlanForAnotherOutput) {
  std::vector<float> out(step_.tokens() * 128);
  const View<float, Token, Head, Value> plain(out.data(), {step_.tokens(), 2, 64});
  QuantisedMemory nvfp4(parse_output_spec("nvfp4"), step_.tokens(), 128);
  EXPECT_EQ(message_of([&] { step_.attend(plan_for("fp8_128_tma"), plain); }),
            "layer: output is plain f32, plan was made for fp8_128_tma");
  EXPECT_EQ(message_of([&] { step_.attend(plan_for("none"), nvfp4.view()); }),
            "layer: output is nvfp4, plan was made for plain f32");
  EXPECT_EQ(message_of([&] { step_.attend(plan_for("fp8_64"), nvfp4.view()); }),
            "layer: output is nvfp4, plan was made for fp8_64");
  QuantizedView none = nvfp4.view();
  none.spec = {};
  EXPECT_EQ(message_of([&] { step_.attend(plan_for("none"), none); }), "layer: output none is not a quantised one");
  EXPECT_EQ(
      message_of([&] { step_.forward(plan_for("nvfp4")); }),
      "layer: plan was made for output nvfp4; the block form's output is hidden states after W_O, never quantised");
}

TEST_F(Refusals, AnOutputThatDoesNotFit) {
  QuantisedMemory small(parse_output_spec("fp8_64"), step_.tokens() - 1, 128);
  EXPECT_EQ(message_of([&] { step_.attend(plan_for("fp8_64"), small.view()); }),
            "layer: output fp8_64 has room for 20 tokens, there are 21");
  QuantisedMemory narrow(parse_output_spec("fp8_64"), step_.tokens(), 64);
  EXPECT_EQ(message_of([&] { step_.attend(plan_for("fp8_64"), narrow.view()); }),
            "layer: output width is 64, Head * Value is 128");
  QuantisedMemory fp8(parse_output_spec("fp8"), step_.tokens(), 128);
  QuantizedView bad = fp8.view();
  bad.spec.scale = -1;
  EXPECT_EQ(message_of([&] { step_.attend(plan_for("fp8"), bad); }),
            "output: scale is -1.000000, must be finite and above 0");
}

TEST_F(Refusals, TheProfileNamesWhatQuantises) {
  for (const char* name : {"fp8_64", "fp8_128"}) {
    QuantisedMemory memory(parse_output_spec(name), step_.tokens(), 128);
    Profile profile;
    step_.attend(plan_for(name), memory.view(), &profile);
    const bool fused = !kOnGpu && parse_output_spec(name).groups_within(64);
    EXPECT_EQ(std::count_if(profile.rows().begin(), profile.rows().end(),
                            [](const Profile::Row& r) { return r.op == "quantize"; }),
              fused ? 0 : 1)
        << name;
  }
}

}  // namespace
}  // namespace mla::test
