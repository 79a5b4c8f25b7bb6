// Memory-bound: a thread moves sixteen bytes of the wider side where both lie at multiples of it.
#include <algorithm>
#include <string>

#include "backend/cuda/backend.hpp"
#include "backend/cuda/core/convert.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/queue.hpp"
#include "backend/cuda/generic/cast/cast.hpp"

namespace mla::cuda {
namespace generic {
namespace {

constexpr int kThreads = 256;

// Element groups of `n`, numbered through row, head and group.
template <class X, class Y, int n>
__global__ void copy_kernel(const X* x, Y* y, int64_t rows, int64_t heads, int64_t groups, int64_t x_row,
                            int64_t x_head, int64_t y_row, int64_t y_head, const int32_t* x_rows, const int32_t* y_rows,
                            float scale) {
  const int64_t count = rows * heads * groups, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    const int64_t g = i % groups, h = i / groups % heads, t = i / groups / heads;
    const int64_t from = x_rows ? x_rows[t] : t, to = y_rows ? y_rows[t] : t;
    const auto in = *reinterpret_cast<const Pack<X, n>*>(x + from * x_row + h * x_head + g * n);
    Pack<Y, n> out;
#pragma unroll
    for (int e = 0; e < n; ++e) out.at[e] = from_float<Y>(scale == 1.0f ? widen(in.at[e]) : widen(in.at[e]) / scale);
    *reinterpret_cast<Pack<Y, n>*>(y + to * y_row + h * y_head + g * n) = out;
  }
}

template <class X, class Y>
void run(const Queue& queue, const CopyRows& c, std::string_view op) {
  constexpr int n = 16 / std::max(sizeof(X), sizeof(Y));
  const int64_t heads = c.x.extent<Head>(), width = c.x.extent<In>();
  const auto fits = [](const auto& v, size_t size, int64_t elements) {
    return reinterpret_cast<uintptr_t>(v.data()) % (size * static_cast<size_t>(elements)) == 0 &&
           v.template stride<Token>() % elements == 0 && v.template stride<Head>() % elements == 0;
  };
  const bool wide = width % n == 0 && fits(c.x, sizeof(X), n) && fits(c.y, sizeof(Y), n);
  const int64_t groups = wide ? width / n : width, count = c.rows * heads * groups;
  if (count == 0) return;
  const std::string shape =
      "rows " + std::to_string(c.rows) + ", heads " + std::to_string(heads) + ", width " + std::to_string(width);
  launch(wide ? copy_kernel<X, Y, n> : copy_kernel<X, Y, 1>,
         strided(count, kThreads, int64_t{queue.multiprocessors()} * 32), queue.stream(), op, "copy of rows", shape,
         static_cast<const X*>(c.x.data()), static_cast<Y*>(c.y.data()), c.rows, heads, groups, c.x.stride<Token>(),
         c.x.stride<Head>(), c.y.stride<Token>(), c.y.stride<Head>(), c.x_rows, c.y_rows, c.scale);
}

template <class X>
void to_any(const Queue& queue, const CopyRows& c, std::string_view op) {
  switch (c.y.dtype()) {
    case Dtype::f32: return run<X, float>(queue, c, op);
    case Dtype::bf16: return run<X, bf16>(queue, c, op);
    case Dtype::f16: return run<X, f16>(queue, c, op);
    case Dtype::fp8_e4m3: return run<X, fp8_e4m3>(queue, c, op);
  }
}

}  // namespace

void copy_rows(const Queue& queue, const CopyRows& c, std::string_view op) {
  if (c.x.dtype() == Dtype::f32) to_any<float>(queue, c, op);
  else to_any<bf16>(queue, c, op);
}

}  // namespace generic

void cast(Stream& stream, const ops::CastArgs& a) {
  const Queue& queue = stream.queue();
  generic::copy_rows(queue,
                     {.x = a.x,
                      .y = a.y,
                      .x_rows = queue.staged(a.x_rows, "cast", "x_rows"),
                      .y_rows = nullptr,
                      .rows = a.y.extent<Token>(),
                      .scale = a.scale},
                     "cast");
}

}  // namespace mla::cuda
