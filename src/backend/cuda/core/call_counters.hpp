// Counters of calls on streams that are not ours, where nothing can be kept between calls.
#pragma once

#include <cuda_runtime_api.h>

namespace mla::cuda {

/// That a call gets.
constexpr int kCallCounters = 512;

/// Counters on the current device, `device`, that are 0 when the stream gets to a call, if every call that has them
/// leaves them 0. A stream keeps its own for the process's life; a graph has others for each stream that it is captured
/// from, until it and what was made of it are gone. So launches of streams and graphs may overlap, those of copies of
/// one graph may not. Null when all are given away: 512 to streams, as many and more to graphs.
unsigned* call_counters(int device, cudaStream_t stream);

}  // namespace mla::cuda
