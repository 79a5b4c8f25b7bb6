#include <string>

#include "cache/format.hpp"
#include "cache/fp8_ds_mla/layout.hpp"
#include "mla/error.hpp"

namespace mla::cache {
namespace {

using namespace fp8_ds_mla;

void validate(const CacheSpec& spec) {
  if (spec.latent != kLatent || spec.rope != kRope)
    throw UnsupportedError("cache format fp8_ds_mla holds latent 512 and rope 64, not latent " +
                           std::to_string(spec.latent) + " and rope " + std::to_string(spec.rope));
}

void encode(const CacheSpec& spec, std::byte* page, int64_t offset, const float* latent, const float* rope) {
  std::byte* row = page + offset * kToken;
  for (int64_t g = 0; g < kGroups; ++g) {
    const float* x = latent + g * kGroup;
    const float scale = writer_scale(spec, largest_magnitude(x, kGroup));
    encode_e4m3(x, row + g * kGroup, kGroup, scale);
    put(row + kScalesAt, g, scale);
  }
  for (int64_t i = 0; i < kRope; ++i) put(row + kRopeAt, i, to_bf16(rope[i]));
}

void decode(const CacheSpec&, const std::byte* page, int64_t first, int64_t count, float* rows, int64_t row_stride) {
  for (int64_t t = 0; t < count; ++t) {
    const std::byte* row = page + (first + t) * kToken;
    float* out = rows + t * row_stride;
    for (int64_t g = 0; g < kGroups; ++g)
      decode_e4m3(row + g * kGroup, out + g * kGroup, kGroup, get<float>(row + kScalesAt, g));
    for (int64_t i = 0; i < kRope; ++i) out[kLatent + i] = to_float(get<bf16>(row + kRopeAt, i));
  }
}

}  // namespace

extern const Format kFp8DsMla = {
    .id = CacheFormat::fp8_ds_mla,
    .name = "fp8_ds_mla",
    .summary = "512 e4m3 + 4 f32 scales + 64 bf16 rope: 656 bytes a token",
    .validate = validate,
    .page_bytes = [](const CacheSpec& s) { return static_cast<size_t>(s.page_size * kToken); },
    .value_width = [](const CacheSpec&) { return kLatent; },
    .encode = encode,
    .decode = decode};

}  // namespace mla::cache
