// Every op, every case of its sweep, against float64, at one thread and at three.
#include <gtest/gtest.h>

#include "cases/case.hpp"

namespace mla::cases {
namespace {

class Conformance : public testing::TestWithParam<CaseType> {};

TEST_P(Conformance, AgreesWithFloat64) {
  ThreadPool one(1), three(3);
  for (const Params& p : GetParam().sweep(20240501)) {
    for (ThreadPool* pool : {&one, &three}) {
      Stream stream(*pool);
      auto c = GetParam().make(p);
      c->run(stream);
      const Verdict v = c->verify();
      EXPECT_TRUE(v.ok) << describe(p, GetParam().op) << " threads=" << pool->threads() << ": error " << v.error
                        << " above bound " << v.bound << "; " << v.detail;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ops, Conformance, testing::ValuesIn(all().begin(), all().end()),
                         [](const auto& i) { return std::string(i.param.op); });

}  // namespace
}  // namespace mla::cases
