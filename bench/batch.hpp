// A batch that owns its arrays: requests of given lengths over pages of their own.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "mla/batch.hpp"

namespace mla::bench {

struct Lengths {
  int64_t query = 1, context = 0;
};

class OwnedBatch {
 public:
  OwnedBatch(std::span<const Lengths> requests, int64_t page_size);
  Batch view() const;
  int64_t pages() const { return pages_; }  ///< in use, 0 .. pages - 1
  int32_t page(int64_t request, int64_t index) const { return table_[request * width_ + index]; }

 private:
  std::vector<int32_t> starts_{0}, lengths_, table_, slots_;
  int64_t width_ = 0, pages_ = 0;
};

}  // namespace mla::bench
