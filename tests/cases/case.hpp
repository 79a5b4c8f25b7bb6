// One case of one op: inputs from a seed, a run on a stream, and a verdict against float64. The same object answers
// "right?" (tests, `mla check`) and "fast?" (`mla bench`).
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mla/cache.hpp"
#include "mla/device.hpp"
#include "mla/dtype.hpp"
#include "mla/error.hpp"
#include "mla/index_cache.hpp"
#include "mla/quant.hpp"
#include "mla/weights.hpp"
#include "ops/cost.hpp"
#include "ops/ops.hpp"

namespace mla::cases {

/// Every knob a case may have; an op reads those it knows.
struct Params {
  Device device;  ///< that runs the case; its memory must be the device's to read
  int64_t requests = 1;
  int64_t query_len = 1;  ///< new tokens a request
  int64_t context = 0;    ///< cached tokens a request before them
  bool ragged = false;    ///< lengths vary by request, up to the numbers above
  int64_t heads = 16, latent = 512, rope = 64, nope = 128, value = 128;
  int64_t in = 512, out = 512;  ///< project
  CacheFormat format = CacheFormat::bf16;
  int64_t page_size = 64;
  Dtype dtype = Dtype::f32;        ///< of the op's main operands
  Dtype activations = Dtype::f32;  ///< of rows between ops; bf16: GPUs
  bool neox = false;
  double yarn_factor = 1;  ///< rope: above 1, YaRN with this factor
  bool causal = true;
  bool batch_invariant = false;
  int64_t splits = 1;                                 ///< attend_latent, attend_sparse
  OutputSpec output{.kind = OutputKind::fp8_groups};  ///< quantize; its numbers scale and global_scale are the case's
  WeightFormat weights = WeightFormat::plain;         ///< project
  Activations inputs = Activations::plain;            ///< project, of fp8 weights
  int64_t weight_block = 0;  ///< project, fp8 weights: side of the square under a scale; 0: one scale
  int64_t topk = 2048;       ///< selected positions of a query row
  int64_t sources = 1;       ///< attend_sparse: caches
  bool sinks = false;        ///< attend_sparse
  bool max_logits = true;    ///< attend_sparse: are they wanted?
  bool dense = false;        ///< attend_sparse: rows without gaps, pages at multiples of 16 bytes
  /// attend_expanded: of most items rows see only what is selected, `topk` keys or, ragged, any number of them.
  bool masked = false;
  /// Attention and merge: NaN, infinities and numbers whose products overflow are planted among the inputs. Rows that
  /// do not see one must have the bits of the same call without them.
  bool nonfinite = false;
  // The sparse indexer; its heads are `heads`.
  int64_t index_dim = 128;
  IndexCacheFormat index_format = IndexCacheFormat::fp8;
  IndexArithmetic index_arithmetic = IndexArithmetic::exact;
  uint64_t seed = 1;
};
std::string describe(const Params& p, std::string_view op);

struct Verdict {
  double error = 0, bound = 0;
  bool ok = false;
  std::string detail;  ///< where the largest error lies, or what broke
};

class Case {
 public:
  virtual ~Case() = default;
  /// One whole call of the op. Allocates nothing. Repeatable: benchmarks call it many times.
  virtual void run(Stream& stream) = 0;
  /// Judges what run() left behind against the float64 reference.
  virtual Verdict verify() = 0;
  virtual ops::Cost cost() const = 0;
  /// Moves what run() reads, where a case knows how, near the workers of a pool over several nodes.
  virtual void place(ThreadPool&) {}
  /// The kernel that run() calls, where a case knows; otherwise empty.
  virtual std::string kernel() const { return {}; }
};

struct CaseType {
  std::string_view op;
  std::unique_ptr<Case> (*make)(const Params& p);
  /// Shapes that the conformance tests run: the edges by name, then random ones from the seed.
  std::vector<Params> (*sweep)(uint64_t seed);
};

/// For test programs: a parameter's name in place of its bytes.
inline void PrintTo(const CaseType& c, std::ostream* out) { *out << c.op; }

std::span<const CaseType> all();
/// That there is no such op: the nearest, and all that are known, `more` among them.
InputError unknown_op(std::string_view op, std::initializer_list<std::string_view> more = {});
/// InputError listing the ops when there is no such case.
const CaseType& find(std::string_view op);

// One per file in this folder.
#define MLA_CASE(op) extern const CaseType op;
MLA_OP_FOLDERS(MLA_CASE)
#undef MLA_CASE

}  // namespace mla::cases
