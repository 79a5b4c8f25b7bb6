// What Hopper's own kernels take over from generic/: each op's function, whether it serves a call, and the name of the
// kernel that then runs.
#pragma once

#include "backend/backend.hpp"

namespace mla::cuda {
class Queue;
backend::GpuModel model_of(const Queue& queue);
}  // namespace mla::cuda

namespace mla::cuda::sm90 {

/// bf16 queries of 512 + 64 over whole requests of a bf16, f16, fp8 or fp8_ds_mla cache, at most 128 heads.
bool serves(const backend::GpuModel& gpu, const ops::AttendLatentArgs& a);
std::string kernel(const backend::GpuModel& gpu, const ops::AttendLatentArgs& a);
/// after_writer: the stream's previous kernel writes the items, which are then waited for before the launch.
void attend_latent(const Queue& queue, const ops::AttendLatentArgs& a, bool after_writer = false);

/// bf16 operands of 128 + 64 / 128 and 192 + 64 / 256.
bool serves(const backend::GpuModel& gpu, const ops::AttendExpandedArgs& a);
std::string kernel(const backend::GpuModel& gpu, const ops::AttendExpandedArgs& a);
void attend_expanded(Stream& stream, const ops::AttendExpandedArgs& a);

}  // namespace mla::cuda::sm90
