// A kernel that lets the stream's next one begin long before it has written what it is to write.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace mla::cuda::test {

/// Copies device memory, a multiple of 16 bytes at 16-byte addresses, 50 us after the next kernel may have begun.
void late_copy(void* to, const void* from, size_t bytes, cudaStream_t stream);

}  // namespace mla::cuda::test
