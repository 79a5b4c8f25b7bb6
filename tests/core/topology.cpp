// A machine's processors, cores and nodes, as made-up trees of Linux's sysfs describe them.
#include "core/topology.hpp"

#include <gtest/gtest.h>
#include <sched.h>

#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "mla/device.hpp"
#include "mla/error.hpp"
#include "support/message.hpp"
#include "support/safetensors_writer.hpp"

namespace mla {
namespace {

// 2 sockets of 2 nodes of 2 cores of 2 threads, numbered as on many servers: first threads are 0 to 7, and 8 later is a
// core's second one.
class MadeUp {
 public:
  static constexpr int kCores = 8, kProcessors = 16, kNodes = 4;

  MadeUp() {
    for (int cpu = 0; cpu < kProcessors; ++cpu) {
      const int core = cpu % kCores;
      write(cpu_file(cpu, "topology/core_cpus_list"), std::to_string(core) + "," + std::to_string(core + kCores));
      if (cpu > 0) write(cpu_file(cpu, "online"), "1");
    }
    for (int n = 0; n < kNodes; ++n) {
      const auto range = [&](int first) { return std::to_string(first) + "-" + std::to_string(first + 1); };
      write(node_file(n), range(2 * n) + "," + range(2 * n + kCores));
    }
    write("node/has_cpu", "0-3");
  }

  static std::string cpu_file(int cpu, const std::string& name) { return "cpu/cpu" + std::to_string(cpu) + "/" + name; }
  static std::string node_file(int node) { return "node/node" + std::to_string(node) + "/cpulist"; }
  void write(const std::string& file, const std::string& line) const {
    std::filesystem::create_directories((root_ / file).parent_path());
    test::write_file(root_ / file, line + "\n");
  }
  void remove(const std::string& file) const { std::filesystem::remove_all(root_ / file); }

  static std::vector<int> all() {
    std::vector<int> cpus(kProcessors);
    std::iota(cpus.begin(), cpus.end(), 0);
    return cpus;
  }
  Topology read(const std::vector<int>& allowed = all()) const { return read_topology(root_.path(), allowed); }

 private:
  test::TempFolder root_;
};

std::vector<int> cpus_of(const Topology& t) {
  std::vector<int> cpus;
  for (const Processor& p : t.processors) cpus.push_back(p.cpu);
  return cpus;
}

TEST(Topology, CoresNodeByNodeThenTheirSecondThreads) {
  const MadeUp made;
  const Topology t = made.read();
  EXPECT_EQ(t.nodes, 4);
  EXPECT_EQ(t.cores, 8);
  EXPECT_EQ(cpus_of(t), MadeUp::all());
  EXPECT_EQ(t.processors[5], (Processor{.cpu = 5, .node = 2, .core = 5, .thread = 0}));
  EXPECT_EQ(t.processors[13], (Processor{.cpu = 13, .node = 2, .core = 5, .thread = 1}));
  EXPECT_EQ(describe(t), "4 nodes, 8 cores, 2 threads a core, 16 processors");
}

TEST(Topology, ANodesWorkersFollowOneAnother) {
  const MadeUp made;
  const Topology t = made.read();
  EXPECT_EQ(places(t, 3), (std::vector<Place>{{0, 0}, {1, 0}, {2, 1}}));
  EXPECT_EQ(places(t, 10),
            (std::vector<Place>{{0, 0}, {1, 0}, {8, 0}, {9, 0}, {2, 1}, {3, 1}, {4, 2}, {5, 2}, {6, 3}, {7, 3}}));
  EXPECT_EQ(places(t, 16).size(), 16u);
}

TEST(Topology, MorePlacesThanProcessorsAreRefusedByBothNumbers) {
  const MadeUp made;
  EXPECT_EQ(test::message_of([&] { places(made.read(), 17); }),
            "threads is 17, each pinned to a processor of its own: this process may use 16 processors");
  EXPECT_THROW(places(made.read({3}), 2), InputError);
}

// A container's mask: what it leaves out is not there, and a core's first thread is the first that is left.
TEST(Topology, OnlyAllowedProcessors) {
  const MadeUp made;
  const Topology t = made.read({13, 6, 12, 4, 6});
  EXPECT_EQ(t.nodes, 2);  // the system's 2 and 3
  EXPECT_EQ(t.cores, 3);
  EXPECT_EQ(t.processors, (std::vector<Processor>{{.cpu = 4, .node = 0, .core = 0, .thread = 0},
                                                  {.cpu = 13, .node = 0, .core = 1, .thread = 0},
                                                  {.cpu = 6, .node = 1, .core = 2, .thread = 0},
                                                  {.cpu = 12, .node = 0, .core = 0, .thread = 1}}));
  EXPECT_EQ(describe(made.read({6})), "1 node, 1 core, 1 thread a core, 1 processor");
}

TEST(Topology, OfflineProcessorsAreNotThere) {
  const MadeUp made;
  made.write(MadeUp::cpu_file(2, "online"), "0");
  made.remove("cpu/cpu2/topology");
  made.write(MadeUp::cpu_file(10, "topology/core_cpus_list"), "10");
  made.write(MadeUp::node_file(1), "3,10-11");
  const Topology t = made.read();
  EXPECT_EQ(t.nodes, 4);
  EXPECT_EQ(t.cores, 8);
  EXPECT_EQ(cpus_of(t), (std::vector<int>{0, 1, 3, 10, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15}));
}

TEST(Topology, ANodeOfMemoryAloneIsNone) {
  const MadeUp made;
  made.write(MadeUp::node_file(4), "");
  EXPECT_EQ(made.read().nodes, 4);
}

TEST(Topology, NodesThatAreNotKnownAreOne) {
  const Topology whole = MadeUp().read();
  const auto one_node = [&](const MadeUp& made, const char* why) {
    const Topology t = made.read();
    EXPECT_EQ(t.nodes, 1) << why;
    EXPECT_EQ(t.cores, 8) << why;
    EXPECT_EQ(cpus_of(t), cpus_of(whole)) << why;
    for (const Processor& p : t.processors) EXPECT_EQ(p.node, 0) << why;
  };
  {
    const MadeUp made;
    made.remove("node");
    one_node(made, "no nodes");
  }
  {
    const MadeUp made;
    made.remove("node/node3");
    one_node(made, "processors of no node");
  }
  {
    const MadeUp made;
    made.remove(MadeUp::node_file(3));
    one_node(made, "no list");
  }
  for (const char* list : {"6-7,14-15,0", "6-7,14-", "7-6,14-15", "6-7;14-15", "6,6,7,14,15", "6-7,14-15,",
                           "6-99999999999", "-1", "six", "6-7,14-15 "}) {
    const MadeUp made;
    made.write(MadeUp::node_file(3), list);
    one_node(made, list);
  }
}

TEST(Topology, ProcessorsWhoseSiblingsAreNotKnownAreCores) {
  const MadeUp made;
  made.remove(MadeUp::cpu_file(9, "topology"));
  made.write(MadeUp::cpu_file(10, "topology/core_cpus_list"), "none");
  made.write(MadeUp::cpu_file(11, "topology/core_cpus_list"), "3");  // not of itself
  made.remove(MadeUp::cpu_file(12, "topology/core_cpus_list"));
  made.write(MadeUp::cpu_file(12, "topology/thread_siblings_list"), "4,12");
  const Topology t = made.read();
  EXPECT_EQ(t.nodes, 4);
  EXPECT_EQ(t.cores, 8 + 3);
  EXPECT_EQ(cpus_of(t), (std::vector<int>{0, 1, 9, 2, 3, 10, 11, 4, 5, 6, 7, 8, 12, 13, 14, 15}));
  const Topology none = read_topology("/nowhere/at/all", std::vector<int>{5, 2});
  EXPECT_EQ(none.nodes, 1);
  EXPECT_EQ(none.cores, 2);
  EXPECT_EQ(cpus_of(none), (std::vector<int>{2, 5}));
  EXPECT_TRUE(read_topology("/nowhere/at/all", {}).processors.empty());
}

TEST(Topology, OfThisMachineIsWhatThisThreadMayUse) {
  const Topology t = this_topology();
  ASSERT_FALSE(t.processors.empty());
  EXPECT_EQ(std::ssize(t.processors), usable_processors());
  EXPECT_LE(t.nodes, t.cores);
  const int last = t.processors.back().cpu;
  std::thread([last] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(last, &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    EXPECT_EQ(allowed_processors(), std::vector<int>{last});
    EXPECT_EQ(this_topology().processors.size(), 1u);
    EXPECT_EQ(usable_processors(), 1);
    EXPECT_EQ(ThreadPool(3).concurrent(), 1);
  }).join();
}

}  // namespace
}  // namespace mla
