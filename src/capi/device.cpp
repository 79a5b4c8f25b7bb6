#include "capi/objects.hpp"
#include "capi/tensor.hpp"

using namespace mla;
using namespace mla::capi;

mla_status mla_device_count(int32_t device_type, int32_t* count) {
  return guarded("mla_device_count", [&] {
    required("count", count) = 0;
    if (device_type != kDLCPU && device_type != kDLCUDA)
      throw UnsupportedError("device type is " + std::to_string(device_type) + ", allowed: 1 (CPU) 2 (CUDA)");
    *count = device_type == kDLCPU ? 1 : gpu_count();
  });
}

mla_status mla_device_describe(DLDevice device, char* text, size_t capacity, size_t* length) {
  return guarded("mla_device_describe", [&] { write_text(describe(read_device(device)), text, capacity, length); });
}

static_assert(static_cast<int>(Pinning::cores) == MLA_PINNING_CORES);

namespace {

void create_on_cpu(int32_t threads, int32_t pinning, mla_stream** stream) {
  expect_handle("stream", stream);
  auto made = std::make_shared<mla_stream>();
  made->pool = std::make_unique<ThreadPool>(threads, read_enum("pinning", pinning, Pinning::cores));
  made->stream = std::make_unique<Stream>(*made->pool);
  put(stream, std::move(made));
}

}  // namespace

mla_status mla_stream_create_cpu(int32_t threads, mla_stream** stream) {
  return guarded("mla_stream_create_cpu", [&] { create_on_cpu(threads, MLA_PINNING_NONE, stream); });
}

mla_status mla_stream_create_cpu_with(int32_t threads, int32_t pinning, mla_stream** stream) {
  return guarded("mla_stream_create_cpu_with", [&] { create_on_cpu(threads, pinning, stream); });
}

mla_status mla_stream_create_cuda(int32_t device_id, void* cuda_stream, mla_stream** stream) {
  return guarded("mla_stream_create_cuda", [&] {
    expect_handle("stream", stream);
    auto made = std::make_shared<mla_stream>();
    made->stream = std::make_unique<Stream>(read_device({kDLCUDA, device_id}), cuda_stream);
    put(stream, std::move(made));
  });
}

mla_status mla_stream_destroy(mla_stream* stream) { return destroy("mla_stream_destroy", "stream", stream); }

mla_status mla_stream_device(const mla_stream* stream, DLDevice* device) {
  return guarded("mla_stream_device",
                 [&] { required("device", device) = write_device(get("stream", stream)->stream->device()); });
}

mla_status mla_stream_synchronize(mla_stream* stream) {
  return guarded("mla_stream_synchronize", [&] { Turn(stream).stream().synchronize(); });
}

mla_status mla_stream_native(const mla_stream* stream, void** cuda_stream) {
  return guarded("mla_stream_native",
                 [&] { required("cuda_stream", cuda_stream) = get("stream", stream)->stream->native(); });
}

mla_status mla_copy(mla_stream* stream, void* to, const void* from, size_t bytes) {
  return guarded("mla_copy", [&] {
    const Turn turn(stream);
    if (bytes == 0) return;
    required("to", static_cast<char*>(to));
    required("from", static_cast<const char*>(from));
    copy(turn.stream(), to, from, bytes);
  });
}

mla_status mla_graph_create(mla_stream* stream, mla_status (*record)(void* context), void* context, mla_graph** graph) {
  return guarded("mla_graph_create", [&] {
    expect_handle("graph", graph);
    const Turn turn(stream);
    required("record", record);
    auto made = std::make_shared<mla_graph>();
    made->stream = get("stream", stream);
    made->graph = Graph(turn.stream(), [&] {
      const mla_status status = record(context);
      if (status == MLA_OK) return;
      const bool known = status > MLA_OK && status <= MLA_ERROR_INTERNAL;
      throw RecordError(known ? status : MLA_ERROR_INPUT, "record returned " + std::to_string(status) + " (" +
                                                              mla_status_name(status) + "); the last message is '" +
                                                              mla_last_error() + "'");
    });
    put(graph, std::move(made));
  });
}

mla_status mla_graph_launch(mla_graph* graph) {
  return guarded("mla_graph_launch", [&] {
    const auto g = get("graph", graph);
    const std::scoped_lock turn(g->stream->turn);
    g->graph.launch(*g->stream->stream);
  });
}

mla_status mla_graph_destroy(mla_graph* graph) { return destroy("mla_graph_destroy", "graph", graph); }

mla_status mla_buffer_create(DLDevice device, size_t bytes, mla_buffer** buffer) {
  return guarded("mla_buffer_create", [&] {
    expect_handle("buffer", buffer);
    auto made = std::make_shared<mla_buffer>();
    made->buffer = Buffer(bytes, read_device(device));
    put(buffer, std::move(made));
  });
}

mla_status mla_buffer_destroy(mla_buffer* buffer) { return destroy("mla_buffer_destroy", "buffer", buffer); }

mla_status mla_buffer_data(const mla_buffer* buffer, void** data, size_t* bytes) {
  return guarded("mla_buffer_data", [&] {
    const auto b = get("buffer", buffer);
    required("data", data) = b->buffer.data();
    if (bytes) *bytes = b->buffer.size();
  });
}

std::span<std::byte> mla::capi::read_memory(const char* name, void* data, size_t bytes) {
  if (!data) {
    if (bytes > 0) throw ShapeError(std::string(name) + " is NULL with " + std::to_string(bytes) + " bytes");
    return {};
  }
  if (const uintptr_t past = reinterpret_cast<uintptr_t>(data) % 64; past != 0)
    throw ShapeError(std::string(name) + " is at an address that is " + std::to_string(past) +
                     " past a multiple of 64");
  return {static_cast<std::byte*>(data), bytes};
}
