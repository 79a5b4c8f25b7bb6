// The sparse path of a step: the indexer scores and selects, the selection is mapped to rows once, attention reads
// those rows.
#pragma once

#include "layer/runner.hpp"

namespace mla::layer {

class Sparse : Runner {
 public:
  explicit Sparse(const Runner& runner) : Runner(runner) {}

  /// That the context has what the plan's sparse rows and the weights' indexer need.
  void check() const;
  /// BatchError unless the selection that this step's sparse rows are to read was made for them.
  void require_chosen() const;
  /// Keys of the step's tokens join the index cache, whatever attends; sparse rows then choose among what they see.
  /// hidden [tokens, 1, H]; query_latent: the normed query latents [tokens, 1, Lq].
  void index(const AnyView<Token, Head, In>& hidden, const AnyView<Token, Head, In>& query_latent) const;
  /// The caller's positions [tokens, topk] in place of the indexer's.
  void choose(View<const int32_t, Token, Topk> positions) const;
  /// Latent queries over the selected rows; q, out and lse begin at the first sparse row.
  void attend(const AnyView<Token, Head, Entry>& q, float q_scale, AnyMutableView<Token, Head, Value> out,
              View<float, Token, Head> lse) const;

 private:
  void select(const AnyView<Token, IndexHead, IndexDim>& q, View<const float, Token, IndexHead> weights) const;
  void map() const;
  void begin_choice() const;
  void end_choice() const;
  CacheView gather(const SparseGroup& group) const;
};

}  // namespace mla::layer
