// The layer's own duties: both forms agree, arguments are checked, nothing is allocated after the plan. On a GPU this
// program's host arrays are the GPU's to read.
#include <gtest/gtest.h>

#include "layer/reference.hpp"
#include "support/block_queries.hpp"
#include "support/count_allocations.hpp"
#include "support/device.hpp"
#include "support/engine.hpp"
#include "support/message.hpp"
#include "support/models.hpp"

namespace mla::test {
namespace {

TEST(Layer, AllocatesNothingAfterThePlan) {
  const ModelConfig m = small_deepseek();
  const auto hidden = cases::random_values(200 * m.hidden, 1);
  for (Dtype t : {Dtype::f32, Dtype::bf16}) {
    const LayerWeights weights = prepare(m, random_layer(m, 0, 1, Dtype::f32), t, kDevice);
    for (PathPolicy path : {PathPolicy::latent, PathPolicy::expanded, PathPolicy::automatic}) {
      Engine engine(weights, cache_spec(m, CacheFormat::bf16), {.plan = {.path = path, .compute = t}});
      engine.counter = allocation_count;
      engine.run_alone(engine.add(hidden), 200, 90);
      EXPECT_EQ(engine.allocations, 0) << to_string(path) << " " << to_string(t);
    }
  }
}

TEST(Layer, OddDimensionsWithoutRopeAgreeWithFloat64) {
  const ModelConfig m = odd_nope();
  const LayerTensors tensors = random_layer(m, 0, 3, Dtype::f32);
  const LayerWeights weights = prepare(m, tensors, Dtype::f32, kDevice);
  const auto hidden = cases::random_values(70 * m.hidden, 2);
  std::vector<int64_t> rows(70);
  std::iota(rows.begin(), rows.end(), 0);
  const auto exact = reference::output_rows(m, reference::plain_weights(tensors, Dtype::f32), hidden, rows);
  for (PathPolicy path : {PathPolicy::latent, PathPolicy::expanded}) {
    Engine engine(weights, cache_spec(m, CacheFormat::f32, 5), {.plan = {.path = path}});
    EXPECT_LE(reference::relative_error(engine.run_alone(engine.add(hidden), 70, 19), exact), 2e-6) << to_string(path);
  }
}

TEST(Layer, QueriesOfFp8TakeTheLayersOwnScale) {
  const ModelConfig m = small_deepseek();
  const auto hidden = cases::random_values(70 * m.hidden, 5);
  LayerTensors tensors = random_layer(m, 0, 3, Dtype::f32);
  const auto run = [&](float q_scale, DecodeOperands decode) {
    const LayerWeights weights = prepare(m, tensors, Dtype::f32, kDevice);
    Engine engine(weights, cache_spec(m, CacheFormat::fp8),
                  {.plan = {.path = PathPolicy::latent, .fp8_query = true, .q_scale = q_scale, .decode = decode}});
    return engine.run_alone(engine.add(hidden), 70, 19);
  };
  for (const DecodeOperands decode : {DecodeOperands::compute, DecodeOperands::fp8}) {
    tensors.scales.q = {};
    const auto given = run(0.125f, decode);
    EXPECT_NE(message_of([&] { run(0, decode); }).find("these weights came without one"), std::string::npos);
    tensors.scales.q.assign(static_cast<size_t>(m.heads), 0.125f);
    EXPECT_EQ(run(0, decode), given) << to_string(decode);
    EXPECT_NE(run(0.5f, decode), given);  // the plan's own goes before
    tensors.scales.q[1] = 0.25f;
    EXPECT_NE(message_of([&] { run(0, decode); }).find("without one that all heads share"), std::string::npos);
  }
}

struct Step {
  ModelConfig model = small_deepseek();
  LayerTensors tensors = random_layer(model, 0, 1, Dtype::f32);
  LayerWeights weights = prepare(model, tensors, Dtype::f32, kDevice);
  RotaryTable rotary{model.rotary, model.rope, 128, kDevice};
  std::vector<int32_t> starts{0, 3, 4}, lengths{3, 1}, table{1, 0}, slots{64, 65, 66, 0};
  Batch batch{starts, lengths, {table.data(), {2, 1}}, slots};
  ThreadPool pool{2};
  Stream stream = stream_on_device(pool);
  Cache cache{cache_spec(model, CacheFormat::f32), 2, kDevice};
  PlanOptions options;
  Plan plan = mla::plan(model, cache.spec(), 2, batch, device_info(stream, model), options);
  Buffer workspace{plan.workspace_bytes, kDevice};
  std::vector<float> hidden = cases::random_values(4 * model.hidden, 8), out = std::vector<float>(4 * model.hidden);

  LayerContext context() { return {plan, batch, weights, rotary, cache.view(), {workspace.data(), workspace.size()}}; }
  View<const float, Token, Hidden> hidden_view() const { return {hidden.data(), {4, model.hidden}}; }
  View<float, Token, Hidden> out_view() { return {out.data(), {4, model.hidden}}; }
  /// The block form, and what it leaves in the workspace.
  void forward() {
    mla::forward(stream, context(), hidden_view(), out_view());
    stream.synchronize();
  }
  std::vector<std::byte> region(const char* name, int64_t bytes) {
    return read(stream, workspace.data() + plan.region(name).offset, static_cast<size_t>(bytes));
  }
  std::vector<std::byte> cache_bytes(const Cache& of) {
    return read(stream, of.view().data, 2 * of.spec().page_bytes());
  }

  explicit Step(PlanOptions o = {}) : options(o) {}
};

TEST(Layer, AttentionFormAgreesWithBlockForm) {
  for (Dtype compute : {Dtype::f32, Dtype::bf16})
    for (PathPolicy path : {PathPolicy::latent, PathPolicy::expanded}) {
      Step s({.path = path, .compute = compute});
      fill(s.stream, s.cache.view().data, 2 * s.cache.spec().page_bytes(), std::byte{0});
      s.forward();
      // The block form leaves its rotated queries and normed latents in the workspace.
      const ModelConfig& m = s.model;
      const Dtype act = s.plan.activations();
      const auto size = static_cast<int64_t>(size_of(act));
      const auto q = block_queries(
          s.plan, [&](size_t at, size_t bytes) { return read(s.stream, s.workspace.data() + at, bytes); });
      const auto kv = s.region("kv", 4 * m.entry() * size), heads = s.region("heads", 4 * m.heads * m.value * size);
      const AnyView<Token, Entry> rows(act, kv.data(), {4, m.entry()});
      const Cache other(s.cache.spec(), 2, kDevice);
      fill(s.stream, other.view().data, 2 * other.spec().page_bytes(), std::byte{0});
      LayerContext context = s.context();
      context.cache = other.view();
      const auto run = [&](Dtype dtype, std::byte* out) {
        attend(s.stream, context, AnyView<Token, Head, QueryKey>(act, q.data(), {4, m.heads, m.query_key()}),
               AnyView<Token, Latent>(act, kv.data(), {4, m.latent}, rows.strides()),
               AnyView<Token, Rope>(act, rows.at(0, m.latent), {4, m.rope}, rows.strides()),
               AnyMutableView<Token, Head, Value>(dtype, out, {4, m.heads, m.value}));
        s.stream.synchronize();
      };
      std::vector<std::byte> out(heads.size());
      run(act, out.data());
      EXPECT_TRUE(out == heads) << to_string(compute) << " " << to_string(path);
      EXPECT_TRUE(s.cache_bytes(other) == s.cache_bytes(s.cache));
      if (act == Dtype::f32) continue;
      // f32 heads are those that the others are rounded from, or next to them.
      std::vector<float> unrounded(static_cast<size_t>(4 * m.heads * m.value));
      run(Dtype::f32, reinterpret_cast<std::byte*>(unrounded.data()));
      std::vector<double> rounded;
      for (size_t i = 0; i < unrounded.size(); ++i)
        rounded.push_back(load_float(act, heads.data(), static_cast<int64_t>(i)));
      EXPECT_LE(reference::relative_error(unrounded, rounded), 0x1p-8) << to_string(path);
      EXPECT_TRUE(std::any_of(unrounded.begin(), unrounded.end(), [](float x) { return to_float(to_bf16(x)) != x; }));
    }
}

TEST(Layer, Bf16HiddenAndOutput) {
  Step s;
  std::vector<bf16> hidden, out(s.out.size());
  for (float& x : s.hidden) {
    hidden.push_back(to_bf16(x));
    x = to_float(hidden.back());
  }
  s.forward();
  forward(s.stream, s.context(), View<const bf16, Token, Hidden>(hidden.data(), {4, s.model.hidden}),
          View<bf16, Token, Hidden>(out.data(), {4, s.model.hidden}));
  s.stream.synchronize();
  for (size_t i = 0; i < out.size(); ++i) EXPECT_EQ(to_float(out[i]), to_float(to_bf16(s.out[i])));
}

TEST(Layer, ProfileCountsEveryOp) {
  Step s;
  Profile profile;
  LayerContext context = s.context();
  context.profile = &profile;
  forward(s.stream, context, s.hidden_view(), s.out_view());
  double flops = 0;
  for (const Profile::Row& row : profile.rows()) {
    EXPECT_GE(row.calls, 1);
    EXPECT_GE(row.seconds, 0);
    flops += row.flops;
  }
  EXPECT_GE(profile.rows().size(), 8u);
  EXPECT_GT(flops, 0);
}

TEST(Layer, MismatchesAreNamed) {
  Step s;
  auto run = [&](const LayerContext& c) { forward(s.stream, c, s.hidden_view(), s.out_view()); };
  {
    LayerContext c = s.context();
    c.workspace = c.workspace.first(c.workspace.size() - 1);
    EXPECT_NE(message_of([&] { run(c); }).find("workspace is " + std::to_string(s.workspace.size() - 1)),
              std::string::npos);
  }
  {
    Cache wrong(cache_spec(s.model, CacheFormat::bf16), 2, kDevice);
    LayerContext c = s.context();
    c.cache = wrong.view();
    EXPECT_EQ(message_of([&] { run(c); }), "layer: cache format is bf16, plan was made for f32");
  }
  {
    ModelConfig other = s.model;
    other.heads = 4;
    const LayerWeights weights = prepare(other, random_layer(other, 0, 1, Dtype::f32), Dtype::f32, kDevice);
    const LayerContext c{s.plan, s.batch, weights, s.rotary, s.cache.view(), {s.workspace.data(), s.workspace.size()}};
    EXPECT_EQ(message_of([&] { run(c); }), "layer: weights heads is 4, plan heads is 3");
  }
  {
    LayerWeights weights = s.weights;
    const Device elsewhere = kOnGpu ? Device{} : Device{DeviceKind::cuda, 0};
    weights.device = elsewhere;
    const LayerContext c{s.plan, s.batch, weights, s.rotary, s.cache.view(), {s.workspace.data(), s.workspace.size()}};
    EXPECT_EQ(message_of([&] { run(c); }),
              "layer: weights of " + to_string(elsewhere) + " on a stream of " + to_string(kDevice));
  }
  EXPECT_EQ(message_of([&] {
              forward(s.stream, s.context(), View<const float, Token, Hidden>(s.hidden.data(), {4, s.model.hidden - 1}),
                      s.out_view());
            }),
            "layer: hidden Hidden is 95, model hidden is 96");
  EXPECT_EQ(message_of([&] {
              forward(s.stream, s.context(), View<const float, Token, Hidden>(s.hidden.data(), {3, s.model.hidden}),
                      s.out_view());
            }),
            "layer: hidden has 3 rows, the plan has 4 tokens");
  EXPECT_EQ(message_of([&] {
              forward(s.stream, s.context(), s.hidden_view(), View<float, Token, Hidden>(s.out.data(), {-3, 96}));
            }),
            "layer: out Token is -3, must not be negative");
  if (!kOnGpu) {
    ThreadPool many(5);
    Stream stream(many);
    EXPECT_EQ(message_of([&] { forward(stream, s.context(), s.hidden_view(), s.out_view()); }),
              "layer: stream has 5 threads, plan was made for 2");
  }
}

// What is not there, lies where it cannot lie, or overlaps: each by its name, in both forms.
TEST(Layer, MissingAndMisplacedMemoryIsNamed) {
  Step s;
  const ModelConfig& m = s.model;
  float* const nothing = nullptr;
  std::vector<float> q(4 * m.heads * m.query_key()), kv(4 * m.entry()), heads(4 * m.heads * m.value);
  const auto block = [&](auto&& change) {
    LayerContext c = s.context();
    change(c);
    return message_of([&] {
      forward(s.stream, c, s.hidden_view(), s.out_view());
      s.stream.synchronize();
    });
  };
  const auto attention = [&](auto&& change, float* q_data, float* kv_data, float* pe_data, float* out_data) {
    LayerContext c = s.context();
    change(c);
    return message_of([&] {
      attend(s.stream, c, View<const float, Token, Head, QueryKey>(q_data, {4, m.heads, m.query_key()}),
             View<const float, Token, Latent>(kv_data, {4, m.latent}),
             View<const float, Token, Rope>(pe_data, {4, m.rope}),
             View<float, Token, Head, Value>(out_data, {4, m.heads, m.value}));
      s.stream.synchronize();
    });
  };
  const auto as_it_is = [](LayerContext&) {};
  EXPECT_EQ(block(as_it_is), "no error");
  EXPECT_EQ(attention(as_it_is, q.data(), kv.data(), kv.data(), heads.data()), "no error");

  EXPECT_EQ(message_of([&] {
              forward(s.stream, s.context(), View<const float, Token, Hidden>(nothing, {4, m.hidden}), s.out_view());
            }),
            "layer: hidden has no data");
  EXPECT_EQ(message_of([&] {
              forward(s.stream, s.context(), s.hidden_view(), View<float, Token, Hidden>(nothing, {4, m.hidden}));
            }),
            "layer: out has no data");
  EXPECT_EQ(attention(as_it_is, nothing, kv.data(), kv.data(), heads.data()), "layer: q has no data");
  EXPECT_EQ(attention(as_it_is, q.data(), nothing, kv.data(), heads.data()), "layer: kv_c has no data");
  EXPECT_EQ(attention(as_it_is, q.data(), kv.data(), nothing, heads.data()), "layer: k_pe has no data");
  EXPECT_EQ(attention(as_it_is, q.data(), kv.data(), kv.data(), nothing), "layer: out has no data");
  float* const odd = reinterpret_cast<float*>(reinterpret_cast<std::byte*>(q.data()) + 2);
  EXPECT_EQ(attention(as_it_is, odd, kv.data(), kv.data(), heads.data()),
            "layer: q is at an address that is 2 past a multiple of 4");

  std::vector<float> k_pe(4 * m.rope);
  const auto both = [&](auto&& change, const std::string& expected) {
    EXPECT_EQ(block(change), expected);
    EXPECT_EQ(attention(change, q.data(), kv.data(), k_pe.data(), heads.data()), expected);
  };
  both(
      [](LayerContext& c) {
        c.workspace = {static_cast<std::byte*>(nullptr), c.workspace.size()};
      },
      "layer: workspace has no data");
  const Buffer larger(s.workspace.size() + 64, kDevice);
  for (size_t past : {1, 4, 32})
    both(
        [&](LayerContext& c) {
          c.workspace = {larger.data() + past, s.workspace.size()};
        },
        "layer: workspace is at an address that is " + std::to_string(past) + " past a multiple of 64");
  both([](LayerContext& c) { c.cache.data = nullptr; }, "layer: cache has no data");
  const std::string page = std::to_string(s.cache.spec().page_bytes());
  for (size_t stride : {size_t{0}, size_t{100}, s.cache.spec().page_bytes() - 1})
    both([&](LayerContext& c) { c.cache.page_stride = stride; },
         "layer: cache page_stride is " + std::to_string(stride) + ", a page takes " + page + " bytes");
  both([&](LayerContext& c) { c.cache.page_stride += 2; },
       "layer: cache page_stride is " + std::to_string(s.cache.spec().page_bytes() + 2) + ", must be a multiple of 4");
  both([](LayerContext& c) { c.cache.data += 8; }, "layer: cache is at an address that is 8 past a multiple of 16");
  both([](LayerContext& c) { c.cache.data += 2; }, "layer: cache is at an address that is 2 past a multiple of 4");
  both([](LayerContext& c) { c.cache.pages = -1; }, "layer: cache pages is -1, allowed 0 to 33554432");
}

TEST(Layer, PagesMayLieAtAnyMultipleOfTheFormatsScalars) {
  if (kOnGpu) GTEST_SKIP() << "kernels are chosen by alignment there, and bits follow the kernel";
  Step s;
  for (CacheFormat format : cache_formats()) {
    const CacheSpec spec = cache_spec(s.model, format);
    try {
      spec.validate();
    } catch (const UnsupportedError&) {
      continue;  // of dimensions that this model has not
    }
    const size_t scalar = format == CacheFormat::f32 || format == CacheFormat::fp8_ds_mla ? 4
                          : format == CacheFormat::fp8                                    ? 1
                                                                                          : 2;
    for (PathPolicy path : {PathPolicy::latent, PathPolicy::expanded}) {
      SCOPED_TRACE(std::string(to_string(format)) + " " + std::string(to_string(path)));
      const Plan p = mla::plan(s.model, spec, 2, s.batch, device_info(s.stream, s.model), {.path = path});
      const Buffer workspace(p.workspace_bytes);
      const auto run = [&](size_t stride) {
        std::vector<std::byte> bytes;
        const Buffer memory(2 * stride);
        std::memset(memory.data(), 0xff, 2 * stride);
        const CacheView cache{spec, memory.data(), 2, stride};
        mla::forward(s.stream, {p, s.batch, s.weights, s.rotary, cache, {workspace.data(), workspace.size()}},
                     s.hidden_view(), s.out_view());
        for (int64_t page : {0, 1}) {
          bytes.insert(bytes.end(), cache.page(page), cache.page(page) + spec.page_bytes());
          for (const std::byte* gap = cache.page(page) + spec.page_bytes(); gap < cache.page(page) + stride; ++gap)
            EXPECT_EQ(*gap, std::byte{0xff});
        }
        const auto* out = reinterpret_cast<const std::byte*>(s.out.data());
        bytes.insert(bytes.end(), out, out + s.out.size() * sizeof(float));
        return bytes;
      };
      const std::vector<std::byte> dense = run(spec.page_bytes());
      for (size_t gap : {scalar, 3 * scalar, size_t{16}}) EXPECT_TRUE(run(spec.page_bytes() + gap) == dense) << gap;
      if (scalar == 1) continue;
      const size_t odd = spec.page_bytes() + scalar / 2;
      EXPECT_EQ(message_of([&] { run(odd); }), "layer: cache page_stride is " + std::to_string(odd) +
                                                   ", must be a multiple of " + std::to_string(scalar));
    }
  }
}

TEST(Layer, StepsWithoutTokensNeedNoMemory) {
  if (kOnGpu) GTEST_SKIP() << "of the contracts, which are the same";
  Step s;
  const std::vector<int32_t> none{0};
  const Batch empty{none, {}, {}, {}};
  const Plan p = plan(s.model, s.cache.spec(), 2, empty, device_info(s.stream, s.model));
  const LayerContext c{p, empty, s.weights, s.rotary, s.cache.view(), {s.workspace.data(), s.workspace.size()}};
  EXPECT_EQ(message_of([&] {
              forward(s.stream, c, View<const float, Token, Hidden>(nullptr, {0, s.model.hidden}),
                      View<float, Token, Hidden>(nullptr, {0, s.model.hidden}));
            }),
            "no error");
}

TEST(Layer, QuantisedOutputsWithoutMemoryAreNamed) {
  Step s;
  const ModelConfig& m = s.model;
  const OutputSpec spec = parse_output_spec("fp8_64");
  const Plan p = plan(m, s.cache.spec(), 2, s.batch, device_info(s.stream, m), {.output = spec});
  const Buffer workspace(p.workspace_bytes, kDevice);
  const LayerContext c{p, s.batch, s.weights, s.rotary, s.cache.view(), {workspace.data(), workspace.size()}};
  std::vector<float> q(4 * m.heads * m.query_key()), kv(4 * m.entry());
  const int64_t width = m.heads * m.value;
  std::vector<std::byte> codes(static_cast<size_t>(4 * width)), scales(4096);
  const auto with = [&](std::byte* data, std::byte* scale, int64_t tokens) {
    const QuantizedView out{.spec = spec,
                            .tokens = tokens,
                            .width = width,
                            .data = data,
                            .row_stride = spec.row_bytes(width),
                            .scales = scale};
    return message_of([&] {
      attend(s.stream, c, View<const float, Token, Head, QueryKey>(q.data(), {4, m.heads, m.query_key()}),
             View<const float, Token, Latent>(kv.data(), {4, m.latent}),
             View<const float, Token, Rope>(kv.data(), {4, m.rope}), out);
      s.stream.synchronize();  // the arrays outlive the work
    });
  };
  EXPECT_EQ(with(codes.data(), scales.data(), 4), "no error");
  EXPECT_EQ(with(nullptr, scales.data(), 4), "layer: output fp8_64 has no data");
  EXPECT_EQ(with(codes.data(), nullptr, 4), "layer: output fp8_64 has no scales");
  EXPECT_EQ(with(codes.data(), scales.data(), 3), "layer: output fp8_64 has room for 3 tokens, there are 4");
}

// A table that is not the model's rotates by other angles, or not at all.
TEST(Layer, OtherRotaryTablesAreRefused) {
  Step s;
  const auto with = [&](const RotaryTable& table) {
    const LayerContext c{s.plan, s.batch, s.weights, table, s.cache.view(), {s.workspace.data(), s.workspace.size()}};
    return message_of([&] {
      forward(s.stream, c, s.hidden_view(), s.out_view());
      s.stream.synchronize();
    });
  };
  const int64_t rope = s.model.rope;
  EXPECT_EQ(with(s.rotary), "no error");
  EXPECT_EQ(with(RotaryTable(s.model.rotary, rope, 3, kDevice)), "no error");
  EXPECT_EQ(with(RotaryTable(s.model.rotary, rope, 2, kDevice)),
            "layer: rotary table has 2 positions, a request's sequence has 3");
  EXPECT_EQ(with(RotaryTable()), "layer: rotary table rotates nothing, the model's rope does");
  EXPECT_EQ(with(RotaryTable(s.model.rotary, 2 * rope, 128)),
            "layer: rotary table is of rope " + std::to_string(2 * rope) + ", the model's is " + std::to_string(rope));
  const auto changed = [&](auto&& change) {
    RopeConfig c = s.model.rotary;
    change(c);
    return with(RotaryTable(c, rope, 128, kDevice));
  };
  EXPECT_EQ(changed([](RopeConfig& c) { c.interleaved = !c.interleaved; }),
            s.model.rotary.interleaved ? "layer: rotary table is of NeoX halves, the model's pairs are interleaved"
                                       : "layer: rotary table is of interleaved pairs, the model's are NeoX halves");
  EXPECT_EQ(changed([](RopeConfig& c) { c.rotate = false; }),
            "layer: rotary table rotates nothing, the model's rope does");
  EXPECT_EQ(changed([](RopeConfig& c) { c.theta *= 2; }).substr(0, 63),
            "layer: rotary table is not the model's: inverse frequency 1 is ");
  EXPECT_EQ(changed([](RopeConfig& c) { c.factor *= 2; }).substr(0, 40), "layer: rotary table is not the model's: ");
  // Other words for the same numbers.
  EXPECT_EQ(changed([](RopeConfig& c) { c.mscale = c.mscale_all_dim = 0.5; }), "no error");

  // The attention form is given rotated rows: its table is not read.
  const RotaryTable none;
  const LayerContext c{s.plan, s.batch, s.weights, none, s.cache.view(), {s.workspace.data(), s.workspace.size()}};
  std::vector<float> q(4 * s.model.heads * s.model.query_key()), kv(4 * s.model.entry()),
      heads(4 * s.model.heads * s.model.value);
  EXPECT_EQ(message_of([&] {
              attend(s.stream, c,
                     View<const float, Token, Head, QueryKey>(q.data(), {4, s.model.heads, s.model.query_key()}),
                     View<const float, Token, Latent>(kv.data(), {4, s.model.latent}),
                     View<const float, Token, Rope>(kv.data(), {4, rope}),
                     View<float, Token, Head, Value>(heads.data(), {4, s.model.heads, s.model.value}));
              s.stream.synchronize();
            }),
            "no error");
}

}  // namespace
}  // namespace mla::test
