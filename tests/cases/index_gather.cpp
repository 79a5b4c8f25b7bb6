#include <bit>
#include <limits>

#include "backend/run.hpp"
#include "cache/index/codec.hpp"
#include "cases/padded.hpp"
#include "cases/poisoned_cache.hpp"

namespace mla::cases {
namespace {

// Each request has up to `context` cached keys, gathered from permuted pages. Ragged: a piece from any start and
// sometimes an empty one, rows left out between them, fp8 scales of any size. Slots of no token are NaN; entries of the
// table past a request's end are absurd.
class IndexGatherCase final : public Case {
 public:
  explicit IndexGatherCase(const Params& p) : IndexGatherCase(p, Random(p.seed)) {}
  void run(Stream& stream) override { ops::run(stream, args_); }
  Verdict verify() override {
    const int64_t rows = args_.keys.extent<Key>(), dim = args_.cache.spec.dim;
    Exact<Key, IndexDim> exact({rows, dim});
    ops::reference(args_, exact.view());
    std::vector<bool> written(static_cast<size_t>(rows));
    for (const GatherPiece& piece : pieces_) std::fill_n(written.begin() + piece.row, piece.count, true);
    Verdict v{.error = 0, .bound = 0, .ok = true, .detail = {}};
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t d = 0; d < dim; ++d) {
        float got = args_.keys(row, d);
        if (args_.scales && written[row]) got *= args_.scales(row);
        const float expected = written[row] ? rounded(static_cast<float>(exact.view()(row, d))) : untouched();
        if (std::bit_cast<uint32_t>(got) == std::bit_cast<uint32_t>(expected)) continue;
        if (v.ok)
          v.detail = "row " + std::to_string(row) + " element " + std::to_string(d) + " is " + std::to_string(got) +
                     ", expected " + std::to_string(expected);
        v.ok = false;
        ++v.error;  // elements that differ
      }
    return unless_touched(v, keys_.intact() && scales_.intact(), "keys or scales");
  }
  ops::Cost cost() const override { return ops::cost(args_); }

 private:
  IndexGatherCase(const Params& p, Random random)
      : pages_per_request_((p.context + p.page_size - 1) / p.page_size),
        table_(p.requests * (pages_per_request_ + 2), std::numeric_limits<int32_t>::min() + 7),
        cache_(
            {.format = p.index_format, .dim = p.index_dim, .page_size = p.page_size, .power_of_two_scales = !p.ragged},
            p.requests * pages_per_request_ + 1, random) {
    int64_t rows = 0, page = 0;
    std::vector<float> key(static_cast<size_t>(p.index_dim));
    for (int64_t r = 0; r < p.requests; ++r) {
      const int64_t length = p.ragged ? random.integer(0, p.context) : p.context;
      const int64_t start = p.ragged ? random.integer(0, length) : 0;
      const int64_t count = p.ragged ? random.integer(0, length - start) : length;
      int32_t* table = table_.data() + r * (pages_per_request_ + 2);
      for (int64_t i = 0; i < length; ++i) {
        if (i % p.page_size == 0) table[i / p.page_size] = cache_.page(page++);
        random.fill_normal(key, 2.0f);
        cache::index::encode(cache_.view().spec, cache_.view().page(table[i / p.page_size]), i % p.page_size,
                             key.data());
      }
      if (p.ragged) rows += random.integer(0, 2);
      pieces_.push_back({.request = static_cast<int32_t>(r),
                         .start = static_cast<int32_t>(start),
                         .count = static_cast<int32_t>(count),
                         .row = static_cast<int32_t>(rows)});
      rows += count;
    }
    keys_ = {p.dtype, {rows, p.index_dim}, gap_of(p)};
    args_ = {.cache = cache_.view(),
             .block_table = {table_.data(), {p.requests, pages_per_request_ + 2}},
             .pieces = pieces_,
             .keys = keys_.any()};
    if (p.dtype == Dtype::fp8_e4m3) {
      scales_ = {Dtype::f32, {rows}, gap_of(p)};
      args_.scales = scales_.view();
    }
  }

  /// x as the destination holds it.
  float rounded(float x) const {
    if (args_.keys.dtype() == Dtype::fp8_e4m3) return x;  // code times scale is the value
    std::byte stored[4];
    store_float(args_.keys.dtype(), stored, 0, x);
    return load_float(args_.keys.dtype(), stored, 0);
  }
  float untouched() const {
    const uint32_t ones = ~0u;
    return load_float(args_.keys.dtype(), &ones, 0);
  }

  int64_t pages_per_request_;
  std::vector<int32_t> table_;
  PoisonedIndexCache cache_;
  std::vector<GatherPiece> pieces_;
  Padded<Key, IndexDim> keys_;
  Padded<Key> scales_;
  ops::IndexGatherArgs args_;
};

std::vector<Params> sweep(uint64_t seed) {
  std::vector<Params> cases;
  for (IndexCacheFormat format : index_cache_formats())
    for (Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::fp8_e4m3}) {
      if (dtype == Dtype::fp8_e4m3 && format != IndexCacheFormat::fp8) continue;
      for (int64_t page_size : {1, 3, 16, 64})
        for (int64_t dim : {128, 1, 77, 256})
          for (bool ragged : {false, true})
            cases.push_back({.requests = 4,
                             .context = 150,
                             .ragged = ragged,
                             .page_size = page_size,
                             .dtype = dtype,
                             .index_dim = dim,
                             .index_format = format,
                             .seed = ++seed});
    }
  cases.push_back({.requests = 0, .context = 10, .seed = ++seed});
  cases.push_back({.requests = 2, .context = 0, .seed = ++seed});
  return cases;
}

}  // namespace

const CaseType index_gather{
    "index_gather", [](const Params& p) -> std::unique_ptr<Case> { return std::make_unique<IndexGatherCase>(p); },
    sweep};

}  // namespace mla::cases
