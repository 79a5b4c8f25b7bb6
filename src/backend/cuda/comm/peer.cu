// Ranks' messages and sums by stores into each other's memory: one kernel a call.
//
// A block brings its piece of every message: it stores the piece into its region of the receiver's slot, sets its flag
// there, waits for the others' flags in its own memory, and takes what has come. Blocks of one kernel wait for the same
// blocks of the others' kernels alone.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <string>

#include "backend/cuda/comm/group.hpp"
#include "backend/cuda/comm/signal.cuh"
#include "backend/cuda/core/check.hpp"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/overlap.cuh"
#include "backend/cuda/core/queue.hpp"
#include "core/gpu.hpp"

namespace mla::cuda {
namespace {

/// Bytes that lie as rows; one row: `bytes` of them.
struct Rows {
  std::byte* data;
  int64_t apart;
  int64_t row_bytes, bytes;  // of a row; of all
};
/// Where element i of T lies.
template <class T>
__device__ T* element(const Rows& m, int64_t i) {
  if (m.row_bytes == m.bytes) return reinterpret_cast<T*>(m.data) + i;
  const auto width = static_cast<unsigned>(m.row_bytes / int64_t{sizeof(T)}), at = static_cast<unsigned>(i);
  const unsigned row = at / width;
  return reinterpret_cast<T*>(m.data + row * m.apart) + (at - row * width);
}

// By the block, past the first caches: what is read may have been written by another device.
template <class T, class To, class From>
__device__ void copy_as(const To& to, const From& from, int64_t begin, int64_t n) {
  constexpr int kUnroll = 4;
  int64_t i = threadIdx.x;
  for (; i + (kUnroll - 1) * kPeerThreads < n; i += kUnroll * kPeerThreads) {
    T v[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) v[k] = __ldcg(from(begin + i + k * kPeerThreads));
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) *to(begin + i + k * kPeerThreads) = v[k];
  }
  for (; i < n; i += kPeerThreads) *to(begin + i) = __ldcg(from(begin + i));
}

__device__ inline uint64_t bits_of(const Rows& m) {
  const bool one = m.row_bytes == m.bytes;
  return reinterpret_cast<uint64_t>(m.data) | static_cast<uint64_t>(m.bytes) |
         (one ? 0 : static_cast<uint64_t>(m.row_bytes | m.apart));
}
/// f(element type) with the widest that divides all of it.
template <class F>
__device__ void by_width(uint64_t bits, F&& f) {
  if (bits % 16 == 0) f(uint4{});
  else if (bits % 4 == 0) f(0u);
  else f(static_cast<unsigned char>(0));
}
/// A piece of a message, which lies densely at the other end.
__device__ void copy_out(const Rows& m, const Piece& piece, std::byte* to) {
  by_width(bits_of(m), [&](auto x) {
    using T = decltype(x);
    constexpr int64_t kSize = sizeof(T);
    T* const y = reinterpret_cast<T*>(to) - piece.begin / kSize;
    copy_as<T>([&](int64_t i) { return y + i; }, [&](int64_t i) { return element<T>(m, i); }, piece.begin / kSize,
               piece.bytes / kSize);
  });
}
__device__ void copy_in(const std::byte* from, const Rows& m, const Piece& piece) {
  by_width(bits_of(m), [&](auto x) {
    using T = decltype(x);
    constexpr int64_t kSize = sizeof(T);
    const T* const y = reinterpret_cast<const T*>(from) - piece.begin / kSize;
    copy_as<T>([&](int64_t i) { return element<T>(m, i); }, [&](int64_t i) { return y + i; }, piece.begin / kSize,
               piece.bytes / kSize);
  });
}
__device__ void copy_own(const Rows& from, const Rows& to, const Piece& piece) {
  by_width(bits_of(from) | bits_of(to), [&](auto x) {
    using T = decltype(x);
    constexpr int64_t kSize = sizeof(T);
    copy_as<T>([&](int64_t i) { return element<T>(to, i); }, [&](int64_t i) { return element<T>(from, i); },
               piece.begin / kSize, piece.bytes / kSize);
  });
}

struct Messages {
  Rows send[kMostParts][kMostPeers], receive[kMostParts][kMostPeers];
};

template <int parts>
__global__ void __launch_bounds__(kPeerThreads)
    exchange_kernel(Peers p, const __grid_constant__ Messages m, int64_t most, uint64_t deadline_ns, int step) {
  wait_for_previous_grids();
  allow_next_grid();
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

/// Eight bytes of a message, from its byte `at` on; bytes past its end are 0, or left alone.
__device__ uint2 load_bytes(const Rows& m, int64_t at) {
  if (bits_of(m) % 8 == 0) return __ldcg(element<uint2>(m, at / 8));
  uint2 value{};
  for (int i = 0; i < 8 && at + i < m.bytes; ++i)
    reinterpret_cast<unsigned char*>(&value)[i] = __ldcg(element<unsigned char>(m, at + i));
  return value;
}
__device__ void store_bytes(const Rows& m, int64_t at, uint2 value) {
  if (bits_of(m) % 8 == 0) {
    *element<uint2>(m, at / 8) = value;
    return;
  }
  for (int i = 0; i < 8 && at + i < m.bytes; ++i)
    *element<unsigned char>(m, at + i) = reinterpret_cast<const unsigned char*>(&value)[i];
}

/// Of messages of at most kMostBlocks * kShortBytes each: a word a thread, by way of words that carry their round.
///
/// A word from each rank is waited for even where it has no bytes to send: who has one of round k - 1 knows that the
/// rank's kernel of round k - 2 has ended, so that its set is free again.
template <int parts>
__global__ void __launch_bounds__(kPeerThreads)
    short_exchange_kernel(Peers p, const __grid_constant__ Messages m, uint64_t deadline_ns, int step) {
  wait_for_previous_grids();
  allow_next_grid();
  unsigned round;
  if (!begin_rounds(p, round)) return;
  ++round;
  const int block = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int64_t at = int64_t{block} * kShortBytes + thread * 8;
#pragma unroll
  for (int part = 0; part < parts; ++part)
    for (int i = 1; i < p.ranks; ++i) {
      const int r = (p.rank + i) % p.ranks;
      Word* const to = p.words(r, p.rank, round, part, block);
      const Rows& from = m.send[part][r];
      if (at < from.bytes) store_word(to + thread, load_bytes(from, at), round);
      if (thread == 0) store_word(to + kPeerThreads, {0, 0}, round);
    }
#pragma unroll
  for (int part = 0; part < parts; ++part) {
    const Rows &from = m.send[part][p.rank], &to = m.receive[part][p.rank];
    if (from.data != to.data && at < from.bytes) store_bytes(to, at, load_bytes(from, at));
  }
  bool here = true;
#pragma unroll
  for (int part = 0; part < parts; ++part)
    for (int i = 1; i < p.ranks; ++i) {
      const int r = (p.rank + i) % p.ranks;
      const Rows& to = m.receive[part][r];
      uint2 value;
      if (here && at < to.bytes) {
        here = take_word(p, r, round, part, thread, deadline_ns, step, value);
        if (here) store_bytes(to, at, value);
      }
      if (here && thread == 0) here = take_word(p, r, round, part, kPeerThreads, deadline_ns, step, value);
    }
  if (__syncthreads_and(here) && thread == 0) p.rounds[block] = round;
}

/// T values of n bytes each: 16 bytes, or one element.
template <class T, int n>
struct alignas(n * sizeof(T)) Values {
  T v[n];
};
template <class T, int n>
__device__ Values<T, n> read_values(const T* from) {
  Values<T, n> x;
  if constexpr (sizeof x == 16) {
    const uint4 raw = __ldcg(reinterpret_cast<const uint4*>(from));
    memcpy(&x, &raw, 16);
  } else {
    x.v[0] = *static_cast<const volatile T*>(from);
  }
  return x;
}

template <class Format>
struct Number;  // Bits: as it lies in memory
template <>
struct Number<float> {
  using Bits = float;
  static __device__ float read(float x) { return x; }
  static __device__ float write(float x) { return x; }
};
template <>
struct Number<bf16> {
  using Bits = uint16_t;
  static __device__ float read(uint16_t x) { return __bfloat162float(__ushort_as_bfloat16(x)); }
  static __device__ uint16_t write(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
};
template <>
struct Number<f16> {
  using Bits = uint16_t;
  static __device__ float read(uint16_t x) { return __half2float(__ushort_as_half(x)); }
  static __device__ uint16_t write(float x) { return __half_as_ushort(__float2half_rn(x)); }
};

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

struct Terms {
  const std::byte* send[kMostPeers];
  int64_t sent[kMostPeers];  // bytes
  std::byte* out;
  int64_t count;  // elements
};

template <class Format, bool wide>
__global__ void __launch_bounds__(kPeerThreads)
    sum_kernel(Peers p, Terms t, int64_t most, uint64_t deadline_ns, int step) {
  using N = Number<Format>;
  using Bits = typename N::Bits;
  constexpr int64_t kSize = sizeof(Bits);
  constexpr int n = wide ? 16 / kSize : 1;
  wait_for_previous_grids();
  allow_next_grid();
  unsigned round;
  if (!begin_rounds(p, round)) return;
  const int block = static_cast<int>(blockIdx.x);
  for (int64_t first = 0; first == 0 || first < most; first += gridDim.x * p.region_bytes) {
    ++round;
    for (int i = 1; i < p.ranks; ++i) {
      const int r = (p.rank + i) % p.ranks;
      const Piece piece = piece_of(t.sent[r], first, p.region_bytes, 16);
      copy_out({const_cast<std::byte*>(t.send[r]), 0, t.sent[r], t.sent[r]}, piece, p.region(r, p.rank, round, block));
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

template <class Format>
__global__ void __launch_bounds__(kPeerThreads) short_sum_kernel(Peers p, Terms t, uint64_t deadline_ns, int step) {
  using N = Number<Format>;
  using Bits = typename N::Bits;
  constexpr int n = 8 / int{sizeof(Bits)};
  wait_for_previous_grids();
  allow_next_grid();
  unsigned round;
  if (!begin_rounds(p, round)) return;
  ++round;
  const int block = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int64_t at = int64_t{block} * kShortBytes + thread * 8;
  const auto sent = [&](int r) { return Rows{const_cast<std::byte*>(t.send[r]), 0, t.sent[r], t.sent[r]}; };
  for (int i = 1; i < p.ranks; ++i) {
    const int r = (p.rank + i) % p.ranks;
    Word* const to = p.words(r, p.rank, round, 0, block);
    if (at < t.sent[r]) store_word(to + thread, load_bytes(sent(r), at), round);
    if (thread == 0) store_word(to + kPeerThreads, {0, 0}, round);
  }
  const int64_t bytes = t.count * int64_t{sizeof(Bits)};
  bool here = true;
  uint2 word;
  if (at < bytes) {
    float total[n];
    for (int r = 0; r < p.ranks && here; ++r) {
      if (r == p.rank) word = load_bytes(sent(r), at);
      else here = take_word(p, r, round, 0, thread, deadline_ns, step, word);
      Values<Bits, n> x;
      memcpy(&x, &word, 8);
#pragma unroll
      for (int e = 0; e < n; ++e) total[e] = r == 0 ? N::read(x.v[e]) : total[e] + N::read(x.v[e]);
    }
    Values<Bits, n> y;
#pragma unroll
    for (int e = 0; e < n; ++e) y.v[e] = N::write(total[e]);
    memcpy(&word, &y, 8);
    if (here) store_bytes({t.out, 0, bytes, bytes}, at, word);
  }
  if (thread == 0)
    for (int i = 1; i < p.ranks && here; ++i)
      here = take_word(p, (p.rank + i) % p.ranks, round, 0, kPeerThreads, deadline_ns, step, word);
  if (__syncthreads_and(here) && thread == 0) p.rounds[block] = round;
}

template <class Format, bool wide>
__global__ void __launch_bounds__(kPeerThreads)
    sum_terms_kernel(const std::byte* own, const std::byte* terms, int64_t apart, int rank, int ranks, std::byte* out,
                     int64_t count) {
  using N = Number<Format>;
  using Bits = typename N::Bits;
  constexpr int n = wide ? 16 / int{sizeof(Bits)} : 1;
  const auto of = [&](int r) { return reinterpret_cast<const Bits*>(r == rank ? own : terms + r * apart); };
  add_up<N, n>(of, ranks, reinterpret_cast<Bits*>(out), count, int64_t{blockIdx.x} * kPeerThreads + threadIdx.x,
               int64_t{gridDim.x} * kPeerThreads);
}

bool wide(const void* a, const void* b, int64_t bytes) {
  return (reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | static_cast<uintptr_t>(bytes)) % 16 == 0;
}

/// f(number format, whether values of 16 bytes).
template <class F>
void for_format(Dtype dtype, bool wide, F&& f) {
  const auto with = [&](auto format) {
    if (wide) f(format, std::true_type{});
    else f(format, std::false_type{});
  };
  if (dtype == Dtype::f32) with(float{});
  else if (dtype == Dtype::bf16) with(bf16{});
  else with(f16{});
}

class PeerCarrier final : public DeviceCarrier {
 public:
  explicit PeerCarrier(const DeviceGroup& g);
  Device device() const override { return {DeviceKind::cuda, device_}; }
  bool meets_first() const override { return watch_->meets; }

  void exchange(Queue& queue, const DeviceExchange& e) override {
    Messages m{};
    const size_t ranks = static_cast<size_t>(peers_.ranks), parts = e.send.size() / ranks;
    const auto rows = [&](const auto& x) {
      require_fits(e.step, x.rows * x.bytes, e.most_bytes, parts);
      auto* data = static_cast<std::byte*>(const_cast<void*>(static_cast<const void*>(x.data)));
      const bool one = x.rows <= 1 || x.apart == x.bytes;
      if (!one && x.rows * x.bytes > std::numeric_limits<uint32_t>::max())
        throw ShapeError("step '" + std::string(e.step) + "': rows of " + std::to_string(x.rows * x.bytes) +
                         " bytes that lie apart, at most 2^32 - 1 are brought at once");
      return Rows{data, x.apart, one ? x.rows * x.bytes : x.bytes, x.rows * x.bytes};
    };
    for (size_t i = 0; i < e.send.size(); ++i) {
      m.send[i / ranks][i % ranks] = rows(e.send[i]);
      m.receive[i / ranks][i % ranks] = rows(e.receive[i]);
    }
    // Of unknown sizes all ranks have to take as many blocks.
    const int64_t most = e.most_bytes > 0 ? e.most_bytes : room(parts);
    run(queue, e.step, e.deadline, most, [&](const LaunchConfig& config, uint64_t ns, int step) {
      if (is_short(most))
        launch(parts == 1 ? short_exchange_kernel<1> : short_exchange_kernel<2>, config, queue.stream(), e.step,
               "short exchange", "", peers_, m, ns, step);
      else
        launch(parts == 1 ? exchange_kernel<1> : exchange_kernel<2>, config, queue.stream(), e.step, "exchange", "",
               peers_, m, most, ns, step);
    });
  }

  void sum(Queue& queue, const DeviceSum& s) override {
    Terms t{};
    for (int r = 0; r < peers_.ranks; ++r) {
      const auto& of = s.send[static_cast<size_t>(r)];
      t.send[r] = static_cast<const std::byte*>(of.data), t.sent[r] = static_cast<int64_t>(of.bytes);
    }
    t.out = static_cast<std::byte*>(s.out), t.count = s.count;
    const auto size = static_cast<int64_t>(size_of(s.dtype)), most = s.most * size;
    run(queue, s.step, s.deadline, most, [&](const LaunchConfig& config, uint64_t ns, int step) {
      if (is_short(most))
        return for_format(s.dtype, true, [&](auto format, auto) {
          launch(short_sum_kernel<decltype(format)>, config, queue.stream(), s.step, "short sum", "", peers_, t, ns,
                 step);
        });
      for_format(s.dtype, wide(t.send[peers_.rank], t.out, s.count * size), [&](auto format, auto is_wide) {
        launch(sum_kernel<decltype(format), decltype(is_wide)::value>, config, queue.stream(), s.step, "sum", "",
               peers_, t, most, ns, step);
      });
    });
  }

 private:
  // What outlives the carrier while a stream may be waited for.
  struct Watch final : Watched {
    explicit Watch(const DeviceGroup& g)
        : carrier(&g.carrier), barrier(g.barrier), meets(g.one_process), patience(g.deadline) {
      failure = reinterpret_cast<PeerFailure*>(gpu::allocate_pinned(sizeof(PeerFailure)));
      *failure = {-1, 0, 0};
    }
    ~Watch() override { gpu::release_pinned(reinterpret_cast<std::byte*>(failure)); }
    void launching() override {
      if (carrier && meets) barrier({"captured step", patience});
    }
    void check(bool) override {
      const int late = *static_cast<volatile int*>(&failure->rank);
      if (late >= 0) {
        const std::string step = steps.name(failure->step);
        throw RankError(late, step, step + ": rank " + std::to_string(late) + " did not come before the deadline");
      }
      try {
        if (carrier) carrier->check();
      } catch (const RankError&) {
        *static_cast<volatile int*>(&failure->stop) = 1;
        throw;
      }
    }
    Carrier* carrier;  // null once the group has gone
    std::function<void(const Collective&)> barrier;
    const bool meets;
    const std::chrono::nanoseconds patience;
    PeerFailure* failure;
    Steps steps;
  };

  static bool is_short(int64_t most) { return most <= int64_t{kMostBlocks} * kShortBytes; }
  int64_t room(size_t parts) const {
    return kMostBlocks * (peers_.region_bytes / static_cast<int64_t>(parts) / 16 * 16);
  }
  void require_fits(std::string_view step, int64_t bytes, int64_t most, size_t parts) const {
    const int64_t allowed = most > 0 ? most : room(parts);
    if (bytes > allowed)
      throw ShapeError("step '" + std::string(step) + "': a message of " + std::to_string(bytes) + " bytes, " +
                       (most > 0 ? "most_bytes is " : "without most_bytes the group's staging takes ") +
                       std::to_string(allowed));
  }

  template <class F>
  void run(Queue& queue, std::string_view step, std::chrono::nanoseconds deadline, int64_t most, F&& start) {
    watch_->check(false);
    if (gpu::capturing(queue)) queue.capture(watch_);
    else queue.watch(watch_);
    const int64_t blocks = std::clamp<int64_t>((most + kShortBytes - 1) / kShortBytes, 1, kMostBlocks);
    start(LaunchConfig{.grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(kPeerThreads), .overlap = true},
          static_cast<uint64_t>(deadline.count()), watch_->steps.number_of(step));
  }

  int device_;
  Peers peers_{};
  std::shared_ptr<Watch> watch_;
  std::shared_ptr<std::byte> rounds_;
  std::vector<std::shared_ptr<std::byte>> memories_;  // every rank's: none goes while a kernel may store there

 public:
  ~PeerCarrier() override { watch_->carrier = nullptr; }
};

// Memories of this process's ranks by number: who looks for one finds it, or that its rank has left.
class Registry {
 public:
  static Registry& get() {
    static Registry r;
    return r;
  }
  int64_t add(const std::shared_ptr<std::byte>& memory) {
    const std::lock_guard lock(mutex_);
    std::erase_if(memories_, [](const auto& m) { return m.second.expired(); });
    memories_[++last_] = memory;
    return last_;
  }
  std::shared_ptr<std::byte> find(int64_t number) {
    const std::lock_guard lock(mutex_);
    const auto at = memories_.find(number);
    return at == memories_.end() ? nullptr : at->second.lock();
  }

 private:
  std::mutex mutex_;
  std::map<int64_t, std::weak_ptr<std::byte>> memories_;
  int64_t last_ = 0;
};

// What a rank tells of its memory.
struct Home {
  char machine[64] = {}, card[32] = {};  // card: its place on the bus
  int64_t process = 0;
  int device = 0, unused = 0;
  int64_t memory = 0;  // in its process's registry
  cudaIpcMemHandle_t handle{};
};

std::shared_ptr<std::byte> reach(const Home& mine, const Home& theirs, int rank) {
  const std::string what = "rank " + std::to_string(rank) + "'s memory";
  if (std::strcmp(mine.machine, theirs.machine) != 0)
    throw DeviceError("communicator: " + what + " is on machine " + theirs.machine + ", this is " + mine.machine +
                      "; peers are GPUs of one machine");
  if (theirs.process == mine.process) {
    if (theirs.device != mine.device) {
      int can = 0;
      check(cudaDeviceCanAccessPeer(&can, mine.device, theirs.device), "communicator", what);
      if (!can)
        throw DeviceError("communicator: cuda:" + std::to_string(mine.device) + " does not reach " + what +
                          " on cuda:" + std::to_string(theirs.device));
      const cudaError_t status = cudaDeviceEnablePeerAccess(theirs.device, 0);
      if (status == cudaErrorPeerAccessAlreadyEnabled) cudaGetLastError();
      else check(status, "communicator", what);
    }
    if (std::shared_ptr<std::byte> memory = Registry::get().find(theirs.memory)) return memory;
    throw DeviceError("communicator: " + what + " is gone: the rank has left");
  }
  void* data = nullptr;
  check(cudaIpcOpenMemHandle(&data, theirs.handle, cudaIpcMemLazyEnablePeerAccess), "communicator", what);
  return {static_cast<std::byte*>(data), [](std::byte* p) { cudaIpcCloseMemHandle(p); }};
}

PeerCarrier::PeerCarrier(const DeviceGroup& g)
    : device_(g.device), watch_(std::make_shared<Watch>(g)), memories_(static_cast<size_t>(g.host.ranks())) {
  const int ranks = g.host.ranks(), rank = g.host.rank();
  if (ranks > kMostPeers)
    throw UnsupportedError("communicator: " + std::to_string(ranks) + " ranks over peers, at most " +
                           std::to_string(kMostPeers));
  const auto slots = static_cast<size_t>(2 * ranks * kMostBlocks);
  peers_.rank = rank, peers_.ranks = ranks, peers_.failure = watch_->failure;
  peers_.region_bytes = static_cast<int64_t>(std::max<size_t>(g.staging_bytes / slots / 256 * 256, 256));
  const auto bytes = static_cast<size_t>(Peers::bytes(ranks, peers_.region_bytes));
  const std::shared_ptr<std::byte> own = shared_memory(bytes, device_, "staging of ranks' messages");
  rounds_ = shared_memory((kMostBlocks + 1) * sizeof(unsigned), device_, "rounds of ranks' messages");
  peers_.rounds = reinterpret_cast<unsigned*>(rounds_.get());
  check(cudaMemset(own.get(), 0, bytes), "communicator", "flags");  // round 0 in all words
  check(cudaMemset(rounds_.get(), 0, (kMostBlocks + 1) * sizeof(unsigned)), "communicator", "rounds");
  check(cudaDeviceSynchronize(), "communicator", "flags");

  std::vector<Home> homes(static_cast<size_t>(ranks));
  Home& mine = homes[static_cast<size_t>(rank)];
  gethostname(mine.machine, sizeof mine.machine - 1);
  check(cudaDeviceGetPCIBusId(mine.card, sizeof mine.card, device_), "communicator", "a GPU's place");
  mine.process = getpid(), mine.device = device_, mine.memory = Registry::get().add(own);
  check(cudaIpcGetMemHandle(&mine.handle, own.get()), "communicator", "a handle of the staging");
  const std::vector<int64_t> sizes(static_cast<size_t>(ranks), sizeof(Home));
  g.host.all_gather({"peers' memories", g.deadline}, &mine, homes.data(), sizes);
  // Of two ranks on one GPU, one's kernels would wait for the other's, which may not begin before they end.
  for (size_t a = 0; a < homes.size(); ++a)
    for (size_t b = 0; b < a; ++b)
      if (std::strcmp(homes[a].machine, homes[b].machine) == 0 && std::strcmp(homes[a].card, homes[b].card) == 0)
        throw DeviceError("communicator: ranks " + std::to_string(b) + " and " + std::to_string(a) +
                          " are on one GPU, " + homes[a].card + "; each needs one of its own");
  for (int r = 0; r < ranks; ++r) {
    memories_[static_cast<size_t>(r)] = r == rank ? own : reach(mine, homes[static_cast<size_t>(r)], r);
    peers_.memory[r] = memories_[static_cast<size_t>(r)].get();
  }
  // Kernels are loaded now: loading may wait for kernels that wait for this rank.
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, short_exchange_kernel<1>), "communicator", "short exchange");
  check(cudaFuncGetAttributes(&attributes, short_exchange_kernel<2>), "communicator", "short exchange");
  check(cudaFuncGetAttributes(&attributes, exchange_kernel<1>), "communicator", "exchange");
  check(cudaFuncGetAttributes(&attributes, exchange_kernel<2>), "communicator", "exchange");
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16})
    for (const bool is_wide : {false, true})
      for_format(dtype, is_wide, [&](auto format, auto w) {
        check(cudaFuncGetAttributes(&attributes, short_sum_kernel<decltype(format)>), "communicator", "short sum");
        check(cudaFuncGetAttributes(&attributes, sum_kernel<decltype(format), decltype(w)::value>), "communicator",
              "sum");
      });
  g.host.barrier({"peers", g.deadline});
}

}  // namespace

void sum_terms(cudaStream_t stream, Dtype dtype, const void* own, const std::byte* terms, int64_t apart, int rank,
               int ranks, void* out, int64_t count) {
  if (count == 0) return;
  const auto size = static_cast<int64_t>(size_of(dtype));
  const bool is_wide = wide(own, out, count * size) && wide(terms, terms, apart);
  for_format(dtype, is_wide, [&](auto format, auto w) {
    const int64_t units = decltype(w)::value ? count * size / 16 : count;
    launch(sum_terms_kernel<decltype(format), decltype(w)::value>, strided(units, kPeerThreads, 1024), stream,
           "communicator", "sum_terms", "", static_cast<const std::byte*>(own), terms, apart, rank, ranks,
           static_cast<std::byte*>(out), count);
  });
}

std::unique_ptr<DeviceCarrier> connect_peers(const DeviceGroup& g) { return std::make_unique<PeerCarrier>(g); }

}  // namespace mla::cuda
