// attend_expanded of e4m3 operands on Hopper against float64: ragged items, scales, merging, poison, bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <thread>

#include "backend/cuda/sm90/attend_expanded/fp8.hpp"
#include "cuda/device.hpp"
#include "cuda/expanded_codes.hpp"
#include "cuda/expanded_fp8.hpp"

namespace mla::cuda {
namespace {

using test::compare_codes;
using test::DeviceArray;
using test::for_codes;
using test::have_hopper;

using sm90::AttendExpandedFp8Args;
using sm90::ExpandedTile;

constexpr double inf = std::numeric_limits<double>::infinity();
constexpr uint8_t nan8 = 0xff;
constexpr uint32_t sentinel = 0x7fc0dead;

enum class Share { all, head, rows };  // of scales

struct Dims {
  int nope = 128, rope = 64, value = 128;
};

struct Batch {
  std::vector<int32_t> queries, keys;  // lengths per item
  int heads = 2;
  bool causal = true;  // aligned at the ends, or everything visible
  Dims dims{};
  Dtype out = Dtype::bf16;
  ExpandedTile tile = ExpandedTile::automatic;
  Share share = Share::all;
  ops::ExpandedSums sums = ops::ExpandedSums::precise;
  int before = 0, after = 0;     // rows of no item around the batch's rows, poisoned
  std::vector<int32_t> visible;  // per item, in place of `causal`
  bool accumulate = false, padded = false;

  std::vector<int32_t> q_starts() const {
    std::vector<int32_t> s{before};
    for (int32_t n : queries) s.push_back(s.back() + n);
    return s;
  }
  /// Multiples of 16; the last is where the last item's keys end.
  std::vector<int32_t> k_starts() const {
    std::vector<int32_t> s;
    int32_t end = before;
    for (int32_t n : keys) {
      s.push_back((end + 15) / 16 * 16);
      end = s.back() + n;
    }
    s.push_back(end);
    return s;
  }
  int32_t visible_of(size_t item) const {
    if (!visible.empty()) return visible[item];
    return causal ? keys[item] - queries[item] : ExpandedItem::everything();
  }
};

double of_code(uint8_t x) { return to_float(fp8_e4m3{x}); }

/// The items of a batch and their scales' rows; padding says absurd things about its keys.
struct Items {
  std::vector<ExpandedItem> items;
  std::vector<ops::ScaleRows> scales, of_request;  // of every item, of the batch's
  int32_t q_groups = 0, k_groups = 0;
  Items(const Batch& b, const std::vector<int32_t>& q_start, const std::vector<int32_t>& k_start) {
    const ExpandedItem none{.q_begin = 1 << 30, .k_begin = -(1 << 30), .k_count = 1 << 30};
    const auto pad = [&](int count) {
      items.insert(items.end(), static_cast<size_t>(count), none);
      scales.insert(scales.end(), static_cast<size_t>(count), ops::ScaleRows{1 << 30, 1 << 30});
    };
    for (size_t r = 0; r < b.queries.size(); ++r) {
      if (b.padded && r % 2 == 0) pad(1);
      items.push_back({q_start[r], b.queries[r], k_start[r], b.keys[r], b.visible_of(r)});
      of_request.push_back({q_groups, k_groups});
      scales.push_back(of_request.back());
      q_groups += (b.queries[r] + 127) / 128 + 1;  // one that nothing reads
      k_groups += (b.keys[r] + 127) / 128 + 1;
    }
    if (b.padded) pad(40);
  }
};

/// A batch on the device: q [tokens, heads, P + R], k_nope [keys, heads, P], k_pe [keys, R], v [heads, V, pitch].
/// Arrays end with the last key.
struct Problem {
  Batch batch;
  std::vector<int32_t> q_start, k_start;
  Items items;
  int64_t tokens, keys, qk, pitch;
  float scale;
  std::vector<uint8_t> q, k, k_pe, v;
  std::vector<float> q_scale, k_scale, v_scale;
  std::vector<uint32_t> out_before;  // bits of what the outputs hold before the run
  std::vector<float> lse_before;
  DeviceArray<uint8_t> q_dev, k_dev, k_pe_dev, v_dev;
  DeviceArray<float> q_scale_dev, k_scale_dev, v_scale_dev;
  DeviceArray<uint32_t> out_dev;  // bits; two 16-bit outputs share a word
  DeviceArray<float> lse_dev;
  DeviceArray<ExpandedItem> items_dev;
  DeviceArray<ops::ScaleRows> rows_dev;
  DeviceArray<int32_t> workspace;

  explicit Problem(const Batch& b, uint32_t seed)
      : batch(b), q_start(b.q_starts()), k_start(b.k_starts()), items(b, q_start, k_start) {
    const Dims d = b.dims;
    tokens = q_start.back() + b.after;
    keys = std::max(k_start.back() + b.after, 1);
    qk = d.nope + d.rope;
    pitch = (keys + 15) / 16 * 16;
    scale = 1.0f / std::sqrt(static_cast<float>(qk));
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<uint8_t>& a, int64_t width, int64_t begin, int64_t end, float size) {
      for (int64_t i = begin * width; i < end * width; ++i)
        a[static_cast<size_t>(i)] = to_fp8_e4m3(size * normal(random)).bits;
    };
    q.assign(static_cast<size_t>(tokens * b.heads * qk), nan8);
    k.assign(static_cast<size_t>(keys * b.heads * d.nope), nan8);
    k_pe.assign(static_cast<size_t>(keys * d.rope), nan8);
    v.assign(static_cast<size_t>(b.heads * d.value * pitch), nan8);
    fill(q, b.heads * qk, q_start.front(), q_start.back(), 80.0f);
    for (size_t r = 0; r < b.keys.size(); ++r) {
      const int64_t begin = k_start[r], end = k_end(r);
      fill(k, int64_t{b.heads} * d.nope, begin, end, 40.0f);
      fill(k_pe, d.rope, begin, end, 40.0f);
      for (int64_t row = 0; row < int64_t{b.heads} * d.value; ++row)
        for (int64_t j = begin; j < end; ++j)
          v[static_cast<size_t>(row * pitch + j)] = to_fp8_e4m3(40.0f * normal(random)).bits;
    }
    const auto scales = [&](std::vector<float>& x, int32_t groups, bool last_of_item(const Items&, int32_t)) {
      const bool rows = b.share == Share::rows;
      x.resize(static_cast<size_t>((rows ? groups : 1) * b.heads));
      for (float& s : x) s = (0.5f + static_cast<float>(random() % 1024) / 1024) / 40;
      for (int32_t g = 0; rows && g < groups; ++g)
        if (last_of_item(items, g))
          for (int h = 0; h < b.heads; ++h)
            x[static_cast<size_t>(g * b.heads + h)] = std::numeric_limits<float>::quiet_NaN();
    };
    // An item's last group is one that nothing reads.
    const auto unread_q = [](const Items& i, int32_t g) {
      return g + 1 == i.q_groups || std::ranges::any_of(i.of_request, [&](auto r) { return r.q == g + 1; });
    };
    const auto unread_k = [](const Items& i, int32_t g) {
      return g + 1 == i.k_groups || std::ranges::any_of(i.of_request, [&](auto r) { return r.k == g + 1; });
    };
    scales(q_scale, items.q_groups, unread_q);
    scales(k_scale, items.k_groups, unread_k);
    scales(v_scale, items.k_groups, unread_k);
    upload();
    lse_dev = DeviceArray<float>(static_cast<size_t>(tokens * b.heads));
    out_dev = DeviceArray<uint32_t>(static_cast<size_t>(tokens * b.heads * words()));
    items_dev = DeviceArray<ExpandedItem>(items.items);
    rows_dev = DeviceArray<ops::ScaleRows>(items.scales);
    lse_before.assign(static_cast<size_t>(tokens * b.heads), std::bit_cast<float>(sentinel));
    out_before.assign(out_dev.size(), sentinel);
    for (int64_t row = q_start.front() * b.heads; b.accumulate && row < q_start.back() * b.heads; ++row) {
      float& lse = lse_before[static_cast<size_t>(row)];
      lse = 4 + 4 * normal(random);
      const uint32_t kind = random() % 16;
      if (kind < 2) {  // holds nothing: out stays NaN
        lse = static_cast<float>(kind == 0 ? -inf : inf);
        continue;
      }
      if (kind == 3) lse = random() % 2 ? 1e5f : -1e5f;
      for (int64_t i = row * words(); i < (row + 1) * words(); ++i) {
        const float x = normal(random), y = normal(random);
        out_before[static_cast<size_t>(i)] = b.out == Dtype::f32
                                                 ? std::bit_cast<uint32_t>(x)
                                                 : uint32_t{to_bf16(y).bits} << 16 | uint32_t{to_bf16(x).bits};
      }
    }
    workspace = DeviceArray<int32_t>(std::vector<int32_t>(4, 0));
  }

  int64_t k_end(size_t item) const { return k_start[item] + batch.keys[item]; }
  int64_t words() const { return batch.dims.value / (batch.out == Dtype::f32 ? 1 : 2); }  // of an output row
  void upload() {
    q_dev = DeviceArray<uint8_t>(q);
    k_dev = DeviceArray<uint8_t>(k);
    k_pe_dev = DeviceArray<uint8_t>(k_pe);
    v_dev = DeviceArray<uint8_t>(v);
    q_scale_dev = DeviceArray<float>(q_scale);
    k_scale_dev = DeviceArray<float>(k_scale);
    v_scale_dev = DeviceArray<float>(v_scale);
  }
  double scale_of(const std::vector<float>& x, int32_t group, int64_t row, int64_t head) const {
    if (batch.share == Share::all) return x[0];
    if (batch.share == Share::head) return x[static_cast<size_t>(head)];
    return x[static_cast<size_t>((group + row / 128) * batch.heads + head)];
  }

  AttendExpandedFp8Args args() const {
    const Dims d = batch.dims;
    const int64_t h = batch.heads;
    AttendExpandedFp8Args a;
    a.q = {Dtype::fp8_e4m3, q_dev.data(), {tokens, h, qk}};
    a.k_nope = {Dtype::fp8_e4m3, k_dev.data(), {keys, h, d.nope}};
    a.k_pe = {Dtype::fp8_e4m3, k_pe_dev.data(), {keys, d.rope}};
    a.v = {Dtype::fp8_e4m3, v_dev.data(), {keys, h, d.value}, {1, d.value * pitch, pitch}};
    const auto scales = [&](const DeviceArray<float>& x) -> View<const float, Group, Head> {
      return {x.data(),
              {static_cast<int64_t>(x.size()) / h, h},
              {batch.share == Share::rows ? h : 0, batch.share == Share::all ? 0 : 1}};
    };
    a.q_scale = scales(q_scale_dev);
    a.k_scale = scales(k_scale_dev);
    a.v_scale = scales(v_scale_dev);
    if (batch.share == Share::rows) a.scale_rows = rows_dev.data();
    a.sums = batch.sums;
    a.items = items_dev.data();
    a.item_count = static_cast<int64_t>(items_dev.size());
    a.scale = scale;
    a.out = {batch.out, out_dev.data(), {tokens, h, d.value}};
    a.lse = {lse_dev.data(), {tokens, h}};
    a.accumulate = batch.accumulate;
    a.tile = batch.tile;
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
    std::vector<uint32_t> bits;
    for (float x : lse_dev.download()) bits.push_back(std::bit_cast<uint32_t>(x));
    return bits;
  }
  double out_value(const std::vector<uint32_t>& bits, int64_t i) const {
    if (batch.out == Dtype::f32) return std::bit_cast<float>(bits[static_cast<size_t>(i)]);
    return to_float(bf16{static_cast<uint16_t>(bits[static_cast<size_t>(i / 2)] >> (16 * (i % 2)))});
  }
};

/// Compares every row with float64 (expanded_fp8.hpp has the bounds). Merging weighs both parts by exponentials of
/// differences of lse, whose own error is as large.
std::string compare(const Problem& p) {
  const Batch& b = p.batch;
  const Dims d = b.dims;
  const std::vector<uint32_t> out = p.out_bits();
  const std::vector<float> lse = p.lse_dev.download();
  const double unit = b.out == Dtype::f32 ? 0x1p-24 : 0x1p-8;
  std::vector<int> request_of(static_cast<size_t>(p.tokens), -1);
  for (size_t r = 0; r < b.queries.size(); ++r)
    for (int32_t t = p.q_start[r]; t < p.q_start[r + 1]; ++t) request_of[static_cast<size_t>(t)] = static_cast<int>(r);
  double codes[256];
  for (int i = 0; i < 256; ++i) codes[i] = of_code(static_cast<uint8_t>(i));

  const unsigned workers = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::string> failures(workers);
  const auto work = [&](unsigned worker) {
    std::string& failure = failures[worker];
    for (int64_t row = worker; row < p.tokens * b.heads && failure.empty(); row += workers) {
      const int64_t token = row / b.heads, head = row % b.heads;
      const int r = request_of[static_cast<size_t>(token)];
      const auto fail = [&](const std::string& what, double got, double want, double bound) {
        failure = what + " token " + std::to_string(token) + " (request " + std::to_string(r) + ") head " +
                  std::to_string(head) + ": " + std::to_string(got) + ", expected " + std::to_string(want) +
                  " within " + std::to_string(bound);
      };
      const double got_lse = lse[static_cast<size_t>(row)];
      if (r < 0) {  // untouched
        if (std::bit_cast<uint32_t>(lse[static_cast<size_t>(row)]) != sentinel) fail("lse of no item", got_lse, 0, 0);
        for (int64_t i = row * p.words(); i < (row + 1) * p.words(); ++i)
          if (out[static_cast<size_t>(i)] != sentinel) fail("out of no item", 0, 0, 0);
        continue;
      }
      const auto request = static_cast<size_t>(r);
      const int64_t i = token - p.q_start[request], nk = b.keys[request], first = p.k_start[request];
      const int64_t seen = std::clamp<int64_t>(i + 1 + b.visible_of(request), 0, nk);
      const ops::ScaleRows rows = p.items.of_request[request];
      std::vector<double> s(static_cast<size_t>(seen));
      for (int64_t j = 0; j < seen; ++j) {
        const uint8_t* qr = &p.q[static_cast<size_t>(row * p.qk)];
        const uint8_t* kr = &p.k[static_cast<size_t>(((first + j) * b.heads + head) * d.nope)];
        const uint8_t* er = &p.k_pe[static_cast<size_t>((first + j) * d.rope)];
        double dot = 0;
        for (int e = 0; e < d.nope; ++e) dot += codes[qr[e]] * codes[kr[e]];
        for (int e = 0; e < d.rope; ++e) dot += codes[qr[d.nope + e]] * codes[er[e]];
        s[static_cast<size_t>(j)] =
            dot * p.scale * p.scale_of(p.q_scale, rows.q, i, head) * p.scale_of(p.k_scale, rows.k, j, head);
      }
      const double chain = static_cast<double>(b.sums == ops::ExpandedSums::raw ? seen : std::min<int64_t>(seen, 512));
      const test::Fp8Row part(
          s, d.value,
          [&](int64_t j, int64_t e) {
            return codes[p.v[static_cast<size_t>((head * d.value + e) * p.pitch + first + j)]] *
                   p.scale_of(p.v_scale, rows.k, j, head);
          },
          std::ceil(chain / 32), unit);
      double before = b.accumulate ? static_cast<double>(p.lse_before[static_cast<size_t>(row)]) : -inf;
      if (!(before < inf)) before = -inf;
      const double most = std::max(before, part.lse);
      const double whole = most > -inf ? std::exp(before - most) + std::exp(part.lse - most) : 0;
      const double keep = whole > 0 ? std::exp(before - most) / whole : 0,
                   take = whole > 0 ? std::exp(part.lse - most) / whole : 0;
      const double want_lse = whole > 0 ? most + std::log(whole) : -inf,
                   lse_bound = part.lse_bound + 2e-5 * (1 + std::abs(most));
      if (whole > 0 ? !(std::abs(got_lse - want_lse) <= lse_bound) : got_lse != want_lse)
        fail("lse", got_lse, want_lse, lse_bound);
      for (int e = 0; e < d.value && failure.empty(); ++e) {
        const auto at = static_cast<size_t>(e);
        const double got = p.out_value(out, row * d.value + e);
        const double old = keep > 0 ? p.out_value(p.out_before, row * d.value + e) : 0;
        const double mine = take > 0 ? take * part.out[at] : 0, want = mine + keep * old;
        const double merged = keep > 0 && take > 0 ? 2 * lse_bound * (std::abs(mine) + std::abs(keep * old)) : 0;
        const double bound = whole > 0 ? take * part.out_bound[at] + unit * std::abs(want) + merged + 1e-7 : 0;
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

class AttendExpandedFp8 : public testing::Test {
 protected:
  void SetUp() override {
    if (!have_hopper()) GTEST_SKIP() << "no CUDA device of compute capability 9.0";
  }
};

std::vector<Batch> kinds() {
  using enum ExpandedTile;
  const auto batch = [](Dims d, Dtype out, ExpandedTile tile, Share share, ops::ExpandedSums sums) {
    Batch b;
    b.dims = d;
    b.out = out;
    b.tile = tile;
    b.share = share;
    b.sums = sums;
    return b;
  };
  const Dims deepseek{128, 64, 128}, glm{192, 64, 256};
  const auto precise = ops::ExpandedSums::precise, raw = ops::ExpandedSums::raw;
  return {batch(deepseek, Dtype::bf16, rows_128, Share::rows, precise),
          batch(deepseek, Dtype::f32, rows_256, Share::head, precise),
          batch(deepseek, Dtype::bf16, rows_256, Share::rows, raw),
          batch(glm, Dtype::f32, rows_128, Share::rows, precise),
          batch(glm, Dtype::bf16, rows_256, Share::all, precise)};
}

std::string name(const Batch& b) {
  std::string text = std::to_string(b.dims.nope) + "/" + std::to_string(b.dims.value) + " to " +
                     std::string(to_string(b.out)) + ", tile " + std::to_string(static_cast<int>(b.tile)) +
                     ", scales " + std::to_string(static_cast<int>(b.share)) + (b.causal ? " causal" : "") +
                     (b.accumulate ? " merged" : "") + ", heads " + std::to_string(b.heads) + ", q";
  for (int32_t n : b.queries) text += " " + std::to_string(n);
  text += ", k";
  for (int32_t n : b.keys) text += " " + std::to_string(n);
  if (!b.visible.empty()) text += ", visible";
  for (int32_t n : b.visible) text += " " + std::to_string(n);
  return text;
}

TEST_F(AttendExpandedFp8, SingleRequestsOfEverySize) {
  for (Batch b : kinds())
    for (const int n : {1, 15, 63, 64, 65, 127, 128, 129, 200, 256, 640}) {
      b.queries = b.keys = {n};
      Problem p(b, static_cast<uint32_t>(n));
      p.run();
      ASSERT_EQ(compare(p), "") << name(b);
    }
}

TEST_F(AttendExpandedFp8, RaggedBatches) {
  std::mt19937 random(7);
  const auto upto = [&](int n) { return static_cast<int32_t>(random() % static_cast<uint32_t>(n + 1)); };
  for (Batch b : kinds())
    for (int round = 0; round < 12; ++round) {
      b.causal = round % 3 != 2;
      b.accumulate = round % 4 == 1;
      b.padded = round % 2 == 0;
      b.heads = 1 + upto(6);
      b.before = upto(3);
      b.after = upto(1) * upto(200);
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
      ASSERT_EQ(p.workspace.download(), std::vector<int32_t>(4, 0));
    }
}

TEST_F(AttendExpandedFp8, TwoHundredRunsGiveTheSameBits) {
  for (Batch b : kinds()) {
    b.queries = {300, 1, 129, 700, 0, 64};
    b.keys = {300, 500, 400, 1500, 70, 33};
    b.heads = 12;
    Problem p(b, 41);
    p.run();
    const std::vector<uint32_t> out = p.out_bits(), lse = p.lse_bits();
    for (int again = 0; again < 200; ++again) {
      p.run();
      ASSERT_EQ(p.out_bits(), out) << name(b) << " run " << again;
      ASSERT_EQ(p.lse_bits(), lse) << name(b) << " run " << again;
    }
  }
}

/// Any bound, of either sign: rows that see nothing, whole items that do, items without keys, padding between them.
TEST_F(AttendExpandedFp8, ItemsOfAnyVisibility) {
  constexpr int32_t least = std::numeric_limits<int32_t>::min(), most = std::numeric_limits<int32_t>::max();
  for (Batch b : kinds())
    for (const bool accumulate : {false, true}) {
      b.accumulate = accumulate;
      b.padded = true;
      b.heads = 3;
      b.before = 5;
      b.after = 70;
      b.queries = {200, 0, 1, 130, 65, 300, 64, 64, 90, 7, 400};
      b.keys = {300, 9, 77, 130, 200, 100, 0, 64, 90, 250, 450};
      b.visible = {0, 3, ExpandedItem::everything(), -70, 40, -150, 12, least, most, -8, -400};
      Problem p(b, 17);
      p.run();
      ASSERT_EQ(compare(p), "") << name(b);
    }
}

/// Chunks of a context one after another, then the causal part: what they make together is one softmax.
TEST_F(AttendExpandedFp8, PartsMergeIntoTheWhole) {
  for (Batch b : kinds()) {
    if (b.share == Share::rows) b.share = Share::head;  // the parts' rows of scales would not be the whole's
    b.queries = {300, 77};
    b.keys = {1000, 400};
    b.visible = {700, 323};
    b.out = Dtype::f32;
    Problem p(b, 19);
    p.poison_outputs();
    const std::vector<std::vector<ExpandedItem>> parts{
        {{0, 300, 0, 144, ExpandedItem::everything()}, {300, 77, 1008, 304, 323}},
        {{0, 300, 144, 560, 556}, {0, 0, 0, 0, 0}},
        {{300, 77, 1312, 96, 19}, {0, 300, 704, 296, -4}}};
    for (size_t i = 0; i < parts.size(); ++i) {
      p.items_dev.upload(parts[i]);
      AttendExpandedFp8Args a = p.args();
      a.item_count = 2;
      a.most_queries = 300;
      a.accumulate = i > 0;
      sm90::attend_expanded(nullptr, a);
    }
    check(cudaDeviceSynchronize(), "test", "attend_expanded");
    ASSERT_EQ(compare(p), "") << name(b) << " in parts";
  }
}

/// A step without any cached or new keys.
TEST_F(AttendExpandedFp8, NoKeysAtAll) {
  for (Batch b : kinds())
    for (const bool accumulate : {false, true}) {
      b.accumulate = accumulate;
      b.queries = {100};
      b.keys = {0};
      Problem p(b, 2);
      AttendExpandedFp8Args a = p.args();
      a.k_nope = {Dtype::fp8_e4m3, nullptr, {0, b.heads, b.dims.nope}};
      a.k_pe = {Dtype::fp8_e4m3, nullptr, {0, b.dims.rope}};
      a.v = {Dtype::fp8_e4m3, nullptr, {0, b.heads, b.dims.value}};
      p.poison_outputs();
      sm90::attend_expanded(nullptr, a);
      check(cudaDeviceSynchronize(), "test", "attend_expanded");
      ASSERT_EQ(compare(p), "") << name(b);
    }
}

/// Codes and scales of every format, of ragged items, with and without what their rows already hold.
TEST_F(AttendExpandedFp8, LastPartsBecomeCodes) {
  std::mt19937 random(41);
  for (const Batch& b : kinds())
    for (const bool accumulate : {false, true}) {
      Problem p(for_codes(b, accumulate), static_cast<uint32_t>(random()));
      ASSERT_EQ(compare_codes(p, static_cast<uint32_t>(random())), "") << name(p.batch);
    }
}

TEST_F(AttendExpandedFp8, LongRequests) {
  for (Batch b : kinds()) {
    b.queries = {2100, 5, 1000};
    b.keys = {2100, 3000, 1111};
    b.heads = 10;
    Problem p(b, 3);
    p.run();
    ASSERT_EQ(compare(p), "") << name(b);
    b.causal = false;
    Problem whole(b, 4);
    whole.run();
    ASSERT_EQ(compare(whole), "") << name(b);
  }
}

/// Scores that grow along the keys, steeply and by less than a reference may be exceeded by.
TEST_F(AttendExpandedFp8, RisingScores) {
  for (Batch b : kinds())
    for (const float slope : {0.25f, 1.0f, 8.0f}) {
      b.queries = b.keys = {600};
      b.heads = 3;
      b.causal = false;
      b.share = Share::all;
      Problem p(b, 5);
      for (int64_t t = 0; t < p.tokens; ++t)
        for (int h = 0; h < b.heads; ++h)
          p.q[static_cast<size_t>((t * b.heads + h) * p.qk + b.dims.nope)] = to_fp8_e4m3(448.0f).bits;
      // The kernel walks the keys from the last to the first.
      for (int64_t j = 0; j < p.keys; ++j)
        p.k_pe[static_cast<size_t>(j * 64)] = to_fp8_e4m3(std::max(-448.0f, -slope * static_cast<float>(j))).bits;
      p.upload();
      p.run();
      ASSERT_EQ(compare(p), "") << name(b) << " slope " << slope;
    }
}

/// NaN in a key or value that some rows see makes those rows NaN and moves no bit of the others.
TEST_F(AttendExpandedFp8, HiddenNanMovesNothing) {
  for (Batch b : kinds())
    for (const bool in_value : {false, true}) {
      b.queries = b.keys = {500};
      b.heads = 2;
      Problem p(b, 77);
      p.run();
      const std::vector<uint32_t> clean = p.out_bits(), clean_lse = p.lse_bits();
      const int64_t bad = 333, head = 1;
      if (in_value) p.v[static_cast<size_t>((head * b.dims.value + 7) * p.pitch + bad)] = 0x7f;
      else p.k[static_cast<size_t>((bad * b.heads + head) * b.dims.nope + 9)] = 0x7f;
      p.upload();
      p.run();
      const std::vector<uint32_t> out = p.out_bits(), lse = p.lse_bits();
      for (int64_t row = 0; row < p.tokens * b.heads; ++row) {
        const bool sees = row % b.heads == head && row / b.heads >= bad;
        if (sees) {
          ASSERT_TRUE(std::isnan(p.out_value(out, row * b.dims.value + (in_value ? 7 : 0)))) << row;
          continue;
        }
        for (int64_t i = row * p.words(); i < (row + 1) * p.words(); ++i)
          ASSERT_EQ(out[static_cast<size_t>(i)], clean[static_cast<size_t>(i)]) << name(b) << " row " << row;
        ASSERT_EQ(lse[static_cast<size_t>(row)], clean_lse[static_cast<size_t>(row)]);
      }
    }
}

TEST_F(AttendExpandedFp8, ARowsBitsDoNotDependOnItsNeighbours) {
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
      const auto keep = [](std::vector<uint8_t>& a, int64_t width, int64_t begin, int64_t end) {
        for (int64_t i = 0; i < static_cast<int64_t>(a.size()); ++i)
          if (i / width < begin || i / width >= end) a[static_cast<size_t>(i)] = nan8;
      };
      keep(alone.q, b.heads * alone.qk, together.q_start[r], together.q_start[r + 1]);
      keep(alone.k, int64_t{b.heads} * b.dims.nope, together.k_start[r], together.k_end(r));
      keep(alone.k_pe, b.dims.rope, together.k_start[r], together.k_end(r));
      for (int64_t i = 0; i < static_cast<int64_t>(alone.v.size()); ++i) {
        const int64_t j = i % alone.pitch;
        if (j < together.k_start[r] || j >= together.k_end(r)) alone.v[static_cast<size_t>(i)] = nan8;
      }
      alone.upload();
      alone.items_dev = DeviceArray<ExpandedItem>(std::vector<ExpandedItem>{together.items.items[r]});
      alone.rows_dev = DeviceArray<ops::ScaleRows>(std::vector<ops::ScaleRows>{together.items.scales[r]});
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

TEST_F(AttendExpandedFp8, TilesOf128And256RowsGiveTheSameBits) {
  for (Batch b : kinds()) {
    if (b.tile != ExpandedTile::rows_256) continue;
    b.queries = {700, 0, 129, 64, 1, 300};
    b.keys = {900, 20, 129, 0, 77, 100};
    b.heads = 3;
    b.accumulate = b.out == Dtype::f32;
    Problem p(b, 31);
    p.run();
    const std::vector<uint32_t> out = p.out_bits(), lse = p.lse_bits();
    p.batch.tile = ExpandedTile::rows_128;
    p.run();
    EXPECT_EQ(p.out_bits(), out) << name(b);
    EXPECT_EQ(p.lse_bits(), lse) << name(b);
  }
}

TEST_F(AttendExpandedFp8, ACapturedLaunchServesOtherLengths) {
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
                                                                          {{1, 700, 0}, {500, 688, 0}},
                                                                          {{0, 0, 0}, {0, 0, 0}},
                                                                          {{899, 1, 0}, {1000, 192, 0}}}) {
    p.batch.queries = queries;
    p.batch.keys = keys;
    p.q_start = p.batch.q_starts();
    p.k_start = p.batch.k_starts();
    p.items = Items(p.batch, p.q_start, p.k_start);
    p.items_dev.upload(p.items.items);
    p.poison_outputs();
    check(cudaGraphLaunch(exec, stream), "test", "replay");
    check(cudaStreamSynchronize(stream), "test", "replay");
    ASSERT_EQ(compare(p), "") << name(p.batch);
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST_F(AttendExpandedFp8, BadArgumentsAreTypedErrors) {
  Batch b{.queries = {10}, .keys = {16}};
  Problem p(b, 1);
  const auto with = [&](auto change) {
    AttendExpandedFp8Args a = p.args();
    change(a);
    sm90::attend_expanded(nullptr, a);
  };
  using A = AttendExpandedFp8Args;
  EXPECT_THROW(with([&](A& a) { a.k_pe = {Dtype::fp8_e4m3, p.k_pe_dev.data(), {9, 64}}; }), ShapeError);
  EXPECT_THROW(with([&](A& a) { a.v = {Dtype::fp8_e4m3, p.v_dev.data(), {16, 2, 128}}; }), ShapeError);
  EXPECT_THROW(with([&](A& a) {
                 a.v = {Dtype::fp8_e4m3, p.v_dev.data(), {16, 2, 128}, {1, 128 * 17, 17}};
               }),
               ShapeError);
  EXPECT_THROW(with([&](A& a) { a.k_nope = {Dtype::fp8_e4m3, p.k_dev.data() + 1, {16, 2, 128}}; }), ShapeError);
  EXPECT_THROW(with([&](A& a) { a.k_nope = {Dtype::bf16, p.k_dev.data(), {16, 2, 128}}; }), UnsupportedError);
  EXPECT_THROW(with([&](A& a) { a.scale = 0.0f; }), ShapeError);
  EXPECT_THROW(with([&](A& a) { a.workspace = nullptr; }), ShapeError);
  EXPECT_THROW(with([&](A& a) { a.items = nullptr; }), ShapeError);
  EXPECT_THROW(with([&](A& a) { a.item_count = -1; }), ShapeError);
  EXPECT_THROW(with([&](A& a) { a.most_queries = 11; }), ShapeError);
  EXPECT_THROW(with([&](A& a) { a.tile = ExpandedTile::rows_192; }), UnsupportedError);
  EXPECT_THROW(with([&](A& a) { a.accumulate = true, a.lse = {}; }), ShapeError);
  EXPECT_THROW(with([&](A& a) { a.out = {Dtype::f16, p.out_dev.data(), {10, 2, 128}}; }), UnsupportedError);
  EXPECT_THROW(with([&](A& a) {
                 a.q = {Dtype::fp8_e4m3, p.q_dev.data(), {10, 2, 128}};
                 a.k_nope = {Dtype::fp8_e4m3, p.k_dev.data(), {16, 2, 64}, {256, 128, 1}};
               }),
               UnsupportedError);
}

}  // namespace
}  // namespace mla::cuda
