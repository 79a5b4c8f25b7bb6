// What a config says of quantised weights.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "mla/model.hpp"

namespace mla {

/// Reads a quantization_config, or the like of other tools, into ModelConfig::quantisation and its fp8 blocks.
/// UnsupportedError naming a method or form whose weights are not read, unless ReadOptions allows it; CheckpointError
/// for a value of the wrong kind.
void read_quantisation(const nlohmann::json& object, const std::string& where, const ReadOptions& options,
                       ModelConfig& model);

}  // namespace mla
