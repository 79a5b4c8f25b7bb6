// Ranks' memory as they see each other's, flags that they set there, and the piece of a message that a block brings.
#pragma once

#include <cstdint>

namespace mla::cuda::peers {

constexpr int kMostPeers = 16;
constexpr int kMostBlocks = 128;  // of a kernel, one a multiprocessor
constexpr int kFlagBlocks = 48;   // of one that tells by flags
constexpr int kPeerThreads = 512;
constexpr int kPeerWarps = kPeerThreads / 32;
constexpr int kMostParts = 2;                 // of an exchange
constexpr int kFlagBytes = 8 * kPeerThreads;  // of a message, a block that tells by flags, before others help

/// In host memory that the device writes, and reads: why a group cannot go on.
struct PeerFailure {
  /// The rank that did not come, 0 to ranks - 1, above the step's number; kNone: nothing has failed. One word, so that
  /// who sees the rank sees the step.
  unsigned long long late;
  int stop;  ///< set by the host: kernels that wait shall end

  static constexpr unsigned long long kNone = ~0ull;
  static __host__ __device__ unsigned long long of(int rank, int step) {
    return static_cast<unsigned long long>(rank) << 32 | static_cast<unsigned>(step);
  }
};

/// Lines: 128 bytes that arrive whole, 120 of a message and the number of their round. A warp's 32 threads store and
/// read four of them at once, a group.
constexpr int kLineUnits = 15;  // of 8 bytes, a message's, in a line
constexpr int kGroupUnits = 4 * kLineUnits;
constexpr int kGroupBytes = 8 * kGroupUnits;              // of a message
constexpr int kGroups = 4;                                // that a warp stores in a round, at most
constexpr int kStoredBytes = kPeerWarps * kGroups * 512;  // a block's, in a round

/// The ranks' memories as one rank sees them. Those of a group that tells by flags have flags[ranks][kMostBlocks], then
/// two sets of slots, one slot a sender, one region of a slot a block:
///
///     flags | set 0: slot of rank 0, of rank 1, ... | set 1: ...
///
/// Those of a group that sends lines have the sets alone, with kStoredBytes a region. Block b's k-th round uses set k
/// % 2. Who has rank r's flag, or a warp's line, of round k - 1 knows that the block, or warp, has read all of its
/// round k - 2: the set is free again. Nothing depends on other blocks, so kernels may overlap.
struct Peers {
  int rank, ranks;
  std::byte* memory[kMostPeers];
  unsigned* rounds;  ///< [kMostBlocks] of this rank's own, then whether it has failed
  PeerFailure* failure;
  int64_t region_bytes;  ///< of a block in a slot; a multiple of 16
  int blocks;            ///< of a kernel, at most
  bool lines;

  __device__ unsigned* flag(int of, int from, int block) const {
    return reinterpret_cast<unsigned*>(memory[of]) + from * kMostBlocks + block;
  }
  __device__ std::byte* region(int of, int from, unsigned round, int block) const {
    const int64_t slot = (round & 1) * ranks + from;
    return memory[of] + flags_bytes() + (slot * blocks + block) * region_bytes;
  }
  __host__ __device__ int64_t bytes() const { return flags_bytes() + int64_t{2} * ranks * blocks * region_bytes; }
  __host__ __device__ int64_t flags_bytes() const {
    return lines ? 0 : (int64_t{ranks} * kMostBlocks * int64_t{sizeof(unsigned)} + 255) / 256 * 256;
  }
};

__device__ inline void set_flag(unsigned* flag, unsigned round) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(round) : "memory");
}
__device__ inline unsigned read_flag(const unsigned* flag) {
  unsigned value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
__device__ inline uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

/// The block's rounds so far; false where an earlier call has failed. For all threads.
__device__ inline bool begin_rounds(const Peers& p, unsigned& round) {
  round = p.rounds[blockIdx.x];
  return p.rounds[kMostBlocks] == 0;
}

/// What the block's threads have stored for the others is there: they are told.
__device__ inline void tell(const Peers& p, unsigned round) {
  __syncthreads();
  const int other = static_cast<int>(threadIdx.x);
  if (other >= p.ranks || other == p.rank) return;
  __threadfence_system();
  set_flag(p.flag(other, p.rank, static_cast<int>(blockIdx.x)), round);
}

/// Asks ready() until it is, or `other` is too late: false then, and the group has failed. together: the warp's threads
/// ask and give up as one.
template <bool together = false, class Ready>
__device__ inline bool wait_until(const Peers& p, int other, uint64_t deadline_ns, int step, Ready&& ready) {
  const auto any = [](bool x) {
    if constexpr (together) return __any_sync(~0u, x) != 0;
    else return x;
  };
  const uint64_t start = nanoseconds();
  for (int i = 1; !ready(); ++i) {
    if (i % 512 != 0) continue;
    const bool stop = any(*static_cast<volatile int*>(&p.failure->stop) != 0);
    if (!stop && !any(nanoseconds() - start >= deadline_ns)) continue;
    if (!stop) atomicCAS_system(&p.failure->late, PeerFailure::kNone, PeerFailure::of(other, step));
    p.rounds[kMostBlocks] = 1;
    __threadfence_system();
    return false;
  }
  return true;
}

/// What the others have stored for the block is there, too. False when one of them has not come in time: the call is
/// over then. For all threads.
__device__ inline bool wait_for_others(const Peers& p, unsigned round, uint64_t deadline_ns, int step) {
  bool here = true;
  const int other = static_cast<int>(threadIdx.x);
  if (other < p.ranks && other != p.rank) {
    const unsigned* mine = p.flag(p.rank, other, static_cast<int>(blockIdx.x));
    here = wait_until(p, other, deadline_ns, step, [&] { return static_cast<int>(read_flag(mine) - round) >= 0; });
  }
  return __syncthreads_and(here);
}

/// The part of [0, bytes) that falls to a block in a round of at most blocks * region bytes; a multiple of `unit`.
struct Piece {
  int64_t begin, bytes;
};
__device__ inline Piece piece_of(int64_t bytes, int64_t first, int64_t region_bytes, int64_t unit) {
  const int64_t blocks = gridDim.x, left = bytes - first;
  const int64_t here = left < 0 ? 0 : left < blocks * region_bytes ? left : blocks * region_bytes;
  const int64_t each = ((here + blocks - 1) / blocks + unit - 1) / unit * unit, begin = each * blockIdx.x;
  return {first + begin, begin >= here ? 0 : here - begin < each ? here - begin : each};
}

}  // namespace mla::cuda::peers
