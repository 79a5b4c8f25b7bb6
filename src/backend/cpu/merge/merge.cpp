// Memory-bound: each row of O is read once from every part and written once.
#include <algorithm>
#include <cmath>

#include "backend/cpu/backend.hpp"
#include "backend/cpu/core/convert.hpp"
#include "backend/cpu/core/merge_weights.hpp"

namespace mla::cpu {
namespace {

// f(row of f32, its first column, how many): a row of out as it is, or rows of 16 bits by pieces that are rounded
// behind it.
template <class F>
void write_row(const AnyMutableView<Token, Head, Value>& out, int64_t row, int64_t head, F&& f) {
  const int64_t width = out.extent<Value>();
  if (out.dtype() == Dtype::f32) return f(static_cast<float*>(out.at(row, head, 0)), 0, width);
  constexpr int64_t kPiece = 256;
  float piece[kPiece];
  for (int64_t first = 0; first < width; first += kPiece) {
    const int64_t n = std::min(kPiece, width - first);
    f(piece, first, n);
    if (out.dtype() == Dtype::bf16) convert(piece, static_cast<bf16*>(out.at(row, head, first)), n);
    else convert(piece, static_cast<f16*>(out.at(row, head, first)), n);
  }
}

}  // namespace

void merge(Stream& stream, const ops::MergeArgs& a) {
  const int64_t heads = a.out.extent<Head>(), width = a.out.extent<Value>();
  stream.pool().run(a.other.extent<Token>(), [&](int64_t t, int) {
    const int64_t row = a.rows.empty() ? t : a.rows[t];
    for (int64_t h = 0; h < heads; ++h) {
      join_part(&a.out(row, h, 0), a.lse(row, h), &a.other(t, h, 0), a.other_lse(t, h), width);
    }
  });
}

void merge_splits(Stream& stream, const ops::MergeSplitsArgs& a) {
  const int64_t heads = a.out.extent<Head>(), width = a.out.extent<Value>();
  // One task an item and head: items are few and rows of one request share their partials' pages.
  stream.pool().run(static_cast<int64_t>(a.items.size()) * heads, [&](int64_t task, int) {
    const SplitRows& s = a.items[task / heads];
    const int64_t h = task % heads;
    for (int32_t r = 0; r < s.rows; ++r) {
      float m = kEmptyLse, sum = 0;
      const float* nan = nullptr;
      auto at = [&](int64_t i) { return s.partial + i * s.rows + r; };
      auto lse = [&](int64_t i) { return usable_lse(a.partial_lse(at(i), h)); };
      for (int32_t i = 0; i < s.splits; ++i) {
        const float* part = &a.partial_out(at(i), h, 0);
        if (nan_row(part, a.partial_lse(at(i), h), width)) nan = part;
        m = std::max(m, lse(i));
      }
      if (nan) {
        write_row(a.out, s.row + r, h, [&](float* out, int64_t first, int64_t n) { std::copy_n(nan + first, n, out); });
        a.lse(s.row + r, h) = nan[0];
        continue;
      }
      for (int32_t i = 0; m != kEmptyLse && i < s.splits; ++i) sum += std::exp(lse(i) - m);
      write_row(a.out, s.row + r, h, [&](float* out, int64_t first, int64_t n) {
        std::fill_n(out, n, 0.0f);
        for (int32_t i = 0; i < s.splits; ++i) {
          if (lse(i) == kEmptyLse) continue;
          add_weighted(out, std::exp(lse(i) - m) / sum, &a.partial_out(at(i), h, first), n);
        }
      });
      a.lse(s.row + r, h) = m == kEmptyLse ? kEmptyLse : m + std::log(sum);
    }
  });
}

}  // namespace mla::cpu
