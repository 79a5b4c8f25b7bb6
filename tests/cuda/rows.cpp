// What the GPU's row ops must agree with beyond their conformance cases.
#include <gtest/gtest.h>

#include <cstring>

#include "backend/run.hpp"
#include "cases/case.hpp"
#include "cases/padded.hpp"
#include "cases/poisoned_cache.hpp"
#include "support/rotated_index_queries.hpp"

namespace mla {
namespace {

using cases::Padded;
using cases::PoisonedCache;
using cases::Random;

constexpr Device kGpu{DeviceKind::cuda, 0};

class RowsOnGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
  }
};

struct Rows {
  Rows(Random& random, const CacheSpec& spec, int64_t tokens, int64_t heads, Dtype dtype, int64_t gap)
      : q(dtype, {tokens, heads, spec.rope}, gap),
        kv_c(dtype, {tokens, spec.latent}, gap),
        k_pe(dtype, {tokens, spec.rope}, gap) {
    q.fill_normal(random);
    kv_c.fill_normal(random, 4.0f);
    k_pe.fill_normal(random);
  }
  ops::RopeAppendArgs rope_append(std::span<const int32_t> positions, const RotaryTable& table,
                                  std::span<const int32_t> slots, const CacheView& cache) {
    return {.q_pe = q.any(),
            .kv_c = kv_c.any(),
            .k_pe = k_pe.any(),
            .positions = positions,
            .table = &table,
            .slots = slots,
            .cache = cache};
  }
  Padded<Token, Head, Rope> q;
  Padded<Token, Latent> kv_c;
  Padded<Token, Rope> k_pe;
};

// The append of a rotated row is checked against the portable codec by its cases; here only the order is.
TEST_F(RowsOnGpu, RopeAppendGivesTheBitsOfItsParts) {
  constexpr int64_t kTokens = 37;
  Stream stream(kGpu);
  for (CacheFormat format : cache_formats())
    for (Dtype dtype : {Dtype::f32, Dtype::bf16})
      for (int64_t gap : {int64_t{3}, Padded<Token>::kAligned})
        for (auto [latent, rope] : {std::pair<int64_t, int64_t>{512, 64}, {40, 8}, {24, 0}, {77, 14}, {16, 512}})
          for (int turn = 0; turn < 3; ++turn) {
            const bool interleaved = turn == 0, rotate = turn < 2;
            CacheSpec spec{.format = format, .latent = latent, .rope = rope, .page_size = 5, .k_scale = 0.1f};
            if (format == CacheFormat::fp8_ds_mla || format == CacheFormat::fp8_ds_v4) {
              if (latent != 512) continue;
              if (format == CacheFormat::fp8_ds_v4) spec.latent = 448;
            }
            Random random(11);
            const int64_t heads = random.integer(1, 40);
            const Rows before(random, spec, kTokens, heads, dtype, gap);
            std::vector<int32_t> positions(kTokens), slots(kTokens);
            const PoisonedCache cache(spec, 9, random);
            for (int64_t t = 0; t < kTokens; ++t) {
              positions[t] = static_cast<int32_t>(random.integer(0, 999));
              slots[t] = t % 4 == 1 ? -1 : cache.slot(t);
            }
            const RotaryTable table({.rotate = rotate, .interleaved = interleaved}, spec.rope, 1000, kGpu);
            Rows separate = before, fused = before;
            PoisonedCache separate_cache = cache, one = cache;
            ops::run(stream,
                     ops::RopeArgs{
                         .q = separate.q.any(), .k = separate.k_pe.any(), .positions = positions, .table = &table});
            ops::run(stream, ops::AppendArgs{separate.kv_c.any(), separate.k_pe.any(), slots, separate_cache.view()});
            ops::run(stream, fused.rope_append(positions, table, slots, one.view()));
            stream.synchronize();
            const std::string where = std::string(to_string(format)) + " " + std::string(to_string(dtype)) +
                                      " latent " + std::to_string(latent) + " rope " + std::to_string(rope) + " gap " +
                                      std::to_string(gap) + (interleaved ? " interleaved" : " neox");
            EXPECT_EQ(fused.q.bytes(), separate.q.bytes()) << where;
            EXPECT_EQ(fused.k_pe.bytes(), separate.k_pe.bytes()) << where;
            EXPECT_EQ(one.bytes(), separate_cache.bytes()) << where;
            EXPECT_NE(one.bytes(), cache.bytes()) << where;
            EXPECT_EQ(fused.q.bytes() == before.q.bytes(), !rotate || rope == 0) << where;

            // The norm before it too.
            std::vector<float> weight(spec.latent);
            random.fill_normal(weight);
            Rows normed = before, all = before;
            PoisonedCache normed_cache = cache, all_cache = cache;
            const AnyMutableView<Token, In> rows(dtype, normed.kv_c.any().data(), {kTokens, spec.latent},
                                                 normed.kv_c.any().strides());
            ops::run(stream, ops::NormArgs{.x = rows, .weight = weight, .eps = 1e-5, .y = rows});
            ops::run(stream, normed.rope_append(positions, table, slots, normed_cache.view()));
            ops::run(stream, ops::NormRopeAppendArgs{.q_pe = all.q.any(),
                                                     .kv_c = all.kv_c.any(),
                                                     .k_pe = all.k_pe.any(),
                                                     .weight = weight,
                                                     .eps = 1e-5,
                                                     .positions = positions,
                                                     .table = &table,
                                                     .slots = slots,
                                                     .cache = all_cache.view()});
            stream.synchronize();
            EXPECT_EQ(all.q.bytes(), normed.q.bytes()) << where;
            EXPECT_EQ(all.kv_c.bytes(), normed.kv_c.bytes()) << where;
            EXPECT_NE(all.kv_c.bytes(), before.kv_c.bytes()) << where;
            EXPECT_EQ(all.k_pe.bytes(), normed.k_pe.bytes()) << where;
            EXPECT_EQ(all_cache.bytes(), normed_cache.bytes()) << where;

            // Queries of some tokens in another place: the same numbers, and those read are left alone.
            Rows read = before;
            PoisonedCache read_cache = cache;
            const std::vector<int32_t> tokens{36, 0, 7, 7, 20};
            for (const bool named : {true, false}) {
              Padded<Token, Head, Rope> to(dtype, {named ? std::ssize(tokens) : kTokens, heads, spec.rope}, gap);
              ops::RopeAppendArgs apart = read.rope_append(positions, table, slots, read_cache.view());
              apart.placed.q = to.any();
              if (named) apart.placed.tokens = tokens;
              ops::run(stream, apart);
              stream.synchronize();
              const size_t bytes = static_cast<size_t>(spec.rope) * size_of(dtype);
              for (int64_t r = 0; r < to.any().extent<Token>(); ++r)
                for (int64_t h = 0; h < heads; ++h)
                  ASSERT_EQ(0, std::memcmp(to.any().at(r, h, 0), fused.q.any().at(named ? tokens[r] : r, h, 0), bytes))
                      << where << " row " << r << " head " << h;
              EXPECT_EQ(read.q.bytes(), before.q.bytes()) << where;
              if (!named) continue;
              EXPECT_EQ(read.k_pe.bytes(), fused.k_pe.bytes()) << where;
              EXPECT_EQ(read_cache.bytes(), one.bytes()) << where;
              read = before;
            }
          }
}

TEST_F(RowsOnGpu, IndexQueriesRotatedOnTheWayAreRopeThenCodes) {
  Stream stream(kGpu);
  Random random(8);
  for (auto [dim, rope] : {std::pair<int64_t, int64_t>{128, 64}, {77, 14}, {300, 256}, {40, 40}})
    for (const bool interleaved : {true, false})
      for (int64_t gap : {int64_t{3}, Padded<Token>::kAligned})
        test::expect_rotated_index_queries(stream, 37, 9, dim, rope, interleaved, gap, random);
  // So many rows that a warp takes several heads.
  for (auto [dim, rope] : {std::pair<int64_t, int64_t>{128, 64}, {40, 40}, {4, 0}})
    for (const bool interleaved : {true, false})
      test::expect_rotated_index_queries(stream, 37, 64, dim, rope, interleaved, Padded<Token>::kAligned, random);
}

TEST_F(RowsOnGpu, CopyPagesCopiesWholePagesAndNothingElse) {
  Stream stream(kGpu);
  for (CacheFormat format : cache_formats())
    for (int64_t page_size : {1, 3, 64}) {
      CacheSpec spec{.format = format, .latent = 509, .rope = 61, .page_size = page_size};
      if (format == CacheFormat::fp8_ds_v4) spec.latent = 448, spec.rope = 64;
      if (format == CacheFormat::fp8_ds_mla) spec.latent = 512, spec.rope = 64;
      Random random(5);
      PoisonedCache cache(spec, 6, random);
      const CacheView view = cache.view();
      for (int64_t page : {0, 2, 4})
        for (size_t i = 0; i < spec.page_bytes(); ++i)
          view.page(page)[i] = std::byte{static_cast<uint8_t>(random.next())};
      std::vector<std::byte> expected = cache.bytes();
      for (auto [from, to] : {std::pair{0, 5}, {4, 1}, {2, 2}})
        std::memmove(expected.data() + to * view.page_stride, expected.data() + from * view.page_stride,
                     spec.page_bytes());
      const std::vector<ops::PageCopy> copies{{0, 5}, {4, 1}, {2, 2}};
      ops::run(stream, ops::CopyPagesArgs{view, copies});
      stream.synchronize();
      EXPECT_EQ(cache.bytes(), expected) << to_string(format) << " page size " << page_size;
    }
}

// So many rows that warps take them by batches.
TEST_F(RowsOnGpu, ManyRowsAreThePortableCodecs) {
  Stream stream(kGpu);
  const auto check = [&](const cases::CaseType& type, const cases::Params& p) {
    auto c = type.make(p);
    c->run(stream);
    stream.synchronize();
    const cases::Verdict v = c->verify();
    EXPECT_TRUE(v.ok) << cases::describe(p, type.op) << ": " << v.error << " differ; " << v.detail;
  };
  for (CacheFormat format : {CacheFormat::bf16, CacheFormat::fp8, CacheFormat::fp8_ds_mla, CacheFormat::fp8_ds_v4}) {
    cases::Params p{.device = kGpu, .format = format, .activations = Dtype::bf16};
    if (format == CacheFormat::fp8_ds_v4) p.latent = 448;
    for (bool ragged : {false, true})
      for (int64_t page_size : {64, 7})
        for (uint64_t seed : {4, 12}) {  // rows are aligned, pages by 8 or 16 bytes
          p.requests = 10003;
          p.ragged = ragged;
          p.page_size = page_size;
          p.seed = seed;
          check(cases::append, p);
        }
    p.requests = 4;
    p.context = 10003;
    p.ragged = false;
    for (Dtype dtype : {Dtype::bf16, Dtype::f16})
      for (uint64_t seed : {4, 12}) {
        p.page_size = dtype == Dtype::bf16 ? 64 : 7;
        p.dtype = dtype;
        p.seed = seed;
        check(cases::gather, p);
      }
  }
}

// The same where queries turn, and a batch's last rows are not there.
TEST_F(RowsOnGpu, ManyRowsOfRopeAppendAreRopeThenAppend) {
  constexpr int64_t kTokens = 10003;
  Stream stream(kGpu);
  for (CacheFormat format : {CacheFormat::bf16, CacheFormat::fp8, CacheFormat::fp8_ds_mla, CacheFormat::fp8_ds_v4})
    for (bool interleaved : {true, false}) {
      const CacheSpec spec{
          .format = format, .latent = format == CacheFormat::fp8_ds_v4 ? 448 : 512, .page_size = 64, .k_scale = 0.1f};
      Random random(12);
      Rows separate(random, spec, kTokens, 3, Dtype::bf16, Padded<Token>::kAligned), fused = separate;
      PoisonedCache separate_cache(spec, kTokens / 64 + 1, random), one = separate_cache;
      std::vector<int32_t> positions(kTokens), slots(kTokens);
      for (int64_t t = 0; t < kTokens; ++t) {
        positions[t] = static_cast<int32_t>(random.integer(0, 999));
        slots[t] = t % 5 == 1 ? -1 : one.slot(t);
      }
      const RotaryTable table({.interleaved = interleaved}, spec.rope, 1000, kGpu);
      ops::run(stream,
               ops::RopeArgs{.q = separate.q.any(), .k = separate.k_pe.any(), .positions = positions, .table = &table});
      ops::run(stream, ops::AppendArgs{separate.kv_c.any(), separate.k_pe.any(), slots, separate_cache.view()});
      ops::run(stream, fused.rope_append(positions, table, slots, one.view()));
      stream.synchronize();
      const std::string where = std::string(to_string(format)) + (interleaved ? "" : " neox");
      EXPECT_TRUE(fused.q.bytes() == separate.q.bytes()) << where;
      EXPECT_TRUE(fused.k_pe.bytes() == separate.k_pe.bytes()) << where;
      EXPECT_TRUE(one.bytes() == separate_cache.bytes()) << where;
    }
}

// Queries of so many heads that a thread turns several give the bits of one token at a time.
TEST_F(RowsOnGpu, RopeOfManyHeadsGivesTheBitsOfSingleTokens) {
  constexpr int64_t kTokens = 4000, kHeads = 53, kWidth = 64;
  Stream stream(kGpu);
  Random random(4);
  for (Dtype dtype : {Dtype::f32, Dtype::bf16})
    for (bool interleaved : {true, false}) {
      Padded<Token, Head, Rope> q(dtype, {kTokens, kHeads, kWidth}, Padded<Token>::kAligned);
      Padded<Token, Rope> k(dtype, {kTokens, kWidth}, Padded<Token>::kAligned);
      q.fill_normal(random);
      k.fill_normal(random);
      auto single_q = q;
      auto single_k = k;
      std::vector<int32_t> positions(kTokens);
      for (int32_t& p : positions) p = static_cast<int32_t>(random.integer(0, 999));
      const RotaryTable table({.interleaved = interleaved}, kWidth, 1000, kGpu);
      ops::run(stream, ops::RopeArgs{.q = q.any(), .k = k.any(), .positions = positions, .table = &table});
      for (int64_t t = 0; t < kTokens; ++t)
        ops::run(stream, ops::RopeArgs{.q = single_q.any().template slice<Token>(t, 1),
                                       .k = single_k.any().template slice<Token>(t, 1),
                                       .positions = std::span(positions).subspan(static_cast<size_t>(t), 1),
                                       .table = &table});
      stream.synchronize();
      EXPECT_TRUE(q.bytes() == single_q.bytes()) << to_string(dtype) << (interleaved ? "" : " neox");
      EXPECT_TRUE(k.bytes() == single_k.bytes()) << to_string(dtype) << (interleaved ? "" : " neox");
    }
}

// Many pieces, most of them empty or short, one long: each row comes from its own piece.
TEST_F(RowsOnGpu, GatherDealsOutPiecesOfAnyLengths) {
  Stream stream(kGpu);
  const CacheSpec spec{.format = CacheFormat::f32, .latent = 8, .rope = 4, .page_size = 7};
  Random random(3);
  PoisonedCache cache(spec, 2000, random);
  const CacheView view = cache.view();
  for (int64_t slot = 0; slot < 2000 * 7; ++slot)
    for (int64_t i = 0; i < 12; ++i)
      reinterpret_cast<float*>(view.page(slot / 7))[slot % 7 * 12 + i] = static_cast<float>(slot * 12 + i);
  const int64_t pages = 1500;
  std::vector<int32_t> table(3 * pages);
  for (int32_t& page : table) page = static_cast<int32_t>(random.integer(0, 1999));
  for (int64_t count : {1, 31, 32, 33, 64, 300}) {
    std::vector<GatherPiece> pieces;
    int32_t rows = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t n = i == count / 2 ? 10000 : random.integer(0, 3) == 0 ? random.integer(1, 60) : 0;
      pieces.push_back({.request = static_cast<int32_t>(random.integer(0, 2)),
                        .start = static_cast<int32_t>(random.integer(0, pages * 7 - n)),
                        .count = static_cast<int32_t>(n),
                        .row = rows});
      rows += static_cast<int32_t>(n);
    }
    std::swap(pieces.front(), pieces.back());
    Padded<Key, Latent> kv_c(Dtype::f32, {rows, 8}, 8);
    Padded<Key, Rope> k_pe(Dtype::f32, {rows, 4}, 8);
    ops::run(stream, ops::GatherArgs{.cache = view,
                                     .block_table = {table.data(), {3, pages}},
                                     .pieces = pieces,
                                     .kv_c = kv_c.any(),
                                     .k_pe = k_pe.any()});
    stream.synchronize();
    int64_t wrong = 0;
    for (const GatherPiece& p : pieces)
      for (int64_t i = 0; i < p.count; ++i) {
        const int64_t at = p.start + i, slot = table[p.request * pages + at / 7] * 7 + at % 7;
        for (int64_t d = 0; d < 12; ++d)
          wrong +=
              (d < 8 ? kv_c.view()(p.row + i, d) : k_pe.view()(p.row + i, d - 8)) != static_cast<float>(slot * 12 + d);
      }
    EXPECT_EQ(wrong, 0) << count << " pieces";
    EXPECT_TRUE(kv_c.intact() && k_pe.intact());
  }
}

}  // namespace
}  // namespace mla
