#include "comm/on_device.hpp"

#include <algorithm>

#include "core/even_ranges.hpp"
#include "core/gpu.hpp"

namespace mla::comm {
namespace {

// Up to so many bytes that all ranks send each other, every rank sums everything: one round instead of two.
constexpr int64_t kOneRound = int64_t{1} << 20;

int64_t longest(const std::vector<int64_t>& at) {
  int64_t most = 0;
  for (size_t r = 0; r + 1 < at.size(); ++r) most = std::max(most, at[r + 1] - at[r]);
  return most;
}

std::vector<SendRows> rows_of(const void* from, const std::vector<int64_t>& at) {
  std::vector<SendRows> s;
  for (size_t r = 0; r + 1 < at.size(); ++r)
    s.push_back({static_cast<const std::byte*>(from) + at[r], 1, at[r + 1] - at[r], 0});
  return s;
}
std::vector<ReceiveRows> places(void* to, const std::vector<int64_t>& at) {
  std::vector<ReceiveRows> s;
  for (size_t r = 0; r + 1 < at.size(); ++r)
    s.push_back({static_cast<std::byte*>(to) + at[r], 1, at[r + 1] - at[r], 0});
  return s;
}

}  // namespace

void all_gather(const OnDevice& on, const void* in, void* out, const std::vector<int64_t>& at) {
  const gpu::OnDevice device(on.carrier.device());
  const size_t rank = static_cast<size_t>(on.rank);
  const std::vector<SendRows> send(static_cast<size_t>(on.ranks), {in, 1, at[rank + 1] - at[rank], 0});
  on.carrier.exchange(on.queue, {on.call.step, on.call.deadline, send, places(out, at), longest(at)});
}

void reduce_scatter(const OnDevice& on, Dtype dtype, const void* in, void* out, const std::vector<int64_t>& at) {
  const gpu::OnDevice device(on.carrier.device());
  const size_t rank = static_cast<size_t>(on.rank), size = size_of(dtype);
  std::vector<Exchange::Send> send;
  for (size_t r = 0; r + 1 < at.size(); ++r)
    send.push_back({static_cast<const std::byte*>(in) + static_cast<size_t>(at[r]) * size,
                    static_cast<size_t>(at[r + 1] - at[r]) * size});
  on.carrier.sum(on.queue, {.step = on.call.step,
                            .deadline = on.call.deadline,
                            .dtype = dtype,
                            .send = send,
                            .out = out,
                            .count = at[rank + 1] - at[rank],
                            .most = longest(at)});
}

void all_reduce(const OnDevice& on, Dtype dtype, const void* in, void* out, int64_t count) {
  const gpu::OnDevice device(on.carrier.device());
  const auto size = static_cast<int64_t>(size_of(dtype));
  if (on.ranks <= 2 || count * size * on.ranks <= kOneRound) {
    const std::vector<Exchange::Send> send(static_cast<size_t>(on.ranks), {in, static_cast<size_t>(count * size)});
    return on.carrier.sum(on.queue, {.step = on.call.step,
                                     .deadline = on.call.deadline,
                                     .dtype = dtype,
                                     .send = send,
                                     .out = out,
                                     .count = count,
                                     .most = count});
  }
  std::vector<int64_t> at = even_ranges(count, on.ranks);
  auto* own = static_cast<std::byte*>(out) + at[static_cast<size_t>(on.rank)] * size;
  reduce_scatter(on, dtype, in, own, at);
  for (int64_t& a : at) a *= size;
  all_gather(on, own, out, at);
}

void all_to_all(const OnDevice& on, const void* in, const std::vector<int64_t>& from, void* out,
                const std::vector<int64_t>& to) {
  const gpu::OnDevice device(on.carrier.device());
  on.carrier.exchange(on.queue,
                      {on.call.step, on.call.deadline, rows_of(in, from), places(out, to), on.call.most_bytes});
}

void exchange(const OnDevice& on, std::span<const SendRows> send, std::span<const ReceiveRows> receive) {
  const gpu::OnDevice device(on.carrier.device());
  on.carrier.exchange(on.queue, {on.call.step, on.call.deadline, send, receive, on.call.most_bytes});
}

void broadcast(const OnDevice& on, int root, void* data, int64_t bytes) {
  const gpu::OnDevice device(on.carrier.device());
  std::vector<SendRows> send(static_cast<size_t>(on.ranks));
  std::vector<ReceiveRows> receive(static_cast<size_t>(on.ranks));
  for (int r = 0; r < on.ranks; ++r)
    if (on.rank == root && r != root) send[static_cast<size_t>(r)] = {data, 1, bytes, 0};
  if (on.rank != root) receive[static_cast<size_t>(root)] = {data, 1, bytes, 0};
  on.carrier.exchange(on.queue, {on.call.step, on.call.deadline, send, receive, bytes});
}

}  // namespace mla::comm
