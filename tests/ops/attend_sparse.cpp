// attend_sparse and merge_sparse beyond their conformance cases: rows without keys, sinks, what must be the same bits
// however it is asked for, and what is refused. On every instruction set.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <ostream>

#include "backend/backend.hpp"
#include "backend/cpu/backend.hpp"
#include "backend/cpu/core/target.hpp"
#include "backend/run.hpp"
#include "cache/format.hpp"
#include "cases/poisoned_cache.hpp"
#include "mla/plan.hpp"
#include "support/count_allocations.hpp"
#include "support/dot_products.hpp"

namespace mla {
namespace {

using cases::PoisonedCache;
using cases::Random;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int32_t kSmallest = std::numeric_limits<int32_t>::min(), kLargest = std::numeric_limits<int32_t>::max();
constexpr int64_t kTokens = 700, kHeads = 19, kLatent = 64, kRope = 16, kEntry = kLatent + kRope;

struct Result {
  std::vector<float> out, lse, max;
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}
bool same_bits(const Result& a, const Result& b) {
  return same_bits(a.out, b.out) && same_bits(a.lse, b.lse) && same_bits(a.max, b.max);
}

/// Slots of each row, padded with -1 to one width.
struct Lists {
  explicit Lists(const std::vector<std::vector<int32_t>>& rows, int64_t at_least = 0)
      : count(static_cast<int64_t>(rows.size())) {
    topk = at_least;
    for (const auto& r : rows) topk = std::max(topk, static_cast<int64_t>(r.size()));
    slots.assign(static_cast<size_t>(count * topk), -1);
    for (int64_t r = 0; r < count; ++r) std::copy(rows[r].begin(), rows[r].end(), slots.begin() + r * topk);
  }
  ops::SparseSource of(const CacheView& cache) const {
    return {.cache = cache, .slots = {slots.data(), {count, topk}}, .lengths = {}};
  }
  int64_t count, topk;
  std::vector<int32_t> slots;
};

// A cache of kTokens rows among NaN, as pages of any size in any order, and queries.
class Fixture : public testing::Test {
 protected:
  explicit Fixture(CacheFormat format = CacheFormat::bf16, Dtype q = Dtype::bf16) : format_(format) {
    Random random(11);
    rows_.resize(static_cast<size_t>(kTokens * kEntry));
    random.fill_normal(rows_);
    std::vector<float> x(static_cast<size_t>(kQueries * kHeads * kEntry));
    random.fill_normal(x);
    q_bytes_.resize(x.size() * size_of(q));
    for (size_t i = 0; i < x.size(); ++i) store_float(q, q_bytes_.data(), static_cast<int64_t>(i), x[i]);
    q_ = {q, q_bytes_.data(), {kQueries, kHeads, kEntry}};
  }

  CacheSpec spec(int64_t page_size) const {
    return {.format = format_, .latent = kLatent, .rope = kRope, .page_size = page_size, .k_scale = 0.0625f};
  }
  /// Only the tokens asked for are written.
  PoisonedCache cache(int64_t page_size, std::span<const int32_t> tokens, uint64_t seed = 1) const {
    Random random(seed);
    PoisonedCache c(spec(page_size), kTokens / page_size + 2, random);
    for (int32_t t : tokens) {
      const int32_t slot = c.slot(t);
      const float* row = rows_.data() + int64_t{t} * kEntry;
      cache::format(format_).encode(spec(page_size), c.view().page(slot / page_size), slot % page_size, row,
                                    row + kLatent);
    }
    return c;
  }
  PoisonedCache cache(int64_t page_size, uint64_t seed = 1) const {
    std::vector<int32_t> all(kTokens);
    std::iota(all.begin(), all.end(), 0);
    return cache(page_size, all, seed);
  }
  static std::vector<int32_t> slots_of(const PoisonedCache& c, std::vector<int32_t> tokens) {
    for (int32_t& t : tokens) t = c.slot(t);
    return tokens;
  }
  static std::vector<int32_t> some_tokens(Random& random, int64_t count) {
    std::vector<int32_t> tokens(static_cast<size_t>(count));
    for (int32_t& t : tokens) t = static_cast<int32_t>(random.integer(0, kTokens - 1));
    return tokens;
  }

  /// Rows [first, first + lists) of the queries by a plan's items.
  Result run(std::vector<ops::SparseSource> sources, const SparseWork& work, std::vector<float> sinks = {},
             int64_t first = 0, int threads = 2) const {
    const int64_t rows = sources[0].slots.extent<Token>(), width = kLatent;
    Result r;
    r.out.assign(static_cast<size_t>(rows * kHeads * width), cases::poison());
    r.lse.assign(static_cast<size_t>(rows * kHeads), cases::poison());
    r.max = r.lse;
    std::vector<float> partial_out(static_cast<size_t>(work.partial_rows * kHeads * width), cases::poison()),
        partial_lse(static_cast<size_t>(work.partial_rows * kHeads), cases::poison()), partial_max = partial_lse;
    ThreadPool pool(threads);
    Stream stream(pool);
    const size_t per_worker = scratch_bytes();
    Buffer scratch(per_worker * static_cast<size_t>(threads));
    std::fill_n(scratch.data(), scratch.size(), std::byte{0xff});
    const ops::AttendSparseArgs args{.q = q_.slice<Token>(first, rows),
                                     .q_scale = 0.5f,
                                     .sources = sources,
                                     .items = work.items,
                                     .part_keys = work.part_keys,
                                     .scale = 0.11f,
                                     .sinks = sinks,
                                     .out = {r.out.data(), {rows, kHeads, width}},
                                     .lse = {r.lse.data(), {rows, kHeads}},
                                     .max_logits = {r.max.data(), {rows, kHeads}},
                                     .partial_out = {partial_out.data(), {work.partial_rows, kHeads, width}},
                                     .partial_lse = {partial_lse.data(), {work.partial_rows, kHeads}},
                                     .partial_max = {partial_max.data(), {work.partial_rows, kHeads}},
                                     .scratch = {scratch.data(), per_worker}};
    const ops::MergeSparseArgs merge{.partial_out = args.partial_out,
                                     .partial_lse = args.partial_lse,
                                     .partial_max = args.partial_max,
                                     .items = work.splits,
                                     .sinks = sinks,
                                     .out = args.out,
                                     .lse = args.lse,
                                     .max_logits = args.max_logits};
    const int64_t before = test::allocation_count();
    ops::run(stream, args);
    if (!work.splits.empty()) ops::run(stream, merge);
    EXPECT_EQ(test::allocation_count(), before);
    return r;
  }
  /// Unsplit.
  Result run(std::vector<ops::SparseSource> sources, std::vector<float> sinks = {}, int threads = 2) const {
    const int64_t rows = sources[0].slots.extent<Token>();
    int32_t keys = 0;
    for (const ops::SparseSource& s : sources) keys += static_cast<int32_t>(s.slots.extent<Topk>());
    const SparseWork whole{.items = {{.q_begin = 0, .q_count = static_cast<int32_t>(rows), .k_end = keys}}};
    return run(std::move(sources), whole, std::move(sinks), 0, threads);
  }
  static size_t scratch_bytes() {
    return backend::backend({}).scratch_per_worker({.heads = kHeads, .latent = kLatent, .rope = kRope});
  }

  static constexpr int64_t kQueries = 40;
  CacheFormat format_;
  std::vector<float> rows_;
  std::vector<std::byte> q_bytes_;
  AnyView<Token, Head, Entry> q_;
};

class AttendSparse : public Fixture {};

TEST_F(AttendSparse, RowsWithoutKeysAreZeroWhateverTheSinks) {
  const PoisonedCache nothing = cache(16, {});
  PoisonedCache c = nothing;
  const int32_t end = static_cast<int32_t>(c.view().pages * 16);
  const Lists lists({{}, {-1, -1}, {kSmallest, kLargest, end, -7}, {kSmallest + 1}}, 130),
      none(std::vector<std::vector<int32_t>>(2));
  for (float sink : {-kInf, 0.0f, 50.0f, kInf})
    for (const Lists* l : {&lists, &none}) {
      const Result r = run({l->of(c.view())}, std::vector<float>(kHeads, sink));
      for (float x : r.out) EXPECT_EQ(x, 0.0f);
      for (float x : r.lse) EXPECT_EQ(x, -kInf);
      for (float x : r.max) EXPECT_EQ(x, -kInf);
      for (SplitPolicy p : {SplitPolicy::fast, SplitPolicy::batch_invariant}) {
        SparseWork cut = plan_sparse(l->count, 3000, kHeads, p);  // more columns than there are: shorten them
        for (SparseItem& i : cut.items) i.k_begin = i.k_end = 0;
        EXPECT_TRUE(same_bits(run({l->of(c.view())}, cut, std::vector<float>(kHeads, sink)), r));
      }
    }
  // A length of 0 hides slots that hold something; no page at all holds nothing.
  PoisonedCache full = cache(16);
  const Lists some({slots_of(full, {1, 2, 3}), slots_of(full, {4})});
  const std::vector<int32_t> zero{0, 0};
  ops::SparseSource hidden = some.of(full.view());
  hidden.lengths = zero;
  CacheView empty = full.view();
  empty.pages = 0;
  for (const ops::SparseSource& s : {hidden, some.of(empty)}) {
    const Result r = run({s});
    for (float x : r.out) EXPECT_EQ(x, 0.0f);
    for (float x : r.lse) EXPECT_EQ(x, -kInf);
  }
}

TEST_F(AttendSparse, Sinks) {
  PoisonedCache c = cache(16);
  Random random(5);
  const Lists lists({slots_of(c, some_tokens(random, 300)), slots_of(c, {17})});
  const Result plain = run({lists.of(c.view())});
  std::vector<float> sinks(kHeads, -kInf);
  EXPECT_TRUE(same_bits(run({lists.of(c.view())}, sinks), plain));
  for (int64_t h = 0; h < kHeads; ++h) sinks[h] = h % 3 == 0 ? kInf : static_cast<float>(h) - 4.0f;
  for (int64_t splits : {1, 3}) {
    SparseWork work{.items = {}, .splits = {}, .partial_rows = splits > 1 ? 2 * splits : 0};
    for (int32_t s = 0; s < splits; ++s)
      work.items.push_back({.q_begin = 0,
                            .q_count = 2,
                            .k_begin = static_cast<int32_t>(s * 300 / splits),
                            .k_end = static_cast<int32_t>((s + 1) * 300 / splits),
                            .partial = splits > 1 ? s * 2 : -1});
    if (splits > 1) work.splits.push_back({0, 2, 0, static_cast<int32_t>(splits)});
    const Result r = run({lists.of(c.view())}, work, sinks), without = run({lists.of(c.view())}, work);
    EXPECT_TRUE(same_bits(r.lse, without.lse));
    EXPECT_TRUE(same_bits(r.max, plain.max));
    for (size_t i = 0; i < r.out.size(); ++i) {
      const size_t at = i / kLatent;
      const double kept = 1.0 / (1.0 + std::exp(static_cast<double>(sinks[at % kHeads]) - without.lse[at]));
      EXPECT_NEAR(r.out[i], kept * without.out[i], 1e-6 * std::abs(without.out[i]));
      if (sinks[at % kHeads] == kInf) {
        EXPECT_EQ(r.out[i], 0.0f);
      }
    }
  }
}

TEST_F(AttendSparse, DuplicatesCountTwice) {
  PoisonedCache c = cache(16);
  Random random(6);
  std::vector<int32_t> once(150);
  std::iota(once.begin(), once.end(), 100);
  std::vector<int32_t> twice = once;
  twice.insert(twice.end(), once.begin(), once.end());
  const Result a = run({Lists({slots_of(c, once)}).of(c.view())}), b = run({Lists({slots_of(c, twice)}).of(c.view())});
  EXPECT_TRUE(same_bits(a.max, b.max));
  for (size_t i = 0; i < a.lse.size(); ++i) EXPECT_NEAR(b.lse[i], a.lse[i] + std::log(2.0f), 1e-5);
  for (size_t i = 0; i < a.out.size(); ++i) EXPECT_NEAR(b.out[i], a.out[i], 2e-2);
}

// Format and query type decide which kernel serves: each of them on every instruction set.
struct Mode {
  std::string_view target;
  CacheFormat format;
  Dtype q;
};
std::string name_of(const Mode& m) {
  return std::string(m.target) + "_" + std::string(to_string(m.format)) + "_" + std::string(to_string(m.q));
}
void PrintTo(const Mode& m, std::ostream* out) { *out << name_of(m); }

class SparseByTarget : public Fixture, public testing::WithParamInterface<Mode> {
 protected:
  SparseByTarget() : Fixture(GetParam().format, GetParam().q) {}
  void SetUp() override {
    try {
      cpu::restrict_target(GetParam().target);
    } catch (const UnsupportedError& e) {
      GTEST_SKIP() << e.what();
    }
  }
  void TearDown() override { cpu::restrict_target(""); }

  std::vector<std::vector<int32_t>> random_rows(uint64_t seed, int64_t rows, int64_t most) const {
    Random random(seed);
    std::vector<std::vector<int32_t>> lists;
    for (int64_t r = 0; r < rows; ++r) lists.push_back(some_tokens(random, random.integer(0, most)));
    return lists;
  }
  static std::vector<std::vector<int32_t>> in_slots(const PoisonedCache& c, std::vector<std::vector<int32_t>> lists) {
    for (auto& l : lists) l = slots_of(c, l);
    return lists;
  }
};

// What does not exist takes no place, so the bits are those of the list without it; nor do pages and what lies in other
// slots make a difference.
TEST_P(SparseByTarget, OnlyWhatIsSelectedCounts) {
  const auto lists = random_rows(1, 9, 400);
  PoisonedCache full = cache(16);
  const Result expected = run({Lists(in_slots(full, lists)).of(full.view())});

  std::vector<int32_t> selected;
  for (const auto& l : lists) selected.insert(selected.end(), l.begin(), l.end());
  PoisonedCache bare = cache(7, selected, 99);  // other pages; slots of no list are NaN
  auto holed = in_slots(bare, lists);
  Random random(2);
  const int32_t odd[] = {-1, -2, kSmallest, kLargest, static_cast<int32_t>(bare.view().pages * 7)};
  for (auto& l : holed)
    for (int i = 0; i < 200; ++i)
      l.insert(l.begin() + random.integer(0, static_cast<int64_t>(l.size())), odd[random.integer(0, 4)]);
  EXPECT_TRUE(same_bits(run({Lists(holed).of(bare.view())}), expected));

  // A length hides what follows it.
  auto longer = in_slots(full, lists);
  std::vector<int32_t> lengths;
  for (auto& l : longer) {
    lengths.push_back(static_cast<int32_t>(l.size()));
    l.insert(l.end(), 30, full.slot(3));
  }
  const Lists padded(longer);
  ops::SparseSource s = padded.of(full.view());
  s.lengths = lengths;
  EXPECT_TRUE(same_bits(run({s}), expected));
}

TEST_P(SparseByTarget, SourcesJoinAsOneList) {
  const auto first = random_rows(3, 9, 300), second = random_rows(4, 9, 200);
  auto joined = first;
  for (size_t r = 0; r < joined.size(); ++r) joined[r].insert(joined[r].end(), second[r].begin(), second[r].end());
  PoisonedCache a = cache(16), b = cache(1, 8);
  const Result expected = run({Lists(in_slots(a, joined)).of(a.view())});
  const Lists la(in_slots(a, first)), lb(in_slots(b, second));
  EXPECT_TRUE(same_bits(run({la.of(a.view()), lb.of(b.view())}), expected));
}

TEST_P(SparseByTarget, EverythingInOrderGivesDenseBits) {
  PoisonedCache c = cache(16);
  std::vector<int32_t> all(kTokens);
  std::iota(all.begin(), all.end(), 0);
  const Result sparse = run({Lists({slots_of(c, all)}).of(c.view())});

  std::vector<int32_t> table;
  for (int64_t i = 0; i * 16 < kTokens; ++i) table.push_back(c.page(i));
  const LatentItem item{.q_count = 1, .kv_end = kTokens, .visible = kTokens};
  Result dense{.out = std::vector<float>(kHeads * kLatent), .lse = std::vector<float>(kHeads), .max = sparse.max};
  ThreadPool pool(1);
  Stream stream(pool);
  Buffer scratch(scratch_bytes());
  ops::run(stream, ops::AttendLatentArgs{.q = q_,
                                         .q_scale = 0.5f,
                                         .cache = c.view(),
                                         .block_table = {table.data(), {1, static_cast<int64_t>(table.size())}},
                                         .items = {&item, 1},
                                         .scale = 0.11f,
                                         .out = {dense.out.data(), {1, kHeads, kLatent}},
                                         .lse = {dense.lse.data(), {1, kHeads}},
                                         .scratch = {scratch.data(), scratch.size()}});
  EXPECT_TRUE(same_bits(sparse, dense));
}

TEST_P(SparseByTarget, BitsDoNotDependOnThreads) {
  const auto lists = random_rows(5, 13, 500);
  PoisonedCache c = cache(16);
  const Lists l(in_slots(c, lists));
  for (SplitPolicy p : {SplitPolicy::fast, SplitPolicy::batch_invariant}) {
    const SparseWork work = plan_sparse(l.count, l.topk, kHeads, p);
    const Result one = run({l.of(c.view())}, work, {}, 0, 1);
    for (int threads : {2, 3, 7}) EXPECT_TRUE(same_bits(run({l.of(c.view())}, work, {}, 0, threads), one));
  }
}

// Constant parts: the same bits whether a row stands alone or among others, and whether its parts are items or not.
TEST_P(SparseByTarget, PartsMakeRowsIndependentOfTheBatchAndOfSplits) {
  constexpr int64_t kRows = 6, kKeys = 2500;
  PoisonedCache c = cache(16);
  Random random(7);
  std::vector<std::vector<int32_t>> lists(kRows);
  for (auto& l : lists) l = some_tokens(random, &l == &lists[2] ? 900 : kKeys);
  const Lists l(in_slots(c, lists), kKeys);
  std::vector<float> sinks(kHeads);
  random.fill_normal(sinks, 4.0f);
  const SparseWork split = plan_sparse(kRows, kKeys, kHeads, SplitPolicy::batch_invariant),
                   unsplit = plan_sparse(kRows, kKeys, kHeads, SplitPolicy::batch_invariant, 1);
  ASSERT_EQ(split.items.size(), 3u);
  ASSERT_EQ(unsplit.items.size(), 1u);
  const Result expected = run({l.of(c.view())}, split, sinks);
  EXPECT_TRUE(same_bits(run({l.of(c.view())}, unsplit, sinks), expected));
  for (int64_t r = 0; r < kRows; ++r) {
    const Lists mine(in_slots(c, {lists[r]}), kKeys);
    const Result alone =
        run({mine.of(c.view())}, plan_sparse(1, kKeys, kHeads, SplitPolicy::batch_invariant), sinks, r);
    auto part = [&](const std::vector<float>& x) {
      const auto size = static_cast<int64_t>(x.size()) / kRows;
      return std::vector<float>(x.begin() + r * size, x.begin() + (r + 1) * size);
    };
    EXPECT_TRUE(same_bits(alone, {part(expected.out), part(expected.lse), part(expected.max)})) << "row " << r;
  }
}

// The whole way of a separate prefill: sequences gathered to a workspace, positions mapped to its rows.
TEST_P(SparseByTarget, WorkspaceGivesTheCachesBits) {
  const Dtype dtype = GetParam().format == CacheFormat::bf16 ? Dtype::bf16 : Dtype::f32;
  PoisonedCache c = cache(16);
  std::vector<int32_t> table(2 * 44);  // two requests of half the tokens
  for (int64_t i = 0; i < 44; ++i) table[i] = c.page(i), table[44 + i] = c.page(std::min<int64_t>(43, i + 20));
  const std::vector<int32_t> starts{0, 320}, counts{320, 380}, requests{1, 0, 1};
  Random random(8);
  std::vector<int32_t> positions(3 * 250);
  for (size_t i = 0; i < positions.size(); ++i)
    positions[i] = random.integer(0, 5) ? static_cast<int32_t>(random.integer(0, counts[requests[i / 250]] - 1)) : -1;
  Lists slots({std::vector<int32_t>(250), std::vector<int32_t>(250), std::vector<int32_t>(250)}), rows = slots;
  ThreadPool pool(2);
  Stream stream(pool);
  const View<const int32_t, Token, Topk> from(positions.data(), {3, 250});
  const View<const int32_t, Request, Page> block_table(table.data(), {2, 44});
  ops::run(stream, ops::MapToSlotsArgs{.positions = from,
                                       .requests = requests,
                                       .block_table = block_table,
                                       .page_size = 16,
                                       .pages = c.view().pages,
                                       .slots = {slots.slots.data(), {3, 250}}});
  ops::run(stream, ops::MapToWorkspaceArgs{.positions = from,
                                           .requests = requests,
                                           .starts = starts,
                                           .counts = counts,
                                           .rows = {rows.slots.data(), {3, 250}}});
  std::vector<std::byte> memory(kTokens * kEntry * size_of(dtype), std::byte{0xff});
  const std::vector<GatherPiece> pieces{{.request = 0, .start = 0, .count = 320, .row = 0},
                                        {.request = 1, .start = 0, .count = 380, .row = 320}};
  const AnyMutableView<Key, Entry> all(dtype, memory.data(), {kTokens, kEntry});
  ops::run(stream, ops::GatherArgs{.cache = c.view(),
                                   .block_table = block_table,
                                   .pieces = pieces,
                                   .kv_c = {dtype, all.data(), {kTokens, kLatent}, all.strides()},
                                   .k_pe = {dtype, all.at(0, kLatent), {kTokens, kRope}, all.strides()}});
  CacheView workspace{.spec = {.format = dtype == Dtype::bf16 ? CacheFormat::bf16 : CacheFormat::f32,
                               .latent = kLatent,
                               .rope = kRope,
                               .page_size = 1},
                      .data = memory.data(),
                      .pages = kTokens,
                      .page_stride = kEntry * size_of(dtype)};
  const Result direct = run({slots.of(c.view())}), gathered = run({rows.of(workspace)});
  // An f32 workspace is attended in f32, where bf16 queries may take the cache's rows in bf16.
  const bool exact =
      dtype == Dtype::bf16 || GetParam().q == Dtype::f32 || cpu::bf16_products() == cpu::Bf16Products::widened;
  if (exact) {
    EXPECT_TRUE(same_bits(direct, gathered));
  } else {
    for (size_t i = 0; i < direct.out.size(); ++i) EXPECT_NEAR(direct.out[i], gathered.out[i], 0.05);
  }
}

std::vector<Mode> modes() {
  std::vector<Mode> m;
  for (const std::string_view target : cpu::targets())
    for (CacheFormat f : {CacheFormat::bf16, CacheFormat::fp8, CacheFormat::f32})
      for (Dtype q : {Dtype::f32, Dtype::bf16}) m.push_back({target, f, q});
  return m;
}
INSTANTIATE_TEST_SUITE_P(Targets, SparseByTarget, testing::ValuesIn(modes()),
                         [](const auto& i) { return name_of(i.param); });

// And attend_latent, whose bits are the same on every target.
TEST_F(AttendSparse, TakesDotProductsWhereThereAreAny) {
  PoisonedCache c = cache(16);
  std::vector<int32_t> all(kTokens);
  std::iota(all.begin(), all.end(), 0);
  const Lists lists({slots_of(c, all)});
  test::expect_dot_products([&] { return run({lists.of(c.view())}).out; });
}

TEST_F(AttendSparse, RefusesWhatDoesNotFit) {
  PoisonedCache c = cache(16), other = cache(8);
  const Lists lists({{1, 2, 3, 4}, {5}, {6}}), more({{1, 2}, {5}, {6}});
  std::vector<ops::SparseSource> sources{lists.of(c.view()), more.of(other.view())};
  std::vector<SparseItem> items{{.q_begin = 0, .q_count = 3, .k_begin = 0, .k_end = 6}};
  std::vector<float> out(3 * kHeads * kLatent), lse(3 * kHeads), sinks(kHeads);
  Buffer scratch(scratch_bytes());
  ThreadPool pool(1);
  Stream stream(pool);
  const ops::AttendSparseArgs base{.q = q_.slice<Token>(0, 3),
                                   .sources = sources,
                                   .items = items,
                                   .sinks = sinks,
                                   .out = {out.data(), {3, kHeads, kLatent}},
                                   .lse = {lse.data(), {3, kHeads}},
                                   .scratch = {scratch.data(), scratch.size()}};
  auto refusal = [&](auto change) -> std::string {
    auto saved_sources = sources;
    auto saved_items = items;
    auto saved_sinks = sinks;
    ops::AttendSparseArgs a = base;
    change(a);
    std::string text = "accepted";
    try {
      ops::run(stream, a);
    } catch (const ShapeError& e) {
      text = e.what();
    }
    std::copy(saved_sources.begin(), saved_sources.end(), sources.begin());
    std::copy(saved_items.begin(), saved_items.end(), items.begin());
    std::copy(saved_sinks.begin(), saved_sinks.end(), sinks.begin());
    return text;
  };
  using A = ops::AttendSparseArgs;
  const std::vector<int32_t> long_one{4, 5, 0}, few{1, 2}, negative{0, -1, 0};
  EXPECT_EQ(refusal([](A&) {}), "accepted");
  EXPECT_EQ(refusal([](A& a) { a.sources = {}; }), "attend_sparse: sources is 0, allowed 1 to 2147483646");
  EXPECT_EQ(refusal([&](A&) { sources[1].cache.spec.rope = 8; }),
            "attend_sparse: q Entry is 80, cache latent + rope is 72");
  EXPECT_EQ(refusal([&](A&) {
              sources[1].cache.spec.latent = 72;
              sources[1].cache.spec.rope = 8;
            }),
            "attend_sparse: out Value is 64, cache value width is 72");
  EXPECT_EQ(refusal([&](A&) { sources[0].cache.spec.page_size = 0; }).substr(0, 20), "cache page size is 0");
  EXPECT_EQ(refusal([&](A&) { sources[0].lengths = long_one; }), "attend_sparse: lengths entry is 5, allowed 0 to 4");
  EXPECT_EQ(refusal([&](A&) { sources[0].lengths = negative; }), "attend_sparse: lengths entry is -1, allowed 0 to 4");
  EXPECT_EQ(refusal([&](A&) { sources[0].lengths = few; }),
            "attend_sparse: item q_begin + q_count is 3, allowed 0 to 2");
  EXPECT_EQ(refusal([&](A& a) { a.sinks = std::span(sinks).first(3); }),
            "attend_sparse: sinks length is 3, out Head is 19");
  EXPECT_EQ(refusal([&](A&) { sinks[2] = std::nanf(""); }),
            "attend_sparse: sink of head 2 is nan, allowed -inf to inf");
  EXPECT_EQ(refusal([&](A&) { items[0].k_end = 7; }), "attend_sparse: item k_end is 7, allowed 0 to 6");
  EXPECT_EQ(refusal([&](A&) { items[0].k_begin = -1; }), "attend_sparse: item k_begin is -1, allowed 0 to 6");
  EXPECT_EQ(refusal([&](A&) { items[0].q_count = 4; }), "attend_sparse: item q_count is 4, allowed 0 to 3");
  EXPECT_EQ(refusal([&](A&) { items[0].q_begin = 1; }), "attend_sparse: item q_begin is 1, allowed 0 to 0");
  EXPECT_EQ(refusal([&](A&) { items[0].partial = 0; }), "attend_sparse: partial_out Head is 0, q Head is 19");
  EXPECT_EQ(refusal([&](A& a) {
              items[0].partial = 2;
              a.partial_out = {out.data(), {3, kHeads, kLatent}};
              a.partial_lse = {lse.data(), {3, kHeads}};
            }),
            "attend_sparse: item partial is 2, allowed 0 to 0");
  EXPECT_EQ(refusal([&](A& a) { a.part_keys = -1; }), "attend_sparse: part_keys is -1, allowed 0 to 2147483647");
  EXPECT_EQ(refusal([&](A& a) {
              a.part_keys = 4;
              items[0].k_begin = 2;
            }),
            "attend_sparse: item k_begin % part_keys is 2, needed is 0");
  EXPECT_EQ(refusal([](A& a) { a.scratch = {}; }), "attend_sparse: no scratch");
  EXPECT_EQ(refusal([](A& a) { a.scratch.per_worker = 64; }),
            "attend_sparse: scratch is 64 bytes a worker, " +
                std::to_string(cpu::attend_sparse_scratch({.heads = kHeads, .latent = kLatent, .rope = kRope})) +
                " are needed");
  EXPECT_EQ(refusal([&](A& a) { a.lse = {lse.data(), {3, 2}}; }), "attend_sparse: lse Head is 2, q Head is 19");
  EXPECT_EQ(refusal([&](A& a) {
              a.max_logits = {lse.data(), {2, kHeads}};
            }),
            "attend_sparse: item q_begin + q_count is 3, allowed 0 to 2");
}

// Parts of all kinds, empty ones full of NaN, two items of other numbers of splits, against float64.
TEST(MergeSparse, AgreesWithFloat64) {
  constexpr int64_t kRows = 7, kWidth = 37, kParts = 3 * 4 + 2 * 2 + 1;
  Random random(21);
  std::vector<float> part(kParts * kHeads * kWidth), part_lse(kParts * kHeads), part_max(part_lse.size()),
      sinks(kHeads), out(kRows * kHeads * kWidth, cases::poison()), lse(kRows * kHeads, cases::poison()), max = lse;
  random.fill_normal(part);
  random.fill_normal(sinks, 5.0f);
  sinks[3] = kInf;
  sinks[4] = -kInf;
  const float empties[] = {-kInf, kInf, std::nanf("")};
  for (size_t i = 0; i < part_lse.size(); ++i) {
    const int64_t kind = random.integer(0, 7);
    part_lse[i] = kind < 3 ? empties[kind] : (kind == 3 ? 200.0f : 3.0f) * random.normal();
    part_max[i] = kind < 3 ? -kInf : part_lse[i] - 1.0f;
    if (kind < 3) std::fill_n(part.begin() + static_cast<int64_t>(i) * kWidth, kWidth, cases::poison());
  }
  for (int64_t h = 0; h < kHeads; h += 5)  // a row whose parts are all empty
    for (int64_t s = 0; s < 4; ++s) part_lse[(1 + s * 3) * kHeads + h] = part_max[(1 + s * 3) * kHeads + h] = -kInf;
  const std::vector<SplitRows> items{{.row = 0, .rows = 3, .partial = 0, .splits = 4},
                                     {.row = 4, .rows = 2, .partial = 13, .splits = 2}};  // row 3 and 6: nobody's
  const ops::MergeSparseArgs a{
      .partial_out = View<const float, Partial, Head, Value>(part.data(), {kParts, kHeads, kWidth}),
      .partial_lse = View<const float, Partial, Head>(part_lse.data(), {kParts, kHeads}),
      .partial_max = View<const float, Partial, Head>(part_max.data(), {kParts, kHeads}),
      .items = items,
      .sinks = sinks,
      .out = {out.data(), {kRows, kHeads, kWidth}},
      .lse = {lse.data(), {kRows, kHeads}},
      .max_logits = {max.data(), {kRows, kHeads}}};
  std::vector<double> exact(out.size()), exact_lse(lse.size()), exact_max(lse.size());
  ops::reference(a, {exact.data(), {kRows, kHeads, kWidth}}, {exact_lse.data(), {kRows, kHeads}},
                 {exact_max.data(), {kRows, kHeads}});
  ThreadPool pool(3);
  Stream stream(pool);
  ops::run(stream, a);
  for (int64_t row : {3, 6}) {
    for (int64_t i = row * kHeads; i < (row + 1) * kHeads; ++i) {
      EXPECT_TRUE(std::isnan(lse[i]) && std::isnan(max[i]) && std::isnan(out[i * kWidth]));
      lse[i] = max[i] = 0.0f;
      std::fill_n(out.begin() + i * kWidth, kWidth, 0.0f);
    }
  }
  // Term by term in f32, one part after another as the contract has it.
  std::vector<float> plain(out.size()), plain_lse(lse.size()), plain_max(exact_max.begin(), exact_max.end());
  for (const SplitRows& s : items)
    for (int64_t i = 0; i < s.rows * kHeads; ++i) {
      const int64_t to = s.row * kHeads + i;
      float& l = plain_lse[to] = -kInf;
      for (int64_t p = s.partial * kHeads + i; p < (s.partial + s.splits * s.rows) * kHeads; p += s.rows * kHeads) {
        if (!(part_lse[p] < kInf) || part_lse[p] == -kInf) continue;
        const float m = std::max(l, part_lse[p]), wa = std::exp(l - m), wb = std::exp(part_lse[p] - m);
        for (int64_t d = 0; d < kWidth; ++d) {
          float& x = plain[to * kWidth + d];
          x = (wa * x + wb * part[p * kWidth + d]) / (wa + wb);
        }
        l = m + std::log(wa + wb);
      }
      const float kept = 1.0f / (1.0f + std::exp(sinks[i % kHeads] - l));
      for (int64_t d = 0; d < kWidth && l > -kInf; ++d) plain[to * kWidth + d] *= kept;
    }
  auto judge = [](const std::vector<float>& got, const std::vector<double>& e, const std::vector<float>& p) {
    const cases::Verdict v = cases::compare(got, e, p, 0x1p-24);
    EXPECT_TRUE(v.ok) << v.error << " above " << v.bound << "; " << v.detail;
  };
  judge(out, exact, plain);
  judge(lse, exact_lse, plain_lse);
  judge(max, exact_max, plain_max);
}

TEST_F(AttendSparse, MergeOfSplitsRefusesWhatDoesNotFit) {
  std::vector<float> part(6 * 2 * 8, 1.0f), out(4 * 2 * 8), lse(16);
  const std::vector<float> sinks(2);
  ThreadPool pool(1);
  Stream stream(pool);
  auto refusal = [&](SplitRows item, bool max, std::span<const float> s) -> std::string {
    try {
      ops::run(stream,
               ops::MergeSparseArgs{.partial_out = View<const float, Partial, Head, Value>(part.data(), {6, 2, 8}),
                                    .partial_lse = View<const float, Partial, Head>(part.data(), {6, 2}),
                                    .items = {&item, 1},
                                    .sinks = s,
                                    .out = {out.data(), {4, 2, 8}},
                                    .lse = {lse.data(), {4, 2}},
                                    .max_logits = {max ? lse.data() + 8 : nullptr, {max ? 4 : 0, 2}}});
    } catch (const ShapeError& e) {
      return e.what();
    }
    return "accepted";
  };
  EXPECT_EQ(refusal({.row = 2, .rows = 2, .partial = 0, .splits = 3}, false, sinks), "accepted");
  EXPECT_EQ(refusal({.row = 2, .rows = 2, .partial = 0, .splits = 3}, true, sinks),
            "merge_sparse: partial_max Partial is 0, partial_out Partial is 6");
  EXPECT_EQ(refusal({.row = 3, .rows = 2, .partial = 0, .splits = 3}, false, {}),
            "merge_sparse: row is 3, allowed 0 to 2");
  EXPECT_EQ(refusal({.row = 0, .rows = 2, .partial = 1, .splits = 3}, false, {}),
            "merge_sparse: partial is 1, allowed 0 to 0");
  EXPECT_EQ(refusal({.row = 0, .rows = 2, .partial = 0, .splits = 0}, false, {}),
            "merge_sparse: splits is 0, allowed 1 to 2147483647");
  EXPECT_EQ(refusal({.row = 0, .rows = 2, .partial = 0, .splits = 1}, false, std::span(sinks).first(1)),
            "merge_sparse: sinks length is 1, out Head is 2");
}

}  // namespace
}  // namespace mla
