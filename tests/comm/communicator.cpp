// Six calls over threads and over a caller's transport: what they bring, to the bit, and how they end when a rank
// fails.
#include "mla/communicator.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <future>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "comm/post.hpp"
#include "support/message.hpp"

namespace mla {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using test::message_of;

// Each rank on its own thread, its communicator destroyed when its work ends or throws. Errors by rank.
std::vector<std::exception_ptr> on_ranks(std::vector<Communicator> group,
                                         const std::function<void(Communicator&)>& work) {
  std::vector<std::exception_ptr> errors(group.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < group.size(); ++r) {
    threads.emplace_back([&work, &error = errors[r], mine = std::move(group[r])]() mutable {
      Communicator self = std::move(mine);
      try {
        work(self);
      } catch (...) {
        error = std::current_exception();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  return errors;
}

void expect_none(const std::vector<std::exception_ptr>& errors) {
  for (size_t r = 0; r < errors.size(); ++r) {
    if (!errors[r]) continue;
    try {
      std::rethrow_exception(errors[r]);
    } catch (const std::exception& e) {
      ADD_FAILURE() << "rank " << r << ": " << e.what();
    }
  }
}

struct Kind {
  const char* name;
  std::vector<Communicator> (*group)(int ranks);
};
const Kind kKinds[] = {{"threads", thread_communicators}, {"transport", test::Post::communicators}};

class Ranks : public testing::TestWithParam<std::tuple<int, int>> {
 protected:
  const Kind& kind = kKinds[std::get<0>(GetParam())];
  const int ranks = std::get<1>(GetParam());
  std::vector<Communicator> group() const { return kind.group(ranks); }
};
INSTANTIATE_TEST_SUITE_P(Kinds, Ranks, testing::Combine(testing::Values(0, 1), testing::Range(1, 9)),
                         [](const auto& p) {
                           return kKinds[std::get<0>(p.param)].name + std::to_string(std::get<1>(p.param));
                         });

// Ranks come at different times, sometimes long after one another.
void dawdle(std::mt19937& random) {
  if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
}

uint8_t byte_of(int from, int to, int64_t i, int turn) {
  return static_cast<uint8_t>(from * 31 + to * 7 + i * 3 + turn);
}

TEST_P(Ranks, BytesOfUnevenLengthsComeToTheirPlaces) {
  expect_none(on_ranks(group(), [&](Communicator& comm) {
    ASSERT_EQ(comm.ranks(), ranks);
    const int me = comm.rank();
    std::mt19937 random(me);
    for (int turn = 0; turn < 30; ++turn) {
      const auto length = [&](int from, int to) {
        return int64_t{(from * 5 + to * 3 + turn) % 7} * (turn % 3 ? 1 : 613);
      };
      std::vector<int64_t> sent(ranks), received(ranks), gathered(ranks);
      for (int r = 0; r < ranks; ++r) sent[r] = length(me, r), received[r] = length(r, me), gathered[r] = length(r, r);

      std::vector<uint8_t> in, out(std::accumulate(received.begin(), received.end(), int64_t{0}), 0xee), want;
      for (int r = 0; r < ranks; ++r) {
        for (int64_t i = 0; i < sent[r]; ++i) in.push_back(byte_of(me, r, i, turn));
        for (int64_t i = 0; i < received[r]; ++i) want.push_back(byte_of(r, me, i, turn));
      }
      dawdle(random);
      comm.all_to_all({"swap"}, in.data(), sent, out.data(), received);
      ASSERT_EQ(out, want);

      for (const bool in_place : {false, true}) {
        std::vector<uint8_t> mine, all;
        want.clear();
        int64_t start = 0;
        for (int r = 0; r < ranks; ++r) {
          if (r == me) start = std::ssize(want);
          for (int64_t i = 0; i < gathered[r]; ++i) want.push_back(byte_of(r, 0, i, turn));
        }
        for (int64_t i = 0; i < gathered[me]; ++i) mine.push_back(byte_of(me, 0, i, turn));
        all.assign(want.size(), 0xee);
        if (in_place) std::copy(mine.begin(), mine.end(), all.begin() + start);
        dawdle(random);
        comm.all_gather({"gather"}, in_place ? all.data() + start : mine.data(), all.data(), gathered);
        ASSERT_EQ(all, want) << "in place " << in_place;
      }

      const int root = turn % ranks;
      std::vector<uint8_t> data(turn * 11, static_cast<uint8_t>(me == root ? turn : 0xee));
      comm.broadcast({"broadcast"}, root, data.data(), std::ssize(data));
      ASSERT_EQ(data, std::vector<uint8_t>(turn * 11, static_cast<uint8_t>(turn)));
      // What is sent may change once a call returns.
      std::fill(in.begin(), in.end(), 0xdd);
    }
  }));
}

// Terms whose sum depends on its order, also in two-byte dtypes: every fourth is small + large - large.
float term(int rank, int64_t i) {
  const float fraction = 1.0f + static_cast<float>((i * 37 + rank * 101) % 97) / 97.0f;
  if (i % 4 == 0) return rank == 1 ? 0x1p14f : rank == 2 ? -0x1p14f : 0x1p-11f * fraction;
  return ((rank + i) % 2 ? -1.0f : 1.0f) * std::ldexp(fraction, static_cast<int>((rank * 5 + i) % 9) - 2);
}

template <class T>
std::vector<T> terms(int rank, int64_t count) {
  std::vector<T> all;
  for (int64_t i = 0; i < count; ++i) all.push_back(from_float<T>(term(rank, i)));
  return all;
}
template <class T>
std::vector<T> sums(int ranks, int64_t count, bool backwards = false) {
  std::vector<T> all;
  for (int64_t i = 0; i < count; ++i) {
    const auto at = [&](int r) { return to_float(from_float<T>(term(backwards ? ranks - 1 - r : r, i))); };
    float total = at(0);
    for (int r = 1; r < ranks; ++r) total += at(r);
    all.push_back(from_float<T>(total));
  }
  return all;
}
template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

template <class T>
void expect_sums(const std::function<std::vector<Communicator>()>& group, int ranks) {
  constexpr Dtype dtype = dtype_of<T>::value;
  if (ranks > 2) {
    EXPECT_FALSE(same(sums<T>(ranks, 4099), sums<T>(ranks, 4099, true))) << "a sum in any order would pass";
  }
  expect_none(on_ranks(group(), [&](Communicator& comm) {
    const int me = comm.rank();
    std::mt19937 random(me + 17);
    for (const int64_t count : {0, 1, 3, 8, 1000, 4099}) {
      for (const bool in_place : {false, true}) {
        std::vector<T> in = terms<T>(me, count), out(in.size());
        dawdle(random);
        comm.all_reduce({"sum"}, dtype, in.data(), in_place ? in.data() : out.data(), count);
        ASSERT_TRUE(same(in_place ? in : out, sums<T>(ranks, count))) << to_string(dtype) << " " << count;
      }
      // Uneven parts, some of them empty.
      std::vector<int64_t> counts(ranks, 0);
      for (int64_t left = count, r = 0; r < ranks; ++r) {
        counts[r] = r + 1 == ranks ? left : r % 3 == 1 ? 0 : left / 2;
        left -= counts[r];
      }
      const int64_t start = std::accumulate(counts.begin(), counts.begin() + me, int64_t{0});
      const std::vector<T> all = sums<T>(ranks, count);
      const std::vector<T> want(all.begin() + start, all.begin() + start + counts[me]);
      for (const bool in_place : {false, true}) {
        std::vector<T> in = terms<T>(me, count), out(want.size());
        dawdle(random);
        T* to = in_place ? in.data() + start : out.data();
        comm.reduce_scatter({"part"}, dtype, in.data(), to, counts);
        ASSERT_TRUE(same(std::vector<T>(to, to + counts[me]), want)) << to_string(dtype) << " " << count;
      }
    }
  }));
}

TEST_P(Ranks, SumsAreThoseInTheRanksOrderToTheBit) {
  expect_sums<float>([this] { return group(); }, ranks);
  expect_sums<bf16>([this] { return group(); }, ranks);
  expect_sums<f16>([this] { return group(); }, ranks);
}

TEST_P(Ranks, NobodyPassesABarrierBeforeAllAreThere) {
  std::atomic<int> there{0};
  expect_none(on_ranks(group(), [&](Communicator& comm) {
    std::mt19937 random(comm.rank());
    for (int turn = 1; turn <= 100; ++turn) {
      if (turn % 10 == 0) dawdle(random);
      ++there;
      comm.barrier({"meet"});
      ASSERT_GE(there, turn * ranks);
      comm.barrier({"part"});
    }
  }));
}

// --- faults ----------------------------------------------------------------------------------------------------------

// What `faulty` does instead of the second of three calls; the others must blame it, in time, and stay refused.
struct FaultOf {
  const char* name;
  const char* says;  // part of the message
  bool at_once;      // not only at the deadline
  void (*instead)(Communicator&);
};

constexpr std::chrono::milliseconds kShort = 300ms, kLong = 20s;

void gather(Communicator& comm, const char* step, int64_t bytes = 3, std::chrono::nanoseconds deadline = kLong) {
  const std::vector<int64_t> lengths(comm.ranks(), bytes);
  std::vector<uint8_t> in(bytes, 1), out(bytes * comm.ranks());
  comm.all_gather({step, deadline}, in.data(), out.data(), lengths);
}

const FaultOf kFaults[] = {
    {"Hangs", "", false, [](Communicator&) { std::this_thread::sleep_for(3 * kShort); }},
    {"Dies", "", true, [](Communicator&) { throw std::runtime_error("dead"); }},
    {"Aborts", "no more pages", true,
     [](Communicator& c) {
       c.abort("no more pages");
       std::this_thread::sleep_for(10ms);
     }},
    {"AnotherOperation", "barrier of step 'two'", true,
     [](Communicator& c) {
       c.barrier({"two", kLong});
     }},
    {"AnotherStep", "all_gather of step 'three'", true, [](Communicator& c) { gather(c, "three"); }},
    {"OtherSizes", "the sizes differ", true, [](Communicator& c) { gather(c, "two", 5); }},
};

TEST_P(Ranks, AFaultOfOneEndsAllInTimeAndNamesIt) {
  if (ranks == 1) return;
  for (const FaultOf& fault : kFaults) {
    const std::string name = fault.name;
    const auto deadline = fault.at_once ? kLong : kShort;
    for (const int faulty : {0, ranks / 2, ranks - 1}) {
      if (!fault.at_once && faulty != ranks / 2) continue;
      // Of two that differ neither is the odd one: the lower rank's call counts.
      const bool differs = fault.at_once && name != "Dies" && name != "Aborts";
      const int blamed = ranks == 2 && differs ? 1 : faulty;
      std::atomic<Clock::time_point> first{Clock::time_point::max()};  // of those that wait: its deadline ends all
      on_ranks(group(), [&](Communicator& comm) {
        gather(comm, "one");
        if (comm.rank() == faulty) {
          fault.instead(comm);
          return;
        }
        const auto start = Clock::now();
        for (auto seen = first.load(); start < seen && !first.compare_exchange_weak(seen, start);) {
        }
        for (int turn = 0; turn < 2; ++turn) {  // the second time at once
          try {
            gather(comm, "two", 3, deadline);
            ADD_FAILURE() << name << ": rank " << comm.rank() << " of " << ranks << " noticed nothing";
          } catch (const RankError& e) {
            EXPECT_EQ(e.rank(), blamed) << name << ": " << e.what();
            if (blamed == faulty) {
              // Who aborts between two calls has its last one to show.
              EXPECT_TRUE(e.step() == "two" || (name == "Aborts" && e.step() == "one")) << name << ": " << e.what();
              EXPECT_NE(std::string(e.what()).find(fault.says), std::string::npos) << e.what();
            }
          }
        }
        const auto end = Clock::now();
        EXPECT_LT(end - start, fault.at_once ? std::chrono::milliseconds(5s) : kShort + 1s) << name;
        if (!fault.at_once) {
          EXPECT_GE(end - first.load(), kShort - 1ms) << name;
        }
      });
    }
  }
}

TEST_P(Ranks, MessagesWhoseEndsDisagreeAreRefused) {
  if (ranks == 1) return;
  std::atomic<int> blamed{0};
  const auto errors = on_ranks(group(), [&](Communicator& comm) {
    std::vector<int64_t> send(ranks, 2), receive(ranks, 2);
    if (comm.rank() == 0) send[ranks - 1] = 3;
    std::vector<uint8_t> in(2 * ranks + 1), out(2 * ranks);
    try {
      comm.all_to_all({"swap", kLong}, in.data(), send, out.data(), receive);
      gather(comm, "after");  // those whose own messages were right
    } catch (const RankError& e) {
      blamed += e.rank() == 0;
      if (comm.rank() == ranks - 1) {
        EXPECT_NE(std::string(e.what()).find("rank 0 sends 3 bytes to rank " + std::to_string(ranks - 1) +
                                             ", which expects 2"),
                  std::string::npos)
            << e.what();
      }
      throw;
    }
  });
  for (const std::exception_ptr& e : errors) EXPECT_TRUE(e);
  EXPECT_GE(blamed, 1);
}

TEST_P(Ranks, DtypesAndRootsMustAgree) {
  if (ranks < 3) return;
  for (const bool root : {false, true}) {
    on_ranks(group(), [&](Communicator& comm) {
      const bool odd = comm.rank() == 1;
      float x[2] = {1, 2};
      try {
        if (root) comm.broadcast({"b", kLong}, odd ? 2 : 0, x, 8);
        else comm.all_reduce({"b", kLong}, odd ? Dtype::bf16 : Dtype::f32, x, x, 2);
        ADD_FAILURE();
      } catch (const RankError& e) {
        EXPECT_EQ(e.rank(), 1) << e.what();
        EXPECT_NE(std::string(e.what()).find(root ? "the roots are 2 and 0" : "the dtypes are bf16 and f32"),
                  std::string::npos)
            << e.what();
      }
    });
  }
}

// What follows from it, here other sizes, is not what the message is about.
TEST_P(Ranks, PlansMustAgree) {
  if (ranks == 1) return;
  const int odd = ranks == 2 ? 1 : ranks / 2;
  for (const int32_t tokens : {8, 9}) {
    on_ranks(group(), [&](Communicator& comm) {
      const bool differs = comm.rank() == odd;
      std::vector<float> x(10, 1.0f);
      const PlanDigest all{.hash = 7, .tokens = 8, .requests = 2}, own{.hash = 9, .tokens = tokens, .requests = 2};
      const Collective call{.step = "sum", .deadline = kLong, .plan = all};
      comm.all_reduce(call, Dtype::f32, x.data(), x.data(), 8);
      try {
        const int64_t count = differs ? tokens : 8;
        comm.all_reduce({.step = "sum", .deadline = kLong, .plan = differs ? own : all}, Dtype::f32, x.data(), x.data(),
                        count);
        ADD_FAILURE();
      } catch (const RankError& e) {
        EXPECT_EQ(e.rank(), odd) << e.what();
        EXPECT_EQ(e.step(), "sum");
        const std::string why = "their plans differ, " + std::to_string(tokens) +
                                " tokens of 2 requests and 8 tokens of 2 requests" +
                                (tokens == 8 ? ", of other lengths, or with other options" : "");
        EXPECT_NE(std::string(e.what()).find(why), std::string::npos) << e.what();
      }
    });
  }
}

// From another thread, as a signal's handler thread does it.
TEST_P(Ranks, AnAbortWakesItsOwnRankToo) {
  if (ranks == 1) return;
  auto all = group();
  std::vector<Communicator> last;
  last.push_back(std::move(all.back()));
  all.pop_back();
  std::thread stop([&] {
    std::this_thread::sleep_for(20ms);
    last[0].abort("stopped");
  });
  const auto start = Clock::now();
  const auto errors = on_ranks(std::move(all), [](Communicator& comm) { comm.barrier({"wait", 20s}); });
  stop.join();
  EXPECT_LT(Clock::now() - start, 5s);
  for (const std::exception_ptr& e : errors) EXPECT_THROW(std::rethrow_exception(e), RankError);
  EXPECT_THROW(last[0].barrier({"wait"}), RankError);
}

// A rank may leave right after its last call, while others have not seen yet that the call was made.
TEST_P(Ranks, LeavingAfterTheLastCallHarmsNobody) {
  for (int turn = 0; turn < 50; ++turn)
    expect_none(on_ranks(group(), [&](Communicator& comm) { gather(comm, "last"); }));
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST(ThreadRanks, OneWithoutMemoryEndsAll) {
  const auto start = Clock::now();
  const auto errors = on_ranks(thread_communicators(3), [](Communicator& comm) {
    std::vector<float> x(3);
    const std::vector<int64_t> counts = {1, 1, 1}, absurd = {int64_t{1} << 43, 0, 0};
    // Nothing there is read: the terms find no room.
    if (comm.rank() == 0) comm.reduce_scatter({"sum"}, Dtype::f32, x.data(), x.data(), absurd);
    else comm.reduce_scatter({"sum", 30s}, Dtype::f32, x.data(), x.data() + comm.rank(), counts);
  });
  EXPECT_LT(Clock::now() - start, 10s);
  EXPECT_THROW(std::rethrow_exception(errors[0]), std::exception);
  for (const int r : {1, 2}) {
    try {
      std::rethrow_exception(errors[r]);
    } catch (const RankError& e) {
      EXPECT_EQ(e.rank(), 0) << e.what();
      EXPECT_NE(std::string(e.what()).find("aborted"), std::string::npos) << e.what();
    }
  }
}
#endif

TEST(Arguments, AreRefusedBeforeAnybodyIsTold) {
  auto group = thread_communicators(2);
  Communicator& comm = group[0];
  std::vector<float> x(8);
  const std::vector<int64_t> one = {1, 1}, three = {1, 1, 1}, negative = {1, -1}, huge = {int64_t{1} << 46, 1};
  const std::string step = "step 's': ";
  EXPECT_EQ(message_of<InputError>([] { thread_communicators(0); }),
            "thread_communicators: ranks is 0, allowed 1 to 1024");
  EXPECT_EQ(message_of<InputError>([] { Communicator(2, 2, nullptr); }), "Communicator: rank is 2, allowed 0 to 1");
  EXPECT_EQ(message_of<InputError>([] { Communicator(1, 2, nullptr); }), "Communicator: no transport");
  EXPECT_EQ(message_of<InputError>([&] {
              comm.barrier({"s", 0ns});
            }),
            step + "deadline is 0 ns, allowed 1 to 86400000000000");
  EXPECT_NE(message_of<InputError>([&] { comm.barrier({std::string(64, 'x')}); }).find("64 bytes, allowed 63"),
            std::string::npos);
  EXPECT_EQ(message_of<ShapeError>([&] { comm.all_gather({"s"}, x.data(), x.data(), three); }),
            step + "bytes has 3 entries, ranks are 2");
  EXPECT_EQ(message_of<ShapeError>([&] { comm.all_gather({"s"}, x.data(), x.data(), negative); }),
            step + "bytes[1] is -1, allowed 0 to 70368744177664");
  EXPECT_NE(message_of<ShapeError>([&] { comm.all_gather({"s"}, x.data(), x.data(), huge); }).find("those before it"),
            std::string::npos);
  EXPECT_EQ(message_of<ShapeError>([&] { comm.all_gather({"s"}, &x[0], reinterpret_cast<char*>(&x[0]) - 1, one); }),
            step + "in overlaps out and is not its own place there");
  EXPECT_EQ(message_of<ShapeError>([&] { comm.all_reduce({"s"}, Dtype::f32, &x[0], &x[1], 4); }),
            step + "in and out overlap and are not the same");
  EXPECT_EQ(message_of<ShapeError>([&] { comm.all_reduce({"s"}, Dtype::f32, nullptr, &x[1], 4); }),
            step + "in is null, bytes are 16");
  EXPECT_EQ(message_of<ShapeError>([&] { comm.reduce_scatter({"s"}, Dtype::f32, &x[0], &x[1], one); }),
            step + "out overlaps in and is not its own place there");
  EXPECT_EQ(message_of<ShapeError>([&] { comm.all_to_all({"s"}, &x[0], one, &x[0], one); }),
            step + "in and out overlap");
  EXPECT_EQ(message_of<ShapeError>([&] { comm.broadcast({"s"}, 2, &x[0], 4); }), step + "root is 2, allowed 0 to 1");
  EXPECT_EQ(message_of<UnsupportedError>([&] { comm.all_reduce({"s"}, Dtype::fp8_e4m3, &x[0], &x[0], 4); }),
            step + "sums of fp8_e4m3; dtypes are f32, bf16 and f16");
  // The group is as it was.
  std::thread other([&] { group[1].barrier({"s", 5s}); });
  EXPECT_NO_THROW(comm.barrier({"s", 5s}));
  other.join();
}

}  // namespace
}  // namespace mla
