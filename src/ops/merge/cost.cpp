#include "ops/merge/op.hpp"

namespace mla::ops {

Cost cost(const MergeArgs& a) {
  const double n = static_cast<double>(a.other.size());
  return {.bytes = 12 * n, .flops = 3 * n};
}

Cost cost(const MergeSplitsArgs& a) {
  const double row = static_cast<double>(a.out.extent<Head>() * a.out.extent<Value>());
  Cost c;
  for (const SplitRows& s : a.items) {
    const double rows = row * s.rows;
    c += {.bytes = rows * (4 * s.splits + static_cast<double>(size_of(a.out.dtype()))), .flops = 2 * rows * s.splits};
  }
  return c;
}

}  // namespace mla::ops
