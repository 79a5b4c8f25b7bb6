// Messages and sums by flags: a block stores its piece of every message into its region of the receiver's slot, sets
// its flag there, waits for the others' flags in its own memory, and takes what has come. Blocks of one kernel wait for
// the same blocks of the others' kernels alone.
#pragma once

#include "backend/cuda/comm/messages.cuh"
#include "backend/cuda/core/overlap.cuh"

namespace mla::cuda::peers {

/// A piece of a message, which lies densely at the other end.
__device__ inline void copy_out(const Rows& m, const Piece& piece, std::byte* to) {
  by_width(bits_of(m), [&](auto x) {
    using T = decltype(x);
    constexpr int64_t kSize = sizeof(T);
    T* const y = reinterpret_cast<T*>(to) - piece.begin / kSize;
    copy_as<T>([&](int64_t i) { return y + i; }, [&](int64_t i) { return element<T>(m, i); }, piece.begin / kSize,
               piece.bytes / kSize);
  });
}
__device__ inline void copy_in(const std::byte* from, const Rows& m, const Piece& piece) {
  by_width(bits_of(m), [&](auto x) {
    using T = decltype(x);
    constexpr int64_t kSize = sizeof(T);
    const T* const y = reinterpret_cast<const T*>(from) - piece.begin / kSize;
    copy_as<T>([&](int64_t i) { return element<T>(m, i); }, [&](int64_t i) { return y + i; }, piece.begin / kSize,
               piece.bytes / kSize);
  });
}
template <int parts>
__global__ void __launch_bounds__(kPeerThreads)
    exchange_kernel(Peers p, const __grid_constant__ Messages m, int64_t most, uint64_t deadline_ns, int step) {
  take_turn();
  unsigned round;
  if (!begin_rounds(p, round)) return;
  const int block = static_cast<int>(blockIdx.x);
  const int64_t share = p.region_bytes / parts / 16 * 16;  // of a region: each part's
  const auto piece_at = [&](const Rows& rows, int64_t first) { return piece_of(rows.bytes, first, share, 16); };
  for (int64_t first = 0; first == 0 || first < most; first += gridDim.x * share) {
    ++round;
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      for (int i = 1; i < p.ranks; ++i) {  // not all to the same rank at first
        const int r = (p.rank + i) % p.ranks;
        copy_out(m.send[part][r], piece_at(m.send[part][r], first), p.region(r, p.rank, round, block) + part * share);
      }
    }
    tell(p, round);
#pragma unroll
    for (int part = 0; part < parts; ++part) {  // meanwhile
      const Rows &from = m.send[part][p.rank], &to = m.receive[part][p.rank];
      if (from.data != to.data) copy_own(from, to, piece_at(from, first));
    }
    if (!wait_for_others(p, round, deadline_ns, step)) return;
#pragma unroll
    for (int part = 0; part < parts; ++part)
      for (int i = 1; i < p.ranks; ++i) {
        const int r = (p.rank + i) % p.ranks;
        copy_in(p.region(p.rank, r, round, block) + part * share, m.receive[part][r],
                piece_at(m.receive[part][r], first));
      }
  }
  if (threadIdx.x == 0) p.rounds[block] = round;
}

/// out[i] = sum over ranks of terms(r)[i], i < count, by the threads thread, thread + threads, ...
template <class N, int n, class Terms>
__device__ void add_up(const Terms& terms, int ranks, typename N::Bits* out, int64_t count, int64_t thread,
                       int64_t threads) {
  using Bits = typename N::Bits;
  for (int64_t i = thread * n; i < count; i += threads * n) {
    float total[n];
    for (int r = 0; r < ranks; ++r) {
      const Values<Bits, n> x = read_values<Bits, n>(terms(r) + i);
#pragma unroll
      for (int e = 0; e < n; ++e) total[e] = r == 0 ? N::read(x.v[e]) : total[e] + N::read(x.v[e]);
    }
    Values<Bits, n> y;
#pragma unroll
    for (int e = 0; e < n; ++e) y.v[e] = N::write(total[e]);
    *reinterpret_cast<Values<Bits, n>*>(out + i) = y;
  }
}

template <class Format, bool wide>
__global__ void __launch_bounds__(kPeerThreads)
    sum_kernel(Peers p, Terms t, int64_t most, uint64_t deadline_ns, int step) {
  using N = Number<Format>;
  using Bits = typename N::Bits;
  constexpr int64_t kSize = sizeof(Bits);
  constexpr int n = wide ? 16 / kSize : 1;
  take_turn();
  unsigned round;
  if (!begin_rounds(p, round)) return;
  const int block = static_cast<int>(blockIdx.x);
  for (int64_t first = 0; first == 0 || first < most; first += gridDim.x * p.region_bytes) {
    ++round;
    for (int i = 1; i < p.ranks; ++i) {
      const int r = (p.rank + i) % p.ranks;
      const Piece piece = piece_of(t.sent[r], first, p.region_bytes, 16);
      copy_out(one_row(t.send[r], t.sent[r]), piece, p.region(r, p.rank, round, block));
    }
    tell(p, round);
    if (!wait_for_others(p, round, deadline_ns, step)) return;
    const Piece piece = piece_of(t.count * kSize, first, p.region_bytes, 16);
    const auto terms = [&](int r) {
      return reinterpret_cast<const Bits*>(r == p.rank ? t.send[r] + piece.begin : p.region(p.rank, r, round, block));
    };
    add_up<N, n>(terms, p.ranks, reinterpret_cast<Bits*>(t.out + piece.begin), piece.bytes / kSize, threadIdx.x,
                 kPeerThreads);
  }
  if (threadIdx.x == 0) p.rounds[block] = round;
}

}  // namespace mla::cuda::peers
