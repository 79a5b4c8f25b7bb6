// A request trace in any of the three formats: refused with its line, or requests that a replay can take as they are.
#include <cmath>
#include <sstream>
#include <string>

#include "fuzz/fuzz.hpp"
#include "serve/hidden.hpp"
#include "serve/trace.hpp"

using namespace mla;
using namespace mla::serve;

namespace {

void check(const Trace& t) {
  FUZZ_CHECK(!t.requests.empty() && t.requests[0].arrival == 0 && t.block_tokens >= 1);
  double now = 0;
  for (size_t i = 0; i < t.requests.size(); ++i) {
    const TraceRequest& r = t.requests[i];
    FUZZ_CHECK(std::isfinite(r.arrival) && r.arrival >= now);
    now = r.arrival;
    FUZZ_CHECK(r.input >= 1 && r.input <= 100'000'000 && r.output >= 1 && r.output <= 100'000'000);
    const int64_t last = static_cast<int64_t>(i);
    FUZZ_CHECK(token_key(t, last, 0) == token_key(t, last, 0));
    (void)token_key(t, last, r.input - 1);  // every token of the prompt is in a block
    (void)token_key(t, last, r.input + r.output - 1);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  fuzz::refused([&] {
    std::istringstream in(text);
    const Trace t = read_trace(in, "trace");
    check(t);
    std::istringstream again(text);
    const Trace first = read_trace(again, "trace", 1);
    FUZZ_CHECK(first.requests.size() == 1);
    for (double factor : {1.0, 0.37, 1e-6}) {
      const Trace scaled = scale_lengths(t, factor);
      FUZZ_CHECK(scaled.requests.size() == t.requests.size());
      check(scaled);
      for (size_t i = 0; i < t.requests.size(); ++i)
        FUZZ_CHECK(scaled.requests[i].input <= t.requests[i].input &&
                   scaled.requests[i].output <= t.requests[i].output);
    }
  });
  return 0;
}
