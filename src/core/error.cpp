#include "mla/error.hpp"

#include "core/one_line.hpp"

namespace mla {

Error::Error(const std::string& what) : std::runtime_error(one_line(what)) {}

OutOfPages::OutOfPages(int64_t wanted, int64_t available, int64_t total)
    : Error("out of pages: " + std::to_string(wanted) + " wanted, " + std::to_string(available) + " of " +
            std::to_string(total) + " available"),
      wanted_(wanted),
      available_(available) {}

}  // namespace mla
