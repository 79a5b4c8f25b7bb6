// What an op must at least do: the denominators of every "percent of roof".
#pragma once

namespace mla::ops {

struct Cost {
  double bytes = 0;  ///< memory that must move, each datum once
  double flops = 0;  ///< multiply and add count as two
  Cost& operator+=(const Cost& o) {
    bytes += o.bytes;
    flops += o.flops;
    return *this;
  }
};

}  // namespace mla::ops
