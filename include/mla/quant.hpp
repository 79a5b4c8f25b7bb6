// Quantised outputs: what the attention form may write instead of f32 heads. A row is a token's heads one after
// another, [Head * Value] flat; groups of neighbours in a row share a scale.
//
// Formulas, all in f32, each operation rounded once:
//   fp8           code = e4m3(x / scale)
//   fp8_groups    s = max(amax, 1e-10) / 448, as a power of two 2^ceil(log2 s) if asked; code = e4m3(x / s)
//   nvfp4         s = e4m3(global_scale * amax / 6), code = e2m1(x * global_scale / s) with s as decoded
//   mxfp4         s = 2^(floor(log2 amax) - 2), at least ue8m0's least, 2^-127; code = e2m1(x / s)
// amax is a group's largest magnitude: NaN does not count, infinity counts as the largest finite number. e4m3 saturates
// at 448 and keeps NaN; e2m1 saturates at 6 and, as it has no NaN, stores +6 for one, as GPUs do. An nvfp4 group whose
// scale rounds to 0 has codes 0. An mxfp4 group that holds NaN or infinity is NaN: scale 0xff, codes 0. One of zeros
// has scale 2^-127, stored as 0. A row's last group may be short.
//
// Sources: OCP 8-bit Floating Point (e4m3) and Microscaling Formats 1.0 (e2m1, ue8m0 as its e8m0, mxfp4; what a group
// with NaN or infinity becomes is left open there, but for ue8m0's NaN standing for the whole group); the scale layouts
// are those that block-scaled matrix products take: DeepGEMM's for fp8, cuBLAS's and CUTLASS's for NVFP4 and MXFP4.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace mla {

enum class OutputKind : uint8_t {
  none,        ///< plain f32
  fp8,         ///< e4m3 with one static scale
  fp8_groups,  ///< e4m3 with a scale for each group of 128 or 64
  nvfp4,       ///< e2m1, two a byte, low nibble first, with an e4m3 scale for each group of 16
  mxfp4,       ///< e2m1 likewise, with a ue8m0 scale for each group of 32
};
/// Of fp8_groups' scales.
enum class ScaleForm : uint8_t {
  f32,
  power_of_two,  ///< f32 that are powers of two
  packed_ue8m0,  ///< powers of two as biased exponents, four groups an int32, lowest byte first; tma_aligned only
};
/// Of fp8_groups' scales [tokens, groups], or of their int32 [tokens, ceil(groups / 4)].
enum class ScaleLayout : uint8_t {
  row_major,
  column_major,  ///< stride (1, tokens)
  tma_aligned,   ///< stride (1, tokens rounded up to 4)
};

struct OutputSpec {
  OutputKind kind = OutputKind::none;
  int64_t group = 128;  ///< fp8_groups: 128 or 64
  ScaleForm form = ScaleForm::f32;
  ScaleLayout layout = ScaleLayout::row_major;
  float scale = 1.0f;         ///< fp8
  float global_scale = 1.0f;  ///< nvfp4: 448 * 6 / amax of the whole tensor

  /// e2m1 codes, whose scales lie in tiles of 128 rows by 4 groups.
  bool is_e2m1() const { return kind == OutputKind::nvfp4 || kind == OutputKind::mxfp4; }
  /// Elements that share a scale; 0 where there is none to store.
  int64_t group_size() const;
  int64_t groups(int64_t width) const;
  /// Bytes of a row's codes, and of all codes when rows follow one another.
  int64_t row_bytes(int64_t width) const;
  int64_t data_bytes(int64_t tokens, int64_t width) const { return tokens * row_bytes(width); }
  /// Bytes of the scales with their padding; 0 for fp8.
  int64_t scale_bytes(int64_t tokens, int64_t width) const;
  /// Where a group's scale lies, in bytes. nvfp4, mxfp4: tiles of 128 rows by 4 groups,
  /// ((row / 128) * ceil(groups / 4) + group / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + group % 4.
  int64_t scale_offset(int64_t tokens, int64_t width, int64_t row, int64_t group) const;
  /// A head's groups are its own: then heads can be quantised where they are made.
  bool groups_within(int64_t value) const { return group_size() == 0 || value % group_size() == 0; }
  /// The same layouts and formulas; the numbers scale and global_scale may differ.
  bool same_format(const OutputSpec& other) const;
  /// UnsupportedError for a group or layout that does not exist, ShapeError for a scale that is not finite and above 0.
  void validate() const;
};

/// "none", "fp8", "nvfp4", "mxfp4", and "fp8_128" or "fp8_64", followed for scales other than f32 row-major by "_ue8m0"
/// (powers of two) and "_column" or "_tma", or by "_packed".
std::string to_string(const OutputSpec& spec);
/// Every format there is, none first; scales 1.
std::span<const OutputSpec> output_specs();
/// InputError listing the names when there is no such format.
OutputSpec parse_output_spec(std::string_view name);

/// A quantised output's memory, not owned. Written are the rows of the step's tokens, and zeros into the scales'
/// padding: rows past `tokens` up to the layout's alignment, and the group places past the last group of the rows
/// written. Rows between the step's tokens and `tokens` are left alone.
struct QuantizedView {
  OutputSpec spec;
  int64_t tokens = 0;  ///< rows there is room for; the scales' layout follows from it
  int64_t width = 0;   ///< Head * Value
  std::byte* data = nullptr;
  int64_t row_stride = 0;       ///< bytes from one row of codes to the next
  std::byte* scales = nullptr;  ///< spec.scale_bytes(tokens, width) bytes, 4-byte aligned; null for fp8

  explicit operator bool() const { return spec.kind != OutputKind::none; }
  std::byte* codes(int64_t row) const { return data + row * row_stride; }
  std::byte* scale(int64_t row, int64_t group) const { return scales + spec.scale_offset(tokens, width, row, group); }
};

/// e2m1: 1 sign, 2 exponent, 1 mantissa bit; magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. Rounds to nearest even, saturates
/// at 6; NaN becomes +6. The code is the low nibble.
constexpr uint8_t to_e2m1(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x), a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return 7;
  const uint8_t sign = static_cast<uint8_t>((u >> 28) & 8u);
  if (a >= 0x40c00000u) return sign | 7;  // 6 and above
  if (a < 0x3f800000u)                    // below 1: multiples of 0.5
    return static_cast<uint8_t>(sign | ((a > 0x3e800000u) + (a >= 0x3f400000u)));
  const uint32_t rounded = a + 0x1fffffu + ((a >> 22) & 1u);
  return static_cast<uint8_t>(sign | ((rounded - 0x3f000000u) >> 22));
}

constexpr float from_e2m1(uint8_t code) {
  constexpr float kMagnitudes[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const float magnitude = kMagnitudes[code & 7u];
  return code & 8u ? -magnitude : magnitude;
}

}  // namespace mla
