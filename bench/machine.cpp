#include "bench/machine.hpp"

#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "core/topology.hpp"

namespace mla::bench {
namespace {

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (colon != std::string::npos && line.rfind("model name", 0) == 0) return line.substr(colon + 2);
  }
  return "unknown CPU";
}

}  // namespace

Machine this_machine() {
  return {
      .cpu = cpu_model(),
      .cores = usable_processors(),
      .memory_bytes = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGE_SIZE))};
}

}  // namespace mla::bench
