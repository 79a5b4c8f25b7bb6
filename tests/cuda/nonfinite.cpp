// NaN and infinities where attention's kernels meet them, at the sizes that Hopper's kernels serve and at others: a row
// that attends to one is NaN, and no other row's bits move. The law is docs/numerics.md's.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "backend/run.hpp"
#include "cases/compare.hpp"
#include "mla/device.hpp"

namespace mla {
namespace {

using cases::Random;

constexpr Device kGpu{DeviceKind::cuda, 0};
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();

class NonFiniteOnGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
  }
};

std::vector<bf16> random_bf16(int64_t n, Random& random) {
  std::vector<bf16> x(static_cast<size_t>(n));
  for (bf16& v : x) v = to_bf16(random.normal());
  return x;
}

/// Finite rows are as they were, the others all NaN.
void expect_rows(const std::vector<float>& before, const std::vector<float>& after, const std::vector<bool>& nan,
                 int64_t width, const std::string& where) {
  for (size_t row = 0; row < nan.size(); ++row)
    for (int64_t i = 0; i < width; ++i) {
      const float was = before[row * static_cast<size_t>(width) + static_cast<size_t>(i)],
                  is = after[row * static_cast<size_t>(width) + static_cast<size_t>(i)];
      ASSERT_TRUE(std::isfinite(was)) << where;
      if (nan[row]) {
        ASSERT_TRUE(std::isnan(is)) << where << ": row " << row << " element " << i << " is " << is << ", NaN is right";
      } else {
        ASSERT_EQ(is, was) << where << ": row " << row << " element " << i << " was " << was;
      }
    }
}

// ---- attend_latent ------------------------------------------------------------------------------------------------

/// Requests over one cache of random rows.
struct LatentCall {
  struct Request {
    int32_t queries, positions;
  };
  CacheSpec spec;
  int64_t heads;
  std::vector<Request> requests;
  std::vector<LatentItem> items;
  std::vector<int32_t> table;
  std::vector<std::byte> bytes;
  std::vector<bf16> q;
  std::vector<float> out, lse;
  std::vector<std::byte> scratch = std::vector<std::byte>(scratch_bytes());
  int64_t tokens = 0, columns = 0;

  static size_t scratch_bytes() { return backend::backend(kGpu).scratch_per_worker({}); }

  LatentCall(CacheFormat format, int64_t head_count, std::vector<Request> r, int64_t page_size, uint64_t seed)
      : spec{.format = format, .page_size = page_size, .k_scale = 0.02f}, heads(head_count), requests(std::move(r)) {
    Random random(seed);
    for (const Request& x : requests) columns = std::max<int64_t>(columns, (x.positions + page_size - 1) / page_size);
    const int64_t pages = columns * static_cast<int64_t>(requests.size());
    bytes.assign(static_cast<size_t>(pages) * spec.page_bytes(), std::byte{0});
    for (int64_t p = 0; p < pages; ++p) table.push_back(static_cast<int32_t>(pages - 1 - p));
    ThreadPool pool(1);
    Stream cpu(pool);
    std::vector<float> kv_c(static_cast<size_t>(spec.latent)), k_pe(static_cast<size_t>(spec.rope));
    for (size_t i = 0; i < requests.size(); ++i) {
      items.push_back({.request = static_cast<int32_t>(i),
                       .q_begin = static_cast<int32_t>(tokens),
                       .q_count = requests[i].queries,
                       .kv_begin = 0,
                       .kv_end = requests[i].positions,
                       .visible = requests[i].positions - requests[i].queries});
      tokens += requests[i].queries;
      for (int32_t j = 0; j < requests[i].positions; ++j) {
        random.fill_normal(kv_c), random.fill_normal(k_pe);
        const std::vector<int32_t> slots{slot(i, j)};
        ops::run(cpu, ops::AppendArgs{View<const float, Token, Latent>(kv_c.data(), {1, spec.latent}),
                                      View<const float, Token, Rope>(k_pe.data(), {1, spec.rope}), slots, view()});
      }
    }
    q = random_bf16(tokens * heads * spec.entry(), random);
    out.resize(static_cast<size_t>(tokens * heads * spec.value_width()));
    lse.resize(static_cast<size_t>(tokens * heads));
  }

  CacheView view() {
    return {spec, bytes.data(), static_cast<int64_t>(bytes.size() / spec.page_bytes()), spec.page_bytes()};
  }
  int32_t slot(size_t request, int32_t position) const {
    const int64_t page = table[request * static_cast<size_t>(columns) + static_cast<size_t>(position / spec.page_size)];
    return static_cast<int32_t>(page * spec.page_size + position % spec.page_size);
  }
  std::byte* row(size_t request, int32_t position) {
    return bytes.data() +
           static_cast<size_t>(slot(request, position)) * (spec.page_bytes() / static_cast<size_t>(spec.page_size));
  }
  void run(Stream& stream, bool invariant) {
    std::fill(out.begin(), out.end(), -7.0f);
    ops::run(stream,
             ops::AttendLatentArgs{.q = {q.data(), {tokens, heads, spec.entry()}},
                                   .cache = view(),
                                   .block_table = {table.data(), {static_cast<int64_t>(requests.size()), columns}},
                                   .items = items,
                                   .scale = 0.07f,
                                   .out = {out.data(), {tokens, heads, spec.value_width()}},
                                   .lse = {lse.data(), {tokens, heads}},
                                   .partial_out = {},
                                   .partial_lse = {},
                                   .batch_invariant = invariant,
                                   .scratch = {scratch.data(), scratch.size()}});
    stream.synchronize();
  }
  /// Rows of a request's tokens that see a position.
  std::vector<bool> seeing(size_t request, int32_t position) const {
    std::vector<bool> rows(static_cast<size_t>(tokens * heads));
    const LatentItem& i = items[request];
    for (int32_t t = 0; t < i.q_count; ++t)
      if (position <= i.visible + t)
        for (int64_t h = 0; h < heads; ++h) rows[static_cast<size_t>((i.q_begin + t) * heads + h)] = true;
    return rows;
  }
};

/// A NaN in the stored row: in its first or last latent, its rope, or a scale.
enum class Place { first, last, rope, scale };

bool poison(std::byte* row, CacheFormat format, Place place, bool infinite) {
  const uint16_t f16_bits = infinite ? 0x7c00 : 0x7e00, bf16_bits = infinite ? 0x7f80 : 0x7fc0;
  const auto put16 = [&](int64_t at, uint16_t bits) { std::memcpy(row + at, &bits, 2); };
  switch (format) {
    case CacheFormat::bf16:
    case CacheFormat::f16: {
      if (place == Place::scale) return false;
      put16(2 * (place == Place::first  ? 0
                 : place == Place::last ? 511
                                        : 540),
            format == CacheFormat::bf16 ? bf16_bits : f16_bits);
      return true;
    }
    case CacheFormat::fp8:
      if (place == Place::scale || infinite) return false;
      row[place == Place::first ? 0 : place == Place::last ? 511 : 540] = std::byte{0xff};
      return true;
    case CacheFormat::fp8_ds_mla: {
      if (place == Place::rope) return put16(528 + 2 * 20, bf16_bits), true;
      if (place == Place::scale) {
        const float scale = infinite ? kInf : kNaN;
        std::memcpy(row + 512 + 4 * 2, &scale, 4);
        return true;
      }
      if (infinite) return false;
      row[place == Place::first ? 0 : 511] = std::byte{0x7f};
      return true;
    }
    default: return false;
  }
}

const char* name_of(Place p) {
  constexpr const char* kNames[] = {"first latent", "last latent", "rope", "scale"};
  return kNames[static_cast<int>(p)];
}

TEST_F(NonFiniteOnGpu, KeysOfAttendLatentReachOnlyWhoSeesThem) {
  Stream stream(kGpu);
  struct Shape {
    int64_t heads, page_size;
    std::vector<LatentCall::Request> requests;
  };
  // One query token and several; tiles that hold several tokens; pieces of long requests; ragged.
  const std::vector<Shape> shapes{{16, 64, {{1, 70}, {4, 130}, {2, 64}}},
                                  {16, 64, {{3, 4100}, {1, 40}}},
                                  {5, 16, {{7, 90}, {1, 33}}},
                                  {64, 64, {{4, 200}, {1, 64}}},
                                  {64, 17, {{2, 2100}}},
                                  {128, 64, {{3, 131}, {2, 500}}},
                                  {128, 1, {{2, 129}}},
                                  {130, 64, {{3, 80}}},
                                  {1, 64, {{150, 300}}}};
  for (CacheFormat format : {CacheFormat::bf16, CacheFormat::f16, CacheFormat::fp8, CacheFormat::fp8_ds_mla})
    for (const Shape& shape : shapes)
      for (bool invariant : {false, true}) {
        LatentCall s(format, shape.heads, shape.requests, shape.page_size, 5);
        s.run(stream, invariant);
        const std::vector<float> before = s.out, lse = s.lse;
        for (size_t r = 0; r < s.requests.size(); ++r)
          for (bool infinite : {false, true})
            for (Place place : {Place::first, Place::last, Place::rope, Place::scale})
              for (int32_t back : {0, 1, s.requests[r].queries - 1, s.requests[r].queries + 1}) {
                const int32_t at = s.requests[r].positions - 1 - back;
                if (at < 0) continue;
                const std::vector<std::byte> kept = s.bytes;
                if (!poison(s.row(r, at), format, place, infinite)) continue;
                s.run(stream, invariant);
                s.bytes = kept;
                const std::string where = std::string(to_string(format)) + " heads " + std::to_string(shape.heads) +
                                          " page " + std::to_string(shape.page_size) + " request " + std::to_string(r) +
                                          " (" + std::to_string(s.requests[r].queries) + " of " +
                                          std::to_string(s.requests[r].positions) + ") position " + std::to_string(at) +
                                          ", " + (infinite ? "infinity" : "NaN") + " in its " + name_of(place) +
                                          (invariant ? ", batch-invariant" : "");
                std::vector<bool> nan = s.seeing(r, at);
                std::vector<float> was = before;
                if (infinite)
                  // By the sign of the query: a logit of +inf is NaN, one of -inf masks the key.
                  for (size_t row = 0; row < nan.size(); ++row) {
                    if (!nan[row] || std::isnan(s.lse[row])) continue;
                    nan[row] = false;  // all that is asked of such a row: no NaN but in the infinity's own column
                    std::copy_n(s.out.begin() + static_cast<int64_t>(row) * 512, 512,
                                was.begin() + static_cast<int64_t>(row) * 512);
                    for (int k = 0; k < 512; ++k)
                      if (!std::isfinite(was[row * 512 + static_cast<size_t>(k)])) {
                        was[row * 512 + static_cast<size_t>(k)] = 0;
                        s.out[row * 512 + static_cast<size_t>(k)] = 0;
                      }
                  }
                expect_rows(was, s.out, nan, 512, where);
                for (size_t row = 0; row < nan.size(); ++row)
                  ASSERT_EQ(nan[row], std::isnan(s.lse[row])) << where << ": lse of row " << row;
                if (testing::Test::HasFatalFailure()) return;
              }
      }
}

TEST_F(NonFiniteOnGpu, QueriesOfAttendLatentStayTheirOwn) {
  Stream stream(kGpu);
  for (CacheFormat format : {CacheFormat::bf16, CacheFormat::f16, CacheFormat::fp8, CacheFormat::fp8_ds_mla})
    for (int64_t heads : {5, 16, 64, 128, 130})
      for (float value : {kNaN, kInf, -kInf}) {
        LatentCall s(format, heads, {{2, 150}, {1, 40}, {3, 2000}}, 64, 9);
        s.run(stream, false);
        const std::vector<float> before = s.out;
        for (int64_t element : {0, 511, 530}) {
          const size_t row = static_cast<size_t>(1 * heads + heads / 2);  // of token 1
          bf16& q = s.q[row * static_cast<size_t>(s.spec.entry()) + static_cast<size_t>(element)];
          const bf16 was = q;
          q = to_bf16(value);
          s.run(stream, false);
          q = was;
          std::vector<bool> nan(static_cast<size_t>(s.tokens * heads));
          nan[row] = true;
          expect_rows(before, s.out, nan, 512,
                      std::string(to_string(format)) + " heads " + std::to_string(heads) + " query " +
                          std::to_string(value) + " in element " + std::to_string(element));
          ASSERT_TRUE(std::isnan(s.lse[row]));
          if (testing::Test::HasFatalFailure()) return;
        }
      }
}

// ---- attend_expanded ----------------------------------------------------------------------------------------------

struct ExpandedCall {
  int64_t heads, nope, rope, value;
  std::vector<ExpandedItem> items;
  int64_t tokens = 0, rows = 0;
  std::vector<bf16> q, k_nope, k_pe, v;
  std::vector<float> out, lse;
  std::vector<std::byte> scratch = std::vector<std::byte>(LatentCall::scratch_bytes());

  /// Causal over `cached` keys more than queries.
  ExpandedCall(int64_t h, int64_t p, int64_t r, int64_t w, std::vector<std::pair<int32_t, int32_t>> requests)
      : heads(h), nope(p), rope(r), value(w) {
    Random random(3);
    for (auto [queries, cached] : requests) {
      items.push_back({.q_begin = static_cast<int32_t>(tokens),
                       .q_count = queries,
                       .k_begin = static_cast<int32_t>(rows),
                       .k_count = queries + cached,
                       .visible = cached});
      tokens += queries, rows += queries + cached;
    }
    q = random_bf16(tokens * heads * (nope + rope), random);
    k_nope = random_bf16(rows * heads * nope, random);
    k_pe = random_bf16(rows * rope, random);
    v = random_bf16(rows * heads * value, random);
    out.resize(static_cast<size_t>(tokens * heads * value));
    lse.resize(static_cast<size_t>(tokens * heads));
  }
  void run(Stream& stream, bool accumulate = false) {
    if (!accumulate) std::fill(out.begin(), out.end(), -7.0f);
    ops::run(stream, ops::AttendExpandedArgs{.q = {q.data(), {tokens, heads, nope + rope}},
                                             .k_nope = {k_nope.data(), {rows, heads, nope}},
                                             .k_pe = {k_pe.data(), {rows, rope}},
                                             .v = {v.data(), {rows, heads, value}},
                                             .items = items,
                                             .scale = 0.07f,
                                             .out = {out.data(), {tokens, heads, value}},
                                             .lse = {lse.data(), {tokens, heads}},
                                             .accumulate = accumulate,
                                             .quantized = {},
                                             .scratch = {scratch.data(), scratch.size()}});
    stream.synchronize();
  }
};

TEST_F(NonFiniteOnGpu, KeysAndValuesOfAttendExpandedReachOnlyWhoSeesThem) {
  Stream stream(kGpu);
  for (auto [nope, rope, value] : {std::array<int64_t, 3>{128, 64, 128}, {192, 64, 256}, {24, 8, 20}})
    for (int64_t heads : {1, 3, 16})
      for (const auto& requests : {std::vector<std::pair<int32_t, int32_t>>{{150, 0}, {40, 90}},
                                   std::vector<std::pair<int32_t, int32_t>>{{300, 7}, {1, 200}, {64, 64}}}) {
        ExpandedCall s(heads, nope, rope, value, requests);
        s.run(stream);
        const std::vector<float> before = s.out, lse = s.lse;
        for (size_t i = 0; i < s.items.size(); ++i)
          for (int32_t key : {0, 17, s.items[i].k_count / 2, s.items[i].k_count - 2, s.items[i].k_count - 1})
            for (int what = 0; what < 6; ++what) {
              if (key < 0 || key >= s.items[i].k_count) continue;
              const size_t row = static_cast<size_t>(s.items[i].k_begin + key);
              const int64_t head = heads / 2;
              std::vector<bf16>& array = what % 3 == 0 ? s.k_nope : what % 3 == 1 ? s.k_pe : s.v;
              const size_t at = what % 3 == 1 ? row * static_cast<size_t>(rope) + 5
                                              : (row * static_cast<size_t>(heads) + static_cast<size_t>(head)) *
                                                        static_cast<size_t>(what % 3 == 0 ? nope : value) +
                                                    9;
              const bool infinite = what >= 3;
              if (infinite && what % 3 < 2) continue;  // a logit of either sign
              const bf16 was = array[at];
              array[at] = to_bf16(infinite ? kInf : kNaN);
              s.run(stream);
              array[at] = was;
              const std::string where = "value " + std::to_string(value) + " heads " + std::to_string(heads) +
                                        " item " + std::to_string(i) + " key " + std::to_string(key) + " in " +
                                        (what % 3 == 0   ? "k_nope"
                                         : what % 3 == 1 ? "k_pe"
                                                         : "v");
              for (int64_t t = 0; t < s.tokens; ++t)
                for (int64_t h = 0; h < heads; ++h) {
                  const ExpandedItem& item = s.items[i];
                  const bool sees = t >= item.q_begin && t < item.q_begin + item.q_count &&
                                    key <= t - item.q_begin + item.visible && (what % 3 == 1 || h == head);
                  const float* now = &s.out[static_cast<size_t>((t * heads + h) * value)];
                  const float* then = &before[static_cast<size_t>((t * heads + h) * value)];
                  if (!sees) {
                    for (int64_t d = 0; d < value; ++d) ASSERT_EQ(now[d], then[d]) << where << " token " << t;
                  } else if (what % 3 < 2) {
                    for (int64_t d = 0; d < value; ++d) ASSERT_TRUE(std::isnan(now[d])) << where << " token " << t;
                    ASSERT_TRUE(std::isnan(s.lse[static_cast<size_t>(t * heads + h)])) << where << " token " << t;
                  } else {
                    ASSERT_FALSE(std::isfinite(now[9])) << where << " token " << t;
                  }
                }
            }
      }
}

// A row that is NaN stays so when a part that is not is merged into it, and the other way round.
TEST_F(NonFiniteOnGpu, MergedPartsKeepNaN) {
  Stream stream(kGpu);
  for (int64_t value : {128, 20}) {
    ExpandedCall s(4, value == 128 ? 128 : 24, value == 128 ? 64 : 8, value, {{70, 0}, {9, 30}});
    for (bool first : {true, false}) {
      const bf16 was = s.q[5];
      if (first) s.q[5] = to_bf16(kNaN);
      s.run(stream);
      s.q[5] = first ? was : to_bf16(kNaN);
      s.run(stream, true);
      s.q[5] = was;
      for (int64_t d = 0; d < value; ++d) ASSERT_TRUE(std::isnan(s.out[static_cast<size_t>(d)])) << value << first;
      ASSERT_TRUE(std::isnan(s.lse[0]));
      for (size_t i = static_cast<size_t>(value); i < s.out.size(); ++i) ASSERT_TRUE(std::isfinite(s.out[i])) << i;
    }
  }
}

// Logits past f32's range.
TEST_F(NonFiniteOnGpu, OverflowingLogitsAreNaN) {
  Stream stream(kGpu);
  for (int64_t heads : {16, 128}) {
    LatentCall s(CacheFormat::bf16, heads, {{1, 100}, {2, 300}}, 64, 2);
    s.run(stream, false);
    const std::vector<float> before = s.out;
    for (int64_t i = 0; i < s.spec.entry(); ++i) {  // token 0, head 1: its query times 3e37, its first key times 3
      bf16& q = s.q[static_cast<size_t>(s.spec.entry() + i)];
      q = to_bf16(to_float(q) * 3e37f);
    }
    s.run(stream, false);
    std::vector<bool> nan(static_cast<size_t>(s.tokens * heads));
    nan[1] = true;
    expect_rows(before, s.out, nan, 512, "heads " + std::to_string(heads));
  }
}

}  // namespace
}  // namespace mla
