// Which heads a part has, alike for tensors that are there and for those that are read.
#pragma once

#include "mla/weights.hpp"

namespace mla {

/// InputError of `call` unless there is one head at least, all of them the model's.
void require_heads(const char* call, const ModelConfig& model, HeadRange heads);
/// Of these heads where there is a scale for each, else as they are.
StoredScales part_of(const ModelConfig& model, StoredScales scales, HeadRange heads);

}  // namespace mla
