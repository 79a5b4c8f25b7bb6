#include "backend/cuda/core/tensor_map.hpp"

#include <cuda_runtime_api.h>

#include <string>

#include "backend/cuda/core/check.hpp"

namespace mla::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode encoder(std::string_view op) {
  static const Encode encode = [op] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found), op,
          "driver entry cuTensorMapEncodeTiled");
    if (found != cudaDriverEntryPointSuccess || !entry)
      throw DeviceError(std::string(op) + ": this driver has no cuTensorMapEncodeTiled (CUDA 12.0 is needed)");
    return reinterpret_cast<Encode>(entry);
  }();
  return encode;
}

CUtensorMapDataType driver_type(MapType t) {
  switch (t) {
    case MapType::bf16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case MapType::f16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case MapType::f32: return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case MapType::u8: return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
  return CU_TENSOR_MAP_DATA_TYPE_UINT8;
}

CUtensorMapSwizzle driver_swizzle(Swizzle s) {
  switch (s) {
    case Swizzle::none: return CU_TENSOR_MAP_SWIZZLE_NONE;
    case Swizzle::b32: return CU_TENSOR_MAP_SWIZZLE_32B;
    case Swizzle::b64: return CU_TENSOR_MAP_SWIZZLE_64B;
    case Swizzle::b128: return CU_TENSOR_MAP_SWIZZLE_128B;
  }
  return CU_TENSOR_MAP_SWIZZLE_NONE;
}

}  // namespace

CUtensorMap tensor_map(std::string_view op, std::string_view name, MapType type, const void* base,
                       std::span<const uint64_t> extents, std::span<const uint64_t> byte_strides,
                       std::span<const uint32_t> box, Swizzle swizzle) {
  CUtensorMap map;
  constexpr cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
  const CUresult status = encoder(op)(
      &map, driver_type(type), static_cast<cuuint32_t>(extents.size()), const_cast<void*>(base), extents.data(),
      byte_strides.data(), box.data(), element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, driver_swizzle(swizzle),
      // Boxes of 128 bytes a row: with 256, the neighbours' lines pass through L2 again.
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status == CUDA_SUCCESS) return map;
  std::string text = std::string(op) + ": no tensor map for " + std::string(name) + ": driver error " +
                     std::to_string(static_cast<int>(status)) + "; extents";
  for (const uint64_t n : extents) text += ' ' + std::to_string(n);
  text += ", byte strides";
  for (const uint64_t n : byte_strides) text += ' ' + std::to_string(n);
  text += ", box";
  for (const uint32_t n : box) text += ' ' + std::to_string(n);
  throw DeviceError(text);
}

}  // namespace mla::cuda
