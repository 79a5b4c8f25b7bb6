// An operand with room around it: rows lie apart, spare rows follow, and everything outside the view is NaN that must
// neither reach an output nor change.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "cases/compare.hpp"
#include "mla/view.hpp"

namespace mla::cases {

template <class... Dims>
class Padded {
 public:
  static constexpr size_t rank = sizeof...(Dims);
  using Extents = std::array<int64_t, rank>;

  Padded() = default;
  /// gap: elements between rows. 3 leaves rows at any address, kAligned rows of multiples of 8 at multiples of 16
  /// bytes.
  static constexpr int64_t kAligned = 8;
  Padded(Dtype dtype, const Extents& extents, int64_t gap = 3) : dtype_(dtype), extents_(extents) {
    constexpr int64_t kSpareRows = 2;
    int64_t step = 1;
    for (size_t i = rank; i-- > 0;) {
      strides_[i] = step;
      step *= extents[i] + (i == 0 ? kSpareRows : i + 1 == rank ? gap : 0);
    }
    bytes_.assign(static_cast<size_t>(step) * size_of(dtype), kPoison);
  }

  AnyMutableView<Dims...> any() { return {dtype_, bytes_.data(), extents_, strides_}; }
  template <class T = float>
  View<T, Dims...> view() {
    return any().template as<T>();
  }

  void fill_normal(Random& random, float stddev = 1.0f) {
    for_each([&](int64_t offset) { store_float(dtype_, bytes_.data(), offset, stddev * random.normal()); });
  }
  /// The view's elements in order.
  std::vector<float> values() const {
    std::vector<float> v;
    for_each([&](int64_t offset) { v.push_back(load_float(dtype_, bytes_.data(), offset)); });
    return v;
  }
  /// Nothing outside the view was written.
  bool intact() const {
    std::vector<std::byte> outside = bytes_;
    const size_t n = size_of(dtype_);
    for_each([&](int64_t offset) { std::fill_n(outside.begin() + offset * static_cast<int64_t>(n), n, kPoison); });
    return std::all_of(outside.begin(), outside.end(), [](std::byte b) { return b == kPoison; });
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }
  /// Back to an earlier bytes(), without allocating.
  void restore(const std::vector<std::byte>& bytes) { std::copy(bytes.begin(), bytes.end(), bytes_.begin()); }

 private:
  static constexpr std::byte kPoison{0xff};  // all ones is NaN in every dtype

  template <class F>
  void for_each(F&& f) const {
    Extents at{};
    if (std::any_of(extents_.begin(), extents_.end(), [](int64_t e) { return e == 0; })) return;
    for (;;) {
      int64_t offset = 0;
      for (size_t i = 0; i < rank; ++i) offset += at[i] * strides_[i];
      f(offset);
      size_t d = rank;
      while (d-- > 0 && ++at[d] == extents_[d]) at[d] = 0;
      if (d == static_cast<size_t>(-1)) return;
    }
  }

  Dtype dtype_ = Dtype::f32;
  Extents extents_{}, strides_{};
  std::vector<std::byte> bytes_;
};

/// The gap of a case's operands: both kinds occur in a sweep.
inline int64_t gap_of(const Params& p) { return p.seed / 2 % 2 == 0 ? Padded<Token>::kAligned : 3; }

/// A dense float64 result of a view's shape.
template <class... Dims>
struct Exact {
  explicit Exact(const std::array<int64_t, sizeof...(Dims)>& shape) : extents(shape) {
    values.resize(static_cast<size_t>(view().size()));
  }
  View<double, Dims...> view() { return {values.data(), extents}; }
  std::array<int64_t, sizeof...(Dims)> extents;
  std::vector<double> values;
};

/// The verdict, turned to a failure when something around an output was written.
inline Verdict unless_touched(Verdict v, bool intact, const char* what) {
  if (intact) return v;
  v.ok = false;
  v.detail = std::string(what) + ": memory outside the view was written";
  return v;
}

}  // namespace mla::cases
