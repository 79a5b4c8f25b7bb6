#include <limits>
#include <utility>

#include "backend/run.hpp"
#include "cases/compare.hpp"

namespace mla::cases {
namespace {

constexpr int32_t kSmallest = std::numeric_limits<int32_t>::min(), kLargest = std::numeric_limits<int32_t>::max();

// Positions of requests * query_len rows, to slots of permuted pages. Ragged: rows of any request or none in any order,
// positions that are unused, past the request, past the table or absurd, pages that do not exist, rows of the table and
// of both arrays apart; and then the same positions to a workspace of requests one after another,
// some of their rows in any order, and all but some to rows of masks that end before the last positions, in any order.
// Every third ragged seed's memory holds the tokens of one rank of several.
class MapIndicesCase final : public Case {
 public:
  explicit MapIndicesCase(const Params& p)
      : p_(p),
        rows_(p.requests * p.query_len),
        stride_(p.topk + (p.ragged ? 3 : 0)),
        columns_((p.context + p.page_size - 1) / p.page_size) {
    Random random(p.seed);
    const int64_t pages = p.requests * columns_ + 1, table_stride = columns_ + (p.ragged ? 2 : 0);
    table_.assign(p.requests * table_stride, kSmallest + 7);
    for (int64_t r = 0; r < p.requests; ++r) {
      for (int64_t i = 0; i < columns_; ++i) {
        int32_t& page = table_[r * table_stride + i];
        page = static_cast<int32_t>(random.integer(0, pages - 1));
        if (p.ragged && random.integer(0, 4) == 0)
          page = pick<int32_t>(random, {-1, kSmallest, kLargest, static_cast<int32_t>(pages)});
      }
      lengths_.push_back(static_cast<int32_t>(p.ragged ? random.integer(-1, p.context + 2) : p.context));
      starts_.push_back(r == 0 ? 0 : starts_.back() + counts_.back());
      counts_.push_back(std::max(0, lengths_.back()));
    }
    positions_.assign((rows_ + 1) * stride_, 5);
    for (int64_t row = 0; row < rows_; ++row) {
      const auto request = static_cast<int32_t>(p.ragged ? random.integer(0, p.requests - 1) : row / p.query_len);
      requests_.push_back(p.ragged && random.integer(0, 9) == 0 ? -1 : request);
      for (int64_t k = 0; k < p.topk; ++k) {
        int32_t& t = positions_[row * stride_ + k];
        t = static_cast<int32_t>(random.integer(0, std::max<int64_t>(0, p.context - 1)));
        if (p.ragged && random.integer(0, 2) == 0)
          t = pick<int32_t>(
              random, {-1, -2, kSmallest, kLargest, kLargest - 1, lengths_[request],
                       static_cast<int32_t>(columns_ * p.page_size), static_cast<int32_t>(columns_ * p.page_size - 1)});
      }
    }
    slots_.assign(positions_.size(), kUntouched);
    workspace_.assign(positions_.size(), kUntouched);
    picked_ = workspace_;
    for (int64_t row = 0; row < rows_; ++row)
      if (random.integer(0, 3)) rows_picked_.push_back(static_cast<int32_t>(random.integer(0, rows_ - 1)));
    const View<const int32_t, Token, Topk> positions = view(positions_);
    to_slots_ = {.positions = positions,
                 .requests = requests_,
                 .block_table = {table_.data(), {p.requests, columns_}, {table_stride, 1}},
                 .page_size = p.page_size,
                 .pages = pages,
                 .slots = view(slots_)};
    if (p.ragged && p.seed % 2) to_slots_.lengths = lengths_;
    if (p.ragged && p.seed % 3 == 0)
      to_slots_.held = {CacheSharding(random.integer(2, 5), random.integer(1, 9)), random.integer(0, 1)};
    to_workspace_ = {.positions = positions,
                     .requests = requests_,
                     .starts = starts_,
                     .counts = counts_,
                     .rows = view(workspace_),
                     .held = to_slots_.held};
    pick_ = {.positions = positions, .rows = rows_picked_, .picked = view(picked_)};
    words_ = random.integer(0, p.context / 32 + 1);
    for (int64_t row = 0; row < rows_; ++row) mask_rows_.push_back(static_cast<int32_t>(row));
    for (int64_t row = rows_ - 1; row > 0; --row) std::swap(mask_rows_[row], mask_rows_[random.integer(0, row)]);
    for (int32_t& row : mask_rows_)
      if (random.integer(0, 4) == 0) row = pick<int32_t>(random, {-1, kSmallest});
    mask_.assign(static_cast<size_t>(rows_ * (words_ + 3)), kUntouched);
    to_mask_ = {.positions = positions, .rows = mask_rows_, .mask = mask_view(mask_)};
  }

  void run(Stream& stream) override {
    ops::run(stream, to_slots_);
    if (!p_.ragged) return;
    ops::run(stream, to_workspace_);
    ops::run(stream, pick_);
    ops::run(stream, to_mask_);
  }

  Verdict verify() override {
    std::vector<int32_t> slots(slots_.size(), kUntouched), workspace = slots, picked = slots;
    std::vector<uint32_t> mask(mask_.size(), kUntouched);
    ops::reference(to_slots_, view(slots));
    if (p_.ragged) {
      ops::reference(to_workspace_, view(workspace));
      ops::reference(pick_, view(picked));
      ops::reference(to_mask_, mask_view(mask));
    }
    Verdict v{.error = 0, .bound = 0, .ok = true, .detail = {}};
    auto compare = [&](const char* what, const auto& got, const auto& expected) {
      for (size_t i = 0; i < got.size(); ++i) {
        if (got[i] == expected[i]) continue;
        if (v.ok)
          v.detail = std::string(what) + " entry " + std::to_string(i) + " is " + std::to_string(got[i]) +
                     ", expected " + std::to_string(expected[i]);
        v.ok = false;
        ++v.error;  // entries that differ
      }
    };
    compare("slots", slots_, slots);
    compare("workspace", workspace_, workspace);
    compare("picked", picked_, picked);
    compare("mask", mask_, mask);
    return v;
  }

  ops::Cost cost() const override {
    ops::Cost c = ops::cost(to_slots_);
    if (p_.ragged) ((c += ops::cost(to_workspace_)) += ops::cost(pick_)) += ops::cost(to_mask_);
    return c;
  }

 private:
  static constexpr int32_t kUntouched = 0x5a5a5a5a;

  template <class T>
  static T pick(Random& random, std::initializer_list<T> values) {
    return values.begin()[random.integer(0, static_cast<int64_t>(values.size()) - 1)];
  }
  View<int32_t, Token, Topk> view(std::vector<int32_t>& x) const { return {x.data(), {rows_, p_.topk}, {stride_, 1}}; }

  View<uint32_t, Token, Word> mask_view(std::vector<uint32_t>& x) const {
    return {x.data(), {rows_, words_}, {words_ + 3, 1}};
  }

  Params p_;
  int64_t rows_, stride_, columns_, words_ = 0;
  std::vector<int32_t> table_, positions_, requests_, lengths_, starts_, counts_, slots_, workspace_, picked_,
      rows_picked_, mask_rows_;
  std::vector<uint32_t> mask_;
  ops::MapToSlotsArgs to_slots_;
  ops::MapToWorkspaceArgs to_workspace_;
  ops::PickRowsArgs pick_;
  ops::MapToMaskArgs to_mask_;
};

std::vector<Params> sweep(uint64_t seed) {
  std::vector<Params> cases;
  for (int64_t page_size : {1, 3, 16, 64, 100, 256})
    for (bool ragged : {false, true})
      for (int64_t topk : {0, 1, 7, 64, 333})
        for (int64_t context : {0, 1, 200, 1000})
          cases.push_back({.requests = 4,
                           .query_len = 3,
                           .context = context,
                           .ragged = ragged,
                           .page_size = page_size,
                           .topk = topk,
                           .seed = ++seed});
  // Several tasks, and more of them than rows in one.
  cases.push_back({.requests = 3, .query_len = 100, .context = 5000, .ragged = true, .topk = 2048, .seed = ++seed});
  cases.push_back({.requests = 1, .query_len = 1, .context = 5000, .ragged = true, .topk = 40000, .seed = ++seed});
  cases.push_back({.requests = 0, .query_len = 1, .context = 50, .topk = 8, .seed = ++seed});
  return cases;
}

}  // namespace

const CaseType map_indices{
    "map_indices", [](const Params& p) -> std::unique_ptr<Case> { return std::make_unique<MapIndicesCase>(p); }, sweep};

}  // namespace mla::cases
