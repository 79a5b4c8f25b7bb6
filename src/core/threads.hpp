// How many threads a pool may have.
#pragma once

namespace mla {

/// Four for each hardware thread, 64 at least: more only wait for each other, minutes where a run takes a second.
int most_threads();

}  // namespace mla
