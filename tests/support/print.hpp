// How parameters of tests that are the library's own types print: as their names, not as bytes.
#pragma once

#include <ostream>

#include "mla/cache.hpp"
#include "mla/communicator.hpp"

namespace mla {

inline void PrintTo(CacheFormat f, std::ostream* to) { *to << to_string(f); }
inline void PrintTo(GpuLink l, std::ostream* to) { *to << to_string(l); }

}  // namespace mla
