// Scratch of an attention task, cut up: row tiles that share one block of keys and values.
#pragma once

#include "backend/cpu/core/block_attention.hpp"

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

/// Memory of kTiles row tiles with a shared score block.
template <int kTiles>
struct RowTiles {
  RowTile tiles[kTiles];
  float* scores = nullptr;
  float* row = nullptr;  ///< one dequantised row or result

  RowTiles(Cutter& cut, int64_t qk_dim, int64_t v_dim) {
    for (RowTile& t : tiles) {
      t.q = cut.take<float>(qk_dim * kTileRows);
      t.o = cut.take<float>(v_dim * kTileRows);
      t.m = cut.take<float>(kTileRows);
      t.l = cut.take<float>(kTileRows);
      t.last = cut.take<int32_t>(kTileRows);
    }
    scores = cut.take<float>(kBlockKeys * kTileRows);
    row = cut.take<float>(qk_dim > v_dim ? qk_dim : v_dim);
  }
  static constexpr int64_t kRows = kTiles * kTileRows;
};

}  // namespace mla::cpu
