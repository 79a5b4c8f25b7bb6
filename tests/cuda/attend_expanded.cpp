// attend_expanded on Hopper against float64: ragged items, merging, poison, bits.
#include "backend/cuda/sm90/attend_expanded/attend_expanded.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <string>
#include <thread>

#include "cuda/device.hpp"
#include "cuda/expanded_codes.hpp"

namespace mla::cuda {
namespace {

using test::compare_codes;
using test::DeviceArray;
using test::for_codes;
using test::have_hopper;

using sm90::AttendExpandedArgs;

struct Dims {
  int nope = 128, rope = 64, value = 128;
};

struct Batch {
  std::vector<int32_t> queries, keys;  // lengths per item
  int heads = 2;
  bool causal = true;  // aligned at the ends, or everything visible
  Dims dims{};
  Dtype dtype = Dtype::bf16, out = Dtype::bf16;
  int before = 0, after = 0;     // rows of no item around the batch's rows, poisoned
  std::vector<int32_t> visible;  // per item, in place of `causal`
  bool accumulate = false;
  bool lse_by_head = false, no_lse = false;
  bool padded = false;  // items of no rows between the others
  sm90::ExpandedTile tile = sm90::ExpandedTile::automatic;
  double masked = 0;  // two of three items have masks that name this share of their keys; 0: none have

  bool masks(size_t item) const { return masked > 0 && item % 3 < 2; }
  int32_t mask_begin(size_t item) const { return 5 + 37 * static_cast<int32_t>(item); }
  std::vector<int32_t> starts(const std::vector<int32_t>& lengths) const {
    std::vector<int32_t> s{before};
    for (int32_t n : lengths) s.push_back(s.back() + n);
    return s;
  }
  int32_t visible_of(size_t item) const {
    if (!visible.empty()) return visible[item];
    return causal ? keys[item] - queries[item] : ExpandedItem::everything();
  }
};

constexpr uint16_t nan16 = 0x7fff;  // NaN in bf16 and f16
constexpr uint32_t sentinel = 0x7fc0dead;

uint16_t rounded(Dtype t, float x) { return t == Dtype::bf16 ? to_bf16(x).bits : to_f16(x).bits; }
double value_of(Dtype t, uint16_t bits) { return t == Dtype::bf16 ? to_float(bf16{bits}) : to_float(f16{bits}); }
double unit(Dtype t) { return t == Dtype::bf16 ? 0x1p-8 : t == Dtype::f16 ? 0x1p-11 : 0x1p-24; }

/// The items of a batch, its starts given; padding says absurd things about its keys.
std::vector<ExpandedItem> items_of(const Batch& b, const std::vector<int32_t>& q_start,
                                   const std::vector<int32_t>& k_start) {
  std::vector<ExpandedItem> items;
  const ExpandedItem none{.q_begin = 1 << 30, .k_begin = -(1 << 30), .k_count = 1 << 30};
  for (size_t r = 0; r < b.queries.size(); ++r) {
    if (b.padded && r % 2 == 0) items.push_back(none);
    items.push_back({q_start[r], b.queries[r], k_start[r], b.keys[r], b.visible_of(r), false, b.masks(r),
                     b.masks(r) ? b.mask_begin(r) : 0});
  }
  if (b.padded) items.insert(items.end(), 40, none);
  return items;
}

/// A batch on the device: q [tokens, heads, P + R], one array [keys, heads, P + V] that k_nope and v are slices of,
/// k_pe [keys, R].
struct Problem {
  Batch batch;
  std::vector<int32_t> q_start, k_start;
  int64_t tokens, keys, qk, kv;
  float scale;
  std::vector<uint16_t> q, k_v, k_pe;
  std::vector<uint32_t> mask;  // [tokens, mask_words]
  int64_t mask_words = 0;
  DeviceArray<uint32_t> mask_dev, columns_dev;
  std::vector<uint32_t> out_before;  // bits of what the outputs hold before the run
  std::vector<float> lse_before;
  DeviceArray<uint16_t> q_dev, k_v_dev, k_pe_dev;
  DeviceArray<uint32_t> out_dev;  // bits; two 16-bit outputs share a word
  DeviceArray<float> lse_dev;
  DeviceArray<ExpandedItem> items_dev;
  DeviceArray<int32_t> workspace;

  explicit Problem(const Batch& b, uint32_t seed) : batch(b), q_start(b.starts(b.queries)), k_start(b.starts(b.keys)) {
    const Dims d = b.dims;
    tokens = q_start.back() + b.after;
    keys = std::max(k_start.back() + b.after, 1);
    qk = d.nope + d.rope;
    kv = d.nope + d.value;
    scale = 1.0f / std::sqrt(static_cast<float>(qk));
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<uint16_t>& a, int64_t rows, int64_t width, int64_t begin, int64_t end,
                          float size) {
      a.assign(static_cast<size_t>(rows * width), nan16);
      for (int64_t i = begin * width; i < end * width; ++i)
        a[static_cast<size_t>(i)] = rounded(b.dtype, size * normal(random));
    };
    fill(q, tokens, b.heads * qk, q_start.front(), q_start.back(), 2.0f);
    fill(k_v, keys, b.heads * kv, k_start.front(), k_start.back(), 1.0f);
    fill(k_pe, keys, d.rope, k_start.front(), k_start.back(), 1.0f);
    upload();
    lse_dev = DeviceArray<float>(tokens * b.heads);
    out_dev = DeviceArray<uint32_t>(tokens * b.heads * words());
    items_dev = DeviceArray<ExpandedItem>(items_of(b, q_start, k_start));
    lse_before.assign(static_cast<size_t>(tokens * b.heads), std::bit_cast<float>(sentinel));
    out_before.assign(static_cast<size_t>(out_dev.size()), sentinel);
    if (b.accumulate) {
      constexpr float inf = std::numeric_limits<float>::infinity();
      for (int64_t row = q_start.front() * b.heads; row < q_start.back() * b.heads; ++row) {
        float& lse = lse_before[static_cast<size_t>(lse_index(row / b.heads, row % b.heads))];
        lse = 4 + 4 * normal(random);
        const uint32_t kind = random() % 16;
        if (kind < 3) lse = kind == 0 ? -inf : kind == 1 ? inf : std::numeric_limits<float>::quiet_NaN();
        if (kind < 2) continue;  // holds nothing: out stays NaN; a NaN lse counts as that only beside numbers
        if (kind == 3) lse = random() % 2 ? 1e5f : -1e5f;
        for (int64_t i = row * words(); i < (row + 1) * words(); ++i) {
          const float x = normal(random), y = normal(random);
          out_before[static_cast<size_t>(i)] = b.out == Dtype::f32
                                                   ? std::bit_cast<uint32_t>(x)
                                                   : uint32_t{rounded(b.out, y)} << 16 | uint32_t{rounded(b.out, x)};
        }
      }
    }
    workspace = DeviceArray<int32_t>(std::vector<int32_t>(4, 0));
    if (b.masked > 0) set_masks(random);
  }

  /// As many words as the widest item needs, of random bits; some rows of an item name no key at all.
  void set_masks(std::mt19937& random) {
    for (size_t r = 0; r < batch.keys.size(); ++r)
      mask_words = std::max<int64_t>(mask_words, (batch.mask_begin(r) + batch.keys[r] + 31) / 32);
    mask.resize(static_cast<size_t>(tokens * mask_words));
    std::bernoulli_distribution sees(batch.masked);
    for (int64_t t = 0; t < tokens; ++t) {
      const bool none = random() % 9 == 0;
      for (int64_t c = 0; c < 32 * mask_words; ++c)
        if (!none && sees(random)) mask[static_cast<size_t>(t * mask_words + c / 32)] |= 1u << c % 32;
    }
    mask_dev = DeviceArray<uint32_t>(mask);
    columns_dev =
        DeviceArray<uint32_t>(std::vector<uint32_t>(sm90::masked_columns_bytes(args()) / sizeof(uint32_t), 0xdeadbeef));
  }
  /// Whether the mask of a token of an item names its key j.
  bool names(size_t item, int64_t token, int64_t j) const {
    if (!batch.masks(item)) return true;
    const int64_t c = batch.mask_begin(item) + j;
    return mask[static_cast<size_t>(token * mask_words + c / 32)] >> c % 32 & 1;
  }

  int64_t words() const { return batch.dims.value / (batch.out == Dtype::f32 ? 1 : 2); }  // of an output row
  int64_t lse_index(int64_t token, int64_t head) const {
    return batch.lse_by_head ? head * tokens + token : token * batch.heads + head;
  }
  void upload() {
    q_dev = DeviceArray<uint16_t>(q);
    k_v_dev = DeviceArray<uint16_t>(k_v);
    k_pe_dev = DeviceArray<uint16_t>(k_pe);
  }

  AttendExpandedArgs args() const {
    const Dims d = batch.dims;
    const int64_t h = batch.heads;
    AttendExpandedArgs a;
    a.q = {batch.dtype, q_dev.data(), {tokens, h, qk}};
    a.k_nope = {batch.dtype, k_v_dev.data(), {keys, h, d.nope}, {h * kv, kv, 1}};
    a.k_pe = {batch.dtype, k_pe_dev.data(), {keys, d.rope}};
    a.v = {batch.dtype, k_v_dev.data() + d.nope, {keys, h, d.value}, {h * kv, kv, 1}};
    a.items = items_dev.data();
    a.item_count = items_dev.size();
    a.scale = scale;
    a.out = {batch.out, out_dev.data(), {tokens, h, d.value}};
    if (!batch.no_lse)
      a.lse = {lse_dev.data(), {tokens, h}, {batch.lse_by_head ? 1 : h, batch.lse_by_head ? tokens : 1}};
    a.accumulate = batch.accumulate;
    a.tile = batch.tile;
    if (batch.masked > 0) {
      a.mask = {mask_dev.data(), {tokens, mask_words}};
      a.columns = columns_dev.data();
    }
    a.workspace = workspace.data();
    return a;
  }

  void poison_outputs() {
    out_dev.upload(out_before);
    lse_dev.upload(lse_before);
  }
  void run() {
    poison_outputs();
    sm90::attend_expanded(nullptr, args());
    check(cudaDeviceSynchronize(), "test", "attend_expanded");
  }
  std::vector<uint32_t> out_bits() const { return out_dev.download(); }
  std::vector<uint32_t> lse_bits() const {
    const std::vector<float> lse = lse_dev.download();
    std::vector<uint32_t> bits;
    for (float x : lse) bits.push_back(std::bit_cast<uint32_t>(x));
    return bits;
  }
};

double out_value(const Problem& p, const std::vector<uint32_t>& bits, int64_t i) {
  if (p.batch.out == Dtype::f32) return std::bit_cast<float>(bits[static_cast<size_t>(i)]);
  return value_of(p.batch.out, static_cast<uint16_t>(bits[static_cast<size_t>(i / 2)] >> (16 * (i % 2))));
}

/// Compares every row with float64. The bound of an output: each probability rounds to the operands' type (relative u),
/// the output to its own; f32 sums and the exponential's approximation add 2e-5 of the summed magnitudes. Merging
/// weighs both parts by exponentials of differences of lse, whose own error is as large.
std::string compare(const Problem& p) {
  const Batch& b = p.batch;
  const Dims d = b.dims;
  const std::vector<uint32_t> out = p.out_bits();
  const std::vector<float> lse = p.lse_dev.download();
  const double u = unit(b.dtype), u_out = unit(b.out);  // half a unit in the last place, at most
  constexpr double inf = std::numeric_limits<double>::infinity();
  std::vector<int> request_of(static_cast<size_t>(p.tokens), -1);
  for (size_t r = 0; r < b.queries.size(); ++r)
    for (int32_t t = p.q_start[r]; t < p.q_start[r + 1]; ++t) request_of[static_cast<size_t>(t)] = static_cast<int>(r);
  std::vector<float> kv(p.k_v.size()), pe(p.k_pe.size()), q(p.q.size());
  std::ranges::transform(p.k_v, kv.begin(), [&](uint16_t x) { return static_cast<float>(value_of(b.dtype, x)); });
  std::ranges::transform(p.k_pe, pe.begin(), [&](uint16_t x) { return static_cast<float>(value_of(b.dtype, x)); });
  std::ranges::transform(p.q, q.begin(), [&](uint16_t x) { return static_cast<float>(value_of(b.dtype, x)); });

  const unsigned workers = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::string> failures(workers);
  const auto work = [&](unsigned worker) {
    std::string& failure = failures[worker];
    std::vector<double> s, o(static_cast<size_t>(d.value)), magnitude(static_cast<size_t>(d.value));
    for (int64_t row = worker; row < p.tokens * b.heads && failure.empty(); row += workers) {
      const int64_t token = row / b.heads, head = row % b.heads;
      const int r = request_of[static_cast<size_t>(token)];
      const auto fail = [&](const std::string& what, double got, double want, double bound) {
        failure = what + " token " + std::to_string(token) + " (request " + std::to_string(r) + ") head " +
                  std::to_string(head) + ": " + std::to_string(got) + ", expected " + std::to_string(want) +
                  " within " + std::to_string(bound);
      };
      const auto lse_at = static_cast<size_t>(p.lse_index(token, head));
      if (r < 0) {  // untouched
        if (std::bit_cast<uint32_t>(lse[lse_at]) != sentinel) fail("lse of no item", lse[lse_at], 0, 0);
        for (int64_t i = row * p.words(); i < (row + 1) * p.words(); ++i)
          if (out[static_cast<size_t>(i)] != sentinel) fail("out of no item", 0, 0, 0);
        continue;
      }
      const auto request = static_cast<size_t>(r);
      const int64_t i = token - p.q_start[request], nk = b.keys[request], first = p.k_start[request];
      const int64_t seen = std::clamp<int64_t>(i + 1 + b.visible_of(request), 0, nk);
      s.assign(static_cast<size_t>(seen), 0.0);
      double high = -std::numeric_limits<double>::infinity();
      bool any = false;
      for (int64_t j = 0; j < seen; ++j) {
        if (!p.names(request, token, j)) continue;
        any = true;
        const float* qr = &q[static_cast<size_t>(row * p.qk)];
        const float* kr = &kv[static_cast<size_t>(((first + j) * b.heads + head) * p.kv)];
        const float* er = &pe[static_cast<size_t>((first + j) * d.rope)];
        double dot = 0;
        for (int e = 0; e < d.nope; ++e) dot += static_cast<double>(qr[e]) * kr[e];
        for (int e = 0; e < d.rope; ++e) dot += static_cast<double>(qr[d.nope + e]) * er[e];
        s[static_cast<size_t>(j)] = dot * static_cast<double>(p.scale);
        high = std::max(high, s[static_cast<size_t>(j)]);
      }
      double sum = 0;
      std::ranges::fill(o, 0.0);
      std::ranges::fill(magnitude, 0.0);
      for (int64_t j = 0; j < seen; ++j) {
        if (!p.names(request, token, j)) continue;
        const double w = std::exp(s[static_cast<size_t>(j)] - high);
        const float* vr = &kv[static_cast<size_t>(((first + j) * b.heads + head) * p.kv + d.nope)];
        sum += w;
        for (int e = 0; e < d.value; ++e) {
          o[static_cast<size_t>(e)] += w * vr[e];
          magnitude[static_cast<size_t>(e)] += w * std::abs(vr[e]);
        }
      }
      double before = b.accumulate ? static_cast<double>(p.lse_before[lse_at]) : -inf;
      if (!(before < inf)) before = -inf;
      const double part = any ? high + std::log(sum) : -inf, most = std::max(before, part);
      const double whole = most > -inf ? std::exp(before - most) + std::exp(part - most) : 0;
      const double keep = whole > 0 ? std::exp(before - most) / whole : 0,
                   take = whole > 0 && any ? std::exp(part - most) / whole / sum : 0;
      const double want_lse = whole > 0 ? most + std::log(whole) : -inf, got_lse = lse[lse_at];
      const double lse_bound = 2e-5 * (1 + std::abs(most));
      if (b.no_lse    ? std::bit_cast<uint32_t>(lse[lse_at]) != sentinel
          : whole > 0 ? !(std::abs(got_lse - want_lse) <= lse_bound)
                      : got_lse != want_lse)
        fail("lse", got_lse, want_lse, lse_bound);
      for (int e = 0; e < d.value && failure.empty(); ++e) {
        const double got = out_value(p, out, row * d.value + e);
        const double old = keep > 0 ? out_value(p, p.out_before, row * d.value + e) : 0;
        const double mine = take > 0 ? take * o[static_cast<size_t>(e)] : 0, want = mine + keep * old;
        const double merged = keep > 0 && take > 0 ? 2 * lse_bound * (std::abs(mine) + std::abs(keep * old)) : 0;
        const double bound = whole > 0 ? (u + 2e-5) * take * magnitude[static_cast<size_t>(e)] * 1.01 +
                                             u_out * std::abs(want) + merged + 1e-7
                                       : 0;
        if (!(std::abs(got - want) <= bound)) fail("out[" + std::to_string(e) + "]", got, want, bound);
      }
    }
  };
  std::vector<std::thread> threads;
  for (unsigned w = 0; w < workers; ++w) threads.emplace_back(work, w);
  for (std::thread& t : threads) t.join();
  for (const std::string& f : failures)
    if (!f.empty()) return f;
  return "";
}

class AttendExpanded : public testing::Test {
 protected:
  void SetUp() override {
    if (!have_hopper()) GTEST_SKIP() << "no CUDA device of compute capability 9.0";
  }
};

std::vector<Batch> kinds() {
  using enum sm90::ExpandedTile;
  const auto batch = [](Dims d, Dtype t, Dtype out, sm90::ExpandedTile tile) {
    Batch b;
    b.dims = d;
    b.dtype = t;
    b.out = out;
    b.tile = tile;
    return b;
  };
  const Dims deepseek{128, 64, 128}, glm{192, 64, 256};
  const auto masked = [&](Dims d, Dtype out, sm90::ExpandedTile tile, double share) {
    Batch b = batch(d, Dtype::bf16, out, tile);
    b.masked = share;
    return b;
  };
  return {masked(deepseek, Dtype::bf16, rows_128, 0.5),
          masked(deepseek, Dtype::f32, rows_256, 0.02),
          masked(deepseek, Dtype::bf16, rows_256, 0.9),
          masked(glm, Dtype::bf16, rows_128, 0.5),
          masked(glm, Dtype::f32, rows_256, 0.1),
          batch(deepseek, Dtype::bf16, Dtype::bf16, rows_128),
          batch(deepseek, Dtype::bf16, Dtype::f32, rows_192),
          batch(deepseek, Dtype::bf16, Dtype::bf16, rows_256),
          batch(deepseek, Dtype::bf16, Dtype::f32, rows_256),
          batch(deepseek, Dtype::f16, Dtype::f16, rows_192),
          batch(deepseek, Dtype::f16, Dtype::f32, rows_128),
          batch(deepseek, Dtype::f16, Dtype::f16, rows_256),
          batch(glm, Dtype::bf16, Dtype::bf16, rows_128),
          batch(glm, Dtype::bf16, Dtype::f32, rows_256),
          batch(glm, Dtype::f16, Dtype::f16, rows_256),
          batch(glm, Dtype::f16, Dtype::f32, rows_128)};
}

std::string name(const Batch& b) {
  std::string text = std::to_string(b.dims.nope) + "/" + std::to_string(b.dims.value) + " " +
                     std::string(to_string(b.dtype)) + " to " + std::string(to_string(b.out)) + ", tile " +
                     std::to_string(static_cast<int>(b.tile)) + (b.causal ? " causal" : "") +
                     (b.accumulate ? " merged" : "") + (b.masked > 0 ? ", masks of " + std::to_string(b.masked) : "") +
                     ", heads " + std::to_string(b.heads) + ", q";
  for (int32_t n : b.queries) text += " " + std::to_string(n);
  text += ", k";
  for (int32_t n : b.keys) text += " " + std::to_string(n);
  if (!b.visible.empty()) text += ", visible";
  for (int32_t n : b.visible) text += " " + std::to_string(n);
  return text;
}

TEST_F(AttendExpanded, SingleRequestsOfEverySize) {
  for (Batch b : kinds()) {
    for (const int n : {1, 63, 64, 65, 127, 128, 129, 200, 256, 640}) {
      b.queries = b.keys = {n};
      Problem p(b, static_cast<uint32_t>(n));
      p.run();
      ASSERT_EQ(compare(p), "") << name(b);
    }
  }
}

TEST_F(AttendExpanded, RaggedBatches) {
  std::mt19937 random(7);
  const auto upto = [&](int n) { return static_cast<int32_t>(random() % static_cast<uint32_t>(n + 1)); };
  for (Batch b : kinds()) {
    for (int round = 0; round < 12; ++round) {
      b.causal = round % 3 != 2;
      b.heads = 1 + upto(6);
      b.before = upto(3);
      b.after = 1 + upto(200);
      b.queries.clear();
      b.keys.clear();
      const int requests = 1 + upto(round % 4 == 3 ? 70 : 8);
      for (int r = 0; r < requests; ++r) {
        const int32_t most = requests > 20 ? 40 : 330;
        b.queries.push_back(upto(4) == 0 ? 0 : upto(most));
        // Equal, with context, fewer keys than queries (rows that see nothing), none.
        const int kind = upto(3);
        b.keys.push_back(kind == 0   ? b.queries.back()
                         : kind == 1 ? b.queries.back() + upto(most)
                         : kind == 2 ? upto(b.queries.back())
                                     : upto(1) * upto(most));
      }
      Problem p(b, static_cast<uint32_t>(round));
      p.run();
      ASSERT_EQ(compare(p), "") << name(b);
      const std::vector<uint32_t> out = p.out_bits(), lse = p.lse_bits();
      for (int again = 0; again < 3; ++again) {
        p.run();
        ASSERT_EQ(p.out_bits(), out) << name(b);
        ASSERT_EQ(p.lse_bits(), lse) << name(b);
      }
      ASSERT_EQ(p.workspace.download(), std::vector<int32_t>(4, 0));
    }
  }
}

/// Any bound, of either sign: rows that see nothing, whole items that do, items without keys, padding between them.
TEST_F(AttendExpanded, ItemsOfAnyVisibility) {
  constexpr int32_t least = std::numeric_limits<int32_t>::min(), most = std::numeric_limits<int32_t>::max();
  for (Batch b : kinds())
    for (const bool accumulate : {false, true}) {
      b.accumulate = accumulate;
      b.no_lse = false;
      b.padded = true;
      b.lse_by_head = !accumulate;
      b.heads = 3;
      b.before = 5;
      b.after = 70;
      b.queries = {200, 0, 1, 130, 65, 300, 64, 64, 90, 7, 400};
      b.keys = {300, 9, 77, 130, 200, 100, 0, 64, 90, 250, 450};
      b.visible = {0, 3, ExpandedItem::everything(), -70, 40, -150, 12, least, most, -8, -400};
      Problem p(b, 17);
      p.run();
      ASSERT_EQ(compare(p), "") << name(b);
      if (accumulate) continue;
      b.lse_by_head = false;
      b.no_lse = true;
      Problem silent(b, 18);
      silent.run();
      ASSERT_EQ(compare(silent), "") << name(b) << " without lse";
    }
}

/// Chunks of a context one after another, then the causal part: what they make together is one softmax.
TEST_F(AttendExpanded, PartsMergeIntoTheWhole) {
  for (Batch b : kinds()) {
    b.heads = 2;
    b.queries = {300, 77};
    b.keys = {1000, 400};
    b.visible = {700, 323};
    Problem p(b, 19);
    p.run();
    const std::string whole = compare(p);
    ASSERT_EQ(whole, "") << name(b);
    p.poison_outputs();
    std::vector<std::vector<ExpandedItem>> parts{
        {{0, 300, 0, 129, ExpandedItem::everything()}, {300, 77, 1000, 300, 323}},
        {{0, 300, 129, 571, ExpandedItem::everything()}, {0, 0, 0, 0, 0}},
        {{300, 77, 1300, 100, 23}, {0, 300, 700, 300, 0}}};
    for (size_t i = 0; i < parts.size(); ++i) {
      for (ExpandedItem& item : parts[i]) {
        const size_t request = item.q_begin < 300 ? 0 : 1;
        item.masked = b.masks(request);
        if (item.masked) item.mask_begin = b.mask_begin(request) + item.k_begin - p.k_start[request];
      }
      p.items_dev.upload(parts[i]);
      AttendExpandedArgs a = p.args();
      a.item_count = 2;
      a.most_queries = 300;
      a.accumulate = i > 0;
      sm90::attend_expanded(nullptr, a);
    }
    check(cudaDeviceSynchronize(), "test", "attend_expanded");
    if (b.out == Dtype::f32) {
      ASSERT_EQ(compare(p), "") << name(b) << " in parts";
    }
  }
}

/// Outputs of the other 16-bit type, and merging random rows with what random rows hold.
TEST_F(AttendExpanded, MergesIntoEveryOutputType) {
  std::mt19937 random(23);
  const auto upto = [&](int n) { return static_cast<int32_t>(random() % static_cast<uint32_t>(n + 1)); };
  for (Batch b : kinds())
    for (const Dtype out : {Dtype::bf16, Dtype::f16, Dtype::f32})
      for (const bool accumulate : {false, true}) {
        if (b.masked > 0 && out == Dtype::f16) continue;
        b.out = out;
        b.accumulate = accumulate;
        b.heads = 1 + upto(4);
        b.before = upto(3);
        b.after = upto(80);
        b.queries.clear();
        b.keys.clear();
        b.visible.clear();
        for (int r = 0, n = 1 + upto(6); r < n; ++r) {
          b.queries.push_back(upto(300));
          b.keys.push_back(upto(4) ? upto(500) : 0);
          b.visible.push_back(upto(1) ? ExpandedItem::everything() : upto(400) - 200);
        }
        Problem p(b, static_cast<uint32_t>(random()));
        p.run();
        ASSERT_EQ(compare(p), "") << name(b);
      }
}

/// A step without any cached or new keys.
TEST_F(AttendExpanded, NoKeysAtAll) {
  for (Batch b : kinds())
    for (const bool accumulate : {false, true}) {
      b.accumulate = accumulate;
      b.queries = {100};
      b.keys = {0};
      Problem p(b, 2);
      AttendExpandedArgs a = p.args();
      a.k_nope = {b.dtype, nullptr, {0, b.heads, b.dims.nope}};
      a.k_pe = {b.dtype, nullptr, {0, b.dims.rope}};
      a.v = {b.dtype, nullptr, {0, b.heads, b.dims.value}};
      p.poison_outputs();
      sm90::attend_expanded(nullptr, a);
      check(cudaDeviceSynchronize(), "test", "attend_expanded");
      ASSERT_EQ(compare(p), "") << name(b);
    }
}

/// Codes and scales of every format, of ragged items, with and without what their rows already hold.
TEST_F(AttendExpanded, LastPartsBecomeCodes) {
  std::mt19937 random(41);
  for (const Batch& b : kinds())
    for (const bool accumulate : {false, true}) {
      if (b.dtype != Dtype::bf16 || b.tile == sm90::ExpandedTile::rows_192) continue;
      Problem p(for_codes(b, accumulate), static_cast<uint32_t>(random()));
      ASSERT_EQ(compare_codes(p, static_cast<uint32_t>(random())), "") << name(p.batch);
    }
}

TEST_F(AttendExpanded, LongRequests) {
  for (Batch b : kinds()) {
    if (b.dtype != Dtype::bf16 || b.out != Dtype::bf16) continue;
    b.queries = {2100, 5, 1000};
    b.keys = {2100, 3000, 1111};
    b.heads = 20;
    Problem p(b, 3);
    p.run();
    ASSERT_EQ(compare(p), "") << name(b);
    b.causal = false;
    Problem whole(b, 4);
    whole.run();
    ASSERT_EQ(compare(whole), "") << name(b);
  }
}

/// Scores that grow along the keys, steeply and by less than the lazy rescale waits for.
TEST_F(AttendExpanded, RisingScores) {
  for (Batch b : kinds())
    for (const float slope : {0.002f, 0.05f, 0.5f, 2.0f}) {
      b.queries = b.keys = {600};
      b.heads = 3;
      b.causal = false;
      Problem p(b, 5);
      for (int64_t t = 0; t < p.tokens; ++t)
        for (int h = 0; h < b.heads; ++h)
          p.q[static_cast<size_t>((t * b.heads + h) * p.qk + b.dims.nope)] = rounded(b.dtype, 14.0f);
      // The kernel walks the keys from the last to the first.
      for (int64_t j = 0; j < p.keys; ++j)
        p.k_pe[static_cast<size_t>(j * 64)] = rounded(b.dtype, -slope * static_cast<float>(j));
      p.upload();
      p.run();
      ASSERT_EQ(compare(p), "") << name(b) << " slope " << slope;
    }
}

TEST_F(AttendExpanded, ARowsBitsDoNotDependOnItsNeighbours) {
  for (Batch b : kinds()) {
    b.queries = {100, 0, 250, 129, 64, 1};
    b.keys = {300, 20, 250, 0, 64, 77};
    b.heads = 3;
    b.after = 100;
    Problem together(b, 11);
    together.run();
    const std::vector<uint32_t> out = together.out_bits(), lse = together.lse_bits();
    const int64_t words = b.heads * together.words();
    for (size_t r = 0; r < b.queries.size(); ++r) {
      // Alone: the same rows of the same arrays, every other row NaN.
      Problem alone(b, 11);
      const auto keep = [](std::vector<uint16_t>& a, int64_t width, int64_t begin, int64_t end) {
        for (int64_t i = 0; i < static_cast<int64_t>(a.size()); ++i)
          if (i / width < begin || i / width >= end) a[static_cast<size_t>(i)] = nan16;
      };
      keep(alone.q, b.heads * alone.qk, together.q_start[r], together.q_start[r + 1]);
      keep(alone.k_v, b.heads * alone.kv, together.k_start[r], together.k_start[r + 1]);
      keep(alone.k_pe, b.dims.rope, together.k_start[r], together.k_start[r + 1]);
      alone.upload();
      const std::vector<ExpandedItem> items = items_of(b, together.q_start, together.k_start);
      alone.items_dev = DeviceArray<ExpandedItem>(std::vector<ExpandedItem>{items[r]});
      alone.run();
      const std::vector<uint32_t> out1 = alone.out_bits(), lse1 = alone.lse_bits();
      for (int64_t t = 0; t < together.tokens; ++t) {
        const bool mine = t >= together.q_start[r] && t < together.q_start[r + 1];
        for (int64_t i = t * words; i < (t + 1) * words; ++i)
          ASSERT_EQ(out1[static_cast<size_t>(i)], mine ? out[static_cast<size_t>(i)] : sentinel)
              << name(b) << " request " << r << " token " << t;
        for (int64_t i = t * b.heads; i < (t + 1) * b.heads; ++i)
          ASSERT_EQ(lse1[static_cast<size_t>(i)], mine ? lse[static_cast<size_t>(i)] : sentinel)
              << name(b) << " request " << r;
      }
    }
  }
}

/// Keys and values that a mask hides may be anything; a row that sees a value that is no number becomes NaN.
TEST_F(AttendExpanded, HiddenKeysReachNobody) {
  for (Batch b : kinds()) {
    if (b.masked == 0) continue;
    b.masked = 0.5;
    b.queries = {333, 70};
    b.keys = {600, 500};
    b.heads = 3;
    b.after = 3;
    Problem p(b, 71);
    p.run();
    const std::vector<uint32_t> out = p.out_bits(), lse = p.lse_bits();
    const int64_t words = b.heads * p.words();
    // A value of one head, and a key of all: of the first request's keys 40, 41, 300 and 577.
    for (const int64_t key : {40, 41, 300, 577}) {
      const size_t value = static_cast<size_t>((key * b.heads + 1) * p.kv + b.dims.nope + key % b.dims.value);
      p.k_v[value] = key == 300 ? uint16_t{0x7f80} : nan16;
    }
    for (int64_t i = 0; i < b.dims.rope; ++i) p.k_pe[static_cast<size_t>(123 * b.dims.rope + i)] = nan16;
    p.upload();
    p.run();
    const std::vector<uint32_t> out1 = p.out_bits();
    int64_t clean = 0, poisoned = 0;
    for (int64_t t = 0; t < 403; ++t)
      for (int64_t h = 0; h < b.heads; ++h) {
        const int64_t seen = t + 1 + 600 - 333;
        bool bad = false;
        if (t < 333) {
          for (const int64_t key : {40, 41, 300, 577}) bad |= h == 1 && key < seen && p.names(0, t, key);
          if (p.names(0, t, 123)) continue;  // a score that is no number: a NaN row, too, in whatever way
        }
        for (int64_t i = t * words + h * p.words(); i < t * words + (h + 1) * p.words(); ++i) {
          if (!bad) ASSERT_EQ(out1[static_cast<size_t>(i)], out[static_cast<size_t>(i)]) << name(b) << " token " << t;
          else if (b.out == Dtype::f32)
            ASSERT_TRUE(std::isnan(std::bit_cast<float>(out1[static_cast<size_t>(i)]))) << name(b) << " token " << t;
          else
            for (const int shift : {0, 16})
              ASSERT_TRUE(std::isnan(value_of(b.out, static_cast<uint16_t>(out1[static_cast<size_t>(i)] >> shift))))
                  << name(b) << " token " << t;
        }
        (bad ? poisoned : clean) += 1;
      }
    EXPECT_TRUE(clean > 300 && poisoned > 30) << clean << " clean, " << poisoned << " poisoned";
  }
}

TEST_F(AttendExpanded, TilesOf128And256RowsGiveTheSameBits) {
  for (Batch b : kinds()) {
    if (b.tile != sm90::ExpandedTile::rows_256) continue;
    b.queries = {700, 0, 129, 64, 1, 300};
    b.keys = {900, 20, 129, 0, 77, 100};
    b.heads = 3;
    b.accumulate = b.out == Dtype::f32;
    Problem p(b, 31);
    p.run();
    const std::vector<uint32_t> out = p.out_bits(), lse = p.lse_bits();
    p.batch.tile = sm90::ExpandedTile::rows_128;
    p.run();
    EXPECT_EQ(p.out_bits(), out) << name(b);
    EXPECT_EQ(p.lse_bits(), lse) << name(b);
  }
}

TEST_F(AttendExpanded, ACapturedLaunchServesOtherLengths) {
  Batch b{.queries = {300, 300, 300}, .keys = {400, 400, 400}, .heads = 4};
  Problem p(b, 21);
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  check(cudaStreamCreate(&stream), "test", "stream");
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "test", "capture");
  sm90::attend_expanded(stream, p.args());
  check(cudaStreamEndCapture(stream, &graph), "test", "capture");
  check(cudaGraphInstantiate(&exec, graph, 0), "test", "instantiate");
  for (const auto& [queries, keys] :
       std::vector<std::pair<std::vector<int32_t>, std::vector<int32_t>>>{{{300, 300, 300}, {400, 400, 400}},
                                                                          {{1, 700, 0}, {500, 700, 0}},
                                                                          {{0, 0, 0}, {0, 0, 0}},
                                                                          {{899, 1, 0}, {1000, 200, 0}}}) {
    p.batch.queries = queries;
    p.batch.keys = keys;
    p.q_start = p.batch.starts(queries);
    p.k_start = p.batch.starts(keys);
    p.items_dev.upload(items_of(p.batch, p.q_start, p.k_start));
    p.poison_outputs();
    check(cudaGraphLaunch(exec, stream), "test", "replay");
    check(cudaStreamSynchronize(stream), "test", "replay");
    ASSERT_EQ(compare(p), "") << name(p.batch);
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST_F(AttendExpanded, BadArgumentsAreTypedErrors) {
  Batch b{.queries = {10}, .keys = {10}};
  Problem p(b, 1);
  const auto with = [&](auto change) {
    AttendExpandedArgs a = p.args();
    change(a);
    sm90::attend_expanded(nullptr, a);
  };
  EXPECT_THROW(with([&](AttendExpandedArgs& a) { a.k_pe = {Dtype::bf16, p.k_pe_dev.data(), {9, 64}}; }), ShapeError);
  EXPECT_THROW(with([&](AttendExpandedArgs& a) { a.v = {Dtype::f16, p.k_v_dev.data(), {10, 2, 128}}; }), ShapeError);
  EXPECT_THROW(with([&](AttendExpandedArgs& a) {
                 a.k_nope = {Dtype::bf16, p.k_v_dev.data() + 1, {10, 2, 128}, {512, 256, 1}};
               }),
               ShapeError);
  EXPECT_THROW(with([&](AttendExpandedArgs& a) { a.scale = 0.0f; }), ShapeError);
  const DeviceArray<uint32_t> mask(std::vector<uint32_t>(20)), columns(std::vector<uint32_t>(40));
  const auto with_mask = [&](auto change) {
    with([&](AttendExpandedArgs& a) {
      a.mask = {mask.data(), {10, 2}};
      a.columns = columns.data();
      change(a);
    });
  };
  EXPECT_THROW(with_mask([&](AttendExpandedArgs& a) { a.mask = {mask.data(), {9, 2}}; }), ShapeError);
  EXPECT_THROW(with_mask([&](AttendExpandedArgs& a) { a.mask = {mask.data(), {10, 1}, {2, 2}}; }), ShapeError);
  EXPECT_THROW(with_mask([&](AttendExpandedArgs& a) { a.most_masked_keys = 11; }), ShapeError);
  EXPECT_THROW(with_mask([&](AttendExpandedArgs& a) { a.columns = nullptr; }), ShapeError);
  EXPECT_THROW(with_mask([&](AttendExpandedArgs& a) { a.tile = sm90::ExpandedTile::rows_192; }), UnsupportedError);
  EXPECT_THROW(with([&](AttendExpandedArgs& a) { a.workspace = nullptr; }), ShapeError);
  EXPECT_THROW(with([&](AttendExpandedArgs& a) { a.items = nullptr; }), ShapeError);
  EXPECT_THROW(with([&](AttendExpandedArgs& a) { a.item_count = -1; }), ShapeError);
  EXPECT_THROW(with([&](AttendExpandedArgs& a) { a.most_queries = 11; }), ShapeError);
  EXPECT_THROW(with([&](AttendExpandedArgs& a) {
                 a.tile = sm90::ExpandedTile::rows_192;
                 a.q = {Dtype::bf16, p.q_dev.data(), {10, 2, 256}};
                 a.k_nope = {Dtype::bf16, p.k_v_dev.data(), {10, 2, 192}, {512, 256, 1}};
                 a.v = {Dtype::bf16, p.k_v_dev.data(), {10, 2, 256}, {512, 256, 1}};
                 a.out = {Dtype::bf16, p.out_dev.data(), {10, 2, 256}};
               }),
               UnsupportedError);
  EXPECT_THROW(with([&](AttendExpandedArgs& a) {
                 a.accumulate = true;
                 a.lse = {};
               }),
               ShapeError);
  EXPECT_THROW(with([&](AttendExpandedArgs& a) {
                 a.out = {Dtype::fp8_e4m3, p.out_dev.data(), {10, 2, 128}};
               }),
               UnsupportedError);
  EXPECT_THROW(with([&](AttendExpandedArgs& a) {
                 a.q = {Dtype::bf16, p.q_dev.data(), {10, 2, 128}};
                 a.k_nope = {Dtype::bf16, p.k_v_dev.data(), {10, 2, 64}, {512, 256, 1}};
               }),
               UnsupportedError);
  EXPECT_THROW(with([&](AttendExpandedArgs& a) {
                 a.q = {Dtype::f32, p.q_dev.data(), {10, 2, 192}};
               }),
               UnsupportedError);
}

}  // namespace
}  // namespace mla::cuda
