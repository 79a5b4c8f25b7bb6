// From float64 to a narrow type in one rounding.
#pragma once

#include <bit>
#include <cstdint>

#include "mla/dtype.hpp"

namespace mla {

/// The bf16 nearest to x, ties to even. By way of f32 to nearest, x close to a border between two bf16 would first move
/// onto it, and from there to either side.
inline bf16 nearest_bf16(double x) {
  const float f = static_cast<float>(x);
  uint32_t u = std::bit_cast<uint32_t>(f);
  const double held = static_cast<double>(f), size = held < 0 ? -held : held, exact = x < 0 ? -x : x;
  // f32 to odd: its last bit then says that something was cut off.
  if ((size < exact || size > exact) && (u & 1u) == 0) u += size < exact ? 1u : -1u;
  return to_bf16(std::bit_cast<float>(u));
}

}  // namespace mla
