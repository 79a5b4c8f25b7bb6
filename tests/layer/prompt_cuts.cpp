// batch_invariant: a token's bits, in the cache and in the output, follow from its request's tokens up to it. Not from
// how a prompt was cut into steps, from rows that were found in the cache, from a second computation after preemption,
// nor from neighbours.
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "layer/random_layer.hpp"
#include "support/engine.hpp"
#include "support/models.hpp"
#include "support/quantised.hpp"
#include "support/sanitized.hpp"

namespace mla::test {
namespace {

// Attention and an indexer of few dims, for long sequences.
ModelConfig tiny_sparse() {
  ModelConfig m = odd_nope();
  m.name = "tiny-sparse";
  m.query_latent = 8;
  m.indexer = IndexerConfig{.heads = 2, .dim = 128, .topk = 1100};
  return m;
}

struct Mode {
  std::string name;
  ModelConfig model;
  PrepareOptions weights;
  CacheFormat format;
  PlanOptions plan;
  int64_t prompt = Engine::kAll;
};
void PrintTo(const Mode& m, std::ostream* out) { *out << m.name; }

std::vector<Mode> modes() {
  const ModelConfig m = small_deepseek(), odd = odd_nope(), sparse = small_sparse();
  const PrepareOptions f32, bf16{.dtype = Dtype::bf16};
  std::vector<Mode> all;
  const auto add = [&](const std::string& name, const ModelConfig& model, const PrepareOptions& weights,
                       CacheFormat format, PlanOptions plan) {
    plan.split = SplitPolicy::batch_invariant;
    plan.compute = weights.dtype;
    all.push_back({name, model, weights, format, plan});
  };
  for (const CacheFormat format :
       {CacheFormat::f32, CacheFormat::bf16, CacheFormat::f16, CacheFormat::fp8, CacheFormat::fp8_ds_mla})
    for (const PathPolicy path : {PathPolicy::latent, PathPolicy::expanded})
      for (const PrepareOptions& weights : {f32, bf16})
        add(std::string(to_string(path)) + "_" + std::string(to_string(weights.dtype)) + "_" +
                std::string(to_string(format)),
            m, weights, format, {.path = path, .context_rows = weights.dtype == Dtype::f32 ? 64 : 0});
  add("automatic", m, bf16, CacheFormat::bf16, {});
  add("by_length", m, f32, CacheFormat::bf16, {.path = PathPolicy::by_length, .reorder_batch_threshold = 4});
  // Prompts on one path, what was generated on the other: prompts end at a page's end, within one, and after a token.
  for (const int64_t prompt : {96, 61, 1}) {
    add("by_prompt_" + std::to_string(prompt), m, prompt == 61 ? f32 : bf16,
        prompt == 1 ? CacheFormat::fp8 : CacheFormat::bf16,
        {.path = PathPolicy::by_prompt, .context_rows = prompt == 96 ? 0 : 64});
    all.back().prompt = prompt;
  }
  add("by_prompt_e4m3", m, bf16, CacheFormat::fp8_ds_mla,
      {.path = PathPolicy::by_prompt, .prefill = PrefillOperands::fp8, .context_rows = 64});
  all.back().prompt = 100;
  add("by_prompt_sparse", sparse, bf16, CacheFormat::bf16, {.path = PathPolicy::by_prompt});
  all.back().prompt = 70;
  add("fp8_query", m, bf16, CacheFormat::fp8, {.fp8_query = true, .q_scale = 0.05f});
  add("e4m3_operands", m, bf16, CacheFormat::bf16,
      {.path = PathPolicy::expanded, .prefill = PrefillOperands::fp8, .context_rows = 64});
  add("e4m3_raw_sums", m, f32, CacheFormat::fp8, {.path = PathPolicy::expanded, .prefill = PrefillOperands::fp8_raw});
  add("fp8_products", m, {.dtype = Dtype::bf16, .products = WeightFormat::fp8}, CacheFormat::bf16,
      {.path = PathPolicy::expanded, .activations = Activations::fp8_128});
  add("absorbed", m, {.absorption = Absorption::full}, CacheFormat::bf16, {.absorbed = true});
  add("odd_latent", odd, f32, CacheFormat::bf16, {.path = PathPolicy::latent});
  add("odd_expanded", odd, bf16, CacheFormat::f16, {.path = PathPolicy::expanded, .context_rows = 50});
  for (const SparsePolicy policy : {SparsePolicy::automatic, SparsePolicy::direct, SparsePolicy::upconvert}) {
    const CostModel loads{.plain_elements = 1e9, .fp8_elements = 1};  // of which gathering is the cheaper way
    const std::string name = "sparse_" + std::string(to_string(policy));
    add(name + "_f32", sparse, f32, CacheFormat::bf16,
        {.sparse = policy, .index_format = IndexCacheFormat::f32, .rates = loads});
    add(name + "_bf16", sparse, bf16, CacheFormat::fp8_ds_mla, {.sparse = policy, .rates = loads});
  }
  add("selected_by_nobody", sparse, bf16, CacheFormat::bf16,
      {.path = PathPolicy::expanded, .sparse = SparsePolicy::dense});
  return all;
}

constexpr int64_t kTokens = 150, kPage = 8;

// A sequence's rows of the cache.
std::vector<std::byte> cached(const Engine& engine, int64_t sequence, int64_t tokens) {
  const std::vector<std::byte> all = engine.cache_bytes();
  const CacheSpec& spec = engine.cache().spec();
  const size_t page = spec.page_bytes(), row = page / static_cast<size_t>(spec.page_size);
  std::vector<std::byte> rows;
  for (int64_t t = 0; t < tokens; ++t) {
    const auto at =
        all.begin() + static_cast<int64_t>(static_cast<size_t>(engine.pages(sequence)[t / spec.page_size]) * page +
                                           static_cast<size_t>(t % spec.page_size) * row);
    rows.insert(rows.end(), at, at + static_cast<int64_t>(row));
  }
  return rows;
}

class PromptCuts : public testing::TestWithParam<Mode> {
 protected:
  const Mode& mode_ = GetParam();
  const int64_t h_ = mode_.model.hidden;
  LayerWeights weights_ = prepare(mode_.model, random_layer(mode_.model, 0, 5, Dtype::f32), mode_.weights, kDevice);
  std::vector<float> hidden_ = cases::random_values(kTokens * h_, 1),
                     other_ = cases::random_values(2 * kTokens * h_, 2);
  cases::Random random_{9};
  std::vector<std::byte> whole_rows_;
  std::vector<float> whole_ = in_one_step();

  Engine engine() {
    CacheSpec spec = cache_spec(mode_.model, mode_.format, kPage);
    if (mode_.format == CacheFormat::fp8) spec.k_scale = 0.02f;
    return Engine(weights_, spec,
                  {.plan = mode_.plan, .pages = 192, .page_seed = random_.next(), .prompt = mode_.prompt});
  }
  std::vector<float> in_one_step() {
    Engine e = engine();
    const int64_t id = e.add(hidden_);
    std::vector<float> out = e.run_alone(id, kTokens, kTokens);
    whole_rows_ = cached(e, id, kTokens);
    return out;
  }
  // The sequence's tokens from `begin` on in steps of these lengths, a last one of the rest, among neighbours.
  std::vector<float> in_steps(Engine& e, int64_t id, int64_t begin, std::vector<int64_t> lengths, bool alone) {
    std::vector<int64_t> others;
    for (int64_t i = 0; !alone && i < 3; ++i) others.push_back(e.add(other_));
    std::vector<int64_t> left(others.size(), 2 * kTokens);
    std::vector<float> out;
    lengths.push_back(kTokens);
    lengths.push_back(kTokens);  // where the one before ended with the prompt
    for (int64_t done = begin; const int64_t length : lengths) {
      const int64_t count = e.up_to_prompt(done, std::min(length, kTokens - done));
      if (count == 0) break;
      std::vector<Engine::Piece> pieces;
      for (size_t i = 0; i < others.size(); ++i) {
        const int64_t n =
            e.up_to_prompt(2 * kTokens - left[i],
                           std::min(left[i], random_.integer(0, 2) ? random_.integer(0, 2) : random_.integer(3, 60)));
        left[i] -= n;
        pieces.push_back({others[i], n});
      }
      const int64_t at = random_.integer(0, static_cast<int64_t>(pieces.size()));
      pieces.insert(pieces.begin() + at, {id, count});
      const auto rows = e.step(pieces);
      out.insert(out.end(), rows[static_cast<size_t>(at)].begin(), rows[static_cast<size_t>(at)].end());
      done += count;
    }
    return out;
  }
  void expect_same(Engine& e, int64_t id, int64_t begin, const std::vector<float>& out, const std::string& how) {
    ASSERT_EQ(std::ssize(out), (kTokens - begin) * h_) << how;
    for (int64_t t = begin; t < kTokens; ++t)
      ASSERT_EQ(std::memcmp(&out[static_cast<size_t>((t - begin) * h_)], &whole_[static_cast<size_t>(t * h_)],
                            static_cast<size_t>(h_) * sizeof(float)),
                0)
          << how << ", token " << t;
    EXPECT_TRUE(cached(e, id, kTokens) == whole_rows_) << how << ", cached rows";
  }
  std::vector<int64_t> random_lengths() {
    std::vector<int64_t> lengths;
    for (int64_t sum = 0; sum < kTokens; sum += lengths.back())
      lengths.push_back(random_.integer(0, 1) ? random_.integer(1, 5) : random_.integer(1, 90));
    return lengths;
  }
};

TEST_P(PromptCuts, StepsOfAnyLength) {
  for (const int64_t budget : {1, 37, 64, 149}) {
    Engine e = engine();
    const int64_t id = e.add(hidden_);
    const std::vector<int64_t> lengths(static_cast<size_t>(kTokens / budget), budget);
    expect_same(e, id, 0, in_steps(e, id, 0, lengths, budget == 37), "steps of " + std::to_string(budget));
  }
  for (int i = 0; i < 3; ++i) {
    Engine e = engine();
    const int64_t id = e.add(hidden_);
    expect_same(e, id, 0, in_steps(e, id, 0, random_lengths(), false), "random steps " + std::to_string(i));
  }
}

TEST_P(PromptCuts, RowsFoundInTheCache) {
  for (const int64_t pages : {1, 5, 18}) {
    Engine e = engine();
    const int64_t first = e.add(hidden_);
    in_steps(e, first, 0, random_lengths(), true);
    const int64_t id = e.add_behind(first, pages);
    expect_same(e, id, pages * kPage, in_steps(e, id, pages * kPage, random_lengths(), false),
                std::to_string(pages) + " pages found");
  }
}

TEST_P(PromptCuts, RowsComputedAgain) {
  Engine e = engine();
  const int64_t id = e.add(hidden_);
  in_steps(e, id, 0, {40, 1, 1, 30, kTokens}, false);
  e.restart(id);
  expect_same(e, id, 0, in_steps(e, id, 0, random_lengths(), true), "after preemption");
}

INSTANTIATE_TEST_SUITE_P(Modes, PromptCuts, testing::ValuesIn(sampled(modes(), 3)),
                         [](const auto& i) { return i.param.name; });

// Positions past a piece of the expanded path, past several parts of the latent one's keys and of a selection's.
TEST(LongPromptCuts, PiecesAndPartsEndAtFixedPositions) {
  struct Long {
    ModelConfig model;
    PathPolicy path;
    int64_t tokens;
    std::vector<std::vector<int64_t>> cuts;
  };
  for (const auto& [m, path, tokens, cuts] :
       {Long{odd_nope(), PathPolicy::expanded, 4200, {{4095, 1, 2, 102}, {1000, 3150, 50}, {4097, 103}}},
        Long{odd_nope(), PathPolicy::latent, 2100, {{1023, 1, 1, 1075}, {1500, 400, 200}, {2047, 53}}},
        Long{tiny_sparse(), PathPolicy::automatic, 1500, {{1023, 78, 399}, {1099, 2, 399}, {1400, 99, 1}}}}) {
    const LayerWeights weights = prepare(m, random_layer(m, 0, 5, Dtype::f32), Dtype::bf16, kDevice);
    const std::vector<float> hidden = cases::random_values(tokens * m.hidden, 1);
    const PlanOptions plan{.path = path,
                           .split = SplitPolicy::batch_invariant,
                           .compute = Dtype::bf16,
                           .index_format = IndexCacheFormat::bf16};
    const auto in_steps = [&](const std::vector<int64_t>& lengths) {
      Engine engine(weights, cache_spec(m, CacheFormat::bf16, 64), {.plan = plan});
      const int64_t id = engine.add(hidden);
      std::vector<float> out;
      for (const int64_t length : lengths) {
        const Engine::Piece piece{id, length};
        const auto rows = engine.step({&piece, 1});
        out.insert(out.end(), rows[0].begin(), rows[0].end());
      }
      return out;
    };
    const std::vector<float> whole = in_steps({tokens});
    for (const std::vector<int64_t>& lengths : cuts)
      EXPECT_TRUE(in_steps(lengths) == whole) << m.name << " " << to_string(path) << ", first " << lengths[0];
  }
}

// The attention form: heads, their codes and scales, from rows that the step appends or that are there already.
TEST(PromptCutsOfAttention, QuantisedHeads) {
  constexpr int64_t kRows = 70;
  for (const PathPolicy path : {PathPolicy::latent, PathPolicy::expanded})
    for (const char* name : {"none", "fp8", "fp8_128_tma", "fp8_64_packed", "nvfp4", "mxfp4"})
      for (const CacheUse use : {CacheUse::append, CacheUse::read}) {
        Layer l(small_deepseek());
        const ModelConfig& m = l.model;
        const int64_t width = m.heads * m.value;
        const auto q = random_values(kRows * m.heads * m.query_key(), 3), kv_c = random_values(kRows * m.latent, 4),
                   k_pe = random_values(kRows * m.rope, 5);
        PlanOptions o{.form = LayerForm::attention,
                      .cache_use = use,
                      .path = path,
                      .split = SplitPolicy::batch_invariant,
                      .context_rows = 24};
        o.output = parse_output_spec(name);
        OutputSpec spec = o.output;
        spec.scale = 0.0071f;
        spec.global_scale = 448.0f * 6.0f / 3.3f;
        const int64_t scale_bytes = std::string(name) == "fp8_128_tma" ? sizeof(float) : 1;
        // Each token's bytes, and its groups' scales.
        const auto in_steps = [&](const std::vector<int32_t>& lengths) {
          l.reset();
          std::vector<std::byte> bytes;
          for (int32_t done = 0; const int32_t n : lengths) {
            const Requests r({n}, {done});
            const Batch b = r.batch();
            const Plan p = l.plan_of(b, o);
            const Buffer workspace = filled(p.workspace_bytes, std::byte{0xff}), none;
            const LayerContext c = l.context(p, b, workspace, none);
            const View<const float, Token, Head, QueryKey> queries(
                &q[static_cast<size_t>(done * m.heads * m.query_key())], {n, m.heads, m.query_key()});
            const View<const float, Token, Latent> latents(&kv_c[static_cast<size_t>(done * m.latent)], {n, m.latent});
            const View<const float, Token, Rope> ropes(&k_pe[static_cast<size_t>(done * m.rope)], {n, m.rope});
            if (spec.kind == OutputKind::none) {
              std::vector<float> heads(static_cast<size_t>(n * width));
              attend(l.stream, c, queries, latents, ropes,
                     View<float, Token, Head, Value>(heads.data(), {n, m.heads, m.value}));
              l.stream.synchronize();
              const auto* const at = reinterpret_cast<const std::byte*>(heads.data());
              bytes.insert(bytes.end(), at, at + heads.size() * sizeof(float));
            } else {
              QuantisedMemory memory(spec, n, width);
              attend(l.stream, c, queries, latents, ropes, memory.view());
              l.stream.synchronize();
              for (int64_t t = 0; t < n; ++t) {
                const std::byte* const codes = memory.view().codes(t);
                bytes.insert(bytes.end(), codes, codes + spec.row_bytes(width));
                for (int64_t g = 0; g < spec.groups(width); ++g) {
                  const std::byte* const scale = memory.view().scale(t, g);
                  bytes.insert(bytes.end(), scale, scale + scale_bytes);
                }
              }
            }
            done += n;
          }
          return bytes;
        };
        const auto whole = in_steps({kRows});
        for (const std::vector<int32_t>& lengths : {std::vector<int32_t>{23, 1, 1, 45}, {48, 22}, {1, 69}})
          EXPECT_TRUE(in_steps(lengths) == whole)
              << to_string(path) << " " << name << " " << to_string(use) << ", first " << lengths[0];
      }
}

}  // namespace
}  // namespace mla::test
