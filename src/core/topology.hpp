// Which processors this process may use, the cores that they are threads of, and the nodes whose memory is near them.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace mla {

/// A processor as the system schedules threads on it: one of a core's hardware threads.
struct Processor {
  int cpu = 0;     ///< the system's number
  int node = 0;    ///< of memory (NUMA): 0 to Topology::nodes - 1, in the order of the system's numbers
  int core = 0;    ///< 0 to Topology::cores - 1, by their lowest processor
  int thread = 0;  ///< of its core: 0 is the first that may be used
  friend bool operator==(const Processor&, const Processor&) = default;
};

struct Topology {
  std::vector<Processor> processors;  ///< every core's first thread, node by node; then the second threads; and so on
  int nodes = 1, cores = 0;
};

/// Linux's description under `root` (/sys/devices/system) of the processors in `allowed`, those that are offline left
/// out. A processor whose siblings are not described, or not sensibly, is a core of its own. Where nodes are not
/// described, or some list is malformed or does not name every processor once, there is one node.
Topology read_topology(const std::filesystem::path& root, std::span<const int> allowed);

/// Processors that the calling thread may use: its affinity mask. Empty when the system does not say.
std::vector<int> allowed_processors();

/// How many these are, at least 1; all that are online when the system does not say. hardware_concurrency() is one or
/// the other, by the C library's version.
int usable_processors();

/// Of the processors that the calling thread may use.
Topology this_topology();

/// "2 nodes, 64 cores, 2 threads a core, 128 processors".
std::string describe(const Topology& t);

/// Where a pool's worker has its place.
struct Place {
  int cpu = 0, node = 0;
  friend bool operator==(const Place&, const Place&) = default;
};

/// A place for each of `threads` workers: the first of Topology::processors, put together by node, so that a node's
/// workers have consecutive numbers. InputError when there are fewer processors.
std::vector<Place> places(const Topology& t, int threads);

}  // namespace mla
