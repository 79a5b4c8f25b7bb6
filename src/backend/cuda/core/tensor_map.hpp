// Tensor maps: what the copy engine needs to know of a tensor in device memory.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <span>
#include <string_view>

namespace mla::cuda {

enum class MapType : uint8_t { bf16, f16, f32, u8 };
enum class Swizzle : uint8_t { none = 0, b32 = 32, b64 = 64, b128 = 128 };

/// A map of the tensor at base. extents and box: elements, innermost first, 1 to 5 of them; byte_strides: of the
/// dimensions after the innermost (one fewer). Boxes reach past the edge read zeros. base must be 16-byte aligned,
/// strides multiples of 16, box extents 1 to 256, the innermost box within the swizzle's bytes. Pass the result as a
/// const __grid_constant__ kernel parameter. Resolves the driver's entry point through the runtime: nothing to link.
/// DeviceError names op and the offending tensor.
CUtensorMap tensor_map(std::string_view op, std::string_view name, MapType type, const void* base,
                       std::span<const uint64_t> extents, std::span<const uint64_t> byte_strides,
                       std::span<const uint32_t> box, Swizzle swizzle);

}  // namespace mla::cuda
