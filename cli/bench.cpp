#include "cli/commands.hpp"

namespace mla::cli {

void add_bench(CLI::App&, int&) {}

}  // namespace mla::cli
