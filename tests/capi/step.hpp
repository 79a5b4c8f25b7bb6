// One step of a small model with all that it needs, made by the C interface.
#pragma once

#include "call.hpp"

namespace capi {

constexpr int64_t kPages = 8, kPageSize = 16, kHeads = 4, kLatent = 128, kRope = 16, kQueryKey = 48, kValue = 64;

// One request of 40 new tokens after `context` cached ones, on pages 1, 2, ... in order.
struct Step {
  Stream stream;
  Model model;
  Weights weights;
  Rotary rotary, index_rotary;
  mla_cache_spec spec = mla_cache_spec_default();
  mla_index_cache_spec index_spec = mla_index_cache_spec_default();
  Cache cache;
  IndexCache index_cache;
  std::vector<int32_t> starts, lengths, table{1, 2, 3, 4, 5, 6, 7}, slots;
  mla_batch batch = make<mla_batch>();
  mla_plan_options options = mla_plan_options_default();

  explicit Step(int32_t tokens = 40, int32_t context = 0) {
    make_model(&model);
    mla_prepare_options prepare = mla_prepare_options_default();
    EXPECT_OK(mla_weights_create_random(model, 0, 3, MLA_F32, &prepare, kCpu, &weights));
    EXPECT_OK(mla_rotary_create(model, 0, 256, kCpu, &rotary));
    EXPECT_OK(mla_rotary_create(model, 1, 256, kCpu, &index_rotary));
    EXPECT_OK(mla_cache_spec_of(model, MLA_CACHE_F32, kPageSize, &spec));
    EXPECT_OK(mla_index_cache_spec_of(model, &spec, MLA_INDEX_CACHE_F32, &index_spec));
    EXPECT_OK(mla_cache_create(&spec, kPages, kCpu, &cache));
    EXPECT_OK(mla_index_cache_create(&index_spec, kPages, kCpu, &index_cache));
    options.index_format = MLA_INDEX_CACHE_F32;
    options.sparse = MLA_SPARSE_DENSE;
    set(tokens, context);
  }
  void set(int32_t tokens, int32_t context) {
    starts = {0, tokens};
    lengths = {context + tokens};
    slots.clear();
    for (int32_t t = context; t < context + tokens; ++t) slots.push_back(static_cast<int32_t>(kPageSize) + t);
    batch.requests = 1;
    batch.tokens = tokens;
    batch.query_start_loc = starts.data();
    batch.seq_lens = lengths.data();
    batch.block_table = table.data();
    batch.block_table_pages = 7;
    batch.slot_mapping = slots.data();
  }
  mla_layer_args args(mla_plan* plan, Bytes& workspace) {
    mla_layer_args a = make<mla_layer_args>();
    a.plan = plan;
    a.weights = weights;
    a.rotary = rotary;
    a.cache = cache;
    a.workspace = workspace.data;
    a.workspace_bytes = workspace.size;
    a.index_cache = index_cache;
    a.index_rotary = index_rotary;
    return a;
  }
};

inline mla_plan_info describe(mla_plan* plan) {
  mla_plan_info info = make<mla_plan_info>();
  EXPECT_OK(mla_plan_get(plan, &info));
  return info;
}

}  // namespace capi
