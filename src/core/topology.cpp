#include "core/topology.hpp"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <tuple>

#include "core/counted.hpp"
#include "mla/error.hpp"

namespace mla {
namespace {

namespace fs = std::filesystem;

// Past any system's: a list that names more is malformed.
constexpr int kMostProcessors = 1 << 16;

std::optional<std::string> first_line(const fs::path& file) {
  std::ifstream in(file);
  std::string line;
  if (!in) return std::nullopt;
  std::getline(in, line);  // a node without processors has an empty list
  return line;
}

// "0-3,8": ascending numbers. Nothing when it is not of this form.
std::optional<std::vector<int>> parse_list(const std::string& text) {
  std::vector<int> all;
  const char *at = text.data(), *const end = at + text.size();
  const auto number = [&](int& n) {
    const auto [next, error] = std::from_chars(at, end, n);
    at = next;
    return error == std::errc() && n >= 0 && n < kMostProcessors;
  };
  while (at < end) {
    int first = 0, last = 0;
    if (!number(first)) return std::nullopt;
    last = first;
    if (at < end && *at == '-' && (++at, !number(last))) return std::nullopt;
    if (last < first || (!all.empty() && first <= all.back())) return std::nullopt;
    for (int n = first; n <= last; ++n) all.push_back(n);
    if (at < end && (*at++ != ',' || at == end)) return std::nullopt;
  }
  return all;
}

std::optional<std::vector<int>> read_list(const fs::path& file) {
  const auto line = first_line(file);
  return line ? parse_list(*line) : std::nullopt;
}

// The lowest processor of a processor's core.
int core_of(const fs::path& root, int cpu) {
  const fs::path folder = root / "cpu" / ("cpu" + std::to_string(cpu)) / "topology";
  for (const char* name : {"core_cpus_list", "thread_siblings_list"})  // before Linux 5.3 there is the second alone
    if (const auto list = read_list(folder / name))
      return std::find(list->begin(), list->end(), cpu) == list->end() ? cpu : list->front();
  return cpu;
}

// The system's number of each processor's node. Nothing when they are not known for all.
std::optional<std::map<int, int>> nodes_of(const fs::path& root, std::span<const int> cpus) {
  std::map<int, int> of;
  std::error_code error;
  for (fs::directory_iterator at(root / "node", error), end; !error && at != end; at.increment(error)) {
    const std::string name = at->path().filename().string();
    int number = 0;
    if (!name.starts_with("node")) continue;
    const auto [past, bad] = std::from_chars(name.data() + 4, name.data() + name.size(), number);
    if (bad != std::errc() || past != name.data() + name.size()) continue;
    const auto list = read_list(at->path() / "cpulist");
    if (!list) return std::nullopt;
    for (const int cpu : *list)
      if (!of.emplace(cpu, number).second) return std::nullopt;
  }
  const bool all = std::all_of(cpus.begin(), cpus.end(), [&](int cpu) { return of.contains(cpu); });
  return all ? std::optional(std::move(of)) : std::nullopt;
}

// Numbers from 0 on for what appears, in ascending order.
std::map<int, int> numbered(const std::map<int, int>& by_cpu, std::span<const int> cpus) {
  std::map<int, int> numbers;
  for (const int cpu : cpus) numbers[by_cpu.at(cpu)] = 0;
  int next = 0;
  for (auto& [key, number] : numbers) number = next++;
  return numbers;
}

}  // namespace

Topology read_topology(const fs::path& root, std::span<const int> allowed) {
  std::vector<int> cpus(allowed.begin(), allowed.end());
  std::sort(cpus.begin(), cpus.end());
  cpus.erase(std::unique(cpus.begin(), cpus.end()), cpus.end());
  std::erase_if(cpus,
                [&](int cpu) { return first_line(root / "cpu" / ("cpu" + std::to_string(cpu)) / "online") == "0"; });

  std::map<int, int> core, node;
  for (const int cpu : cpus) core[cpu] = core_of(root, cpu);
  if (auto known = nodes_of(root, cpus)) node = std::move(*known);
  else
    for (const int cpu : cpus) node[cpu] = 0;

  const std::map<int, int> cores = numbered(core, cpus), nodes = numbered(node, cpus);
  Topology t;
  t.cores = static_cast<int>(cores.size());
  t.nodes = std::max(1, static_cast<int>(nodes.size()));
  std::vector<int> threads(cores.size());
  for (const int cpu : cpus) {
    const int c = cores.at(core[cpu]);
    t.processors.push_back({cpu, nodes.at(node[cpu]), c, threads[static_cast<size_t>(c)]++});
  }
  std::sort(t.processors.begin(), t.processors.end(), [](const Processor& a, const Processor& b) {
    return std::tie(a.thread, a.node, a.core) < std::tie(b.thread, b.node, b.core);
  });
  return t;
}

std::vector<int> allowed_processors() {
  // A mask that is too short for the system's is refused with EINVAL.
  for (int most = 1024; most <= kMostProcessors; most *= 2) {
    const auto free = [](cpu_set_t* s) { CPU_FREE(s); };
    const std::unique_ptr<cpu_set_t, decltype(free)> mask(CPU_ALLOC(static_cast<size_t>(most)), free);
    const size_t bytes = CPU_ALLOC_SIZE(static_cast<size_t>(most));
    if (!mask) return {};
    if (sched_getaffinity(0, bytes, mask.get()) != 0) {
      if (errno == EINVAL) continue;
      return {};
    }
    std::vector<int> cpus;
    for (int cpu = 0; cpu < most; ++cpu)
      if (CPU_ISSET_S(static_cast<size_t>(cpu), bytes, mask.get())) cpus.push_back(cpu);
    return cpus;
  }
  return {};
}

int usable_processors() {
  const int allowed = static_cast<int>(allowed_processors().size());
  return allowed > 0 ? allowed : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

Topology this_topology() { return read_topology("/sys/devices/system", allowed_processors()); }

std::string describe(const Topology& t) {
  int threads = 1;
  for (const Processor& p : t.processors) threads = std::max(threads, p.thread + 1);
  return counted(t.nodes, "node") + ", " + counted(t.cores, "core") + ", " + counted(threads, "thread") + " a core, " +
         counted(static_cast<int64_t>(t.processors.size()), "processor");
}

std::vector<Place> places(const Topology& t, int threads) {
  if (threads > static_cast<int>(t.processors.size()))
    throw InputError("threads is " + std::to_string(threads) +
                     ", each pinned to a processor of its own: this process may use " +
                     counted(static_cast<int64_t>(t.processors.size()), "processor"));
  std::vector<Place> all;
  for (int i = 0; i < threads; ++i) {
    const Processor& p = t.processors[static_cast<size_t>(i)];
    all.push_back({p.cpu, p.node});
  }
  std::stable_sort(all.begin(), all.end(), [](const Place& a, const Place& b) { return a.node < b.node; });
  return all;
}

}  // namespace mla
