#include <bit>
#include <limits>

#include "backend/backend.hpp"
#include "backend/run.hpp"
#include "cases/padded.hpp"
#include "cases/scratch.hpp"

namespace mla::cases {
namespace {

// Rows of `requests` x `query_len` over up to `context` positions before each, fed in `splits` tiles, windows of whole
// items or items of the tile by turns, and finished; the answer must be the definition's, exactly. Ragged: lengths
// vary, tiles have random borders and come in random order, and scores are of a kind that the seed chooses: normal, few
// distinct ones, all equal, rising, falling, with NaN and infinities, or high in one stretch or at every sixteenth
// column alone. Scores that a row does not see are NaN. Every third seed's positions number the tokens of one rank of
// several; of every other third the last tile's call finishes.
class SelectTopkCase final : public Case {
 public:
  explicit SelectTopkCase(const Params& p) : SelectTopkCase(p, Random(p.seed)) {}

  void run(Stream& stream) override {
    const ops::Scratch scratch =
        scratch_.get(stream, backend::backend(stream.device()).scratch_per_worker({.topk = p_.topk}));
    bool begin = true;
    for (const Tile& tile : tiles_) {
      const bool last = finishes_ && &tile == &tiles_.back();
      const bool window = p_.seed % 2 == 0;
      ops::run(stream, ops::SelectTopkArgs{.scores = scores_.view().slice<Key>(tile.begin, tile.columns),
                                           .items = window ? whole_ : tile.items,
                                           .first = window ? tile.begin : 0,
                                           .positions = {},
                                           .begin = begin,
                                           .state = state(),
                                           .scratch = scratch,
                                           .indices = last ? finish().indices : View<int32_t, Token, Topk>{}});
      begin = false;
    }
    if (!finishes_) ops::run(stream, finish());
  }
  Verdict verify() override {
    const auto indices = indices_.view();
    const int64_t rows = indices.extent<Token>();
    std::vector<int32_t> expected(static_cast<size_t>(rows * p_.topk));
    std::vector<float> expected_scores(expected.size());
    const View<int32_t, Token, Topk> exact(expected.data(), {rows, p_.topk});
    const View<float, Token, Topk> exact_scores(expected_scores.data(), {rows, p_.topk});
    ops::reference({.scores = scores_.view(), .items = whole_, .state = state()}, exact, exact_scores);
    Verdict v{.error = 0, .bound = 0, .ok = true, .detail = {}};
    for (int64_t t = 0; t < rows; ++t)
      for (int64_t k = 0; k < p_.topk; ++k) {
        const int32_t got = std::bit_cast<int32_t>(indices(t, k));
        const int32_t right = exact(t, k) < 0 ? -1 : held_.position(exact(t, k));
        const bool same =
            finishes_ || std::bit_cast<uint32_t>(best_.view()(t, k)) == std::bit_cast<uint32_t>(exact_scores(t, k));
        if (got == right && same) continue;
        if (v.ok)
          v.detail = "row " + std::to_string(t) + " place " + std::to_string(k) + " is position " +
                     std::to_string(got) + ", expected " + std::to_string(right);
        v.ok = false;
        ++v.error;  // places that differ
      }
    return unless_touched(v, indices_.intact() && best_.intact() && guarded(), "indices, scores or state");
  }
  ops::Cost cost() const override {
    ops::Cost c = cost_;
    return c += {.bytes = 8.0 * static_cast<double>(indices_.values().size()), .flops = 0};
  }

 private:
  struct Tile {
    int64_t begin = 0, columns = 0;
    std::vector<IndexItem> items;
  };

  SelectTopkCase(const Params& p, Random random) : p_(p) {
    int32_t rows = 0, longest = 0;
    for (int64_t r = 0; r < p.requests; ++r) {
      const int32_t count = static_cast<int32_t>(p.ragged ? random.integer(0, p.query_len) : p.query_len);
      const int32_t context = static_cast<int32_t>(p.ragged ? random.integer(0, p.context) : p.context);
      whole_.push_back({.request = static_cast<int32_t>(r),
                        .q_begin = rows,
                        .q_count = count,
                        .kv_begin = 0,
                        .kv_end = context + count,
                        .visible = p.ragged && r % 3 == 2 ? -count : context,
                        .row = rows});
      rows += count;
      longest = std::max(longest, context + count);
    }
    finishes_ = p.seed % 3 == 1;
    if (p.seed % 3 == 0) held_ = {CacheSharding(random.integer(2, 5), random.integer(1, 9)), random.integer(0, 1)};
    std::vector<int64_t> borders{0, longest};
    for (int64_t s = 1; s < p.splits; ++s)
      borders.push_back(p.ragged ? random.integer(0, longest) : s * longest / p.splits);
    std::sort(borders.begin(), borders.end());
    for (size_t b = 1; b < borders.size(); ++b) {
      Tile tile{borders[b - 1], borders[b] - borders[b - 1], whole_};
      for (IndexItem& item : tile.items) {
        item.kv_begin = static_cast<int32_t>(tile.begin);
        item.kv_end = std::max(item.kv_begin, std::min(item.kv_end, static_cast<int32_t>(borders[b])));
      }
      tiles_.push_back(tile);
    }
    if (p.ragged)
      for (size_t i = tiles_.size(); i-- > 1;) std::swap(tiles_[i], tiles_[random.integer(0, static_cast<int64_t>(i))]);

    scores_ = {Dtype::f32, {rows, longest}};
    const int64_t kind = p.ragged ? random.integer(0, 7) : 0;
    for (const IndexItem& item : whole_)
      for (int64_t i = 0; i < item.q_count; ++i)
        for (int64_t c = 0; c < item.columns(i); ++c) scores_.view()(item.row + i, c) = score(random, kind, c);
    cost_ = ops::cost(
        ops::SelectTopkArgs{.scores = scores_.view(), .items = whole_, .positions = {}, .state = {}, .scratch = {}});
    indices_ = {Dtype::f32, {rows, p.topk}};  // four bytes an element
    best_ = {Dtype::f32, {rows, p.topk}};
    state_.assign(static_cast<size_t>(rows) * topk_state_bytes(p.topk) + 2 * kGuard, std::byte{0xff});
  }

  static float score(Random& random, int64_t kind, int64_t column) {
    constexpr float kInf = std::numeric_limits<float>::infinity();
    const float odd[] = {kInf, -kInf, poison(), -poison(), 0.0f, -0.0f, 1e-42f, std::numeric_limits<float>::lowest()};
    switch (kind) {
      case 1: return static_cast<float>(random.integer(-2, 2));
      case 2: return 0.0f;
      case 3: return static_cast<float>(column);
      case 4: return -static_cast<float>(column / 3);
      case 5: return random.integer(0, 1) ? odd[random.integer(0, 7)] : random.normal();
      case 6: return random.normal() + (column / 4000 == 1 ? 10.0f : 0.0f);
      case 7: return random.normal() + (column % 16 == 8 ? 10.0f : 0.0f);
      default: return random.normal();
    }
  }

  ops::TopkState state() {
    const auto at = reinterpret_cast<uintptr_t>(state_.data() + kGuard);
    return {reinterpret_cast<std::byte*>((at + 63) / 64 * 64), indices_.view().extent<Token>(), p_.topk};
  }
  ops::FinishTopkArgs finish() {
    const auto indices = indices_.view();
    return {.state = state(),
            .items = whole_,
            .indices = {reinterpret_cast<int32_t*>(indices.data()), indices.extents(), indices.strides()},
            .scores = best_.view(),
            .held = held_};
  }
  bool guarded() {
    const std::byte *begin = state().data, *end = begin + state().rows * topk_state_bytes(p_.topk);
    auto untouched = [](std::byte b) { return b == std::byte{0xff}; };
    return std::all_of(const_cast<const std::byte*>(state_.data()), begin, untouched) &&
           std::all_of(end, const_cast<const std::byte*>(state_.data() + state_.size()), untouched);
  }

  static constexpr size_t kGuard = 128;
  Params p_;
  bool finishes_ = false;
  ops::HeldTokens held_;
  std::vector<IndexItem> whole_;
  std::vector<Tile> tiles_;
  Padded<Token, Key> scores_;
  Padded<Token, Topk> indices_, best_;
  ops::Cost cost_;
  std::vector<std::byte> state_;
  CaseScratch scratch_;
};

std::vector<Params> sweep(uint64_t seed) {
  std::vector<Params> cases;
  for (int64_t topk : {1, 7, 64, 1000, 2048, 8192})
    for (int64_t context : {0, 5, 63, 2047, 2048, 5000, 20000})
      for (bool ragged : {false, true})
        cases.push_back({.requests = ragged ? 4 : 1,
                         .query_len = 3,
                         .context = context,
                         .ragged = ragged,
                         .splits = 1 + static_cast<int64_t>(seed % 5),
                         .topk = topk,
                         .seed = ++seed});
  for (int i = 0; i < 12; ++i)  // rows long enough for several blocks of a GPU
    cases.push_back({.requests = 2,
                     .query_len = 2,
                     .context = 150000,
                     .ragged = true,
                     .splits = 1 + i % 3,
                     .topk = 2048,
                     .seed = ++seed});
  for (int i = 0; i < 4; ++i)  // many of them; a long one
    cases.push_back({.requests = i == 3 ? 1 : 3,
                     .query_len = i == 3 ? 1 : 120,
                     .context = i == 3 ? 1200000 : 9000 * (i + 1),
                     .ragged = i < 2,
                     .splits = 1,
                     .topk = 2048,
                     .seed = ++seed});
  for (int64_t context : {500, 2100, 4000, 8000, 15000})  // many short ones
    for (int64_t topk : {300, 2048})
      cases.push_back({.requests = 3,
                       .query_len = 120,
                       .context = context,
                       .ragged = context < 5000,
                       .splits = 1,
                       .topk = topk,
                       .seed = ++seed});
  Random random(seed);
  for (int i = 0; i < 60; ++i)
    cases.push_back({.requests = random.integer(0, 5),
                     .query_len = random.integer(1, 6),
                     .context = random.integer(0, 9000),
                     .ragged = true,
                     .splits = random.integer(1, 40),
                     .topk = random.integer(1, random.integer(0, 1) ? 8192 : 300),
                     .seed = ++seed});
  return cases;
}

}  // namespace

const CaseType select_topk{
    "select_topk", [](const Params& p) -> std::unique_ptr<Case> { return std::make_unique<SelectTopkCase>(p); }, sweep};

}  // namespace mla::cases
