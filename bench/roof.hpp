// What this machine can do, measured: the denominators of every "percent of roof".
#pragma once

#include "mla/device.hpp"

namespace mla::bench {

struct Roof {
  double read_gbps = 0;    ///< memory read by all threads together, 1e9 bytes a second
  double fma_gflops = 0;   ///< f32 multiply-adds from registers at the widest vectors in use, 1e9 flops a second
  double bf16_gflops = 0;  ///< bf16 dot products into f32, likewise; 0 when the CPU has none or they are restricted
};

/// Best of several short rounds on the pool's threads, in less than half a second. Follows cpu::restrict_target().
Roof measure_roof(ThreadPool& pool);

/// The same measurements one by one: short probes to interleave with what is timed, for clocks and neighbours change
/// from moment to moment. Its buffer, larger than the last-level cache, also serves to empty the caches.
class Probe {
 public:
  explicit Probe(ThreadPool& pool);
  double read_gbps(double seconds) const;  ///< at least one pass over the buffer
  double fma_gflops(double seconds) const;
  double bf16_gflops(double seconds) const;
  /// Reads the whole buffer on every thread's core, so that what an op needs next comes from memory.
  void evict_caches() const;

 private:
  ThreadPool& pool_;
  Buffer buffer_;
};

}  // namespace mla::bench
