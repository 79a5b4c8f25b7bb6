// DLPack tensors as views: dtype, device, shape, strides and address are checked on the way.
#pragma once

#include <array>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "capi/boundary.hpp"
#include "mla/c/dlpack.h"
#include "mla/device.hpp"
#include "mla/view.hpp"

namespace mla::capi {

/// Elements that tensors may have here: those of Dtype, and those of index tensors and raw bytes.
enum class Element : uint8_t { f32, bf16, f16, fp8_e4m3, i32, u8 };
std::string_view to_string(Element e);
constexpr Element element_of(Dtype t) { return static_cast<Element>(t); }

/// UnsupportedError for a device type other than CPU and CUDA, InputError for an index below 0.
Device read_device(DLDevice device);
DLDevice write_device(Device device);

constexpr size_t kMostDims = 4;
struct Checked {
  Element element = Element::f32;
  void* data = nullptr;
  std::array<int64_t, kMostDims> extents{}, strides{};
};

/// Tensors of one call, on one device.
class Tensors {
 public:
  explicit Tensors(Device device) : device_(device) {}

  template <class... D>
  AnyView<D...> read(const char* name, const DLTensor* t, std::initializer_list<Dtype> allowed) const {
    return erased<AnyView<D...>, D...>(check_dtypes(name, t, allowed, {D::name...}, false));
  }
  template <class... D>
  AnyMutableView<D...> write(const char* name, const DLTensor* t, std::initializer_list<Dtype> allowed) const {
    return erased<AnyMutableView<D...>, D...>(check_dtypes(name, t, allowed, {D::name...}, true));
  }
  template <class T, class... D>
  View<const T, D...> read_as(const char* name, const DLTensor* t) const {
    return typed<const T, D...>(check(name, t, {element<T>()}, {D::name...}, false));
  }
  template <class T, class... D>
  View<T, D...> write_as(const char* name, const DLTensor* t) const {
    return typed<T, D...>(check(name, t, {element<T>()}, {D::name...}, true));
  }
  /// A dense vector.
  template <class T, class D>
  std::span<T> list(const char* name, const DLTensor* t, bool writable = false) const {
    const Checked c = check(name, t, {element<std::remove_const_t<T>>()}, {D::name}, writable);
    require_dense(name, D::name, c.extents[0], c.strides[0]);
    return {static_cast<T*>(c.data), static_cast<size_t>(c.extents[0])};
  }

  // The same of optional tensors: an empty view for NULL.
  template <class... D>
  AnyMutableView<D...> write_optional(const char* name, const DLTensor* t, std::initializer_list<Dtype> allowed) const {
    return t ? write<D...>(name, t, allowed) : AnyMutableView<D...>();
  }
  template <class T, class... D>
  View<const T, D...> read_optional_as(const char* name, const DLTensor* t) const {
    return t ? read_as<T, D...>(name, t) : View<const T, D...>();
  }
  template <class T, class... D>
  View<T, D...> write_optional_as(const char* name, const DLTensor* t) const {
    return t ? write_as<T, D...>(name, t) : View<T, D...>();
  }

  Checked check(const char* name, const DLTensor* t, std::initializer_list<Element> allowed,
                std::initializer_list<std::string_view> dims, bool writable) const;

 private:
  template <class T>
  static constexpr Element element() {
    if constexpr (std::is_same_v<T, int32_t>) return Element::i32;
    else if constexpr (std::is_same_v<T, uint8_t>) return Element::u8;
    else return element_of(dtype_of<T>::value);
  }
  Checked check_dtypes(const char* name, const DLTensor* t, std::initializer_list<Dtype> allowed,
                       std::initializer_list<std::string_view> dims, bool writable) const;
  static void require_dense(const char* name, std::string_view dim, int64_t extent, int64_t stride);

  template <class V, class... D>
  static V erased(const Checked& c) {
    return {static_cast<Dtype>(c.element), c.data, extents<V>(c.extents), extents<V>(c.strides)};
  }
  template <class T, class... D>
  static View<T, D...> typed(const Checked& c) {
    using V = View<T, D...>;
    return {static_cast<T*>(c.data), extents<V>(c.extents), extents<V>(c.strides)};
  }
  template <class V>
  static typename V::Extents extents(const std::array<int64_t, kMostDims>& from) {
    typename V::Extents out{};
    for (size_t i = 0; i < out.size(); ++i) out[i] = from[i];
    return out;
  }

  Device device_;
};

/// A list of the caller's host memory.
template <class T>
std::span<const T> read_list(const char* name, const T* data, int64_t count) {
  constexpr int64_t kMost = int64_t{1} << 40;
  if (count < 0 || count > kMost)
    throw ShapeError(std::string(name) + "_count is " + std::to_string(count) + ", allowed 0 to " +
                     std::to_string(kMost));
  if (count > 0) required(name, data);
  return {count > 0 ? data : nullptr, static_cast<size_t>(count)};
}

/// Where tokens' rows go: rows are written in no order, so that two of them with one slot are refused.
std::span<const int32_t> read_slots(const int32_t* slots, int64_t count);

}  // namespace mla::capi
