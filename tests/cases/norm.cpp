#include <cmath>

#include "backend/run.hpp"
#include "cases/compare.hpp"
#include "cases/padded.hpp"

namespace mla::cases {
namespace {

class NormCase final : public Case {
 public:
  explicit NormCase(const Params& p)
      : x_(p.activations, {p.requests * p.query_len, p.in}, gap_of(p)),
        y_(p.activations, {p.requests * p.query_len, p.in}, gap_of(p)),
        weight_(p.in),
        positions_(p.seed % 3 == 0 ? p.requests * p.query_len : 0) {
    Random random(p.seed);
    x_.fill_normal(random, static_cast<float>(std::exp2(random.integer(-20, 20))));
    random.fill_normal(weight_);
    args_ = {.x = x_.any(), .weight = weight_, .eps = 1e-6, .y = y_.any()};
    // Every third case grows with its rows' positions.
    const int32_t length = static_cast<int32_t>(random.integer(1, 9000));
    for (int32_t& position : positions_)
      position =
          static_cast<int32_t>(random.integer(0, 1) ? random.integer(0, 200000) : length * random.integer(1, 9) - 1);
    if (!positions_.empty()) args_.growth = {positions_, 0.1, length};
  }
  void run(Stream& stream) override { ops::run(stream, args_); }
  Verdict verify() override {
    const int64_t rows = args_.x.extent<Token>(), n = args_.x.extent<In>();
    Exact<Token, In> exact({rows, n});
    ops::reference(args_, exact.view());
    std::vector<float> plain;
    for (int64_t t = 0; t < rows; ++t) {
      float sum = 0;
      for (int64_t i = 0; i < n; ++i) sum += args_.x(t, i) * args_.x(t, i);
      const float inverse = 1.0f / std::sqrt(sum / static_cast<float>(n) + static_cast<float>(args_.eps));
      float factor = 1.0f;
      if (!positions_.empty())
        factor += 0.1f * std::log1p(static_cast<float>(positions_[static_cast<size_t>(t)] / args_.growth.length));
      for (int64_t i = 0; i < n; ++i)
        plain.push_back(stored(args_.y.dtype(), args_.x(t, i) * (inverse * factor) * weight_[i]));
    }
    return unless_touched(compare(y_.values(), exact.values, plain, unit_of(args_.y.dtype())), y_.intact(), "y");
  }
  ops::Cost cost() const override { return ops::cost(args_); }

 private:
  Padded<Token, In> x_, y_;
  std::vector<float> weight_;
  std::vector<int32_t> positions_;
  ops::NormArgs args_;
};

std::vector<Params> sweep(uint64_t seed) {
  std::vector<Params> cases;
  for (int64_t rows : {0, 1, 3, 130})
    for (int64_t in : {1, 15, 16, 17, 40, 512, 1536}) cases.push_back({.requests = rows, .in = in, .seed = ++seed});
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

const CaseType norm{"norm", [](const Params& p) -> std::unique_ptr<Case> { return std::make_unique<NormCase>(p); },
                    sweep};

}  // namespace mla::cases
