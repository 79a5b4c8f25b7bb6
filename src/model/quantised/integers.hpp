// What the formats of packed integers share: w[r][c] = (code[r][c] - zero[r][group of c]) * scale[r][group of c].
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "model/quantised/stored.hpp"

namespace mla {

/// Bits of an integer in words of 32, from the number of words that `count` of them take; 0 where none of `known` fits.
int64_t bits_that_fit(int64_t words, int64_t count, std::initializer_list<int64_t> known);
/// UnsupportedError naming `part` where the config says other bits.
void require_bits(const StoredMatrix& m, std::string_view part, int64_t bits);

/// Which groups the wanted columns are of.
struct Groups {
  std::vector<int32_t> of_column;  // [wanted cols], counted from `first` on; empty without data
  int64_t first = 0, count = 0;    // from the lowest to the highest of them; without data all
  std::string words;
};
/// From the tensor `index` (I32 [cols]) where there is one, else neighbours, as many as the config says. `count` groups
/// have scales in the tensor `scales`.
Groups groups_of(const StoredMatrix& m, std::string_view index, std::string_view scales, int64_t count);

/// Scales and zero points of each wanted row and group.
struct Affine {
  std::vector<float> scales;
  std::vector<int16_t> zeros;
  int64_t row_stride = 0, group_stride = 0;
};

/// Code(words, r, c): the integer of the whole matrix's row and column as it is stored, at least 0.
template <class Code>
class IntegerMatrix : public QuantisedMatrix {
 public:
  IntegerMatrix(std::shared_ptr<const Buffer> words, Code code, Affine affine, std::vector<int32_t> groups,
                const MatrixPart& held)
      : words_(std::move(words)), code_(code), affine_(std::move(affine)), groups_(std::move(groups)), held_(held) {}

  void decode(int64_t row, int64_t rows, int64_t col, int64_t cols, double* out) const override {
    const uint32_t* words = words_->template as<uint32_t>();
    for (int64_t c = 0; c < cols; ++c)
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t group = groups_[static_cast<size_t>(col + c - held_.col)];
        const size_t at =
            static_cast<size_t>((row + r - held_.row) * affine_.row_stride + group * affine_.group_stride);
        const int64_t code = code_(words, row + r, col + c);
        out[r * cols + c] = static_cast<double>(code - affine_.zeros[at]) * affine_.scales[at];  // 10 bits times 24
      }
  }

 private:
  std::shared_ptr<const Buffer> words_;
  Code code_;
  Affine affine_;
  std::vector<int32_t> groups_;
  MatrixPart held_;
};

/// `code` has a member `held`: which words of the tensor `part` it is given.
template <class Code>
std::shared_ptr<const QuantisedMatrix> integer_matrix(const StoredMatrix& m, std::string_view part, Code code,
                                                      Affine affine, Groups groups) {
  if (!m.data) return nullptr;
  return std::make_shared<const IntegerMatrix<Code>>(m.bytes(part, code.held), code, std::move(affine),
                                                     std::move(groups.of_column), m.wanted);
}

}  // namespace mla
