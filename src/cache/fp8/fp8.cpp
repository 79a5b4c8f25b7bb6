// fp8: [latent | rope] in e4m3 with one scale for the whole cache, the rope part included.
//
//   page    | token 0 | token 1 | ... Q tokens
//   token   | latent 0 .. L-1 | rope 0 .. R-1 |   one byte each, L + R bytes
//
// stored = e4m3(x / k_scale), saturating; value = stored * k_scale.
#include "cache/codec.hpp"
#include "cache/format.hpp"

namespace mla::cache {
namespace {

void encode(const CacheSpec& spec, std::byte* page, int64_t offset, const float* latent, const float* rope) {
  std::byte* row = page + offset * spec.entry();
  encode_e4m3(latent, row, spec.latent, spec.k_scale);
  encode_e4m3(rope, row + spec.latent, spec.rope, spec.k_scale);
}

void decode(const CacheSpec& spec, const std::byte* page, int64_t first, int64_t count, float* rows,
            int64_t row_stride) {
  for (int64_t t = 0; t < count; ++t)
    decode_e4m3(page + (first + t) * spec.entry(), rows + t * row_stride, spec.entry(), spec.k_scale);
}

}  // namespace

extern const Format kFp8 = {
    .id = CacheFormat::fp8,
    .name = "fp8",
    .summary = "[latent | rope] in e4m3, one scale for the cache",
    .validate = [](const CacheSpec&) {},
    .page_bytes = [](const CacheSpec& s) { return static_cast<size_t>(s.page_size * s.entry()); },
    .value_width = [](const CacheSpec& s) { return s.latent; },
    .encode = encode,
    .decode = decode};

}  // namespace mla::cache
