// attend_expanded's masks beyond its conformance cases, bit for bit: that a full mask is none, that a row's tile does
// not matter, and that what a mask hides does not either. On every instruction set.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <tuple>

#include "backend/backend.hpp"
#include "backend/cpu/core/target.hpp"
#include "backend/run.hpp"
#include "cases/compare.hpp"
#include "support/dot_products.hpp"

namespace mla {
namespace {

// Rows of several tiles over keys of several blocks, whose bits begin within a word.
struct Masked {
  static constexpr int64_t kTokens = 70, kKeys = 530, kHeads = 2, kNope = 12, kRope = 4, kValue = 20, kWords = 18;
  static constexpr int32_t kBegin = 37;

  explicit Masked(Dtype dtype)
      : dtype_(dtype), k_nope(kKeys * kHeads * kNope), k_pe(kKeys * kRope), v(kKeys * kHeads * kValue) {
    const auto fill = [&](Operand& x, uint64_t seed) {
      const std::vector<float> values = cases::random_values(x.size, seed);
      for (int64_t i = 0; i < x.size; ++i) x.set(dtype_, i, values[i]);
    };
    fill(k_nope, 1);
    fill(k_pe, 2);
    fill(v, 3);
  }

  bool sees(int64_t row, int64_t key) const {
    const int64_t column = kBegin + key;
    return key <= row + item.visible && mask[row * kWords + column / 32] >> column % 32 & 1;
  }

  void run(const std::vector<ExpandedItem>& items) {
    const size_t each =
        backend::backend({}).scratch_per_worker({.heads = kHeads, .rope = kRope, .nope = kNope, .value = kValue});
    Buffer scratch(each * static_cast<size_t>(pool.threads()));
    Stream stream(pool);
    out.assign(kTokens * kHeads * kValue, cases::poison());
    lse.assign(kTokens * kHeads, cases::poison());
    ops::run(stream, ops::AttendExpandedArgs{.q = {q.data(), {kTokens, kHeads, kNope + kRope}},
                                             .k_nope = {dtype_, k_nope.bytes.data(), {kKeys, kHeads, kNope}},
                                             .k_pe = {dtype_, k_pe.bytes.data(), {kKeys, kRope}},
                                             .v = {dtype_, v.bytes.data(), {kKeys, kHeads, kValue}},
                                             .items = items,
                                             .mask = {mask.data(), {kTokens, kWords}},
                                             .scale = 0.3f,
                                             .out = {out.data(), {kTokens, kHeads, kValue}},
                                             .lse = {lse.data(), {kTokens, kHeads}},
                                             .scratch = {scratch.data(), each}});
  }
  // Of a row and head, the lse last.
  std::vector<uint32_t> bits(int64_t row, int64_t head) const {
    std::vector<uint32_t> all;
    for (int64_t d = 0; d < kValue; ++d)
      all.push_back(std::bit_cast<uint32_t>(out[(row * kHeads + head) * kValue + d]));
    all.push_back(std::bit_cast<uint32_t>(lse[row * kHeads + head]));
    return all;
  }
  std::vector<std::vector<uint32_t>> bits() const {
    std::vector<std::vector<uint32_t>> all;
    for (int64_t i = 0; i < kTokens * kHeads; ++i) all.push_back(bits(i / kHeads, i % kHeads));
    return all;
  }

  struct Operand {
    explicit Operand(int64_t n) : size(n), bytes(static_cast<size_t>(n) * sizeof(float)) {}
    void set(Dtype dtype, int64_t i, float x) { store_float(dtype, bytes.data(), i, x); }
    int64_t size;
    std::vector<std::byte> bytes;
  };
  Dtype dtype_;
  ThreadPool pool{2};
  ExpandedItem item{
      .q_count = kTokens, .k_count = kKeys, .visible = kKeys - kTokens, .masked = true, .mask_begin = kBegin};
  std::vector<float> q = cases::random_values(kTokens * kHeads * (kNope + kRope), 4), out, lse;
  Operand k_nope, k_pe, v;
  std::vector<uint32_t> mask = std::vector<uint32_t>(kTokens * kWords, ~uint32_t{0});
};

struct OnTarget {
  std::string_view target;
  Dtype dtype;
};
std::string name_of(const OnTarget& t) { return std::string(t.target) + "_" + std::string(to_string(t.dtype)); }
void PrintTo(const OnTarget& t, std::ostream* out) { *out << name_of(t); }
std::vector<OnTarget> on_targets() {
  std::vector<OnTarget> all;
  for (const std::string_view target : cpu::targets())
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) all.push_back({target, dtype});
  return all;
}

class AttendExpandedMasks : public testing::TestWithParam<OnTarget> {
 protected:
  void SetUp() override {
    try {
      cpu::restrict_target(GetParam().target);
    } catch (const UnsupportedError& e) {
      GTEST_SKIP() << e.what();
    }
  }
  void TearDown() override { cpu::restrict_target(""); }
  const Dtype dtype_ = GetParam().dtype;
};

TEST_P(AttendExpandedMasks, AFullOneIsNone) {
  Masked call(dtype_);
  call.run({call.item});
  const auto masked = call.bits();
  call.item.masked = false;
  call.run({call.item});
  EXPECT_EQ(call.bits(), masked);
}

// A row that sees nothing, rows of one key, and any others; alone, a row's tile skips blocks that the others see.
TEST_P(AttendExpandedMasks, BitsDoNotDependOnTheTile) {
  Masked call(dtype_);
  cases::Random random(5);
  for (int64_t row = 0; row < call.kTokens; ++row)
    for (int64_t w = 0; w < call.kWords; ++w) {
      uint32_t& word = call.mask[row * call.kWords + w];
      word = static_cast<uint32_t>(random.next() & random.next());
      if (row % 7 == 0) word = 0;
      if (row % 7 == 1) word = w == row * 5 % 16 + 1 ? 1u << row % 32 : 0;
    }
  call.run({call.item});
  const auto together = call.bits();
  std::vector<ExpandedItem> rows;
  for (int32_t i = 0; i < call.kTokens; ++i) {
    rows.push_back(call.item);
    rows.back().q_begin = i;
    rows.back().q_count = 1;
    rows.back().visible += i;
  }
  call.run(rows);
  EXPECT_EQ(call.bits(), together);
  for (int64_t d = 0; d < call.kValue; ++d) EXPECT_EQ(call.out[d], 0.0f);
  EXPECT_EQ(call.lse[0], -INFINITY);
}

TEST_P(AttendExpandedMasks, WhatTheyHideReachesNoRow) {
  Masked call(dtype_);
  cases::Random random(6);
  for (uint32_t& word : call.mask) word = static_cast<uint32_t>(random.next());
  call.run({call.item});
  const auto clean = call.bits();
  for (const float odd : {NAN, INFINITY})
    for (const int64_t key : {0, 1, 95, 96, 255, 256, 529})
      for (int what = 0; what < 3; ++what) {
        Masked::Operand& operand = what == 0 ? call.k_nope : what == 1 ? call.k_pe : call.v;
        const Masked::Operand before = operand;
        const int64_t at = what == 0   ? (key * call.kHeads + 1) * call.kNope + 5
                           : what == 1 ? key * call.kRope + 2
                                       : (key * call.kHeads + 1) * call.kValue + 7;
        operand.set(dtype_, at, odd);
        call.run({call.item});
        operand = before;
        for (int64_t row = 0; row < call.kTokens; ++row)
          for (int64_t head = 0; head < call.kHeads; ++head) {
            const std::string where = std::to_string(odd) + " in " + std::to_string(what) + " of key " +
                                      std::to_string(key) + ", row " + std::to_string(row);
            const bool hidden = !call.sees(row, key) || (what != 1 && head == 0);
            if (hidden) {
              EXPECT_EQ(call.bits(row, head), clean[row * call.kHeads + head]) << where;
            } else if (std::isnan(odd) || what == 2) {
              EXPECT_TRUE(std::isnan(call.lse[row * call.kHeads + head])) << where;
            }
          }
      }
}

INSTANTIATE_TEST_SUITE_P(Targets, AttendExpandedMasks, testing::ValuesIn(on_targets()),
                         [](const auto& i) { return name_of(i.param); });

TEST(AttendExpanded, TakesDotProductsWhereThereAreAny) {
  Masked call(Dtype::bf16);
  test::expect_dot_products([&] {
    call.run({call.item});
    return call.bits();
  });
}

}  // namespace
}  // namespace mla
