// What makes tests slow: a sanitizer in the build, or an emulator that runs it. Sweeps then take some of their cases;
// the optimised build, some five times as fast as a sanitized one, takes all.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <vector>

namespace mla::test {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

/// From one case of a sweep to the next that is taken: `plain`, or `sanitized` in such a build; five times as far where
/// MLA_TEST_EMULATED says that an emulator runs it (scripts/test-arm.sh).
inline size_t stride_of_sweep(size_t plain, size_t sanitized) {
  return (kSanitized ? sanitized : plain) * (std::getenv("MLA_TEST_EMULATED") ? 5 : 1);
}

/// Which of a test's cases are taken: every one; of a sanitized build's each so many-th, from the first on.
class Sample {
 public:
  explicit Sample(size_t sanitized) : stride_(stride_of_sweep(1, sanitized)) {}
  bool take() { return seen_++ % stride_ == 0; }

 private:
  size_t stride_, seen_ = 0;
};

/// The same of a test's parameters.
template <class T>
std::vector<T> sampled(std::vector<T> all, size_t sanitized) {
  Sample sample(sanitized);
  std::erase_if(all, [&](const T&) { return !sample.take(); });
  return all;
}

}  // namespace mla::test
