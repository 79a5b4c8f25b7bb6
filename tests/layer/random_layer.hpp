// A layer of random weights over pages of random rows, and steps of given lengths, for tests that call it themselves.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "cases/compare.hpp"
#include "mla/mla.hpp"
#include "support/device.hpp"
#include "support/models.hpp"

namespace mla::test {

constexpr int64_t kPageSize = 16;

// Requests of given query and context lengths, each with pages of its own.
struct Requests {
  std::vector<int32_t> starts{0}, lengths, table, slots;
  int64_t width, pages;

  Requests(const std::vector<int32_t>& queries, const std::vector<int32_t>& contexts, int64_t wide = 8)
      : width(wide), pages(wide * static_cast<int64_t>(queries.size())) {
    for (size_t r = 0; r < queries.size(); ++r) {
      starts.push_back(starts.back() + queries[r]);
      lengths.push_back(queries[r] + contexts[r]);
      for (int64_t p = 0; p < width; ++p) table.push_back(static_cast<int32_t>(static_cast<int64_t>(r) * width + p));
      for (int32_t i = contexts[r]; i < lengths[r]; ++i)
        slots.push_back(static_cast<int32_t>(static_cast<int64_t>(r) * width * kPageSize) + i);
    }
  }
  int64_t tokens() const { return starts.back(); }
  Batch batch() const {
    return {starts, lengths, {table.data(), {static_cast<int64_t>(lengths.size()), width}}, slots};
  }
};

using cases::random_values;

// A layer over pages of random rows.
struct Layer {
  ModelConfig model;
  LayerTensors tensors;
  LayerWeights weights;
  RotaryTable rotary, index_rotary;
  ThreadPool pool{2};
  Stream stream = stream_on_device(pool);
  CacheSpec spec = cache_spec(model, CacheFormat::f32, kPageSize);
  static constexpr int64_t kPages = 64;
  Cache cache{spec, kPages, kDevice};
  IndexCache index;

  explicit Layer(const ModelConfig& m, const PrepareOptions& options = {})
      : Layer(m, random_layer(m, 0, 1, Dtype::f32), options) {}
  Layer(const ModelConfig& m, const LayerTensors& of, const PrepareOptions& options)
      : model(m), tensors(of), weights(prepare(m, tensors, options, kDevice)), rotary(m.rotary, m.rope, 256, kDevice) {
    if (m.indexer) {
      index_rotary = RotaryTable(m.index_rotary(), m.rope, 256, kDevice);
      index = IndexCache(index_cache_spec(m, spec, IndexCacheFormat::f32), kPages, kDevice);
    }
    reset();
  }
  void reset() {
    const auto rows = random_values(static_cast<int64_t>(spec.page_bytes()) * kPages / 4, 7);
    const auto keys =
        random_values(model.indexer ? static_cast<int64_t>(index.spec().page_bytes()) * kPages / 4 : 0, 8);
    copy(stream, cache.view().data, rows.data(), rows.size() * sizeof(float));
    if (model.indexer) copy(stream, index.view().data, keys.data(), keys.size() * sizeof(float));
    stream.synchronize();  // while both are there
  }
  PlanOptions planned(PlanOptions o) const {
    o.index_format = IndexCacheFormat::f32;
    return o;
  }
  Plan plan_of(const Batch& batch, const PlanOptions& o) {
    return plan(model, spec, kPages, batch, device_info(stream, model), planned(o));
  }
  std::vector<std::byte> cache_bytes() {
    return read(stream, cache.view().data, spec.page_bytes() * static_cast<size_t>(kPages));
  }
  LayerContext context(const Plan& p, const Batch& b, const Buffer& workspace, const Buffer& selection) const {
    return {.plan = p,
            .batch = b,
            .weights = weights,
            .rotary = rotary,
            .cache = cache.view(),
            .workspace = {workspace.data(), workspace.size()},
            .index_cache = index.view(),
            .index_rotary = &index_rotary,
            .selection = {selection.data(), selection.size()}};
  }
};

// The caller's choice of each token's first positions, where the step selects; past the tokens positions that no
// sequence has.
inline void choose(Layer& l, const LayerContext& c, int64_t rows) {
  const int64_t topk = c.plan.topk;
  if (topk == 0) return;
  std::vector<int32_t> choice(static_cast<size_t>(rows * topk), 0x7fffffff);
  for (int64_t i = 0; i < c.plan.tokens; ++i) std::iota(choice.begin() + i * topk, choice.begin() + (i + 1) * topk, 0);
  select(l.stream, c, View<const int32_t, Token, Topk>(choice.data(), {rows, topk}));
  l.stream.synchronize();
}

// Cached rows of f32 are the same: on a GPU up to products that go with the number of rows.
inline void expect_same_cache(const std::vector<std::byte>& found, const std::vector<std::byte>& right,
                              const std::string& how) {
  if (!kOnGpu) {
    EXPECT_TRUE(found == right) << how;
    return;
  }
  ASSERT_EQ(found.size(), right.size());
  for (size_t i = 0; i < found.size(); i += sizeof(float)) {
    float x, y;
    std::memcpy(&x, &found[i], sizeof x), std::memcpy(&y, &right[i], sizeof y);
    ASSERT_NEAR(x, y, 1e-5f * std::max(1.0f, std::abs(y))) << how << ", byte " << i;
  }
}

struct Kind {
  const char* name;
  bool sparse, absorbed;
  PlanOptions plan;
};
inline std::vector<Kind> kinds() {
  return {
      {"latent", false, false, {.path = PathPolicy::latent}},
      {"expanded", false, false, {.path = PathPolicy::expanded}},
      {"mixed", false, false, {.path = PathPolicy::by_length, .reorder_batch_threshold = 1}},
      {"invariant", false, false, {.path = PathPolicy::by_length, .split = SplitPolicy::batch_invariant}},
      {"absorbed", false, true, {.absorbed = true}},
      {"sparse", true, false, {.path = PathPolicy::by_length}},
      {"upconverted", true, false, {.path = PathPolicy::by_length, .sparse = SparsePolicy::upconvert}},
      {"masked", true, false, {.path = PathPolicy::by_length, .sparse = SparsePolicy::masked}},
      {"selected by nobody", true, false, {.path = PathPolicy::by_length, .sparse = SparsePolicy::dense}},
  };
}

// Those that have an attention form. Its choices are the caller's, which masks may not hold.
inline std::vector<Kind> attention_kinds() {
  std::vector<Kind> all = kinds();
  std::erase_if(all, [](const Kind& k) { return k.absorbed || k.plan.sparse == SparsePolicy::masked; });
  for (Kind& k : all)
    if (k.plan.sparse == SparsePolicy::automatic) k.plan.sparse = SparsePolicy::mixed;
  return all;
}

// Of prefills with and without context and decodes, below and above topk.
inline const Requests& requests() {
  static const Requests r({5, 1, 3, 1}, {0, 70, 40, 3});
  return r;
}

inline Layer layer_of(const Kind& k) {
  PrepareOptions options;
  if (k.absorbed) options.absorption = Absorption::full;
  return Layer(k.sparse ? small_sparse() : small_deepseek(), options);
}

}  // namespace mla::test
