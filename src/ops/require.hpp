// Shape checks shared by the ops' contracts: each throws a one-line ShapeError that gives both numbers and their names.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "mla/dtype.hpp"
#include "mla/error.hpp"

namespace mla::ops {

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
