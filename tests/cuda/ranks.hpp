// Ranks on GPUs, and a layer over them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "cases/compare.hpp"
#include "layer/shares.hpp"
#include "mla/mla.hpp"
#include "support/models.hpp"

namespace mla::test {

struct Self {
  int rank, ranks;
  Communicator& comm;
  Stream& stream;
  Device device;
};

// A rank a thread, each with a stream on its GPU; errors by rank. The streams are waited for.
inline std::vector<std::string> on_gpus(GpuLink link, int ranks, const std::function<void(Self)>& work,
                                        size_t staging = size_t{1} << 20) {
  std::vector<Communicator> group = thread_communicators(ranks);
  std::vector<std::string> errors(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r)
    threads.emplace_back([&, r, mine = std::move(group[static_cast<size_t>(r)])]() mutable {
      Communicator self = std::move(mine);
      try {
        const Device device{DeviceKind::cuda, r % gpu_count()};
        Stream stream(device);
        self.connect(device, link, staging, std::chrono::seconds(20));
        work({r, ranks, self, stream, device});
        stream.synchronize();
      } catch (const std::exception& e) {
        errors[static_cast<size_t>(r)] = e.what();
        self.abort(e.what());
      }
    });
  for (std::thread& t : threads) t.join();
  return errors;
}

inline void expect_none(const std::vector<std::string>& errors) {
  for (const std::string& e : errors) EXPECT_EQ(e, "");
}

struct Lengths {
  std::vector<int32_t> queries, contexts;
};
inline constexpr int64_t kPageSize = 16, kPages = 400;

inline ModelConfig model_of(bool selects) {
  ModelConfig m = selects ? small_sparse() : small_deepseek();
  m.heads = 8;
  return m;
}

struct Split {
  int ranks;
  int members;  // of a group that shares a cache
  CacheFormat format = CacheFormat::bf16;
  SplitPolicy policy = SplitPolicy::fast;
  PathPolicy path = PathPolicy::automatic;
  bool selects = false;
  ContextExchange exchange = ContextExchange::latents;
  HiddenSums sums = HiddenSums::all;

  /// Heads of the members of a rank's group, where they exchange heads.
  std::vector<HeadRange> group(int64_t heads, int rank) const {
    std::vector<HeadRange> g;
    for (int r = rank / members * members; exchange == ContextExchange::heads && std::ssize(g) < members; ++r)
      g.push_back(head_share(heads, r, ranks));
    return g;
  }
};

// Prefills, then a step behind them; what this rank's second step gives. Captured: as a graph, launched twice.
inline std::vector<bf16> steps_of(const Split& split, int rank, Stream& stream, Communicator* comm, const Lengths& l,
                                  bool captured) {
  const ModelConfig whole = model_of(split.selects);
  const HeadRange heads = head_share(whole.heads, rank, split.ranks);
  const ModelConfig m = part_of(whole, heads);
  const Device device = stream.device();
  const LayerWeights weights =
      prepare(m, part_of(whole, random_layer(whole, 0, 1, Dtype::f32), heads, split.group(whole.heads, rank)),
              Dtype::bf16, device);
  const RotaryTable rotary(m.rotary, m.rope, 4096, device);
  const CacheSpec spec = cache_spec(m, split.format, kPageSize);
  const Cache cache(spec, kPages, device);
  {
    const std::vector<std::byte> nan(spec.page_bytes() * kPages, std::byte{0xff});
    copy(stream, cache.view().data, nan.data(), nan.size());
    stream.synchronize();
  }
  RotaryTable index_rotary;
  IndexCache index;
  if (m.indexer) {
    index_rotary = RotaryTable(m.index_rotary(), m.rope, 4096, device);
    index = IndexCache(index_cache_spec(m, spec, IndexCacheFormat::fp8), kPages, device);
  }
  const CacheSharding sharding = split.members > 1 ? CacheSharding(split.members, 4) : CacheSharding();
  const int holder = rank % split.members;
  std::vector<bf16> out;
  StagedStep staged(stream);
  const auto step = [&](const Lengths& s, uint64_t seed) {
    std::vector<int32_t> starts{0}, lengths, table, slots;
    int64_t width = 1;
    for (size_t r = 0; r < s.queries.size(); ++r)
      width = std::max(width, sharding.pages(holder, l.queries[r] + l.contexts[r], kPageSize));
    table.assign(static_cast<size_t>(width) * s.queries.size(), 0);
    int32_t next = static_cast<int32_t>(3 + rank);
    for (size_t r = 0; r < s.queries.size(); ++r) {
      starts.push_back(starts.back() + s.queries[r]);
      lengths.push_back(s.queries[r] + s.contexts[r]);
      const std::span<int32_t> own(table.data() + r * static_cast<size_t>(width), static_cast<size_t>(width));
      for (int32_t& page : own) page = next++;
      for (int64_t p = s.contexts[r]; p < lengths.back(); ++p)
        slots.push_back(static_cast<int32_t>(sharding.slot(holder, p, own, kPageSize)));
    }
    const Batch batch{starts, lengths, {table.data(), {std::ssize(lengths), width}}, slots};
    PlanOptions o{.tensor_parallel = split.ranks};
    o.compute = Dtype::bf16;
    o.split = split.policy;
    o.path = s.contexts == l.contexts ? split.path : PathPolicy::automatic;
    o.sums = split.sums;
    o.context_parallel.rank = rank;
    if (split.members > 1) {
      o.context_parallel = {.sharding = sharding, .rank = rank, .heads = {}, .exchange = split.exchange};
      for (const HeadRange& h : shares(whole.heads, split.ranks)) o.context_parallel.heads.push_back(h.count);
    }
    const Plan p = plan(m, spec, kPages, batch, device_info(stream, m), o);
    const Buffer workspace(p.workspace_bytes, device), selection(p.selection_bytes, device);
    const auto values = cases::random_values(p.tokens * m.hidden, seed);
    std::vector<bf16> hidden;
    for (const float x : values) hidden.push_back(to_bf16(x));
    const Buffer in = Buffer::copy_of(hidden.data(), hidden.size() * sizeof(bf16), device);
    const Buffer to(hidden.size() * sizeof(bf16), device);
    staged.stage(p, batch);
    const auto call = [&] {
      forward(stream,
              {.plan = p,
               .batch = batch,
               .weights = weights,
               .rotary = rotary,
               .cache = cache.view(),
               .workspace = {workspace.data(), workspace.size()},
               .index_cache = index.view(),
               .index_rotary = &index_rotary,
               .selection = {selection.data(), selection.size()},
               .staged = &staged,
               .ranks = comm,
               .deadline = std::chrono::seconds(30)},
              AnyView<Token, Hidden>(Dtype::bf16, in.data(), {p.tokens, m.hidden}),
              AnyMutableView<Token, Hidden>(Dtype::bf16, to.data(), {p.own_rows().count, m.hidden}));
    };
    call();
    if (captured) {
      stream.synchronize();
      const Graph graph(stream, call);
      graph.launch(stream);
      graph.launch(stream);
      stream.synchronize();
    }
    out.resize(static_cast<size_t>(p.own_rows().count * m.hidden));
    copy(stream, out.data(), to.data(), out.size() * sizeof(bf16));
    stream.synchronize();
  };
  step({l.contexts, std::vector<int32_t>(l.contexts.size())}, 3);
  step(l, 4);
  return out;
}

}  // namespace mla::test
