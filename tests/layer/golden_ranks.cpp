// Golden files by ranks that split heads, and cached tokens over groups of them: from 1 to one for each head, every
// size of group, every interleave, held to one rank's bounds.
#include <gtest/gtest.h>

#include <thread>

#include "layer/reference.hpp"
#include "layer/shares.hpp"
#include "mla/mla.hpp"
#include "support/golden.hpp"
#include "support/sanitized.hpp"

namespace mla::test {
namespace {

constexpr double kFileError = 5e-6, kFloor = 2e-6;  // as one rank's, see golden.cpp
constexpr int64_t kPageSize = 16;

struct Ran {
  std::vector<float> out;
  std::vector<std::vector<int32_t>> selected;  // of each row; none: it attended to everything
};

// One request with the pages of the tokens that the rank holds, in an order of its own.
struct Rank {
  ModelConfig model;
  CacheSharding sharding;
  int rank;
  LayerWeights weights;
  RotaryTable rotary, index_rotary;
  ThreadPool pool{1};
  Stream stream{pool};
  CacheSpec spec;
  std::vector<int32_t> table;
  Cache cache;
  IndexCache index;

  Rank(const Golden& g, const CacheSharding& s, int of, HeadRange heads, std::span<const HeadRange> group,
       CacheFormat format)  // of: a group
      : model(part_of(g.config, heads)),
        sharding(s),
        rank(of),
        weights(prepare(model, part_of(g.config, g.tensors, heads, group), Dtype::f32)),
        rotary(model.rotary, model.rope, g.length),
        spec(cache_spec(model, format, kPageSize)),
        table(pages_of(s.pages(of, g.length, kPageSize))),
        cache(spec, std::ssize(table) + 1) {
    std::memset(cache.view().data, 0xff, spec.page_bytes() * static_cast<size_t>(cache.view().pages));
    if (!model.indexer) return;
    index_rotary = RotaryTable(model.index_rotary(), model.rope, g.length);
    index = IndexCache(index_cache_spec(model, spec, IndexCacheFormat::f32), cache.pages());
    std::memset(index.view().data, 0xff, index.spec().page_bytes() * static_cast<size_t>(index.pages()));
  }
  // Page 0 is nobody's; a rank without tokens has none.
  static std::vector<int32_t> pages_of(int64_t count) {
    std::vector<int32_t> pages;
    for (int64_t i = count; i > 0; --i) pages.push_back(static_cast<int32_t>(i));
    return pages;
  }

  // Rows [begin, end) of the request, appended to what is cached; what each attended to, of those that select.
  void step(const Golden& g, int64_t begin, int64_t end, Communicator* group, const PlanOptions& o, Ran& ran) {
    const std::vector<int32_t> starts{0, static_cast<int32_t>(end - begin)}, lengths{static_cast<int32_t>(end)};
    std::vector<int32_t> slots, pages(table);
    for (int64_t p = begin; p < end; ++p)
      slots.push_back(static_cast<int32_t>(sharding.slot(rank, p, table, kPageSize)));
    if (pages.empty()) pages.push_back(-1);
    const Batch batch{starts, lengths, {pages.data(), {1, std::ssize(pages)}}, slots};
    const Plan p = plan(model, spec, cache.view().pages, batch, device_info(stream, model), o);
    Buffer workspace(p.workspace_bytes);
    std::memset(workspace.data(), 0xff, workspace.size());
    const int64_t width = model.hidden;
    const Buffer selection(p.selection_bytes);
    const LayerContext context{.plan = p,
                               .batch = batch,
                               .weights = weights,
                               .rotary = rotary,
                               .cache = cache.view(),
                               .workspace = {workspace.data(), workspace.size()},
                               .index_cache = index.view(),
                               .index_rotary = &index_rotary,
                               .selection = {selection.data(), selection.size()},
                               .ranks = group,
                               .deadline = std::chrono::seconds(60)};
    if (p.sparse_rows() > 0 && !weights.indexer)
      select(stream, context, View<const int32_t, Token, Topk>(g.topk.data() + begin * p.topk, {end - begin, p.topk}));
    forward(stream, context, View<const float, Token, Hidden>(g.hidden.data() + begin * width, {end - begin, width}),
            View<float, Token, Hidden>(ran.out.data() + begin * width, {end - begin, width}));
    for (int64_t i = 0; i < p.sparse_rows(); ++i)
      for (int64_t k = 0; k < p.topk; ++k)
        if (const int32_t at = p.selected(context.selection)(i, k); at >= 0)
          ran.selected[static_cast<size_t>(begin + i)].push_back(at);
  }
};

// A prefill, a chunk behind it and single tokens, by all ranks: what each has of the output.
std::vector<Ran> by_ranks(const Golden& g, int ranks, int members, int64_t interleave, CacheFormat format,
                          ContextExchange exchange = ContextExchange::latents) {
  const std::vector<HeadRange> heads = shares(g.config.heads, ranks);
  std::vector<Communicator> group = thread_communicators(ranks);
  std::vector<Ran> out(heads.size());
  std::vector<std::jthread> threads;
  for (int r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      const auto at = static_cast<size_t>(r);
      PlanOptions o{.tensor_parallel = ranks, .index_format = IndexCacheFormat::f32};
      o.context_parallel = {
          .sharding = CacheSharding(members, interleave), .rank = r, .heads = {}, .exchange = exchange};
      for (const HeadRange& h : heads) o.context_parallel.heads.push_back(h.count);
      std::span<const HeadRange> sharing;
      if (members > 1 && exchange == ContextExchange::heads)
        sharing = std::span(heads).subspan(static_cast<size_t>(r / members * members), static_cast<size_t>(members));
      Rank rank(g, o.context_parallel.sharding, o.context_parallel.member(), heads[at], sharing, format);
      out[at].out.assign(static_cast<size_t>(g.length * g.config.hidden), -7.0f);
      out[at].selected.resize(static_cast<size_t>(g.length));
      const int64_t last = g.length - 3;
      std::vector<int64_t> ends{g.length / 2, last};
      for (int64_t p = last + 1; p <= g.length; ++p) ends.push_back(p);
      int64_t begin = 0;
      for (const int64_t end : ends) {
        rank.step(g, begin, end, ranks > 1 ? &group[at] : nullptr, o, out[at]);
        begin = end;
      }
    });
  threads.clear();
  return out;
}

class GoldenRanks : public testing::TestWithParam<GoldenCase> {};

TEST_P(GoldenRanks, ReproduceTheFile) {
  const Golden g = read_golden(GetParam());
  std::vector<int64_t> rows(static_cast<size_t>(g.length));
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int64_t>(i);
  const auto weights = reference::plain_weights(g.tensors, Dtype::f32);
  const std::vector<double> exact = reference::output_rows(g.config, weights, g.hidden, rows),
                            file(g.output.begin(), g.output.end());
  for (const CacheFormat format : {CacheFormat::f32, CacheFormat::bf16}) {
    double plain = 0;
    for (const Path path : {Path::latent, Path::expanded}) {
      reference::Rounding rounding{.weights = Dtype::f32,
                                   .compute = Dtype::f32,
                                   .activations = Dtype::f32,
                                   .cache = cache_spec(g.config, format),
                                   .path = path};
      const auto y = reference::output_rows(g.config, weights, g.hidden, rows, &rounding);
      plain = std::max(plain, reference::relative_error(std::vector<float>(y.begin(), y.end()), exact));
    }
    const double bound = 2 * plain + kFloor;
    for (int ranks = 1; ranks <= std::min<int64_t>(8, g.config.heads); ++ranks)
      for (int members = 1; members <= ranks; ++members)
        for (const int64_t interleave : {1, 2, 4, 16, 64}) {
          if (ranks % members != 0) continue;
          if ((format != CacheFormat::f32 || members < ranks) && interleave != 2 && interleave != 16) continue;
          for (const ContextExchange exchange : {ContextExchange::latents, ContextExchange::heads}) {
            if (exchange == ContextExchange::heads && (members == 1 || interleave != 2)) continue;
            const std::string how = g.name + " by " + std::to_string(ranks) + " ranks in groups of " +
                                    std::to_string(members) + ", " + std::to_string(interleave) + " in turn, " +
                                    std::string(to_string(format)) + ", exchanging " + std::string(to_string(exchange));
            const auto out = by_ranks(g, ranks, members, interleave, format, exchange);
            EXPECT_LE(reference::relative_error(out[0].out, exact), bound) << how << " against float64";
            EXPECT_LE(reference::relative_error(out[0].out, file), bound + kFileError) << how << " against the file";
            for (const auto& other : out) EXPECT_TRUE(other.out == out[0].out) << how;
          }
        }
  }
}

std::vector<GoldenCase> with_indexer() {
  std::vector<GoldenCase> cases;
  for (const GoldenCase& c : golden_cases())
    if (read_golden(c).config.indexer) cases.push_back(c);
  return cases;
}

class GoldenRanksThatSelect : public testing::TestWithParam<GoldenCase> {};

// Whole files, far past what is selected: by the file's own choice its outputs, by the ranks' what float64 makes of it.
TEST_P(GoldenRanksThatSelect, ReproduceTheFile) {
  Golden g = read_golden(GetParam(), true);
  std::vector<int64_t> rows(static_cast<size_t>(g.length));
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int64_t>(i);
  const auto weights = reference::plain_weights(g.tensors, Dtype::f32);
  const std::vector<double> file(g.output.begin(), g.output.end());
  const auto each_grid = [&](auto&& expect) {
    for (int ranks = 2; ranks <= std::min<int64_t>(8, g.config.heads); ++ranks)
      for (int members = 2; members <= ranks; ++members)
        for (const int64_t interleave : {1, 2, 4, 16, 64}) {
          if (ranks % members != 0 || (members < ranks && interleave != 2)) continue;
          const std::string how = g.name + " by " + std::to_string(ranks) + " ranks in groups of " +
                                  std::to_string(members) + ", " + std::to_string(interleave) + " in turn";
          const std::vector<Ran> ran = by_ranks(g, ranks, members, interleave, CacheFormat::f32);
          for (const Ran& other : ran) EXPECT_TRUE(other.out == ran[0].out && other.selected == ran[0].selected) << how;
          expect(ran[0], how);
        }
  };
  if (g.tensors.indexer) {
    const Ran one = by_ranks(g, 1, 1, 1, CacheFormat::f32)[0];
    reference::Rounding rounding{.weights = Dtype::f32,
                                 .compute = Dtype::f32,
                                 .activations = Dtype::f32,
                                 .cache = cache_spec(g.config, CacheFormat::f32),
                                 .path = Path::latent};
    const auto exact = reference::output_rows(g.config, weights, g.hidden, rows, nullptr, one.selected),
               plain = reference::output_rows(g.config, weights, g.hidden, rows, &rounding, one.selected);
    const double bound = 2 * reference::relative_error(std::vector<float>(plain.begin(), plain.end()), exact) + kFloor;
    each_grid([&](const Ran& ran, const std::string& how) {
      EXPECT_EQ(ran.selected, one.selected) << how;
      EXPECT_LE(reference::relative_error(ran.out, exact), bound) << how;
    });
  }
  g.tensors.indexer.reset();
  for (int64_t row = 0; row < g.length; ++row)  // what a row does not see is not chosen
    for (int64_t k = 0; k < g.config.indexer->topk; ++k)
      if (int32_t& at = g.topk[static_cast<size_t>(row * g.config.indexer->topk + k)]; at > row) at = -1;
  each_grid([&](const Ran& ran, const std::string& how) {
    EXPECT_LE(reference::relative_error(ran.out, file), kFileError) << how << " by the file's choice";
  });
}

INSTANTIATE_TEST_SUITE_P(Files, GoldenRanksThatSelect, testing::ValuesIn(with_indexer()),
                         [](const auto& i) { return i.param.name(); });
INSTANTIATE_TEST_SUITE_P(Files, GoldenRanks, testing::ValuesIn(sampled(golden_cases(), 3)),
                         [](const auto& i) { return i.param.name(); });

}  // namespace
}  // namespace mla::test
