#include "mla/dtype.hpp"

#include <string>

#include "mla/error.hpp"

namespace mla {

std::string_view to_string(Dtype t) {
  switch (t) {
    case Dtype::f32: return "f32";
    case Dtype::bf16: return "bf16";
    case Dtype::f16: return "f16";
    case Dtype::fp8_e4m3: return "fp8_e4m3";
  }
  return "?";
}

Dtype parse_dtype(std::string_view name) {
  for (Dtype t : {Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::fp8_e4m3})
    if (name == to_string(t)) return t;
  if (name == "fp8") return Dtype::fp8_e4m3;
  throw InputError("unknown dtype '" + std::string(name) + "'; known: f32 bf16 f16 fp8_e4m3");
}

float load_float(Dtype t, const void* data, int64_t i) {
  switch (t) {
    case Dtype::f32: return static_cast<const float*>(data)[i];
    case Dtype::bf16: return to_float(static_cast<const bf16*>(data)[i]);
    case Dtype::f16: return to_float(static_cast<const f16*>(data)[i]);
    case Dtype::fp8_e4m3: return to_float(static_cast<const fp8_e4m3*>(data)[i]);
  }
  return 0;
}

void store_float(Dtype t, void* data, int64_t i, float x) {
  switch (t) {
    case Dtype::f32: static_cast<float*>(data)[i] = x; break;
    case Dtype::bf16: static_cast<bf16*>(data)[i] = to_bf16(x); break;
    case Dtype::f16: static_cast<f16*>(data)[i] = to_f16(x); break;
    case Dtype::fp8_e4m3: static_cast<fp8_e4m3*>(data)[i] = to_fp8_e4m3(x); break;
  }
}

}  // namespace mla
