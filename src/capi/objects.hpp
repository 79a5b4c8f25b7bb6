// What the handles stand for.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "capi/boundary.hpp"
#include "mla/c/mla.h"
#include "mla/mla.hpp"

#define MLA_KIND(text)                       \
  static constexpr const char* kKind = text; \
  std::string_view kind() const override { return kKind; }

struct mla_stream final : mla::capi::Object {
  MLA_KIND("stream")
  std::unique_ptr<mla::ThreadPool> pool;  ///< the CPU's
  std::unique_ptr<mla::Stream> stream;
  std::recursive_mutex turn;  ///< one call at a time; a capture holds it around its own calls
};

struct mla_graph final : mla::capi::Object {
  MLA_KIND("graph")
  std::shared_ptr<mla_stream> stream;  ///< the calls work in its memory too
  mla::Graph graph;
};

struct mla_buffer final : mla::capi::Object {
  MLA_KIND("buffer")
  mla::Buffer buffer;
};

struct mla_model final : mla::capi::Object {
  MLA_KIND("model")
  mla::ModelConfig config;
};

struct mla_rotary final : mla::capi::Object {
  MLA_KIND("rotary")
  mla::RotaryTable table;
  mla::Device device;
};

struct mla_checkpoint final : mla::capi::Object {
  MLA_KIND("checkpoint")
  explicit mla_checkpoint(const char* folder, const mla::ReadOptions& options = {}) : checkpoint(folder, options) {}
  mla::Checkpoint checkpoint;
};

struct mla_weights final : mla::capi::Object {
  MLA_KIND("weights")
  mla::LayerWeights weights;
  mla::Device device;
};

struct mla_linear final : mla::capi::Object {
  MLA_KIND("linear")
  std::shared_ptr<const mla::Linear> linear;
  mla::Device device;
};

struct mla_cache final : mla::capi::Object {
  MLA_KIND("cache")
  mla::Cache own;  ///< empty in the caller's memory
  mla::CacheView view;
  mla::Device device;
};

struct mla_index_cache final : mla::capi::Object {
  MLA_KIND("index cache")
  mla::IndexCache own;
  mla::IndexCacheView view;
  mla::Device device;
};

struct mla_pages final : mla::capi::Object {
  MLA_KIND("page allocator")
  mla_pages(int64_t pages, mla::PageAllocator::Options options) : allocator(pages, options), count(pages) {}
  mla::PageAllocator allocator;
  int64_t count;
};

struct mla_plan final : mla::capi::Object {
  MLA_KIND("plan")
  mla::Plan plan;
  // The batch that was planned.
  std::vector<int32_t> query_start_loc, seq_lens, block_table, slot_mapping, prompt_lens;
  mla::Batch batch;
};

struct mla_staged_step final : mla::capi::Object {
  MLA_KIND("staged step")
  std::shared_ptr<mla_stream> stream;  ///< outlives what is staged on it
  std::shared_ptr<mla_plan> plan;      ///< the staged one
  std::unique_ptr<mla::StagedStep> staged;
};

struct mla_profile final : mla::capi::Object {
  MLA_KIND("profile")
  mla::Profile profile;
};

struct mla_communicator final : mla::capi::Object {
  MLA_KIND("communicator")
  explicit mla_communicator(mla::Communicator c) : communicator(std::move(c)) {}
  mla::Communicator communicator;
};

#undef MLA_KIND

namespace mla::capi {

mla::ModelConfig read_fields(const mla_model_fields& f);
mla::ReadOptions read_read_options(const mla_read_options* options);
CacheSpec read_cache_spec(const char* name, const mla_cache_spec* spec);
IndexCacheSpec read_index_cache_spec(const char* name, const mla_index_cache_spec* spec);
OutputSpec read_output_spec(const char* name, const mla_output_spec* spec);
/// `device` is where the memory must lie.
QuantizedView read_quantized(const char* name, const mla_quantized* q, Device device);

/// ShapeError unless what a call is given lies on its stream's device.
template <class T>
void require_on(Device device, const char* name, const T& object) {
  if (!(object.device == device))
    throw ShapeError(std::string(name) + " is on " + to_string(object.device) + ", the stream is on " +
                     to_string(device));
}

/// A stream for one call: nobody else's call runs on it meanwhile.
class Turn {
 public:
  explicit Turn(const mla_stream* stream) : stream_(get("stream", stream)), lock_(stream_->turn) {}
  Stream& stream() const { return *stream_->stream; }
  Device device() const { return stream().device(); }

 private:
  std::shared_ptr<mla_stream> stream_;
  std::unique_lock<std::recursive_mutex> lock_;
};

/// Bytes of caller's memory, 64-byte aligned.
std::span<std::byte> read_memory(const char* name, void* data, size_t bytes);

}  // namespace mla::capi
