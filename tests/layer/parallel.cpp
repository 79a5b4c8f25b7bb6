// Heads over ranks: parts of a layer, whose hidden rows are summed, against the whole.
#include "mla/parallel.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "layer/kernels.hpp"
#include "layer/random_layer.hpp"
#include "layer/shares.hpp"
#include "support/message.hpp"

namespace mla::test {
namespace {

ModelConfig model_of(bool sparse) {
  ModelConfig m = sparse ? small_sparse() : small_deepseek();
  m.heads = 6;
  return m;
}

PrepareOptions prepare_options(const Kind& k) {
  PrepareOptions options;
  if (k.absorbed) options.absorption = Absorption::full;
  return options;
}

constexpr int64_t kRoom = 2;  // rows past the step's tokens

template <class T>
std::vector<T> run(Layer& l, const Batch& batch, PlanOptions o, Communicator* ranks, T sentinel) {
  const Plan p = l.plan_of(batch, o);
  const Buffer workspace = filled(p.workspace_bytes, std::byte{0xff}),
               selection = filled(p.selection_bytes, std::byte{0xff});
  LayerContext c = l.context(p, batch, workspace, selection);
  c.ranks = ranks;
  c.deadline = std::chrono::seconds(30);
  const int64_t h = l.model.hidden, rows = p.tokens + kRoom;
  const auto hidden = random_values(p.tokens * h, 3);
  std::vector<T> out(static_cast<size_t>(rows * h), sentinel);
  forward(l.stream, c, View<const float, Token, Hidden>(hidden.data(), {p.tokens, h}),
          View<T, Token, Hidden>(out.data(), {rows, h}));
  l.stream.synchronize();
  return out;
}

// What each rank's call gives.
template <class T>
std::vector<std::vector<T>> run_ranks(const Kind& k, const ModelConfig& model, const std::vector<HeadRange>& division,
                                      const Batch& batch, T sentinel) {
  const LayerTensors whole = random_layer(model, 0, 1, Dtype::f32);
  std::vector<Communicator> ranks = thread_communicators(static_cast<int>(division.size()));
  std::vector<std::vector<T>> out(division.size());
  {
    std::vector<std::jthread> threads;
    for (size_t r = 0; r < division.size(); ++r)
      threads.emplace_back([&, r] {
        Layer l(part_of(model, division[r]), part_of(model, whole, division[r]), prepare_options(k));
        PlanOptions o = k.plan;
        o.tensor_parallel = static_cast<int>(division.size());
        out[r] = run<T>(l, batch, o, &ranks[r], sentinel);
      });
  }
  return out;
}

TEST(TensorParallel, RanksGiveTheLayersRows) {
  const Batch batch = requests().batch();
  for (const Kind& k : kinds()) {
    const ModelConfig model = model_of(k.sparse);
    Layer whole(model, prepare_options(k));
    const std::vector<float> right = run<float>(whole, batch, k.plan, nullptr, -7.0f);
    float largest = 0;
    for (float x : right) largest = std::max(largest, std::abs(x));
    const int64_t n = model.heads;
    for (const std::vector<HeadRange>& division :
         {shares(n, 1), shares(n, 2), shares(n, 3), shares(n, 4), std::vector<HeadRange>{{1, n - 1}, {0, 1}}}) {
      const auto out = run_ranks<float>(k, model, division, batch, -7.0f);
      const std::string what = std::string(k.name) + ", " + std::to_string(division.size()) + " ranks";
      for (size_t i = 0; i < right.size(); ++i) {
        // Sums of f32 in another order; rows past the tokens as they were.
        ASSERT_NEAR(out[0][i], right[i], 1e-5f * largest) << what << ", element " << i;
        for (const auto& other : out) ASSERT_EQ(std::memcmp(&other[i], &out[0][i], sizeof(float)), 0) << what;
      }
      EXPECT_TRUE(run_ranks<float>(k, model, division, batch, -7.0f) == out) << what << ", again";
      // Rounded once, behind the sum.
      const auto rounded = run_ranks<bf16>(k, model, division, batch, to_bf16(-7.0f));
      for (size_t i = 0; i < right.size(); ++i)
        ASSERT_EQ(rounded.back()[i].bits, to_bf16(out[0][i]).bits) << what << ", element " << i;
    }
  }
}

// Sums of a rank's own rows: the bits that all have with whole sums; other rows are not written. Also in steps of
// maxima, where fewer rows are the batch's, and with fewer rows than ranks.
TEST(TensorParallel, RanksMaySumTheirOwnRows) {
  const ModelConfig model = model_of(false);
  const LayerTensors whole = random_layer(model, 0, 1, Dtype::f32);
  const int64_t h = model.hidden;
  for (const Requests& of : {requests(), Requests({1, 1}, {40, 3})})
    for (const int64_t tokens : {int64_t{0}, of.tokens() + 5})  // of maxima
      for (const int ranks : {1, 2, 3, 5}) {
        const Batch batch = of.batch();
        const std::vector<HeadRange> division = shares(model.heads, ranks);
        std::vector<Communicator> group = thread_communicators(ranks);
        std::vector<std::vector<float>> all(division.size()), own(division.size());
        std::vector<RowRange> range(division.size());
        {
          std::vector<std::jthread> threads;
          for (size_t r = 0; r < division.size(); ++r)
            threads.emplace_back([&, r] {
              Layer l(part_of(model, division[r]), part_of(model, whole, division[r]), {});
              PlanOptions o{.tensor_parallel = ranks};
              if (tokens > 0) o.maxima = StepMaxima{.requests = 6, .tokens = tokens, .query_len = 80, .seq_len = 200};
              all[r] = run<float>(l, batch, o, &group[r], -7.0f);
              l.reset();
              o.sums = HiddenSums::own;
              o.context_parallel.rank = static_cast<int>(r);
              range[r] = l.plan_of(batch, o).own_rows();
              own[r] = run<float>(l, batch, o, &group[r], -7.0f);
            });
        }
        int64_t next = 0;
        for (size_t r = 0; r < division.size(); ++r) {
          const std::string what =
              std::to_string(ranks) + " ranks, maxima of " + std::to_string(tokens) + ", rank " + std::to_string(r);
          ASSERT_EQ(range[r].begin, next) << what;
          next += range[r].count;
          for (int64_t i = 0; i < std::ssize(own[r]); ++i)
            ASSERT_EQ(own[r][static_cast<size_t>(i)],
                      i < range[r].count * h ? all[r][static_cast<size_t>(range[r].begin * h + i)] : -7.0f)
                << what << ", element " << i;
        }
        ASSERT_EQ(next, tokens > 0 ? tokens : of.tokens());
      }
}

TEST(TensorParallel, TheAttentionFormTakesAPartsHeadsAlone) {
  const ModelConfig model = model_of(false);
  const LayerTensors tensors = random_layer(model, 0, 1, Dtype::f32);
  const Batch batch = requests().batch();
  const int64_t t = requests().tokens(), n = model.heads, qk = model.query_key();
  const auto q = random_values(t * n * qk, 3), kv_c = random_values(t * model.latent, 4),
             k_pe = random_values(t * model.rope, 5);
  const auto attended = [&](HeadRange heads) {
    Layer l(part_of(model, heads), part_of(model, tensors, heads), {});
    const Plan p = l.plan_of(batch, {.form = LayerForm::attention, .path = PathPolicy::by_length});
    const Buffer workspace = filled(p.workspace_bytes, std::byte{0xff}), selection;
    std::vector<float> out(static_cast<size_t>(t * heads.count * model.value));
    attend(l.stream, l.context(p, batch, workspace, selection),
           View<const float, Token, Head, QueryKey>(q.data() + heads.begin * qk, {t, heads.count, qk}, {n * qk, qk, 1}),
           View<const float, Token, Latent>(kv_c.data(), {t, model.latent}),
           View<const float, Token, Rope>(k_pe.data(), {t, model.rope}),
           View<float, Token, Head, Value>(out.data(), {t, heads.count, model.value}));
    l.stream.synchronize();
    return out;
  };
  const std::vector<float> all = attended({0, n});
  for (const HeadRange heads : {HeadRange{0, 1}, HeadRange{1, n - 1}, HeadRange{n - 1, 1}}) {
    const std::vector<float> some = attended(heads);
    for (int64_t i = 0; i < t; ++i)
      for (int64_t e = 0; e < heads.count * model.value; ++e)
        ASSERT_NEAR(some[static_cast<size_t>(i * heads.count * model.value + e)],
                    all[static_cast<size_t>((i * n + heads.begin) * model.value + e)], 1e-5f);
  }
}

TEST(TensorParallel, SharesCoverEveryHeadOnce) {
  for (int64_t heads : {1, 5, 16, 17, 128})
    for (int ranks = 1; ranks <= std::min<int64_t>(heads, 20); ++ranks) {
      int64_t next = 0;
      for (int r = 0; r < ranks; ++r) {
        const HeadRange h = head_share(heads, r, ranks);
        EXPECT_EQ(h.begin, next);
        EXPECT_GE(h.count, heads / ranks);
        EXPECT_LE(h.count, heads / ranks + 1);
        next += h.count;
      }
      EXPECT_EQ(next, heads);
    }
}

// Of tensors with a scale a block, cut between blocks and within them.
TEST(TensorParallel, PartsHaveTheValuesOfTheWhole) {
  const ModelConfig m = model_of(false);
  LayerTensors layer = random_layer(m, 0, 1, Dtype::f32);
  const int64_t block = 2 * m.query_key();
  std::vector<std::vector<uint8_t>> codes;
  const auto scaled = [&](HostTensor& t) {
    const int64_t out = t.shape[0], in = t.shape[1];
    std::vector<uint8_t>& c = codes.emplace_back(static_cast<size_t>(out * in));
    for (size_t i = 0; i < c.size(); ++i) c[i] = static_cast<uint8_t>((i * 37 + i / 256) % 0x7e);
    t.dtype = Dtype::fp8_e4m3;
    t.data = reinterpret_cast<const std::byte*>(c.data());
    t.block_rows = t.block_cols = block;
    const int64_t n = (out + block - 1) / block * ((in + block - 1) / block);
    for (int64_t i = 0; i < n; ++i) t.block_scales.push_back(0.01f * static_cast<float>(1 + i % 11));
  };
  scaled(layer.query), scaled(layer.kv_up), scaled(layer.output);
  const auto rows = [&](const HostTensor& t, int64_t begin, int64_t count) {
    const std::vector<float> all = t.to_f32();
    return std::vector<float>(all.begin() + begin * t.shape[1], all.begin() + (begin + count) * t.shape[1]);
  };
  int kept = 0, made = 0;
  for (int64_t begin = 0; begin < m.heads; ++begin)
    for (int64_t count = 1; count <= m.heads - begin; ++count) {
      const LayerTensors part = part_of(m, layer, {begin, count});
      EXPECT_EQ(part.query.to_f32(), rows(layer.query, begin * m.query_key(), count * m.query_key()));
      const int64_t up = m.nope + m.value;
      EXPECT_EQ(part.kv_up.to_f32(), rows(layer.kv_up, begin * up, count * up));
      const std::vector<float> some = part.output.to_f32(), all = layer.output.to_f32();
      for (int64_t r = 0; r < m.hidden; ++r)
        for (int64_t c = 0; c < count * m.value; ++c)
          ASSERT_EQ(some[static_cast<size_t>(r * count * m.value + c)],
                    all[static_cast<size_t>((r * m.heads + begin) * m.value + c)]);
      for (const HostTensor* t : {&part.query, &part.kv_up, &part.output})
        ++(t->dtype == Dtype::fp8_e4m3 ? kept : made);
    }
  EXPECT_GT(kept, 0);
  EXPECT_GT(made, 0);
}

TEST(TensorParallel, TheSumIsAStep) {
  Layer l(small_deepseek());
  const Batch batch = requests().batch();
  const Plan p = l.plan_of(batch, {.tensor_parallel = 3});
  int sums = 0;
  for (const Step& s : p.steps) sums += std::holds_alternative<steps::AllReduce>(s.work);
  EXPECT_EQ(sums, 1);
  bool noted = false;
  for (const layer::KernelUse& u : layer::kernels(p, batch, {}))
    if (u.op == "all_reduce") {
      noted = true;
      EXPECT_EQ(u.kernel, "of 3 ranks, link unknown");
      EXPECT_EQ(u.bytes, static_cast<double>(p.tokens * l.model.hidden) * 4);
    }
  EXPECT_TRUE(noted);
  PlanOptions o{.tensor_parallel = 3, .sums = HiddenSums::own};
  o.context_parallel.rank = 1;
  const Plan own = l.plan_of(batch, o);
  EXPECT_NE(own.describe().find(", rows " + std::to_string(own.own_rows().begin) + " to "), std::string::npos)
      << own.describe();
  for (const layer::KernelUse& u : layer::kernels(own, batch, {})) {
    EXPECT_NE(u.op, "all_reduce");
    if (u.op == "reduce_scatter") {
      EXPECT_EQ(u.bytes, static_cast<double>((own.tokens - own.own_rows().count) * l.model.hidden) * 4);
    }
  }
}

// What all ranks' products would give alike, each makes a range of.
TEST(TensorParallel, RanksDivideTheRowsOfSharedProducts) {
  const Requests many({1, 7, 30}, {20, 40, 0});
  const auto divided = [](const Plan& p) {
    std::string names;
    for (const Step& s : p.steps) {
      const auto* product = std::get_if<steps::Project>(&s.work);
      if (product && product->divided) names += std::string(s.name) + " ";
      if (std::holds_alternative<steps::AllGather>(s.work)) names += "| ";
    }
    return names;
  };
  Layer dense(small_deepseek()), sparse(small_sparse());
  const auto planned = [&](Layer& l, int ranks, const Batch& b) {
    return divided(l.plan_of(b, {.tensor_parallel = ranks}));
  };
  const std::string none = "", both = "query_down | kv_down | ";
  EXPECT_EQ(planned(dense, 1, many.batch()), none);
  EXPECT_EQ(planned(dense, 4, many.batch()), kOnGpu ? none : both);
  EXPECT_EQ(planned(dense, 5, many.batch()), none);  // 38 rows
  EXPECT_EQ(planned(sparse, 4, many.batch()), kOnGpu ? none : "kv_down | ");
  for (const Kind& k : kinds()) {
    if (k.plan.path != PathPolicy::by_length || k.absorbed) continue;
    const ModelConfig model = model_of(k.sparse);
    Layer whole(model);
    const std::vector<float> right = run<float>(whole, many.batch(), k.plan, nullptr, -7.0f);
    float largest = 0;
    for (float x : right) largest = std::max(largest, std::abs(x));
    const auto out = run_ranks<float>(k, model, shares(model.heads, 3), many.batch(), -7.0f);
    for (size_t i = 0; i < right.size(); ++i) {
      ASSERT_NEAR(out[0][i], right[i], 1e-5f * largest) << k.name << ", element " << i;
      for (const auto& other : out) ASSERT_EQ(std::memcmp(&other[i], &out[0][i], sizeof(float)), 0) << k.name;
    }
  }
}

TEST(TensorParallel, WhatDoesNotFitIsNamed) {
  Layer l(small_deepseek());
  const Batch batch = requests().batch();
  EXPECT_EQ(message_of([&] { (void)run<float>(l, batch, {.tensor_parallel = 2}, nullptr, 0.0f); }),
            "layer: ranks is missing, plan was made for tensor_parallel 2");
  std::vector<Communicator> three = thread_communicators(3);
  EXPECT_EQ(message_of([&] { (void)run<float>(l, batch, {.tensor_parallel = 2}, &three[0], 0.0f); }),
            "layer: ranks is 3, plan tensor_parallel is 2");
  EXPECT_EQ(message_of([&] { (void)l.plan_of(batch, {.tensor_parallel = 0}); }),
            "plan: tensor_parallel is 0, allowed 1 to 2147483647");
  PlanOptions own{.tensor_parallel = 2, .sums = HiddenSums::own};
  own.context_parallel.rank = 2;
  EXPECT_EQ(message_of([&] { (void)l.plan_of(batch, own); }), "plan: context_parallel rank is 2, allowed 0 to 1");
  own.context_parallel.rank = 1;
  std::vector<Communicator> two = thread_communicators(2);
  EXPECT_EQ(message_of([&] { (void)run<float>(l, batch, own, &two[0], 0.0f); }),
            "layer: ranks' own is 0, plan context_parallel rank is 1");
  EXPECT_EQ(message_of([&] { (void)row_share(-1, 0, 2); }), "row_share: rows is -1 and ranks is 2, at least 0 and 1");
  EXPECT_EQ(message_of([&] { (void)row_share(1, 2, 2); }), "row_share: rank is 2, allowed 0 to 1");
  EXPECT_EQ(message_of([&] { (void)head_share(4, 0, 5); }),
            "head_share: ranks is 5, allowed 1 to 4, the number of heads");
  EXPECT_EQ(message_of([&] { (void)head_share(4, 4, 4); }), "head_share: rank is 4, allowed 0 to 3");
  EXPECT_EQ(message_of([&] { (void)part_of(l.model, {l.model.heads, 1}); }).substr(0, 15), "part_of: heads ");
}

// Ranks' own shares of heads do not count, what they were given alike does.
TEST(TensorParallel, RanksPlanTheSameDigest) {
  const ModelConfig model = model_of(false);
  Layer one(part_of(model, {0, 1})), five(part_of(model, {1, 5}));
  const Batch batch = requests().batch();
  const PlanDigest digest = one.plan_of(batch, {.tensor_parallel = 2}).digest;
  EXPECT_NE(digest.hash, 0u);
  EXPECT_EQ(digest.tokens, batch.tokens());
  EXPECT_EQ(digest.requests, batch.requests());
  EXPECT_EQ(five.plan_of(batch, {.tensor_parallel = 2}).digest, digest);
  EXPECT_EQ(one.plan_of(batch, {}).digest, PlanDigest());
  EXPECT_NE(one.plan_of(batch, {.tensor_parallel = 3}).digest, digest);
  EXPECT_NE(one.plan_of(batch, {.tensor_parallel = 2, .sums = HiddenSums::own}).digest, digest);
  EXPECT_NE(one.plan_of(batch, {.tensor_parallel = 2, .split = SplitPolicy::batch_invariant}).digest, digest);
  const Requests a({1, 5}, {20, 0}), b({5, 1}, {20, 0}), c({1, 5}, {21, 0}), d({1, 5}, {0, 20});
  std::vector<uint64_t> hashes;
  for (const Requests* r : {&a, &b, &c, &d})
    hashes.push_back(one.plan_of(r->batch(), {.tensor_parallel = 2}).digest.hash);
  for (size_t i = 0; i < hashes.size(); ++i)
    for (size_t j = 0; j < i; ++j) EXPECT_NE(hashes[i], hashes[j]) << i << " " << j;
}

// The sizes of all messages are the same; the rows that would be added up are not.
TEST(TensorParallel, ARankWithAnotherBatchIsNamed) {
  const ModelConfig model = model_of(false);
  const LayerTensors whole = random_layer(model, 0, 1, Dtype::f32);
  std::vector<Communicator> ranks = thread_communicators(3);
  const Requests common({1, 5}, {20, 0}), other({1, 5}, {19, 0});
  std::vector<std::jthread> threads;
  for (int r = 0; r < 3; ++r)
    threads.emplace_back([&, r] {
      const HeadRange mine = head_share(model.heads, r, 3);
      Layer l(part_of(model, mine), part_of(model, whole, mine), {});
      const auto start = std::chrono::steady_clock::now();
      try {
        (void)run<float>(l, (r == 1 ? other : common).batch(), {.tensor_parallel = 3}, &ranks[static_cast<size_t>(r)],
                         0.0f);
        ADD_FAILURE() << "rank " << r;
      } catch (const RankError& e) {
        EXPECT_EQ(e.rank(), 1) << e.what();
        EXPECT_EQ(e.step(), "all_reduce");
        EXPECT_NE(std::string(e.what()).find("their plans differ, 6 tokens of 2 requests and 6 tokens of 2 requests"),
                  std::string::npos)
            << e.what();
      }
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(31));
    });
}

// A rank that leaves before the sum ends the others' calls, by name and at once.
TEST(TensorParallel, ARankThatLeavesIsNamed) {
  const ModelConfig model = model_of(false);
  const LayerTensors whole = random_layer(model, 0, 1, Dtype::f32);
  std::vector<Communicator> ranks = thread_communicators(2);
  std::jthread leaves([there = std::move(ranks[1])]() mutable { const Communicator gone = std::move(there); });
  const HeadRange mine = head_share(model.heads, 0, 2);
  Layer l(part_of(model, mine), part_of(model, whole, mine), {});
  try {
    (void)run<float>(l, requests().batch(), {.tensor_parallel = 2}, &ranks[0], 0.0f);
    FAIL() << "the other rank's part is missing";
  } catch (const RankError& e) {
    EXPECT_EQ(e.rank(), 1);
    EXPECT_EQ(e.step(), "all_reduce");
  }
}

}  // namespace
}  // namespace mla::test
