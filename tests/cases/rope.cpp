#include <cmath>

#include "backend/run.hpp"
#include "cases/compare.hpp"
#include "cases/padded.hpp"
#include "mla/rotary.hpp"

namespace mla::cases {
namespace {

// Tokens at random positions up to Params::context.
class RopeCase final : public Case {
 public:
  explicit RopeCase(const Params& p)
      : config_{.interleaved = !p.neox,
                .scaling = p.yarn_factor > 1 ? RopeConfig::Scaling::yarn : RopeConfig::Scaling::none,
                .factor = p.yarn_factor,
                .mscale = 1.0,
                .mscale_all_dim = 0.0},
        table_(config_, p.rope, p.context + 1, p.device),
        host_table_(config_, p.rope, p.context + 1),
        positions_(p.requests * p.query_len),
        q_(p.activations, {p.requests * p.query_len, p.heads, p.rope}, gap_of(p)),
        k_(p.activations, {p.requests * p.query_len, p.rope}, gap_of(p)) {
    Random random(p.seed);
    for (int32_t& position : positions_) position = static_cast<int32_t>(random.integer(0, p.context));
    if (!positions_.empty()) positions_.back() = static_cast<int32_t>(p.context);
    q_.fill_normal(random);
    k_.fill_normal(random);
    q_before_ = q_.bytes();
    k_before_ = k_.bytes();
    args_ = {.q = q_.any(), .k = k_.any(), .positions = positions_, .table = &table_};
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
    Exact<Token, Head, Rope> q(args_.q.extents());
    Exact<Token, Rope> k(args_.k.extents());
    ops::reference(args_, config_, q.view(), k.view());
    std::vector<float> plain;
    for (size_t t = 0; t < positions_.size(); ++t) {
      const int64_t row = static_cast<int64_t>(t);
      for (int64_t h = 0; h < args_.q.extent<Head>(); ++h)
        append_plain(
            t, [&](int64_t i) { return args_.q(row, h, i); }, plain);
    }
    for (size_t t = 0; t < positions_.size(); ++t)
      append_plain(
          t, [&](int64_t i) { return args_.k(static_cast<int64_t>(t), i); }, plain);
    q_.restore(q_after);
    k_.restore(k_after);
    q.values.insert(q.values.end(), k.values.begin(), k.values.end());
    return unless_touched(compare(got, q.values, plain, unit_of(args_.q.dtype())), intact, "q or k");
  }
  ops::Cost cost() const override { return ops::cost(args_); }

 private:
  template <class X>
  void append_plain(size_t t, X&& x, std::vector<float>& to) const {
    const int64_t pairs = table_.pairs(), step = table_.interleaved() ? 2 : 1,
                  partner = table_.interleaved() ? 1 : pairs;
    const float *cos = host_table_.cos(positions_[t]), *sin = host_table_.sin(positions_[t]);
    std::vector<float> row(static_cast<size_t>(2 * pairs));
    for (int64_t i = 0; i < pairs; ++i) {
      const float a = x(i * step), b = x(i * step + partner);
      row[i * step] = stored(args_.q.dtype(), a * cos[i] - b * sin[i]);
      row[i * step + partner] = stored(args_.q.dtype(), b * cos[i] + a * sin[i]);
    }
    to.insert(to.end(), row.begin(), row.end());
  }

  RopeConfig config_;
  RotaryTable table_, host_table_;
  std::vector<int32_t> positions_;
  Padded<Token, Head, Rope> q_;
  Padded<Token, Rope> k_;
  std::vector<std::byte> q_before_, k_before_;
  ops::RopeArgs args_;
};

std::vector<Params> sweep(uint64_t seed) {
  std::vector<Params> cases;
  for (bool neox : {false, true})
    for (double yarn : {1.0, 40.0})
      for (int64_t rope : {0, 2, 10, 32, 64})
        for (int64_t tokens : {0, 1, 35})
          cases.push_back({.requests = tokens,
                           .context = 4000,
                           .heads = 3,
                           .rope = rope,
                           .neox = neox,
                           .yarn_factor = yarn,
                           .seed = ++seed});
  cases.push_back({.requests = 5, .context = 163839, .heads = 2, .yarn_factor = 40, .seed = ++seed});
  Random random(seed);
  for (int i = 0; i < 10; ++i)
    cases.push_back({.requests = random.integer(1, 50),
                     .context = random.integer(0, 9000),
                     .heads = random.integer(1, 20),
                     .rope = 2 * random.integer(1, 50),
                     .neox = random.integer(0, 1) == 1,
                     .seed = ++seed});
  return cases;
}

}  // namespace

const CaseType rope{"rope", [](const Params& p) -> std::unique_ptr<Case> { return std::make_unique<RopeCase>(p); },
                    sweep};

}  // namespace mla::cases
