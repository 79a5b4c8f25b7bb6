// Runs programs with one call after another failing, and looks at how they end: well, or with an exit code and one line
// that says why. A signal, another exit code, no message, wrong output, or no end is a failure of this test.
//
//   faults INJECTOR MLA STEP FOLDER [--python PYTHON STEP.PY] [--gpu] [--all | --seconds N] [--only PROGRAM]
//          [--shard I/N] [--workers N]
//
// PYTHON has NumPy and the package mla, on a GPU PyTorch, too; without it the step in Python is skipped. --gpu:
// programs on the first GPU, and faults of the CUDA driver instead of the system's. Without --all, calls are taken
// evenly spaced, as many as fit into N seconds.
// --shard: of the calls that would be tried the I-th of every N, from 1, in a folder of its own below FOLDER. With
// --all all N together try all. --workers: programs at a time, by default as many as there are processors, at most 8.
//
// Every call of `run`, on 16 processors:
//   for i in $(seq 16); do faults ... FOLDER --all --only run --shard $i/16 --workers 1 & done; wait
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "mla/dtype.hpp"
#include "support/safetensors_writer.hpp"

namespace {

using Clock = std::chrono::steady_clock;
constexpr double kLimit = 60;  // seconds that a run may take

struct Program {
  std::string name;
  std::vector<std::string> command;
  bool window = false;      // it opens the injector's window itself
  bool same_output = true;  // its output is a function of its arguments
  std::string of;           // the injector's MLA_FAULT_OF
  bool hurries = false;     // it measures the machine first, with which nothing here is done
};

struct Fault {
  std::string kind;  // of the injector
  bool from = false;
};

struct End {
  int status = 0;  // as waitpid's
  bool hung = false, fired = false;
  std::string out, error;
  std::map<std::string, long> counts;
};

std::string text_of(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

class Runner {
 public:
  Runner(std::string injector, std::string folder) : injector_(std::move(injector)), folder_(std::move(folder)) {}

  // `worker` names the files that this run may write: "@" in the command.
  End run(const Program& p, const Fault& fault, long n, int worker) const {
    const std::string stem = folder_ + "/worker" + std::to_string(worker);
    const std::string out = stem + ".out", error = stem + ".err", report = stem + ".report";
    // A file that an earlier run left would be looked at by this one: other calls than the run without a fault makes.
    for (const auto& entry : std::filesystem::directory_iterator(folder_))
      if (entry.path().string().starts_with(stem + ".")) std::filesystem::remove(entry.path());
    std::vector<std::string> arguments = p.command;
    for (std::string& a : arguments)
      if (a.starts_with("@")) a = stem + a.substr(1);
    std::vector<std::string> set{"LD_PRELOAD=" + injector_, "MLA_FAULT_REPORT=" + report, "HOME=/",
                                 "PATH=/usr/bin:/bin"};
    if (n > 0) {
      set.push_back("MLA_FAULT_KIND=" + fault.kind);
      set.push_back("MLA_FAULT_AT=" + std::to_string(n));
      if (fault.from) set.push_back("MLA_FAULT_FROM=1");
    }
    for (const char* name : {"LD_LIBRARY_PATH", "PYTHONPATH"})
      if (const char* folders = std::getenv(name)) set.push_back(std::string(name) + "=" + folders);
    if (p.window) set.push_back("MLA_FAULT_WINDOW=1");
    if (!p.of.empty()) set.push_back("MLA_FAULT_OF=" + p.of);
    if (p.hurries) set.push_back("MLA_FAULT_HURRY=1");
    std::vector<char*> argv, env;
    for (std::string& a : arguments) argv.push_back(a.data());
    for (std::string& e : set) env.push_back(e.data());
    argv.push_back(nullptr);
    env.push_back(nullptr);

    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&files, 1, out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    posix_spawn_file_actions_addopen(&files, 2, error.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    pid_t child = 0;
    const int spawned = posix_spawn(&child, argv[0], &files, nullptr, argv.data(), env.data());
    posix_spawn_file_actions_destroy(&files);
    End end;
    if (spawned != 0) {
      end.error = std::string("could not be started: ") + std::strerror(spawned);
      end.status = 127 << 8;
      return end;
    }
    const auto start = Clock::now();
    while (waitpid(child, &end.status, WNOHANG) == 0) {
      if (std::chrono::duration<double>(Clock::now() - start).count() > kLimit) {
        kill(child, SIGKILL);
        waitpid(child, &end.status, 0);
        end.hung = true;
        break;
      }
      usleep(500);
    }
    end.out = text_of(out);
    end.error = text_of(error);
    std::istringstream lines(text_of(report));
    for (std::string word; lines >> word;) {
      if (word == "fired") end.fired = true;
      else lines >> end.counts[word];
    }
    return end;
  }

 private:
  std::string injector_, folder_;
};

// Without the lines that name a worker's own files.
std::string comparable(const std::string& out) {
  std::string kept;
  for (size_t at = 0; at < out.size();) {
    const size_t end = std::min(out.find('\n', at), out.size() - 1) + 1;
    if (out.compare(at, 7, "written") != 0) kept += out.substr(at, end - at);
    at = end;
  }
  return kept;
}

constexpr const char* kOtherOutput = "other output";

// What is wrong with an end; "" if nothing is.
std::string wrong(const Program& p, const End& end, const End& clean) {
  if (end.hung) return "does not end";
  if (WIFSIGNALED(end.status)) return std::string("signal ") + strsignal(WTERMSIG(end.status));
  const int code = WEXITSTATUS(end.status);
  if (code == 0) return p.same_output && comparable(end.out) != comparable(clean.out) ? kOtherOutput : "";
  if (code > 2) return "exit code " + std::to_string(code);
  const bool one_line = !end.error.empty() && end.error.find('\n') == end.error.size() - 1;
  return one_line ? "" : "exit code " + std::to_string(code) + " without one line that says why";
}

struct Row {
  long calls = 0, tried = 0, errors = 0, tolerated = 0, missed = 0, wrong = 0;
};

void write_inputs(const std::string& folder) {
  namespace fs = std::filesystem;
  const std::string config =
      R"({"model_type":"deepseek_v3","hidden_size":64,"num_hidden_layers":2,"num_attention_heads":2,"q_lora_rank":16,"kv_lora_rank":32,)"
      R"("qk_nope_head_dim":16,"qk_rope_head_dim":16,"v_head_dim":16})";
  fs::create_directories(folder + "/checkpoint");
  mla::test::write_file(folder + "/tiny.json", config);
  mla::test::write_file(folder + "/checkpoint/config.json", config);
  mla::test::write_file(folder + "/batch.json", R"({"query_lens":[1,20,3],"contexts":[70,0,30]})");
  std::string trace;
  for (int i = 0; i < 3; ++i)
    trace += R"({"timestamp":)" + std::to_string(i) + R"(,"input_length":20,"output_length":3,"hash_ids":[)" +
             std::to_string(i) + "]}\n";
  mla::test::write_file(folder + "/trace.jsonl", trace);
  // Of each call of `run` one run: as few steps and op calls as say something.
  mla::test::write_file(folder + "/short.jsonl", R"({"timestamp":0,"input_length":6,"output_length":2,"hash_ids":[0]})"
                                                 "\n"
                                                 R"({"timestamp":1,"input_length":6,"output_length":1,"hash_ids":[1]})"
                                                 "\n");
  const struct {
    const char* role;
    std::vector<int64_t> shape;
  } tensors[] = {{"q_a_proj.weight", {16, 64}},   {"q_a_layernorm.weight", {16}},
                 {"q_b_proj.weight", {64, 16}},   {"kv_a_proj_with_mqa.weight", {48, 64}},
                 {"kv_a_layernorm.weight", {32}}, {"kv_b_proj.weight", {64, 32}},
                 {"o_proj.weight", {64, 32}}};
  std::string map;
  for (int layer = 0; layer < 2; ++layer) {
    mla::test::SafetensorsWriter w;
    const std::string shard = "part-" + std::to_string(layer) + ".safetensors";
    for (const auto& t : tensors) {
      int64_t n = 1;
      for (int64_t e : t.shape) n *= e;
      std::vector<mla::bf16> values;
      for (int64_t i = 0; i < n; ++i) values.push_back(mla::to_bf16(static_cast<float>(i * 7 % 23 - 11) * 0.015625f));
      const std::string name = "model.layers." + std::to_string(layer) + ".self_attn." + t.role;
      w.add(name, "BF16", t.shape, values);
      map += (map.empty() ? "\"" : ",\"") + name + "\":\"" + shard + "\"";
    }
    w.write(folder + "/checkpoint/" + shard);
  }
  mla::test::write_file(folder + "/checkpoint/model.safetensors.index.json", R"({"weight_map":{)" + map + "}}");
}

int usage() {
  std::fprintf(stderr,
               "usage: faults INJECTOR MLA STEP FOLDER [--python PYTHON STEP.PY] [--gpu] [--all | --seconds N] [--only "
               "PROGRAM] [--shard I/N] [--workers N]\n");
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) return usage();
  const std::string injector = argv[1], mla = argv[2], step = argv[3];
  std::string folder = argv[4];
  bool all = false, gpu = false;
  double seconds = 60;
  int workers = static_cast<int>(std::max(1u, std::min(8u, std::thread::hardware_concurrency())));
  long shard = 1, shards = 1;
  std::string only, python, python_step;
  for (int i = 5; i < argc; ++i) {
    if (std::strcmp(argv[i], "--all") == 0) all = true;
    else if (std::strcmp(argv[i], "--seconds") == 0 && i + 1 < argc) seconds = std::atof(argv[++i]);
    else if (std::strcmp(argv[i], "--gpu") == 0) gpu = true;
    else if (std::strcmp(argv[i], "--python") == 0 && i + 2 < argc) python = argv[++i], python_step = argv[++i];
    else if (std::strcmp(argv[i], "--only") == 0 && i + 1 < argc) only = argv[++i];
    else if (std::strcmp(argv[i], "--workers") == 0 && i + 1 < argc) workers = std::atoi(argv[++i]);
    else if (std::strcmp(argv[i], "--shard") != 0 || i + 1 == argc ||
             std::sscanf(argv[++i], "%ld/%ld", &shard, &shards) != 2)
      return usage();
  }
  if (workers < 1 || shard < 1 || shard > shards) return usage();
  if (shards > 1) folder += "/shard" + std::to_string(shard);
  write_inputs(folder);
  const std::string tiny = folder + "/tiny.json", checkpoint = folder + "/checkpoint";
  std::vector<Program> programs{
      {"plan", {mla, "plan", "--model", tiny, "--batch", folder + "/batch.json", "--json", "@.json"}},
      {"plan --sparse",
       {mla, "plan", "--model", "deepseek-v3.2", "--queries", "1,20", "--contexts", "4000", "--topk", "64"}},
      {"info CHECKPOINT", {mla, "info", checkpoint}},
      {"check norm", {mla, "check", "norm", "--threads", "2"}, false, false},
      {"run",
       {mla, "run", "--model", checkpoint, "--layers", "1", "--trace", folder + "/short.jsonl", "--threads", "3",
        "--verify", "1", "--json", "@.json", "--report", "@.html", "--chrome-trace", "@.trace"},
       false,
       false,
       {},
       true},
      {"run --tp 2",
       {mla, "run", "--model", checkpoint, "--trace", folder + "/trace.jsonl", "--threads", "2", "--tp", "2"},
       false,
       false}};
  if (step != "-") programs.push_back({"C: a step", {step, checkpoint}, true, true});
  // What Python and NumPy allocate themselves is theirs: libmla lies in the extension module.
  if (!python.empty())
    programs.push_back({"Python: a step", {python, python_step, checkpoint}, true, true, "/_mla.,/libstdc++.so"});
  else if (!gpu) std::printf("Python: a step: skipped: --python names no Python with NumPy and the package\n");
  if (gpu) {
    const std::vector<std::string> replay{mla,          "run", "--device", "cuda", "--layers",     "1",
                                          "--requests", "2",   "--rate",   "0",    "--output-len", "3"};
    auto run = [&](std::initializer_list<std::string> more) {
      std::vector<std::string> command = replay;
      command.insert(command.end(), more);
      return command;
    };
    programs = {
        {"GPU: run", run({"--model", "deepseek-v2-lite", "--input-len", "100"}), false, false},
        {"GPU: run, sparse", run({"--model", "deepseek-v3.2", "--topk", "64", "--input-len", "200"}), false, false}};
    if (step != "-") programs.push_back({"GPU: a step in C", {step, checkpoint, "cuda"}, true, true});
    // PyTorch's own calls are not libmla's, whose copy of the runtime lies in the extension module.
    if (!python.empty())
      programs.push_back(
          {"GPU: a step in Python", {python, python_step, checkpoint, "cuda"}, true, true, "/_mla.,/libcublas"});
  }
  std::erase_if(programs, [&](const Program& p) { return !only.empty() && p.name != only; });
  const std::vector<Fault> faults =
      gpu ? std::vector<Fault>{{"cuda"}}
          : std::vector<Fault>{{"alloc"}, {"alloc", true}, {"mmap"},   {"open"},  {"read"},
                               {"write"}, {"stat"},        {"rename"}, {"thread"}};
  const Runner runner(injector, folder);

  bool fine = true;
  Row sum;
  std::printf("%-16s %-14s %7s %7s %7s %9s %7s %7s\n", "program", "fault", "calls", "tried", "errors", "tolerated",
              "missed", "wrong");
  auto print = [](const std::string& name, const std::string& fault, const Row& r) {
    std::printf("%-16s %-14s %7ld %7ld %7ld %9ld %7ld %7ld\n", name.c_str(), fault.c_str(), r.calls, r.tried, r.errors,
                r.tolerated, r.missed, r.wrong);
    std::fflush(stdout);
  };
  for (const Program& p : programs) {
    const auto start = Clock::now();
    const End clean = runner.run(p, {}, 0, 0);
    const double once = std::chrono::duration<double>(Clock::now() - start).count();
    if (!WIFEXITED(clean.status) || WEXITSTATUS(clean.status) != 0 || clean.counts.empty()) {
      std::printf("%s fails without a fault: status %d: %s\n", p.name.c_str(), clean.status, clean.error.c_str());
      return 1;
    }
    for (const Fault& fault : faults) {
      Row row;
      row.calls = clean.counts.at(fault.kind);
      if (row.calls == 0) continue;
      const double share = seconds * workers / static_cast<double>(programs.size() * faults.size());
      row.tried = all ? row.calls : std::min<long>(row.calls, std::max(6L, static_cast<long>(share / once)));
      const long chosen = row.tried;  // of all shards
      row.tried = (chosen + shards - shard) / shards;
      std::vector<std::string> found;
      std::mutex mutex;
      std::atomic<long> next{0};
      std::vector<std::thread> pool;
      for (int w = 0; w < workers; ++w)
        pool.emplace_back([&, w] {
          for (long i; (i = next++) < row.tried;) {
            const long at = shard - 1 + i * shards;
            const long n = chosen == row.calls ? at + 1 : 1 + at * (row.calls - 1) / (chosen - 1);
            End end = runner.run(p, fault, n, w);
            std::string why = wrong(p, end, clean);
            // How many ended threads' blocks glibc still holds is a matter of timing; what libmla loses is not.
            for (int again = 0; again < 2 && why == kOtherOutput; ++again) {
              end = runner.run(p, fault, n, w);
              why = wrong(p, end, clean);
            }
            const std::lock_guard lock(mutex);
            if (!why.empty()) {
              ++row.wrong;
              std::string command = "MLA_FAULT_TRACE=1 MLA_FAULT_KIND=" + fault.kind +
                                    " MLA_FAULT_AT=" + std::to_string(n) + (fault.from ? " MLA_FAULT_FROM=1" : "") +
                                    (p.window ? " MLA_FAULT_WINDOW=1" : "") +
                                    (p.of.empty() ? "" : " MLA_FAULT_OF=" + p.of) +
                                    (p.hurries ? " MLA_FAULT_HURRY=1" : "") + " LD_PRELOAD=" + injector;
              for (const std::string& a : p.command) command += " " + a;
              found.push_back(why + ": " + command + "\n    " + end.error.substr(0, 300));
            } else if (!end.fired) {
              ++row.missed;
            } else {
              ++(WEXITSTATUS(end.status) == 0 ? row.tolerated : row.errors);
            }
          }
        });
      for (std::thread& t : pool) t.join();
      print(p.name, fault.kind + (fault.from ? ", from then" : ""), row);
      std::sort(found.begin(), found.end());
      for (size_t i = 0; i < found.size() && i < 8; ++i) std::printf("  %s\n", found[i].c_str());
      fine = fine && row.wrong == 0;
      sum.tried += row.tried;
      sum.errors += row.errors;
      sum.tolerated += row.tolerated;
      sum.missed += row.missed;
      sum.wrong += row.wrong;
    }
  }
  print("all", "", sum);
  return fine ? 0 : 1;
}
