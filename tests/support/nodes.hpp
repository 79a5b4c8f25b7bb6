// Pools over nodes that the machine need not have.
#pragma once

#include <vector>

#include "core/threads.hpp"
#include "core/topology.hpp"

namespace mla::test {

/// So many workers on each node, all on one processor.
inline ThreadPool pool_of_nodes(const std::vector<int>& workers) {
  std::vector<Place> places;
  for (size_t n = 0; n < workers.size(); ++n)
    places.insert(places.end(), static_cast<size_t>(workers[n]), {allowed_processors()[0], static_cast<int>(n) + 3});
  return pool_at(places);
}

}  // namespace mla::test
