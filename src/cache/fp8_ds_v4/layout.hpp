// fp8_ds_v4: 448 numbers in e4m3 with a power-of-two scale for every 64, rope 64 in bf16; keys and values are the whole
// 512.
//
//   page    | Q rows of 576 bytes                       | Q x 8 bytes of scales                        |
//   row     | 448 e4m3 | 64 bf16 rope (128 bytes) |       | 7 UE8M0 | 1 pad | per token
//             group g is bytes 64 g .. 64 g + 63, value = e4m3 * 2^(scale[g] - 127)
//
// Writer scale: 2^ceil(log2(max(amax / 448, 1e-4))); the pad byte is 0.
#pragma once

#include "cache/codec.hpp"
#include "mla/cache.hpp"

namespace mla::cache::fp8_ds_v4 {

constexpr int64_t kLatent = 448, kRope = 64, kGroup = 64, kGroups = kLatent / kGroup, kRow = kLatent + 2 * kRope,
                  kScales = 8;
static_assert(kRow + kScales == 584);

inline int64_t row_at(int64_t offset) { return offset * kRow; }
inline int64_t scales_at(const CacheSpec& spec, int64_t offset) { return spec.page_size * kRow + offset * kScales; }

/// UE8M0: a biased exponent; 255 is NaN, and 0 is 2^-127, subnormal in f32 but exact.
inline float from_ue8m0(uint8_t e) {
  if (e == 255) return std::bit_cast<float>(0x7fc00000u);
  return e == 0 ? 0x1p-127f : power_of_two(e - 127);
}

}  // namespace mla::cache::fp8_ds_v4
