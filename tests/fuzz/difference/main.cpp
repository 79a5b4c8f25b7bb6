// Difference fuzzing of the layer: rounds from consecutive seeds, each against float64 (support/difference.hpp).
//   fuzz_difference [--rounds N] [--seed S]
// Every failure prints the line that repeats it; the exit status is 1 if there was one.
#include "support/difference.hpp"

#include <charconv>
#include <cstdio>
#include <cstring>
#include <exception>

namespace {

bool parse(const char* text, uint64_t& value) {
  const char* end = text + std::strlen(text);
  const auto [at, error] = std::from_chars(text, end, value);
  return error == std::errc() && at == end;
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t rounds = 100, seed = 1, failures = 0;
  for (int i = 1; i < argc; i += 2) {
    uint64_t* value = std::strcmp(argv[i], "--rounds") == 0 ? &rounds
                      : std::strcmp(argv[i], "--seed") == 0 ? &seed
                                                            : nullptr;
    if (!value || i + 1 == argc || !parse(argv[i + 1], *value)) {
      std::fprintf(stderr, "usage: fuzz_difference [--rounds N] [--seed S]\n");
      return 2;
    }
  }
  for (uint64_t i = 0; i < rounds; ++i) {
    mla::test::Difference d;
    try {
      d = mla::test::difference(seed + i);
    } catch (const std::exception& e) {
      d.wrong = std::string("threw: ") + e.what();
    }
    if (d.wrong.empty()) continue;
    ++failures;
    std::printf("%s\n  %s\n  again: fuzz_difference --rounds 1 --seed %llu\n", d.wrong.c_str(), d.drawn.c_str(),
                static_cast<unsigned long long>(seed + i));
    std::fflush(stdout);
  }
  std::printf("%llu rounds from seed %llu, %llu failures\n", static_cast<unsigned long long>(rounds),
              static_cast<unsigned long long>(seed), static_cast<unsigned long long>(failures));
  return failures > 0;
}
