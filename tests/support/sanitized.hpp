// Whether this build is instrumented by a sanitizer: its sweeps then take some of their cases, as the optimised build,
// which takes all, is some five times as fast.
#pragma once

namespace mla::test {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace mla::test
