// A batch file of `mla plan`: refused, or plans on every path that check out against the file's own numbers.
#include <algorithm>
#include <numeric>

#include "cli/batch_file.hpp"
#include "fuzz/fuzz.hpp"
#include "fuzz/plan_checks.hpp"

using namespace mla;

namespace {

ModelConfig model() {
  ModelConfig m;
  m.name = "fuzz";
  m.hidden = 64;
  m.layers = 1;
  m.heads = 4;
  m.query_latent = 16;
  m.latent = 32;
  m.nope = 16;
  m.rope = 16;
  m.value = 16;
  m.indexer = IndexerConfig{.heads = 2, .dim = 32, .topk = 40};
  return m;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const ModelConfig sparse = model(), dense = [] {
    ModelConfig m = model();
    m.indexer.reset();
    return m;
  }();
  fuzz::refused([&] {
    const cli::BatchLengths lengths = cli::parse_batch({reinterpret_cast<const char*>(data), size}, "batch.json");
    // A file may ask for more than a machine has: what it would take follows from its numbers.
    int64_t most = 0;
    for (const auto& list : {lengths.queries, lengths.contexts})
      for (int64_t n : list) most = std::max(most, n);
    if (most > 4096 || lengths.queries.size() > 64) return;
    for (int64_t page_size : {1, 16, 64}) {
      const cli::BatchOfLengths made(lengths, page_size);
      for (int64_t n : lengths.queries) FUZZ_CHECK(n >= 0);
      const Batch batch = made.batch();
      FUZZ_CHECK(batch.requests() == static_cast<int64_t>(lengths.queries.size()));
      FUZZ_CHECK(batch.tokens() == std::accumulate(lengths.queries.begin(), lengths.queries.end(), int64_t{0}));
      for (const ModelConfig& m : {dense, sparse})
        for (PathPolicy path : {PathPolicy::automatic, PathPolicy::latent, PathPolicy::expanded}) {
          const PlanOptions options{.path = path, .context_rows = page_size == 16 ? 96 : 0};
          fuzz::refused([&] {
            fuzz::check_plan(plan(m, cache_spec(m, CacheFormat::bf16, page_size), made.pages(), batch,
                                  {.threads = 2, .scratch_per_worker = 4096}, options),
                             lengths.queries, lengths.contexts);
          });
        }
    }
  });
  return 0;
}
