#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "backend/run.hpp"
#include "cases/compare.hpp"
#include "cases/padded.hpp"

namespace mla::cases {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

bool empty(float lse) { return !(lse < kInf) || lse == -kInf; }

/// Mostly ordinary values; some empty, some of the two forms read as empty, some far away.
float random_lse(Random& random) {
  switch (random.integer(0, 11)) {
    case 0: return -kInf;
    case 1: return kInf;
    case 2: return std::numeric_limits<float>::quiet_NaN();
    case 3: return 300.0f * random.normal();
    default: return 3.0f * random.normal();
  }
}

/// Random (O, LSE) parts; the O of an empty part is absurd in its first element and NaN in most. With nonfinite, some
/// are rows that attention made NaN.
template <class Row>
void fill_parts(Random& random, Padded<Row, Head, Value>& out, Padded<Row, Head>& lse, bool nonfinite) {
  out.fill_normal(random);
  auto o = out.view();
  auto l = lse.view();
  for (int64_t t = 0; t < o.template extent<Row>(); ++t)
    for (int64_t h = 0; h < o.template extent<Head>(); ++h) {
      l(t, h) = random_lse(random);
      if (empty(l(t, h)))
        for (int64_t d = 0; d < o.template extent<Value>(); ++d) o(t, h, d) = d % 3 ? poison() : 3e38f;
      if (nonfinite && random.integer(0, 5) == 0) {
        l(t, h) = poison();
        for (int64_t d = 0; d < o.template extent<Value>(); ++d) o(t, h, d) = poison();
      }
    }
}

/// One row joined in f32, term by term; writes out and returns lse.
template <class Lse, class Part>
float plain_join(int64_t parts, int64_t width, Lse&& lse, Part&& part, std::vector<float>& out) {
  float m = -kInf, sum = 0;
  for (int64_t i = 0; i < parts; ++i)
    if (!empty(lse(i))) m = std::max(m, lse(i));
  for (int64_t i = 0; i < parts; ++i)
    if (!empty(lse(i))) sum += std::exp(lse(i) - m);
  for (int64_t d = 0; d < width; ++d) {
    float x = 0;
    for (int64_t i = 0; i < parts; ++i)
      if (!empty(lse(i))) x += std::exp(lse(i) - m) / sum * part(i, d);
    out.push_back(x);
  }
  return sum > 0 ? m + std::log(sum) : -kInf;
}

// Splits 1: merge of (out, lse) with another part, through a row list when ragged. Splits > 1: merge_splits of that
// many, each request one item; ragged: a different number for each.
class MergeCase final : public Case {
 public:
  explicit MergeCase(const Params& p)
      : tokens_(p.requests * p.query_len),
        heads_(p.heads),
        width_(p.value),
        split_(p.splits > 1),
        dtype_(split_ ? p.dtype : Dtype::f32),
        out_(dtype_, {tokens_ + 2, heads_, width_}, gap_of(p)),
        lse_(Dtype::f32, {tokens_ + 2, heads_}, gap_of(p)) {
    Random random(p.seed);
    if (split_) out_.fill_normal(random), lse_.fill_normal(random);  // written, not read
    else fill_parts(random, out_, lse_, p.nonfinite);
    if (split_) {
      int32_t partials = 1;  // row 0 belongs to nobody
      for (int64_t r = 0; r < p.requests; ++r) {
        const int32_t splits = static_cast<int32_t>(p.ragged ? random.integer(1, p.splits) : p.splits);
        items_.push_back({.row = static_cast<int32_t>(r * p.query_len),
                          .rows = static_cast<int32_t>(p.query_len),
                          .partial = partials,
                          .splits = splits});
        partials += splits * static_cast<int32_t>(p.query_len);
      }
      part_out_ = {Dtype::f32, {partials, heads_, width_}, gap_of(p)};
      part_lse_ = {Dtype::f32, {partials, heads_}, gap_of(p)};
      fill_parts(random, part_out_, part_lse_, p.nonfinite);
      splits_args_ = {.partial_out = part_out_.view(),
                      .partial_lse = part_lse_.view(),
                      .items = items_,
                      .out = out_.any(),
                      .lse = lse_.view()};
    } else {
      other_out_ = {Dtype::f32, {tokens_, heads_, width_}, gap_of(p)};
      other_lse_ = {Dtype::f32, {tokens_, heads_}, gap_of(p)};
      fill_parts(random, other_out_, other_lse_, p.nonfinite);
      if (p.ragged) {
        rows_.resize(tokens_ + 2);
        std::iota(rows_.begin(), rows_.end(), 0);
        for (int64_t i = tokens_ + 1; i > 0; --i) std::swap(rows_[i], rows_[random.integer(0, i)]);
        rows_.resize(tokens_);
      }
      args_ = {.out = out_.view(),
               .lse = lse_.view(),
               .other = other_out_.view(),
               .other_lse = other_lse_.view(),
               .rows = rows_};
    }
    out_before_ = out_.bytes();
    lse_before_ = lse_.bytes();
  }

  // In place: the operands are put back first, a copy that counts in the time.
  void run(Stream& stream) override {
    out_.restore(out_before_);
    lse_.restore(lse_before_);
    if (split_) ops::run(stream, splits_args_);
    else ops::run(stream, args_);
  }

  Verdict verify() override {
    Padded<Token, Head, Value> out_after = out_;
    Padded<Token, Head> lse_after = lse_;
    out_.restore(out_before_);
    lse_.restore(lse_before_);
    Exact<Token, Head, Value> exact_out({tokens_ + 2, heads_, width_});
    Exact<Token, Head> exact_lse({tokens_ + 2, heads_});
    std::vector<std::vector<float>> plain(tokens_ + 2);
    std::vector<float> plain_lse((tokens_ + 2) * heads_);
    if (split_) {
      ops::reference(splits_args_, exact_out.view(), exact_lse.view());
      for (const SplitRows& s : items_)
        for (int32_t r = 0; r < s.rows; ++r)
          for (int64_t h = 0; h < heads_; ++h) {
            auto at = [&](int64_t i) { return s.partial + i * s.rows + r; };
            plain_lse[(s.row + r) * heads_ + h] = plain_join(
                s.splits, width_, [&](int64_t i) { return splits_args_.partial_lse(at(i), h); },
                [&](int64_t i, int64_t d) { return splits_args_.partial_out(at(i), h, d); }, plain[s.row + r]);
          }
    } else {
      ops::reference(args_, exact_out.view(), exact_lse.view());
      for (int64_t t = 0; t < tokens_; ++t) {
        const int64_t row = rows_.empty() ? t : rows_[t];
        for (int64_t h = 0; h < heads_; ++h)
          plain_lse[row * heads_ + h] = plain_join(
              2, width_, [&](int64_t i) { return i ? args_.other_lse(t, h) : args_.lse(row, h); },
              [&](int64_t i, int64_t d) { return i ? args_.other(t, h, d) : args_.out(row, h, d); }, plain[row]);
      }
    }

    // Rows that no part was joined into must be as they were.
    std::vector<float> got_out, got_lse, p_out, p_lse;
    std::vector<double> e_out, e_lse;
    bool intact = out_after.intact() && lse_after.intact();
    for (int64_t t = 0; t < tokens_ + 2; ++t)
      for (int64_t h = 0; h < heads_; ++h) {
        const float lse = lse_after.view()(t, h);
        if (plain[t].empty() && width_ > 0) {
          intact = intact && same(lse, lse_.view()(t, h));
          for (int64_t d = 0; d < width_; ++d) intact = intact && same(out_after.any()(t, h, d), out_.any()(t, h, d));
          continue;
        }
        got_lse.push_back(lse);
        e_lse.push_back(exact_lse.view()(t, h));
        p_lse.push_back(plain_lse[t * heads_ + h]);
        for (int64_t d = 0; d < width_; ++d) {
          got_out.push_back(out_after.any()(t, h, d));
          e_out.push_back(exact_out.view()(t, h, d));
          p_out.push_back(plain[t][h * width_ + d]);
        }
      }
    out_ = out_after;
    lse_ = lse_after;
    const double unit = dtype_ == Dtype::f32 ? 0x1p-24 : dtype_ == Dtype::f16 ? 0x1p-11 : 0x1p-8;
    const Verdict out = compare(got_out, e_out, p_out, unit), lse = compare(got_lse, e_lse, p_lse, 0x1p-24);
    return unless_touched(out.ok ? lse : out, intact, "out or lse");
  }
  ops::Cost cost() const override { return split_ ? ops::cost(splits_args_) : ops::cost(args_); }

 private:
  static bool same(float a, float b) { return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b); }

  int64_t tokens_, heads_, width_;
  bool split_;
  Dtype dtype_;
  Padded<Token, Head, Value> out_, other_out_;
  Padded<Token, Head> lse_, other_lse_;
  Padded<Partial, Head, Value> part_out_;
  Padded<Partial, Head> part_lse_;
  std::vector<int32_t> rows_;
  std::vector<SplitRows> items_;
  std::vector<std::byte> out_before_, lse_before_;
  ops::MergeArgs args_;
  ops::MergeSplitsArgs splits_args_;
};

std::vector<Params> sweep(uint64_t seed) {
  std::vector<Params> cases;
  for (int64_t splits : {1, 2, 7})
    for (bool ragged : {false, true})
      for (int64_t requests : {0, 1, 33})
        for (int64_t value : {1, 20, 512})
          cases.push_back({.requests = requests,
                           .query_len = 2,
                           .ragged = ragged,
                           .heads = 5,
                           .value = value,
                           .dtype = std::array{Dtype::f32, Dtype::bf16, Dtype::f16}[seed % 3],
                           .splits = splits,
                           .seed = ++seed});
  Random random(seed);
  for (int i = 0; i < 20; ++i)
    cases.push_back({.requests = random.integer(1, 20),
                     .query_len = random.integer(1, 6),
                     .ragged = random.integer(0, 1) == 1,
                     .heads = random.integer(1, 20),
                     .value = random.integer(1, 600),
                     .dtype = std::array{Dtype::f32, Dtype::bf16, Dtype::f16}[i % 3],
                     .splits = random.integer(1, 12),
                     .nonfinite = i % 2 == 1,
                     .seed = ++seed});
  return cases;
}

}  // namespace

const CaseType merge{"merge", [](const Params& p) -> std::unique_ptr<Case> { return std::make_unique<MergeCase>(p); },
                     sweep};

}  // namespace mla::cases
