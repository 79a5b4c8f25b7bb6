// Shape checks shared by the ops' contracts: each throws a one-line ShapeError that gives both numbers and their names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "mla/cache.hpp"
#include "mla/dtype.hpp"
#include "mla/error.hpp"
#include "mla/index_cache.hpp"
#include "mla/view.hpp"

namespace mla::ops {

namespace detail {

struct Extents {
  const void* data;
  size_t element;  ///< bytes
  const int64_t *extents, *strides;
  const std::string_view* names;
  size_t rank;
};
[[noreturn]] void refuse_view(std::string_view op, std::string_view name, const Extents& view);

inline void require_view(std::string_view op, std::string_view name, const Extents& v) {
  constexpr int64_t kMost = int64_t{1} << 59;
  int64_t size = 1;
  bool good = true, empty = false;
  for (size_t i = 0; i < v.rank; ++i) {
    const int64_t e = v.extents[i];
    good = good && e >= 0 && !__builtin_mul_overflow(size, e > 0 ? e : 1, &size) && size <= kMost;
    empty = empty || e == 0;
  }
  if (!good || (!empty && (!v.data || reinterpret_cast<uintptr_t>(v.data) % v.element != 0))) refuse_view(op, name, v);
}

}  // namespace detail

/// "norm: x has no data"; also an extent below 0, more elements than 2^59, an address that is no element's. Views
/// without elements may be of nothing.
template <class T, class... Dims>
void require_view(std::string_view op, std::string_view name, const View<T, Dims...>& v) {
  constexpr std::string_view kNames[] = {Dims::name...};
  detail::require_view(op, name,
                       {v.data(), alignof(T), v.extents().data(), v.strides().data(), kNames, sizeof...(Dims)});
}
template <class Void, class... Dims>
void require_view(std::string_view op, std::string_view name, const mla::detail::ErasedView<Void, Dims...>& v) {
  constexpr std::string_view kNames[] = {Dims::name...};
  detail::require_view(op, name,
                       {v.data(), size_of(v.dtype()), v.extents().data(), v.strides().data(), kNames, sizeof...(Dims)});
}

/// Some extent is 0. Unlike size(), of any extents.
template <class V>
bool is_empty(const V& v) {
  for (int64_t e : v.extents())
    if (e == 0) return true;
  return false;
}

/// "layer: q has 2 rows, the plan has 3 tokens"
inline void require_rows(std::string_view op, std::string_view name, int64_t rows, int64_t tokens) {
  if (rows < tokens)
    throw ShapeError(std::string(op) + ": " + std::string(name) + " has " + std::to_string(rows) +
                     " rows, the plan has " + std::to_string(tokens) + " tokens");
}

/// A cache's memory: "append: cache page_stride is 100, a page takes 576 bytes"; also no data, an address or a stride
/// that is not a multiple of the format's elements.
void require_pages(std::string_view op, std::string_view name, const CacheView& cache);
void require_pages(std::string_view op, std::string_view name, const IndexCacheView& cache);

/// "norm: y Token is 3, x Token is 4"
template <class D, class A, class B>
void require_same(std::string_view op, std::string_view a_name, const A& a, std::string_view b_name, const B& b) {
  if (a.template extent<D>() != b.template extent<D>())
    throw ShapeError(std::string(op) + ": " + std::string(a_name) + " " + std::string(D::name) + " is " +
                     std::to_string(a.template extent<D>()) + ", " + std::string(b_name) + " " + std::string(D::name) +
                     " is " + std::to_string(b.template extent<D>()));
}

/// "append: kv_c Latent is 40, cache Latent is 512"
inline void require_equal(std::string_view op, std::string_view what, int64_t found, std::string_view other,
                          int64_t needed) {
  if (found != needed)
    throw ShapeError(std::string(op) + ": " + std::string(what) + " is " + std::to_string(found) + ", " +
                     std::string(other) + " is " + std::to_string(needed));
}

/// "gather: piece 3 row is 70, limit 64"; holds when lo <= found < hi.
inline void require_range(std::string_view op, std::string_view what, int64_t found, int64_t lo, int64_t hi) {
  if (found < lo || found >= hi)
    throw ShapeError(std::string(op) + ": " + std::string(what) + " is " + std::to_string(found) + ", allowed " +
                     std::to_string(lo) + " to " + std::to_string(hi - 1));
}

/// "norm: eps is -1, a finite number from 0 on is needed"
void require_eps(std::string_view op, double eps);

/// "rope: q Rope has stride 2, 1 is needed"
template <class D, class A>
void require_dense(std::string_view op, std::string_view name, const A& a) {
  if (a.template extent<D>() > 1 && a.template stride<D>() != 1)
    throw ShapeError(std::string(op) + ": " + std::string(name) + " " + std::string(D::name) + " has stride " +
                     std::to_string(a.template stride<D>()) + ", 1 is needed");
}

inline void require_dtype(std::string_view op, std::string_view name, Dtype found,
                          std::initializer_list<Dtype> allowed) {
  std::string list;
  for (Dtype t : allowed) {
    if (t == found) return;
    list += ' ';
    list += to_string(t);
  }
  throw ShapeError(std::string(op) + ": " + std::string(name) + " is " + std::string(to_string(found)) +
                   ", allowed:" + list);
}

}  // namespace mla::ops
