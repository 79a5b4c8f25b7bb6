// A run as Chrome's trace event JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open.
#pragma once

#include <iosfwd>
#include <string>

#include "serve/replay.hpp"

namespace mla::serve {

/// Writes every step (category "step", its token counts as arguments) and, inside it, its planning ("plan"), its layers
/// ("layer") and the calls of result.spans ("op": bytes, flops, layer) as complete events on one track, in microseconds
/// since the first step; cache pages and tokens a step as counters. A GPU's sampled calls have a track of their own.
void write_chrome_trace(std::ostream& out, const std::string& title, const Options& options, const Result& result);

}  // namespace mla::serve
