#include <algorithm>
#include <cmath>
#include <numeric>

#include "backend/backend.hpp"
#include "backend/run.hpp"
#include "cases/compare.hpp"
#include "cases/padded.hpp"
#include "cases/scratch.hpp"

namespace mla::cases {
namespace {

// Weights in Params::dtype, and so are the products. Ragged: latent rows in Params::dtype, read by a list, some more
// than once; f32 rows in order otherwise. In every second case values have their rows innermost, with room behind each
// column; room for products is for fewer rows than there are, but for every third.
class ExpandCase final : public Case {
 public:
  explicit ExpandCase(const Params& p)
      : device_(p.device),
        rows_(p.requests * p.query_len),
        turned_(p.seed / 2 % 2 == 1),
        weights_(static_cast<size_t>(p.heads * (p.nope + p.value) * p.latent)),
        x_(p.ragged ? p.dtype : p.activations, {rows_ + (p.ragged ? 3 : 0), p.latent},
           p.seed / 8 % 2 == 0 ? Padded<Token>::kAligned : 3),
        keys_(Dtype::fp8_e4m3, {rows_, p.heads, p.nope}, turned_ ? 16 : 3) {
    Random random(p.seed);
    random.fill_normal(weights_, 0.25f);
    x_.fill_normal(random);
    if (p.ragged)
      for (int64_t i = 0; i < rows_; ++i) list_.push_back(static_cast<int32_t>(random.integer(0, rows_ + 2)));
    // Some codes saturate, some are 0; with one seed in five, by scales that are far from 1.
    for (int64_t h = 0; h < 2 * p.heads; ++h) {
      const float scale = static_cast<float>(std::exp(6 * random.uniform() - 5));
      scales_.push_back(p.seed % 5 != 0 ? scale : h % 3 == 0 ? 0x1p-70f : h % 3 == 1 ? 0x1p62f : scale);
    }
    // [head, value, row], or [row, head, value].
    const int64_t pitch = (rows_ + 15) / 16 * 16 + 16;
    const std::array<int64_t, 3> strides = turned_ ? std::array<int64_t, 3>{1, p.value * pitch, pitch}
                                                   : std::array<int64_t, 3>{p.heads * (p.value + 5), p.value + 5, 1};
    value_codes_.assign(static_cast<size_t>(p.heads * (turned_ ? p.value * pitch : rows_ * (p.value + 5))), kUntouched);
    const backend::Backend& backend = backend::backend(p.device);
    if (p.weights == WeightFormat::plain) {
      linear_ = backend.pack(weights_, 1, p.heads * (p.nope + p.value), p.latent, p.dtype, p.device);
    } else {
      const QuantisedWeights q = quantise(weights_, 1, p.heads * (p.nope + p.value), p.latent, p.weights, 0, 0);
      linear_ = backend.pack_quantised(q, p.dtype, p.device);
      weights_ = dequantise(q, Dtype::f32);
    }
    const int64_t room = p.seed % 3 == 0 ? rows_ : std::max<int64_t>(1, std::min<int64_t>(rows_, 16 * (p.seed % 3)));
    products_.resize(static_cast<size_t>(std::max<int64_t>(room, 1) * linear_->out) * size_of(p.dtype));
    scratch_bytes_ = backend.scratch_per_worker({.heads = p.heads, .latent = p.latent, .hidden = p.latent});
    args_ = {.x = x_.any(),
             .x_rows = list_,
             .weights = linear_.get(),
             .keys = keys_.any(),
             .values = {Dtype::fp8_e4m3, value_codes_.data(), {rows_, p.heads, p.value}, strides},
             .key_scales = {scales_.data(), {p.heads}},
             .value_scales = {scales_.data() + p.heads, {p.heads}},
             .products = {p.dtype, products_.data(), {std::max<int64_t>(room, 1), linear_->out}},
             .batch_invariant = p.batch_invariant,
             .scratch = {}};
    if (p.seed % 6 == 0) args_.key_scales = {};
    if (p.seed % 6 == 1) args_.value_scales = {};
  }
  void place(ThreadPool& pool) override { linear_->place(pool); }
  void run(Stream& stream) override {
    args_.scratch = scratch_.get(stream, scratch_bytes_);
    ops::run(stream, args_);
  }

  // A code is right when it is that of a number that the product may come out as.
  Verdict verify() override {
    const int64_t in = linear_->in, heads = args_.keys.extent<Head>(), nope = args_.keys.extent<Nope>(),
                  value = args_.values.extent<Value>(), width = nope + value;
    const int64_t affordable = std::max<int64_t>(2, (int64_t{1} << 23) / std::max<int64_t>(1, linear_->out * in)),
                  judged = std::min(rows_, affordable);
    const auto row_of = [&](int64_t j) { return judged < 2 ? 0 : j * (rows_ - 1) / (judged - 1); };
    const auto operand = [&](float v) { return linear_->dtype == Dtype::bf16 ? to_float(to_bf16(v)) : v; };
    const bool plain = linear_->format == WeightFormat::plain;
    std::vector<float> w = weights_, x;
    if (plain)
      for (float& v : w) v = operand(v);
    for (int64_t j = 0; j < judged; ++j)
      for (int64_t k = 0; k < in; ++k) x.push_back(operand(args_.x(list_.empty() ? row_of(j) : list_[row_of(j)], k)));
    ops::ExpandArgs dense = args_;
    dense.x = View<const float, Token, Latent>(x.data(), {judged, in});
    dense.x_rows = {};
    dense.keys = {Dtype::fp8_e4m3, nullptr, {judged, heads, nope}};
    Exact<Key, Head, Nope> keys({judged, heads, nope});
    Exact<Key, Head, Value> values({judged, heads, value});
    ops::reference(dense, w, keys.view(), values.view());

    const auto norm = [&](const float* v) { return std::sqrt(std::inner_product(v, v + in, v, 0.0)); };
    const double rounding = args_.products.dtype() == Dtype::bf16 ? 0x1p-8 : 0x1p-22,
                 operands = plain || linear_->dtype == Dtype::f32 ? 0 : 0x1p-8,
                 of_norms = operands + static_cast<double>(in + 8) * 0x1p-24 + rounding * of_parts();
    Verdict v{.error = 0, .bound = 1, .ok = true, .detail = {}};
    for (int64_t j = 0; j < judged; ++j)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t o = 0; o < width; ++o) {
          const double quotient = o < nope ? keys.view()(j, h, o) : values.view()(j, h, o - nope),
                       scale = scale_of(o < nope ? args_.key_scales : args_.value_scales, h),
                       off = std::fabs(quotient) * rounding +
                             norm(x.data() + j * in) * norm(w.data() + (h * width + o) * in) / scale * of_norms;
          const auto code = [](double y) { return to_float(to_fp8_e4m3(static_cast<float>(y))); };
          const float got = o < nope ? args_.keys(row_of(j), h, o) : args_.values(row_of(j), h, o - nope);
          if (!(code(quotient - off) <= got && got <= code(quotient + off))) {
            v.ok = false;
            v.error = 2;
            v.detail = "row " + std::to_string(row_of(j)) + ", head " + std::to_string(h) + ", output " +
                       std::to_string(o) + " is " + std::to_string(got) + ", the quotient is " +
                       std::to_string(quotient);
          }
        }
    return unless_touched(unless_touched(v, keys_.intact(), "keys"), values_intact(), "values");
  }
  ops::Cost cost() const override { return ops::cost(args_); }

 private:
  static constexpr uint8_t kUntouched = 0x5a;

  // Products by cuBLASLt may be sums of several parts, each rounded: of numbers as large as a sum of as many terms is.
  double of_parts() const {
    if (device_.kind != DeviceKind::cuda) return 0;
    const std::string kernel = ops::kernel(backend::backend(device_), {}, args_);
    return kernel.starts_with("cuda/generic") ? 2 / std::sqrt(static_cast<double>(linear_->in)) : 0;
  }
  static double scale_of(const View<const float, Head>& scales, int64_t h) { return scales ? scales(h) : 1; }
  // But for zeros behind a column of rows, where its last 16 are not all there.
  bool values_intact() const {
    std::vector<uint8_t> outside = value_codes_;
    const auto& y = args_.values;
    const int64_t padded = turned_ ? (rows_ + 15) / 16 * 16 : rows_;
    for (int64_t i = 0; i < padded; ++i)
      for (int64_t h = 0; h < y.extent<Head>(); ++h)
        for (int64_t o = 0; o < y.extent<Value>(); ++o) {
          uint8_t& at = outside[static_cast<size_t>(y.offset(i, h, o))];
          if (i < rows_ || at == 0) at = kUntouched;
        }
    return std::all_of(outside.begin(), outside.end(), [](uint8_t b) { return b == kUntouched; });
  }

  Device device_;
  int64_t rows_;
  bool turned_;
  std::vector<float> weights_;
  Padded<Token, Latent> x_;
  Padded<Key, Head, Nope> keys_;
  std::vector<uint8_t> value_codes_;
  std::vector<float> scales_;
  std::vector<int32_t> list_;
  std::shared_ptr<const Linear> linear_;
  std::vector<std::byte> products_;
  size_t scratch_bytes_ = 0;
  CaseScratch scratch_;
  ops::ExpandArgs args_;
};

std::vector<Params> sweep(uint64_t seed) {
  std::vector<Params> cases;
  struct Dims {
    int64_t latent, nope, value;
  };
  const auto add = [&](int64_t rows, int64_t heads, const Dims& d, Dtype dtype,
                       WeightFormat weights = WeightFormat::plain) {
    cases.push_back({.requests = rows,
                     .ragged = seed / 4 % 2 == 1,
                     .heads = heads,
                     .latent = d.latent,
                     .nope = d.nope,
                     .value = d.value,
                     .dtype = dtype,
                     .batch_invariant = seed % 7 == 0,
                     .weights = weights,
                     .seed = seed + 1});
    ++seed;
  };
  for (Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    for (const Dims& d : {Dims{40, 24, 20}, Dims{64, 16, 32}, Dims{24, 0, 8}, Dims{24, 8, 0}, Dims{33, 7, 5}})
      for (int64_t rows : {0, 1, 2, 17, 70}) add(rows, 3, d, dtype);
    for (WeightFormat format : {WeightFormat::fp8, WeightFormat::mxfp4})
      for (int64_t rows : {1, 40}) add(rows, 2, {64, 32, 16}, dtype, format);
  }
  // As Hopper's kernel takes them, where values have their rows innermost: rows in 128s and 256s, one head more than
  // pairs; and so many tiles that each cluster has several, and rows in sections of 16K.
  const auto add_turned = [&](int64_t rows, int64_t heads, const Dims& d) {
    while ((seed + 1) / 2 % 2 == 0) ++seed;
    add(rows, heads, d, Dtype::bf16);
  };
  for (const Dims& d : {Dims{512, 128, 128}, Dims{512, 192, 256}})
    for (int64_t heads : {1, 2, 3})
      for (int64_t rows : {1, 31, 127, 129, 257}) add_turned(rows, heads, d);
  add_turned(16600, 3, {512, 128, 128});
  add_turned(5000, 5, {512, 192, 256});
  Random random(seed);
  for (int i = 0; i < 12; ++i) {
    const int64_t rows = random.integer(0, 90), heads = random.integer(1, 5), latent = random.integer(1, 200),
                  nope = random.integer(0, 60), value = random.integer(0, 60);
    add(rows, heads, {latent, nope, value}, random.integer(0, 1) ? Dtype::bf16 : Dtype::f32);
  }
  return cases;
}

}  // namespace

const CaseType expand{"expand",
                      [](const Params& p) -> std::unique_ptr<Case> { return std::make_unique<ExpandCase>(p); }, sweep};

}  // namespace mla::cases
