// Messages and sums by lines: a warp stores 120 bytes of a message and the number of their round as 128 bytes into the
// receiver's memory, and the receiver's warp of the same number waits until the lines in its own memory have that
// number. Who reads the number has the bytes: the way over the link is gone once, nothing is fenced and no flag is set.
//
// What it rests on: 128 bytes that a warp stores by one instruction, 16 a thread, aligned, come over NVLink whole, and
// are read so by one instruction. NCCL's protocol LL128 rests on the same.
#pragma once

#include "backend/cuda/comm/messages.cuh"
#include "backend/cuda/core/overlap.cuh"

namespace mla::cuda::peers {

/// A thread's 16 bytes of a line: two units of a message, of the eighth thread one and the round.
struct Units {
  uint2 first, second;
};
__device__ inline bool ends_line() { return threadIdx.x % 8 == 7; }
/// Where the thread's units of a message's group begin, in bytes.
__device__ inline int64_t units_at(int64_t group) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return (group * kGroupUnits + lane / 8 * kLineUnits + lane % 8 * 2) * 8;
}
__device__ inline Units load_units(const Rows& m, int64_t group) {
  const int64_t at = units_at(group);
  Units u{};
  if (at < m.bytes) u.first = load_bytes(m, at);
  if (!ends_line() && at + 8 < m.bytes) u.second = load_bytes(m, at + 8);
  return u;
}
__device__ inline void store_units(const Rows& m, int64_t group, const Units& u) {
  const int64_t at = units_at(group);
  if (at < m.bytes) store_bytes(m, at, u.first);
  if (!ends_line() && at + 8 < m.bytes) store_bytes(m, at + 8, u.second);
}
/// to, from: this thread's place.
__device__ inline void send_units(uint4* to, const Units& u, unsigned round) {
  const uint2 end = ends_line() ? uint2{round, round} : u.second;
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(u.first.x), "r"(u.first.y),
               "r"(end.x), "r"(end.y)
               : "memory");
}
__device__ inline Units received_units(const uint4* from) {
  Units u;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(u.first.x), "=r"(u.first.y), "=r"(u.second.x), "=r"(u.second.y)
               : "l"(from)
               : "memory");
  return u;
}

/// One warp's share of the messages between two ranks: groups first, first + stride, ..., `most` of them a round.
///
/// Its first line is sent and waited for even where it has nothing of a message: who has one of round k - 1 knows that
/// the other rank's warp has read its round k - 2, so that its set is free again.
template <int most>
struct WarpLines {
  int64_t first, stride;
  __device__ int64_t group(int j) const { return first + j * stride; }
  __device__ static uint4* place(const Peers& p, int of, int from, unsigned round, int j) {
    const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
    return reinterpret_cast<uint4*>(p.region(of, from, round, static_cast<int>(blockIdx.x))) +
           (warp * kGroups + j) * 32 + lane;
  }
  /// load(group): the thread's units.
  template <class Load>
  __device__ void send(const Peers& p, int to, unsigned round, int64_t groups, Load&& load) const {
    Units u[most];
#pragma unroll
    for (int j = 0; j < most; ++j) u[j] = group(j) < groups ? load(group(j)) : Units{};
    __syncwarp();  // one instruction stores a line
#pragma unroll
    for (int j = 0; j < most; ++j)
      if (j == 0 || group(j) < groups) send_units(place(p, to, p.rank, round, j), u[j], round);
  }
  /// False when they did not come in time; for the warp's threads alike.
  __device__ bool take(const Peers& p, int from, unsigned round, int64_t groups, uint64_t deadline_ns, int step,
                       Units (&u)[most]) const {
    const auto read = [&](int j) {
      u[j] = received_units(place(p, p.rank, from, round, j));
      return __all_sync(~0u, !ends_line() || (u[j].second.x == round && u[j].second.y == round)) != 0;
    };
    __syncwarp();
    // The last one first: it was sent behind the others, and looking for it alone leaves memory to what comes.
    bool here = true;
#pragma unroll
    for (int j = most - 1; j >= 0; --j)
      if (here && (j == 0 || group(j) < groups))
        here = wait_until<true>(p, from, deadline_ns, step, [&] { return read(j); });
    return here;
  }
};
/// Calls work(lines, whether it is the first round) for each round, until it fails.
template <int most, class Work>
__device__ inline void in_rounds(const Peers& p, int64_t groups, Work&& work) {
  take_turn();
  unsigned round;
  if (!begin_rounds(p, round)) return;
  const int64_t warps = int64_t{gridDim.x} * kPeerWarps, warp = int64_t{blockIdx.x} * kPeerWarps + threadIdx.x / 32;
  bool here = true;
  for (int64_t first = 0; here && (first == 0 || first < groups); first += most * warps)
    here = work(WarpLines<most>{first + warp, warps}, ++round, first == 0);
  if (__syncthreads_and(here) && threadIdx.x == 0) p.rounds[blockIdx.x] = round;
}

__host__ __device__ inline int64_t groups_of(int64_t bytes) { return (bytes + kGroupBytes - 1) / kGroupBytes; }

/// groups: of the longest message; most: that a warp takes in a round, 1 or kGroups.
template <int parts, int most>
__global__ void __launch_bounds__(kPeerThreads, 1)
    exchange_lines_kernel(Peers p, const __grid_constant__ Messages m, int64_t groups, uint64_t deadline_ns, int step) {
  // A message's parts one behind the other, each in groups of its own.
  const auto part_of = [](const Rows(&rows)[kMostParts][kMostPeers], int r, int64_t& group) -> const Rows& {
    if (parts == 1) return rows[0][r];
    const int64_t before = groups_of(rows[0][r].bytes);
    const int part = group >= before ? 1 : 0;
    if (part == 1) group -= before;
    return rows[part][r];
  };
  const auto groups_with = [](const Rows(&rows)[kMostParts][kMostPeers], int r) {
    return groups_of(rows[0][r].bytes) + (parts == 2 ? groups_of(rows[1][r].bytes) : 0);
  };
  in_rounds<most>(p, groups, [&](const WarpLines<most>& lines, unsigned round, bool first) {
    for (int i = 1; i < p.ranks; ++i) {  // not all to the same rank at first
      const int r = (p.rank + i) % p.ranks;
      lines.send(p, r, round, groups_with(m.send, r), [&](int64_t group) {
        const Rows& from = part_of(m.send, r, group);
        return load_units(from, group);
      });
    }
    if (first) {
#pragma unroll
      for (int part = 0; part < parts; ++part) {  // meanwhile
        const Rows &from = m.send[part][p.rank], &to = m.receive[part][p.rank];
        if (from.data != to.data) copy_own(from, to, piece_of(from.bytes, 0, from.bytes, 16));
      }
    }
    for (int i = 1; i < p.ranks; ++i) {
      const int r = (p.rank + i) % p.ranks;
      const int64_t come = groups_with(m.receive, r);
      Units u[most];
      if (!lines.take(p, r, round, come, deadline_ns, step, u)) return false;
#pragma unroll
      for (int j = 0; j < most; ++j) {
        int64_t group = lines.group(j);
        if (group >= come) continue;
        const Rows& to = part_of(m.receive, r, group);
        store_units(to, group, u[j]);
      }
    }
    return true;
  });
}

template <class Format, int most>
__global__ void __launch_bounds__(kPeerThreads, 1)
    sum_lines_kernel(Peers p, Terms t, int64_t groups, uint64_t deadline_ns, int step) {
  using N = Number<Format>;
  using Bits = typename N::Bits;
  constexpr int n = 8 / int{sizeof(Bits)};
  const Rows out = one_row(t.out, t.count * int64_t{sizeof(Bits)});
  const int64_t come = groups_of(out.bytes);
  in_rounds<most>(p, groups, [&](const WarpLines<most>& lines, unsigned round, bool) {
    const auto sent = [&](int r) { return one_row(t.send[r], t.sent[r]); };
    for (int i = 1; i < p.ranks; ++i) {
      const int r = (p.rank + i) % p.ranks;
      lines.send(p, r, round, groups_of(t.sent[r]), [&](int64_t group) { return load_units(sent(r), group); });
    }
    float total[most][2][n];
    for (int r = 0; r < p.ranks; ++r) {
      Units u[most];
      if (r != p.rank) {
        if (!lines.take(p, r, round, come, deadline_ns, step, u)) return false;
      } else {
#pragma unroll
        for (int j = 0; j < most; ++j)
          if (lines.group(j) < come) u[j] = load_units(sent(r), lines.group(j));
      }
#pragma unroll
      for (int j = 0; j < most; ++j) {
        Values<Bits, n> x[2];
        memcpy(x, &u[j], 16);
#pragma unroll
        for (int e = 0; e < 2 * n; ++e) {
          const float term = N::read(x[e / n].v[e % n]);
          total[j][e / n][e % n] = r == 0 ? term : total[j][e / n][e % n] + term;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < most; ++j) {
      if (lines.group(j) >= come) continue;
      Values<Bits, n> y[2];
#pragma unroll
      for (int e = 0; e < 2 * n; ++e) y[e / n].v[e % n] = N::write(total[j][e / n][e % n]);
      Units u;
      memcpy(&u, y, 16);
      store_units(out, lines.group(j), u);
    }
    return true;
  });
}

}  // namespace mla::cuda::peers
