// Scratch of an attention task, cut up: row tiles that share one block of keys and values.
#pragma once

#include <algorithm>

#include "backend/cpu/core/block_forms.hpp"
#include "backend/cpu/core/tile_registers.hpp"

namespace mla::cpu {

/// Hands out 64-byte aligned pieces; with a null base it only counts.
class Cutter {
 public:
  explicit Cutter(std::byte* base) : base_(base) {}
  template <class T>
  T* take(int64_t n) {
    std::byte* p = base_ ? base_ + used_ : nullptr;
    used_ += (static_cast<size_t>(n) * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(p);
  }
  size_t used() const { return used_; }

 private:
  std::byte* base_;
  size_t used_ = 0;
};

/// Memory of kTiles row tiles and of the scores of kScored of them.
template <class Form, int kTiles, int kScored = 1>
struct RowTiles {
  RowTile tiles[kTiles];
  float* scores = nullptr;      ///< [kScored][Form::kScores]
  void* probabilities[2] = {};  ///< Form::kProbabilities floats each
  float* row = nullptr;         ///< one dequantised row or result

  RowTiles(Cutter& cut, int64_t qk_dim, int64_t v_dim) {
    const int64_t o_stride = Form::kRowsOut ? tile_stride(value_squares(v_dim) * 16, sizeof(float)) : 0;
    for (RowTile& t : tiles) {
      t.q = cut.take<uint32_t>(Form::query_words(qk_dim) * kTileRows);
      t.o = cut.take<float>((Form::kRowsOut ? o_stride : v_dim) * kTileRows);
      t.o_stride = o_stride;
      t.m = cut.take<float>(kTileRows);
      t.l = cut.take<float>(kTileRows);
      t.last = cut.take<int32_t>(kTileRows);
    }
    scores = cut.take<float>(kScored * Form::kScores);
    for (void*& p : probabilities) p = cut.take<float>(Form::kProbabilities);
    row = cut.take<float>(qk_dim > v_dim ? qk_dim : v_dim);
  }
};

/// The largest of what bytes(Form{}) says, over the forms that this CPU has, whatever the current restriction.
template <class F>
size_t largest_of_forms(F&& bytes) {
  const size_t most = std::max(bytes(F32Form{}), bytes(DotForm{}));
  return has_amx_bf16() ? std::max(most, bytes(AmxForm{})) : most;
}

}  // namespace mla::cpu
