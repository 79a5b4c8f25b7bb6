// A main for targets that are built without libFuzzer: runs every file of the folders that are named, then inputs that
// are those files damaged at random.
//   target [-runs=N] [-max_total_time=SECONDS] [-seed=N] [-exact_artifact_path=FILE] FILE|FOLDER ...
// Ends with status 0 and the number of executions. Before an input runs it is kept, so that what ends the program can
// be run again: in the file named, or in crash-input.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "fuzz/fuzz.hpp"

namespace {

using Input = std::vector<uint8_t>;

Input contents(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

const Input* running = nullptr;
std::string artifact = "crash-input";

// The process is about to end: plain calls are all that is needed.
void keep(int signal) {
  std::fprintf(stderr, "input of %zu bytes, kept in %s:\n", running->size(), artifact.c_str());
  for (size_t i = 0; i < std::min<size_t>(running->size(), 4096); ++i) std::fprintf(stderr, "%02x", (*running)[i]);
  std::fputs("\n", stderr);
  std::ofstream(artifact, std::ios::binary)
      .write(reinterpret_cast<const char*>(running->data()), static_cast<std::streamsize>(running->size()));
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

Input damaged(const std::vector<Input>& corpus, std::mt19937_64& random) {
  auto below = [&](size_t n) { return static_cast<size_t>(random() % std::max<size_t>(n, 1)); };
  Input x = corpus.empty() ? Input{} : corpus[below(corpus.size())];
  for (size_t n = 1 + below(4); n > 0; --n) {
    const size_t at = below(x.size() + 1);
    switch (below(6)) {
      case 0: x.insert(x.begin() + static_cast<ptrdiff_t>(at), static_cast<uint8_t>(random())); break;
      case 1:
        if (at < x.size()) x[at] = static_cast<uint8_t>(random());
        break;
      case 2:
        if (at < x.size()) x[at] ^= static_cast<uint8_t>(1 << below(8));
        break;
      case 3:
        x.erase(x.begin() + static_cast<ptrdiff_t>(at),
                x.begin() + static_cast<ptrdiff_t>(std::min(x.size(), at + 1 + below(8))));
        break;
      case 4: {  // a piece of another
        const Input& other = corpus.empty() ? x : corpus[below(corpus.size())];
        const size_t from = below(other.size()), count = std::min(other.size() - from, below(64));
        const Input piece(other.begin() + static_cast<ptrdiff_t>(from),
                          other.begin() + static_cast<ptrdiff_t>(from + count));
        x.insert(x.begin() + static_cast<ptrdiff_t>(at), piece.begin(), piece.end());
        break;
      }
      default: x.resize(at);
    }
  }
  return x;
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t runs = 0, seed = 1;
  double seconds = 0;
  std::vector<Input> corpus;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    auto value = [&](const char* name) {
      return arg.starts_with(name) ? arg.c_str() + std::string(name).size() : nullptr;
    };
    if (const char* v = value("-runs=")) runs = std::strtoull(v, nullptr, 10);
    else if (const char* v2 = value("-seed=")) seed = std::strtoull(v2, nullptr, 10);
    else if (const char* v3 = value("-max_total_time=")) seconds = std::strtod(v3, nullptr);
    else if (const char* v4 = value("-exact_artifact_path=")) artifact = v4;
    else if (arg.starts_with("-")) continue;  // libFuzzer's others
    else if (std::filesystem::is_directory(arg))
      for (const auto& e : std::filesystem::recursive_directory_iterator(arg)) {
        if (e.is_regular_file()) corpus.push_back(contents(e.path()));
      }
    else corpus.push_back(contents(arg));
  }
  for (int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) std::signal(signal, keep);
  std::sort(corpus.begin(), corpus.end());
  uint64_t done = 0;
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  const auto run = [&](const Input& x) {
    running = &x;
    // As large as the input, so that a sanitizer sees a read past it.
    std::vector<uint8_t> exact(x);
    exact.shrink_to_fit();
    LLVMFuzzerTestOneInput(exact.data(), exact.size());
    ++done;
  };
  for (const Input& x : corpus) run(x);
  std::mt19937_64 random(seed);
  while (done < runs || (runs == 0 && elapsed() < seconds)) {
    const Input x = damaged(corpus, random);
    run(x);
    if (runs > 0 && seconds > 0 && elapsed() >= seconds) break;
  }
  std::printf("stat::number_of_executed_units: %llu\n", static_cast<unsigned long long>(done));
}
