#include "model/json.hpp"

#include <fstream>
#include <system_error>

#include "model/text.hpp"

namespace mla {

std::string read_text(const std::filesystem::path& file) {
  constexpr uintmax_t kMost = 100'000'000;
  std::error_code error;
  const bool regular = std::filesystem::is_regular_file(file, error);
  const uintmax_t size = regular ? std::filesystem::file_size(file, error) : 0;
  std::ifstream in(file, std::ios::binary);
  if (!regular || error || !in) refuse(file.string(), "cannot be read");
  if (size > kMost) refuse(file.string(), "has " + std::to_string(size) + " bytes, at most " + std::to_string(kMost));
  std::string text(size, '\0');
  if (!in.read(text.data(), static_cast<std::streamsize>(size))) refuse(file.string(), "cannot be read to its end");
  return text;
}

nlohmann::json parse_object(std::string_view text, std::string_view where) {
  constexpr int kMostDepth = 64;  // the parser does not recurse, but printing a value does
  const auto bounded = [&](int depth, nlohmann::json::parse_event_t, nlohmann::json&) {
    if (depth > kMostDepth) refuse(where, "nested deeper than " + std::to_string(kMostDepth));
    return true;
  };
  nlohmann::json json = nlohmann::json::parse(text, bounded, /*allow_exceptions=*/false);
  if (json.is_discarded()) refuse(where, "not valid JSON");
  if (!json.is_object()) refuse(where, "not a JSON object");
  return json;
}

}  // namespace mla
