// Which choices of keys lie in a GPU's memory, as far as the host knows: it cannot look without waiting.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace mla {

/// Of a stream, whose calls make choices and read them.
class SelectionLog {
 public:
  enum class Found { none, other, same };

  /// A call will write the choice with this stamp. captured: it will do so whenever its graph is launched, for the step
  /// that is then staged, which the host hears nothing of.
  void note(const std::byte* memory, uint64_t stamp, bool captured) {
    const auto at = find(memory);
    if (at != entries_.end()) {
      at->stamp = stamp;
      at->captured |= captured;
      return;
    }
    if (entries_.size() == kMost) entries_.erase(entries_.begin());
    entries_.push_back({memory, stamp, captured});
  }
  /// What was there is being overwritten.
  void forget(const std::byte* memory) {
    if (const auto at = find(memory); at != entries_.end() && !at->captured) entries_.erase(at);
  }
  Found look(const std::byte* memory, uint64_t stamp) const {
    const auto at = find(memory);
    if (at == entries_.end()) return Found::none;
    return at->captured || at->stamp == stamp ? Found::same : Found::other;
  }

 private:
  struct Entry {
    const std::byte* memory;
    uint64_t stamp;
    bool captured;
  };
  std::vector<Entry>::iterator find(const std::byte* memory) {
    return std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.memory == memory; });
  }
  std::vector<Entry>::const_iterator find(const std::byte* memory) const {
    return std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.memory == memory; });
  }

  static constexpr size_t kMost = 1024;  // memory of so many steps at once; an engine has one, or one a captured size
  std::vector<Entry> entries_;
};

}  // namespace mla
