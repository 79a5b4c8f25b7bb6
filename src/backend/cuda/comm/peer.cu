// Ranks' messages and sums by stores into each other's memory: one kernel a call, by lines where all ranks reach each
// other over NVLink, else by flags.
#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "backend/cuda/comm/flags.cuh"
#include "backend/cuda/comm/group.hpp"
#include "backend/cuda/comm/lines.cuh"
#include "backend/cuda/core/check.hpp"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/queue.hpp"
#include "core/gpu.hpp"

namespace mla::cuda {
namespace {

using namespace peers;

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
      auto* data = static_cast<std::byte*>(const_cast<void*>(static_cast<const void*>(x.data)));
      const bool one = x.rows <= 1 || x.apart == x.bytes;
      if (!one && x.rows * x.bytes > std::numeric_limits<uint32_t>::max())
        throw ShapeError("step '" + std::string(e.step) + "': rows of " + std::to_string(x.rows * x.bytes) +
                         " bytes that lie apart, at most 2^32 - 1 are brought at once");
      return Rows{data, x.apart, one ? x.rows * x.bytes : x.bytes, x.rows * x.bytes};
    };
    // Of unknown sizes all ranks have to take as many blocks.
    const int64_t most = e.most_bytes > 0 ? e.most_bytes : room(static_cast<int>(parts));
    for (size_t r = 0; r < ranks; ++r) {
      int64_t sent = 0, received = 0;
      for (size_t part = 0; part < parts; ++part) {
        m.send[part][r] = rows(e.send[part * ranks + r]);
        m.receive[part][r] = rows(e.receive[part * ranks + r]);
        sent += m.send[part][r].bytes, received += m.receive[part][r].bytes;
      }
      if (const int64_t bytes = std::max(sent, received); bytes > most)
        throw ShapeError("step '" + std::string(e.step) + "': a message of " + std::to_string(bytes) + " bytes, " +
                         (e.most_bytes > 0 ? "most_bytes is " : "without most_bytes the group's staging takes ") +
                         std::to_string(most));
    }
    if (peers_.lines)
      return run_lines(
          queue, e.step, e.deadline, groups_of(most) + static_cast<int64_t>(parts) - 1,
          [&](auto of_a_warp, auto&&... arguments) {
            constexpr int n = decltype(of_a_warp)::value;
            launch(parts == 1 ? exchange_lines_kernel<1, n> : exchange_lines_kernel<2, n>, arguments...);
          },
          "exchange of lines", m);
    run(queue, e.step, e.deadline, blocks_of(most, kFlagBytes), [&](const LaunchConfig& config, uint64_t ns, int step) {
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
    if (peers_.lines)
      return for_format(s.dtype, true, [&](auto format, auto) {
        run_lines(
            queue, s.step, s.deadline, groups_of(most),
            [&](auto of_a_warp, auto&&... arguments) {
              launch(sum_lines_kernel<decltype(format), decltype(of_a_warp)::value>, arguments...);
            },
            "sum of lines", t);
      });
    run(queue, s.step, s.deadline, blocks_of(most, kFlagBytes), [&](const LaunchConfig& config, uint64_t ns, int step) {
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
      *failure = {PeerFailure::kNone, 0};
    }
    ~Watch() override { gpu::release_pinned(reinterpret_cast<std::byte*>(failure)); }
    void launching() override {
      if (carrier && meets) barrier({"captured step", patience});
    }
    void check(bool) override {
      const unsigned long long failed = *static_cast<volatile unsigned long long*>(&failure->late);
      if (failed != PeerFailure::kNone) {
        const int late = static_cast<int>(failed >> 32);
        const std::string step = steps.name(static_cast<int>(failed & 0xffffffff));
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

  /// Of a message in one round.
  int64_t room(int parts) const {
    if (peers_.lines) return (int64_t{peers_.blocks} * kPeerWarps * kGroups - (parts - 1)) * kGroupBytes;
    return peers_.blocks * (peers_.region_bytes / parts / 16 * 16);
  }
  int64_t blocks_of(int64_t units, int64_t of_a_block) const {
    return std::clamp<int64_t>((units + of_a_block - 1) / of_a_block, 1, peers_.blocks);
  }
  /// Regions for each rank's messages, twice, in so much memory.
  void lay_out(bool lines, size_t staging_bytes) {
    const int64_t sets = int64_t{2} * peers_.ranks, bytes = static_cast<int64_t>(staging_bytes);
    peers_.lines = lines;
    if (lines) {
      peers_.region_bytes = kStoredBytes;
      peers_.blocks = static_cast<int>(std::clamp<int64_t>(bytes / (sets * kStoredBytes), 1, kMostBlocks));
    } else {
      peers_.blocks = kFlagBlocks;
      peers_.region_bytes = std::max<int64_t>(bytes / (sets * kFlagBlocks) / 256 * 256, 256);
    }
  }

  template <class F>
  void run(Queue& queue, std::string_view step, std::chrono::nanoseconds deadline, int64_t blocks, F&& start) {
    watch_->check(false);
    if (gpu::capturing(queue)) queue.capture(watch_);
    else queue.watch(watch_);
    start(LaunchConfig{.grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(kPeerThreads), .overlap = true},
          static_cast<uint64_t>(deadline.count()), watch_->steps.number_of(step));
  }

  /// Of messages of so many groups at most: a group a warp, while there are warps enough.
  template <class Start, class What>
  void run_lines(Queue& queue, std::string_view step, std::chrono::nanoseconds deadline, int64_t groups, Start&& start,
                 const char* name, const What& what) {
    const int64_t blocks = blocks_of(groups, kPeerWarps);
    run(queue, step, deadline, blocks, [&](const LaunchConfig& config, uint64_t ns, int number) {
      const auto with = [&](auto of_a_warp) {
        start(of_a_warp, config, queue.stream(), step, name, "", peers_, what, groups, ns, number);
      };
      if (groups <= blocks * kPeerWarps) with(std::integral_constant<int, 1>{});
      else with(std::integral_constant<int, kGroups>{});
    });
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

/// Does `device` reach the card over NVLink? Atomic operations on another GPU's memory tell it from PCI Express. A card
/// that this process does not see counts as one that it does not.
bool over_nvlink(int device, const char* card) {
  int other = 0, native = 0;
  if (cudaDeviceGetByPCIBusId(&other, card) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  check(cudaDeviceGetP2PAttribute(&native, cudaDevP2PAttrNativeAtomicSupported, device, other), "communicator",
        "the link between two GPUs");
  return native != 0;
}

/// Once a process for each pair; others in the process may have done so, too.
void enable_peer(int device, int other, const std::string& what) {
  static std::mutex mutex;
  static std::set<std::pair<int, int>> enabled;
  const std::lock_guard lock(mutex);
  if (enabled.contains({device, other})) return;
  const cudaError_t status = cudaDeviceEnablePeerAccess(other, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) cudaGetLastError();
  else check(status, "communicator", what);
  enabled.insert({device, other});
}

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
      enable_peer(mine.device, theirs.device, what);
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
  peers_.rank = rank, peers_.ranks = ranks, peers_.failure = watch_->failure;
  int64_t most_bytes = 0;  // which way is known only when all have said whom they reach how
  for (const bool lines : {false, true}) {
    lay_out(lines, g.staging_bytes);
    most_bytes = std::max(most_bytes, peers_.bytes());
  }
  const auto bytes = static_cast<size_t>(most_bytes);
  const std::shared_ptr<std::byte> own = shared_memory(bytes, device_, "staging of ranks' messages");
  rounds_ = shared_memory((kMostBlocks + 1) * sizeof(unsigned), device_, "rounds of ranks' messages");
  peers_.rounds = reinterpret_cast<unsigned*>(rounds_.get());
  check(cudaMemset(own.get(), 0, bytes), "communicator", "flags");  // and round 0 in all lines
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
  // MLA_PEER_LINES=0 is the way out for a machine whose links do not bring 128 bytes whole.
  const char* const allowed = std::getenv("MLA_PEER_LINES");
  bool lines = allowed == nullptr || std::string_view(allowed) != "0";
  for (int r = 0; r < ranks; ++r) {
    const Home& theirs = homes[static_cast<size_t>(r)];
    memories_[static_cast<size_t>(r)] = r == rank ? own : reach(mine, theirs, r);
    peers_.memory[r] = memories_[static_cast<size_t>(r)].get();
    lines = lines && (r == rank || over_nvlink(device_, theirs.card));
  }
  std::vector<int64_t> all(static_cast<size_t>(ranks), lines);
  g.host.all_gather({"peers' links", g.deadline}, &all[static_cast<size_t>(rank)], all.data(),
                    std::vector<int64_t>(all.size(), int64_t{sizeof(int64_t)}));
  lay_out(std::all_of(all.begin(), all.end(), [](int64_t x) { return x != 0; }), g.staging_bytes);
  // Kernels are loaded now: loading may wait for kernels that wait for this rank.
  cudaFuncAttributes attributes{};
  const auto load = [&](auto kernel, const char* name) {
    check(cudaFuncGetAttributes(&attributes, kernel), "communicator", name);
  };
  load(exchange_lines_kernel<1, 1>, "exchange of lines"), load(exchange_lines_kernel<2, 1>, "exchange of lines");
  load(exchange_lines_kernel<1, kGroups>, "exchange of lines"),
      load(exchange_lines_kernel<2, kGroups>, "exchange of lines");
  load(exchange_kernel<1>, "exchange"), load(exchange_kernel<2>, "exchange");
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16})
    for (const bool is_wide : {false, true})
      for_format(dtype, is_wide, [&](auto format, auto w) {
        load(sum_lines_kernel<decltype(format), 1>, "sum of lines");
        load(sum_lines_kernel<decltype(format), kGroups>, "sum of lines");
        load(sum_kernel<decltype(format), decltype(w)::value>, "sum");
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
