// The ops, in one list: what a backend's table, the declarations of its functions, ops::run, the conformance cases and
// the build (CMakeLists.txt reads this file) follow from.
#pragma once

#include "ops/append/op.hpp"
#include "ops/attend_expanded/op.hpp"
#include "ops/attend_latent/op.hpp"
#include "ops/attend_sparse/op.hpp"
#include "ops/cast/op.hpp"
#include "ops/expand/op.hpp"
#include "ops/gather/op.hpp"
#include "ops/hadamard/op.hpp"
#include "ops/index_append/op.hpp"
#include "ops/index_gather/op.hpp"
#include "ops/index_query/op.hpp"
#include "ops/index_score/op.hpp"
#include "ops/layer_norm/op.hpp"
#include "ops/map_indices/op.hpp"
#include "ops/merge/op.hpp"
#include "ops/norm/op.hpp"
#include "ops/project/op.hpp"
#include "ops/quantize/op.hpp"
#include "ops/rope/op.hpp"
#include "ops/select_topk/op.hpp"

/// Each folder, a subject: X(name). Its conformance cases are tests/cases/<name>.cpp; lists of ops stand in this order.
#define MLA_OP_FOLDERS(X) \
  X(norm)                 \
  X(layer_norm)           \
  X(rope)                 \
  X(project)              \
  X(expand)               \
  X(append)               \
  X(gather)               \
  X(cast)                 \
  X(attend_latent)        \
  X(attend_expanded)      \
  X(attend_sparse)        \
  X(merge)                \
  X(map_indices)          \
  X(quantize)             \
  X(index_append)         \
  X(index_gather)         \
  X(index_query)          \
  X(index_score)          \
  X(select_topk)          \
  X(hadamard)

/// What a backend is called for, and with which arguments: X(call, Args).
#define MLA_OPS(X)                         \
  X(norm, NormArgs)                        \
  X(layer_norm, LayerNormArgs)             \
  X(rope, RopeArgs)                        \
  X(project, ProjectArgs)                  \
  X(expand, ExpandArgs)                    \
  X(append, AppendArgs)                    \
  X(rope_append, RopeAppendArgs)           \
  X(norm_rope_append, NormRopeAppendArgs)  \
  X(copy_pages, CopyPagesArgs)             \
  X(gather, GatherArgs)                    \
  X(cast, CastArgs)                        \
  X(attend_expanded, AttendExpandedArgs)   \
  X(attend_latent, AttendLatentArgs)       \
  X(schedule_latent, ScheduleLatentArgs)   \
  X(merge, MergeArgs)                      \
  X(merge_splits, MergeSplitsArgs)         \
  X(quantize, QuantizeArgs)                \
  X(quantize_padding, QuantizePaddingArgs) \
  X(map_to_slots, MapToSlotsArgs)          \
  X(map_to_workspace, MapToWorkspaceArgs)  \
  X(pick_rows, PickRowsArgs)               \
  X(map_to_mask, MapToMaskArgs)            \
  X(attend_sparse, AttendSparseArgs)       \
  X(merge_sparse, MergeSparseArgs)         \
  X(index_append, IndexAppendArgs)         \
  X(index_gather, IndexGatherArgs)         \
  X(index_query, IndexQueryArgs)           \
  X(index_score, IndexScoreArgs)           \
  X(select_topk, SelectTopkArgs)           \
  X(finish_topk, FinishTopkArgs)           \
  X(fill_topk, FillTopkArgs)               \
  X(hadamard, HadamardArgs)
