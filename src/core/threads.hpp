// How many threads a pool may have.
#pragma once

namespace mla {

/// Four for each processor, 64 at least: each has its own scratch in every workspace.
int most_threads();

}  // namespace mla
