// What attend_latent and attend_sparse have in common on Hopper: the rows that the kernels take, and the part of a call
// that says where they lie.
#pragma once

#include <limits>

#include "backend/cuda/core/queue.hpp"
#include "backend/cuda/sm90/attention/attention.hpp"
#include "backend/cuda/sm90/ops.hpp"

namespace mla::cuda::sm90 {

inline bool is_16_bit(CacheFormat f) { return f == CacheFormat::bf16 || f == CacheFormat::f16; }
inline bool is_e4m3(CacheFormat f) { return f == CacheFormat::fp8 || f == CacheFormat::fp8_ds_mla; }

constexpr int64_t kMostHeads = 128;

/// Rows that the kernels attend to.
inline bool serves_rows(const CacheSpec& spec) {
  constexpr int64_t kValues = 512;
  const bool rope = spec.rope == 64 || (spec.rope == 0 && is_16_bit(spec.format));
  return (is_16_bit(spec.format) || is_e4m3(spec.format) || spec.format == CacheFormat::fp8_ds_v4) &&
         spec.value_width() == kValues && rope && (spec.format != CacheFormat::fp8 || spec.k_scale > 0);
}

/// Queries and outputs of either op over such a cache; how its pages lie is each op's own to ask. codes: may queries be
/// e4m3, over a cache of fp8?
template <class Args>
bool serves_rows(const Args& a, const CacheView& cache, bool codes = false) {
  const auto dense = [](const auto& v, int64_t width) {
    return v.template stride<Head>() == width && v.template stride<Token>() == v.template extent<Head>() * width;
  };
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  const CacheSpec& spec = cache.spec;
  const int64_t heads = a.q.template extent<Head>();
  const bool half = a.q.dtype() == Dtype::f16 && spec.format == CacheFormat::f16;
  codes = codes && a.q.dtype() == Dtype::fp8_e4m3 && spec.format == CacheFormat::fp8;
  return (half || ((codes || a.q.dtype() == Dtype::bf16) && a.out.dtype() != Dtype::f16)) && serves_rows(spec) &&
         heads <= kMostHeads && dense(a.q, spec.entry()) && dense(a.out, spec.value_width()) &&
         a.q.template extent<Token>() * heads < std::numeric_limits<int32_t>::max() && aligned(a.q.data()) &&
         aligned(a.out.data()) && aligned(cache.data) && a.scale > 0;
}

/// A call without its limits, items, pages and partials.
template <class Args>
AttendLatent call_of(const Queue& queue, const Args& a, const CacheView& cache, const CallerArrays* caller) {
  AttendLatent call;
  call.q = a.q.data(), call.q_dtype = a.q.dtype();
  call.cache = cache.data, call.format = cache.spec.format, call.k_scale = cache.spec.k_scale;
  call.rope = static_cast<int>(cache.spec.rope);
  call.scale = a.scale;
  call.out = a.out.data(), call.out_dtype = a.out.dtype();
  call.lse = a.lse.data();
  call.lse_token_stride = a.lse.template stride<Token>(), call.lse_head_stride = a.lse.template stride<Head>();
  call.counters = queue.counters(), call.counter_count = Queue::kCounters;
  if (caller) {
    call.put_lse(caller->lse);
    call.counters = caller->counters.data(), call.counter_count = caller->counters.size();
  }
  return call;
}

}  // namespace mla::cuda::sm90
