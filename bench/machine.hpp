// The machine a measurement was made on.
#pragma once

#include <cstdint>
#include <string>

namespace mla::bench {

struct Machine {
  std::string cpu;  ///< model name as the system gives it
  int cores = 1;    ///< hardware threads this process may use
  uint64_t memory_bytes = 0;
};
Machine this_machine();

}  // namespace mla::bench
