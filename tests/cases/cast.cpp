#include "backend/run.hpp"
#include "cases/compare.hpp"

namespace mla::cases {
namespace {

class CastCase final : public Case {
 public:
  explicit CastCase(const Params& p) : rows_(p.requests * p.query_len), heads_(p.heads), n_(p.in) {
    Random random(p.seed);
    const int64_t stored = rows_ + 3;  // x holds more rows than are asked for, and a wider last dimension
    x_.resize(stored * heads_ * (n_ + 5));
    random.fill_normal(x_, 30.0f);  // reaches past 448 at times
    const Dtype from = p.seed % 5 == 0 ? Dtype::f16 : p.seed % 5 == 1 ? Dtype::bf16 : Dtype::f32;
    stored_x_.resize(x_.size() * size_of(from));
    for (size_t i = 0; i < x_.size(); ++i) store_float(from, stored_x_.data(), static_cast<int64_t>(i), x_[i]);
    for (int64_t i = 0; i < rows_; ++i) list_.push_back(static_cast<int32_t>(random.integer(0, stored - 1)));
    // Rows innermost in every second case, with room behind each column.
    const bool turned = p.seed % 2 == 0;
    const int64_t step = (rows_ + 3) / 4 * 4 + 4;
    y_.assign(heads_ * std::max(rows_ * (n_ + 2), n_ * step) * size_of(p.dtype), std::byte{0x5a});
    for (int64_t h = 0; h < heads_; ++h) scales_.push_back(p.dtype == Dtype::fp8_e4m3 ? 0.05f + 0.03f * h : 1.0f);
    args_ = {.x = {from, stored_x_.data(), {stored, heads_, n_}, {heads_ * (n_ + 5), n_ + 5, 1}},
             .x_rows = list_,
             .y = {p.dtype, y_.data(), {rows_, heads_, n_}, {heads_ * (n_ + 2), n_ + 2, 1}},
             .scale = p.dtype == Dtype::fp8_e4m3 ? 0.0625f : 1.0f};
    if (turned) args_.y = {p.dtype, y_.data(), {rows_, heads_, n_}, {1, n_ * step, step}};
    if (p.seed % 4 < 2) args_.scales = {scales_.data(), {heads_}};
    args_.through_e4m3 = p.dtype != Dtype::fp8_e4m3 && p.seed % 3 == 0;
    // In every third case to rows in another order, some of them nowhere.
    if (p.seed % 3 == 0 && rows_ > 0) {
      for (int64_t i = 0; i < rows_; ++i) to_.push_back(static_cast<int32_t>(i));
      for (int64_t i = rows_; i-- > 0;) std::swap(to_[i], to_[random.integer(0, i)]);
      for (int32_t& row : to_)
        if (random.integer(0, 3) == 0) row = -1;
      args_.y_rows = to_;
    }
    for (int64_t t = 0; t < rows_; ++t)
      for (int64_t h = 0; h < heads_; ++h)
        for (int64_t d = 0; d < n_; ++d) before_.push_back(args_.y(t, h, d));
  }
  void run(Stream& stream) override { ops::run(stream, args_); }
  Verdict verify() override {
    std::vector<float> expected = before_;
    ops::reference(args_, expected);
    Verdict v{.error = 0, .bound = 0, .ok = true, .detail = {}};
    size_t i = 0;
    for (int64_t t = 0; t < rows_; ++t)
      for (int64_t h = 0; h < heads_; ++h)
        for (int64_t d = 0; d < n_; ++d, ++i)
          if (args_.y(t, h, d) != expected[i]) {
            v.ok = false;
            v.error = 1;
            v.detail = "element " + std::to_string(i) + " is " + std::to_string(args_.y(t, h, d)) + ", expected " +
                       std::to_string(expected[i]);
          }
    return v;
  }
  ops::Cost cost() const override { return ops::cost(args_); }

 private:
  int64_t rows_, heads_, n_;
  std::vector<float> x_, scales_, before_;
  std::vector<int32_t> list_, to_;
  std::vector<std::byte> stored_x_, y_;
  ops::CastArgs args_;
};

std::vector<Params> sweep(uint64_t seed) {
  std::vector<Params> cases;
  for (Dtype t : {Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::fp8_e4m3})
    for (int64_t rows : {0, 1, 37})
      for (int64_t in : {1, 8, 64, 576, 40})
        cases.push_back({.requests = rows, .heads = 3, .in = in, .dtype = t, .seed = ++seed});
  return cases;
}

}  // namespace

const CaseType cast{"cast", [](const Params& p) -> std::unique_ptr<Case> { return std::make_unique<CastCase>(p); },
                    sweep};

}  // namespace mla::cases
