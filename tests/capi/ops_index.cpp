// The indexer's ops through the C interface, and what every op does with nothing, or nonsense, in its hands.
#include <algorithm>
#include <numeric>

#include "call.hpp"

namespace capi {
namespace {

constexpr int kHeads = 4, kDim = 32, kKeys = 40;

struct Index {
  Stream s;
  Bytes memory = scratch(s);
  mla_index_cache_spec spec = mla_index_cache_spec_default();
  IndexCache cache;
  Tensor<float> keys{{kKeys, kDim}}, q{{2, kHeads, kDim}}, weights{{2, kHeads}};
  std::vector<int32_t> pages{4, 1, 2, 3, 0}, slots;
  explicit Index(int32_t format) {
    spec.format = format;
    spec.dim = kDim;
    spec.page_size = 8;
    EXPECT_OK(mla_index_cache_create(&spec, 5, kCpu, &cache));
    keys.random(1);
    q.random(2);
    weights.random(3);
    for (int j = 0; j < kKeys; ++j) slots.push_back(pages[j / 8] * 8 + j % 8);
    mla_index_append_args a = make<mla_index_append_args>();
    a.keys = keys;
    a.slots = slots.data();
    a.slots_count = kKeys;
    a.cache = cache;
    EXPECT_OK(mla_index_append(s, &a));
    const int32_t twice[] = {3, 3};
    a.slots = twice;
    a.slots_count = 2;
    EXPECT_FAILS(MLA_ERROR_SHAPE, mla_index_append(s, &a), "slots[1] is 3, the slot of token 0 too");
  }
  double score(int t, int j) {
    double sum = 0;
    for (int h = 0; h < kHeads; ++h) {
      double dot = 0;
      for (int i = 0; i < kDim; ++i) dot += double{q[(t * kHeads + h) * kDim + i]} * keys[j * kDim + i];
      sum += 0.1f * weights[t * kHeads + h] * std::max(dot, 0.0);
    }
    return sum;
  }
};

TEST(COpsIndex, ScoreAndSelect) {
  constexpr int kTopk = 6;
  Index x(MLA_INDEX_CACHE_F32);
  Tensor<float> scores({2, kKeys}, -99.0f);
  const mla_index_item item{0, 0, 2, 0, kKeys, kKeys - 2, 0};  // the first query sees all but the last position
  mla_index_score_args a = make<mla_index_score_args>();
  a.q = x.q;
  a.weights = x.weights;
  a.cache = x.cache;
  a.block_table = {x.pages.data(), 1, 5, 0};
  a.items = &item;
  a.items_count = 1;
  a.scores = scores;
  a.scale = 0.1f;
  a.scratch = x.memory.data;
  a.scratch_bytes = x.memory.size;
  ASSERT_OK(mla_index_score(x.s, &a));
  for (int t = 0; t < 2; ++t)
    for (int j = 0; j < kKeys - 1 + t; ++j) EXPECT_NEAR(scores[t * kKeys + j], x.score(t, j), 1e-5);
  EXPECT_EQ(scores[kKeys - 1], -99.0f);

  size_t row_bytes = 0;
  ASSERT_OK(mla_topk_state_bytes(kTopk, &row_bytes));
  Bytes state(2 * row_bytes);
  mla_select_topk_args sel = make<mla_select_topk_args>();
  sel.scores = scores;
  sel.items = &item;
  sel.items_count = 1;
  sel.topk = kTopk;
  sel.state = state.data;
  sel.state_bytes = state.size;
  sel.begin = 1;
  ASSERT_OK(mla_select_topk(x.s, &sel));
  Tensor<int32_t> indices({2, kTopk});
  Tensor<float> best({2, kTopk});
  mla_finish_topk_args f = make<mla_finish_topk_args>();
  f.topk = kTopk;
  f.state = state.data;
  f.state_bytes = state.size;
  f.items = &item;
  f.items_count = 1;
  f.indices = indices;
  f.scores = best;
  ASSERT_OK(mla_finish_topk(x.s, &f));
  for (int t = 0; t < 2; ++t) {
    std::vector<int32_t> order(kKeys - 1 + t);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t i, int32_t j) { return scores[t * kKeys + i] > scores[t * kKeys + j]; });
    order.resize(kTopk);
    std::sort(order.begin(), order.end());
    for (int i = 0; i < kTopk; ++i) {
      EXPECT_EQ(indices[t * kTopk + i], order[i]);
      EXPECT_EQ(best[t * kTopk + i], scores[t * kKeys + order[i]]);
    }
  }
  // With scratch for its threads to share a row in, though this one is too short.
  mla_scratch_shape shape = make<mla_scratch_shape>();
  shape.topk = kTopk;
  size_t scratch_bytes = 0;
  ASSERT_OK(mla_scratch_bytes(x.s, &shape, &scratch_bytes));
  EXPECT_GE(scratch_bytes, row_bytes);
  Bytes scratch(scratch_bytes);
  sel.scratch = scratch.data;
  sel.scratch_bytes = scratch.size;
  Tensor<int32_t> at_once({2, kTopk});
  sel.indices = at_once;
  ASSERT_OK(mla_select_topk(x.s, &sel));
  for (int i = 0; i < 2 * kTopk; ++i) EXPECT_EQ(at_once[i], indices[i]);
  sel.indices = nullptr;
  sel.state_bytes = 2 * row_bytes - 1;
  EXPECT_EQ(MLA_ERROR_SHAPE, mla_select_topk(x.s, &sel));
  sel.topk = 0;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_select_topk(x.s, &sel), "topk is 0, allowed 1 to 8192");
  EXPECT_EQ(MLA_ERROR_SHAPE, mla_topk_state_bytes(8193, &row_bytes));

  const mla_index_item few{0, 0, 2, 0, 4, 2, 0};
  mla_fill_topk_args fill = make<mla_fill_topk_args>();
  fill.items = &few;
  fill.items_count = 1;
  fill.indices = indices;
  ASSERT_OK(mla_fill_topk(x.s, &fill));
  EXPECT_EQ(indices.data, (std::vector<int32_t>{0, 1, 2, -1, -1, -1, 0, 1, 2, 3, -1, -1}));
}

TEST(COpsIndex, Fp8QueriesKeepScores) {
  Index x(MLA_INDEX_CACHE_FP8);
  Tensor<uint8_t> codes({2, kHeads, kDim});
  Tensor<float> scaled({2, kHeads}), scores({2, kKeys});
  mla_index_query_args query = make<mla_index_query_args>();
  query.q = x.q;
  query.weights = x.weights;
  query.codes = codes;
  query.scaled_weights = scaled;
  ASSERT_OK(mla_index_query(x.s, &query));
  const mla_index_item item{0, 0, 2, 0, kKeys, kKeys, 0};
  mla_index_score_args a = make<mla_index_score_args>();
  a.q = codes;
  a.weights = scaled;
  a.cache = x.cache;
  a.block_table = {x.pages.data(), 1, 5, 0};
  a.items = &item;
  a.items_count = 1;
  a.scores = scores;
  a.scale = 0.1f;
  a.scratch = x.memory.data;
  a.scratch_bytes = x.memory.size;
  ASSERT_OK(mla_index_score(x.s, &a));
  for (int t = 0; t < 2; ++t)
    for (int j = 0; j < kKeys; ++j) EXPECT_NEAR(scores[t * kKeys + j], x.score(t, j), 0.05);

  // The stored codes and scales give the keys back.
  Tensor<uint8_t> stored({3, kDim});
  Tensor<float> scales({3}), values({3, kDim});
  const mla_gather_piece piece{0, 6, 3, 0};
  mla_index_gather_args g = make<mla_index_gather_args>();
  g.cache = x.cache;
  g.block_table = {x.pages.data(), 1, 5, 0};
  g.pieces = &piece;
  g.pieces_count = 1;
  g.keys = values;
  ASSERT_OK(mla_index_gather(x.s, &g));
  for (int i = 0; i < 3 * kDim; ++i) EXPECT_NEAR(values[i], x.keys[6 * kDim + i], 0.07);
  g.keys = stored;
  EXPECT_EQ(MLA_ERROR_SHAPE, mla_index_gather(x.s, &g));
  g.scales = scales;
  ASSERT_OK(mla_index_gather(x.s, &g));
  for (int r = 0; r < 3; ++r) EXPECT_GT(scales[r], 0.0f);

  const mla_page_copy copy{4, 2};
  mla_copy_pages_args cp = make<mla_copy_pages_args>();
  cp.index_cache = x.cache;
  cp.copies = &copy;
  cp.copies_count = 1;
  EXPECT_OK(mla_copy_pages(x.s, &cp));
  cp.copies = nullptr;
  EXPECT_EQ(MLA_ERROR_HANDLE, mla_copy_pages(x.s, &cp));
}

TEST(COpsIndex, Maps) {
  Stream s;
  Tensor<int32_t> positions({2, 4}), slots({2, 4}), rows({2, 4}), picked({3, 4});
  positions.data = {0, 9, -1, 30, 5, 8, 100, 3};
  const int32_t requests[] = {1, 0}, table[] = {7, 3, 77, 2, 5, 99}, lengths[] = {6, 20};
  mla_map_to_slots_args a = make<mla_map_to_slots_args>();
  a.positions = positions;
  a.requests = requests;
  a.requests_count = 2;
  a.block_table = {table, 2, 2, 3};
  a.page_size = 8;
  a.pages = 8;
  a.lengths = lengths;
  a.lengths_count = 2;
  a.slots = slots;
  ASSERT_OK(mla_map_to_slots(s, &a));
  EXPECT_EQ(slots.data, (std::vector<int32_t>{16, 41, -1, -1, 61, -1, -1, 59}));

  const int32_t starts[] = {10, 100}, counts[] = {6, 20};
  mla_map_to_workspace_args w = make<mla_map_to_workspace_args>();
  w.positions = positions;
  w.requests = requests;
  w.requests_count = 2;
  w.starts = starts;
  w.counts = counts;
  w.starts_count = w.counts_count = 2;
  w.rows = rows;
  ASSERT_OK(mla_map_to_workspace(s, &w));
  EXPECT_EQ(rows.data, (std::vector<int32_t>{100, 109, -1, -1, 15, -1, -1, 13}));
  w.counts_count = 1;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_map_to_workspace(s, &w), "counts length is 1");

  const int32_t order[] = {1, 0, 1};
  mla_pick_rows_args p = make<mla_pick_rows_args>();
  p.positions = positions;
  p.rows = order;
  p.rows_count = 3;
  p.picked = picked;
  ASSERT_OK(mla_pick_rows(s, &p));
  EXPECT_EQ(picked.data, (std::vector<int32_t>{5, 8, 100, 3, 0, 9, -1, 30, 5, 8, 100, 3}));

  Tensor<int32_t> mask({3, 1}, 77);
  int32_t to[] = {2, 0};
  mla_map_to_mask_args m = make<mla_map_to_mask_args>();
  m.positions = positions;
  m.rows = to;
  m.rows_count = 2;
  m.mask = mask;
  ASSERT_OK(mla_map_to_mask(s, &m));
  EXPECT_EQ(mask.data, (std::vector<int32_t>{1 << 3 | 1 << 5 | 1 << 8, 77, 1 | 1 << 9 | 1 << 30}));
  to[1] = -1;
  ASSERT_OK(mla_map_to_mask(s, &m));
  to[1] = 2;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_map_to_mask(s, &m), "rows[1] is 2, that of rows[0] too");
  to[1] = 3;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_map_to_mask(s, &m), "row is 3, allowed 0 to 2");
  m.mask = nullptr;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_map_to_mask(s, &m), "mask is missing");
}

template <class Args>
void reject(const char* name, mla_stream* stream, mla_status (*op)(mla_stream*, const Args*)) {
  Args args = make<Args>();
  EXPECT_EQ(MLA_ERROR_HANDLE, op(nullptr, &args)) << name;
  EXPECT_EQ(MLA_ERROR_HANDLE, op(stream, nullptr)) << name;
  const mla_status nothing = op(stream, &args);
  EXPECT_TRUE(nothing == MLA_ERROR_SHAPE || nothing == MLA_ERROR_HANDLE || nothing == MLA_ERROR_INPUT)
      << name << " " << nothing;
  EXPECT_EQ(std::string(mla_last_error()).find(std::string(name) + ": "), 0u) << mla_last_error();
  args.struct_size = 0;
  EXPECT_EQ(MLA_ERROR_SHAPE, op(stream, &args)) << name;
}

TEST(COpsIndex, EveryOpRefusesNothing) {
  Stream s;
#define REJECT(op) reject(#op, s, op)
  REJECT(mla_norm);
  REJECT(mla_layer_norm);
  REJECT(mla_cast);
  REJECT(mla_project);
  REJECT(mla_quantize);
  REJECT(mla_quantize_padding);
  REJECT(mla_rope);
  REJECT(mla_append);
  REJECT(mla_rope_append);
  REJECT(mla_norm_rope_append);
  REJECT(mla_copy_pages);
  REJECT(mla_gather);
  REJECT(mla_attend_expanded);
  REJECT(mla_attend_latent);
  REJECT(mla_attend_sparse);
  REJECT(mla_merge);
  REJECT(mla_merge_splits);
  REJECT(mla_merge_sparse);
  REJECT(mla_index_append);
  REJECT(mla_index_gather);
  REJECT(mla_index_query);
  REJECT(mla_index_score);
  REJECT(mla_select_topk);
  REJECT(mla_finish_topk);
  REJECT(mla_fill_topk);
  REJECT(mla_map_to_slots);
  REJECT(mla_map_to_workspace);
  REJECT(mla_pick_rows);
  REJECT(mla_map_to_mask);
#undef REJECT
  mla_hadamard_args none = make<mla_hadamard_args>();  // both of its tensors are optional
  EXPECT_OK(mla_hadamard(s, &none));
}

}  // namespace
}  // namespace capi
