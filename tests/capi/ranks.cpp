// Heads over ranks through the C interface: threads, and a transport of the caller's.
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "step.hpp"

namespace capi {
namespace {

constexpr int32_t kTokens = 12;

std::vector<float> forward(Step& s, mla_communicator* ranks, int32_t tensor_parallel) {
  s.options.tensor_parallel = tensor_parallel;
  Plan plan;
  EXPECT_OK(mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, &plan));
  const mla_plan_info info = describe(plan);
  Bytes workspace(info.workspace_bytes), selection(info.selection_bytes);
  mla_layer_args a = s.args(plan, workspace);
  a.selection = selection.data;
  a.selection_bytes = selection.size;
  a.ranks = ranks;
  a.rank_seconds = 20;
  Tensor<float> hidden({s.batch.tokens, 96}), out({s.batch.tokens, 96});
  hidden.random(5);
  EXPECT_OK(mla_forward(s.stream, &a, hidden, out));
  return out.data;
}

// The same layer's step, of some of its heads.
struct Part : Step {
  Part(int64_t begin, int64_t count, std::vector<int64_t> group = {}) : Step(kTokens) {
    mla_prepare_options prepare = mla_prepare_options_default();
    prepare.head_begin = begin;
    prepare.head_count = count;
    prepare.group_heads = group.data();
    prepare.group_members = std::ssize(group) / 2;
    mla_model* of_heads = nullptr;
    mla_weights* weights_of_heads = nullptr;
    EXPECT_OK(mla_weights_create_random(model, 0, 3, MLA_F32, &prepare, kCpu, &weights_of_heads));
    EXPECT_OK(mla_model_part(model, begin, count, &of_heads));
    EXPECT_OK(mla_weights_destroy(weights));
    EXPECT_OK(mla_model_destroy(model));
    *&weights = weights_of_heads;
    *&model = of_heads;
  }
};

void expect_close(const std::vector<float>& found, const std::vector<float>& right) {
  float largest = 0;
  for (float x : right) largest = std::max(largest, std::abs(x));
  ASSERT_EQ(found.size(), right.size());
  for (size_t i = 0; i < right.size(); ++i) ASSERT_NEAR(found[i], right[i], 1e-5f * largest) << i;
}

TEST(CRanks, ThreadsGiveTheLayersRows) {
  Step whole(kTokens);
  const std::vector<float> right = forward(whole, nullptr, 0);
  for (const int64_t first : {1, 2, 3}) {
    mla_communicator* ranks[2];
    ASSERT_OK(mla_communicator_create_threads(2, ranks));
    std::vector<float> out[2];
    const auto run = [&](int rank) {
      Part part(rank == 0 ? 0 : first, rank == 0 ? first : kHeads - first);
      out[rank] = forward(part, ranks[rank], 2);
    };
    std::thread other(run, 1);
    run(0);
    other.join();
    expect_close(out[0], right);
    EXPECT_EQ(out[0], out[1]);
    for (mla_communicator* c : ranks) EXPECT_OK(mla_communicator_destroy(c));
  }
}

// Each rank has its range of the summed rows.
TEST(CRanks, RanksMaySumTheirOwnRows) {
  mla_communicator* ranks[2];
  ASSERT_OK(mla_communicator_create_threads(2, ranks));
  std::vector<float> all[2], own[2];
  mla_plan_info info[2];
  const auto run = [&](int rank) {
    Part part(rank == 0 ? 0 : 1, rank == 0 ? 1 : kHeads - 1);
    all[rank] = forward(part, ranks[rank], 2);
    part.options.rank = rank;
    part.options.sums = MLA_SUMS_OWN;
    own[rank] = forward(part, ranks[rank], 2);
    Plan plan;
    EXPECT_OK(mla_plan_create(part.stream, part.model, &part.spec, kPages, &part.batch, &part.options, &plan));
    info[rank] = describe(plan);
  };
  std::thread other(run, 1);
  run(0);
  other.join();
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(info[r].own_row_begin, r * kTokens / 2);
    EXPECT_EQ(info[r].own_rows, kTokens / 2);
    const auto count = static_cast<size_t>(info[r].own_rows * 96),
               begin = static_cast<size_t>(info[r].own_row_begin * 96);
    for (size_t i = 0; i < count; ++i) ASSERT_EQ(own[r][i], all[r][begin + i]) << r << ", element " << i;
  }
  for (mla_communicator* c : ranks) EXPECT_OK(mla_communicator_destroy(c));
}

// A cache whose tokens go round the ranks: prompts, then a step behind them, against one rank's.
TEST(CRanks, ASplitCacheGivesTheLayersRows) {
  const auto steps = [](Step& s, mla_communicator* ranks, int32_t count, int64_t rank) {
    mla_sharding sharding = mla_sharding_default();
    sharding.ranks = count;
    sharding.interleave = 4;
    const int64_t heads[] = {kHeads - 1, 1};
    if (count > 1) s.options.sharding = &sharding, s.options.rank = rank, s.options.rank_heads = heads;
    std::vector<float> out;
    for (const int32_t context : {0, kTokens}) {
      s.set(kTokens, context);
      for (size_t i = 0; i < s.slots.size(); ++i) {
        int64_t slot = 0;
        EXPECT_OK(
            mla_sharding_slot(&sharding, rank, context + static_cast<int64_t>(i), s.table.data(), 7, kPageSize, &slot));
        s.slots[i] = static_cast<int32_t>(slot);
      }
      s.options.path = context == 0 ? MLA_PATHS_AUTOMATIC : MLA_PATHS_LATENT;
      out = forward(s, ranks, count);
    }
    s.options.sharding = nullptr, s.options.rank_heads = nullptr;
    return out;
  };
  Step whole(kTokens);
  const std::vector<float> right = steps(whole, nullptr, 1, 0);
  mla_communicator* ranks[2];
  ASSERT_OK(mla_communicator_create_threads(2, ranks));
  for (const int32_t exchange : {MLA_EXCHANGE_LATENTS, MLA_EXCHANGE_HEADS}) {
    std::vector<float> out[2];
    const auto run = [&](int rank) {
      Part part(
          rank == 0 ? 0 : kHeads - 1, rank == 0 ? kHeads - 1 : 1,
          exchange == MLA_EXCHANGE_HEADS ? std::vector<int64_t>{0, kHeads - 1, kHeads - 1, 1} : std::vector<int64_t>());
      part.options.exchange = exchange;
      out[rank] = steps(part, ranks[rank], 2, rank);
    };
    std::thread other(run, 1);
    run(0);
    other.join();
    expect_close(out[0], right);
    EXPECT_EQ(out[0], out[1]);
  }
  EXPECT_EQ(mla_communicator_connect(ranks[0], kCpu, MLA_LINK_PEER, 0, 0), MLA_ERROR_INPUT);
  EXPECT_EQ(mla_communicator_connect(ranks[0], kCpu, 7, 0, 0), MLA_ERROR_INPUT);
  for (mla_communicator* c : ranks) EXPECT_OK(mla_communicator_destroy(c));

  // Four ranks, a head each, in two groups that split the indexer's keys, too: rows of the second step select 16 of 24.
  Step selects(kTokens);
  const auto grid = [&](Step& s, mla_communicator* own, int64_t rank) {
    s.options.sparse = MLA_SPARSE_AUTOMATIC;
    mla_sharding sharding = mla_sharding_default();
    sharding.ranks = own ? 2 : 1;
    sharding.interleave = 4;
    const int64_t heads[] = {1, 1, 1, 1};
    if (own) s.options.sharding = &sharding, s.options.rank = rank, s.options.rank_heads = heads;
    std::vector<float> rows;
    for (const int32_t context : {0, kTokens}) {
      s.set(kTokens, context);
      for (size_t i = 0; i < s.slots.size(); ++i) {
        int64_t slot = 0;
        EXPECT_OK(mla_sharding_slot(&sharding, rank % 2, context + static_cast<int64_t>(i), s.table.data(), 7,
                                    kPageSize, &slot));
        s.slots[i] = static_cast<int32_t>(slot);
      }
      rows = forward(s, own, own ? 4 : 1);
    }
    s.options.sharding = nullptr, s.options.rank_heads = nullptr;
    return rows;
  };
  const std::vector<float> chosen = grid(selects, nullptr, 0);
  mla_communicator* four[4];
  ASSERT_OK(mla_communicator_create_threads(4, four));
  std::vector<float> found[4];
  std::vector<std::thread> others;
  for (int r = 0; r < 4; ++r)
    others.emplace_back([&, r] {
      Part part(r, 1);
      found[r] = grid(part, four[r], r);
    });
  for (std::thread& t : others) t.join();
  for (int r = 0; r < 4; ++r) {
    expect_close(found[r], chosen);
    EXPECT_EQ(found[r], found[0]);
    EXPECT_OK(mla_communicator_destroy(four[r]));
  }

  mla_sharding three = mla_sharding_default();
  three.ranks = 3;
  whole.options.sharding = &three;
  whole.options.tensor_parallel = 2;
  Plan plan;
  EXPECT_FAILS(MLA_ERROR_INPUT,
               mla_plan_create(whole.stream, whole.model, &whole.spec, kPages, &whole.batch, &whole.options, &plan),
               "options sharding ranks is 3, tensor_parallel is 2, which must be groups of as many");
  three.ranks = 2;
  whole.options.sharding = &three;
  whole.options.tensor_parallel = 4;
  whole.options.rank = 4;
  EXPECT_FAILS(MLA_ERROR_INPUT,
               mla_plan_create(whole.stream, whole.model, &whole.spec, kPages, &whole.batch, &whole.options, &plan),
               "options rank is 4, allowed 0 to 3");
}

// Messages by (from, to), of a group of two.
struct Post {
  std::mutex mutex;
  std::condition_variable wake;
  std::map<std::pair<int, int>, std::deque<std::vector<char>>> letters;
  bool aborted = false;
  int released = 0;
};
struct End {
  Post* post;
  int rank;
};
int32_t exchange(void* user, const mla_exchange* m) {
  const End& end = *static_cast<End*>(user);
  std::unique_lock<std::mutex> lock(end.post->mutex);
  for (int to = 0; to < static_cast<int>(m->ranks); ++to)
    if (m->send_bytes[to] > 0) {
      const char* data = static_cast<const char*>(m->send[to]);
      end.post->letters[{end.rank, to}].emplace_back(data, data + m->send_bytes[to]);
    }
  end.post->wake.notify_all();
  for (int from = 0; from < static_cast<int>(m->ranks); ++from) {
    if (m->receive_bytes[from] == 0) continue;
    std::deque<std::vector<char>>& box = end.post->letters[{from, end.rank}];
    if (!end.post->wake.wait_for(lock, std::chrono::duration<double>(m->seconds),
                                 [&] { return end.post->aborted || !box.empty(); }))
      return 7;
    if (box.empty() || box.front().size() != m->receive_bytes[from]) return 8;
    std::memcpy(m->receive[from], box.front().data(), box.front().size());
    box.pop_front();
  }
  return 0;
}
void abort_all(void* user, int32_t, const char*) {
  Post& post = *static_cast<End*>(user)->post;
  const std::lock_guard<std::mutex> lock(post.mutex);
  post.aborted = true;
  post.wake.notify_all();
}
void release(void* user) { ++static_cast<End*>(user)->post->released; }

mla_transport transport_of(End& end) {
  mla_transport t = make<mla_transport>();
  t.user = &end;
  t.exchange = exchange;
  t.abort = abort_all;
  t.release = release;
  return t;
}

TEST(CRanks, TheCallersTransportCarriesTheSameBits) {
  mla_communicator* threads[2];
  ASSERT_OK(mla_communicator_create_threads(2, threads));
  Post post;
  End ends[2] = {{&post, 0}, {&post, 1}};
  mla_communicator* own[2];
  for (int r = 0; r < 2; ++r) {
    const mla_transport t = transport_of(ends[r]);
    ASSERT_OK(mla_communicator_create(r, 2, &t, &own[r]));
  }
  std::vector<float> by_threads[2], by_post[2];
  const auto run = [&](int rank) {
    int64_t begin = 0, count = 0;
    EXPECT_OK(mla_head_share(kHeads, rank, 2, &begin, &count));
    Part part(begin, count);
    by_threads[rank] = forward(part, threads[rank], 2);
    Part again(begin, count);
    by_post[rank] = forward(again, own[rank], 2);
  };
  std::thread other(run, 1);
  run(0);
  other.join();
  EXPECT_EQ(by_post[0], by_threads[0]);
  EXPECT_EQ(by_post[1], by_threads[0]);
  for (int r = 0; r < 2; ++r) {
    EXPECT_OK(mla_communicator_destroy(threads[r]));
    EXPECT_OK(mla_communicator_destroy(own[r]));
  }
  EXPECT_EQ(post.released, 2);
}

TEST(CRanks, FaultsAreNamed) {
  mla_communicator* ranks[2];
  ASSERT_OK(mla_communicator_create_threads(2, ranks));
  Part part(0, 2);
  part.options.tensor_parallel = 2;
  Plan plan;
  ASSERT_OK(mla_plan_create(part.stream, part.model, &part.spec, kPages, &part.batch, &part.options, &plan));
  Bytes workspace(describe(plan).workspace_bytes);
  mla_layer_args a = part.args(plan, workspace);
  Tensor<float> hidden({kTokens, 96}), out({kTokens, 96});
  EXPECT_FAILS(MLA_ERROR_HANDLE, mla_forward(part.stream, &a, hidden, out), "ranks is NULL");
  a.ranks = ranks[0];
  a.rank_seconds = -1;
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_forward(part.stream, &a, hidden, out), "rank_seconds is -1.000000");
  a.rank_seconds = 0.2;
  EXPECT_FAILS(MLA_ERROR_DEVICE, mla_forward(part.stream, &a, hidden, out), "rank 1 did not come");
  EXPECT_OK(mla_communicator_destroy(ranks[0]));
  EXPECT_OK(mla_communicator_destroy(ranks[1]));

  ASSERT_OK(mla_communicator_create_threads(2, ranks));
  a.ranks = ranks[0];
  a.rank_seconds = 20;
  EXPECT_OK(mla_communicator_abort(ranks[1], "out of patience"));
  EXPECT_FAILS(MLA_ERROR_DEVICE, mla_forward(part.stream, &a, hidden, out), "out of patience");
  EXPECT_OK(mla_communicator_destroy(ranks[0]));
  EXPECT_OK(mla_communicator_destroy(ranks[1]));

  EXPECT_FAILS(MLA_ERROR_INPUT, mla_communicator_create_threads(0, ranks), "ranks is 0");
  mla_transport t = make<mla_transport>();
  mla_communicator* one = nullptr;
  EXPECT_FAILS(MLA_ERROR_HANDLE, mla_communicator_create(0, 2, &t, &one), "exchange is NULL");
  Post post;
  End end{&post, 0};
  t = transport_of(end);
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_communicator_create(2, 2, &t, &one), "rank is 2 of 2");
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_communicator_create(0, 65537, &t, &one), "ranks is 65537");
  EXPECT_EQ(post.released, 0);
  int64_t begin = 0, count = 0;
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_head_share(4, 0, 5, &begin, &count), "ranks is 5");
  mla_model* none = nullptr;
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_model_part(part.model, 1, 2, &none), "heads 1");
  part.options.tensor_parallel = -1;
  mla_plan* no_plan = nullptr;
  EXPECT_FAILS(MLA_ERROR_INPUT,
               mla_plan_create(part.stream, part.model, &part.spec, kPages, &part.batch, &part.options, &no_plan),
               "tensor_parallel is -1");
  mla_prepare_options prepare = mla_prepare_options_default();
  prepare.head_begin = 1;
  mla_weights* no_weights = nullptr;
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_weights_create_random(part.model, 0, 3, MLA_F32, &prepare, kCpu, &no_weights),
               "head_begin is 1, head_count is 0");
  prepare.head_begin = 0;
  prepare.group_members = 2;
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_weights_create_random(part.model, 0, 3, MLA_F32, &prepare, kCpu, &no_weights),
               "group_members is 2, head_count is 0");
  prepare.head_count = 1;
  EXPECT_FAILS(MLA_ERROR_HANDLE, mla_weights_create_random(part.model, 0, 3, MLA_F32, &prepare, kCpu, &no_weights),
               "group_heads is NULL");
}

}  // namespace
}  // namespace capi
