// Per-worker working memory of an op, part of the plan's workspace.
#pragma once

#include <cstddef>

namespace mla::ops {

struct Scratch {
  std::byte* data = nullptr;  ///< 64-byte aligned
  size_t per_worker = 0;      ///< a multiple of 64
  std::byte* worker(int index) const { return data + per_worker * static_cast<size_t>(index); }
};

}  // namespace mla::ops
