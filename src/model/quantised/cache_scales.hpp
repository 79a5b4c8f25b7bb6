// Scales of queries, keys and values that a checkpoint has beside attention's weights.
#pragma once

#include <string>
#include <string_view>
#include <unordered_set>

#include "mla/weights.hpp"
#include "model/quantised/stored.hpp"

namespace mla {

/// Whether this is the name of such a scale, under a layer's attention.
bool is_cache_scale(std::string_view role);
/// Those under `prefix`; without data only checked. CheckpointError naming a tensor of another dtype or number of
/// elements than one or `heads`, one that is not finite and above 0, and two tensors for one scale.
StoredScales read_cache_scales(const FindTensor& find, const std::string& prefix, int64_t heads, bool data,
                               std::unordered_set<std::string>& used);

}  // namespace mla
