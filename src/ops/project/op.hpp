// project: y = x W^T, one matrix or one per head. Serves the model's projections, the absorption of W_UK into the query
// (per head nope -> latent) and the projection of latent outputs by W_UV (per head latent -> value).
//
// Operands: f32 weights take x in f32; bf16 weights take x rounded to bf16 (nearest even). Quantised weights multiply
// as code times scale, rounded to the same dtype as x, or without that rounding, where codes are multiplied as they
// are. Sums are f32; y is stored in its dtype, or, given a quantised output, goes there from f32 while it is in cache:
// y is then not used.
//
// Activations fp8_128, for fp8 weights: x, as it is given, first becomes e4m3 codes in groups of 128 along In, bit for
// bit as quantize's fp8_128 (a head's groups are its own, the last may be short), but that an infinity makes its group
// NaN; its values, code times scale, are then multiplied as above.
#pragma once

#include <span>

#include "mla/quant.hpp"
#include "mla/view.hpp"
#include "mla/weights.hpp"
#include "ops/cost.hpp"
#include "ops/list.hpp"
#include "ops/scratch.hpp"

namespace mla::ops {

struct ProjectArgs {
  AnyView<Token, Head, In> x;  ///< f32 or bf16, In dense; Head = weights->heads
  List<int32_t> x_rows;        ///< rows of x to read, in order; empty: row i for y's row i
  const Linear* weights = nullptr;
  AnyMutableView<Token, Head, Out> y;            ///< f32 or bf16, Out dense
  List<int32_t> y_rows;                          ///< rows of y to write; below 0: nowhere; empty: 0, 1, ...
  int64_t rows = 0;                              ///< how many; with index lists: their length
  bool batch_invariant = false;                  ///< a row's bits must not depend on the other rows
  Activations activations = Activations::plain;  ///< fp8_128: of fp8 weights; UnsupportedError for others
  /// With a spec other than none: takes y's place, one head after another in its rows. UnsupportedError when its groups
  /// span heads. Its scales' padding is left to quantize_padding.
  QuantizedView quantized;
  Scratch scratch;
};

void check(const ProjectArgs& a);
Cost cost(const ProjectArgs& a);
/// float64 from the weights' values [heads, out, in] in f32: y[i, h, o] for i in [0, rows), of skipped rows too.
void reference(const ProjectArgs& a, std::span<const float> weights, View<double, Token, Head, Out> y);

}  // namespace mla::ops
