// Memory-bound: a warp has one group of 128 inputs, a lane four neighbours of it. The group's scale is found among the
// lanes, and codes leave in words of four.
#include <cfloat>
#include <string>

#include "backend/cuda/core/convert.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/overlap.cuh"
#include "backend/cuda/generic/project/activations.hpp"
#include "mla/error.hpp"

namespace mla::cuda::generic {
namespace {

constexpr int kN = 4, kGroup = 32 * kN;

struct Rows {
  const void* x = nullptr;
  int64_t x_row = 0, x_head = 0;
  const int32_t* list = nullptr;
  int64_t rows = 0, padded = 0;
  int32_t heads = 1, in = 0, groups = 0;
  void* to = nullptr;
  float* scales = nullptr;
};

// Y: e4m3 codes, or the dtype of the values that they stand for.
template <class X, class Y, bool wide>
__global__ void __launch_bounds__(kBlockThreads) activation_kernel(Rows a) {
  take_turn();
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * (kBlockThreads / 32) + threadIdx.x / 32,
                line = unit / a.groups;  // row and head
  const int64_t row = line / a.heads;
  if (row >= a.padded) return;
  const int head = static_cast<int>(line - row * a.heads), group = static_cast<int>(unit - line * a.groups);
  const int lane = static_cast<int>(threadIdx.x % 32), i = group * kGroup + kN * lane;
  const int here = row < a.rows ? min(kN, a.in - i) : 0, stored = min(kN, a.in - i);  // elements of this lane
  float x[kN] = {};
  if (here > 0) {
    const int64_t from = a.list ? a.list[row] : row;
    const X* const at = static_cast<const X*>(a.x) + from * a.x_row + head * a.x_head + i;
    if constexpr (wide) {
      X read[kN];
      load<true>(at, read);
      widen_all(read, x);
    } else {
#pragma unroll
      for (int e = 0; e < kN; ++e)
        if (e < here) x[e] = widen(at[e]);
    }
  }
  const float most = warp_max(largest_of(x));
  // An infinity makes its group NaN, as it makes a sum.
  const float scale = most > FLT_MAX ? __uint_as_float(0x7fc00000u) : group_scale(most);
  float quotients[kN];
  divide_all(x, scale, most, quotients);
  fp8_e4m3 codes[kN];
  narrow_all(quotients, codes);
  Y y[kN];
  if constexpr (std::is_same_v<Y, fp8_e4m3>) {
#pragma unroll
    for (int e = 0; e < kN; ++e) y[e] = codes[e];
    bool nan = false;
#pragma unroll
    for (int e = 0; e < kN; ++e) nan = nan || x[e] != x[e];
    const bool any = __any_sync(0xffffffffu, nan);
    if (lane == 0)
      a.scales[(static_cast<int64_t>(head) * a.groups + group) * a.padded + row] =
          any ? __uint_as_float(0x7fc00000u) : scale;
  } else {
    float values[kN];
    widen_all(codes, values);
#pragma unroll
    for (int e = 0; e < kN; ++e) values[e] *= scale;
    narrow_all(values, y);
  }
  Y* const to = static_cast<Y*>(a.to) + line * a.in + i;
  if constexpr (wide) {
    if (stored > 0) store<true>(y, to);
  } else {
#pragma unroll
    for (int e = 0; e < kN; ++e)
      if (e < stored) to[e] = y[e];
  }
}

}  // namespace

void quantise_activations(cudaStream_t stream, const ActivationRows& a) {
  const int64_t heads = a.x.extent<Head>(), in = a.x.extent<In>(), groups = (in + kGroup - 1) / kGroup;
  const int64_t blocks = (a.padded * heads * groups + kBlockThreads / 32 - 1) / (kBlockThreads / 32);
  if (blocks == 0) return;
  const std::string shape =
      "rows " + std::to_string(a.padded) + ", heads " + std::to_string(heads) + ", in " + std::to_string(in);
  if (blocks > INT32_MAX) throw ShapeError("project: too many activations for one call (" + shape + ")");
  const Rows rows{.x = a.x.data(),
                  .x_row = a.x.stride<Token>(),
                  .x_head = a.x.stride<Head>(),
                  .list = a.x_rows,
                  .rows = a.rows,
                  .padded = a.padded,
                  .heads = static_cast<int32_t>(heads),
                  .in = static_cast<int32_t>(in),
                  .groups = static_cast<int32_t>(groups),
                  .to = a.codes ? a.codes : a.values,
                  .scales = a.scales};
  const auto multiple = [](const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; };
  const auto run = [&]<class X, class Y>(X, Y) {
    const bool wide = in % kN == 0 && rows.x_row % kN == 0 && rows.x_head % kN == 0 &&
                      multiple(rows.x, kN * sizeof(X)) && multiple(rows.to, kN * sizeof(Y));
    launch(wide ? activation_kernel<X, Y, true> : activation_kernel<X, Y, false>,
           {.grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(kBlockThreads), .overlap = a.overlap}, stream,
           "project", "quantised activations", shape, rows);
  };
  for_activation(a.x.dtype(), [&](auto x) {
    if (a.codes) run(x, fp8_e4m3{});
    else for_activation(a.value_dtype, [&](auto y) { run(x, y); });
  });
}

}  // namespace mla::cuda::generic
