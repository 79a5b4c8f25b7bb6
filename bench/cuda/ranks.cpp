// Two ranks on two GPUs: what a step's collectives take by themselves, and one layer of deepseek-v3 on one GPU, with
// its heads over two, and with heads and cached tokens over two. Captured graphs; the ranks' medians, the slower one's.
//   ranks_bench [json=FILE] [only=SUBSTRING]... [replays=N] [link=peer|nccl]...
#include <algorithm>
#include <array>
#include <barrier>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "backend/cuda/core/check.hpp"
#include "cuda/bench.hpp"
#include "mla/mla.hpp"

namespace {

using namespace mla;
using cuda::bench::Times;

constexpr int kRanks = 2;

struct Self {
  int rank = 0, ranks = 1;
  Communicator* comm = nullptr;
  Stream& stream;
};

/// f on every rank at once, each with a stream on its GPU; the slowest rank's times.
Times on_ranks(int ranks, GpuLink link, const std::function<Times(Self)>& f) {
  std::vector<Communicator> group = thread_communicators(ranks);
  std::vector<Times> times(static_cast<size_t>(ranks));
  std::vector<std::exception_ptr> errors(static_cast<size_t>(ranks));
  {
    std::vector<std::jthread> threads;
    for (int r = 0; r < ranks; ++r)
      threads.emplace_back([&, r] {
        Communicator& comm = group[static_cast<size_t>(r)];
        try {
          const Device device{DeviceKind::cuda, r};
          cuda::check(cudaSetDevice(r), "bench", "device");
          Stream stream(device);
          if (ranks > 1) comm.connect(device, link);
          times[static_cast<size_t>(r)] = f({r, ranks, ranks > 1 ? &comm : nullptr, stream});
        } catch (const std::exception& e) {
          errors[static_cast<size_t>(r)] = std::current_exception();
          comm.abort(e.what());
        }
      });
  }
  for (const std::exception_ptr& e : errors)
    if (e) std::rethrow_exception(e);
  return *std::max_element(times.begin(), times.end(),
                           [](const Times& a, const Times& b) { return a.median < b.median; });
}

/// Microseconds a call of a graph of `calls`; as many launches on every rank.
Times time_graph(Stream& stream, int calls, int replays, const std::function<void()>& call) {
  call();
  stream.synchronize();
  const Graph graph(stream, [&] {
    for (int i = 0; i < calls; ++i) call();
  });
  cudaEvent_t begin, end;
  cuda::check(cudaEventCreate(&begin), "bench", "event");
  cuda::check(cudaEventCreate(&end), "bench", "event");
  std::vector<double> us;
  Times t;
  for (int i = -10; i < replays; ++i, ++t.launches) {
    graph.launch(stream);  // ahead: the ranks begin the measured one together
    const auto native = static_cast<cudaStream_t>(stream.native());
    cuda::check(cudaEventRecord(begin, native), "bench", "event");
    graph.launch(stream);
    cuda::check(cudaEventRecord(end, native), "bench", "event");
    stream.synchronize();
    float ms = 0;
    cuda::check(cudaEventElapsedTime(&ms, begin, end), "bench", "event");
    if (i >= 0) us.push_back(1e3 * static_cast<double>(ms) / calls);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::sort(us.begin(), us.end());
  t.median = us[us.size() / 2], t.p90 = us[us.size() * 9 / 10];
  return t;
}

// What a split cache's ranks send of a head: of its query in bf16, and of what was found for it in f32.
struct Sent {
  int64_t query = 0, value = 0;
};
constexpr Sent kLatents{576, 512}, kHeadsOwn{192, 128};

// Of one decode step of a layer: queries to all, what was found to its owner, hidden rows summed.
Times collectives(Self s, int64_t rows, int64_t hidden, const Sent& sent, int replays) {
  constexpr int64_t kHeads = 64;
  const int64_t kEntry = sent.query, kValue = sent.value;
  const int64_t all = kHeads * s.ranks, f = sizeof(float);
  const Device d = s.stream.device();
  const auto buffer = [&](int64_t bytes) { return Buffer(static_cast<size_t>(bytes), d); };
  const Buffer q = buffer(rows * kHeads * kEntry * 2), queries = buffer(rows * all * kEntry * 2),
               found = buffer(rows * all * kValue * f), found_lse = buffer(rows * all * f),
               got = buffer(rows * all * kValue * f), got_lse = buffer(rows * all * f),
               part = buffer(rows * hidden * f);
  std::vector<SendRows> send_queries, send_found;
  std::vector<ReceiveRows> place_queries, place_found;
  for (int64_t r = 0; r < s.ranks; ++r) {
    send_queries.push_back({q.data(), 1, rows * kHeads * kEntry * 2, 0});
    place_queries.push_back({queries.data() + r * kHeads * kEntry * 2, rows, kHeads * kEntry * 2, all * kEntry * 2});
  }
  const auto add = [&](const Buffer& from, const Buffer& to, int64_t width) {
    for (int64_t r = 0; r < s.ranks; ++r) {
      send_found.push_back({from.data() + r * kHeads * width * f, rows, kHeads * width * f, all * width * f});
      place_found.push_back({to.data() + r * rows * kHeads * width * f, 1, rows * kHeads * width * f, 0});
    }
  };
  add(found, got, kValue), add(found_lse, got_lse, 1);
  return time_graph(s.stream, 50, replays, [&] {
    if (sent.query > 0) {
      s.comm->exchange(s.stream, {.step = "gather_queries", .most_bytes = rows * kHeads * kEntry * 2}, send_queries,
                       place_queries);
      s.comm->exchange(s.stream, {.step = "exchange_found", .most_bytes = rows * kHeads * (kValue + 1) * f}, send_found,
                       place_found);
    }
    if (hidden > 0) s.comm->all_reduce(s.stream, {"all_reduce"}, Dtype::f32, part.data(), part.data(), rows * hidden);
  });
}

struct Division {
  const char* name;
  int ranks;
  bool cache;
  ContextExchange exchange = ContextExchange::latents;
};
constexpr Division kDivisions[] = {{"one GPU", 1, false},
                                   {"TP 2", 2, false},
                                   {"TP 2, DCP 2", 2, true},
                                   {"TP 2, DCP 2 by heads", 2, true, ContextExchange::heads}};

// A decode step of `rows` requests with `length` tokens each: the layer, or its attention form.
Times layer(Self s, const Division& d, int64_t rows, int64_t length, bool attention, int replays) {
  const ModelConfig whole = preset("deepseek-v3");
  const HeadRange heads = head_share(whole.heads, s.rank, s.ranks);
  const ModelConfig m = part_of(whole, heads);
  const Device device = s.stream.device();
  std::vector<HeadRange> group;
  for (int r = 0; d.exchange == ContextExchange::heads && r < s.ranks; ++r)
    group.push_back(head_share(whole.heads, r, s.ranks));
  const LayerWeights weights =
      prepare(m, part_of(whole, random_layer(whole, 0, 1, Dtype::bf16), heads, group), Dtype::bf16, device);
  const RotaryTable rotary(m.rotary, m.rope, length, device);
  const CacheSpec spec = cache_spec(m, CacheFormat::bf16, 64);
  const CacheSharding sharding = d.cache ? CacheSharding(s.ranks, 64) : CacheSharding();
  const int holder = d.cache ? s.rank : 0;
  const int64_t pages = sharding.pages(0, length, 64);
  const Cache cache(spec, rows * pages, device);
  std::vector<uint16_t> page(spec.page_bytes() / 2);
  uint32_t state = 3;
  const auto next = [&] { return (state = state * 1664525u + 1013904223u) >> 16; };
  for (uint16_t& x : page) x = static_cast<uint16_t>(next() & 0xbfbf);  // finite, small
  for (int64_t i = 0; i < cache.pages(); ++i) copy(s.stream, cache.view().page(i), page.data(), spec.page_bytes());
  s.stream.synchronize();
  std::vector<int32_t> starts{0}, lengths, table, slots;
  for (int64_t r = 0; r < rows; ++r) {
    starts.push_back(static_cast<int32_t>(r + 1));
    lengths.push_back(static_cast<int32_t>(length));
    for (int64_t p = 0; p < pages; ++p) table.push_back(static_cast<int32_t>(p * rows + r));
    slots.push_back(static_cast<int32_t>(
        sharding.slot(holder, length - 1, {table.data() + r * pages, static_cast<size_t>(pages)}, 64)));
  }
  const Batch batch{starts, lengths, {table.data(), {rows, pages}}, slots};
  PlanOptions o{.tensor_parallel = s.ranks};
  o.compute = Dtype::bf16;
  o.path = PathPolicy::latent;
  if (attention) o.form = LayerForm::attention;
  if (d.cache) {
    o.context_parallel = {.sharding = sharding, .rank = s.rank, .heads = {}, .exchange = d.exchange};
    for (int r = 0; r < s.ranks; ++r) o.context_parallel.heads.push_back(head_share(whole.heads, r, s.ranks).count);
  }
  const Plan p = plan(m, spec, cache.pages(), batch, device_info(s.stream, m), o);
  const Buffer workspace(p.workspace_bytes, device);
  StagedStep staged(s.stream);
  staged.stage(p, batch);
  const auto numbers = [&](int64_t n) {
    std::vector<bf16> x(static_cast<size_t>(n));
    for (bf16& v : x) v = to_bf16(static_cast<float>(next()) * 0x1p-15f - 1.0f);
    return Buffer::copy_of(x.data(), x.size() * sizeof(bf16), device);
  };
  const Buffer hidden = numbers(rows * m.hidden), out(static_cast<size_t>(rows * m.hidden) * 2, device),
               q = numbers(rows * m.heads * m.query_key()), kv = numbers(rows * m.latent),
               k_pe = numbers(rows * m.rope), heads_out(static_cast<size_t>(rows * m.heads * m.value) * 2, device);
  const LayerContext context{.plan = p,
                             .batch = batch,
                             .weights = weights,
                             .rotary = rotary,
                             .cache = cache.view(),
                             .workspace = {workspace.data(), workspace.size()},
                             .staged = &staged,
                             .ranks = s.comm};
  const Times t = time_graph(s.stream, 20, replays, [&] {
    if (attention)
      attend(s.stream, context, AnyView<Token, Head, QueryKey>(Dtype::bf16, q.data(), {rows, m.heads, m.query_key()}),
             AnyView<Token, Latent>(Dtype::bf16, kv.data(), {rows, m.latent}),
             AnyView<Token, Rope>(Dtype::bf16, k_pe.data(), {rows, m.rope}),
             AnyMutableView<Token, Head, Value>(Dtype::bf16, heads_out.data(), {rows, m.heads, m.value}));
    else
      forward(s.stream, context, AnyView<Token, Hidden>(Dtype::bf16, hidden.data(), {rows, m.hidden}),
              AnyMutableView<Token, Hidden>(Dtype::bf16, out.data(), {rows, m.hidden}));
  });
  const Buffer& result = attention ? heads_out : out;
  std::vector<bf16> x(result.size() / sizeof(bf16));
  copy(s.stream, x.data(), result.data(), result.size());
  s.stream.synchronize();
  for (size_t i = 0; i < x.size(); ++i)
    if ((x[i].bits & 0x7f80) == 0x7f80) throw Error("ranks: output element " + std::to_string(i) + " is not finite");
  return t;
}

void measure(cuda::bench::Report& report) {
  if (gpu_count() < kRanks) throw Error("ranks: two GPUs are needed, there are " + std::to_string(gpu_count()));
  std::vector<GpuLink> links;
  for (const std::string& name : report.values("link")) links.push_back(parse_gpu_link(name));
  if (links.empty()) links = {GpuLink::peer, GpuLink::nccl};
  const auto add = [&](const char* op, const std::string& shape, GpuLink link, int ranks,
                       const std::function<Times(Self)>& f) {
    if (report.wants(shape))
      report.add({{"op", op}, {"shape", shape}, {"ranks", ranks}, {"link", ranks > 1 ? to_string(link) : "none"}},
                 on_ranks(ranks, link, f), true);
  };
  for (const GpuLink link : links) {
    const std::string by = ", " + std::string(to_string(link));
    for (const int64_t rows : {1, 8, 64}) {
      const std::string b = "b" + std::to_string(rows);
      add("all_reduce", "all_reduce " + b + " x 7168 f32" + by, link, kRanks,
          [&](Self s) { return collectives(s, rows, 7168, {}, report.replays()); });
      for (const auto& [sent, what] : {std::pair{kLatents, ""}, {kHeadsOwn, " by heads"}}) {
        add("exchange", "DCP 2 merge " + b + " h128" + what + by, link, kRanks,
            [&, sent = sent](Self s) { return collectives(s, rows, 0, sent, report.replays()); });
        add("collectives", "all collectives of a layer " + b + what + by, link, kRanks,
            [&, sent = sent](Self s) { return collectives(s, rows, 7168, sent, report.replays()); });
      }
    }
  }
  struct Shape {
    int64_t rows, length;
    bool attention;
  };
  for (const Shape& shape : {Shape{8, 65536, true}, Shape{1, 65536, false}, Shape{8, 65536, false},
                             Shape{64, 65536, false}, Shape{64, 4096, false}})
    for (const Division& d : kDivisions)
      for (const GpuLink link : links) {
        if (d.ranks == 1 && link != links[0]) continue;
        const std::string name = std::string(shape.attention ? "attention" : "layer") + " b" +
                                 std::to_string(shape.rows) + " " + std::to_string(shape.length / 1024) + "K, " +
                                 d.name + (d.ranks > 1 ? ", " + std::string(to_string(link)) : "");
        add(shape.attention ? "attention" : "layer", name, link, d.ranks,
            [&](Self s) { return layer(s, d, shape.rows, shape.length, shape.attention, report.replays()); });
      }
}

}  // namespace

int main(int argc, char** argv) {
  return mla::cuda::bench::run(
      argc, argv,
      {.columns = {"ranks"}, .arguments = {"link"}, .head = {{"model", "deepseek-v3, 1 layer"}}, .hopper = false},
      measure);
}
