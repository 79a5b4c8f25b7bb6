// A run or a benchmark as one HTML page: data, style and script inside, nothing loaded from anywhere.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace mla::report {

/// The page of what `mla run --json` or `mla bench --json` writes: data["command"] is "run" or "bench". The data may
/// hold any text: none of it is read as markup, and bytes that are not UTF-8 show as replacement characters. InputError
/// for another command.
std::string html(const nlohmann::json& data);

}  // namespace mla::report
