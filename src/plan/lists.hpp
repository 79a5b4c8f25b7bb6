// Lists that steps name: where the host has them, and how they are staged.
#pragma once

#include <cstddef>
#include <span>

#include "mla/plan.hpp"

namespace mla::planning {

struct HostList {
  const char* name = "";
  const void* data = nullptr;
  size_t count = 0, element = 1;  ///< elements, and bytes of one
  std::byte padding{0};           ///< bytes of elements that a later step does not have
  bool rows = false;              ///< token rows: where they count up from 0, kernels take a slice instead
};
HostList host_list(const Plan& plan, const Batch& batch, ListKey key);

template <class T>
std::span<const T> part(const HostList& whole, const ListOf<T>& list) {
  return std::span(static_cast<const T*>(whole.data), whole.count)
      .subspan(static_cast<size_t>(list.begin), static_cast<size_t>(list.count));
}

}  // namespace mla::planning
