// The last way out when memory ends inside code that must not throw.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <new>

namespace mla::cli {

/// For std::set_terminate: CLI11's noexcept look-ups and nlohmann's destructors allocate. An allocation that fails
/// there ends the program with exit code 2 and a line, as one that fails anywhere else does.
[[noreturn]] inline void end_without_memory() {
  try {
    if (std::current_exception()) throw;
  } catch (const std::bad_alloc&) {
    constexpr char text[] = "mla: out of memory\n";
    [[maybe_unused]] const auto written = write(STDERR_FILENO, text, sizeof text - 1);
    _exit(2);
  } catch (...) {
  }
  std::abort();
}

}  // namespace mla::cli
