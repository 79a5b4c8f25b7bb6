#include <cmath>
#include <limits>

#include "backend/run.hpp"
#include "cases/padded.hpp"

namespace mla::cases {
namespace {

// Codes and weights bit for bit as the definition gives them. Ragged: rows of every magnitude, some with infinities and
// NaN.
class IndexQueryCase final : public Case {
 public:
  explicit IndexQueryCase(const Params& p)
      : gap_(gap_of(p)),
        q_(Dtype::f32, {p.requests * p.query_len, p.heads, p.index_dim}, gap_),
        weights_(Dtype::f32, {p.requests * p.query_len, p.heads}, gap_),
        codes_(Dtype::fp8_e4m3, {p.requests * p.query_len, p.heads, p.index_dim}, gap_),
        scaled_(Dtype::f32, {p.requests * p.query_len, p.heads}, gap_) {
    Random random(p.seed);
    q_.fill_normal(random);
    weights_.fill_normal(random);
    constexpr float kInf = std::numeric_limits<float>::infinity();
    const float odd[] = {kInf, -kInf, poison(), 0.0f, -0.0f, 1e-42f, std::numeric_limits<float>::max()};
    if (p.ragged)
      for (int64_t t = 0; t < p.requests * p.query_len; ++t)
        for (int64_t h = 0; h < p.heads; ++h) {
          const float magnitude = std::exp2(static_cast<float>(random.integer(-40, 40)));
          for (int64_t d = 0; d < p.index_dim; ++d) q_.view()(t, h, d) *= magnitude;
          if (random.integer(0, 3) == 0)
            q_.view()(t, h, random.integer(0, p.index_dim - 1)) = odd[random.integer(0, 6)];
        }
    args_ = {
        .q = q_.view(), .weights = weights_.view(), .codes = codes_.view<fp8_e4m3>(), .scaled_weights = scaled_.view()};
  }
  void run(Stream& stream) override { ops::run(stream, args_); }
  Verdict verify() override {
    Padded<Token, IndexHead, IndexDim> codes(Dtype::fp8_e4m3, args_.q.extents(), gap_);
    Padded<Token, IndexHead> scaled(Dtype::f32, args_.weights.extents(), gap_);
    ops::IndexQueryArgs plain = args_;
    plain.codes = codes.view<fp8_e4m3>();
    plain.scaled_weights = scaled.view();
    ops::reference(plain);
    Verdict v{.error = 0, .bound = 0, .ok = codes.bytes() == codes_.bytes() && scaled.bytes() == scaled_.bytes()};
    if (!v.ok) {
      v.error = 1;
      v.detail = codes.bytes() == codes_.bytes() ? "weights differ" : "codes differ";
    }
    return v;  // equal bytes around the views too
  }
  ops::Cost cost() const override { return ops::cost(args_); }

 private:
  int64_t gap_;
  Padded<Token, IndexHead, IndexDim> q_;
  Padded<Token, IndexHead> weights_;
  Padded<Token, IndexHead, IndexDim> codes_;
  Padded<Token, IndexHead> scaled_;
  ops::IndexQueryArgs args_;
};

std::vector<Params> sweep(uint64_t seed) {
  std::vector<Params> cases;
  for (int64_t tokens : {0, 1, 35})
    for (int64_t heads : {1, 5, 64})
      for (int64_t dim : {1, 77, 128})
        for (bool ragged : {false, true})
          cases.push_back({.requests = tokens, .ragged = ragged, .heads = heads, .index_dim = dim, .seed = ++seed});
  return cases;
}

}  // namespace

const CaseType index_query{
    "index_query", [](const Params& p) -> std::unique_ptr<Case> { return std::make_unique<IndexQueryCase>(p); }, sweep};

}  // namespace mla::cases
