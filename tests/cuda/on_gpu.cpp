// Programs whose every test runs on the first GPU: without one they skip, and say so.
#include <gtest/gtest.h>

#include "mla/device.hpp"
#include "support/count_allocations.hpp"
#include "support/device.hpp"

namespace mla::test {

constinit const Device kDevice{DeviceKind::cuda, 0};
constinit const bool kOnGpu = true;

namespace {

class SkipWithoutGpu : public testing::Environment {
 public:
  void SetUp() override {
    if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
  }
};
const auto* const kSkip = testing::AddGlobalTestEnvironment(new SkipWithoutGpu);

}  // namespace

// The CPU's hook counts what libmla takes from the heap during a call; on a GPU, captures answer that question.
int64_t allocation_count() { return 0; }

}  // namespace mla::test
