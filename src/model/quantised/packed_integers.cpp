// compressed-tensors' pack-quantized: a row's integers in words of 32 bits, the first in the lowest ones, the last word
// of a row filled up. Stored is the signed integer plus 2^(bits - 1), of zero points too, so that it cancels.
//
//   weight_packed      I32 [rows, ceil(cols / (32 / bits))]
//   weight_scale       float [rows, groups]
//   weight_shape       I64 [2]: rows, cols
//   weight_zero_point  of asymmetric ones: I32 [ceil(rows / (32 / bits)), groups], packed along rows; or I8 [rows,
//   groups] weight_g_idx       I32 [cols]: the group of each column, for columns quantised in another order
#include <algorithm>

#include "model/quantised/formats.hpp"
#include "model/quantised/integers.hpp"

namespace mla {
namespace {

constexpr std::string_view kWhat = "the packed integer weight";

struct Code {
  MatrixPart held;
  uint32_t bits;
  int64_t operator()(const uint32_t* words, int64_t r, int64_t c) const {
    const uint32_t in_word = 32 / bits, at = static_cast<uint32_t>(c) % in_word;
    return words[held.at(r, c / in_word)] >> (at * bits) & ((1u << bits) - 1);
  }
};

void check_shape(const StoredMatrix& m) {
  const SafetensorsEntry& e = m.take("weight_shape", {"I64", "I32"}, {{2}}, kWhat);
  const auto memory = m.bytes("weight_shape");
  if (!memory) return;
  for (int i = 0; i < 2; ++i) {
    const int64_t n = e.dtype == "I64" ? memory->as<int64_t>()[i] : memory->as<int32_t>()[i];
    const int64_t expected = i == 0 ? m.rows : m.cols;
    if (n != expected)
      m.fail("weight_shape", "is " + std::to_string(n) + " at element " + std::to_string(i) + ", the model's is " +
                                 std::to_string(expected));
  }
}

// [wanted rows, groups of `own`]
std::vector<int16_t> zeros(const StoredMatrix& m, int64_t bits, int64_t groups, const Groups& own, bool& there) {
  const int64_t half = int64_t{1} << (bits - 1), in_word = 32 / bits;
  there = m.has("weight_zero_point");
  if (!there && m.model.quantisation.zero_points)
    m.missing("weight_zero_point", "the config says that its integer weights have zero points");
  std::vector<int16_t> z(m.data ? static_cast<size_t>(m.wanted.rows * own.count) : 0, static_cast<int16_t>(half));
  if (!there) return z;
  const bool plain = m.entry("weight_zero_point")->dtype == "I8";
  m.take("weight_zero_point", {"I32", "I8"}, {{plain ? m.rows : (m.rows + in_word - 1) / in_word, groups}}, kWhat);
  const MatrixPart held = blocks_of({.row = m.wanted.row, .rows = m.wanted.rows, .col = own.first, .cols = own.count},
                                    plain ? 1 : in_word, 1);
  const auto memory = m.bytes("weight_zero_point", held);
  for (int64_t r = m.wanted.row; memory && r < m.wanted.row + m.wanted.rows; ++r)
    for (int64_t g = 0; g < own.count; ++g) {
      const int64_t at = held.at(r / (plain ? 1 : in_word), own.first + g);
      const uint32_t word = plain ? 0 : memory->as<uint32_t>()[at];
      const int64_t packed = word >> (r % in_word * bits) & ((1u << bits) - 1);
      z[static_cast<size_t>((r - m.wanted.row) * own.count + g)] =
          static_cast<int16_t>(plain ? memory->as<int8_t>()[at] + half : packed);
    }
  return z;
}

}  // namespace

HostTensor read_packed_integers(const StoredMatrix& m) {
  const auto& shape = m.entry("weight_packed")->shape;
  const int64_t words = shape.size() == 2 ? shape[1] : 0, bits = bits_that_fit(words, m.cols, {4, 8});
  if (bits == 0 || shape[0] != m.rows)
    m.take("weight_packed", {"I32"}, {{m.rows, (m.cols + 7) / 8}, {m.rows, (m.cols + 3) / 4}},
           "a weight of 4 or 8 bits");
  if (bits == 0) m.unsupported("weight_packed", "may have 4 or 8 bits: its rows are too short to tell");
  m.take("weight_packed", {"I32"}, {shape}, kWhat);
  require_bits(m, "weight_packed", bits);
  check_shape(m);
  const SafetensorsEntry* scale = m.entry("weight_scale");
  const int64_t groups = scale && scale->shape.size() == 2 ? std::max<int64_t>(scale->shape[1], 1) : 1;
  m.take("weight_scale", {"F32", "BF16", "F16"}, {{m.rows, groups}}, kWhat);
  Groups g = groups_of(m, "weight_g_idx", "weight_scale", groups);
  bool zero_points = false;
  Affine affine{.scales = m.scales("weight_scale", {m.wanted.row, m.wanted.rows, g.first, g.count}),
                .zeros = zeros(m, bits, groups, g, zero_points),
                .row_stride = g.count,
                .group_stride = 1};
  const std::string form =
      "int" + std::to_string(bits) + " (packed), " + g.words + (zero_points ? ", zero points" : "");
  const Code code{blocks_of(m.wanted, 1, 32 / bits), static_cast<uint32_t>(bits)};
  return m.tensor("weight_packed", form, integer_matrix(m, "weight_packed", code, std::move(affine), std::move(g)));
}

}  // namespace mla
