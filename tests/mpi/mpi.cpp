// Ranks that are processes: what their calls bring is what threads bring, to the bit; how a group ends when one does
// not come. Every process runs every test; the first one that fails prints.
#include "mla/mpi.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "layer/random_layer.hpp"
#include "layer/shares.hpp"

namespace mla::test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

int world_size() {
  int n = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &n);
  return n;
}

// f on every rank of a group of threads; what rank `mine` of it gives.
template <class F>
auto by_threads(int ranks, int mine, F&& f) {
  std::vector<Communicator> group = thread_communicators(ranks);
  std::vector<decltype(f(group[0]))> out(static_cast<size_t>(ranks));
  {
    std::vector<std::jthread> threads;
    for (int r = 0; r < ranks; ++r)
      threads.emplace_back([&, r] { out[static_cast<size_t>(r)] = f(group[static_cast<size_t>(r)]); });
  }
  return out[static_cast<size_t>(mine)];
}

// Bytes that every call brings to this rank.
std::vector<std::byte> calls(Communicator& comm) {
  const int n = comm.ranks(), me = comm.rank();
  std::vector<std::byte> all;
  const auto keep = [&](const auto& x) {
    const auto* p = reinterpret_cast<const std::byte*>(x.data());
    all.insert(all.end(), p, p + x.size() * sizeof x[0]);
  };
  for (int turn = 0; turn < 40; ++turn) {
    std::mt19937 random(static_cast<unsigned>(turn * 64 + me));
    if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
    const int64_t unit = turn % 10 == 9 ? 40000 : 13;  // some longer than MPI sends at once
    const auto length = [&](int from, int to) { return int64_t{(from * 5 + to * 3 + turn) % 7} * unit; };
    std::vector<int64_t> sent(static_cast<size_t>(n)), got(sent), gathered(sent), counts(sent);
    for (int r = 0; r < n; ++r) {
      const auto at = static_cast<size_t>(r);
      sent[at] = length(me, r), got[at] = length(r, me), gathered[at] = length(r, r);
      counts[at] = (r * 7 + turn) % 11 * unit;
    }
    const auto total = [](const std::vector<int64_t>& x) {
      return static_cast<size_t>(std::accumulate(x.begin(), x.end(), int64_t{0}));
    };
    const auto bytes = [&](size_t count) {
      std::vector<uint8_t> x(count);
      for (uint8_t& b : x) b = static_cast<uint8_t>(random());
      return x;
    };
    const auto in = bytes(total(sent)), mine = bytes(static_cast<size_t>(gathered[static_cast<size_t>(me)]));
    std::vector<uint8_t> swapped(total(got)), joined(total(gathered));
    comm.all_to_all({"swap"}, in.data(), sent, swapped.data(), got);
    comm.all_gather({"gather"}, mine.data(), joined.data(), gathered);
    auto cast = bytes(static_cast<size_t>(unit));
    comm.broadcast({"cast"}, turn % n, cast.data(), unit);
    keep(swapped), keep(joined), keep(cast);
    std::vector<float> terms(total(counts)), sum(terms), part(static_cast<size_t>(counts[static_cast<size_t>(me)]));
    for (size_t i = 0; i < terms.size(); ++i)
      terms[i] =
          std::ldexp(static_cast<float>(random() % 97) - 48.0f, static_cast<int>((i + static_cast<size_t>(me)) % 11));
    comm.all_reduce({"sum"}, Dtype::f32, terms.data(), sum.data(), std::ssize(sum));
    comm.reduce_scatter({"part"}, Dtype::f32, terms.data(), part.data(), counts);
    comm.barrier({"all"});
    keep(sum), keep(part);
  }
  return all;
}

TEST(Mpi, CallsBringWhatThreadsBring) {
  Communicator comm = mpi_communicator();
  ASSERT_EQ(comm.ranks(), world_size());
  const std::vector<std::byte> found = calls(comm);
  EXPECT_TRUE(found == by_threads(comm.ranks(), comm.rank(), calls));
}

// A layer's step, its heads over the ranks.
std::vector<float> step(Communicator& comm, int32_t first_context = 20) {
  ModelConfig whole = small_deepseek();
  whole.heads = comm.ranks() + 3;
  const HeadRange heads = head_share(whole.heads, comm.rank(), comm.ranks());
  Layer l(part_of(whole, heads), part_of(whole, random_layer(whole, 0, 1, Dtype::f32), heads), {});
  const Requests requests({1, 5, 2}, {first_context, 0, 33});
  const Batch batch = requests.batch();
  const Plan p = l.plan_of(batch, {.tensor_parallel = comm.ranks()});
  const Buffer workspace = filled(p.workspace_bytes, std::byte{0xff}), selection;
  LayerContext c = l.context(p, batch, workspace, selection);
  c.ranks = &comm;
  const auto hidden = random_values(p.tokens * whole.hidden, 3);
  std::vector<float> out(hidden.size());
  forward(l.stream, c, View<const float, Token, Hidden>(hidden.data(), {p.tokens, whole.hidden}),
          View<float, Token, Hidden>(out.data(), {p.tokens, whole.hidden}));
  return out;
}

TEST(Mpi, ALayerHasTheBitsOfThreads) {
  Communicator comm = mpi_communicator();
  const std::vector<float> found = step(comm);
  EXPECT_EQ(found, by_threads(comm.ranks(), comm.rank(), [](Communicator& c) { return step(c); }));
}

// Nobody's messages have another size.
TEST(Mpi, WhoPlansAnotherStepIsNamed) {
  Communicator comm = mpi_communicator();
  const int last = comm.ranks() - 1;
  const auto start = Clock::now();
  try {
    step(comm, comm.rank() == last ? 21 : 20);
    ADD_FAILURE() << "plans differ";
  } catch (const RankError& e) {
    EXPECT_EQ(e.rank(), last) << e.what();
    EXPECT_EQ(e.step(), "all_reduce");
    EXPECT_NE(std::string(e.what()).find("their plans differ, 8 tokens of 3 requests and 8 tokens of 3 requests"),
              std::string::npos)
        << e.what();
  }
  EXPECT_LT(Clock::now() - start, 10s);
}

TEST(Mpi, WhoDoesNotComeIsNamed) {
  Communicator comm = mpi_communicator();
  const int last = comm.ranks() - 1;
  comm.barrier({"begin"});
  if (comm.rank() == last) {
    std::this_thread::sleep_for(3s);
  } else {
    const auto start = Clock::now();
    try {
      comm.barrier({"late", 1s});
      ADD_FAILURE() << "nobody was late";
    } catch (const RankError& e) {
      EXPECT_EQ(e.rank(), last) << e.what();
      EXPECT_EQ(e.step(), "late");
    }
    EXPECT_LT(Clock::now() - start, 2s);
  }
}

TEST(Mpi, AbortReachesAll) {
  Communicator comm = mpi_communicator();
  comm.barrier({"begin"});
  if (comm.rank() == 1) {
    comm.abort("rank 1 has no more");
  } else {
    const auto start = Clock::now();
    try {
      comm.barrier({"wait", 30s});
      ADD_FAILURE() << "nobody aborted";
    } catch (const RankError& e) {
      EXPECT_EQ(e.rank(), 1) << e.what();
      EXPECT_NE(std::string(e.what()).find("rank 1 has no more"), std::string::npos) << e.what();
    }
    EXPECT_LT(Clock::now() - start, 10s);
  }
}

TEST(Mpi, WhoLeavesIsMissed) {
  Communicator comm = mpi_communicator();
  comm.barrier({"begin"});
  if (comm.rank() == 0) return;  // its communicator ends
  try {
    comm.barrier({"wait", 30s});
    ADD_FAILURE() << "nobody left";
  } catch (const RankError& e) {
    EXPECT_NE(std::string(e.what()).find("rank "), std::string::npos) << e.what();
  }
}

}  // namespace

int64_t allocation_count() { return 0; }

}  // namespace mla::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  int provided = 0, rank = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  auto& listeners = testing::UnitTest::GetInstance()->listeners();
  if (rank != 0) delete listeners.Release(listeners.default_result_printer());
  int failed = RUN_ALL_TESTS(), any = 0;
  // A rank that does not print says at least what failed.
  if (rank != 0 && failed) {
    const testing::UnitTest& all = *testing::UnitTest::GetInstance();
    for (int s = 0; s < all.total_test_suite_count(); ++s)
      for (int t = 0; t < all.GetTestSuite(s)->total_test_count(); ++t) {
        const testing::TestResult& r = *all.GetTestSuite(s)->GetTestInfo(t)->result();
        for (int k = 0; k < r.total_part_count(); ++k)
          if (r.GetTestPartResult(k).failed())
            std::fprintf(stderr, "rank %d: %s\n", rank, r.GetTestPartResult(k).message());
      }
  }
  MPI_Allreduce(&failed, &any, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  MPI_Finalize();
  return any;
}
