// AWQ's gemm form: integers of 4 bits, eight neighbouring rows in a word, in the order in which its kernel takes them
// apart: rows 0 2 4 6 1 3 5 7 from the lowest bits up.
//
//   qweight  I32 [cols, rows / 8]
//   qzeros   I32 [groups, rows / 8], in the same order
//   scales   float [groups, rows]
//
// w = (code - zero) * scale, for groups of neighbouring columns. Source: AutoAWQ's packing.
#include <algorithm>

#include "model/quantised/formats.hpp"
#include "model/quantised/integers.hpp"

namespace mla {
namespace {

constexpr std::string_view kWhat = "the awq weight";
constexpr int64_t kInWord = 8;

constexpr uint32_t shift(int64_t row) {
  constexpr uint32_t kPlace[kInWord] = {0, 4, 1, 5, 2, 6, 3, 7};
  return 4 * kPlace[row % kInWord];
}

struct Code {
  MatrixPart held;
  int64_t operator()(const uint32_t* w, int64_t r, int64_t c) const {
    return w[held.at(c, r / kInWord)] >> shift(r) & 15u;
  }
};

}  // namespace

HostTensor read_awq(const StoredMatrix& m) {
  if (m.rows % kInWord != 0)
    m.unsupported("qweight", "has " + std::to_string(m.rows) + " rows; whole words of 8 are supported");
  m.take("qweight", {"I32"}, {{m.cols, m.rows / kInWord}}, kWhat);
  require_bits(m, "qweight", 4);
  const SafetensorsEntry* scales = m.entry("scales");
  const int64_t groups = scales && scales->shape.size() == 2 ? std::max<int64_t>(scales->shape[0], 1) : 1;
  m.take("scales", {"F32", "BF16", "F16"}, {{groups, m.rows}}, kWhat);
  m.take("qzeros", {"I32"}, {{groups, m.rows / kInWord}}, kWhat);
  Groups g = groups_of(m, "g_idx", "scales", groups);
  const MatrixPart& part = m.wanted;
  const MatrixPart own{.row = g.first, .rows = g.count, .col = part.row, .cols = part.rows};
  Affine affine{.scales = m.scales("scales", own), .zeros = {}, .row_stride = 1, .group_stride = part.rows};
  const Code zero{blocks_of(own, 1, kInWord)};
  if (const auto stored = m.bytes("qzeros", zero.held))
    for (int64_t i = g.first; i < g.first + g.count; ++i)
      for (int64_t r = part.row; r < part.row + part.rows; ++r)
        affine.zeros.push_back(static_cast<int16_t>(zero(stored->as<uint32_t>(), r, i)));
  const std::string form = "int4 (awq), " + g.words + ", zero points";
  return m.tensor(
      "qweight", form,
      integer_matrix(m, "qweight", Code{transposed(blocks_of(part, kInWord, 1))}, std::move(affine), std::move(g)));
}

}  // namespace mla
