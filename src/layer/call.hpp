// Calls of ops: run, under a profile where there is one.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string_view>
#include <type_traits>

#ifdef MLA_NVTX
#include <nvtx3/nvToolsExt.h>
#endif

#include "backend/run.hpp"
#include "core/gpu.hpp"
#include "mla/layer.hpp"

namespace mla::layer {

#ifdef MLA_NVTX
/// The op's name over what the host queues for it, for NVIDIA's profilers; next to nothing when none is attached.
class NamedRange {
 public:
  explicit NamedRange(std::string_view name) { nvtxRangePushA(name.data()); }  // a literal: it ends with a zero
  ~NamedRange() { nvtxRangePop(); }
  NamedRange(const NamedRange&) = delete;
  NamedRange& operator=(const NamedRange&) = delete;
};
#endif

/// ops::cost with the slots, in memory of the stream's device, read back first; waits for the stream, when it is
/// called. The arrays that args borrows must live until then.
std::function<Profile::Work()> work_of_selection(const Stream& stream, const ops::AttendSparseArgs& args);

/// Costs follow from what the host has, but for the slots of a selection: those cannot be read while the stream is
/// held, and may be overwritten once it is not.
template <class Args>
std::function<Profile::Work()> work_on_gpu(Stream& stream, const Args& args) {
  const auto known = [](Profile::Work work) { return [work] { return work; }; };
  if constexpr (std::is_same_v<Args, ops::AttendSparseArgs>) {
    const auto work = work_of_selection(stream, args);
    if (gpu::held(stream.queue())) return work;
    return known(work());
  } else {
    const ops::Cost cost = ops::cost(args);
    return known({cost.bytes, cost.flops});
  }
}

/// Under the profile, where there is one: work of known cost that `run` does, or queues on a GPU.
template <class Run>
void timed(Stream& stream, Profile* profile, std::string_view name, const ops::Cost& cost, Run&& run) {
  if (!profile) return run();
  if (stream.device().kind == DeviceKind::cuda) {
    const gpu::OnDevice on(stream.device());
    auto watch = std::make_unique<gpu::Stopwatch>();
    watch->start(stream.queue());
    run();
    watch->stop(stream.queue());
    return profile->add(name, std::move(watch), [cost] { return Profile::Work{cost.bytes, cost.flops}; });
  }
  const auto start = std::chrono::steady_clock::now();
  run();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  profile->add(name, seconds.count(), cost.bytes, cost.flops);
}

template <class Args>
void call(Stream& stream, Profile* profile, std::string_view name, const Args& args) {
#ifdef MLA_NVTX
  const NamedRange range(name);
#endif
  if (!profile) return ops::run(stream, args);
  if (stream.device().kind == DeviceKind::cuda) {
    const gpu::OnDevice on(stream.device());
    auto watch = std::make_unique<gpu::Stopwatch>();
    watch->start(stream.queue());
    ops::run(stream, args);
    watch->stop(stream.queue());
    profile->add(name, std::move(watch), work_on_gpu(stream, args));
    return;
  }
  timed(stream, profile, name, ops::cost(args), [&] { ops::run(stream, args); });
}

}  // namespace mla::layer
