// Every op through the C interface against its definition, plainly written.
#include <algorithm>
#include <limits>

#include "call.hpp"

namespace capi {
namespace {

TEST(COps, LayerNorm) {
  Stream s;
  Tensor<float> x({2, 8}), w({8}), b({8}), y({2, 8});
  x.random(1);
  w.random(2);
  b.random(3);
  mla_layer_norm_args a = make<mla_layer_norm_args>();
  a.x = x;
  a.weight = w;
  a.bias = b;
  a.eps = 1e-6;
  a.y = y;
  ASSERT_OK(mla_layer_norm(s, &a));
  for (int r = 0; r < 2; ++r) {
    double mean = 0, var = 0;
    for (int i = 0; i < 8; ++i) mean += x[r * 8 + i] / 8.0;
    for (int i = 0; i < 8; ++i) var += std::pow(x[r * 8 + i] - mean, 2) / 8.0;
    for (int i = 0; i < 8; ++i)
      EXPECT_NEAR(y[r * 8 + i], (x[r * 8 + i] - mean) / std::sqrt(var + 1e-6) * w[i] + b[i], 1e-5);
  }
  a.bias = nullptr;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_layer_norm(s, &a), "mla_layer_norm: bias is missing");
  a.bias = b;
  mla_norm_args n = make<mla_norm_args>();
  n.x = n.y = x;
  n.weight = w;
  for (const auto& [eps, text] : {std::pair(-1.0, "eps is -1, a finite number"), std::pair(std::nan(""), "eps is nan"),
                                  std::pair(HUGE_VAL, "eps is inf")}) {
    a.eps = n.eps = eps;
    EXPECT_FAILS(MLA_ERROR_SHAPE, mla_layer_norm(s, &a), text);
    EXPECT_FAILS(MLA_ERROR_SHAPE, mla_norm(s, &n), text);
  }
  a.eps = n.eps = 0;
  EXPECT_OK(mla_layer_norm(s, &a));
  EXPECT_OK(mla_norm(s, &n));
}

// Pair i of position p turns by p * theta^(-2i/R), pairs (2i, 2i+1).
float rotated(const float* x, int i, int rope, int position) {
  const double angle = position * std::pow(10000.0, -2.0 * (i / 2) / rope);
  const float a = x[i / 2 * 2], b = x[i / 2 * 2 + 1];
  return static_cast<float>(i % 2 == 0 ? a * std::cos(angle) - b * std::sin(angle)
                                       : b * std::cos(angle) + a * std::sin(angle));
}

TEST(COps, RopeAndAppendAndGather) {
  Stream s;
  Model model;
  make_model(&model);
  Rotary table;
  ASSERT_OK(mla_rotary_create(model, 0, 64, kCpu, &table));
  const int32_t positions[] = {0, 7, 63}, slots[] = {17, -1, 5};
  Tensor<float> q({3, 2, 16}), k({3, 16}), kv({3, 128});
  q.random(1);
  k.random(2);
  kv.random(3);
  const std::vector<float> q0 = q.data, k0 = k.data;
  mla_rope_args r = make<mla_rope_args>();
  r.q = q;
  r.k = k;
  r.positions = positions;
  r.positions_count = 3;
  r.table = table;
  ASSERT_OK(mla_rope(s, &r));
  for (int t = 0; t < 3; ++t)
    for (int i = 0; i < 16; ++i) {
      EXPECT_NEAR(k[t * 16 + i], rotated(&k0[t * 16], i, 16, positions[t]), 1e-5f);
      EXPECT_NEAR(q[t * 32 + 16 + i], rotated(&q0[t * 32 + 16], i, 16, positions[t]), 1e-5f);
    }
  const int32_t beyond[] = {0, 7, 64};
  r.positions = beyond;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_rope(s, &r), "position is 64");

  // Both at once write what one after the other does.
  mla_cache_spec spec = mla_cache_spec_default();
  ASSERT_OK(mla_cache_spec_of(model, MLA_CACHE_F32, 4, &spec));
  Cache one, both;
  ASSERT_OK(mla_cache_create(&spec, 5, kCpu, &one));
  ASSERT_OK(mla_cache_create(&spec, 5, kCpu, &both));
  mla_append_args ap = make<mla_append_args>();
  ap.kv_c = kv;
  ap.k_pe = k;
  ap.slots = slots;
  ap.slots_count = 3;
  ap.cache = one;
  ASSERT_OK(mla_append(s, &ap));
  const std::vector<float> kr = k.data;

  // Rows of a model in bf16: the bytes that their f32 values give.
  Cache wide, narrow;
  mla_cache_spec codes = spec;
  codes.format = MLA_CACHE_FP8;
  codes.k_scale = 0.05f;
  ASSERT_OK(mla_cache_create(&codes, 5, kCpu, &wide));
  ASSERT_OK(mla_cache_create(&codes, 5, kCpu, &narrow));
  Tensor<uint16_t> kv16({3, 128}), k16({3, 16});
  Tensor<float> kv32({3, 128}), k32({3, 16});
  for (size_t i = 0; i < kv16.data.size(); ++i)
    kv32.data[i] = from_bf16(kv16.data[i] = static_cast<uint16_t>(16000 + i));
  for (size_t i = 0; i < k16.data.size(); ++i) k32.data[i] = from_bf16(k16.data[i] = static_cast<uint16_t>(16200 + i));
  ap.kv_c = kv32;
  ap.k_pe = k32;
  ap.cache = wide;
  ASSERT_OK(mla_append(s, &ap));
  ap.kv_c = kv16;
  ap.k_pe = k16;
  ap.cache = narrow;
  ASSERT_OK(mla_append(s, &ap));
  void *wide_data = nullptr, *narrow_data = nullptr;
  size_t page = 0;
  ASSERT_OK(mla_cache_get(wide, nullptr, nullptr, &wide_data, &page));
  ASSERT_OK(mla_cache_get(narrow, nullptr, nullptr, &narrow_data, &page));
  EXPECT_EQ(std::memcmp(wide_data, narrow_data, 5 * page), 0);
  ap.k_pe = k32;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_append(s, &ap), "k_pe is f32, allowed: bf16");
  ap.kv_c = kv;
  ap.k_pe = k;
  ap.cache = one;
  q.data = q0;
  k.data = k0;
  mla_rope_append_args ra = make<mla_rope_append_args>();
  ra.q_pe = q;
  ra.kv_c = kv;
  ra.k_pe = k;
  ra.positions = positions;
  ra.positions_count = 3;
  ra.table = table;
  ra.slots = slots;
  ra.slots_count = 3;
  ra.cache = both;
  ASSERT_OK(mla_rope_append(s, &ra));
  for (int i = 0; i < 48; ++i) EXPECT_NEAR(k[i], kr[i], 1e-6f);

  // With the norm before it: the rows that mla_norm makes, in the same cache.
  const std::vector<float> turned = k.data;
  Tensor<float> weight({128}), plain({3, 128}), fused({3, 128});
  plain.data = kv.data;
  fused.data = kv.data;
  for (int i = 0; i < 128; ++i) weight[i] = 1.0f + 0.01f * static_cast<float>(i);
  mla_norm_args na = make<mla_norm_args>();
  na.x = na.y = plain;
  na.weight = weight;
  na.eps = 1e-6;
  ASSERT_OK(mla_norm(s, &na));
  Cache third;
  ASSERT_OK(mla_cache_create(&spec, 5, kCpu, &third));
  mla_norm_rope_append_args nra = make<mla_norm_rope_append_args>();
  nra.q_pe = q;
  nra.kv_c = fused;
  nra.k_pe = k;
  nra.weight = weight;
  nra.eps = 1e-6;
  nra.positions = positions;
  nra.positions_count = 3;
  nra.table = table;
  nra.slots = slots;
  nra.slots_count = 3;
  nra.cache = third;
  ASSERT_OK(mla_norm_rope_append(s, &nra));
  EXPECT_EQ(fused.data, plain.data);
  k.data = turned;

  // Position 5 and 17 of a request whose pages are in order, through a copy of page 4 on page 0.
  const mla_page_copy copy{4, 0};
  mla_copy_pages_args cp = make<mla_copy_pages_args>();
  cp.copies = &copy;
  cp.copies_count = 1;
  EXPECT_EQ(MLA_ERROR_INPUT, mla_copy_pages(s, &cp));
  for (mla_cache* cache : {static_cast<mla_cache*>(one), static_cast<mla_cache*>(both)}) {
    cp.cache = cache;
    ASSERT_OK(mla_copy_pages(s, &cp));
    const int32_t pages[] = {3, 1, 2, 3, 0};
    const mla_gather_piece pieces[] = {{0, 17, 1, 0}, {0, 5, 1, 1}};
    Tensor<float> got_kv({2, 128}), got_k({2, 16});
    mla_gather_args g = make<mla_gather_args>();
    g.cache = cache;
    g.block_table = {pages, 1, 5, 0};
    g.pieces = pieces;
    g.pieces_count = 2;
    g.kv_c = got_kv;
    g.k_pe = got_k;
    ASSERT_OK(mla_gather(s, &g));
    for (int i = 0; i < 128; ++i) {
      EXPECT_EQ(got_kv[i], kv[i]);
      EXPECT_EQ(got_kv[128 + i], kv[2 * 128 + i]);
    }
    for (int i = 0; i < 16; ++i) EXPECT_EQ(got_k[16 + i], cache == both ? k[32 + i] : kr[32 + i]);
    g.pieces_count = -1;
    EXPECT_EQ(MLA_ERROR_SHAPE, mla_gather(s, &g));
    g.pieces_count = 2;
    g.block_table.stride = 2;
    EXPECT_FAILS(MLA_ERROR_SHAPE, mla_gather(s, &g), "block_table stride is 2");
  }
  const int32_t past[] = {20, -1, 5};
  ap.slots = past;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_append(s, &ap), "slot of token 0 is 20, the cache has 20");

  // What would be written twice, in no order: an error before anything is.
  std::vector<char> before(static_cast<const char*>(narrow_data), static_cast<const char*>(narrow_data) + 5 * page);
  const int32_t twice[] = {5, 17, 5}, none[] = {-1, -1, -1}, falling[] = {6, 5, -1};
  ap.slots = nra.slots = twice;
  nra.cache = narrow;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_append(s, &ap), "mla_append: slots[2] is 5, the slot of token 0 too");
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_norm_rope_append(s, &nra), "slots[2] is 5, the slot of token 0 too");
  EXPECT_EQ(k.data, turned);
  const mla_page_copy to_one[] = {{0, 3}, {1, 2}, {4, 3}}, chain[] = {{0, 3}, {1, 2}, {2, 4}},
                      itself[] = {{0, 0}, {1, 2}};
  cp.cache = narrow;
  cp.copies = to_one;
  cp.copies_count = 3;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_copy_pages(s, &cp), "copies[2].to is page 3, which copies[0] writes");
  cp.copies = chain;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_copy_pages(s, &cp), "copies[2].from is page 2, which copies[1] writes");
  ap.slots = none;
  EXPECT_OK(mla_append(s, &ap));
  EXPECT_EQ(std::memcmp(narrow_data, before.data(), before.size()), 0);
  ap.slots = falling;
  EXPECT_OK(mla_append(s, &ap));
  cp.copies = itself;
  cp.copies_count = 2;
  EXPECT_OK(mla_copy_pages(s, &cp));
}

TEST(COps, CastPicksRowsAndSaturates) {
  Stream s;
  Tensor<float> x({3, 1, 2});
  x.data = {1, 2, 3, 4, 5000, -6};
  Tensor<uint8_t> y({2, 1, 2});
  const int32_t rows[] = {2, 0};
  mla_cast_args a = make<mla_cast_args>();
  a.x = x;
  a.x_rows = rows;
  a.x_rows_count = 2;
  a.y = y;
  a.scale = 2;
  ASSERT_OK(mla_cast(s, &a));
  EXPECT_EQ(y.data, (std::vector<uint8_t>{0x7e, 0xc4, 0x30, 0x38}));  // 448, -3, 0.5, 1
  a.scale = 0;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_cast(s, &a), "scale");
}

TEST(COps, Project) {
  Stream s;
  Bytes memory = scratch(s);
  Tensor<float> w({2, 5, 7}), x({4, 2, 7}), y({4, 2, 5}, -1.0f);
  w.random(1);
  x.random(2);
  Linear linear;
  ASSERT_OK(mla_linear_create(w, MLA_F32, MLA_WEIGHTS_PLAIN, 0, 0, kCpu, &linear));
  const int32_t x_rows[] = {3, 1}, y_rows[] = {0, 2};
  mla_project_args a = make<mla_project_args>();
  a.x = x;
  a.weights = linear;
  a.y = y;
  a.x_rows = x_rows;
  a.x_rows_count = 2;
  a.y_rows = y_rows;
  a.y_rows_count = 2;
  a.rows = 2;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_project(s, &a), "scratch");
  a.scratch = memory.data;
  a.scratch_bytes = memory.size;
  ASSERT_OK(mla_project(s, &a));
  for (int r = 0; r < 2; ++r)
    for (int h = 0; h < 2; ++h)
      for (int o = 0; o < 5; ++o) {
        double sum = 0;
        for (int i = 0; i < 7; ++i) sum += double{w[(h * 5 + o) * 7 + i]} * x[(x_rows[r] * 2 + h) * 7 + i];
        EXPECT_NEAR(y[(y_rows[r] * 2 + h) * 5 + o], sum, 1e-5);
      }
  for (int i = 0; i < 10; ++i) EXPECT_EQ(y[10 + i], -1.0f);
  a.scratch_bytes = 64;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_project(s, &a), "scratch");
  a.scratch_bytes = memory.size;
  a.activations = MLA_ACTIVATIONS_FP8_128;
  EXPECT_FAILS(MLA_ERROR_UNSUPPORTED, mla_project(s, &a), "activations fp8_128 are for weights in fp8");
  Linear fp8;
  ASSERT_OK(mla_linear_create(w, MLA_F32, MLA_WEIGHTS_FP8, 0, 0, kCpu, &fp8));
  a.weights = fp8;
  ASSERT_OK(mla_project(s, &a));
  for (int o = 0; o < 5; ++o) {
    double sum = 0, size = 0;
    for (int i = 0; i < 7; ++i) {
      const double term = double{w[o * 7 + i]} * x[3 * 2 * 7 + i];
      sum += term;
      size += std::abs(term);
    }
    EXPECT_NEAR(y[o], sum, size * (17.0 / 16 * 17 / 16 - 1) + 1e-3);  // either side loses up to 1/16
  }
  a.activations = 2;
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_project(s, &a), "activations");
  a.activations = MLA_ACTIVATIONS_PLAIN;
  a.y = nullptr;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_project(s, &a), "mla_project: y is missing");
  mla_linear* none = nullptr;
  EXPECT_EQ(MLA_ERROR_UNSUPPORTED, mla_linear_create(w, MLA_F16, MLA_WEIGHTS_PLAIN, 0, 0, kCpu, &none));
  EXPECT_EQ(MLA_ERROR_INPUT, mla_linear_create(w, MLA_F32, 3, 0, 0, kCpu, &none));
  w[3] = std::numeric_limits<float>::infinity();
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_linear_create(w, MLA_BF16, MLA_WEIGHTS_FP8, 4, 4, kCpu, &none), "element 3");
}

TEST(COps, QuantizeGroupsAndPadding) {
  Stream s;
  mla_output_spec spec = mla_output_spec_default();
  spec.kind = MLA_OUTPUT_FP8_GROUPS;
  spec.group = 64;
  spec.layout = MLA_LAYOUT_TMA_ALIGNED;
  int64_t row_bytes = 0, scale_bytes = 0;
  ASSERT_OK(mla_output_bytes(&spec, 3, 128, &row_bytes, &scale_bytes));
  EXPECT_EQ(row_bytes, 128);
  EXPECT_EQ(scale_bytes, 2 * 4 * 4);
  Tensor<float> x({2, 128});
  x.random(4);
  Tensor<uint8_t> codes({3, 128}, 9);
  Tensor<float> scales({8}, -1.0f);
  DLTensor bytes = *scales;
  int64_t shape[] = {scale_bytes};
  bytes.dtype = Type<uint8_t>::value;
  bytes.shape = shape;
  mla_quantized y = make<mla_quantized>();
  y.spec = &spec;
  y.width = 128;
  y.codes = codes;
  y.scales = &bytes;
  mla_quantize_args a = make<mla_quantize_args>();
  a.x = x;
  a.y = &y;
  ASSERT_OK(mla_quantize(s, &a));
  for (int r = 0; r < 2; ++r)
    for (int g = 0; g < 2; ++g) {
      float amax = 0;
      for (int i = 0; i < 64; ++i) amax = std::max(amax, std::abs(x[r * 128 + g * 64 + i]));
      int64_t offset = -1;
      ASSERT_OK(mla_output_scale_offset(&spec, 3, 128, r, g, &offset));
      EXPECT_EQ(offset, (g * 4 + r) * 4);
      EXPECT_FLOAT_EQ(scales[offset / 4], amax / 448);
    }
  EXPECT_EQ(scales[3], 0.0f);  // the padding
  for (int i = 0; i < 128; ++i) EXPECT_EQ(codes[256 + i], 9);

  scales[3] = scales[7] = -1.0f;
  mla_quantize_padding_args p = make<mla_quantize_padding_args>();
  p.y = &y;
  p.rows = 2;
  ASSERT_OK(mla_quantize_padding(s, &p));
  EXPECT_EQ(scales[3], 0.0f);
  EXPECT_EQ(scales[7], 0.0f);

  shape[0] = scale_bytes - 1;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_quantize(s, &a), "y scales has 31 bytes, 32 are needed");
  y.scales = nullptr;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_quantize(s, &a), "y scales is missing");
  y.width = 64;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_quantize(s, &a), "y codes Byte is 128");
  spec.kind = MLA_OUTPUT_NONE;
  EXPECT_EQ(MLA_ERROR_INPUT, mla_quantize(s, &a));
  spec.kind = MLA_OUTPUT_FP8_GROUPS;
  spec.group = 32;
  EXPECT_EQ(MLA_ERROR_UNSUPPORTED, mla_quantize(s, &a));
}

TEST(COps, KvScales) {
  Tensor<float> q({1, 2, 3}, -50.0f), kv({2, 4}, 30.0f);
  mla_kv_scales scales = make<mla_kv_scales>();
  ASSERT_OK(mla_calc_kv_scales(q, kv, 0, 0, 60, &scales));
  EXPECT_FLOAT_EQ(scales.q_scale, 0.25f);
  EXPECT_FLOAT_EQ(scales.k_scale, 0.15f);
  EXPECT_FLOAT_EQ(scales.v_scale, 0.5f);
  EXPECT_EQ(MLA_ERROR_INPUT, mla_calc_kv_scales(q, kv, -1, 0, 0, &scales));
}

TEST(COps, Hadamard) {
  Stream s;
  Tensor<float> k({1, 4});
  k.data = {1, 2, 3, 4};
  mla_hadamard_args a = make<mla_hadamard_args>();
  a.k = k;
  ASSERT_OK(mla_hadamard(s, &a));
  const float expected[] = {5, -1, -2, 0};
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(k[i], expected[i], 1e-6f);
  Tensor<float> odd({1, 3});
  a.k = odd;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_hadamard(s, &a), "power of two");
}

// Softmax attention of one query row in float64; keys and values [count, width].
struct Attended {
  std::vector<double> out;
  double lse = -std::numeric_limits<double>::infinity(), most = lse;
};
Attended attend(const std::vector<double>& scores, const std::vector<const float*>& values, int width) {
  Attended a;
  a.out.assign(width, 0.0);
  for (double s : scores) a.most = std::max(a.most, s);
  double sum = 0;
  for (double s : scores) sum += std::exp(s - a.most);
  for (size_t j = 0; j < scores.size(); ++j)
    for (int i = 0; i < width; ++i) a.out[i] += std::exp(scores[j] - a.most) / sum * values[j][i];
  if (!scores.empty()) a.lse = a.most + std::log(sum);
  return a;
}

double dot(const float* a, const float* b, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += double{a[i]} * b[i];
  return sum;
}

TEST(COps, AttendExpandedAndMerge) {
  constexpr int kHeads = 2, kNope = 16, kRope = 8, kValue = 16, kTokens = 5, kKeys = 9;
  Stream s;
  Bytes memory = scratch(s);
  Tensor<float> q({kTokens, kHeads, kNope + kRope}), kn({kKeys, kHeads, kNope}), kp({kKeys, kRope}),
      v({kKeys, kHeads, kValue}), out({kTokens, kHeads, kValue}), lse({kTokens, kHeads}),
      other({kTokens, kHeads, kValue}), other_lse({kTokens, kHeads});
  q.random(1);
  kn.random(2);
  kp.random(3);
  v.random(4);
  mla_expanded_item item{0, kTokens, 0, kKeys, 4, 0, 0, {0, 0}, 0};
  mla_attend_expanded_args a = make<mla_attend_expanded_args>();
  a.q = q;
  a.k_nope = kn;
  a.k_pe = kp;
  a.v = v;
  a.items = &item;
  a.items_count = 1;
  a.scale = 0.3f;
  a.out = out;
  a.lse = lse;
  a.scratch = memory.data;
  a.scratch_bytes = memory.size;
  ASSERT_OK(mla_attend_expanded(s, &a));
  for (int t = 0; t < kTokens; ++t)
    for (int h = 0; h < kHeads; ++h) {
      std::vector<double> scores;
      std::vector<const float*> values;
      for (int j = 0; j <= t + 4 && j < kKeys; ++j) {
        const float* row = &q[(t * kHeads + h) * (kNope + kRope)];
        scores.push_back(0.3f *
                         (dot(row, &kn[(j * kHeads + h) * kNope], kNope) + dot(row + kNope, &kp[j * kRope], kRope)));
        values.push_back(&v[(j * kHeads + h) * kValue]);
      }
      const Attended e = attend(scores, values, kValue);
      EXPECT_NEAR(lse[t * kHeads + h], e.lse, 1e-4);
      for (int i = 0; i < kValue; ++i) EXPECT_NEAR(out[(t * kHeads + h) * kValue + i], e.out[i], 1e-4);
    }

  // The keys in two parts, merged.
  const std::vector<float> whole = out.data;
  item.k_count = 4;
  ASSERT_OK(mla_attend_expanded(s, &a));
  item = {0, kTokens, 4, kKeys - 4, 0, 0, 0, {0, 0}, 0};
  a.out = other;
  a.lse = other_lse;
  ASSERT_OK(mla_attend_expanded(s, &a));
  mla_merge_args m = make<mla_merge_args>();
  m.out = out;
  m.lse = lse;
  m.other = other;
  m.other_lse = other_lse;
  ASSERT_OK(mla_merge(s, &m));
  for (size_t i = 0; i < whole.size(); ++i) EXPECT_NEAR(out[i], whole[i], 1e-4f);
  const int32_t rows[] = {0, 1, 2, 3, 5};
  m.rows = rows;
  m.rows_count = 5;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_merge(s, &m), "rows entry is 5");

  // The same by masks: of every row's first keys, from bit 30 on, and of the others.
  const std::vector<float> second = other.data;
  Tensor<int32_t> mask({kTokens, 2});
  for (int t = 0; t < kTokens; ++t) {
    mask[2 * t] = static_cast<int32_t>(~0u << 30);
    mask[2 * t + 1] = 3;
  }
  item = {0, kTokens, 0, kKeys, 4, 0, 1, {0, 0}, 30};
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_attend_expanded(s, &a), "an item is masked, there is no mask");
  a.mask = mask;
  ASSERT_OK(mla_attend_expanded(s, &a));
  const std::vector<float> first = other.data;
  for (int t = 0; t < kTokens; ++t) {
    mask[2 * t] = 0;
    mask[2 * t + 1] = ~3;
  }
  ASSERT_OK(mla_attend_expanded(s, &a));
  for (size_t i = 0; i < second.size(); ++i) EXPECT_NEAR(other[i], second[i], 1e-4f);
  a.accumulate = 1;
  for (int t = 0; t < kTokens; ++t) {
    mask[2 * t] = static_cast<int32_t>(~0u << 30);
    mask[2 * t + 1] = 3;
  }
  ASSERT_OK(mla_attend_expanded(s, &a));
  for (size_t i = 0; i < whole.size(); ++i) EXPECT_NEAR(other[i], whole[i], 1e-4f);
  a.accumulate = 0;
  // Items of an older header lie closer together.
  a.struct_size = offsetof(mla_attend_expanded_args, mask);
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_attend_expanded(s, &a), "args struct_size is 104: an older header's items");
  a.struct_size = sizeof a;

  item.last = 2;
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_attend_expanded(s, &a), "item last is 2");
  item.last = 0;
  item.masked = 3;
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_attend_expanded(s, &a), "item masked is 3");
  item.masked = 0;
  item.k_begin = 1;
  item.k_count = kKeys;
  EXPECT_EQ(MLA_ERROR_SHAPE, mla_attend_expanded(s, &a));
  a.items = nullptr;
  EXPECT_FAILS(MLA_ERROR_HANDLE, mla_attend_expanded(s, &a), "items is NULL");
}

// Four tokens of one request and 20 cached rows of a small latent cache.
struct Latent {
  static constexpr int kHeads = 3, kLatent = 128, kRope = 16, kEntry = kLatent + kRope, kRows = 20;
  Stream s;
  Bytes memory = scratch(s);
  mla_cache_spec spec = mla_cache_spec_default();
  Cache cache;
  Tensor<float> kv{{kRows, kLatent}}, kp{{kRows, kRope}}, q{{4, kHeads, kEntry}}, out{{4, kHeads, kLatent}, -1.0f},
      lse{{4, kHeads}, -1.0f};
  std::vector<int32_t> pages{2, 0, 1}, slots;
  Latent() {
    spec.format = MLA_CACHE_F32;
    spec.latent = kLatent;
    spec.rope = kRope;
    spec.page_size = 8;
    EXPECT_OK(mla_cache_create(&spec, 3, kCpu, &cache));
    kv.random(1);
    kp.random(2);
    q.random(3);
    for (int j = 0; j < kRows; ++j) slots.push_back(pages[j / 8] * 8 + j % 8);
    mla_append_args a = make<mla_append_args>();
    a.kv_c = kv;
    a.k_pe = kp;
    a.slots = slots.data();
    a.slots_count = kRows;
    a.cache = cache;
    EXPECT_OK(mla_append(s, &a));
  }
  Attended expected(int t, int h, const std::vector<int>& seen) {
    std::vector<double> scores;
    std::vector<const float*> values;
    const float* row = &q[(t * kHeads + h) * kEntry];
    for (int j : seen) {
      scores.push_back(0.2f * (dot(row, &kv[j * kLatent], kLatent) + dot(row + kLatent, &kp[j * kRope], kRope)));
      values.push_back(&kv[j * kLatent]);
    }
    return attend(scores, values, kLatent);
  }
  void expect(int t, int h, const Attended& e, double factor = 1) {
    EXPECT_NEAR(lse[t * kHeads + h], e.lse, 1e-4);
    for (int i = 0; i < kLatent; ++i)
      EXPECT_NEAR(out[(t * kHeads + h) * kLatent + i], factor * e.out[i], 1e-4) << t << " " << h << " " << i;
  }
};

TEST(COps, AttendLatentAndMergeSplits) {
  Latent l;
  mla_latent_item items[] = {{0, 0, 4, 0, 20, 16, -1}, {}};
  mla_attend_latent_args a = make<mla_attend_latent_args>();
  a.q = l.q;
  a.q_scale = 1;
  a.scale = 0.2f;
  a.cache = l.cache;
  a.block_table = {l.pages.data(), 1, 3, 0};
  a.items = items;
  a.items_count = 1;
  a.out = l.out;
  a.lse = l.lse;
  a.scratch = l.memory.data;
  a.scratch_bytes = l.memory.size;
  ASSERT_OK(mla_attend_latent(l.s, &a));
  std::vector<int> seen;
  for (int j = 0; j < 16; ++j) seen.push_back(j);
  for (int t = 0; t < 4; ++t) {
    seen.push_back(16 + t);
    for (int h = 0; h < Latent::kHeads; ++h) l.expect(t, h, l.expected(t, h, seen));
  }

  // In two splits, joined.
  const std::vector<float> whole = l.out.data;
  Tensor<float> partial({8, Latent::kHeads, Latent::kLatent}), partial_lse({8, Latent::kHeads});
  items[0] = {0, 0, 4, 0, 8, 16, 0};
  items[1] = {0, 0, 4, 8, 20, 16, 4};
  a.items_count = 2;
  EXPECT_EQ(MLA_ERROR_SHAPE, mla_attend_latent(l.s, &a));
  a.partial_out = partial;
  a.partial_lse = partial_lse;
  ASSERT_OK(mla_attend_latent(l.s, &a));
  const mla_split_rows split{0, 4, 0, 2};
  mla_merge_splits_args m = make<mla_merge_splits_args>();
  m.partial_out = partial;
  m.partial_lse = partial_lse;
  m.items = &split;
  m.items_count = 1;
  m.out = l.out;
  m.lse = l.lse;
  ASSERT_OK(mla_merge_splits(l.s, &m));
  for (size_t i = 0; i < whole.size(); ++i) EXPECT_NEAR(l.out[i], whole[i], 1e-4f);

  Tensor<float> few({8, Latent::kHeads - 1});
  a.partial_lse = few;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_attend_latent(l.s, &a), "mla_attend_latent: partial_lse Head is 2, q Head is 3");
  a.partial_lse = partial_lse;
  l.pages[1] = 3;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_attend_latent(l.s, &a), "page id is 3");
  l.pages[1] = 0;
  a.lse = nullptr;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_attend_latent(l.s, &a), "lse is missing");
}

TEST(COps, AttendSparseAndMergeSparse) {
  Latent l;
  const int32_t lengths[] = {4, 4, 2, 0};
  Tensor<int32_t> slots({4, 4}, -1);
  const std::vector<std::vector<int>> chosen{{3, 19, 7, 7}, {0, 1, 2}, {5, 6}, {}};
  for (int t = 0; t < 4; ++t)
    for (size_t i = 0; i < chosen[t].size(); ++i) slots[t * 4 + i] = l.slots[chosen[t][i]];
  slots[2 * 4 + 2] = l.slots[9];  // past the row's length
  const mla_sparse_source source{l.cache, slots, lengths, 4};
  const float inf = std::numeric_limits<float>::infinity(), sinks[] = {-inf, inf, 0.5f};
  mla_sparse_item items[] = {{0, 4, 0, 4, -1}, {}};
  Tensor<float> most({4, Latent::kHeads});
  mla_attend_sparse_args a = make<mla_attend_sparse_args>();
  a.q = l.q;
  a.q_scale = 1;
  a.scale = 0.2f;
  a.sources = &source;
  a.sources_count = 1;
  a.items = items;
  a.items_count = 1;
  a.sinks = sinks;
  a.sinks_count = 3;
  a.out = l.out;
  a.lse = l.lse;
  a.max_logits = most;
  a.scratch = l.memory.data;
  a.scratch_bytes = l.memory.size;
  const auto judge = [&] {
    for (int t = 0; t < 3; ++t)
      for (int h = 0; h < Latent::kHeads; ++h) {
        const Attended e = l.expected(t, h, chosen[t]);
        l.expect(t, h, e, h == 0 ? 1 : h == 1 ? 0 : std::exp(e.lse) / (std::exp(e.lse) + std::exp(0.5)));
        EXPECT_NEAR(most[t * Latent::kHeads + h], e.most, 1e-4);
      }
    for (int h = 0; h < Latent::kHeads; ++h) EXPECT_EQ(l.lse[3 * Latent::kHeads + h], -inf);
  };
  ASSERT_OK(mla_attend_sparse(l.s, &a));
  judge();

  Tensor<float> partial({8, Latent::kHeads, Latent::kLatent}), partial_lse({8, Latent::kHeads}),
      partial_max({8, Latent::kHeads});
  items[0] = {0, 4, 0, 2, 0};
  items[1] = {0, 4, 2, 4, 4};
  a.items_count = 2;
  a.partial_out = partial;
  a.partial_lse = partial_lse;
  a.partial_max = partial_max;
  ASSERT_OK(mla_attend_sparse(l.s, &a));
  const mla_split_rows split{0, 4, 0, 2};
  mla_merge_sparse_args m = make<mla_merge_sparse_args>();
  m.partial_out = partial;
  m.partial_lse = partial_lse;
  m.partial_max = partial_max;
  m.items = &split;
  m.items_count = 1;
  m.sinks = sinks;
  m.sinks_count = 3;
  m.out = l.out;
  m.lse = l.lse;
  m.max_logits = most;
  std::fill(l.out.data.begin(), l.out.data.end(), 9.0f);
  ASSERT_OK(mla_merge_sparse(l.s, &m));
  judge();

  a.sources_count = 9;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_attend_sparse(l.s, &a), "sources_count is 9, allowed 1 to 8");
  a.sources_count = 1;
  a.sinks_count = 2;
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_attend_sparse(l.s, &a), "sinks length is 2");
}

}  // namespace
}  // namespace capi
