// map_indices: selected positions, counted from their request's first token, to rows of the memory that holds them. An
// unused entry (a position below 0) stays unused, and so does one whose row does not exist: -1. Done once a step and
// group of layers that share a selection; attend_sparse reads the result. Or to masks of positions, which
// attend_expanded reads.
#pragma once

#include "mla/view.hpp"
#include "ops/cost.hpp"
#include "ops/held.hpp"
#include "ops/list.hpp"

namespace mla::ops {

/// To cache slots: position t of request r -> block_table(r, t / page_size) * page_size + t % page_size. -1 for t past
/// the table's columns or the request's length, and for a page outside [0, pages).
struct MapToSlotsArgs {
  View<const int32_t, Token, Topk> positions;  ///< Topk dense; any numbers
  /// Of each row; its length is the number of rows mapped. Below 0: a row of no request, all of it -1.
  List<int32_t> requests;
  BlockTable block_table;
  int64_t page_size = 0, pages = 0;  ///< of the cache; their product numbers its slots in 32 bits
  List<int32_t> lengths;             ///< tokens a request has, of all that are named; empty: no bound but the table's
  View<int32_t, Token, Topk> slots;  ///< may be `positions`
  /// Of a split cache: the table lists the pages of the rank's own tokens alone, and positions of others become -1.
  HeldTokens held = {};
};

/// To rows of a workspace where whole requests lie gathered: position t of request r -> starts[r] + t, -1 for t not
/// below counts[r].
struct MapToWorkspaceArgs {
  View<const int32_t, Token, Topk> positions;
  List<int32_t> requests;           ///< as above
  List<int32_t> starts, counts;     ///< first row and number of rows of each request
  View<int32_t, Token, Topk> rows;  ///< may be `positions`
  HeldTokens held = {};             ///< as above: what lies gathered are the rank's own tokens
};

/// Rows of selections made elsewhere: row r of `picked` is row rows[r] of `positions`.
struct PickRowsArgs {
  View<const int32_t, Token, Topk> positions;  ///< Topk dense
  List<int32_t> rows;                          ///< its length is the number of rows picked
  View<int32_t, Token, Topk> picked;           ///< Topk dense; apart from `positions`
};

/// To masks: bit t % 32 of word t / 32 is set for each position t of the row, all others are cleared. Positions past the
/// words are left out.
struct MapToMaskArgs {
  View<const int32_t, Token, Topk> positions;  ///< Topk dense; any numbers
  /// Of each row its row of `mask`, none twice; its length is the number of rows mapped. Below 0: a row of none.
  List<int32_t> rows;
  View<uint32_t, Token, Word> mask;  ///< Word dense; rows that are not named are left alone
};

void check(const MapToSlotsArgs& a);
void check(const MapToWorkspaceArgs& a);
void check(const PickRowsArgs& a);
void check(const MapToMaskArgs& a);
Cost cost(const MapToSlotsArgs& a);
Cost cost(const MapToWorkspaceArgs& a);
Cost cost(const PickRowsArgs& a);
Cost cost(const MapToMaskArgs& a);
/// Exact in integers, so there is nothing in float64 here: what the op must write.
void reference(const MapToSlotsArgs& a, View<int32_t, Token, Topk> slots);
void reference(const MapToWorkspaceArgs& a, View<int32_t, Token, Topk> rows);
void reference(const PickRowsArgs& a, View<int32_t, Token, Topk> picked);
void reference(const MapToMaskArgs& a, View<uint32_t, Token, Word> mask);

}  // namespace mla::ops
