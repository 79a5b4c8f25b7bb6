// What Hopper's own kernels take over from generic/: each op's function, whether it serves a call, and the name of the
// kernel that then runs.
#pragma once

#include <array>
#include <span>

#include "backend/backend.hpp"
#include "core/captured_schedule.hpp"

namespace mla::cuda {
class Queue;
}  // namespace mla::cuda

namespace mla::cuda::sm90 {

/// What a call on a caller's own device arrays asks of latent attention beside its op.
struct CallerArrays {
  /// In place of the op's: queries of one request after another, +inf where nothing is seen.
  View<float, Request, Head, Token> lse;
  /// Of all queries of a request alike. attend_sparse: how many slots of each source count; without data: all.
  /// attend_latent: of the first, how many positions there are, in place of items; without data: the stream's previous
  /// kernel writes the items.
  std::array<View<const int32_t, Request>, 2> lengths;
  bool causal = false;  ///< attend_latent by lengths: queries are the last positions, otherwise they see all
  /// attend_latent over a cache of fp8: what queries and rows are multiplied by, beside the op's; null: 1.
  const float *q_scale = nullptr, *k_scale = nullptr;
  /// That are 0, in place of the queue's.
  std::span<unsigned> counters;
  /// attend_latent by lengths: shared by calls that are captured together; null: none.
  CapturedSchedule* schedule = nullptr;
};

/// bf16 queries of 512 + 64 over whole requests of a bf16, f16, fp8 or fp8_ds_mla cache, f16 ones of an f16 cache; at
/// most 128 heads.
bool serves(const backend::GpuModel& gpu, const ops::AttendLatentArgs& a);
std::string kernel(const backend::GpuModel& gpu, const ops::AttendLatentArgs& a);
/// caller, with lengths: the host's items have as many query tokens each, and the longest lengths that there may be.
void attend_latent(const Queue& queue, const ops::AttendLatentArgs& a, const CallerArrays* caller = nullptr);
/// Of calls that the kernels above serve; nothing otherwise.
void schedule_latent(const Queue& queue, const ops::ScheduleLatentArgs& a);

/// bf16 queries over lists of slots of one or two such caches of one format, or of fp8_ds_v4, each row's softmax whole
/// or batch-invariant; largest logits of 16-bit caches and where rows are converted.
bool serves(const backend::GpuModel& gpu, const ops::AttendSparseArgs& a);
std::string kernel(const backend::GpuModel& gpu, const ops::AttendSparseArgs& a);
/// caller: a.items is one item in host memory.
void attend_sparse(const Queue& queue, const ops::AttendSparseArgs& a, const CallerArrays* caller = nullptr);

/// bf16 weights as they are, of 128 / 128 or 192 / 256 outputs of a head's key / value and a multiple of 64 inputs;
/// bf16 products; codes at multiples of 16 bytes, values with the rows innermost.
bool serves(const backend::GpuModel& gpu, const ops::ExpandArgs& a);
std::string kernel(const backend::GpuModel& gpu, const ops::ExpandArgs& a);
void expand(const Queue& queue, const ops::ExpandArgs& a);

/// bf16 and f16 operands of 128 + 64 / 128 and 192 + 64 / 256, or of whole keys, 192 / 128 and 256 / 256; e4m3 ones
/// whose values have the keys innermost; a quantised output only where writes_codes says so.
bool serves(const backend::GpuModel& gpu, const ops::AttendExpandedArgs& a);
bool writes_codes(const ops::AttendExpandedArgs& a);
std::string kernel(const backend::GpuModel& gpu, const ops::AttendExpandedArgs& a);
/// counters: four that are 0, and are left 0, in place of the queue's.
void attend_expanded(const Queue& queue, const ops::AttendExpandedArgs& a, unsigned* counters = nullptr);

}  // namespace mla::cuda::sm90
