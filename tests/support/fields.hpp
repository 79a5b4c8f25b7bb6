// The fields of an aggregate, one after another: for checks that no field may escape.
#pragma once

#include <cstddef>
#include <utility>

namespace mla::test {

struct AnyField {
  size_t index;
  template <class T>
  constexpr operator T() const;  // NOLINT: what an aggregate is tried with, never called
};

template <class T, size_t... I>
constexpr bool takes(std::index_sequence<I...>) {
  return requires { T{AnyField{I}...}; };
}
template <class T, size_t N = 13>
constexpr size_t fields() {
  if constexpr (takes<T>(std::make_index_sequence<N>())) return N;
  else return fields<T, N - 1>();
}

/// visit(field) of each of at most thirteen.
template <class T, class F>
void each_field(const T& s, F&& visit) {
  const auto all = [&](const auto&... f) { (visit(f), ...); };
  constexpr size_t n = fields<T>();
  if constexpr (n == 13) {
    const auto& [a, b, c, d, e, f, g, h, i, j, k, l, m] = s;
    all(a, b, c, d, e, f, g, h, i, j, k, l, m);
  } else if constexpr (n == 12) {
    const auto& [a, b, c, d, e, f, g, h, i, j, k, l] = s;
    all(a, b, c, d, e, f, g, h, i, j, k, l);
  } else if constexpr (n == 11) {
    const auto& [a, b, c, d, e, f, g, h, i, j, k] = s;
    all(a, b, c, d, e, f, g, h, i, j, k);
  } else if constexpr (n == 10) {
    const auto& [a, b, c, d, e, f, g, h, i, j] = s;
    all(a, b, c, d, e, f, g, h, i, j);
  } else if constexpr (n == 9) {
    const auto& [a, b, c, d, e, f, g, h, i] = s;
    all(a, b, c, d, e, f, g, h, i);
  } else if constexpr (n == 8) {
    const auto& [a, b, c, d, e, f, g, h] = s;
    all(a, b, c, d, e, f, g, h);
  } else if constexpr (n == 7) {
    const auto& [a, b, c, d, e, f, g] = s;
    all(a, b, c, d, e, f, g);
  } else if constexpr (n == 6) {
    const auto& [a, b, c, d, e, f] = s;
    all(a, b, c, d, e, f);
  } else if constexpr (n == 5) {
    const auto& [a, b, c, d, e] = s;
    all(a, b, c, d, e);
  } else if constexpr (n == 4) {
    const auto& [a, b, c, d] = s;
    all(a, b, c, d);
  } else if constexpr (n == 3) {
    const auto& [a, b, c] = s;
    all(a, b, c);
  } else if constexpr (n == 2) {
    const auto& [a, b] = s;
    all(a, b);
  } else if constexpr (n == 1) {
    const auto& [a] = s;
    all(a);
  }
}

}  // namespace mla::test
