// The mla command as a user meets it: exit codes, messages, help, JSON.
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/safetensors_writer.hpp"
#include "support/sanitized.hpp"

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

std::string contents(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

struct Outcome {
  int status;
  std::string out, err;
};

class Command : public testing::Test {
 protected:
  Command() : folder_(fs::temp_directory_path() / ("mla_cli_" + std::to_string(getpid()))) {
    fs::create_directories(folder_);
  }
  ~Command() override { fs::remove_all(folder_); }

  Outcome mla(const std::string& arguments) const {
    const fs::path out = folder_ / "out", err = folder_ / "err";
    const int raw =
        std::system((MLA_COMMAND " " + arguments + " >" + out.string() + " 2>" + err.string() + " </dev/null").c_str());
    return {WIFEXITED(raw) ? WEXITSTATUS(raw) : -1, contents(out), contents(err)};
  }

  // As it is: redirections, pipes, descriptors that are closed. In bash, with pipefail.
  Outcome shell(const std::string& script) const {
    const fs::path file = write("script", "set -o pipefail; mla() { " MLA_COMMAND " \"$@\"; }; cd " + folder_.string() +
                                              "\n" + script + "\n"),
                   out = folder_ / "out", err = folder_ / "err";
    const int raw = std::system(("bash " + file.string() + " >" + out.string() + " 2>" + err.string()).c_str());
    return {WIFEXITED(raw) ? WEXITSTATUS(raw) : -1, contents(out), contents(err)};
  }

  // Runs until `ready` holds, then sends the signal; the status is the program's own, or -1 when it was killed.
  template <class Ready>
  Outcome signalled(const std::vector<std::string>& arguments, int signal, Ready&& ready) const {
    const fs::path out = folder_ / "out", err = folder_ / "err";
    fs::remove(out);
    const pid_t child = fork();
    if (child == 0) {
      std::vector<char*> argv{const_cast<char*>(MLA_COMMAND)};
      for (const std::string& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
      argv.push_back(nullptr);
      ::signal(signal, SIG_DFL);
      if (!std::freopen(out.c_str(), "w", stdout) || !std::freopen(err.c_str(), "w", stderr)) _exit(126);
      execv(MLA_COMMAND, argv.data());
      _exit(127);
    }
    int raw = 0;
    for (int i = 0; i < 3000 && !ready(contents(out)) && waitpid(child, &raw, WNOHANG) == 0; ++i) usleep(20'000);
    kill(child, signal);
    waitpid(child, &raw, 0);
    return {WIFEXITED(raw) ? WEXITSTATUS(raw) : -1, contents(out), contents(err)};
  }

  // A run of a moment.
  std::string small_run() const {
    return "run --model " + sparse_config() + " --requests 3 --input-len 30 --output-len 4 --threads 2 ";
  }
  static bool whole(const fs::path& file) { return json::accept(contents(file)); }

  // Exit code 2, nothing but one line on stderr, and that line says what it should.
  void expect_bad(const std::string& arguments, const std::vector<std::string>& says) const {
    const Outcome o = mla(arguments);
    EXPECT_EQ(o.status, 2) << arguments;
    EXPECT_EQ(o.out, "") << arguments;
    EXPECT_EQ(std::count(o.err.begin(), o.err.end(), '\n'), 1) << arguments << ": " << o.err;
    EXPECT_EQ(o.err.rfind("mla: ", 0), 0u) << arguments << ": " << o.err;
    EXPECT_EQ(o.err.back(), '\n') << arguments;
    for (const std::string& s : says) EXPECT_NE(o.err.find(s), std::string::npos) << arguments << ": " << o.err;
  }

  fs::path write(const std::string& name, const std::string& text) const {
    fs::create_directories((folder_ / name).parent_path());
    std::ofstream(folder_ / name, std::ios::binary) << text;
    return folder_ / name;
  }

  // A checkpoint of two layers whose second may lack its output projection.
  fs::path checkpoint(bool complete) const {
    write(
        "model/config.json",
        R"({"model_type":"deepseek_v3","hidden_size":8,"num_hidden_layers":2,"num_attention_heads":2,"q_lora_rank":null,)"
        R"("kv_lora_rank":6,"qk_nope_head_dim":4,"qk_rope_head_dim":2,"v_head_dim":3,"rms_norm_eps":1e-6,"rope_theta":10000})");
    json header = json::object();
    int64_t at = 0;
    for (int layer = 0; layer < 2; ++layer) {
      auto add = [&](const char* name, std::vector<int64_t> shape) {
        int64_t bytes = 4;
        for (int64_t n : shape) bytes *= n;
        header["model.layers." + std::to_string(layer) + ".self_attn." + name + ".weight"] = {
            {"dtype", "F32"}, {"shape", shape}, {"data_offsets", {at, at + bytes}}};
        at += bytes;
      };
      add("q_proj", {12, 8});
      add("kv_a_proj_with_mqa", {8, 8});
      add("kv_a_layernorm", {6});
      add("kv_b_proj", {14, 6});
      if (complete || layer == 0) add("o_proj", {8, 6});
    }
    const std::string text = header.dump();
    std::string file;
    for (int i = 0; i < 8; ++i) file += static_cast<char>(static_cast<uint64_t>(text.size()) >> (8 * i) & 0xff);
    write("model/model.safetensors", file + text + std::string(static_cast<size_t>(at), '\0'));
    return folder_ / "model";
  }

  // A config of a small sparse model: two layers, the second shares the first one's choice.
  std::string sparse_config() const {
    return write("sparse/config.json",
                 R"({"model_type":"deepseek_v32","hidden_size":64,"num_hidden_layers":2,"num_attention_heads":4,)"
                 R"("q_lora_rank":32,"kv_lora_rank":64,"qk_nope_head_dim":16,"qk_rope_head_dim":8,"v_head_dim":16,)"
                 R"("rms_norm_eps":1e-6,"rope_theta":10000,"index_n_heads":3,"index_head_dim":32,"index_topk":20,)"
                 R"("indexer_types":["full","shared"]})")
        .string();
  }

  fs::path folder_;
};

TEST_F(Command, HelpAndVersionExitWithZero) {
  const Outcome help = mla("--help");
  EXPECT_EQ(help.status, 0);
  for (const char* s : {"bench", "check", "info", "run", "plan", "Examples:", "Exit codes"})
    EXPECT_NE(help.out.find(s), std::string::npos) << s;
  EXPECT_EQ(help.err, "");
  for (const char* command : {"bench", "check", "info", "run", "plan"}) {
    const Outcome o = mla(std::string(command) + " --help");
    EXPECT_EQ(o.status, 0) << command;
    EXPECT_NE(o.out.find("Usage: mla " + std::string(command)), std::string::npos) << o.out;
    EXPECT_NE(o.out.find("\nExample"), std::string::npos) << o.out;
  }
  EXPECT_EQ(mla("--version").status, 0);
}

TEST_F(Command, BadUsageIsOneLineAndExitsWithTwo) {
  expect_bad("", {"subcommand"});
  expect_bad("frobnicate", {"frobnicate", "bench", "check", "info"});
  expect_bad("--frobnicate", {"--frobnicate"});
  expect_bad("check --frobnicate", {"--frobnicate"});
  expect_bad("check --heads many", {"--heads", "many"});
  expect_bad("check --threads 0", {"--threads", "0"});
  expect_bad("bench norm --rounds 3", {"--rounds", "3", "4"});
  expect_bad("bench --heads 128", {"needs an op"});
  expect_bad("bench attend_latent --device cuda", {"--device cuda", "--fit"});
  expect_bad("bench --fit --device tpu", {"--device", "'tpu'", "cuda:N"});
}

TEST_F(Command, UnknownNamesListTheKnownOnes) {
  expect_bad("check frobnicate", {"'frobnicate'", "norm", "attend_latent"});
  for (const char* flag : {"--sparse mixed", "--topk 5", "--index-cache bf16", "--hadamard"})
    expect_bad(std::string("run ") + flag, {"needs a model with an indexer", "deepseek-v2-lite"});
  expect_bad("plan --sparse direct", {"--sparse", "needs a model with an indexer", "deepseek-v2-lite"});
  expect_bad("plan --decode-length -5", {"--decode-length is -5", "0 to"});
  expect_bad("plan --output fp8_32", {"unknown output 'fp8_32'", "fp8_128_tma", "nvfp4", "mxfp4"});
  expect_bad("check quantize --output none", {"output none is not a quantised one"});
  expect_bad("bench frobnicate", {"'frobnicate'", "norm", "plan", "layer"});
  expect_bad("check gather --format q8", {"'q8'", "bf16", "fp8_ds_mla"});
  expect_bad("check norm --dtype int4", {"'int4'", "f32", "bf16"});
  expect_bad("check norm --target sse9", {"'sse9'", "portable"});
  expect_bad("info gpt-2", {"'gpt-2'", "deepseek-v3"});
}

TEST_F(Command, ImpossibleNumbersNameFlagValueAndLimit) {
  expect_bad("check norm --requests -1", {"--requests", "-1", "0"});
  expect_bad("check gather --page-size 0", {"--page-size", "0", "1"});
  expect_bad("check rope --rope 3", {"--rope", "3", "even"});
  expect_bad("check norm --heads 99999999999", {"--heads", "99999999999"});
  expect_bad("check norm --requests 16000000 --query-len 16000000", {"--requests", "256000000000000"});
  expect_bad("bench norm --in 8 --json /no/such/folder/x.json", {"/no/such/folder/x.json"});
}

TEST_F(Command, PlanRefusesBadBatchFiles) {
  auto refuse = [&](const std::string& text, const std::vector<std::string>& says) {
    expect_bad("plan --batch " + write("batch.json", text).string(), says);
  };
  refuse("[1]", {"batch.json", "not a JSON object"});
  refuse(R"({"query_lens":[1]})", {"batch.json", "contexts is missing"});
  refuse(R"({"query_lens":[1,0.5],"contexts":[0,0]})", {"batch.json", "query_lens[1]", "integer"});
  refuse(R"({"query_lens":[18446744073709551615],"contexts":[0]})", {"batch.json", "query_lens[0]", "268435456"});
  refuse(R"({"query_lens":[1],"contexts":3})", {"batch.json", "contexts is missing or not an array"});
  refuse(R"({"query_lens":[-1],"contexts":[0]})", {"request 0: length is -1, allowed 0 to 268435456"});
  refuse(R"({"query_lens":[1],"contexts":[-2]})", {"request 0: length is -2"});
  refuse(R"({"query_lens":[268435456,1],"contexts":[0,0]})", {"more than 268435456 new tokens"});
  refuse(R"({"query_lens":[],"contexts":[5,6]})", {"contexts has 2", "queries has 0"});
  refuse(R"({"query_lens":[1],"query_lens":[2],"contexts":[0]})", {"batch.json", "'query_lens' occurs twice"});
  refuse(R"({"query_lens":[1],"contexts":[0]})" + std::string("\0x", 2), {"batch.json", "NUL"});
  refuse(R"({"query_lens":[)" + std::string(1'000'000, '[') + std::string(1'000'000, ']') + R"(],"contexts":[0]})",
         {"batch.json", "nested deeper"});
  refuse(R"({"query_lens":[1],"query_lens":[2],"contexts":[0]})", {"batch.json", "key 'query_lens' occurs twice"});
  refuse(std::string("{\"query_lens\":[1],\"contexts\":[0]}\0garbage", 42), {"batch.json", "a NUL at byte 33"});
  expect_bad("plan --batch " + folder_.string(), {folder_.string(), "not a regular file"});
  const Outcome none = mla("plan --batch " + write("batch.json", R"({"query_lens":[],"contexts":[]})").string());
  EXPECT_EQ(none.status, 0);
  EXPECT_NE(none.out.find("0 tokens in 0 requests"), std::string::npos) << none.out;
}

// Heads, then cached tokens too, over ranks: prompts in pieces, decodes and shared prefixes, checked against float64.
TEST_F(Command, RanksSplitHeadsAndTheCache) {
  const fs::path file = folder_ / "ranks.json";
  const std::string run =
      "run --layers 1 --heads 5 --requests 6 --input-len 60 --output-len 6 --token-budget 24 "
      "--page-size 8 --threads 2 --verify 12 --json " +
      file.string();
  for (const char* ranks :
       {"--tp 2", "--tp 2 --dcp 2", "--tp 4 --dcp 2", "--tp 3 --dcp 3 --dcp-interleave 8 --cache fp8_ds_mla",
        "--tp 4 --dcp 2 --dcp-exchange heads --cache fp8",
        "--tp 2 --dcp 2 --dcp-interleave 2 --split batch_invariant --path latent --dcp-exchange heads"}) {
    const Outcome o = mla(run + " " + ranks);
    EXPECT_EQ(o.status, 0) << ranks << o.out << o.err;
    EXPECT_NE(o.out.find(" 0 failed"), std::string::npos) << ranks << o.out;
  }
  const json j = json::parse(contents(file));
  EXPECT_EQ(j["model"]["tensor_parallel"], 2);
  EXPECT_EQ(j["model"]["context_parallel"], 2);
  EXPECT_EQ(j["model"]["context_parallel_interleave"], 2);
  EXPECT_EQ(j["model"]["context_parallel_exchange"], "heads");
  EXPECT_EQ(j["model"]["link"], "threads");
  EXPECT_EQ(j["cache"]["page_size"], 16);
  expect_bad("run --dcp 2", {"--dcp is 2", "must divide --tp, 1"});
  expect_bad("run --tp 4 --dcp 3", {"--dcp is 3", "must divide --tp, 4"});
  const Outcome grid = mla("plan --model deepseek-v3 --tp 8 --dcp 4 --contexts 8192 --link 200,7");
  EXPECT_EQ(grid.status, 0) << grid.err;
  for (const char* said : {"rank 0 of 8 in groups of 4 that hold 1 token in turn", "--dcp 2", "--dcp 8",
                           "tokens of every request from which on a split cache is faster than heads alone:"})
    EXPECT_NE(grid.out.find(said), std::string::npos) << said << grid.out;
  // A row of numbers or dashes for each number of requests, a column for each group.
  const std::string_view even = std::string_view(grid.out).substr(grid.out.find("tokens of every request"));
  for (const char* requests : {"\n             1 ", "\n             8 ", "\n            64 ", "\n           256 "})
    EXPECT_NE(even.find(requests), std::string_view::npos) << requests << grid.out;
  expect_bad("run --tp 2 --dcp 2 --dcp-interleave 7", {"pages of 128 tokens", "7 in turn"});
  expect_bad("run --tp 2 --dcp-interleave 2", {"--dcp-interleave is read with --dcp"});
  expect_bad("run --tp 2 --dcp-exchange heads", {"--dcp-exchange is read with --dcp"});
  expect_bad("run --tp 2 --dcp 2 --dcp-exchange values", {"--dcp-exchange", "'values'", "latents heads"});
  expect_bad("run --tp 2 --dcp 2 --dcp-exchange heads --absorption full", {"exchange heads", "fully absorbed"});
  const Outcome heads =
      mla("plan --model deepseek-v3 --tp 2 --dcp 2 --dcp-exchange heads --contexts 8192 --link 200,7");
  EXPECT_EQ(heads.status, 0) << heads.err;
  EXPECT_NE(heads.out.find("and exchange heads"), std::string::npos) << heads.out;
  expect_bad("run --tp 2 --comm nccl", {"--comm nccl is read with --device cuda"});
}

// Requests that select their keys, over ranks that split the indexer's cache, too.
TEST_F(Command, RanksSelectKeysOfASplitCache) {
  for (const char* ranks :
       {"--tp 2 --dcp 2", "--tp 4 --dcp 2 --dcp-interleave 4 --cache fp8", "--tp 3 --dcp 3 --sparse upconvert"}) {
    const Outcome o =
        mla("run --layers 2 --requests 6 --input-len 60 --output-len 6 --token-budget 24 --page-size 8 "
            "--threads 2 --verify 12 --model " +
            sparse_config() + " " + ranks);
    EXPECT_EQ(o.status, 0) << ranks << o.out << o.err;
    EXPECT_NE(o.out.find(" 0 failed"), std::string::npos) << ranks << o.out;
    EXPECT_NE(o.out.find("gather_candidates"), std::string::npos) << ranks << o.out;
  }
}

// What comes in and goes out is of a dtype of its own, and judged so.
TEST_F(Command, HiddenStatesOfF16) {
  const fs::path file = folder_ / "f16.json";
  const std::string run =
      "run --layers 1 --heads 5 --requests 4 --input-len 40 --output-len 4 --weights f32 --verify 12 --json " +
      file.string() + " --activation-dtype ";
  for (const char* rest : {"f16", "bf16", "f16 --tp 2 --threads 2", "f16 --absorption full"}) {
    const Outcome o = mla(run + rest);
    EXPECT_EQ(o.status, 0) << rest << o.out << o.err;
    EXPECT_NE(o.out.find(" 0 failed"), std::string::npos) << rest << o.out;
    EXPECT_NE(o.out.find("hidden states in "), std::string::npos) << rest << o.out;
  }
  EXPECT_EQ(json::parse(contents(file))["model"]["activation_dtype"], "f16");
  EXPECT_NE(mla("plan --activation-dtype f16").out.find("rows of calls in f16"), std::string::npos);
  expect_bad("run --activation-dtype f64", {"--activation-dtype", "'f64'", "known: native f32 bf16 f16"});
}

// A program by itself is a job of one process, where it was built with MPI.
TEST_F(Command, RanksOfAnMpiJobAreItsProcesses) {
  const Outcome o = mla("run --comm mpi --tp 2");
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(o.err.find("--tp is 2, the MPI job has 1 process: start it as mpirun -n 2 mla run --comm mpi --tp 2") !=
                  std::string::npos ||
              o.err.find("built without MPI") != std::string::npos)
      << o.err;
  expect_bad("run --comm peer --tp 2", {"--comm peer is read with --device cuda"});
  expect_bad("run --comm-seconds 3", {"--comm-seconds is read with --tp"});
  expect_bad("run --tp 2 --comm-seconds 0", {"--comm-seconds", "0"});
}

TEST_F(Command, SparseModelsRunAndSayWhereTimeGoes) {
  const std::string trace = " --requests 4 --input-len 70 --output-len 5 --threads 2 --verify 8";
  const fs::path file = folder_ / "run.json";
  const Outcome o = mla("run --model " + sparse_config() + trace + " --json " + file.string());
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  for (const char* s : {"sparse     topk 20, automatic, index cache fp8", "skipped scoring", "time split indexer",
                        "with their selection of keys", "0 failed"})
    EXPECT_NE(o.out.find(s), std::string::npos) << s << "\n" << o.out;
  const json j = json::parse(contents(file));
  EXPECT_GT(j["sparse"]["selected_rows"].get<int64_t>(), 0);
  EXPECT_LT(j["sparse"]["selected_keys"].get<int64_t>(), j["sparse"]["seen_keys"].get<int64_t>());
  EXPECT_GT(j["cache"]["index_bytes"].get<int64_t>(), 0);

  const Outcome fewer = mla("run --model " + sparse_config() + trace +
                            " --heads 2 --topk 9 --sparse upconvert --index-cache bf16 --hadamard --absorption full");
  EXPECT_EQ(fewer.status, 0) << fewer.out << fewer.err;
  for (const char* s : {"2 (--heads) heads", "topk 9, upconvert, index cache bf16 rotated", "absorption full"})
    EXPECT_NE(fewer.out.find(s), std::string::npos) << s << "\n" << fewer.out;
  const Outcome dense = mla("run --model " + sparse_config() + trace + " --sparse dense --up-weights mxfp4");
  EXPECT_EQ(dense.status, 0) << dense.out << dense.err;
  EXPECT_NE(dense.out.find("sparse     off"), std::string::npos) << dense.out;

  const Outcome plan =
      mla("plan --model " + sparse_config() + " --queries 1,60,3 --contexts 40,0,4 --sparse upconvert");
  EXPECT_EQ(plan.status, 0) << plan.err;
  EXPECT_NE(mla("plan --absorbed").out.find("fully absorbed weights"), std::string::npos);
  EXPECT_NE(mla("plan --up-weights mxfp4").out.find("W_UK and W_UV in mxfp4"), std::string::npos);
  for (const char* s : {"sparse by policy upconvert: topk 20", "launch: 1 row read in place",
                        "launch: 60 rows through a workspace of 60 rows, 1 sequence"})
    EXPECT_NE(plan.out.find(s), std::string::npos) << s << "\n" << plan.out;
}

TEST_F(Command, SparseFlagsThatCannotBe) {
  expect_bad("run --topk 4", {"--topk", "deepseek-v2-lite", "none"});
  expect_bad("run --hadamard", {"--hadamard", "deepseek-v2-lite"});
  expect_bad("plan --topk 4", {"--topk", "none"});
  expect_bad("run --heads 17", {"--heads", "17", "1 to 16"});
  expect_bad("run --heads -1", {"--heads", "-1", "0 to"});
  expect_bad("run --heads 1 --model " + checkpoint(true).string(), {"--heads", "checkpoint"});
  expect_bad("run --model " + sparse_config() + " --topk 8193 --requests 1", {"8193", "8192"});
  expect_bad("run --model " + sparse_config() + " --topk -1 --requests 1", {"--topk is -1", "0 to 8192"});
  expect_bad("plan --model " + sparse_config() + " --sparse most", {"'most'", "upconvert"});
  expect_bad("run --index-cache bf16", {"--index-cache", "deepseek-v2-lite"});
  expect_bad("run --model " + sparse_config() + " --index-cache int8", {"'int8'", "fp8"});
  expect_bad("run --absorption half", {"'half'", "full_fp8"});
  expect_bad("run --model " + sparse_config() + " --absorption full --up-weights fp8 --requests 1", {"fp8", "full"});
  expect_bad("run --model " + sparse_config() + " --absorption full --path expanded --requests 1 --input-len 15",
             {"expanded", "absorbed"});
}

TEST_F(Command, PinnedThreadsAreSaidAndChangeNoResult) {
  const std::string small = "run --model " + sparse_config() + " --requests 3 --input-len 30 --output-len 4 --rate 0 ",
                    one = small + "--threads 1 --verify 4 ";
  const fs::path plain = folder_ / "plain.json", pinned = folder_ / "pinned.json";
  EXPECT_EQ(mla(one + "--json " + plain.string()).status, 0);
  const Outcome o = mla(one + "--pin --json " + pinned.string());
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_NE(o.out.find(", 1 thread pinned on 1 node; read"), std::string::npos) << o.out;
  const json before = json::parse(contents(plain)), after = json::parse(contents(pinned));
  EXPECT_EQ(before["machine"]["pinned"], false);
  EXPECT_EQ(after["machine"]["pinned"], true);
  EXPECT_EQ(after["machine"]["nodes"], 1);
  EXPECT_EQ(after["options"]["pin"], true);
  EXPECT_EQ(before["verification"]["worst_error"], after["verification"]["worst_error"]);

  cpu_set_t mask;
  ASSERT_EQ(sched_getaffinity(0, sizeof mask, &mask), 0);
  const int processors = CPU_COUNT(&mask);
  const std::string threads = std::to_string(processors + 1);
  expect_bad("run --pin --threads " + threads, {"threads is " + threads, "may use " + std::to_string(processors)});
  expect_bad("check --pin --threads " + threads, {"threads is " + threads});
  expect_bad("run --pin --device cuda", {"--pin", "--device is cuda:0"});
  EXPECT_EQ(mla("check norm --requests 3 --pin --threads 1").status, 0);
  if (processors < 2) return;
  EXPECT_EQ(mla(small + "--tp 2 --pin --threads 2 --verify 4").status, 0);
  if (processors < 4) expect_bad(small + "--pin --threads 2 --tp " + threads, {"threads is " + threads});
}

TEST_F(Command, CheckJudgesACase) {
  const Outcome o = mla("check norm merge --requests 5 --in 33 --threads 2");
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_NE(o.out.find("norm requests=5"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("error"), std::string::npos);
  EXPECT_NE(o.out.find("2 of 2 cases within their bounds"), std::string::npos) << o.out;
}

TEST_F(Command, CheckSweepsOnEveryTarget) {
  for (const char* target : {"", "--target portable"}) {
    const Outcome o = mla("check norm cast --seed 7 " + std::string(target));
    EXPECT_EQ(o.status, 0) << o.out << o.err;
    EXPECT_NE(o.out.find("norm "), std::string::npos);
    EXPECT_NE(o.out.find("largest error"), std::string::npos);
  }
}

TEST_F(Command, BenchWritesJson) {
  const fs::path file = folder_ / "bench.json";
  const Outcome o =
      mla("bench project --requests 4 --in 64 --out 48 --rounds 4 --min-time 0.01 --json " + file.string());
  ASSERT_EQ(o.status, 0) << o.out << o.err;
  const json report = json::parse(contents(file));
  EXPECT_GT(report.at("roof").at("read_gbps").get<double>(), 0);
  EXPECT_GT(report.at("roof").at("fma_gflops").get<double>(), 0);
  EXPECT_FALSE(report.at("machine").at("target").get<std::string>().empty());
  EXPECT_EQ(report.at("options").at("rounds"), 4);
  ASSERT_EQ(report.at("rows").size(), 1u);
  const json& row = report.at("rows")[0];
  EXPECT_EQ(row.at("op"), "project");
  EXPECT_EQ(row.at("params").at("in"), 64);
  EXPECT_TRUE(row.at("ok").get<bool>());
  EXPECT_LE(row.at("error").get<double>(), row.at("bound").get<double>());
  EXPECT_EQ(row.at("flops").get<double>(), 2.0 * 4 * 16 * 64 * 48);
  EXPECT_GT(row.at("median_s").get<double>(), 0);
  EXPECT_LE(row.at("median_s").get<double>(), row.at("p90_s").get<double>());
  EXPECT_GE(row.at("calls").get<int>(), 4);
}

// Calls between ranks, and the link that a plan takes from them.
TEST_F(Command, BenchCommMakesALinkForPlan) {
  const fs::path file = folder_ / "comm.json";
  const Outcome o = mla("bench comm --ranks 3 --bytes 1000,65536 --min-time 0 --json " + file.string());
  ASSERT_EQ(o.status, 0) << o.err;
  const json j = json::parse(contents(file));
  EXPECT_EQ(j["ranks"], 3);
  EXPECT_EQ(j["comm"], "threads");
  ASSERT_EQ(j["rows"].size(), 6u);
  for (const json& row : j["rows"]) {
    EXPECT_GT(row["median_s"], 0.0);
    EXPECT_GE(row["p90_s"], row["median_s"]);
    EXPECT_GT(row["calls"], 0);
    EXPECT_TRUE(row["bytes"] == 1000 || row["bytes"] == 65536) << row;
  }
  ASSERT_EQ(j["expected"].size(), 11u);  // of 1, 8 and 64 tokens three; the rows of 64 are divided, too
  const double seconds = j["link"]["seconds"], rate = j["link"]["bytes_per_second"];
  EXPECT_GT(rate, 0.0);
  for (const json& row : j["expected"]) {
    EXPECT_NEAR(row["expected_s"], seconds + row["bytes"].get<double>() / rate, 1e-3 * row["expected_s"].get<double>())
        << row;
    EXPECT_NEAR(row["error"], row["expected_s"].get<double>() / row["median_s"].get<double>() - 1, 1e-9);
  }
  const std::string flag = j["link"]["flag"];
  EXPECT_NE(o.out.find("--link " + flag + ": "), std::string::npos) << o.out;
  const Outcome plan = mla("plan --model deepseek-v3 --tp 3 --link " + flag);
  EXPECT_EQ(plan.status, 0) << plan.err;
  EXPECT_EQ(plan.out.find("link unknown"), std::string::npos) << plan.out;
  expect_bad("bench comm --ranks 1", {"--ranks", "1", "2", "128"});
  expect_bad("bench comm --bytes 63", {"--bytes", "63", "64"});
  expect_bad("bench comm --comm smoke", {"smoke", "threads, mpi, peer and nccl"});
  expect_bad("bench comm --comm peer", {"--comm peer is between GPUs, --device is cpu"});
  expect_bad("bench comm --device cuda", {"--comm threads", "--device is cuda:0"});
  expect_bad("bench --cold comm", {"--cold"});
}

TEST_F(Command, RunWritesReportAndChromeTrace) {
  const fs::path report = folder_ / "run.html", data = folder_ / "run.json", trace = folder_ / "trace.json";
  const Outcome o = mla("run --model " + sparse_config() + " --requests 9 --input-len 40 --output-len 8 --json " +
                        data.string() + " --report " + report.string() + " --chrome-trace " + trace.string());
  ASSERT_EQ(o.status, 0) << o.out << o.err;
  const json j = json::parse(contents(data));
  EXPECT_EQ(j["command"], "run");
  const json& series = j["steps_series"];
  const size_t points = series["start_s"].size();
  EXPECT_GT(points, 3u);
  int64_t steps = 0, prefill = 0, decode = 0;
  for (size_t i = 0; i < points; ++i) {
    steps += series["steps"][i].get<int64_t>();
    prefill += series["prefill_tokens"][i].get<int64_t>();
    decode += series["decode_tokens"][i].get<int64_t>();
  }
  EXPECT_EQ(steps, j["steps"]);
  EXPECT_EQ(prefill, j["throughput"]["prefill_tokens"]);
  EXPECT_EQ(decode, j["throughput"]["decode_tokens"]);
  for (const auto& [name, column] : series.items()) EXPECT_EQ(column.size(), points) << name;

  // The page carries the same object.
  const std::string page = contents(report), open = "<script id=\"data\" type=\"application/json\">";
  const size_t at = page.find(open) + open.size();
  EXPECT_EQ(json::parse(page.substr(at, page.find("</script", at) - at)), j);

  std::vector<std::string> categories;
  const json events = json::parse(contents(trace))["traceEvents"];
  for (const json& e : events)
    if (e["ph"] == "X") categories.push_back(e["cat"]);
  EXPECT_EQ(std::count(categories.begin(), categories.end(), "step"), steps);
  EXPECT_EQ(std::count(categories.begin(), categories.end(), "layer"), 2 * steps);
  EXPECT_GT(std::count(categories.begin(), categories.end(), "op"), 10 * steps);

  expect_bad("run --report /no/such/folder/x.html", {"/no/such/folder/x.html", "cannot be written"});
  expect_bad("run --chrome-trace /no/such/folder/x.json", {"/no/such/folder/x.json", "cannot be written"});
}

TEST_F(Command, LongRunsAreSummedUpInTheSeries) {
  const fs::path data = folder_ / "run.json";
  const Outcome o = mla("run --model " + sparse_config() +
                        " --requests 30 --input-len 60 --output-len 20 --token-budget 3 --json " + data.string());
  ASSERT_EQ(o.status, 0) << o.out << o.err;
  const json j = json::parse(contents(data));
  ASSERT_GT(j["steps"].get<int64_t>(), 600);
  EXPECT_LE(j["steps_series"]["start_s"].size(), 600u);
  EXPECT_EQ(j["steps_series"]["steps"][0], 2);
}

TEST_F(Command, BenchWritesReportWithPeers) {
  const std::string bench = "bench norm --requests 4 --in 64 --rounds 4 --min-time 0 ";
  const fs::path data = folder_ / "bench.json", report = folder_ / "bench.html";
  ASSERT_EQ(mla(bench + "--json " + data.string()).status, 0);
  const std::string name = json::parse(contents(data))["rows"][0]["name"];
  const auto peers = [&](const json& all) { return " --peers " + write("peers.json", all.dump()).string(); };
  const Outcome o = mla(bench + "--json " + data.string() + " --report " + report.string() +
                        peers({{{"row", name}, {"peer", "theirs"}, {"us", 12.5}},
                               {{"row", name}, {"peer", "others"}, {"us", 3}},
                               {{"row", "no such row"}, {"peer", "theirs"}, {"us", 1}}}));
  ASSERT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_EQ(o.err, "mla: 2 of 3 peers name a row of this bench\n");
  const json row = json::parse(contents(data))["rows"][0];
  EXPECT_EQ(row["peers"], json::parse(R"([{"peer":"theirs","us":12.5},{"peer":"others","us":3.0}])"));
  EXPECT_NE(contents(report).find("\"theirs\""), std::string::npos);

  const auto refuse = [&](const json& all, const std::vector<std::string>& says) {
    expect_bad(bench + peers(all), says);
  };
  refuse(json::object(), {"peers.json", "array"});
  expect_bad(bench + "--peers " + write("peers.json", R"([{"row":"a","row":"b","peer":"c","us":1}])").string(),
             {"peers.json", "'row' occurs twice"});
  refuse({{{"row", name}, {"us", 1}}}, {"peers.json: entry 0", "\"peer\""});
  refuse({{{"row", name}, {"peer", "a"}, {"us", "1"}}}, {"peers.json: entry 0", "no number"});
  refuse({{{"row", name}, {"peer", "a"}, {"us", 0}}}, {"peers.json: entry 0", "is 0", "above 0"});
  expect_bad(bench + "--peers " + write("peers.json", "[{").string(), {"peers.json", "not valid JSON"});
  expect_bad(bench + peers(json::array()), {"--peers", "--report or --json"});
  expect_bad(bench + "--peers /no/such/peers.json", {"/no/such/peers.json", "cannot be read"});
  expect_bad(bench + "--report /no/such/folder/x.html", {"/no/such/folder/x.html", "cannot be written"});
}

TEST_F(Command, InvariantRunsHavePromptsOnAPathOfTheirOwn) {
  const auto path = [&](const std::string& flags) {
    const Outcome o =
        mla("run --model deepseek-v2-lite --layers 1 --requests 1 --input-len 8 --output-len 2 --rate 0 " +
            std::string("--verify 1 ") + flags);
    EXPECT_EQ(o.status, 0) << o.out << o.err;
    const size_t at = o.out.find("path ") + 5;
    return o.out.substr(at, o.out.find(',', at) - at);
  };
  EXPECT_EQ(path(""), "automatic");
  EXPECT_EQ(path("--split batch_invariant"), "by_prompt");
  EXPECT_EQ(path("--split batch_invariant --path latent"), "latent");
  EXPECT_EQ(path("--split batch_invariant --absorption full"), "automatic");
}

TEST_F(Command, BenchPlanIsVerified) {
  const Outcome o = mla("bench plan --rounds 4 --min-time 0.01");
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_NE(o.out.find("256 requests, batch_invariant"), std::string::npos) << o.out;
}

TEST_F(Command, PlanSaysWhetherAnOutputIsFused) {
  const Outcome o = mla("plan --queries 1,100 --contexts 50,0 --output fp8_128_tma");
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_NE(o.out.find("output: fp8_128_tma, fused"), std::string::npos) << o.out;
  const Outcome spans = mla("plan --model minicpm3 --output fp8_128");
  EXPECT_EQ(spans.status, 0) << spans.err;
  EXPECT_NE(spans.out.find("output: fp8_128, not fused: groups of 128 span heads of 64"), std::string::npos)
      << spans.out;
}

TEST_F(Command, PlanNamesTheKernels) {
  const fs::path file = folder_ / "plan.json";
  const Outcome o = mla("plan --queries 1,100 --contexts 50,0 --path by_length --device cpu --json " + file.string());
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_NE(o.out.find("kernels on a CPU ("), std::string::npos) << o.out;
  const json plan = json::parse(contents(file));
  EXPECT_EQ(plan["tokens"], 101);
  EXPECT_EQ(plan["requests"][0], (json{{"path", "latent"}, {"new_tokens", 1}, {"context_tokens", 50}}));
  std::vector<std::string> ops;
  for (const json& k : plan["kernels"]) {
    ops.push_back(k["op"]);
    EXPECT_EQ(k["kernel"], "cpu");
    EXPECT_EQ(k["calls"], 1);
    EXPECT_GT(k["bytes"], 0);
    EXPECT_GT(k["expected_seconds"], 0);
  }
  EXPECT_NE(o.out.find("steps of a layer"), std::string::npos) << o.out;
  // Two threads of a core's rates take half the time.
  const auto seconds = [&](int threads) {
    mla("plan --device cpu --threads " + std::to_string(threads) + " --json " + file.string());
    return json::parse(contents(file))["kernels"][0]["expected_seconds"].get<double>();
  };
  EXPECT_DOUBLE_EQ(seconds(1), 2 * seconds(2));
  const std::vector<std::string> expected{
      "kv_down",  "query", "norm_rope_append", "absorb",          "query_rope", "attend_latent",
      "value_up", "kv_up", "key_rope",         "attend_expanded", "output"};
  EXPECT_EQ(ops, expected);
  expect_bad("plan --device tpu", {"--device", "'tpu'", "cuda:N"});
  EXPECT_NE(mla("plan --product-weights fp8 --activations fp8_128").out.find("activations fp8_128"), std::string::npos);
  expect_bad("plan --activations fp8_128", {"--activations fp8_128 needs --product-weights fp8"});
  expect_bad("plan --product-weights mxfp4", {"mxfp4"});
  expect_bad("run --requests 1 --activations fp8", {"'fp8'", "fp8_128"});
  expect_bad("plan --compute-capability 80", {"--compute-capability", "--device is cpu"});
  expect_bad("plan --device cuda --compute-capability 9", {"--compute-capability", "9", "80"});
#if MLA_HAVE_CUDA
  // No GPU is needed to name its kernels.
  const auto kernels = [&](const std::string& more) { return mla("plan --device cuda " + more).out; };
  const auto says = [](const std::string& out, const std::string& line) {
    EXPECT_NE(out.find("    " + line + "\n"), std::string::npos) << line << "\n" << out;
  };
  says(kernels("--contexts 4096"), "cuda/sm90, narrow, 16 rows: attend_latent");
  says(kernels("--contexts 4096"), "cuda/generic, cuBLASLt in bf16: kv_down, query, absorb, value_up, output");
  says(kernels("--model kimi-k2 --contexts 4096"), "cuda/sm90, wide, 64 rows: attend_latent");
  says(kernels("--model deepseek-v3 --contexts 4096"), "cuda/sm90, wide, 128 rows: attend_latent");
  says(kernels("--model deepseek-v3 --contexts 4096 --cache fp8"), "cuda/sm90, wide, 128 rows: attend_latent");
  // fp8_ds_mla's kernels read lists of slots themselves, others a table that a launch makes of them.
  says(kernels("--model deepseek-v3.2 --contexts 4096 --cache fp8_ds_mla"), "cuda/sm90, wide, 128 rows: attend_sparse");
  says(kernels("--model deepseek-v3.2 --contexts 4096 --cache fp8_ds_mla"), "cuda/sm90, short rows: select_topk");
  says(kernels("--model deepseek-v3.2 --contexts 20000 --cache fp8_ds_mla"),
       "cuda/sm90, rows by clusters: select_topk");
  says(kernels("--model deepseek-v3.2 --contexts 4096 --cache bf16"),
       "cuda/sm90, lists, wide, 128 rows: attend_sparse");
  says(kernels("--model deepseek-v3 --queries 2048"), "cuda/sm90, 128 + 64 / 128: attend_expanded");
  says(kernels("--model deepseek-v3.2 --queries 300 --contexts 4000 --path latent"),
       "cuda/sm90, matrix units by warpgroups: index_score");
  says(kernels("--contexts 4096 --up-weights mxfp4"), "cuda/sm90, mxfp4 weights, few rows: absorb, value_up");
  const std::string fp8 = "--contexts 4096 --product-weights fp8 ", rows = "--path latent --queries ";
  says(kernels(fp8), "cuda/sm90, fp8 weights, few rows: kv_down, query, output");
  says(kernels(fp8 + rows + "17"),
       "cuda/sm90, fp8 weights, many rows, slower than weights in bf16: kv_down, query, output");
  says(kernels("--model deepseek-v3 " + fp8 + rows + "64"), "cuda/sm90, fp8 weights, many rows: query, output");
  says(kernels(fp8 + rows + "257"),
       "cuda/generic, fp8 weights dequantised for cuBLASLt in bf16, slower than weights in bf16: kv_down, query, "
       "output");
  says(kernels(fp8 + "--activations fp8_128"), "cuda/sm90, fp8 weights, few rows: kv_down, query, output");
  says(kernels(fp8 + "--activations fp8_128 " + rows + "33"),
       "cuda/sm90, fp8 inputs and weights by cuBLASLt, dequantised where it has no algorithm: kv_down, query, output");
  for (const char* other : {"--weights f32 --compute bf16", "--compute-capability 80"}) {
    const std::string out = kernels(fp8 + "--activations fp8_128 " + other);
    EXPECT_NE(out.find("fp8 weights dequantised for cuBLASLt"), std::string::npos) << other << "\n" << out;
    EXPECT_EQ(out.find("fp8 inputs"), std::string::npos) << other << "\n" << out;
  }
  for (const char* other : {"--contexts 4096 --compute f32", "--contexts 4096 --compute-capability 80",
                            "--model minicpm3 --contexts 4096"}) {
    const std::string out = kernels(other);
    EXPECT_NE(out.find("attend_latent"), std::string::npos) << other << "\n" << out;
    EXPECT_EQ(out.find("sm90"), std::string::npos) << other << "\n" << out;
  }
#else
  expect_bad("plan --device cuda", {"cuda:0", "not built with CUDA"});
#endif
}

TEST_F(Command, InfoShowsMachineModelsAndFormats) {
  const Outcome o = mla("info --threads 1");
  EXPECT_EQ(o.status, 0) << o.err;
  for (const char* s : {"machine", "backend", "target", "roof", "topology  ", " node", " core", "a core",
                        "on 1 thread)", "deepseek-v2-lite", "minicpm3", "fp8_ds_mla", "656", "584"})
    EXPECT_NE(o.out.find(s), std::string::npos) << s << "\n" << o.out;
}

TEST_F(Command, InfoShowsWhatEachWayOfPreparingTakes) {
  const Outcome o = mla("info deepseek-v3.2");
  EXPECT_EQ(o.status, 0) << o.err;
  for (const char* s : {"indexer heads 64, dim 128, top 2048, NeoX halves; every layer has its own",
                        "runtime absorption", "fp8", "mxfp4", "full absorption", "GiB"})
    EXPECT_NE(o.out.find(s), std::string::npos) << s << "\n" << o.out;
  const fs::path shared = write(
      "config.json",
      R"({"model_type":"glm_moe_dsa","hidden_size":8,"num_hidden_layers":4,"num_attention_heads":2,"q_lora_rank":6,)"
      R"("kv_lora_rank":6,"qk_nope_head_dim":4,"qk_rope_head_dim":2,"v_head_dim":3,"index_n_heads":2,"index_head_dim":4,)"
      R"("index_topk":5,"indexer_rope_interleave":true,"indexer_types":["full","shared","shared","full"]})");
  const Outcome s = mla("info " + shared.string());
  EXPECT_EQ(s.status, 0) << s.err;
  EXPECT_NE(s.out.find("interleaved; 2 of 4 layers have their own, the others share it"), std::string::npos) << s.out;
}

TEST_F(Command, InfoCountsLayersWithMlaAndSaysHowKeysAreRead) {
  const fs::path kimi = write(
      "config.json", R"({"model_type":"kimi_linear","linear_attn_config":{"full_attn_layers":[4,8,12,16,20,24,27],)"
                     R"("kda_layers":[1,2,3,5,6,7,9,10,11,13,14,15,17,18,19,21,22,23,25,26]}})");
  Outcome o = mla("info " + kimi.string());
  EXPECT_EQ(o.status, 0) << o.err;
  for (const char* s : {"layers 7,", "rotary none (NoPE)", "counted from 0: 3 7 11 15 19 23 26", "8064.0 a token"})
    EXPECT_NE(o.out.find(s), std::string::npos) << s << "\n" << o.out;
  const fs::path yarn = write("yarn.json", R"({"model_type":"deepseek_v3","attention_twist":3,"rope_scaling":)"
                                           R"({"type":"yarn","factor":40,"mscale":0.707}})");
  expect_bad("info " + yarn.string(), {"attention_twist is 3", "allow_unknown"});
  expect_bad("plan --queries 1 --contexts 1 --model " + yarn.string(), {"attention_twist is 3"});
  expect_bad("run --layers 1 --model " + yarn.string(), {"attention_twist is 3"});
  EXPECT_EQ(mla("plan --allow-unknown --queries 1 --contexts 1 --model " + yarn.string()).status, 0);
  o = mla("info --allow-unknown " + yarn.string());
  EXPECT_EQ(o.status, 0) << o.err;
  for (const char* s : {"magnitude 1.36888795, score factor 1", "note: YaRN's magnitude is 1.36888795 as transformers"})
    EXPECT_NE(o.out.find(s), std::string::npos) << s << "\n" << o.out;
}

TEST_F(Command, BenchMeasuresQuantisedWeights) {
  for (const char* weights : {"fp8 --weight-block 16", "mxfp4"}) {
    const Outcome o =
        mla("bench project --requests 4 --in 64 --out 48 --rounds 4 --min-time 0.01 --weights " + std::string(weights));
    EXPECT_EQ(o.status, 0) << o.out << o.err;
  }
  expect_bad("bench project --in 64 --weights int3", {"'int3'", "plain", "mxfp4"});
}

TEST_F(Command, InfoShowsACheckpoint) {
  Outcome o = mla("info " + checkpoint(true).string());
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_NE(o.out.find("layers 0 to 1, all alike: 5 tensors"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("[14, 6]"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("model.safetensors"), std::string::npos) << o.out;
  EXPECT_EQ(mla("info " + (folder_ / "model/config.json").string()).status, 0);

  o = mla("info " + checkpoint(false).string());
  EXPECT_EQ(o.status, 1) << o.out << o.err;
  EXPECT_NE(o.out.find("layer 0: 5 tensors"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("layer 1: 4 tensors"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("unusable: "), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("o_proj"), std::string::npos) << o.out;
}

// What each matrix was read as, and that one may be plain beside.
TEST_F(Command, InfoNamesTheFormsOfWeights) {
  fs::create_directories(folder_ / "fp8");
  write(
      "fp8/config.json",
      R"({"model_type":"deepseek_v3","hidden_size":32,"num_hidden_layers":1,"num_attention_heads":2,"q_lora_rank":null,)"
      R"("kv_lora_rank":6,"qk_nope_head_dim":4,"qk_rope_head_dim":2,"v_head_dim":3,)"
      R"("quantization_config":{"quant_method":"compressed-tensors","format":"mixed-precision"}})");
  mla::test::SafetensorsWriter w;
  const std::string prefix = "model.layers.0.self_attn.";
  w.add(prefix + "q_proj.weight", "F8_E4M3", {12, 32}, std::vector<uint8_t>(12 * 32, 0x38));
  w.add(prefix + "q_proj.weight_scale", "F32", {12, 1}, std::vector<float>(12, 1.0f));
  w.add(prefix + "kv_a_proj_with_mqa.weight_packed", "U8", {8, 16}, std::vector<uint8_t>(8 * 16));
  w.add(prefix + "kv_a_proj_with_mqa.weight_scale", "U8", {8, 1}, std::vector<uint8_t>(8));
  w.add(prefix + "kv_a_layernorm.weight", "F32", {6}, std::vector<float>(6));
  w.add(prefix + "kv_b_proj.weight", "F32", {14, 6}, std::vector<float>(14 * 6));
  w.add(prefix + "o_proj.weight", "F8_E4M3", {32, 6}, std::vector<uint8_t>(32 * 6, 0x38));
  w.add(prefix + "o_proj.weight_scale", "F32", {32, 1}, std::vector<float>(32, 1.0f));
  w.write(folder_ / "fp8/model.safetensors");
  const Outcome o = mla("info " + (folder_ / "fp8").string());
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  for (const char* s :
       {"weights quantised by compressed-tensors\n", "  read as fp8, a scale for each row: q_proj, o_proj\n",
        "  read as mxfp4, groups of 32: kv_a_proj_with_mqa\n"})
    EXPECT_NE(o.out.find(s), std::string::npos) << s << "\n" << o.out;
}

TEST_F(Command, InfoShowsAFileOfTensors) {
  const Outcome o = mla("info " MLA_GOLDEN "/tiny.safetensors");
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_NE(o.out.find("kv_c_normed"), std::string::npos) << o.out;
}

TEST_F(Command, MalformedFilesAreOneLine) {
  expect_bad("info " + write("config.json", "{\"hidden_size\": \"wide\"}").string(), {"config.json", "hidden_size"});
  expect_bad("info " + write("cut.safetensors", "\x40\0\0").string(), {"cut.safetensors"});
  expect_bad("info " + write("empty/none", "").parent_path().string(), {"config.json"});
}

// Scales of an fp8 cache: as asked for, in the summary, in JSON, and named where they cut.
TEST_F(Command, KvScales) {
  const fs::path file = folder_ / "run.json";
  const std::string run =
      "run --requests 2 --input-len 20 --output-len 2 --layers 2 --heads 2 --cache fp8 --verify 2 "
      "--json " +
      file.string() + " --kv-scales ";
  Outcome o = mla(run + "1");
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_EQ(o.out.find("k_scale"), std::string::npos) << o.out;
  EXPECT_EQ(json::parse(contents(file))["cache"]["k_scales"], json({1.0, 1.0}));
  o = mla(run + "auto");
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_NE(o.out.find(", all found on the trace's first tokens; at most 0% of a layer's codes"), std::string::npos)
      << o.out;
  EXPECT_EQ(o.err.find("e4m3"), std::string::npos) << o.err;
  const json found = json::parse(contents(file));
  EXPECT_EQ(found["options"]["kv_scales"], "auto") << found["options"].dump();
  EXPECT_EQ(found["cache"]["saturated"], json({0.0, 0.0}));
  EXPECT_GT(found["cache"]["k_scales"][0].get<double>(), 0.001);
  EXPECT_LT(found["cache"]["k_scales"][0].get<double>(), 0.1);
  const std::string scales = write("scales.json", R"({"k_scale": [1, 0.00001]})").string();
  o = mla(run + scales);
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_NE(o.err.find("mla: layer 1: 9"), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("% of its cache's codes are at e4m3's largest, above 0.1%: values past 448 times k_scale 1e-05 "
                       "are cut (--kv-scales)"),
            std::string::npos)
      << o.err;
  EXPECT_EQ(o.err.find("layer 0"), std::string::npos) << o.err;
  expect_bad("run --kv-scales auto", {"--kv-scales is auto", "--cache is bf16"});
  expect_bad("run --layers 3 --cache fp8 --kv-scales " + scales, {"scales.json", "2 elements", "3 layers"});
}

TEST_F(Command, KvScalesOfACheckpoint) {
  fs::create_directories(folder_ / "scaled");
  write(
      "scaled/config.json",
      R"({"model_type":"deepseek_v3","hidden_size":16,"num_hidden_layers":2,"num_attention_heads":2,"q_lora_rank":null,)"
      R"("kv_lora_rank":8,"qk_nope_head_dim":4,"qk_rope_head_dim":2,"v_head_dim":4})");
  mla::test::SafetensorsWriter w;
  for (int layer = 0; layer < 2; ++layer) {
    const auto add = [&](const std::string& name, std::vector<int64_t> shape) {
      std::vector<float> x;
      for (int64_t i = 0, n = shape[0] * (shape.size() > 1 ? shape[1] : 1); i < n; ++i)
        x.push_back(static_cast<float>(i * 7 % 11) * 0.1f - 0.45f);
      w.add("model.layers." + std::to_string(layer) + ".self_attn." + name, "F32", shape, x);
    };
    add("q_proj.weight", {12, 16});
    add("kv_a_proj_with_mqa.weight", {10, 16});
    add("kv_a_layernorm.weight", {8});
    add("kv_b_proj.weight", {16, 8});
    add("o_proj.weight", {16, 8});
  }
  w.add("model.layers.0.self_attn.k_proj.k_scale", "F32", {}, std::vector<float>{0.5f});
  w.write(folder_ / "scaled/model.safetensors");
  const fs::path file = folder_ / "run.json";
  const std::string run = "run --model " + (folder_ / "scaled").string() +
                          " --requests 2 --input-len 20 --output-len 2 --verify 4 --json " + file.string();
  Outcome o = mla(run + " --cache fp8");
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_NE(o.err.find("mla: the checkpoint has scales for an fp8 cache, --kv-scales 1 leaves them unread"),
            std::string::npos)
      << o.err;
  o = mla(run + " --cache fp8 --kv-scales auto");
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_EQ(o.err.find("unread"), std::string::npos) << o.err;
  EXPECT_NE(o.out.find(" to 0.5, 1 found on the trace's first tokens"), std::string::npos) << o.out;
  const json scales = json::parse(contents(file))["cache"]["k_scales"];
  EXPECT_EQ(scales[0], 0.5);
  EXPECT_LT(scales[1].get<double>(), 0.1);  // found
  EXPECT_EQ(mla(run).err.find("unread"), std::string::npos);
  // Two layers' maps and norms, every tensor once by one rank, and a scale of four bytes that more than one asks for.
  constexpr int kShared = 2 * 4 * (10 * 16 + 8), kBytes = kShared + 2 * 4 * (12 * 16 + 16 * 8 + 16 * 8), kScale = 16;
  const auto read = [&] { return json::parse(contents(file))["checkpoint_bytes"].get<int>(); };
  EXPECT_NE(mla(run).out.find("checkpoint 4.8 KiB of tensors read\n"), std::string::npos);
  EXPECT_GE(read(), kBytes);
  EXPECT_LE(read(), kBytes + kScale);
  // Of two ranks each its own rows and columns; what both need is read twice.
  ASSERT_EQ(mla(run + " --tp 2").status, 0);
  EXPECT_GE(read(), kBytes + kShared);
  EXPECT_LE(read(), kBytes + kShared + kScale);
  ASSERT_EQ(mla("run --requests 2 --layers 1 --input-len 20 --output-len 2 --json " + file.string()).status, 0);
  EXPECT_TRUE(json::parse(contents(file))["checkpoint_bytes"].is_null());
}

// Tokens over the run's duration, and nothing that a share of each step goes into.
TEST_F(Command, ThroughputIsTokensOverDuration) {
  const fs::path file = folder_ / "run.json";
  const Outcome o = mla("run --model " + sparse_config() +
                        " --requests 12 --rate 40 --input-len 40 --output-len 8 --threads 2 --json " + file.string());
  ASSERT_EQ(o.status, 0) << o.out << o.err;
  const json j = json::parse(contents(file)), t = j["throughput"];
  const double seconds = j["seconds"]["simulated"], output = t["output_tokens"], prompt = t["prefill_tokens"];
  EXPECT_EQ(t["duration_s"], seconds);
  EXPECT_EQ(output, t["decode_tokens"].get<double>() + 12);  // a prefill ends with a token
  EXPECT_DOUBLE_EQ(t["output_tokens_per_second"], output / seconds);
  EXPECT_DOUBLE_EQ(t["prompt_tokens_per_second"], prompt / seconds);
  EXPECT_DOUBLE_EQ(t["total_tokens_per_second"], (output + prompt) / seconds);
  EXPECT_DOUBLE_EQ(t["requests_per_second"], 12 / seconds);
  EXPECT_FALSE(t.contains("decode_tokens_per_second"));
  char line[80];
  std::snprintf(line, sizeof line, "throughput output %.1f tokens/s, prompt %.1f tokens/s", output / seconds,
                prompt / seconds);
  EXPECT_NE(o.out.find(line), std::string::npos) << line << "\n" << o.out;
  EXPECT_NE(o.out.find("from the first arrival to the last step's end"), std::string::npos) << o.out;
}

TEST_F(Command, WhereNothingWasMeasuredIsADash) {
  const fs::path file = folder_ / "run.json";
  const Outcome o =
      mla("run --model " + sparse_config() + " --requests 1 --output-len 1 --seed 2 --json " + file.string());
  ASSERT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_NE(o.out.find("  TPOT              -          -          -\n"), std::string::npos) << o.out;
  EXPECT_TRUE(json::parse(contents(file))["latency_seconds"]["tpot"]["p50"].is_null());
  EXPECT_NE(o.out.find("1 request, 1 finished"), std::string::npos) << o.out;
  // One width for all names of ops.
  std::vector<size_t> ends;
  for (const char* op : {"\n  query ", "\n  norm_rope_append "}) {
    const size_t at = o.out.find(op);
    ASSERT_NE(at, std::string::npos) << op << o.out;
    ends.push_back(o.out.find('%', at) - at);
  }
  EXPECT_EQ(ends[0], ends[1]) << o.out;
}

TEST_F(Command, ResultsSayHowTheyWereMade) {
  const fs::path file = folder_ / "run.json", again = folder_ / "again.json";
  ASSERT_EQ(mla("run --model '" + sparse_config() +
                "' --requests 7 --input-len 50 --output-len 6 --rate 3.5 --seed 18446744073709551615 --page-size 16 "
                "--no-prefix-reuse --context-rows 64 --cache-gib 0.5 --threads 2 --json " +
                file.string())
                .status,
            0);
  const json j = json::parse(contents(file));
  EXPECT_EQ(j["command_line"],
            "mla run --model " + sparse_config() +
                " --requests 7 --input-len 50 --output-len 6 --rate 3.5 --seed 18446744073709551615 "
                "--page-size 16 --no-prefix-reuse --context-rows 64 --cache-gib 0.5 --threads 2 --json " +
                file.string());
  EXPECT_FALSE(j["commit"].get<std::string>().empty());
  EXPECT_NE(mla("--version").out.find(j["commit"]), std::string::npos);
  const json& o = j["options"];
  EXPECT_EQ(o["requests"], 7);
  EXPECT_EQ(o["input_len"], 50);
  EXPECT_EQ(o["output_len"], 6);
  EXPECT_EQ(o["rate"], 3.5);
  EXPECT_EQ(o["seed"], 18446744073709551615u);
  EXPECT_EQ(o["page_size"], 16);
  EXPECT_EQ(o["no_prefix_reuse"], true);
  EXPECT_EQ(o["context_rows"], 64);
  EXPECT_EQ(o["cache_gib"], 0.5);
  EXPECT_EQ(o["decode_length"], 1);
  // Every option that the command has is there.
  const std::string help = mla("run --help").out;
  size_t options = 0;
  for (size_t at = help.find("\n  --"); at != std::string::npos; at = help.find("\n  --", at + 1), ++options) {
    std::string name = help.substr(at + 5, help.find_first_of(" \n", at + 5) - at - 5);
    std::replace(name.begin(), name.end(), '-', '_');
    EXPECT_TRUE(o.contains(name)) << name;
  }
  EXPECT_GT(options, 30u);
  // The same generated trace comes of them.
  ASSERT_EQ(shell(j["command_line"].get<std::string>() + "; mv run.json first.json; " +
                  j["command_line"].get<std::string>() + " --verify 2; mv run.json again.json")
                .status,
            0);
  const json k = json::parse(contents(again));
  for (const char* key : {"prefill_tokens", "decode_tokens", "output_tokens"})
    EXPECT_EQ(k["throughput"][key], j["throughput"][key]) << key;
  EXPECT_EQ(json::parse(contents(write("q", mla("plan --json " + (folder_ / "p.json").string()).err)), nullptr, false)
                .is_discarded(),
            true);
  EXPECT_EQ(json::parse(contents(folder_ / "p.json"))["options"]["decode_length"], 1);
}

TEST_F(Command, TextSaysWhatTheTimesAreOf) {
  const Outcome o = mla(small_run() + "--layers 1 --scale-lengths 0.5");
  ASSERT_EQ(o.status, 0) << o.err;
  for (const char* s : {"1 of 2 layers", "lengths times 0.5,", "attention's alone, of 1 of 2 layers", "of 64 (",
                        "prompts share blocks of 32 tokens, a page has 64 (--page-size)"})
    EXPECT_NE(o.out.find(s), std::string::npos) << s << "\n" << o.out;
  EXPECT_EQ(mla(small_run() + "--layers 1").out.find("prompts share blocks"), std::string::npos);
}

// What stood there before is there after every failure, and nothing else is left in the folder.
TEST_F(Command, AGoodFileSurvivesFailures) {
  const fs::path old = write("files/old.json", "old\n"), folder = old.parent_path();
  const auto kept = [&](const char* when) {
    EXPECT_EQ(contents(old), "old\n") << when;
    EXPECT_EQ(std::distance(fs::directory_iterator(folder), fs::directory_iterator()), 1) << when;
  };
  expect_bad("plan --queries -1 --json " + old.string(), {"--queries"});
  kept("bad option");
  expect_bad("run --trace /no/such/trace --json " + old.string(), {"/no/such/trace"});
  kept("no trace");
  expect_bad(small_run() + "--absorption full --up-weights fp8 --report " + old.string(), {"fp8", "full"});
  kept("options that do not fit");
  // Files of at most 4 blocks: the report does not fit.
  const Outcome full = shell("ulimit -f 4; mla " + small_run() + " --report files/old.json");
  EXPECT_EQ(full.status, 1) << full.err;
  EXPECT_NE(full.err.find("mla: --report: files/old.json was not written: File too large"), std::string::npos)
      << full.err;
  EXPECT_NE(full.out.find("throughput"), std::string::npos);
  kept("a full disk");
  const Outcome good = shell("mla " + small_run() + " --json files/old.json");
  EXPECT_EQ(good.status, 0) << good.err;
  EXPECT_NE(good.out.find("written    files/old.json\n"), std::string::npos) << good.out;
  EXPECT_TRUE(whole(old));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder), fs::directory_iterator()), 1);
}

TEST_F(Command, OutputsKeepLinksAndModes) {
  const fs::path target = write("target.json", "old");
  chmod(target.c_str(), 0640);
  fs::create_symlink(target, folder_ / "link.json");
  ASSERT_EQ(shell("umask 022; mla plan --json link.json --queries 1 && mla plan --json new.json").status, 0);
  EXPECT_TRUE(fs::is_symlink(folder_ / "link.json"));
  EXPECT_TRUE(whole(target));
  EXPECT_EQ(fs::status(target).permissions(), fs::perms(0640));
  EXPECT_EQ(fs::status(folder_ / "new.json").permissions(), fs::perms(0644));
}

TEST_F(Command, OneFailedOutputLeavesTheOthers) {
  const Outcome o = shell("mla " + small_run() + "--json /dev/full --report ok.html --chrome-trace ok.json");
  EXPECT_EQ(o.status, 1) << o.err;
  EXPECT_EQ(o.err, "mla: --json: /dev/full was not written: No space left on device\n");
  EXPECT_NE(contents(folder_ / "ok.html").find("</html>"), std::string::npos);
  EXPECT_TRUE(whole(folder_ / "ok.json"));
}

TEST_F(Command, OutputsThatWouldDestroyAreRefused) {
  const std::string a = (folder_ / "a").string(), same = (folder_ / "model/../a").string();
  checkpoint(true);
  const fs::path config = sparse_config(), batch = write("batch.json", R"({"query_lens":[1],"contexts":[0]})"),
                 trace = write("trace.csv", "Timestamp,Request tokens,Response tokens\n5,47,2\n");
  fs::create_hard_link(trace, folder_ / "hard.csv");
  expect_bad("run --json " + a + " --report " + a, {"--report is", "--json writes"});
  expect_bad("run --json " + a + " --chrome-trace " + same, {"--chrome-trace is", "--json writes"});
  // Neither is there yet.
  const std::string here = fs::current_path().string();
  expect_bad("run --json ./never-there --report never-there", {"--report is", "--json writes"});
  expect_bad("run --json never-there --chrome-trace " + here + "/never-there", {"--chrome-trace is", "--json writes"});
  for (const char* flag : {"--json", "--report", "--chrome-trace", "--trace"})
    expect_bad(std::string("run ") + flag + " ''", {std::string(flag) + " is ''"});
  expect_bad("plan --batch ''", {"--batch is ''"});
  expect_bad("run --trace " + trace.string() + " --json " + trace.string(), {"--json is", "--trace reads"});
  expect_bad("run --trace " + trace.string() + " --json " + (folder_ / "hard.csv").string(), {"--trace reads"});
  expect_bad("run --model " + config.string() + " --report " + config.string(), {"--report is", "--model reads"});
  expect_bad("run --model " + (folder_ / "model").string() + " --json " + (folder_ / "model/config.json").string(),
             {"--json is", "--model reads"});
  expect_bad("plan --batch " + batch.string() + " --json " + batch.string(), {"--json is", "--batch reads"});
  expect_bad("bench norm --peers " + batch.string() + " --json " + batch.string(), {"--json is", "--peers reads"});
  expect_bad("run --json -", {"--json", "/dev/stdout"});
  expect_bad("run --json " + folder_.string(), {"--json", "folder"});
  const fs::path fifo = folder_ / "fifo";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  expect_bad("run --json " + fifo.string(), {"--json", "nobody reads it"});
  expect_bad("run --trace " + fifo.string(), {"fifo", "not a regular file"});
  expect_bad("plan --batch " + fifo.string(), {"fifo", "not a regular file"});
  expect_bad("run --trace -", {"--trace", "standard input"});
}

TEST_F(Command, ChecksOfNoQueriesEnd) {
  for (const char* op : {"index_score", "attend_latent", "attend_expanded", "attend_sparse", "append"}) {
    const Outcome o = mla(std::string("check ") + op + " --ragged --requests 3 --query-len 0 --context 5");
    EXPECT_TRUE(o.status == 0 || o.status == 2) << op << ": " << o.status << " " << o.err;
  }
}

TEST_F(Command, PlanRehearsesMoreThreadsThanThereAre) {
  const fs::path file = folder_ / "plan.json";
  const Outcome o = mla("plan --queries 1,40 --contexts 300,0 --threads 200 --rehearse --json " + file.string());
  ASSERT_EQ(o.status, 0) << o.err;
  const size_t at = o.out.find("as 200 threads would share the tasks");
  ASSERT_NE(at, std::string::npos) << o.out;
  // Each op of the step with its tasks, on one thread no faster than on all.
  std::istringstream rows(o.out.substr(at));
  std::string line, op, unit;
  std::getline(rows, line);
  std::getline(rows, line);
  int steps = 0;
  int64_t tasks = 0;
  double alone = 0, longest = 0, shared = 0;
  for (; op != "all" && rows >> op >> tasks >> alone >> unit >> longest >> unit >> shared >> unit >> unit; ++steps) {
    EXPECT_GT(tasks, 0) << op;
    EXPECT_LE(longest, alone) << op;
    EXPECT_LE(shared, alone * 1.01 + 0.1) << op;
    EXPECT_GE(shared, longest * 0.99 - 0.1) << op;
    if (op == "query") {
      EXPECT_GT(tasks, 40) << "an output of 3072 columns in tiles of 64";
    }
  }
  EXPECT_GT(steps, 8) << o.out;
  EXPECT_EQ(op, "all");
  EXPECT_EQ(json::parse(contents(file))["rehearsed"].size(), static_cast<size_t>(steps) - 1);
  // Nothing to do is no task.
  for (const std::string& none :
       {std::string("--queries 0"), "--batch " + write("none.json", R"({"query_lens":[],"contexts":[]})").string()}) {
    const Outcome idle = mla("plan --rehearse " + none);
    EXPECT_EQ(idle.status, 0) << idle.err;
    EXPECT_NE(idle.out.find("    all                      0 "), std::string::npos) << idle.out;
  }
  expect_bad("plan --rehearse --device cuda", {"--rehearse", "cpu"});
  expect_bad("plan --rehearse --tp 2", {"--rehearse", "--tp 1"});
  expect_bad("plan --threads 5000", {"--threads", "5000", "4096"});
}

TEST_F(Command, OutputsThatAreNoFilesAreWrittenAsTheyAre) {
  // Text and JSON in one stream, in this order, whether that is a pipe or a file.
  for (const char* to : {"| cat", "> both; cat both"}) {
    const Outcome o = shell("mla plan --queries 1 --json /dev/stdout " + std::string(to));
    EXPECT_EQ(o.status, 0) << o.err;
    const size_t at = o.out.find("{\n");
    ASSERT_NE(at, std::string::npos) << o.out;
    EXPECT_EQ(json::parse(o.out.substr(at, o.out.find("\n}\n") + 3 - at))["command"], "plan");
    EXPECT_NE(o.out.find("1 token in 1 request"), std::string::npos) << o.out;
  }
  EXPECT_EQ(shell("mla plan --json /dev/null").status, 0);
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  const Outcome pipe = shell("mkfifo p; cat p > got & mla plan --json p; status=$?; wait; exit $status");
  EXPECT_EQ(pipe.status, 0) << pipe.err;
  EXPECT_TRUE(whole(folder_ / "got"));
}

TEST_F(Command, StandardOutputThatFailsIsAnError) {
  for (const std::string& command : {std::string("info deepseek-v3"), std::string("plan"), std::string("--help"),
                                     std::string("check norm --requests 2 --in 8"), small_run()})
    for (const char* to : {">/dev/full", ">&-"}) {
      const Outcome o = shell("mla " + command + " " + to);
      EXPECT_EQ(o.status, 1) << command << to << o.err;
      EXPECT_EQ(o.err.rfind("mla: standard output could not be written", 0), 0u) << command << to << o.err;
    }
  // The descriptor that is free is no file's.
  const Outcome o = shell("mla " + small_run() + "--json j.json --report r.html >&-");
  EXPECT_EQ(o.status, 1);
  EXPECT_TRUE(whole(folder_ / "j.json"));
  EXPECT_EQ(contents(folder_ / "r.html").rfind("<!DOCTYPE html>", 0), 0u);
  EXPECT_EQ(shell("mla plan --json j2.json <&- 2>&-").status, 0);
  EXPECT_TRUE(whole(folder_ / "j2.json"));
}

TEST_F(Command, AReaderThatLeavesLosesNoFile) {
  for (const std::string& command : {small_run(), small_run() + "--verify 5 ",
                                     std::string("bench norm merge --requests 3 --rounds 4 --min-time 0 ")}) {
    fs::remove(folder_ / "j.json");
    const Outcome o = shell("mla " + command + "--json j.json | true");
    EXPECT_EQ(o.status, 128 + SIGPIPE) << command << o.err;
    EXPECT_TRUE(whole(folder_ / "j.json")) << command;
  }
}

TEST_F(Command, SignalsEndARunWithWhatItHas) {
  const fs::path data = folder_ / "j.json", page = folder_ / "r.html", trace = folder_ / "t.json";
  const std::vector<std::string> run{"run",
                                     "--model",
                                     sparse_config(),
                                     "--requests",
                                     "100000",
                                     "--rate",
                                     "0",
                                     "--input-len",
                                     "60",
                                     "--threads",
                                     "2",
                                     "--json",
                                     data,
                                     "--report",
                                     page,
                                     "--chrome-trace",
                                     trace};
  const auto soon = [](const std::string&) { return usleep(500'000) == 0; };
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    for (const fs::path& file : {data, page, trace}) fs::remove(file);
    const Outcome o = signalled(run, signal, soon);
    EXPECT_EQ(o.status, 128 + signal) << o.err;
    EXPECT_EQ(o.out.rfind("interrupted: what follows covers the run so far\n", 0), 0u) << o.out;
    ASSERT_TRUE(whole(data));
    EXPECT_EQ(json::parse(contents(data))["interrupted"], true);
    EXPECT_NE(contents(page).find("</html>"), std::string::npos);
    EXPECT_TRUE(whole(trace));
  }
}

TEST_F(Command, SignalsEndSetUpVerificationAndBench) {
  const fs::path data = folder_ / "j.json";
  // While the weights of a model are made, which takes a minute.
  Outcome o = signalled({"run", "--model", "deepseek-v3", "--requests", "1", "--threads", "1", "--json", data}, SIGTERM,
                        [](const std::string&) { return usleep(1'500'000) == 0; });
  EXPECT_EQ(o.status, 128 + SIGTERM) << o.err;
  ASSERT_TRUE(whole(data));
  EXPECT_EQ(json::parse(contents(data))["steps"], 0);
  // What an earlier run gave is worth more than that.
  write("j.json", "{\"earlier\": true}");
  o = signalled({"run", "--model", "deepseek-v3", "--requests", "1", "--threads", "1", "--json", data}, SIGTERM,
                [](const std::string&) { return usleep(1'500'000) == 0; });
  EXPECT_EQ(o.status, 128 + SIGTERM) << o.err;
  EXPECT_EQ(contents(data), "{\"earlier\": true}");
  EXPECT_NE(o.out.find("kept       " + data.string() + " as it was"), std::string::npos) << o.out;

  fs::remove(data);
  o = signalled({"run", "--layers", "1", "--requests", "4", "--input-len", "600", "--output-len", "2", "--threads", "2",
                 "--verify", "400", "--json", data},
                SIGINT, [&](const std::string&) { return fs::exists(data); });
  EXPECT_EQ(o.status, 128 + SIGINT) << o.err;
  EXPECT_NE(o.out.find(", then interrupted"), std::string::npos) << o.out;
  ASSERT_TRUE(whole(data));
  json j = json::parse(contents(data));
  EXPECT_EQ(j["interrupted"], false);  // the run itself was whole
  EXPECT_EQ(j["verification"]["interrupted"], true);
  EXPECT_LT(j["verification"]["rows"], 400);

  fs::remove(data);
  o = signalled({"bench", "--min-time", "0", "--rounds", "4", "--threads", "2", "--json", data}, SIGTERM,
                [](const std::string& out) { return std::count(out.begin(), out.end(), '\n') >= 3; });
  EXPECT_EQ(o.status, 128 + SIGTERM) << o.err;
  ASSERT_TRUE(whole(data));
  j = json::parse(contents(data));
  EXPECT_EQ(j["interrupted"], true);
  EXPECT_GE(j["rows"].size(), 1u);
}

TEST_F(Command, VerificationSaysHowLongItTook) {
  const Outcome o = mla(small_run() + "--verify 6");
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_NE(o.out.find("verified   6 rows against float64 in "), std::string::npos) << o.out;
}

TEST_F(Command, ARunThatRefusedEverythingFailed) {
  const fs::path data = folder_ / "j.json";
  Outcome o = mla(small_run() + "--pages 1 --page-size 8 --json " + data.string());
  EXPECT_EQ(o.status, 1);
  EXPECT_EQ(o.err.rfind("mla: every request was refused: the smallest needs ", 0), 0u) << o.err;
  EXPECT_NE(o.err.find("the cache has 1"), std::string::npos) << o.err;
  EXPECT_TRUE(whole(data));
  // A small file that asks for 6 million million tokens: refused by what the cache holds, in little memory.
  std::string text = "Timestamp,Request tokens,Response tokens\n";
  for (int i = 0; i < 30'000; ++i) text += std::to_string(i) + ",100000000,100000000\n";
  write("long.csv", text);
  // A sanitizer's shadow memory takes more addresses than any limit leaves.
  const std::string limit = mla::test::kSanitized ? "" : "ulimit -v 4000000; ";
  o = shell(limit + "mla run --model " + sparse_config() + " --cache-gib 0.01 --threads 2 --trace long.csv");
  EXPECT_EQ(o.status, 1) << o.err;
  EXPECT_NE(o.out.find("30000 requests, 0 finished, 30000 refused"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("output - tokens/s, prompt - tokens/s, together - tokens/s"), std::string::npos) << o.out;
  expect_bad(small_run() + "--cache-gib 1e-6", {"cache-gib", "cannot hold a page"});
}

TEST_F(Command, NumbersAreTakenWholeOrNotAtAll) {
  for (const char* seed : {"-1", "99999999999999999999999", "1.5", "0x10", "' 1'"})
    for (const char* command : {"run", "check norm"})
      expect_bad(std::string(command) + " --seed=" + seed, {"--seed is", "0 to 18446744073709551615"});
  expect_bad("plan --queries 9223372036854775808", {"--queries[0] is 9223372036854775808", "0 to 268435456"});
  expect_bad("plan --queries 1,,2", {"--queries[1] is ''"});
  expect_bad("plan --queries 1,2, --contexts 3", {"--queries[2] is ''"});
  expect_bad("plan --queries 1 --contexts 1,x", {"--contexts[1] is 'x'"});
  expect_bad("run --rate inf", {"--rate is inf"});
  expect_bad("run --rate nan", {"--rate is 'nan'"});
  expect_bad("run --verify 4611686018427387904", {"--verify is 4611686018427387904", "0 to 1000000"});
  expect_bad("run --cache-gib 1e30", {"--cache-gib is 1e30", "to 1000000"});
  expect_bad("run --scale-lengths 1.5", {"--scale-lengths is 1.5"});
  expect_bad("bench norm --min-time nan --in 8", {"--min-time is 'nan'"});
  for (const char* command : {"run", "plan", "bench norm", "check norm", "info"})
    for (const char* threads : {"0", "-1", "100000", "4294967297"})
      expect_bad(std::string(command) + " --threads " + threads, {"--threads is " + std::string(threads), "1 to "});
  // Several numbers may be several arguments, too.
  EXPECT_EQ(mla("plan --queries 1,2 --contexts 3,4").out, mla("plan --queries 1 2 --contexts 3 4").out);
}

TEST_F(Command, AnOptionIsGivenOnce) {
  expect_bad("run --layers 1 --layers 2", {"mla: --layers was given twice (see mla --help)"});
  expect_bad("check norm --threads=1 --threads 1 --threads 1", {"mla: --threads was given 3 times"});
  EXPECT_EQ(mla("plan --queries 1 --queries 2 --contexts 3 --contexts 4").status, 0);
}

TEST_F(Command, FilesThatAreNotWhatTheyShouldBe) {
  expect_bad("info " + write("words", "these are words and no tensors").string(),
             {"words: not a safetensors file: its first 8 bytes would be the length of a header of ", "at most "});
  expect_bad("info " + write("empty.json", "").string(), {"empty.json: not valid JSON: it is empty"});
  expect_bad("info " + write("commas.json", "{\n\"a\": 1,,\n}").string(),
             {"commas.json: not valid JSON at byte 9 (line 2, column 8), the end of '\"a\": 1,,'"});
  expect_bad("plan --batch " + write("b.json", R"({"query_lens":[1],"contexts":[2],"q_scale":-3})").string(),
             {"b.json: q_scale is -3, known are query_lens, contexts"});
  expect_bad("run --layers 1 --cache fp8 --kv-scales " + write("k.json", R"({"k_scale":1,"q_scale":-3})").string(),
             {"k.json: q_scale is -3, known are k_scale, v_scale"});
  expect_bad("bench norm --json j --peers " + write("p.json", R"([{"row":"a","peer":"b","us":1,"ms":2}])").string(),
             {"p.json: entry 0: ms is 2, known are row, peer, us"});
}

TEST_F(Command, MemoryThatIsNotThereIsNamed) {
  if (mla::test::kSanitized) GTEST_SKIP() << "a sanitizer's shadow memory takes more addresses than any limit leaves";
  const Outcome o = shell("ulimit -v 120000; mla info --threads 1");
  EXPECT_EQ(o.status, 2);
  EXPECT_EQ(o.err.rfind("mla: probe of memory bandwidth: cpu has no ", 0), 0u) << o.err;
  const Outcome run = shell("ulimit -v 400000; mla run --model deepseek-v3 --layers 1 --threads 1");
  EXPECT_EQ(run.status, 2);
  EXPECT_NE(run.err.find("weights"), std::string::npos) << run.err;
}

TEST_F(Command, MisspelledNamesAreGuessed) {
  expect_bad("runn", {"'runn'; commands: run", "did you mean 'run'?"});
  expect_bad("--versoin", {"did you mean '--version'?"});
  expect_bad("run --layer 1", {"'--layer' '1'; did you mean '--layers'?"});
  expect_bad("plan --contxets=3", {"did you mean '--contexts'?"});
  expect_bad("check nrm", {"'nrm'; known: ", "did you mean 'norm'?"});
  expect_bad("bench attend_latnt", {"did you mean 'attend_latent'?"});
  expect_bad("bench layr", {"did you mean 'layer'?"});
  for (const char* far : {"xyzzy", "run --xyzzy 1", "run extra words", "check xyzzy"})
    EXPECT_EQ(mla(far).err.find("did you mean"), std::string::npos) << far;
}

TEST_F(Command, WhatWouldNotBeReadIsRefused) {
  for (const char* flag : {"--requests 3", "--input-len 9", "--output-len 9", "--rate 1"})
    expect_bad("run --trace t.csv " + std::string(flag), {std::string(flag).substr(0, 6), "not read beside --trace"});
  expect_bad("plan --batch b.json --queries 3", {"--queries is not read beside --batch"});
  expect_bad("plan --batch b.json --contexts 3", {"--contexts is not read beside --batch"});
  expect_bad("run --pages 7 --cache-gib 2", {"--cache-gib is not read beside --pages"});
  expect_bad("run --decode-length 3", {"--decode-length", "--path by_length"});
}

TEST_F(Command, ErrorsNameTheOption) {
  const std::string fifo = (folder_ / "ff").string();
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  for (const std::string command : {"run", "plan"}) {
    expect_bad(command + " --model " + fifo, {"--model: " + fifo + " is neither a folder nor a file whose name ends"});
    expect_bad(command + " --model /no/such.json", {"--model: /no/such.json: cannot be read"});
    expect_bad(command + " --q-scale auto", {"--q-scale is auto, --cache is bf16: fp8 queries need a cache of fp8"});
  }
  expect_bad("run --layers 28", {"mla: --layers is 28, deepseek-v2-lite has 1 to 27"});
  expect_bad(small_run() + "--cache-gib 1e-9", {"mla: --cache-gib: 1 byte cannot hold a page"});
  expect_bad("run --layers 1 --cache fp8 --kv-scales 0", {"--kv-scales: 0: cannot be read"});
  expect_bad("run --trace /no/such.jsonl", {"--trace: /no/such.jsonl: cannot be read"});
  expect_bad("plan --batch /no/such.json", {"--batch: /no/such.json: cannot be read"});
  expect_bad("run --requests 100000000", {"--requests is 100000000, allowed 1 to 8388608"});
  expect_bad("run --cache q8", {"--cache: unknown cache format 'q8'"});
  expect_bad("run --path fast", {"--path: ", "'fast'"});
  expect_bad("run --model gpt-2", {"--model: ", "'gpt-2'"});
  expect_bad("run --weights f16", {"--weights is f16", "f32 or bf16"});
  expect_bad("run --compute fp8", {"--compute is fp8", "f32 or bf16"});
  expect_bad("run --activations fp8_128", {"--activations fp8_128 needs --product-weights fp8"});
  expect_bad("run --token-budget 0", {"--token-budget is 0"});
  expect_bad("run --model deepseek-v3.2 --topk 9000", {"--topk is 9000", "8192"});
  expect_bad("run extra words", {"'extra' 'words'"});
  expect_bad("run --layer 1", {"'--layer' '1'"});
  // One line that a terminal can show, however long or strange what it quotes.
  const Outcome o = mla("run --cache \"$(printf '\\033[31m\\n%5000d' 0)\"");
  EXPECT_EQ(o.status, 2);
  EXPECT_EQ(std::count_if(o.err.begin(), o.err.end(), [](unsigned char c) { return c < 0x20; }), 1) << o.err;
  EXPECT_LT(o.err.size(), 1100u);
}

TEST_F(Command, HelpSaysEveryExitCode) {
  const std::string help = mla("--help").out;
  for (const char* s : {"Exit codes: 0; 1, ", "; 2, ", "128 + n", "130", "143", "129", "141"})
    EXPECT_NE(help.find(s), std::string::npos) << s << "\n" << help;
}

TEST_F(Command, TimesThatGoBackAreSaid) {
  const fs::path trace = write("t.csv", "Timestamp,Request tokens,Response tokens\n5,40,2\n3,41,2\n4,42,2\n");
  const Outcome o = mla("run --model " + sparse_config() + " --threads 2 --trace " + trace.string());
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_NE(o.out.find("1 line has an earlier time than the line above, the first is line 3"), std::string::npos)
      << o.out;
}

}  // namespace
