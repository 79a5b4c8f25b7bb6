// The layer straight from its definition, for judging the real one: in float64, or as a plain computation that makes
// the same roundings as the layer but none of its optimisations. An answer is good when its error against float64 is no
// more than twice the plain one's (docs/numerics.md).
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "mla/cache.hpp"
#include "mla/model.hpp"
#include "mla/plan.hpp"
#include "mla/weights.hpp"

namespace mla::reference {

/// A layer's tensors as f32, rounded to the dtype they are prepared in.
struct Weights {
  std::vector<float> query_down, query_norm, query, kv_down, kv_norm, kv_up, output;
  std::vector<float> latent_up;  ///< kv_up as the latent path holds it, when that is quantised; else empty
  /// W_Q W_UK^T [N*L, Lq or H] and W_UV W_O [H, N*L] of full absorption, which then take the place of their factors on
  /// the latent path; else empty.
  std::vector<float> absorbed_query, absorbed_output;
  /// Held in fp8, so that Rounding::inputs says what they are multiplied with.
  bool fp8_products = false, fp8_up = false, fp8_absorbed = false;
  /// W_Q is a product's map under runtime absorption alone: what is left of it otherwise stays plain.
  bool fp8_query() const { return fp8_products && absorbed_query.empty(); }
  std::vector<float> index_query, index_key, index_key_norm, index_key_norm_bias, index_head_weights;  ///< or empty
};
Weights plain_weights(const LayerTensors& tensors, Dtype dtype);
/// What prepare() makes of the tensors under these options, by plain loops, of each rank's heads by itself. Products of
/// weights are moved by this part of themselves before they become codes (Rounding::moved).
Weights plain_weights(const ModelConfig& config, const LayerTensors& tensors, const PrepareOptions& options,
                      int ranks = 1, double moved = 0);

/// Rows as this dtype holds them.
void round_rows(Dtype dtype, std::span<float> rows);

/// What a plain computation rounds.
struct Rounding {
  Dtype weights = Dtype::f32;               ///< bf16: activations round before each product with weights
  Dtype compute = Dtype::f32;               ///< bf16: the operands of attention's products round, its probabilities too
  Activations inputs = Activations::plain;  ///< of products with fp8 weights
  Dtype activations = Dtype::f32;           ///< bf16: rows round whenever an op stores them
  Dtype outputs = Dtype::f32;               ///< hidden states that come out round once more
  std::optional<CacheSpec> cache;           ///< keys go through this format's codec
  Path path = Path::latent;
  float q_scale = 0;  ///< above 0: latent queries go through e4m3 with this scale
  /// The latent path's probabilities go through e4m3, 2^7 at the largest.
  bool latent_codes = false;
  /// The expanded path's queries, keys and values go through e4m3, by these scales.
  const StoredScales* prefill = nullptr;
  Dtype prefill_probabilities = Dtype::bf16;  ///< beside those; e4m3: 2^7 at the largest
  /// Indexer keys go through this format's codec; with fp8, queries do too. Otherwise queries round as compute says.
  std::optional<IndexCacheSpec> index_cache;
  bool index_hadamard = false;
  IndexArithmetic index_arithmetic = IndexArithmetic::exact;
  /// Sums in float64, and nothing rounds whose rounding depends on how a kernel goes about it: probabilities, which
  /// round relative to the maximum that their block has seen.
  bool float64 = false;
  /// What is about to be rounded is moved by this part of itself first: as far as sums in f32 may have moved it, which
  /// shows what becomes of those that lie at a border between two codes.
  double moved = 0;
  /// Cached rows round to `compute` as the latent path reads them.
  bool round_keys = false;
};

/// Output rows [rows.size(), hidden] of one sequence with hidden states [S, hidden], positions 0..S-1, each row
/// attending to itself and all before it, or to the positions that selections[i] lists for rows[i] unless that is
/// empty. contexts[i] tokens were cached before the step of rows[i]: on the expanded path it saw the others as they
/// were before they were stored; all as they are stored without a list. Without `rounding` everything is float64; with
/// it, sums are f32 unless it says otherwise. Nothing comes back when `stop` became true before the end, which is then
/// near.
std::vector<double> output_rows(const ModelConfig& config, const Weights& weights, std::span<const float> hidden,
                                std::span<const int64_t> rows, const Rounding* rounding = nullptr,
                                std::span<const std::vector<int32_t>> selections = {},
                                std::span<const int64_t> contexts = {}, const std::atomic<bool>* stop = nullptr);

/// The indexer's scores of positions 0..row for each of `rows`; none when `stop` became true.
std::vector<std::vector<double>> index_scores(const ModelConfig& config, const Weights& weights,
                                              std::span<const float> hidden, std::span<const int64_t> rows,
                                              const Rounding* rounding = nullptr,
                                              const std::atomic<bool>* stop = nullptr);

/// The best k positions, ascending; the lower of equal scores wins. All of them when there are no more than k.
std::vector<int32_t> best(std::span<const double> scores, int64_t k);

/// How far a choice of k positions is from one that the exact scores allow, as a part of what the error of the plain
/// scores excuses: at most 1 for a choice made from scores whose error is no more than twice theirs. Infinity for a
/// choice of another size, with repeats, or of positions that do not exist.
double selection_error(std::span<const int32_t> chosen, std::span<const double> exact, std::span<const double> plain,
                       int64_t k);

/// Root mean square of got - exact over that of exact.
double relative_error(std::span<const float> got, std::span<const double> exact);

}  // namespace mla::reference
