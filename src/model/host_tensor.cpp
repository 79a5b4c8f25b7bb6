#include <algorithm>
#include <cstring>

#include "core/round_once.hpp"
#include "mla/error.hpp"
#include "mla/weights.hpp"

namespace mla {
namespace {

template <class T>
void widen(const std::byte* data, std::vector<float>& out) {
  for (size_t i = 0; i < out.size(); ++i) {
    T e;  // tensors need not be aligned
    std::memcpy(&e, data + i * sizeof(T), sizeof(T));
    out[i] = to_float(e);
  }
}

float round_to(Dtype t, double x) { return t == Dtype::bf16 ? to_float(nearest_bf16(x)) : static_cast<float>(x); }

void scale_blocks(const HostTensor& t, Dtype rounded, std::vector<float>& x) {
  const int64_t cols = t.shape[1], blocks = (cols + t.block_cols - 1) / t.block_cols;
  for (int64_t r = 0; r < t.shape[0]; ++r)
    for (int64_t b = 0; b < blocks; ++b) {
      const float scale = t.block_scales[static_cast<size_t>((r / t.block_rows) * blocks + b)];
      float *e = x.data() + r * cols + b * t.block_cols, *const end = x.data() + r * cols +
                                                                      std::min(cols, (b + 1) * t.block_cols);
      if (rounded == Dtype::f32)
        for (; e < end; ++e) *e *= scale;
      else  // 4 bits times 24: exact in float64
        for (; e < end; ++e) *e = to_float(nearest_bf16(static_cast<double>(*e) * scale));
    }
}

std::vector<float> decoded(const HostTensor& t, Dtype rounded) {
  // Some formats pack neighbours in a column: strips of rows let these come from one word.
  constexpr int64_t kRows = 32, kColumns = 512;
  const int64_t rows = t.shape[0], cols = t.shape[1];
  std::vector<float> out(static_cast<size_t>(rows * cols));
  std::vector<double> block(static_cast<size_t>(kRows * kColumns));
  for (int64_t r = 0; r < rows; r += kRows)
    for (int64_t c = 0; c < cols; c += kColumns) {
      const int64_t n = std::min(kRows, rows - r), m = std::min(kColumns, cols - c);
      t.quantised->decode(t.first_row + r, n, t.first_col + c, m, block.data());
      for (int64_t i = 0; i < n; ++i)
        for (int64_t j = 0; j < m; ++j)
          out[static_cast<size_t>((r + i) * cols + c + j)] = round_to(rounded, block[static_cast<size_t>(i * m + j)]);
    }
  return out;
}

}  // namespace

int64_t HostTensor::size() const {
  int64_t n = 1;
  for (int64_t e : shape) n *= e;
  return n;
}

std::vector<float> HostTensor::to_f32(Dtype rounded) const {
  if (rounded != Dtype::f32 && rounded != Dtype::bf16)
    throw UnsupportedError("tensor '" + name + "' rounded to " + std::string(to_string(rounded)) +
                           "; f32 and bf16 are supported");
  if (quantised) return decoded(*this, rounded);
  std::vector<float> out(static_cast<size_t>(size()));
  switch (dtype) {
    case Dtype::f32: widen<float>(data, out); break;
    case Dtype::bf16: widen<bf16>(data, out); break;
    case Dtype::f16: widen<f16>(data, out); break;
    case Dtype::fp8_e4m3: widen<fp8_e4m3>(data, out); break;
  }
  if (!block_scales.empty()) scale_blocks(*this, rounded, out);
  else if (rounded == Dtype::bf16 && dtype != Dtype::bf16)
    for (float& e : out) e = to_float(to_bf16(e));
  return out;
}

}  // namespace mla
