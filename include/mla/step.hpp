// What a plan does, as data: ops in the order they run, their operands named instead of addressed. The layer finds the
// memory of each and runs them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <variant>

#include "mla/dtype.hpp"
#include "mla/index_cache.hpp"
#include "mla/view.hpp"
#include "mla/work.hpp"

namespace mla {

/// Where an operand's memory comes from.
enum class Memory : uint8_t {
  none,  ///< there is no operand
  workspace,
  selection,  ///< LayerContext::selection; 32-bit integers
  // Of the call, a row a token, strided as the caller's are.
  hidden,
  hidden_out,
  q,  ///< attend()'s, as are the next two; forward() makes them in the workspace, as do casts
  kv_c,
  k_pe,
  given_q,  ///< attend()'s inputs of another dtype than rows have, which become the three above
  given_kv_c,
  given_k_pe,
  heads,      ///< where finished heads go: attend()'s output, or the workspace
  heads_out,  ///< attend()'s output of another dtype than heads are made in
  positions,  ///< select()'s; 32-bit integers
};

/// A view whose memory is found when the step runs. Strides are its own in the workspace and a selection, and the
/// call's otherwise.
template <class... Dims>
struct Operand : detail::Shape<Dims...> {
  using Base = detail::Shape<Dims...>;
  using typename Base::Extents;
  Memory memory = Memory::none;
  Dtype dtype = Dtype::f32;  ///< in the call's memory, the call's
  int64_t offset = 0;        ///< bytes from where the memory begins

  constexpr Operand() = default;
  constexpr Operand(Memory from, Dtype type, int64_t begin, const Extents& extents)
      : Base(extents), memory(from), dtype(type), offset(begin) {}
  constexpr Operand(Memory from, Dtype type, int64_t begin, const Extents& extents, const Extents& strides)
      : Base(extents, strides), memory(from), dtype(type), offset(begin) {}
  constexpr explicit operator bool() const { return memory != Memory::none; }

  /// Elements [begin, begin + extents.back()) of the last dimension, under other names.
  template <class... As>
  constexpr Operand<As...> part(int64_t begin, const typename Operand<As...>::Extents& extents) const {
    return {memory, dtype, offset + begin * static_cast<int64_t>(size_of(dtype)), extents, this->strides_};
  }
  /// Rows [begin, begin + count); of the workspace or a selection.
  constexpr Operand rows(int64_t begin, int64_t count) const {
    Operand o = *this;
    o.offset += begin * this->strides_[0] * static_cast<int64_t>(size_of(dtype));
    o.extents_[0] = count;
    return o;
  }
};

/// A layer's weights by role.
enum class Weight : uint8_t {
  query_down,
  query,
  query_rope,
  kv_down,
  kv_up,
  absorb_key,
  value_up,
  output,
  absorbed_query,
  absorbed_output,
  index_query,
  index_key,
  index_head_weights,
};

/// Scales of a layer's e4m3 prefills by role (PrefillScales); none: an op's own number.
enum class Scales : uint8_t { none, query, query_rope, key, key_rope, value };

/// Lists that steps read: the batch's, and the plan's. Where a plan has several of a kind, `part` numbers them.
enum class ListKind : uint8_t {
  none,
  slot_mapping,
  seq_lens,
  positions,
  latent_tokens,
  latent_items,
  splits,
  rank_splits,
  expanded_tokens,
  suffix_items,
  context_pieces,  ///< of a chunk, as are the next
  context_items,
  context_held,
  context_sources,
  context_placed,
  sparse_requests,
  sparse_positions,
  sparse_tokens,
  gathered_starts,
  gathered_counts,
  sparse_items,  ///< of a group, as are the next two
  sparse_splits,
  sparse_pieces,
  index_rows,
  index_tile,  ///< of a tile, as is the next
  index_joined,
  written_rows,  ///< of a plan with maxima
  written_sums,  ///< the same, of ranks that sum their own rows
};
struct ListKey {
  ListKind kind = ListKind::none;
  int32_t part = 0;
  friend bool operator==(const ListKey&, const ListKey&) = default;
};

/// Elements [begin, begin + count) of a list.
template <class T>
struct ListOf {
  ListKey key;
  int64_t begin = 0, count = 0;
};
using RowList = ListOf<int32_t>;

/// What a step does: an op's arguments (src/ops) with operands, lists and weights named. Numbers are as the op has
/// them.
namespace steps {

struct Project {
  Operand<Token, Head, In> x;
  RowList x_rows;
  Weight weights = Weight::query;
  Operand<Token, Head, Out> y;
  RowList y_rows;
  int64_t rows = 0;
  bool quantized = false;  ///< finishes heads of a quantised output
  bool divided = false;    ///< each rank makes a range of the rows; an AllGather brings them together
};
struct Cast {
  Operand<Token, Head, In> x;
  RowList x_rows;
  Operand<Token, Head, In> y;
  float scale = 1.0f;  ///< 0: the layer's, of queries (LayerWeights::query_scale)
  Scales scales = Scales::none;
  bool through_e4m3 = false;
  RowList y_rows = {};
};
/// Keys and values of latent rows as codes, by the layer's scales.
struct Expand {
  Operand<Token, Latent> x;
  RowList x_rows;
  Weight weights = Weight::kv_up;
  Operand<Key, Head, Nope> keys;
  Operand<Key, Head, Value> values;
  Operand<Token, Out> products;  ///< room for those of some rows
};
/// In place, by the query's norm weights.
struct Norm {
  Operand<Token, In> x;
  double eps = 1e-6;
  RowList positions;  ///< none: rows do not grow
  double growth_beta = 0;
  int32_t growth_length = 1;
};
/// In place, by the indexer's.
struct LayerNorm {
  Operand<Token, In> x;
};
/// In place, by the indexer's table.
struct Rotate {
  Operand<Token, Head, Rope> q;
  Operand<Token, Rope> k;
  RowList positions;
};
struct Hadamard {
  Operand<Token, IndexHead, IndexDim> q;
  Operand<Token, IndexDim> k;
};
struct Append {
  Operand<Token, Latent> kv_c;
  Operand<Token, Rope> k_pe;
  RowList slots;
};
struct NormRopeAppend {
  Operand<Token, Head, Rope> q_pe;
  Operand<Token, Latent> kv_c;
  Operand<Token, Rope> k_pe;
  double eps = 1e-6;
  RowList positions, slots;
  // Where rotated queries of these tokens go; none: they stay in their place.
  Operand<Token, Head, Rope> q_placed = {};
  RowList q_tokens = {};
};
struct Gather {
  ListOf<GatherPiece> pieces;
  Operand<Key, Latent> kv_c;
  Operand<Key, Rope> k_pe;
  // Of rows that ranks have sent, as bytes, where they are read instead of the cache; the block table of their one
  // request.
  Operand<Key, Entry> sent = {};
  RowList sources = {};
};
/// Cached rows as they are sent, one behind another.
struct PackRows {
  ListOf<GatherPiece> pieces;
  Operand<Key, Entry> rows;  ///< bytes
};
/// Each member's rows of a chunk on every one: this rank's lie in their place.
struct GatherRows {
  Operand<Key, Entry> rows;  ///< bytes; member 0's first
  int32_t chunk = 0;
};
/// Which worker attends what, for AttendLatent of the same queries and items in every layer. It stays where the step is
/// staged.
struct ScheduleLatent {
  Operand<Token, Head, Entry> q;  ///< its dtype and extents; it is not read
  ListOf<LatentItem> items;
};
struct AttendLatent {
  Operand<Token, Head, Entry> q;
  float q_scale = 1.0f;  ///< of e4m3 queries; 0: the layer's
  ListOf<LatentItem> items;
  bool scheduled = false;  ///< by a ScheduleLatent, where the step is staged
  float scale = 1.0f;      ///< 0: the softmax's times the layer's of queries
  Operand<Token, Head, Value> out;
  Operand<Token, Head> lse;
  Operand<Partial, Head, Value> partial_out;
  Operand<Partial, Head> partial_lse;
};
struct MergeSplits {
  Operand<Partial, Head, Value> partial_out;
  Operand<Partial, Head> partial_lse;
  ListOf<SplitRows> items;
  Operand<Token, Head, Value> out;
  Operand<Token, Head> lse;
};
struct AttendExpanded {
  Operand<Token, Head, QueryKey> q;
  Operand<Key, Head, Nope> k_nope;
  Operand<Key, Rope> k_pe;
  Operand<Key, Head, Value> v;
  ListOf<ExpandedItem> items;
  Operand<Token, Word> mask = {};  ///< of masked items
  float scale = 1.0f;
  Operand<Token, Head, Value> out;
  Operand<Token, Head> lse;
  bool accumulate = false;
  bool quantized = false;  ///< as Project's
  bool raw_sums = false;   ///< of codes, which are by the layer's scales
};
struct AttendSparse {
  Operand<Token, Head, Entry> q;
  float q_scale = 1.0f;          ///< as AttendLatent's, and so is scale
  Operand<Key, Entry> gathered;  ///< none: cache rows are read in place
  Operand<Token, Topk> slots;
  ListOf<SparseItem> items;
  int32_t part_keys = 0;
  bool many_holes = false;   ///< slots are those of a split cache
  bool shared_keys = false;  ///< several rows are one request's
  float scale = 1.0f;
  Operand<Token, Head, Value> out;
  Operand<Token, Head> lse;
  Operand<Partial, Head, Value> partial_out;
  Operand<Partial, Head> partial_lse;
};
struct MergeSparse {
  Operand<Partial, Head, Value> partial_out;
  Operand<Partial, Head> partial_lse;
  ListOf<SplitRows> items;
  Operand<Token, Head, Value> out;
  Operand<Token, Head> lse;
};
struct IndexAppend {
  Operand<Token, IndexDim> keys;
  RowList slots;
};
struct IndexQuery {
  Operand<Token, IndexHead, IndexDim> q;
  Operand<Token, IndexHead> weights;  ///< in place
  Operand<Token, IndexHead, IndexDim> codes;
  RowList positions;  ///< by these, queries are rotated first; none: they have been
};
struct IndexScore {
  Operand<Token, IndexHead, IndexDim> q;
  Operand<Token, IndexHead> weights;
  float scale = 1.0f;
  ListOf<IndexItem> items;
  int64_t first = 0;
  Operand<Token, Key> scores;
  IndexArithmetic arithmetic = IndexArithmetic::exact;
};
struct SelectTopk {
  Operand<Token, Key> scores;
  ListOf<IndexItem> items;
  int64_t first = 0;
  Operand<Token, Topk> state;
  Operand<Token, Key> positions = {};  ///< of the scores; none: those of the items
  Operand<Token, Topk> indices = {};   ///< of a last window, for which no FinishTopk follows
};
struct FinishTopk {
  Operand<Token, Topk> state;
  ListOf<IndexItem> items;
  Operand<Token, Topk> indices;
  Operand<Token, Topk> scores = {};  ///< none: not wanted
  bool held = false;                 ///< what is selected from are tokens of this rank
};
/// What each member selected of its own tokens, on every one; member 0's columns first.
struct GatherCandidates {
  Operand<Token, Topk> positions, scores;
  Operand<Token, Key> all_positions, all_scores;
};
struct FillTopk {
  ListOf<IndexItem> items;
  Operand<Token, Topk> indices;
};
struct PickRows {
  Operand<Token, Topk> positions;
  RowList rows;
  Operand<Token, Topk> picked;
};
struct MapToSlots {
  Operand<Token, Topk> positions;
  RowList requests, lengths;
  Operand<Token, Topk> slots;
};
struct MapToWorkspace {
  Operand<Token, Topk> positions;
  RowList requests, starts, counts;
  Operand<Token, Topk> rows;
};
struct MapToMask {
  Operand<Token, Topk> positions;
  RowList rows;
  Operand<Token, Word> mask;
};
/// Queries of every rank's heads on every rank, rank 0's heads first; latent ones, or as heads have them.
struct GatherQueries {
  Operand<Token, Head, Entry> x, y;  ///< this rank's; all ranks'
};
/// To each rank what this one found for its heads; from each what it found for this one's.
struct ExchangeFound {
  Operand<Token, Head, Value> found;  ///< of all ranks' heads
  Operand<Token, Head> found_lse;
  Operand<Partial, Head, Value> got;  ///< found's rows as rank 0 found them, then rank 1's, ...
  Operand<Partial, Head> got_lse;
};
/// The sum of the ranks' rows, in place, on all of them.
struct AllReduce {
  Operand<Token, In> x;  ///< dense
};
/// The same, of each rank's range of the rows: in its place, on this rank alone.
struct ReduceScatter {
  Operand<Token, In> x;  ///< dense
};
/// Rows of which each rank has made its range, in their place, on all of them.
struct AllGather {
  Operand<Token, Head, Out> y;  ///< dense
};
/// Zeros, of a dummy step.
struct Zero {
  Operand<Token, Head, In> y;
};
/// All heads of tokens into the call's quantised output.
struct Quantize {
  Operand<Token, HeadValue> x;
  RowList rows = {};  ///< of x and of the output; none: all
};
struct QuantizePadding {
  int64_t rows = 0;
};
/// The selection holds no choice from here, and this step's from here: what sharing layers are told.
struct BeginChoice {};
struct EndChoice {};
/// The step's lane goes on when what lane `on` was given before is done.
struct Wait {
  int8_t on;
};

using Work =
    std::variant<Project, Cast, Expand, Norm, LayerNorm, Rotate, Hadamard, Append, NormRopeAppend, Gather, PackRows,
                 GatherRows, ScheduleLatent, AttendLatent, MergeSplits, AttendExpanded, AttendSparse, MergeSparse,
                 IndexAppend, IndexQuery, IndexScore, SelectTopk, FinishTopk, GatherCandidates, FillTopk, PickRows,
                 MapToSlots, MapToWorkspace, MapToMask, Quantize, QuantizePadding, GatherQueries, ExchangeFound,
                 AllReduce, ReduceScatter, AllGather, Zero, BeginChoice, EndChoice, Wait>;

}  // namespace steps

/// Calls that a step is a part of, as bits.
struct Calls {
  uint8_t bits = 0;
  friend constexpr Calls operator|(Calls a, Calls b) { return {static_cast<uint8_t>(a.bits | b.bits)}; }
  constexpr bool any_of(Calls other) const { return (bits & other.bits) != 0; }
};
constexpr Calls kForward{1};   ///< forward()
constexpr Calls kIndexer{2};   ///< forward() of a layer with an indexer
constexpr Calls kAttend{4};    ///< attend()
constexpr Calls kNarrowed{8};  ///< attend() into another dtype than heads are made in
constexpr Calls kSelect{16};   ///< select()
constexpr Calls kAnyCall{31};
constexpr Calls kStaging{32};  ///< no call of a layer: StagedStep's, once a step

constexpr int kLanes = 3;

struct Step {
  std::string_view name;  ///< as Profile has it: a literal
  Calls calls;
  steps::Work work;
  /// Steps of a lane follow one another. Those of different lanes may run at once, each lane on a GPU's stream of its
  /// own with scratch of its own, but for what a Wait orders; lane 0 is the call's stream.
  int8_t lane = 0;
};

}  // namespace mla
