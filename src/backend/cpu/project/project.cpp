// Products with weights. Weights are cut into column panels, rows into blocks. A row's sums do not depend on either
// cut, so results do not depend on the number of threads, nor on the other rows. See README.md for figures.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <string>

#include "backend/cpu/backend.hpp"
#include "backend/cpu/core/convert.hpp"
#include "backend/cpu/project/linear.hpp"
#include "mla/error.hpp"

namespace mla::cpu {
namespace {

// Columns of a task when there are several row blocks: their weights then serve the next one.
constexpr int64_t kMostColumns = 4 * kPanel;

// How a product is cut: rows and columns of a task. Which task computes a column changes no bit.
struct Cut {
  int64_t rows, columns;
};

// `unit`: columns that a task's are a multiple of.
Cut cut_of(const CpuLinear& w, int64_t rows, int64_t unit, int threads) {
  const int64_t most = w.most_rows(), units = (w.out + unit - 1) / unit;
  if (most <= kMaxRows) {
    // Columns of a task share its staged rows; a few tasks a thread are enough. Whole panels where these are.
    const int64_t blocks = (rows + kMaxRows - 1) / kMaxRows, wanted = w.heads * blocks * w.out / (4 * threads);
    const int64_t of = wanted >= kPanel ? kPanel : unit, columns = std::max(wanted / of * of, of);
    return {kMaxRows, std::min(columns, blocks > 2 ? kMostColumns : units * unit)};
  }
  // Where products are fast, staging rows and reading weights count: the cut whose last thread ends first, by what a
  // core of a Xeon with AMX does, in nanoseconds.
  constexpr double kStage = 0.35, kProduct = 1.0 / 1500, kWeights = 1.0 / 16;  // an input, a FLOP, a byte
  Cut best{kMaxRows, units * unit};
  double least = std::numeric_limits<double>::infinity();
  for (int64_t block = kMaxRows; block <= most; block += kMaxRows) {
    const int64_t blocks = (rows + block - 1) / block, whole = std::min(block, rows);
    // The fewest groups of each size that there is, from one of all units to one a unit.
    for (int64_t group = units, groups = 1;; --group, groups = (units + group - 1) / group) {
      group = (units + groups - 1) / groups;
      const double columns = static_cast<double>(std::min(group * unit, w.out)), in = static_cast<double>(w.in),
                   staged = static_cast<double>(whole) * in;
      const double task = staged * kStage + staged * columns * 2 * kProduct + columns * in * 2 * kWeights;
      const double seconds = task * static_cast<double>((w.heads * groups * blocks + threads - 1) / threads);
      if (seconds < least) {
        least = seconds;
        best = {block, group * unit};
      }
      if (group == 1) break;
    }
  }
  return best;
}

// Up to kActivationPart inputs of a row as the values of their fp8_128 codes.
class Fp8Row {
 public:
  Fp8Row()
      : writer_({.spec = kSpec,
                 .tokens = 1,
                 .width = kActivationPart,
                 .data = codes_,
                 .row_stride = kActivationPart,
                 .scales = reinterpret_cast<std::byte*>(scales_)}) {}
  Fp8Row(const Fp8Row&) = delete;
  Fp8Row& operator=(const Fp8Row&) = delete;

  void operator()(const void* x, Dtype dtype, int64_t count, float* values) const {
    const float* from = static_cast<const float*>(x);
    if (dtype == Dtype::bf16) {
      convert(static_cast<const bf16*>(x), values, count);
      from = values;
    }
    writer_.write(0, nullptr, 1, 0, from, 0, count);
    for (int64_t i = 0; i < count; i += kSpec.group) {
      const int64_t here = std::min(kSpec.group, count - i);
      float scale = scales_[i / kSpec.group];
      // An infinity, which the codes saturate, makes its group NaN, as it makes a sum.
      const auto infinite = [](float e) { return std::isinf(e); };
      if (scale >= FLT_MAX / 448 && std::any_of(from + i, from + i + here, infinite))
        scale = std::numeric_limits<float>::quiet_NaN();
      convert(reinterpret_cast<const fp8_e4m3*>(codes_ + i), values + i, here, scale);
    }
  }

 private:
  static constexpr OutputSpec kSpec{.kind = OutputKind::fp8_groups, .group = 128};
  alignas(64) mutable std::byte codes_[kActivationPart];
  mutable float scales_[kActivationPart / 128];
  QuantizedWriter writer_;
};

}  // namespace

void CpuLinear::stage(const ops::ProjectArgs& a, int64_t head, const RowBlock& rows, int64_t begin, int64_t count,
                      int64_t pitch, std::byte* to) const {
  const size_t used = static_cast<size_t>(count) * operand_bytes(),
               row_bytes = static_cast<size_t>(pitch) * operand_bytes();
  const bool fp8 = a.activations == Activations::fp8_128;
  std::optional<Fp8Row> through;
  if (fp8) through.emplace();
  for (int64_t r = 0; r < rows.rows; ++r) {
    const int64_t row = a.x_rows.empty() ? rows.first + r : a.x_rows[rows.first + r];
    const void* x = a.x.at(row, head, begin);
    Dtype from = a.x.dtype();
    alignas(64) float values[kActivationPart];
    if (fp8) {
      (*through)(x, from, count, values);
      x = values;
      from = Dtype::f32;
    }
    std::byte* y = to + static_cast<size_t>(r) * row_bytes;
    if (native_bf16) {
      if (from == Dtype::bf16) std::memcpy(y, x, used);
      else convert(static_cast<const float*>(x), reinterpret_cast<bf16*>(y), count);
    } else if (from == Dtype::bf16) {
      convert(static_cast<const bf16*>(x), reinterpret_cast<float*>(y), count);
    } else if (dtype == Dtype::bf16) {
      for (int64_t i = 0; i < count; ++i)
        reinterpret_cast<float*>(y)[i] = to_float(to_bf16(static_cast<const float*>(x)[i]));
    } else {
      std::memcpy(y, x, used);
    }
    std::memset(y + used, 0, row_bytes - used);
  }
}

void CpuLinear::store(const ops::ProjectArgs& a, int64_t head, const RowBlock& rows, int64_t first, int64_t width,
                      int64_t pitch, const QuantizedWriter& quantized, const float* from) const {
  if (quantized)
    return quantized.write(rows.first, a.y_rows.empty() ? nullptr : a.y_rows.data() + rows.first, rows.rows,
                           head * out + first, from, pitch, width);
  for (int64_t r = 0; r < rows.rows; ++r) {
    const int64_t to = a.y_rows.empty() ? rows.first + r : a.y_rows[rows.first + r];
    if (to < 0) continue;
    void* y = a.y.at(to, head, first);
    if (a.y.dtype() == Dtype::bf16) convert(from + r * pitch, static_cast<bf16*>(y), width);
    else std::memcpy(y, from + r * pitch, static_cast<size_t>(width) * sizeof(float));
  }
}

size_t project_scratch(const backend::ScratchShape& s) { return std::max(packed_scratch(s), quantised_scratch()); }

void project(Stream& stream, const ops::ProjectArgs& a) {
  if (a.rows == 0) return;
  const auto& w = static_cast<const CpuLinear&>(*a.weights);
  if (a.scratch.per_worker < w.scratch())
    throw ShapeError("project: scratch is " + std::to_string(a.scratch.per_worker) + " bytes a worker, " +
                     std::to_string(w.scratch()) + " are needed");
  const QuantizedWriter quantized(a.quantized);
  // A panel is a multiple of every group of a quantised output.
  const Cut cut = cut_of(w, a.rows, quantized ? kPanel : w.unit(), stream.pool().concurrent());
  const int64_t blocks = (a.rows + cut.rows - 1) / cut.rows, groups = (w.out + cut.columns - 1) / cut.columns;
  stream.pool().run(w.heads * groups * blocks, [&](int64_t task, int worker) {
    // Row blocks innermost: neighbours in time share weights.
    const int64_t first = task % blocks * cut.rows;
    const int64_t head = task / blocks / groups, begin = task / blocks % groups * cut.columns;
    w.multiply(a, head, begin, std::min(begin + cut.columns, w.out), {first, std::min(cut.rows, a.rows - first)},
               quantized, a.scratch.worker(worker));
  });
}

}  // namespace mla::cpu
