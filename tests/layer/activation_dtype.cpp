// Rows of calls in a dtype of their own: what comes out is what a plan without one gives of the same numbers, rounded
// once; refusals. On a GPU this program's host arrays are the GPU's to read.
#include <gtest/gtest.h>

#include <cstring>

#include "layer/random_layer.hpp"
#include "layer/reference.hpp"
#include "support/message.hpp"
#include "support/sanitized.hpp"

namespace mla::test {
namespace {

// Numbers as a dtype holds them, and its bytes.
struct Rows {
  std::vector<float> values;
  std::vector<std::byte> bytes;
  Rows(Dtype dtype, std::vector<float> x) : values(std::move(x)), bytes(values.size() * size_of(dtype)) {
    for (size_t i = 0; i < values.size(); ++i) {
      store_float(dtype, bytes.data(), static_cast<int64_t>(i), values[i]);
      values[i] = load_float(dtype, bytes.data(), static_cast<int64_t>(i));
    }
  }
};

std::vector<float> rounded(Dtype dtype, std::vector<float> x) { return Rows(dtype, std::move(x)).values; }

std::vector<float> floats(Dtype dtype, const std::vector<std::byte>& bytes) {
  std::vector<float> x(bytes.size() / size_of(dtype));
  for (size_t i = 0; i < x.size(); ++i) x[i] = load_float(dtype, bytes.data(), static_cast<int64_t>(i));
  return x;
}

// On a GPU products of the same numbers that lie elsewhere may sum in another order, and with operands of 16 bits what
// is next to a border between two numbers then goes over it.
double apart(Dtype to, Dtype compute) {
  if (compute == Dtype::bf16 || to == Dtype::bf16) return 0x1p-7;
  return to == Dtype::f16 ? 0x1p-10 : 2e-6;
}

void expect_rounded(const std::vector<float>& found, const std::vector<float>& exact, Dtype to, Dtype compute,
                    const std::string& how) {
  if (!kOnGpu) EXPECT_EQ(found, rounded(to, exact)) << how;
  else
    EXPECT_LE(reference::relative_error(found, std::vector<double>(exact.begin(), exact.end())), apart(to, compute))
        << how;
}

void expect_same_rows(const std::vector<std::byte>& found, const std::vector<std::byte>& right, Dtype compute,
                      const std::string& how) {
  if (!kOnGpu || compute == Dtype::f32) return expect_same_cache(found, right, how);
  const auto exact = floats(Dtype::f32, right);
  EXPECT_LE(reference::relative_error(floats(Dtype::f32, found), std::vector<double>(exact.begin(), exact.end())),
            apart(Dtype::f32, compute))
      << how;
}

constexpr Dtype kDtypes[] = {Dtype::f32, Dtype::bf16, Dtype::f16};

ActivationDtype of(Dtype dtype) { return parse_activation_dtype(to_string(dtype)); }

// A layer's call by a plan for rows of `dtype`, native where there is none; its cache begins the same.
struct Called {
  Layer& l;
  const Batch batch;
  Plan plan;
  Buffer workspace, selection;
  Called(Layer& layer, const Batch& b, PlanOptions o, std::optional<Dtype> dtype)
      : l(layer),
        batch(b),
        plan(layer.plan_of(b, with(std::move(o), dtype))),
        workspace(filled(plan.workspace_bytes, std::byte{0xff})),
        selection(filled(plan.selection_bytes, std::byte{0xff})) {
    l.reset();
  }
  static PlanOptions with(PlanOptions o, std::optional<Dtype> dtype) {
    if (dtype) o.activation_dtype = of(*dtype);
    return o;
  }
  std::vector<float> forward(Dtype in, const void* hidden, Dtype to) {
    std::vector<std::byte> out(static_cast<size_t>(plan.tokens * l.model.hidden) * size_of(to));
    mla::forward(l.stream, l.context(plan, batch, workspace, selection),
                 AnyView<Token, Hidden>(in, hidden, {plan.tokens, l.model.hidden}),
                 AnyMutableView<Token, Hidden>(to, out.data(), {plan.tokens, l.model.hidden}));
    l.stream.synchronize();
    return floats(to, out);
  }
  std::vector<float> attend(Dtype in, const void* q, const void* kv_c, const void* k_pe, Dtype to) {
    const ModelConfig& m = l.model;
    const int64_t t = plan.tokens;
    std::vector<std::byte> out(static_cast<size_t>(t * m.heads * m.value) * size_of(to));
    const LayerContext c = l.context(plan, batch, workspace, selection);
    choose(l, c, t);
    mla::attend(l.stream, c, AnyView<Token, Head, QueryKey>(in, q, {t, m.heads, m.query_key()}),
                AnyView<Token, Latent>(in, kv_c, {t, m.latent}), AnyView<Token, Rope>(in, k_pe, {t, m.rope}),
                AnyMutableView<Token, Head, Value>(to, out.data(), {t, m.heads, m.value}));
    l.stream.synchronize();
    return floats(to, out);
  }
};

TEST(ActivationDtype, TheBlockFormGivesWhatItGivesOfTheSameNumbersInF32) {
  Sample sample(5);
  for (const Kind& k : kinds()) {
    Layer l = layer_of(k);
    const Batch b = requests().batch();
    for (Dtype compute : {Dtype::f32, Dtype::bf16})
      for (Dtype dtype : kDtypes) {
        if (!sample.take()) continue;
        const std::string how =
            std::string(k.name) + ", " + std::string(to_string(dtype)) + ", compute " + std::string(to_string(compute));
        PlanOptions o = k.plan;
        o.compute = compute;
        const Rows hidden(dtype, random_values(requests().tokens() * l.model.hidden, 3));
        // f16 becomes what rows between ops are.
        Called native(l, b, o, {});
        const Rows seen(dtype == Dtype::f16 ? native.plan.activations() : Dtype::f32, hidden.values);
        const auto plain = native.forward(Dtype::f32, seen.values.data(), Dtype::f32);
        const auto cache = l.cache_bytes();
        for (Dtype to : {Dtype::f32, Dtype::bf16, dtype}) {
          Called call(l, b, o, dtype);
          expect_rounded(call.forward(dtype, hidden.bytes.data(), to), plain, to, compute, how);
          expect_same_rows(l.cache_bytes(), cache, compute, how);
        }
      }
  }
}

TEST(ActivationDtype, TheAttentionFormGivesWhatItGivesOfTheSameNumbers) {
  Sample sample(5);
  for (const Kind& k : attention_kinds()) {
    Layer l = layer_of(k);
    const ModelConfig& m = l.model;
    const Batch b = requests().batch();
    const int64_t t = requests().tokens();
    for (LayerForm form : {LayerForm::block, LayerForm::attention})
      for (Dtype compute : {Dtype::f32, Dtype::bf16})
        for (Dtype dtype : kDtypes) {
          if (!sample.take()) continue;
          const std::string how = std::string(k.name) + ", " + std::string(to_string(dtype)) + ", compute " +
                                  std::string(to_string(compute)) + ", form " + std::string(to_string(form));
          PlanOptions o = k.plan;
          o.form = form;
          o.compute = compute;
          const Rows q(dtype, random_values(t * m.heads * m.query_key(), 3)),
              kv_c(dtype, random_values(t * m.latent, 4)), k_pe(dtype, random_values(t * m.rope, 5));
          Called native(l, b, o, {});
          const Dtype act = native.plan.activations();
          const Rows act_q(act, q.values), act_kv_c(act, kv_c.values), act_k_pe(act, k_pe.values);
          const auto plain =
              native.attend(act, act_q.bytes.data(), act_kv_c.bytes.data(), act_k_pe.bytes.data(), Dtype::f32);
          const auto cache = l.cache_bytes();
          for (Dtype to : kDtypes) {
            Called call(l, b, o, dtype);
            ASSERT_EQ(call.plan.inputs(), dtype);
            const auto found = call.attend(dtype, q.bytes.data(), kv_c.bytes.data(), k_pe.bytes.data(), to);
            EXPECT_TRUE(l.cache_bytes() == cache) << how;
            expect_rounded(found, plain, to, compute, how);
          }
        }
  }
}

TEST(ActivationDtype, F16OfALayerIsNearFloat64) {
  const ModelConfig m = small_deepseek();
  Layer l(m);
  const Requests r({60}, {0});
  const Rows hidden(Dtype::f16, random_values(60 * m.hidden, 9));
  std::vector<int64_t> rows(60);
  std::iota(rows.begin(), rows.end(), 0);
  const auto exact = reference::output_rows(m, reference::plain_weights(l.tensors, Dtype::f32), hidden.values, rows);
  for (PathPolicy path : {PathPolicy::latent, PathPolicy::expanded}) {
    Called call(l, r.batch(), {.path = path}, Dtype::f16);
    // Each result is rounded by at most 2^-11 of itself.
    EXPECT_LE(reference::relative_error(call.forward(Dtype::f16, hidden.bytes.data(), Dtype::f16), exact),
              0x1p-11 + 2e-6);
  }
}

// Inputs of as many rows as the maxima have, those past the batch's poison; of the outputs they are left alone.
TEST(ActivationDtype, StepsOfMaximaWriteTheBatchsRowsAlone) {
  const Requests r({2, 1}, {30, 5});
  const Batch b = r.batch();
  const std::byte sentinel{0x5a};
  for (const Kind& k : kinds()) {
    if (k.plan.path != PathPolicy::automatic && k.plan.path != PathPolicy::latent) continue;
    Layer l = layer_of(k);
    const ModelConfig& m = l.model;
    PlanOptions o = k.plan;
    Called own(l, b, o, Dtype::f16);
    o.maxima = StepMaxima{.requests = 4, .tokens = 9, .query_len = 3, .seq_len = 100};
    Called most(l, b, o, Dtype::f16);
    ASSERT_EQ(most.plan.tokens, 9);
    const auto poisoned = [&](int64_t width, uint64_t seed) {
      auto x = random_values(r.tokens() * width, seed);
      x.resize(static_cast<size_t>(most.plan.tokens * width), cases::poison());
      return Rows(Dtype::f16, std::move(x));
    };
    const auto expect_same = [&](const std::vector<std::byte>& found, const std::vector<float>& right) {
      const size_t written = right.size() * size_of(Dtype::f16);
      const auto rows = floats(Dtype::f16, {found.begin(), found.begin() + static_cast<int64_t>(written)});
      EXPECT_LE(reference::relative_error(rows, std::vector<double>(right.begin(), right.end())), 0x1p-10) << k.name;
      EXPECT_TRUE(std::all_of(found.begin() + static_cast<int64_t>(written), found.end(), [&](std::byte x) {
        return x == sentinel;
      })) << k.name;
    };
    const Rows hidden = poisoned(m.hidden, 3);
    std::vector<std::byte> out(hidden.bytes.size(), sentinel);
    const auto right = own.forward(Dtype::f16, hidden.bytes.data(), Dtype::f16);
    l.reset();
    forward(l.stream, l.context(most.plan, b, most.workspace, most.selection),
            AnyView<Token, Hidden>(Dtype::f16, hidden.bytes.data(), {most.plan.tokens, m.hidden}),
            AnyMutableView<Token, Hidden>(Dtype::f16, out.data(), {most.plan.tokens, m.hidden}));
    l.stream.synchronize();
    expect_same(out, right);
    if (k.absorbed || m.indexer) continue;  // no attention form; a choice has rows of its own
    const Rows q = poisoned(m.heads * m.query_key(), 4), kv_c = poisoned(m.latent, 5), k_pe = poisoned(m.rope, 6);
    std::vector<std::byte> heads(static_cast<size_t>(most.plan.tokens * m.heads * m.value) * size_of(Dtype::f16),
                                 sentinel);
    l.reset();
    const auto right_heads = own.attend(Dtype::f16, q.bytes.data(), kv_c.bytes.data(), k_pe.bytes.data(), Dtype::f16);
    l.reset();
    attend(l.stream, l.context(most.plan, b, most.workspace, most.selection),
           AnyView<Token, Head, QueryKey>(Dtype::f16, q.bytes.data(), {most.plan.tokens, m.heads, m.query_key()}),
           AnyView<Token, Latent>(Dtype::f16, kv_c.bytes.data(), {most.plan.tokens, m.latent}),
           AnyView<Token, Rope>(Dtype::f16, k_pe.bytes.data(), {most.plan.tokens, m.rope}),
           AnyMutableView<Token, Head, Value>(Dtype::f16, heads.data(), {most.plan.tokens, m.heads, m.value}));
    l.stream.synchronize();
    expect_same(heads, right_heads);
  }
}

// Past f16's largest number lies infinity.
TEST(ActivationDtype, F16ResultsOverflow) {
  Layer l(small_deepseek());
  const Rows hidden(Dtype::f32, random_values(requests().tokens() * l.model.hidden, 3));
  HostTensor& w = l.tensors.output;
  const auto large = std::make_shared<std::vector<float>>(static_cast<size_t>(w.shape[0] * w.shape[1]));
  std::memcpy(large->data(), w.data, large->size() * sizeof(float));
  for (float& x : *large) x *= 1e7f;
  w.data = reinterpret_cast<const std::byte*>(large->data());
  w.owner = large;
  l.weights = prepare(l.model, l.tensors, Dtype::f32, kDevice);
  const Rows narrow(Dtype::f16, hidden.values);
  Called call(l, requests().batch(), {.path = PathPolicy::latent}, Dtype::f16);
  const auto out = call.forward(Dtype::f16, narrow.bytes.data(), Dtype::f16);
  EXPECT_TRUE(std::any_of(out.begin(), out.end(), [](float x) { return std::isinf(x); }));
  EXPECT_FALSE(std::any_of(out.begin(), out.end(), [](float x) { return std::isnan(x); }));
}

TEST(ActivationDtype, OthersThanThePlansAreNamed) {
  Layer l(small_deepseek());
  const Batch b = requests().batch();
  const std::vector<float> x(static_cast<size_t>(requests().tokens() * l.model.hidden) * 4);
  const auto forward = [&](std::optional<Dtype> planned, Dtype in, Dtype to) {
    Called call(l, b, {.path = PathPolicy::latent}, planned);
    return message_of([&] { call.forward(in, x.data(), to); });
  };
  const std::string option = " (PlanOptions::activation_dtype)";
  EXPECT_EQ(forward({}, Dtype::f16, Dtype::f32),
            "layer: hidden is f16, plan was made for activations of f32 or bf16" + option);
  EXPECT_EQ(forward({}, Dtype::f32, Dtype::f16),
            "layer: out is f16, plan was made for activations of f32 or bf16" + option);
  EXPECT_EQ(forward(Dtype::f16, Dtype::f32, Dtype::f16),
            "layer: hidden is f32, plan was made for activations of f16" + option);
  EXPECT_EQ(forward(Dtype::f16, Dtype::f16, Dtype::fp8_e4m3),
            "layer: out is fp8_e4m3, plan was made for activations of f16" + option);
  EXPECT_EQ(forward(Dtype::bf16, Dtype::bf16, Dtype::f16),
            "layer: out is f16, plan was made for activations of bf16" + option);
  const auto attend = [&](Dtype planned, Dtype in, Dtype to) {
    Called call(l, b, {.path = PathPolicy::latent}, planned);
    return message_of([&] { call.attend(in, x.data(), x.data(), x.data(), to); });
  };
  EXPECT_EQ(attend(Dtype::f16, Dtype::f32, Dtype::f32), "layer: q is f32, allowed: f16");
  EXPECT_EQ(attend(Dtype::f16, Dtype::f16, Dtype::fp8_e4m3), "layer: out is fp8_e4m3, allowed: f32 bf16 f16");
  EXPECT_EQ(message_of([] { parse_activation_dtype("f64"); }),
            "unknown activation dtype 'f64'; known: native f32 bf16 f16");
}

}  // namespace
}  // namespace mla::test
