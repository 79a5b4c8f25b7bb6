// Query heads that share keys and values, by an op that has as many heads of either.
#pragma once

#include <cstdint>

#include "ops/attend_expanded/op.hpp"

namespace mla::ops {

namespace detail {

/// `count` heads of a view [.., Head, ..], each `step` after the one before.
template <class V>
V some_heads(const V& v, int64_t first, int64_t count, int64_t step) {
  const V from = v.template slice<Head>(first, 1);
  auto extents = from.extents(), strides = from.strides();
  extents[1] = count, strides[1] *= step;
  if constexpr (requires { v.dtype(); }) return {v.dtype(), from.data(), extents, strides};
  else return {from.data(), extents, strides};
}

}  // namespace detail

/// run(call) for calls that together are `a`, where k_nope and v have fewer heads than q: head h of q meets theirs of
/// number h / (q's heads / theirs). A call has one query head of every group or, where that makes fewer calls, one
/// group. Without scales and quantised outputs.
template <class Run>
void for_each_group(const AttendExpandedArgs& a, Run&& run) {
  const int64_t groups = a.k_nope.extent<Head>(), size = groups > 0 ? a.q.extent<Head>() / groups : 0;
  const bool across = size <= groups;
  const int64_t count = across ? groups : size, step = across ? size : 1;
  for (int64_t i = 0; i < (across ? size : groups); ++i) {
    const int64_t first = across ? i : i * size;
    AttendExpandedArgs part = a;
    part.q = detail::some_heads(a.q, first, count, step);
    part.out = detail::some_heads(a.out, first, count, step);
    part.lse = detail::some_heads(a.lse, first, count, step);
    if (!across) {
      part.k_nope = detail::some_heads(a.k_nope, i, count, 0);
      part.v = detail::some_heads(a.v, i, count, 0);
    }
    run(part);
  }
}

}  // namespace mla::ops
