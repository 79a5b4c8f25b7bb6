#include "mla/communicator.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "comm/carrier.hpp"
#include "comm/on_device.hpp"
#include "comm/transport.hpp"
#include "core/even_ranges.hpp"
#include "core/gpu.hpp"

namespace mla {
namespace {

constexpr int64_t kMostBytes = int64_t{1} << 46;  // of one call and rank; sums of it do not wrap
constexpr int64_t kBlock = 1024;                  // elements of a sum that stay in the first cache

[[noreturn]] void refuse(const Collective& call, const std::string& text) {
  throw ShapeError("step '" + std::string(call.step) + "': " + text);
}

int64_t checked(const Collective& call, const std::string& name, int64_t value) {
  if (value < 0 || value > kMostBytes)
    refuse(call, name + " is " + std::to_string(value) + ", allowed 0 to " + std::to_string(kMostBytes));
  return value;
}

// Where each rank's part begins, the end last.
std::vector<int64_t> starts(const Collective& call, const char* name, std::span<const int64_t> parts, int ranks) {
  if (std::ssize(parts) != ranks)
    refuse(call,
           std::string(name) + " has " + std::to_string(parts.size()) + " entries, ranks are " + std::to_string(ranks));
  std::vector<int64_t> at(1, 0);
  for (int r = 0; r < ranks; ++r)
    at.push_back(checked(call, std::string(name) + " of rank " + std::to_string(r) + " and those before it",
                         at.back() + checked(call, std::string(name) + "[" + std::to_string(r) + "]", parts[r])));
  return at;
}

void expect_memory(const Collective& call, const char* name, const void* data, int64_t bytes) {
  if (bytes > 0 && !data) refuse(call, std::string(name) + " is null, bytes are " + std::to_string(bytes));
}

bool overlap(const void* a, int64_t a_bytes, const void* b, int64_t b_bytes) {
  const auto x = reinterpret_cast<uintptr_t>(a), y = reinterpret_cast<uintptr_t>(b);
  return a_bytes > 0 && b_bytes > 0 && x < y + b_bytes && y < x + a_bytes;
}

uint64_t hash(std::span<const int64_t> sizes) {
  uint64_t h = 0xcbf29ce484222325u;  // FNV-1a over bytes
  for (const int64_t size : sizes)
    for (int i = 0; i < 64; i += 8) h = (h ^ ((static_cast<uint64_t>(size) >> i) & 255u)) * 0x100000001b3u;
  return h;
}

template <class T>
void sum(std::span<const std::byte* const> parts, T* out, int64_t count) {
  float total[kBlock];
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t n = std::min(kBlock, count - at);
    for (size_t r = 0; r < parts.size(); ++r) {
      const T* part = reinterpret_cast<const T*>(parts[r]) + at;
      if (r == 0)
        for (int64_t i = 0; i < n; ++i) total[i] = to_float(part[i]);
      else
        for (int64_t i = 0; i < n; ++i) total[i] += to_float(part[i]);
    }
    for (int64_t i = 0; i < n; ++i) out[at + i] = from_float<T>(total[i]);
  }
}

}  // namespace

struct Communicator::State {
  std::unique_ptr<Carrier> carrier;
  std::unique_ptr<DeviceCarrier> device;  // of calls with a GPU's stream; gone before what it watches
  uint64_t rounds = 0;
  PlanDigest agreed;               // of calls on a GPU's stream: the newest plan that the ranks have compared
  std::vector<std::byte> scratch;  // others' terms of a sum
  std::vector<Exchange::Send> send;
  std::vector<Exchange::Receive> receive;

  int rank() const { return carrier->rank(); }
  int ranks() const { return carrier->ranks(); }

  // All that one rank can judge; then what is this rank's alone to fail in, of which the others are told.
  struct Call {
    Record record;
    std::string_view step;
    std::chrono::steady_clock::time_point deadline;
  };
  static void check_call(const Collective& call) {
    if (call.step.size() >= sizeof Record::step || call.step.find('\0') != std::string_view::npos)
      throw InputError("a step's name of " + std::to_string(call.step.size()) + " bytes, allowed " +
                       std::to_string(sizeof Record::step - 1) + " without a NUL: '" + std::string(call.step) + "'");
    constexpr std::chrono::nanoseconds kDay = std::chrono::hours(24);
    if (call.deadline <= std::chrono::nanoseconds(0) || call.deadline > kDay)
      throw InputError("step '" + std::string(call.step) + "': deadline is " + std::to_string(call.deadline.count()) +
                       " ns, allowed 1 to " + std::to_string(kDay.count()));
  }
  Call begin(const Collective& call, Operation operation, uint64_t sizes, int dtype = -1, int root = -1) {
    check_call(call);
    Call c;
    c.record.sizes = sizes;
    c.record.operation = operation;
    c.record.dtype = dtype;
    c.record.root = root;
    c.record.plan = call.plan;
    std::memcpy(c.record.step, call.step.data(), call.step.size());
    c.step = call.step;
    c.deadline = std::chrono::steady_clock::now() + call.deadline;
    return c;
  }

  void clear() {
    send.assign(ranks(), {});
    receive.assign(ranks(), {});
  }
  void round(Call& c) {
    c.record.round = ++rounds;
    carrier->carry(c.record, {c.step, c.deadline, send, receive});
  }

  template <class F>
  void or_abort(F&& f) {
    try {
      f();
    } catch (const RankError&) {
      throw;
    } catch (const std::exception& e) {
      carrier->abort(e.what());
      throw;
    }
  }

  // Of a call on a GPU's stream, which the others make too.
  DeviceCarrier& on(const Stream& stream, const Collective& call, Operation operation, uint64_t sizes, int dtype = -1,
                    int root = -1);
  void barrier(const Collective& call);
  void swap(Call& c, std::span<const SendRows> send, std::span<const ReceiveRows> receive);

  // The terms of this rank's range, of `count` elements, come into scratch; out = their sum.
  void scatter(Call& c, Dtype dtype, const std::byte* in, std::byte* out, std::span<const int64_t> at) {
    const int64_t size = static_cast<int64_t>(size_of(dtype)), count = at[rank() + 1] - at[rank()];
    const size_t bytes = count * size;
    if (scratch.size() < bytes * (ranks() - 1)) scratch.resize(bytes * (ranks() - 1));
    clear();
    std::vector<const std::byte*> terms(ranks());
    for (int r = 0, other = 0; r < ranks(); ++r) {
      if (r == rank()) {
        terms[r] = in + at[r] * size;
        continue;
      }
      send[r] = {in + at[r] * size, static_cast<size_t>((at[r + 1] - at[r]) * size)};
      terms[r] = scratch.data() + bytes * other++;
      receive[r] = {const_cast<std::byte*>(terms[r]), bytes};
    }
    round(c);
    if (dtype == Dtype::f32) sum(terms, reinterpret_cast<float*>(out), count);
    else if (dtype == Dtype::bf16) sum(terms, reinterpret_cast<bf16*>(out), count);
    else sum(terms, reinterpret_cast<f16*>(out), count);
  }

  void gather(Call& c, const std::byte* in, std::byte* out, std::span<const int64_t> at) {
    clear();
    const size_t mine = at[rank() + 1] - at[rank()];
    for (int r = 0; r < ranks(); ++r) {
      if (r == rank()) continue;
      send[r] = {in, mine};
      receive[r] = {out + at[r], static_cast<size_t>(at[r + 1] - at[r])};
    }
    round(c);
    if (mine > 0 && in != out + at[rank()]) std::memcpy(out + at[rank()], in, mine);
  }
};

Communicator::Communicator(std::unique_ptr<Carrier> carrier) : state_(std::make_unique<State>()) {
  state_->carrier = std::move(carrier);
}
Communicator::Communicator(int rank, int ranks, std::unique_ptr<Transport> transport)
    : Communicator(carry_by(rank, ranks, std::move(transport))) {}
Communicator::~Communicator() = default;
Communicator::Communicator(Communicator&&) noexcept = default;
Communicator& Communicator::operator=(Communicator&&) noexcept = default;

int Communicator::rank() const { return state_->rank(); }
int Communicator::ranks() const { return state_->ranks(); }

namespace {

// What one rank can judge of a call's arguments: the same of both forms.
int64_t width(const Collective& call, Dtype dtype) {
  if (dtype == Dtype::fp8_e4m3)
    throw UnsupportedError("step '" + std::string(call.step) + "': sums of fp8_e4m3; dtypes are f32, bf16 and f16");
  return static_cast<int64_t>(size_of(dtype));
}

void check_all_reduce(const Collective& call, Dtype dtype, const void* in, const void* out, int64_t count) {
  const int64_t bytes = checked(call, "count", count) * width(call, dtype);
  expect_memory(call, "in", in, bytes);
  expect_memory(call, "out", out, bytes);
  if (in != out && overlap(in, bytes, out, bytes)) refuse(call, "in and out overlap and are not the same");
}

// Where the ranks' parts begin, in bytes; as of reduce_scatter, too.
std::vector<int64_t> check_all_gather(const Collective& call, int rank, int ranks, const void* in, const void* out,
                                      std::span<const int64_t> bytes) {
  std::vector<int64_t> at = starts(call, "bytes", bytes, ranks);
  const int64_t mine = bytes[static_cast<size_t>(rank)];
  expect_memory(call, "in", in, mine);
  expect_memory(call, "out", out, at.back());
  const auto* to = static_cast<const std::byte*>(out);
  if (in != to + at[static_cast<size_t>(rank)] && overlap(in, mine, out, at.back()))
    refuse(call, "in overlaps out and is not its own place there");
  return at;
}

// In elements.
std::vector<int64_t> check_reduce_scatter(const Collective& call, Dtype dtype, int rank, int ranks, const void* in,
                                          const void* out, std::span<const int64_t> counts) {
  const int64_t size = width(call, dtype);
  std::vector<int64_t> at = starts(call, "counts", counts, ranks);
  const int64_t mine = counts[static_cast<size_t>(rank)] * size;
  expect_memory(call, "in", in, at.back() * size);
  expect_memory(call, "out", out, mine);
  const auto* from = static_cast<const std::byte*>(in);
  if (out != from + at[static_cast<size_t>(rank)] * size && overlap(in, at.back() * size, out, mine))
    refuse(call, "out overlaps in and is not its own place there");
  return at;
}

struct Swap {
  std::vector<int64_t> from, to;  // where parts begin, in bytes
};
Swap check_all_to_all(const Collective& call, int rank, int ranks, const void* in, std::span<const int64_t> send_bytes,
                      const void* out, std::span<const int64_t> receive_bytes) {
  Swap s{starts(call, "send_bytes", send_bytes, ranks), starts(call, "receive_bytes", receive_bytes, ranks)};
  const int64_t own = send_bytes[static_cast<size_t>(rank)];
  if (own != receive_bytes[static_cast<size_t>(rank)])
    refuse(call, "this rank sends itself " + std::to_string(own) + " bytes and expects " +
                     std::to_string(receive_bytes[static_cast<size_t>(rank)]));
  expect_memory(call, "in", in, s.from.back());
  expect_memory(call, "out", out, s.to.back());
  if (overlap(in, s.from.back(), out, s.to.back())) refuse(call, "in and out overlap");
  return s;
}

void check_broadcast(const Collective& call, int ranks, int root, const void* data, int64_t bytes) {
  if (root < 0 || root >= ranks)
    refuse(call, "root is " + std::to_string(root) + ", allowed 0 to " + std::to_string(ranks - 1));
  expect_memory(call, "data", data, checked(call, "bytes", bytes));
}

// Bytes of rows, and what their memory spans.
template <class Rows>
void check_rows(const Collective& call, const char* name, size_t at, const Rows& m) {
  const std::string what = std::string(name) + "[" + std::to_string(at) + "]";
  checked(call, what + " rows", m.rows), checked(call, what + " bytes", m.bytes);
  checked(call, what + " rows times bytes",
          m.bytes > 0 && m.rows > kMostBytes / m.bytes ? kMostBytes + 1 : m.rows * m.bytes);
  if (m.rows > 1 && m.bytes > 0 && m.apart < m.bytes)
    refuse(call, what + " apart is " + std::to_string(m.apart) + ", a row takes " + std::to_string(m.bytes));
  if (m.rows > 1)
    checked(call, what + " rows times apart", m.apart > kMostBytes / m.rows ? kMostBytes + 1 : m.rows * m.apart);
  expect_memory(call, what.c_str(), m.data, m.rows * m.bytes);
}
void check_exchange(const Collective& call, int rank, int ranks, std::span<const SendRows> send,
                    std::span<const ReceiveRows> receive) {
  const size_t n = static_cast<size_t>(ranks);
  if (send.size() != receive.size() || (send.size() != n && send.size() != 2 * n))
    refuse(call, "send has " + std::to_string(send.size()) + " entries and receive " + std::to_string(receive.size()) +
                     ", both have one or two for each of " + std::to_string(ranks) + " ranks");
  for (size_t i = 0; i < send.size(); ++i) {
    check_rows(call, "send", i, send[i]);
    check_rows(call, "receive", i, receive[i]);
    if (static_cast<int>(i % n) == rank && send[i].rows * send[i].bytes != receive[i].rows * receive[i].bytes)
      refuse(call, "this rank sends itself " + std::to_string(send[i].rows * send[i].bytes) + " bytes and expects " +
                       std::to_string(receive[i].rows * receive[i].bytes));
  }
  checked(call, "most_bytes", call.most_bytes);
}

void copy_rows(const SendRows& from, std::byte* to) {
  for (int64_t r = 0; r < from.rows; ++r, to += from.bytes)
    if (from.bytes > 0)
      std::memcpy(to, static_cast<const std::byte*>(from.data) + r * from.apart, static_cast<size_t>(from.bytes));
}
void copy_rows(const std::byte* from, const ReceiveRows& to) {
  for (int64_t r = 0; r < to.rows; ++r, from += to.bytes)
    if (to.bytes > 0) std::memcpy(static_cast<std::byte*>(to.data) + r * to.apart, from, static_cast<size_t>(to.bytes));
}

}  // namespace

void Communicator::all_reduce(const Collective& call, Dtype dtype, const void* in, void* out, int64_t count) {
  State& s = *state_;
  check_all_reduce(call, dtype, in, out, count);
  const auto size = static_cast<int64_t>(size_of(dtype));
  State::Call c = s.begin(call, Operation::all_reduce, count, static_cast<int>(dtype));
  s.or_abort([&] {
    // Each rank sums one range for all: every rank moves 2 count elements, however many ranks there are.
    std::vector<int64_t> at = even_ranges(count, s.ranks());
    auto* to = static_cast<std::byte*>(out);
    s.scatter(c, dtype, static_cast<const std::byte*>(in), to + at[s.rank()] * size, at);
    const std::byte* own = to + at[s.rank()] * size;
    for (int64_t& a : at) a *= size;
    s.gather(c, own, to, at);
  });
}

void Communicator::all_gather(const Collective& call, const void* in, void* out, std::span<const int64_t> bytes) {
  State& s = *state_;
  const std::vector<int64_t> at = check_all_gather(call, s.rank(), s.ranks(), in, out, bytes);
  State::Call c = s.begin(call, Operation::all_gather, hash(bytes));
  s.or_abort([&] { s.gather(c, static_cast<const std::byte*>(in), static_cast<std::byte*>(out), at); });
}

void Communicator::reduce_scatter(const Collective& call, Dtype dtype, const void* in, void* out,
                                  std::span<const int64_t> counts) {
  State& s = *state_;
  const std::vector<int64_t> at = check_reduce_scatter(call, dtype, s.rank(), s.ranks(), in, out, counts);
  State::Call c = s.begin(call, Operation::reduce_scatter, hash(counts), static_cast<int>(dtype));
  s.or_abort([&] { s.scatter(c, dtype, static_cast<const std::byte*>(in), static_cast<std::byte*>(out), at); });
}

void Communicator::all_to_all(const Collective& call, const void* in, std::span<const int64_t> send_bytes, void* out,
                              std::span<const int64_t> receive_bytes) {
  State& s = *state_;
  const Swap at = check_all_to_all(call, s.rank(), s.ranks(), in, send_bytes, out, receive_bytes);
  State::Call c = s.begin(call, Operation::all_to_all, 0);
  s.or_abort([&] {
    const auto* sent = static_cast<const std::byte*>(in);
    auto* received = static_cast<std::byte*>(out);
    const int64_t own = send_bytes[s.rank()];
    s.clear();
    for (int r = 0; r < s.ranks(); ++r) {
      if (r == s.rank()) continue;
      s.send[r] = {sent + at.from[r], static_cast<size_t>(send_bytes[r])};
      s.receive[r] = {received + at.to[r], static_cast<size_t>(receive_bytes[r])};
    }
    s.round(c);
    if (own > 0) std::memcpy(received + at.to[s.rank()], sent + at.from[s.rank()], own);
  });
}

void Communicator::broadcast(const Collective& call, int root, void* data, int64_t bytes) {
  State& s = *state_;
  check_broadcast(call, s.ranks(), root, data, bytes);
  State::Call c = s.begin(call, Operation::broadcast, bytes, -1, root);
  s.or_abort([&] {
    s.clear();
    if (s.rank() == root) {
      for (int r = 0; r < s.ranks(); ++r)
        if (r != root) s.send[r] = {data, static_cast<size_t>(bytes)};
    } else {
      s.receive[root] = {data, static_cast<size_t>(bytes)};
    }
    s.round(c);
  });
}

void Communicator::State::barrier(const Collective& call) {
  Call c = begin(call, Operation::barrier, 0);
  or_abort([&] {
    clear();
    round(c);
  });
}
void Communicator::barrier(const Collective& call) { state_->barrier(call); }

// Calls with a stream.

std::string_view to_string(GpuLink link) { return link == GpuLink::peer ? "peer" : "nccl"; }

namespace {

// Whether two ranks are threads of one process: an address of one of them means the same to the other.
bool shares_process(Communicator& group, std::chrono::nanoseconds deadline) {
  struct Process {
    char machine[64] = {};
    int64_t id = 0;
  };
  std::vector<Process> all(static_cast<size_t>(group.ranks()));
  Process& mine = all[static_cast<size_t>(group.rank())];
  gethostname(mine.machine, sizeof mine.machine - 1);
  mine.id = getpid();
  group.all_gather({"processes", deadline}, &mine, all.data(),
                   std::vector<int64_t>(all.size(), int64_t{sizeof(Process)}));
  for (size_t a = 0; a < all.size(); ++a)
    for (size_t b = 0; b < a; ++b)
      if (all[a].id == all[b].id && std::strcmp(all[a].machine, all[b].machine) == 0) return true;
  return false;
}

}  // namespace

GpuLink parse_gpu_link(std::string_view name) {
  for (const GpuLink link : {GpuLink::peer, GpuLink::nccl})
    if (name == to_string(link)) return link;
  throw InputError("no link '" + std::string(name) + "'; links are peer and nccl");
}

void Communicator::connect(Device device, GpuLink link, size_t staging_bytes, std::chrono::nanoseconds deadline) {
  State& s = *state_;
  if (device.kind != DeviceKind::cuda)
    throw InputError("communicator: connect on " + to_string(device) + ", ranks on the CPU are connected as they are");
  State::check_call({"connect", deadline});
  s.device.reset();
  s.device = gpu::connect({.host = *this,
                           .carrier = *s.carrier,
                           .barrier = [&s](const Collective& call) { s.barrier(call); },
                           .device = device.index,
                           .link = link,
                           .deadline = deadline,
                           .staging_bytes = staging_bytes,
                           .one_process = shares_process(*this, deadline)});
}

// Parts of a message one behind the other, packed.
void Communicator::State::swap(Call& c, std::span<const SendRows> from, std::span<const ReceiveRows> to) {
  const size_t n = static_cast<size_t>(ranks());
  clear();
  size_t bytes = 0;
  for (size_t i = 0; i < from.size(); ++i)
    bytes += static_cast<size_t>(from[i].rows * from[i].bytes + to[i].rows * to[i].bytes);
  if (scratch.size() < bytes) scratch.resize(bytes);
  std::byte* at = scratch.data();
  for (size_t r = 0; r < n; ++r) {
    send[r].data = at;
    for (size_t i = r; i < from.size(); i += n) {
      copy_rows(from[i], at);
      at += from[i].rows * from[i].bytes;
    }
    send[r].bytes = static_cast<size_t>(at - static_cast<const std::byte*>(send[r].data));
  }
  for (size_t r = 0; r < n; ++r) {
    receive[r].data = at;
    for (size_t i = r; i < to.size(); i += n) at += to[i].rows * to[i].bytes;
    receive[r].bytes = static_cast<size_t>(at - static_cast<std::byte*>(receive[r].data));
  }
  const Exchange::Send own = send[static_cast<size_t>(rank())];
  send[static_cast<size_t>(rank())] = {}, receive[static_cast<size_t>(rank())] = {};
  round(c);
  for (size_t r = 0; r < n; ++r) {
    const auto* got = static_cast<const std::byte*>(r == static_cast<size_t>(rank()) ? own.data : receive[r].data);
    for (size_t i = r; i < to.size(); i += n) {
      copy_rows(got, to[i]);
      got += to[i].rows * to[i].bytes;
    }
  }
}

DeviceCarrier& Communicator::State::on(const Stream& stream, const Collective& call, Operation operation,
                                       uint64_t sizes, int dtype, int root) {
  check_call(call);
  if (!device)
    throw InputError("step '" + std::string(call.step) + "': the group's calls on " + to_string(stream.device()) +
                     " need connect() first");
  if (device->device() != stream.device())
    throw InputError("step '" + std::string(call.step) + "': the stream is on " + to_string(stream.device()) +
                     ", this rank is connected on " + to_string(device->device()));
  carrier->check();
  // Messages between devices say nothing of themselves: ranks compare a new plan on the host before the first of them.
  const bool new_plan = call.plan != PlanDigest{} && call.plan != agreed;
  if ((device->meets_first() || new_plan) && !gpu::capturing(stream.queue())) {
    // A barrier that says what the call is.
    const int64_t said[] = {static_cast<int64_t>(operation), static_cast<int64_t>(sizes), dtype, root};
    Call c = begin(call, Operation::barrier, hash(said));
    clear();
    round(c);
    agreed = call.plan;
  }
  return *device;
}

void Communicator::all_reduce(Stream& stream, const Collective& call, Dtype dtype, const void* in, void* out,
                              int64_t count) {
  if (stream.device().kind == DeviceKind::cpu) return all_reduce(call, dtype, in, out, count);
  check_all_reduce(call, dtype, in, out, count);
  DeviceCarrier& to = state_->on(stream, call, Operation::all_reduce, count, static_cast<int>(dtype));
  comm::all_reduce({to, stream.queue(), call, rank(), ranks()}, dtype, in, out, count);
}

void Communicator::all_gather(Stream& stream, const Collective& call, const void* in, void* out,
                              std::span<const int64_t> bytes) {
  if (stream.device().kind == DeviceKind::cpu) return all_gather(call, in, out, bytes);
  const std::vector<int64_t> at = check_all_gather(call, rank(), ranks(), in, out, bytes);
  DeviceCarrier& to = state_->on(stream, call, Operation::all_gather, hash(bytes));
  comm::all_gather({to, stream.queue(), call, rank(), ranks()}, in, out, at);
}

void Communicator::reduce_scatter(Stream& stream, const Collective& call, Dtype dtype, const void* in, void* out,
                                  std::span<const int64_t> counts) {
  if (stream.device().kind == DeviceKind::cpu) return reduce_scatter(call, dtype, in, out, counts);
  const std::vector<int64_t> at = check_reduce_scatter(call, dtype, rank(), ranks(), in, out, counts);
  DeviceCarrier& to = state_->on(stream, call, Operation::reduce_scatter, hash(counts), static_cast<int>(dtype));
  comm::reduce_scatter({to, stream.queue(), call, rank(), ranks()}, dtype, in, out, at);
}

void Communicator::all_to_all(Stream& stream, const Collective& call, const void* in,
                              std::span<const int64_t> send_bytes, void* out, std::span<const int64_t> receive_bytes) {
  if (stream.device().kind == DeviceKind::cpu) return all_to_all(call, in, send_bytes, out, receive_bytes);
  const auto [from, at] = check_all_to_all(call, rank(), ranks(), in, send_bytes, out, receive_bytes);
  checked(call, "most_bytes", call.most_bytes);
  DeviceCarrier& to = state_->on(stream, call, Operation::all_to_all, call.most_bytes);
  comm::all_to_all({to, stream.queue(), call, rank(), ranks()}, in, from, out, at);
}

void Communicator::exchange(Stream& stream, const Collective& call, std::span<const SendRows> send,
                            std::span<const ReceiveRows> receive) {
  State& s = *state_;
  check_exchange(call, s.rank(), s.ranks(), send, receive);
  if (stream.device().kind == DeviceKind::cuda)
    return comm::exchange({s.on(stream, call, Operation::all_to_all, send.size() + call.most_bytes), stream.queue(),
                           call, rank(), ranks()},
                          send, receive);
  State::Call c = s.begin(call, Operation::all_to_all, send.size());
  s.or_abort([&] { s.swap(c, send, receive); });
}

void Communicator::broadcast(Stream& stream, const Collective& call, int root, void* data, int64_t bytes) {
  if (stream.device().kind == DeviceKind::cpu) return broadcast(call, root, data, bytes);
  check_broadcast(call, ranks(), root, data, bytes);
  DeviceCarrier& to = state_->on(stream, call, Operation::broadcast, bytes, -1, root);
  comm::broadcast({to, stream.queue(), call, rank(), ranks()}, root, data, bytes);
}

void Communicator::abort(std::string_view reason) noexcept { state_->carrier->abort(reason); }

}  // namespace mla
