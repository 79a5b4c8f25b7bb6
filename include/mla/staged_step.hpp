// A step's host arrays (what its plan and its batch list) copied to a GPU, where kernels read them.
#pragma once

#include <cstddef>
#include <memory>

#include "mla/batch.hpp"
#include "mla/device.hpp"
#include "mla/plan.hpp"

namespace mla {

/// Memory for one step at a time, on a stream's device. Calls of the layer on that stream find the staged step's arrays
/// there, until another step takes its place or this goes. On the CPU nothing is needed, and nothing is done.
class StagedStep {
 public:
  explicit StagedStep(Stream& stream);
  ~StagedStep();
  StagedStep(const StagedStep&) = delete;
  StagedStep& operator=(const StagedStep&) = delete;

  /// One copy, queued on the stream; memory is allocated only to grow. Plan and batch must stay where they are and as
  /// they are while calls with them are made.
  void stage(const Plan& plan, const Batch& batch);

  /// Another step's arrays in the place of those of the last stage(), whose captured calls then serve it (Graph). Plan
  /// and batch may go once this returns. ShapeError naming the array otherwise; the device's arrays are then as they
  /// were.
  ///
  /// Of a step of maxima (plan_maxima): every batch within them, planned with the same options. Rows of the calls'
  /// outputs past the batch's tokens are left alone. The block table may have more columns than the maxima's.
  ///
  /// Of other steps: one that is no larger in any array, takes the same paths, and gives its rows in order where the
  /// first one did. Missing requests become empty ones, missing tokens have no slot; what calls write for them lies in
  /// rows past the step's tokens, and is unspecified.
  void restage(const Plan& plan, const Batch& batch);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace mla
