// Memory-bound: rows are read once and codes written once. Roofline and figures: README.md.
#include <algorithm>

#include "backend/cpu/backend.hpp"
#include "backend/cpu/core/convert.hpp"
#include "backend/cpu/quantize/kernel.hpp"
#include "ops/quantize/codec.hpp"

namespace mla::cpu {

void quantize(Stream& stream, const ops::QuantizeArgs& a) {
  constexpr int64_t kElementsPerTask = 16384;
  constexpr int64_t kPart = 1024;  // of a bf16 row, as f32 on the stack: a multiple of every group
  const int64_t rows = ops::rows_of(a), width = a.x.extent<HeadValue>();
  const QuantizedWriter y(a.y);
  const int64_t block = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, width));
  stream.pool().run(width == 0 ? 0 : (rows + block - 1) / block, [&](int64_t task, int) {
    for (int64_t n = task * block; n < std::min(rows, (task + 1) * block); ++n) {
      const int64_t t = a.rows.empty() ? n : a.rows[static_cast<size_t>(n)];
      if (t < 0) continue;
      if (a.x.dtype() == Dtype::f32) {
        y.write(t, nullptr, 1, 0, static_cast<const float*>(a.x.at(t, 0)), 0, width);
        continue;
      }
      float part[kPart];
      for (int64_t i = 0; i < width; i += kPart) {
        const int64_t count = std::min(kPart, width - i);
        convert(static_cast<const bf16*>(a.x.at(t, i)), part, count);
        y.write(t, nullptr, 1, i, part, 0, count);
      }
    }
  });
  quantize_padding(stream, {a.y, a.x.extent<Token>()});
}

// Where a word holds four groups, padding rows are cleared by the word: a single row of nvfp4 brings 127 of them.
void quantize_padding(Stream& stream, const ops::QuantizePaddingArgs& a) {
  constexpr int64_t kWordsPerTask = 1 << 14;
  const QuantizedView& y = a.y;
  const int64_t groups = y.spec.groups(y.width), padded = ops::padded_groups(y);
  const int64_t first = y.tokens, rows = ops::padded_tokens(y) - first;
  if (groups == 0) return;
  const QuantizedWriter places(y);
  const int64_t step = ops::scale_is_f32(y.spec) ? 1 : 4, words = padded / step;
  const int64_t block = rows == 0 ? words : std::max<int64_t>(1, kWordsPerTask / rows);
  stream.pool().run(rows == 0 ? 0 : (words + block - 1) / block, [&](int64_t task, int) {
    for (int64_t w = task * block; w < std::min(words, (task + 1) * block); ++w)
      for (int64_t t = first; t < first + rows; ++t) cache::put(places.scale(t, w * step), 0, uint32_t{0});
  });
  for (int64_t g = groups; g < padded; ++g)
    for (int64_t t = 0; t < a.rows; ++t) *places.scale(t, g) = std::byte{0};
}

}  // namespace mla::cpu
