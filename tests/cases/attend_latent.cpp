#include <cmath>
#include <limits>

#include "backend/backend.hpp"
#include "backend/run.hpp"
#include "cache/format.hpp"
#include "cases/padded.hpp"
#include "cases/poisoned_cache.hpp"
#include "cases/scratch.hpp"

namespace mla::cases {
namespace {

CacheSpec spec_of(const Params& p) {
  return {.format = p.format, .latent = p.latent, .rope = p.rope, .page_size = p.page_size, .k_scale = 0.0625f};
}

// Requests of up to `context` cached and `query_len` new tokens on permuted pages; slots of no token are NaN and table
// entries past a request's end absurd. With splits, each request's positions are cut into that many ranges whose
// partial rows the verdict joins in float64. Requests with nothing to see and with no query are among the ragged ones.
class AttendLatentCase final : public Case {
 public:
  explicit AttendLatentCase(const Params& p) : AttendLatentCase(p, Random(p.seed)) {
    if (!p.nonfinite) return;
    Params clean = p;
    clean.nonfinite = false;
    clean_ = std::make_unique<AttendLatentCase>(clean);
  }

  void run(Stream& stream) override {
    const size_t per_worker =
        backend::backend(stream.device())
            .scratch_per_worker(
                {.heads = p_.heads, .latent = p_.latent, .rope = p_.rope, .nope = 1, .value = 1, .hidden = 1});
    args_.scratch = scratch_.get(stream, per_worker);
    ops::run(stream, args_);
    if (clean_) clean_->run(stream);
  }

  Verdict verify() override {
    const auto [exact, exact_lse] = exact_result();
    join_partials();
    std::vector<float> got = out_.values(), plain(got.size());
    std::vector<float> got_lse = lse_.values(), plain_lse(got_lse.size());
    plain_result(plain, plain_lse);
    // One rounding of a score moves its probability by the score's magnitude times that, whoever computes it; lse tells
    // the magnitude. bf16 queries: their products may round probabilities and rows to bf16 too.
    double magnitude = 1;
    for (double lse : exact_lse.values)
      if (std::isfinite(lse)) magnitude = std::max(magnitude, std::abs(lse));
    const double unit = rounds() ? 0x1p-9 : magnitude * 0x1p-24;
    // Of few keys' probabilities a plain computation may round none to e4m3.
    Verdict v = compare(got, exact.values, plain, codes() ? 0x1p-8 : out_unit(unit));
    if (v.ok) {
      const Verdict lse = compare(got_lse, exact_lse.values, plain_lse, unit);
      if (!lse.ok) {
        v = lse;
        v.detail = "lse: " + v.detail;
      }
    }
    if (clean_) {
      const auto [clean, clean_lse] = clean_->exact_result();
      clean_->join_partials();
      v = unless_moved(v, args_.out.extent<Value>(), got, exact.values, clean_->out_.values(), clean.values);
      v = unless_moved(v, 1, got_lse, exact_lse.values, clean_->lse_.values(), clean_lse.values);
    }
    return unless_touched(v, out_.intact() && lse_.intact() && partial_out_.intact() && partial_lse_.intact(),
                          "an output");
  }
  ops::Cost cost() const override { return ops::cost(args_); }

 private:
  AttendLatentCase(const Params& p, Random random)
      : p_(p),
        pages_((p.context + p.query_len + p.page_size - 1) / p.page_size),
        table_(p.requests * (pages_ + 2), std::numeric_limits<int32_t>::min() + 7),
        cache_(spec_of(p), p.requests * pages_ + 1, random) {
    const CacheSpec spec = spec_of(p);
    int32_t rows = 0, partial = 0;
    int64_t page = 0;
    std::vector<float> row(spec.entry());
    Random plants(p.seed + 1);
    const int64_t huge_at = plants.integer(0, spec.entry() - 1);
    std::vector<std::pair<int32_t, int32_t>> huge_rows;  // query rows of the requests whose products may overflow
    for (int64_t r = 0; r < p.requests; ++r) {
      const int32_t count = static_cast<int32_t>(p.ragged ? random.integer(0, p.query_len) : p.query_len);
      const int32_t context = static_cast<int32_t>(p.ragged ? random.integer(0, p.context) : p.context),
                    length = context + count;
      const bool huge = p.nonfinite && p.dtype != Dtype::fp8_e4m3 && plants.integer(0, 3) == 0;
      if (huge) huge_rows.emplace_back(rows, count);
      for (int64_t i = 0; i < length; ++i) {
        int32_t& id = table_[r * (pages_ + 2) + i / p.page_size];
        if (i % p.page_size == 0) id = cache_.page(page++);
        random.fill_normal(row);
        if (huge) row[huge_at] = plants.integer(0, 1) == 0 ? kHugeKey : -kHugeKey;
        if (p.nonfinite && !huge && plants.integer(0, 11) == 0)
          row[plants.integer(0, spec.entry() - 1)] = odd_number(plants, keeps_infinity(spec.format));
        cache::format(spec.format)
            .encode(spec, cache_.view().page(id), i % p.page_size, row.data(), row.data() + spec.latent);
      }
      // Every third ragged request's rows see nothing: visible lies before the first position.
      const int32_t visible = p.ragged && r % 3 == 2 ? -static_cast<int32_t>(count) : context;
      LatentItem item{.request = static_cast<int32_t>(r),
                      .q_begin = rows,
                      .q_count = count,
                      .kv_begin = 0,
                      .kv_end = length,
                      .visible = visible};
      whole_.push_back(item);
      const int32_t step = static_cast<int32_t>(std::max<int64_t>(1, (length + p.splits - 1) / p.splits));
      int32_t splits = 0;
      for (int32_t begin = 0; begin < std::max(length, 1); begin += step, ++splits) {
        item.kv_begin = begin;
        item.kv_end = std::min(length, begin + step);
        item.partial = p.splits > 1 ? partial + splits * count : -1;
        items_.push_back(item);
      }
      if (p.splits > 1) {
        joins_.push_back({rows, count, partial, splits});
        partial += splits * count;
      }
      rows += count;
    }
    const int64_t width = spec.value_width();
    q_ = {p.dtype, {rows, p.heads, spec.entry()}};
    q_.fill_normal(random, p.dtype == Dtype::fp8_e4m3 ? 16.0f : 1.0f);
    for (int32_t t = 0; t < rows && p.nonfinite; ++t)
      for (int64_t h = 0; h < p.heads; ++h) {
        auto set = [&](int64_t d, float x) { store_float(p.dtype, q_.any().at(t, h, d), 0, x); };
        const bool huge = std::any_of(huge_rows.begin(), huge_rows.end(),
                                      [&](const auto& r) { return t >= r.first && t < r.first + r.second; });
        if (huge && plants.integer(0, 1) == 0) set(huge_at, kHugeQuery);
        else if (!huge && plants.integer(0, 15) == 0)  // a product past f32 beside an infinity: the order would decide
          set(plants.integer(0, spec.entry() - 1), odd_number(plants, p.dtype != Dtype::fp8_e4m3));
      }
    out_ = {out_dtype(p), {rows, p.heads, width}};
    lse_ = {Dtype::f32, {rows, p.heads}};
    partial_out_ = {Dtype::f32, {partial, p.heads, width}};
    partial_lse_ = {Dtype::f32, {partial, p.heads}};
    args_ = {.q = q_.any(),
             .q_scale = p.dtype == Dtype::fp8_e4m3 ? 0.0625f : 1.0f,
             .cache = cache_.view(),
             .block_table = {table_.data(), {p.requests, pages_ + 2}},
             .items = items_,
             .scale = 1.0f / std::sqrt(static_cast<float>(spec.entry())),
             .out = out_.any(),
             .lse = lse_.view(),
             .partial_out = partial_out_.view(),
             .partial_lse = partial_lse_.view()};
  }

  // In these a row of the cache may hold infinities; elsewhere they saturate.
  static bool keeps_infinity(CacheFormat f) {
    return f == CacheFormat::f32 || f == CacheFormat::bf16 || f == CacheFormat::f16;
  }

  std::pair<Exact<Token, Head, Value>, Exact<Token, Head>> exact_result() const {
    const int64_t tokens = args_.q.extent<Token>();
    Exact<Token, Head, Value> out({tokens, p_.heads, args_.out.extent<Value>()});
    Exact<Token, Head> lse({tokens, p_.heads});
    ops::AttendLatentArgs whole = args_;
    whole.items = whole_;
    ops::reference(whole, out.view(), lse.view());
    return {out, lse};
  }

  void join_partials() {
    if (joins_.empty()) return;
    const ops::MergeSplitsArgs merge{partial_out_.view(), partial_lse_.view(), joins_, out_.view(), lse_.view()};
    Exact<Token, Head, Value> out({out_.view().extent<Token>(), p_.heads, out_.view().extent<Value>()});
    Exact<Token, Head> lse({out_.view().extent<Token>(), p_.heads});
    ops::reference(merge, out.view(), lse.view());
    const View<float, Token, Head, Value> to = out_.view();
    for (int64_t t = 0; t < to.extent<Token>(); ++t)
      for (int64_t h = 0; h < p_.heads; ++h) {
        lse_.view()(t, h) = static_cast<float>(lse.view()(t, h));
        for (int64_t d = 0; d < to.extent<Value>(); ++d) to(t, h, d) = static_cast<float>(out.view()(t, h, d));
      }
  }

  // On a Hopper GPU products are of codes, and probabilities e4m3.
  bool codes() const {
    return p_.dtype == Dtype::fp8_e4m3 && p_.format == CacheFormat::fp8 && p_.device.kind == DeviceKind::cuda &&
           p_.latent == 512 && p_.rope == 64 && p_.page_size % 2 == 0 && p_.splits == 1;
  }
  // Products take bf16 operands: of bf16 queries, and on GPUs of fp8 ones.
  bool rounds() const {
    return p_.dtype == Dtype::bf16 || (p_.dtype == Dtype::fp8_e4m3 && p_.device.kind == DeviceKind::cuda);
  }
  double out_unit(double unit) const { return out_dtype(p_) == Dtype::bf16 ? std::max(unit, 0x1p-9) : unit; }
  // Partial rows are f32, and what they are joined to here.
  static Dtype out_dtype(const Params& p) { return p.splits > 1 ? Dtype::f32 : p.activations; }

  // Straight loops in the operands' precision: f32, or bf16 operands with f32 sums.
  void plain_result(std::vector<float>& out, std::vector<float>& lse) const {
    const CacheSpec spec = spec_of(p_);
    const int64_t entry = spec.entry(), width = spec.value_width();
    auto operand = [&](float x) { return rounds() ? to_float(to_bf16(x)) : x; };
    // 2^7 at the largest.
    auto probability = [&](float x) { return codes() ? to_float(to_fp8_e4m3(x * 0x1p7f)) * 0x1p-7f : operand(x); };
    for (const LatentItem& item : whole_) {
      std::vector<float> rows(static_cast<size_t>(item.kv_end * entry));
      for (int64_t j = 0; j < item.kv_end; ++j)
        cache::format(spec.format)
            .decode(spec, args_.cache.page(args_.block_table(item.request, j / p_.page_size)), j % p_.page_size, 1,
                    rows.data() + j * entry, entry);
      for (int64_t i = 0; i < item.q_count; ++i)
        for (int64_t h = 0; h < p_.heads; ++h) {
          const int64_t at = (item.q_begin + i) * p_.heads + h,
                        count = std::clamp<int64_t>(item.visible + i + 1, 0, item.kv_end);
          std::vector<float> s(static_cast<size_t>(count));
          float m = -std::numeric_limits<float>::infinity(), sum = 0;
          for (int64_t j = 0; j < count; ++j) {
            float x = 0;
            for (int64_t d = 0; d < entry; ++d)
              x += args_.q(item.q_begin + i, h, d) * args_.q_scale * operand(rows[j * entry + d]);
            m = std::max(m, s[j] = x * args_.scale);
          }
          const bool some = m > -std::numeric_limits<float>::infinity();
          for (float& e : s) sum += (e = some ? std::exp(e - m) : 0.0f);
          for (int64_t d = 0; d < width; ++d) {
            float x = 0;
            for (int64_t j = 0; j < count; ++j) x += probability(s[j]) * operand(rows[j * entry + d]);
            out[at * width + d] = some ? x / sum : 0.0f;
            if (out_dtype(p_) == Dtype::bf16) out[at * width + d] = to_float(to_bf16(out[at * width + d]));
          }
          lse[at] = some ? m + std::log(sum) : m;
        }
    }
  }

  Params p_;
  int64_t pages_;
  std::vector<int32_t> table_;
  PoisonedCache cache_;
  std::vector<LatentItem> whole_, items_;
  std::vector<SplitRows> joins_;
  Padded<Token, Head, Entry> q_;
  Padded<Token, Head, Value> out_;
  Padded<Token, Head> lse_;
  Padded<Partial, Head, Value> partial_out_;
  Padded<Partial, Head> partial_lse_;
  CaseScratch scratch_;
  std::unique_ptr<AttendLatentCase> clean_;  // the same without what is planted
  ops::AttendLatentArgs args_;
};

std::vector<Params> sweep(uint64_t seed) {
  std::vector<Params> cases;
  auto add = [&](Params p) {
    p.seed = ++seed;
    cases.push_back(p);
  };
  for (CacheFormat format : cache_formats()) {
    const int64_t latent = format == CacheFormat::fp8_ds_v4 ? 448 : 512;
    for (Dtype q : {Dtype::f32, Dtype::bf16, Dtype::fp8_e4m3}) {
      add({.requests = 4,
           .query_len = 3,
           .context = 130,
           .ragged = true,
           .heads = 5,
           .latent = latent,
           .format = format,
           .page_size = 16,
           .dtype = q,
           .splits = 2});
      add({.requests = 1, .query_len = 1, .context = 200, .heads = 16, .latent = latent, .format = format, .dtype = q});
    }
    add({.requests = 1,
         .query_len = 2,
         .context = 97,
         .heads = 64,
         .latent = latent,
         .format = format,
         .page_size = 100,
         .dtype = Dtype::bf16});
  }
  // Odd dimensions, no rope, tiny pages, more splits than blocks, long queries.
  for (CacheFormat format : {CacheFormat::f32, CacheFormat::bf16, CacheFormat::f16, CacheFormat::fp8})
    for (Dtype q : {Dtype::f32, Dtype::bf16})
      for (int64_t page_size : {1, 3, 64}) {
        add({.requests = 3,
             .query_len = 7,
             .context = 60,
             .ragged = true,
             .heads = 3,
             .latent = 40,
             .rope = 8,
             .format = format,
             .page_size = page_size,
             .dtype = q,
             .splits = 5});
        add({.requests = 2,
             .query_len = 40,
             .context = 33,
             .heads = 1,
             .latent = 35,
             .rope = 0,
             .format = format,
             .page_size = page_size,
             .dtype = q});
      }
  add({.requests = 1, .query_len = 1, .context = 0, .heads = 2, .latent = 40, .rope = 8});
  // Products of codes, where a GPU makes them.
  for (int64_t heads : {3, 64, 128})
    for (int64_t page_size : {2, 16, 64})
      add({.requests = 4,
           .query_len = 3,
           .context = 130,
           .ragged = true,
           .heads = heads,
           .format = CacheFormat::fp8,
           .page_size = page_size,
           .dtype = Dtype::fp8_e4m3});
  // Rows of 512 values alone, of 16 bits: tiles of each height, pages of whole boxes and of single rows.
  for (CacheFormat format : {CacheFormat::bf16, CacheFormat::f16})
    for (int64_t heads : {3, 20, 64, 128})
      for (int64_t page_size : {64, 17})
        add({.requests = 3,
             .query_len = 2,
             .context = 200,
             .ragged = true,
             .heads = heads,
             .rope = 0,
             .format = format,
             .page_size = page_size,
             .dtype = Dtype::bf16,
             .nonfinite = heads == 20 || heads == 128});
  // Batches of any shape: rows a request from none to several groups of a kernel's, in any order.
  Random random(seed);
  constexpr CacheFormat kPlain[] = {CacheFormat::f32, CacheFormat::bf16, CacheFormat::f16, CacheFormat::fp8};
  for (int i = 0; i < 300; ++i) {
    const int64_t heads = random.integer(1, 4) == 1 ? random.integer(48, 132) : random.integer(1, 40);
    add({.requests = random.integer(1, 6),
         .query_len = random.integer(1, 1 + 200 / heads),
         .context = random.integer(0, 20),
         .ragged = random.integer(0, 5) > 0,
         .heads = heads,
         .latent = random.integer(1, 16),
         .rope = random.integer(0, 6),
         .format = kPlain[random.integer(0, 3)],
         .page_size = random.integer(1, 9),
         .dtype = random.integer(0, 1) == 0 ? Dtype::f32 : Dtype::bf16,
         .splits = random.integer(1, 4) == 1 ? random.integer(2, 4) : 1});
  }
  // NaN and infinities, in tiles of many rows that see different keys, over several blocks of keys.
  for (CacheFormat format : cache_formats())
    for (Dtype q : {Dtype::f32, Dtype::bf16, Dtype::fp8_e4m3}) {
      const bool fixed = format == CacheFormat::fp8_ds_mla || format == CacheFormat::fp8_ds_v4;
      for (int i = 0; i < (fixed ? 2 : 12); ++i)
        add({.requests = 3,
             .query_len = random.integer(1, 40),
             .context = random.integer(0, 1) * random.integer(0, fixed ? 60 : 200),
             .ragged = i > 0,
             .heads = random.integer(1, 5),
             .latent = format == CacheFormat::fp8_ds_v4 ? 448
                       : fixed                          ? 512
                                                        : random.integer(1, 33),
             .rope = fixed ? 64 : random.integer(0, 9),
             .format = format,
             .page_size = random.integer(1, 20),
             .dtype = q,
             .splits = i % 4 == 3 ? 3 : 1,
             .nonfinite = true});
    }
  for (int i = 0; i < 6; ++i)
    add({.requests = 3,
         .query_len = random.integer(1, 4),
         .context = random.integer(0, 1) * random.integer(0, 200),
         .ragged = i > 0,
         .heads = random.integer(1, 128),
         .format = CacheFormat::fp8,
         .page_size = 2 * random.integer(1, 20),
         .dtype = Dtype::fp8_e4m3,
         .nonfinite = true});
  return cases;
}

}  // namespace

const CaseType attend_latent{
    "attend_latent", [](const Params& p) -> std::unique_ptr<Case> { return std::make_unique<AttendLatentCase>(p); },
    sweep};

}  // namespace mla::cases
