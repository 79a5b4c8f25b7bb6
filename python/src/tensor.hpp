// Arrays of other frameworks as views of libmla: DLPack and the buffer protocol, no copies.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "mla/device.hpp"
#include "mla/dtype.hpp"
#include "mla/error.hpp"
#include "mla/view.hpp"
#include "ops/require.hpp"

namespace mla::python {

namespace nb = nanobind;

enum class Element : uint8_t { f32, bf16, f16, fp8_e4m3, byte, i32, i64, other };

enum class Access : uint8_t { read, write };
/// How long an array is used: what outlives the call holds the memory itself, whatever becomes of the array.
enum class Use : uint8_t { call, kept };

/// An array of the caller's, held while this lives. NumPy (with ml_dtypes' bfloat16 and float8_e4m3fn) and anything
/// with DLPack; device memory stays where it is. ShapeError naming `name` for what is no array or lies in memory that
/// no op takes, and where it is to be written, for a read-only one.
class Tensor {
 public:
  Tensor(nb::handle array, std::string_view name, Access access, Use use = Use::call);

  const std::string& name() const { return name_; }
  Element element() const { return element_; }
  /// "f32", "int64"
  std::string element_text() const;
  Device device() const { return device_; }
  std::byte* data() const { return data_; }
  size_t rank() const { return rank_; }
  int64_t extent(size_t i) const { return shape_[i]; }
  int64_t stride(size_t i) const { return strides_[i]; }  ///< in elements
  int64_t element_bytes() const { return bytes_; }
  /// "[4, 16, 576]"
  std::string shape_text() const;

  /// ShapeError unless the array has as many dimensions as `dims` names, for instance "[tokens, hidden]".
  void require_rank(size_t rank, std::string_view dims) const;
  /// ShapeError unless it lies on the device.
  void require_device(Device device) const;
  /// f32, bf16, f16 or fp8; ShapeError for other elements.
  Dtype dtype() const;

  template <class... Dims>
  AnyView<Dims...> view() const {
    const auto [extents, strides] = shape<Dims...>();
    return {dtype(), data_, extents, strides};
  }
  template <class... Dims>
  AnyMutableView<Dims...> mutable_view() const {
    const auto [extents, strides] = shape<Dims...>();
    return {dtype(), data_, extents, strides};
  }
  /// int32 elements.
  template <class... Dims>
  View<const int32_t, Dims...> int32_view() const {
    require_int32();
    const auto [extents, strides] = shape<Dims...>();
    return {reinterpret_cast<const int32_t*>(data_), extents, strides};
  }
  /// A copy, row by row, of int32 elements in host memory, or of int64 ones that int32 holds.
  std::vector<int32_t> int32_values() const;
  void require_int32() const;

 private:
  template <class... Dims>
  std::pair<std::array<int64_t, sizeof...(Dims)>, std::array<int64_t, sizeof...(Dims)>> shape() const {
    constexpr size_t rank = sizeof...(Dims);
    std::string dims;
    for (std::string_view d : {Dims::name...}) dims += (dims.empty() ? "[" : ", ") + std::string(d);
    require_rank(rank, dims + "]");
    std::array<int64_t, rank> extents, strides;
    std::copy_n(shape_.begin(), rank, extents.begin());
    std::copy_n(strides_.begin(), rank, strides.begin());
    return {extents, strides};
  }

  void read(const nb::dlpack::dltensor& t, const Element* element);

  // The array, one way or the other.
  nb::ndarray<nb::ro> held_;
  nb::object owner_;
  std::string name_;
  Element element_ = Element::f32;
  nb::dlpack::dtype type_{};
  Device device_;
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
  static constexpr size_t kMostDimensions = 8;
  std::array<int64_t, kMostDimensions> shape_{}, strides_{};
  size_t rank_ = 0;
};

/// "cpu", "cuda" or "cuda:1"; InputError for anything else.
Device parse_device(std::string_view name);

}  // namespace mla::python
