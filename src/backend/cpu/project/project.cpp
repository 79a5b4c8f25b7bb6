// Products with weights, by oneDNN. Weights are cut into column panels and packed once; a product is cut into row
// blocks of a few fixed sizes. Both cuts are independent of the number of threads, so results are too. See README.md
// for figures.
#include <algorithm>
#include <cstring>
#include <string>

#include "backend/cpu/backend.hpp"
#include "backend/cpu/core/convert.hpp"
#include "backend/cpu/core/target.hpp"
#include "backend/cpu/project/kernel.hpp"
#include "backend/cpu/quantize/kernel.hpp"
#include "mla/error.hpp"

namespace mla::cpu {
namespace {

constexpr int64_t kPanel = 256;  // output columns that share a pack; a multiple of every group of a quantised output
constexpr int64_t kPanelsPerTask =
    4;  // at most, of one row block when there are several: their weights then serve the next one
constexpr int64_t kMaxRows = kRowBlocks.back();
// Candidates for the one block of an invariant product whose kernels are not uniform: 8 rows and up, then down. One row
// always serves.
constexpr size_t kInvariantBlocks[] = {3, 4, 5, 6, 7, 8, 9, 2, 1, 0};

struct Panel {
  const PanelKernel* kernel;
  int64_t first, width;  // output columns
  dnnl::memory packed;   // in PackedLinear::memory
};

struct PackedLinear final : Linear {
  bool native_bf16 = false;    // operands reach oneDNN as bf16; otherwise as f32 values that are representable in dtype
  bool uniform = true;         // all kernels are
  size_t invariant_block = 0;  // uniform in all kernels
  std::vector<Panel> panels;   // of one head, then the next
  int64_t panels_per_head = 0;
  Buffer memory;
};

size_t round_up(size_t n) { return (n + 63) / 64 * 64; }

// x rows of one block, dense, in the operand dtype; missing rows are zero.
void stage(const ops::ProjectArgs& a, const PackedLinear& w, int64_t head, int64_t first, int64_t rows, int64_t block,
           std::byte* to) {
  const int64_t in = w.in;
  const size_t row_bytes = static_cast<size_t>(in) * (w.native_bf16 ? 2 : 4);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = a.x_rows.empty() ? first + r : a.x_rows[first + r];
    const void* x = a.x.at(row, head, 0);
    std::byte* y = to + static_cast<size_t>(r) * row_bytes;
    if (w.native_bf16) {
      if (a.x.dtype() == Dtype::bf16) std::memcpy(y, x, row_bytes);
      else convert(static_cast<const float*>(x), reinterpret_cast<bf16*>(y), in);
    } else if (a.x.dtype() == Dtype::bf16) {
      convert(static_cast<const bf16*>(x), reinterpret_cast<float*>(y), in);
    } else if (w.dtype == Dtype::bf16) {
      for (int64_t i = 0; i < in; ++i)
        reinterpret_cast<float*>(y)[i] = to_float(to_bf16(static_cast<const float*>(x)[i]));
    } else {
      std::memcpy(y, x, row_bytes);
    }
  }
  std::memset(to + static_cast<size_t>(rows) * row_bytes, 0, static_cast<size_t>(block - rows) * row_bytes);
}

void store(const ops::ProjectArgs& a, const Panel& panel, int64_t head, int64_t first, int64_t rows,
           const float* from) {
  for (int64_t r = 0; r < rows; ++r) {
    void* y = a.y.at(a.y_rows.empty() ? first + r : a.y_rows[first + r], head, panel.first);
    if (a.y.dtype() == Dtype::bf16) convert(from + r * panel.width, static_cast<bf16*>(y), panel.width);
    else std::memcpy(y, from + r * panel.width, static_cast<size_t>(panel.width) * sizeof(float));
  }
}

}  // namespace

std::shared_ptr<const Linear> pack(std::span<const float> weights, int64_t heads, int64_t out, int64_t in,
                                   Dtype dtype) {
  if (dtype != Dtype::f32 && dtype != Dtype::bf16)
    throw UnsupportedError("pack: dtype is " + std::string(to_string(dtype)) + "; f32 and bf16 are supported");
  if (heads < 1 || out < 1 || in < 1 || static_cast<int64_t>(weights.size()) != heads * out * in)
    throw ShapeError("pack: " + std::to_string(weights.size()) + " weights, expected " + std::to_string(heads) + " x " +
                     std::to_string(out) + " x " + std::to_string(in));
  auto w = std::make_shared<PackedLinear>();
  w->heads = heads;
  w->in = in;
  w->out = out;
  w->dtype = dtype;
  w->native_bf16 = dtype == Dtype::bf16 && native_bf16_dot() && bf16_products();
  w->panels_per_head = (out + kPanel - 1) / kPanel;
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t first = 0; first < out; first += kPanel) {
      const int64_t width = std::min(kPanel, out - first);
      const PanelKernel& kernel = PanelKernel::get(in, width, w->native_bf16 ? Dtype::bf16 : Dtype::f32);
      w->panels.push_back({&kernel, first, width, {}});
      w->uniform = w->uniform && kernel.uniform();
      w->bytes += round_up(kernel.packed_bytes());
    }
  w->invariant_block = *std::find_if(std::begin(kInvariantBlocks), std::end(kInvariantBlocks), [&](size_t block) {
    return std::all_of(w->panels.begin(), w->panels.end(), [&](const Panel& p) { return p.kernel->uniform(block); });
  });
  w->memory = Buffer(w->bytes);
  std::byte* to = w->memory.data();
  std::vector<float> rounded;
  for (size_t i = 0; i < w->panels.size(); ++i) {
    Panel& p = w->panels[i];
    const float* source = weights.data() + (static_cast<int64_t>(i) / w->panels_per_head * out + p.first) * in;
    if (dtype == Dtype::bf16 && !w->native_bf16) {
      rounded.assign(source, source + p.width * in);
      for (float& x : rounded) x = to_float(to_bf16(x));
      source = rounded.data();
    }
    p.packed = p.kernel->pack(source, to);
    to += round_up(p.kernel->packed_bytes());
  }
  return w;
}

size_t project_scratch(const backend::ScratchShape& s) {
  const int64_t in = std::max({s.hidden, s.query_latent, s.latent, s.nope, s.heads * s.value});
  return round_up(static_cast<size_t>(kMaxRows * in) * sizeof(float)) +
         static_cast<size_t>(kMaxRows * kPanel) * sizeof(float);
}

void project(Stream& stream, const ops::ProjectArgs& a) {
  if (a.rows == 0) return;
  const auto& w = static_cast<const PackedLinear&>(*a.weights);
  const size_t staged = round_up(static_cast<size_t>(kMaxRows * w.in) * (w.native_bf16 ? 2 : 4));
  if (a.scratch.per_worker < staged + kMaxRows * kPanel * sizeof(float))
    throw ShapeError("project: scratch is " + std::to_string(a.scratch.per_worker) + " bytes a worker, " +
                     std::to_string(staged + kMaxRows * kPanel * sizeof(float)) + " are needed");
  // Full blocks of the largest size, and the remainder in the smallest that holds it; one size for all when bits may
  // not depend on the number of rows and the kernels' own order does.
  const bool one_size = a.batch_invariant && !w.uniform;
  const int64_t largest = one_size ? kRowBlocks[w.invariant_block] : kMaxRows;
  const int64_t blocks = (a.rows + largest - 1) / largest;
  // Panels of a task share its staged rows; a few tasks a thread are enough. Which task computes a panel changes no
  // bit.
  const int64_t group = std::clamp<int64_t>(w.heads * w.panels_per_head * blocks / (4 * stream.pool().threads()), 1,
                                            blocks > 2 ? kPanelsPerTask : w.panels_per_head);
  const int64_t groups = (w.panels_per_head + group - 1) / group;
  const bool dense = a.x_rows.empty() && w.heads == 1 && a.x.stride<Token>() == w.in &&
                     a.x.dtype() == (w.native_bf16 ? Dtype::bf16 : Dtype::f32) &&
                     (w.native_bf16 || w.dtype == Dtype::f32);
  const QuantizedWriter quantized(a.quantized);
  stream.pool().run(w.heads * groups * blocks, [&](int64_t task, int worker) {
    // Row blocks innermost: neighbours in time share weights.
    const int64_t first = task % blocks * largest, rows = std::min(largest, a.rows - first);
    const int64_t head = task / blocks / groups, first_panel = task / blocks % groups * group;
    size_t block = one_size ? w.invariant_block : 0;
    while (kRowBlocks[block] < rows) ++block;
    std::byte* staging = a.scratch.worker(worker);
    float* y = reinterpret_cast<float*>(staging + staged);
    const void* x = staging;
    if (dense && rows == kRowBlocks[block]) x = a.x.at(first, head, 0);
    else stage(a, w, head, first, rows, kRowBlocks[block], staging);
    for (int64_t p = first_panel; p < std::min(first_panel + group, w.panels_per_head); ++p) {
      const Panel& panel = w.panels[head * w.panels_per_head + p];
      panel.kernel->run(block, x, panel.packed, y, worker);
      if (quantized)
        quantized.write(first, a.y_rows.empty() ? nullptr : a.y_rows.data() + first, rows, head * w.out + panel.first,
                        y, panel.width, panel.width);
      else store(a, panel, head, first, rows, y);
    }
  });
}

}  // namespace mla::cpu
