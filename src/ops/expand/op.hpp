// expand: latent rows become keys and values of each head as e4m3 codes, what a prefill by codes attends to:
// y = e4m3(x W^T / scale), saturating, each head's keys by one scale and its values by another.
//
// Operands are project's: f32 weights take x in f32, bf16 weights take x rounded to bf16, and quantised weights their
// values. Sums are f32, rounded to the dtype of `products` before they are divided: what project and cast make, one
// after the other.
#pragma once

#include <span>

#include "mla/view.hpp"
#include "mla/weights.hpp"
#include "ops/cost.hpp"
#include "ops/list.hpp"
#include "ops/scratch.hpp"

namespace mla::ops {

struct ExpandArgs {
  AnyView<Token, Latent> x;                 ///< f32 or bf16, Latent dense
  List<int32_t> x_rows;                     ///< rows of x to read, in order; empty: row i for row i of the codes
  const Linear* weights = nullptr;          ///< one matrix; of each head Nope outputs, then Value
  AnyMutableView<Key, Head, Nope> keys;     ///< e4m3, Nope dense
  AnyMutableView<Key, Head, Value> values;  ///< e4m3, Value or Key dense; behind Key's last row, up to a multiple of
                                            ///< 16, 0 may be written
  View<const float, Head> key_scales, value_scales;  ///< above 0; without data: 1
  /// Room for products of some rows at a time, dense: f32, or bf16 of bf16 weights. What is in it afterwards is not
  /// said.
  AnyMutableView<Token, Out> products;
  bool batch_invariant = false;                  ///< a row's bits must not depend on the other rows
  Activations activations = Activations::plain;  ///< as project has them
  Scratch scratch;
};

inline int64_t rows_of(const ExpandArgs& a) { return a.keys.extent<Key>(); }
void check(const ExpandArgs& a);
bool writes_nothing(const ExpandArgs& a);
Cost cost(const ExpandArgs& a);
/// float64 of what the codes round, x W^T / scale, from the weights' values [out, latent] in f32.
void reference(const ExpandArgs& a, std::span<const float> weights, View<double, Key, Head, Nope> keys,
               View<double, Key, Head, Value> values);

}  // namespace mla::ops
