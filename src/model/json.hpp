// JSON that others wrote: config.json and the index of shards beside a checkpoint, batch files.
#pragma once

#include <filesystem>
#include <functional>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace mla {

/// A whole file; CheckpointError when it is not a regular file of at most 100 MB that can be read.
std::string read_text(const std::filesystem::path& file);

/// Owns a JSON value. nlohmann's destructor allocates for a value that holds others, and ends the process where memory
/// is short; this one takes the value apart first, which needs none. At most some hundred levels deep.
class JsonDocument {
 public:
  JsonDocument() = default;
  explicit JsonDocument(nlohmann::json value) : root(std::move(value)) {}
  JsonDocument(JsonDocument&&) = default;
  JsonDocument& operator=(JsonDocument&& other) noexcept {
    std::swap(root, other.root);
    return *this;
  }
  ~JsonDocument();

  nlohmann::json root;
};

/// The JSON value that text holds and nothing beside it, at most 64 levels deep, no object with a key twice, no NUL.
/// Otherwise `fail` is called, which must throw.
JsonDocument parse_strict(std::string_view text, const std::function<void(const std::string& why)>& fail);

/// The same for an object; CheckpointError for anything else.
JsonDocument parse_object(std::string_view text, std::string_view where);

/// InputError for a key of an object that is none of `known`: "FILE: qeury_lens is [1], known are query_lens,
/// contexts".
void require_keys(const nlohmann::json& object, std::span<const std::string_view> known, std::string_view where);
inline void require_keys(const nlohmann::json& object, std::initializer_list<std::string_view> known,
                         std::string_view where) {
  require_keys(object, std::span(known.begin(), known.size()), where);
}

}  // namespace mla
