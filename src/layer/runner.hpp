// What walks over a plan share: the workspace's regions, and running ops, under a profile or as notes of a survey.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <type_traits>

#ifdef MLA_NVTX
#include <nvtx3/nvToolsExt.h>
#endif

#include "core/gpu.hpp"
#include "layer/kernels.hpp"
#include "mla/layer.hpp"
#include "ops/run.hpp"

namespace mla::layer {

/// ops::cost with the slots, in memory of the stream's device, read back first; waits for the stream, when it is called.
/// The arrays that args borrows must live until then.
std::function<Profile::Work()> work_of_selection(const Stream& stream, const ops::AttendSparseArgs& args);

#ifdef MLA_NVTX
/// The op's name over what the host queues for it, for NVIDIA's profilers; next to nothing when none is attached.
class NamedRange {
 public:
  explicit NamedRange(std::string_view name) { nvtxRangePushA(name.data()); }  // a literal: it ends with a zero
  ~NamedRange() { nvtxRangePop(); }
  NamedRange(const NamedRange&) = delete;
  NamedRange& operator=(const NamedRange&) = delete;
};
#endif

class Runner {
 public:
  Runner(Stream& stream, const LayerContext& context) : stream_(&stream), c_(context), plan_(context.plan) {}
  Runner(Survey& survey, const LayerContext& context) : survey_(&survey), c_(context), plan_(context.plan) {}

 protected:
  // A flat [rows, 1, n] array as a product's source or destination.
  struct Flat {
    AnyView<Token, Head, In> read;
    AnyMutableView<Token, Head, Out> write;
    operator AnyMutableView<Token, Head, Out>() const { return write; }
  };
  static Flat flat(Dtype dtype, void* data, int64_t rows, int64_t n) {
    return {{dtype, data, {rows, 1, n}}, {dtype, data, {rows, 1, n}}};
  }

  template <class T>
  T* at(std::string_view region) const {
    return reinterpret_cast<T*>(c_.workspace.data() + plan_.region(region).offset);
  }

  // Memory that the caller lends.
  static void require_memory(const char* name, std::span<std::byte> memory, size_t needed) {
    if (memory.size() < needed)
      throw ShapeError("layer: " + std::string(name) + " is " + std::to_string(memory.size()) + " bytes, plan needs " +
                       std::to_string(needed));
    if (needed > 0 && !memory.data()) throw ShapeError("layer: " + std::string(name) + " has no data");
    if (const uintptr_t past = reinterpret_cast<uintptr_t>(memory.data()) % 64; past != 0)
      throw ShapeError("layer: " + std::string(name) + " is at an address that is " + std::to_string(past) +
                       " past a multiple of 64");
  }

  // The table that positions are rotated with.
  void require_table(const char* name, const RotaryTable& table, const RopeConfig& model) const {
    if (survey_) return;
    if (const std::string why = table.difference(model, plan_.model.rope); !why.empty())
      throw ShapeError("layer: " + std::string(name) + " " + why);
    if (!table.rotates()) return;
    if (table.device() != stream_->device())
      throw UnsupportedError("layer: " + std::string(name) + " of " + to_string(table.device()) + " on a stream of " +
                             to_string(stream_->device()));
    for (const RequestPlan& r : plan_.requests)
      if (const int64_t last = int64_t{r.context} + r.query_len; r.query_len > 0 && last > table.positions())
        throw ShapeError("layer: " + std::string(name) + " has " + std::to_string(table.positions()) +
                         " positions, a request's sequence has " + std::to_string(last));
  }

  template <class Args>
  void run(std::string_view name, const Args& args) const {
    if (survey_) return survey_->note(name, args);
#ifdef MLA_NVTX
    const NamedRange range(name);
#endif
    if (!c_.profile) return ops::run(*stream_, args);
    if (stream_->device().kind == DeviceKind::cuda) {
      auto watch = std::make_unique<gpu::Stopwatch>();
      watch->start(stream_->queue());
      ops::run(*stream_, args);
      watch->stop(stream_->queue());
      c_.profile->add(name, std::move(watch), work_on_gpu(args));
      return;
    }
    const ops::Cost cost = ops::cost(args);
    const auto start = std::chrono::steady_clock::now();
    ops::run(*stream_, args);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    c_.profile->add(name, seconds, cost.bytes, cost.flops);
  }

  void project(std::string_view name, AnyView<Token, Head, In> x, std::span<const int32_t> x_rows, const Linear& w,
               AnyMutableView<Token, Head, Out> y, std::span<const int32_t> y_rows, int64_t rows,
               const QuantizedView& quantized = {}) const {
    const Activations activations = w.format == WeightFormat::fp8 ? plan_.options.activations : Activations::plain;
    run(name, ops::ProjectArgs{.x = x,
                               .x_rows = x_rows,
                               .weights = &w,
                               .y = y,
                               .y_rows = y_rows,
                               .rows = rows,
                               .batch_invariant = plan_.options.split == SplitPolicy::batch_invariant,
                               .activations = activations,
                               .quantized = quantized,
                               .scratch = scratch_});
  }

  // Costs follow from what the host has, but for the slots of a selection: those cannot be read while the stream is
  // held, and may be overwritten once it is not.
  template <class Args>
  std::function<Profile::Work()> work_on_gpu(const Args& args) const {
    const auto known = [](Profile::Work work) { return [work] { return work; }; };
    if constexpr (std::is_same_v<Args, ops::AttendSparseArgs>) {
      const auto work = work_of_selection(*stream_, args);
      if (gpu::held(stream_->queue())) return work;
      return known(work());
    } else {
      const ops::Cost cost = ops::cost(args);
      return known({cost.bytes, cost.flops});
    }
  }

  Stream* stream_ = nullptr;  // of a walk that runs; else
  Survey* survey_ = nullptr;
  const LayerContext& c_;
  const Plan& plan_;
  const Dtype act_ = plan_.activations();
  ops::Scratch scratch_;
};

}  // namespace mla::layer
