// JSON files beside a checkpoint: config.json and the index of shards.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace mla {

/// A whole file; CheckpointError when it is not a regular file of at most 100 MB that can be read.
std::string read_text(const std::filesystem::path& file);

/// The JSON object that text holds; CheckpointError for anything else.
nlohmann::json parse_object(std::string_view text, std::string_view where);

}  // namespace mla
