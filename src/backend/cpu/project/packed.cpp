// Weights as they are multiplied: tiles of 64 columns, laid out once.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "backend/cpu/backend.hpp"
#include "backend/cpu/core/block_attention.hpp"
#include "backend/cpu/core/convert.hpp"
#include "backend/cpu/core/target.hpp"
#include "backend/cpu/core/tile_registers.hpp"
#include "backend/cpu/index_score/kernel.hpp"
#include "backend/cpu/project/linear.hpp"
#include "backend/cpu/project/tile_amx.hpp"
#include "backend/cpu/project/tile_bf16.hpp"
#include "core/counted.hpp"
#include "core/named_buffer.hpp"
#include "mla/error.hpp"

namespace mla::cpu {
namespace {

// Inputs that are staged together, so that scratch stays bounded: only a fully absorbed output projection has more. The
// parts' sums are added in order.
constexpr int64_t kMostInputs = 16384;

// Rows of so many inputs that take at most 1 MiB in bf16.
constexpr int64_t rows_beside(int64_t in) {
  return std::clamp<int64_t>((int64_t{1} << 19) / std::max<int64_t>(in, 1) / 32 * 32, kMaxRows, kMostRows);
}

struct PackedLinear final : CpuLinear {
  bool amx = false;
  Buffer memory;  // [head, tile, the tile's groups of columns, inputs (pairs of them in bf16), column]

  int64_t parts() const { return (in + kMostInputs - 1) / kMostInputs; }
  int64_t part_inputs(int64_t part) const { return std::min(kMostInputs, in - part * kMostInputs); }
  // bf16 inputs come in pairs.
  int64_t padded(int64_t inputs) const { return native_bf16 ? (inputs + 1) / 2 * 2 : inputs; }
  // Columns that lie together: all of a tile's, but a register of AMX reads 16.
  int64_t together() const { return amx ? kAmxColumns : kTileColumns; }
  int64_t tiles() const { return (out + kTileColumns - 1) / kTileColumns; }
  std::byte* tile(int64_t head, int64_t t) const {
    return const_cast<std::byte*>(memory.data()) + static_cast<size_t>(head * tiles() + t) * tile_bytes();
  }
  size_t tile_bytes() const { return static_cast<size_t>(padded(in) * kTileColumns) * operand_bytes(); }
  // AMX multiplies faster than weights come from afar: more rows share them, as many as leave L2 room for both.
  int64_t most_rows() const override { return amx ? rows_beside(in) : kMaxRows; }
  int64_t unit() const override { return kTileColumns; }
  // From one staged row to the next: in AMX an odd number of lines, for a register loads 16 rows at once.
  int64_t pitch(int64_t inputs) const { return amx ? tile_stride(padded(inputs), sizeof(bf16)) : padded(inputs); }
  size_t staged() const {
    return round_up(static_cast<size_t>(most_rows() * pitch(std::min(in, kMostInputs))) * operand_bytes());
  }
  size_t scratch() const override {
    return staged() + static_cast<size_t>(most_rows() * kPanel) * sizeof(float) * (parts() > 1 ? 2 : 1);
  }

  void place(ThreadPool& pool) const override { memory.place(pool, Placement::in_ranges); }

  void multiply(const ops::ProjectArgs& a, int64_t head, int64_t begin, int64_t end, const RowBlock& rows,
                const QuantizedWriter& quantized, std::byte* scratch) const override {
    float* y = reinterpret_cast<float*>(scratch + staged());
    float* more = y + most_rows() * kPanel;  // of a later part
    const bool dense = !amx && a.x_rows.empty() && heads == 1 && parts() == 1 && a.x.stride<Token>() == in &&
                       padded(in) == in && a.x.dtype() == (native_bf16 ? Dtype::bf16 : Dtype::f32) &&
                       (native_bf16 || dtype == Dtype::f32);
    const void* x = scratch;
    if (dense) x = a.x.at(rows.first, head, 0);
    else if (parts() == 1) stage(a, head, rows, 0, in, pitch(in), scratch);
    for (int64_t first = begin; first < end; first += kPanel) {
      const int64_t width = std::min(kPanel, end - first);
      for (int64_t part = 0; part < parts(); ++part) {
        const int64_t inputs = part_inputs(part);
        if (parts() > 1) stage(a, head, rows, part * kMostInputs, inputs, pitch(inputs), scratch);
        for (int64_t c = 0; c < width; c += kTileColumns)
          product(x, pitch(inputs), rows.rows, tile(head, (first + c) / kTileColumns), part * kMostInputs, inputs,
                  (part == 0 ? y : more) + c);
        if (part > 0)
          for (int64_t i = 0; i < rows.rows * kPanel; ++i) y[i] += more[i];
      }
      store(a, head, rows, first, width, kPanel, quantized, y);
    }
  }

  // Sums of inputs [begin, begin + inputs) of a tile. Blocks of inputs are summed apart: their weights stay in L2 for
  // all rows.
  void product(const void* x, int64_t pitch, int64_t rows, const std::byte* weights, int64_t begin, int64_t inputs,
               float* sums) const {
    const int64_t block = inputs <= 1024 ? 512 : 1024;
    for (int64_t i = 0; i < inputs; i += block) {
      const int64_t n = std::min(block, inputs - i), at = (begin + i) * together();
      if (!native_bf16) {
        product_f32(static_cast<const float*>(x) + i, pitch, rows, reinterpret_cast<const float*>(weights) + at,
                    kTileColumns, n, sums, kPanel, i > 0);
        continue;
      }
      const bf16 *from = static_cast<const bf16*>(x) + i, *w = reinterpret_cast<const bf16*>(weights) + at;
      const int64_t pairs = (n + 1) / 2;
      if (amx) amx_product(from, pitch, rows, w, padded(in) * kAmxColumns, pairs, sums, kPanel, i > 0);
      else tile_product(from, pitch, rows, w, pairs, nullptr, sums, kPanel, i > 0);
    }
  }

  // Columns from `first` on of row-major [out, in] weights of a head.
  void lay_out(const float* weights, int64_t first, std::byte* to) const {
    constexpr int64_t kInputs = 64;  // at a time: a transposition of 32-bit words, pairs of bf16 among them
    const int64_t width = std::min(kTileColumns, out - first), words = native_bf16 ? 2 : 1;
    for (int64_t i = 0; i < in; i += kInputs) {
      const int64_t n = std::min(kInputs, in - i);
      alignas(64) float rows[kTileColumns * kInputs] = {};
      for (int64_t c = 0; c < width; ++c) {
        const float* from = weights + (first + c) * in + i;
        float* row = rows + c * kInputs / words;
        if (native_bf16) convert(from, reinterpret_cast<bf16*>(row), n);
        else if (dtype == Dtype::bf16)
          for (int64_t k = 0; k < n; ++k) row[k] = to_float(to_bf16(from[k]));
        else std::copy_n(from, n, row);
      }
      for (int64_t c = 0; c < kTileColumns; c += together())
        transpose(reinterpret_cast<const uint32_t*>(rows) + c * kInputs / words, kInputs / words, together(),
                  (n + words - 1) / words,
                  reinterpret_cast<uint32_t*>(to) + c * padded(in) / words + i / words * together(), together());
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
  w->native_bf16 = dtype == Dtype::bf16 && native_bf16_dot();
  w->amx = w->native_bf16 && native_amx();
  w->bytes = static_cast<size_t>(heads * w->tiles()) * w->tile_bytes();
  w->memory = named_buffer(
      "weights of " + counted(heads, "map") + " from " + std::to_string(in) + " to " + std::to_string(out), w->bytes);
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t t = 0; t < w->tiles(); ++t) w->lay_out(weights.data() + h * out * in, t * kTileColumns, w->tile(h, t));
  return w;
}

size_t packed_scratch(const backend::ScratchShape& s) {
  const int64_t in = std::max({s.hidden, s.query_latent, s.latent, s.nope, s.heads * s.value, s.heads * s.latent});
  const auto bytes = [&](int64_t rows, size_t staged) {
    return round_up(staged) + static_cast<size_t>(rows * kPanel) * sizeof(float) * (in > kMostInputs ? 2 : 1);
  };
  const size_t usual = bytes(kMaxRows, static_cast<size_t>(kMaxRows * std::min(in, kMostInputs)) * sizeof(float));
  if (!has_amx_bf16()) return usual;
  // Fewer inputs have more rows; a row's pitch adds less than two lines.
  constexpr size_t kMost = size_t{1} << 20;
  return std::max(usual, bytes(kMostRows, kMost + static_cast<size_t>(kMostRows) * 128));
}

}  // namespace mla::cpu
