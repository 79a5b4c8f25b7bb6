// expand by a backend's project and cast: as many rows at a time as there is room for their products.
#pragma once

#include <algorithm>

#include "mla/device.hpp"
#include "ops/cast/op.hpp"
#include "ops/expand/op.hpp"
#include "ops/project/op.hpp"

namespace mla::backend {

template <auto project, auto cast>
void expand_by_products(Stream& stream, const ops::ExpandArgs& a) {
  const int64_t rows = ops::rows_of(a), heads = a.keys.extent<Head>(), nope = a.keys.extent<Nope>(),
                value = a.values.extent<Value>(), in = a.x.extent<Latent>(), out = a.weights->out,
                most = a.products.extent<Token>();
  const Dtype dtype = a.products.dtype();
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t count = std::min(most, rows - first);
    const bool listed = !a.x_rows.empty();
    const AnyView<Token, Latent> x = listed ? a.x : a.x.slice<Token>(first, count);
    project(stream, {.x = {x.dtype(), x.data(), {x.extent<Token>(), 1, in}, {x.stride<Token>(), 0, 1}},
                     .x_rows = listed ? a.x_rows.subspan(static_cast<size_t>(first), static_cast<size_t>(count))
                                      : ops::List<int32_t>(),
                     .weights = a.weights,
                     .y = {dtype, a.products.data(), {count, 1, out}},
                     .rows = count,
                     .batch_invariant = a.batch_invariant,
                     .activations = a.activations,
                     .scratch = a.scratch});
    const auto encode = [&](int64_t begin, int64_t width, const auto& codes, const View<const float, Head>& scales) {
      if (width == 0) return;
      cast(stream, {.x = {dtype, a.products.at(0, begin), {count, heads, width}, {out, nope + value, 1}},
                    .y = {codes.dtype(), codes.at(first, 0, 0), {count, heads, width}, codes.strides()},
                    .scales = scales});
    };
    encode(0, nope, a.keys, a.key_scales);
    encode(nope, value, a.values, a.value_scales);
  }
}

}  // namespace mla::backend
