// Ranks that are processes, a GPU each, as engines run them: their host's messages go over socket pairs.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "ranks.hpp"
#include "support/print.hpp"

extern char** environ;

namespace mla::test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// A socket to each other rank, -1 at this rank's place. A rank that is gone closes its own.
class Sockets final : public Transport {
 public:
  explicit Sockets(std::vector<int> sockets) : sockets_(std::move(sockets)) {
    for (const int s : sockets_)
      if (s >= 0) fcntl(s, F_SETFL, fcntl(s, F_GETFL) | O_NONBLOCK);
  }
  ~Sockets() override {
    for (const int s : sockets_)
      if (s >= 0) close(s);
  }
  void exchange(const Exchange& messages) override {
    const size_t ranks = sockets_.size();
    std::vector<size_t> sent(ranks), received(ranks);
    for (;;) {
      std::vector<pollfd> waits;
      std::vector<size_t> of;
      for (size_t r = 0; r < ranks; ++r) {
        if (sockets_[r] < 0) continue;
        const bool sends = sent[r] < messages.send[r].bytes, receives = received[r] < messages.receive[r].bytes;
        if (!sends && !receives) continue;
        waits.push_back({sockets_[r], static_cast<short>((sends ? POLLOUT : 0) | (receives ? POLLIN : 0)), 0});
        of.push_back(r);
      }
      if (waits.empty()) return;
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(messages.deadline - Clock::now());
      if (left <= 0ms || poll(waits.data(), waits.size(), static_cast<int>(left.count()) + 1) == 0)
        throw RankError(static_cast<int>(of[0]), std::string(messages.step),
                        "rank " + std::to_string(of[0]) + " did not come");
      for (size_t i = 0; i < waits.size(); ++i) {
        const size_t r = of[i];
        if (waits[i].revents & POLLOUT)
          move(r, messages, sent[r],
               ::send(waits[i].fd, static_cast<const std::byte*>(messages.send[r].data) + sent[r],
                      messages.send[r].bytes - sent[r], MSG_NOSIGNAL));
        if (waits[i].revents & (POLLIN | POLLHUP | POLLERR))
          move(r, messages, received[r],
               ::recv(waits[i].fd, static_cast<std::byte*>(messages.receive[r].data) + received[r],
                      messages.receive[r].bytes - received[r], 0));
      }
    }
  }
  void abort(int, std::string_view) noexcept override {
    for (const int s : sockets_)
      if (s >= 0) shutdown(s, SHUT_RDWR);
  }

 private:
  static void move(size_t rank, const Exchange& messages, size_t& done, ssize_t n) {
    if (n > 0) done += static_cast<size_t>(n);
    else if (n == 0 || (errno != EAGAIN && errno != EINTR))
      throw RankError(static_cast<int>(rank), std::string(messages.step), "rank " + std::to_string(rank) + " is gone");
  }
  std::vector<int> sockets_;
};

// What a process is told: its rank, its sockets, the link, the GPU, where its result goes, and what it does.
constexpr char kTold[] = "MLA_TEST_RANK";
enum class Work { layer, captured_layer, dies };

struct Result {
  std::vector<bf16> rows;
  std::string error;
};

const Lengths kLengths{{1, 3, 1, 7}, {130, 40, 1, 65}};
Split split_over(int ranks) { return {.ranks = ranks, .members = ranks}; }

std::vector<Result> in_processes(GpuLink link, int ranks, Work work) {
  const auto n = static_cast<size_t>(ranks);
  std::vector<std::vector<int>> sockets(n, std::vector<int>(n, -1));
  for (size_t a = 0; a < n; ++a)
    for (size_t b = 0; b < a; ++b) {
      int pair[2];
      if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) throw Error("socketpair failed");
      sockets[a][b] = pair[0], sockets[b][a] = pair[1];
    }
  const std::filesystem::path folder = testing::TempDir();
  const std::string stem = folder / ("mla_rank_" + std::to_string(getpid()) + "_");
  std::vector<pid_t> processes;
  for (size_t r = 0; r < n; ++r) {
    std::ostringstream told;
    told << r << ' ' << ranks << ' ' << static_cast<int>(link) << ' ' << static_cast<int>(work) << ' ' << stem << r;
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    for (const int s : sockets[r]) {
      told << ' ' << s;
      if (s >= 0) posix_spawn_file_actions_adddup2(&actions, s, s);  // this one stays open there
    }
    const std::string variable = std::string(kTold) + "=" + told.str();
    std::vector<char*> environment;
    for (char** e = environ; *e; ++e) environment.push_back(*e);
    environment.push_back(const_cast<char*>(variable.c_str()));
    environment.push_back(nullptr);
    std::string program = "rank", filter = "--gtest_filter=GpuRankProcess.OneRank", brief = "--gtest_brief=1";
    char* argv[] = {program.data(), filter.data(), brief.data(), nullptr};
    pid_t process = 0;
    const int failed = posix_spawn(&process, "/proc/self/exe", &actions, nullptr, argv, environment.data());
    posix_spawn_file_actions_destroy(&actions);
    if (failed) throw Error(std::string("posix_spawn: ") + std::strerror(failed));
    processes.push_back(process);
  }
  for (const auto& of : sockets)
    for (const int s : of)
      if (s >= 0) close(s);
  std::vector<Result> results(n);
  for (size_t r = 0; r < n; ++r) {
    int status = 0;
    waitpid(processes[r], &status, 0);
    std::ifstream file(stem + std::to_string(r), std::ios::binary);
    std::getline(file, results[r].error);
    if (!file) results[r].error = "no result, status " + std::to_string(status);
    const std::string rows{std::istreambuf_iterator<char>(file), {}};
    results[r].rows.resize(rows.size() / sizeof(bf16));
    std::memcpy(results[r].rows.data(), rows.data(), results[r].rows.size() * sizeof(bf16));
    std::filesystem::remove(stem + std::to_string(r));
  }
  return results;
}

// Not a test by itself: what each process of the tests below runs.
TEST(GpuRankProcess, OneRank) {
  const char* told = std::getenv(kTold);
  if (!told) GTEST_SKIP() << "run by the other tests, in processes of their own";
  std::istringstream in(told);
  int rank = 0, ranks = 0, link = 0, work = 0;
  std::string file;
  in >> rank >> ranks >> link >> work >> file;
  std::vector<int> sockets(static_cast<size_t>(ranks));
  for (int& s : sockets) in >> s;
  std::vector<bf16> rows;
  std::string error;
  try {
    Communicator self(rank, ranks, std::make_unique<Sockets>(std::move(sockets)));
    const Device device{DeviceKind::cuda, rank};
    Stream stream(device);
    self.connect(device, static_cast<GpuLink>(link), size_t{1} << 20, 60s);
    if (static_cast<Work>(work) == Work::dies) {
      const Buffer x(4096, device);
      self.all_reduce(stream, {"sum"}, Dtype::f32, x.data(), x.data(), 1024);
      stream.synchronize();
      if (rank == ranks - 1) _exit(7);
      self.all_reduce(stream, {"late sum", 3s}, Dtype::f32, x.data(), x.data(), 1024);
      stream.synchronize();
    } else {
      rows =
          steps_of(split_over(ranks), rank, stream, &self, kLengths, static_cast<Work>(work) == Work::captured_layer);
    }
  } catch (const std::exception& e) {
    error = e.what();
  }
  std::ofstream out(file, std::ios::binary);
  out << error << '\n';
  out.write(reinterpret_cast<const char*>(rows.data()), static_cast<std::streamsize>(rows.size() * sizeof(bf16)));
  out.close();
}

class GpuRankProcesses : public testing::TestWithParam<GpuLink> {
 protected:
  void SetUp() override {
    if (gpu_count() < 2) GTEST_SKIP() << "a process a GPU, there are " << gpu_count();
    ranks = std::min(gpu_count(), 4);
  }
  int ranks = 0;
};
INSTANTIATE_TEST_SUITE_P(Links, GpuRankProcesses, testing::Values(GpuLink::peer, GpuLink::nccl),
                         [](const auto& p) { return std::string(to_string(p.param)); });

TEST_P(GpuRankProcesses, GiveTheBitsOfThreads) {
  std::vector<std::vector<bf16>> right(static_cast<size_t>(ranks));
  expect_none(on_gpus(GetParam(), ranks, [&](Self s) {
    right[static_cast<size_t>(s.rank)] = steps_of(split_over(ranks), s.rank, s.stream, &s.comm, kLengths, false);
  }));
  for (const Work work : {Work::layer, Work::captured_layer}) {
    const std::vector<Result> found = in_processes(GetParam(), ranks, work);
    for (size_t r = 0; r < found.size(); ++r) {
      EXPECT_EQ(found[r].error, "") << "rank " << r;
      ASSERT_EQ(found[r].rows.size(), right[r].size()) << "rank " << r;
      EXPECT_EQ(std::memcmp(found[r].rows.data(), right[r].data(), right[r].size() * sizeof(bf16)), 0) << "rank " << r;
    }
  }
}

TEST_P(GpuRankProcesses, OneThatDiesEndsTheOthers) {
  const auto start = Clock::now();
  const std::vector<Result> found = in_processes(GetParam(), ranks, Work::dies);
  EXPECT_LT(Clock::now() - start, 60s);
  for (size_t r = 0; r + 1 < found.size(); ++r)
    EXPECT_NE(found[r].error.find("late sum"), std::string::npos) << "rank " << r << ": " << found[r].error;
  EXPECT_EQ(found.back().error, "no result, status 1792");  // exit code 7
}

}  // namespace
}  // namespace mla::test
