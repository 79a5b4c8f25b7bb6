// A layer's prepared weights without their memory: for what asks about shapes and formats alone.
#pragma once

#include "mla/weights.hpp"

namespace mla {

/// What prepare() would make, every map a Linear of the right shape, dtype and format that holds nothing; vectors are
/// empty. `indexer`: of a layer that has its own.
LayerWeights outline(const ModelConfig& config, bool indexer, const PrepareOptions& options, Device device = {});

}  // namespace mla
