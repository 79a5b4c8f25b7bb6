#include <algorithm>
#include <cstring>
#include <vector>

#include "backend/cpu/backend.hpp"
#include "backend/cpu/core/convert.hpp"
#include "backend/cpu/core/rotate.hpp"
#include "cache/format.hpp"
#include "cache/fp8_ds_mla/layout.hpp"
#include "cache/fp8_ds_v4/layout.hpp"

namespace mla::cpu {
namespace {

constexpr int64_t kTokensPerTask = 16;

template <class F>
void for_tokens(Stream& stream, int64_t tokens, F&& f) {
  stream.pool().run((tokens + kTokensPerTask - 1) / kTokensPerTask, [&](int64_t task, int) {
    for (int64_t t = task * kTokensPerTask; t < std::min(tokens, (task + 1) * kTokensPerTask); ++t) f(t);
  });
}

// One row as the format's portable codec writes it, bit for bit; a format without a case here goes through that codec.
void store_row(const CacheSpec& spec, std::byte* page, int64_t offset, const float* latent, const float* rope) {
  auto plain = [&]<class T>(T*, auto... scale) {
    T* row = reinterpret_cast<T*>(page) + offset * spec.entry();
    convert(latent, row, spec.latent, scale...);
    convert(rope, row + spec.latent, spec.rope, scale...);
  };
  switch (spec.format) {
    case CacheFormat::f32: {
      float* row = reinterpret_cast<float*>(page) + offset * spec.entry();
      std::copy_n(rope, spec.rope, std::copy_n(latent, spec.latent, row));
      return;
    }
    case CacheFormat::bf16: return plain(static_cast<bf16*>(nullptr));
    case CacheFormat::f16: return plain(static_cast<f16*>(nullptr));
    case CacheFormat::fp8: return plain(static_cast<fp8_e4m3*>(nullptr), spec.k_scale);
    case CacheFormat::fp8_ds_mla: {
      using namespace cache::fp8_ds_mla;
      std::byte* row = page + offset * kToken;
      for (int64_t g = 0; g < kGroups; ++g) {
        const float scale = writer_scale(spec, largest_magnitude(latent + g * kGroup, kGroup));
        convert(latent + g * kGroup, reinterpret_cast<fp8_e4m3*>(row) + g * kGroup, kGroup, scale);
        cache::put(row + kScalesAt, g, scale);
      }
      return convert(rope, reinterpret_cast<bf16*>(row + kRopeAt), kRope);
    }
    case CacheFormat::fp8_ds_v4: {
      using namespace cache::fp8_ds_v4;
      std::byte *row = page + row_at(offset), *scales = page + scales_at(spec, offset);
      for (int64_t g = 0; g < kGroups; ++g) {
        const int exponent = cache::scale_exponent(largest_magnitude(latent + g * kGroup, kGroup));
        convert(latent + g * kGroup, reinterpret_cast<fp8_e4m3*>(row) + g * kGroup, kGroup,
                cache::power_of_two(exponent));
        cache::put(scales, g, static_cast<uint8_t>(exponent + 127));
      }
      cache::put(scales, kGroups, uint8_t{0});
      return convert(rope, reinterpret_cast<bf16*>(row + kLatent), kRope);
    }
    default: cache::format(spec.format).encode(spec, page, offset, latent, rope);
  }
}

void write(const CacheView& cache, int32_t slot, const float* latent, const float* rope) {
  if (slot < 0) return;
  const int64_t page_size = cache.spec.page_size;
  store_row(cache.spec, cache.page(slot / page_size), slot % page_size, latent, rope);
}

}  // namespace

void append(Stream& stream, const ops::AppendArgs& a) {
  const int64_t tokens = static_cast<int64_t>(a.slots.size());
  const auto narrow = [&]<class T>(T*) {
    const auto kv_c = a.kv_c.as<T>();
    const auto k_pe = a.k_pe.as<T>();
    const CacheSpec& spec = a.cache.spec;
    for_tokens(stream, tokens, [&](int64_t t) {
      if (a.slots[t] < 0) return;
      constexpr int64_t kUsual = 1024;  // elements; every model's row fits
      float usual[kUsual];
      std::vector<float> longer(spec.entry() > kUsual ? static_cast<size_t>(spec.entry()) : 0);
      float* row = longer.empty() ? usual : longer.data();
      convert(kv_c.data() + t * kv_c.template stride<Token>(), row, spec.latent);
      convert(k_pe.data() + t * k_pe.template stride<Token>(), row + spec.latent, spec.rope);
      write(a.cache, a.slots[t], row, row + spec.latent);
    });
  };
  if (a.kv_c.dtype() == Dtype::bf16) return narrow(static_cast<bf16*>(nullptr));
  if (a.kv_c.dtype() == Dtype::f16) return narrow(static_cast<f16*>(nullptr));
  const auto kv_c = a.kv_c.as<float>();
  const auto k_pe = a.k_pe.as<float>();
  for_tokens(stream, tokens, [&](int64_t t) {
    write(a.cache, a.slots[t], kv_c.data() + t * kv_c.stride<Token>(), k_pe.data() + t * k_pe.stride<Token>());
  });
}

namespace {
// Queries beside where they come from.
void place_queries(Stream& stream, const ops::RopeAppendArgs& a) {
  const RotaryTable& table = *a.table;
  const auto from = a.q_pe.as<float>(), to = a.placed.q.as<float>();
  for_tokens(stream, a.query_rows(), [&](int64_t r) {
    const int64_t t = a.placed.tokens.empty() ? r : a.placed.tokens[r];
    for (int64_t h = 0; h < from.extent<Head>(); ++h) {
      float* const row = to.data() + to.offset(r, h, 0);
      std::copy_n(from.data() + from.offset(t, h, 0), from.extent<Rope>(), row);
      if (table.rotates())
        rotate_row(row, table.cos(a.positions[t]), table.sin(a.positions[t]), table.pairs(), table.interleaved());
    }
  });
}
}  // namespace

void rope_append(Stream& stream, const ops::RopeAppendArgs& a) {
  const RotaryTable& table = *a.table;
  if (a.placed.q) place_queries(stream, a);
  const auto q_pe = a.q_pe.as<float>();
  const int64_t heads = a.placed.q ? 0 : q_pe.extent<Head>();  // that turn in their place
  const auto kv_c = a.kv_c.as<float>();
  const auto k_pe = a.k_pe.as<float>();
  for_tokens(stream, static_cast<int64_t>(a.slots.size()), [&](int64_t t) {
    float* k = k_pe.data() + t * k_pe.stride<Token>();
    if (table.rotates()) {
      const float* cos = table.cos(a.positions[t]);
      const float* sin = table.sin(a.positions[t]);
      for (int64_t h = 0; h < heads; ++h) rotate_row(&q_pe(t, h, 0), cos, sin, table.pairs(), table.interleaved());
      rotate_row(k, cos, sin, table.pairs(), table.interleaved());
    }
    write(a.cache, a.slots[t], kv_c.data() + t * kv_c.stride<Token>(), k);
  });
}

void norm_rope_append(Stream& stream, const ops::NormRopeAppendArgs& a) {
  norm(stream, a.norm());  // a pass of its own costs nothing here: rows stay in the caches
  rope_append(stream, a.rope_append());
}

void copy_pages(Stream& stream, const ops::CopyPagesArgs& a) {
  stream.pool().run(static_cast<int64_t>(a.copies.size()), [&](int64_t task, int) {
    std::memmove(a.cache.page(a.copies[task].to), a.cache.page(a.copies[task].from), a.cache.page_bytes);
  });
}

}  // namespace mla::cpu
