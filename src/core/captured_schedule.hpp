// Who attends what, worked out once on a GPU for several calls that are captured together, from one stream, and attend
// by the same lengths and table: a step's layers. The graph makes it anew at every launch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mla {

struct CapturedSchedule {
  static constexpr size_t kBytes = size_t{1} << 18;
  std::byte* data = nullptr;       ///< of kBytes on the device, 16-byte aligned
  unsigned long long capture = 0;  ///< that the rest is of; 0: none
  const void* stream = nullptr;    ///< cudaStream_t; calls on others that the capture has joined find their own
  std::vector<int64_t> key;        ///< what it is for, as the kernel has it
  bool there = false;
};

}  // namespace mla
