// A layer's prepared weights without their memory: for what asks about shapes and formats alone.
#pragma once

#include <cstdint>
#include <utility>

#include "mla/weights.hpp"

namespace mla {

/// What prepare() would make, every map a Linear of the right shape, dtype and format that holds nothing; vectors hold
/// zeros, on the host. `indexer`: of a layer that has its own. group_heads: of LayerTensors::group_kv_up; 0: there is
/// none. UnsupportedError for options that prepare() refuses.
LayerWeights outline(const ModelConfig& config, bool indexer, const PrepareOptions& options, Device device = {},
                     int64_t group_heads = 0);

/// Rows and columns of products in fp8 that share a scale, where tensors do not come with their own.
std::pair<int64_t, int64_t> product_block(const ModelConfig& config);
/// fp8 codes with block scales, which products in fp8 take as they are.
bool stored_as_fp8(const HostTensor& tensor);

}  // namespace mla
