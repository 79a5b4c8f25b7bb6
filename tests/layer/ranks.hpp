// Ranks that split heads, and their cache in groups: each a thread with weights, caches and pages of its own.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "cases/compare.hpp"
#include "layer/shares.hpp"
#include "mla/mla.hpp"

namespace mla::test::ranks {

constexpr int64_t kPageSize = 16, kPages = 192;

struct Lengths {
  std::vector<int32_t> queries, contexts;
};

/// Who has which heads, and the groups that hold a cache together.
struct Grid {
  std::vector<HeadRange> heads;
  int members = 1;
  int64_t interleave = 1;
  ContextExchange exchange = ContextExchange::latents;

  int ranks() const { return static_cast<int>(heads.size()); }
  std::string name() const {
    return std::to_string(ranks()) + " ranks, groups of " + std::to_string(members) + ", " +
           std::to_string(interleave) + " in turn, exchanging " + std::string(to_string(exchange));
  }
  ContextParallel of(int rank) const {
    if (members == 1) return {};
    ContextParallel c{.sharding = CacheSharding(members, interleave), .rank = rank, .heads = {}, .exchange = exchange};
    for (const HeadRange& h : heads) c.heads.push_back(h.count);
    return c;
  }
  /// Heads of the members of the rank's group, where they exchange heads.
  std::vector<HeadRange> group(int rank) const {
    if (members == 1 || exchange != ContextExchange::heads) return {};
    const auto first = heads.begin() + rank / members * members;
    return {first, first + members};
  }
};
inline Grid grid_of(const ModelConfig& m, int ranks, int members, int64_t interleave) {
  return {shares(m.heads, ranks), members, interleave};
}
/// The same with either exchange.
inline std::vector<Grid> exchanges(Grid g) {
  std::vector<Grid> both{g, g};
  both[1].exchange = ContextExchange::heads;
  return both;
}

/// Pages of the tokens that a rank holds of each request, in an order of its own.
struct Held {
  ContextParallel context;
  std::vector<std::vector<int32_t>> tables;

  Held(const ContextParallel& c, const Lengths& most) : context(c) {
    std::vector<int32_t> order(kPages);
    std::iota(order.begin(), order.end(), 0);
    std::rotate(order.begin(), order.begin() + 11 + c.rank, order.end());
    size_t at = 0;
    for (size_t r = 0; r < most.queries.size(); ++r) {
      std::vector<int32_t>& table = tables.emplace_back();
      for (int64_t p = 0; p < c.sharding.pages(c.member(), most.queries[r] + most.contexts[r], kPageSize); ++p)
        table.push_back(order.at(at++));
    }
  }
};

/// A step of that rank, with these options otherwise.
inline PlanOptions options_of(const Held& held, PlanOptions o = {}) {
  o.tensor_parallel = static_cast<int>(held.context.heads.size());
  o.context_parallel = held.context;
  return o;
}

struct Step {
  std::vector<int32_t> starts{0}, lengths, table, slots;
  int64_t width = 1;
  Batch batch;

  Step(const Held& h, const Lengths& l) {
    for (const auto& t : h.tables) width = std::max<int64_t>(width, std::ssize(t));
    table.assign(static_cast<size_t>(width) * h.tables.size(), 0x7fffffff);  // entries past a rank's pages are not read
    for (size_t r = 0; r < h.tables.size(); ++r) {
      std::copy(h.tables[r].begin(), h.tables[r].end(), table.begin() + static_cast<int64_t>(r) * width);
      starts.push_back(starts.back() + l.queries[r]);
      lengths.push_back(l.queries[r] + l.contexts[r]);
      for (int64_t p = l.contexts[r]; p < lengths.back(); ++p)
        slots.push_back(static_cast<int32_t>(h.context.sharding.slot(h.context.member(), p, h.tables[r], kPageSize)));
    }
    batch = {starts, lengths, {table.data(), {std::ssize(lengths), width}}, slots};
  }
};

struct Rank {
  ModelConfig model;
  HeadRange heads;
  LayerWeights weights;
  RotaryTable rotary, index_rotary;
  ThreadPool pool{1};
  Stream stream{pool};
  CacheSpec spec;
  Cache cache;
  IndexCacheSpec index_spec;
  IndexCache index;
  Communicator* group = nullptr;  ///< null: it is alone
  Buffer workspace, selection;
  std::vector<int32_t>
      chosen;  ///< of the last step's sparse rows, in the order of their tokens: positions [rows, topk]

  Rank(const ModelConfig& whole, HeadRange own, CacheFormat format, IndexCacheFormat index_format,
       const std::vector<HeadRange>& group_heads = {})
      : model(part_of(whole, own)),
        heads(own),
        weights(prepare(model, part_of(whole, random_layer(whole, 0, 1, Dtype::f32), own, group_heads), Dtype::f32)),
        rotary(model.rotary, model.rope, 4096),
        spec(cache_spec(model, format, kPageSize)),
        cache(spec, kPages) {
    std::memset(cache.view().data, 0xff, spec.page_bytes() * kPages);  // NaN, of what is not written
    if (format == CacheFormat::fp8) spec.k_scale = 0.03f;
    if (!model.indexer) return;
    index_rotary = RotaryTable(model.index_rotary(), model.rope, 4096);
    index_spec = index_cache_spec(model, spec, index_format);
    index = IndexCache(index_spec, kPages);
    std::memset(index.view().data, 0xff, index_spec.page_bytes() * kPages);
  }
  Plan plan_of(const Step& s, const PlanOptions& o) {
    return plan(model, spec, kPages, s.batch, device_info(stream, model), o);
  }
  LayerContext context(const Plan& p, const Step& s) {
    workspace = Buffer(p.workspace_bytes);
    std::memset(workspace.data(), 0xff, workspace.size());
    if (p.selection_bytes > selection.size()) selection = Buffer(p.selection_bytes);
    CacheView view = cache.view();
    view.spec = spec;
    return {.plan = p,
            .batch = s.batch,
            .weights = weights,
            .rotary = rotary,
            .cache = view,
            .workspace = {workspace.data(), workspace.size()},
            .index_cache = index.view(),
            .index_rotary = &index_rotary,
            .selection = {selection.data(), selection.size()},
            .ranks = group,
            .deadline = std::chrono::seconds(60)};
  }
  std::vector<float> run(const Step& s, const PlanOptions& o, uint64_t seed) {
    return run(s, o, cases::random_values(s.starts.back() * model.hidden, seed));
  }
  std::vector<float> run(const Step& s, const PlanOptions& o, const std::vector<float>& hidden) {
    const Plan p = plan_of(s, o);
    std::vector<float> out(hidden.size(), -7.0f);
    forward(stream, context(p, s), View<const float, Token, Hidden>(hidden.data(), {p.tokens, model.hidden}),
            View<float, Token, Hidden>(out.data(), {p.tokens, model.hidden}));
    take_choice(p);
    return out;
  }
  /// attend() of its heads, with queries and new rows that are the same for every division of the heads; into
  /// `quantised` where there is one.
  std::vector<float> attended(const Step& s, PlanOptions o, int64_t all_heads, uint64_t seed,
                              const QuantizedView& quantised = {}) {
    o.form = LayerForm::attention;
    const Plan p = plan_of(s, o);
    const int64_t t = p.tokens, qk = model.query_key();
    const auto q = cases::random_values(t * all_heads * qk, seed),
               kv_c = cases::random_values(t * model.latent, seed + 1),
               k_pe = cases::random_values(t * model.rope, seed + 2);
    std::vector<float> out(static_cast<size_t>(t * heads.count * model.value), -7.0f);
    const View<const float, Token, Head, QueryKey> own(q.data() + heads.begin * qk, {t, heads.count, qk},
                                                       {all_heads * qk, qk, 1});
    const View<const float, Token, Latent> latents(kv_c.data(), {t, model.latent});
    const View<const float, Token, Rope> ropes(k_pe.data(), {t, model.rope});
    if (quantised.data) attend(stream, context(p, s), own, latents, ropes, quantised);
    else
      attend(stream, context(p, s), own, latents, ropes,
             View<float, Token, Head, Value>(out.data(), {t, heads.count, model.value}));
    return out;
  }

 private:
  void take_choice(const Plan& p) {
    chosen.clear();
    const View<int32_t, Token, Topk> all = p.selected({selection.data(), selection.size()});
    std::vector<int64_t> order(p.sparse_tokens.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(),
              [&](int64_t a, int64_t b) { return p.sparse_tokens[a] < p.sparse_tokens[b]; });
    for (const int64_t i : order) chosen.insert(chosen.end(), &all(i, 0), &all(i, 0) + p.topk);
  }
};

/// What ranks cache, and how the indexer's keys are held.
struct Formats {
  CacheFormat cache = CacheFormat::f32;
  IndexCacheFormat index = IndexCacheFormat::f32;
};

/// f(rank, held, options) on every rank's thread.
template <class F>
void on_ranks(const ModelConfig& m, const Grid& g, const Formats& formats, const Lengths& most, const PlanOptions& o,
              F&& f) {
  std::vector<Communicator> group = thread_communicators(g.ranks());
  std::vector<std::jthread> threads;
  for (int r = 0; r < g.ranks(); ++r)
    threads.emplace_back([&, r] {
      const auto at = static_cast<size_t>(r);
      try {
        PlanOptions own = o;
        own.tensor_parallel = g.ranks();
        own.context_parallel = g.of(r);
        own.index_format = formats.index;
        Rank rank(m, g.heads[at], formats.cache, formats.index, g.group(r));
        rank.group = &group[at];
        f(rank, Held(own.context_parallel, most), own, r);
      } catch (const std::exception& e) {
        ADD_FAILURE() << "rank " << r << ": " << e.what();
        group[at].abort(e.what());
      }
    });
}

/// A step as each rank saw it.
struct Ran {
  std::vector<float> out;
  std::vector<int32_t> chosen;
};

/// Prompts of the contexts, then a step of the queries behind them: the last one's rows.
inline Ran two_steps(Rank& rank, const Held& held, const Lengths& l, const PlanOptions& first,
                     const PlanOptions& second) {
  rank.run(Step(held, {l.contexts, std::vector<int32_t>(l.contexts.size())}), first, 3);
  Ran r;
  r.out = rank.run(Step(held, l), second, 4);
  r.chosen = rank.chosen;
  return r;
}

inline std::vector<Ran> by_ranks(const ModelConfig& m, const Grid& g, const Lengths& l, const Formats& formats = {},
                                 const PlanOptions& options = {}) {
  std::vector<Ran> ran(g.heads.size());
  on_ranks(m, g, formats, l, options, [&](Rank& rank, const Held& held, const PlanOptions& o, int r) {
    PlanOptions prompts = o;
    prompts.path = PathPolicy::automatic;
    ran[static_cast<size_t>(r)] = two_steps(rank, held, l, prompts, o);
  });
  return ran;
}

/// The same of one rank with all heads and the whole cache.
inline Ran by_one(const ModelConfig& m, const Lengths& l, const Formats& formats = {}, PlanOptions o = {}) {
  Rank rank(m, {0, m.heads}, formats.cache, formats.index);
  o.index_format = formats.index;
  PlanOptions prompts = o;
  prompts.path = PathPolicy::automatic;
  return two_steps(rank, Held({}, l), l, prompts, o);
}

/// Within `allowed` of the largest element, and on every rank the same bits.
inline void expect_same(const std::vector<Ran>& found, const Ran& right, float allowed, const std::string& what) {
  float largest = 0;
  for (const float x : right.out) largest = std::max(largest, std::abs(x));
  for (const Ran& one : found) {
    ASSERT_EQ(one.out.size(), right.out.size()) << what;
    ASSERT_EQ(one.chosen, right.chosen) << what;
    for (size_t i = 0; i < right.out.size(); ++i) {
      ASSERT_NEAR(one.out[i], right.out[i], allowed * largest) << what << ", element " << i;
      ASSERT_EQ(one.out[i], found[0].out[i]) << what << ", element " << i;
    }
  }
}

}  // namespace mla::test::ranks
