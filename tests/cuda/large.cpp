// Sizes at which 32-bit offsets and grids of 65535 blocks would end: caches over 4 GiB, calls of over 65535 rows, heads
// and requests. Each is compared, bit for bit, with the same rows where no limit is near.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <utility>

#include "backend/backend.hpp"
#include "backend/run.hpp"
#include "cases/padded.hpp"
#include "cases/scratch.hpp"

namespace mla {
namespace {

using cases::CaseScratch;
using cases::Padded;
using cases::Random;

constexpr Device kGpu{DeviceKind::cuda, 0};

class LargeOnGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
    stream_.emplace(kGpu);
  }
  ops::Scratch scratch() {
    const backend::ScratchShape shape{
        .heads = 128, .latent = 512, .rope = 64, .nope = 128, .value = 128, .hidden = 512};
    return scratch_.get(*stream_, backend::backend(kGpu).scratch_per_worker(shape));
  }
  std::optional<Stream> stream_;
  CaseScratch scratch_;
};

// The same tokens in a cache's first pages and in its last ones, past 4 GiB: rows read back, dense and sparse
// attention.
TEST_F(LargeOnGpu, CachesOver4GiB) {
  constexpr int64_t kTokens = 300, kPages = 5, kHeads = 16;
  Stream& stream = *stream_;
  Random random(1);
  for (CacheFormat format : cache_formats()) {
    const CacheSpec spec{.format = format,
                         .latent = format == CacheFormat::fp8_ds_v4 ? 448 : 512,
                         .rope = 64,
                         .page_size = 64,
                         .k_scale = 0.0625f};
    const auto pages = static_cast<int64_t>((size_t{9} << 29) / spec.page_bytes()) + 1;
    const Cache cache(spec, pages, kGpu);
    const int64_t far = pages - kPages;
    ASSERT_GT(static_cast<size_t>(far) * spec.page_bytes(), size_t{1} << 32);
    const std::string name(to_string(format));

    Padded<Token, Latent> kv_c(Dtype::bf16, {kTokens, spec.latent}, 0);
    Padded<Token, Rope> k_pe(Dtype::bf16, {kTokens, spec.rope}, 0);
    kv_c.fill_normal(random);
    k_pe.fill_normal(random);
    std::vector<int32_t> near_slots(kTokens), far_slots(kTokens), table;
    std::iota(near_slots.begin(), near_slots.end(), 0);
    std::iota(far_slots.begin(), far_slots.end(), static_cast<int32_t>(far * spec.page_size));
    for (int64_t first : {int64_t{0}, far})
      for (int64_t i = 0; i < kPages; ++i) table.push_back(static_cast<int32_t>(first + i));
    const View<const int32_t, Request, Page> block_table(table.data(), {2, kPages});
    for (const auto* slots : {&near_slots, &far_slots})
      ops::run(stream, ops::AppendArgs{kv_c.any(), k_pe.any(), *slots, cache.view()});

    const std::vector<GatherPiece> pieces{{.request = 0, .count = kTokens, .row = 0},
                                          {.request = 1, .count = kTokens, .row = kTokens}};
    Padded<Key, Latent> latents(Dtype::f32, {2 * kTokens, spec.latent}, 0);
    Padded<Key, Rope> ropes(Dtype::f32, {2 * kTokens, spec.rope}, 0);
    ops::run(stream, ops::GatherArgs{cache.view(), block_table, pieces, latents.any(), ropes.any()});
    stream.synchronize();
    auto halves_equal = [](const std::vector<float>& x) {
      return std::equal(x.begin(), x.begin() + static_cast<int64_t>(x.size() / 2),
                        x.begin() + static_cast<int64_t>(x.size() / 2)) &&
             std::any_of(x.begin(), x.end(), [](float v) { return v != 0; });
    };
    EXPECT_TRUE(halves_equal(latents.values())) << name;
    EXPECT_TRUE(halves_equal(ropes.values())) << name;

    for (Dtype dtype : {Dtype::bf16, Dtype::f32}) {
      const int64_t width = spec.value_width();
      Padded<Token, Head, Entry> one(dtype, {1, kHeads, spec.entry()}, 0), q(dtype, {2, kHeads, spec.entry()}, 0);
      one.fill_normal(random);
      const size_t row = static_cast<size_t>(kHeads * spec.entry()) * size_of(dtype);
      for (int64_t t : {0, 1}) std::memcpy(q.any().at(t, 0, 0), one.any().data(), row);
      const std::vector<LatentItem> items{
          {.request = 0, .q_begin = 0, .q_count = 1, .kv_end = kTokens, .visible = kTokens - 1},
          {.request = 1, .q_begin = 1, .q_count = 1, .kv_end = kTokens, .visible = kTokens - 1}};
      Padded<Token, Head, Value> out(Dtype::f32, {2, kHeads, width}, 0);
      Padded<Token, Head> lse(Dtype::f32, {2, kHeads}, 0);
      ops::run(stream, ops::AttendLatentArgs{.q = q.any(),
                                             .cache = cache.view(),
                                             .block_table = block_table,
                                             .items = items,
                                             .scale = 0.05f,
                                             .out = out.any(),
                                             .lse = lse.view(),
                                             .partial_out = {},
                                             .partial_lse = {},
                                             .batch_invariant = true,
                                             .scratch = scratch()});
      stream.synchronize();
      EXPECT_TRUE(halves_equal(out.values())) << name << ", queries " << to_string(dtype);
      EXPECT_TRUE(halves_equal(lse.values())) << name << ", queries " << to_string(dtype);

      std::vector<int32_t> chosen(near_slots);
      chosen.insert(chosen.end(), far_slots.begin(), far_slots.end());
      const ops::SparseSource source{cache.view(), View<const int32_t, Token, Topk>(chosen.data(), {2, kTokens}), {}};
      const std::vector<SparseItem> rows{{.q_begin = 0, .q_count = 2, .k_end = kTokens}};
      ops::run(stream, ops::AttendSparseArgs{.q = q.any(),
                                             .sources = {&source, 1},
                                             .items = rows,
                                             .scale = 0.05f,
                                             .sinks = {},
                                             .out = out.any(),
                                             .lse = lse.view(),
                                             .max_logits = {},
                                             .partial_out = {},
                                             .partial_lse = {},
                                             .partial_max = {},
                                             .scratch = scratch()});
      stream.synchronize();
      EXPECT_TRUE(halves_equal(out.values())) << name << ", sparse, queries " << to_string(dtype);
    }
  }
}

// batch_invariant, of as many partial rows as a context of 292K has, at the most heads. The same 4K positions over and
// over are attended as they are once, all but their weights' sum.
TEST_F(LargeOnGpu, BatchInvariantDecodesOfLongContexts) {
  constexpr int64_t kPages = 64, kPageSize = 64, kTimes = 73, kHeads = 128;
  constexpr auto kOnce = static_cast<int32_t>(kPages * kPageSize);
  Stream& stream = *stream_;
  Random random(1);
  std::vector<int32_t> slots(kOnce), table;
  std::iota(slots.begin(), slots.end(), 0);
  for (int64_t i = 0; i < kTimes * kPages; ++i) table.push_back(static_cast<int32_t>(i * 7 % kPages));
  for (CacheFormat format : {CacheFormat::bf16, CacheFormat::fp8, CacheFormat::fp8_ds_mla}) {
    const CacheSpec spec{.format = format, .latent = 512, .rope = 64, .page_size = kPageSize, .k_scale = 0.0625f};
    const Cache cache(spec, kPages, kGpu);
    Padded<Token, Latent> kv_c(Dtype::bf16, {kOnce, spec.latent}, 0);
    Padded<Token, Rope> k_pe(Dtype::bf16, {kOnce, spec.rope}, 0);
    kv_c.fill_normal(random);
    k_pe.fill_normal(random);
    ops::run(stream, ops::AppendArgs{kv_c.any(), k_pe.any(), slots, cache.view()});
    Padded<Token, Head, Entry> q(Dtype::bf16, {1, kHeads, spec.entry()}, 0);
    q.fill_normal(random);
    Padded<Token, Head, Value> out(Dtype::f32, {1, kHeads, spec.value_width()}, 0);
    Padded<Token, Head> lse(Dtype::f32, {1, kHeads}, 0);
    const auto attend = [&](int64_t times) {
      const auto end = static_cast<int32_t>(times * kOnce);
      const std::vector<LatentItem> items{{.q_count = 1, .kv_end = end, .visible = end - 1}};
      ops::run(stream, ops::AttendLatentArgs{.q = q.any(),
                                             .cache = cache.view(),
                                             .block_table = {table.data(), {1, kTimes * kPages}},
                                             .items = items,
                                             .scale = 0.05f,
                                             .out = out.any(),
                                             .lse = lse.view(),
                                             .partial_out = {},
                                             .partial_lse = {},
                                             .batch_invariant = true,
                                             .scratch = scratch()});
      stream.synchronize();
      return std::pair(out.values(), lse.values());
    };
    const auto [once, once_lse] = attend(1);
    const auto [often, often_lse] = attend(kTimes);
    float largest = 0, apart = 0, lse_apart = 0;
    for (size_t i = 0; i < once.size(); ++i) {
      largest = std::max(largest, std::abs(once[i]));
      apart = std::max(apart, std::abs(once[i] - often[i]));
    }
    for (size_t i = 0; i < once_lse.size(); ++i)
      lse_apart = std::max(lse_apart, std::abs(often_lse[i] - once_lse[i] - std::log(static_cast<float>(kTimes))));
    EXPECT_GT(largest, 0.01f) << to_string(format);
    EXPECT_LT(apart, 0.01f * largest) << to_string(format);  // pieces are kept in f16, probabilities in 16 bits
    EXPECT_LT(lse_apart, 1e-3f) << to_string(format);
  }
}

// 70000 rows in one call and in two give the same bits.
TEST_F(LargeOnGpu, CallsOfOver65535Rows) {
  constexpr int64_t kRows = 70000, kHalf = kRows / 2, kHeads = 2;
  Stream& stream = *stream_;
  Random random(2);
  const CacheSpec spec{.format = CacheFormat::bf16, .latent = 16, .rope = 8, .page_size = 16};
  const Cache cache(spec, kRows / 16 + 1, kGpu);
  Padded<Token, Latent> kv_c(Dtype::bf16, {kRows, spec.latent}, 0), normed(Dtype::bf16, {kRows, spec.latent}, 0);
  Padded<Token, Rope> k_pe(Dtype::bf16, {kRows, spec.rope}, 0);
  kv_c.fill_normal(random);
  k_pe.fill_normal(random);
  std::vector<int32_t> slots(kRows), table(kRows);
  std::iota(slots.begin(), slots.end(), 0);
  for (int64_t i = 0; i < kRows; ++i) table[i] = static_cast<int32_t>(i / 16);
  std::vector<float> weight(spec.latent, 1.5f);
  ops::run(stream, ops::AppendArgs{kv_c.any(), k_pe.any(), slots, cache.view()});

  const auto in_parts = [&](auto&& call, auto& whole, auto& parts, const char* name) {
    call(0, kRows, whole);
    call(0, kHalf, parts);
    call(kHalf, kRows - kHalf, parts);
    stream.synchronize();
    EXPECT_TRUE(whole.bytes() == parts.bytes()) << name;
  };
  {
    Padded<Token, In> x(Dtype::bf16, {kRows, spec.latent}, 0), whole(Dtype::bf16, {kRows, spec.latent}, 0);
    x.fill_normal(random);
    auto parts = whole;
    in_parts(
        [&](int64_t first, int64_t count, auto& y) {
          ops::run(stream, ops::NormArgs{.x = x.any().template slice<Token>(first, count),
                                         .weight = weight,
                                         .y = y.any().template slice<Token>(first, count)});
        },
        whole, parts, "norm");
  }
  {
    Padded<Key, Latent> whole(Dtype::bf16, {kRows, spec.latent}, 0);
    Padded<Key, Rope> ropes(Dtype::bf16, {kRows, spec.rope}, 0);
    auto parts = whole;
    const View<const int32_t, Request, Page> pages(table.data(), {1, kRows});
    std::vector<int32_t> ascending(kRows / 16 + 1);
    std::iota(ascending.begin(), ascending.end(), 0);
    const View<const int32_t, Request, Page> all(ascending.data(), {1, static_cast<int64_t>(ascending.size())});
    std::vector<GatherPiece> piece;
    in_parts(
        [&](int64_t first, int64_t count, auto& y) {
          piece = {{.start = static_cast<int32_t>(first),
                    .count = static_cast<int32_t>(count),
                    .row = static_cast<int32_t>(first)}};
          ops::run(stream, ops::GatherArgs{cache.view(), all, piece, y.any(), ropes.any()});
          stream.synchronize();
        },
        whole, parts, "gather");
    EXPECT_EQ(whole.values(), kv_c.values());
  }
  {  // a request of one position for each row
    Padded<Token, Head, Entry> q(Dtype::bf16, {kRows, kHeads, spec.entry()}, 0);
    q.fill_normal(random);
    Padded<Token, Head, Value> whole(Dtype::bf16, {kRows, kHeads, spec.value_width()}, 0);
    Padded<Token, Head> lse(Dtype::f32, {kRows, kHeads}, 0);
    auto parts = whole;
    std::vector<LatentItem> items(kRows);
    for (int32_t i = 0; i < kRows; ++i)
      items[i] = {.request = i, .q_begin = i, .q_count = 1, .kv_end = 1 + i % 16, .visible = i % 16};
    const View<const int32_t, Request, Page> pages(table.data(), {kRows, 1});
    in_parts(
        [&](int64_t first, int64_t count, auto& y) {
          ops::run(stream, ops::AttendLatentArgs{.q = q.any(),
                                                 .cache = cache.view(),
                                                 .block_table = pages,
                                                 .items = std::span(items).subspan(first, count),
                                                 .scale = 0.2f,
                                                 .out = y.any(),
                                                 .lse = lse.view(),
                                                 .partial_out = {},
                                                 .partial_lse = {},
                                                 .scratch = scratch()});
        },
        whole, parts, "attend_latent");

    const ops::SparseSource source{cache.view(), View<const int32_t, Token, Topk>(slots.data(), {kRows, 1}), {}};
    in_parts(
        [&](int64_t first, int64_t count, auto& y) {
          const std::vector<SparseItem> rows{
              {.q_begin = static_cast<int32_t>(first), .q_count = static_cast<int32_t>(count), .k_end = 1}};
          ops::run(stream, ops::AttendSparseArgs{.q = q.any(),
                                                 .sources = {&source, 1},
                                                 .items = rows,
                                                 .scale = 0.2f,
                                                 .sinks = {},
                                                 .out = y.any(),
                                                 .lse = lse.view(),
                                                 .max_logits = {},
                                                 .partial_out = {},
                                                 .partial_lse = {},
                                                 .partial_max = {},
                                                 .scratch = scratch()});
          stream.synchronize();
        },
        whole, parts, "attend_sparse");
  }
}

// A row's products do not depend on how many other rows there are, nor on where they lie.
TEST_F(LargeOnGpu, InvariantProductsIgnoreOtherRowsAndAddresses) {
  constexpr int64_t kMost = 300;
  Stream& stream = *stream_;
  Random random(3);
  for (auto [heads, in, out] : {std::array<int64_t, 3>{1, 512, 1536}, {1, 128, 64}, {4, 128, 512}, {16, 512, 128}})
    for (auto [from, dtype, to] : {std::array{Dtype::bf16, Dtype::bf16, Dtype::bf16},
                                   {Dtype::bf16, Dtype::bf16, Dtype::f32},
                                   {Dtype::f32, Dtype::bf16, Dtype::bf16},
                                   {Dtype::f32, Dtype::f32, Dtype::f32},
                                   {Dtype::f32, Dtype::f32, Dtype::bf16}}) {
      std::vector<float> w(static_cast<size_t>(heads * in * out));
      random.fill_normal(w);
      const auto weights = backend::backend(kGpu).pack(w, heads, out, in, dtype, kGpu);
      Padded<Token, Head, In> x(from, {kMost + 8, heads, in}, 0);
      x.fill_normal(random);
      std::vector<std::byte> first;
      for (int64_t rows : {1, 2, 5, 16, 63, 64, 65, 130, 300})
        for (int64_t shift : {0, 1, 3}) {
          // Row 0 of every call is the same row, at addresses 0, 1 and 3 rows on.
          const size_t row = static_cast<size_t>(heads * in) * size_of(from);
          auto moved = x;
          std::memmove(moved.any().at(shift, 0, 0), x.any().data(), row);
          Padded<Token, Head, Out> y(to, {kMost + 8, heads, out}, 0);
          ops::run(stream, ops::ProjectArgs{.x = moved.any().slice<Token>(shift, rows),
                                            .x_rows = {},
                                            .weights = weights.get(),
                                            .y = y.any().slice<Token>(shift, rows),
                                            .y_rows = {},
                                            .rows = rows,
                                            .batch_invariant = true,
                                            .quantized = {},
                                            .scratch = scratch()});
          stream.synchronize();
          const auto* at = static_cast<const std::byte*>(y.any().at(shift, 0, 0));
          const std::vector<std::byte> got(at, at + static_cast<size_t>(heads * out) * size_of(to));
          if (first.empty()) first = got;
          EXPECT_TRUE(got == first) << heads << " x [" << out << ", " << in << "], " << to_string(from) << " by "
                                    << to_string(dtype) << " to " << to_string(to) << ", " << rows << " rows, " << shift
                                    << " on";
        }
    }
}

}  // namespace
}  // namespace mla
