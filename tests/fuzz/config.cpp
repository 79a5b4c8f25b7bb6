// A config.json: refused, or a model whose numbers are finite, which plans a step, and whose plan can be read.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "fuzz/fuzz.hpp"
#include "fuzz/plan_checks.hpp"
#include "mla/rotary.hpp"
#include "mla/weights.hpp"
#include "model/outline.hpp"
#include "support/batches.hpp"

using namespace mla;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  fuzz::refused([&] {
    const ModelConfig m = parse_config(text, "config.json");
    m.validate();  // refuses nothing that was read
    fuzz::check_message(m.name);
    FUZZ_CHECK(std::isfinite(m.softmax_scale()) && m.softmax_scale() > 0);
    FUZZ_CHECK(std::isfinite(rotary_magnitude(m.rotary)));
    FUZZ_CHECK(m.rms_eps >= 0 && std::isfinite(m.rms_eps));
    for (double f : inverse_frequencies(m.rotary, std::min<int64_t>(m.rope, 256)))
      FUZZ_CHECK(std::isfinite(f) && f >= 0);
    for (int64_t l : {int64_t{0}, m.layers / 2, m.layers - 1}) FUZZ_CHECK(!m.layer_has_indexer(l) || m.indexer);
    FUZZ_CHECK(!m.layer_has_indexer(-1) && !m.layer_has_indexer(m.layers));
    FUZZ_CHECK(!m.indexer || m.layer_has_indexer(0));
    // Whatever it costs nothing to say of it.
    for (CacheFormat f : cache_formats())
      fuzz::refused([&] {
        const CacheSpec spec = cache_spec(m, f, 16);
        spec.validate();
        FUZZ_CHECK(spec.page_bytes() > 0);
        const std::vector<int64_t> queries{1, 5}, contexts{40, 0};
        const test::Made made(queries, contexts, 16);
        fuzz::check_plan(plan(m, spec, made.pages, made.batch(), {.threads = 2, .scratch_per_worker = 4096}), queries,
                         contexts);
      });
    fuzz::refused([&] { outline(m, m.indexer.has_value(), PrepareOptions{}); });
  });
  return 0;
}
