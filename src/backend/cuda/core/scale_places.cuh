// Where the scales of a quantised output lie, for the kernels that write them.
#pragma once

#include <cstdint>

#include "mla/quant.hpp"
#include "ops/quantize/codec.hpp"

namespace mla::cuda {

/// Where scales lie, in words of 4 bytes: an f32, or the bytes of four groups. As OutputSpec::scale_offset.
struct ScalePlaces {
  uint32_t* data = nullptr;
  int64_t row = 0, word = 0;  // from one to the next
  int32_t tiles = 0;          // e2m1: words of a row, otherwise 0
  __device__ uint32_t* at(int64_t r, int64_t w) const {
    if (tiles == 0) return data + r * row + w * word;
    return data + ((r >> 7) * tiles + w) * 128 + (r & 31) * 4 + (r >> 5 & 3);
  }
};

inline bool bytes_of_groups(const OutputSpec& spec) { return spec.group_size() > 0 && !ops::scale_is_f32(spec); }

inline ScalePlaces scale_places(const QuantizedView& y) {
  ScalePlaces s;
  if (y.spec.group_size() == 0) return s;
  const bool bytes = bytes_of_groups(y.spec);
  const auto at = [&](int64_t row, int64_t group) { return y.spec.scale_offset(y.tokens, y.width, row, group) / 4; };
  s.data = reinterpret_cast<uint32_t*>(y.scales);
  s.row = at(1, 0);
  s.word = at(0, bytes ? 4 : 1);
  if (y.spec.is_e2m1()) s.tiles = static_cast<int32_t>(ops::padded_groups(y) / 4);
  return s;
}

}  // namespace mla::cuda
