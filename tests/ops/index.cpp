// The sparse indexer beyond its conformance cases: every instruction set, bits that depend on nothing but the inputs,
// ties and NaN, a whole step against a plain one, and what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "backend/backend.hpp"
#include "backend/cpu/core/target.hpp"
#include "backend/cpu/select_topk/cut.hpp"
#include "backend/run.hpp"
#include "cache/index/codec.hpp"
#include "cases/case.hpp"
#include "cases/padded.hpp"
#include "cases/poisoned_cache.hpp"
#include "core/threads.hpp"
#include "mla/plan.hpp"
#include "support/dot_products.hpp"
#include "support/rotated_index_queries.hpp"
#include "support/sanitized.hpp"

namespace mla {
namespace {

using cases::Padded;
using cases::PoisonedIndexCache;
using cases::Random;

template <class Args>
std::string refusal(const Args& args) {
  ThreadPool pool(1);
  Stream stream(pool);
  try {
    ops::run(stream, args);
  } catch (const ShapeError& e) {
    EXPECT_EQ(std::string_view(e.what()).find('\n'), std::string_view::npos);
    return e.what();
  }
  return "accepted";
}

class IndexOnTarget : public testing::TestWithParam<std::string_view> {
 protected:
  void SetUp() override {
    try {
      cpu::restrict_target(GetParam());
    } catch (const UnsupportedError& e) {
      GTEST_SKIP() << e.what();
    }
  }
  void TearDown() override { cpu::restrict_target(""); }
};

TEST_P(IndexOnTarget, PassesItsCases) {
  ThreadPool pool(2);
  Stream stream(pool);
  for (const cases::CaseType* type : {&cases::index_append, &cases::index_gather, &cases::index_query,
                                      &cases::index_score, &cases::select_topk, &cases::hadamard}) {
    for (const cases::Params& p : test::sampled(type->sweep(31), 5, 2)) {
      const auto c = type->make(p);
      c->run(stream);
      const cases::Verdict v = c->verify();
      EXPECT_TRUE(v.ok) << describe(p, type->op) << ": error " << v.error << " above bound " << v.bound << "; "
                        << v.detail;
    }
  }
}

// One request of `context` cached keys and its queries, with room for scores.
struct Step {
  Step(IndexCacheFormat format, Dtype dtype, int64_t tokens, int64_t heads, int64_t dim, int32_t length,
       int64_t page_size, uint64_t seed = 5)
      : random(seed),
        cache({.format = format, .dim = dim, .page_size = page_size}, (length + page_size - 1) / page_size + 1, random),
        q(dtype, {tokens, heads, dim}),
        weights(Dtype::f32, {tokens, heads}),
        scores(Dtype::f32, {tokens, length}),
        state(static_cast<size_t>(tokens) * topk_state_bytes(kMostTopk) + 64) {
    std::vector<float> key(static_cast<size_t>(dim));
    for (int32_t i = 0; i < length; ++i) {
      if (i % page_size == 0) table.push_back(cache.page(i / page_size));
      random.fill_normal(key);
      cache::index::encode(cache.view().spec, cache.view().page(table.back()), i % page_size, key.data());
    }
    q.fill_normal(random);
    weights.fill_normal(random);
    backend_bytes = backend::backend({}).scratch_per_worker({.index_heads = heads, .index_dim = dim});
    scratch = Buffer(8 * backend_bytes);
  }
  ops::IndexScoreArgs score(std::span<const IndexItem> items, int64_t begin, int64_t columns) {
    return {.q = q.any(),
            .weights = weights.view(),
            .scale = 0.25f,
            .cache = cache.view(),
            .block_table = {table.data(), {1, static_cast<int64_t>(table.size())}},
            .items = items,
            .scores = scores.view().slice<Key>(begin, columns),
            .scratch = {scratch.data(), backend_bytes}};
  }
  ops::TopkState topk_state(int64_t topk) {
    const auto at = reinterpret_cast<uintptr_t>(state.data());
    return {reinterpret_cast<std::byte*>((at + 63) / 64 * 64), q.any().extent<Token>(), topk};
  }

  Random random;
  PoisonedIndexCache cache;
  std::vector<int32_t> table;
  Padded<Token, IndexHead, IndexDim> q;
  Padded<Token, IndexHead> weights;
  Padded<Token, Key> scores;
  std::vector<std::byte> state;
  Buffer scratch;
  size_t backend_bytes = 0;
};

TEST_P(IndexOnTarget, ScoresKeepTheirBitsInEveryTileAndOnEveryThread) {
  test::Sample sample(2);
  constexpr int32_t kTokens = 11, kLength = 2500;
  for (IndexCacheFormat format : index_cache_formats())
    for (Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::fp8_e4m3}) {
      if (!sample.take()) continue;
      Step step(format, dtype, kTokens, 40, 48, kLength, 37);
      ThreadPool one(1), three(3);
      Stream alone(one), shared(three);
      const IndexItem whole{.q_count = kTokens, .kv_end = kLength, .visible = kLength - kTokens};
      ops::run(alone, step.score({&whole, 1}, 0, kLength));
      const std::vector<std::byte> expected = step.scores.bytes();
      for (int i = 0; i < 3; ++i) {
        std::vector<std::byte> blank(expected.size(), std::byte{0xff});
        step.scores.restore(blank);
        for (int32_t begin = 0, columns; begin < kLength; begin += columns) {
          columns = std::min<int32_t>(kLength - begin, static_cast<int32_t>(step.random.integer(1, 1200)));
          std::vector<IndexItem> items;
          for (int32_t row = 0, rows; row < kTokens; row += rows) {
            rows = std::min<int32_t>(kTokens - row, static_cast<int32_t>(step.random.integer(1, 9)));
            items.push_back({.q_begin = row,
                             .q_count = rows,
                             .kv_begin = begin,
                             .kv_end = begin + columns,
                             .visible = whole.visible + row,
                             .row = row});
          }
          ops::run(shared, step.score(items, begin, columns));
        }
        EXPECT_EQ(step.scores.bytes(), expected) << to_string(format) << " " << to_string(dtype);
      }
    }
}

// Queries that no key answers: every product is negative or zero, so every score is 0 and only positions decide.
TEST_P(IndexOnTarget, DeadScoresSelectTheFirstPositions) {
  constexpr int32_t kTokens = 2, kLength = 6000;
  Step step(IndexCacheFormat::fp8, Dtype::f32, kTokens, 64, 128, kLength, 64);
  std::vector<float> key(128, 1.0f);
  for (int32_t i = 0; i < kLength; ++i)
    cache::index::encode(step.cache.view().spec, step.cache.view().page(step.table[i / 64]), i % 64, key.data());
  for (int64_t t = 0; t < kTokens; ++t)
    for (int64_t h = 0; h < 64; ++h)
      for (int64_t d = 0; d < 128; ++d) step.q.view()(t, h, d) = -1.0f;
  ThreadPool pool(2);
  Stream stream(pool);
  const IndexItem item{.q_count = kTokens, .kv_end = kLength, .visible = kLength - kTokens};
  ops::run(stream, step.score({&item, 1}, 0, kLength));
  const ops::TopkState state = step.topk_state(2048);
  ops::run(stream,
           ops::SelectTopkArgs{.scores = step.scores.view(), .items = {&item, 1}, .begin = true, .state = state});
  std::vector<int32_t> indices(kTokens * 2048);
  ops::run(stream,
           ops::FinishTopkArgs{
               .state = state, .items = {&item, 1}, .indices = {indices.data(), {kTokens, 2048}}, .scores = {}});
  for (int32_t t = 0; t < kTokens; ++t)
    for (int32_t k = 0; k < 2048; ++k) ASSERT_EQ(indices[t * 2048 + k], k) << t;
}

TEST_P(IndexOnTarget, NanScoresAreNanAndComeLast) {
  constexpr int32_t kLength = 100;
  for (Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    Step step(IndexCacheFormat::bf16, dtype, 1, 64, 128, kLength, 16);
    std::vector<float> key(128, 1.0f);
    for (int32_t nan : {3, 50, 99}) {
      key[nan] = cases::poison();
      cache::index::encode(step.cache.view().spec, step.cache.view().page(step.table[nan / 16]), nan % 16, key.data());
      key[nan] = 1.0f;
    }
    ThreadPool pool(1);
    Stream stream(pool);
    const IndexItem item{.q_count = 1, .kv_end = kLength, .visible = kLength - 1};
    ops::run(stream, step.score({&item, 1}, 0, kLength));
    for (int32_t c = 0; c < kLength; ++c)
      EXPECT_EQ(std::isnan(step.scores.view()(0, c)), c == 3 || c == 50 || c == 99) << c;
    for (int64_t topk : {97, 98, 100}) {
      const ops::TopkState state = step.topk_state(topk);
      ops::run(stream,
               ops::SelectTopkArgs{.scores = step.scores.view(), .items = {&item, 1}, .begin = true, .state = state});
      std::vector<int32_t> indices(topk);
      std::vector<float> best(topk);
      ops::run(stream, ops::FinishTopkArgs{.state = state,
                                           .items = {&item, 1},
                                           .indices = {indices.data(), {1, topk}},
                                           .scores = {best.data(), {1, topk}}});
      const bool has3 = std::count(indices.begin(), indices.end(), 3),
                 has50 = std::count(indices.begin(), indices.end(), 50);
      EXPECT_EQ(has3, topk > 97);
      EXPECT_EQ(has50, topk > 98);
      if (has3) {
        EXPECT_EQ(best[3], -std::numeric_limits<float>::infinity());
      }
    }
  }
}

// Shards of a sequence select on their own; their (score, position) pairs are selected from again. The result is the
// selection from everything, whatever the shards.
// Heads are padded to whole vectors, whose products with an infinity are no numbers: a score is of its own heads.
TEST_P(IndexOnTarget, InfiniteKeysMeetTheirHeadsAlone) {
  constexpr int32_t kTokens = 2, kLength = 200, kDim = 64;
  for (const IndexCacheFormat format : {IndexCacheFormat::f32, IndexCacheFormat::bf16})
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16})
      for (const int64_t heads : {1, 5, 16, 20, 33}) {
        Step step(format, dtype, kTokens, heads, kDim, kLength, 16);
        std::vector<float> key(kDim, 0.0f);
        key[7] = std::numeric_limits<float>::infinity();
        for (const int32_t at : {3, 64, 199})
          cache::index::encode(step.cache.view().spec, step.cache.view().page(step.table[static_cast<size_t>(at / 16)]),
                               at % 16, key.data());
        const IndexItem item{.q_count = kTokens, .kv_end = kLength, .visible = kLength - 1};
        ThreadPool pool(2);
        Stream stream(pool);
        const ops::IndexScoreArgs args = step.score({&item, 1}, 0, kLength);
        ops::run(stream, args);
        for (int64_t t = 0; t < kTokens; ++t)
          for (const int64_t at : {3, 64, 199}) {
            // Of heads that see it with a number above 0, the weights' sign decides; of the others nothing comes.
            float want = 0;
            for (int64_t h = 0; h < heads; ++h)
              if (load_float(dtype, args.q.at(t, h, 0), 7) > 0)
                want += args.weights(t, h) * std::numeric_limits<float>::infinity();
            const float found = args.scores(t, at);
            EXPECT_TRUE(std::isnan(want) ? std::isnan(found) : found == want)
                << to_string(format) << " " << to_string(dtype) << ", " << heads << " heads: " << found << ", not "
                << want;
          }
      }
}

TEST_P(IndexOnTarget, SelectionsMergeExactly) {
  constexpr int32_t kLength = 20000;
  constexpr int64_t kTopk = 700;
  Random random(8);
  ThreadPool pool(2);
  Stream stream(pool);
  for (int64_t shards : {1, 2, 5}) {
    std::vector<float> all(kLength);
    for (float& s : all) s = static_cast<float>(random.integer(-300, 300));  // many ties
    std::vector<std::byte> memory(topk_state_bytes(kTopk) + 64);
    const ops::TopkState state{
        reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64), 1, kTopk};
    auto select = [&](std::span<const float> scores, std::span<const int32_t> positions, std::vector<int32_t>& indices,
                      std::vector<float>& best) {
      const int64_t n = static_cast<int64_t>(scores.size());
      const IndexItem item{.q_count = 1, .kv_end = static_cast<int32_t>(n), .visible = static_cast<int32_t>(n)};
      ops::SelectTopkArgs args{
          .scores = {scores.data(), {1, n}}, .items = {&item, 1}, .positions = {}, .begin = true, .state = state};
      if (!positions.empty()) args.positions = {positions.data(), {1, n}};
      ops::run(stream, args);
      indices.assign(kTopk, 0);
      best.assign(kTopk, 0);
      ops::run(stream, ops::FinishTopkArgs{.state = state,
                                           .items = {&item, 1},
                                           .indices = {indices.data(), {1, kTopk}},
                                           .scores = {best.data(), {1, kTopk}}});
    };
    std::vector<int32_t> expected, indices, gathered;
    std::vector<float> expected_scores, best, gathered_scores;
    select(all, {}, expected, expected_scores);
    for (int64_t shard = shards; shard-- > 0;) {
      std::vector<float> own;
      std::vector<int32_t> positions;
      for (int32_t i = 0; i < kLength; ++i)
        if (i / 16 % shards == shard) {
          own.push_back(all[i]);
          positions.push_back(i);
        }
      select(own, positions, indices, best);
      gathered.insert(gathered.end(), indices.begin(), indices.end());
      gathered_scores.insert(gathered_scores.end(), best.begin(), best.end());
      gathered.push_back(-1);  // what padding leaves
      gathered_scores.push_back(1e9f);
    }
    select(gathered_scores, gathered, indices, best);
    EXPECT_EQ(indices, expected) << shards;
    EXPECT_EQ(best, expected_scores) << shards;
  }
}

// Three neighbouring scores, so that the search for the threshold ends on the middle one, with exactly topk at or above
// it. An equal score at a lower position must still get in.
TEST_P(IndexOnTarget, EqualScoresAtLowerPositionsStillEnter) {
  constexpr int32_t kFirst = 5000, kColumns = 1500;
  constexpr int64_t kTopk = 4;
  const float low = 1.0f, middle = std::nextafter(low, 2.0f), high = std::nextafter(middle, 2.0f);
  std::vector<float> late(kColumns, low), early(10, low);
  late[7] = late[20] = high;
  late[3] = late[30] = middle;
  early[4] = early[9] = middle;
  std::vector<std::byte> memory(topk_state_bytes(kTopk) + 64);
  const ops::TopkState state{reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64),
                             1, kTopk};
  ThreadPool pool(1);
  Stream stream(pool);
  const IndexItem last{.q_count = 1, .kv_begin = kFirst, .kv_end = kFirst + kColumns, .visible = 9999},
      first{.q_count = 1, .kv_begin = 0, .kv_end = 10, .visible = 9999};
  ops::run(
      stream,
      ops::SelectTopkArgs{
          .scores = {late.data(), {1, kColumns}}, .items = {&last, 1}, .positions = {}, .begin = true, .state = state});
  ops::run(stream, ops::SelectTopkArgs{
                       .scores = {early.data(), {1, 10}}, .items = {&first, 1}, .positions = {}, .state = state});
  std::vector<int32_t> indices(kTopk);
  ops::run(stream, ops::FinishTopkArgs{
                       .state = state, .items = {&last, 1}, .indices = {indices.data(), {1, kTopk}}, .scores = {}});
  EXPECT_EQ(indices, (std::vector<int32_t>{4, 9, kFirst + 7, kFirst + 20}));
}

// A selection that begins with many columns may guess its threshold from some of them: rows in which every so many-th
// score is better, worse or no better guide than the rest, whole and in two windows.
TEST_P(IndexOnTarget, NoPatternOfScoresMisleadsASelection) {
  ThreadPool pool(1);
  Stream stream(pool);
  Random random(12);
  for (int64_t topk : {1, 97, 700, 2048})
    for (int64_t n : {topk_capacity(topk) + 1, 3 * topk_capacity(topk) + 5, int64_t{40000}})
      for (int kind = 0; kind < 5; ++kind) {
        const int64_t step = std::max<int64_t>(1, n / 1024), odd = random.integer(1, 2 * step);
        std::vector<float> scores(static_cast<size_t>(n));
        for (int64_t c = 0; c < n; ++c) {
          const bool seen = c % step == 0;
          float& s = scores[static_cast<size_t>(c)];
          switch (kind) {
            case 0: s = (seen ? 100.0f : 0.0f) + random.normal(); break;
            case 1: s = (seen ? -100.0f : 0.0f) + random.normal(); break;
            case 2: s = seen ? 1.0f : static_cast<float>(random.integer(0, 1)); break;
            case 3: s = seen ? std::numeric_limits<float>::quiet_NaN() : random.normal(); break;
            default: s = c % odd == 0 ? 5.0f : random.normal();
          }
        }
        const IndexItem item{.q_count = 1, .kv_end = static_cast<int32_t>(n), .visible = static_cast<int32_t>(n)};
        std::vector<std::byte> memory(topk_state_bytes(topk) + 64);
        const ops::TopkState state{
            reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64), 1, topk};
        const ops::SelectTopkArgs all{
            .scores = {scores.data(), {1, n}}, .items = {&item, 1}, .positions = {}, .begin = true, .state = state};
        std::vector<int32_t> expected(static_cast<size_t>(topk)), indices(static_cast<size_t>(topk));
        ops::reference(all, {expected.data(), {1, topk}}, {});
        for (int64_t first : {n, n - 7, int64_t{9}}) {
          ops::SelectTopkArgs window = all;
          window.scores = {scores.data(), {1, first}};
          ops::run(stream, window);
          if (first < n) {
            window.scores = {scores.data() + first, {1, n - first}};
            window.first = first;
            window.begin = false;
            ops::run(stream, window);
          }
          ops::run(stream,
                   ops::FinishTopkArgs{
                       .state = state, .items = {&item, 1}, .indices = {indices.data(), {1, topk}}, .scores = {}});
          EXPECT_EQ(indices, expected) << "kind " << kind << ", topk " << topk << ", " << n << " columns, window "
                                       << first;
        }
      }
}

// Rows of these lengths with scores of a kind, and what a pool's threads select from them.
class RowsToShare {
 public:
  enum Kind { normal, equal, few, rising, falling, odd, lowest, stretch, misleading, kinds, misleading_twice };
  struct Selected {
    std::vector<int32_t> indices;
    std::vector<float> scores;
    friend bool operator==(const Selected&, const Selected&) = default;
  };

  RowsToShare(std::span<const int64_t> lengths, Kind kind, int64_t topk)
      : topk_(topk), rows_(std::ssize(lengths)), columns_(*std::max_element(lengths.begin(), lengths.end())) {
    Random random(6);
    scores_.assign(static_cast<size_t>(rows_ * columns_), 1e30f);  // columns that a row does not see would be the best
    for (int64_t r = 0; r < rows_; ++r) {
      const auto row = static_cast<int32_t>(r), n = static_cast<int32_t>(lengths[static_cast<size_t>(r)]);
      items_.push_back({.request = row, .q_begin = row, .q_count = 1, .kv_end = n, .visible = n, .row = row});
      for (int64_t c = 0; c < n; ++c) scores_[static_cast<size_t>(r * columns_ + c)] = score(random, kind, c, n);
    }
  }

  // Positions in a random order; of ten columns `missing` have none.
  void shuffle(int64_t missing) {
    Random random(9);
    std::vector<int32_t> row(static_cast<size_t>(columns_));
    for (int64_t r = 0; r < rows_; ++r) {
      for (size_t c = 0; c < row.size(); ++c) row[c] = static_cast<int32_t>(3 * c);
      for (size_t c = row.size(); c-- > 1;)
        std::swap(row[c], row[static_cast<size_t>(random.integer(0, static_cast<int64_t>(c)))]);
      for (int32_t& p : row)
        if (random.integer(0, 9) < missing) p = -1;
      positions_.insert(positions_.end(), row.begin(), row.end());
    }
  }

  // In windows that end at these columns and the last. Without scratch rows are not shared.
  Selected select(ThreadPool& pool, std::vector<int64_t> ends = {}, bool scratch = true) const {
    Stream stream(pool);
    const size_t row = topk_state_bytes(topk_), workers = static_cast<size_t>(pool.threads());
    const Buffer state(static_cast<size_t>(rows_) * row), memory(row * workers + 64);
    for (const Buffer* b : {&state, &memory}) std::fill_n(b->data(), b->size(), std::byte{0xff});
    ends.push_back(columns_);
    for (int64_t first = 0; int64_t end : ends) {
      ops::SelectTopkArgs window = all();
      window.scores = window.scores.slice<Key>(first, end - first);
      if (window.positions) window.positions = window.positions.slice<Key>(first, end - first);
      window.first = first;
      window.begin = first == 0;
      window.state.data = state.data();
      if (scratch) window.scratch = {memory.data(), row};
      ops::run(stream, window);
      first = end;
    }
    Selected s = blank();
    ops::run(stream, ops::FinishTopkArgs{.state = {state.data(), rows_, topk_},
                                         .items = items_,
                                         .indices = {s.indices.data(), {rows_, topk_}},
                                         .scores = {s.scores.data(), {rows_, topk_}}});
    const std::byte* end = memory.data() + memory.size();
    EXPECT_TRUE(std::all_of(end - 64, end, [](std::byte b) { return b == std::byte{0xff}; })) << "behind the scratch";
    return s;
  }

  Selected by_definition() const {
    Selected s = blank();
    ops::reference(all(), {s.indices.data(), {rows_, topk_}}, {s.scores.data(), {rows_, topk_}});
    return s;
  }

 private:
  static float score(Random& random, Kind kind, int64_t column, int64_t n) {
    constexpr float kInf = std::numeric_limits<float>::infinity();
    const float some[] = {kInf, -kInf, cases::poison(), -cases::poison(), 0.0f, -0.0f, 1e-42f, 1.0f};
    switch (kind) {
      case equal: return 0.5f;
      case few: return static_cast<float>(random.integer(-2, 2));
      case rising: return static_cast<float>(column);
      case falling: return -static_cast<float>(column / 3);
      case odd: return some[random.integer(0, 7)];
      case lowest: return random.integer(0, 1) ? cases::poison() : -kInf;
      case stretch: return random.normal() + (column / 3000 == 2 ? 10.0f : 0.0f);
      case misleading: return random.normal() + (column % std::max<int64_t>(1, n / 1024) == 0 ? 100.0f : 0.0f);
      // In ranges of kLeastRange equal scores get past a guess, and every 33rd column is better, which the ranges keep.
      case misleading_twice:
        return column % cpu::kLeastRange % 33 == 0 && column % 128 != 0 ? 2.0f + random.normal() / 16 : 1.0f;
      default: return random.normal();
    }
  }
  ops::SelectTopkArgs all() const {
    ops::SelectTopkArgs a{.scores = {scores_.data(), {rows_, columns_}}, .items = items_, .begin = true};
    if (!positions_.empty()) a.positions = {positions_.data(), {rows_, columns_}};
    a.state = {nullptr, rows_, topk_};
    return a;
  }
  Selected blank() const {
    const auto n = static_cast<size_t>(rows_ * topk_);
    return {std::vector<int32_t>(n, 7), std::vector<float>(n, 7.0f)};
  }

  int64_t topk_, rows_, columns_;
  std::vector<float> scores_;
  std::vector<int32_t> positions_;
  std::vector<IndexItem> items_;
};

constexpr int kSharers[] = {1, 2, 3, 7, 16};

// A row has one range more from a quarter above each multiple of a range's columns on.
TEST_P(IndexOnTarget, ARowHasOneSelectionHoweverItIsShared) {
  test::Sample sample(4);
  ThreadPool one(1), three(3);
  constexpr int64_t kLeast = cpu::kLeastRange, kHelp = cpu::kLeastHelp, kTopk[] = {1, 300, 2048, 8192};
  std::vector<int64_t> lengths{7000, kHelp, 12 * kLeast, 20 * kLeast + 17};
  for (int64_t shortest : {2 * kHelp, 3 * kHelp / 2, 4 * kHelp / 3})  // in 2, 3 and 4 ranges
    for (int64_t more : {-2, -1, 0, 1}) lengths.push_back(shortest + more);
  for (int64_t ranges : {3, 4, 6, 7, 15, 16})
    for (int64_t more : {-1, 0, 1}) lengths.push_back(ranges * kLeast + kLeast / 4 + more);
  for (const int64_t n : lengths)
    for (int kind = 0; kind < RowsToShare::kinds; ++kind) {
      if (!sample.take()) continue;
      const int64_t topk = kTopk[static_cast<size_t>(n + kind) % 4];
      const RowsToShare rows({&n, 1}, static_cast<RowsToShare::Kind>(kind), topk);
      const auto expected = rows.select(one);
      for (int threads : kSharers) {
        Rehearsal many(threads);  // cuts as so many threads would, whatever the machine has
        EXPECT_TRUE(rows.select(many.pool()) == expected)
            << n << " columns, kind " << kind << ", topk " << topk << ", " << threads << " threads";
      }
      EXPECT_TRUE(rows.select(three) == expected) << n << " columns, kind " << kind << ", topk " << topk;
    }
}

TEST_P(IndexOnTarget, SharedRowsGoOnFromWindowToWindow) {
  test::Sample sample(4);
  ThreadPool one(1), three(3);
  constexpr int64_t kColumns = 150000;
  const std::vector<int64_t> windows[] = {{100}, {3000, 30000}, {kColumns / 2}, {50000, 100000, 140000}};
  for (int kind = 0; kind < RowsToShare::kinds; ++kind)
    for (int64_t topk : {97, 2048})
      for (int64_t missing : {-1, 0, 7}) {  // -1: positions are those of the columns
        if (!sample.take()) continue;
        RowsToShare rows({&kColumns, 1}, static_cast<RowsToShare::Kind>(kind), topk);
        if (missing >= 0) rows.shuffle(missing);
        const auto expected = rows.by_definition();
        for (const std::vector<int64_t>& ends : windows) {
          const std::string what = "kind " + std::to_string(kind) + ", topk " + std::to_string(topk) + ", missing " +
                                   std::to_string(missing) + ", first window " + std::to_string(ends[0]);
          EXPECT_TRUE(rows.select(one, ends) == expected) << what << ", one thread";
          for (int threads : kSharers) {
            Rehearsal many(threads);
            EXPECT_TRUE(rows.select(many.pool(), ends) == expected) << what << ", " << threads << " threads";
          }
          EXPECT_TRUE(rows.select(three, ends) == expected) << what;
        }
      }
}

TEST_P(IndexOnTarget, RowsOfAllLengthsAreSharedTogether) {
  ThreadPool one(1), three(3);
  const int64_t few[] = {200000, 30, 9000, 70000, 0, 2047, 120000}, two[] = {90000, 300000},
                many[] = {100,   10000, 10100, 10200, 10300, 10400, 10500, 10600, 10700, 10800,
                          10900, 11000, 11100, 11200, 11300, 11400, 11500, 11600, 400000};
  for (std::span<const int64_t> lengths : {std::span<const int64_t>(few), {two}, {many}})
    for (auto kind : {RowsToShare::normal, RowsToShare::few, RowsToShare::misleading}) {
      const RowsToShare rows(lengths, kind, 2048);
      const auto expected = rows.by_definition();
      EXPECT_TRUE(rows.select(one) == expected) << lengths.size() << " rows, kind " << kind;
      for (int threads : kSharers) {
        Rehearsal pool(threads);
        for (const std::vector<int64_t>& ends : {std::vector<int64_t>{}, {65000}})
          EXPECT_TRUE(rows.select(pool.pool(), ends) == expected)
              << lengths.size() << " rows, kind " << kind << ", " << threads << " threads, " << ends.size() + 1
              << " windows";
      }
      EXPECT_TRUE(rows.select(three) == expected) << lengths.size() << " rows, kind " << kind;
    }
}

INSTANTIATE_TEST_SUITE_P(Targets, IndexOnTarget, testing::ValuesIn(cpu::targets()));

TEST(IndexScore, TakesDotProductsWhereThereAreAny) {
  Step step(IndexCacheFormat::bf16, Dtype::bf16, 3, 40, 48, 500, 37);
  const IndexItem whole{.q_count = 3, .kv_end = 500, .visible = 497};
  ThreadPool pool(1);
  Stream stream(pool);
  test::expect_dot_products([&] {
    ops::run(stream, step.score({&whole, 1}, 0, 500));
    return step.scores.bytes();
  });
}

// Tasks of each run: ranges and rows, after a wrong guess the ranges again, what joins them, and finish_topk.
TEST(SelectTopk, LongRowsAreCutWhereThreadsWouldIdle) {
  constexpr int64_t kLeast = cpu::kLeastRange, kHelp = cpu::kLeastHelp;
  auto tasks = [](int threads, std::vector<int64_t> lengths, bool scratch = true,
                  RowsToShare::Kind kind = RowsToShare::normal) {
    Rehearsal pool(threads);
    RowsToShare(lengths, kind, 2048).select(pool.pool(), {}, scratch);
    std::vector<size_t> sizes;
    for (const Rehearsal::Run& run : pool.take()) sizes.push_back(run.size());
    return sizes;
  };
  using Sizes = std::vector<size_t>;
  EXPECT_EQ(tasks(16, {16 * kLeast}), (Sizes{16 + 1, 1, 1}));
  EXPECT_EQ(tasks(16, {16 * kLeast}, true, RowsToShare::misleading), (Sizes{16 + 1, 16, 1, 1}));
  EXPECT_EQ(tasks(16, {5 * kLeast}), (Sizes{5 + 1, 1, 1}));
  EXPECT_EQ(tasks(2, {2 * kHelp}), (Sizes{2 + 1, 1, 1}));
  EXPECT_EQ(tasks(2, {100 * kLeast, 10 * kLeast, 20}), (Sizes{2 + 3, 1, 3}));
  EXPECT_EQ(tasks(16, std::vector<int64_t>(8, 8 * kLeast)), (Sizes{16 + 8, 8, 8}));
  // Too short, one thread, rows for all threads, no scratch.
  EXPECT_EQ(tasks(2, {2 * kHelp - 2}), (Sizes{1, 1}));
  EXPECT_EQ(tasks(1, {16 * kLeast}), (Sizes{1, 1}));
  EXPECT_EQ(tasks(16, std::vector<int64_t>(16, 8 * kLeast)), (Sizes{16, 16}));
  EXPECT_EQ(tasks(16, std::vector<int64_t>(13, 8 * kLeast)), (Sizes{13, 13}));
  EXPECT_EQ(tasks(16, {16 * kLeast}, false), (Sizes{1, 1}));
}

// What ranges kept is sampled, too, where it is more than a row has room for.
TEST(SelectTopk, NoPatternOfWhatRangesKeepMisleadsASelection) {
  const int64_t columns = 16 * cpu::kLeastRange;
  const RowsToShare rows({&columns, 1}, RowsToShare::misleading_twice, 2048);
  Rehearsal pool(16);
  EXPECT_TRUE(rows.select(pool.pool()) == rows.by_definition());
}

// A step of mixed requests as its schedule says, in tiles of several sizes, against scoring everything at once.
TEST(IndexStep, ScheduleGivesTheUnstreamedSelection) {
  constexpr int64_t kHeads = 8, kDim = 32, kTopk = 300, kPage = 16;
  const std::vector<RequestPlan> requests{{.q_begin = 0, .query_len = 1, .context = 5000},
                                          {.q_begin = 1, .query_len = 400, .context = 100},
                                          {.q_begin = 401, .query_len = 3, .context = 10},
                                          {.q_begin = 404, .query_len = 90, .context = 2500}};
  constexpr int64_t kRows = 494, kPages = 320;
  Random random(4);
  PoisonedIndexCache cache({.dim = kDim, .page_size = kPage}, 1000, random);
  std::vector<int32_t> table(requests.size() * kPages, -5);
  std::vector<float> key(kDim);
  int64_t page = 0;
  for (size_t r = 0; r < requests.size(); ++r)
    for (int64_t i = 0; i < requests[r].context + requests[r].query_len; ++i) {
      int32_t& id = table[r * kPages + i / kPage];
      if (i % kPage == 0) id = cache.page(page++);
      random.fill_normal(key);
      cache::index::encode(cache.view().spec, cache.view().page(id), i % kPage, key.data());
    }
  Padded<Token, IndexHead, IndexDim> q(Dtype::f32, {kRows, kHeads, kDim});
  Padded<Token, IndexHead> weights(Dtype::f32, {kRows, kHeads});
  q.fill_normal(random);
  weights.fill_normal(random);
  ThreadPool pool(2);
  Stream stream(pool);
  const size_t per_worker = backend::backend({}).scratch_per_worker({.index_heads = kHeads, .index_dim = kDim});
  const Buffer scratch(2 * per_worker);
  const ops::IndexScoreArgs base{.q = q.any(),
                                 .weights = weights.view(),
                                 .cache = cache.view(),
                                 .block_table = {table.data(), {static_cast<int64_t>(requests.size()), kPages}},
                                 .scratch = {scratch.data(), per_worker}};

  // Everything at once, row by row.
  std::vector<int32_t> expected(kRows * kTopk, 7);
  std::vector<float> scores(kRows * 6000, cases::poison());
  std::vector<IndexItem> whole;
  for (size_t r = 0; r < requests.size(); ++r)
    whole.push_back({.request = static_cast<int32_t>(r),
                     .q_begin = requests[r].q_begin,
                     .q_count = requests[r].query_len,
                     .kv_end = requests[r].context + requests[r].query_len,
                     .visible = requests[r].context,
                     .row = requests[r].q_begin});
  ops::IndexScoreArgs all = base;
  all.items = whole;
  all.scores = {scores.data(), {kRows, 6000}};
  ops::run(stream, all);
  ops::reference(
      ops::SelectTopkArgs{.scores = all.scores, .items = whole, .positions = {}, .state = {nullptr, 0, kTopk}},
      {expected.data(), {kRows, kTopk}}, {});

  for (size_t bytes : {topk_state_bytes(kTopk) + 4096, size_t{300000}, kIndexTileBytes}) {
    const IndexSchedule s = schedule_index(requests, kTopk, bytes);
    std::vector<int32_t> indices(kRows * kTopk, 7);
    const View<int32_t, Token, Topk> out(indices.data(), {kRows, kTopk});
    const Buffer tile(s.tiles.score_bytes), state(s.tiles.state_bytes);
    const ops::TopkState topk{state.data(), s.tiles.rows, kTopk};
    ops::IndexScoreArgs score = base;
    score.scores = {tile.as<float>(), {s.tiles.rows, s.tiles.keys}};
    ops::run(stream, ops::FillTopkArgs{s.all, out});
    for (const IndexTile& t : s.selected) {
      score.items = t.rows;
      for (int64_t round = 0; round < t.rounds(s.tiles.keys); ++round) {
        score.first = round * s.tiles.keys;
        ops::run(stream, score);
        ops::run(stream, ops::SelectTopkArgs{.scores = score.scores,
                                             .items = t.rows,
                                             .first = score.first,
                                             .positions = {},
                                             .begin = round == 0,
                                             .state = topk});
      }
      ops::run(stream, ops::FinishTopkArgs{.state = topk, .items = t.rows, .indices = out, .scores = {}});
    }
    EXPECT_EQ(indices, expected) << bytes;
  }
}

TEST(IndexStep, QueriesRotatedOnTheWayAreRopeThenCodes) {
  Random random(3);
  ThreadPool pool(2);
  Stream stream(pool);
  for (auto [dim, rope] : {std::pair<int64_t, int64_t>{40, 24}, {128, 64}, {600, 64}})
    for (const bool interleaved : {true, false})
      test::expect_rotated_index_queries(stream, 5, 7, dim, rope, interleaved, 3, random);
}

// fp8 codes and their folded scales score as the queries that they stand for.
TEST(IndexStep, FoldedScalesScoreAsTheQuantisedQuery) {
  constexpr int64_t kTokens = 5, kHeads = 64, kDim = 128;
  constexpr int32_t kLength = 300;
  Step step(IndexCacheFormat::fp8, Dtype::f32, kTokens, kHeads, kDim, kLength, 64);
  for (int64_t t = 0; t < kTokens; ++t)
    for (int64_t h = 0; h < kHeads; ++h)
      for (int64_t d = 0; d < kDim; ++d) step.q.view()(t, h, d) *= static_cast<float>(h + 1);
  Padded<Token, IndexHead, IndexDim> codes(Dtype::fp8_e4m3, {kTokens, kHeads, kDim});
  Padded<Token, IndexHead> scaled(Dtype::f32, {kTokens, kHeads});
  ThreadPool pool(2);
  Stream stream(pool);
  ops::run(stream, ops::IndexQueryArgs{step.q.view(), step.weights.view(), codes.view<fp8_e4m3>(), scaled.view()});
  const IndexItem item{.q_count = kTokens, .kv_end = kLength, .visible = kLength};
  ops::IndexScoreArgs args = step.score({&item, 1}, 0, kLength);
  args.q = codes.any();
  args.weights = scaled.view();
  ops::run(stream, args);
  const std::vector<float> got = step.scores.values();

  // The same queries in f32, their weights as they were.
  for (int64_t t = 0; t < kTokens; ++t)
    for (int64_t h = 0; h < kHeads; ++h)
      for (int64_t d = 0; d < kDim; ++d)
        step.q.view()(t, h, d) =
            to_float(codes.view<fp8_e4m3>()(t, h, d)) * (scaled.view()(t, h) / step.weights.view()(t, h));
  args.q = step.q.any();
  args.weights = step.weights.view();
  cases::Exact<Token, Key> exact({kTokens, kLength});
  ops::reference(args, exact.view());
  ops::run(stream, args);
  const cases::Verdict v = cases::compare(got, exact.values, step.scores.values(), 0x1p-22);
  EXPECT_TRUE(v.ok) << v.detail;
}

TEST(IndexCopyPages, CopiesWholePagesAndNothingElse) {
  const IndexCacheSpec spec{.dim = 20, .page_size = 3};
  Random random(5);
  PoisonedIndexCache cache(spec, 5, random);
  const IndexCacheView view = cache.view();
  for (int64_t page : {0, 3})
    for (size_t i = 0; i < spec.page_bytes(); ++i) view.page(page)[i] = std::byte{static_cast<uint8_t>(random.next())};
  std::vector<std::byte> expected = cache.bytes();
  std::memcpy(expected.data() + 2 * view.page_stride, view.page(0), spec.page_bytes());
  std::memcpy(expected.data() + 4 * view.page_stride, view.page(3), spec.page_bytes());
  const std::vector<ops::PageCopy> copies{{0, 2}, {3, 4}}, far{{0, 5}};
  ThreadPool pool(2);
  Stream stream(pool);
  ops::run(stream, ops::CopyPagesArgs{view, copies});
  EXPECT_EQ(cache.bytes(), expected);
  EXPECT_EQ(refusal(ops::CopyPagesArgs{view, far}), "copy_pages: destination page is 5, allowed 0 to 4");
}

TEST(IndexArguments, EveryViolationIsNamed) {
  const IndexCacheSpec spec{.dim = 8, .page_size = 4};
  IndexCache cache(spec, 3);
  std::vector<float> data(4096), more(4096);
  std::vector<fp8_e4m3> codes(4096);
  float *x = data.data(), *y = more.data();
  const std::vector<int32_t> table{2, 0, 77, 1, 1, -9}, good{11, -1}, far{3, 12}, three{0, 1, 2};

  const ops::IndexAppendArgs append{
      .keys = View<const float, Token, IndexDim>(x, {2, 8}), .slots = good, .cache = cache.view()};
  auto appended = [&](auto change) {
    ops::IndexAppendArgs a = append;
    change(a);
    return refusal(a);
  };
  using A = ops::IndexAppendArgs;
  EXPECT_EQ(refusal(append), "accepted");
  EXPECT_EQ(appended([&](A& a) { a.slots = far; }), "index_append: slot of token 1 is 12, the cache has 12");
  EXPECT_EQ(appended([&](A& a) { a.slots = three; }), "index_append: slots length is 3, allowed 0 to 2");
  EXPECT_EQ(appended([&](A& a) { a.keys = {x, {2, 9}}; }), "index_append: keys IndexDim is 9, cache dim is 8");
  EXPECT_EQ(appended([&](A& a) {
              a.keys = {x, {2, 8}, {16, 2}};
            }),
            "index_append: keys IndexDim has stride 2, 1 is needed");

  const std::vector<GatherPiece> pieces{{0, 1, 7, 0}}, outside{{0, 7, 2, 0}}, late{{1, 10, 3, 0}};
  const ops::IndexGatherArgs gather{.cache = cache.view(),
                                    .block_table = {table.data(), {2, 3}},
                                    .pieces = pieces,
                                    .keys = View<float, Key, IndexDim>(x, {10, 8}),
                                    .scales = {}};
  auto gathered = [&](auto change) {
    ops::IndexGatherArgs a = gather;
    change(a);
    return refusal(a);
  };
  using G = ops::IndexGatherArgs;
  EXPECT_EQ(refusal(gather), "accepted");
  EXPECT_EQ(gathered([&](G& a) { a.pieces = outside; }), "index_gather: piece 0 page id is 77, allowed 0 to 2");
  EXPECT_EQ(gathered([&](G& a) { a.pieces = late; }), "index_gather: piece 0 start is 10, allowed 0 to 9");
  EXPECT_EQ(gathered([&](G& a) {
              a.keys = {Dtype::f16, x, {10, 8}};
            }),
            "index_gather: keys is f16, allowed: f32 bf16 fp8_e4m3");
  EXPECT_EQ(gathered([&](G& a) {
              a.keys = View<fp8_e4m3, Key, IndexDim>(codes.data(), {10, 8});
            }),
            "index_gather: scales Key is 0, keys Key is 10");
  EXPECT_EQ(gathered([&](G& a) {
              a.keys = View<fp8_e4m3, Key, IndexDim>(codes.data(), {10, 8});
              a.cache.spec.format = IndexCacheFormat::bf16;
              a.cache.page_stride = a.cache.spec.page_bytes();
            }),
            "index_gather: keys are fp8_e4m3, the cache is bf16");

  const ops::IndexQueryArgs query{.q = View<const float, Token, IndexHead, IndexDim>(x, {2, 3, 8}),
                                  .weights = View<const float, Token, IndexHead>(y, {2, 3}),
                                  .codes = {codes.data(), {2, 3, 8}},
                                  .scaled_weights = {y, {2, 3}}};
  auto asked = [&](auto change) {
    ops::IndexQueryArgs a = query;
    change(a);
    return refusal(a);
  };
  using Q = ops::IndexQueryArgs;
  EXPECT_EQ(refusal(query), "accepted");
  EXPECT_EQ(asked([&](Q& a) {
              a.codes = {codes.data(), {2, 3, 9}};
            }),
            "index_query: codes IndexDim is 9, q IndexDim is 8");
  EXPECT_EQ(asked([&](Q& a) { a.weights = {y, {2, 4}}; }), "index_query: weights IndexHead is 4, q IndexHead is 3");
  EXPECT_EQ(asked([&](Q& a) {
              a.scaled_weights = {y, {1, 3}};
            }),
            "index_query: scaled_weights Token is 1, q Token is 2");
  const RotaryTable four({}, 4, 50), ten({}, 10, 50);
  const std::vector<int32_t> at{3, 50}, one{3};
  EXPECT_EQ(asked([&](Q& a) { a.table = &four, a.positions = one; }),
            "index_query: positions length is 1, q Token is 2");
  EXPECT_EQ(asked([&](Q& a) { a.table = &four, a.positions = at; }), "index_query: position is 50, allowed 0 to 49");
  EXPECT_EQ(asked([&](Q& a) { a.table = &ten, a.positions = at; }), "index_query: table's rope is 10, allowed 0 to 8");

  EXPECT_EQ(refusal(ops::HadamardArgs{.q = {x, {2, 3, 8}}, .k = {}}), "accepted");
  EXPECT_EQ(refusal(ops::HadamardArgs{.q = {}, .k = {x, {2, 12}}}),
            "hadamard: k IndexDim is 12, must be a power of two");
  EXPECT_EQ(refusal(ops::HadamardArgs{.q = {x, {2, 3, 0}}, .k = {}}),
            "hadamard: q IndexDim is 0, must be a power of two");

  const size_t bytes = backend::backend({}).scratch_per_worker({.index_heads = 3, .index_dim = 8});
  Buffer scratch(bytes);
  const std::vector<IndexItem> items{{.q_count = 1, .kv_end = 4, .visible = 5},
                                     {.request = 1, .q_begin = 1, .q_count = 1, .kv_end = 4, .visible = 2, .row = 1}};
  const ops::IndexScoreArgs score{.q = View<const float, Token, IndexHead, IndexDim>(x, {2, 3, 8}),
                                  .weights = View<const float, Token, IndexHead>(y, {2, 3}),
                                  .cache = cache.view(),
                                  .block_table = {table.data(), {2, 3}},
                                  .items = items,
                                  .scores = {y + 1000, {2, 6}},
                                  .scratch = {scratch.data(), bytes}};
  using S = ops::IndexScoreArgs;
  auto scored = [&](auto change) {
    S a = score;
    change(a);
    return refusal(a);
  };
  auto item = [&](IndexItem i) { return scored([&](S& a) { a.items = {&i, 1}; }); };
  EXPECT_EQ(refusal(score), "accepted");
  EXPECT_EQ(scored([&](S& a) { a.items = {}, a.scratch = {}; }), "accepted");
  EXPECT_EQ(scored([&](S& a) { a.scratch = {}; }), "index_score: no scratch");
  EXPECT_EQ(scored([&](S& a) { a.scratch.per_worker = 64; }),
            "index_score: scratch is 64 bytes a worker, 38656 are needed");
  EXPECT_EQ(scored([&](S& a) {
              a.q = View<const float, Token, IndexHead, IndexDim>(x, {2, 3, 9});
            }),
            "index_score: q IndexDim is 9, cache dim is 8");
  EXPECT_EQ(scored([&](S& a) { a.weights = {y, {2, 2}}; }), "index_score: weights IndexHead is 2, q IndexHead is 3");
  EXPECT_EQ(scored([&](S& a) { a.first = -1; }), "index_score: first is -1, allowed 0 to 2147483647");
  EXPECT_EQ(scored([&](S& a) { a.scores = {y, {1, 6}}; }), "index_score: item row is 1, allowed 1 to 0");
  EXPECT_EQ(item({.request = 2, .q_count = 1}), "index_score: item request is 2, allowed 0 to 1");
  EXPECT_EQ(item({.q_begin = 2, .q_count = 1}), "index_score: item q_begin is 2, allowed 0 to 1");
  EXPECT_EQ(item({.q_count = 1, .kv_begin = 8, .kv_end = 13}), "index_score: item kv_end is 13, allowed 0 to 12");
  EXPECT_EQ(item({.q_count = 1, .kv_begin = 7, .kv_end = 10}), "index_score: page id is 77, allowed 0 to 2");
  const std::vector<IndexItem> twice{items[0], items[0]};
  EXPECT_EQ(scored([&](S& a) { a.items = twice; }), "index_score: item row is 0, allowed 1 to 1");

  std::vector<std::byte> memory(2 * topk_state_bytes(4) + 64);
  const ops::TopkState state{reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64),
                             2, 4};
  const ops::SelectTopkArgs select{.scores = View<const float, Token, Key>(x, {2, 6}),
                                   .items = items,
                                   .positions = {},
                                   .begin = true,
                                   .state = state};
  using T = ops::SelectTopkArgs;
  auto selected = [&](auto change) {
    T a = select;
    change(a);
    return refusal(a);
  };
  EXPECT_EQ(refusal(select), "accepted");
  EXPECT_EQ(selected([&](T& a) { a.state.topk = 8193; }), "select_topk: topk is 8193, allowed 1 to 8192");
  EXPECT_EQ(selected([&](T& a) { a.state.topk = 0; }), "select_topk: topk is 0, allowed 1 to 8192");
  EXPECT_EQ(selected([&](T& a) { a.state.data = nullptr; }), "select_topk: no state");
  EXPECT_EQ(selected([&](T& a) { a.state.rows = 1; }), "select_topk: item row is 1, allowed 1 to 0");
  EXPECT_EQ(selected([&](T& a) { a.items = twice; }), "select_topk: item row is 0, allowed 1 to 1");
  EXPECT_EQ(selected([&](T& a) {
              a.positions = {table.data(), {1, 6}};
            }),
            "select_topk: positions Token is 1, scores Token is 2");
  EXPECT_EQ(selected([&](T& a) {
              a.scores = {x, {2, 6}, {12, 2}};
            }),
            "select_topk: scores Key has stride 2, 1 is needed");
  std::vector<int32_t> indices(100);
  EXPECT_EQ(selected([&](T& a) { a.indices = {indices.data(), {2, 4}}; }), "accepted");
  EXPECT_EQ(selected([&](T& a) { a.indices = {indices.data(), {2, 5}}; }), "select_topk: indices Topk is 5, topk is 4");
  EXPECT_EQ(selected([&](T& a) {
              a.indices = {indices.data(), {2, 4}, {8, 2}};
            }),
            "select_topk: indices Topk has stride 2, 1 is needed");
  EXPECT_EQ(selected([&](T& a) {
              a.indices = {indices.data(), {1, 4}};
            }),
            "select_topk: item q_begin is 1, allowed 0 to 0");

  const ops::FinishTopkArgs finish{.state = state, .items = items, .indices = {indices.data(), {2, 4}}, .scores = {}};
  using F = ops::FinishTopkArgs;
  auto finished = [&](auto change) {
    F a = finish;
    change(a);
    return refusal(a);
  };
  EXPECT_EQ(refusal(finish), "accepted");
  EXPECT_EQ(finished([&](F& a) { a.indices = {indices.data(), {2, 5}}; }), "finish_topk: indices Topk is 5, topk is 4");
  EXPECT_EQ(finished([&](F& a) {
              a.indices = {indices.data(), {1, 4}};
            }),
            "finish_topk: item q_begin is 1, allowed 0 to 0");
  EXPECT_EQ(finished([&](F& a) { a.scores = {y, {1, 4}}; }), "finish_topk: scores Token is 1, indices Token is 2");

  const IndexItem fits{.q_count = 2, .kv_end = 4, .visible = 2}, large{.q_count = 2, .kv_end = 5, .visible = 3};
  const View<int32_t, Token, Topk> out(indices.data(), {2, 4});
  EXPECT_EQ(refusal(ops::FillTopkArgs{{&fits, 1}, out}), "accepted");
  EXPECT_EQ(std::vector<int32_t>(indices.begin(), indices.begin() + 8),
            (std::vector<int32_t>{0, 1, 2, -1, 0, 1, 2, 3}));
  EXPECT_EQ(refusal(ops::FillTopkArgs{{&large, 1}, out}), "fill_topk: item's visible positions is 5, allowed 0 to 4");
}

}  // namespace
}  // namespace mla
