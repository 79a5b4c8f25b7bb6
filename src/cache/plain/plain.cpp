// f32, bf16, f16: [latent | rope], dense.
//
//   page    | token 0              | token 1              | ... Q tokens
//   token   | latent 0 .. L-1 | rope 0 .. R-1 |   (L + R) * 4 or 2 bytes
#include "cache/codec.hpp"
#include "cache/format.hpp"

namespace mla::cache {
namespace {

template <class T>
size_t token_bytes(const CacheSpec& spec) {
  return static_cast<size_t>(spec.entry()) * sizeof(T);
}

template <class T>
void encode(const CacheSpec& spec, std::byte* page, int64_t offset, const float* latent, const float* rope) {
  std::byte* row = page + static_cast<size_t>(offset) * token_bytes<T>(spec);
  for (int64_t i = 0; i < spec.latent; ++i) put<T>(row, i, from_float<T>(latent[i]));
  for (int64_t i = 0; i < spec.rope; ++i) put<T>(row, spec.latent + i, from_float<T>(rope[i]));
}

template <class T>
void decode(const CacheSpec& spec, const std::byte* page, int64_t first, int64_t count, float* rows,
            int64_t row_stride) {
  for (int64_t t = 0; t < count; ++t) {
    const std::byte* row = page + static_cast<size_t>(first + t) * token_bytes<T>(spec);
    for (int64_t i = 0; i < spec.entry(); ++i) rows[t * row_stride + i] = to_float(get<T>(row, i));
  }
}

template <class T>
constexpr Format plain(CacheFormat id, std::string_view name, std::string_view summary) {
  return {.id = id,
          .name = name,
          .summary = summary,
          .validate = [](const CacheSpec&) {},
          .page_bytes = [](const CacheSpec& s) { return static_cast<size_t>(s.page_size) * token_bytes<T>(s); },
          .value_width = [](const CacheSpec& s) { return s.latent; },
          .encode = encode<T>,
          .decode = decode<T>};
}

}  // namespace

extern const Format kF32 = plain<float>(CacheFormat::f32, "f32", "[latent | rope] in f32: exact");
extern const Format kBf16 = plain<bf16>(CacheFormat::bf16, "bf16", "[latent | rope] in bf16");
extern const Format kF16 = plain<f16>(CacheFormat::f16, "f16", "[latent | rope] in f16");

}  // namespace mla::cache
