#include <bit>
#include <cmath>
#include <limits>

#include "backend/backend.hpp"
#include "backend/run.hpp"
#include "cache/index/codec.hpp"
#include "cases/padded.hpp"
#include "cases/poisoned_cache.hpp"
#include "cases/scratch.hpp"
#include "ops/index_score/cut_product.hpp"

namespace mla::cases {
namespace {

// Requests of up to `context` cached and `query_len` new tokens on permuted pages; slots of no token are NaN and table
// entries past a request's end absurd. The positions are scored in `splits` tiles, one call each: windows of whole
// items or items of the tile, by turns. A request with nothing to see and one with no query are among the ragged ones,
// whose fp8 scales are no powers of two. Scores that no row sees must stay as they were. Of large shapes a sample of
// the rows is judged.
class IndexScoreCase final : public Case {
 public:
  explicit IndexScoreCase(const Params& p) : IndexScoreCase(p, Random(p.seed)) {}

  void run(Stream& stream) override {
    const size_t per_worker = backend::backend(stream.device())
                                  .scratch_per_worker({.heads = 1,
                                                       .latent = 1,
                                                       .nope = 1,
                                                       .value = 1,
                                                       .hidden = 1,
                                                       .index_heads = p_.heads,
                                                       .index_dim = p_.index_dim});
    args_.scratch = scratch_.get(stream, per_worker);
    for (size_t tile = 0; tile < items_.size(); ++tile) {
      args_.items = windows() ? whole_ : items_[tile];
      args_.first = windows() ? begins_[tile] : 0;
      args_.scores = scores_.view().slice<Key>(begins_[tile], begins_[tile + 1] - begins_[tile]);
      ops::run(stream, args_);
    }
  }

  Verdict verify() override {
    const View<float, Token, Key> scores = scores_.view();
    const int64_t width = scores.extent<Key>();
    double work = 0;
    for (const IndexItem& i : whole_) work += ops::cost(with({&i, 1})).flops;
    const int64_t step = std::max<int64_t>(1, static_cast<int64_t>(work / 2e9));
    std::vector<float> got, plain;
    std::vector<double> expected;
    double mass = 0;
    for (const IndexItem& item : whole_)
      for (int64_t i = 0; i < item.q_count; i += step) {
        IndexItem one = item;
        one.q_begin += static_cast<int32_t>(i);
        one.visible += static_cast<int32_t>(i);
        one.q_count = 1;
        one.row = 0;
        const int64_t seen = one.columns(0), row = item.row + i;
        for (int64_t c = seen; c < width; ++c)
          if (std::bit_cast<uint32_t>(scores(row, c)) != ~0u)
            return {.detail = "row " + std::to_string(row) + " column " + std::to_string(c) + " was written"};
        Exact<Token, Key> exact({1, width});
        ops::reference(with({&one, 1}), exact.view());
        for (int64_t c = 0; c < seen; ++c) got.push_back(scores(row, c));
        expected.insert(expected.end(), exact.values.begin(), exact.values.begin() + seen);
        mass = std::max(mass, plain_row(one, plain));
      }
    // Weights have both signs: one rounding of a summand moves the score by the summands' size times that.
    double sum = 0;
    for (double x : expected) sum += x * x;
    const double rms = std::sqrt(sum / static_cast<double>(std::max<size_t>(1, expected.size())));
    const double unit = 0x1p-24 * std::max(1.0, rms > 0 ? mass / rms : 0.0);
    return unless_touched(compare(got, expected, plain, unit), scores_.intact(), "scores");
  }
  ops::Cost cost() const override { return cost_; }

 private:
  IndexScoreCase(const Params& p, Random random)
      : p_(p),
        pages_((p.context + p.query_len + p.page_size - 1) / p.page_size),
        table_(p.requests * (pages_ + 2), std::numeric_limits<int32_t>::min() + 7),
        cache_(
            {.format = p.index_format, .dim = p.index_dim, .page_size = p.page_size, .power_of_two_scales = !p.ragged},
            p.requests * pages_ + 1, random, p.index_arithmetic == IndexArithmetic::fp8) {
    int32_t rows = 0, longest = 0;
    int64_t page = 0;
    std::vector<float> key(static_cast<size_t>(p.index_dim));
    for (int64_t r = 0; r < p.requests; ++r) {
      const int32_t count = static_cast<int32_t>(
          p.ragged ? random.integer(r == 1 ? 0 : std::min<int64_t>(1, p.query_len), p.query_len) : p.query_len);
      const int32_t context = static_cast<int32_t>(p.ragged ? random.integer(0, p.context) : p.context),
                    length = context + count;
      for (int64_t i = 0; i < length; ++i) {
        int32_t& id = table_[r * (pages_ + 2) + i / p.page_size];
        if (i % p.page_size == 0) id = cache_.page(page++);
        random.fill_normal(key);
        cache::index::encode(cache_.view().spec, cache_.view().page(id), i % p.page_size, key.data());
      }
      // Every third ragged request's rows see nothing: visible lies before the first position.
      whole_.push_back({.request = static_cast<int32_t>(r),
                        .q_begin = rows,
                        .q_count = count,
                        .kv_begin = 0,
                        .kv_end = length,
                        .visible = p.ragged && r % 3 == 2 ? -count : context,
                        .row = rows});
      rows += count;
      longest = std::max(longest, length);
    }
    const int32_t step = static_cast<int32_t>(std::max<int64_t>(1, (longest + p.splits - 1) / p.splits));
    for (int32_t begin = 0; begin < longest; begin += step) {
      begins_.push_back(begin);
      for (IndexItem item : whole_) {
        if (item.kv_end <= begin) continue;
        item.kv_begin = begin;
        item.kv_end = std::min(item.kv_end, begin + step);
        if (begins_.size() > items_.size()) items_.emplace_back();
        items_.back().push_back(item);
      }
    }
    begins_.push_back(longest);
    q_ = {p.dtype, {rows, p.heads, p.index_dim}, p.seed % 4 < 2 ? 3 : 16};
    q_.fill_normal(random, p.dtype == Dtype::fp8_e4m3 ? 100.0f : 1.0f);
    weights_ = {Dtype::f32, {rows, p.heads}, p.seed % 4 < 2 ? 3 : 8};
    weights_.fill_normal(random);
    scores_ = {Dtype::f32, {rows, longest}};
    args_ = {.q = q_.any(),
             .weights = weights_.view(),
             .scale = 1.0f / std::sqrt(static_cast<float>(p.heads * p.index_dim)),
             .cache = cache_.view(),
             .block_table = {table_.data(), {p.requests, pages_ + 2}},
             .scores = {},
             .arithmetic = p.index_arithmetic};
    cost_ = ops::cost(with(whole_));
  }

  ops::IndexScoreArgs with(std::span<const IndexItem> items) {
    ops::IndexScoreArgs a = args_;
    a.items = items;
    a.first = 0;
    a.scores = scores_.view();
    return a;
  }
  bool windows() const { return p_.seed % 2 == 0; }

  // Straight f32 loops, or sums cut off as fp8 arithmetic may cut them, over one row's columns; the largest sum of
  // magnitudes among its scores.
  double plain_row(const IndexItem& item, std::vector<float>& to) const {
    double most = 0;
    std::vector<float> key(static_cast<size_t>(p_.index_dim)), q;
    for (int64_t h = 0; h < p_.heads; ++h)
      for (int64_t d = 0; d < p_.index_dim; ++d) q.push_back(args_.q(item.q_begin, h, d));
    const IndexCacheView& cache = args_.cache;
    for (int64_t j = 0; j < item.columns(0); ++j) {
      cache::index::decode(cache.spec, cache.page(args_.block_table(item.request, j / cache.spec.page_size)),
                           j % cache.spec.page_size, key.data());
      float sum = 0;
      double mass = 0;
      for (int64_t h = 0; h < p_.heads; ++h) {
        float product = 0;
        if (p_.index_arithmetic == IndexArithmetic::fp8) {
          product = static_cast<float>(ops::cut_product(&q[h * p_.index_dim], key.data(), p_.index_dim));
        } else {
          for (int64_t d = 0; d < p_.index_dim; ++d) product += q[h * p_.index_dim + d] * key[d];
        }
        const float w = args_.weights(item.q_begin, h) * args_.scale;
        sum += w * std::max(product, 0.0f);
        mass += std::abs(w * product);
      }
      to.push_back(sum);
      most = std::max(most, mass);
    }
    return most;
  }

  Params p_;
  int64_t pages_;
  std::vector<int32_t> table_;
  PoisonedIndexCache cache_;
  std::vector<IndexItem> whole_;
  std::vector<std::vector<IndexItem>> items_;  // of each tile of positions
  std::vector<int32_t> begins_;                // first position of each tile, and the end
  Padded<Token, IndexHead, IndexDim> q_;
  Padded<Token, IndexHead> weights_;
  Padded<Token, Key> scores_;
  CaseScratch scratch_;
  ops::IndexScoreArgs args_;
  ops::Cost cost_;
};

std::vector<Params> sweep(uint64_t seed) {
  std::vector<Params> cases;
  auto add = [&](Params p) {
    p.seed = ++seed;
    cases.push_back(p);
  };
  for (IndexCacheFormat format : index_cache_formats())
    for (Dtype q : {Dtype::f32, Dtype::bf16, Dtype::fp8_e4m3}) {
      for (int64_t heads : {64, 32, 5, 1, 48, 100})
        add({.requests = 4,
             .query_len = 3,
             .context = 130,
             .ragged = true,
             .heads = heads,
             .page_size = 16,
             .dtype = q,
             .splits = 2,
             .index_format = format});
      for (int64_t dim : {1, 2, 40, 77, 256})
        add({.requests = 2,
             .query_len = 20,
             .context = 33,
             .ragged = true,
             .heads = 20,
             .page_size = 3,
             .dtype = q,
             .index_dim = dim,
             .index_format = format});
      for (int64_t page_size : {1, 64, 100})
        add({.requests = 1,
             .query_len = 1,
             .context = 2200,
             .heads = 8,
             .page_size = page_size,
             .dtype = q,
             .splits = 3,
             .index_dim = 32,
             .index_format = format});
    }
  // Products of fp8: one to several tokens, heads on both sides of what a product takes, pages of one and several boxes
  // of keys, and what no fp8 kernel serves.
  auto fp8 = [&](Params p) {
    p.dtype = Dtype::fp8_e4m3;
    p.index_arithmetic = IndexArithmetic::fp8;
    add(p);
  };
  for (int64_t heads : {64, 32, 8, 33, 100, 128, 130})
    for (int64_t query_len : {1, 2, 3, 4, 9})
      fp8({.requests = 4,
           .query_len = query_len,
           .context = 300,
           .ragged = query_len != 1,
           .heads = heads,
           .page_size = 64,
           .splits = query_len % 3 + 1});
  for (int64_t page_size : {1, 16, 37, 48, 128, 1024}) {
    fp8({.requests = 3, .query_len = 5, .context = 700, .ragged = true, .heads = 64, .page_size = page_size});
    fp8({.requests = 2, .query_len = 1, .context = 3000, .heads = 32, .page_size = page_size, .splits = 3});
  }
  fp8({.requests = 70, .query_len = 2, .context = 90, .ragged = true, .heads = 64, .page_size = 16});
  fp8({.requests = 1, .query_len = 40, .context = 1500, .heads = 64});
  fp8({.requests = 1, .query_len = 3, .context = 100, .heads = 64, .index_format = IndexCacheFormat::bf16});
  fp8({.requests = 1, .query_len = 3, .context = 100, .heads = 16, .index_dim = 64});
  add({.requests = 0, .heads = 4});
  add({.requests = 1, .query_len = 1, .context = 0, .heads = 4});
  return cases;
}

}  // namespace

const CaseType index_score{
    "index_score", [](const Params& p) -> std::unique_ptr<Case> { return std::make_unique<IndexScoreCase>(p); }, sweep};

}  // namespace mla::cases
