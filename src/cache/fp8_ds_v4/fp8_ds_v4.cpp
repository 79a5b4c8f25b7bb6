// fp8_ds_v4: 448 numbers in e4m3 with a power-of-two scale for every 64, rope 64 in bf16; keys and values are the whole 512.
//
//   page    | Q rows of 576 bytes                       | Q x 8 bytes of scales                        |
//   row     | 448 e4m3 | 64 bf16 rope (128 bytes) |       | 7 UE8M0 | 1 pad | per token
//             group g is bytes 64 g .. 64 g + 63, value = e4m3 * 2^(scale[g] - 127)
//
// Writer scale: 2^ceil(log2(max(amax / 448, 1e-4))); the pad byte is 0.
#include <algorithm>
#include <string>

#include "cache/codec.hpp"
#include "cache/format.hpp"
#include "mla/error.hpp"

namespace mla::cache {
namespace {

constexpr int64_t kLatent = 448, kRope = 64, kGroup = 64, kGroups = kLatent / kGroup, kRow = kLatent + 2 * kRope, kScales = 8;
static_assert(kRow + kScales == 584);

void validate(const CacheSpec& spec) {
  if (spec.latent != kLatent || spec.rope != kRope)
    throw UnsupportedError("cache format fp8_ds_v4 holds latent 448 and rope 64, not latent " + std::to_string(spec.latent) +
                           " and rope " + std::to_string(spec.rope));
}

// UE8M0: biased exponent; 255 is NaN. 2^-127 is subnormal in f32, and exact.
float from_ue8m0(uint8_t e) {
  if (e == 255) return std::bit_cast<float>(0x7fc00000u);
  return e == 0 ? 0x1p-127f : power_of_two(e - 127);
}

void encode(const CacheSpec& spec, std::byte* page, int64_t offset, const float* latent, const float* rope) {
  std::byte* row = page + offset * kRow;
  std::byte* scales = page + spec.page_size * kRow + offset * kScales;
  for (int64_t g = 0; g < kGroups; ++g) {
    const float* x = latent + g * kGroup;
    const int exponent = ceil_log2(std::max(largest_magnitude(x, kGroup) / 448.0f, 1e-4f));
    const float scale = power_of_two(exponent);
    for (int64_t i = 0; i < kGroup; ++i) put(row, g * kGroup + i, to_fp8_e4m3(x[i] / scale));
    put(scales, g, static_cast<uint8_t>(exponent + 127));
  }
  put(scales, kGroups, uint8_t{0});
  for (int64_t i = 0; i < kRope; ++i) put(row + kLatent, i, to_bf16(rope[i]));
}

void decode(const CacheSpec& spec, const std::byte* page, int64_t first, int64_t count, float* rows, int64_t row_stride) {
  for (int64_t t = 0; t < count; ++t) {
    const std::byte* row = page + (first + t) * kRow;
    const std::byte* scales = page + spec.page_size * kRow + (first + t) * kScales;
    float* out = rows + t * row_stride;
    for (int64_t g = 0; g < kGroups; ++g) {
      const float scale = from_ue8m0(get<uint8_t>(scales, g));
      for (int64_t i = 0; i < kGroup; ++i) out[g * kGroup + i] = to_float(get<fp8_e4m3>(row, g * kGroup + i)) * scale;
    }
    for (int64_t i = 0; i < kRope; ++i) out[kLatent + i] = to_float(get<bf16>(row + kLatent, i));
  }
}

}  // namespace

extern const Format kFp8DsV4 = {.id = CacheFormat::fp8_ds_v4,
                                .name = "fp8_ds_v4",
                                .summary = "448 e4m3 + 64 bf16 rope + 7 UE8M0 scales: 584 bytes a token, values are the whole row",
                                .validate = validate,
                                .page_bytes = [](const CacheSpec& s) { return static_cast<size_t>(s.page_size * (kRow + kScales)); },
                                .value_width = [](const CacheSpec&) { return kLatent + kRope; },
                                .encode = encode,
                                .decode = decode};

}  // namespace mla::cache
