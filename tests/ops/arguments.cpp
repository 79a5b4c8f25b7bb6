// Arguments that do not fit: a one-line ShapeError that gives both values and the dimension's name, before anything is
// written.
#include <gtest/gtest.h>

#include "backend/backend.hpp"
#include "backend/run.hpp"
#include "cases/compare.hpp"

namespace mla {
namespace {

class Arguments : public testing::Test {
 protected:
  template <class Args>
  std::string refusal(const Args& args) {
    try {
      ops::run(stream_, args);
    } catch (const ShapeError& e) {
      EXPECT_EQ(std::string_view(e.what()).find('\n'), std::string_view::npos);
      return e.what();
    }
    return "accepted";
  }

  ThreadPool pool_{1};
  Stream stream_{pool_};
  std::vector<float> data_ = std::vector<float>(4096, 1.0f), other_ = std::vector<float>(4096, 2.0f);
};

TEST_F(Arguments, Norm) {
  const std::vector<float> weight(8, 1.0f);
  auto with = [&](View<const float, Token, In> x, View<float, Token, In> y, size_t weights) {
    return refusal(ops::NormArgs{.x = x, .weight = std::span(weight).first(weights), .y = y});
  };
  float *x = data_.data(), *y = other_.data();
  EXPECT_EQ(with({x, {2, 8}}, {y, {2, 8}}, 8), "accepted");
  EXPECT_EQ(with({x, {2, 8}}, {x, {2, 8}}, 8), "accepted");  // in place
  EXPECT_EQ(with({x, {2, 8}}, {y, {3, 8}}, 8), "norm: y Token is 3, x Token is 2");
  EXPECT_EQ(with({x, {2, 8}}, {y, {2, 9}}, 8), "norm: y In is 9, x In is 8");
  EXPECT_EQ(with({x, {2, 8}}, {y, {2, 8}}, 7), "norm: weight length is 7, x In is 8");
  EXPECT_EQ(with({x, {2, 8}, {16, 2}}, {y, {2, 8}}, 8), "norm: x In has stride 2, 1 is needed");
  EXPECT_EQ(with({x, {2, 8}}, {y, {2, 8}, {1, 2}}, 8), "norm: y In has stride 2, 1 is needed");
  auto growing = [&](const std::vector<int32_t>& positions, int32_t length) {
    return refusal(ops::NormArgs{.x = View<const float, Token, In>(x, {2, 8}),
                                 .weight = weight,
                                 .y = View<float, Token, In>(y, {2, 8}),
                                 .growth = {positions, 0.1, length}});
  };
  EXPECT_EQ(growing({0, 7}, 1), "accepted");
  EXPECT_EQ(growing({0}, 1), "norm: positions is 1, x Token is 2");
  EXPECT_EQ(growing({0, -1}, 1).substr(0, 19), "norm: position is -");
  EXPECT_EQ(growing({0, 1}, 0).substr(0, 23), "norm: growth length is ");
}

// Operands of e4m3: all of them or none, scales for every row of an item, and items where values may begin.
TEST_F(Arguments, AttendExpandedOfCodes) {
  const std::vector<fp8_e4m3> codes(4096, fp8_e4m3{0x38});
  const std::vector<float> scales(64, 1.0f);
  std::vector<std::byte> scratch(64);
  const std::vector<ExpandedItem> items{{0, 4, 16, 150, 0}};
  const std::vector<ops::ScaleRows> rows{{.q = 1, .k = 2}};
  const auto with = [&](auto change) -> std::string {
    ops::AttendExpandedArgs a{.q = {codes.data(), {4, 2, 8}},
                              .k_nope = {codes.data(), {166, 2, 6}},
                              .k_pe = {codes.data(), {166, 2}},
                              .v = {codes.data(), {166, 2, 3}, {1, 504, 168}},
                              .scales = {.q = {scales.data(), {2, 2}},
                                         .k = {scales.data(), {4, 2}},
                                         .v = {scales.data(), {4, 2}, {2, 0}},
                                         .rows = rows},
                              .items = items,
                              .out = {data_.data(), {4, 2, 3}},
                              .lse = {other_.data(), {4, 2}},
                              .scratch = {scratch.data(), scratch.size()}};
    change(a);
    try {
      ops::check(a);
    } catch (const ShapeError& e) {
      EXPECT_EQ(std::string_view(e.what()).find('\n'), std::string_view::npos);
      return e.what();
    }
    return "accepted";
  };
  using A = ops::AttendExpandedArgs;
  EXPECT_EQ(with([](A&) {}), "accepted");
  EXPECT_EQ(with([](A& a) { a.scales = {}; }), "accepted");
  EXPECT_EQ(with([&](A& a) {
              a.scales.k = {scales.data(), {3, 2}};
            }),
            "attend_expanded: k scales last row of an item is 3, allowed 2 to 2");
  EXPECT_EQ(with([&](A& a) {
              a.scales.q = {scales.data(), {1, 2}};
            }),
            "attend_expanded: q scales row of an item is 1, allowed 0 to 0");
  EXPECT_EQ(with([&](A& a) {
              a.scales.v = {scales.data(), {4, 3}};
            }),
            "attend_expanded: v scales Head is 3, q Head is 2");
  EXPECT_EQ(with([](A& a) { a.items = {}; }), "attend_expanded: scales' rows is 1, items is 0");
  EXPECT_EQ(with([&](A& a) { a.k_pe = {data_.data(), {166, 2}}; }), "attend_expanded: k_pe is f32, allowed: fp8_e4m3");
  EXPECT_EQ(with([&](A& a) {
              a.k_nope = {data_.data(), {166, 2, 6}};
            }),
            "attend_expanded: k_nope beside q of e4m3 is f32, allowed: fp8_e4m3");
  EXPECT_EQ(with([&](A& a) {
              a.q = {data_.data(), {4, 2, 8}};
              a.k_nope = {data_.data(), {166, 2, 6}};
              a.k_pe = {data_.data(), {166, 2}};
              a.v = {data_.data(), {166, 2, 3}};
            }),
            "attend_expanded: scales are of e4m3 operands, q is f32");
  const std::vector<ExpandedItem> odd{{0, 4, 7, 150, 0}};
  EXPECT_EQ(with([&](A& a) { a.items = odd; }),
            "attend_expanded: item k_begin is 7, v with its keys innermost takes multiples of 16");
  EXPECT_EQ(with([&](A& a) {
              a.items = odd;
              a.v = {codes.data(), {166, 2, 3}};
            }),
            "accepted");
  EXPECT_EQ(with([&](A& a) {
              a.v = {codes.data(), {166, 2, 3}, {2, 504, 168}};
            }),
            "attend_expanded: v Value has stride 168, 1 is needed");
}

// Masks: there for every masked item, with rows and columns for what it names.
TEST_F(Arguments, AttendExpandedMasks) {
  const std::vector<uint32_t> words(64);
  std::vector<std::byte> scratch(64);
  const auto with = [&](View<const uint32_t, Token, Word> mask, ExpandedItem item) -> std::string {
    try {
      ops::check(ops::AttendExpandedArgs{.q = {data_.data(), {6, 2, 8}},
                                         .k_nope = {data_.data(), {90, 2, 6}},
                                         .k_pe = {data_.data(), {90, 2}},
                                         .v = {data_.data(), {90, 2, 3}},
                                         .items = {&item, 1},
                                         .mask = mask,
                                         .out = {other_.data(), {6, 2, 3}},
                                         .lse = {other_.data(), {6, 2}},
                                         .scratch = {scratch.data(), scratch.size()}});
    } catch (const ShapeError& e) {
      EXPECT_EQ(std::string_view(e.what()).find('\n'), std::string_view::npos);
      return e.what();
    }
    return "accepted";
  };
  const auto item = [](int32_t q_begin, int32_t k_count, int32_t mask_begin, bool masked = true) {
    return ExpandedItem{
        .q_begin = q_begin, .q_count = 2, .k_count = k_count, .masked = masked, .mask_begin = mask_begin};
  };
  const View<const uint32_t, Token, Word> mask(words.data(), {5, 3});
  EXPECT_EQ(with(mask, item(3, 90, 6)), "accepted");
  EXPECT_EQ(with(mask, item(3, 90, 7)), "attend_expanded: item mask_begin is 7, allowed 0 to 6");
  EXPECT_EQ(with(mask, item(3, 90, -1)), "attend_expanded: item mask_begin is -1, allowed 0 to 6");
  EXPECT_EQ(with({words.data(), {5, 2}}, item(3, 65, 0)).substr(0, 42), "attend_expanded: item mask_begin is 0, all");
  EXPECT_EQ(with(mask, item(4, 90, 0)), "attend_expanded: item q_begin is 4, allowed 0 to 3");
  EXPECT_EQ(with({words.data(), {1, 3}}, item(0, 90, 0)), "attend_expanded: item q_count is 2, allowed 0 to 1");
  EXPECT_EQ(with({}, item(0, 90, 0)), "attend_expanded: an item is masked, there is no mask");
  EXPECT_EQ(with({words.data(), {5, 3}, {1, 5}}, item(0, 90, 0)),
            "attend_expanded: mask Word has stride 5, 1 is needed");
  // Items without a mask, or without keys, need none, whatever they say of it.
  EXPECT_EQ(with({}, item(4, 90, -7, false)), "accepted");
  EXPECT_EQ(with({}, item(0, 0, -7)), "accepted");
}

// Views of no elements may be of nothing and of any other extents; all others have memory for what they say.
TEST_F(Arguments, EmptyNullAndImpossibleViews) {
  constexpr int64_t kMany = int64_t{1} << 50;
  float* const nothing = nullptr;
  const std::vector<float> weight(8, 1.0f);
  const auto norm = [&](View<const float, Token, In> x, View<float, Token, In> y, size_t n) {
    return refusal(ops::NormArgs{.x = x, .weight = std::span(weight).first(n), .y = y});
  };
  float *x = data_.data(), *y = other_.data();
  EXPECT_EQ(norm({nothing, {kMany, 0}}, {nothing, {kMany, 0}}, 0), "accepted");
  EXPECT_EQ(norm({nothing, {0, 8}}, {nothing, {0, 8}}, 8), "accepted");
  EXPECT_EQ(norm({nothing, {2, 8}}, {y, {2, 8}}, 8), "norm: x has no data");
  EXPECT_EQ(norm({x, {2, 8}}, {nothing, {2, 8}}, 8), "norm: y has no data");
  EXPECT_EQ(norm({x, {-2, 8}}, {y, {-2, 8}}, 8), "norm: x Token is -2, must not be negative");
  EXPECT_EQ(norm({x, {kMany, kMany}}, {y, {kMany, kMany}}, 8), "norm: x has more than 2^59 elements");
  float* const odd = reinterpret_cast<float*>(reinterpret_cast<std::byte*>(x) + 1);
  EXPECT_EQ(norm({odd, {2, 8}}, {y, {2, 8}}, 8), "norm: x is at an address that is 1 past a multiple of 4");

  EXPECT_EQ(
      refusal(ops::LayerNormArgs{.x = {nothing, {kMany, 0}}, .weight = {}, .bias = {}, .y = {nothing, {kMany, 0}}}),
      "accepted");
  EXPECT_EQ(refusal(ops::CastArgs{.x = View<const float, Token, Head, In>(nothing, {kMany, 3, 0}),
                                  .y = View<float, Token, Head, In>(nothing, {kMany, 3, 0})}),
            "accepted");
  EXPECT_EQ(refusal(ops::CastArgs{.x = View<const float, Token, Head, In>(x, {2, 3, 4}),
                                  .y = View<float, Token, Head, In>(nothing, {2, 3, 4})}),
            "cast: y has no data");
  EXPECT_EQ(refusal(ops::HadamardArgs{.q = {nothing, {kMany, 0, 64}}, .k = {}}), "accepted");
  EXPECT_EQ(refusal(ops::HadamardArgs{.q = {nothing, {2, 3, 64}}, .k = {}}), "hadamard: q has no data");
  EXPECT_EQ(refusal(ops::MergeArgs{.out = {nothing, {kMany, 0, 8}},
                                   .lse = {nothing, {kMany, 0}},
                                   .other = View<const float, Token, Head, Value>(nothing, {kMany, 0, 8}),
                                   .other_lse = View<const float, Token, Head>(nothing, {kMany, 0})}),
            "accepted");
  EXPECT_EQ(refusal(ops::IndexQueryArgs{.q = {nothing, {kMany, 0, 64}},
                                        .weights = {nothing, {kMany, 0}},
                                        .codes = {nullptr, {kMany, 0, 64}},
                                        .scaled_weights = {nothing, {kMany, 0}}}),
            "accepted");
  const RotaryTable table({}, 8, 100);
  const std::vector<int32_t> positions{0, 1};
  EXPECT_EQ(refusal(ops::RopeArgs{.q = View<float, Token, Head, Rope>(nothing, {2, 3, 8}),
                                  .k = View<float, Token, Rope>(y, {2, 8}),
                                  .positions = positions,
                                  .table = &table}),
            "rope: q has no data");
}

// Pages of a cache that is nowhere, or that would lie on one another.
TEST_F(Arguments, Caches) {
  const Cache cache({.format = CacheFormat::bf16, .latent = 40, .rope = 8, .page_size = 4}, 3);
  const std::vector<int32_t> slots{0, 11};
  const auto with = [&](auto&& change) {
    CacheView view = cache.view();
    change(view);
    return refusal(ops::AppendArgs{.kv_c = View<const float, Token, Latent>(data_.data(), {2, 40}),
                                   .k_pe = View<const float, Token, Rope>(data_.data(), {2, 8}),
                                   .slots = slots,
                                   .cache = view});
  };
  EXPECT_EQ(with([](CacheView&) {}), "accepted");
  EXPECT_EQ(with([](CacheView& c) { c.data = nullptr; }), "append: cache has no data");
  EXPECT_EQ(with([](CacheView& c) { c.data += 1; }), "append: cache is at an address that is 1 past a multiple of 2");
  EXPECT_EQ(with([](CacheView& c) { c.page_stride = 382; }),
            "append: cache page_stride is 382, a page takes 384 bytes");
  EXPECT_EQ(with([](CacheView& c) { c.page_stride = 385; }),
            "append: cache page_stride is 385, must be a multiple of 2");
  EXPECT_EQ(with([](CacheView& c) { c.spec.page_size = 0; }), "append: cache page size is 0, at least 1 is needed");
  EXPECT_EQ(with([](CacheView& c) { c.pages = int64_t{1} << 40; }),
            "append: cache pages is 1099511627776, allowed 0 to 536870912");
  ops::PageBytes pages = cache.view();
  const std::vector<ops::PageCopy> copies{{0, 1}};
  pages.page_stride = 100;
  EXPECT_EQ(refusal(ops::CopyPagesArgs{pages, copies}), "copy_pages: cache page_stride is 100, a page takes 384 bytes");
  pages.data = nullptr;
  EXPECT_EQ(refusal(ops::CopyPagesArgs{pages, copies}), "copy_pages: cache has no data");
}

TEST_F(Arguments, LayerNorm) {
  const std::vector<float> weight(8, 1.0f), bias(8, 0.5f);
  auto with = [&](View<const float, Token, In> x, View<float, Token, In> y, size_t weights, size_t biases) {
    return refusal(ops::LayerNormArgs{
        .x = x, .weight = std::span(weight).first(weights), .bias = std::span(bias).first(biases), .y = y});
  };
  float *x = data_.data(), *y = other_.data();
  EXPECT_EQ(with({x, {2, 8}}, {y, {2, 8}}, 8, 8), "accepted");
  EXPECT_EQ(with({x, {2, 8}}, {x, {2, 8}}, 8, 8), "accepted");  // in place
  EXPECT_EQ(with({x, {2, 8}}, {y, {3, 8}}, 8, 8), "layer_norm: y Token is 3, x Token is 2");
  EXPECT_EQ(with({x, {2, 8}}, {y, {2, 9}}, 8, 8), "layer_norm: y In is 9, x In is 8");
  EXPECT_EQ(with({x, {2, 8}}, {y, {2, 8}}, 7, 8), "layer_norm: weight length is 7, x In is 8");
  EXPECT_EQ(with({x, {2, 8}}, {y, {2, 8}}, 8, 7), "layer_norm: bias length is 7, x In is 8");
  EXPECT_EQ(with({x, {2, 8}, {16, 2}}, {y, {2, 8}}, 8, 8), "layer_norm: x In has stride 2, 1 is needed");
  EXPECT_EQ(with({x, {2, 8}}, {y, {2, 8}, {1, 2}}, 8, 8), "layer_norm: y In has stride 2, 1 is needed");
}

TEST_F(Arguments, LayerNormInPlaceGivesTheSameBits) {
  const std::vector<float> weight(40, 0.5f), bias(40, 3.0f);
  cases::Random(1).fill_normal(data_);
  for (std::vector<float>* y : {&other_, &data_})
    ops::run(stream_, ops::LayerNormArgs{.x = View<const float, Token, In>(data_.data(), {9, 40}),
                                         .weight = weight,
                                         .bias = bias,
                                         .y = {y->data(), {9, 40}}});
  EXPECT_TRUE(std::equal(data_.begin(), data_.begin() + 360, other_.begin()));
}

TEST_F(Arguments, NormInPlaceGivesTheSameBits) {
  const std::vector<float> weight(40, 0.5f);
  cases::Random(1).fill_normal(data_);
  ops::run(stream_, ops::NormArgs{.x = View<const float, Token, In>(data_.data(), {9, 40}),
                                  .weight = weight,
                                  .y = {other_.data(), {9, 40}}});
  ops::run(stream_, ops::NormArgs{.x = View<const float, Token, In>(data_.data(), {9, 40}),
                                  .weight = weight,
                                  .y = {data_.data(), {9, 40}}});
  EXPECT_TRUE(std::equal(data_.begin(), data_.begin() + 360, other_.begin()));
}

TEST_F(Arguments, Rope) {
  const RotaryTable table({}, 8, 100);
  auto with = [&](View<float, Token, Head, Rope> q, View<float, Token, Rope> k, std::vector<int32_t> positions) {
    return refusal(ops::RopeArgs{.q = q, .k = k, .positions = positions, .table = &table});
  };
  float *q = data_.data(), *k = other_.data();
  EXPECT_EQ(with({q, {2, 3, 8}}, {k, {2, 8}}, {0, 99}), "accepted");
  EXPECT_EQ(with({}, {k, {2, 8}}, {0, 1}), "accepted");
  EXPECT_EQ(with({q, {2, 3, 8}}, {}, {0, 1}), "accepted");
  EXPECT_EQ(with({q, {2, 3, 8}}, {k, {2, 8}}, {0, 100}), "rope: position is 100, allowed 0 to 99");
  EXPECT_EQ(with({q, {2, 3, 8}}, {k, {2, 8}}, {-1, 0}), "rope: position is -1, allowed 0 to 99");
  EXPECT_EQ(with({q, {3, 3, 8}}, {k, {2, 8}}, {0, 1}), "rope: q Token is 3, positions is 2");
  EXPECT_EQ(with({q, {2, 3, 8}}, {k, {1, 8}}, {0, 1}), "rope: k Token is 1, positions is 2");
  EXPECT_EQ(with({q, {2, 3, 6}}, {k, {2, 8}}, {0, 1}), "rope: q Rope is 6, table's is 8");
  EXPECT_EQ(with({q, {2, 3, 8}, {48, 16, 2}}, {k, {2, 8}}, {0, 1}), "rope: q Rope has stride 2, 1 is needed");
  EXPECT_EQ(refusal(ops::RopeArgs{}), "rope: no table");
}

TEST_F(Arguments, RopeLeavesUnrotatedDimsAlone) {
  RopeConfig config;
  config.rotate = false;
  const RotaryTable table(config, 8, 4);
  const std::vector<int32_t> positions{123456, -5};  // a table that does not rotate reads no position
  cases::Random(1).fill_normal(data_);
  other_ = data_;
  ops::run(stream_, ops::RopeArgs{.q = {data_.data(), {2, 3, 8}}, .positions = positions, .table = &table});
  EXPECT_EQ(data_, other_);
}

TEST_F(Arguments, Project) {
  const auto w = backend::backend({}).pack(std::vector<float>(2 * 5 * 4), 2, 5, 4, Dtype::f32, {});
  const size_t bytes = backend::backend({}).scratch_per_worker({.hidden = 4});
  Buffer scratch(bytes);
  const std::vector<int32_t> good{2, 0}, far{0, 3}, negative{-1, 0};
  const ops::ProjectArgs base{.x = View<const float, Token, Head, In>(data_.data(), {3, 2, 4}),
                              .weights = w.get(),
                              .y = View<float, Token, Head, Out>(other_.data(), {3, 2, 5}),
                              .rows = 2,
                              .scratch = {scratch.data(), bytes}};
  auto with = [&](auto change) {
    ops::ProjectArgs a = base;
    change(a);
    return refusal(a);
  };
  using A = ops::ProjectArgs;
  EXPECT_EQ(refusal(base), "accepted");
  EXPECT_EQ(with([&](A& a) { a.x_rows = good, a.y_rows = good; }), "accepted");
  EXPECT_EQ(with([&](A& a) { a.rows = 0, a.scratch = {}; }), "accepted");
  EXPECT_EQ(with([&](A& a) { a.weights = nullptr; }), "project: no weights");
  EXPECT_EQ(with([&](A& a) {
              a.x = View<const float, Token, Head, In>(data_.data(), {3, 1, 4});
            }),
            "project: x Head is 1, weights heads is 2");
  EXPECT_EQ(with([&](A& a) {
              a.x = View<const float, Token, Head, In>(data_.data(), {3, 2, 6});
            }),
            "project: x In is 6, weights in is 4");
  EXPECT_EQ(with([&](A& a) {
              a.y = View<float, Token, Head, Out>(other_.data(), {3, 2, 4});
            }),
            "project: y Out is 4, weights out is 5");
  EXPECT_EQ(with([&](A& a) {
              a.x = View<const float, Token, Head, In>(data_.data(), {3, 2, 4}, {16, 8, 2});
            }),
            "project: x In has stride 2, 1 is needed");
  EXPECT_EQ(with([&](A& a) { a.x = {Dtype::f16, data_.data(), {3, 2, 4}}; }), "project: x is f16, allowed: f32 bf16");
  EXPECT_EQ(with([&](A& a) {
              a.y = {Dtype::fp8_e4m3, other_.data(), {3, 2, 5}};
            }),
            "project: y is fp8_e4m3, allowed: f32 bf16");
  EXPECT_EQ(with([&](A& a) { a.rows = 4; }), "project: rows is 4, allowed 0 to 3");
  EXPECT_EQ(with([&](A& a) { a.rows = -1; }), "project: rows is -1, must not be negative");
  EXPECT_EQ(with([&](A& a) { a.x_rows = far; }), "project: x_rows entry is 3, allowed 0 to 2");
  EXPECT_EQ(with([&](A& a) { a.x_rows = negative; }), "project: x_rows entry is -1, allowed 0 to 2");
  EXPECT_EQ(with([&](A& a) { a.y_rows = far; }), "project: y_rows entry is 3, allowed 0 to 2");
  EXPECT_EQ(with([&](A& a) { a.y_rows = negative; }), "accepted");
  EXPECT_EQ(with([&](A& a) { a.y_rows = std::span(good).first(1); }), "project: y_rows length is 1, rows is 2");
  EXPECT_EQ(with([&](A& a) { a.scratch = {}; }), "project: no scratch");
  EXPECT_EQ(with([&](A& a) { a.scratch.per_worker = 64; }).substr(0, 44),
            "project: scratch is 64 bytes a worker, 66560");
}

TEST_F(Arguments, Merge) {
  const std::vector<int32_t> far{0, 4};
  const ops::MergeArgs base{.out = {data_.data(), {4, 2, 8}},
                            .lse = {data_.data() + 1000, {4, 2}},
                            .other = View<const float, Token, Head, Value>(other_.data(), {2, 2, 8}),
                            .other_lse = View<const float, Token, Head>(other_.data() + 1000, {2, 2})};
  auto with = [&](auto change) {
    ops::MergeArgs a = base;
    change(a);
    return refusal(a);
  };
  using A = ops::MergeArgs;
  EXPECT_EQ(refusal(base), "accepted");
  EXPECT_EQ(with([&](A& a) { a.out = {data_.data(), {4, 3, 8}}; }), "merge: other Head is 2, out Head is 3");
  EXPECT_EQ(with([&](A& a) { a.out = {data_.data(), {4, 2, 9}}; }), "merge: other Value is 8, out Value is 9");
  EXPECT_EQ(with([&](A& a) { a.lse = {data_.data(), {3, 2}}; }), "merge: lse Token is 3, out Token is 4");
  EXPECT_EQ(with([&](A& a) {
              a.out = {data_.data(), {4, 2, 8}, {32, 16, 2}};
            }),
            "merge: out Value has stride 2, 1 is needed");
  EXPECT_EQ(with([&](A& a) {
              a.out = {data_.data(), {1, 2, 8}}, a.lse = {data_.data(), {1, 2}};
            }),
            "merge: other Token is 2, allowed 0 to 1");
  EXPECT_EQ(with([&](A& a) { a.rows = far; }), "merge: rows entry is 4, allowed 0 to 3");
  EXPECT_EQ(with([&](A& a) { a.rows = std::span(far).first(1); }), "merge: rows length is 1, other Token is 2");
}

TEST_F(Arguments, MergeSplits) {
  auto with = [&](SplitRows item) {
    return refusal(
        ops::MergeSplitsArgs{.partial_out = View<const float, Partial, Head, Value>(other_.data(), {6, 2, 8}),
                             .partial_lse = View<const float, Partial, Head>(other_.data() + 1000, {6, 2}),
                             .items = {&item, 1},
                             .out = {data_.data(), {4, 2, 8}},
                             .lse = {data_.data() + 1000, {4, 2}}});
  };
  EXPECT_EQ(with({.row = 2, .rows = 2, .partial = 0, .splits = 3}), "accepted");
  EXPECT_EQ(with({.row = 3, .rows = 2, .partial = 0, .splits = 3}), "merge_splits: row is 3, allowed 0 to 2");
  EXPECT_EQ(with({.row = 0, .rows = 2, .partial = 1, .splits = 3}), "merge_splits: partial is 1, allowed 0 to 0");
  EXPECT_EQ(with({.row = 0, .rows = 2, .partial = -1, .splits = 2}), "merge_splits: partial is -1, allowed 0 to 2");
  EXPECT_EQ(with({.row = 0, .rows = 2, .partial = 0, .splits = 0}),
            "merge_splits: splits is 0, allowed 1 to 2147483647");
  EXPECT_EQ(with({.row = 0, .rows = -1, .partial = 0, .splits = 1}), "merge_splits: rows is -1, allowed 0 to 4");
}

TEST_F(Arguments, SplitsOfAttendLatent) {
  const CacheSpec spec{.format = CacheFormat::f32, .latent = 8, .rope = 4, .page_size = 4};
  const int32_t table[] = {0};
  auto with = [&](LatentItem item, View<float, Partial, Head, Value> out, View<float, Partial, Head> lse) {
    std::vector<std::byte> scratch(1 << 20);
    return refusal(
        ops::AttendLatentArgs{.q = View<const float, Token, Head, Entry>(other_.data(), {2, 3, 12}),
                              .cache = {spec, reinterpret_cast<std::byte*>(other_.data() + 1024), 1, spec.page_bytes()},
                              .block_table = {table, {1, 1}},
                              .items = {&item, 1},
                              .out = View<float, Token, Head, Value>(data_.data(), {2, 3, 8}),
                              .lse = {data_.data() + 512, {2, 3}},
                              .partial_out = out,
                              .partial_lse = lse,
                              .scratch = {scratch.data(), scratch.size()}});
  };
  float *out = data_.data() + 1024, *lse = data_.data() + 2048;
  const LatentItem split{.request = 0, .q_begin = 0, .q_count = 2, .kv_begin = 0, .kv_end = 4, .partial = 1};
  EXPECT_EQ(with(split, {out, {3, 3, 8}}, {lse, {3, 3}}), "accepted");
  EXPECT_EQ(with(split, {out, {2, 3, 8}}, {lse, {3, 3}}), "attend_latent: item partial is 1, allowed 0 to 0");
  EXPECT_EQ(with(split, {out, {3, 3, 8}}, {lse, {2, 3}}), "attend_latent: item partial is 1, allowed 0 to 0");
  EXPECT_EQ(with(split, {out, {3, 2, 8}}, {lse, {3, 3}}), "attend_latent: partial_out Head is 2, q Head is 3");
  EXPECT_EQ(with(split, {out, {3, 3, 8}}, {lse, {3, 2}}), "attend_latent: partial_lse Head is 2, q Head is 3");
  EXPECT_EQ(with(split, {out, {3, 3, 7}}, {lse, {3, 3}}), "attend_latent: partial_out Value is 7, out Value is 8");
}

}  // namespace
}  // namespace mla
