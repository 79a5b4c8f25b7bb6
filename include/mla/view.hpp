// Views: a pointer, extents and strides, with the dimensions named in the type.
//
//   View<const bf16, Token, Head, Latent> q;      // element type fixed at compile time
//   AnyView<Token, Head, Latent> q;               // element type a run-time Dtype, read-only
//   AnyMutableView<Token, Head, Value> out;       // the same, writable
//
// Views own nothing. Strides count elements. The last dimension may be strided too; kernels that need it dense say so.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "mla/dim.hpp"
#include "mla/dtype.hpp"
#include "mla/error.hpp"

namespace mla {

namespace detail {

template <class D, class... Dims>
constexpr size_t index_of() {
  static_assert((std::is_same_v<D, Dims> || ...), "this view has no such dimension");
  size_t i = 0;
  (void)((std::is_same_v<D, Dims> ? true : (++i, false)) || ...);
  return i;
}

template <size_t Rank>
constexpr std::array<int64_t, Rank> dense_strides(const std::array<int64_t, Rank>& extents) {
  std::array<int64_t, Rank> strides{};
  int64_t step = 1;
  for (size_t i = Rank; i-- > 0;) {
    strides[i] = step;
    // Of impossible extents, which whoever takes the view refuses, it wraps around.
    step = static_cast<int64_t>(static_cast<uint64_t>(step) * static_cast<uint64_t>(extents[i]));
  }
  return strides;
}

/// Extents and strides of named dimensions: what every kind of view shares.
template <class... Dims>
class Shape {
 public:
  static constexpr size_t rank = sizeof...(Dims);
  using Extents = std::array<int64_t, rank>;

  constexpr Shape() = default;
  constexpr explicit Shape(const Extents& extents) : Shape(extents, dense_strides(extents)) {}
  constexpr Shape(const Extents& extents, const Extents& strides) : extents_(extents), strides_(strides) {}

  template <class D>
  constexpr int64_t extent() const {
    return extents_[index_of<D, Dims...>()];
  }
  template <class D>
  constexpr int64_t stride() const {
    return strides_[index_of<D, Dims...>()];
  }
  constexpr const Extents& extents() const { return extents_; }
  constexpr const Extents& strides() const { return strides_; }
  constexpr int64_t size() const {
    int64_t n = 1;
    for (int64_t e : extents_) n *= e;
    return n;
  }
  constexpr bool dense() const { return size() == 0 || strides_ == dense_strides(extents_); }

  template <class... I>
  constexpr int64_t offset(I... index) const {
    static_assert(sizeof...(I) == rank, "one index per dimension");
    const Extents at{static_cast<int64_t>(index)...};
    int64_t sum = 0;
    for (size_t i = 0; i < rank; ++i) sum += at[i] * strides_[i];
    return sum;
  }

 protected:
  template <class D>
  constexpr Shape narrowed(int64_t begin, int64_t count) const {
    constexpr size_t i = index_of<D, Dims...>();
    if (begin < 0 || count < 0 || begin + count > extents_[i])
      throw ShapeError("slice of " + std::string(D::name) + " [" + std::to_string(begin) + ", " +
                       std::to_string(begin + count) + ") leaves its extent " + std::to_string(extents_[i]));
    Shape s = *this;
    s.extents_[i] = count;
    return s;
  }

  Extents extents_{};
  Extents strides_{};
};

}  // namespace detail

template <class T, class... Dims>
class View : public detail::Shape<Dims...> {
  using Base = detail::Shape<Dims...>;

 public:
  using typename Base::Extents;
  constexpr View() = default;
  constexpr View(T* data, const Extents& extents) : Base(extents), data_(data) {}
  constexpr View(T* data, const Extents& extents, const Extents& strides) : Base(extents, strides), data_(data) {}
  constexpr View(T* data, const Base& shape) : Base(shape), data_(data) {}
  /// A writable view reads as a read-only one.
  template <class U>
  requires(std::is_same_v<const U, T> && !std::is_const_v<U>) constexpr View(const View<U, Dims...>& other)
      : Base(other), data_(other.data()) {}

  constexpr T* data() const { return data_; }
  constexpr explicit operator bool() const { return data_ != nullptr; }
  template <class... I>
  constexpr T& operator()(I... index) const {
    return data_[this->offset(index...)];
  }
  template <class D>
  constexpr View slice(int64_t begin, int64_t count) const {
    return View(data_ + begin * this->template stride<D>(), this->template narrowed<D>(begin, count));
  }

 private:
  T* data_ = nullptr;
};

namespace detail {

/// Run-time element type; Void is `void` or `const void`.
template <class Void, class... Dims>
class ErasedView : public Shape<Dims...> {
  using Base = Shape<Dims...>;
  template <class T>
  using Element = std::conditional_t<std::is_const_v<Void>, const T, T>;
  using Byte = Element<std::byte>;

 public:
  using typename Base::Extents;
  constexpr ErasedView() = default;
  constexpr ErasedView(Dtype dtype, Void* data, const Extents& extents) : Base(extents), data_(data), dtype_(dtype) {}
  constexpr ErasedView(Dtype dtype, Void* data, const Extents& extents, const Extents& strides)
      : Base(extents, strides), data_(data), dtype_(dtype) {}
  constexpr ErasedView(Dtype dtype, Void* data, const Base& shape) : Base(shape), data_(data), dtype_(dtype) {}
  template <class T>
  requires(std::is_const_v<Void> || !std::is_const_v<T>) constexpr ErasedView(T* data, const Extents& extents)
      : ErasedView(View<T, Dims...>(data, extents)) {}
  template <class T>
  requires(std::is_const_v<Void> || !std::is_const_v<T>) constexpr ErasedView(T* data, const Extents& extents,
                                                                              const Extents& strides)
      : ErasedView(View<T, Dims...>(data, extents, strides)) {}
  template <class T>
  requires(std::is_const_v<Void> || !std::is_const_v<T>) constexpr ErasedView(const View<T, Dims...>& v)
      : Base(v), data_(v.data()), dtype_(dtype_of<std::remove_const_t<T>>::value) {}
  template <class V>
  requires(std::is_const_v<Void>&& std::is_same_v<V, void>) constexpr ErasedView(const ErasedView<V, Dims...>& v)
      : Base(v), data_(v.data()), dtype_(v.dtype()) {}

  constexpr Void* data() const { return data_; }
  constexpr Dtype dtype() const { return dtype_; }
  constexpr explicit operator bool() const { return data_ != nullptr; }

  /// The same view with its element type fixed; ShapeError when the dtype is another.
  template <class T>
  View<Element<T>, Dims...> as() const {
    if (dtype_ != dtype_of<T>::value)
      throw ShapeError("view holds " + std::string(to_string(dtype_)) + ", read as " +
                       std::string(to_string(dtype_of<T>::value)));
    return {static_cast<Element<T>*>(data_), static_cast<const Base&>(*this)};
  }
  /// Element as f32, whatever the dtype.
  template <class... I>
  float operator()(I... index) const {
    return load_float(dtype_, data_, this->offset(index...));
  }
  /// Address of an element.
  template <class... I>
  Void* at(I... index) const {
    return static_cast<Byte*>(data_) + this->offset(index...) * static_cast<int64_t>(size_of(dtype_));
  }
  template <class D>
  ErasedView slice(int64_t begin, int64_t count) const {
    return ErasedView(
        dtype_, static_cast<Byte*>(data_) + begin * this->template stride<D>() * static_cast<int64_t>(size_of(dtype_)),
        this->template narrowed<D>(begin, count));
  }

 private:
  Void* data_ = nullptr;
  Dtype dtype_ = Dtype::f32;
};

}  // namespace detail

template <class... Dims>
using AnyView = detail::ErasedView<const void, Dims...>;
template <class... Dims>
using AnyMutableView = detail::ErasedView<void, Dims...>;

}  // namespace mla
