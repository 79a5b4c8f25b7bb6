// The calls with a GPU's stream, as rounds of messages and sums of terms. Arguments are checked.
#pragma once

#include <vector>

#include "comm/device_carrier.hpp"

namespace mla::comm {

struct OnDevice {
  DeviceCarrier& carrier;
  cuda::Queue& queue;
  const Collective& call;
  int rank, ranks;
};

void all_reduce(const OnDevice& on, Dtype dtype, const void* in, void* out, int64_t count);
/// at: where each rank's bytes begin, the end last; as in what follows.
void all_gather(const OnDevice& on, const void* in, void* out, const std::vector<int64_t>& at);
void reduce_scatter(const OnDevice& on, Dtype dtype, const void* in, void* out, const std::vector<int64_t>& at);
void all_to_all(const OnDevice& on, const void* in, const std::vector<int64_t>& from, void* out,
                const std::vector<int64_t>& to);
void exchange(const OnDevice& on, std::span<const SendRows> send, std::span<const ReceiveRows> receive);
void broadcast(const OnDevice& on, int root, void* data, int64_t bytes);

}  // namespace mla::comm
