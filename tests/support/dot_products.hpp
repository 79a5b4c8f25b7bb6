// Whether kernels of bf16 dot products serve where the CPU has them, which no answer within its bound tells.
#pragma once

#include <gtest/gtest.h>

#include <string_view>

#include "backend/backend.hpp"
#include "backend/cpu/core/target.hpp"
#include "mla/error.hpp"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace mla::test {

#if defined(__aarch64__)
inline constexpr std::string_view kDotTarget = "neon_bf16";
#else
inline constexpr std::string_view kDotTarget = "avx512_bf16";
#endif

/// Asked of the system, not of the library.
inline bool cpu_has_bf16_dot() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16");
#elif defined(__aarch64__) && defined(__linux__) && !defined(__clang__)
  return getauxval(AT_HWCAP2) & HWCAP2_BF16;
#else
  return false;
#endif
}

/// run() computes something of bf16 operands, by other bits than without dot products: they round where f32 does not,
/// and add pairs.
template <class F>
void expect_dot_products(F&& run) {
  struct Unrestricted {
    ~Unrestricted() { cpu::restrict_target(""); }
  } unrestricted;
  if (!cpu_has_bf16_dot()) {
    EXPECT_THROW(cpu::restrict_target(kDotTarget), Error);
    GTEST_SKIP() << "no bf16 dot products";
  }
  cpu::restrict_target(kDotTarget);
  EXPECT_EQ(backend::backend({}).target(), kDotTarget);
  EXPECT_EQ(cpu::bf16_products(), cpu::Bf16Products::dot);
  const auto dots = run();
  cpu::restrict_target("portable");
  EXPECT_EQ(cpu::bf16_products(), cpu::Bf16Products::widened);
  EXPECT_FALSE(dots == run());
}

}  // namespace mla::test
