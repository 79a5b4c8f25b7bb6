// Devices, streams, memory.
#ifndef MLA_C_DEVICE_H
#define MLA_C_DEVICE_H

#include "mla/c/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/// How many devices of a type (kDLCPU or kDLCUDA) this build can use; 1 CPU, 0 GPUs without CUDA or a driver.
/// MLA_ERROR_UNSUPPORTED for another type.
MLA_API mla_status mla_device_count(int32_t device_type, int32_t* count);
/// A device in one line: a GPU's name, memory and architecture. MLA_ERROR_DEVICE when there is no such device.
MLA_API mla_status mla_device_describe(DLDevice device, char* text, size_t capacity, size_t* length);

/// An order of execution on a device. On the CPU calls run at once, on the stream's threads; on a GPU they are queued
/// and return. Calls of several threads on one stream take turns.
typedef struct mla_stream mla_stream;

/// On the CPU, with threads of its own (1 to four a processor, or 64; the caller's included).
MLA_API mla_status mla_stream_create_cpu(int32_t threads, mla_stream** stream);
/// Where a stream's threads run: wherever the system puts them; or each, but the caller's, on a processor of its own.
enum { MLA_PINNING_NONE = 0, MLA_PINNING_CORES = 1 };
/// The same with a pinning. MLA_PINNING_CORES takes a thread a core of those that the calling thread may use, one node
/// of memory (NUMA) after another, then the cores' further hardware threads. MLA_ERROR_INPUT for more threads than
/// processors, MLA_ERROR_DEVICE when the system refuses one. What lies on which node: mla_weights_place,
/// mla_cache_place.
MLA_API mla_status mla_stream_create_cpu_with(int32_t threads, int32_t pinning, mla_stream** stream);
/// On a GPU. cuda_stream: a cudaStream_t, borrowed (cudaStreamLegacy for CUDA's default stream); NULL: a stream of its
/// own. MLA_ERROR_DEVICE when there is no such GPU, it is older than compute capability 8.0, or this build has no CUDA.
MLA_API mla_status mla_stream_create_cuda(int32_t device_id, void* cuda_stream, mla_stream** stream);
MLA_API mla_status mla_stream_destroy(mla_stream* stream);
MLA_API mla_status mla_stream_device(const mla_stream* stream, DLDevice* device);
/// Waits for everything queued so far; MLA_ERROR_DEVICE for what failed since the last wait.
MLA_API mla_status mla_stream_synchronize(mla_stream* stream);
/// The cudaStream_t; NULL on the CPU.
MLA_API mla_status mla_stream_native(const mla_stream* stream, void** cuda_stream);
/// Bytes from any memory to any other, in the stream's order. Host memory that a GPU's copy reads or writes stays as it
/// is until the copy is done.
MLA_API mla_status mla_copy(mla_stream* stream, void* to, const void* from, size_t bytes);

/// Calls on a GPU's stream, to be queued again as a whole. They see the same addresses every time; what lies there may
/// change, and so may the step (mla_staged_step_restage).
typedef struct mla_graph mla_graph;
/// Calls record(context), which makes the calls on `stream` from this thread; they are captured, not executed. Make
/// them once before: products choose their algorithms at their first call. Other threads' calls on the stream wait. A
/// status other than MLA_OK from record ends the capture and is returned. MLA_ERROR_UNSUPPORTED on the CPU,
/// MLA_ERROR_DEVICE when a call cannot be captured: mla_stream_synchronize, memory. A profile's times are not measured
/// within a graph.
MLA_API mla_status mla_graph_create(mla_stream* stream, mla_status (*record)(void* context), void* context,
                                    mla_graph** graph);
/// Queues the calls on the stream that they were captured on.
MLA_API mla_status mla_graph_launch(mla_graph* graph);
MLA_API mla_status mla_graph_destroy(mla_graph* graph);

/// Memory on a device, 64-byte aligned: zero on the CPU, anything on a GPU.
typedef struct mla_buffer mla_buffer;
/// MLA_ERROR_DEVICE when the device has no such memory.
MLA_API mla_status mla_buffer_create(DLDevice device, size_t bytes, mla_buffer** buffer);
MLA_API mla_status mla_buffer_destroy(mla_buffer* buffer);
/// NULL data for 0 bytes.
MLA_API mla_status mla_buffer_data(const mla_buffer* buffer, void** data, size_t* bytes);

#ifdef __cplusplus
}
#endif

#endif  // MLA_C_DEVICE_H
