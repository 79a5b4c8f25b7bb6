#include "bench/batch.hpp"

#include <algorithm>

namespace mla::bench {

OwnedBatch::OwnedBatch(std::span<const Lengths> requests, int64_t page_size) {
  auto pages_of = [&](const Lengths& r) { return (r.query + r.context + page_size - 1) / page_size; };
  for (const Lengths& r : requests) width_ = std::max(width_, pages_of(r));
  table_.assign(requests.size() * static_cast<size_t>(width_), -1);
  for (size_t i = 0; i < requests.size(); ++i) {
    const Lengths& r = requests[i];
    starts_.push_back(starts_.back() + static_cast<int32_t>(r.query));
    lengths_.push_back(static_cast<int32_t>(r.query + r.context));
    for (int64_t p = 0; p < pages_of(r); ++p)
      table_[static_cast<int64_t>(i) * width_ + p] = static_cast<int32_t>(pages_++);
    for (int64_t t = r.context; t < r.context + r.query; ++t)
      slots_.push_back(static_cast<int32_t>(page(static_cast<int64_t>(i), t / page_size) * page_size + t % page_size));
  }
}

Batch OwnedBatch::view() const {
  return {starts_, lengths_, {table_.data(), {static_cast<int64_t>(lengths_.size()), width_}}, slots_};
}

}  // namespace mla::bench
