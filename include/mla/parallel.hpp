// Tensor parallelism: each rank has some of a layer's query heads, and all of everything that heads share: hidden and
// query latents, cached rows, the indexer. A rank runs the layer of its heads as a model of its own; what W_O makes of
// them are parts of the hidden rows, whose sum over the ranks is the layer's (PlanOptions::tensor_parallel).
#pragma once

#include <cstdint>
#include <span>

#include "mla/model.hpp"
#include "mla/weights.hpp"

namespace mla {

/// Rank `rank`'s of `ranks` shares, as even as can be: the first heads % ranks have one head more. Ranks may also share
/// heads in any other way, as long as each head is of one rank. InputError for a rank outside the group, or more ranks
/// than heads.
HeadRange head_share(int64_t heads, int rank, int ranks);

/// Rows [begin, begin + count) of a step.
struct RowRange {
  int64_t begin = 0, count = 0;
};
/// Rank `rank`'s of `ranks` shares of a step's rows, as even as can be: the first rows % ranks have one row more; there
/// may be fewer rows than ranks. InputError for a negative number of rows or a rank outside the group.
RowRange row_share(int64_t rows, int rank, int ranks);

/// The model of these heads alone. InputError unless there is one at least, all of them the model's.
ModelConfig part_of(const ModelConfig& model, HeadRange heads);

/// The layer's tensors for part_of(model, heads), for prepare(). Rows of query and kv_up stay where they lie, columns
/// of output are copied; the rest is the same on all ranks. A tensor with block scales keeps its codes and scales where
/// the cut falls between blocks, and otherwise becomes the f32 values that they stand for. ShapeError naming a tensor
/// that is not the model's. A layer of a checkpoint need not be read whole for it: Checkpoint::layer(index, heads).
/// group: heads of each member of the rank's group, for LayerTensors::group_kv_up.
LayerTensors part_of(const ModelConfig& model, const LayerTensors& layer, HeadRange heads,
                     std::span<const HeadRange> group = {});

}  // namespace mla
