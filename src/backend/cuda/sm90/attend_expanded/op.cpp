#include <algorithm>
#include <string>

#include "backend/cuda/core/aligned.hpp"
#include "backend/cuda/core/queue.hpp"
#include "backend/cuda/sm90/attend_expanded/attend_expanded.hpp"
#include "backend/cuda/sm90/attend_expanded/fp8.hpp"
#include "backend/cuda/sm90/ops.hpp"

namespace mla::cuda::sm90 {
namespace {

// Keys as the kernels take them. Keys that are whole, rotated parts of each head behind its others, are cut in two.
struct Keys {
  AnyView<Key, Head, Nope> nope;
  AnyView<Key, Rope> pe;
  int64_t rope_head_stride = 0;
};
Keys keys_of(const ops::AttendExpandedArgs& a) {
  constexpr int64_t kRope = 64;
  const AnyView<Key, Head, Nope>& k = a.k_nope;
  const int64_t rows = k.extent<Key>(), whole = k.extent<Nope>(), value = a.v.extent<Value>();
  if (a.k_pe.extent<Rope>() > 0 || a.q.dtype() == Dtype::fp8_e4m3 || k.extent<Head>() == 0 ||
      !((whole == 192 && value == 128) || (whole == 256 && value == 256)))
    return {k, a.k_pe};
  const int64_t nope = whole - kRope;
  const auto* const pe = static_cast<const std::byte*>(k.data()) + nope * static_cast<int64_t>(size_of(k.dtype()));
  return {{k.dtype(), k.data(), {rows, k.extent<Head>(), nope}, k.strides()},
          {k.dtype(), pe, {rows, kRope}, {k.stride<Key>(), 1}},
          k.stride<Head>()};
}

// What follows from the host alone.
AttendExpandedArgs arguments(const ops::AttendExpandedArgs& a) {
  int64_t most = 0, masked = 0;
  for (const ExpandedItem& i : a.items) {
    most = std::max<int64_t>(most, i.q_count);
    if (i.masked) masked = std::max<int64_t>(masked, i.k_count);
  }
  const Keys k = keys_of(a);
  return {.q = a.q,
          .k_nope = k.nope,
          .k_pe = k.pe,
          .rope_head_stride = k.rope_head_stride,
          .v = a.v,
          .item_count = static_cast<int64_t>(a.items.size()),
          .mask = masked > 0 ? a.mask : View<const uint32_t, Token, Word>(),
          .most_masked_keys = masked,
          .columns = a.scratch.data,
          .most_queries = most,
          .scale = a.scale,
          .out = a.out,
          .lse = a.lse,
          .accumulate = a.accumulate,
          .quantized = a.quantized};
}

// Codes have no kernel for masks.
bool serves_masks(const ops::AttendExpandedArgs& a) {
  if (!a.mask) return true;
  const AttendExpandedArgs args = arguments(a);
  return !args.mask || (a.q.dtype() == Dtype::bf16 && a.mask.extent<Token>() >= a.q.extent<Token>() &&
                        masked_columns_bytes(args) <= a.scratch.per_worker);
}

}  // namespace

bool serves(const backend::GpuModel& gpu, const ops::AttendExpandedArgs& a) {
  const Keys k = keys_of(a);
  const int64_t nope = k.nope.extent<Nope>(), rope = k.pe.extent<Rope>(), value = a.v.extent<Value>();
  const bool dims = rope == 64 && ((nope == 128 && value == 128) || (nope == 192 && value == 256));
  const bool codes = a.q.dtype() == Dtype::fp8_e4m3;
  const size_t size = size_of(a.q.dtype());
  const bool types = codes
                         ? a.v.stride<Key>() == 1 || a.v.extent<Key>() <= 1
                         : (a.q.dtype() == Dtype::bf16 || a.q.dtype() == Dtype::f16) && a.k_nope.dtype() == a.q.dtype();
  return gpu.hopper && dims && types && serves_masks(a) && !a.items.empty() && a.scale > 0 &&
         aligned(a.q.data(), a.q.stride<Token>(), a.q.stride<Head>(), size) &&
         aligned(k.nope.data(), k.nope.stride<Key>(), k.nope.stride<Head>(), size) &&
         aligned(k.pe.data(), k.pe.stride<Key>(), 0, size) &&
         aligned(a.v.data(), codes ? a.v.stride<Value>() : a.v.stride<Key>(), a.v.stride<Head>(), size) &&
         aligned(a.out.data(), a.out.stride<Token>(), a.out.stride<Head>(), size_of(a.out.dtype()));
}

bool writes_codes(const QuantizedView& y, int64_t value) {
  const bool known = y.spec.kind == OutputKind::fp8 || y.spec.kind == OutputKind::fp8_groups;
  return known && value % 128 == 0 && aligned(y.data, y.row_stride, 0, 1, 8);
}
bool writes_codes(const ops::AttendExpandedArgs& a) {
  return a.out.dtype() == Dtype::f32 && writes_codes(a.quantized, a.v.extent<Value>());
}

std::string kernel(const backend::GpuModel&, const ops::AttendExpandedArgs& a) {
  const Keys k = keys_of(a);
  return std::to_string(k.nope.extent<Nope>()) + " + " + std::to_string(k.pe.extent<Rope>()) + " / " +
         std::to_string(a.v.extent<Value>()) +
         (a.mask                                 ? ", masked"
          : a.q.dtype() != Dtype::fp8_e4m3       ? ""
          : a.sums == ops::ExpandedSums::precise ? ", e4m3"
                                                 : ", e4m3, raw sums");
}

void attend_expanded(const Queue& queue, const ops::AttendExpandedArgs& a, unsigned* counters) {
  if (!counters) counters = queue.counters() + Queue::kSpare;
  int64_t most = 0;
  for (const ExpandedItem& i : a.items) most = std::max<int64_t>(most, i.q_count);
  if (most == 0) return;
  if (a.q.dtype() == Dtype::fp8_e4m3) {
    const ops::ExpandedScales& s = a.scales;
    attend_expanded(queue.stream(),
                    AttendExpandedFp8Args{.q = a.q,
                                          .k_nope = a.k_nope,
                                          .k_pe = a.k_pe,
                                          .v = a.v,
                                          .q_scale = s.q,
                                          .k_scale = s.k,
                                          .v_scale = s.v,
                                          .scale_rows = queue.reads(s.rows, "attend_expanded", "scales' rows"),
                                          .sums = a.sums,
                                          .items = queue.reads(a.items, "attend_expanded", "items"),
                                          .item_count = static_cast<int64_t>(a.items.size()),
                                          .most_queries = most,
                                          .scale = a.scale,
                                          .out = a.out,
                                          .lse = a.lse,
                                          .accumulate = a.accumulate,
                                          .quantized = a.quantized,
                                          .workspace = counters});
    return;
  }
  AttendExpandedArgs args = arguments(a);
  args.items = queue.reads(a.items, "attend_expanded", "items");
  args.workspace = counters;
  attend_expanded(queue.stream(), args);
}

}  // namespace mla::cuda::sm90
