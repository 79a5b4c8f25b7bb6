// What makes tests slow: a sanitizer in the build, or an emulator that runs it. Sweeps then take some of their cases;
// the optimised build, some five times as fast as a sanitized one, takes all.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <vector>

namespace mla::test {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

/// Which of a test's cases are taken: one of `plain`, or one of `sanitized` in such a build; a fifth of those where
/// MLA_TEST_EMULATED says that an emulator runs it (scripts/test-arm.sh). The first is, and then at irregular
/// distances, so that cases in nested loops are not always of the same inner ones.
class Sample {
 public:
  explicit Sample(size_t sanitized, size_t plain = 1)
      : share_(1.0 /
               static_cast<double>((kSanitized ? sanitized : plain) * (std::getenv("MLA_TEST_EMULATED") ? 5 : 1))) {}
  bool take() {
    constexpr double kGoldenRatio = 0.6180339887498949;  // its multiples' fractions spread evenly
    return std::fmod(static_cast<double>(seen_++) * kGoldenRatio, 1) < share_;
  }

 private:
  double share_;
  size_t seen_ = 0;
};

/// The same of a list of cases.
template <class T>
std::vector<T> sampled(std::vector<T> all, size_t sanitized, size_t plain = 1) {
  Sample sample(sanitized, plain);
  std::erase_if(all, [&](const T&) { return !sample.take(); });
  return all;
}

}  // namespace mla::test
