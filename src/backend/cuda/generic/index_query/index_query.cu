// Memory-bound: a warp a (token, head), or eight heads of a token, which share what is worked out for them.
#include <string>

#include "backend/cuda/backend.hpp"
#include "backend/cuda/core/index_row.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/overlap.cuh"
#include "backend/cuda/core/queue.hpp"
#include "backend/cuda/core/rotate.cuh"

namespace mla::cuda {
namespace generic {
namespace {

struct QueryRows {
  const float *q = nullptr, *weights = nullptr;
  fp8_e4m3* codes = nullptr;
  float* scaled_weights = nullptr;
  int64_t q_token = 0, q_head = 0, weights_token = 0, weights_head = 0;
  int64_t codes_token = 0, codes_head = 0, scaled_token = 0, scaled_head = 0;
  uint32_t heads = 1, rows = 0;  // rows of all tokens and heads
  int32_t width = 0;
  Rotation rotation;
  const int32_t* positions = nullptr;
};

template <bool wide>
__global__ void __launch_bounds__(kBlockThreads) index_query_kernel(QueryRows a) {
  take_turn();
  const int lane = static_cast<int>(threadIdx.x % 32);
  const uint32_t r = blockIdx.x * (kBlockThreads / 32) + threadIdx.x / 32;
  if (r >= a.rows) return;
  const int64_t t = r / a.heads, h = r % a.heads;
  const float weight = a.weights[t * a.weights_token + h * a.weights_head];
  constexpr int n = wide ? 4 : 1;
  const float* const row = a.q + t * a.q_token + h * a.q_head;
  const float* const cos_sin = a.rotation.pairs > 0 ? a.rotation.at(a.positions[t]) : nullptr;
  const auto read = [&](int at, float(&x)[n]) { RotatedPart<wide, n>(a.rotation, cos_sin, at).load(row, x); };
  const float scale = quantise_row<wide, n>(read, a.codes + t * a.codes_token + h * a.codes_head, a.width,
                                            /*powers_of_two=*/true, lane);
  if (lane == 0) a.scaled_weights[t * a.scaled_token + h * a.scaled_head] = weight * scale;
}

// Heads of a token that a warp takes when there are kManyRows; a row is at most four numbers a lane then.
constexpr int kHeads = 8, kMostWidth = 128;
constexpr int64_t kManyRows = 2048;

__global__ void __launch_bounds__(kBlockThreads) index_query_heads_kernel(QueryRows a) {
  take_turn();
  const int lane = static_cast<int>(threadIdx.x % 32), at = 4 * lane;
  const uint32_t r = (blockIdx.x * (kBlockThreads / 32) + threadIdx.x / 32) * kHeads;
  if (r >= a.rows) return;
  const int64_t t = r / a.heads, h = r % a.heads;
  const int own = lane / 4;  // the lane's head, where each has one
  const float weight = lane % 4 == 0 ? a.weights[t * a.weights_token + (h + own) * a.weights_head] : 0;
  const float* const rows = a.q + t * a.q_token + h * a.q_head;
  float x[kHeads][4] = {};
  if (at < a.width) {
#pragma unroll
    for (int k = 0; k < kHeads; ++k) load<true>(rows + k * a.q_head + at, x[k]);
  }
  if (a.rotation.pairs > 0) {
    const RotatedPart<true, 4> part(a.rotation, a.rotation.at(a.positions[t]), at);
#pragma unroll
    for (int k = 0; k < kHeads; ++k) part.turn(x[k]);
  }
  // Each exchange leaves a lane half of the heads that it had: in the end its own one's largest.
  float most[kHeads];
#pragma unroll
  for (int k = 0; k < kHeads; ++k) most[k] = largest_of(x[k]);
#pragma unroll
  for (int half = kHeads / 2, d = 16; half; half /= 2, d /= 2) {
    const bool upper = lane & d;
#pragma unroll
    for (int k = 0; k < half; ++k) {
      const float theirs = __shfl_xor_sync(0xffffffffu, upper ? most[k] : most[k + half], d);
      most[k] = fmaxf(upper ? most[k + half] : most[k], theirs);
    }
  }
  const float scale = index_scale(largest_in_lanes<4>(most[0]), /*powers_of_two=*/true), inverse = 1.0f / scale;
  if (lane % 4 == 0) a.scaled_weights[t * a.scaled_token + (h + own) * a.scaled_head] = weight * scale;
  fp8_e4m3* const to = a.codes + t * a.codes_token + h * a.codes_head + at;
#pragma unroll
  for (int k = 0; k < kHeads; ++k) {
    const float by = __shfl_sync(0xffffffffu, inverse, 4 * k);
    float y[4];
    fp8_e4m3 codes[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) y[e] = x[k][e] * by;
    narrow_all(y, codes);
    if (at < a.width) store<true>(codes, to + k * a.codes_head);
  }
}
static_assert(kHeads == 8 && kMostWidth == 32 * 4);

}  // namespace
}  // namespace generic

void index_query(Stream& stream, const ops::IndexQueryArgs& a) {
  generic::QueryRows r;
  r.q = a.q.data();
  r.q_token = a.q.stride<Token>();
  r.q_head = a.q.stride<IndexHead>();
  r.weights = a.weights.data();
  r.weights_token = a.weights.stride<Token>();
  r.weights_head = a.weights.stride<IndexHead>();
  r.codes = a.codes.data();
  r.codes_token = a.codes.stride<Token>();
  r.codes_head = a.codes.stride<IndexHead>();
  r.scaled_weights = a.scaled_weights.data();
  r.scaled_token = a.scaled_weights.stride<Token>();
  r.scaled_head = a.scaled_weights.stride<IndexHead>();
  r.heads = static_cast<uint32_t>(a.q.extent<IndexHead>());
  r.width = static_cast<int32_t>(a.q.extent<IndexDim>());
  const int64_t rows = a.q.extent<Token>() * a.q.extent<IndexHead>();
  if (rows == 0) return;
  const std::string what = "rows " + std::to_string(rows) + ", width " + std::to_string(r.width);
  if (rows > INT32_MAX) throw ShapeError("index_query: too many rows for one call (" + what + ")");
  r.rows = static_cast<uint32_t>(rows);
  if (a.rotates()) {
    r.rotation = Rotation(*a.table);
    r.positions = stream.queue().reads(a.positions, "index_query", "positions");
  }
  const bool wide = r.width % 4 == 0 && reinterpret_cast<uintptr_t>(r.q) % 16 == 0 && r.q_token % 4 == 0 &&
                    r.q_head % 4 == 0 && reinterpret_cast<uintptr_t>(r.codes) % 4 == 0 && r.codes_token % 4 == 0 &&
                    r.codes_head % 4 == 0 && r.rotation.pairs % 4 == 0 && rows_aligned<float>(r.rotation.table);
  const bool many =
      wide && r.width <= generic::kMostWidth && r.heads % generic::kHeads == 0 && rows >= generic::kManyRows;
  const int64_t of_block = (many ? generic::kHeads : 1) * (kBlockThreads / 32);
  launch(many   ? generic::index_query_heads_kernel
         : wide ? generic::index_query_kernel<true>
                : generic::index_query_kernel<false>,
         {.grid = dim3(static_cast<unsigned>((rows + of_block - 1) / of_block)),
          .block = dim3(kBlockThreads),
          .overlap = stream.queue().hopper()},
         stream.queue().stream(), "index_query", "index_query_kernel", what, r);
}

}  // namespace mla::cuda
