// Every op on a GPU, every case of its sweep, against float64: the cases of the CPU's tests as they are, on arrays that
// both read (pinned_new.cpp). Skipped where there is no GPU.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "cases/case.hpp"
#include "mla/device.hpp"
#include "mla/error.hpp"

namespace mla::cases {
namespace {

constexpr Device kGpu{DeviceKind::cuda, 0};

class EveryOpOnGpu : public testing::TestWithParam<CaseType> {
 protected:
  void SetUp() override {
    if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
  }
};

// MLA_TEST_MAX_FLOPS leaves out large cases, for tools that slow a kernel down a thousandfold.
bool wanted(const Case& c) {
  const char* most = std::getenv("MLA_TEST_MAX_FLOPS");
  return !most || c.cost().flops + c.cost().bytes <= std::atof(most);
}

TEST_P(EveryOpOnGpu, AgreesWithFloat64) {
  Stream stream(kGpu);
  for (Dtype activations : {Dtype::f32, Dtype::bf16}) {
    for (Params p : GetParam().sweep(20240501)) {
      p.device = kGpu;
      p.activations = activations;
      const std::string what = describe(p, GetParam().op);
      try {
        auto c = GetParam().make(p);
        if (!wanted(*c)) continue;
        c->run(stream);
        stream.synchronize();
        const Verdict v = c->verify();
        EXPECT_TRUE(v.ok) << what << ": error " << v.error << " above bound " << v.bound << "; " << v.detail;
      } catch (const DeviceError& e) {
        FAIL() << what << ": " << e.what();  // the device does nothing more after an error
      } catch (const Error& e) {
        ADD_FAILURE() << what << ": " << e.what();
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ops, EveryOpOnGpu, testing::ValuesIn(all().begin(), all().end()),
                         [](const auto& i) { return std::string(i.param.op); });

}  // namespace
}  // namespace mla::cases
