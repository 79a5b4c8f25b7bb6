#include <cmath>
#include <limits>
#include <numeric>

#include "backend/backend.hpp"
#include "backend/run.hpp"
#include "cache/format.hpp"
#include "cases/padded.hpp"
#include "cases/poisoned_cache.hpp"
#include "cases/scratch.hpp"
#include "ops/attend_sparse/selected.hpp"

namespace mla::cases {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int32_t kSmallest = std::numeric_limits<int32_t>::min(), kLargest = std::numeric_limits<int32_t>::max();

// A cache of which each query row selects up to topk visible positions in random order. The n-th source has other page
// sizes, and less is selected from it. Slots that nobody selects are NaN.
class Source {
 public:
  Source(const Params& p, int64_t index, Random& random)
      : topk_(index == 0 ? p.topk : p.topk / 2 + 1),
        stride_(topk_ + 3),
        cache_(spec_of(p, index), pages_of(p, index), random, p.dense),
        held_(cache_.view().pages * cache_.view().spec.page_size),
        plants_(p.seed + 1 + static_cast<uint64_t>(index)),
        nonfinite_(p.nonfinite),
        infinities_(!p.dense),
        slots_((p.requests * p.query_len + 1) * stride_, kSmallest) {
    const int64_t per_request = pages_per_request(p, index) * page_size_of(p, index);
    std::vector<int32_t> order;
    for (int64_t r = 0; r < p.requests; ++r) {
      order.resize(static_cast<size_t>(p.context));
      std::iota(order.begin(), order.end(), 0);
      for (int64_t i = 0; i < p.query_len; ++i) {
        order.push_back(static_cast<int32_t>(p.context + i));
        select(p, random, order, r * per_request, r * p.query_len + i);
      }
    }
  }
  ops::SparseSource args(int64_t rows) {
    return {.cache = cache_.view(), .slots = {slots_.data(), {rows, topk_}, {stride_, 1}}, .lengths = lengths_};
  }
  int64_t topk() const { return topk_; }

 private:
  static int64_t page_size_of(const Params& p, int64_t index) { return p.page_size + 3 * index; }
  static int64_t pages_per_request(const Params& p, int64_t index) {
    return (p.context + p.query_len + page_size_of(p, index) - 1) / page_size_of(p, index);
  }
  static int64_t pages_of(const Params& p, int64_t index) { return p.requests * pages_per_request(p, index) + 1; }
  static CacheSpec spec_of(const Params& p, int64_t index) {
    return {.format = p.format,
            .latent = p.latent,
            .rope = p.rope,
            .page_size = page_size_of(p, index),
            .k_scale = 0.0625f};
  }

  // Row's list: the first of the visible positions after a partial shuffle, then -1. Ragged: fewer of them, holes and
  // absurd entries anywhere, some named again, and a length; now and then nothing that exists, or no length.
  void select(const Params& p, Random& random, std::vector<int32_t>& order, int64_t first_token, int64_t row) {
    const int64_t visible = static_cast<int64_t>(order.size());
    int64_t count = std::min(topk_, visible);
    int32_t* slots = slots_.data() + row * stride_;
    std::fill_n(slots, topk_, -1);
    if (p.ragged && random.integer(0, 2) == 0) count = random.integer(0, count);
    const bool nothing = p.ragged && row % 5 == 3;
    for (int64_t k = 0; k < count; ++k) {
      std::swap(order[k], order[random.integer(k, visible - 1)]);
      const int32_t slot = cache_.slot(first_token + order[k]);
      const int64_t what = p.ragged ? random.integer(0, 9) : 9;
      if (nothing || what == 0) {
        const int32_t odd[] = {-1, -2, kSmallest, kLargest, static_cast<int32_t>(held_.size())};
        slots[k] = odd[random.integer(0, 4)];
      } else {
        slots[k] = what == 1 && k > 0 ? slots[random.integer(0, k - 1)] : slot;
        if (slots[k] == slot) fill(random, slot);
      }
    }
    if (p.ragged) {
      // What lies past a row's length counts for nothing, even where it exists.
      lengths_.push_back(static_cast<int32_t>(row % 7 == 5 ? 0 : random.integer(topk_ / 2, topk_)));
    }
  }
  void fill(Random& random, int32_t slot) {
    if (held_[slot]) return;
    held_[slot] = true;
    const CacheView cache = cache_.view();
    std::vector<float> row(static_cast<size_t>(cache.spec.entry()));
    random.fill_normal(row);
    const CacheFormat f = cache.spec.format;
    if (nonfinite_ && plants_.integer(0, 30) == 0)
      row[plants_.integer(0, cache.spec.entry() - 1)] = odd_number(
          plants_, infinities_ && (f == CacheFormat::f32 || f == CacheFormat::bf16 || f == CacheFormat::f16));
    cache::format(cache.spec.format)
        .encode(cache.spec, cache.page(slot / cache.spec.page_size), slot % cache.spec.page_size, row.data(),
                row.data() + cache.spec.latent);
  }

  int64_t topk_, stride_;
  PoisonedCache cache_;
  std::vector<bool> held_;
  Random plants_;
  bool nonfinite_, infinities_;  // Hopper's kernels keep an infinity of a logit of -inf to its own column
  std::vector<int32_t> slots_, lengths_;
};

// requests * query_len rows over one source or several. With splits, each row's list is cut into that many ranges, as
// items of their own that merge_sparse joins, or (batch_invariant) as parts of one item.
class AttendSparseCase final : public Case {
 public:
  explicit AttendSparseCase(const Params& p) : AttendSparseCase(p, Random(p.seed)) {
    if (!p.nonfinite) return;
    Params clean = p;
    clean.nonfinite = false;
    clean_ = std::make_unique<AttendSparseCase>(clean);
  }

  void run(Stream& stream) override {
    args_.scratch = scratch_.get(stream, per_worker_);
    ops::run(stream, args_);
    if (!joins_.empty()) ops::run(stream, merge_);
    if (clean_) clean_->run(stream);
  }

  Verdict verify() override {
    const int64_t rows = args_.q.extent<Token>(), width = args_.out.extent<Value>();
    // Large cases are judged on evenly spaced rows, the first and the last among them.
    const int64_t stride = 1 + static_cast<int64_t>(cost().flops * 0x1p-30);
    ops::AttendSparseArgs whole = args_;
    std::vector<SparseItem> judged;
    for (int64_t r = 0; r < rows; ++r)
      if (r % stride == 0 || r == rows - 1)
        judged.push_back({.q_begin = static_cast<int32_t>(r), .q_count = 1, .k_end = keys_});
    whole.items = judged;
    whole.part_keys = 0;
    Exact<Token, Head, Value> exact({rows, p_.heads, width}), clean(exact.extents);
    Exact<Token, Head> exact_lse({rows, p_.heads}), exact_max({rows, p_.heads}), clean_lse(exact_lse.extents),
        clean_max(exact_lse.extents);
    ops::reference(whole, exact.view(), exact_lse.view(), exact_max.view());
    if (clean_) {
      ops::AttendSparseArgs without = clean_->args_;
      without.items = judged;
      without.part_keys = 0;
      ops::reference(without, clean.view(), clean_lse.view(), clean_max.view());
    }
    std::vector<float> plain(exact.values.size()), plain_lse(exact_lse.values.size()), plain_max(plain_lse.size());
    for (const SparseItem& item : judged) plain_row(item.q_begin, plain, plain_lse, plain_max);

    auto kept = [&](auto values, int64_t row_size) {
      for (size_t i = 0; i < judged.size(); ++i)
        std::copy_n(values.begin() + judged[i].q_begin * row_size, row_size,
                    values.begin() + static_cast<int64_t>(i) * row_size);
      values.resize(judged.size() * static_cast<size_t>(row_size));
      return values;
    };
    // One rounding of a score moves its probability by the score's magnitude times that, whoever computes it; lse tells
    // the magnitude. bf16 queries: their products may round probabilities and rows to bf16 too.
    double magnitude = 1;
    for (double lse : exact_lse.values)
      if (std::isfinite(lse)) magnitude = std::max(magnitude, std::abs(lse));
    const double unit = rounds() ? 0x1p-9 : magnitude * 0x1p-24;
    const double out_unit = p_.activations == Dtype::bf16 ? std::max(unit, 0x1p-9) : unit;
    auto judge = [&](const char* what, const auto& got, const std::vector<double>& e, const std::vector<float>& p,
                     int64_t row_size, double u, const auto* clean_got, const std::vector<double>& clean_e) {
      Verdict v = compare(kept(got.values(), row_size), kept(e, row_size), kept(p, row_size), u);
      if (clean_)
        v = unless_moved(v, row_size / p_.heads, kept(got.values(), row_size), kept(e, row_size),
                         kept(clean_got->values(), row_size), kept(clean_e, row_size));
      v.detail = std::string(what) + ": " + v.detail;
      return v;
    };
    const AttendSparseCase* c = clean_.get();
    Verdict v =
        judge("out", out_, exact.values, plain, p_.heads * width, out_unit, c ? &c->out_ : nullptr, clean.values);
    if (v.ok)
      if (const Verdict l =
              judge("lse", lse_, exact_lse.values, plain_lse, p_.heads, unit, c ? &c->lse_ : nullptr, clean_lse.values);
          !l.ok)
        v = l;
    if (v.ok && p_.max_logits)
      if (const Verdict m = judge("max_logits", max_, exact_max.values, plain_max, p_.heads, unit,
                                  c ? &c->max_ : nullptr, clean_max.values);
          !m.ok)
        v = m;
    return unless_touched(v,
                          out_.intact() && lse_.intact() && max_.intact() && partial_out_.intact() &&
                              partial_lse_.intact() && partial_max_.intact(),
                          "an output");
  }

  std::string kernel() const override { return ops::kernel(backend::backend(p_.device), {}, args_); }

  ops::Cost cost() const override {
    ops::Cost c = ops::cost(args_);
    if (!joins_.empty()) c += ops::cost(merge_);
    return c;
  }

 private:
  AttendSparseCase(const Params& p, Random random) : p_(p) {
    const int64_t rows = p.requests * p.query_len;
    for (int64_t i = 0; i < p.sources; ++i) {
      sources_.push_back(std::make_unique<Source>(p, i, random));
      source_args_.push_back(sources_.back()->args(rows));
      keys_ += static_cast<int32_t>(sources_.back()->topk());
    }
    const CacheSpec& spec = source_args_[0].cache.spec;
    const int64_t width = spec.value_width();
    const int64_t gap = p.dense ? 0 : 3;
    q_ = {p.dtype, {rows, p.heads, spec.entry()}, gap};
    q_.fill_normal(random, p.dtype == Dtype::fp8_e4m3 ? 16.0f : 1.0f);
    Random plants(p.seed);
    for (int64_t t = 0; t < rows && p.nonfinite; ++t)
      for (int64_t h = 0; h < p.heads; ++h)
        if (plants.integer(0, 15) == 0)
          store_float(p.dtype, q_.any().at(t, h, plants.integer(0, spec.entry() - 1)), 0,
                      odd_number(plants, p.dtype != Dtype::fp8_e4m3));
    out_ = {p.activations, {rows, p.heads, width}, gap};
    lse_ = {Dtype::f32, {rows, p.heads}};
    max_ = {Dtype::f32, {rows, p.heads}};
    for (int64_t h = 0; p.sinks && h < p.heads; ++h)
      sinks_.push_back(h % 4 == 1 ? -kInf : h % 4 == 3 ? kInf : 5.0f + 3.0f * random.normal());

    const int32_t step = static_cast<int32_t>(std::max<int64_t>(1, (keys_ + p.splits - 1) / p.splits));
    const int32_t all = static_cast<int32_t>(rows), splits = std::max(1, (keys_ + step - 1) / step);
    const bool whole = splits == 1 || p.batch_invariant;
    if (p.batch_invariant) args_.part_keys = step;
    // Ragged rows come in items of any length, none too.
    for (int32_t row = 0, count; row < all || items_.empty(); row += count) {
      count = p.ragged ? static_cast<int32_t>(random.integer(0, all - row)) : all;
      for (int32_t s = 0; s < (whole ? 1 : splits); ++s)
        items_.push_back({.q_begin = row,
                          .q_count = count,
                          .k_begin = whole ? 0 : s * step,
                          .k_end = whole ? keys_ : std::min(keys_, (s + 1) * step),
                          .partial = whole ? -1 : row * splits + s * count});
      if (!whole) joins_.push_back({.row = row, .rows = count, .partial = row * splits, .splits = splits});
    }
    if (!whole) {
      partial_out_ = {Dtype::f32, {splits * all, p.heads, width}};
      partial_lse_ = {Dtype::f32, {splits * all, p.heads}};
      partial_max_ = {Dtype::f32, {splits * all, p.heads}};
    }
    args_.q = q_.any();
    args_.q_scale = p.dtype == Dtype::fp8_e4m3 ? 0.0625f : 1.0f;
    args_.sources = source_args_;
    args_.items = items_;
    args_.scale = 1.0f / std::sqrt(static_cast<float>(spec.entry()));
    args_.sinks = sinks_;
    args_.out = out_.any();
    args_.lse = lse_.view();
    if (p.max_logits) args_.max_logits = max_.view();
    args_.partial_out = partial_out_.view();
    args_.partial_lse = partial_lse_.view();
    args_.partial_max = partial_max_.view();
    merge_ = {.partial_out = args_.partial_out,
              .partial_lse = args_.partial_lse,
              .partial_max = args_.partial_max,
              .items = joins_,
              .sinks = sinks_,
              .out = args_.out,
              .lse = args_.lse,
              .max_logits = args_.max_logits};
    per_worker_ = backend::backend(p.device).scratch_per_worker(
        {.heads = p.heads, .latent = p.latent, .rope = p.rope, .nope = 1, .value = 1, .hidden = 1});
  }

  // Products take bf16 operands: of bf16 queries, and on GPUs of fp8 ones.
  bool rounds() const {
    return p_.dtype == Dtype::bf16 || (p_.dtype == Dtype::fp8_e4m3 && p_.device.kind == DeviceKind::cuda);
  }

  // Straight loops in the operands' precision: f32, or bf16 operands with f32 sums.
  void plain_row(int64_t row, std::vector<float>& out, std::vector<float>& lse, std::vector<float>& largest) const {
    const int64_t entry = args_.q.extent<Entry>(), width = args_.out.extent<Value>();
    auto operand = [&](float x) { return rounds() ? to_float(to_bf16(x)) : x; };
    std::vector<float> keys;
    int64_t count = 0;
    ops::for_selected(args_.sources, row, 0, keys_, [&](size_t source, int32_t slot) {
      const CacheView& c = args_.sources[source].cache;
      keys.resize(static_cast<size_t>((count + 1) * entry));
      cache::format(c.spec.format)
          .decode(c.spec, c.page(slot / c.spec.page_size), slot % c.spec.page_size, 1, keys.data() + count * entry,
                  entry);
      ++count;
    });
    for (float& x : keys) x = operand(x);
    for (int64_t h = 0; h < p_.heads; ++h) {
      const int64_t at = row * p_.heads + h;
      std::vector<float> s, sums(static_cast<size_t>(width)), q;
      for (int64_t d = 0; d < entry; ++d) q.push_back(args_.q(row, h, d) * args_.q_scale);
      float m = -kInf, sum = 0;
      for (int64_t j = 0; j < count; ++j) {
        float x = 0;
        for (int64_t d = 0; d < entry; ++d) x += q[d] * keys[j * entry + d];
        s.push_back(x * args_.scale);
        m = std::max(m, s.back());
      }
      for (int64_t j = 0; j < count; ++j) {
        if (s[j] == -kInf) continue;
        const float e = std::exp(s[j] - m);
        sum += e;
        for (int64_t d = 0; d < width; ++d) sums[d] += operand(e) * keys[j * entry + d];
      }
      const bool some = m > -kInf;
      largest[at] = m;
      lse[at] = some ? m + std::log(sum) : m;
      const float kept = sinks_.empty() ? 1.0f : 1.0f / (1.0f + std::exp(sinks_[h] - lse[at]));
      for (int64_t d = 0; d < width; ++d) {
        out[at * width + d] = some ? sums[d] / sum * kept : 0.0f;
        if (p_.activations == Dtype::bf16) out[at * width + d] = to_float(to_bf16(out[at * width + d]));
      }
    }
  }

  Params p_;
  int32_t keys_ = 0;
  std::vector<std::unique_ptr<Source>> sources_;
  std::vector<ops::SparseSource> source_args_;
  std::vector<SparseItem> items_;
  std::vector<SplitRows> joins_;
  std::vector<float> sinks_;
  Padded<Token, Head, Entry> q_;
  Padded<Token, Head, Value> out_;
  Padded<Token, Head> lse_, max_;
  Padded<Partial, Head, Value> partial_out_;
  Padded<Partial, Head> partial_lse_, partial_max_;
  size_t per_worker_ = 0;
  CaseScratch scratch_;
  std::unique_ptr<AttendSparseCase> clean_;  // the same without what is planted
  ops::AttendSparseArgs args_;
  ops::MergeSparseArgs merge_;
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
           .splits = 2,
           .topk = 100,
           .sources = 2,
           .sinks = true});
      add({.requests = 1, .context = 400, .latent = latent, .format = format, .dtype = q, .topk = 200});
    }
    add({.requests = 1,
         .query_len = 2,
         .context = 250,
         .heads = 80,
         .latent = latent,
         .format = format,
         .page_size = 100,
         .dtype = Dtype::bf16,
         .splits = 3,
         .topk = 130});
  }
  // Odd dimensions, no rope, tiny pages, more selected than there is, parts within an item.
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
             .splits = 5,
             .topk = 97,
             .sources = page_size == 3 ? 3 : 1,
             .sinks = true});
        add({.requests = 2,
             .query_len = 9,
             .context = 333,
             .ragged = page_size == 64,
             .heads = 33,
             .latent = 35,
             .rope = 0,
             .format = format,
             .page_size = page_size,
             .dtype = q,
             .batch_invariant = true,
             .splits = 4,
             .topk = 300});
      }
  add({.requests = 2, .query_len = 1, .context = 0, .heads = 2, .latent = 40, .rope = 8, .topk = 5});
  add({.requests = 2, .query_len = 3, .context = 9, .heads = 2, .latent = 40, .rope = 8, .splits = 3, .topk = 0});
  add({.requests = 0, .query_len = 3, .context = 9, .heads = 2, .latent = 40, .rope = 8, .splits = 2, .topk = 4});
  // Batches of any shape; every third with NaN and infinities.
  Random random(seed);
  constexpr CacheFormat kPlain[] = {CacheFormat::f32, CacheFormat::bf16, CacheFormat::f16, CacheFormat::fp8};
  constexpr Dtype kQueries[] = {Dtype::f32, Dtype::bf16, Dtype::fp8_e4m3};
  for (int i = 0; i < 200; ++i)
    add({.requests = random.integer(0, 5),
         .query_len = random.integer(1, 6),
         .context = random.integer(0, 40),
         .ragged = random.integer(0, 5) > 0,
         .heads = random.integer(0, 4) == 0 ? random.integer(48, 132) : random.integer(1, 20),
         .latent = random.integer(1, 16),
         .rope = random.integer(0, 6),
         .format = kPlain[random.integer(0, 3)],
         .page_size = random.integer(1, 9),
         .dtype = kQueries[random.integer(0, 2)],
         .batch_invariant = random.integer(0, 3) == 0,
         .splits = random.integer(1, 3),
         .topk = random.integer(0, 60),
         .sources = random.integer(1, 3),
         .sinks = random.integer(0, 1) == 0,
         .nonfinite = i % 3 == 0});
  return cases;
}

}  // namespace

const CaseType attend_sparse{
    "attend_sparse", [](const Params& p) -> std::unique_ptr<Case> { return std::make_unique<AttendSparseCase>(p); },
    sweep};

}  // namespace mla::cases
