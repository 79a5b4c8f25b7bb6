// A cache whose pages lie apart, every byte all ones: NaN in every format, scales included. Pages are handed out in
// random order.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "cases/compare.hpp"
#include "mla/cache.hpp"
#include "mla/index_cache.hpp"

namespace mla::cases {

template <class Spec, class View>
class Poisoned {
 public:
  /// aligned: pages lie at multiples of 16 bytes.
  Poisoned(const Spec& spec, int64_t pages, Random& random, bool aligned = false)
      : spec_(spec), order_(pages), gap_(random.integer(0, 1) == 0 && !aligned ? 24 : 32) {
    if (aligned) gap_ += (16 - spec.page_bytes() % 16) % 16;
    spec.validate();
    const size_t size = static_cast<size_t>(pages) * stride();
    bytes_.reserve(size);
    ask_for_huge_pages(bytes_.data(), size);
    bytes_.assign(size, std::byte{0xff});
    std::iota(order_.begin(), order_.end(), 0);
    for (int64_t i = pages - 1; i > 0; --i) std::swap(order_[i], order_[random.integer(0, i)]);
  }

  View view() { return view(bytes_); }
  /// The same cache on a copy of its bytes.
  View view(std::vector<std::byte>& bytes) const {
    return {spec_, bytes.data(), static_cast<int64_t>(order_.size()), stride()};
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }
  /// The i-th page handed out.
  int32_t page(int64_t i) const { return order_[i]; }
  /// Slot of the i-th token when they fill the pages in that order.
  int32_t slot(int64_t i) const {
    return static_cast<int32_t>(page(i / spec_.page_size) * spec_.page_size + i % spec_.page_size);
  }

 private:
  /// As a Cache's memory does; what reads rows from all over it is timed by that.
  static void ask_for_huge_pages(std::byte* data, size_t size) {
    constexpr size_t kPage = 4096;
    void* first = data;
    if (std::align(kPage, kPage, first, size)) madvise(first, size / kPage * kPage, MADV_HUGEPAGE);
  }
  size_t stride() const { return spec_.page_bytes() + gap_; }

  Spec spec_;
  std::vector<int32_t> order_;
  size_t gap_;  // between pages
  std::vector<std::byte> bytes_;
};

using PoisonedCache = Poisoned<CacheSpec, CacheView>;
using PoisonedIndexCache = Poisoned<IndexCacheSpec, IndexCacheView>;

}  // namespace mla::cases
