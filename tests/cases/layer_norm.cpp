#include <cmath>
#include <limits>

#include "backend/run.hpp"
#include "cases/compare.hpp"
#include "cases/padded.hpp"

namespace mla::cases {
namespace {

class LayerNormCase final : public Case {
 public:
  explicit LayerNormCase(const Params& p)
      : x_(Dtype::f32, {p.requests * p.query_len, p.in}, gap_of(p)),
        y_(Dtype::f32, {p.requests * p.query_len, p.in}, gap_of(p)),
        weight_(p.in),
        bias_(p.in) {
    Random random(p.seed);
    const float scale = static_cast<float>(std::exp2(random.integer(-20, 20)));
    x_.fill_normal(random, scale);
    // Rows stand off zero, by up to eight times their spread.
    for (int64_t t = 0; t < p.requests * p.query_len; ++t) {
      const float offset = 8 * scale * static_cast<float>(random.uniform());
      for (int64_t i = 0; i < p.in; ++i) x_.view()(t, i) += offset;
    }
    random.fill_normal(weight_);
    random.fill_normal(bias_);
    args_ = {.x = x_.view(), .weight = weight_, .bias = bias_, .eps = 1e-6, .y = y_.view()};
  }
  void run(Stream& stream) override { ops::run(stream, args_); }
  Verdict verify() override {
    const int64_t rows = args_.x.extent<Token>(), n = args_.x.extent<In>();
    Exact<Token, In> exact({rows, n});
    ops::reference(args_, exact.view());
    std::vector<float> plain;
    for (int64_t t = 0; t < rows; ++t) {
      float sum = 0, squares = 0;
      double exact_sum = 0;
      for (int64_t i = 0; i < n; ++i) {
        sum += args_.x(t, i);
        exact_sum += static_cast<double>(args_.x(t, i));
      }
      float mean = sum / static_cast<float>(n);
      // Of rows far off zero the mean's rounding is most of the error, and one row's may round well by luck: the bound
      // is of a mean that is an ulp off.
      const double exact_mean = exact_sum / static_cast<double>(n);
      const float off = std::nextafter(static_cast<float>(exact_mean), std::numeric_limits<float>::infinity());
      if (std::abs(static_cast<double>(mean) - exact_mean) < std::abs(static_cast<double>(off) - exact_mean))
        mean = off;
      for (int64_t i = 0; i < n; ++i) squares += (args_.x(t, i) - mean) * (args_.x(t, i) - mean);
      const float inverse = 1.0f / std::sqrt(squares / static_cast<float>(n) + static_cast<float>(args_.eps));
      for (int64_t i = 0; i < n; ++i) plain.push_back((args_.x(t, i) - mean) * inverse * weight_[i] + bias_[i]);
    }
    return unless_touched(compare(y_.values(), exact.values, plain, 0x1p-24), y_.intact(), "y");
  }
  ops::Cost cost() const override { return ops::cost(args_); }

 private:
  Padded<Token, In> x_, y_;
  std::vector<float> weight_, bias_;
  ops::LayerNormArgs args_;
};

std::vector<Params> sweep(uint64_t seed) {
  std::vector<Params> cases;
  for (int64_t rows : {0, 1, 3, 130})
    for (int64_t in : {1, 15, 16, 17, 40, 512, 1536}) cases.push_back({.requests = rows, .in = in, .seed = ++seed});
  cases.push_back({.requests = 70, .in = 128, .seed = ++seed});  // the indexer's
  cases.push_back({.requests = 2, .in = 7168, .seed = ++seed});
  Random random(seed);
  for (int i = 0; i < 20; ++i)
    cases.push_back({.requests = random.integer(1, 40),
                     .query_len = random.integer(1, 4),
                     .in = random.integer(1, 700),
                     .seed = ++seed});
  return cases;
}

}  // namespace

const CaseType layer_norm{
    "layer_norm", [](const Params& p) -> std::unique_ptr<Case> { return std::make_unique<LayerNormCase>(p); }, sweep};

}  // namespace mla::cases
