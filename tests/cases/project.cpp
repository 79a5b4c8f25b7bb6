#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <utility>

#include "backend/backend.hpp"
#include "backend/run.hpp"
#include "cases/compare.hpp"
#include "cases/padded.hpp"
#include "cases/scratch.hpp"
#include "ops/project/activations.hpp"

namespace mla::cases {
namespace {

// Weights in Params::dtype. Plain: f32 activations, rows in order. Ragged: activations in Params::dtype too, read and
// written through row lists, x rows possibly more than once; in every second of these some rows go nowhere.
class ProjectCase final : public Case {
 public:
  explicit ProjectCase(const Params& p)
      : device_(p.device),
        rows_(p.requests * p.query_len),
        weights_(static_cast<size_t>(p.heads * p.out * p.in)),
        x_(p.ragged ? p.dtype : Dtype::f32, {rows_ + (p.ragged ? 2 : 0), p.heads, p.in}),
        y_(p.ragged ? p.dtype : Dtype::f32, {rows_, p.heads, p.out}) {
    Random random(p.seed);
    random.fill_normal(weights_);
    x_.fill_normal(random);
    if (p.ragged) {
      y_rows_.resize(rows_);
      std::iota(y_rows_.begin(), y_rows_.end(), 0);
      for (int64_t i = rows_; i-- > 0;) {
        x_rows_.push_back(static_cast<int32_t>(random.integer(0, rows_ + 1)));
        std::swap(y_rows_[i], y_rows_[random.integer(0, i)]);
      }
      for (int32_t& row : y_rows_)
        if (p.seed % 4 < 2 && random.integer(0, 3) == 0) skipped_.push_back(std::exchange(row, -1));
    }
    for (int64_t i = 0; i < rows_; ++i)
      if (y_rows_.empty() || y_rows_[i] >= 0) written_.push_back(i);
    const backend::Backend& backend = backend::backend(p.device);
    if (p.weights == WeightFormat::plain) {
      linear_ = backend.pack(weights_, p.heads, p.out, p.in, p.dtype, p.device);
    } else {
      const QuantisedWeights q = quantise(weights_, p.heads, p.out, p.in, p.weights, p.weight_block, p.weight_block);
      linear_ = backend.pack_quantised(q, p.dtype, p.device);
      weights_ = dequantise(q, Dtype::f32);
    }
    scratch_bytes_ = backend.scratch_per_worker({.heads = p.heads, .hidden = p.in});
    args_ = {.x = x_.any(),
             .x_rows = x_rows_,
             .weights = linear_.get(),
             .y = y_.any(),
             .y_rows = y_rows_,
             .rows = rows_,
             .batch_invariant = p.batch_invariant,
             .activations = p.inputs,
             .scratch = {}};
  }
  void place(ThreadPool& pool) override { linear_->place(pool); }
  void run(Stream& stream) override {
    args_.scratch = scratch_.get(stream, scratch_bytes_);
    ops::run(stream, args_);
  }
  Verdict verify() override {
    // Large products are judged on evenly spaced rows, the first and the last among them.
    const int64_t heads = linear_->heads, in = linear_->in, out = linear_->out;
    const int64_t affordable = std::max<int64_t>(2, (int64_t{1} << 24) / std::max<int64_t>(1, heads * in * out));
    const int64_t all = std::ssize(written_), judged = std::min(all, affordable);
    auto row = [&](int64_t i) { return written_[judged < 2 ? 0 : i * (all - 1) / (judged - 1)]; };

    // The contract's operands: rounded to the weights' dtype before the product. What quantised weights and fp8 codes
    // of activations stand for may also be multiplied as it is: that is the exact answer then, and the rounding a plain
    // computation's.
    const bool fp8 = args_.activations == Activations::fp8_128,
               held = linear_->format != WeightFormat::plain && device_.kind == DeviceKind::cuda;
    auto operand = [&](float v) { return linear_->dtype == Dtype::bf16 ? to_float(to_bf16(v)) : v; };
    std::vector<float> x, w = weights_, got, plain, taken(static_cast<size_t>(in));
    for (float& v : w) v = operand(v);
    for (int64_t i = 0; i < judged; ++i)
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t k = 0; k < in; ++k) taken[k] = args_.x(x_rows_.empty() ? row(i) : x_rows_[row(i)], h, k);
        if (fp8) {
          x.insert(x.end(), taken.begin(), taken.end());
          ops::through_fp8(taken.data(), taken.data(), in);
        }
        for (float& v : taken) v = operand(v);
        if (!fp8) x.insert(x.end(), taken.begin(), taken.end());
        for (int64_t o = 0; o < out; ++o) {
          got.push_back(args_.y(y_rows_.empty() ? row(i) : y_rows_[row(i)], h, o));
          float sum = 0;
          for (int64_t k = 0; k < in; ++k) sum += taken[k] * w[(h * out + o) * in + k];
          plain.push_back(args_.y.dtype() == Dtype::bf16 ? to_float(to_bf16(sum)) : sum);
        }
      }
    ops::ProjectArgs dense = args_;
    dense.x = View<const float, Token, Head, In>(x.data(), {judged, heads, in});
    dense.x_rows = {};
    dense.y_rows = {};
    dense.rows = judged;
    Exact<Token, Head, Out> exact({judged, heads, out});
    ops::reference(dense, fp8 || held ? weights_ : w, exact.view());
    double unit = args_.y.dtype() == Dtype::bf16 ? 0x1p-9 : 0x1p-24;
    // Tensor cores cut sums off, to f32 and toward zero, every 16 products: errors of one sign add up.
    if (device_.kind == DeviceKind::cuda && linear_->dtype == Dtype::bf16)
      unit = std::max(unit, static_cast<double>(in) / 16 * 0x1p-26);
    // Those that multiply codes keep 14 bits of a sum of 128 products.
    if (device_.kind == DeviceKind::cuda && fp8 && linear_->dtype == Dtype::bf16) unit = std::max(unit, 0x1p-14);
    bool intact = y_.intact();
    for (const int32_t skipped : skipped_)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t o = 0; o < out; ++o) intact = intact && std::isnan(args_.y(skipped, h, o));
    return unless_touched(compare(got, exact.values, plain, unit), intact, "y");
  }
  ops::Cost cost() const override { return ops::cost(args_); }

 private:
  Device device_;
  int64_t rows_;
  std::vector<float> weights_;
  Padded<Token, Head, In> x_;
  Padded<Token, Head, Out> y_;
  std::vector<int32_t> x_rows_, y_rows_, skipped_;
  std::vector<int64_t> written_;
  std::shared_ptr<const Linear> linear_;
  size_t scratch_bytes_ = 0;
  CaseScratch scratch_;
  ops::ProjectArgs args_;
};

// A case of up to so many heads and inputs. One draw a variable: which argument a call evaluates first is the
// compiler's.
template <class Add>
void draw(Random& random, int64_t most_heads, int64_t most_in, const Add& add) {
  const int64_t out = random.integer(1, 400), in = random.integer(1, most_in), heads = random.integer(1, most_heads);
  add(random.integer(1, 100), heads, in, out);
}

std::vector<Params> sweep(uint64_t seed) {
  std::vector<Params> cases;
  struct Held {
    WeightFormat format;
    int64_t block;
  };
  // Cases of weights held so; batch-invariant as said, or one in three.
  const auto adder = [&](Dtype dtype, Held held, Activations inputs, std::optional<bool> invariant = {}) {
    return [&cases, &seed, dtype, held, inputs, invariant](int64_t rows, int64_t heads, int64_t in, int64_t out) {
      cases.push_back({.requests = rows,
                       .ragged = seed % 2 == 1,
                       .heads = heads,
                       .in = in,
                       .out = out,
                       .dtype = dtype,
                       .batch_invariant = invariant.value_or(seed % 3 == 1),
                       .weights = held.format,
                       .inputs = inputs,
                       .weight_block = held.block,
                       .seed = seed + 1});
      ++seed;
    };
  };
  for (Dtype dtype : {Dtype::f32, Dtype::bf16})
    for (bool invariant : {false, true}) {
      const auto add = adder(dtype, {WeightFormat::plain, 0}, Activations::plain, invariant);
      for (int64_t rows : {0, 1, 2, 5, 16, 17, 63, 64, 65, 150}) add(rows, 1, 40, 72);
      for (int64_t in : {1, 3, 15, 16, 17, 63, 65}) add(6, 2, in, 33);
      for (int64_t out : {1, 2, 15, 17, 63, 65, 255, 256, 257, 520}) add(6, 1, 24, out), add(1, 3, 31, out);
      add(4, 16, 128, 512);
      add(4, 16, 512, 128);
      add(3, 1, 2048, 576);
      add(2, 1, 7168, 300);
      add(3, 1, 16500, 270);  // more inputs than are staged at once
      Random random(seed);
      for (int i = 0; i < 12; ++i) draw(random, 5, 300, add);
    }
  // Quantised weights: partial panels, parts, groups and blocks; one scale for all and one a block.
  for (Dtype dtype : {Dtype::f32, Dtype::bf16})
    for (const Held& held : {Held{WeightFormat::fp8, 0}, Held{WeightFormat::fp8, 128}, Held{WeightFormat::fp8, 48},
                             Held{WeightFormat::mxfp4, 0}}) {
      const auto add = adder(dtype, held, Activations::plain);
      for (int64_t rows : {0, 1, 5, 64, 65, 150}) add(rows, 2, 40, 72);
      for (int64_t in : {1, 31, 32, 33, 511, 512, 513, 1100}) add(6, 2, in, 33);
      for (int64_t out : {1, 2, 15, 255, 256, 257, 300}) add(6, 1, 48, out);
      add(4, 16, 128, 512);
      add(4, 16, 512, 128);
      // What a GPU reads as it is: rows in tiles of 8, inputs shared out in steps of 128.
      for (int64_t rows : {1, 7, 8, 9, 16, 17, 33, 64}) add(rows, 1, 256, 72), add(rows, 3, 128, 33);
      for (int64_t in : {128, 384, 1152, 4096}) add(6, 1, in, 130);
      for (int64_t out : {1, 31, 32, 63, 64, 65, 576}) add(6, 2, 640, out);
      // In tiles of 32, 64 and 128 rows and 128 outputs; at first small enough for a sanitizer.
      add(17, 1, 128, 33), add(33, 1, 256, 16), add(65, 1, 128, 17);
      for (int64_t rows : {17, 65, 127, 128, 129, 256, 257}) add(rows, 1, 256, 130), add(rows, 2, 128, 40);
      for (int64_t in : {128, 384, 1152, 4096}) add(40, 1, in, 130), add(70, 1, in, 64);
      for (int64_t out : {1, 64, 127, 129, 576}) add(70, 2, 640, out);
      Random random(seed);
      for (int i = 0; i < 6; ++i) draw(random, 5, 700, add);
    }
  // The same weights with fp8 activations: groups that end short, heads, and what a GPU multiplies as codes, whose rows
  // need not come in fours.
  for (Dtype dtype : {Dtype::f32, Dtype::bf16})
    for (int64_t block : {0, 48, 128}) {
      const auto add = adder(dtype, {WeightFormat::fp8, block}, Activations::fp8_128);
      for (int64_t in : {1, 33, 127, 129, 513, 1100}) add(6, 2, in, 33);
      add(4, 16, 128, 512);
      add(4, 16, 512, 128);
      for (int64_t rows : {0, 1, 2, 3, 4, 5, 63, 64, 65, 150}) add(rows, 1, 256, 128), add(rows, 1, 640, 208);
      add(7, 1, 7168, 576);
      add(130, 1, 1536, 384);
      Random random(seed);
      for (int i = 0; i < 4; ++i) {
        const int64_t out = 16 * random.integer(1, 40), in = 16 * random.integer(1, 60);
        add(random.integer(1, 100), 1, in, out);
      }
    }
  return cases;
}

}  // namespace

const CaseType project{
    "project", [](const Params& p) -> std::unique_ptr<Case> { return std::make_unique<ProjectCase>(p); }, sweep};

}  // namespace mla::cases
