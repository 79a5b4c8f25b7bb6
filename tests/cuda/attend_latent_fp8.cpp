// attend_latent over fp8 and fp8_ds_mla caches on Hopper against float64 over rows that the portable codec reads: fresh
// random inputs, NaN in every unused slot and in the outputs before a run.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <string_view>

#include "backend/cuda/sm90/attention/attention.hpp"
#include "cache/codec.hpp"
#include "cache/format.hpp"
#include "cache/fp8_ds_mla/layout.hpp"
#include "cuda/device.hpp"
#include "cuda/latent_repeats.hpp"
#include "mla/error.hpp"

namespace mla::cuda {
namespace {

using namespace test;

constexpr CacheFormat fp8 = CacheFormat::fp8, ds = CacheFormat::fp8_ds_mla;
/// Scales of fp8_ds_mla: the writer's two rules, or any number: of either sign, of sizes 2^-20 to 2^20, some zero.
enum class Scales { power_of_two, exact, any };

struct Case {
  const char* name;
  CacheFormat format;
  int heads, page_size;
  std::vector<int> q_lens, seq_lens;
  Dtype out = Dtype::f32;
  bool invariant = false;
  float spread = 1.0f;  // of scores: large makes maxima move
  Scales scales = Scales::exact;
  int gap = 0;          // bytes between pages
  float q_size = 1.0f;  // of queries, with a scale that makes up for it
  int tile_rows = 0;    // forced
  bool codes = false;   // are queries e4m3, too, and products of codes?
  bool needle = false;  // does one key in the middle carry the first row's answer?
  friend void PrintTo(const Case& c, std::ostream* to) { *to << c.name; }
};

int multiprocessor_count() {
  int n = 0;
  check(cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, 0), "test", "device");
  return n;
}

class Inputs {
 public:
  explicit Inputs(const Case& c, uint64_t seed = 1) : c_(c), random_(seed) {
    const int requests = static_cast<int>(c.q_lens.size());
    starts_.assign(1, 0);
    for (const int n : c.q_lens) starts_.push_back(starts_.back() + n);
    tokens_ = starts_.back();
    const int longest = *std::max_element(c.seq_lens.begin(), c.seq_lens.end());
    stride_ = (longest + c.page_size - 1) / c.page_size + 3;
    CacheSpec spec{.format = c.format, .page_size = c.page_size};
    spec.k_scale = 0.0173f;
    spec.power_of_two_scales = c.scales == Scales::power_of_two;
    const cache::Format& format = cache::format(c.format);
    const size_t page_stride = spec.page_bytes() + static_cast<size_t>(c.gap);

    std::vector<int32_t> order;
    for (const int n : c.seq_lens) order.resize(order.size() + (n + c.page_size - 1) / c.page_size);
    std::iota(order.begin(), order.end(), 1);
    std::shuffle(order.begin(), order.end(), random_);
    const int64_t pages = static_cast<int64_t>(order.size()) + 2;
    std::vector<int32_t> table(requests * stride_, 0x7ffffff0);
    std::vector<std::byte> bytes(static_cast<size_t>(pages) * page_stride, std::byte{0xff});
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> size(-20, 20);
    std::vector<uint16_t> q(static_cast<size_t>(tokens_) * c.heads * 576);
    q_.resize(q.size());
    std::vector<fp8_e4m3> codes(c.codes ? q.size() : 0);
    for (size_t i = 0; i < q.size(); ++i) {
      const float x = c.q_size * c.spread * normal(random_);
      const bf16 b = to_bf16(x);
      const fp8_e4m3 code = to_fp8_e4m3(x);
      q[i] = b.bits, q_[i] = c.codes ? to_float(code) : to_float(b);
      if (c.codes) codes[i] = code;
    }
    if (c.codes) std::memcpy(q.data(), codes.data(), codes.size());
    rows_.resize(requests);
    size_t used = 0;
    float row[576];
    for (int r = 0; r < requests; ++r) {
      rows_[r].resize(static_cast<size_t>(c.seq_lens[r]) * 576);
      for (int at = 0; at < c.seq_lens[r]; at += c.page_size) {
        const int32_t page = order[used++];
        table[r * stride_ + at / c.page_size] = page;
        std::byte* to = bytes.data() + static_cast<size_t>(page) * page_stride;
        const int count = std::min(c.page_size, c.seq_lens[r] - at);
        for (int t = 0; t < count; ++t) {
          for (float& x : row) x = normal(random_);
          if (c.needle && at + t == c.seq_lens[r] / 2)
            for (int i = 0; i < 576; ++i) row[i] = 0.6f * q_[i] / (c.q_size * c.spread);
          format.encode(spec, to, t, row, row + 512);
          if (c.scales == Scales::any && c.format == ds)
            for (int g = 0; g < 4; ++g) {
              const float s = std::exp2(size(random_));
              const uint64_t pick = random_() % 16;
              cache::put(to + t * cache::fp8_ds_mla::kToken + cache::fp8_ds_mla::kScalesAt, g,
                         pick == 0  ? 0.0f
                         : pick < 4 ? -s
                                    : s);
            }
        }
        format.decode(spec, to, 0, count, &rows_[r][static_cast<size_t>(at) * 576], 576);
      }
    }
    std::vector<LatentItem> items;
    for (int r = 0; r < requests; ++r)
      items.push_back({.request = r,
                       .q_begin = starts_[r],
                       .q_count = c.q_lens[r],
                       .kv_begin = 0,
                       .kv_end = c.seq_lens[r],
                       .visible = c.seq_lens[r] - c.q_lens[r]});
    cache_.emplace(bytes), d_q_.emplace(q), d_table_.emplace(table), d_items_.emplace(items);

    AttendLatentLimits& l = args.limits;
    l = {.tokens = tokens_,
         .requests = requests,
         .heads = c.heads,
         .query_tokens = *std::max_element(c.q_lens.begin(), c.q_lens.end()),
         .seq_len = longest,
         .batch_invariant = c.invariant};
    args.q_dtype = c.codes ? Dtype::fp8_e4m3 : Dtype::bf16;
    choice = attend_latent_choice(l, c.page_size, multiprocessor_count(), c.format, args.q_dtype);
    if (c.tile_rows) choice.tile_rows = c.tile_rows;
    if (choice.converts && c.format == ds)  // fp8's codes are bf16 as they are
      for (auto& rows : rows_)
        for (float& x : rows) x = to_float(to_bf16(x));
    partials_.emplace(attend_latent_partials(l, choice, c.format));
    counters_.emplace(attend_latent_counters(l, choice), 0);
    if (!c.invariant) {
      EXPECT_LE(partials_->size(), attend_latent_most_partials(multiprocessor_count()));
      EXPECT_LE(counters_->size(), attend_latent_most_counters(multiprocessor_count()));
    }
    out_bytes_ = static_cast<size_t>(tokens_) * c.heads * 512 * size_of(c.out);
    out_.emplace(out_bytes_ + 256), lse_.emplace(static_cast<size_t>(tokens_) * c.heads + 64);
    args.q = d_q_->data(), args.cache = cache_->data(), args.format = c.format, args.k_scale = spec.k_scale;
    args.pages = pages, args.page_size = c.page_size, args.items = d_items_->data();
    args.page_stride = c.gap ? static_cast<int64_t>(page_stride) : 0;
    args.block_table = d_table_->data(), args.table_stride = stride_, args.scale = 0.0721688f / c.q_size;
    args.out = out_->data(), args.out_dtype = c.out, args.lse = lse_->data(), args.lse_token_stride = c.heads;
    args.partials = partials_->data(), args.partials_bytes = partials_->size();
    args.counters = counters_->data(), args.counter_count = counters_->size();
  }

  /// From here on the cache lies in the host's memory.
  void move_cache_to_host() {
    std::byte* host = nullptr;
    check(cudaMallocHost(&host, cache_->size()), "test", "allocation");
    check(cudaMemcpy(host, cache_->data(), cache_->size(), cudaMemcpyDeviceToHost), "test", "download");
    host_cache_.reset(host), args.cache = host;
  }

  void poison() { out_->poison(), lse_->poison(), partials_->poison(); }
  std::vector<std::byte> out() const { return out_->download(0, out_bytes_); }
  std::vector<float> lse() const { return lse_->download(); }
  std::vector<unsigned> counters() const { return counters_->download(); }

  /// Every row, or a sample of them when there are many, against float64; each group of 128 latents by itself.
  void verify() {
    const auto bytes = out_->download();
    const auto lse = lse_->download();
    for (size_t i = out_bytes_; i < bytes.size(); ++i) ASSERT_EQ(bytes[i], std::byte{0xff}) << "written past out";
    for (size_t i = static_cast<size_t>(tokens_) * c_.heads; i < lse.size(); ++i)
      ASSERT_TRUE(std::isnan(lse[i])) << "written past lse";
    for (const unsigned n : counters_->download()) ASSERT_EQ(n, 0u) << "counters";
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
    if (work > 2e5) rows.resize(std::max<size_t>(24, static_cast<size_t>(rows.size() * (2e5 / work))));
    struct Error {
      double worst = 0, lse = 0;  // of what is allowed
      bool finite = true, empty = true;
    };
    std::vector<Error> errors(rows.size());
    double largest = 0;  // errors of converted rows are bound as those of a 16-bit cache (attend_latent.cpp)
    for (const auto& request : rows_)
      for (size_t i = 0; i < request.size(); ++i)
        if (i % 576 < 512) largest = std::max<double>(largest, std::abs(request[i]));
    parallel(static_cast<int64_t>(rows.size()), [&](int64_t i) {
      const Row& at = rows[i];
      Error& e = errors[i];
      const int visible =
          std::min(c_.seq_lens[at.request] - c_.q_lens[at.request] + at.token + 1, c_.seq_lens[at.request]);
      const LatentRow want =
          attend_row(&q_[at.row * 576], visible, args.scale, c_.codes ? Dtype::fp8_e4m3 : Dtype::bf16,
                     [&](int j) { return &rows_[at.request][static_cast<int64_t>(j) * 576]; });
      for (int group = 0; group < 4; ++group) {
        double out = 0, plain_out = 0, square = 0, squares = 0, plain_squares = 0, sizes = 0;
        for (int k = group * 128; k < group * 128 + 128; ++k) {
          float got, plain = want.plain[k];
          if (c_.out == Dtype::f32) {
            std::memcpy(&got, &bytes[(at.row * 512 + k) * 4], 4);
          } else {
            bf16 b;
            std::memcpy(&b, &bytes[(at.row * 512 + k) * 2], 2);
            got = to_float(b), plain = to_float(to_bf16(plain));
          }
          if (!std::isfinite(got)) e.finite = false;
          if (visible <= 0 && got != 0) e.empty = false;
          out = std::max(out, std::abs(got - want.out[k]));
          plain_out = std::max(plain_out, std::abs(plain - want.out[k]));
          square += want.out[k] * want.out[k];
          squares += (got - want.out[k]) * (got - want.out[k]);
          plain_squares += (plain - want.out[k]) * (plain - want.out[k]);
          sizes += want.size[k] * want.size[k];
          if (choice.codes) {
            // Each probability to 4 bits, small ones to 2^-10 of 2^7; and what scores err by.
            double allowed = (0x1p-4 + score_error(8)) * want.size[k] + (visible * 0x1p-17 + 0x1p-11) * largest;
            if (c_.out == Dtype::bf16) allowed += 0x1p-8 * (std::abs(want.out[k]) + allowed);
            e.worst = std::max(e.worst, std::abs(got - want.out[k]) / (allowed + 1e-30));
          } else if (choice.converts) {
            double allowed = (0x1p-8 + 0x1p-12) * want.size[k] + 0x1p-11 * largest;
            if (c_.out == Dtype::bf16) allowed += 0x1p-8 * (std::abs(want.out[k]) + allowed);
            e.worst = std::max(e.worst, std::abs(got - want.out[k]) / (allowed + 1e-30));
          }
        }
        // Of few keys' probabilities a plain computation may round none.
        const double luck = (visible < 100 ? 0x1p-10 * sizes : 0x1p-16 * square) + std::pow(score_error(1), 2) * sizes;
        if (choice.codes)
          e.worst = std::max(e.worst, std::sqrt(squares) / (2 * std::sqrt(plain_squares) + std::sqrt(luck) + 1e-30));
        else if (!choice.converts)
          e.worst = std::max(e.worst, out / (2 * plain_out + 0x1p-9 * std::sqrt(square / 128) + 1e-30));
      }
      const float l = lse[at.row];
      if (visible <= 0) {
        if (!(l == -std::numeric_limits<float>::infinity())) e.empty = false;
      } else {
        const double allowed =
            choice.codes ? score_error(4) + kCuts * std::abs(want.lse) : 3e-5 * (1 + std::abs(want.lse));
        e.lse = std::isfinite(l) ? std::abs(l - want.lse) / allowed : 1e30;
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
      ASSERT_LE(e.worst, 1) << where();
      ASSERT_LE(e.lse, 1) << where();
    }
  }

  /// Of the first `count` rows, all of request 0's first token, after a call: error over outputs, root mean squares.
  double relative_error(int count) const {
    const auto bytes = out_->download();
    std::vector<double> squares(count), sizes(count);
    parallel(count, [&](int64_t row) {
      const LatentRow want = attend_row(&q_[row * 576], c_.seq_lens[0], args.scale, Dtype::bf16,
                                        [&](int j) { return &rows_[0][static_cast<int64_t>(j) * 576]; });
      for (int k = 0; k < 512; ++k) {
        float got;
        std::memcpy(&got, &bytes[(row * 512 + k) * 4], 4);
        squares[row] += (got - want.out[k]) * (got - want.out[k]), sizes[row] += want.out[k] * want.out[k];
      }
    });
    return std::sqrt(std::accumulate(squares.begin(), squares.end(), 0.0) /
                     std::accumulate(sizes.begin(), sizes.end(), 0.0));
  }

  AttendLatent args;
  AttendLatentChoice choice;

 private:
  /// Of scores by codes: 18 sums of 32 products, cut off 13 bits below the largest addend, which is some times the
  /// spread of scores.
  static constexpr double kCuts = 18 * 0x1p-13;
  double score_error(double times) const { return kCuts * times * c_.spread; }

  Case c_;
  std::mt19937_64 random_;
  int tokens_ = 0;
  int64_t stride_ = 0;
  size_t out_bytes_ = 0;
  std::vector<int32_t> starts_;
  std::vector<std::vector<float>> rows_;
  std::vector<float> q_;
  std::optional<DeviceArray<uint16_t>> d_q_;
  std::optional<DeviceArray<int32_t>> d_table_;
  std::optional<DeviceArray<LatentItem>> d_items_;
  std::optional<DeviceArray<unsigned>> counters_;
  std::optional<DeviceArray<std::byte>> cache_, partials_, out_;
  struct FreeHost {
    void operator()(void* p) const { cudaFreeHost(p); }
  };
  std::unique_ptr<std::byte, FreeHost> host_cache_;
  std::optional<DeviceArray<float>> lse_;
};

void synchronize() { check(cudaDeviceSynchronize(), "attend_latent", "run"); }

class AttendLatentFp8 : public testing::TestWithParam<Case> {};

TEST_P(AttendLatentFp8, AgreesWithFloat64AndRepeats) {
  if (!have_hopper()) GTEST_SKIP() << "no Hopper GPU: skipped";
  Inputs s(GetParam(), testing::UnitTest::GetInstance()->random_seed() + 17);
  expect_right_and_same_bits(s);
}

std::vector<int> fill(int n, int value) { return std::vector<int>(n, value); }

std::vector<Case> cases() {
  const std::vector<int> one = {1}, three = {1, 1, 1}, six = fill(6, 1);
  const std::vector<int> ragged = {1, 63, 64, 65, 1000, 4097};
  std::vector<Case> all;
  for (const CacheFormat f : {fp8, ds}) {
    const std::vector<Case> of_format = {
        {"one_position", f, 16, 64, one, {1}},
        {"one_block", f, 16, 64, one, {64}},
        {"h16_4k", f, 16, 64, one, {4096}},
        {"h16_ragged", f, 16, 64, six, ragged},
        {"h16_none", f, 16, 64, {1, 0, 1, 1}, {0, 5, 100, 0}},
        {"h1", f, 1, 64, three, {700, 3, 129}},
        {"h5_q3", f, 5, 64, {3, 1, 2}, {700, 3, 129}},
        {"h20", f, 20, 64, {1, 1}, {300, 1025}},
        {"h16_q2", f, 16, 64, {2, 2, 1, 2}, {300, 2, 1, 1025}},
        {"h32_ragged", f, 32, 64, six, ragged},
        {"h16_bf16_out", f, 16, 64, three, {2000, 333, 64}, Dtype::bf16},
        {"h16_invariant", f, 16, 64, three, {5000, 333, 2049}, Dtype::f32, true},
        {"h16_many", f, 16, 64, fill(300, 1), fill(300, 150)},
        {"h16_line", f, 16, 64, fill(140, 1), fill(140, 700)},
        {"h16_spread", f, 16, 64, {1, 1}, {3000, 700}, Dtype::f32, false, 12.0f},
        {"h32_spread", f, 32, 64, {1, 1}, {3000, 700}, Dtype::f32, false, 12.0f},
        {"h64_spread", f, 64, 64, {1, 1}, {3000, 700}, Dtype::f32, false, 12.0f},
        {"h16_page16", f, 16, 16, three, {1000, 17, 333}},
        {"h16_page48", f, 16, 48, {1, 1}, {1000, 333}},
        {"h16_page8", f, 16, 8, {1, 1}, {1000, 333}},
        {"h16_page2", f, 16, 2, {1, 1}, {1001, 333}},
        {"h16_page128", f, 16, 128, {1, 1}, {1000, 333}},
        {"h16_page1", f, 16, 1, {1, 1}, {1000, 333}},
        {"h16_page17", f, 16, 17, three, {5000, 333, 64}},
        {"h16_gap", f, 16, 64, {1, 1}, {1000, 333}, Dtype::f32, false, 1.0f, Scales::exact, 48},
        {"h16_small_q", f, 16, 64, {1, 1}, {1000, 333}, Dtype::f32, false, 1.0f, Scales::exact, 0, 1e-20f},
        {"h16_large_q", f, 16, 64, {1, 1}, {1000, 333}, Dtype::f32, false, 1.0f, Scales::exact, 0, 1e20f},
        {"h64_one_position", f, 64, 64, one, {1}},
        {"h64_4k", f, 64, 64, one, {4096}},
        {"h64_ragged", f, 64, 64, six, ragged},
        {"h40", f, 40, 64, {1, 1}, {300, 1025}},
        {"h20_q3", f, 20, 64, {3, 1, 0, 2}, {300, 1025, 7, 1}},
        {"h64_none", f, 64, 64, {1, 0, 1, 1}, {0, 5, 100, 0}},
        {"h64_bf16_out", f, 64, 64, three, {2000, 333, 64}, Dtype::bf16},
        {"h64_invariant", f, 64, 64, three, {5000, 333, 2049}, Dtype::f32, true},
        {"h64_page17", f, 64, 17, three, {5000, 333, 64}},
        {"h128_one_block", f, 128, 64, one, {64}},
        {"h128_ragged", f, 128, 64, six, ragged},
        {"h128_q2", f, 128, 64, {2, 1, 2}, {1000, 77, 1}},
        {"h20_q4_ragged", f, 20, 64, {4, 1, 9, 2}, {300, 1025, 2000, 1}},
        {"h128_bf16_out", f, 128, 64, three, {2000, 333, 64}, Dtype::bf16},
        {"h128_page1", f, 128, 1, {1, 1}, {1000, 333}},
        {"h128_line", f, 128, 64, fill(70, 1), fill(70, 700)},
    };
    all.insert(all.end(), of_format.begin(), of_format.end());
  }
  for (const char* const name :
       {"one_position", "one_block", "h16_4k",           "h16_ragged",    "h16_none",   "h1",
        "h5_q3",        "h20",       "h16_bf16_out",     "h16_spread",    "h16_page8",  "h16_page2",
        "h16_page128",  "h16_gap",   "h64_one_position", "h64_4k",        "h64_ragged", "h40",
        "h20_q3",       "h64_none",  "h64_bf16_out",     "h64_invariant", "h64_spread", "h128_one_block",
        "h128_ragged",  "h128_q2",   "h20_q4_ragged",    "h128_bf16_out", "h128_line"}) {
    Case c = *std::find_if(all.begin(), all.end(),
                           [&](const Case& of) { return of.format == fp8 && std::string_view(of.name) == name; });
    c.codes = true;
    all.push_back(c);
  }
  Case invariant{"h128_invariant", fp8, 128, 64, three, {5000, 333, 2049}, Dtype::f32, true};
  invariant.codes = true;
  all.push_back(invariant);
  Case gap{"h16_page128_gap", fp8, 16, 128, {1, 1}, {1000, 333}, Dtype::f32, false, 1.0f, Scales::exact, 48};
  gap.codes = true;
  all.push_back(gap);
  for (const int heads : {16, 32, 64})
    for (const Scales scales : {Scales::power_of_two, Scales::any})
      all.push_back({scales == Scales::any ? "any_scale" : "power_of_two_scale",
                     ds,
                     heads,
                     64,
                     {1, 2, 1},
                     {1500, 333, 64},
                     Dtype::f32,
                     false,
                     scales == Scales::any ? 2e-7f : 1.0f,
                     scales});
  for (const int heads : {16, 32, 64})
    all.push_back(
        {"any_scale_spread", ds, heads, 64, {1, 1, 1}, {1500, 333, 64}, Dtype::f32, false, 1.0f, Scales::any});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Shapes, AttendLatentFp8, testing::ValuesIn(cases()), [](const auto& at) {
  return std::string(at.param.codes           ? "codes_"
                     : at.param.format == fp8 ? "fp8_"
                                              : "ds_") +
         at.param.name + "_" + std::to_string(at.param.heads) + "_" + std::to_string(at.index);
});

struct Form {
  CacheFormat format;
  bool codes;
};
constexpr Form kForms[] = {{fp8, false}, {ds, false}, {fp8, true}};

/// batch_invariant: a request's bits stay, whatever stands beside it.
TEST(AttendLatentFp8Bits, BatchInvariant) {
  if (!have_hopper()) GTEST_SKIP() << "no Hopper GPU: skipped";
  for (const auto [format, codes] : kForms)
    for (const int heads : {16, 64, 128}) {
      Case c{"beside", format, heads, 64, {1, 7, 1, 3}, {5000, 9000, 100, 3000}, Dtype::f32, true};
      c.codes = codes;
      Inputs b(c, 5);
      attend_latent(b.args, b.choice, nullptr);
      synchronize();
      const auto together = b.out();
      expect_same_bits(b);
      AttendLatent one = b.args;
      one.limits.requests = one.limits.tokens = one.limits.query_tokens = 1;
      b.poison();
      attend_latent(one, attend_latent_choice(one.limits, one.page_size, b.choice.workers, format, one.q_dtype),
                    nullptr);
      synchronize();
      const auto single = b.out();
      EXPECT_EQ(0, std::memcmp(together.data(), single.data(), static_cast<size_t>(heads) * 512 * 4))
          << heads << " heads";
    }
}

// Copies of blocks overtake one another on their way from the host's memory, as they may from the device's: nobody
// takes a block for there because a later one is.
TEST(AttendLatentFp8Bits, BlocksArriveInAnyOrder) {
  if (!have_hopper()) GTEST_SKIP() << "no Hopper GPU: skipped";
  for (const auto [format, codes] : kForms)
    for (const int heads : {16, 32, 64, 128})
      for (const bool invariant : {true, false}) {
        Case c{"host", format, heads, 64, {3, 1}, {4100, 40}, Dtype::f32, invariant};
        c.codes = codes;
        Inputs s(c);
        attend_latent(s.args, s.choice, nullptr);
        synchronize();
        const auto want = s.out();
        s.move_cache_to_host();
        const int times = format == fp8 && heads == 16 ? 6000 : 1000;
        for (int i = 0; i < times; ++i) {
          attend_latent(s.args, s.choice, nullptr);
          synchronize();
          ASSERT_EQ(s.out(), want) << to_string(format) << " heads " << heads << (invariant ? " batch-invariant" : "")
                                   << ", call " << i;
        }
      }
}

// docs/numerics.md has the table that this prints.
TEST(AttendLatentFp8Bits, ErrorsOfCodesDoNotGrowWithTheContext) {
  if (!have_hopper()) GTEST_SKIP() << "no Hopper GPU: skipped";
  for (const bool needle : {false, true})
    for (const int keys : {512, 4096, 32768, 131072}) {
      double error[2];
      for (const bool codes : {false, true}) {
        Case c{"length", fp8, 128, 64, {1}, {keys}};
        c.codes = codes, c.needle = needle;
        Inputs s(c, 3);
        attend_latent(s.args, s.choice, nullptr);
        synchronize();
        error[codes] = s.relative_error(needle ? 1 : 16);
      }
      std::printf("%s, %d keys: by values %.5f, by codes %.5f\n", needle ? "one key of all" : "random", keys, error[0],
                  error[1]);
      EXPECT_LE(error[1], needle ? 0.002 : 0.035) << keys << (needle ? ", needle" : "");
    }
}

TEST(AttendLatentFp8Bits, RefusesBadShapes) {
  if (!have_hopper()) GTEST_SKIP() << "no Hopper GPU: skipped";
  Inputs s({"bad", fp8, 16, 64, {1}, {100}});
  const auto message = [&](auto change) {
    AttendLatent a = s.args;
    change(a);
    try {
      attend_latent(a, s.choice, nullptr);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_EQ(message([](AttendLatent& a) { a.page_stride = 36872; }),
            "attend_latent: page stride is 36872 bytes, a multiple of 16 from 36864 on is needed");
  EXPECT_EQ(message([](AttendLatent& a) { a.k_scale = 0; }),
            "attend_latent: k_scale is 0.000000, a positive number is needed");
  EXPECT_NE(message([](AttendLatent& a) { a.q_dtype = Dtype::fp8_e4m3; }).find("other queries than fp8_e4m3"),
            std::string::npos);
  Case odd{"odd", fp8, 16, 17, {1}, {100}};
  odd.codes = true;
  Inputs pages(odd);
  try {
    attend_latent(pages.args, pages.choice, nullptr);
    FAIL() << "pages of 17 rows were taken";
  } catch (const ShapeError& e) {
    EXPECT_STREQ(e.what(), "attend_latent: q of fp8_e4m3 needs pages of an even number of rows, page size is 17");
  }
  EXPECT_NE(message([](AttendLatent& a) { a.format = CacheFormat::fp8_ds_v4; }).find("fp8_ds_mla is needed"),
            std::string::npos);
  const SlotLists lists;
  EXPECT_NE(message([&](AttendLatent& a) { a.lists = &lists; }).find("lists are read by the kernels of fp8_ds_mla"),
            std::string::npos);
}

}  // namespace
}  // namespace mla::cuda
