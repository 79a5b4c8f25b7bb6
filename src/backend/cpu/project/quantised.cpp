// Weights that stay quantised in memory and are dequantised into scratch a part at a time, just before its product: in
// f32, or in bf16 by the dot products of tile_bf16.
#include <algorithm>
#include <bit>
#include <string>

#include "backend/cpu/backend.hpp"
#include "backend/cpu/core/convert.hpp"
#include "backend/cpu/core/target.hpp"
#include "backend/cpu/project/linear.hpp"
#include "backend/cpu/project/tile_bf16.hpp"
#include "mla/error.hpp"

namespace mla::cpu {
namespace {

// Inputs that are dequantised together: a panel of 256 columns then takes 512 KB in f32 and stays in a core's L2. A
// multiple of mxfp4's group. The parts' sums are added in order.
constexpr int64_t kPart = kActivationPart;
static_assert(kPart % kMxGroup == 0);

class QuantisedLinear final : public CpuLinear {
 public:
  QuantisedLinear(const QuantisedWeights& w, Dtype operands) {
    heads = w.heads;
    in = w.in;
    out = w.out;
    dtype = operands;
    format = w.format;
    if (format == WeightFormat::fp8) {
      block_rows = w.block_rows;
      block_cols = w.block_cols;
      scales_ = w.scales;
    }
    row_blocks_ = w.row_blocks();
    col_blocks_ = w.col_blocks();
    codes_ = Buffer(static_cast<size_t>(heads * code_bytes(out) * in));
    exponents_ = Buffer(format == WeightFormat::mxfp4 ? static_cast<size_t>(heads * out * groups()) : 0);
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t p = 0; p * kPanel < out; ++p) lay_out(w, h, p);
    bytes = codes_.size() + exponents_.size() + scales_.size() * sizeof(float);
  }

  size_t scratch() const override { return staged() + panel_bytes() + kProduct; }

  static size_t most_scratch() {
    return round_up(static_cast<size_t>(kMaxRows * kPart) * sizeof(float)) +
           round_up(static_cast<size_t>(kPart * kPanel) * sizeof(float)) + kProduct;
  }

  void place(ThreadPool& pool) const override {
    codes_.place(pool, Placement::in_ranges);
    exponents_.place(pool, Placement::in_ranges);
  }

  void multiply(const ops::ProjectArgs& a, int64_t head, int64_t begin, int64_t end, const RowBlock& rows,
                const QuantizedWriter& quantized, std::byte* scratch) const override {
    float* weights = reinterpret_cast<float*>(scratch + staged());
    float* y = reinterpret_cast<float*>(scratch + staged() + panel_bytes());
    for (int64_t first = begin; first < end; first += kPanel) {
      const int64_t width = std::min(kPanel, end - first);
      for (int64_t i = 0; i < in; i += kPart) {
        const int64_t count = std::min(kPart, in - i);
        // One part serves every panel.
        if (in > kPart || first == begin) stage(a, head, rows, i, count, count, scratch);
        dequantise_part(head, first / kPanel, i, count, weights);
        for (int64_t c = 0; c < width; c += kTileColumns)
          product_f32(reinterpret_cast<const float*>(scratch), count, rows.rows, weights + c, kPanel, count, y + c,
                      kPanel, i > 0);
      }
      store(a, head, rows, first, width, kPanel, quantized, y);
    }
  }

 private:
  static constexpr size_t kProduct = static_cast<size_t>(kMaxRows * kPanel) * sizeof(float);

  int64_t groups() const { return (in + kMxGroup - 1) / kMxGroup; }
  size_t staged() const { return round_up(static_cast<size_t>(kMaxRows * std::min(in, kPart)) * operand_bytes()); }
  size_t panel_bytes() const { return static_cast<size_t>(std::min(in, kPart) * kPanel) * sizeof(float); }

  // A panel's codes are [in][width]. Two mxfp4 codes share a byte: column c of the first half in the low nibble, its
  // counterpart of the second half in the high one, so that both unpack to runs of neighbours.
  int64_t code_bytes(int64_t columns) const {
    if (format == WeightFormat::fp8) return columns;
    const int64_t last = columns % kPanel;
    return columns / kPanel * (kPanel / 2) + (last + 1) / 2;
  }
  const std::byte* codes(int64_t head, int64_t panel) const {
    return codes_.data() + (head * code_bytes(out) + code_bytes(panel * kPanel)) * in;
  }
  const uint8_t* exponents(int64_t head, int64_t panel) const {
    return exponents_.as<uint8_t>() + (head * out + panel * kPanel) * groups();
  }

  void lay_out(const QuantisedWeights& w, int64_t head, int64_t panel) {
    const int64_t first = panel * kPanel, width = std::min(kPanel, out - first), row = code_bytes(width);
    uint8_t* to = reinterpret_cast<uint8_t*>(const_cast<std::byte*>(codes(head, panel)));
    auto code = [&](int64_t c, int64_t i) { return w.codes[(head * out + first + c) * in + i]; };
    constexpr int64_t kTile = 64;  // inputs at a time: a transposition
    for (int64_t begin = 0; begin < in; begin += kTile)
      for (int64_t c = 0; c < row; ++c) {
        const bool second = format == WeightFormat::mxfp4 && row + c < width;
        for (int64_t i = begin; i < std::min(in, begin + kTile); ++i)
          to[i * row + c] = static_cast<uint8_t>(code(c, i) | (second ? code(row + c, i) << 4 : 0));
      }
    if (format != WeightFormat::mxfp4) return;
    uint8_t* exponent = const_cast<uint8_t*>(exponents(head, panel));
    for (int64_t g = 0; g < groups(); ++g)
      for (int64_t c = 0; c < width; ++c)  // a power of two: its exponent bits are its e8m0 code
        exponent[g * width + c] =
            static_cast<uint8_t>(std::bit_cast<uint32_t>(w.scale(head, first + c, g * kMxGroup)) >> 23);
  }

  // Inputs [begin, begin + count) of a panel as [count, kPanel]: columns that there are not keep what they hold.
  void dequantise_part(int64_t head, int64_t panel, int64_t begin, int64_t count, float* to) const {
    const int64_t first = panel * kPanel, width = std::min(kPanel, out - first), row = code_bytes(width);
    const std::byte* from = codes(head, panel) + begin * row;
    if (format == WeightFormat::fp8) return fp8_part(from, head, first, width, begin, count, to);
    alignas(64) float scale[kPanel];
    for (int64_t i = 0; i < count; ++i, from += row, to += kPanel) {
      if ((begin + i) % kMxGroup == 0) {
        const uint8_t* exponent = exponents(head, panel) + (begin + i) / kMxGroup * width;
        for (int64_t c = 0; c < width; ++c) scale[c] = e8m0_value(exponent[c]);
      }
      convert_e2m1(reinterpret_cast<const uint8_t*>(from), scale, to, width);
      narrow(to, width);
    }
  }

  // Block by block, so that a conversion's scale changes as seldom as it can.
  void fp8_part(const std::byte* from, int64_t head, int64_t first, int64_t width, int64_t begin, int64_t count,
                float* to) const {
    if (block_rows == 0) {
      for (int64_t i = 0; i < count; ++i) fp8_codes(from + i * width, width, scales_[0], to + i * kPanel);
      return;
    }
    const float* scales = scales_.data() + head * row_blocks_ * col_blocks_;
    for (int64_t i = begin; i < begin + count;) {
      const int64_t next = std::min(begin + count, (i / block_cols + 1) * block_cols);
      for (int64_t c = first; c < first + width;) {
        const int64_t end = std::min(first + width, (c / block_rows + 1) * block_rows);
        for (int64_t r = i; r < next; ++r) {
          fp8_codes(from + (r - begin) * width + c - first, end - c,
                    scales[c / block_rows * col_blocks_ + i / block_cols], to + (r - begin) * kPanel + c - first);
        }
        c = end;
      }
      i = next;
    }
  }
  void fp8_codes(const std::byte* from, int64_t n, float scale, float* to) const {
    convert(reinterpret_cast<const fp8_e4m3*>(from), to, n, scale);
    narrow(to, n);
  }

  // Rounds values to what is exact in the operands' dtype.
  void narrow(float* x, int64_t n) const {
    if (dtype == Dtype::bf16)
      for (int64_t i = 0; i < n; ++i) x[i] = to_float(to_bf16(x[i]));
  }

  int64_t row_blocks_ = 1, col_blocks_ = 1;
  std::vector<float> scales_;  // fp8
  Buffer codes_, exponents_;
};

// With bf16 dot products: codes are turned into dot products' operands 64 columns at a time and used at once, from L1.
class NativeQuantisedLinear final : public CpuLinear {
 public:
  explicit NativeQuantisedLinear(const QuantisedWeights& w) {
    heads = w.heads;
    in = w.in;
    out = w.out;
    dtype = Dtype::bf16;
    format = w.format;
    native_bf16 = true;
    if (format == WeightFormat::fp8) {
      block_rows = w.block_rows;
      block_cols = w.block_cols;
      scales_ = w.scales;
    }
    row_blocks_ = w.row_blocks();
    col_blocks_ = w.col_blocks();
    codes_ = Buffer(static_cast<size_t>(heads * tiles() * tile_bytes()));
    exponents_ =
        Buffer(format == WeightFormat::mxfp4 ? static_cast<size_t>(heads * tiles() * groups() * kTileColumns) : 0);
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t t = 0; t < tiles(); ++t) lay_out(w, h, t);
    bytes = codes_.size() + exponents_.size() + scales_.size() * sizeof(float);
  }

  int64_t unit() const override { return kTileColumns; }
  size_t scratch() const override { return kStaged + kTile + kSums; }

  void place(ThreadPool& pool) const override {
    codes_.place(pool, Placement::in_ranges);
    exponents_.place(pool, Placement::in_ranges);
  }

  void multiply(const ops::ProjectArgs& a, int64_t head, int64_t begin, int64_t end, const RowBlock& rows,
                const QuantizedWriter& quantized, std::byte* scratch) const override {
    const bf16* x = reinterpret_cast<const bf16*>(scratch);
    bf16* tile = reinterpret_cast<bf16*>(scratch + kStaged);
    float* sums = reinterpret_cast<float*>(scratch + kStaged + kTile);
    for (int64_t first = begin; first < end; first += kPanel) {
      const int64_t width = std::min(kPanel, end - first);
      for (int64_t part = 0; part < in; part += kPart) {
        const int64_t last = std::min(in, part + kPart), pitch = (last - part + 1) / 2 * 2;
        // One part serves every panel.
        if (in > kPart || first == begin) stage(a, head, rows, part, last - part, pitch, scratch);
        for (int64_t c = 0; c < width; c += kTileColumns)
          for (int64_t i = part; i < last;) {
            const int64_t next = std::min(last, next_input(i));
            const int64_t pairs = (next - i + 1) / 2;
            alignas(64) float scale[kTileColumns];
            dequantise_tile(head, first + c, i, pairs, tile, scale);
            tile_product(x + i - part, pitch, rows.rows, tile, pairs, format == WeightFormat::mxfp4 ? scale : nullptr,
                         sums + c, kPanel, i > 0);
            i = next;
          }
      }
      store(a, head, rows, first, width, kPanel, quantized, sums);
    }
  }

 private:
  static constexpr int64_t kInputs = 128;  // of a tile: 16 KB
  static constexpr size_t kStaged = static_cast<size_t>(kMaxRows * kPart) * sizeof(bf16),
                          kTile = static_cast<size_t>(kInputs * kTileColumns) * sizeof(bf16),
                          kSums = static_cast<size_t>(kMaxRows * kPanel) * sizeof(float);

  int64_t tiles() const { return (out + kTileColumns - 1) / kTileColumns; }
  int64_t pairs() const { return (in + 1) / 2; }
  int64_t groups() const { return (in + kMxGroup - 1) / kMxGroup; }
  int64_t pair_bytes() const { return format == WeightFormat::fp8 ? 2 * kTileColumns : kTileColumns; }
  int64_t tile_bytes() const { return pairs() * pair_bytes(); }
  // A tile's columns have one fp8 scale.
  bool one_scale() const { return block_rows == 0 || (block_rows % kTileColumns == 0 && block_cols % 2 == 0); }

  // Where the inputs of the tile that begins at i end: with their scales.
  int64_t next_input(int64_t i) const {
    if (format == WeightFormat::mxfp4) return (i / kMxGroup + 1) * kMxGroup;
    const int64_t next = (i / kInputs + 1) * kInputs;
    return block_rows > 0 && one_scale() ? std::min(next, (i / block_cols + 1) * block_cols) : next;
  }

  void lay_out(const QuantisedWeights& w, int64_t head, int64_t tile) {
    const int64_t first = tile * kTileColumns, width = std::min(kTileColumns, out - first);
    uint8_t* to = codes_.as<uint8_t>() + (head * tiles() + tile) * tile_bytes();
    for (int64_t c = 0; c < width; ++c) {
      const uint8_t* from = w.codes.data() + (head * out + first + c) * in;
      for (int64_t i = 0; i < in; ++i) {
        if (format == WeightFormat::fp8) to[(i / 2 * kTileColumns + c) * 2 + i % 2] = from[i];
        else to[i / 2 * kTileColumns + c] |= static_cast<uint8_t>(from[i] << (i % 2 * 4));
      }
      if (format != WeightFormat::mxfp4) continue;
      uint8_t* exponent = exponents_.as<uint8_t>() + (head * tiles() + tile) * groups() * kTileColumns;
      for (int64_t g = 0; g < groups(); ++g)  // a power of two: its exponent bits are its e8m0 code
        exponent[g * kTileColumns + c] =
            static_cast<uint8_t>(std::bit_cast<uint32_t>(w.scale(head, first + c, g * kMxGroup)) >> 23);
    }
  }

  // Pairs of inputs from `input` on, of 64 columns from `column` on.
  void dequantise_tile(int64_t head, int64_t column, int64_t input, int64_t count, bf16* tile, float* scale) const {
    const int64_t t = head * tiles() + column / kTileColumns;
    const uint8_t* codes = codes_.as<uint8_t>() + t * tile_bytes() + input / 2 * pair_bytes();
    if (format == WeightFormat::mxfp4) {
      const uint8_t* exponent = exponents_.as<uint8_t>() + (t * groups() + input / kMxGroup) * kTileColumns;
      for (int64_t c = 0; c < kTileColumns; ++c) scale[c] = e8m0_value(exponent[c]);
      return e2m1_tile(codes, count, tile);
    }
    const float* scales = scales_.data() + (block_rows == 0 ? 0 : head * row_blocks_ * col_blocks_);
    auto at = [&](int64_t c, int64_t i) {
      return block_rows == 0 ? scales[0] : scales[c / block_rows * col_blocks_ + i / block_cols];
    };
    if (one_scale()) return fp8_tile(codes, at(column, input), count, tile);
    for (int64_t p = 0; p < count; ++p)
      for (int64_t c = 0; c < kTileColumns; ++c)
        for (int64_t k = 0; k < 2; ++k) {
          const int64_t n = (p * kTileColumns + c) * 2 + k;
          tile[n] = to_bf16(to_float(fp8_e4m3{codes[n]}) *
                            at(std::min(out - 1, column + c), std::min(in - 1, input + 2 * p + k)));
        }
  }

  int64_t row_blocks_ = 1, col_blocks_ = 1;
  std::vector<float> scales_;  // fp8
  Buffer codes_, exponents_;
};

}  // namespace

std::shared_ptr<const Linear> pack_quantised(const QuantisedWeights& w, Dtype dtype, Device) {
  if (dtype != Dtype::f32 && dtype != Dtype::bf16)
    throw UnsupportedError("pack: dtype is " + std::string(to_string(dtype)) + "; f32 and bf16 are supported");
  const int64_t elements = w.heads * w.out * w.in;
  const int64_t scales = w.block_rows == 0 ? 1 : w.heads * w.row_blocks() * w.col_blocks();
  if (w.format == WeightFormat::plain || w.heads < 1 || w.out < 1 || w.in < 1 ||
      static_cast<int64_t>(w.codes.size()) != elements || static_cast<int64_t>(w.scales.size()) != scales)
    throw ShapeError("pack: " + std::to_string(w.codes.size()) + " codes and " + std::to_string(w.scales.size()) +
                     " scales in format " + std::string(to_string(w.format)) + ", expected " + std::to_string(w.heads) +
                     " x " + std::to_string(w.out) + " x " + std::to_string(w.in) + " and " + std::to_string(scales));
  if (dtype == Dtype::bf16 && native_bf16_dot()) return std::make_shared<NativeQuantisedLinear>(w);
  return std::make_shared<QuantisedLinear>(w, dtype);
}

size_t quantised_scratch() { return QuantisedLinear::most_scratch(); }

}  // namespace mla::cpu
