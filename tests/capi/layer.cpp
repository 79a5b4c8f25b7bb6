// The layer through the C interface: both forms, quantised outputs, sparse attention, memory of the caller's.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "mla/dtype.hpp"
#include "step.hpp"

namespace capi {

template <>
struct Type<mla::f16> {
  static constexpr DLDataType value{kDLFloat, 16, 1};
};

namespace {

std::vector<float> forward(Step& s, uint32_t seed, const mla_staged_step* staged = nullptr) {
  Plan plan;
  EXPECT_OK(mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, &plan));
  const mla_plan_info info = describe(plan);
  Bytes workspace(info.workspace_bytes), selection(info.selection_bytes + 64);
  mla_layer_args a = s.args(plan, workspace);
  a.selection = selection.data;
  a.selection_bytes = selection.size;
  a.staged = staged;
  Tensor<float> hidden({s.batch.tokens, 96}), out({s.batch.tokens, 96});
  hidden.random(seed);
  EXPECT_OK(mla_forward(s.stream, &a, hidden, out));
  return out.data;
}

TEST(CLayer, PathsAgreeAndCachedContextGivesTheSameRows) {
  std::vector<float> outs[2];
  for (int32_t path : {MLA_PATHS_LATENT, MLA_PATHS_EXPANDED}) {
    Step s;
    s.options.path = path;
    outs[path - 1] = forward(s, 5);
  }
  float most = 0, error = 0;
  for (size_t i = 0; i < outs[0].size(); ++i) {
    most = std::max(most, std::abs(outs[0][i]));
    error = std::max(error, std::abs(outs[0][i] - outs[1][i]));
  }
  EXPECT_GT(most, 0.01f);
  EXPECT_LT(error, 1e-4f * most);

  // The same tokens one after another: the first 39 cached, then one.
  Step s;
  s.options.path = MLA_PATHS_LATENT;
  forward(s, 5);
  Tensor<float> hidden({40, 96}), out({1, 96});
  hidden.random(5);
  s.set(1, 39);
  Plan plan;
  ASSERT_OK(mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, &plan));
  Bytes workspace(describe(plan).workspace_bytes);
  const mla_layer_args a = s.args(plan, workspace);
  int64_t shape[] = {1, 96};
  DLTensor last = *hidden;
  last.shape = shape;
  last.byte_offset = 39 * 96 * sizeof(float);
  ASSERT_OK(mla_forward(s.stream, &a, &last, out));
  for (int i = 0; i < 96; ++i) EXPECT_NEAR(out[i], outs[0][39 * 96 + i], 1e-4f * most);
}

TEST(CLayer, PlansAreNumbersAndText) {
  Step s(40, 20);
  s.options.path = MLA_PATHS_EXPANDED;
  Plan plan;
  ASSERT_OK(mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, &plan));
  const mla_plan_info info = describe(plan);
  EXPECT_EQ(info.tokens, 40);
  EXPECT_EQ(info.requests, 1);
  EXPECT_EQ(info.expanded_rows, 40);
  EXPECT_EQ(info.latent_rows, 0);
  EXPECT_EQ(info.context_chunks, 1);
  EXPECT_EQ(info.activations, MLA_F32);
  EXPECT_GT(info.workspace_bytes, 0u);
  mla_request_plan r = make<mla_request_plan>();
  EXPECT_OK(mla_plan_request(plan, 0, &r));
  EXPECT_EQ(r.path, MLA_PATH_EXPANDED);
  EXPECT_EQ(r.query_length, 40);
  EXPECT_EQ(r.context, 20);
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_plan_request(plan, 1, &r), "request is 1, the plan has 1");
  const int32_t* positions = nullptr;
  int64_t count = 0;
  EXPECT_OK(mla_plan_positions(plan, &positions, &count));
  ASSERT_EQ(count, 40);
  EXPECT_EQ(positions[39], 59);
  size_t length = 0;
  EXPECT_OK(mla_plan_describe(plan, nullptr, 0, &length));
  std::string text(length, ' ');
  EXPECT_OK(mla_plan_describe(plan, text.data(), length + 1, nullptr));
  EXPECT_NE(text.find("plan: small, 4 heads, 40 tokens"), std::string::npos) << text;
}

TEST(CLayer, RatesChooseThePath) {
  mla_cost_model usual = make<mla_cost_model>();
  ASSERT_OK(mla_cost_model_of(kCpu, &usual));
  EXPECT_GT(usual.latent_flops, 0);
  EXPECT_GT(usual.projection_flops, 0);
  EXPECT_EQ(usual.struct_size, sizeof usual);

  Step s;
  const auto latent_rows = [&](const mla_cost_model& rates) {
    s.options.rates = &rates;
    Plan plan;
    EXPECT_OK(mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, &plan));
    return describe(plan).latent_rows;
  };
  mla_cost_model of_gpu = make<mla_cost_model>();
  ASSERT_OK(mla_cost_model_of({kDLCUDA, 0}, &of_gpu));
  EXPECT_EQ(usual.row_element, 4);
  EXPECT_EQ(of_gpu.row_element, 2);
  EXPECT_EQ(usual.expanded_tiles, 0);
  EXPECT_GT(of_gpu.expanded_tiles, 0);
  EXPECT_EQ(usual.context_seconds, 0);
  EXPECT_GT(of_gpu.context_seconds, 0);
  EXPECT_GT(of_gpu.latent_flops, 100 * usual.latent_flops);

  mla_cost_model rates = usual;
  rates.latent_flops = 1e30;
  rates.expanded_flops = 1;
  EXPECT_EQ(latent_rows(rates), 40);
  rates.latent_flops = 1;
  rates.expanded_flops = 1e30;
  EXPECT_EQ(latent_rows(rates), 0);

  for (double bad : {0.0, -1.0, HUGE_VAL, std::nan("")}) {
    rates.expanded_flops = bad;
    mla_plan* plan = nullptr;
    EXPECT_FAILS(MLA_ERROR_INPUT, mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, &plan),
                 "options rates expanded_flops is");
    EXPECT_EQ(plan, nullptr);
  }
}

// A step of four tokens at most in memory for all of them: what lies behind the batch's rows stays.
TEST(CLayer, StepsOfMaximaServeBatchesWithinThem) {
  Step s(3, 20);
  s.options.path = MLA_PATHS_LATENT;
  const std::vector<float> expected = forward(s, 5);
  mla_step_maxima maxima = make<mla_step_maxima>();
  maxima.requests = 2, maxima.tokens = 6, maxima.query_len = 4, maxima.seq_len = 64;
  size_t workspace_bytes = 0, selection_bytes = 77;
  ASSERT_OK(mla_step_memory(s.stream, s.model, &s.spec, &maxima, &s.options, &workspace_bytes, &selection_bytes));
  EXPECT_EQ(selection_bytes, 0u);
  s.options.maxima = &maxima;
  Plan whole, plan;
  ASSERT_OK(mla_plan_create_maxima(s.stream, s.model, &s.spec, &s.options, &whole));
  ASSERT_OK(mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, &plan));
  const mla_plan_info of_whole = describe(whole), info = describe(plan);
  EXPECT_EQ(of_whole.tokens, 6);
  EXPECT_EQ(of_whole.batch_tokens, 0);
  EXPECT_EQ(of_whole.requests, 0);
  EXPECT_EQ(info.tokens, 6);
  EXPECT_EQ(info.batch_tokens, 3);
  EXPECT_EQ(info.requests, 1);
  EXPECT_EQ(info.workspace_bytes, of_whole.workspace_bytes);
  EXPECT_LE(info.workspace_bytes, workspace_bytes);

  Bytes workspace(workspace_bytes);
  Tensor<float> hidden({6, 96}), out({6, 96});
  Tensor<float> own({3, 96});
  own.random(5);
  std::fill(hidden.data.begin(), hidden.data.end(), std::nanf(""));
  std::copy(own.data.begin(), own.data.end(), hidden.data.begin());
  std::fill(out.data.begin(), out.data.end(), -7.0f);
  for (mla_plan* p : {static_cast<mla_plan*>(whole), static_cast<mla_plan*>(plan)}) {
    const mla_layer_args a = s.args(p, workspace);
    ASSERT_OK(mla_forward(s.stream, &a, hidden, out));
    const size_t written = p == static_cast<mla_plan*>(plan) ? expected.size() : 0;
    EXPECT_TRUE(
        std::equal(out.data.begin(), out.data.begin() + static_cast<std::ptrdiff_t>(written), expected.begin()));
    EXPECT_TRUE(std::all_of(out.data.begin() + static_cast<std::ptrdiff_t>(written), out.data.end(),
                            [](float x) { return x == -7.0f; }));
  }

  mla_plan* refused = nullptr;
  s.set(5, 20);
  EXPECT_FAILS(MLA_ERROR_BATCH, mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, &refused),
               "request 0: 5 new tokens, the step's maxima allow 4");
  s.options.maxima = nullptr;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_plan_create_maxima(s.stream, s.model, &s.spec, &s.options, &refused),
               "the options have no maxima");
  maxima.seq_len = 3;
  EXPECT_FAILS(MLA_ERROR_SHAPE,
               mla_step_memory(s.stream, s.model, &s.spec, &maxima, &s.options, &workspace_bytes, nullptr),
               "seq_len is 3, below query_len 4");
  EXPECT_EQ(refused, nullptr);
}

TEST(CLayer, BatchesThatReachBeyondMemoryOrIntoOthersRowsAreRefused) {
  Step s;
  mla_plan* plan = nullptr;
  const auto create = [&] { return mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, &plan); };
  for (int64_t stride : {int64_t{1} << 62, (int64_t{1} << 59) + 1}) {
    s.batch.block_table_stride = stride;
    EXPECT_FAILS(MLA_ERROR_SHAPE, create(), "batch block_table_stride is");
  }
  s.batch.block_table_stride = 0;
  s.slots[7] = s.slots[6];
  EXPECT_FAILS(MLA_ERROR_BATCH, create(), "request 0: slot_mapping[7] is");
  EXPECT_EQ(plan, nullptr);
}

TEST(CLayer, PromptsAndTheTokensBehindThem) {
  Step s;
  mla_plan* refused = nullptr;
  s.options.path = MLA_PATHS_BY_PROMPT;
  s.options.split = MLA_SPLIT_BATCH_INVARIANT;
  const auto create = [&](mla_plan** plan) {
    return mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, plan);
  };
  EXPECT_FAILS(MLA_ERROR_BATCH, create(&refused), "path policy by_prompt needs prompt_lens");
  std::vector<int32_t> prompts(s.batch.seq_lens, s.batch.seq_lens + s.batch.requests);
  s.batch.prompt_lens = prompts.data();
  Plan all, none;
  ASSERT_OK(create(&all));
  EXPECT_EQ(describe(all).latent_rows, 0);
  EXPECT_FALSE(forward(s, 5).empty());
  std::fill(prompts.begin(), prompts.end(), 0);
  ASSERT_OK(create(&none));
  EXPECT_EQ(describe(none).latent_rows, s.batch.tokens);
}

TEST(CLayer, APlanNeedsNothingOfWhatItWasMadeOf) {
  Step s;
  const std::vector<float> expected = forward(s, 5);
  Plan plan;
  ASSERT_OK(mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, &plan));
  std::fill(s.slots.begin(), s.slots.end(), 1 << 30);
  std::fill(s.table.begin(), s.table.end(), -9);
  std::fill(s.starts.begin(), s.starts.end(), -9);
  Bytes workspace(describe(plan).workspace_bytes);
  const mla_layer_args a = s.args(plan, workspace);
  Tensor<float> hidden({40, 96}), out({40, 96});
  hidden.random(5);
  ASSERT_OK(mla_forward(s.stream, &a, hidden, out));
  EXPECT_EQ(out.data, expected);
}

TEST(CLayer, ACacheInTheCallersMemory) {
  Step s;
  const std::vector<float> expected = forward(s, 5);
  size_t bytes = 0;
  ASSERT_OK(mla_cache_page_bytes(&s.spec, &bytes));
  const size_t stride = bytes + 32;
  Bytes memory(kPages * stride);
  std::memset(memory.data, 0xff, memory.size);
  Cache cache;
  ASSERT_OK(mla_cache_create_in(&s.spec, kPages, memory.data, stride, kCpu, &cache));
  Plan plan;
  ASSERT_OK(mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, &plan));
  Bytes workspace(describe(plan).workspace_bytes);
  mla_layer_args a = s.args(plan, workspace);
  a.cache = cache;
  Tensor<float> hidden({40, 96}), out({40, 96});
  hidden.random(5);
  ASSERT_OK(mla_forward(s.stream, &a, hidden, out));
  EXPECT_EQ(out.data, expected);
  // Written are the request's pages: neither page 0 nor a gap.
  const auto* byte = static_cast<const unsigned char*>(memory.data);
  for (size_t i = 0; i < stride; ++i) ASSERT_EQ(byte[i], 0xff);
  for (size_t i = bytes; i < stride; ++i) ASSERT_EQ(byte[stride + i], 0xff);
  EXPECT_NE(byte[stride], 0xff);
}

TEST(CLayer, QuantisedOutputIsTheAttentionFormQuantised) {
  Step s;
  mla_output_spec fp8 = mla_output_spec_default();
  fp8.kind = MLA_OUTPUT_FP8;
  fp8.scale = 0.01f;
  Tensor<float> q({40, kHeads, kQueryKey}), kv_c({40, kLatent}), k_pe({40, kRope}), out({40, kHeads, kValue});
  q.random(1);
  kv_c.random(2);
  k_pe.random(3);
  Tensor<uint8_t> codes({40, kHeads * kValue}), expected({40, kHeads, kValue});
  for (bool quantised : {false, true}) {
    s.options.output = quantised ? &fp8 : nullptr;
    Plan plan;
    ASSERT_OK(mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, &plan));
    Bytes workspace(describe(plan).workspace_bytes);
    const mla_layer_args a = s.args(plan, workspace);
    mla_quantized y = make<mla_quantized>();
    y.spec = &fp8;
    y.width = kHeads * kValue;
    y.codes = codes;
    if (quantised) {
      ASSERT_OK(mla_attend_quantized(s.stream, &a, q, kv_c, k_pe, &y));
      EXPECT_FAILS(MLA_ERROR_SHAPE, mla_attend(s.stream, &a, q, kv_c, k_pe, out), "plan was made for fp8");
    } else {
      ASSERT_OK(mla_attend(s.stream, &a, q, kv_c, k_pe, out));
      EXPECT_EQ(MLA_ERROR_SHAPE, mla_attend_quantized(s.stream, &a, q, kv_c, k_pe, &y));
    }
  }
  mla_cast_args cast = make<mla_cast_args>();
  cast.x = out;
  cast.y = expected;
  cast.scale = fp8.scale;
  ASSERT_OK(mla_cast(s.stream, &cast));
  EXPECT_EQ(codes.data, expected.data);
  EXPECT_TRUE(std::any_of(codes.data.begin(), codes.data.end(), [](uint8_t c) { return (c & 0x7f) > 8; }));
}

TEST(CLayer, SparseStepsSelectAndTakeSelections) {
  Step s(40, 0);
  const std::vector<float> dense = forward(s, 5);
  Step sparse(40, 0);
  sparse.options.sparse = MLA_SPARSE_DIRECT;
  const std::vector<float> selected = forward(sparse, 5);
  // The first 16 tokens see no more than topk keys; later ones leave some out.
  for (int i = 0; i < 16 * 96; ++i) ASSERT_NEAR(dense[i], selected[i], 1e-3f);
  EXPECT_NE(dense, selected);

  // A choice of the caller's own, in the attention form: every row its own position alone, so that its values are its
  // own row's.
  Plan plan;
  ASSERT_OK(mla_plan_create(sparse.stream, sparse.model, &sparse.spec, kPages, &sparse.batch, &sparse.options, &plan));
  const mla_plan_info info = describe(plan);
  EXPECT_EQ(info.topk, 16);
  EXPECT_EQ(info.sparse_rows, 40);
  EXPECT_GT(info.selection_bytes, 0u);
  Bytes workspace(info.workspace_bytes), selection(info.selection_bytes);
  mla_layer_args a = sparse.args(plan, workspace);
  Tensor<int32_t> positions({40, 16}, -1);
  for (int t = 0; t < 40; ++t) positions[t * 16 + 3] = t;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_select(sparse.stream, &a, positions), "selection");
  a.selection = selection.data;
  a.selection_bytes = selection.size;
  Tensor<float> q({40, kHeads, kQueryKey}), kv_c({40, kLatent}), k_pe({40, kRope}), one({40, kHeads, kValue}),
      other({40, kHeads, kValue});
  EXPECT_FAILS(MLA_ERROR_BATCH, mla_attend(sparse.stream, &a, q, kv_c, k_pe, one), "the selection holds no choice");
  ASSERT_OK(mla_select(sparse.stream, &a, positions));
  q.random(1);
  kv_c.random(2);
  k_pe.random(3);
  ASSERT_OK(mla_attend(sparse.stream, &a, q, kv_c, k_pe, one));
  q.random(9);  // with a single key the softmax is 1 whatever the query
  ASSERT_OK(mla_attend(sparse.stream, &a, q, kv_c, k_pe, other));
  for (size_t i = 0; i < one.data.size(); ++i) ASSERT_NEAR(one[i], other[i], 1e-5f);

  // Planned for this form alone: less is reserved, and the block form is refused.
  sparse.options.form = MLA_FORM_ATTENTION;
  Plan lean;
  ASSERT_OK(mla_plan_create(sparse.stream, sparse.model, &sparse.spec, kPages, &sparse.batch, &sparse.options, &lean));
  EXPECT_LT(describe(lean).workspace_bytes, info.workspace_bytes);
  a.plan = lean;
  q.random(1);
  ASSERT_OK(mla_attend(sparse.stream, &a, q, kv_c, k_pe, other));  // the same step: the choice stands
  for (size_t i = 0; i < one.data.size(); ++i) ASSERT_NEAR(one[i], other[i], 1e-5f);
  Tensor<float> hidden({40, 96});
  EXPECT_FAILS(MLA_ERROR_UNSUPPORTED, mla_forward(sparse.stream, &a, hidden, hidden), "attention form alone");
  sparse.options.form = 2;
  mla_plan* none = nullptr;
  EXPECT_FAILS(
      MLA_ERROR_INPUT,
      mla_plan_create(sparse.stream, sparse.model, &sparse.spec, kPages, &sparse.batch, &sparse.options, &none),
      "options form is 2, allowed 0 to 1");
}

TEST(CLayer, PrefillsOfCodes) {
  Step s(40, 0);
  s.options.path = MLA_PATHS_EXPANDED;
  Tensor<float> hidden({40, 96}), plain({40, 96}, -7.0f), codes({40, 96}, -7.0f);
  hidden.random(4);
  const auto forward = [&](int32_t prefill, Tensor<float>& out) {
    s.options.prefill = prefill;
    Plan plan;
    ASSERT_OK(mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, &plan));
    Bytes workspace(describe(plan).workspace_bytes);
    mla_layer_args a = s.args(plan, workspace);
    ASSERT_OK(mla_forward(s.stream, &a, hidden, out));
  };
  forward(MLA_PREFILL_COMPUTE, plain);
  forward(MLA_PREFILL_FP8, codes);
  double error = 0, norm = 0;
  for (size_t i = 0; i < plain.data.size(); ++i) {
    error += (codes[i] - plain[i]) * (codes[i] - plain[i]);
    norm += plain[i] * plain[i];
  }
  EXPECT_LT(std::sqrt(error / norm), 0.08);  // 2^-4 at most of a code, three of them on the way
  EXPECT_GT(std::sqrt(error / norm), 0.005);
  s.options.prefill = 3;
  mla_plan* none = nullptr;
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, &none),
               "options prefill is 3, allowed 0 to 2");
  s.options.prefill = MLA_PREFILL_COMPUTE, s.options.decode = 2;
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, &none),
               "options decode is 2, allowed 0 to 1");
  s.options.decode = MLA_DECODE_FP8;
  EXPECT_FAILS(MLA_ERROR_UNSUPPORTED, mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, &none),
               "plan: decode fp8 is of models without an indexer");
}

TEST(CLayer, F16Activations) {
  Step s(40, 0);
  Tensor<float> hidden({40, 96}), plain({40, 96}, -7.0f);
  hidden.random(4);
  Tensor<mla::f16> narrow({40, 96}), out({40, 96});
  for (size_t i = 0; i < hidden.data.size(); ++i) {
    narrow[i] = mla::to_f16(hidden[i]);
    hidden[i] = mla::to_float(narrow[i]);
  }
  const auto forward = [&](int32_t dtype, const DLTensor* in, const DLTensor* to) {
    s.options.activation_dtype = dtype;
    Plan plan;
    EXPECT_OK(mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, &plan));
    EXPECT_EQ(describe(plan).activations, dtype == MLA_ACTIVATION_DTYPE_F16 ? MLA_F16 : MLA_F32);
    Bytes workspace(describe(plan).workspace_bytes);
    mla_layer_args a = s.args(plan, workspace);
    return mla_forward(s.stream, &a, in, to);
  };
  EXPECT_OK(forward(MLA_ACTIVATION_DTYPE_NATIVE, hidden, plain));
  EXPECT_OK(forward(MLA_ACTIVATION_DTYPE_F16, narrow, out));
  for (size_t i = 0; i < out.data.size(); ++i) EXPECT_EQ(out[i].bits, mla::to_f16(plain[i]).bits);
  EXPECT_FAILS(MLA_ERROR_SHAPE, forward(MLA_ACTIVATION_DTYPE_NATIVE, narrow, plain),
               "hidden is f16, plan was made for activations of f32 or bf16");
  s.options.activation_dtype = 4;
  mla_plan* none = nullptr;
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, &none),
               "options activation_dtype is 4, allowed 0 to 3");
}

// Inputs and output of the attention form over 40 tokens, called with a plan of its own.
struct Attention {
  Tensor<float> q{{40, kHeads, kQueryKey}}, kv_c{{40, kLatent}}, k_pe{{40, kRope}}, out{{40, kHeads, kValue}, -7.0f};
  Attention() { q.random(1), kv_c.random(2), k_pe.random(3); }
};

TEST(CLayer, AttentionOverRowsThatAreThereOrWithoutACache) {
  Step s(40, 0);
  s.options.form = MLA_FORM_ATTENTION;
  s.options.path = MLA_PATHS_LATENT;
  Attention appended, read, alone, expanded;
  Plan plans[4];
  const auto call = [&](int which, Attention& a, const DLTensor* kv_c, const DLTensor* k_pe, bool cached) {
    EXPECT_OK(mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, &plans[which]));
    Bytes workspace(describe(plans[which]).workspace_bytes);
    mla_layer_args args = s.args(plans[which], workspace);
    if (!cached) args.cache = nullptr;
    EXPECT_OK(mla_attend(s.stream, &args, a.q, kv_c, k_pe, a.out));
  };
  call(0, appended, appended.kv_c, appended.k_pe, true);
  s.options.cache_use = MLA_CACHE_USE_READ;
  call(1, read, nullptr, nullptr, true);
  EXPECT_EQ(read.out.data, appended.out.data);

  s.options.cache_use = MLA_CACHE_USE_APPEND;
  s.options.path = MLA_PATHS_EXPANDED;
  call(2, expanded, expanded.kv_c, expanded.k_pe, true);
  s.options.cache_use = MLA_CACHE_USE_NONE;
  s.batch.slot_mapping = nullptr;
  s.batch.block_table = nullptr;
  s.batch.block_table_pages = 0;
  call(3, alone, alone.kv_c, alone.k_pe, false);
  EXPECT_EQ(alone.out.data, expanded.out.data);

  // Rows and a cache that a plan does need are missed.
  Bytes workspace(describe(plans[2]).workspace_bytes);
  mla_layer_args args = s.args(plans[2], workspace);
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_attend(s.stream, &args, read.q, nullptr, nullptr, read.out), "kv_c is missing");
  args.cache = nullptr;
  EXPECT_FAILS(MLA_ERROR_HANDLE, mla_attend(s.stream, &args, read.q, read.kv_c, read.k_pe, read.out), "cache");
  mla_plan* none = nullptr;
  s.options.form = MLA_FORM_BLOCK;
  EXPECT_FAILS(MLA_ERROR_UNSUPPORTED, mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, &none),
               "cache_use none");
  s.options.cache_use = 3;
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, &none),
               "options cache_use is 3, allowed 0 to 2");
}

TEST(CLayer, DummyStepsWriteZeros) {
  Step s(40, 0);
  s.options.dummy = 1;
  s.batch.slot_mapping = nullptr;
  s.batch.block_table = nullptr;
  s.batch.block_table_pages = 0;
  Plan plan;
  ASSERT_OK(mla_plan_create(s.stream, s.model, &s.spec, 0, &s.batch, &s.options, &plan));
  Bytes workspace(describe(plan).workspace_bytes);
  mla_layer_args args = s.args(plan, workspace);
  args.cache = nullptr;
  args.index_cache = nullptr;
  args.index_rotary = nullptr;
  Tensor<float> hidden({43, 96}, -7.0f), heads({43, kHeads, kValue}, -7.0f);
  ASSERT_OK(mla_forward(s.stream, &args, nullptr, hidden));
  ASSERT_OK(mla_attend(s.stream, &args, nullptr, nullptr, nullptr, heads));
  for (size_t i = 0; i < hidden.data.size(); ++i) ASSERT_EQ(hidden[i], i < 40 * 96 ? 0.0f : -7.0f) << i;
  for (size_t i = 0; i < heads.data.size(); ++i) ASSERT_EQ(heads[i], i < 40 * kHeads * kValue ? 0.0f : -7.0f) << i;
  s.batch.tokens = 41;
  mla_plan* none = nullptr;
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_plan_create(s.stream, s.model, &s.spec, 0, &s.batch, &s.options, &none),
               "batch tokens is 41, query_start_loc ends at 40");
  s.options.dummy = 2;
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_plan_create(s.stream, s.model, &s.spec, 0, &s.batch, &s.options, &none),
               "options dummy is 2");
}

TEST(CLayer, ProfilesCountOps) {
  Step s;
  Profile profile;
  ASSERT_OK(mla_profile_create(&profile));
  Plan plan;
  ASSERT_OK(mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, &plan));
  Bytes workspace(describe(plan).workspace_bytes);
  mla_layer_args a = s.args(plan, workspace);
  a.profile = profile;
  Tensor<float> hidden({40, 96}), out({40, 96});
  ASSERT_OK(mla_forward(s.stream, &a, hidden, out));
  int64_t rows = 0;
  ASSERT_OK(mla_profile_count(profile, &rows));
  ASSERT_GT(rows, 4);
  bool found = false;
  for (int64_t i = 0; i < rows; ++i) {
    mla_profile_row row = make<mla_profile_row>();
    ASSERT_OK(mla_profile_get(profile, i, &row));
    if (std::string(row.op) == "output") found = row.calls == 1 && row.flops > 0 && row.seconds > 0;
  }
  EXPECT_TRUE(found);
  mla_profile_row row = make<mla_profile_row>();
  EXPECT_EQ(MLA_ERROR_INPUT, mla_profile_get(profile, rows, &row));
  ASSERT_OK(mla_profile_clear(profile));
  ASSERT_OK(mla_profile_count(profile, &rows));
  EXPECT_EQ(rows, 0);
}

TEST(CLayer, StagingDoesNothingOnTheCpu) {
  Step s;
  mla_staged_step* staged = nullptr;
  ASSERT_OK(mla_staged_step_create(s.stream, &staged));
  {
    Plan plan;
    ASSERT_OK(mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, &plan));
    EXPECT_OK(mla_staged_step_stage(staged, plan));
  }
  EXPECT_EQ(MLA_ERROR_HANDLE, mla_staged_step_stage(staged, nullptr));
  const std::vector<float> plain = forward(s, 5);
  EXPECT_EQ(forward(s, 5, staged), plain);
  Step other;
  Plan plan;
  ASSERT_OK(mla_plan_create(other.stream, other.model, &other.spec, kPages, &other.batch, &other.options, &plan));
  Bytes workspace(describe(plan).workspace_bytes);
  mla_layer_args a = other.args(plan, workspace);
  a.staged = staged;
  Tensor<float> hidden({other.batch.tokens, 96}), out({other.batch.tokens, 96});
  EXPECT_FAILS(MLA_ERROR_HANDLE, mla_forward(other.stream, &a, hidden, out), "staged is of another stream");
  EXPECT_OK(mla_staged_step_destroy(staged));
  EXPECT_FAILS(MLA_ERROR_HANDLE, mla_forward(other.stream, &a, hidden, out), "staged is no handle");
  EXPECT_EQ(MLA_ERROR_HANDLE, mla_staged_step_destroy(staged));
}

TEST(CLayer, WhatDoesNotFitIsRefused) {
  Step s;
  mla_plan* none = nullptr;
  s.lengths[0] = 39;
  EXPECT_FAILS(MLA_ERROR_BATCH, mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, nullptr, &none),
               "seq_len is 39");
  s.lengths[0] = 40;
  s.batch.block_table = nullptr;
  EXPECT_FAILS(MLA_ERROR_HANDLE, mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, nullptr, &none),
               "block_table");
  s.batch.block_table = s.table.data();
  s.batch.block_table_stride = 3;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, nullptr, &none),
               "block_table_stride is 3");
  s.batch.block_table_stride = 0;
  s.batch.requests = -1;
  EXPECT_EQ(MLA_ERROR_INPUT, mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, nullptr, &none));
  s.batch.requests = 1;
  s.options.compute = MLA_F16;
  EXPECT_NE(MLA_OK, mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, &none));
  s.options.compute = MLA_F32;

  Plan plan;
  ASSERT_OK(mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, &plan));
  Bytes workspace(describe(plan).workspace_bytes);
  const mla_layer_args good = s.args(plan, workspace);
  Tensor<float> hidden({40, 96}), out({40, 96}), narrow({40, 95}), few({39, 96});
  mla_layer_args a = good;
  a.workspace_bytes -= 64;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_forward(s.stream, &a, hidden, out), "workspace is");
  a = good;
  a.workspace = static_cast<char*>(a.workspace) + 16;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_forward(s.stream, &a, hidden, out), "16 past a multiple of 64");
  a = good;
  a.weights = nullptr;
  EXPECT_FAILS(MLA_ERROR_HANDLE, mla_forward(s.stream, &a, hidden, out), "weights is NULL");
  a = good;
  a.rotary = reinterpret_cast<mla_rotary*>(static_cast<mla_plan*>(plan));
  EXPECT_FAILS(MLA_ERROR_HANDLE, mla_forward(s.stream, &a, hidden, out), "rotary is a plan, needed: rotary");
  EXPECT_EQ(MLA_ERROR_SHAPE, mla_forward(s.stream, &good, narrow, out));
  EXPECT_EQ(MLA_ERROR_SHAPE, mla_forward(s.stream, &good, hidden, few));
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_forward(s.stream, &good, nullptr, out), "hidden is missing");
  EXPECT_EQ(MLA_ERROR_HANDLE, mla_forward(s.stream, nullptr, hidden, out));
  EXPECT_EQ(MLA_ERROR_HANDLE, mla_forward(nullptr, &good, hidden, out));
  EXPECT_OK(mla_forward(s.stream, &good, hidden, out));
}

TEST(CLayer, WeightsOfTensors) {
  Model model;
  make_model(&model);
  Tensor<float> query({4 * 48, 48}), query_down({48, 96}), query_norm({48}, 1.0f), kv_down({144, 96}),
      kv_norm({128}, 1.0f), kv_up({4 * 96, 128}), output({96, 256});
  query.random(1);
  query_down.random(2);
  kv_down.random(3);
  kv_up.random(4);
  output.random(5);
  mla_layer_tensors t = make<mla_layer_tensors>();
  t.query.values = query;
  t.query_down.values = query_down;
  t.query_norm.values = query_norm;
  t.kv_down.values = kv_down;
  t.kv_norm.values = kv_norm;
  t.kv_up.values = kv_up;
  Weights weights;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_weights_create(model, &t, nullptr, kCpu, &weights), "output");
  t.output.values = output;
  ASSERT_OK(mla_weights_create(model, &t, nullptr, kCpu, &weights));
  size_t bytes = 0;
  EXPECT_OK(mla_weights_bytes(weights, &bytes));
  EXPECT_GT(bytes, 4u * (192 * 48 + 48 * 96 + 144 * 96 + 384 * 128 + 96 * 256));

  // Scales of e4m3 prefills: five arrays of a number a head.
  Tensor<float> one({1}, 0.5f), heads({4}, 0.25f), three({3}, 1.0f);
  t.k_scales = one;
  t.v_scales = heads;
  Weights scaled;
  ASSERT_OK(mla_weights_create(model, &t, nullptr, kCpu, &scaled));
  size_t more = 0;
  EXPECT_OK(mla_weights_bytes(scaled, &more));
  EXPECT_EQ(more - bytes, (4 * 4 + 1) * sizeof(float));
  t.v_scales = three;
  mla_weights* none = nullptr;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_weights_create(model, &t, nullptr, kCpu, &none), "v scales have 3 elements");
  one.data[0] = -1;
  t.v_scales = nullptr;
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_weights_create(model, &t, nullptr, kCpu, &none), "k scale is -1");
  t.k_scales = nullptr;

  // fp8 codes with block scales.
  Tensor<uint8_t> codes({96, 256}, 0x38);
  Tensor<float> scales({1, 2}, 0.5f);
  t.output = {codes, scales, 128, 128};
  mla_weights* other = nullptr;
  EXPECT_OK(mla_weights_create(model, &t, nullptr, kCpu, &other));
  EXPECT_OK(mla_weights_destroy(other));
  t.output.block_rows = 64;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_weights_create(model, &t, nullptr, kCpu, &other), "need [2, 2]");
  t.output.block_rows = 0;
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_weights_create(model, &t, nullptr, kCpu, &other), "block_rows is 0");
  mla_prepare_options options = mla_prepare_options_default();
  options.products = MLA_WEIGHTS_FP8;
  EXPECT_OK(mla_weights_create_random(model, 0, 1, MLA_F32, &options, kCpu, &other));
  size_t fp8_bytes = 0;
  EXPECT_OK(mla_weights_bytes(other, &fp8_bytes));
  EXPECT_LT(fp8_bytes, bytes);
  EXPECT_OK(mla_weights_destroy(other));
  options.products = MLA_WEIGHTS_MXFP4;
  EXPECT_FAILS(MLA_ERROR_UNSUPPORTED, mla_weights_create_random(model, 0, 1, MLA_F32, &options, kCpu, &other),
               "products in mxfp4");
  options.products = MLA_WEIGHTS_PLAIN;
  options.dtype = MLA_F16;
  EXPECT_EQ(MLA_ERROR_UNSUPPORTED, mla_weights_create_random(model, 0, 1, MLA_F32, &options, kCpu, &other));
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_weights_create_random(model, 2, 1, MLA_F32, nullptr, kCpu, &other),
               "layer is 2, allowed 0 to 1");
  EXPECT_EQ(other, nullptr);
}

// A layer of a checkpoint is the same layer as that of its tensors.
TEST(CLayer, WeightsOfACheckpoint) {
  Tensor<float> query({2 * 24, 32}), kv_down({40, 32}), kv_norm({32}, 1.0f), kv_up({2 * 32, 32}), output({32, 32});
  query.random(1);
  kv_down.random(2);
  kv_up.random(4);
  output.random(5);
  const std::filesystem::path folder = std::filesystem::path(testing::TempDir()) / "mla_capi_checkpoint";
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "config.json")
      << R"({"model_type":"deepseek_v3","hidden_size":32,"num_hidden_layers":1,"num_attention_heads":2,)"
      << R"("q_lora_rank":null,"kv_lora_rank":32,"qk_nope_head_dim":16,"qk_rope_head_dim":8,"v_head_dim":16,)"
      << R"("rms_norm_eps":1e-6,"rope_theta":10000})";
  std::string header = "{", values;
  const auto add = [&](const char* name, Tensor<float>& t) {
    std::string shape;
    for (int32_t i = 0; i < (*t).ndim; ++i) shape += (i ? "," : "") + std::to_string((*t).shape[i]);
    const size_t begin = values.size();
    values.append(reinterpret_cast<const char*>(t.data.data()), t.data.size() * sizeof(float));
    header += std::string(begin ? "," : "") + "\"model.layers.0.self_attn." + name +
              ".weight\":{\"dtype\":\"F32\",\"shape\":[" + shape + "],\"data_offsets\":[" + std::to_string(begin) +
              "," + std::to_string(values.size()) + "]}";
  };
  add("q_proj", query);
  add("kv_a_proj_with_mqa", kv_down);
  add("kv_a_layernorm", kv_norm);
  add("kv_b_proj", kv_up);
  add("o_proj", output);
  const float scales[] = {0.25f, 3.0f, 4.0f};  // of keys, and of the values of two heads
  const auto add_scale = [&](const char* name, const float* x, int n) {
    const size_t begin = values.size();
    values.append(reinterpret_cast<const char*>(x), static_cast<size_t>(n) * sizeof(float));
    header += std::string(",\"model.layers.0.self_attn.") + name + "\":{\"dtype\":\"F32\",\"shape\":[" +
              std::to_string(n) + "],\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(values.size()) +
              "]}";
  };
  add_scale("k_proj.k_scale", scales, 1);
  add_scale("v_proj.v_scale", scales + 1, 2);
  header += "}";
  const uint64_t length = header.size();
  std::ofstream(folder / "model.safetensors", std::ios::binary)
      << std::string(reinterpret_cast<const char*>(&length), sizeof length) << header << values;

  Weights weights[2];
  Model model;
  {
    Handle<mla_checkpoint, mla_checkpoint_destroy> checkpoint;
    ASSERT_OK(mla_checkpoint_open(folder.c_str(), &checkpoint));
    ASSERT_OK(mla_checkpoint_model(checkpoint, &model));
    ASSERT_OK(mla_weights_create_checkpoint(checkpoint, 0, nullptr, kCpu, &weights[0]));
    mla_weights* none = nullptr;
    EXPECT_FAILS(MLA_ERROR_INPUT, mla_weights_create_checkpoint(checkpoint, 1, nullptr, kCpu, &none), "layer is 1");
    EXPECT_EQ(none, nullptr);

    // A part is read by itself: query, kv_up and output have two heads, the rest is shared.
    uint64_t before = 0, whole = 0, part = 0;
    ASSERT_OK(mla_checkpoint_bytes_read(checkpoint, &before));
    Weights all, half;
    ASSERT_OK(mla_weights_create_checkpoint(checkpoint, 0, nullptr, kCpu, &all));
    ASSERT_OK(mla_checkpoint_bytes_read(checkpoint, &whole));
    mla_prepare_options second = make<mla_prepare_options>();
    second.head_begin = 1, second.head_count = 1;
    ASSERT_OK(mla_weights_create_checkpoint(checkpoint, 0, &second, kCpu, &half));
    ASSERT_OK(mla_checkpoint_bytes_read(checkpoint, &part));
    part -= whole, whole -= before;
    EXPECT_EQ(whole - part, (query.data.size() + kv_up.data.size() + output.data.size()) / 2 * sizeof(float));
    second.head_begin = 2;
    EXPECT_FAILS(MLA_ERROR_INPUT, mla_weights_create_checkpoint(checkpoint, 0, &second, kCpu, &none), "heads");
    EXPECT_FAILS(MLA_ERROR_HANDLE, mla_checkpoint_bytes_read(checkpoint, nullptr), "bytes is NULL");

    float found[3] = {-1, -1, -1};
    int64_t count = -1;
    ASSERT_OK(mla_checkpoint_scales(checkpoint, 0, MLA_SCALES_Q, found, 3, &count));
    EXPECT_EQ(count, 0);
    ASSERT_OK(mla_checkpoint_scales(checkpoint, 0, MLA_SCALES_K, found, 3, &count));
    EXPECT_EQ(count, 1);
    EXPECT_EQ(found[0], 0.25f);
    ASSERT_OK(mla_checkpoint_scales(checkpoint, 0, MLA_SCALES_V, found, 1, &count));
    EXPECT_EQ(count, 2);
    EXPECT_EQ(found[0], 3.0f);
    EXPECT_EQ(found[1], -1.0f);
    ASSERT_OK(mla_checkpoint_scales(checkpoint, 0, MLA_SCALES_V, nullptr, 0, &count));
    EXPECT_EQ(count, 2);
    EXPECT_FAILS(MLA_ERROR_INPUT, mla_checkpoint_scales(checkpoint, 1, MLA_SCALES_V, found, 3, &count), "layer is 1");
    EXPECT_FAILS(MLA_ERROR_INPUT, mla_checkpoint_scales(checkpoint, 0, 3, found, 3, &count), "which is 3");
    EXPECT_FAILS(MLA_ERROR_HANDLE, mla_checkpoint_scales(checkpoint, 0, 0, nullptr, 3, &count), "scales is NULL");
    EXPECT_FAILS(MLA_ERROR_HANDLE, mla_checkpoint_scales(checkpoint, 0, 0, found, 3, nullptr), "count is NULL");
  }
  std::filesystem::remove_all(folder);
  mla_layer_tensors t = make<mla_layer_tensors>();
  t.query.values = query;
  t.kv_down.values = kv_down;
  t.kv_norm.values = kv_norm;
  t.kv_up.values = kv_up;
  t.output.values = output;
  ASSERT_OK(mla_weights_create(model, &t, nullptr, kCpu, &weights[1]));

  Stream stream;
  Rotary rotary;
  ASSERT_OK(mla_rotary_create(model, 0, 16, kCpu, &rotary));
  mla_cache_spec spec = mla_cache_spec_default();
  ASSERT_OK(mla_cache_spec_of(model, MLA_CACHE_F32, 16, &spec));
  Cache cache;
  ASSERT_OK(mla_cache_create(&spec, 1, kCpu, &cache));
  const int32_t starts[] = {0, 3}, lengths[] = {3}, table[] = {0}, slots[] = {0, 1, 2};
  mla_batch batch = make<mla_batch>();
  batch.requests = 1;
  batch.tokens = 3;
  batch.query_start_loc = starts;
  batch.seq_lens = lengths;
  batch.block_table = table;
  batch.block_table_pages = 1;
  batch.slot_mapping = slots;
  Plan plan;
  ASSERT_OK(mla_plan_create(stream, model, &spec, 1, &batch, nullptr, &plan));
  Bytes workspace(describe(plan).workspace_bytes);
  Tensor<float> hidden({3, 32}), outs[2] = {Tensor<float>({3, 32}), Tensor<float>({3, 32})};
  hidden.random(7);
  for (int i = 0; i < 2; ++i) {
    mla_layer_args a = make<mla_layer_args>();
    a.plan = plan;
    a.weights = weights[i];
    a.rotary = rotary;
    a.cache = cache;
    a.workspace = workspace.data;
    a.workspace_bytes = workspace.size;
    ASSERT_OK(mla_forward(stream, &a, hidden, outs[i]));
  }
  EXPECT_NE(outs[0][0], 0.0f);
  EXPECT_EQ(outs[0].data, outs[1].data);
}

}  // namespace
}  // namespace capi
