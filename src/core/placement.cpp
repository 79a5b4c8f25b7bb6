// Linux gives a page memory of the node whose processor touches it first. So a page that lies elsewhere is given back
// to the system, its bytes kept aside, and touched anew by a worker of its node. That needs neither libnuma nor a
// privilege, unlike move_pages, and serves what was filled by one thread as well as what is fresh.
#include "core/placement.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>
#include <thread>

#include "core/counted.hpp"
#include "core/mapped.hpp"
#include "mla/error.hpp"

namespace mla {

std::vector<PlacedPart> placed_parts(uintptr_t address, size_t bytes, size_t page, std::span<const int> workers,
                                     Placement how) {
  size_t all = 0, before = 0;
  for (const int n : workers) all += static_cast<size_t>(n);
  std::vector<size_t> ends;  // of ranges
  for (const int n : workers) {
    before += static_cast<size_t>(n);
    ends.push_back(before == all ? bytes : (bytes / all * before + bytes % all * before / all) / page * page);
  }
  std::vector<PlacedPart> parts;
  size_t node = 0;
  for (size_t at = 0; at < bytes;) {
    size_t end = std::min(bytes, at + kPlacedBlock - (address + at) % kPlacedBlock);
    if (how == Placement::in_turn) {
      node = (address + at) / kPlacedBlock % workers.size();
    } else {
      while (ends[node] <= at) ++node;
      end = std::min(end, ends[node]);
    }
    parts.push_back({static_cast<int>(node), at, end});
    at = end;
  }
  return parts;
}

void Buffer::place(ThreadPool& pool, Placement how) const {
  if (device_.kind != DeviceKind::cpu)
    throw UnsupportedError("place: memory of " + to_string(device_) + " is not near any of the pool's threads");
  if (pool.nodes() == 1 || size_ < kLeastMap) return;
  std::vector<int> workers(static_cast<size_t>(pool.nodes())), first(workers.size());
  for (int w = pool.threads() - 1; w >= 0; --w) {
    ++workers[static_cast<size_t>(pool.node(w))];
    first[static_cast<size_t>(pool.node(w))] = w;
  }
  const auto parts = placed_parts(reinterpret_cast<uintptr_t>(data()), size_,
                                  static_cast<size_t>(sysconf(_SC_PAGESIZE)), workers, how);
  // The caller's thread may be anywhere: it touches nothing, unless its node has no other.
  if (workers[0] > 1) --workers[0], ++first[0];
  std::atomic<int> arrived{0};
  pool.run(pool.threads(), [&](int64_t, int worker) {
    // Each waits for all, so that each has one task and no node does another's.
    ++arrived;
    while (arrived < pool.threads()) std::this_thread::yield();
    const size_t node = static_cast<size_t>(pool.node(worker));
    if (worker < first[node]) return;
    const Buffer kept(std::min(size_, kPlacedBlock));
    int turn = first[node];  // whose the node's next part is
    for (const PlacedPart& part : parts) {
      if (static_cast<size_t>(part.node) != node) continue;
      const bool mine = turn == worker;
      if (++turn == first[node] + workers[node]) turn = first[node];
      if (!mine) continue;
      std::byte* const at = data() + part.begin;
      const size_t count = part.end - part.begin;
      std::memcpy(kept.data(), at, count);
      if (madvise(at, count, MADV_DONTNEED) != 0)
        throw DeviceError("place: the system does not take back " + counted(static_cast<int64_t>(count), "byte") +
                          " of " + readable_bytes(size_) + ": " + std::generic_category().message(errno));
      std::memcpy(at, kept.data(), count);
    }
  });
}

}  // namespace mla
