// Which keys of a config may be there: those that are read, those known to be none of attention's, and words that say
// which of the two an unknown one looks like. Null is as good as absent throughout.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

namespace mla {

enum class KeysOf {
  model,
  kimi_linear,  ///< a model's with layers of linear attention beside those that are read
  rope,         ///< a rope object's: all but the ones that are read are refused
};

/// UnsupportedError "where: key is value: ..." for the first key, in the object's order, that asks for what this
/// library does not do or that looks as if it concerned attention and is not understood.
void check_keys(const nlohmann::json& object, KeysOf keys, std::string_view where);

/// The same for an object around the one that is read: a key that is read there must say the same here.
void check_keys_around(const nlohmann::json& outer, const nlohmann::json& inner, KeysOf keys, std::string_view where);

}  // namespace mla
