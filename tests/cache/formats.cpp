// Layout and codec of every cache format: bytes worked out by hand, all stored codes, edge values, and round trips
// within the rounding that the format allows.
#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "cache/format.hpp"
#include "cases/compare.hpp"
#include "mla/error.hpp"

namespace mla {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

CacheSpec spec_of(CacheFormat format) {
  CacheSpec spec{.format = format, .page_size = 3};
  if (format == CacheFormat::fp8_ds_v4) spec.latent = 448;
  return spec;
}

// One page, all ones before anything is written. It starts at an odd address: no codec may rely on alignment.
class Page {
 public:
  explicit Page(const CacheSpec& spec) : spec_(spec), bytes_(1 + spec.page_bytes(), std::byte{0xff}) {}
  std::byte* data() { return bytes_.data() + 1; }
  uint8_t operator[](size_t i) const { return static_cast<uint8_t>(bytes_[1 + i]); }
  template <class T>
  T at(size_t i) const {
    T x;
    std::memcpy(&x, bytes_.data() + 1 + i, sizeof(T));
    return x;
  }
  template <class T>
  void set(size_t i, T x) {
    std::memcpy(bytes_.data() + 1 + i, &x, sizeof(T));
  }
  void encode(int64_t offset, const std::vector<float>& row) {
    cache::format(spec_.format).encode(spec_, data(), offset, row.data(), row.data() + spec_.latent);
  }
  std::vector<float> decode(int64_t offset) {
    std::vector<float> row(static_cast<size_t>(spec_.entry()));
    cache::format(spec_.format).decode(spec_, data(), offset, 1, row.data(), spec_.entry());
    return row;
  }
  /// Offsets of the bytes that are no longer as they were.
  std::vector<size_t> written() const {
    std::vector<size_t> w;
    for (size_t i = 1; i < bytes_.size(); ++i)
      if (bytes_[i] != std::byte{0xff}) w.push_back(i - 1);
    return w;
  }

 private:
  CacheSpec spec_;
  std::vector<std::byte> bytes_;
};

std::vector<float> normal_row(const CacheSpec& spec, uint64_t seed, float stddev = 1) {
  return cases::random_values(spec.entry(), seed, stddev);
}

TEST(Formats, SizesAndWidths) {
  const auto bytes = [](CacheFormat f, int64_t latent, int64_t rope, int64_t page_size) {
    return CacheSpec{.format = f, .latent = latent, .rope = rope, .page_size = page_size}.page_bytes();
  };
  EXPECT_EQ(bytes(CacheFormat::f32, 512, 64, 64), 64u * 2304);
  EXPECT_EQ(bytes(CacheFormat::bf16, 512, 64, 64), 64u * 1152);
  EXPECT_EQ(bytes(CacheFormat::f16, 40, 0, 3), 240u);
  EXPECT_EQ(bytes(CacheFormat::fp8, 77, 13, 3), 270u);
  EXPECT_EQ(bytes(CacheFormat::fp8_ds_mla, 512, 64, 64), 64u * 656);
  EXPECT_EQ(bytes(CacheFormat::fp8_ds_v4, 448, 64, 64), 64u * 584);
  for (CacheFormat f : cache_formats())
    EXPECT_EQ(spec_of(f).value_width(), 512) << to_string(f);  // the latent; for fp8_ds_v4 448 + 64
  EXPECT_EQ((CacheSpec{.format = CacheFormat::fp8, .latent = 40, .rope = 8}).value_width(), 40);
}

TEST(Formats, NamesAreReadBack) {
  for (CacheFormat f : cache_formats()) EXPECT_EQ(parse_cache_format(to_string(f)), f);
  try {
    parse_cache_format("fp4");
    FAIL();
  } catch (const InputError& e) {
    EXPECT_STREQ(e.what(), "unknown cache format 'fp4'; known: f32 bf16 f16 fp8 fp8_ds_mla fp8_ds_v4");
  }
}

template <class E>
std::string refusal(const CacheSpec& spec) {
  try {
    spec.validate();
  } catch (const E& e) {
    return e.what();
  }
  return "accepted";
}

TEST(Formats, DimensionsTheyCannotHoldAreRefused) {
  for (CacheFormat f : cache_formats()) EXPECT_EQ(refusal<Error>(spec_of(f)), "accepted");
  CacheSpec mla = spec_of(CacheFormat::fp8_ds_mla), v4 = spec_of(CacheFormat::fp8_ds_v4),
            plain = spec_of(CacheFormat::f32);
  mla.latent = 256;
  EXPECT_EQ(refusal<UnsupportedError>(mla),
            "cache format fp8_ds_mla holds latent 512 and rope 64, not latent 256 and rope 64");
  v4.rope = 0;
  EXPECT_EQ(refusal<UnsupportedError>(v4),
            "cache format fp8_ds_v4 holds latent 448 and rope 64, not latent 448 and rope 0");
  plain.rope = -1;
  EXPECT_EQ(refusal<ShapeError>(plain), "cache rope is -1, allowed 0 to 1048576");
  plain.rope = 0;
  plain.page_size = 0;
  EXPECT_EQ(refusal<ShapeError>(plain), "cache page size is 0, allowed 1 to 1048576");
  for (float scale : {0.0f, -1.0f, kInf, cases::poison()}) {
    CacheSpec fp8 = spec_of(CacheFormat::fp8);
    fp8.k_scale = scale;
    EXPECT_NE(refusal<ShapeError>(fp8), "accepted") << scale;
  }
  EXPECT_THROW(Cache(spec_of(CacheFormat::f32), -1), ShapeError);
  EXPECT_THROW(Cache(spec_of(CacheFormat::f32), int64_t{1} << 31), ShapeError);
}

TEST(Formats, PlainBytes) {
  for (CacheFormat f : {CacheFormat::f32, CacheFormat::bf16, CacheFormat::f16, CacheFormat::fp8}) {
    const CacheSpec spec{.format = f, .latent = 2, .rope = 1, .page_size = 3, .k_scale = 0.5f};
    Page page(spec);
    page.encode(1, {1.5f, -2.0f, 0.25f});
    const std::vector<uint8_t> expected =
        f == CacheFormat::f32    ? std::vector<uint8_t>{0, 0, 0xc0, 0x3f, 0, 0, 0, 0xc0, 0, 0, 0x80, 0x3e}
        : f == CacheFormat::bf16 ? std::vector<uint8_t>{0xc0, 0x3f, 0x00, 0xc0, 0x80, 0x3e}
        : f == CacheFormat::f16  ? std::vector<uint8_t>{0x00, 0x3e, 0x00, 0xc0, 0x00, 0x34}
                                 : std::vector<uint8_t>{0x44, 0xc8, 0x30};
    const size_t n = expected.size();
    for (size_t i = 0; i < n; ++i) EXPECT_EQ(page[n + i], expected[i]) << to_string(f) << " byte " << i;
    for (size_t i = 0; i < n; ++i) EXPECT_TRUE(page[i] == 0xff && page[2 * n + i] == 0xff) << to_string(f);
    EXPECT_EQ(page.decode(1), (std::vector<float>{1.5f, -2.0f, 0.25f})) << to_string(f);
  }
}

TEST(Formats, DsMlaBytes) {
  const CacheSpec spec = spec_of(CacheFormat::fp8_ds_mla);
  std::vector<float> row(576);
  row[0] = 336.0f;  // amax 336: 336 / 448 = 0.75, so the scale is exactly 1
  row[1] = -1.0f;
  row[128] = 448.0f;  // exactly full: scale 1
  row[256] = 449.0f;  // just past: scale 2
  row[257] = 3.0f;
  row[384] = 1e-6f;  // far below: the floor 1e-4 rounds up to 2^-13
  row[512] = 1.0f;
  row[575] = -0.3f;
  Page page(spec);
  page.encode(1, row);
  const size_t t = 656;
  EXPECT_EQ(page[t + 0], 0x7a);    // 336 = 1.3125 * 256: rounds to 1.25 (even) * 256 = 320
  EXPECT_EQ(page[t + 1], 0xb8);    // -1
  EXPECT_EQ(page[t + 128], 0x7e);  // 448
  EXPECT_EQ(page[t + 256], 0x76);  // 224.5 rounds to 224
  EXPECT_EQ(page[t + 257], 0x3c);  // 1.5
  EXPECT_EQ(page[t + 384], 0x04);  // 1e-6 * 8192 = 0.0082: 4.19 steps of 2^-9
  EXPECT_EQ(page.at<float>(t + 512), 1.0f);
  EXPECT_EQ(page.at<float>(t + 516), 1.0f);
  EXPECT_EQ(page.at<float>(t + 520), 2.0f);
  EXPECT_EQ(page.at<float>(t + 524), 0x1p-13f);
  EXPECT_EQ(page.at<uint16_t>(t + 528), 0x3f80);
  EXPECT_EQ(page.at<uint16_t>(t + 528 + 126), 0xbe9a);
  const auto written = page.written();
  EXPECT_EQ(written.front(), t);
  EXPECT_EQ(written.back(), 2 * t - 1);
  EXPECT_EQ(written.size(), t);

  CacheSpec plain = spec;
  plain.power_of_two_scales = false;
  Page other(plain);
  other.encode(0, row);
  EXPECT_EQ(other.at<float>(512), 0.75f);
  EXPECT_EQ(other[0], 0x7e);
  EXPECT_EQ(other.at<float>(520), 449.0f / 448.0f);
  EXPECT_EQ(other.at<float>(524), 1e-6f / 448.0f);
  row[384] = 0;
  other.encode(0, row);
  EXPECT_EQ(other.at<float>(524), FLT_MIN);
  EXPECT_EQ(other[384], 0);
}

TEST(Formats, DsV4Bytes) {
  const CacheSpec spec = spec_of(CacheFormat::fp8_ds_v4);
  std::vector<float> row(512);
  for (int g = 0; g < 7; ++g) row[64 * g] = std::ldexp(448.0f, g - 3);  // scales 2^-3 .. 2^3
  row[65] = 0.5f;
  row[448] = 1.0f;
  row[511] = 2.0f;
  Page page(spec);
  page.encode(2, row);
  const size_t t = 2 * 576, s = 3 * 576 + 2 * 8;
  for (int g = 0; g < 7; ++g) {
    EXPECT_EQ(page[t + 64 * g], 0x7e) << g;
    EXPECT_EQ(page[s + g], 124 + g) << g;
  }
  EXPECT_EQ(page[s + 7], 0);      // pad
  EXPECT_EQ(page[t + 65], 0x40);  // 0.5 / 2^-2 = 2
  EXPECT_EQ(page.at<uint16_t>(t + 448), 0x3f80);
  EXPECT_EQ(page.at<uint16_t>(t + 448 + 126), 0x4000);
  const auto written = page.written();
  EXPECT_EQ(written.size(), 584u);
  EXPECT_EQ(written.front(), t);
  EXPECT_EQ(written[575], t + 575);
  EXPECT_EQ(written[576], s);
  EXPECT_EQ(page.decode(2), row);  // all of it is representable
}

// Every code of every format's quantised part decodes to what the code means.
TEST(Formats, AllStoredCodes) {
  for (CacheFormat f : {CacheFormat::fp8, CacheFormat::fp8_ds_mla, CacheFormat::fp8_ds_v4}) {
    CacheSpec spec = spec_of(f);
    spec.k_scale = 0.3f;
    for (int code = 0; code < 256; ++code) {
      Page page(spec);
      page.set(5, static_cast<uint8_t>(code));
      float scale = spec.k_scale;
      if (f == CacheFormat::fp8_ds_mla) page.set(512, scale = 1.7e-3f);
      if (f == CacheFormat::fp8_ds_v4) {
        page.set(3 * 576, uint8_t{120});
        scale = 0x1p-7f;
      }
      const double exponent = (code >> 3) & 15, mantissa = code & 7;
      double value =
          exponent > 0 ? std::ldexp(1 + mantissa / 8, static_cast<int>(exponent) - 7) : std::ldexp(mantissa, -9);
      if (code & 128) value = -value;
      const float got = page.decode(0)[5];
      if ((code & 127) == 127) EXPECT_TRUE(std::isnan(got)) << to_string(f) << " code " << code;
      else EXPECT_EQ(got, static_cast<float>(value) * scale) << to_string(f) << " code " << code;
    }
  }
}

TEST(Formats, ReadersTakeAnyScale) {
  const CacheSpec mla = spec_of(CacheFormat::fp8_ds_mla), v4 = spec_of(CacheFormat::fp8_ds_v4);
  Page page(mla);
  page.set(0, uint8_t{0x3c});  // 1.5
  for (float scale : {1.0f, 0.1f, FLT_MIN, FLT_TRUE_MIN, -3.3f, 0.0f, 1.2345678e30f, 1.00000012f}) {
    page.set(512, scale);
    EXPECT_EQ(page.decode(0)[0], 1.5f * scale) << scale;
  }
  Page split(v4);
  split.set(0, uint8_t{0x40});  // 2
  for (int e = 0; e < 255; ++e) {
    split.set(3 * 576, static_cast<uint8_t>(e));
    EXPECT_EQ(split.decode(0)[0], 2.0f * static_cast<float>(std::ldexp(1.0, e - 127))) << e;
  }
  split.set(3 * 576, uint8_t{255});
  EXPECT_TRUE(std::isnan(split.decode(0)[0]));
}

// ceil(log2) at and around every power of two, where a rounded logarithm would slip.
TEST(Formats, WriterScalesAreExactPowersOfTwo) {
  const CacheSpec spec = spec_of(CacheFormat::fp8_ds_mla), v4 = spec_of(CacheFormat::fp8_ds_v4);
  for (int e = -13; e <= 118; ++e) {
    const float full = std::ldexp(448.0f, e);
    for (float amax : {std::nextafter(full, 0.0f), full, std::nextafter(full, kInf)}) {
      // The definition in exact terms: the smallest power of two, at least 2^-13, that is no less than f32's amax /
      // 448.
      float scale = 0x1p-13f;
      while (scale < amax / 448.0f) scale *= 2;
      std::vector<float> row(576);
      row[7] = -amax;
      Page page(spec);
      page.encode(0, row);
      EXPECT_EQ(page.at<float>(512), scale) << amax;
      row.resize(512);
      Page split(v4);
      split.encode(0, row);
      EXPECT_EQ(split[3 * 576], 127 + std::ilogb(scale)) << amax;
    }
  }
}

// Latent error bounds per element, by format: half a unit of the rounding, and of the smallest step near zero.
double bound(const CacheSpec& spec, float x, float scale) {
  switch (spec.format) {
    case CacheFormat::f32: return 0;
    case CacheFormat::bf16: return std::fabs(x) * 0x1p-8 + 0x1p-134;
    case CacheFormat::f16: return std::fabs(x) * 0x1p-11 + 0x1p-25;
    default: return (std::fabs(x) * 0x1p-4 + scale * 0x1p-10) * (1 + 0x1p-20);  // x / scale and the way back round too
  }
}

TEST(Formats, RoundTripsStayWithinTheirRounding) {
  for (CacheFormat f : cache_formats())
    for (bool power_of_two : {true, false})
      for (float stddev : {1e-6f, 1e-2f, 1.0f, 90.0f}) {
        CacheSpec spec = spec_of(f);
        spec.power_of_two_scales = power_of_two;
        spec.k_scale = stddev / 60;  // 448 k_scale is 7.5 standard deviations
        Page page(spec);
        std::vector<std::vector<float>> rows;
        for (int64_t t = 0; t < spec.page_size; ++t) rows.push_back(normal_row(spec, 31 + t, stddev));
        for (int64_t t = spec.page_size; t-- > 0;) page.encode(t, rows[t]);  // order must not matter
        for (int64_t t = 0; t < spec.page_size; ++t) {
          const std::vector<float> got = page.decode(t);
          const int64_t group = f == CacheFormat::fp8_ds_mla ? 128 : 64;
          for (int64_t i = 0; i < spec.entry(); ++i) {
            const bool rope = i >= spec.latent, scaled = f >= CacheFormat::fp8_ds_mla;
            CacheSpec as = spec;
            float scale = spec.k_scale;
            if (scaled && rope) as.format = CacheFormat::bf16;
            if (scaled && !rope) {
              float amax = 0;
              for (int64_t j = 0; j < group; ++j) amax = std::max(amax, std::fabs(rows[t][i / group * group + j]));
              scale = std::max(2 * amax / 448, 0x1p-13f);
            }
            ASSERT_LE(std::fabs(got[i] - rows[t][i]), bound(as, rows[t][i], scale))
                << to_string(f) << " element " << i << ": " << rows[t][i] << " came back as " << got[i];
          }
        }
      }
}

TEST(Formats, RunsDecodeLikeSingleTokensAtAnyStride) {
  for (CacheFormat f : cache_formats()) {
    const CacheSpec spec = spec_of(f);
    Page page(spec);
    for (int64_t t = 0; t < 3; ++t) page.encode(t, normal_row(spec, 7 + t));
    const int64_t stride = spec.entry() + 5;
    std::vector<float> rows(static_cast<size_t>(2 * stride), -77.0f);
    cache::format(f).decode(spec, page.data(), 1, 2, rows.data(), stride);
    for (int64_t t = 0; t < 2; ++t) {
      const std::vector<float> one = page.decode(1 + t);
      EXPECT_TRUE(std::equal(one.begin(), one.end(), rows.begin() + t * stride)) << to_string(f);
      for (int64_t i = spec.entry(); i < stride; ++i) EXPECT_EQ(rows[t * stride + i], -77.0f) << to_string(f);
    }
  }
}

// NaN stays NaN where it stood, infinities stay large, scales stay finite, and neighbours survive.
TEST(Formats, NonFiniteInputs) {
  for (CacheFormat f : cache_formats())
    for (bool power_of_two : {true, false}) {
      CacheSpec spec = spec_of(f);
      spec.power_of_two_scales = power_of_two;
      std::vector<float> row(static_cast<size_t>(spec.entry()), 1.0f);
      row[3] = cases::poison();
      row[200] = kInf;
      row[201] = -kInf;
      row[spec.latent + 1] = cases::poison();
      row[spec.latent + 2] = -kInf;
      Page page(spec);
      page.encode(0, row);
      const std::vector<float> got = page.decode(0);
      EXPECT_TRUE(std::isnan(got[3])) << to_string(f);
      EXPECT_TRUE(std::isnan(got[spec.latent + 1])) << to_string(f);
      EXPECT_NEAR(got[4], 1.0f, 0x1p-4) << to_string(f);  // NaN in the group does not touch the scale
      if (f == CacheFormat::f32 || f == CacheFormat::bf16 || f == CacheFormat::f16) {
        EXPECT_EQ(got[200], kInf);
        EXPECT_EQ(got[201], -kInf);
      } else {
        EXPECT_GE(got[200], 448.0f) << to_string(f);  // the largest code, times a scale that may take it past f32
        EXPECT_EQ(got[201], -got[200]) << to_string(f);
      }
      for (int g = 0; f == CacheFormat::fp8_ds_mla && g < 4; ++g)
        EXPECT_TRUE(std::isfinite(page.at<float>(512 + 4 * g))) << g;
      for (int g = 0; f == CacheFormat::fp8_ds_v4 && g < 7; ++g) EXPECT_LT(page[3 * 576 + g], 255) << g;
      EXPECT_EQ(got[spec.latent + 2], f == CacheFormat::fp8 ? -448.0f : -kInf) << to_string(f);
    }
}

TEST(Formats, Fp8SaturatesAndKeepsSigns) {
  const CacheSpec spec{.format = CacheFormat::fp8, .latent = 8, .rope = 0, .page_size = 1, .k_scale = 2.0f};
  Page page(spec);
  page.encode(0, {1e30f, -1e30f, 896.0f, 897.0f, -0.0f, 0x1p-9f, 0x1.8p-9f, -FLT_TRUE_MIN});
  // 0x1p-9 / 2 is half the smallest step: to even, zero; 1.5 times that: one step.
  const std::vector<uint8_t> expected{0x7e, 0xfe, 0x7e, 0x7e, 0x80, 0x00, 0x01, 0x80};
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(page[i], expected[i]) << "element " << i;
}

}  // namespace
}  // namespace mla
