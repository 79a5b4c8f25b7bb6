#include "core/quantised_weights.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "mla/error.hpp"

namespace mla {
namespace {

float largest_magnitude(const QuantisedWeights& q, std::span<const float> w, int64_t head, int64_t row, int64_t col) {
  float amax = 0;
  for (int64_t o = row; o < std::min(q.out, row + q.block_rows); ++o)
    for (int64_t i = col; i < std::min(q.in, col + q.block_cols); ++i)
      amax = std::max(amax, std::fabs(w[(head * q.out + o) * q.in + i]));
  return amax;
}

}  // namespace

std::string_view to_string(WeightFormat f) {
  return f == WeightFormat::plain ? "plain" : f == WeightFormat::fp8 ? "fp8" : "mxfp4";
}

WeightFormat parse_weight_format(std::string_view name) {
  for (WeightFormat f : {WeightFormat::plain, WeightFormat::fp8, WeightFormat::mxfp4})
    if (name == to_string(f)) return f;
  throw InputError("unknown weight format '" + std::string(name) + "'; known: plain fp8 mxfp4");
}

std::string_view to_string(Activations a) { return a == Activations::plain ? "plain" : "fp8_128"; }

Activations parse_activations(std::string_view name) {
  for (Activations a : {Activations::plain, Activations::fp8_128})
    if (name == to_string(a)) return a;
  throw InputError("unknown activations '" + std::string(name) + "'; known: plain fp8_128");
}

double weight_bytes(WeightFormat format, Dtype dtype, int64_t heads, int64_t out, int64_t in, int64_t block_rows,
                    int64_t block_cols) {
  const double elements = static_cast<double>(heads) * static_cast<double>(out) * static_cast<double>(in);
  auto blocks = [](int64_t n, int64_t block) { return static_cast<double>((n + block - 1) / block); };
  const double groups = static_cast<double>(heads) * static_cast<double>(out) * blocks(in, kMxGroup);
  switch (format) {
    case WeightFormat::plain: return elements * static_cast<double>(size_of(dtype));
    case WeightFormat::mxfp4: return elements / 2 + groups;
    case WeightFormat::fp8: break;
  }
  return elements +
         4 * (block_rows == 0 ? 1 : static_cast<double>(heads) * blocks(out, block_rows) * blocks(in, block_cols));
}

uint8_t mx_scale(float amax) {
  if (amax == 0) return 0;
  return static_cast<uint8_t>(std::clamp(std::ilogb(amax) - 2 + 127, 0, 254));
}

QuantisedWeights quantise(std::span<const float> w, int64_t heads, int64_t out, int64_t in, WeightFormat format,
                          int64_t block_rows, int64_t block_cols) {
  QuantisedWeights q{.format = format, .heads = heads, .out = out, .in = in};
  q.codes.resize(w.size());
  if (format == WeightFormat::fp8 && block_rows == 0) {
    float amax = 0;
    for (float x : w) amax = std::max(amax, std::fabs(x));
    const float s = 448.0f / std::max(amax, 1e-10f);
    q.scales = {1.0f / s};
    for (size_t i = 0; i < w.size(); ++i) q.codes[i] = to_fp8_e4m3(w[i] * s).bits;
    return q;
  }
  const bool mx = format == WeightFormat::mxfp4;
  q.block_rows = mx ? 1 : block_rows;
  q.block_cols = mx ? kMxGroup : block_cols;
  q.scales.reserve(static_cast<size_t>(heads * q.row_blocks() * q.col_blocks()));
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t row = 0; row < out; row += q.block_rows)
      for (int64_t col = 0; col < in; col += q.block_cols) {
        const float amax = largest_magnitude(q, w, h, row, col);
        const float s = 448.0f / std::max(amax, 1e-10f), power = e8m0_value(mx_scale(amax));
        q.scales.push_back(mx ? power : 1.0f / s);
        for (int64_t o = row; o < std::min(out, row + q.block_rows); ++o)
          for (int64_t i = col; i < std::min(in, col + q.block_cols); ++i) {
            const int64_t at = (h * out + o) * in + i;
            q.codes[at] = mx ? to_e2m1(w[at] / power) : to_fp8_e4m3(w[at] * s).bits;
          }
      }
  return q;
}

std::vector<float> dequantise(const QuantisedWeights& q, Dtype dtype) {
  std::vector<float> w(q.codes.size());
  size_t at = 0;
  for (int64_t h = 0; h < q.heads; ++h)
    for (int64_t o = 0; o < q.out; ++o)
      for (int64_t i = 0; i < q.in; ++i, ++at) {
        const float x = q.value(h, o, i);
        w[at] = dtype == Dtype::bf16 ? to_float(to_bf16(x)) : x;
      }
  return w;
}

}  // namespace mla
