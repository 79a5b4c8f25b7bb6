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
#include <string>

#include "backend/cuda/comm/group.hpp"
#include "backend/cuda/comm/signal.cuh"
#include "backend/cuda/core/check.hpp"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/queue.hpp"
#include "core/gpu.hpp"

namespace mla::cuda {
namespace {

template <class T>
__device__ void copy_as(std::byte* to, const std::byte* from, int64_t bytes) {
  constexpr int kUnroll = 4;
  const int64_t n = bytes / int64_t{sizeof(T)};
  T* const y = reinterpret_cast<T*>(to);
  const T* const x = reinterpret_cast<const T*>(from);
  int64_t i = threadIdx.x;
  for (; i + (kUnroll - 1) * kPeerThreads < n; i += kUnroll * kPeerThreads) {
    T v[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) v[k] = __ldcg(x + i + k * kPeerThreads);
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) y[i + k * kPeerThreads] = v[k];
  }
  for (; i < n; i += kPeerThreads) y[i] = __ldcg(x + i);
}
/// By the block. Past the first caches: the source may have been written by another device.
__device__ void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  const auto odd = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | static_cast<uintptr_t>(bytes);
  if (odd % 16 == 0) copy_as<uint4>(to, from, bytes);
  else if (odd % 4 == 0) copy_as<unsigned>(to, from, bytes);
  else copy_as<unsigned char>(to, from, bytes);
}

struct Messages {
  const std::byte* send[kMostPeers];
  std::byte* receive[kMostPeers];
  int64_t sent[kMostPeers], received[kMostPeers];
};

__global__ void __launch_bounds__(kPeerThreads)
    exchange_kernel(Peers p, Messages m, int64_t most, uint64_t deadline_ns, int step) {
  unsigned round;
  if (!begin_rounds(p, round)) return;
  const int block = static_cast<int>(blockIdx.x);
  for (int64_t first = 0; first == 0 || first < most; first += gridDim.x * p.region_bytes) {
    ++round;
    for (int i = 1; i < p.ranks; ++i) {  // not all to the same rank at first
      const int r = (p.rank + i) % p.ranks;
      const Piece piece = piece_of(m.sent[r], first, p.region_bytes, 16);
      copy_bytes(p.region(r, p.rank, round, block), m.send[r] + piece.begin, piece.bytes);
    }
    if (m.send[p.rank] != m.receive[p.rank]) {
      const Piece piece = piece_of(m.sent[p.rank], first, p.region_bytes, 16);
      copy_bytes(m.receive[p.rank] + piece.begin, m.send[p.rank] + piece.begin, piece.bytes);
    }
    if (!meet(p, round, deadline_ns, step)) return;
    for (int i = 1; i < p.ranks; ++i) {
      const int r = (p.rank + i) % p.ranks;
      const Piece piece = piece_of(m.received[r], first, p.region_bytes, 16);
      copy_bytes(m.receive[r] + piece.begin, p.region(p.rank, r, round, block), piece.bytes);
    }
  }
  if (threadIdx.x == 0) p.rounds[block] = round;
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
  unsigned round;
  if (!begin_rounds(p, round)) return;
  const int block = static_cast<int>(blockIdx.x);
  for (int64_t first = 0; first == 0 || first < most; first += gridDim.x * p.region_bytes) {
    ++round;
    for (int i = 1; i < p.ranks; ++i) {
      const int r = (p.rank + i) % p.ranks;
      const Piece piece = piece_of(t.sent[r], first, p.region_bytes, 16);
      copy_bytes(p.region(r, p.rank, round, block), t.send[r] + piece.begin, piece.bytes);
    }
    if (!meet(p, round, deadline_ns, step)) return;
    const Piece piece = piece_of(t.count * kSize, first, p.region_bytes, 16);
    const auto terms = [&](int r) {
      return reinterpret_cast<const Bits*>(r == p.rank ? t.send[r] + piece.begin : p.region(p.rank, r, round, block));
    };
    add_up<N, n>(terms, p.ranks, reinterpret_cast<Bits*>(t.out + piece.begin), piece.bytes / kSize, threadIdx.x,
                 kPeerThreads);
  }
  if (threadIdx.x == 0) p.rounds[block] = round;
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

  void exchange(Queue& queue, const DeviceExchange& e) override {
    Messages m{};
    int64_t most = e.most_bytes;
    for (int r = 0; r < peers_.ranks; ++r) {
      const auto& s = e.send[static_cast<size_t>(r)];
      const auto& got = e.receive[static_cast<size_t>(r)];
      m.send[r] = static_cast<const std::byte*>(s.data), m.sent[r] = static_cast<int64_t>(s.bytes);
      m.receive[r] = static_cast<std::byte*>(got.data), m.received[r] = static_cast<int64_t>(got.bytes);
      require_fits(e.step, m.sent[r], most), require_fits(e.step, m.received[r], most);
    }
    // Of unknown sizes all ranks have to take as many blocks.
    run(queue, e.step, e.deadline, most > 0 ? most : kMostBlocks * peers_.region_bytes, [&](const LaunchConfig& config,
                                                                                        uint64_t ns, int step) {
      launch(exchange_kernel, config, queue.stream(), e.step, "exchange", "", peers_, m, most, ns, step);
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
      for_format(s.dtype, wide(t.send[peers_.rank], t.out, s.count * size), [&](auto format, auto is_wide) {
        launch(sum_kernel<decltype(format), decltype(is_wide)::value>, config, queue.stream(), s.step, "sum", "", peers_,
               t, most, ns, step);
      });
    });
  }

 private:
  // What outlives the carrier while a stream may be waited for.
  struct Watch final : Watched {
    explicit Watch(const DeviceGroup& g) : carrier(&g.carrier) {
      failure = reinterpret_cast<PeerFailure*>(gpu::allocate_pinned(sizeof(PeerFailure)));
      *failure = {-1, 0, 0};
    }
    ~Watch() override { gpu::release_pinned(reinterpret_cast<std::byte*>(failure)); }
    void launched() override {}
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
    Carrier* carrier;
    PeerFailure* failure;
    Steps steps;
  };

  void require_fits(std::string_view step, int64_t bytes, int64_t most) const {
    const int64_t room = most > 0 ? most : kMostBlocks * peers_.region_bytes;
    if (bytes > room)
      throw ShapeError("step '" + std::string(step) + "': a message of " + std::to_string(bytes) + " bytes, " +
                       (most > 0 ? "most_bytes is " : "without most_bytes the group's staging takes ") +
                       std::to_string(room));
  }

  template <class F>
  void run(Queue& queue, std::string_view step, std::chrono::nanoseconds deadline, int64_t most, F&& start) {
    watch_->check(false);
    queue.watch(watch_);
    constexpr int64_t kFewBytes = 4096;  // of a block
    const int64_t blocks = std::clamp<int64_t>((most + kFewBytes - 1) / kFewBytes, 1, kMostBlocks);
    start(LaunchConfig{.grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(kPeerThreads)},
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

// What a rank tells of its memory.
struct Home {
  char machine[64] = {};
  int64_t process = 0;
  int device = 0, unused = 0;
  const std::shared_ptr<std::byte>* memory = nullptr;  // of the same process
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
        throw DeviceError("communicator: cuda:" + std::to_string(mine.device) + " does not reach " + what + " on cuda:" +
                          std::to_string(theirs.device));
      const cudaError_t status = cudaDeviceEnablePeerAccess(theirs.device, 0);
      if (status == cudaErrorPeerAccessAlreadyEnabled) cudaGetLastError();
      else check(status, "communicator", what);
    }
    return *theirs.memory;
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
  const size_t flags = static_cast<size_t>(Peers::flags_bytes(ranks)),
               bytes = flags + slots * static_cast<size_t>(peers_.region_bytes);
  const std::shared_ptr<std::byte> own = shared_memory(bytes, device_, "staging of ranks' messages");
  rounds_ = shared_memory((kMostBlocks + 1) * sizeof(unsigned), device_, "rounds of ranks' messages");
  peers_.rounds = reinterpret_cast<unsigned*>(rounds_.get());
  check(cudaMemset(own.get(), 0, flags), "communicator", "flags");
  check(cudaMemset(rounds_.get(), 0, (kMostBlocks + 1) * sizeof(unsigned)), "communicator", "rounds");
  check(cudaDeviceSynchronize(), "communicator", "flags");

  std::vector<Home> homes(static_cast<size_t>(ranks));
  Home& mine = homes[static_cast<size_t>(rank)];
  gethostname(mine.machine, sizeof mine.machine - 1);
  mine.process = getpid(), mine.device = device_, mine.memory = &own;
  check(cudaIpcGetMemHandle(&mine.handle, own.get()), "communicator", "a handle of the staging");
  const std::vector<int64_t> sizes(static_cast<size_t>(ranks), sizeof(Home));
  g.host.all_gather({"peers' memories", g.deadline}, &mine, homes.data(), sizes);
  for (int r = 0; r < ranks; ++r) {
    memories_[static_cast<size_t>(r)] = r == rank ? own : reach(mine, homes[static_cast<size_t>(r)], r);
    peers_.memory[r] = memories_[static_cast<size_t>(r)].get();
  }
  // Kernels are loaded now: loading may wait for kernels that wait for this rank.
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, exchange_kernel), "communicator", "exchange");
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16})
    for (const bool is_wide : {false, true})
      for_format(dtype, is_wide, [&](auto format, auto w) {
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
