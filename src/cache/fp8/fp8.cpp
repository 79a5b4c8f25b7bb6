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
  for (int64_t i = 0; i < spec.latent; ++i) put(row, i, to_fp8_e4m3(latent[i] / spec.k_scale));
  for (int64_t i = 0; i < spec.rope; ++i) put(row, spec.latent + i, to_fp8_e4m3(rope[i] / spec.k_scale));
}

void decode(const CacheSpec& spec, const std::byte* page, int64_t first, int64_t count, float* rows, int64_t row_stride) {
  for (int64_t t = 0; t < count; ++t) {
    const std::byte* row = page + (first + t) * spec.entry();
    for (int64_t i = 0; i < spec.entry(); ++i) rows[t * row_stride + i] = to_float(get<fp8_e4m3>(row, i)) * spec.k_scale;
  }
}

}  // namespace

extern const Format kFp8 = {.id = CacheFormat::fp8,
                            .name = "fp8",
                            .summary = "[latent | rope] in e4m3, one scale for the cache",
                            .validate = [](const CacheSpec&) {},
                            .page_bytes = [](const CacheSpec& s) { return static_cast<size_t>(s.page_size * s.entry()); },
                            .value_width = [](const CacheSpec& s) { return s.latent; },
                            .encode = encode,
                            .decode = decode};

}  // namespace mla::cache
