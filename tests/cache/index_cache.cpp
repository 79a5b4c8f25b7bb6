// Layout and codec of the index cache: bytes worked out by hand, the scale's rule, and what the reader takes.
#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "cache/index/codec.hpp"
#include "cases/compare.hpp"
#include "mla/error.hpp"

namespace mla {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// All ones before anything is written, at an odd address: no codec may rely on alignment.
class Page {
 public:
  explicit Page(const IndexCacheSpec& spec) : spec_(spec), bytes_(1 + spec.page_bytes(), std::byte{0xff}) {}
  std::byte* data() { return bytes_.data() + 1; }
  uint8_t operator[](size_t i) const { return static_cast<uint8_t>(bytes_[1 + i]); }
  float scale(int64_t offset) { return cache::get<float>(data() + cache::index::scale_at(spec_, offset), 0); }
  void encode(int64_t offset, const std::vector<float>& key) {
    cache::index::encode(spec_, data(), offset, key.data());
  }
  std::vector<float> decode(int64_t offset) {
    std::vector<float> key(static_cast<size_t>(spec_.dim));
    cache::index::decode(spec_, data(), offset, key.data());
    return key;
  }

 private:
  IndexCacheSpec spec_;
  std::vector<std::byte> bytes_;
};

TEST(IndexCache, Sizes) {
  const auto bytes = [](IndexCacheFormat f, int64_t dim, int64_t page_size) {
    return IndexCacheSpec{.format = f, .dim = dim, .page_size = page_size}.page_bytes();
  };
  EXPECT_EQ(bytes(IndexCacheFormat::fp8, 128, 64), 64u * 132);
  EXPECT_EQ(bytes(IndexCacheFormat::bf16, 128, 64), 64u * 256);
  EXPECT_EQ(bytes(IndexCacheFormat::f32, 128, 64), 64u * 512);
  EXPECT_EQ(bytes(IndexCacheFormat::fp8, 77, 3), 3u * 81);
  EXPECT_EQ(IndexCacheSpec{}.token_bytes(), 132.0);
  const IndexCache cache({}, 3);
  EXPECT_EQ(cache.view().page(2) - cache.view().page(0), 2 * 64 * 132);
}

TEST(IndexCache, NamesAreReadBack) {
  for (IndexCacheFormat f : index_cache_formats()) EXPECT_EQ(parse_index_cache_format(to_string(f)), f);
  try {
    parse_index_cache_format("f16");
    FAIL();
  } catch (const InputError& e) {
    EXPECT_STREQ(e.what(), "unknown index cache format 'f16'; known: f32 bf16 fp8");
  }
}

TEST(IndexCache, ImpossibleNumbersAreRefused) {
  auto refusal = [](IndexCacheSpec spec, int64_t pages) -> std::string {
    try {
      const IndexCache cache(spec, pages);
    } catch (const ShapeError& e) {
      return e.what();
    }
    return "accepted";
  };
  EXPECT_EQ(refusal({}, 0), "accepted");
  EXPECT_EQ(refusal({.dim = 0}, 1), "index cache dim is 0, allowed 1 to 1048576");
  EXPECT_EQ(refusal({.page_size = 0}, 1), "index cache page size is 0, allowed 1 to 1048576");
  EXPECT_EQ(refusal({.page_size = 64}, -1), "index cache pages is -1, allowed 0 to 33554431 at page size 64");
  EXPECT_EQ(refusal({.page_size = 64}, 1 << 25),
            "index cache pages is 33554432, allowed 0 to 33554431 at page size 64");
}

// Three tokens of two: rows at 0, 2, 4, scales at 6, 10, 14. 448 over scale 1 is code 0x7e, -56 is 0xe6.
TEST(IndexCache, Fp8Bytes) {
  const IndexCacheSpec spec{.dim = 2, .page_size = 3};
  Page page(spec);
  page.encode(1, {448.0f, -56.0f});
  const std::vector<uint8_t> expected{0xff, 0xff, 0x7e, 0xe6, 0xff, 0xff, 0xff, 0xff, 0xff,
                                      0xff, 0,    0,    0x80, 0x3f, 0xff, 0xff, 0xff, 0xff};
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(page[i], expected[i]) << i;
  EXPECT_EQ(page.decode(1), (std::vector<float>{448.0f, -56.0f}));
}

TEST(IndexCache, PlainBytes) {
  Page b({.format = IndexCacheFormat::bf16, .dim = 2, .page_size = 2}),
      f({.format = IndexCacheFormat::f32, .dim = 1, .page_size = 2});
  b.encode(1, {1.5f, -2.0f});
  f.encode(0, {1.5f});
  const std::vector<uint8_t> bf16_bytes{0xff, 0xff, 0xff, 0xff, 0xc0, 0x3f, 0x00, 0xc0},
      f32_bytes{0, 0, 0xc0, 0x3f, 0xff, 0xff, 0xff, 0xff};
  for (size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(b[i], bf16_bytes[i]) << i;
    EXPECT_EQ(f[i], f32_bytes[i]) << i;
  }
}

TEST(IndexCache, WriterScales) {
  for (bool powers : {true, false}) {
    const IndexCacheSpec spec{.dim = 2, .page_size = 1, .power_of_two_scales = powers};
    auto scale = [&](float a, float b) {
      Page page(spec);
      page.encode(0, {a, b});
      return page.scale(0);
    };
    EXPECT_EQ(scale(448, 0), 1.0f);
    EXPECT_EQ(scale(1, -896), 2.0f);
    EXPECT_EQ(scale(449, 0), powers ? 2.0f : 449.0f / 448);
    EXPECT_EQ(scale(300, 0), powers ? 1.0f : 300.0f / 448);
    EXPECT_EQ(scale(0, 0), powers ? 0x1p-22f : 1e-4f / 448);  // 1e-4 / 448 = 2.23e-7, 2^-22 = 2.38e-7
    EXPECT_EQ(scale(1e-30f, 0), scale(0, 0));
    EXPECT_EQ(scale(cases::poison(), 448), 1.0f);
    EXPECT_EQ(scale(kInf, 0), powers ? 0x1p120f : FLT_MAX / 448);
  }
}

TEST(IndexCache, ReaderTakesAnyScale) {
  const IndexCacheSpec spec{.dim = 4, .page_size = 2};
  Page page(spec);
  page.encode(1, {448, 224, -2, 0});
  cache::put(page.data() + cache::index::scale_at(spec, 1), 0, 0.3f);
  EXPECT_EQ(page.decode(1), (std::vector<float>{448 * 0.3f, 224 * 0.3f, -2 * 0.3f, 0}));
}

// e4m3 rounds to 2^-4 of an element, or to half its least step, 2^-10 scales.
TEST(IndexCache, RoundTripStaysWithinRounding) {
  for (bool powers : {true, false}) {
    const IndexCacheSpec spec{.page_size = 7, .power_of_two_scales = powers};
    cases::Random random(3);
    Page page(spec);
    std::vector<float> key(128);
    for (int i = 0; i < 200; ++i) {
      random.fill_normal(key, std::exp2(static_cast<float>(random.integer(-12, 12))));
      const int64_t offset = random.integer(0, 6);
      page.encode(offset, key);
      const std::vector<float> back = page.decode(offset);
      for (size_t d = 0; d < key.size(); ++d)
        ASSERT_LE(std::abs(back[d] - key[d]), std::max(std::abs(key[d]) * 0x1.0001p-4f, page.scale(offset) * 0x1p-10f));
    }
  }
}

}  // namespace
}  // namespace mla
