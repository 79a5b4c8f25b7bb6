// fp8_ds_mla: latent 512 in e4m3 with a scale for every 128, rope 64 in bf16. DeepSeek V3.2's cache as FlashMLA lays it out.
//
//   token (656 bytes)   0             512                 528              656
//                       | 512 e4m3    | 4 f32 scales      | 64 bf16 rope   |
//                         group g is bytes 128 g .. 128 g + 127, value = e4m3 * scale[g]
//
// Writer scale: 2^ceil(log2(max(amax / 448, 1e-4))), or max(amax / 448, FLT_MIN) when power_of_two_scales is off. The reader takes
// any finite f32 scale as it stands.
#include <algorithm>
#include <cfloat>
#include <string>

#include "cache/codec.hpp"
#include "cache/format.hpp"
#include "mla/error.hpp"

namespace mla::cache {
namespace {

constexpr int64_t kLatent = 512, kRope = 64, kGroup = 128, kGroups = kLatent / kGroup;
constexpr int64_t kScales = kLatent, kRopeBytes = kScales + kGroups * 4, kToken = kRopeBytes + kRope * 2;
static_assert(kToken == 656);

void validate(const CacheSpec& spec) {
  if (spec.latent != kLatent || spec.rope != kRope)
    throw UnsupportedError("cache format fp8_ds_mla holds latent 512 and rope 64, not latent " + std::to_string(spec.latent) +
                           " and rope " + std::to_string(spec.rope));
}

void encode(const CacheSpec& spec, std::byte* page, int64_t offset, const float* latent, const float* rope) {
  std::byte* row = page + offset * kToken;
  for (int64_t g = 0; g < kGroups; ++g) {
    const float* x = latent + g * kGroup;
    const float fit = largest_magnitude(x, kGroup) / 448.0f;
    const float scale = spec.power_of_two_scales ? power_of_two(ceil_log2(std::max(fit, 1e-4f))) : std::max(fit, FLT_MIN);
    for (int64_t i = 0; i < kGroup; ++i) put(row, g * kGroup + i, to_fp8_e4m3(x[i] / scale));
    put(row + kScales, g, scale);
  }
  for (int64_t i = 0; i < kRope; ++i) put(row + kRopeBytes, i, to_bf16(rope[i]));
}

void decode(const CacheSpec&, const std::byte* page, int64_t first, int64_t count, float* rows, int64_t row_stride) {
  for (int64_t t = 0; t < count; ++t) {
    const std::byte* row = page + (first + t) * kToken;
    float* out = rows + t * row_stride;
    for (int64_t g = 0; g < kGroups; ++g) {
      const float scale = get<float>(row + kScales, g);
      for (int64_t i = 0; i < kGroup; ++i) out[g * kGroup + i] = to_float(get<fp8_e4m3>(row, g * kGroup + i)) * scale;
    }
    for (int64_t i = 0; i < kRope; ++i) out[kLatent + i] = to_float(get<bf16>(row + kRopeBytes, i));
  }
}

}  // namespace

extern const Format kFp8DsMla = {.id = CacheFormat::fp8_ds_mla,
                                 .name = "fp8_ds_mla",
                                 .summary = "512 e4m3 + 4 f32 scales + 64 bf16 rope: 656 bytes a token",
                                 .validate = validate,
                                 .page_bytes = [](const CacheSpec& s) { return static_cast<size_t>(s.page_size * kToken); },
                                 .value_width = [](const CacheSpec&) { return kLatent; },
                                 .encode = encode,
                                 .decode = decode};

}  // namespace mla::cache
