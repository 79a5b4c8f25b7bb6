// Ranks on GPUs: what their calls bring, to the bit; captured; how they end when one does not come; and layers over
// them. With one GPU all ranks of a group of peers are on it; NCCL wants a GPU for each.
#include "ranks.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <random>

#include "support/message.hpp"

namespace mla::test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

struct Group {
  GpuLink link;
  int ranks;
  bool lines = true;  // of peers, where the link brings them
};
void PrintTo(const Group& g, std::ostream* out) {
  *out << g.ranks << " ranks, " << to_string(g.link) << (g.lines ? "" : " by flags");
}
class GpuRanks : public testing::TestWithParam<Group> {
 protected:
  void SetUp() override {
    if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
    if (GetParam().link == GpuLink::nccl)
      for (const std::string& e : on_gpus(GpuLink::nccl, 1, [](Self) {}))
        if (e.find("NCCL is not there") != std::string::npos) GTEST_SKIP() << e;
    if (gpu_count() < GetParam().ranks)
      GTEST_SKIP() << GetParam().ranks << " ranks need as many GPUs, there are " << gpu_count();
    setenv("MLA_PEER_LINES", GetParam().lines ? "1" : "0", 1);
  }
  void TearDown() override { unsetenv("MLA_PEER_LINES"); }
  std::vector<std::string> run(const std::function<void(Self)>& work, size_t staging = size_t{1} << 20) const {
    return on_gpus(GetParam().link, GetParam().ranks, work, staging);
  }
};
INSTANTIATE_TEST_SUITE_P(Links, GpuRanks,
                         testing::Values(Group{GpuLink::peer, 1}, Group{GpuLink::peer, 2}, Group{GpuLink::peer, 3},
                                         Group{GpuLink::peer, 4}, Group{GpuLink::peer, 2, false},
                                         Group{GpuLink::peer, 4, false}, Group{GpuLink::nccl, 1},
                                         Group{GpuLink::nccl, 2}),
                         [](const auto& p) {
                           return std::string(to_string(p.param.link)) + std::to_string(p.param.ranks) +
                                  (p.param.lines ? "" : "_flags");
                         });

std::vector<std::byte> bytes_of(uint64_t seed, size_t n) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> x(n);
  for (std::byte& b : x) b = static_cast<std::byte>(random());
  return x;
}
Buffer on(const Self& s, const std::vector<std::byte>& x) {
  return x.empty() ? Buffer(16, s.device) : Buffer::copy_of(x.data(), x.size(), s.device);
}
std::vector<std::byte> back(const Self& s, const std::byte* data, size_t n) {
  std::vector<std::byte> x(n);
  if (n > 0) copy(s.stream, x.data(), data, n);
  s.stream.synchronize();
  return x;
}
std::vector<std::byte> poison(size_t n) { return std::vector<std::byte>(n, std::byte{0xee}); }

// As the host's ranks bring it: by the same call over threads.
TEST_P(GpuRanks, EveryCallBringsWhatTheHostsDoes) {
  std::vector<Communicator> host = thread_communicators(GetParam().ranks);
  expect_none(run([&](Self s) {
    Communicator& reference = host[static_cast<size_t>(s.rank)];
    const size_t self = static_cast<size_t>(s.rank), n = static_cast<size_t>(s.ranks);
    for (int turn = 0; turn < 24; ++turn) {
      // Odd bytes, whole vectors, several words a thread, and, in some turns, more than the staging takes at once.
      const int64_t unit = turn % 3 == 0   ? 1
                           : turn % 3 == 1 ? 16
                                           : 4096,
                    big = turn % 8 == 7   ? 257
                          : turn % 8 == 3 ? 20
                                          : 1;
      const auto length = [&](int from, int to) {
        return int64_t{(from * 5 + to * 3 + turn) % 7} * unit * (unit > 1 ? big : 613);
      };
      int64_t most = 0;
      for (int a = 0; a < s.ranks; ++a)
        for (int b = 0; b < s.ranks; ++b) most = std::max(most, length(a, b));
      std::vector<int64_t> sent(n), received(n), gathered(n);
      for (int r = 0; r < s.ranks; ++r) {
        sent[static_cast<size_t>(r)] = length(s.rank, r), received[static_cast<size_t>(r)] = length(r, s.rank);
        gathered[static_cast<size_t>(r)] = length(r, r);
      }
      const auto total = [](const std::vector<int64_t>& x) {
        return static_cast<size_t>(std::accumulate(x.begin(), x.end(), int64_t{0}));
      };
      const uint64_t seed = static_cast<uint64_t>(turn * 100 + s.rank);
      {
        const auto in = bytes_of(seed, total(sent));
        std::vector<std::byte> want = poison(total(received));
        reference.all_to_all({"swap"}, in.data(), sent, want.data(), received);
        const Buffer from = on(s, in), to = on(s, poison(want.size()));
        s.comm.all_to_all(s.stream, {.step = "swap", .most_bytes = most}, from.data(), sent, to.data(), received);
        ASSERT_TRUE(back(s, to.data(), want.size()) == want) << "all_to_all, turn " << turn;
      }
      for (const bool in_place : {false, true}) {
        const auto in = bytes_of(seed + 7, static_cast<size_t>(gathered[self]));
        std::vector<std::byte> want = poison(total(gathered)), start = want;
        reference.all_gather({"gather"}, in.data(), want.data(), gathered);
        const int64_t at = std::accumulate(gathered.begin(), gathered.begin() + s.rank, int64_t{0});
        if (in_place) std::copy(in.begin(), in.end(), start.begin() + at);
        const Buffer from = on(s, in), to = on(s, start);
        s.comm.all_gather(s.stream, {"gather"}, in_place ? to.data() + at : from.data(), to.data(), gathered);
        ASSERT_TRUE(back(s, to.data(), want.size()) == want) << "all_gather, turn " << turn;
      }
      {
        std::vector<std::byte> want = bytes_of(seed + 9, static_cast<size_t>(most));
        const Buffer to = on(s, want);
        reference.broadcast({"broadcast"}, turn % s.ranks, want.data(), most);
        s.comm.broadcast(s.stream, {"broadcast"}, turn % s.ranks, to.data(), most);
        ASSERT_TRUE(back(s, to.data(), want.size()) == want) << "broadcast, turn " << turn;
      }
      for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
        const int64_t count = turn == 0 ? 0 : (turn % 2 ? 8 : 1) * (turn * 37 % 101) * big * 5,
                      size = static_cast<int64_t>(size_of(dtype));
        std::vector<std::byte> in(static_cast<size_t>(count * size));
        for (int64_t i = 0; i < count; ++i) {
          // Sums that depend on their order.
          const float x = static_cast<float>((i * 37 + s.rank * 101 + turn) % 97 - 48) *
                          std::ldexp(1.0f, static_cast<int>((s.rank * 5 + i) % 11) - 6);
          store_float(dtype, in.data(), i, x);
        }
        for (const bool in_place : {false, true}) {
          std::vector<std::byte> want = poison(in.size());
          reference.all_reduce({"sum"}, dtype, in.data(), want.data(), count);
          const Buffer from = on(s, in), to = on(s, in_place ? in : poison(in.size()));
          s.comm.all_reduce(s.stream, {"sum"}, dtype, in_place ? to.data() : from.data(), to.data(), count);
          ASSERT_TRUE(back(s, to.data(), want.size()) == want) << "all_reduce, turn " << turn;
        }
        std::vector<int64_t> counts(n, count / s.ranks);
        counts[n - 1] += count % s.ranks;
        if (turn % 5 == 0 && n > 1) counts[0] += std::exchange(counts[1], 0);
        std::vector<std::byte> want = poison(static_cast<size_t>(counts[self] * size));
        reference.reduce_scatter({"part"}, dtype, in.data(), want.data(), counts);
        const Buffer from = on(s, in), to = on(s, poison(want.size()));
        s.comm.reduce_scatter(s.stream, {"part"}, dtype, from.data(), to.data(), counts);
        ASSERT_TRUE(back(s, to.data(), want.size()) == want) << "reduce_scatter, turn " << turn;
      }
    }
  }));
}

// Two parts, of rows that are apart at one end, at the other, or at both.
TEST_P(GpuRanks, RowsComeToTheirPlaces) {
  std::vector<Communicator> host = thread_communicators(GetParam().ranks);
  expect_none(run([&](Self s) {
    ThreadPool pool(1);
    Stream cpu(pool);
    for (const int64_t unit : {1, 4, 16, 400, 12007, 16000}) {
      const int64_t rows = 13, n = s.ranks;
      const auto heads = [](int64_t r) { return r + 1; };
      const int64_t all = n * (n + 1) / 2, own = heads(s.rank);
      // Part 0 lies apart where it is sent, part 1 where it comes to.
      const auto in = bytes_of(static_cast<uint64_t>(s.rank), static_cast<size_t>(rows * all * unit * 2));
      std::vector<std::byte> out = poison(static_cast<size_t>(rows * (n * own + all) * unit));
      const auto messages = [&](const std::byte* from, std::byte* to, std::vector<SendRows>& send,
                                std::vector<ReceiveRows>& receive) {
        int64_t before = 0;
        for (int64_t r = 0; r < n; before += heads(r++)) {
          send.push_back({from + before * unit, rows, heads(r) * unit, all * unit});
          receive.push_back({to + r * rows * own * unit, 1, rows * own * unit, 0});
        }
        before = 0;
        for (int64_t r = 0; r < n; before += heads(r++)) {
          send.push_back({from + rows * all * unit, 1, rows * own * unit, 0});
          receive.push_back({to + (rows * n * own + before) * unit, rows, heads(r) * unit, all * unit});
        }
      };
      std::vector<SendRows> send;
      std::vector<ReceiveRows> receive;
      messages(in.data(), out.data(), send, receive);
      host[static_cast<size_t>(s.rank)].exchange(cpu, {"rows"}, send, receive);
      const Buffer from = on(s, in), to = on(s, poison(out.size()));
      std::vector<SendRows> device_send;
      std::vector<ReceiveRows> device_receive;
      messages(from.data(), to.data(), device_send, device_receive);
      s.comm.exchange(s.stream, {.step = "rows", .most_bytes = 2 * rows * n * unit}, device_send, device_receive);
      ASSERT_TRUE(back(s, to.data(), out.size()) == out) << unit << " bytes";
    }
  }));
}

TEST_P(GpuRanks, CapturedCallsAreRepeated) {
  expect_none(run([&](Self s) {
    constexpr int64_t kCount = 5000;
    const Buffer x(kCount * sizeof(float), s.device),
        all(kCount * sizeof(float) * static_cast<size_t>(s.ranks), s.device);
    const std::vector<int64_t> sizes(static_cast<size_t>(s.ranks), kCount * int64_t{sizeof(float)});
    const auto step = [&] {
      s.comm.all_gather(s.stream, {"gather"}, x.data(), all.data(), sizes);
      s.comm.all_reduce(s.stream, {"sum"}, Dtype::f32, x.data(), x.data(), kCount);
    };
    std::vector<float> in(kCount);
    const Graph graph(s.stream, step);
    for (int turn = 0; turn < 100; ++turn) {
      for (int64_t i = 0; i < kCount; ++i)
        in[static_cast<size_t>(i)] = static_cast<float>(i % 113 * (s.rank + 1) + turn);
      copy(s.stream, x.data(), in.data(), kCount * sizeof(float));
      graph.launch(s.stream);
      std::vector<float> sum(kCount), gathered(kCount * static_cast<size_t>(s.ranks));
      copy(s.stream, sum.data(), x.data(), sum.size() * sizeof(float));
      copy(s.stream, gathered.data(), all.data(), gathered.size() * sizeof(float));
      s.stream.synchronize();
      for (int64_t i = 0; i < kCount; ++i) {
        float want = 0;
        for (int r = 0; r < s.ranks; ++r) {
          const auto term = static_cast<float>(i % 113 * (r + 1) + turn);
          want += term;
          ASSERT_EQ(gathered[static_cast<size_t>(r * kCount + i)], term) << "turn " << turn;
        }
        ASSERT_EQ(sum[static_cast<size_t>(i)], want) << "turn " << turn;
      }
    }
  }));
}

// Bytes go round all ranks and are turned by eight in every round, so that no round brings what an earlier one brought
// to the same place, and what is lost once stays lost.
TEST_P(GpuRanks, ThousandsOfRoundsLoseNothing) {
  expect_none(run([&](Self s) {
    for (const size_t bytes : {size_t{40'008}, size_t{1} << 20}) {
      const auto of = [&](int rank) { return bytes_of(bytes + static_cast<size_t>(rank), bytes); };
      Buffer x = on(s, of(s.rank)), y(bytes, s.device);
      const auto length = static_cast<int64_t>(bytes);
      const size_t n = static_cast<size_t>(s.ranks), next = static_cast<size_t>((s.rank + 1) % s.ranks),
                   before = static_cast<size_t>((s.rank + s.ranks - 1) % s.ranks);
      const auto turn = [&](const Buffer& from, const Buffer& to) {
        std::vector<SendRows> send(2 * n);
        std::vector<ReceiveRows> receive(2 * n);
        send[next] = {from.data() + 8, 1, length - 8, 0}, send[n + next] = {from.data(), 1, 8, 0};
        receive[before] = {to.data(), 1, length - 8, 0}, receive[n + before] = {to.data() + length - 8, 1, 8, 0};
        s.comm.exchange(s.stream, {.step = "turn", .most_bytes = length}, send, receive);
      };
      const int rounds = 24 * s.ranks;  // even, and bytes are at home
      const Graph graph(s.stream, [&] {
        for (int i = 0; i < rounds; i += 2) turn(x, y), turn(y, x);
      });
      const int launches = 40;
      for (int i = 0; i < launches; ++i) graph.launch(s.stream);
      std::vector<std::byte> want = of(s.rank);
      std::rotate(want.begin(), want.begin() + 8 * rounds * launches % length, want.end());
      ASSERT_TRUE(back(s, x.data(), bytes) == want) << bytes << " bytes";
    }
  }));
}

TEST_P(GpuRanks, WhoDoesNotComeIsNamed) {
  if (GetParam().ranks == 1) GTEST_SKIP() << "a rank alone waits for nobody";
  const auto start = Clock::now();
  const int last = GetParam().ranks - 1;
  const auto errors = run([&](Self s) {
    const Buffer x(4096, s.device);
    s.comm.all_reduce(s.stream, {"sum"}, Dtype::f32, x.data(), x.data(), 1024);
    s.stream.synchronize();
    if (s.rank == last) {
      std::this_thread::sleep_for(3s);  // as a rank that hangs
      return;
    }
    s.comm.all_reduce(s.stream, {"late sum", 1s}, Dtype::f32, x.data(), x.data(), 1024);
    s.stream.synchronize();
  });
  EXPECT_LT(Clock::now() - start, 30s);
  for (int r = 0; r < last; ++r) {
    EXPECT_NE(errors[static_cast<size_t>(r)].find("late sum"), std::string::npos) << errors[static_cast<size_t>(r)];
    EXPECT_NE(errors[static_cast<size_t>(r)].find("rank " + std::to_string(last) + " did not come"), std::string::npos)
        << errors[static_cast<size_t>(r)];
  }
}

TEST_P(GpuRanks, AbortEndsWaitingKernels) {
  if (GetParam().ranks == 1) GTEST_SKIP() << "a rank alone waits for nobody";
  const auto start = Clock::now();
  const auto errors = run([&](Self s) {
    const Buffer x(4096, s.device);
    if (s.rank == 1) {
      std::this_thread::sleep_for(300ms);
      throw InputError("rank 1 has no more");
    }
    s.comm.all_reduce(s.stream, {"sum"}, Dtype::f32, x.data(), x.data(), 1024);
    s.stream.synchronize();
  });
  EXPECT_LT(Clock::now() - start, 30s);
  EXPECT_NE(errors[0].find("rank 1 has no more"), std::string::npos) << errors[0];
}

TEST_P(GpuRanks, WrongCallsAreRefused) {
  expect_none(run([&](Self s) {
    if (s.rank != 0) return;
    ThreadPool pool(1);
    Stream cpu(pool);
    std::vector<Communicator> other = thread_communicators(1);
    const Buffer x(64, s.device);
    EXPECT_EQ(message_of([&] { other[0].all_reduce(s.stream, {"sum"}, Dtype::f32, x.data(), x.data(), 4); }),
              "step 'sum': the group's calls on " + to_string(s.device) + " need connect() first");
    EXPECT_EQ(message_of([&] { other[0].connect({}, GpuLink::peer); }),
              "communicator: connect on cpu, ranks on the CPU are connected as they are");
    EXPECT_EQ(message_of([&] { s.comm.all_reduce(s.stream, {"sum"}, Dtype::f32, nullptr, x.data(), 4); }),
              "step 'sum': in is null, bytes are 16");
  }));
}

TEST(GpuRankLinks, RanksOnOneGpuAreRefused) {
  for (const std::string& e : on_gpus(GpuLink::peer, gpu_count() + 1, [](Self) { ADD_FAILURE(); }))
    EXPECT_NE(e.find("each needs one of its own"), std::string::npos) << e;
}

class GpuRankLayers : public GpuRanks {};
INSTANTIATE_TEST_SUITE_P(Links, GpuRankLayers,
                         testing::Values(Group{GpuLink::peer, 2}, Group{GpuLink::peer, 3}, Group{GpuLink::nccl, 2}),
                         [](const auto& p) {
                           return std::string(to_string(p.param.link)) + std::to_string(p.param.ranks);
                         });

// One rank's rows by every division, on all ranks the same bits, captured or not.
void expect_rows(const Group& group, const Lengths& l, const Split& split) {
  Split whole = split;
  whole.ranks = whole.members = 1;
  whole.exchange = ContextExchange::latents;
  Stream alone({DeviceKind::cuda, 0});
  const std::vector<bf16> right = steps_of(whole, 0, alone, nullptr, l, false);
  float largest = 0;
  for (const bf16 x : right) largest = std::max(largest, std::abs(to_float(x)));
  ASSERT_GT(largest, 0);
  std::vector<bf16> first;
  for (const bool captured : {false, true}) {
    std::vector<std::vector<bf16>> found(static_cast<size_t>(split.ranks));
    expect_none(on_gpus(
        group.link, group.ranks,
        [&](Self s) { found[static_cast<size_t>(s.rank)] = steps_of(split, s.rank, s.stream, &s.comm, l, captured); },
        size_t{1} << 20));
    const std::string what = std::string(to_string(split.format)) + ", " + std::string(to_string(split.path)) +
                             ", groups of " + std::to_string(split.members) + " exchanging " +
                             std::string(to_string(split.exchange)) + (captured ? ", captured" : "");
    for (const auto& one : found) {
      ASSERT_EQ(one.size(), right.size()) << what;
      // Orders of sums, and roundings of 8 bits behind them.
      for (size_t i = 0; i < right.size(); ++i)
        ASSERT_NEAR(to_float(one[i]), to_float(right[i]), 0.02f * largest) << what << ", element " << i;
      ASSERT_EQ(std::memcmp(one.data(), found[0].data(), one.size() * sizeof(bf16)), 0) << what;
    }
    if (first.empty()) first = found[0];
    ASSERT_EQ(std::memcmp(first.data(), found[0].data(), first.size() * sizeof(bf16)), 0) << what;
  }
}

TEST_P(GpuRankLayers, RanksGiveTheLayersRows) {
  const int ranks = GetParam().ranks;
  const Lengths ragged{{1, 3, 1, 2, 7}, {130, 40, 1, 0, 65}}, decodes{{1, 1, 1, 1}, {900, 3, 260, 64}};
  for (const Lengths& l : {ragged, decodes})
    for (const SplitPolicy policy : {SplitPolicy::fast, SplitPolicy::batch_invariant})
      for (const CacheFormat format : {CacheFormat::bf16, CacheFormat::fp8_ds_mla})
        for (const int members : {1, ranks})
          expect_rows(GetParam(), l, {ranks, members, format, policy, PathPolicy::latent});
}

// Some requests on either path, or all of them decodes.
TEST_P(GpuRankLayers, RanksExchangeHeads) {
  const int ranks = GetParam().ranks;
  const Lengths ragged{{1, 3, 1, 2, 7}, {130, 40, 1, 0, 65}}, decodes{{1, 1, 1, 1}, {900, 3, 260, 64}};
  for (const Lengths& l : {ragged, decodes})
    for (const CacheFormat format : {CacheFormat::bf16, CacheFormat::fp8})
      for (const bool selects : {false, true})
        expect_rows(GetParam(), l,
                    {ranks, ranks, format, SplitPolicy::fast, PathPolicy::automatic, selects, ContextExchange::heads});
}

// Each rank's range of the rows: the bits that all have otherwise.
TEST_P(GpuRankLayers, RanksMaySumTheirOwnRows) {
  const int ranks = GetParam().ranks;
  const Lengths l{{1, 3, 1, 2, 7}, {130, 40, 1, 0, 65}};
  for (const bool captured : {false, true}) {
    std::vector<std::vector<bf16>> own(static_cast<size_t>(ranks));
    std::vector<bf16> all, joined;
    expect_none(on_gpus(
        GetParam().link, ranks,
        [&](Self s) {
          Split split{ranks, 1};
          std::vector<bf16> rows = steps_of(split, s.rank, s.stream, &s.comm, l, captured);
          if (s.rank == 0) all = std::move(rows);
          split.sums = HiddenSums::own;
          own[static_cast<size_t>(s.rank)] = steps_of(split, s.rank, s.stream, &s.comm, l, captured);
        },
        size_t{1} << 20));
    for (const auto& rows : own) joined.insert(joined.end(), rows.begin(), rows.end());
    ASSERT_EQ(joined.size(), all.size());
    EXPECT_EQ(std::memcmp(joined.data(), all.data(), all.size() * sizeof(bf16)), 0) << captured;
  }
}

// Context on the expanded path: rows of other ranks, in every format.
TEST_P(GpuRankLayers, PrefillsOverASplitCache) {
  const int ranks = GetParam().ranks;
  const Lengths l{{30, 3, 1, 20}, {600, 40, 1, 0}};
  for (const SplitPolicy policy : {SplitPolicy::fast, SplitPolicy::batch_invariant})
    for (const CacheFormat format : {CacheFormat::bf16, CacheFormat::fp8, CacheFormat::fp8_ds_mla})
      expect_rows(GetParam(), l, {ranks, ranks, format, policy, PathPolicy::expanded});
}

// The indexer's keys are split, too: some requests fit what is selected, some outgrow it.
TEST_P(GpuRankLayers, RanksSelectWhatOneSelects) {
  const int ranks = GetParam().ranks;
  const Lengths l{{1, 3, 30, 2}, {330, 40, 3, 0}};
  for (const SplitPolicy policy : {SplitPolicy::fast, SplitPolicy::batch_invariant})
    for (const CacheFormat format : {CacheFormat::bf16, CacheFormat::fp8_ds_mla})
      expect_rows(GetParam(), l, {ranks, ranks, format, policy, PathPolicy::automatic, true});
}

class GpuRankGroups : public GpuRanks {};
INSTANTIATE_TEST_SUITE_P(Links, GpuRankGroups, testing::Values(Group{GpuLink::peer, 4}, Group{GpuLink::nccl, 4}),
                         [](const auto& p) {
                           return std::string(to_string(p.param.link)) + std::to_string(p.param.ranks);
                         });
TEST_P(GpuRankGroups, ShareCachesOfTheirOwn) {
  const Lengths l{{1, 3, 1, 2, 7}, {130, 40, 1, 0, 65}};
  for (const PathPolicy path : {PathPolicy::latent, PathPolicy::expanded})
    expect_rows(GetParam(), l, {4, 2, CacheFormat::bf16, SplitPolicy::fast, path});
  expect_rows(GetParam(), l, {4, 2, CacheFormat::bf16, SplitPolicy::fast, PathPolicy::automatic, true});
}

// The same bits over every link.
TEST(GpuRankLinks, GiveTheSameBits) {
  if (gpu_count() < 2) GTEST_SKIP() << "links of two GPUs, there are " << gpu_count();
  const Lengths l{{1, 1, 5}, {300, 64, 17}};
  std::vector<std::vector<bf16>> by_link;
  for (const GpuLink link : {GpuLink::peer, GpuLink::nccl})
    expect_none(on_gpus(link, 2, [&](Self s) {
      std::vector<bf16> out = steps_of({2, 2}, s.rank, s.stream, &s.comm, l, false);
      if (s.rank == 0) by_link.push_back(std::move(out));
    }));
  ASSERT_EQ(by_link.size(), 2u);
  EXPECT_EQ(std::memcmp(by_link[0].data(), by_link[1].data(), by_link[0].size() * sizeof(bf16)), 0);
}

}  // namespace
}  // namespace mla::test
