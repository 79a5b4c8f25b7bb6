// Text that others wrote, made fit for a message.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace mla {

/// The longest message in bytes, and what one that was cut is at most.
constexpr size_t kLongestLine = 1000;

/// The text on one line that any terminal can show: control characters, line separators and bytes that are not UTF-8 as
/// \xNN; of a text above kLongestLine the middle is left out, and how much that is stands in its place. A line that
/// this gave comes back as it is.
std::string one_line(std::string_view text);

}  // namespace mla
