// A step's host arrays (what its plan and its batch list) copied to a GPU, where kernels read them.
#pragma once

#include <cstddef>
#include <memory>

#include "mla/batch.hpp"
#include "mla/device.hpp"
#include "mla/plan.hpp"

namespace mla {

/// While it lives, the layer's calls on the stream with this plan and batch, and with copies of their spans, find their
/// arrays on the device. On the CPU there is nothing to do, and nothing is done.
///
/// One copy, queued on the stream; the host does not wait. Plan and batch must stay where they are.
class StagedStep {
 public:
  StagedStep(Stream& stream, const Plan& plan, const Batch& batch);
  ~StagedStep();
  StagedStep(const StagedStep&) = delete;
  StagedStep& operator=(const StagedStep&) = delete;

  /// Another step's arrays in the place of the first one's, whose captured calls then serve it (Graph): the step must
  /// be no larger in any array, take the same paths, and give its rows in order where the first one did. ShapeError
  /// naming the array otherwise; the device's arrays are then as they were. Missing requests become empty ones, missing
  /// tokens have no slot; what calls write for them is unspecified.
  void restage(Stream& stream, const Plan& plan, const Batch& batch);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace mla
