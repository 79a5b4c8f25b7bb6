// What is alike for parts of tensors that are there and of tensors that are read.
#pragma once

#include "mla/weights.hpp"

namespace mla {

/// The tensor as its values in f32: what one with block scales becomes where a cut falls within a block.
HostTensor values_of(const HostTensor& tensor);
/// InputError of `call` unless there is one head at least, all of them the model's.
void require_heads(const char* call, const ModelConfig& model, HeadRange heads);
/// Of these heads where there is a scale for each, else as they are.
StoredScales part_of(const ModelConfig& model, StoredScales scales, HeadRange heads);

}  // namespace mla
