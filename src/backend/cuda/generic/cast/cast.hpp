// Copies of rows with another element type: the op cast, and what project stages its operands with.
#pragma once

#include <cstdint>
#include <string_view>

#include "mla/view.hpp"

namespace mla::cuda {
class Queue;
}  // namespace mla::cuda

namespace mla::cuda::generic {

struct CopyRows {
  AnyView<Token, Head, In> x;         ///< In dense
  AnyMutableView<Token, Head, In> y;  ///< In or Token dense; any dtype
  const int32_t* x_rows = nullptr;    ///< device; null: row t
  const int32_t* y_rows = nullptr;    ///< device; null: row t; below 0: nowhere
  int64_t rows = 0;
  float scale = 1.0f;             ///< y = x / scale
  const float* scales = nullptr;  ///< device; not null: one a head, `scales_head` apart, in place of scale
  int64_t scales_head = 0;
  bool through_e4m3 = false;  ///< as ops::CastArgs has it
};
/// One launch.
void copy_rows(const Queue& queue, const CopyRows& c, std::string_view op);

}  // namespace mla::cuda::generic
