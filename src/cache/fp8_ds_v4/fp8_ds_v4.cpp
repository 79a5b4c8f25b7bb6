#include <string>

#include "cache/format.hpp"
#include "cache/fp8_ds_v4/layout.hpp"
#include "mla/error.hpp"

namespace mla::cache {
namespace {

using namespace fp8_ds_v4;

void validate(const CacheSpec& spec) {
  if (spec.latent != kLatent || spec.rope != kRope)
    throw UnsupportedError("cache format fp8_ds_v4 holds latent 448 and rope 64, not latent " +
                           std::to_string(spec.latent) + " and rope " + std::to_string(spec.rope));
}

void encode(const CacheSpec& spec, std::byte* page, int64_t offset, const float* latent, const float* rope) {
  std::byte* row = page + row_at(offset);
  std::byte* scales = page + scales_at(spec, offset);
  for (int64_t g = 0; g < kGroups; ++g) {
    const float* x = latent + g * kGroup;
    const int exponent = scale_exponent(largest_magnitude(x, kGroup));
    encode_e4m3(x, row + g * kGroup, kGroup, power_of_two(exponent));
    put(scales, g, static_cast<uint8_t>(exponent + 127));
  }
  put(scales, kGroups, uint8_t{0});
  for (int64_t i = 0; i < kRope; ++i) put(row + kLatent, i, to_bf16(rope[i]));
}

void decode(const CacheSpec& spec, const std::byte* page, int64_t first, int64_t count, float* rows,
            int64_t row_stride) {
  for (int64_t t = 0; t < count; ++t) {
    const std::byte* row = page + row_at(first + t);
    const std::byte* scales = page + scales_at(spec, first + t);
    float* out = rows + t * row_stride;
    for (int64_t g = 0; g < kGroups; ++g)
      decode_e4m3(row + g * kGroup, out + g * kGroup, kGroup, from_ue8m0(get<uint8_t>(scales, g)));
    for (int64_t i = 0; i < kRope; ++i) out[kLatent + i] = to_float(get<bf16>(row + kLatent, i));
  }
}

}  // namespace

extern const Format kFp8DsV4 = {
    .id = CacheFormat::fp8_ds_v4,
    .name = "fp8_ds_v4",
    .summary = "448 e4m3 + 64 bf16 rope + 7 UE8M0 scales: 584 bytes a token, values are the whole row",
    .validate = validate,
    .page_bytes = [](const CacheSpec& s) { return static_cast<size_t>(s.page_size * (kRow + kScales)); },
    .value_width = [](const CacheSpec&) { return kLatent + kRope; },
    .encode = encode,
    .decode = decode};

}  // namespace mla::cache
