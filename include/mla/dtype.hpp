// Element types and their portable conversions.
//
// bf16 and f16 follow IEEE 754 round-to-nearest-even; NaN stays NaN, infinities are kept. fp8 e4m3 is the OCP "E4M3"
// form (no infinities, S.1111.111 is NaN): rounding to nearest even, saturating to +-448, NaN kept.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace mla {

enum class Dtype : uint8_t { f32, bf16, f16, fp8_e4m3 };

constexpr size_t size_of(Dtype t) { return t == Dtype::f32 ? 4 : t == Dtype::fp8_e4m3 ? 1 : 2; }
std::string_view to_string(Dtype t);
/// "f32", "bf16", "f16", "fp8_e4m3" (also "fp8"); anything else: InputError.
Dtype parse_dtype(std::string_view name);

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
struct fp8_e4m3 {
  uint8_t bits;
};

constexpr float to_float(float x) { return x; }

constexpr float to_float(bf16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }

constexpr float to_float(f16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, exponent = (x.bits >> 10) & 31u, mantissa = x.bits & 0x3ffu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // subnormal: exact
  return sign ? -magnitude : magnitude;
}

constexpr float to_float(fp8_e4m3 x) {
  const uint32_t sign = (x.bits & 0x80u) << 24, exponent = (x.bits >> 3) & 15u, mantissa = x.bits & 7u;
  if (exponent == 15 && mantissa == 7) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 120) << 23) | (mantissa << 20));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-9f;
  return sign ? -magnitude : magnitude;
}

constexpr bf16 to_bf16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x40u)};  // quiet, payload's top kept
  return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

constexpr f16 to_f16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u | ((a >> 13) & 0x1ffu))};
  if (a >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // >= 65520 rounds to infinity
  if (a < 0x38800000u) {                                                 // below 2^-14: subnormal or zero
    if (a < 0x33000000u) return {static_cast<uint16_t>(sign)};           // < 2^-25 (exactly 2^-25 is a tie: even, zero)
    const uint32_t shift = 126 - (a >> 23), mantissa = (a & 0x7fffffu) | 0x800000u;
    const uint32_t kept = mantissa >> shift, rest = mantissa & ((1u << shift) - 1), half = 1u << (shift - 1);
    return {static_cast<uint16_t>(sign | (kept + (rest > half || (rest == half && (kept & 1u)) ? 1u : 0u)))};
  }
  const uint32_t rounded = a + 0xfffu + ((a >> 13) & 1u);
  return {static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

constexpr fp8_e4m3 to_fp8_e4m3(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x), sign = (u >> 24) & 0x80u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return {static_cast<uint8_t>(sign | 0x7fu)};
  if (a >= 0x43e00000u) return {static_cast<uint8_t>(sign | 0x7eu)};  // >= 448 saturates
  if (a < 0x3c800000u) {                                              // below 2^-6: multiples of 2^-9
    if (a < 0x3a800000u) return {static_cast<uint8_t>(sign)};         // < 2^-10
    const uint32_t shift = 141 - (a >> 23), mantissa = (a & 0x7fffffu) | 0x800000u;
    const uint32_t kept = mantissa >> shift, rest = mantissa & ((1u << shift) - 1), half = 1u << (shift - 1);
    return {static_cast<uint8_t>(sign | (kept + (rest > half || (rest == half && (kept & 1u)) ? 1u : 0u)))};
  }
  const uint32_t rounded = a + 0x7ffffu + ((a >> 20) & 1u);
  return {static_cast<uint8_t>(sign | ((rounded - 0x3c000000u) >> 20))};
}

template <class T>
struct dtype_of;
template <>
struct dtype_of<float> {
  static constexpr Dtype value = Dtype::f32;
};
template <>
struct dtype_of<bf16> {
  static constexpr Dtype value = Dtype::bf16;
};
template <>
struct dtype_of<f16> {
  static constexpr Dtype value = Dtype::f16;
};
template <>
struct dtype_of<fp8_e4m3> {
  static constexpr Dtype value = Dtype::fp8_e4m3;
};

template <class T>
constexpr T from_float(float x) {
  if constexpr (dtype_of<T>::value == Dtype::f32) return x;
  else if constexpr (dtype_of<T>::value == Dtype::bf16) return to_bf16(x);
  else if constexpr (dtype_of<T>::value == Dtype::f16) return to_f16(x);
  else return to_fp8_e4m3(x);
}

/// Element i of an array of run-time type.
float load_float(Dtype t, const void* data, int64_t i);
void store_float(Dtype t, void* data, int64_t i, float x);

}  // namespace mla
