// What this machine can do, measured: the denominators of every "percent of roof".
#pragma once

#include <string>

#include "mla/device.hpp"

namespace mla::bench {

struct Roof {
  double read_gbps = 0;    ///< memory read by all threads together, 1e9 bytes a second
  double fma_gflops = 0;   ///< f32 multiply-adds from registers at the widest vectors in use, 1e9 flops a second
  double dot_gflops = 0;   ///< bf16 dot products into f32, likewise; 0 when the CPU has none or they are restricted
  double amx_gflops = 0;   ///< AMX's bf16 products, operands from the nearest cache; 0 likewise
  double int8_gops = 0;    ///< AMX's int8 products, likewise; 1e9 multiplications and additions a second
  double bf16_gflops = 0;  ///< the fastest bf16 products into f32: dot products or AMX's; on a GPU a large product
};

/// A CPU's roof in words: "read 50.1 GB/s, f32 multiply-add 510 GFLOP/s, ..", what it lacks left out.
std::string text_of(const Roof& roof);

/// Best of several short rounds on the pool's threads, in less than half a second. Follows cpu::restrict_target().
Roof measure_roof(ThreadPool& pool);

/// The same measurements one by one: short probes to interleave with what is timed, for clocks and neighbours change
/// from moment to moment. Its buffer, larger than the last-level cache, also serves to empty the caches.
class Probe {
 public:
  explicit Probe(ThreadPool& pool);
  double read_gbps(double seconds) const;  ///< at least one pass over the buffer
  double fma_gflops(double seconds) const;
  double dot_gflops(double seconds) const;
  double amx_gflops(double seconds) const;
  double int8_gops(double seconds) const;
  /// Of what serves bf16, the fastest; `seconds` for each.
  double bf16_gflops(double seconds) const;
  /// Reads the whole buffer on every thread's core, so that what an op needs next comes from memory.
  void evict_caches() const;

 private:
  ThreadPool& pool_;
  Buffer buffer_;
};

}  // namespace mla::bench
