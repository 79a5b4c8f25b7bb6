// What project promises beyond one call's numbers: bits that do not depend on threads, nor, in batch-invariant mode, on
// the other rows; on every instruction set.
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <thread>

#include "backend/backend.hpp"
#include "backend/cpu/core/target.hpp"
#include "cases/compare.hpp"
#include "ops/run.hpp"

namespace mla {
namespace {

constexpr int64_t kRows = 64;

struct Shape {
  int64_t heads, in, out;
};

class Product {
 public:
  Product(const Shape& shape, Dtype dtype) : x(kRows * shape.heads * shape.in), shape_(shape) {
    cases::Random random(7);
    std::vector<float> w(shape.heads * shape.out * shape.in);
    random.fill_normal(w);
    random.fill_normal(x);
    weights = backend::backend({}).pack(w, shape.heads, shape.out, shape.in, dtype);
  }
  /// Rows `list` of x, in that order.
  std::vector<float> run(ThreadPool& pool, std::span<const int32_t> list, bool invariant) const {
    const size_t per_worker = backend::backend({}).scratch_per_worker({.heads = shape_.heads, .hidden = shape_.in});
    Buffer scratch(per_worker * static_cast<size_t>(pool.threads()));
    const int64_t rows = static_cast<int64_t>(list.size());
    std::vector<float> y(rows * shape_.heads * shape_.out, cases::poison());
    Stream stream(pool);
    ops::run(stream,
             ops::ProjectArgs{.x = View<const float, Token, Head, In>(x.data(), {kRows, shape_.heads, shape_.in}),
                              .x_rows = list,
                              .weights = weights.get(),
                              .y = View<float, Token, Head, Out>(y.data(), {rows, shape_.heads, shape_.out}),
                              .rows = rows,
                              .batch_invariant = invariant,
                              .scratch = {scratch.data(), per_worker}});
    return y;
  }
  int64_t width() const { return shape_.heads * shape_.out; }

  std::vector<float> x;
  std::shared_ptr<const Linear> weights;

 private:
  Shape shape_;
};

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

class OnTarget : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    try {
      cpu::restrict_target(GetParam());
    } catch (const UnsupportedError& e) {
      GTEST_SKIP() << e.what();
    }
  }
  void TearDown() override { cpu::restrict_target(""); }
};

TEST_P(OnTarget, InvariantRowsKeepTheirBitsInEveryBatchAndPosition) {
  ThreadPool pool(2);
  for (Dtype dtype : {Dtype::f32, Dtype::bf16})
    for (const Shape& shape : {Shape{1, 300, 333}, Shape{3, 128, 65}}) {
      const Product product(shape, dtype);
      std::vector<std::vector<float>> alone;
      for (int32_t r = 0; r < kRows; ++r) alone.push_back(product.run(pool, {&r, 1}, true));
      cases::Random random(3);
      for (int64_t batch = 1; batch <= kRows; ++batch) {
        std::vector<int32_t> list(batch);
        for (int32_t& r : list) r = static_cast<int32_t>(random.integer(0, kRows - 1));
        const std::vector<float> y = product.run(pool, list, true);
        for (int64_t i = 0; i < batch; ++i)
          ASSERT_TRUE(same_bits({y.data() + i * product.width(), static_cast<size_t>(product.width())}, alone[list[i]]))
              << to_string(dtype) << " heads " << shape.heads << ", batch " << batch << ", position " << i;
      }
    }
}

TEST_P(OnTarget, BitsDoNotDependOnThreads) {
  ThreadPool one(1), three(3);
  for (Dtype dtype : {Dtype::f32, Dtype::bf16})
    for (bool invariant : {false, true}) {
      const Product product({2, 200, 700}, dtype);
      for (int64_t rows : {1, 7, 64}) {
        std::vector<int32_t> list(rows);
        for (int64_t i = 0; i < rows; ++i) list[i] = static_cast<int32_t>(i);
        EXPECT_TRUE(same_bits(product.run(one, list, invariant), product.run(three, list, invariant)))
            << to_string(dtype) << " rows " << rows << (invariant ? " invariant" : "");
      }
    }
}

TEST_P(OnTarget, EnginesShareWeights) {
  const Product product({1, 256, 512}, Dtype::bf16);
  std::vector<int32_t> list(kRows);
  for (int64_t i = 0; i < kRows; ++i) list[i] = static_cast<int32_t>(i);
  ThreadPool pool(1);
  const std::vector<float> expected = product.run(pool, list, false);
  std::vector<std::thread> engines;
  std::array<bool, 4> right{};
  for (bool& r : right)
    engines.emplace_back([&] {
      ThreadPool own(2);
      r = true;
      for (int i = 0; i < 20; ++i) r = r && same_bits(product.run(own, list, false), expected);
    });
  for (std::thread& t : engines) t.join();
  for (bool r : right) EXPECT_TRUE(r);
}

INSTANTIATE_TEST_SUITE_P(Targets, OnTarget, testing::Values("avx512_bf16", "avx512", "avx2", "sse4", "portable"));

TEST(Pack, RefusesWhatItCannotHold) {
  const auto pack = backend::backend({}).pack;
  const std::vector<float> w(12);
  EXPECT_THROW(pack(w, 1, 3, 4, Dtype::f16), UnsupportedError);
  EXPECT_THROW(pack(w, 1, 3, 5, Dtype::f32), ShapeError);
  EXPECT_THROW(pack(w, 0, 3, 4, Dtype::f32), ShapeError);
  EXPECT_THROW(pack({}, 1, 0, 4, Dtype::f32), ShapeError);
  EXPECT_EQ(pack(w, 1, 3, 4, Dtype::f32)->out, 3);
}

TEST(Target, NamesAreCheckedAndLimitsHold) {
  EXPECT_THROW(cpu::restrict_target("avx1024"), InputError);
  const std::string_view best = backend::backend({}).target();
  cpu::restrict_target("portable");
  EXPECT_EQ(backend::backend({}).target(), "portable");
  EXPECT_FALSE(cpu::native_bf16_dot());
  cpu::restrict_target("");
  EXPECT_EQ(backend::backend({}).target(), best);
}

}  // namespace
}  // namespace mla
