#include <cmath>

#include "backend/run.hpp"
#include "cases/padded.hpp"

namespace mla::cases {
namespace {

class HadamardCase final : public Case {
 public:
  explicit HadamardCase(const Params& p)
      : q_(Dtype::f32, {p.requests * p.query_len, p.heads, p.index_dim}, gap_of(p)),
        k_(Dtype::f32, {p.requests * p.query_len, p.index_dim}, gap_of(p)) {
    Random random(p.seed);
    q_.fill_normal(random);
    k_.fill_normal(random);
    q_before_ = q_.bytes();
    k_before_ = k_.bytes();
    args_ = {.q = q_.view(), .k = k_.view()};
  }
  // Rotation is in place: the operands are put back first, a copy that counts in the time.
  void run(Stream& stream) override {
    q_.restore(q_before_);
    k_.restore(k_before_);
    ops::run(stream, args_);
  }
  Verdict verify() override {
    const std::vector<std::byte> q_after = q_.bytes(), k_after = k_.bytes();
    std::vector<float> got = q_.values();
    for (float x : k_.values()) got.push_back(x);
    const bool intact = q_.intact() && k_.intact();
    q_.restore(q_before_);
    k_.restore(k_before_);
    Exact<Token, IndexHead, IndexDim> q(args_.q.extents());
    Exact<Token, IndexDim> k(args_.k.extents());
    ops::reference(args_, q.view(), k.view());
    std::vector<float> plain;
    const int64_t n = args_.k.extent<IndexDim>();
    append_plain(q_.values(), n, plain);
    append_plain(k_.values(), n, plain);
    q_.restore(q_after);
    k_.restore(k_after);
    q.values.insert(q.values.end(), k.values.begin(), k.values.end());
    return unless_touched(compare(got, q.values, plain, 0x1p-24), intact, "q or k");
  }
  ops::Cost cost() const override { return ops::cost(args_); }

 private:
  // Every element as the sum of its definition, in f32.
  static void append_plain(const std::vector<float>& x, int64_t n, std::vector<float>& to) {
    for (size_t row = 0; row < x.size(); row += static_cast<size_t>(n))
      for (int64_t i = 0; i < n; ++i) {
        float sum = 0;
        for (int64_t j = 0; j < n; ++j) sum += __builtin_parityll(i & j) ? -x[row + j] : x[row + j];
        to.push_back(sum / std::sqrt(static_cast<float>(n)));
      }
  }

  Padded<Token, IndexHead, IndexDim> q_;
  Padded<Token, IndexDim> k_;
  std::vector<std::byte> q_before_, k_before_;
  ops::HadamardArgs args_;
};

std::vector<Params> sweep(uint64_t seed) {
  std::vector<Params> cases;
  for (int64_t dim : {1, 2, 4, 8, 16, 32, 64, 128, 256, 512})
    for (int64_t tokens : {0, 1, 30})
      cases.push_back({.requests = tokens, .heads = 3, .index_dim = dim, .seed = ++seed});
  return cases;
}

}  // namespace

const CaseType hadamard{
    "hadamard", [](const Params& p) -> std::unique_ptr<Case> { return std::make_unique<HadamardCase>(p); }, sweep};

}  // namespace mla::cases
