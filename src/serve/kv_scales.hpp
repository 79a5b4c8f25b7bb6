// Where the scales of a run's fp8 caches come from: a checkpoint, a file, or the first tokens of the trace.
#pragma once

#include <filesystem>
#include <span>
#include <vector>

#include "serve/replay.hpp"

namespace mla::serve {

/// Of each of the first layers, what the checkpoint has for its cache; 0 where it has none.
std::vector<float> checkpoint_k_scales(const Checkpoint& checkpoint, int64_t layers);

/// Of each of the first layers, from a file: JSON {"k_scale": number or one for each layer}, or safetensors with a
/// tensor `k_scale` of one element or one for each layer, or with each layer's under a name that checkpoints use.
/// InputError or CheckpointError naming file, key or tensor, and value.
std::vector<float> read_k_scales(const std::filesystem::path& file, const ModelConfig& model, int64_t layers);

/// Hidden states [rows, hidden] that calibration looks at: the trace's first prompt tokens, at most 256.
std::vector<float> first_hidden(const Trace& trace, const Options& options);

/// Codes at e4m3's largest magnitude, 448: values that were there or beyond.
int64_t saturated_codes(std::span<const std::byte> codes);

}  // namespace mla::serve
