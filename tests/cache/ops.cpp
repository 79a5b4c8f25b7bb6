// append, rope_append, copy_pages and gather beyond their conformance cases: what must agree with what, and what is
// refused.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "backend/cpu/core/convert.hpp"
#include "backend/cpu/core/target.hpp"
#include "backend/run.hpp"
#include "cache/codec.hpp"
#include "cases/case.hpp"
#include "cases/padded.hpp"
#include "cases/poisoned_cache.hpp"
#include "support/sanitized.hpp"

namespace mla {
namespace {

using cases::Padded;
using cases::PoisonedCache;
using cases::Random;

template <class Args>
std::string refusal(const Args& args) {
  ThreadPool pool(1);
  Stream stream(pool);
  try {
    ops::run(stream, args);
  } catch (const ShapeError& e) {
    return e.what();
  }
  return "accepted";
}

struct Rows {
  Rows(Random& random, const CacheSpec& spec, int64_t tokens)
      : q(Dtype::f32, {tokens, 3, spec.rope}),
        kv_c(Dtype::f32, {tokens, spec.latent}),
        k_pe(Dtype::f32, {tokens, spec.rope}) {
    q.fill_normal(random);
    kv_c.fill_normal(random);
    k_pe.fill_normal(random);
  }
  Padded<Token, Head, Rope> q;
  Padded<Token, Latent> kv_c;
  Padded<Token, Rope> k_pe;
};

// The CPU's vector code must give the portable codec's bits on every instruction set.
class CacheOnTarget : public testing::TestWithParam<std::string_view> {
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

template <class T>
bool same_bits(const T& a, const T& b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

// Every 16-bit prefix with every rounding situation after it: 2^16 * 8 numbers, NaN and subnormals among them.
std::vector<float> all_kinds_of_floats() {
  std::vector<float> x;
  for (uint32_t high = 0; high < 65536; ++high)
    for (uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu, 0x1000u, 0x0fffu})
      x.push_back(std::bit_cast<float>(high << 16 | low));
  return x;
}

TEST_P(CacheOnTarget, NarrowingEqualsThePortableConversions) {
  const std::vector<float> x = all_kinds_of_floats();
  const int64_t n = static_cast<int64_t>(x.size()) - 3;  // a tail
  std::vector<bf16> b(x.size());
  std::vector<f16> h(x.size());
  std::vector<fp8_e4m3> e(x.size());
  cpu::convert(x.data(), b.data(), n);
  cpu::convert(x.data(), h.data(), n);
  for (int64_t i = 0; i < n; ++i) {
    ASSERT_TRUE(same_bits(b[i], to_bf16(x[i]))) << i;
    ASSERT_TRUE(same_bits(h[i], to_f16(x[i]))) << i;
  }
  for (float scale : {1.0f, 0.3f, 0x1p-13f}) {
    cpu::convert(x.data(), e.data(), n, scale);
    for (int64_t i = 0; i < n; ++i) ASSERT_TRUE(same_bits(e[i], to_fp8_e4m3(x[i] / scale))) << i << " over " << scale;
  }
}

TEST_P(CacheOnTarget, WideningEqualsThePortableConversions) {
  std::vector<bf16> b(65536 + 3);
  std::vector<f16> h(b.size());
  std::vector<fp8_e4m3> e(b.size());
  for (size_t i = 0; i < b.size(); ++i) {
    b[i].bits = h[i].bits = static_cast<uint16_t>(i);
    e[i].bits = static_cast<uint8_t>(i);
  }
  std::vector<float> y(b.size());
  const int64_t n = static_cast<int64_t>(b.size());
  cpu::convert(b.data(), y.data(), n);
  for (int64_t i = 0; i < n; ++i) ASSERT_TRUE(same_bits(y[i], to_float(b[i]))) << i;
  cpu::convert(h.data(), y.data(), n);
  for (int64_t i = 0; i < n; ++i) ASSERT_TRUE(same_bits(y[i], to_float(h[i]))) << i;
  for (float scale : {1.0f, 0.3f, 0x1p-127f}) {
    cpu::convert(e.data(), y.data(), n, scale);
    for (int64_t i = 0; i < n; ++i) ASSERT_TRUE(same_bits(y[i], to_float(e[i]) * scale)) << i << " times " << scale;
  }
}

TEST_P(CacheOnTarget, LargestMagnitudeEqualsThePortableOne) {
  const std::vector<float> x = all_kinds_of_floats();
  for (size_t at = 0; at + 131 < x.size(); at += 97)
    for (int64_t n : {0, 1, 64, 128, 131})
      ASSERT_EQ(cpu::largest_magnitude(x.data() + at, n), cache::largest_magnitude(x.data() + at, n))
          << at << " + " << n;
}

TEST_P(CacheOnTarget, AppendAndGatherPassTheirCases) {
  ThreadPool pool(2);
  Stream stream(pool);
  for (const cases::CaseType* type : {&cases::append, &cases::gather})
    for (const cases::Params& p : test::sampled(type->sweep(77), 2)) {
      const auto c = type->make(p);
      c->run(stream);
      const cases::Verdict v = c->verify();
      EXPECT_TRUE(v.ok) << type->op << " " << to_string(p.format) << " latent " << p.latent << " rope " << p.rope
                        << " page size " << p.page_size << ": " << v.detail;
    }
}

INSTANTIATE_TEST_SUITE_P(Targets, CacheOnTarget, testing::ValuesIn(cpu::targets()));

TEST(RopeAppend, GivesTheBitsOfItsParts) {
  constexpr int64_t kTokens = 37;
  for (CacheFormat format : cache_formats())
    for (bool interleaved : {true, false})
      for (bool rotate : {true, false}) {
        CacheSpec spec{.format = format, .page_size = 5, .k_scale = 0.1f};
        if (format == CacheFormat::fp8_ds_v4) spec.latent = 448;
        Random random(11);
        const Rows before(random, spec, kTokens);
        std::vector<int32_t> positions(kTokens), slots(kTokens);
        PoisonedCache fused_cache(spec, 9, random);
        for (int64_t t = 0; t < kTokens; ++t) {
          positions[t] = static_cast<int32_t>(random.integer(0, 999));
          slots[t] = t % 4 == 1 ? -1 : fused_cache.slot(t);
        }
        const RotaryTable table({.rotate = rotate, .interleaved = interleaved}, spec.rope, 1000);

        for (int threads : {1, 3}) {
          ThreadPool pool(threads);
          Stream stream(pool);
          Rows separate = before, fused = before;
          PoisonedCache separate_cache = fused_cache, one = fused_cache;
          ops::run(stream,
                   ops::RopeArgs{
                       .q = separate.q.view(), .k = separate.k_pe.view(), .positions = positions, .table = &table});
          ops::run(stream, ops::AppendArgs{separate.kv_c.view(), separate.k_pe.view(), slots, separate_cache.view()});
          ops::run(stream, ops::RopeAppendArgs{.q_pe = fused.q.view(),
                                               .kv_c = fused.kv_c.view(),
                                               .k_pe = fused.k_pe.view(),
                                               .positions = positions,
                                               .table = &table,
                                               .slots = slots,
                                               .cache = one.view()});
          const std::string where = std::string(to_string(format)) + (interleaved ? " interleaved" : " neox");
          EXPECT_EQ(fused.q.bytes(), separate.q.bytes()) << where;
          EXPECT_EQ(fused.k_pe.bytes(), separate.k_pe.bytes()) << where;
          EXPECT_EQ(one.bytes(), separate_cache.bytes()) << where;
          EXPECT_NE(one.bytes(), fused_cache.bytes()) << where;
          EXPECT_EQ(fused.q.bytes() == before.q.bytes(), !rotate);
          // A token without a slot is rotated all the same.
          EXPECT_EQ(fused.k_pe.view()(1, 1) == Rows(before).k_pe.view()(1, 1), !rotate);

          // The norm before it too.
          std::vector<float> weight(spec.latent);
          random.fill_normal(weight);
          Rows normed = before, all = before;
          PoisonedCache normed_cache = fused_cache, all_cache = fused_cache;
          const View<float, Token, In> rows(normed.kv_c.view().data(), {kTokens, spec.latent},
                                            normed.kv_c.view().strides());
          ops::run(stream, ops::NormArgs{.x = rows, .weight = weight, .eps = 1e-5, .y = rows});
          ops::run(stream, ops::RopeAppendArgs{.q_pe = normed.q.view(),
                                               .kv_c = normed.kv_c.view(),
                                               .k_pe = normed.k_pe.view(),
                                               .positions = positions,
                                               .table = &table,
                                               .slots = slots,
                                               .cache = normed_cache.view()});
          ops::run(stream, ops::NormRopeAppendArgs{.q_pe = all.q.view(),
                                                   .kv_c = all.kv_c.view(),
                                                   .k_pe = all.k_pe.view(),
                                                   .weight = weight,
                                                   .eps = 1e-5,
                                                   .positions = positions,
                                                   .table = &table,
                                                   .slots = slots,
                                                   .cache = all_cache.view()});
          EXPECT_EQ(all.q.bytes(), normed.q.bytes()) << where;
          EXPECT_EQ(all.kv_c.bytes(), normed.kv_c.bytes()) << where;
          EXPECT_NE(all.kv_c.bytes(), before.kv_c.bytes()) << where;
          EXPECT_EQ(all.k_pe.bytes(), normed.k_pe.bytes()) << where;
          EXPECT_EQ(all_cache.bytes(), normed_cache.bytes()) << where;

          // Queries of some tokens in another place: the same numbers, and those read are left alone.
          Rows read = before;
          PoisonedCache read_cache = fused_cache;
          const std::vector<int32_t> tokens{kTokens - 1, 0, 2, 2};
          Padded<Token, Head, Rope> to(Dtype::f32, {std::ssize(tokens), read.q.view().extent<Head>(), spec.rope});
          ops::run(stream, ops::RopeAppendArgs{.q_pe = read.q.view(),
                                               .kv_c = read.kv_c.view(),
                                               .k_pe = read.k_pe.view(),
                                               .positions = positions,
                                               .table = &table,
                                               .slots = slots,
                                               .cache = read_cache.view(),
                                               .placed = {to.any(), tokens}});
          for (int64_t r = 0; r < std::ssize(tokens); ++r)
            for (int64_t h = 0; h < to.any().extent<Head>(); ++h)
              for (int64_t i = 0; i < spec.rope; ++i)
                ASSERT_EQ(to.any().as<float>()(r, h, i), fused.q.view()(tokens[r], h, i)) << where;
          EXPECT_EQ(read.q.bytes(), before.q.bytes()) << where;
          EXPECT_EQ(read.k_pe.bytes(), fused.k_pe.bytes()) << where;
          EXPECT_EQ(read_cache.bytes(), one.bytes()) << where;
        }
      }
}

TEST(CopyPages, CopiesWholePagesAndNothingElse) {
  for (CacheFormat format : cache_formats()) {
    CacheSpec spec{.format = format, .page_size = 3};
    if (format == CacheFormat::fp8_ds_v4) spec.latent = 448;
    Random random(5);
    PoisonedCache cache(spec, 6, random);
    const CacheView view = cache.view();
    for (int64_t page : {0, 2, 4})
      for (size_t i = 0; i < spec.page_bytes(); ++i)
        view.page(page)[i] = std::byte{static_cast<uint8_t>(random.next())};
    std::vector<std::byte> expected = cache.bytes();
    for (auto [from, to] : {std::pair{0, 5}, {4, 1}, {2, 2}})
      std::memmove(expected.data() + to * view.page_stride, expected.data() + from * view.page_stride,
                   spec.page_bytes());
    const std::vector<ops::PageCopy> copies{{0, 5}, {4, 1}, {2, 2}};
    ThreadPool pool(3);
    Stream stream(pool);
    ops::run(stream, ops::CopyPagesArgs{view, copies});
    EXPECT_EQ(cache.bytes(), expected) << to_string(format);
  }
}

TEST(AppendArguments, EveryViolationIsNamed) {
  const CacheSpec spec{.format = CacheFormat::f32, .latent = 40, .rope = 8, .page_size = 4};
  Cache cache(spec, 3);
  std::vector<float> data(4096);
  const std::vector<int32_t> good{11, -1}, far{3, 12}, three{0, 1, 2};
  const ops::AppendArgs base{.kv_c = View<const float, Token, Latent>(data.data(), {2, 40}),
                             .k_pe = View<const float, Token, Rope>(data.data(), {2, 8}),
                             .slots = good,
                             .cache = cache.view()};
  using A = ops::AppendArgs;
  auto with = [&](auto change) {
    A a = base;
    change(a);
    return refusal(a);
  };
  float* x = data.data();
  EXPECT_EQ(refusal(base), "accepted");
  EXPECT_EQ(with([&](A& a) { a.slots = {}; }), "accepted");
  EXPECT_EQ(with([&](A& a) { a.slots = far; }), "append: slot of token 1 is 12, the cache has 12");
  EXPECT_EQ(with([&](A& a) { a.slots = three; }), "append: slots length is 3, allowed 0 to 2");
  EXPECT_EQ(with([&](A& a) { a.kv_c = {x, {2, 41}}; }), "append: kv_c Latent is 41, cache latent is 40");
  EXPECT_EQ(with([&](A& a) { a.k_pe = {x, {2, 7}}; }), "append: k_pe Rope is 7, cache rope is 8");
  EXPECT_EQ(with([&](A& a) { a.k_pe = {x, {1, 8}}; }), "append: slots length is 2, allowed 0 to 1");
  EXPECT_EQ(with([&](A& a) { a.kv_c = {x, {2, 40}, {80, 2}}; }), "append: kv_c Latent has stride 2, 1 is needed");
  EXPECT_EQ(with([&](A& a) { a.k_pe = {x, {2, 8}, {16, 2}}; }), "append: k_pe Rope has stride 2, 1 is needed");

  const RotaryTable table({}, 8, 100);
  const std::vector<int32_t> positions{0, 99}, late{0, 100};
  const ops::RopeAppendArgs fused{.q_pe = {x, {2, 3, 8}},
                                  .kv_c = base.kv_c,
                                  .k_pe = {x, {2, 8}},
                                  .positions = positions,
                                  .table = &table,
                                  .slots = good,
                                  .cache = cache.view()};
  using F = ops::RopeAppendArgs;
  auto fused_with = [&](auto change) {
    F f = fused;
    change(f);
    return refusal(f);
  };
  EXPECT_EQ(refusal(fused), "accepted");
  EXPECT_EQ(fused_with([&](F& f) { f.table = nullptr; }), "rope_append: no table");
  EXPECT_EQ(fused_with([&](F& f) { f.positions = late; }), "rope_append: position is 100, allowed 0 to 99");
  EXPECT_EQ(fused_with([&](F& f) { f.positions = three; }), "rope_append: positions length is 3, slots length is 2");
  EXPECT_EQ(fused_with([&](F& f) { f.slots = far; }), "rope_append: slot of token 1 is 12, the cache has 12");
  EXPECT_EQ(fused_with([&](F& f) { f.q_pe = {x, {1, 3, 8}}; }), "rope_append: slots length is 2, allowed 0 to 1");
  EXPECT_EQ(fused_with([&](F& f) { f.q_pe = {x, {2, 3, 6}}; }), "rope_append: q_pe Rope is 6, cache rope is 8");
  const std::vector<int32_t> named{1, 2};
  EXPECT_EQ(fused_with([&](F& f) { f.placed.q = {x, {2, 3, 8}}; }), "accepted");
  EXPECT_EQ(fused_with([&](F& f) { f.placed.q = {x, {1, 3, 8}}; }), "rope_append: placed tokens is 2, allowed 0 to 1");
  EXPECT_EQ(fused_with([&](F& f) { f.placed.q = {x, {2, 4, 8}}; }), "rope_append: placed q Head is 4, q_pe Head is 3");
  EXPECT_EQ(fused_with([&](F& f) {
              f.placed = {{x, {2, 3, 8}}, named};
            }),
            "rope_append: placed token is 2, allowed 0 to 1");
  const RotaryTable wide({}, 16, 100);
  EXPECT_EQ(fused_with([&](F& f) { f.table = &wide; }), "rope_append: table's rope is 16, cache rope is 8");

  const std::vector<float> weight(41);
  ops::NormRopeAppendArgs normed{.q_pe = fused.q_pe,
                                 .kv_c = {x, {2, 40}},
                                 .k_pe = fused.k_pe,
                                 .weight = std::span(weight).first(40),
                                 .positions = positions,
                                 .table = &table,
                                 .slots = good,
                                 .cache = cache.view()};
  EXPECT_EQ(refusal(normed), "accepted");
  normed.weight = weight;
  EXPECT_EQ(refusal(normed), "norm_rope_append: weight length is 41, cache latent is 40");
  normed.positions = late;
  EXPECT_EQ(refusal(normed), "rope_append: position is 100, allowed 0 to 99");

  const std::vector<ops::PageCopy> from{{3, 0}}, to{{0, -1}};
  EXPECT_EQ(refusal(ops::CopyPagesArgs{cache.view(), from}), "copy_pages: source page is 3, allowed 0 to 2");
  EXPECT_EQ(refusal(ops::CopyPagesArgs{cache.view(), to}), "copy_pages: destination page is -1, allowed 0 to 2");
}

TEST(GatherArguments, EveryViolationIsNamed) {
  const CacheSpec spec{.format = CacheFormat::f32, .latent = 40, .rope = 8, .page_size = 4};
  Cache cache(spec, 3);
  std::vector<float> data(4096);
  float* x = data.data();
  const std::vector<int32_t> table{2, 0, 77, 1, 1, -9};
  std::vector<GatherPiece> pieces{{0, 1, 7, 0}, {1, 0, 3, 7}};
  const ops::GatherArgs base{.cache = cache.view(),
                             .block_table = {table.data(), {2, 3}},
                             .pieces = pieces,
                             .kv_c = View<float, Key, Latent>(x, {10, 40}),
                             .k_pe = View<float, Key, Rope>(x + 1000, {10, 8})};
  using A = ops::GatherArgs;
  auto with = [&](auto change) {
    A a = base;
    change(a);
    return refusal(a);
  };
  auto piece = [&](GatherPiece p) {
    const std::vector<GatherPiece> changed{pieces[0], p};
    return with([&](A& a) { a.pieces = changed; });
  };
  EXPECT_EQ(refusal(base), "accepted");
  EXPECT_EQ(with([&](A& a) { a.pieces = {}; }), "accepted");
  EXPECT_EQ(piece({1, 12, 0, 10}), "accepted");  // empty: reads nothing
  EXPECT_EQ(piece({2, 0, 3, 7}), "gather: piece 1 request is 2, allowed 0 to 1");
  EXPECT_EQ(piece({1, 0, -1, 7}), "gather: piece 1 count is -1, allowed 0 to 10");
  EXPECT_EQ(piece({1, 0, 3, 8}), "gather: piece 1 row is 8, allowed 0 to 7");
  EXPECT_EQ(piece({1, 0, 3, -1}), "gather: piece 1 row is -1, allowed 0 to 7");
  EXPECT_EQ(piece({1, -1, 3, 0}), "gather: piece 1 start is -1, allowed 0 to 9");
  EXPECT_EQ(piece({1, 10, 3, 0}), "gather: piece 1 start is 10, allowed 0 to 9");
  EXPECT_EQ(piece({0, 7, 2, 0}), "gather: piece 1 page id is 77, allowed 0 to 2");
  EXPECT_EQ(piece({1, 7, 2, 0}), "gather: piece 1 page id is -9, allowed 0 to 2");
  EXPECT_EQ(with([&](A& a) {
              a.kv_c = View<float, Key, Latent>(x, {10, 41});
            }),
            "gather: kv_c Latent is 41, cache latent is 40");
  EXPECT_EQ(with([&](A& a) {
              a.k_pe = View<float, Key, Rope>(x, {10, 9});
            }),
            "gather: k_pe Rope is 9, cache rope is 8");
  EXPECT_EQ(with([&](A& a) { a.k_pe = View<float, Key, Rope>(x, {9, 8}); }), "gather: k_pe Key is 9, kv_c Key is 10");
  EXPECT_EQ(with([&](A& a) {
              a.kv_c = View<float, Key, Latent>(x, {10, 40}, {80, 2});
            }),
            "gather: kv_c Latent has stride 2, 1 is needed");
  EXPECT_EQ(with([&](A& a) { a.k_pe = {Dtype::bf16, x, {10, 8}}; }), "gather: k_pe is bf16, kv_c is f32");
  EXPECT_EQ(with([&](A& a) {
              a.kv_c = {Dtype::fp8_e4m3, x, {10, 40}};
              a.k_pe = {Dtype::fp8_e4m3, x, {10, 8}};
            }),
            "gather: kv_c is fp8_e4m3, allowed: f32 bf16 f16");
}

// Every code, at every offset and length that a vector of 64 or of 32 may end in.
TEST(Codes, AreRoundedToBf16AsOneByOneByBytesAndByWords) {
  if (!cpu::native_bf16_dot()) GTEST_SKIP() << "no bf16 dot products";
  std::vector<fp8_e4m3> codes(256 + 64);
  for (size_t i = 0; i < codes.size(); ++i) codes[i].bits = static_cast<uint8_t>(37 * i);
  const bf16 untouched = to_bf16(-77.0f);
  for (float scale : {1.0f, 0.37f, -2.5f, 1e-30f, 3e37f, 1.0f})
    for (size_t first : {0, 1, 63})
      for (size_t n = 0; first + n <= codes.size(); n = n < 70 ? n + 1 : n + 31)
        for (auto* convert : {cpu::convert_fp8_bf16, cpu::convert_fp8_bf16_by_words}) {
          std::vector<bf16> got(n + 64, untouched);
          convert(codes.data() + first, got.data(), static_cast<int64_t>(n), scale);
          for (size_t i = 0; i < got.size(); ++i) {
            const bf16 right = i < n ? to_bf16(to_float(codes[first + i]) * scale) : untouched;
            if (std::isnan(to_float(right))) ASSERT_TRUE(std::isnan(to_float(got[i]))) << scale << " " << i;
            else ASSERT_EQ(got[i].bits, right.bits) << "scale " << scale << ", " << n << " codes, number " << i;
          }
        }
}

}  // namespace
}  // namespace mla
