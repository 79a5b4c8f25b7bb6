// Products of fp8 codes by fp8 codes, at the shapes of deepseek-v3: that they are what runs, to what precision, and
// that a row's bits do not depend on its neighbours.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "backend/backend.hpp"
#include "backend/cuda/gpu_model.hpp"
#include "backend/run.hpp"
#include "cases/compare.hpp"
#include "ops/project/activations.hpp"

namespace mla {
namespace {

constexpr Device kGpu{DeviceKind::cuda, 0};
constexpr int64_t kRows = 1200;

struct Shape {
  int64_t in, out;
};
// query_down, kv_down, query, kv_up and output; and blocks cut short on both sides.
constexpr Shape kShapes[] = {{7168, 1536}, {7168, 576}, {1536, 24576}, {512, 32768}, {16384, 7168}, {336, 208}};

class Product {
 public:
  explicit Product(const Shape& s) : shape_(s), x_(static_cast<size_t>(kRows * s.in)) {
    cases::Random random(11);
    std::vector<float> w(static_cast<size_t>(s.out * s.in));
    random.fill_normal(w);
    random.fill_normal(x_);
    const QuantisedWeights q = quantise(w, 1, s.out, s.in, WeightFormat::fp8, 128, 128);
    values_ = dequantise(q, Dtype::f32);
    linear_ = backend::backend(kGpu).pack_quantised(q, Dtype::bf16, kGpu);
    x_device_ = Buffer::copy_of(x_.data(), x_.size() * sizeof(float), kGpu);
  }

  ops::ProjectArgs args(int64_t first, int64_t rows, const Buffer& y, Dtype y_dtype, bool invariant) const {
    return {.x = AnyView<Token, Head, In>(Dtype::f32, x_device_.as<float>() + first * shape_.in, {rows, 1, shape_.in}),
            .x_rows = {},
            .weights = linear_.get(),
            .y = AnyMutableView<Token, Head, Out>(y_dtype, y.data(), {rows, 1, shape_.out}),
            .y_rows = {},
            .rows = rows,
            .batch_invariant = invariant,
            .activations = Activations::fp8_128,
            .scratch = {scratch_.data(), scratch_.size()}};
  }
  std::vector<float> run(int64_t first, int64_t rows, bool invariant = false) {
    std::vector<float> y(static_cast<size_t>(rows * shape_.out), cases::poison());
    const Buffer device = Buffer::copy_of(y.data(), y.size() * sizeof(float), kGpu);
    ops::run(stream_, args(first, rows, device, Dtype::f32, invariant));
    copy(stream_, y.data(), device.data(), y.size() * sizeof(float));
    stream_.synchronize();
    return y;
  }
  /// An output in float64: of what the codes of both sides stand for, or of that rounded to bf16.
  double sum(int64_t row, int64_t out, bool rounded) const {
    std::vector<float> x(static_cast<size_t>(shape_.in));
    ops::through_fp8(&x_[static_cast<size_t>(row * shape_.in)], x.data(), shape_.in);
    const auto operand = [&](float v) { return static_cast<double>(rounded ? to_float(to_bf16(v)) : v); };
    double sum = 0;
    for (int64_t k = 0; k < shape_.in; ++k) sum += operand(x[k]) * operand(values_[out * shape_.in + k]);
    return sum;
  }

 private:
  Shape shape_;
  std::vector<float> x_, values_;
  std::shared_ptr<const Linear> linear_;
  Buffer x_device_, scratch_{size_t{64} << 20, kGpu};
  Stream stream_{kGpu};
};

bool hopper() {
  const Stream stream(kGpu);
  return cuda::model_of(stream.queue()).hopper;
}

class Fp8ProductsOnGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
  }
};

// What sums of codes lose is less than rounding the operands to bf16 would: tensor cores cut each of 128 products off
// 14 bits below their sum. With a sum of about sqrt(128) products, that is up to 16 2^-14 / sqrt(12) of a product,
// sqrt(128) times in the root mean square, thrice at most for the steps that raise it: 2^-11 of the sum. Rounding costs
// 2^-9 sqrt(2 / 3) or a little less, more than three times that. f32 joins the sums.
TEST_F(Fp8ProductsOnGpu, CodesAreMultipliedAsTheyAre) {
  if (!hopper()) GTEST_SKIP() << "not a Hopper GPU";
  for (const Shape& s : kShapes) {
    Product p(s);
    for (int64_t rows : {1, 3, 4, 65, 200}) {
      const std::vector<float> y = p.run(0, rows);
      double error = 0, rounding = 0;
      for (int64_t r = 0; r < rows; r += std::max<int64_t>(1, rows / 4))
        for (int64_t o = 0; o < s.out; o += s.out / 97 + 1) {
          const double exact = p.sum(r, o, false), e = y[r * s.out + o] - exact, b = p.sum(r, o, true) - exact;
          error += e * e;
          rounding += b * b;
        }
      EXPECT_LE(std::sqrt(error / rounding), 0.5) << s.in << " -> " << s.out << ", rows " << rows;
    }
  }
}

TEST_F(Fp8ProductsOnGpu, ARowsBitsDoNotDependOnItsNeighbours) {
  for (const Shape& s : kShapes) {
    Product p(s);
    const size_t bytes = static_cast<size_t>(s.out) * sizeof(float);
    const std::vector<float> alone = p.run(17, 1, true);
    for (int64_t rows : {2, 4, 7, 33, 64, 129, 180, 500, 1150}) {
      const std::vector<float> y = p.run(17, rows, true);
      EXPECT_EQ(std::memcmp(alone.data(), y.data(), bytes), 0) << s.in << " -> " << s.out << ", first of " << rows;
      const std::vector<float> last = p.run(18 - std::min<int64_t>(rows, 18), std::min<int64_t>(rows, 18), true);
      EXPECT_EQ(std::memcmp(alone.data(), &last[last.size() - static_cast<size_t>(s.out)], bytes), 0)
          << s.in << " -> " << s.out << ", last of " << std::min<int64_t>(rows, 18);
    }
  }
}

}  // namespace
}  // namespace mla
