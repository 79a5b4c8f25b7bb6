// A step's lists (what its plan and its batch have of items, rows, slots and page numbers) on a GPU, where kernels read
// them.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "mla/batch.hpp"
#include "mla/device.hpp"
#include "mla/plan.hpp"

namespace mla {

/// Memory for one step at a time, on a stream's device. Calls of the layer with that step's plan, on that stream, read
/// its lists there (LayerContext::staged). On the CPU nothing is needed, and nothing is done.
class StagedStep {
 public:
  explicit StagedStep(Stream& stream);
  ~StagedStep();
  StagedStep(const StagedStep&) = delete;
  StagedStep& operator=(const StagedStep&) = delete;

  /// One copy, and what the plan has of steps of no layer's (kStaging), queued on the stream; memory is allocated only
  /// to grow, and graphs that were captured with what was staged before are then not to be launched. The plan and the
  /// batch's arrays must stay where they are and as they are while calls with them are made. After an error nothing is
  /// staged.
  void stage(const Plan& plan, const Batch& batch);

  /// Another step's arrays in the place of those of the last stage(), whose captured calls then serve it (Graph). Plan
  /// and batch may go once this returns. ShapeError naming the array otherwise; the device's arrays are then as they
  /// were. After any other error they are of no step: restage before the next launch.
  ///
  /// Of a step of maxima (plan_maxima): every batch within them, planned with the same options. Rows of the calls'
  /// outputs past the batch's tokens are left alone. The block table may have more columns than the maxima's.
  ///
  /// Of other steps: one that is no larger in any array, takes the same paths, and gives its rows in order where the
  /// first one did. Missing requests become empty ones, missing tokens have no slot; what calls write for them lies in
  /// rows past the step's tokens, and is unspecified.
  void restage(const Plan& plan, const Batch& batch);

  /// Whether calls may be made on this stream with this plan and this batch's arrays: those of the last stage().
  bool serves(const Stream& stream, const Plan& plan, const Batch& batch) const;
  /// Where the device has the whole of a list of `count` elements, and a block table; null on the CPU. ShapeError when
  /// the staged step's are of another size.
  const std::byte* list(ListKey key, size_t count) const;
  const int32_t* block_table(View<const int32_t, Request, Page> table) const;
  /// What ScheduleLatent made; empty where the plan has none.
  std::span<const std::byte> schedule() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace mla
