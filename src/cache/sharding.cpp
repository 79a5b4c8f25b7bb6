#include "mla/sharding.hpp"

#include <string>

namespace mla {

void CacheSharding::refuse(const char* name, int64_t value, int64_t least, int64_t most) {
  const std::string text = "cache sharding: " + std::string(name) + " is " + std::to_string(value);
  if (most < least) throw InputError(text + ", the page table is empty");
  if (most == kMost64) throw InputError(text + ", must be at least " + std::to_string(least));
  throw InputError(text + ", allowed " + std::to_string(least) + " to " + std::to_string(most));
}

}  // namespace mla
