#include "bench/roof.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>

#include "backend/cpu/core/dot_rate.hpp"
#include "backend/cpu/core/target.hpp"
#include "backend/cpu/core/tile_registers.hpp"
#include "bench/kernels.hpp"
#include "core/named_buffer.hpp"

namespace mla::bench {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

size_t past_last_level_cache() {
  long l3 = 0;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  l3 = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
  return std::clamp(4 * static_cast<size_t>(std::max(l3, 0L)), 128 * kMiB, 256 * kMiB);
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Work a second of all threads together. Every worker waits for the others, so each takes exactly one task and all run
// at once; each then works for the given time by its own clock, and the rates add up.
template <class F>
double together(ThreadPool& pool, double seconds, F&& work) {
  std::atomic<int> arrived{0};
  std::atomic<double> rate{0};
  const int threads = pool.concurrent();
  pool.run(threads, [&](int64_t task, int) {
    arrived.fetch_add(1);
    while (arrived.load() < threads) std::this_thread::yield();
    const auto start = std::chrono::steady_clock::now();
    double done = 0, elapsed = 0;
    do {
      done += work(task);
      elapsed = seconds_since(start);
    } while (elapsed < seconds);
    rate.fetch_add(done / elapsed);
  });
  return rate.load();
}

}  // namespace

Probe::Probe(ThreadPool& pool)
    : pool_(pool), buffer_(named_buffer("probe of memory bandwidth", past_last_level_cache())) {
  // Written once: untouched pages would all be the kernel's one page of zeros, read from cache.
  const size_t step = 4096;
  for (size_t i = 0; i < buffer_.size(); i += step) buffer_.data()[i] = std::byte{1};
  buffer_.place(pool, Placement::in_ranges);
}

double Probe::read_gbps(double seconds) const {
  const size_t slice = buffer_.size() / sizeof(float) / static_cast<size_t>(pool_.concurrent());
  return 1e-9 * together(pool_, seconds, [&](int64_t task) {
           volatile float sink = read_all(buffer_.as<float>() + static_cast<size_t>(task) * slice, slice);
           (void)sink;
           return static_cast<double>(slice * sizeof(float));
         });
}

double Probe::fma_gflops(double seconds) const {
  return 1e-9 * together(pool_, seconds, [](int64_t) { return fma_chains(20000); });
}

double Probe::dot_gflops(double seconds) const {
  if (!cpu::native_bf16_dot()) return 0;
  return 1e-9 * together(pool_, seconds, [](int64_t) { return cpu::bf16_dot_chains(20000); });
}

double Probe::amx_gflops(double seconds) const {
  if (!cpu::native_amx()) return 0;
  return 1e-9 * together(pool_, seconds, [](int64_t) { return cpu::amx_chains(5000); });
}

double Probe::int8_gops(double seconds) const {
  if (!cpu::native_amx() || !cpu::has_amx_int8()) return 0;
  return 1e-9 * together(pool_, seconds, [](int64_t) { return cpu::amx_int8_chains(5000); });
}

double Probe::bf16_gflops(double seconds) const { return std::max(dot_gflops(seconds), amx_gflops(seconds)); }

void Probe::evict_caches() const { read_gbps(0); }

std::string text_of(const Roof& roof) {
  char text[200];
  int used = std::snprintf(text, sizeof text, "read %.1f GB/s, f32 multiply-add %.0f GFLOP/s", roof.read_gbps,
                           roof.fma_gflops);
  const auto add = [&](const char* what, double rate, const char* unit) {
    if (rate <= 0) return;
    used += std::snprintf(text + used, sizeof text - static_cast<size_t>(used), ", %s %.0f %s", what, rate, unit);
  };
  add("bf16 dot", roof.dot_gflops, "GFLOP/s");
  add("AMX bf16", roof.amx_gflops, "GFLOP/s");
  add("AMX int8", roof.int8_gops, "GOP/s");
  return text;
}

Roof measure_roof(ThreadPool& pool) {
  constexpr int kRounds = 5;
  const Probe probe(pool);
  Roof roof;
  for (int i = 0; i < kRounds; ++i) {
    roof.read_gbps = std::max(roof.read_gbps, probe.read_gbps(0.02));
    roof.fma_gflops = std::max(roof.fma_gflops, probe.fma_gflops(0.01));
    roof.dot_gflops = std::max(roof.dot_gflops, probe.dot_gflops(0.01));
    roof.amx_gflops = std::max(roof.amx_gflops, probe.amx_gflops(0.01));
    roof.int8_gops = std::max(roof.int8_gops, probe.int8_gops(0.01));
  }
  roof.bf16_gflops = std::max(roof.dot_gflops, roof.amx_gflops);
  return roof;
}

}  // namespace mla::bench
