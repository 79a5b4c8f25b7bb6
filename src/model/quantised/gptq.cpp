// GPTQ: integers of 2, 4 or 8 bits, neighbouring columns in a word, the first in the lowest bits.
//
//   qweight  I32 [cols / (32 / bits), rows]
//   qzeros   I32 [groups, rows / (32 / bits)], neighbouring rows in a word
//   scales   float [groups, rows]
//   g_idx    I32 [cols]: the group of each column; without it, neighbours
//
// w = (code - zero) * scale. checkpoint_format gptq stores zero points less one, gptq_v2 as they are. Less one, 0 has
// no place: readers take 2^bits - 1 for 2^bits (vLLM) or, adding in as many bits, for 0. It is refused.
#include <algorithm>

#include "model/quantised/formats.hpp"
#include "model/quantised/integers.hpp"

namespace mla {
namespace {

constexpr std::string_view kWhat = "the gptq weight";

struct Code {
  MatrixPart held;
  uint32_t bits;
  int64_t operator()(const uint32_t* words, int64_t r, int64_t c) const {
    const uint32_t in_word = 32 / bits, at = static_cast<uint32_t>(c) % in_word;
    return words[held.at(c / in_word, r)] >> (at * bits) & ((1u << bits) - 1);
  }
};

// Of `own`, groups and rows.
std::vector<int16_t> zeros(const StoredMatrix& m, const MatrixPart& own, int64_t bits) {
  const int64_t in_word = 32 / bits, offset = m.model.quantisation.zero_offset, last = (int64_t{1} << bits) - 1;
  const MatrixPart held = blocks_of(own, 1, in_word);
  const auto stored = m.bytes("qzeros", held);
  std::vector<int16_t> z;
  if (!stored) return z;
  z.reserve(static_cast<size_t>(own.rows * own.cols));
  for (int64_t g = own.row; g < own.row + own.rows; ++g)
    for (int64_t r = own.col; r < own.col + own.cols; ++r) {
      const uint32_t word = stored->as<uint32_t>()[held.at(g, r / in_word)];
      const int64_t zero = word >> (r % in_word * bits) & last;
      if (zero == last && offset > 0)
        m.unsupported("qzeros", "is " + std::to_string(zero) + " at group " + std::to_string(g) + ", row " +
                                    std::to_string(r) + ", which readers of checkpoint_format gptq take for " +
                                    std::to_string(zero + offset) + " or for 0");
      z.push_back(static_cast<int16_t>(zero + offset));
    }
  return z;
}

}  // namespace

HostTensor read_gptq(const StoredMatrix& m) {
  const auto& shape = m.entry("qweight")->shape;
  int64_t bits = 0;
  for (int64_t b : {2, 4, 8})
    if (m.cols * b % 32 == 0 && shape.size() == 2 && shape[0] == m.cols * b / 32 && shape[1] == m.rows) bits = b;
  if (bits == 0)
    m.take("qweight", {"I32"}, {{m.cols / 16, m.rows}, {m.cols / 8, m.rows}, {m.cols / 4, m.rows}},
           "a weight of 2, 4 or 8 bits in whole words");
  if (bits == 0)
    m.unsupported("qweight", "has " + std::to_string(m.cols) + " columns; whole words of 2, 4 or 8 bits are supported");
  m.take("qweight", {"I32"}, {shape}, kWhat);
  require_bits(m, "qweight", bits);
  const int64_t in_word = 32 / bits;
  if (m.rows % in_word != 0)
    m.unsupported("qweight", "has " + std::to_string(m.rows) + " rows; whole words of " + std::to_string(in_word) +
                                 " zero points are supported");
  const SafetensorsEntry* scales = m.entry("scales");
  const int64_t groups = scales && scales->shape.size() == 2 ? std::max<int64_t>(scales->shape[0], 1) : 1;
  m.take("scales", {"F32", "BF16", "F16"}, {{groups, m.rows}}, kWhat);
  m.take("qzeros", {"I32"}, {{groups, m.rows / in_word}}, kWhat);
  Groups g = groups_of(m, "g_idx", "scales", groups);
  const MatrixPart own{.row = g.first, .rows = g.count, .col = m.wanted.row, .cols = m.wanted.rows};
  Affine affine{
      .scales = m.scales("scales", own), .zeros = zeros(m, own, bits), .row_stride = 1, .group_stride = own.cols};
  const std::string form = "int" + std::to_string(bits) + " (gptq), " + g.words + ", zero points";
  const Code code{transposed(blocks_of(m.wanted, 1, in_word)), static_cast<uint32_t>(bits)};
  return m.tensor("qweight", form, integer_matrix(m, "qweight", code, std::move(affine), std::move(g)));
}

}  // namespace mla
