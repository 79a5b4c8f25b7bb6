// An op's working memory, NaN before its first use.
#pragma once

#include <algorithm>
#include <vector>

#include "mla/device.hpp"
#include "ops/scratch.hpp"

namespace mla::cases {

class CaseScratch {
 public:
  /// Of this many bytes a worker. Allocates only when it has to grow.
  ops::Scratch get(const Stream& stream, size_t per_worker) {
    const size_t bytes = per_worker * static_cast<size_t>(stream.workers());
    Buffer& memory = stream.device().kind == DeviceKind::cpu ? own_ : shared();
    if (memory.size() < bytes || memory.device() != stream.device()) {
      const std::vector<std::byte> poison(bytes, std::byte{0xff});
      memory = Buffer::copy_of(poison.data(), bytes, stream.device());
    }
    return {memory.data(), per_worker};
  }

 private:
  // A GPU's is large and the same for all ops.
  static Buffer& shared() {
    static Buffer memory;
    return memory;
  }
  Buffer own_;
};

}  // namespace mla::cases
