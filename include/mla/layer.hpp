// One MLA layer executed by a plan. Two forms: block (hidden in, hidden out) and attention (q, kv_c, k_pe in; heads
// out).
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "mla/batch.hpp"
#include "mla/cache.hpp"
#include "mla/device.hpp"
#include "mla/plan.hpp"
#include "mla/quant.hpp"
#include "mla/rotary.hpp"
#include "mla/staged_step.hpp"
#include "mla/weights.hpp"

namespace mla {

class Communicator;

namespace gpu {
class Stopwatch;
}

/// Time and counted work by op, summed over calls. Attach one to a Layer to fill it. A GPU's times are those of its own
/// clock, read when rows() is asked for; what the stream has not done by then is waited for.
class Profile {
 public:
  struct Row {
    std::string_view op;  ///< a string literal
    double seconds = 0, bytes = 0, flops = 0;
    int64_t calls = 0;
  };
  /// One call as it happened.
  struct Call {
    std::string_view op;  ///< a string literal
    double start = 0;     ///< seconds on std::chrono::steady_clock; 0 on a GPU, whose calls follow one another
    double seconds = 0, bytes = 0, flops = 0;
  };
  Profile();
  ~Profile();
  Profile(Profile&&) noexcept;
  Profile& operator=(Profile&&) noexcept;

  /// A call that has just ended and took `seconds`.
  void add(std::string_view op, double seconds, double bytes, double flops);
  /// Counted work of a call.
  struct Work {
    double bytes = 0, flops = 0;
  };
  /// The same with the time that the watch will have measured, and work that is counted when rows() is asked for.
  void add(std::string_view op, std::unique_ptr<gpu::Stopwatch> watch, std::function<Work()> work);
  /// Sums measured elsewhere.
  void add(const Row& sums);
  const std::vector<Row>& rows() const;
  /// Multiplies all sums and counts: of a sample, to stand for the whole.
  void scale(double factor);
  void clear();
  /// Also tells `observer` of every call, in their order: on a CPU from within add(), on a GPU from within rows().
  /// Empty for none.
  void observe(std::function<void(const Call&)> observer);

 private:
  struct Pending;
  void settle() const;
  std::function<void(const Call&)> observer_;
  mutable std::vector<Row> rows_;
  mutable std::vector<Pending> pending_;
};

/// Everything one step of one layer needs besides its inputs. All is borrowed; nothing is kept between calls. On a GPU,
/// weights, tables, cache, workspace, selection, inputs and outputs lie in its memory, and the step is staged; calls
/// are queued, and can be captured (Graph).
struct LayerContext {
  const Plan& plan;
  const Batch& batch;  ///< the batch that was planned: its block table and slots are read
  const LayerWeights& weights;
  const RotaryTable& rotary;  ///< of forward(): made of ModelConfig::rotary, for all of the step's positions
  /// Not looked at where plan.uses_cache() is false. data 16-byte aligned; page_stride at least page_bytes() and a
  /// multiple of 4 bytes (f32, fp8_ds_mla, and where Plan::gathers_context()), 1 (fp8) or 2 (all others).
  CacheView cache;
  std::span<std::byte> workspace;  ///< at least plan.workspace_bytes, 64-byte aligned; contents may be anything
  /// On a stream that is held (HeldStream), what a sparse step's rows attend to is counted when rows() is asked for: do
  /// that before the selection is written again.
  Profile* profile = nullptr;
  // Of models with an indexer.
  IndexCacheView index_cache;                 ///< of forward() with indexer weights: page for page beside the cache
  const RotaryTable* index_rotary = nullptr;  ///< made of ModelConfig::index_rotary(); likewise
  /// At least plan.selection_bytes, 64-byte aligned. A layer with an indexer writes it; layers that share its choice,
  /// later in the step, read it. BatchError when they find none there, or that of another step. On a GPU that is known
  /// of the stream's calls, not read: choices made while a stream was captured are taken for the step's.
  std::span<std::byte> selection = {};
  /// On a GPU: where the plan's lists and the block table lie. Without it kernels read the plan's and the batch's own
  /// memory, which must then be the device's to read (pinned, managed).
  const StagedStep* staged = nullptr;
  // Of forward() with a plan whose options say tensor_parallel, of attend() where they say context_parallel, too; not
  // looked at otherwise.
  Communicator* ranks = nullptr;  ///< of as many ranks; all of them make the same calls in the same order
  std::chrono::nanoseconds deadline = std::chrono::minutes(1);  ///< that a call waits for the others: then RankError
};

/// Block form: out = W_O attention(rmsnorm, projections, rope of hidden). hidden [Token >= plan.tokens, Hidden], f32 or
/// bf16, or what PlanOptions::activation_dtype says; out f32 or bf16, with f16 activations f16 too. Rows past
/// plan.tokens are neither read nor written. Appends the step's rows to the cache. UnsupportedError when the plan was
/// made for the attention form alone or a quantised output: this one is hidden states.
void forward(Stream& stream, const LayerContext& context, AnyView<Token, Hidden> hidden,
             AnyMutableView<Token, Hidden> out);

/// Puts the caller's own choice into context.selection, for layers without an indexer and for the attention form:
/// positions [Token >= plan.tokens, topk], counted from each token's request's start, unused entries negative. Rows of
/// tokens that the plan attends densely are not read. A position past the request's sequence counts as unused; one past
/// its own token does not: what is chosen is attended. ShapeError when topk is not the plan's or memory is too small;
/// UnsupportedError where the plan masks rows (SparsePolicy::masked, and automatic in the block form).
void select(Stream& stream, const LayerContext& context, View<const int32_t, Token, Topk> positions);

/// Attention form: q [Token, Head, nope + rope] rotated, kv_c normed, k_pe rotated, all of dtype plan.inputs();
/// q and kv_c are taken as they are: what a model multiplies them by (ModelConfig::query_scale, latent_scale,
/// query_growth) is the caller's to have done, scores take ModelConfig::softmax_scale alone.
/// out [Token, Head, Value], f32, bf16 or f16. Appends [kv_c | k_pe] first, with CacheUse::append; with read,
/// both are looked at where the plan has requests on the expanded path alone, whose new tokens attend to one another
/// through them unless they are read back from the cache (Plan::reads_new_rows). Sparse rows attend to what
/// context.selection holds: see select().
void attend(Stream& stream, const LayerContext& context, AnyView<Token, Head, QueryKey> q, AnyView<Token, Latent> kv_c,
            AnyView<Token, Rope> k_pe, AnyMutableView<Token, Head, Value> out);

/// The same with a quantised output: out holds, bit for bit, what quantising the other form's f32 result would give.
/// out.spec must be of the format that the plan was made for (PlanOptions::output); its scale or global_scale is this
/// layer's. out.tokens >= plan.tokens; rows past plan.tokens are left alone.
void attend(Stream& stream, const LayerContext& context, AnyView<Token, Head, QueryKey> q, AnyView<Token, Latent> kv_c,
            AnyView<Token, Rope> k_pe, const QuantizedView& out);

}  // namespace mla
