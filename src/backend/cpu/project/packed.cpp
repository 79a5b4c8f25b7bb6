// Weights as they are multiplied: each panel packed once in oneDNN's own layout.
#include <algorithm>
#include <cstring>
#include <string>

#include "backend/cpu/backend.hpp"
#include "backend/cpu/core/target.hpp"
#include "backend/cpu/project/linear.hpp"
#include "mla/error.hpp"

namespace mla::cpu {
namespace {

// Inputs that are staged together, so that scratch stays bounded: only a fully absorbed output projection has more. The
// parts' sums are added in order.
constexpr int64_t kMostInputs = 16384;

struct Panel {
  const PanelKernel* kernel;
  dnnl::memory packed;  // in PackedLinear::memory
};

struct PackedLinear final : CpuLinear {
  int64_t parts = 1;          // of the inputs
  std::vector<Panel> panels;  // [head, panel, part]
  Buffer memory;

  using CpuLinear::use;

  int64_t part_inputs(int64_t part) const { return std::min(kMostInputs, in - part * kMostInputs); }
  size_t staged() const {
    return round_up(static_cast<size_t>(kMaxRows * std::min(in, kMostInputs)) * operand_bytes());
  }
  size_t scratch() const override {
    return staged() + static_cast<size_t>(kMaxRows * kPanel) * sizeof(float) * (parts > 1 ? 2 : 1);
  }

  void multiply(const ops::ProjectArgs& a, int64_t head, int64_t first_panel, int64_t last_panel, const RowBlock& rows,
                const QuantizedWriter& quantized, std::byte* scratch, int slot) const override {
    float* y = reinterpret_cast<float*>(scratch + staged());
    float* more = y + kMaxRows * kPanel;  // of a later part
    const bool dense = a.x_rows.empty() && heads == 1 && parts == 1 && a.x.stride<Token>() == in &&
                       a.x.dtype() == (native_bf16 ? Dtype::bf16 : Dtype::f32) && (native_bf16 || dtype == Dtype::f32);
    const void* x = scratch;
    if (dense && rows.rows == rows.padded()) x = a.x.at(rows.first, head, 0);
    else if (parts == 1) stage(a, head, rows, 0, in, in, scratch);
    for (int64_t p = first_panel; p < last_panel; ++p) {
      const int64_t first = p * kPanel, width = std::min(kPanel, out - first);
      for (int64_t part = 0; part < parts; ++part) {
        if (parts > 1) stage(a, head, rows, part * kMostInputs, part_inputs(part), part_inputs(part), scratch);
        const Panel& panel = panels[(head * panels_per_head + p) * parts + part];
        panel.kernel->run(rows.block, x, panel.packed, part == 0 ? y : more, slot);
        if (part > 0)
          for (int64_t i = 0; i < rows.rows * width; ++i) y[i] += more[i];
      }
      store(a, head, rows, first, width, width, quantized, y);
    }
  }
};

}  // namespace

std::shared_ptr<const Linear> pack(std::span<const float> weights, int64_t heads, int64_t out, int64_t in, Dtype dtype,
                                   Device) {
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
  w->parts = (in + kMostInputs - 1) / kMostInputs;
  std::vector<const PanelKernel*> kernels;
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t first = 0; first < out; first += kPanel)
      for (int64_t part = 0; part < w->parts; ++part) {
        const PanelKernel& kernel = PanelKernel::get(w->part_inputs(part), std::min(kPanel, out - first),
                                                     w->native_bf16 ? Dtype::bf16 : Dtype::f32);
        w->panels.push_back({&kernel, {}});
        kernels.push_back(&kernel);
        w->bytes += round_up(kernel.packed_bytes());
      }
  w->use(kernels);
  w->memory = Buffer(w->bytes);
  std::byte* to = w->memory.data();
  std::vector<float> copy;
  for (size_t i = 0; i < w->panels.size(); ++i) {
    Panel& p = w->panels[i];
    const int64_t part = static_cast<int64_t>(i) % w->parts, panel = static_cast<int64_t>(i) / w->parts;
    const int64_t first = panel % w->panels_per_head * kPanel, width = std::min(kPanel, out - first);
    const float* source = weights.data() + (panel / w->panels_per_head * out + first) * in;
    const bool rounded = dtype == Dtype::bf16 && !w->native_bf16;
    if (rounded || w->parts > 1) {
      const int64_t inputs = w->part_inputs(part);
      copy.resize(static_cast<size_t>(width * inputs));
      for (int64_t o = 0; o < width; ++o)
        std::copy_n(source + o * in + part * kMostInputs, inputs, copy.begin() + o * inputs);
      if (rounded)
        for (float& x : copy) x = to_float(to_bf16(x));
      source = copy.data();
    }
    p.packed = p.kernel->pack(source, to);
    to += round_up(p.kernel->packed_bytes());
  }
  return w;
}

size_t packed_scratch(const backend::ScratchShape& s) {
  const int64_t in = std::max({s.hidden, s.query_latent, s.latent, s.nope, s.heads * s.value, s.heads * s.latent});
  return round_up(static_cast<size_t>(kMaxRows * std::min(in, kMostInputs)) * sizeof(float)) +
         static_cast<size_t>(kMaxRows * kPanel) * sizeof(float) * (in > kMostInputs ? 2 : 1);
}

}  // namespace mla::cpu
