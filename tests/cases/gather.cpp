#include <bit>
#include <limits>

#include "backend/run.hpp"
#include "cache/format.hpp"
#include "cases/padded.hpp"
#include "cases/poisoned_cache.hpp"

namespace mla::cases {
namespace {

CacheSpec spec_of(const Params& p) {
  return {.format = p.format, .latent = p.latent, .rope = p.rope, .page_size = p.page_size, .k_scale = 0.05f};
}

// Each request has up to `context` cached tokens, gathered from permuted pages. Plain: all of them, into one [latent |
// rope] array, as the layer asks. Ragged: a piece from any start and sometimes an empty one, rows left out between
// them, and kv_c and k_pe in arrays of their own. Slots of no token are NaN; entries of the table past a request's end
// are absurd.
class GatherCase final : public Case {
 public:
  explicit GatherCase(const Params& p) : GatherCase(p, Random(p.seed)) {}
  void run(Stream& stream) override { ops::run(stream, args_); }
  Verdict verify() override {
    const CacheSpec& spec = args_.cache.spec;
    Exact<Key, Entry> exact({args_.kv_c.extent<Key>(), spec.entry()});
    ops::reference(args_, exact.view());
    std::vector<bool> written(static_cast<size_t>(args_.kv_c.extent<Key>()));
    for (const GatherPiece& piece : pieces_) std::fill_n(written.begin() + piece.row, piece.count, true);

    Verdict v{.error = 0, .bound = 0, .ok = true, .detail = {}};
    for (int64_t row = 0; row < args_.kv_c.extent<Key>(); ++row)
      for (int64_t d = 0; d < spec.entry(); ++d) {
        const float got = d < spec.latent ? args_.kv_c(row, d) : args_.k_pe(row, d - spec.latent);
        const float expected =
            written[row] ? stored(args_.kv_c.dtype(), static_cast<float>(exact.view()(row, d))) : untouched();
        if (std::bit_cast<uint32_t>(got) == std::bit_cast<uint32_t>(expected)) continue;
        if (v.ok)
          v.detail = "row " + std::to_string(row) + " element " + std::to_string(d) + " is " + std::to_string(got) +
                     ", expected " + std::to_string(expected);
        v.ok = false;
        ++v.error;  // elements that differ
      }
    return unless_touched(v, joined_.intact() && kv_c_.intact() && k_pe_.intact(), "kv_c or k_pe");
  }
  ops::Cost cost() const override { return ops::cost(args_); }

 private:
  GatherCase(const Params& p, Random random)
      : pages_per_request_((p.context + p.page_size - 1) / p.page_size),
        table_(p.requests * (pages_per_request_ + 2), std::numeric_limits<int32_t>::min() + 7),
        cache_(spec_of(p), p.requests * pages_per_request_ + 1, random) {
    int64_t rows = 0, page = 0;
    for (int64_t r = 0; r < p.requests; ++r) {
      const int64_t length = p.ragged ? random.integer(0, p.context) : p.context;
      const int64_t start = p.ragged ? random.integer(0, length) : 0;
      const int64_t count = p.ragged ? random.integer(0, length - start) : length;
      int32_t* table = table_.data() + r * (pages_per_request_ + 2);
      for (int64_t first = 0; first < length; first += p.page_size) {
        *table = cache_.page(page++);
        for (int64_t i = 0; i < std::min(p.page_size, length - first); ++i) fill(random, *table, i);
        ++table;
      }
      if (p.ragged) rows += random.integer(0, 2);
      pieces_.push_back({.request = static_cast<int32_t>(r),
                         .start = static_cast<int32_t>(start),
                         .count = static_cast<int32_t>(count),
                         .row = static_cast<int32_t>(rows)});
      rows += count;
    }
    args_ = {.cache = cache_.view(),
             .block_table = {table_.data(), {p.requests, pages_per_request_ + 2}},
             .pieces = pieces_};
    if (p.ragged) {
      kv_c_ = {p.dtype, {rows, p.latent}, gap_of(p)};
      k_pe_ = {p.dtype, {rows, p.rope}, gap_of(p)};
      args_.kv_c = kv_c_.any();
      args_.k_pe = k_pe_.any();
    } else {
      joined_ = {p.dtype, {rows, p.latent + p.rope}, gap_of(p)};
      const AnyMutableView<Key, Entry> all = joined_.any();
      args_.kv_c = {p.dtype, all.data(), {rows, p.latent}, all.strides()};
      args_.k_pe = {p.dtype, all.at(0, p.latent), {rows, p.rope}, all.strides()};
    }
  }

  void fill(Random& random, int32_t page, int64_t offset) {
    const CacheView cache = cache_.view();
    std::vector<float> row(static_cast<size_t>(cache.spec.entry()));
    random.fill_normal(row, 2.0f);
    mla::cache::format(cache.spec.format)
        .encode(cache.spec, cache.page(page), offset, row.data(), row.data() + cache.spec.latent);
  }
  float untouched() const {
    const uint32_t ones = ~0u;
    return load_float(args_.kv_c.dtype(), &ones, 0);
  }

  int64_t pages_per_request_;
  std::vector<int32_t> table_;
  PoisonedCache cache_;
  std::vector<GatherPiece> pieces_;
  Padded<Key, Entry> joined_;
  Padded<Key, Latent> kv_c_;
  Padded<Key, Rope> k_pe_;
  ops::GatherArgs args_;
};

std::vector<Params> sweep(uint64_t seed) {
  std::vector<Params> cases;
  for (CacheFormat format : cache_formats())
    for (Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16})
      for (int64_t page_size : {1, 3, 16, 64})
        for (bool ragged : {false, true}) {
          Params p{
              .requests = 4, .context = 83, .ragged = ragged, .format = format, .page_size = page_size, .dtype = dtype};
          if (format == CacheFormat::fp8_ds_v4) p.latent = 448;
          p.seed = ++seed;
          cases.push_back(p);
          if (format == CacheFormat::fp8_ds_mla || format == CacheFormat::fp8_ds_v4) continue;
          for (auto [latent, rope] : {std::pair<int64_t, int64_t>{40, 8}, {40, 0}, {1, 1}, {77, 13}}) {
            p.latent = latent;
            p.rope = rope;
            p.seed = ++seed;
            cases.push_back(p);
          }
        }
  // Batches of any shape: pieces from none to several tasks of rows, in any order.
  Random random(seed);
  constexpr CacheFormat kPlain[] = {CacheFormat::f32, CacheFormat::bf16, CacheFormat::f16, CacheFormat::fp8};
  constexpr Dtype kOut[] = {Dtype::f32, Dtype::bf16, Dtype::f16};
  for (int i = 0; i < 200; ++i)
    cases.push_back({.requests = random.integer(0, 7),
                     .context = random.integer(0, 150),
                     .ragged = random.integer(0, 5) > 0,
                     .latent = random.integer(1, 20),
                     .rope = random.integer(0, 8),
                     .format = kPlain[random.integer(0, 3)],
                     .page_size = random.integer(1, 40),
                     .dtype = kOut[random.integer(0, 2)],
                     .seed = ++seed});
  cases.push_back({.requests = 0, .context = 10, .seed = ++seed});
  cases.push_back({.requests = 2, .context = 0, .seed = ++seed});
  return cases;
}

}  // namespace

const CaseType gather{"gather",
                      [](const Params& p) -> std::unique_ptr<Case> { return std::make_unique<GatherCase>(p); }, sweep};

}  // namespace mla::cases
