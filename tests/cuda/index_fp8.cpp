// index_score by fp8 products beyond its conformance cases: which kernel serves, bits that depend on nothing but query
// and key, NaN, and how much of the exact selection its scores choose.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <vector>

#include "backend/backend.hpp"
#include "backend/cuda/gpu_model.hpp"
#include "backend/run.hpp"
#include "cache/index/codec.hpp"
#include "cases/padded.hpp"
#include "cases/poisoned_cache.hpp"

namespace mla {
namespace {

using cases::Padded;
using cases::PoisonedIndexCache;
using cases::Random;

constexpr Device kGpu{DeviceKind::cuda, 0};
constexpr int64_t kDim = 128;

/// One request: queries of its last `tokens` positions, keys of all `length`.
struct Keys {
  /// aligned: may queries and weights be copied as boxes?
  Keys(int64_t tokens, int64_t heads, int32_t length, int64_t page_size, uint64_t seed = 3, bool aligned = true)
      : random(seed),
        cache({.dim = kDim, .page_size = page_size}, (length + page_size - 1) / page_size + 1, random, true),
        q(Dtype::fp8_e4m3, {tokens, heads, kDim}, aligned ? 16 : 3),
        weights(Dtype::f32, {tokens, heads}, aligned ? 8 : 3),
        scores(Dtype::f32, {tokens, length}) {
    for (int32_t i = 0; i < length; i += static_cast<int32_t>(page_size)) table.push_back(cache.page(i / page_size));
    std::vector<float> key(kDim);
    for (int32_t i = 0; i < length; ++i) {
      random.fill_normal(key);
      set(i, key);
    }
    q.fill_normal(random, 100.0f);
    weights.fill_normal(random);
  }
  void set(int32_t position, std::span<const float> key) {
    const IndexCacheSpec& spec = cache.view().spec;
    cache::index::encode(spec, cache.view().page(table[position / spec.page_size]), position % spec.page_size,
                         key.data());
  }
  ops::IndexScoreArgs args(std::span<const IndexItem> items, IndexArithmetic arithmetic, int64_t begin, int64_t end) {
    return {.q = q.any(),
            .weights = weights.view(),
            .scale = 0.01f,
            .cache = cache.view(),
            .block_table = {table.data(), {1, static_cast<int64_t>(table.size())}},
            .items = items,
            .first = begin,
            .scores = scores.view().slice<Key>(begin, end - begin),
            .arithmetic = arithmetic,
            .scratch = {scratch.data(), 64}};
  }
  IndexItem all() const {
    const int32_t tokens = static_cast<int32_t>(scores_tokens()), length = static_cast<int32_t>(positions());
    return {.q_count = tokens, .kv_end = length, .visible = length - tokens};
  }
  int64_t scores_tokens() const { return const_cast<Keys*>(this)->scores.any().extent<Token>(); }
  int64_t positions() const { return const_cast<Keys*>(this)->scores.any().extent<Key>(); }
  std::vector<std::byte> run(Stream& stream, IndexArithmetic arithmetic) {
    scores.restore(std::vector<std::byte>(scores.bytes().size(), std::byte{0xff}));
    const std::vector<IndexItem> item{all()};
    ops::run(stream, args(item, arithmetic, 0, positions()));
    stream.synchronize();
    return scores.bytes();
  }

  Random random;
  PoisonedIndexCache cache;
  std::vector<int32_t> table;
  Padded<Token, IndexHead, IndexDim> q;
  Padded<Token, IndexHead> weights;
  Padded<Token, Key> scores;
  Buffer scratch{64, kGpu};
};

class IndexFp8OnGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
    stream.emplace(kGpu);
    if (!cuda::model_of(stream->queue()).hopper) GTEST_SKIP() << "not a Hopper GPU";
  }
  std::optional<Stream> stream;
};

TEST_F(IndexFp8OnGpu, TheKernelIsNamed) {
  const auto kernel = [&](int64_t heads, int64_t page_size, IndexArithmetic arithmetic) {
    Keys keys(1, heads, 200, page_size);
    const std::vector<IndexItem> item{keys.all()};
    return ops::kernel(backend::backend(kGpu), cuda::model_of(stream->queue()), keys.args(item, arithmetic, 0, 200));
  };
  const std::string fp8 = "cuda/sm90, fp8 products", exact = "cuda/sm90, matrix units by warpgroups";
  for (int64_t heads : {8, 32, 64, 128}) EXPECT_EQ(kernel(heads, 64, IndexArithmetic::fp8), fp8) << heads;
  for (int64_t page_size : {16, 48, 128}) EXPECT_EQ(kernel(64, page_size, IndexArithmetic::fp8), fp8) << page_size;
  EXPECT_EQ(kernel(64, 64, IndexArithmetic::exact), exact);
  EXPECT_EQ(kernel(130, 64, IndexArithmetic::fp8), exact);
  EXPECT_EQ(kernel(64, 8, IndexArithmetic::fp8), exact);
}

TEST_F(IndexFp8OnGpu, BitsDependOnQueryAndKeyAlone) {
  constexpr int32_t kTokens = 19, kLength = 3000;
  for (int64_t heads : {64, 20, 32, 128}) {
    Keys keys(kTokens, heads, kLength, 64);
    const std::vector<std::byte> expected = keys.run(*stream, IndexArithmetic::fp8);
    for (int turn = 0; turn < 12; ++turn) {
      keys.scores.restore(std::vector<std::byte>(expected.size(), std::byte{0xff}));
      const int64_t most = turn < 5 ? turn + 1 : 19;
      for (int32_t begin = 0, end; begin < kLength; begin = end) {
        end =
            turn == 0 ? kLength : std::min<int32_t>(kLength, begin + static_cast<int32_t>(keys.random.integer(1, 900)));
        std::vector<IndexItem> items;
        for (int32_t row = 0, rows; row < kTokens; row += rows) {
          rows = std::min<int32_t>(kTokens - row, static_cast<int32_t>(turn < 5 ? most : keys.random.integer(1, most)));
          IndexItem item = keys.all();
          item.q_begin = item.row = row, item.q_count = rows, item.visible += row;
          items.push_back(item);
        }
        ops::run(*stream, keys.args(items, IndexArithmetic::fp8, begin, end));
        stream->synchronize();
      }
      EXPECT_EQ(keys.scores.bytes() == expected, true) << heads << " heads, turn " << turn;
    }
  }
}

TEST_F(IndexFp8OnGpu, AddressesDoNotMoveBits) {
  for (int64_t heads : {8, 20, 64, 128})
    for (int64_t tokens : {1, 2, 3, 9}) {
      Keys boxes(tokens, heads, 700, 64), bytes(tokens, heads, 700, 64, 3, false);
      EXPECT_EQ(boxes.run(*stream, IndexArithmetic::fp8) == bytes.run(*stream, IndexArithmetic::fp8), true)
          << heads << " heads, " << tokens << " tokens";
    }
}

TEST_F(IndexFp8OnGpu, PagesDoNotMoveBits) {
  Keys wide(3, 64, 1500, 64), narrow(3, 64, 1500, 16), odd(3, 64, 1500, 48);
  const std::vector<std::byte> expected = wide.run(*stream, IndexArithmetic::fp8);
  for (Keys* keys : {&narrow, &odd}) {
    for (int32_t i = 0; i < 1500; ++i) {
      std::vector<float> key(kDim);
      const IndexCacheView from = wide.cache.view();
      cache::index::decode(from.spec, from.page(wide.table[i / 64]), i % 64, key.data());
      keys->set(i, key);
    }
    keys->q.restore(wide.q.bytes());
    keys->weights.restore(wide.weights.bytes());
    EXPECT_EQ(keys->run(*stream, IndexArithmetic::fp8) == expected, true);
  }
}

TEST_F(IndexFp8OnGpu, RepeatsGiveTheSameBits) {
  Keys one(1, 64, 20000, 64), four(4, 64, 5000, 64), many(70, 32, 1000, 16);
  const char* most = std::getenv("MLA_TEST_MAX_FLOPS");  // a tool that slows kernels down
  for (Keys* keys : {&one, &four, &many}) {
    const std::vector<std::byte> expected = keys->run(*stream, IndexArithmetic::fp8);
    for (int i = 0; i < (most ? 2 : 1000); ++i)
      ASSERT_EQ(keys->run(*stream, IndexArithmetic::fp8) == expected, true) << "repeat " << i;
  }
}

TEST_F(IndexFp8OnGpu, NanStaysWithItsKeyAndItsQuery) {
  Keys keys(5, 64, 900, 16);
  std::vector<float> key(kDim, 1.0f);
  for (int32_t nan : {0, 77, 500, 899}) {
    key[nan % kDim] = cases::poison();
    keys.set(nan, key);
    key[nan % kDim] = 1.0f;
  }
  store_float(Dtype::fp8_e4m3, keys.q.any().data(), 3 * keys.q.any().stride<Token>() + 9, cases::poison());
  keys.run(*stream, IndexArithmetic::fp8);
  for (int64_t t = 0; t < 5; ++t)
    for (int64_t c = 0; c < 895 + t + 1; ++c)
      EXPECT_EQ(std::isnan(keys.scores.view()(t, c)), t == 3 || c == 0 || c == 77 || c == 500 || c == 899)
          << t << ", " << c;
}

// Positions among the best 2048 of both, as a share; and the largest difference of two scores by their root mean
// square. The second kind of keys has what trained ones have: a common part, channels of very unequal size, and
// neighbours that resemble each other.
TEST_F(IndexFp8OnGpu, ChoosesWhatExactScoresChoose) {
  constexpr int32_t kLength = 32768, kTopk = 2048;
  constexpr int64_t kTokens = 4;
  if (std::getenv("MLA_TEST_MAX_FLOPS")) GTEST_SKIP() << "too large for such a tool";
  for (bool random : {true, false}) {
    Keys keys(kTokens, 64, kLength, 64, 17);
    if (!random) {
      std::vector<float> common(kDim), size(kDim), drift(kDim), key(kDim), fresh(kDim);
      keys.random.fill_normal(common);
      for (float& s : size) s = std::exp(keys.random.normal());
      for (int32_t i = 0; i < kLength; ++i) {
        keys.random.fill_normal(fresh);
        for (int64_t d = 0; d < kDim; ++d) {
          drift[d] = 0.95f * drift[d] + 0.3f * fresh[d];
          key[d] = size[d] * (common[d] + drift[d]);
        }
        keys.set(i, key);
      }
      for (int64_t t = 0; t < kTokens; ++t)  // queries look for what lies in the common part, more or less
        for (int64_t h = 0; h < 64; ++h)
          for (int64_t d = 0; d < kDim; ++d)
            store_float(Dtype::fp8_e4m3, keys.q.any().data(),
                        t * keys.q.any().stride<Token>() + h * keys.q.any().stride<IndexHead>() + d,
                        40.0f * (keys.random.normal() + 0.3f * common[d]));
    }
    const auto choose = [&](IndexArithmetic arithmetic, int64_t token, std::vector<float>& scores) {
      keys.run(*stream, arithmetic);
      std::vector<int32_t> best(kLength - kTokens + 1 + token);
      std::iota(best.begin(), best.end(), 0);
      scores.resize(best.size());
      for (size_t c = 0; c < scores.size(); ++c) scores[c] = keys.scores.view()(token, static_cast<int64_t>(c));
      std::nth_element(best.begin(), best.begin() + kTopk, best.end(),
                       [&](int32_t x, int32_t y) { return scores[x] != scores[y] ? scores[x] > scores[y] : x < y; });
      best.resize(kTopk);
      std::sort(best.begin(), best.end());
      return best;
    };
    double least = 1, error = 0;
    for (int64_t token = 0; token < kTokens; ++token) {
      std::vector<float> exact, fp8;
      std::vector<int32_t> both;
      const std::vector<int32_t> a = choose(IndexArithmetic::exact, token, exact),
                                 b = choose(IndexArithmetic::fp8, token, fp8);
      std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(both));
      least = std::min(least, static_cast<double>(both.size()) / kTopk);
      double square = 0, worst = 0;
      for (size_t c = 0; c < exact.size(); ++c) {
        square += static_cast<double>(exact[c]) * exact[c];
        worst = std::max(worst, std::abs(static_cast<double>(fp8[c]) - exact[c]));
      }
      error = std::max(error, worst / std::sqrt(square / static_cast<double>(exact.size())));
    }
    std::printf("  %s keys: %.2f%% of the best %d at least, error %.2g of the root mean square\n",
                random ? "random" : "correlated", 100 * least, kTopk, error);
    EXPECT_GE(least, 0.99);
    EXPECT_GT(error, 0);  // it is another arithmetic
  }
}

}  // namespace
}  // namespace mla
