// Signals that end a command early, but not its results.
#pragma once

#include <signal.h>

#include <array>
#include <atomic>

namespace mla::cli {

/// While it lives, the first SIGINT, SIGTERM, SIGHUP or SIGPIPE sets stop(), and the next one ends the program; a
/// closed pipe stays harmless. Signals that the program was started to ignore stay ignored. One at a time.
class StopOnSignal {
 public:
  StopOnSignal();
  ~StopOnSignal();
  StopOnSignal(const StopOnSignal&) = delete;
  StopOnSignal& operator=(const StopOnSignal&) = delete;

  const std::atomic<bool>& stop() const;
  /// As a shell reports a program that the signal ended: 128 + its number. 0 while none came.
  int exit_code() const;

 private:
  std::array<struct sigaction, 4> before_{};
};

}  // namespace mla::cli
