// The benches' own kernels: what fills inputs on the device, and what is timed beside the library's. All are queued on
// the stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "mla/dtype.hpp"

namespace mla::cuda::bench {

/// n elements, each a function of its index and the seed: of a normal distribution; of one that is nearly normal and
/// bounded, the sum of four uniform ones (3.5 deviations at most). e4m3 saturates.
void fill_normal(cudaStream_t stream, Dtype dtype, void* to, size_t n, uint32_t seed, float deviation = 1.0f);
void fill_bounded(cudaStream_t stream, Dtype dtype, void* to, size_t n, uint32_t seed, float deviation = 1.0f);
/// Uniform in [-2, 2).
void fill_uniform(cudaStream_t stream, Dtype dtype, void* to, size_t n, uint32_t seed);

/// Scales of fp8_ds_mla's groups: seven of them, 0.003 to 0.021, above elements of deviation 1; or 2^-6 and 2^-7 above
/// codes of deviation 64.
enum class DsMlaScales { seven, powers_of_two };
/// Rows of fp8_ds_mla, 656 bytes each.
void fill_ds_mla(cudaStream_t stream, std::byte* to, size_t rows, uint32_t seed, DsMlaScales scales);
/// Pages of 64 rows of fp8_ds_v4.
void fill_ds_v4(cudaStream_t stream, std::byte* to, size_t pages);
/// Pages of 64 rows of the fp8 index cache, 128 codes each, of deviation 100.
void fill_index_pages(cudaStream_t stream, uint8_t* to, size_t pages);
/// Distinct slots of each row's own request, in random order. `context`: slots of a request, a power of two.
void fill_slots(cudaStream_t stream, int32_t* to, size_t rows, int topk, int context, int query_tokens, uint32_t seed);

/// Reads n elements, in so many blocks.
void read_all(cudaStream_t stream, int blocks, uint4* data, size_t n);
/// Rows [start, start + count) of a request's cache, 576 elements of 16 bits in pages of 64 rows, to flat rows.
void gather_rows(cudaStream_t stream, int blocks, const uint16_t* cache, const int32_t* block_table, int start,
                 int count, uint16_t* out);

}  // namespace mla::cuda::bench
