// Bits that must not change: with the thread count, with what lies in memory that is not the request's, and, in
// batch-invariant mode, with the request's neighbours, its place among them and its pages.
#include <gtest/gtest.h>

#include "support/engine.hpp"
#include "support/models.hpp"

namespace mla::test {
namespace {

std::vector<float> random_hidden(const ModelConfig& m, int64_t tokens, uint64_t seed) {
  return cases::random_values(tokens * m.hidden, seed);
}

struct Mode {
  PathPolicy path;
  Dtype compute;
  CacheFormat format;
  friend void PrintTo(const Mode& m, std::ostream* to) {
    *to << to_string(m.path) << ", " << to_string(m.compute) << ", " << to_string(m.format);
  }
};

class Invariance : public testing::TestWithParam<Mode> {
 protected:
  ModelConfig model_ = small_deepseek();
  LayerWeights weights_ = prepare(model_, random_layer(model_, 0, 5, Dtype::f32), Dtype::f32, kDevice);
  LayerWeights bf16_weights_ = prepare(model_, random_layer(model_, 0, 5, Dtype::f32), Dtype::bf16, kDevice);

  PlanOptions plan(SplitPolicy split) const {
    PlanOptions o;
    o.path = GetParam().path;
    o.compute = GetParam().compute;
    o.split = split;
    o.context_rows = 256;
    return o;
  }
  CacheSpec spec(int64_t page_size) const { return cache_spec(model_, GetParam().format, page_size); }
  const LayerWeights& weights() const { return GetParam().compute == Dtype::bf16 ? bf16_weights_ : weights_; }
};

// One request of 300 tokens: prefill in uneven chunks, then a few single tokens, while `neighbours` others do the same
// at other depths.
std::vector<float> run_with_neighbours(const LayerWeights& weights, const CacheSpec& spec, Engine::Options options,
                                       std::span<const float> mine, const std::vector<std::vector<float>>& others,
                                       uint64_t order_seed) {
  Engine engine(weights, spec, options);
  const int64_t me = engine.add(mine);
  for (const auto& o : others) engine.add(o);
  cases::Random random(order_seed);
  std::vector<int64_t> left(others.size() + 1);
  for (size_t i = 0; i < others.size(); ++i)
    left[i + 1] = static_cast<int64_t>(others[i].size()) / weights.config.hidden;
  std::vector<float> out;
  for (int64_t count : {150, 3, 130, 1, 1, 2, 1}) {
    std::vector<Engine::Piece> pieces{{me, count}};
    for (size_t i = 1; i < left.size(); ++i) {
      const int64_t n = std::min(left[i], random.integer(0, 3) == 0 ? random.integer(2, 30) : 1);
      left[i] -= n;
      pieces.push_back({static_cast<int64_t>(i), n});
    }
    std::swap(pieces[0], pieces[random.integer(0, static_cast<int64_t>(pieces.size()) - 1)]);
    const auto rows = engine.step(pieces);
    for (size_t i = 0; i < pieces.size(); ++i)
      if (pieces[i].sequence == me) out.insert(out.end(), rows[i].begin(), rows[i].end());
  }
  return out;
}

TEST_P(Invariance, BatchInvariantBitsIgnoreNeighbours) {
  const auto mine = random_hidden(model_, 288, 1);
  std::vector<float> alone;
  for (int64_t batch : {1, 2, 5, 16, 64}) {
    std::vector<std::vector<float>> others;
    for (int64_t i = 1; i < batch; ++i) others.push_back(random_hidden(model_, 40 + i * 3, 100 + i));
    Engine::Options options{
        .plan = plan(SplitPolicy::batch_invariant), .pages = 1024, .page_seed = static_cast<uint64_t>(batch)};
    const auto got = run_with_neighbours(weights(), spec(16), options, mine, others, static_cast<uint64_t>(batch) * 7);
    if (batch == 1) alone = got;
    EXPECT_TRUE(got == alone) << "batch of " << batch;
  }
}

TEST_P(Invariance, ThreadsDoNotChangeBits) {
  const auto mine = random_hidden(model_, 288, 1);
  std::vector<std::vector<float>> others{random_hidden(model_, 90, 2), random_hidden(model_, 35, 3),
                                         random_hidden(model_, 64, 4)};
  for (SplitPolicy split : {SplitPolicy::fast, SplitPolicy::batch_invariant}) {
    std::vector<float> first;
    for (int threads : {1, 2, 3, 7}) {
      const auto got =
          run_with_neighbours(weights(), spec(64), {.plan = plan(split), .threads = threads}, mine, others, 9);
      if (threads == 1) first = got;
      EXPECT_TRUE(got == first) << threads << " threads, " << to_string(split);
    }
  }
}

TEST_P(Invariance, PoisonDoesNotChangeBits) {
  const auto mine = random_hidden(model_, 288, 1);
  std::vector<std::vector<float>> others{random_hidden(model_, 90, 2), random_hidden(model_, 35, 3)};
  for (int64_t page_size : {1, 5, 64}) {
    Engine::Options options{.plan = plan(SplitPolicy::fast), .pages = 1024};
    const auto poisoned = run_with_neighbours(weights(), spec(page_size), options, mine, others, 9);
    options.poison = false;
    EXPECT_TRUE(poisoned == run_with_neighbours(weights(), spec(page_size), options, mine, others, 9))
        << "page size " << page_size;
  }
}

TEST_P(Invariance, PagesDoNotChangeBits) {
  const auto mine = random_hidden(model_, 288, 1);
  Engine::Options options{.plan = plan(SplitPolicy::fast), .pages = 512};
  const auto first = run_with_neighbours(weights(), spec(16), options, mine, {}, 9);
  for (uint64_t seed : {2, 3}) {
    options.page_seed = seed;
    EXPECT_TRUE(first == run_with_neighbours(weights(), spec(16), options, mine, {}, 9));
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, Invariance,
                         testing::Values(Mode{PathPolicy::latent, Dtype::f32, CacheFormat::bf16},
                                         Mode{PathPolicy::expanded, Dtype::f32, CacheFormat::bf16},
                                         Mode{PathPolicy::automatic, Dtype::f32, CacheFormat::f32},
                                         Mode{PathPolicy::latent, Dtype::bf16, CacheFormat::bf16},
                                         Mode{PathPolicy::expanded, Dtype::bf16, CacheFormat::f16},
                                         Mode{PathPolicy::automatic, Dtype::bf16, CacheFormat::fp8_ds_mla},
                                         Mode{PathPolicy::latent, Dtype::f32, CacheFormat::fp8_ds_mla},
                                         Mode{PathPolicy::automatic, Dtype::f32, CacheFormat::fp8}),
                         [](const auto& i) {
                           return std::string(to_string(i.param.path)) + "_" + std::string(to_string(i.param.compute)) +
                                  "_" + std::string(to_string(i.param.format));
                         });

}  // namespace
}  // namespace mla::test
