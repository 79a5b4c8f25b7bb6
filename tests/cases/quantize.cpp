#include <algorithm>
#include <cfloat>
#include <limits>

#include "backend/run.hpp"
#include "cases/compare.hpp"
#include "cases/padded.hpp"
#include "support/quantised.hpp"

namespace mla::cases {
namespace {

// Ragged: the output has room for more rows than x; groups of zeros, of tiny, huge, infinite and NaN elements occur.
class QuantizeCase final : public Case {
 public:
  explicit QuantizeCase(const Params& p)
      : rows_(p.requests * p.query_len), width_(p.heads * p.value), x_(p.dtype, {rows_, width_}, gap_of(p)) {
    Random random(p.seed);
    x_.fill_normal(random, 30.0f);  // reaches past 448 * 0.0625 at times
    if (p.ragged && width_ > 0)
      for (int64_t t = 0; t < rows_; ++t) {
        constexpr float kInf = std::numeric_limits<float>::infinity();
        constexpr float kSpecial[] = {0.0f, -0.0f, kInf, -kInf, FLT_MAX, 1e-42f, 1e-12f, 448.0f, -6.0f, 1e30f};
        const float special = random.integer(0, 4) ? kSpecial[random.integer(0, std::size(kSpecial) - 1)] : poison();
        const int64_t first = random.integer(0, width_ - 1), last = std::min(width_, first + random.integer(1, 200));
        for (int64_t i = first; i < last; ++i) store_float(p.dtype, x_.any().at(t, i), 0, special);
      }
    OutputSpec spec = p.output;
    spec.scale = 0.0625f;
    spec.global_scale = 448.0f * 6.0f / 100.0f;
    gap_ = gap_of(p) == 3 ? 7 : 16;
    got_ = {spec, rows_ + (p.ragged ? 3 : 0), width_, gap_};
    args_ = {.x = x_.any(), .y = got_.view()};
  }
  void run(Stream& stream) override { ops::run(stream, args_); }
  Verdict verify() override {
    test::QuantisedMemory expected(args_.y.spec, args_.y.tokens, width_, gap_);
    ops::reference(args_, expected.view());
    Verdict v{.error = 0, .bound = 0, .ok = true, .detail = {}};
    auto same = [&](const std::vector<std::byte>& got, const std::vector<std::byte>& right, const char* what) {
      const auto at = std::mismatch(got.begin(), got.end(), right.begin()).first;
      if (at == got.end()) return;
      const auto i = at - got.begin();
      v.ok = false;
      v.error = 1;
      v.detail = std::string(what) + " byte " + std::to_string(i) + " is " + std::to_string(static_cast<int>(*at)) +
                 ", expected " + std::to_string(static_cast<int>(right[i]));
    };
    same(got_.scales, expected.scales, "scales'");
    same(got_.codes, expected.codes, "codes'");
    return v;
  }
  ops::Cost cost() const override { return ops::cost(args_); }

 private:
  int64_t rows_, width_, gap_ = 7;
  Padded<Token, HeadValue> x_;
  test::QuantisedMemory got_;
  ops::QuantizeArgs args_;
};

std::vector<Params> sweep(uint64_t seed) {
  std::vector<Params> cases;
  for (const OutputSpec& spec : output_specs()) {
    if (spec.kind == OutputKind::none) continue;
    auto add = [&](int64_t rows, int64_t heads, int64_t value) {
      ++seed;
      cases.push_back({.requests = rows,
                       .ragged = seed % 3 != 0,
                       .heads = heads,
                       .value = value,
                       .dtype = seed % 2 ? Dtype::f32 : Dtype::bf16,
                       .output = spec,
                       .seed = seed});
    };
    for (int64_t value : {64, 128, 256, 20, 48, 1, 7}) add(5, 3, value), add(4, 16, value);
    for (int64_t rows : {0, 1, 2, 3, 6, 31, 127, 128, 129, 260}) add(rows, 3, 64), add(rows, 5, 20);
    add(3, 128, 128);
    Random random(seed);
    for (int i = 0; i < 8; ++i) {  // one draw a variable: which argument a call evaluates first is the compiler's
      const int64_t value = random.integer(1, 300), heads = random.integer(1, 9);
      add(random.integer(1, 300), heads, value);
    }
  }
  return cases;
}

}  // namespace

const CaseType quantize{
    "quantize", [](const Params& p) -> std::unique_ptr<Case> { return std::make_unique<QuantizeCase>(p); }, sweep};

}  // namespace mla::cases
