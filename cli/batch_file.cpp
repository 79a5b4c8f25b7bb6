#include "cli/batch_file.hpp"

#include <algorithm>
#include <numeric>
#include <string>

#include "mla/error.hpp"
#include "model/json.hpp"

namespace mla::cli {
BatchLengths parse_batch(std::string_view text, std::string_view where) {
  const JsonDocument document = parse_object(text, where);
  const nlohmann::json& json = document.root;
  require_keys(json, {"query_lens", "contexts"}, where);
  auto lengths = [&](const char* key) {
    const auto it = json.find(key);
    if (it == json.end() || !it->is_array())
      throw InputError(std::string(where) + ": " + key + " is missing or not an array");
    std::vector<int64_t> v;
    for (const auto& e : *it) {
      if (!e.is_number_integer() || (e.is_number_unsigned() && e.get<uint64_t>() > kMostTokens))
        throw InputError(std::string(where) + ": " + key + "[" + std::to_string(v.size()) +
                         "] is not an integer up to " + std::to_string(kMostTokens));
      v.push_back(e.get<int64_t>());
    }
    return v;
  };
  return {.queries = lengths("query_lens"), .contexts = lengths("contexts")};
}

BatchOfLengths::BatchOfLengths(const BatchLengths& of, int64_t page_size) {
  if (of.contexts.size() != of.queries.size())
    throw InputError("contexts has " + std::to_string(of.contexts.size()) + " entries, queries has " +
                     std::to_string(of.queries.size()));
  int64_t width = 1, tokens = 0;
  for (size_t r = 0; r < of.queries.size(); ++r) {
    for (int64_t n : {of.queries[r], of.contexts[r]})
      if (n < 0 || n > kMostTokens)
        throw InputError("request " + std::to_string(r) + ": length is " + std::to_string(n) + ", allowed 0 to " +
                         std::to_string(kMostTokens));
    const int64_t length = of.queries[r] + of.contexts[r], needed = (length + page_size - 1) / page_size;
    tokens += of.queries[r];
    if (tokens > kMostTokens)
      throw InputError("the batch has more than " + std::to_string(kMostTokens) + " new tokens");
    starts_.push_back(static_cast<int32_t>(tokens));
    lengths_.push_back(static_cast<int32_t>(length));
    prompts_.push_back(static_cast<int32_t>(of.queries[r] > 1 ? length : of.contexts[r]));
    width = std::max(width, needed);
  }
  table_.resize(static_cast<size_t>(width));
  std::iota(table_.begin(), table_.end(), 0);
  slots_.assign(static_cast<size_t>(tokens), -1);
}

Batch BatchOfLengths::batch() const {
  // All rows of the block table are the one that there is.
  return {
      starts_, lengths_, {table_.data(), {static_cast<int64_t>(lengths_.size()), pages()}, {0, 1}}, slots_, prompts_};
}

}  // namespace mla::cli
