// A model's attention on a device, as the replay drives it: weights, caches and working memory of every layer, one step
// at a time. On a GPU, steps of few new tokens a request are captured once for each size of batch and launched as a
// whole.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "mla/mla.hpp"
#include "serve/replay.hpp"

namespace mla::serve {

/// An output row that is wanted from a step.
struct WantedRow {
  int64_t row = 0, layer = 0;
  std::vector<float> out;
  std::vector<int32_t> selected;  ///< sparse path: the positions it attended to
  Path path = Path::latent;
  bool masked = false;  ///< RequestPlan::masked
};

/// A step's measured time: `seconds`, of which the first `plan` went into its plan; and when it ran, on
/// std::chrono::steady_clock, which also counts what an engine would not do in a step.
struct StepTime {
  double seconds = 0, plan = 0, start = 0, end = 0;
};

class Engine {
 public:
  /// Which heads of the model it runs, and the ranks that run the others.
  struct Part {
    HeadRange heads;
    Communicator* ranks = nullptr;  ///< null: there are none
    ContextParallel context;        ///< of a cache that they split
  };
  /// Options are complete (layers, limits.pages). `positions`: of the longest sequence. Stops between layers when
  /// `stop` becomes true; fills what the result says of memory.
  Engine(const Options& options, const Part& part, int64_t positions, ThreadPool& pool, const std::atomic<bool>& stop,
         Result& result);
  ~Engine();

  /// Of fp8 caches, scales that are 0: by the latents that hidden states [rows, hidden] give in each layer. Given none,
  /// all are 1.
  void calibrate(std::span<const float> hidden, std::vector<float>& k_scales);
  /// Before the first step.
  void use_k_scales(std::vector<float> k_scales) { k_scales_ = std::move(k_scales); }

  /// Plans and runs a step of hidden states [tokens, hidden]. Rows are filled in.
  StepTime run(const Batch& batch, std::span<const float> hidden, std::span<WantedRow> rows, Result& result);
  /// Closes what was measured by op.
  void finish(Result& result);

 private:
  struct CapturedSteps;
  /// What a batch's step may be launched as; null: it runs call by call. Made when it is first met, or met again where
  /// such steps are rare.
  CapturedSteps* captured_for(const Batch& batch);
  std::unique_ptr<CapturedSteps> capture(const StepMaxima& maxima);
  /// On a GPU, before time counts: a layer's kernels are loaded and the products' algorithms looked up when they are
  /// first needed, a tenth of a second. Steps over the first page, in which nothing is written to the caches.
  void warm_up();
  /// Memory of a step's calls. Layers that share a choice have one selection; `apart`: others have one each.
  struct Working {
    std::span<std::byte> workspace, selection;
    const StagedStep& staged;
    bool apart = false;
  };
  std::span<std::byte> selection_of(int64_t layer, const Plan& plan, const Working& memory) const;
  void forward_all(const Plan& plan, const Batch& batch, const Working& memory, const void* hidden, void* out,
                   bool keep_all, std::span<WantedRow> rows, Profile* profile);
  LayerContext context(int64_t layer, const Plan& plan, const Batch& batch, const Working& memory, Profile* profile);
  /// On a GPU: the steps of a kind, and those of them whose ops were timed. What was measured stands for all by time.
  struct Sample {
    Profile profile;
    int64_t steps = 0;
    double seconds = 0, all_seconds = 0;
  };
  void profile_layer(const Plan& plan, const Batch& batch, Profile& profile);
  void keep_spans(Result& result);
  float k_scale_of(const LayerWeights& weights, std::span<const float> hidden);
  void count_saturated(Result& result);
  void take(WantedRow& row, const Plan& plan, const std::byte* out, std::span<std::byte> selection);
  /// Of a split cache: the step's slots in this rank's.
  std::span<const int32_t> own_slots(const Batch& batch);
  bool gpu() const { return stream_.device().kind == DeviceKind::cuda; }

  const Options& o_;
  const ModelConfig model_;  // of its heads
  Communicator* const ranks_;
  const PlanOptions plan_;
  ThreadPool& pool_;
  Stream stream_;
  CacheSpec spec_;
  IndexCacheSpec index_spec_;
  int64_t positions_;
  std::vector<LayerWeights> weights_;
  std::vector<Cache> caches_;
  std::vector<float> k_scales_;           // of fp8 caches; empty: 1
  std::vector<bool> written_;             // of fp8 caches: slots that hold a row
  std::vector<IndexCache> index_caches_;  // empty where a layer has no indexer
  RotaryTable rotary_, index_rotary_;
  DeviceInfo device_;
  Dtype io_;  // of hidden states and outputs
  Buffer workspace_, selection_, hidden_, out_;
  std::vector<uint16_t> narrow_;
  std::vector<int32_t> slots_;
  StagedStep staged_;
  using Size = std::array<int64_t, 3>;                       // most requests, tokens, and tokens of a request
  std::map<Size, std::unique_ptr<CapturedSteps>> captured_;  // null: met once
  Sample captured_steps_, others_;                           // steps that run as a graph; and the rest
  int64_t layer_ = 0;                                        // whose ops run
  double span_start_ = 0;                                    // on a GPU: where the next call is put
};

}  // namespace mla::serve
