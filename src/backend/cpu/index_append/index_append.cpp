#include <algorithm>
#include <cstring>

#include "backend/cpu/backend.hpp"
#include "backend/cpu/core/convert.hpp"
#include "cache/index/codec.hpp"

namespace mla::cpu {
namespace {

constexpr int64_t kTokensPerTask = 64;

// One key as the portable codec writes it, bit for bit.
void store_key(const IndexCacheSpec& spec, std::byte* page, int64_t offset, const float* key) {
  std::byte* row = page + cache::index::row_at(spec, offset);
  switch (spec.format) {
    case IndexCacheFormat::f32: std::memcpy(row, key, static_cast<size_t>(spec.dim) * sizeof(float)); return;
    case IndexCacheFormat::bf16: convert(key, reinterpret_cast<bf16*>(row), spec.dim); return;
    case IndexCacheFormat::fp8: {
      const float scale = cache::index::writer_scale(largest_magnitude(key, spec.dim), spec.power_of_two_scales);
      convert(key, reinterpret_cast<fp8_e4m3*>(row), spec.dim, scale);
      cache::put(page + cache::index::scale_at(spec, offset), 0, scale);
    }
  }
}

}  // namespace

void index_append(Stream& stream, const ops::IndexAppendArgs& a) {
  const int64_t tokens = static_cast<int64_t>(a.slots.size()), page_size = a.cache.spec.page_size;
  stream.pool().run((tokens + kTokensPerTask - 1) / kTokensPerTask, [&](int64_t task, int) {
    for (int64_t t = task * kTokensPerTask; t < std::min(tokens, (task + 1) * kTokensPerTask); ++t)
      if (const int64_t slot = a.slots[t]; slot >= 0)
        store_key(a.cache.spec, a.cache.page(slot / page_size), slot % page_size,
                  a.keys.data() + t * a.keys.stride<Token>());
  });
}

}  // namespace mla::cpu
