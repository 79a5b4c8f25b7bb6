// What the attention form has to do with the cache: rows that are there already, and steps without a cache.
#include <gtest/gtest.h>

#include <cstring>

#include "backend/run.hpp"
#include "layer/kernels.hpp"
#include "layer/random_layer.hpp"
#include "layer/reference.hpp"
#include "support/block_queries.hpp"
#include "support/message.hpp"
#include "support/quantised.hpp"

namespace mla::test {
namespace {

// Inputs of the attention form.
struct Inputs {
  std::vector<float> q, kv_c, k_pe;
};
Inputs random_inputs(const ModelConfig& m, int64_t tokens) {
  return {random_values(tokens * m.heads * m.query_key(), 3), random_values(tokens * m.latent, 4),
          random_values(tokens * m.rope, 5)};
}

struct Called {
  std::vector<float> heads;
  std::vector<std::byte> codes, scales;
};
// attend(), into what the plan's output says; rows that are not given are views of nothing.
Called attend(Layer& l, const LayerContext& c, const Inputs& in) {
  const ModelConfig& m = l.model;
  const int64_t t = c.plan.tokens, width = m.heads * m.value;
  const auto rows = [&](const std::vector<float>& x) { return x.empty() ? 0 : t; };
  const View<const float, Token, Head, QueryKey> q(in.q.data(), {t, m.heads, m.query_key()});
  const View<const float, Token, Latent> kv_c(in.kv_c.empty() ? nullptr : in.kv_c.data(), {rows(in.kv_c), m.latent});
  const View<const float, Token, Rope> k_pe(in.k_pe.empty() ? nullptr : in.k_pe.data(), {rows(in.k_pe), m.rope});
  choose(l, c, t);
  Called called;
  if (c.plan.options.output.kind == OutputKind::none) {
    called.heads.resize(static_cast<size_t>(t * width));
    attend(l.stream, c, q, kv_c, k_pe, View<float, Token, Head, Value>(called.heads.data(), {t, m.heads, m.value}));
    l.stream.synchronize();
    return called;
  }
  QuantisedMemory memory(c.plan.options.output, t, width);
  attend(l.stream, c, q, kv_c, k_pe, memory.view());
  l.stream.synchronize();
  called.codes = memory.codes;
  called.scales = memory.scales;
  return called;
}

Called planned_attend(Layer& l, const Batch& b, const PlanOptions& o, const Inputs& in) {
  const Plan p = l.plan_of(b, o);
  const Buffer workspace = filled(p.workspace_bytes, std::byte{0xff}),
               selection = filled(p.selection_bytes, std::byte{0xff});
  LayerContext c = l.context(p, b, workspace, selection);
  if (o.cache_use == CacheUse::none) c.cache = {};
  return attend(l, c, in);
}

TEST(CacheUse, RowsThatAreThereAreAttendedToWithTheSameBits) {
  for (const Kind& k : attention_kinds()) {
    for (const char* output : {"none", "fp8_128"}) {
      Layer l = layer_of(k);
      const Batch b = requests().batch();
      PlanOptions o = k.plan;
      o.form = LayerForm::attention;
      o.output = parse_output_spec(output);
      Inputs in = random_inputs(l.model, requests().tokens());
      const Called appended = planned_attend(l, b, o, in);
      const auto bytes = l.cache_bytes();
      o.cache_use = CacheUse::read;
      const Plan p = l.plan_of(b, o);
      for (const Step& s : p.steps) EXPECT_FALSE(std::holds_alternative<steps::Append>(s.work)) << k.name;
      EXPECT_NE(p.describe().find("the step's rows are in the cache"), std::string::npos);
      if (!p.reads_new_rows()) in.kv_c.clear(), in.k_pe.clear();
      EXPECT_EQ(p.reads_new_rows(), !p.expanded_tokens.empty());
      const Called read = planned_attend(l, b, o, in);
      EXPECT_TRUE(read.heads == appended.heads && read.codes == appended.codes && read.scales == appended.scales)
          << k.name << " " << output;
      EXPECT_TRUE(l.cache_bytes() == bytes) << k.name;
    }
  }
}

// Rows that the cache has are what is attended to, not those that would have been appended.
TEST(CacheUse, TheCallersRowsAreNotWritten) {
  Layer l(small_deepseek());
  const Batch b = requests().batch();
  const Inputs in = random_inputs(l.model, requests().tokens());
  const PlanOptions o{.form = LayerForm::attention, .cache_use = CacheUse::read, .path = PathPolicy::latent};
  const auto before = l.cache_bytes();
  const Called other = planned_attend(l, b, o, in);
  EXPECT_TRUE(l.cache_bytes() == before);
  PlanOptions appends = o;
  appends.cache_use = CacheUse::append;
  EXPECT_FALSE(planned_attend(l, b, appends, in).heads == other.heads);
  EXPECT_FALSE(l.cache_bytes() == before);
}

// Two sequences by block steps, whose queries and rows the attention form is then given; its heads, through W_O, are
// judged by float64 of the sequences.
struct Sequences {
  static constexpr int32_t kPast = 30, kNew = 10, kOther = 24;
  Layer l{small_deepseek()};
  std::vector<float> a = random_values((kPast + kNew) * l.model.hidden, 11),
                     b = random_values((kOther + 1) * l.model.hidden, 12);
  Requests first{{kPast, kOther}, {0, 0}}, second{{kNew, 1}, {kPast, kOther}};

  std::vector<float> hidden(int64_t a_begin, int64_t a_end, int64_t b_begin, int64_t b_end) const {
    const int64_t h = l.model.hidden;
    std::vector<float> rows(a.begin() + a_begin * h, a.begin() + a_end * h);
    rows.insert(rows.end(), b.begin() + b_begin * h, b.begin() + b_end * h);
    return rows;
  }
  // A block step; what it leaves in the workspace.
  Inputs step(const Requests& r, const std::vector<float>& rows) {
    const ModelConfig& m = l.model;
    const Batch batch = r.batch();
    const Plan p = l.plan_of(batch, {});
    const Buffer workspace = filled(p.workspace_bytes, std::byte{0xff}), none;
    std::vector<float> out(rows.size());
    forward(l.stream, l.context(p, batch, workspace, none),
            View<const float, Token, Hidden>(rows.data(), {p.tokens, m.hidden}),
            View<float, Token, Hidden>(out.data(), {p.tokens, m.hidden}));
    l.stream.synchronize();
    const auto region = [&](const char* name, int64_t n) {
      std::vector<float> x(static_cast<size_t>(n));
      const auto bytes = read(l.stream, workspace.data() + p.region(name).offset, x.size() * sizeof(float));
      std::memcpy(x.data(), bytes.data(), bytes.size());
      return x;
    };
    const auto at = [&](size_t offset, size_t bytes) { return read(l.stream, workspace.data() + offset, bytes); };
    Inputs in{block_queries_f32(p, at), {}, {}};
    const auto kv = region("kv", p.tokens * m.entry());
    for (int64_t t = 0; t < p.tokens; ++t) {
      const auto row = kv.begin() + t * m.entry();
      in.kv_c.insert(in.kv_c.end(), row, row + m.latent);
      in.k_pe.insert(in.k_pe.end(), row + m.latent, row + m.entry());
    }
    return in;
  }
  std::vector<float> output(const std::vector<float>& heads) {
    const ModelConfig& m = l.model;
    const int64_t t = static_cast<int64_t>(heads.size()) / (m.heads * m.value);
    const Buffer scratch(1 << 22, kDevice);
    std::vector<float> y(static_cast<size_t>(t * m.hidden));
    ops::run(l.stream,
             ops::ProjectArgs{.x = View<const float, Token, Head, In>(heads.data(), {t, 1, m.heads * m.value}),
                              .weights = l.weights.output.get(),
                              .y = View<float, Token, Head, Out>(y.data(), {t, 1, m.hidden}),
                              .rows = t,
                              .scratch = {scratch.data(), scratch.size() / 2}});
    l.stream.synchronize();
    return y;
  }
  std::vector<double> exact(int64_t a_begin, int64_t a_end, int64_t b_begin, int64_t b_end) const {
    const auto weights = reference::plain_weights(l.tensors, Dtype::f32);
    const auto rows = [&](const std::vector<float>& x, int64_t begin, int64_t end) {
      std::vector<int64_t> all(static_cast<size_t>(end - begin));
      std::iota(all.begin(), all.end(), begin);
      return reference::output_rows(l.model, weights, x, all);
    };
    auto both = rows(a, a_begin, a_end);
    const auto of_b = rows(b, b_begin, b_end);
    both.insert(both.end(), of_b.begin(), of_b.end());
    return both;
  }
};

TEST(CacheUse, ReadStepsAgreeWithFloat64) {
  Sequences s;
  fill(s.l.stream, s.l.cache.view().data, s.l.spec.page_bytes() * Layer::kPages, std::byte{0xff});
  s.step(s.first, s.hidden(0, Sequences::kPast, 0, Sequences::kOther));
  const int32_t end = Sequences::kPast + Sequences::kNew;
  const Inputs in = s.step(s.second, s.hidden(Sequences::kPast, end, Sequences::kOther, Sequences::kOther + 1));
  const auto exact = s.exact(Sequences::kPast, end, Sequences::kOther, Sequences::kOther + 1);
  for (PathPolicy path : {PathPolicy::latent, PathPolicy::expanded, PathPolicy::by_length})
    for (SplitPolicy split : {SplitPolicy::fast, SplitPolicy::batch_invariant}) {
      const PlanOptions o{.form = LayerForm::attention, .cache_use = CacheUse::read, .path = path, .split = split};
      const auto heads = planned_attend(s.l, s.second.batch(), o, in).heads;
      EXPECT_LE(reference::relative_error(s.output(heads), exact), 2e-6) << to_string(path);
    }
}

TEST(CacheUse, StepsWithoutACacheAgreeWithFloat64) {
  Sequences s;
  const Inputs in = s.step(s.first, s.hidden(0, Sequences::kPast, 0, Sequences::kOther));
  const auto exact = s.exact(0, Sequences::kPast, 0, Sequences::kOther);
  for (PathPolicy path : {PathPolicy::automatic, PathPolicy::expanded, PathPolicy::by_length})
    for (SplitPolicy split : {SplitPolicy::fast, SplitPolicy::batch_invariant}) {
      const PlanOptions o{.form = LayerForm::attention, .cache_use = CacheUse::none, .path = path, .split = split};
      // Nothing but lengths: no block table, no slots, no pages.
      const Batch b{s.first.starts, s.first.lengths, {}, {}};
      const Plan p = plan(s.l.model, s.l.spec, 0, b, device_info(s.l.stream, s.l.model), o);
      EXPECT_NE(p.describe().find("no cache"), std::string::npos);
      EXPECT_GT(layer::kernels(p, b, {}).size(), 1u);
      for (const ListKey key : p.lists) EXPECT_NE(key.kind, ListKind::slot_mapping);
      const auto heads = planned_attend(s.l, b, o, in).heads;
      EXPECT_LE(reference::relative_error(s.output(heads), exact), 2e-6) << to_string(path);
    }
  // One-token requests, and an empty one among them.
  Layer l(small_deepseek());
  const Requests few({1, 0, 2}, {0, 0, 0});
  const Inputs some = random_inputs(l.model, few.tokens());
  const PlanOptions none{.form = LayerForm::attention, .cache_use = CacheUse::none},
      appends{.form = LayerForm::attention, .path = PathPolicy::expanded};
  EXPECT_TRUE(planned_attend(l, {few.starts, few.lengths, {}, {}}, none, some).heads ==
              planned_attend(l, few.batch(), appends, some).heads);
}

// Sparse models: requests that topk does not bind need no cache; the others have nothing to select from.
TEST(CacheUse, SparseModelsWithoutACache) {
  Layer l(small_sparse());
  const auto topk = static_cast<int32_t>(l.model.indexer->topk);
  const PlanOptions none{.form = LayerForm::attention, .cache_use = CacheUse::none},
      expanded{.form = LayerForm::attention, .path = PathPolicy::expanded};
  const Requests fits({topk, 3}, {0, 0});
  const Inputs in = random_inputs(l.model, fits.tokens());
  EXPECT_TRUE(planned_attend(l, {fits.starts, fits.lengths, {}, {}}, none, in).heads ==
              planned_attend(l, fits.batch(), expanded, in).heads);
  const Requests longer({3, topk + 1}, {0, 0});
  const Batch b{longer.starts, longer.lengths, {}, {}};
  EXPECT_EQ(message_of([&] { l.plan_of(b, none); }),
            "plan: request 1 of 25 tokens attends to the 24 that are selected for each, in a cache; cache_use is none");
  PlanOptions dense = none;
  dense.sparse = SparsePolicy::dense;
  EXPECT_EQ(message_of([&] { l.plan_of(b, dense); }), "no error");
}

TEST(CacheUse, WhatCannotBeIsNamed) {
  Layer l(small_deepseek());
  const auto planned = [&](const Batch& b, const PlanOptions& o) { return message_of([&] { l.plan_of(b, o); }); };
  const Requests r({2, 3}, {0, 7});
  EXPECT_EQ(planned(r.batch(), {.cache_use = CacheUse::read}),
            "plan: cache_use read is the attention form's (PlanOptions::form), this plan is for form block");
  const PlanOptions none{.form = LayerForm::attention, .cache_use = CacheUse::none};
  EXPECT_EQ(planned(r.batch(), none),
            "batch: request 1: seq_len is 10 with 3 new tokens: without a cache there is no context");
  PlanOptions latent = none;
  latent.path = PathPolicy::latent;
  EXPECT_EQ(planned(r.batch(), latent), "plan: path policy latent attends to cached rows, cache_use is none");
  const std::vector<int32_t> starts{0, 3}, lengths{2};
  EXPECT_EQ(planned({starts, lengths, {}, {}}, none), "batch: request 0: seq_len is 2, below its 3 new tokens");
  EXPECT_EQ(message_of([] { parse_cache_use("write"); }), "unknown cache use 'write'; known: append read none");
  for (CacheUse u : {CacheUse::append, CacheUse::read, CacheUse::none}) EXPECT_EQ(parse_cache_use(to_string(u)), u);
  // Rows that the expanded path reads are missed by name.
  const PlanOptions expanded{.form = LayerForm::attention, .cache_use = CacheUse::read, .path = PathPolicy::expanded};
  Inputs in = random_inputs(l.model, r.tokens());
  in.kv_c.clear();
  EXPECT_EQ(message_of([&] { planned_attend(l, r.batch(), expanded, in); }),
            "layer: kv_c has 0 rows, the plan has 5 tokens");
}

}  // namespace
}  // namespace mla::test
