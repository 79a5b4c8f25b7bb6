#include <algorithm>
#include <cstring>

#include "backend/cpu/backend.hpp"
#include "backend/cpu/core/rotate.hpp"
#include "cache/format.hpp"

namespace mla::cpu {
namespace {

constexpr int64_t kTokensPerTask = 16;

template <class F>
void for_tokens(Stream& stream, int64_t tokens, F&& f) {
  stream.pool().run((tokens + kTokensPerTask - 1) / kTokensPerTask, [&](int64_t task, int) {
    for (int64_t t = task * kTokensPerTask; t < std::min(tokens, (task + 1) * kTokensPerTask); ++t) f(t);
  });
}

void write(const CacheView& cache, const mla::cache::Format& format, int32_t slot, const float* latent, const float* rope) {
  if (slot < 0) return;
  const int64_t page_size = cache.spec.page_size;
  format.encode(cache.spec, cache.page(slot / page_size), slot % page_size, latent, rope);
}

}  // namespace

void append(Stream& stream, const ops::AppendArgs& a) {
  const mla::cache::Format& format = mla::cache::format(a.cache.spec.format);
  for_tokens(stream, static_cast<int64_t>(a.slots.size()),
             [&](int64_t t) { write(a.cache, format, a.slots[t], a.kv_c.data() + t * a.kv_c.stride<Token>(), a.k_pe.data() + t * a.k_pe.stride<Token>()); });
}

void rope_append(Stream& stream, const ops::RopeAppendArgs& a) {
  const mla::cache::Format& format = mla::cache::format(a.cache.spec.format);
  const RotaryTable& table = *a.table;
  for_tokens(stream, static_cast<int64_t>(a.slots.size()), [&](int64_t t) {
    float* k = a.k_pe.data() + t * a.k_pe.stride<Token>();
    if (table.rotates()) {
      const float* cos = table.cos(a.positions[t]);
      const float* sin = table.sin(a.positions[t]);
      for (int64_t h = 0; h < a.q_pe.extent<Head>(); ++h) rotate_row(&a.q_pe(t, h, 0), cos, sin, table.pairs(), table.interleaved());
      rotate_row(k, cos, sin, table.pairs(), table.interleaved());
    }
    write(a.cache, format, a.slots[t], a.kv_c.data() + t * a.kv_c.stride<Token>(), k);
  });
}

void copy_pages(Stream& stream, const ops::CopyPagesArgs& a) {
  stream.pool().run(static_cast<int64_t>(a.copies.size()), [&](int64_t task, int) {
    std::memmove(a.cache.page(a.copies[task].to), a.cache.page(a.copies[task].from), a.cache.spec.page_bytes());
  });
}

}  // namespace mla::cpu
