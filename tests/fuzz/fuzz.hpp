// What fuzz targets share. A target takes any bytes; a check that does not hold, or an exception that is not one of
// libmla's, ends the program, which is how a fuzzer knows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string_view>

#include "core/one_line.hpp"
#include "mla/error.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#define FUZZ_CHECK(...)                                                    \
  do {                                                                     \
    if (!(__VA_ARGS__)) mla::fuzz::fail(#__VA_ARGS__, __FILE__, __LINE__); \
  } while (false)

namespace mla::fuzz {

[[noreturn]] inline void fail(const char* what, const char* file, int line) {
  std::fprintf(stderr, "%s:%d: check failed: %s\n", file, line, what);
  std::abort();
}

/// A message that a person is shown: something, on one line, no longer than messages are.
inline void check_message(std::string_view text) {
  int sign = 0;  // below 0 for a control character; no branch for each byte
  for (const char c : text) sign |= static_cast<unsigned char>(c) - 0x20;
  const bool good = !text.empty() && text.size() <= 2 * kLongestLine && sign >= 0;
  if (!good) std::fprintf(stderr, "message of %zu bytes: %.*s\n", text.size(), 2000, text.data());
  FUZZ_CHECK(good);
}

/// Whether the call was refused, with an error of libmla's that reads well.
template <class F>
bool refused(F&& call) {
  try {
    call();
    return false;
  } catch (const Error& e) {
    check_message(e.what());
    return true;
  }
}

/// Takes values from the front of an input; zeros once it is used up.
class Source {
 public:
  Source(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}
  bool empty() const { return at_ == end_; }
  size_t left() const { return static_cast<size_t>(end_ - at_); }
  template <class T>
  T raw() {
    T x{};
    const size_t n = left() < sizeof(T) ? left() : sizeof(T);
    std::memcpy(&x, at_, n);
    at_ += n;
    return x;
  }
  uint8_t byte() { return raw<uint8_t>(); }
  bool flag() { return byte() & 1; }
  /// From low to high, of as few bytes as hold that many.
  int64_t within(int64_t low, int64_t high) {
    const uint64_t span = static_cast<uint64_t>(high - low) + 1;
    const uint64_t x = span <= 256 ? byte() : span <= 65536 ? raw<uint16_t>() : raw<uint64_t>();
    return low + static_cast<int64_t>(span ? x % span : x);
  }
  /// Mostly a good number, now and then any, or one at the edges of a type.
  int64_t odd(int64_t low, int64_t high) {
    const uint8_t kind = byte();
    if (kind < 232) return within(low, high);
    constexpr int64_t kEdges[] = {0,
                                  -1,
                                  1,
                                  INT32_MAX,
                                  INT32_MIN,
                                  INT64_MAX,
                                  INT64_MIN,
                                  int64_t{1} << 31,
                                  int64_t{1} << 32,
                                  int64_t{1} << 50,
                                  int64_t{1} << 59,
                                  int64_t{1} << 62};
    if (kind < 250) return kEdges[byte() % (sizeof kEdges / sizeof *kEdges)];
    return raw<int64_t>();
  }
  std::string_view rest() {
    const std::string_view text(reinterpret_cast<const char*>(at_), left());
    at_ = end_;
    return text;
  }

 private:
  const uint8_t *at_, *end_;
};

}  // namespace mla::fuzz
