// Every op, every case of its sweep, against float64, at one thread and at three; sanitized, half of them at one of the
// two.
#include <gtest/gtest.h>

#include "backend/cpu/core/target.hpp"
#include "cases/case.hpp"
#include "mla/error.hpp"
#include "support/sanitized.hpp"

namespace mla::cases {
namespace {

class EveryOp : public testing::TestWithParam<CaseType> {};

TEST_P(EveryOp, AgreesWithFloat64) {
  ThreadPool pools[] = {ThreadPool(1), ThreadPool(3)};
  size_t turn = 0;
  for (const Params& p : test::sampled(GetParam().sweep(20240501), 2)) {
    ++turn;
    for (ThreadPool& pool : pools) {
      if (test::kSanitized && &pool != &pools[turn % 2]) continue;
      Stream stream(pool);
      auto c = GetParam().make(p);
      c->run(stream);
      const Verdict v = c->verify();
      EXPECT_TRUE(v.ok) << describe(p, GetParam().op) << " threads=" << pool.threads() << ": error " << v.error
                        << " above bound " << v.bound << "; " << v.detail;
    }
  }
}

// Some cases of some ops' sweeps on every instruction set.
void on_every_target(std::initializer_list<const CaseType*> types) {
  struct Unrestricted {
    ~Unrestricted() { cpu::restrict_target(""); }
  } unrestricted;
  ThreadPool pool(2);
  Stream stream(pool);
  for (const std::string_view target : cpu::targets()) {
    try {
      cpu::restrict_target(target);
    } catch (const Error&) {
      continue;  // not this CPU's
    }
    for (const CaseType* type : types) {
      for (const Params& p : test::sampled(type->sweep(7), 20, 5)) {
        auto c = type->make(p);
        c->run(stream);
        const Verdict v = c->verify();
        EXPECT_TRUE(v.ok) << target << " " << describe(p, type->op) << ": error " << v.error << " above bound "
                          << v.bound << "; " << v.detail;
      }
    }
  }
}

TEST(Conformance, AttentionOnEveryTarget) { on_every_target({&attend_latent, &attend_expanded}); }
TEST(Conformance, SparseOnEveryTarget) { on_every_target({&attend_sparse, &map_indices}); }
TEST(Conformance, ProductsAndNormsOnEveryTarget) { on_every_target({&layer_norm, &project}); }

TEST(Names, OfParametersAreNoBytes) { EXPECT_EQ(testing::PrintToString(all()[0]), all()[0].op); }

INSTANTIATE_TEST_SUITE_P(Ops, EveryOp, testing::ValuesIn(all().begin(), all().end()),
                         [](const auto& i) { return std::string(i.param.op); });

}  // namespace
}  // namespace mla::cases
