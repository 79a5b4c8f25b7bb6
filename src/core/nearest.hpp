// What a misspelled name was meant to be.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace mla {

/// "; did you mean 'layers'?" of the known name with the fewest letters put in, left out, changed or swapped; "" when
/// more than a third of the letters would have to be.
std::string did_you_mean(std::string_view name, std::span<const std::string_view> known);

}  // namespace mla
