// On which node each part of a buffer belongs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "mla/device.hpp"

namespace mla {

/// Of memory that is placed in turn, and moved at a time: a huge page, which lies on one node.
constexpr size_t kPlacedBlock = size_t{2} << 20;

/// Bytes [begin, end) of a buffer, within one block of addresses, for the node's workers to touch first.
struct PlacedPart {
  int node;
  size_t begin, end;
  friend bool operator==(const PlacedPart&, const PlacedPart&) = default;
};

/// All of a buffer at `address`, in order. workers: of each node. Ranges end where a page of `page` bytes does; what is
/// placed in turn goes by its address, so that many small buffers lie on all nodes, too.
std::vector<PlacedPart> placed_parts(uintptr_t address, size_t bytes, size_t page, std::span<const int> workers,
                                     Placement how);

}  // namespace mla
