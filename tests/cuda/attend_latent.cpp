// attend_latent on Hopper against float64: fresh random inputs, NaN in every unused slot and in the outputs before a
// run.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include "backend/cuda/sm90/attention/attention.hpp"
#include "cuda/device.hpp"
#include "cuda/late_copy.hpp"
#include "cuda/latent_repeats.hpp"
#include "mla/error.hpp"

namespace mla::cuda {
namespace {

using namespace test;

struct Case {
  const char* name;
  int heads;
  int page_size;
  std::vector<int> q_lens, seq_lens;
  Dtype cache = Dtype::bf16, out = Dtype::f32;
  bool invariant = false;
  float spread = 1.0f;            // of scores: large makes maxima move
  int64_t first_page = 0;         // pages before it are unused
  int tile_rows = 0;              // forced
  std::vector<int> visible = {};  // of the items; empty: seq_len - q_len, as in a causal step
  enum { dense, by_head, none } lse = dense;
  friend void PrintTo(const Case& c, std::ostream* to) { *to << c.name; }
};

int multiprocessor_count() {
  int n = 0;
  check(cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, 0), "test", "device");
  return n;
}

/// Inputs on the device, the same on the host, and a call's arguments.
class Inputs {
 public:
  explicit Inputs(const Case& c, uint64_t seed = 1) : c_(c), random_(seed) {
    const int requests = static_cast<int>(c.q_lens.size());
    tokens_ = std::accumulate(c.q_lens.begin(), c.q_lens.end(), 0);
    const int longest = *std::max_element(c.seq_lens.begin(), c.seq_lens.end());
    stride_ = (longest + c.page_size - 1) / c.page_size + 3;

    std::vector<int32_t> order;
    for (const int n : c.seq_lens) order.resize(order.size() + (n + c.page_size - 1) / c.page_size);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    pages_ = c.first_page + static_cast<int64_t>(order.size()) + 2;
    std::vector<int32_t> table((requests + 2) * stride_, 0x7ffffff0);
    table_rows_.resize(requests + 2);
    std::iota(table_rows_.begin(), table_rows_.end(), 0);
    std::shuffle(table_rows_.begin(), table_rows_.end(), random_);
    cache_.emplace(static_cast<size_t>(pages_) * c.page_size * 576);
    std::normal_distribution<float> normal;
    const int64_t page_elements = static_cast<int64_t>(c.page_size) * 576;
    rows_.resize(requests);
    size_t used = 0;
    std::vector<uint16_t> all(order.size() * page_elements, 0xffff);
    for (int r = 0; r < requests; ++r) {
      rows_[r].resize(static_cast<size_t>(c.seq_lens[r]) * 576);
      for (int at = 0; at < c.seq_lens[r]; at += c.page_size) {
        const int32_t page = order[used++];
        table[table_rows_[r] * stride_ + at / c.page_size] = static_cast<int32_t>(c.first_page + page);
        for (int64_t i = 0; i < std::min<int64_t>(c.page_size, c.seq_lens[r] - at) * 576; ++i) {
          const float x = normal(random_);
          uint16_t bits;
          float value;
          if (c.cache == Dtype::bf16) {
            const bf16 b = to_bf16(x);
            bits = b.bits, value = to_float(b);
          } else {
            const f16 b = to_f16(x);
            bits = b.bits, value = to_float(b);
          }
          all[page * page_elements + i] = bits;
          rows_[r][static_cast<int64_t>(at) * 576 + i] = value;
        }
      }
    }
    cache_->upload(all, c.first_page * page_elements);
    std::vector<uint16_t> q(static_cast<size_t>(tokens_) * c.heads * 576);
    q_.resize(q.size());
    for (size_t i = 0; i < q.size(); ++i) {
      const bf16 b = to_bf16(c.spread * normal(random_));
      q[i] = b.bits, q_[i] = to_float(b);
    }
    d_q_.emplace(q), d_table_.emplace(table), d_items_.emplace(static_cast<size_t>(requests));
    set_lengths(c.q_lens, c.seq_lens);

    AttendLatentLimits& l = args.limits;
    l = {.tokens = tokens_,
         .requests = requests,
         .heads = c.heads,
         .query_tokens = *std::max_element(c.q_lens.begin(), c.q_lens.end()),
         .seq_len = longest,
         .batch_invariant = c.invariant};
    choice = attend_latent_choice(l, c.page_size, multiprocessor_count());
    if (c.tile_rows) {
      choice.tile_rows = c.tile_rows;
      choice.workers = multiprocessor_count() / choice.ctas();
    }
    partials_.emplace(attend_latent_partials(l, choice, CacheFormat::bf16));
    counters_.emplace(attend_latent_counters(l, choice), 0);
    if (!c.invariant) {
      EXPECT_LE(partials_->size(), attend_latent_most_partials(multiprocessor_count()));
      EXPECT_LE(counters_->size(), attend_latent_most_counters(multiprocessor_count()));
    }
    out_bytes_ = static_cast<size_t>(tokens_) * c.heads * 512 * size_of(c.out);
    out_.emplace(out_bytes_ + 256), lse_.emplace(static_cast<size_t>(tokens_ + 3) * c.heads + 64);
    args.q = d_q_->data(), args.cache = cache_->data(), args.pages = pages_;
    args.format = c.cache == Dtype::bf16 ? CacheFormat::bf16 : CacheFormat::f16;
    args.page_size = c.page_size, args.items = d_items_->data();
    args.block_table = d_table_->data(), args.table_stride = stride_, args.scale = 0.0721688f;
    args.out = out_->data(), args.out_dtype = c.out, args.lse = lse_->data();
    args.lse_token_stride = c.heads;
    if (c.lse == Case::by_head) args.lse_token_stride = 1, args.lse_head_stride = tokens_ + 3;
    if (c.lse == Case::none) args.lse = nullptr;
    args.partials = partials_->data(), args.partials_bytes = partials_->size();
    args.counters = counters_->data(), args.counter_count = counters_->size();
  }

  void set_lengths(const std::vector<int>& q_lens, const std::vector<int>& seq_lens) {
    starts_.assign(1, 0);
    for (const int n : q_lens) starts_.push_back(starts_.back() + n);
    c_.q_lens = q_lens, c_.seq_lens = seq_lens;
    tokens_ = starts_.back();
    std::vector<int> order(q_lens.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    set_items(order);
  }

  /// These requests in this order; places left over are padding.
  void set_items(const std::vector<int>& order) {
    std::vector<LatentItem> items(c_.q_lens.size());
    for (size_t i = 0; i < order.size(); ++i) {
      const int r = order[i];
      items[i] = {.request = table_rows_[r],
                  .q_begin = starts_[r],
                  .q_count = c_.q_lens[r],
                  .kv_begin = 0,
                  .kv_end = c_.seq_lens[r],
                  .visible = first_visible(r)};
    }
    d_items_->upload(items);
  }

  /// One item: token `token` of the first request alone.
  void set_token(int token) {
    d_items_->upload({{.request = table_rows_[0],
                       .q_begin = starts_[0] + token,
                       .q_count = 1,
                       .kv_begin = 0,
                       .kv_end = c_.seq_lens[0],
                       .visible = first_visible(0) + token}});
  }

  void poison() { out_->poison(), lse_->poison(); }
  std::vector<std::byte> out() const { return out_->download(0, out_bytes_); }
  std::vector<float> lse() const { return lse_->download(); }
  std::vector<unsigned> counters() const { return counters_->download(); }

  /// Every row, or a sample of them when there are many, against float64.
  void verify() {
    const auto bytes = out_->download();
    auto lse = lse_->download();
    for (size_t i = out_bytes_; i < bytes.size(); ++i) ASSERT_EQ(bytes[i], std::byte{0xff}) << "written past out";
    std::vector<float> lse_rows;
    for (int t = 0; t < tokens_ && args.lse; ++t)
      for (int h = 0; h < c_.heads; ++h)
        lse_rows.push_back(std::exchange(lse[t * args.lse_token_stride + h * args.lse_head_stride],
                                         std::numeric_limits<float>::quiet_NaN()));
    for (const float x : lse) ASSERT_TRUE(std::isnan(x)) << "written beside lse";
    for (const unsigned n : counters()) ASSERT_EQ(n, 0u) << "counters";
    struct Row {
      int request, token;
      int64_t row;
    };
    std::vector<Row> rows;
    double work = 0;
    for (size_t r = 0; r < c_.q_lens.size(); ++r)
      for (int t = 0; t < c_.q_lens[r]; ++t)
        for (int h = 0; h < c_.heads; ++h)
          rows.push_back({static_cast<int>(r), t, (starts_[r] + int64_t{t}) * c_.heads + h}), work += c_.seq_lens[r];
    std::shuffle(rows.begin(), rows.end(), random_);
    if (work > 4e5) rows.resize(std::max<size_t>(24, static_cast<size_t>(rows.size() * (4e5 / work))));
    struct Error {
      double out = 0, lse = 0;  // of what is allowed
      bool finite = true, empty = true;
    };
    std::vector<Error> errors(rows.size());
    // Rounded to 16 bits are probabilities, each by itself, so that a sum of p v errs by that much of the sum of p |v|
    // (and scores in f32: by less than 2^-12 of it); bf16 outputs; and from 64 rows on the pieces of a split tile, f16
    // relative to their largest element, at most the cache's largest.
    const double rounding = (c_.cache == Dtype::bf16 ? 0x1p-8 : 0x1p-11) + 0x1p-12;
    double largest = 0;
    if (choice.tile_rows >= 64)
      for (const auto& request : rows_)
        for (size_t i = 0; i < request.size(); ++i)
          if (i % 576 < 512) largest = std::max<double>(largest, std::abs(request[i]));
    parallel(static_cast<int64_t>(rows.size()), [&](int64_t i) {
      const Row& at = rows[i];
      Error& e = errors[i];
      const int visible = std::min(first_visible(at.request) + at.token + 1, c_.seq_lens[at.request]);
      const LatentRow want = attend_row(&q_[at.row * 576], visible, args.scale, c_.cache,
                                        [&](int j) { return &rows_[at.request][static_cast<int64_t>(j) * 576]; });
      for (int k = 0; k < 512; ++k) {
        float got;
        double allowed = rounding * want.size[k] + 0x1p-11 * largest;
        if (c_.out == Dtype::f32) {
          std::memcpy(&got, &bytes[(at.row * 512 + k) * 4], 4);
        } else {
          bf16 b;
          std::memcpy(&b, &bytes[(at.row * 512 + k) * 2], 2);
          got = to_float(b), allowed += 0x1p-8 * (std::abs(want.out[k]) + allowed);
        }
        if (!std::isfinite(got)) e.finite = false;
        if (visible <= 0 && got != 0) e.empty = false;
        e.out = std::max(e.out, std::abs(got - want.out[k]) / (allowed + 1e-30));
      }
      if (!args.lse) return;
      const float l = lse_rows[at.row];
      if (visible <= 0) {
        if (!(l == -std::numeric_limits<float>::infinity())) e.empty = false;
      } else {
        e.lse = std::isfinite(l) ? std::abs(l - want.lse) / (3e-5 * (1 + std::abs(want.lse))) : 1e30;
      }
    });
    for (size_t i = 0; i < rows.size(); ++i) {
      const Error& e = errors[i];
      const auto where = [&] {
        return "request " + std::to_string(rows[i].request) + " token " + std::to_string(rows[i].token) + " row " +
               std::to_string(rows[i].row);
      };
      ASSERT_TRUE(e.finite) << where();
      ASSERT_TRUE(e.empty) << "a row that sees nothing: " << where();
      ASSERT_LE(e.out, 1) << where();
      ASSERT_LE(e.lse, 1) << where();
    }
  }

  AttendLatent args;
  AttendLatentChoice choice;

 private:
  int first_visible(int r) const { return c_.visible.empty() ? c_.seq_lens[r] - c_.q_lens[r] : c_.visible[r]; }

  Case c_;
  std::mt19937_64 random_;
  int tokens_ = 0;
  int64_t stride_ = 0, pages_ = 0;
  size_t out_bytes_ = 0;
  std::vector<int32_t> starts_, table_rows_;
  std::vector<std::vector<float>> rows_;
  std::vector<float> q_;
  std::optional<DeviceArray<uint16_t>> cache_, d_q_;
  std::optional<DeviceArray<int32_t>> d_table_;
  std::optional<DeviceArray<LatentItem>> d_items_;
  std::optional<DeviceArray<unsigned>> counters_;
  std::optional<DeviceArray<std::byte>> partials_, out_;
  std::optional<DeviceArray<float>> lse_;
};

void synchronize() { check(cudaDeviceSynchronize(), "attend_latent", "run"); }

class OnDevice : public testing::Test {
 protected:
  void SetUp() override {
    if (!have_hopper()) GTEST_SKIP() << "no CUDA device of compute capability 9.0: skipped";
  }
};

class AttendLatentCases : public testing::TestWithParam<Case> {};

TEST_P(AttendLatentCases, AgreesWithFloat64AndRepeats) {
  if (!have_hopper()) GTEST_SKIP() << "no CUDA device of compute capability 9.0: skipped";
  Inputs s(GetParam(), testing::UnitTest::GetInstance()->random_seed() + 17);
  expect_right_and_same_bits(s);
}

std::vector<int> fill(int n, int value) { return std::vector<int>(n, value); }

const auto name_of = [](const auto& at) { return std::string(at.param.name); };

INSTANTIATE_TEST_SUITE_P(
    Shapes, AttendLatentCases,
    testing::Values(
        Case{"one_block", 16, 64, {1}, {64}}, Case{"one_position", 16, 64, {1}, {1}},
        Case{"h16_4k", 16, 64, {1}, {4096}},
        Case{"h16_ragged", 16, 64, {1, 1, 1, 1, 1, 1}, {1, 63, 64, 65, 1000, 4097}},
        Case{"h16_long", 16, 64, {1}, {16000}}, Case{"h16_long_ragged", 16, 64, {1, 1, 1, 1}, {9000, 63, 700, 5000}},
        // In a relay those who merge have done their pieces first, and with no patience leave it all to the others.
        Case{"h16_late_first", 16, 64, fill(60, 1), fill(60, 192)},
        Case{"h4_q4_long", 4, 64, {4, 1, 2}, {9000, 63, 5000}}, Case{"h16_none", 16, 64, {1, 0, 1, 1}, {0, 5, 100, 0}},
        Case{"h1", 1, 64, {1, 1, 1}, {700, 3, 129}}, Case{"h5_q3", 5, 64, {3, 1, 2}, {700, 3, 129}},
        Case{"h20", 20, 64, {1, 1}, {300, 1025}}, Case{"h16_q2", 16, 64, {2, 2, 1, 2}, {300, 2, 1, 1025}},
        Case{"h32", 32, 64, {1, 1}, {300, 2025}},
        Case{"h16_bf16_out", 16, 64, {1, 1, 1}, {2000, 333, 64}, Dtype::bf16, Dtype::bf16},
        Case{"h16_f16", 16, 64, {1, 1, 1}, {2000, 333, 64}, Dtype::f16},
        Case{"h16_invariant", 16, 64, {1, 1, 1}, {5000, 333, 2049}, Dtype::bf16, Dtype::f32, true},
        Case{"h16_many", 16, 64, fill(300, 1), fill(300, 150)}, Case{"h16_line", 16, 64, fill(140, 1), fill(140, 700)},
        Case{"h16_spread", 16, 64, {1, 1}, {3000, 700}, Dtype::bf16, Dtype::f32, false, 12.0f},
        Case{"h16_spread_f16", 16, 64, {1, 1}, {3000, 700}, Dtype::f16, Dtype::f32, false, 12.0f},
        Case{"h16_page16", 16, 16, {1, 1, 1}, {1000, 17, 333}}, Case{"h16_page48", 16, 48, {1, 1}, {1000, 333}},
        Case{"h16_page8", 16, 8, {1, 1}, {1000, 333}}, Case{"h16_page128", 16, 128, {1, 1}, {1000, 333}},
        Case{"h16_page1", 16, 1, {1, 1}, {1000, 333}}, Case{"h16_page17", 16, 17, {1, 1, 1}, {5000, 333, 64}},
        Case{"h16_high", 16, 64, {1, 1}, {1000, 333}, Dtype::bf16, Dtype::f32, false, 1.0f, 66000},
        Case{.name = "h8_q3_visible",
             .heads = 8,
             .page_size = 64,
             .q_lens = {3, 2, 4, 1},
             .seq_lens = {700, 70, 300, 128},
             .visible = {698, 500, 31, 63}},
        Case{.name = "h16_lse_by_head",
             .heads = 16,
             .page_size = 64,
             .q_lens = {1, 1, 1, 1},
             .seq_lens = {4000, 64, 300, 2},
             .lse = Case::by_head},
        Case{.name = "h16_no_lse",
             .heads = 16,
             .page_size = 64,
             .q_lens = {1, 1},
             .seq_lens = {4000, 64},
             .lse = Case::none}),
    name_of);

INSTANTIATE_TEST_SUITE_P(
    WideShapes, AttendLatentCases,
    testing::Values(Case{"h64_one_block", 64, 64, {1}, {64}}, Case{"h64_two_blocks", 64, 64, {1}, {128}},
                    Case{"h64_three_blocks", 64, 64, {1}, {170}}, Case{"h64_4k", 64, 64, {1}, {4096}},
                    Case{"h64_ragged", 64, 64, {1, 1, 1, 1, 1, 1}, {1, 63, 64, 65, 1000, 4097}},
                    Case{"h40", 40, 64, {1, 1}, {300, 1025}}, Case{"h20_q3", 20, 64, {3, 1, 0, 2}, {300, 1025, 7, 1}},
                    Case{"h64_none", 64, 64, {1, 0, 1, 1}, {0, 5, 100, 0}},
                    Case{"h64_f16", 64, 64, {1, 1, 1}, {2000, 333, 64}, Dtype::f16},
                    Case{"h64_bf16_out", 64, 64, {1, 1, 1}, {2000, 333, 64}, Dtype::bf16, Dtype::bf16},
                    Case{"h64_spread", 64, 64, {1, 1}, {3000, 700}, Dtype::bf16, Dtype::f32, false, 12.0f},
                    Case{"h64_invariant", 64, 64, {1, 1, 1}, {5000, 333, 2049}, Dtype::bf16, Dtype::f32, true},
                    Case{"h64_page16", 64, 16, {1, 1, 1}, {1000, 17, 333}},
                    Case{"h64_page17", 64, 17, {1, 1, 1}, {5000, 333, 64}},
                    Case{"h64_many", 64, 64, fill(150, 1), fill(150, 450)}, Case{"h128_one_block", 128, 64, {1}, {64}},
                    Case{"h128_4k", 128, 64, {1}, {4096}},
                    Case{"h128_ragged", 128, 64, {1, 1, 1, 1, 1, 1}, {1, 63, 64, 65, 1000, 4097}},
                    Case{"h128_none", 128, 64, {1, 0, 1, 1}, {0, 5, 100, 0}},
                    Case{"h128_q2", 128, 64, {2, 1, 2}, {1000, 77, 1}},
                    Case{"h40_q2", 40, 64, {2, 1, 2}, {1000, 77, 1}},
                    Case{"h20_q4_ragged", 20, 64, {4, 1, 9, 2}, {300, 1025, 2000, 1}},
                    Case{"h128_bf16_out", 128, 64, {1, 1, 1}, {2000, 333, 64}, Dtype::bf16, Dtype::bf16},
                    Case{"h128_f16", 128, 64, {1, 1, 1}, {2000, 333, 64}, Dtype::f16},
                    Case{"h128_spread", 128, 64, {1, 1}, {3000, 700}, Dtype::bf16, Dtype::f32, false, 12.0f},
                    Case{"h128_invariant", 128, 64, {1, 1, 1}, {5000, 333, 2049}, Dtype::bf16, Dtype::f32, true},
                    Case{"h128_page16", 128, 16, {1, 1, 1}, {1000, 17, 333}},
                    Case{"h128_page17", 128, 17, {1, 1, 1}, {1000, 17, 333}},
                    Case{"h128_line", 128, 64, fill(70, 1), fill(70, 700)},
                    Case{"h128_high", 128, 64, {1, 1}, {1000, 333}, Dtype::bf16, Dtype::f32, false, 1.0f, 66000},
                    Case{.name = "h100_q3_visible",
                         .heads = 100,
                         .page_size = 64,
                         .q_lens = {3, 2, 4, 1},
                         .seq_lens = {700, 70, 300, 128},
                         .visible = {698, 500, 31, 63}},
                    Case{.name = "h128_lse_by_head",
                         .heads = 128,
                         .page_size = 64,
                         .q_lens = {1, 2, 1, 1},
                         .seq_lens = {4000, 64, 300, 2},
                         .lse = Case::by_head},
                    Case{.name = "h128_no_lse",
                         .heads = 128,
                         .page_size = 64,
                         .q_lens = {1, 1},
                         .seq_lens = {4000, 64},
                         .lse = Case::none}),
    name_of);

// Tiles of 2, 4 and 8 pieces of one size, of rows that fill a tile or do not.
INSTANTIATE_TEST_SUITE_P(EqualPieces, AttendLatentCases,
                         testing::Values(Case{"h64_8_pieces", 64, 64, fill(16, 1), fill(16, 1024)},
                                         Case{"h64_f16_4_pieces", 64, 64, fill(33, 1), fill(33, 512), Dtype::f16},
                                         Case{"h128_8_pieces", 128, 64, fill(8, 1), fill(8, 1024)},
                                         Case{"h128_4_pieces", 128, 64, fill(16, 1), fill(16, 512)},
                                         Case{"h128_2_pieces", 128, 64, fill(32, 1), fill(32, 256)},
                                         Case{"h100_2_pieces", 100, 64, fill(32, 1), fill(32, 256)},
                                         Case{"h90_8_pieces", 90, 64, fill(8, 1), fill(8, 1024)}),
                         name_of);

// Pages whose rows are copied one by one.
INSTANTIATE_TEST_SUITE_P(
    RowByRow, AttendLatentCases,
    testing::Values(
        Case{"h64_three_blocks", 64, 17, {1}, {170}}, Case{"h128_three_blocks", 128, 1, {1}, {170}},
        Case{"h32_page1", 32, 1, {1, 1, 1}, {5000, 333, 64}},
        Case{"h32_page17_invariant", 32, 17, {1, 1}, {5000, 333}, Dtype::bf16, Dtype::f32, true},
        Case{"h64_page1", 64, 1, {1, 1, 1}, {5000, 333, 64}},
        Case{"h64_page12_f16", 64, 12, {1, 1, 1}, {2000, 333, 64}, Dtype::f16},
        Case{"h64_page17_invariant", 64, 17, {1, 1}, {5000, 333}, Dtype::bf16, Dtype::f32, true},
        Case{"h64_page1_line", 64, 1, fill(140, 1), fill(140, 330)},
        Case{"h128_page1_ragged", 128, 1, {1, 1, 1, 1, 1, 1}, {1, 63, 64, 65, 1000, 4097}},
        Case{"h128_page17_none", 128, 17, {1, 0, 1, 1}, {0, 5, 100, 0}},
        Case{"h100_page17_q3", 100, 17, {3, 1, 2}, {300, 1025, 2}},
        Case{"h128_page12_f16", 128, 12, {1, 1, 1}, {2000, 333, 64}, Dtype::f16},
        Case{"h128_page1_invariant", 128, 1, {1, 1}, {5000, 333}, Dtype::bf16, Dtype::f32, true},
        Case{"h128_page1_8_pieces", 128, 1, fill(8, 1), fill(8, 1024)},
        Case{"h128_page17_high", 128, 17, {1, 1}, {1000, 333}, Dtype::bf16, Dtype::f32, false, 1.0f, 249000}),
    name_of);

// Whole tiles of several blocks whose maxima grow from one to the next: some, past 2^8, and past what a byte tells of
// it.
INSTANTIATE_TEST_SUITE_P(
    GrowingMaxima, AttendLatentCases,
    testing::Values(Case{"h16_leaps", 16, 64, fill(140, 1), fill(140, 400), Dtype::bf16, Dtype::f32, false, 12.0f},
                    Case{"h64_grows", 64, 64, fill(140, 1), fill(140, 400), Dtype::bf16, Dtype::f32, false, 4.0f},
                    Case{"h64_f16_leaps", 64, 64, fill(140, 1), fill(140, 400), Dtype::f16, Dtype::f32, false, 12.0f},
                    Case{"h128_leaps", 128, 64, fill(70, 1), fill(70, 400), Dtype::bf16, Dtype::f32, false, 12.0f},
                    Case{"h128_far", 128, 64, fill(70, 1), fill(70, 400), Dtype::bf16, Dtype::f32, false, 150.0f},
                    Case{"h128_page17", 128, 17, fill(70, 1), fill(70, 400), Dtype::bf16, Dtype::f32, false, 12.0f}),
    name_of);

/// One captured call serves other lengths: they are read on device.
TEST_F(OnDevice, AGraphServesOtherLengths) {
  for (const int heads : {16, 128}) {
    Inputs s({"graph", heads, 64, {1, 2, 1, 1}, {900, 1500, 70, 2000}, Dtype::bf16, Dtype::f32});
    cudaStream_t stream;
    check(cudaStreamCreate(&stream), "test", "stream");
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "test", "capture");
    attend_latent(s.args, s.choice, stream);
    check(cudaStreamEndCapture(stream, &graph), "test", "capture");
    check(cudaGraphInstantiate(&exec, graph, 0), "test", "instantiate");
    const std::vector<std::pair<std::vector<int>, std::vector<int>>> lengths = {
        {{1, 2, 1, 1}, {900, 1500, 70, 2000}}, {{1, 1, 1, 1}, {1, 1400, 64, 3}}, {{2, 1, 0, 1}, {10, 700, 0, 1999}}};
    for (const auto& [q, seq] : lengths) {
      s.set_lengths(q, seq);
      s.poison();
      check(cudaGraphLaunch(exec, stream), "test", "replay");
      check(cudaStreamSynchronize(stream), "test", "replay");
      s.verify();
    }
    cudaGraphExecDestroy(exec), cudaGraphDestroy(graph), cudaStreamDestroy(stream);
  }
}

/// A kernel that writes queries and cache may still run when a call begins; of a settled cache, the queries alone. Some
/// workers' first items have nothing to read.
TEST_F(OnDevice, WaitsForWhatTheKernelBeforeWrites) {
  std::vector<int> lengths;
  for (int i = 0; i < 300; ++i) lengths.push_back(i % 4 == 2 ? 130 : 0);
  for (const int heads : {16, 32, 64, 128})
    for (const int page_size : {64, 17})
      for (const bool settled : {false, true})
        for (const auto& seq_lens : {lengths, std::vector<int>{900, 333}}) {
          const Case c{"late", heads, page_size, std::vector<int>(seq_lens.size(), 1), seq_lens};
          Inputs s(c);
          s.choice.settled = settled;
          const auto late = [](const void* at, size_t bytes) {
            const auto now = std::make_shared<DeviceArray<std::byte>>(bytes);
            void* const to = const_cast<void*>(at);
            check(cudaMemcpy(now->data(), to, bytes, cudaMemcpyDeviceToDevice), "test", "copy");
            check(cudaMemset(to, 0xff, bytes), "test", "fill");
            return [=] { late_copy(to, now->data(), bytes, nullptr); };
          };
          const auto queries = late(s.args.q, static_cast<size_t>(s.args.limits.tokens) * heads * 1152);
          const auto cache = late(s.args.cache, settled ? 0 : static_cast<size_t>(s.args.pages) * page_size * 1152);
          s.poison();
          synchronize();
          queries();
          if (!settled) cache();
          attend_latent(s.args, s.choice, nullptr);
          synchronize();
          s.verify();
          if (HasFatalFailure()) FAIL() << heads << " heads, pages of " << page_size << (settled ? ", settled" : "");
        }
}

/// Calls of several streams get the GPU's multiprocessors in any order: none waits for what cannot start, and bits
/// stay.
TEST_F(OnDevice, CallsOfSeveralStreams) {
  for (const int heads : {16, 128}) {
    const std::vector<Case> cases = {{"one", heads, 64, {1}, {9000}},
                                     {"long", heads, 64, {1}, {16000}},
                                     {"line", heads, 64, fill(140, 1), fill(140, 300)},
                                     {"three", heads, 64, fill(3, 1), {3000, 100, 5000}},
                                     {"eights", heads, 64, fill(8, 1), fill(8, 1024)}};
    std::vector<std::unique_ptr<Inputs>> inputs;
    std::vector<std::vector<std::byte>> out;
    std::vector<cudaStream_t> streams(cases.size());
    for (size_t i = 0; i < cases.size(); ++i) {
      Inputs& s = *inputs.emplace_back(std::make_unique<Inputs>(cases[i]));
      check(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking), "test", "stream");
      s.poison();
      attend_latent(s.args, s.choice, nullptr);
      synchronize();
      s.verify();
      out.push_back(s.out());
    }
    for (auto& s : inputs) s->poison();
    for (int i = 0; i < 200; ++i)
      for (size_t k = 0; k < cases.size(); ++k) {
        if (i > 100) inputs[k]->choice.patience = i % 3 * 1000;
        attend_latent(inputs[k]->args, inputs[k]->choice, streams[k]);
      }
    synchronize();
    for (size_t k = 0; k < cases.size(); ++k) {
      EXPECT_EQ(out[k], inputs[k]->out()) << cases[k].name << ", " << heads << " heads";
      for (const unsigned n : inputs[k]->counters()) ASSERT_EQ(n, 0u) << "counters, " << cases[k].name;
      check(cudaStreamDestroy(streams[k]), "test", "stream");
    }
  }
}

/// batch_invariant: a request's bits stay, whatever stands beside it, longer queries too.
TEST_F(OnDevice, BatchInvariantBits) {
  for (const auto& [heads, page_size] :
       {std::pair{8, 64}, {16, 64}, {16, 17}, {24, 64}, {64, 64}, {64, 17}, {128, 64}, {128, 1}}) {
    Case alone{"alone", heads, page_size, {1}, {5000}, Dtype::bf16, Dtype::f32, true};
    Case beside = alone;
    beside.q_lens = {1, 7, 1, 3}, beside.seq_lens = {5000, 9000, 100, 3000};
    Inputs b(beside, 5);
    b.set_items({0, 3, 1, 2});
    attend_latent(b.args, b.choice, nullptr);
    synchronize();
    const auto together = b.out();
    expect_same_bits(b);
    AttendLatent one = b.args;
    one.limits.requests = one.limits.tokens = one.limits.query_tokens = 1;
    b.poison();
    attend_latent(one, attend_latent_choice(one.limits, one.page_size, b.choice.workers * b.choice.ctas()), nullptr);
    synchronize();
    const auto single = b.out();
    const size_t bytes = static_cast<size_t>(heads) * 512 * 4;
    EXPECT_EQ(0, std::memcmp(together.data(), single.data(), bytes)) << heads << " heads, pages of " << page_size;
  }
}

/// batch_invariant: nor do they follow from the other tokens of its request, which share its tile and its pieces.
TEST_F(OnDevice, BatchInvariantBitsOfAToken) {
  for (const int heads : {5, 8, 16, 24, 64, 128}) {
    Inputs s({"tokens", heads, 64, {3}, {7169}, Dtype::bf16, Dtype::f32, true}, 9);
    attend_latent(s.args, s.choice, nullptr);
    synchronize();
    const auto together = s.out();
    const size_t bytes = static_cast<size_t>(heads) * 512 * 4;
    for (int token = 0; token < 3; ++token) {
      s.set_token(token);
      s.poison();
      attend_latent(s.args, s.choice, nullptr);
      synchronize();
      EXPECT_EQ(0, std::memcmp(&together[token * bytes], &s.out()[token * bytes], bytes))
          << heads << " heads, token " << token;
    }
  }
}

TEST_F(OnDevice, RefusesBadShapes) {
  Inputs s({"bad", 64, 64, {1}, {100}});
  const auto message = [&](auto change) {
    AttendLatent a = s.args;
    change(a);
    try {
      attend_latent(a, s.choice, nullptr);
    } catch (const ShapeError& e) {
      return std::string(e.what());
    } catch (const UnsupportedError& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_EQ(message([](AttendLatent& a) { a.limits.heads = 129; }), "attend_latent: heads is 129, allowed 1 to 128");
  EXPECT_EQ(message([](AttendLatent& a) { a.table_stride = 1; }),
            "attend_latent: block_table Page is 1, seq_len 100 needs 2");
  EXPECT_NE(message([](AttendLatent& a) { a.scale = 0; }).find("scale is"), std::string::npos);
  EXPECT_NE(message([](AttendLatent& a) { a.page_size = 17, a.table_stride = 100; }).find("page size is 17"),
            std::string::npos);
  EXPECT_NE(message([](AttendLatent& a) { a.partials_bytes -= 1; }).find("partials are"), std::string::npos);
  EXPECT_NE(message([](AttendLatent& a) { a.counter_count -= 1; }).find("counters are"), std::string::npos);
  EXPECT_NE(message([&](AttendLatent& a) { a.schedule = a.partials, a.schedule_bytes = 16; }).find("schedule is 16"),
            std::string::npos);
  EXPECT_THROW(attend_latent_schedule(s.args, s.choice, nullptr), ShapeError);
  EXPECT_NE(message([](AttendLatent& a) { a.items = nullptr; }).find("items"), std::string::npos);
  EXPECT_NE(message([](AttendLatent& a) { a.format = CacheFormat::f32; }).find("bf16, f16"), std::string::npos);
}

}  // namespace
}  // namespace mla::cuda
