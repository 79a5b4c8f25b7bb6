// Steps of a plan as they are made: each path appends its own.
#pragma once

#include <string_view>
#include <utility>

#include "mla/plan.hpp"

namespace mla::planning {

/// Where steps are appended. Lists that they name are noted with the plan, and are what is staged.
class Steps {
 public:
  explicit Steps(Plan& p) : plan(p), m(p.model), act(p.activations()), tokens(p.tokens) {}

  void add(std::string_view name, Calls calls, steps::Work work) {
    plan.steps.push_back({name, calls, std::move(work), lane_});
    for (auto& lane : since_) lane[lane_] = lane[lane_] | calls;
  }
  /// What follows is of this lane, where the plan has several.
  void go_on_in(int lane);
  /// The lane waits for what another did since it last waited for it, in these calls.
  void wait(Calls calls, int on);
  /// For all others.
  void join(Calls calls);
  void project(std::string_view name, Calls calls, const Operand<Token, Head, In>& x, const RowList& x_rows,
               Weight weights, const Operand<Token, Head, Out>& y, const RowList& y_rows, int64_t rows,
               bool quantized = false) {
    add(name, calls, steps::Project{x, x_rows, weights, y, y_rows, rows, quantized});
  }

  /// Of weights that all ranks have: where enough rows are there, each rank makes a range of them.
  void project_shared(std::string_view name, std::string_view gather, Calls calls, const Operand<Token, Head, In>& x,
                      Weight weights, const Operand<Token, Head, Out>& y) {
    const bool divided = plan.divides_rows();
    add(name, calls, steps::Project{x, {}, weights, y, {}, tokens, false, divided});
    if (divided) add(gather, calls, steps::AllGather{y});
  }

  /// A dense array at the beginning of a region.
  template <class... D>
  Operand<D...> region(std::string_view name, Dtype dtype, const typename Operand<D...>::Extents& extents) const {
    return {Memory::workspace, dtype, static_cast<int64_t>(plan.region(name).offset), extents};
  }
  /// The same, strided.
  template <class... D>
  Operand<D...> region(std::string_view name, Dtype dtype, const typename Operand<D...>::Extents& extents,
                       const typename Operand<D...>::Extents& strides) const {
    return {Memory::workspace, dtype, static_cast<int64_t>(plan.region(name).offset), extents, strides};
  }
  /// Rows of the call's.
  template <class... D>
  Operand<D...> input(Memory memory, Dtype dtype, const typename Operand<D...>::Extents& extents) const {
    return {memory, dtype, 0, extents};
  }
  /// A list of the plan's that there is one of.
  template <class T>
  ListOf<T> list(ListKind kind, const std::vector<T>& of) {
    return {once(kind), 0, static_cast<int64_t>(of.size())};
  }
  /// One of the batch's or the plan's with an entry a token or a request.
  RowList list(ListKind kind, int64_t count) { return {once(kind), 0, count}; }
  /// One of several; named by one step.
  template <class T>
  ListOf<T> list(ListKind kind, const std::vector<T>& of, size_t part) {
    plan.lists.push_back({kind, static_cast<int32_t>(part)});
    return {plan.lists.back(), 0, static_cast<int64_t>(of.size())};
  }
  template <class T>
  static ListOf<T> slice(ListOf<T> of, int64_t begin, int64_t count) {
    return {of.key, of.begin + begin, count};
  }

  /// Rows of a call's output that are written; none named: all of them.
  RowList written() { return plan.options.maxima ? list(ListKind::written_rows, plan.written_rows) : RowList{}; }
  /// The same of forward()'s.
  RowList written_sums() {
    return plan.options.maxima && plan.sums_own() ? list(ListKind::written_sums, plan.written_sums) : written();
  }

  Plan& plan;
  const ModelConfig& m;
  const Dtype act;
  const int64_t tokens;

 private:
  ListKey once(ListKind kind) {
    const uint32_t bit = uint32_t{1} << static_cast<uint32_t>(kind);
    if (!(named_ & bit)) plan.lists.push_back({kind, 0});
    named_ |= bit;
    return {kind, 0};
  }
  uint32_t named_ = 0;  // kinds that there is one list of
  int8_t lane_ = 0;
  // [lane][other]: calls in which the other one has steps that this lane has not waited for. What calls before this one
  // queued is lane 0's.
  Calls since_[kLanes][kLanes] = {{}, {kAnyCall}, {kAnyCall}};
};

/// The block form: projections, the indexer and the output around attention_steps().
void block_steps(Steps& s);
/// The same with W_Q W_UK^T and W_UV W_O, and without attention_steps(): latent queries straight from the query source,
/// hidden straight from latent outputs.
void absorbed_steps(Steps& s);
/// Both forms' attention, from queries and new rows to finished heads. calls: forward() where it has appended the rows.
void attention_steps(Steps& s, Calls calls);

/// Zeros for results.
void dummy_steps(Steps& s);

// Parts of these.

/// Finished heads in the dtype or format that attend() was asked for.
void finish_heads(Steps& s);

/// The block form's last product, of ranks that split the heads summed: hidden rows in the call's dtype.
void project_hidden(Steps& s, std::string_view name, const Operand<Token, Head, In>& x, Weight weights,
                    const RowList& y_rows, int64_t rows);

/// The call's hidden states as products take them.
Operand<Token, Head, In> hidden_rows(Steps& s);
/// Normed query latents, where the model has them: what queries are projected from.
Operand<Token, Head, In> query_source(Steps& s, const Operand<Token, Head, In>& hidden);
/// The new tokens' cache rows.
void new_rows(Steps& s, const Operand<Token, Head, In>& hidden);
/// They are normed, rotated and appended; q_pe is rotated with them.
void append_new_rows(Steps& s, const Operand<Token, Head, Rope>& q_pe);
/// Latent queries before their quantisation: [latent | rope] per head.
Operand<Token, Head, Entry> staged_queries(const Steps& s);
/// Their rotated parts.
Operand<Token, Head, Rope> latent_rope(const Steps& s);
/// Whether append_new_rows() writes them: on a GPU, where all tokens' queries are latent ones, in the dtype that they
/// come in.
bool appending_places_rope(const Steps& s);
/// Rotated parts of these tokens' queries behind their latent parts, in calls that do not append.
void place_rope(Steps& s, Calls calls, const Operand<Token, Head, Rope>& q_pe, const RowList& tokens);
/// What items that are splits leave, for a merge behind them.
struct Partials {
  Operand<Partial, Head, Value> out;
  Operand<Partial, Head> lse;
};
Partials partials(const Steps& s, int64_t rows, int64_t heads);
/// Staged queries over the cached rows; their quantisation first, where the plan asks for it. Splits are merged.
Operand<Token, Head, Value> attend_latent(Steps& s, Calls calls);
/// Absorbed queries over the cache itself, then W_UV.
void latent_steps(Steps& s, Calls calls);
/// New tokens among themselves, unless chunks have them too; then one chunk of cached rows after another, merged in
/// place.
void expanded_steps(Steps& s, Calls calls);
/// What an indexer makes of hidden states: keys of the step's tokens, head weights of the sparse rows.
void index_products(Steps& s, const Operand<Token, Head, In>& hidden);
/// The keys join the index cache, whatever attends. Rows that see few choose all.
void append_index_keys(Steps& s);
/// The indexer's queries of the sparse rows, as they are scored.
Operand<Token, IndexHead, IndexDim> index_queries(Steps& s, const Operand<Token, Head, In>& query_source);
/// Sparse rows choose among what they see.
void index_choice(Steps& s, const Operand<Token, IndexHead, IndexDim>& queries);
/// All that is made of the hidden states but queries: what queries are projected from. Lanes: new_rows() and the
/// indexer's keys beside query_source(), the choice beside what follows; whoever reads them waits for them.
Operand<Token, Head, In> begin_block(Steps& s, const Operand<Token, Head, In>& hidden);
/// Positions that were chosen, by whomever, become what each group's attention reads.
void choice_steps(Steps& s);
/// What was selected for rows of masked requests as masks of the step's tokens; none where there are no such rows.
Operand<Token, Word> mask_steps(Steps& s, Calls calls);
/// What scores of latent queries are multiplied by: a scale of codes, and softmax's.
struct QueryScales {
  float codes, softmax;
};
/// Latent queries of the sparse rows over what they chose.
void sparse_steps(Steps& s, Calls calls, const Operand<Token, Head, Entry>& q, const QueryScales& scales,
                  const Operand<Token, Head, Value>& out, const Operand<Token, Head>& lse);

}  // namespace mla::planning
