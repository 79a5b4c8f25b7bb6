// Sparse attention end to end: the golden DeepSeek V3.2 module by prefill, chunks, single tokens and mixed batches, on
// every plan mode and cache format; invariance.
#include <gtest/gtest.h>

#include <cmath>

#include "layer/call.hpp"
#include "layer/v32.hpp"
#include "support/count_allocations.hpp"
#include "support/engine.hpp"
#include "support/golden.hpp"
#include "support/models.hpp"
#include "support/sanitized.hpp"

namespace mla::test {
namespace {

constexpr double kFileError = 5e-6, kFloor = 2e-6;

/// Runs the sequence through an engine by chunks; what each row attended to, and its output.
struct Ran {
  std::vector<float> out;
  std::vector<std::vector<int32_t>> selected;
};
Ran run(Engine& engine, std::span<const float> hidden, int64_t tokens, int64_t chunk) {
  Ran r;
  const int64_t id = engine.add(hidden);
  for (int64_t done = 0; done < tokens; done += chunk) {
    const Engine::Piece piece{id, std::min(chunk, tokens - done)};
    const auto rows = engine.step({&piece, 1});
    r.out.insert(r.out.end(), rows[0].begin(), rows[0].end());
    for (auto& s : engine.selected()) r.selected.push_back(std::move(s));
  }
  return r;
}

/// Judges outputs on the rows' own selections, and the selections by the exact scores.
void judge(const Ran& r, CacheFormat format, Dtype compute, IndexCacheFormat index, bool hadamard,
           const std::string& how) {
  const V32& v = v32();
  const Golden& g = v.golden;
  const int64_t n = static_cast<int64_t>(r.selected.size());
  const reference::Rounding rounding{.weights = Dtype::f32,
                                     .compute = compute,
                                     .activations = kOnGpu ? compute : Dtype::f32,
                                     .cache = cache_spec(g.config, format),
                                     .path = Path::latent,
                                     .index_cache = index_cache_spec(g.config, cache_spec(g.config, format), index),
                                     .index_hadamard = hadamard};
  const std::span rows = std::span(v.rows).first(static_cast<size_t>(n));
  const auto exact = reference::output_rows(g.config, v.plain, g.hidden, rows, nullptr, r.selected);
  const auto plain = reference::output_rows(g.config, v.plain, g.hidden, rows, &rounding, r.selected);
  const double bound = 2 * reference::relative_error(std::vector<float>(plain.begin(), plain.end()), exact) + kFloor;
  EXPECT_LE(reference::relative_error(r.out, exact), bound) << how;
  const auto plain_scores = reference::index_scores(g.config, v.plain, g.hidden, rows, &rounding);
  for (int64_t i = 0; i < n; ++i) {
    if (r.selected[i].empty()) continue;
    EXPECT_LE(reference::selection_error(r.selected[i], v.scores[i], plain_scores[i], v.topk()), 1)
        << how << " row " << i;
  }
}

TEST(SparseReference, ChoosesWhatTheFileChose) {
  const V32& v = v32();
  int64_t tied = 0;
  for (int64_t row = 0; row < v.golden.length; ++row) {
    const auto ours = reference::best(v.scores[row], v.topk()), file = v.chosen(row);
    ASSERT_EQ(ours.size(), file.size()) << row;
    if (ours == file) continue;
    // Then they differ in positions of one and the same score.
    std::vector<int32_t> a, b;
    std::set_difference(ours.begin(), ours.end(), file.begin(), file.end(), std::back_inserter(a));
    std::set_difference(file.begin(), file.end(), ours.begin(), ours.end(), std::back_inserter(b));
    for (int32_t j : a) EXPECT_EQ(v.scores[row][j], 0) << row;
    for (int32_t j : b) EXPECT_EQ(v.scores[row][j], 0) << row;
    ++tied;
  }
  EXPECT_LE(tied, 14);  // the file's authors count as many
}

// The file's own choice, through weights without an indexer: outputs are then the file's.
TEST(SparseGolden, OutputsOnTheFilesChoice) {
  const V32& v = v32();
  const Golden& g = v.golden;
  const std::vector<double> file(g.output.begin(), g.output.end());
  for (SparsePolicy policy : {SparsePolicy::mixed, SparsePolicy::direct, SparsePolicy::upconvert})
    for (int64_t chunk : {g.length, int64_t{64}, int64_t{23}}) {
      Engine engine(v.without_indexer, cache_spec(g.config, CacheFormat::f32, 16), {.plan = {.sparse = policy}});
      engine.chooser = [&](int64_t, int64_t position) { return v.chosen(position); };
      EXPECT_LE(reference::relative_error(engine.run_alone(engine.add(g.hidden), g.length, chunk), file), kFileError)
          << to_string(policy) << " chunks of " << chunk;
      EXPECT_FALSE(engine.padding_touched);
    }
}

// GLM-5's interleaved indexer, which no key of the file says, and a layer that takes the choice of the one before it.
TEST(SparseGolden, IndexerPairsAndSharedChoicesOfGlm) {
  for (const GoldenCase& which : {GoldenCase{golden2_folder() / "glm_moe_dsa.safetensors"},
                                  GoldenCase{golden2_folder() / "glm_moe_dsa_shared.safetensors", 0},
                                  GoldenCase{golden2_folder() / "glm_moe_dsa_shared.safetensors", 1}}) {
    const Golden g = read_golden(which, true);
    ASSERT_TRUE(g.config.indexer->interleaved);
    const int64_t k = g.config.indexer->topk;
    const auto chosen = [&](int64_t row) {
      std::vector<int32_t> c;
      for (int64_t i = 0; i < k; ++i)
        if (const int32_t j = g.topk[row * k + i]; j <= row) c.push_back(j);
      std::sort(c.begin(), c.end());
      return c;
    };
    const std::vector<double> file(g.output.begin(), g.output.end());
    LayerWeights weights = prepare(g.config, g.tensors, Dtype::f32, kDevice);
    EXPECT_EQ(weights.indexer.has_value(), which.attention != 1);
    if (weights.indexer) {
      std::vector<int64_t> rows(static_cast<size_t>(g.length));
      std::iota(rows.begin(), rows.end(), 0);
      const auto scores =
          reference::index_scores(g.config, reference::plain_weights(g.tensors, Dtype::f32), g.hidden, rows);
      for (int64_t row = 0; row < g.length; ++row) EXPECT_EQ(reference::best(scores[row], k), chosen(row)) << row;
      Engine engine(weights, cache_spec(g.config, CacheFormat::f32, 16),
                    {.plan = {.index_format = IndexCacheFormat::f32}});
      if (!kOnGpu) {
        const Ran r = run(engine, g.hidden, g.length, 23);
        for (int64_t row = k; row < g.length; ++row) EXPECT_EQ(r.selected[row], chosen(row)) << row;
        EXPECT_LE(reference::relative_error(r.out, file), kFileError) << which.name();
      }
      weights.indexer.reset();
    }
    for (int64_t chunk : {g.length, int64_t{23}, int64_t{1}}) {
      Engine engine(weights, cache_spec(g.config, CacheFormat::f32, 16), {});
      engine.chooser = [&](int64_t, int64_t position) { return chosen(position); };
      EXPECT_LE(reference::relative_error(engine.run_alone(engine.add(g.hidden), g.length, chunk), file), kFileError)
          << which.name() << " chunks of " << chunk;
    }
  }
}

TEST(SparseGolden, PrefillAndChunksOnEveryModeAndFormat) {
  const Golden& g = v32().golden;
  Sample sample(3);
  for (CacheFormat format :
       {CacheFormat::f32, CacheFormat::bf16, CacheFormat::f16, CacheFormat::fp8, CacheFormat::fp8_ds_mla})
    for (SparsePolicy policy : {SparsePolicy::automatic, SparsePolicy::mixed, SparsePolicy::direct,
                                SparsePolicy::upconvert, SparsePolicy::masked})
      for (int64_t chunk : {g.length, int64_t{23}}) {
        if (!sample.take()) continue;
        const IndexCacheFormat index = chunk == 23 ? IndexCacheFormat::fp8 : IndexCacheFormat::f32;
        Engine engine(v32().weights, cache_spec(g.config, format, chunk == 23 ? 3 : 64),
                      {.plan = {.sparse = policy, .index_format = index}});
        judge(run(engine, g.hidden, g.length, chunk), format, Dtype::f32, index, false,
              std::string(to_string(format)) + " " + std::string(to_string(policy)) + " chunks of " +
                  std::to_string(chunk));
        EXPECT_FALSE(engine.padding_touched);
      }
}

TEST(SparseGolden, IndexFormatsAndRotation) {
  const Golden& g = v32().golden;
  for (IndexCacheFormat index : index_cache_formats())
    for (bool hadamard : {false, true})
      for (Dtype compute : {Dtype::f32, Dtype::bf16}) {
        Engine engine(v32().weights, cache_spec(g.config, CacheFormat::bf16),
                      {.plan = {.compute = compute, .index_format = index, .index_hadamard = hadamard}});
        judge(run(engine, g.hidden, g.length, 50), CacheFormat::bf16, compute, index, hadamard,
              std::string(to_string(index)) + (hadamard ? " rotated" : "") + " compute " +
                  std::string(to_string(compute)));
      }
}

TEST(SparseGolden, TokenByToken) {
  const Golden& g = v32().golden;
  Engine engine(v32().weights, cache_spec(g.config, CacheFormat::f32, 7),
                {.plan = {.index_format = IndexCacheFormat::f32}});
  judge(run(engine, g.hidden, g.length, 1), CacheFormat::f32, Dtype::f32, IndexCacheFormat::f32, false,
        "token by token");
}

TEST(SparseGolden, DensePolicyAttendsToEverything) {
  const V32& v = v32();
  Engine engine(v.weights, cache_spec(v.golden.config, CacheFormat::f32), {.plan = {.sparse = SparsePolicy::dense}});
  const auto exact = reference::output_rows(v.golden.config, v.plain, v.golden.hidden, v.rows);
  EXPECT_LE(reference::relative_error(engine.run_alone(engine.add(v.golden.hidden), v.golden.length, 100), exact),
            kFloor);
}

// One request beside others, alone, in other orders and pages: the same bits, selection included.
TEST(SparseInvariance, NeighboursThreadsAndPoison) {
  const Golden& g = v32().golden;
  for (SparsePolicy policy :
       {SparsePolicy::mixed, SparsePolicy::automatic, SparsePolicy::upconvert, SparsePolicy::masked})
    for (Dtype compute : {Dtype::f32, Dtype::bf16}) {
      const Engine::Options options{
          .plan = {.split = SplitPolicy::batch_invariant, .compute = compute, .sparse = policy}};
      auto go = [&](Engine::Options o, int others) {
        Engine engine(v32().weights, cache_spec(g.config, CacheFormat::fp8_ds_mla, 16), o);
        const int64_t me = engine.add(g.hidden);
        for (int i = 0; i < others; ++i)
          engine.add(std::span(g.hidden).subspan(static_cast<size_t>(i) * g.config.hidden));
        std::vector<float> out;
        for (int64_t count : {100, 1, 60, 1, 1, 90}) {
          std::vector<Engine::Piece> pieces;
          for (int i = 0; i < others; ++i) pieces.push_back({i + 1, i % 2 ? 1 : 17});
          pieces.insert(pieces.begin() + others / 2, {me, count});
          const auto rows = engine.step(pieces);
          out.insert(out.end(), rows[others / 2].begin(), rows[others / 2].end());
        }
        return out;
      };
      const auto alone = go(options, 0);
      for (float x : alone) ASSERT_TRUE(std::isfinite(x));
      EXPECT_EQ(go(options, 6), alone) << to_string(policy) << " " << to_string(compute);
      Engine::Options other = options;
      other.threads = 1;
      other.poison = false;
      other.page_seed = 8;
      EXPECT_EQ(go(other, 3), alone) << to_string(policy) << " " << to_string(compute);
      other.threads = 5;
      EXPECT_EQ(go(other, 0), alone) << to_string(policy) << " " << to_string(compute);
    }
}

// What a selection costs is in its slots, which lie on the device: a profile has to count the rows that they name.
TEST(SparseLayer, ASelectionsCostIsReadFromTheDevice) {
  constexpr int64_t kRows = 3, kTopk = 4, kStride = 6;
  // Row 1 repeats two rows of row 0's; slots that do not exist and what lies between lists cost nothing.
  const std::vector<int32_t> slots{0, 1, 2, -1, 9, 9, 1, 2, 7, 3, 9, 9, -1, -1, 8, -1};
  const Buffer there = Buffer::copy_of(slots.data(), slots.size() * sizeof(int32_t), kDevice);
  const ModelConfig m = small_sparse();
  const CacheSpec spec = cache_spec(m, CacheFormat::bf16, 4);
  const std::vector<SparseItem> items{{.q_count = kRows, .k_end = kTopk}};
  ops::SparseSource source{.cache = {spec, nullptr, 2, spec.page_bytes()},
                           .slots = {there.as<const int32_t>(), {kRows, kTopk}, {kStride, 1}},
                           .lengths = {}};
  const ops::AttendSparseArgs args{
      .q = {Dtype::bf16, nullptr, {kRows, m.heads, m.entry()}},
      .sources = {&source, 1},
      .items = items,
      .sinks = {},
      .out = {Dtype::bf16, nullptr, {kRows, m.heads, m.latent}},
      .lse = {},
      .max_logits = {},
      .partial_out = {},
      .partial_lse = {},
      .partial_max = {},
      .scratch = {},
  };
  ThreadPool pool(1);
  Stream stream = stream_on_device(pool);
  const Profile::Work found = layer::work_of_selection(stream, args)();
  const double width = static_cast<double>(m.entry() + m.latent), heads = static_cast<double>(m.heads);
  EXPECT_EQ(found.bytes, 5 * spec.token_bytes() + kRows * (heads * width * 2 + 4 * kTopk));
  EXPECT_EQ(found.flops, 2 * 7 * heads * width);
}

TEST(SparseLayer, AllocatesNothingAfterThePlan) {
  const Golden& g = v32().golden;
  for (SparsePolicy policy : {SparsePolicy::mixed, SparsePolicy::upconvert, SparsePolicy::masked})
    for (IndexCacheFormat index : index_cache_formats()) {
      Engine engine(v32().weights, cache_spec(g.config, CacheFormat::bf16),
                    {.plan = {.sparse = policy, .index_format = index}});
      engine.counter = allocation_count;
      engine.run_alone(engine.add(g.hidden), 200, 90);
      EXPECT_EQ(engine.allocations, 0) << to_string(policy) << " " << to_string(index);
    }
}

}  // namespace
}  // namespace mla::test
