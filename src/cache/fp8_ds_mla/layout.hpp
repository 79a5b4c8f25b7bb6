// fp8_ds_mla: latent 512 in e4m3 with a scale for every 128, rope 64 in bf16. DeepSeek V3.2's cache as FlashMLA lays it
// out.
//
//   token (656 bytes)   0             512                 528              656
//                       | 512 e4m3    | 4 f32 scales      | 64 bf16 rope   |
//                         group g is bytes 128 g .. 128 g + 127, value = e4m3 * scale[g]
//
// Writer scale: 2^ceil(log2(max(amax / 448, 1e-4))), or max(amax / 448, FLT_MIN) when power_of_two_scales is off. The
// reader takes any finite f32 scale as it stands.
#pragma once

#include "cache/codec.hpp"
#include "mla/cache.hpp"

namespace mla::cache::fp8_ds_mla {

constexpr int64_t kLatent = 512, kRope = 64, kGroup = 128, kGroups = kLatent / kGroup;
constexpr int64_t kScalesAt = kLatent, kRopeAt = kScalesAt + kGroups * 4, kToken = kRopeAt + kRope * 2;
static_assert(kToken == 656);

inline float writer_scale(const CacheSpec& spec, float amax) {
  return spec.power_of_two_scales ? power_of_two(scale_exponent(amax)) : std::max(amax / 448.0f, FLT_MIN);
}

}  // namespace mla::cache::fp8_ds_mla
