// Attention over a caller's own device arrays (core/device_attention.hpp) against float64: its three forms, however
// their arrays lie, called and captured. What must not be read is NaN or a slot that does not exist; outputs, what lies
// beside them and the workspace are NaN before a run.
#include "core/device_attention.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "cuda/device_attention.hpp"
#include "mla/device.hpp"

namespace mla::test {
namespace {

// Paged.

struct PagedCase {
  friend void PrintTo(const PagedCase& c, std::ostream* to) { *to << c.name; }
  const char* name;
  CacheFormat format;
  Dtype q, out;
  int heads, queries, kv_heads = 1;
  bool causal = false;
  int page = 64;
  size_t page_gap = 0;
  std::vector<int> lengths = {300, 0, 1, 64, -5, 700};
  float q_scale = 0, k_scale = 0;  ///< in device memory, other ones at each launch; 0: none
};

struct Paged {
  struct Layouts {
    Layout q, lse;
  };
  Paged(const PagedCase& of, const Layouts& l)
      : c(of),
        requests(static_cast<int64_t>(c.lengths.size())),
        columns((*std::max_element(c.lengths.begin(), c.lengths.end()) + c.page - 1) / c.page + 1),
        cache(spec_of(c.format, int64_t{c.page} * c.kv_heads), requests * columns, c.page_gap, random),
        numbers(c.q, requests * c.queries * c.heads * cache.view.spec.entry(), random, 2),
        order(cache.view.pages),
        d_lengths(2 * c.lengths.size()),
        d_scales(2),
        table(sizeof(int32_t), {requests, columns}, {.gaps = {0, 3}}),
        q(size_of(c.q), {requests, c.queries, c.heads, cache.view.spec.entry()}, l.q),
        out(size_of(c.out), {requests, c.queries, c.heads, 512}),
        lse(sizeof(float), {requests, c.heads, c.queries}, l.lse) {
    std::iota(order.begin(), order.end(), 0);
    for (size_t i = order.size(); i-- > 1;) std::swap(order[i], order[random.integer(0, static_cast<int64_t>(i))]);
    q.put(numbers.bytes.data());
    args = {.q = q.any(c.q),
            .cache = cache.view,
            .kv_heads = c.kv_heads,
            .block_table = table.view<const int32_t>(),
            .causal = c.causal,
            .scale = 0.0417f,
            .out = out.any(c.out),
            .lse = lse.view<float>()};
    change(0);
  }
  void change(int turn) {
    lengths = changed(c.lengths, turn);
    std::vector<bool> live(cache.count());
    std::vector<int32_t> pages(order.size(), 0x7ffffff0);
    for (int64_t r = 0; r < requests; ++r)
      for (int64_t p = 0; p < lengths[r]; ++p) {
        const auto at = r * columns + p / c.page;
        pages[at] = order[at];
        for (int kv = 0; kv < c.kv_heads; ++kv) live[row_of(r, p, kv)] = true;
      }
    cache.keep(live);
    table.put(pages.data());
    args.lengths = upload_spaced(d_lengths, lengths);
    q_scale = c.q_scale ? std::ldexp(c.q_scale, turn) : 1, k_scale = c.k_scale ? std::ldexp(c.k_scale, -turn) : 1;
    d_scales.upload({q_scale, k_scale});
    args.q_scale = c.q_scale ? d_scales.data() : nullptr, args.k_scale = c.k_scale ? d_scales.data() + 1 : nullptr;
  }
  int64_t row_of(int64_t request, int64_t position, int64_t kv) const {
    const int64_t page = order[request * columns + position / c.page];
    return (page * c.page + position % c.page) * c.kv_heads + kv;
  }
  void poison() { out.poison(), lse.poison(); }
  void verify() const {
    const auto found = out.numbers(c.out), found_lse = lse.numbers(Dtype::f32);
    const auto depth = cache.view.spec.entry();
    expect_none(requests * c.queries * c.heads, [&](int64_t i) {
      const int64_t head = i % c.heads, query = i / c.heads % c.queries, request = i / c.heads / c.queries;
      const int length = lengths[request], seen = c.causal ? length - c.queries + static_cast<int>(query) + 1 : length;
      std::vector<SeenKey> keys;
      std::vector<float> rows(static_cast<size_t>(std::max(seen, 0)) * depth);
      for (int64_t p = 0; p < seen; ++p) {
        const float* from = cache.row(row_of(request, p, head / (c.heads / c.kv_heads)));
        float* row = &rows[p * depth];
        // The device's scale in place of the cache's.
        const float by = c.k_scale ? k_scale / cache.view.spec.k_scale : 1;
        for (int64_t j = 0; j < depth; ++j) row[j] = by * from[j];
        keys.push_back({row, row});
      }
      const Row want(&numbers.x[i * depth], depth, 512, keys, args.scale * q_scale, operands_of(c.q, c.format), c.out);
      return want.fault(std::span(found).subspan(i * 512, 512),
                        found_lse[(request * c.heads + head) * c.queries + query], kInf);
    });
  }

  PagedCase c;
  Random random{7};
  int64_t requests, columns;
  Rows cache;
  Numbers numbers;
  std::vector<int32_t> order;
  std::vector<int> lengths;
  DeviceArray<int32_t> d_lengths;
  DeviceArray<float> d_scales;
  float q_scale = 1, k_scale = 1;
  Array<Request, Page> table;
  Array<Request, Token, Head, Entry> q;
  Array<Request, Token, Head, Value> out;
  Array<Request, Head, Token> lse;
  gpu::PagedAttention args;
};

// Lists.

struct ListCase {
  friend void PrintTo(const ListCase& c, std::ostream* to) { *to << c.name; }
  const char* name;
  CacheFormat format;
  Dtype q, out;
  int heads, queries, topk;
  int more = 0;  ///< topk of a second cache
  bool lengths[2] = {false, false};
  bool sinks = false, maxima = false;
};

struct Lists {
  struct Layouts {
    Layout q, slots, lse;
  };
  /// A cache of which every second row lives; the others are there to be named where no name counts.
  struct Source {
    Source(const ListCase& c, int64_t page, int64_t most, bool lengths, const Layout& layout, Random& random)
        : topk(most),
          cut(lengths),
          cache(spec_of(c.format, page), 5, 64, random),
          slots(sizeof(int32_t), {kRequests, c.queries, topk}, layout, 0),
          d_lengths(2 * kRequests) {
      std::vector<bool> live(cache.count());
      for (size_t i = 0; i < live.size(); i += 2) live[i] = true;
      cache.keep(live);
    }
    gpu::SlotLists choose(int64_t queries, Random& random) {
      const int most = static_cast<int>(topk);
      counts = {most + 9, most / 3, -3, most - 1};
      if (random.integer(0, 1)) std::reverse(counts.begin(), counts.end());
      const auto rows = static_cast<int32_t>(cache.count());
      chosen.clear();
      for (int64_t i = 0; i < kRequests * queries * topk; ++i) {
        const int32_t holes[] = {-1, std::numeric_limits<int32_t>::min(), rows, std::numeric_limits<int32_t>::max()};
        const bool counts_for = i % topk < count(i / topk / queries), none = i / topk == 1;
        chosen.push_back(!counts_for ? 1
                         : none || random.integer(0, 9) == 0
                             ? holes[random.integer(0, 3)]
                             : static_cast<int32_t>(random.integer(0, (rows - 1) / 2)) * 2);
      }
      slots.put(chosen.data());
      gpu::SlotLists lists{cache.view, slots.view<const int32_t>(), {}};
      if (cut) lists.lengths = upload_spaced(d_lengths, counts);
      return lists;
    }
    int64_t count(int64_t request) const { return cut ? std::clamp<int64_t>(counts[request], 0, topk) : topk; }
    int64_t topk;
    bool cut;
    Rows cache;
    Array<Request, Token, Topk> slots;
    DeviceArray<int32_t> d_lengths;
    std::vector<int32_t> chosen;
    std::vector<int> counts;
  };
  static constexpr int64_t kRequests = 4;

  Lists(const ListCase& of, const Layouts& l)
      : c(of),
        depth(spec_of(c.format, 1).entry()),
        numbers(c.q, kRequests * c.queries * c.heads * static_cast<int64_t>(depth), random, 2),
        q(size_of(c.q), {kRequests, c.queries, c.heads, static_cast<int64_t>(depth)}, l.q),
        out(size_of(c.out), {kRequests, c.queries, c.heads, 512}),
        lse(sizeof(float), {kRequests, c.heads, c.queries}, l.lse),
        maxima(sizeof(float), {kRequests * c.queries, c.heads}) {
    q.put(numbers.bytes.data());
    sources.emplace_back(c, 64, c.topk, c.lengths[0], l.slots, random);
    if (c.more) sources.emplace_back(c, 16, c.more, c.lengths[1], l.slots, random);
    constexpr float kSinks[] = {3.0f, -INFINITY, 6.5f, INFINITY};
    for (int h = 0; h < c.heads; ++h) sinks.push_back(kSinks[h % 4]);
    d_sinks = DeviceArray<float>(sinks);
    args = {.q = q.any(c.q), .scale = 0.0417f, .out = out.any(c.out), .lse = lse.view<float>()};
    if (c.sinks) args.sinks = {d_sinks.data(), {c.heads}};
    if (c.maxima) args.max_logits = maxima.view<float>();
    change(0);
  }
  void change(int) {
    args.sources.clear();
    for (Source& s : sources) args.sources.push_back(s.choose(c.queries, random));
  }
  void poison() { out.poison(), lse.poison(), maxima.poison(); }
  void verify() const {
    const auto found = out.numbers(c.out), found_lse = lse.numbers(Dtype::f32), found_max = maxima.numbers(Dtype::f32);
    expect_none(kRequests * c.queries * c.heads, [&](int64_t i) -> std::optional<std::string> {
      const int64_t head = i % c.heads, row = i / c.heads, request = row / c.queries, query = row % c.queries;
      std::vector<SeenKey> keys;
      for (const Source& s : sources)
        for (int64_t j = 0; j < s.count(request); ++j)
          if (const int32_t slot = s.chosen[row * s.topk + j]; slot >= 0 && slot < s.cache.count())
            keys.push_back({s.cache.row(slot), s.cache.row(slot)});
      const Row want(&numbers.x[i * depth], depth, 512, keys, args.scale, operands_of(c.q, c.format), c.out,
                     c.sinks ? &sinks[head] : nullptr);
      const float max = found_max[i];
      if (c.maxima && max != want.max && !Row::near(max, want.max))
        return "max_logits is " + std::to_string(max) + ", exactly " + std::to_string(want.max);
      return want.fault(std::span(found).subspan(i * 512, 512),
                        found_lse[(request * c.heads + head) * c.queries + query], kInf);
    });
  }

  ListCase c;
  Random random{8};
  size_t depth;
  Numbers numbers;
  std::vector<Source> sources;
  std::vector<float> sinks;
  DeviceArray<float> d_sinks;
  Array<Request, Token, Head, Entry> q;
  Array<Request, Token, Head, Value> out;
  Array<Request, Head, Token> lse;
  Array<Token, Head> maxima;
  gpu::ListAttention args;
};

// Sequences.

struct SequenceCase {
  friend void PrintTo(const SequenceCase& c, std::ostream* to) { *to << c.name; }
  const char* name;
  Dtype dtype, out;
  int heads, kv_heads, depth, width;
  bool causal = true;
  std::vector<int> q_lens = {40, 1, 0, 130, 7, 5}, k_lens = {40, 300, 20, 90, 0, 200};  ///< some queries see nothing
  bool begins = true;  ///< are they given? Without: all sequences are equally long
};

struct Sequences {
  struct Layouts {
    Layout q, k, v, lse;
  };
  /// Rows of q, or of k and v: those of sequences after some of none, and before some more.
  struct Spans {
    Spans(const std::vector<int>& lengths, bool apart)
        : before(apart ? 3 : 0), rows(std::accumulate(lengths.begin(), lengths.end(), 2 * before)) {}
    View<const int32_t, Request> set(const std::vector<int>& lengths) {
      begins.assign(1, before);
      for (const int n : lengths) begins.push_back(begins.back() + n);
      if (!d_begins.size()) d_begins = DeviceArray<int32_t>(2 * begins.size());
      return upload_spaced(d_begins, begins);
    }
    template <class A>
    void put(A& to, const Numbers& numbers) const {
      std::vector<std::byte> bytes = numbers.bytes;
      const size_t row = bytes.size() / rows;
      std::fill_n(bytes.begin(), begins.front() * row, std::byte{0xff});
      std::fill(bytes.begin() + begins.back() * row, bytes.end(), std::byte{0xff});
      to.put(bytes.data());
    }
    int before, rows;
    std::vector<int> begins;
    DeviceArray<int32_t> d_begins;
  };

  Sequences(const SequenceCase& of, const Layouts& l)
      : c(of),
        queries(c.q_lens, c.begins),
        keys(c.k_lens, c.begins),
        q_numbers(c.dtype, int64_t{queries.rows} * c.heads * c.depth, random, 2),
        k_numbers(c.dtype, int64_t{keys.rows} * c.kv_heads * c.depth, random),
        v_numbers(c.dtype, int64_t{keys.rows} * c.kv_heads * c.width, random),
        q(size_of(c.dtype), {queries.rows, c.heads, c.depth}, l.q),
        k(size_of(c.dtype), {keys.rows, c.kv_heads, c.depth}, l.k),
        v(size_of(c.dtype), {keys.rows, c.kv_heads, c.width}, l.v),
        out(size_of(c.out), {queries.rows, c.heads, c.width}),
        lse(sizeof(float), {queries.rows, c.heads}, l.lse) {
    args = {.q = q.any(c.dtype),
            .k = k.any(c.dtype),
            .v = v.any(c.dtype),
            .sequences = static_cast<int64_t>(c.q_lens.size()),
            .causal = c.causal,
            .scale = 1 / std::sqrt(static_cast<float>(c.depth)),
            .out = out.any(c.out),
            .lse = lse.view<float>()};
    change(0);
  }
  void change(int turn) {
    const auto q_begins = queries.set(changed(c.q_lens, c.begins ? turn : 0)),
               k_begins = keys.set(changed(c.k_lens, c.begins ? turn : 0));
    if (c.begins) args.q_begins = q_begins, args.k_begins = k_begins;
    queries.put(q, q_numbers), keys.put(k, k_numbers), keys.put(v, v_numbers);
  }
  void poison() { out.poison(), lse.poison(); }
  void verify() const {
    const auto found = out.numbers(c.out), found_lse = lse.numbers(Dtype::f32);
    expect_none(int64_t{queries.rows} * c.heads, [&](int64_t i) -> std::optional<std::string> {
      const int64_t row = i / c.heads, kv_head = i % c.heads / (c.heads / c.kv_heads);
      const auto got = std::span(found).subspan(i * c.width, c.width);
      const auto after = std::upper_bound(queries.begins.begin(), queries.begins.end(), row);
      if (after == queries.begins.begin() || after == queries.begins.end()) {
        const bool alone =
            std::isnan(found_lse[i]) && std::all_of(got.begin(), got.end(), [](float x) { return std::isnan(x); });
        return alone ? std::nullopt : std::optional<std::string>("is of no sequence, but written");
      }
      const int64_t s = after - queries.begins.begin() - 1, first = keys.begins[s], end = keys.begins[s + 1];
      std::vector<SeenKey> seen;
      for (int64_t j = first; j < (c.causal ? end - queries.begins[s + 1] + row + 1 : end); ++j)
        seen.push_back(
            {&k_numbers.x[(j * c.kv_heads + kv_head) * c.depth], &v_numbers.x[(j * c.kv_heads + kv_head) * c.width]});
      const Row want(&q_numbers.x[i * c.depth], c.depth, c.width, seen, args.scale, c.dtype, c.out);
      return want.fault(got, found_lse[i], -kInf);
    });
  }

  SequenceCase c;
  Random random{9};
  Spans queries, keys;
  Numbers q_numbers, k_numbers, v_numbers;
  Array<Token, Head, QueryKey> q;
  Array<Key, Head, QueryKey> k;
  Array<Key, Head, Value> v;
  Array<Token, Head, Value> out;
  Array<Token, Head> lse;
  gpu::SequenceAttention args;
};

// Cases.

template <class Case>
class DeviceAttention : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
  }
};
using PagedAttention = DeviceAttention<PagedCase>;
using ListAttention = DeviceAttention<ListCase>;
using SequenceAttention = DeviceAttention<SequenceCase>;
const auto name_of = [](const auto& at) { return std::string(at.param.name); };

constexpr Dtype f32 = Dtype::f32, bf16 = Dtype::bf16, f16 = Dtype::f16;
using F = CacheFormat;

// Heads apart, tokens apart, requests apart, all of them at an address of no vector; heads outermost.
const Layout kQueries[] = {{.gaps = {0, 0, 0, 64}},
                           {.gaps = {0, 0, 3, 0}},
                           {.gaps = {0, 1, 0, 0}},
                           {.gaps = {1, 2, 1, 3}, .offset = 1},
                           {.gaps = {0, 0, 0, 8}, .offset = 4, .heads_first = true}};

std::vector<int> many_lengths() {
  std::vector<int> all;
  for (int i = 0; i < 300; ++i) all.push_back(i * 37 % 91);
  return all;
}

PagedCase fp8_case(const char* name, F format, int heads, int queries, float q_scale = 0, float k_scale = 0) {
  return {.name = name,
          .format = format,
          .q = Dtype::fp8_e4m3,
          .out = bf16,
          .heads = heads,
          .queries = queries,
          .causal = queries > 1,
          .q_scale = q_scale,
          .k_scale = k_scale};
}

TEST_P(PagedAttention, IsRightHoweverCalled) {
  // Of several KV heads lse must be even.
  const Layout lse = GetParam().kv_heads > 1 ? Layout{.gaps = {0, 0, 3}, .offset = 1}
                                             : Layout{.gaps = {2, 1, 3}, .offset = 1, .heads_first = true};
  std::vector<Paged::Layouts> others;
  for (const Layout& q : kQueries) others.push_back({q, lse});
  expect_right_however_called<Paged>(GetParam(), others);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, PagedAttention,
    testing::Values(PagedCase{"h16", F::bf16, bf16, bf16, 16, 1}, PagedCase{"h128", F::bf16, bf16, f32, 128, 1},
                    PagedCase{"h16_q2", F::bf16, bf16, bf16, 16, 2},
                    PagedCase{"h64_q2_causal", F::bf16, bf16, bf16, 64, 2, 1, true},
                    PagedCase{.name = "h16_many_causal",
                              .format = F::bf16,
                              .q = bf16,
                              .out = bf16,
                              .heads = 16,
                              .queries = 1,
                              .causal = true,
                              .lengths = many_lengths()},
                    PagedCase{"h7_page17_gap", F::bf16, bf16, bf16, 7, 1, 1, false, 17, 64},
                    PagedCase{"h64_page16_gap", F::bf16, bf16, bf16, 64, 1, 1, false, 16, 1152 * 3},
                    PagedCase{"h128_page64_gap16", F::bf16, bf16, bf16, 128, 2, 1, true, 64, 16},
                    PagedCase{"h16_fp8_gap", F::fp8, bf16, bf16, 16, 1, 1, false, 64, 64},
                    PagedCase{"h128_fp8_ds_mla_gap", F::fp8_ds_mla, bf16, bf16, 128, 1, 1, false, 32, 1024},
                    fp8_case("fp8_codes", F::fp8, 16, 1), fp8_case("fp8_codes_h40_q2_scales", F::fp8, 40, 2, 0.25f, 2),
                    fp8_case("fp8_codes_h128_scales", F::fp8, 128, 1, 0.5f, 0.25f),
                    fp8_case("fp8_codes_h128_q2_scale", F::fp8, 128, 2, 0.5f), fp8_case("bf16_codes", F::bf16, 64, 1),
                    fp8_case("bf16_codes_scale", F::bf16, 16, 1, 0.25f),
                    fp8_case("fp8_ds_mla_codes", F::fp8_ds_mla, 128, 1),
                    PagedCase{"kv2_h32", F::bf16, bf16, bf16, 32, 1, 2},
                    PagedCase{"kv2_h32_q2_causal", F::bf16, bf16, bf16, 32, 2, 2, true},
                    PagedCase{"kv4_h64_q2_gap", F::bf16, bf16, bf16, 64, 2, 4, false, 64, 1152},
                    PagedCase{"kv4_h4_fp8_ds_mla", F::fp8_ds_mla, bf16, bf16, 4, 1, 4, false, 16},
                    PagedCase{"kv2_f16_q2_causal", F::f16, f16, f16, 16, 2, 2, true},
                    PagedCase{"f16", F::f16, f16, f16, 16, 1}, PagedCase{"f16_h40_q2", F::f16, f16, f16, 40, 2},
                    PagedCase{"f16_h128_gap", F::f16, f16, f16, 128, 1, 1, false, 64, 1152},
                    PagedCase{"f16_h64_f32_out", F::f16, f16, f32, 64, 1},
                    PagedCase{"f16_over_bf16", F::bf16, f16, f16, 16, 1}, PagedCase{"f32", F::f32, f32, f32, 5, 2},
                    PagedCase{"fp8", F::fp8, bf16, bf16, 16, 1},
                    PagedCase{"fp8_h128_q2_causal", F::fp8, bf16, bf16, 128, 2, 1, true},
                    PagedCase{"fp8_ds_mla_h64", F::fp8_ds_mla, bf16, bf16, 64, 1},
                    PagedCase{"fp8_ds_v4", F::fp8_ds_v4, bf16, bf16, 16, 1}),
    name_of);

// Calls that count the pieces of split tiles, in graphs that were captured from one stream and are launched on several
// beside calls that are not captured; so many graphs that counters run out, and some that come after others have gone.
TEST(DeviceAttentionCounters, AreNotSharedByStreamsAndGraphs) {
  if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
  constexpr int kBeside = 4, kGraphs = 1100;
  const PagedCase c{
      .name = "", .format = F::bf16, .q = bf16, .out = bf16, .heads = 16, .queries = 1, .lengths = {3000}};
  std::vector<std::unique_ptr<Paged>> inputs;
  std::vector<DeviceArray<std::byte>> workspaces;
  std::vector<cudaStream_t> streams(kBeside + 1);
  for (cudaStream_t& s : streams) {
    check(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "test", "stream");
    inputs.push_back(std::make_unique<Paged>(c, Paged::Layouts{}));
    workspaces.emplace_back(gpu::workspace_bytes(inputs.back()->args), 0xff);
  }
  const auto attend = [&](int i, cudaStream_t on) {
    gpu::attend(inputs[i]->args, {.device = 0, .native = on, .workspace = workspaces[i].data()});
  };
  const auto capture = [&](int i) {
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeThreadLocal), "test", "capture");
    attend(i, streams[0]), attend(i, streams[0]);
    check(cudaStreamEndCapture(streams[0], &graph), "test", "capture");
    return graph;
  };
  attend(0, streams[0]);
  synchronize();
  inputs[0]->verify();
  const auto bits = inputs[0]->out.take();
  const auto launch_beside = [&] {
    std::vector<cudaGraphExec_t> execs(kBeside);
    for (int i = 0; i < kBeside; ++i) {
      cudaGraph_t graph = capture(i);
      check(cudaGraphInstantiate(&execs[i], graph, 0), "test", "instantiate");
      cudaGraphDestroy(graph);
    }
    for (auto& x : inputs) x->poison();
    synchronize();
    for (int round = 0; round < 100; ++round) {
      for (int i = 0; i < kBeside; ++i) check(cudaGraphLaunch(execs[i], streams[i]), "test", "replay");
      attend(kBeside, streams[kBeside]);
    }
    synchronize();
    for (auto& x : inputs) EXPECT_TRUE(x->out.take() == bits);
    for (cudaGraphExec_t e : execs) cudaGraphExecDestroy(e);
  };
  launch_beside();
  std::vector<cudaGraph_t> held;
  for (int i = 0; i < kGraphs; ++i) held.push_back(capture(0));
  launch_beside();  // none are left
  for (cudaGraph_t g : held) cudaGraphDestroy(g);
  launch_beside();
  for (cudaStream_t s : streams) cudaStreamDestroy(s);
}

// A capture that forks: calls of one lengths and table, with one schedule, on two streams at a time.
TEST(DeviceAttentionSchedule, IsOfOneStreamOfACapture) {
  if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
  const PagedCase c{
      .name = "", .format = F::bf16, .q = bf16, .out = bf16, .heads = 16, .queries = 1, .lengths = {900, 7, 3000}};
  Paged inputs[2] = {{c, {}}, {c, {}}};
  inputs[1].args.lengths = inputs[0].args.lengths, inputs[1].args.block_table = inputs[0].args.block_table;
  const DeviceArray<std::byte> schedule_memory(CapturedSchedule::kBytes);
  CapturedSchedule schedule{.data = schedule_memory.data()};
  DeviceArray<std::byte> workspaces[2];
  cudaStream_t streams[2];
  cudaEvent_t forked, joined;
  for (int i = 0; i < 2; ++i) {
    workspaces[i] = DeviceArray<std::byte>(gpu::workspace_bytes(inputs[i].args));
    check(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking), "test", "stream");
  }
  for (cudaEvent_t* e : {&forked, &joined}) check(cudaEventCreateWithFlags(e, cudaEventDisableTiming), "test", "event");
  const auto attend = [&](int i) {
    gpu::attend(inputs[i].args,
                {.device = 0, .native = streams[i], .workspace = workspaces[i].data(), .schedule = &schedule});
  };
  attend(0), attend(1);
  synchronize();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  check(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeThreadLocal), "test", "capture");
  attend(0);
  check(cudaEventRecord(forked, streams[0]), "test", "fork");
  check(cudaStreamWaitEvent(streams[1], forked), "test", "fork");
  for (int layer = 0; layer < 4; ++layer) attend(1), attend(0);
  check(cudaEventRecord(joined, streams[1]), "test", "join");
  check(cudaStreamWaitEvent(streams[0], joined), "test", "join");
  check(cudaStreamEndCapture(streams[0], &graph), "test", "capture");
  EXPECT_EQ(schedule.stream, streams[0]);
  EXPECT_TRUE(schedule.there);
  check(cudaGraphInstantiate(&exec, graph, 0), "test", "instantiate");
  cudaGraphDestroy(graph);
  for (const int turn : {1, 2, 0}) {
    for (Paged& x : inputs) x.change(turn), x.poison();
    for (int i = 0; i < 20; ++i) check(cudaGraphLaunch(exec, streams[0]), "test", "replay");
    synchronize();
    for (Paged& x : inputs) x.verify();
  }
  cudaGraphExecDestroy(exec);
  for (cudaEvent_t e : {forked, joined}) cudaEventDestroy(e);
  for (cudaStream_t s : streams) cudaStreamDestroy(s);
}

TEST_P(ListAttention, IsRightHoweverCalled) {
  const Layout slots[] = {{.gaps = {0, 0, 5}}, {.gaps = {0, 1, 0}}, {.gaps = {1, 1, 3}, .offset = 1}};
  std::vector<Lists::Layouts> others{{{}, slots[2], {}}};
  for (size_t i = 0; i < std::size(kQueries); ++i)
    others.push_back(
        {kQueries[i], slots[i % std::size(slots)], {.gaps = {2, 1, 3}, .offset = 1, .heads_first = i % 2 == 1}});
  expect_right_however_called<Lists>(GetParam(), others);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, ListAttention,
    testing::Values(
        ListCase{"h16", F::bf16, bf16, bf16, 16, 2, 200},
        ListCase{"h16_q1_lengths", F::bf16, bf16, f32, 16, 1, 300, 0, {true}, true},
        ListCase{"h128_maxima", F::bf16, bf16, bf16, 128, 2, 200, 0, {true}, true, true},
        ListCase{"h16_maxima", F::bf16, bf16, bf16, 16, 2, 130, 0, {}, false, true},
        ListCase{"two_caches", F::bf16, bf16, bf16, 64, 2, 128, 70, {}, true},
        ListCase{"two_caches_first_length", F::bf16, bf16, bf16, 16, 2, 130, 64, {true, false}, true, true},
        ListCase{"two_caches_second_length", F::bf16, bf16, bf16, 128, 1, 64, 200, {false, true}},
        ListCase{"two_caches_lengths", F::bf16, bf16, bf16, 128, 2, 128, 70, {true, true}, true, true},
        ListCase{"f16_lengths", F::f16, f16, f16, 16, 2, 130, 70, {true, true}, true, true},
        ListCase{"f16_over_bf16", F::bf16, f16, f16, 16, 1, 130, 0, {true}, true, true},
        ListCase{"f32", F::f32, f32, f32, 5, 2, 70, 20, {true, true}, true, true},
        ListCase{"fp8", F::fp8, bf16, bf16, 16, 2, 130, 0, {true}, true},
        ListCase{"fp8_ds_mla_h16", F::fp8_ds_mla, bf16, bf16, 16, 2, 200, 0, {true}, true},
        ListCase{"fp8_ds_mla_h128", F::fp8_ds_mla, bf16, bf16, 128, 2, 200, 0, {true}, true, true},
        ListCase{"fp8_ds_mla_two_caches", F::fp8_ds_mla, bf16, bf16, 64, 2, 128, 70, {true, true}, true},
        ListCase{"fp8_ds_v4_h64", F::fp8_ds_v4, bf16, bf16, 64, 1, 128, 0, {}, true},
        ListCase{"fp8_ds_v4_two_caches", F::fp8_ds_v4, bf16, bf16, 64, 2, 128, 200, {true, true}, true},
        ListCase{"fp8_ds_v4_h128_second_length", F::fp8_ds_v4, bf16, bf16, 128, 1, 64, 130, {false, true}, true, true}),
    name_of);

TEST_P(SequenceAttention, IsRightHoweverCalled) {
  // Keys and values as parts of one array, as packed forms have them; heads outermost; at an address of no vector.
  expect_right_however_called<Sequences>(
      GetParam(), {{{.gaps = {0, 4, 0}}, {.gaps = {0, 2, 0}}, {.gaps = {0, 2, 0}}, {.gaps = {0, 3}}},
                   {{.gaps = {0, 0, 64}}, {.gaps = {0, 0, 128}}, {.gaps = {0, 0, 192}}, {}},
                   {{.heads_first = true},
                    {.gaps = {2, 0, 8}, .heads_first = true},
                    {.offset = 8, .heads_first = true},
                    {.heads_first = true}},
                   {{.gaps = {1, 0, 3}, .offset = 1},
                    {.gaps = {0, 1, 5}, .offset = 3},
                    {.gaps = {0, 2, 1}, .offset = 1},
                    {.gaps = {3, 1}, .offset = 1, .heads_first = true}}});
}

INSTANTIATE_TEST_SUITE_P(
    Cases, SequenceAttention,
    testing::Values(
        SequenceCase{"bf16_192", bf16, bf16, 8, 8, 192, 128},
        SequenceCase{"bf16_192_all", bf16, bf16, 4, 4, 192, 128, false},
        SequenceCase{"bf16_128_gqa", bf16, f32, 16, 2, 128, 128},
        SequenceCase{"bf16_192_gqa_across", bf16, bf16, 8, 4, 192, 128},
        SequenceCase{"bf16_128_mqa_all", bf16, bf16, 8, 1, 128, 128, false},
        SequenceCase{"bf16_192_long", bf16, bf16, 3, 3, 192, 128, true, {700, 1, 0, 130}, {900, 1500, 64, 90}},
        SequenceCase{"bf16_192_mqa_all", bf16, f32, 8, 1, 192, 128, false},
        SequenceCase{"bf16_256", bf16, bf16, 4, 4, 256, 256}, SequenceCase{"f16_256_gqa", f16, f32, 8, 2, 256, 256},
        SequenceCase{"f16_192", f16, f16, 4, 4, 192, 128}, SequenceCase{"f16_128_gqa", f16, f16, 16, 2, 128, 128},
        SequenceCase{"f16_192_gqa_across_all", f16, f16, 6, 3, 192, 128, false},
        SequenceCase{"f32_192", f32, f32, 2, 2, 192, 128}, SequenceCase{"f32_128_gqa", f32, f32, 8, 2, 128, 128},
        SequenceCase{"equal_lengths", bf16, bf16, 4, 4, 192, 128, true, {33, 33, 33}, {70, 70, 70}, false}),
    name_of);

}  // namespace
}  // namespace mla::test
