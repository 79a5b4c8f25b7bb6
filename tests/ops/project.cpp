// What project promises beyond one call's numbers: bits that depend neither on threads nor on the other rows, on every
// instruction set.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "backend/backend.hpp"
#include "backend/cpu/core/dot_rate.hpp"
#include "backend/cpu/core/target.hpp"
#include "backend/run.hpp"
#include "cases/compare.hpp"
#include "core/threads.hpp"
#include "support/dot_products.hpp"
#include "support/nodes.hpp"
#include "support/sanitized.hpp"

namespace mla {
namespace {

constexpr int64_t kRows = 64;

struct Shape {
  int64_t heads, in, out;
};

// How weights are held, and what they are multiplied with: plain, one fp8 scale, fp8 blocks, mxfp4, fp8 activations.
struct Held {
  WeightFormat format = WeightFormat::plain;
  int64_t block = 0;
  Activations activations = Activations::plain;
};
constexpr Held kHeld[] = {{},
                          {WeightFormat::fp8, 0},
                          {WeightFormat::fp8, 128},
                          {WeightFormat::mxfp4, 0},
                          {WeightFormat::fp8, 128, Activations::fp8_128}};
std::string name(const Held& h) {
  return " " + std::string(to_string(h.format)) + " " + std::to_string(h.block) + " activations " +
         std::string(to_string(h.activations));
}

class Product {
 public:
  Product(const Shape& shape, Dtype dtype, const Held& held = {})
      : x(kRows * shape.heads * shape.in), shape_(shape), held_(held) {
    cases::Random random(7);
    std::vector<float> w(shape.heads * shape.out * shape.in);
    random.fill_normal(w);
    random.fill_normal(x);
    const backend::Backend& b = backend::backend({});
    weights = held.format == WeightFormat::plain
                  ? b.pack(w, shape.heads, shape.out, shape.in, dtype, {})
                  : b.pack_quantised(quantise(w, shape.heads, shape.out, shape.in, held.format, held.block, held.block),
                                     dtype, {});
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
                              .activations = held_.activations,
                              .scratch = {scratch.data(), per_worker}});
    return y;
  }
  int64_t width() const { return shape_.heads * shape_.out; }

  std::vector<float> x;
  std::shared_ptr<const Linear> weights;

 private:
  Shape shape_;
  Held held_;
};

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

class OnTarget : public testing::TestWithParam<std::string_view> {
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

TEST_P(OnTarget, RowsKeepTheirBitsInEveryBatchAndPosition) {
  test::Sample sample(3);
  ThreadPool pool(2);
  for (Dtype dtype : {Dtype::f32, Dtype::bf16})
    for (const auto& [shape, held] :
         {std::pair{Shape{1, 300, 333}, kHeld[0]}, std::pair{Shape{3, 128, 65}, kHeld[0]},
          std::pair{Shape{1, 700, 300}, kHeld[1]}, std::pair{Shape{1, 300, 257}, kHeld[2]},
          std::pair{Shape{2, 530, 65}, kHeld[3]}, std::pair{Shape{1, 700, 300}, kHeld[4]}}) {
      if (!sample.take()) continue;
      const Product product(shape, dtype, held);
      std::vector<std::vector<float>> alone;
      for (int32_t r = 0; r < kRows; ++r) alone.push_back(product.run(pool, {&r, 1}, true));
      cases::Random random(3);
      for (int64_t batch = 1; batch <= kRows; ++batch) {
        std::vector<int32_t> list(batch);
        for (int32_t& r : list) r = static_cast<int32_t>(random.integer(0, kRows - 1));
        const std::vector<float> y = product.run(pool, list, batch % 2 == 0);
        for (int64_t i = 0; i < batch; ++i)
          ASSERT_TRUE(same_bits({y.data() + i * product.width(), static_cast<size_t>(product.width())}, alone[list[i]]))
              << to_string(dtype) << name(held) << " heads " << shape.heads << ", batch " << batch << ", position "
              << i;
      }
    }
}

TEST_P(OnTarget, BitsDoNotDependOnThreads) {
  test::Sample sample(3);
  ThreadPool one(1), three(3);
  Rehearsal many(200);  // cuts as finely as anything does
  for (Dtype dtype : {Dtype::f32, Dtype::bf16})
    for (const Held& held : kHeld)
      for (bool invariant : {false, true}) {
        if (!sample.take()) continue;
        const Product product({2, held.format == WeightFormat::plain ? 200 : 600, 700}, dtype, held);
        for (int64_t rows : {1, 7, 64}) {
          std::vector<int32_t> list(rows);
          for (int64_t i = 0; i < rows; ++i) list[i] = static_cast<int32_t>(i);
          const std::vector<float> alone = product.run(one, list, invariant);
          for (ThreadPool* pool : {&three, &many.pool()})
            EXPECT_TRUE(same_bits(alone, product.run(*pool, list, invariant)))
                << to_string(dtype) << name(held) << " rows " << rows << (invariant ? " invariant" : "") << ", "
                << pool->threads() << " threads";
        }
      }
}

TEST_P(OnTarget, PlacedWeightsGiveTheSameBits) {
  ThreadPool one(1), nodes = test::pool_of_nodes({1, 2});
  const std::vector<int32_t> list{3, 0, 5};
  for (const Held& held : kHeld) {
    const Product product({2, 600, 700}, Dtype::bf16, held);
    const std::vector<float> before = product.run(one, list, false);
    product.weights->place(nodes);
    EXPECT_TRUE(same_bits(before, product.run(nodes, list, false))) << name(held);
    EXPECT_TRUE(same_bits(before, product.run(one, list, false))) << name(held);
  }
}

TEST_P(OnTarget, EnginesShareWeights) {
  for (const Held& held : kHeld) {
    const Product product({1, 256, 512}, Dtype::bf16, held);
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
    for (bool r : right) EXPECT_TRUE(r) << name(held);
  }
}

// A product with a unit vector is the dequantised weight itself, on every instruction set: all e4m3 and e2m1 codes.
TEST_P(OnTarget, QuantisedWeightsMultiplyAsTheirValues) {
  ThreadPool pool(2);
  Stream stream(pool);
  for (Dtype dtype : {Dtype::f32, Dtype::bf16})
    for (WeightFormat format : {WeightFormat::fp8, WeightFormat::mxfp4}) {
      const int64_t in = 33, out = 259, codes = format == WeightFormat::fp8 ? 256 : 16;
      QuantisedWeights q{.format = format, .heads = 1, .out = out, .in = in};
      for (int64_t i = 0; i < out * in; ++i) {
        int64_t code = (i / in + i % in) % codes;
        if (format == WeightFormat::fp8 && code % 128 == 127) code = 0;  // NaN
        q.codes.push_back(static_cast<uint8_t>(code));
      }
      q.scales = {0.3f};
      if (format == WeightFormat::mxfp4) {
        q.block_rows = 1;
        q.block_cols = kMxGroup;
        q.scales.clear();
        for (int64_t i = 0; i < out * 2; ++i) q.scales.push_back(static_cast<float>(std::exp2(i % 200 - 100)));
      }
      const auto weights = backend::backend({}).pack_quantised(q, dtype, {});
      EXPECT_EQ(weights->format, format);
      const std::vector<float> values = dequantise(q, dtype);
      const size_t per_worker = backend::backend({}).scratch_per_worker({.hidden = in});
      Buffer scratch(per_worker * 2);
      for (int64_t at : {0, 1, 31, 32}) {
        std::vector<float> x(in), y(out, cases::poison());
        x[at] = 1;
        ops::run(stream, ops::ProjectArgs{.x = View<const float, Token, Head, In>(x.data(), {1, 1, in}),
                                          .x_rows = {},
                                          .weights = weights.get(),
                                          .y = View<float, Token, Head, Out>(y.data(), {1, 1, out}),
                                          .y_rows = {},
                                          .rows = 1,
                                          .scratch = {scratch.data(), per_worker}});
        for (int64_t o = 0; o < out; ++o)
          ASSERT_EQ(y[o], values[o * in + at]) << to_string(dtype) << " " << to_string(format) << " " << o << " " << at;
      }
    }
}

INSTANTIATE_TEST_SUITE_P(Targets, OnTarget, testing::ValuesIn(cpu::targets()));

TEST(Pack, RefusesWhatItCannotHold) {
  const auto pack = backend::backend({}).pack;
  const std::vector<float> w(12);
  EXPECT_THROW(pack(w, 1, 3, 4, Dtype::f16, {}), UnsupportedError);
  EXPECT_THROW(pack(w, 1, 3, 5, Dtype::f32, {}), ShapeError);
  EXPECT_THROW(pack(w, 0, 3, 4, Dtype::f32, {}), ShapeError);
  EXPECT_THROW(pack({}, 1, 0, 4, Dtype::f32, {}), ShapeError);
  EXPECT_EQ(pack(w, 1, 3, 4, Dtype::f32, {})->out, 3);
  const auto pack_quantised = backend::backend({}).pack_quantised;
  QuantisedWeights q = quantise(w, 1, 3, 4, WeightFormat::mxfp4);
  EXPECT_EQ(pack_quantised(q, Dtype::bf16, {})->out, 3);
  EXPECT_THROW(pack_quantised(q, Dtype::f16, {}), UnsupportedError);
  q.scales.pop_back();
  EXPECT_THROW(pack_quantised(q, Dtype::f32, {}), ShapeError);
  q = quantise(w, 1, 3, 4, WeightFormat::fp8);
  q.codes.pop_back();
  EXPECT_THROW(pack_quantised(q, Dtype::f32, {}), ShapeError);
}

TEST(Target, NamesAreCheckedAndLimitsHold) {
  EXPECT_THROW(cpu::restrict_target("avx1024"), InputError);
  const std::string_view best = backend::backend({}).target();
  cpu::restrict_target("portable");
  EXPECT_EQ(backend::backend({}).target(), cpu::targets().back());
  EXPECT_FALSE(cpu::native_bf16_dot());
  EXPECT_FALSE(cpu::native_amx());
  EXPECT_EQ(cpu::bf16_products(), cpu::Bf16Products::widened);
  cpu::restrict_target("");
  EXPECT_EQ(backend::backend({}).target(), best);
}

TEST(Target, ProductsTakeDotProductsWhereThereAreAny) {
  ThreadPool pool(1);
  const int32_t rows[] = {0, 1, 2, 3, 4};
  for (const Held& held : {kHeld[0], kHeld[2], kHeld[3]})
    test::expect_dot_products([&] { return Product({1, 300, 100}, Dtype::bf16, held).run(pool, rows, false); });
}

// A dot product does as much as one multiply-add or as two, or about so, and tile products many times that: what
// decides is no accident of the measurement.
TEST(Target, Bf16OperandsTakeWhatIsFaster) {
  if (!cpu::native_bf16_dot()) GTEST_SKIP() << "no bf16 dot products";
  const cpu::Bf16Products chosen = cpu::bf16_products();
  const int rounds = std::getenv("MLA_TEST_EMULATED") ? 0 : 20;  // an emulator's rates are its own
  for (int i = 0; i < rounds; ++i) {
    const double rate = cpu::bf16_dot_rate();
    EXPECT_TRUE((rate > 0.1 && rate < 0.6) || (rate > 0.9 && rate < 1.2)) << rate;  // far from what decides
    if (cpu::native_amx()) {
      EXPECT_GT(cpu::amx_rate(), 4) << "of an f32 multiply-add's";
      EXPECT_EQ(chosen, cpu::Bf16Products::amx);
    } else {
      EXPECT_EQ(rate > 0.75, chosen == cpu::Bf16Products::dot) << rate;
    }
  }
  cpu::restrict_target(test::kDotTarget);
  EXPECT_EQ(cpu::bf16_products(), cpu::Bf16Products::dot);
  EXPECT_FALSE(cpu::native_amx());
  cpu::restrict_target("");
  EXPECT_EQ(cpu::bf16_products(), chosen);
}

}  // namespace
}  // namespace mla
