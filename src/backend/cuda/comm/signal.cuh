// Flags that ranks set in each other's memory, and the piece of a message that a block brings.
#pragma once

#include <cstdint>

namespace mla::cuda {

constexpr int kMostPeers = 16;
constexpr int kMostBlocks = 48;  // of a kernel: with 512 threads each they fill NVLink
constexpr int kPeerThreads = 512;
constexpr int kMostParts = 2;  // of an exchange

/// In host memory that the device writes, and reads: why a group cannot go on.
struct PeerFailure {
  int rank;  ///< the one that did not come; -1: nothing has failed
  int step;
  int stop;  ///< set by the host: kernels that wait shall end
};

/// Eight bytes of a short message, each half beside the number of its round: who reads the number has the bytes, and no
/// flag is waited for. Halves are stored and read whole.
struct alignas(16) Word {
  unsigned low, low_round, high, high_round;
};
constexpr int kShortBytes = 8 * kPeerThreads;      // of a message that a block brings so: a word a thread
constexpr int kWords = kPeerThreads + kMostPeers;  // and one from each rank that is there always

/// The ranks' memories as one rank sees them. Each has flags[ranks][kMostBlocks], then two sets of slots, one slot a
/// sender, one region of a slot a block:
///
///     flags | set 0: slot of rank 0, of rank 1, ... | set 1: ... | two sets of words for each part of short messages
///
/// Block b's k-th round uses set k % 2. Who has rank r's flag of round k - 1 knows that r has read all of its round
/// k - 2: the set is free again. Nothing depends on other blocks, so kernels may overlap.
struct Peers {
  int rank, ranks;
  std::byte* memory[kMostPeers];
  unsigned* rounds;  ///< [kMostBlocks] of this rank's own, then whether it has failed
  PeerFailure* failure;
  int64_t region_bytes;  ///< of a block in a slot; a multiple of 16

  __device__ unsigned* flag(int of, int from, int block) const {
    return reinterpret_cast<unsigned*>(memory[of]) + from * kMostBlocks + block;
  }
  __device__ std::byte* region(int of, int from, unsigned round, int block) const {
    const int64_t slot = (round & 1) * ranks + from;
    return memory[of] + flags_bytes(ranks) + (slot * kMostBlocks + block) * region_bytes;
  }
  __device__ Word* words(int of, int from, unsigned round, int part, int block) const {
    const int64_t slots = int64_t{2} * ranks * kMostBlocks,
                  slot = (int64_t{round & 1} * kMostParts + part) * ranks + from;
    return reinterpret_cast<Word*>(memory[of] + flags_bytes(ranks) + slots * region_bytes) +
           (slot * kMostBlocks + block) * kWords;
  }
  __host__ __device__ static int64_t bytes(int ranks, int64_t region_bytes) {
    return flags_bytes(ranks) +
           int64_t{2} * ranks * kMostBlocks * (region_bytes + kMostParts * kWords * int64_t{sizeof(Word)});
  }
  __host__ __device__ static int64_t flags_bytes(int ranks) {
    return (int64_t{ranks} * kMostBlocks * int64_t{sizeof(unsigned)} + 255) / 256 * 256;
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

__device__ inline void store_word(Word* to, uint2 value, unsigned round) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(to), "r"(value.x), "r"(round), "r"(value.y)
               : "memory");
}
__device__ inline Word read_word(const Word* from) {
  Word w;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.low), "=r"(w.low_round), "=r"(w.high), "=r"(w.high_round)
               : "l"(from)
               : "memory");
  return w;
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

/// Asks ready() until it is, or `other` is too late: false then, and the group has failed.
template <class Ready>
__device__ inline bool wait_until(const Peers& p, int other, uint64_t deadline_ns, int step, Ready&& ready) {
  const uint64_t start = nanoseconds();
  for (int i = 1; !ready(); ++i) {
    if (i % 512 != 0) continue;
    const bool stop = *static_cast<volatile int*>(&p.failure->stop) != 0;
    if (!stop && nanoseconds() - start < deadline_ns) continue;
    if (!stop && atomicCAS_system(&p.failure->rank, -1, other) == -1) p.failure->step = step;
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

/// A word that has come from `other`; false as above, for this thread alone.
__device__ inline bool take_word(const Peers& p, int other, unsigned round, int part, int at, uint64_t deadline_ns,
                                 int step, uint2& value) {
  const Word* const from = p.words(p.rank, other, round, part, static_cast<int>(blockIdx.x)) + at;
  Word w;
  const bool here = wait_until(p, other, deadline_ns, step, [&] {
    w = read_word(from);
    return w.low_round == round && w.high_round == round;
  });
  value = {w.low, w.high};
  return here;
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

}  // namespace mla::cuda
