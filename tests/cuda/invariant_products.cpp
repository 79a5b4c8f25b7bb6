// Batch-invariant products: a row has the same bits among any number of rows, though many take other algorithms than
// few, at the shapes of deepseek-v3 and at odd ones.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "backend/run.hpp"
#include "cases/compare.hpp"

namespace mla {
namespace {

constexpr Device kGpu{DeviceKind::cuda, 0};
constexpr int64_t kRows = 2500;

struct Shape {
  int64_t heads, in, out;
  Dtype dtype = Dtype::bf16, y = Dtype::bf16;
};
// query_down, kv_down, query, kv_up, output, W_UK, W_UV; and odd ones.
constexpr Shape kShapes[] = {{1, 7168, 1536},
                             {1, 7168, 576},
                             {1, 1536, 24576},
                             {1, 512, 32768},
                             {1, 16384, 7168},
                             {128, 128, 512},
                             {128, 512, 128, Dtype::bf16, Dtype::f32},
                             {3, 104, 72},
                             {1, 1000, 264, Dtype::f32, Dtype::f32}};

class Product {
 public:
  explicit Product(const Shape& s) : shape_(s), y_(bytes(kRows), kGpu) {
    cases::Random random(11);
    std::vector<float> w(static_cast<size_t>(s.heads * s.out * s.in));
    // Uniform numbers: a normal distribution of as many takes seconds.
    for (float& v : w) v = static_cast<float>(random.uniform() - 0.5);
    linear_ = backend::backend(kGpu).pack(w, s.heads, s.out, s.in, s.dtype, kGpu);
    std::vector<std::byte> x(static_cast<size_t>(kRows * s.heads * s.in) * size_of(s.dtype));
    for (int64_t i = 0; i < kRows * s.heads * s.in; ++i)
      store_float(s.dtype, x.data(), i, static_cast<float>(random.uniform() - 0.5));
    x_ = Buffer::copy_of(x.data(), x.size(), kGpu);
  }
  /// Bytes of row `row`, multiplied among rows [first, first + rows).
  std::vector<std::byte> row(int64_t row, int64_t first, int64_t rows) {
    const Shape& s = shape_;
    std::byte* const x = x_.data() + static_cast<size_t>(first * s.heads * s.in) * size_of(s.dtype);
    ops::run(stream_, ops::ProjectArgs{.x = {s.dtype, x, {rows, s.heads, s.in}},
                                       .x_rows = {},
                                       .weights = linear_.get(),
                                       .y = {s.y, y_.data(), {rows, s.heads, s.out}},
                                       .y_rows = {},
                                       .rows = rows,
                                       .batch_invariant = true,
                                       .scratch = {scratch_.data(), scratch_.size()}});
    std::vector<std::byte> y(bytes(1));
    copy(stream_, y.data(), y_.data() + bytes(row - first), y.size());
    stream_.synchronize();
    return y;
  }

 private:
  size_t bytes(int64_t rows) const { return static_cast<size_t>(rows * shape_.heads * shape_.out) * size_of(shape_.y); }

  Shape shape_;
  std::shared_ptr<const Linear> linear_;
  Buffer x_, y_, scratch_{size_t{64} << 20, kGpu};
  Stream stream_{kGpu};
};

TEST(InvariantProductsOnGpu, ARowsBitsDoNotDependOnTheNumberOfRows) {
  if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
  for (const Shape& s : kShapes) {
    Product p(s);
    const std::vector<std::byte> alone = p.row(1300, 1300, 1);
    for (int64_t rows : {2, 64, 65, 128, 200, 500, 1000, 1024})
      for (int64_t first : {int64_t{1300}, 1301 - rows})
        EXPECT_TRUE(alone == p.row(1300, first, rows))
            << s.heads << " x " << s.in << " -> " << s.out << ", " << rows << " rows from " << first;
    EXPECT_TRUE(alone == p.row(1300, 0, kRows)) << s.heads << " x " << s.in << " -> " << s.out;
  }
}

}  // namespace
}  // namespace mla
