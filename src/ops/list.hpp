// What a step lists (items, rows, slots, page numbers), as an op is given it: the numbers that the host knows, which
// contracts check and launches are sized by, and where a GPU's kernels read them. The two need not be equal: where the
// device's are written later, as a captured step's are, the host's are their bounds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "mla/view.hpp"

namespace mla::ops {

template <class T>
class List : public std::span<const T> {
  using Host = std::span<const T>;

 public:
  using Host::Host;
  /// Without `device` kernels read the host's memory, where they can (pinned, managed).
  constexpr List(Host host = {}, const T* device = nullptr) : Host(host), device_(device) {}

  constexpr const T* device() const { return device_; }

  constexpr List subspan(size_t from, size_t count) const {
    return {Host::subspan(from, count), device_ ? device_ + from : nullptr};
  }

 private:
  const T* device_ = nullptr;
};

class BlockTable : public View<const int32_t, Request, Page> {
  using Host = View<const int32_t, Request, Page>;

 public:
  using Host::Host;
  constexpr BlockTable(const Host& host = {}, const int32_t* device = nullptr) : Host(host), device_(device) {}

  /// With the same strides.
  constexpr const int32_t* device() const { return device_; }

 private:
  const int32_t* device_ = nullptr;
};

}  // namespace mla::ops
