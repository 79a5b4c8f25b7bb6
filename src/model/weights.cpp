#include "mla/weights.hpp"

#include <algorithm>
#include <cstring>

#include "backend/backend.hpp"
#include "mla/error.hpp"
#include "model/text.hpp"

namespace mla {
namespace {

template <class T>
void widen(const std::byte* data, std::vector<float>& out) {
  const T* x = reinterpret_cast<const T*>(data);
  for (size_t i = 0; i < out.size(); ++i) {
    T e;  // mapped tensors need not be aligned
    std::memcpy(&e, x + i, sizeof(T));
    out[i] = to_float(e);
  }
}

std::vector<float> values(const HostTensor& t, const char* role, const std::vector<int64_t>& shape) {
  if (!t) throw ShapeError(std::string("prepare: ") + role + " is missing, expected shape " + shape_text(shape));
  if (t.shape != shape)
    throw ShapeError(std::string("prepare: ") + role + " (" + t.name + ") has shape " + shape_text(t.shape) +
                     ", expected " + shape_text(shape));
  return t.to_f32();
}

}  // namespace

int64_t HostTensor::size() const {
  int64_t n = 1;
  for (int64_t e : shape) n *= e;
  return n;
}

std::vector<float> HostTensor::to_f32() const {
  std::vector<float> out(static_cast<size_t>(size()));
  switch (dtype) {
    case Dtype::f32: widen<float>(data, out); break;
    case Dtype::bf16: widen<bf16>(data, out); break;
    case Dtype::f16: widen<f16>(data, out); break;
    case Dtype::fp8_e4m3: widen<fp8_e4m3>(data, out); break;
  }
  if (!block_scales.empty()) {
    const int64_t cols = shape[1], blocks = (cols + block_cols - 1) / block_cols;
    for (int64_t r = 0; r < shape[0]; ++r)
      for (int64_t c = 0; c < cols; ++c) out[r * cols + c] *= block_scales[(r / block_rows) * blocks + c / block_cols];
  }
  return out;
}

size_t LayerWeights::bytes() const {
  size_t total = (query_norm.size() + kv_norm.size()) * sizeof(float);
  for (const auto* w : {&query_down, &query, &kv_down, &kv_up, &absorb_key, &value_up, &output})
    if (*w) total += (*w)->bytes;
  return total;
}

LayerWeights prepare(const ModelConfig& m, const LayerTensors& t, Dtype dtype, Device device) {
  m.validate();
  if (dtype != Dtype::f32 && dtype != Dtype::bf16)
    throw UnsupportedError("weights prepared in " + std::string(to_string(dtype)) + "; f32 and bf16 are supported");
  const auto& backend = backend::backend(device);
  auto linear = [&](const HostTensor& tensor, const char* role, int64_t out, int64_t in) {
    return backend.pack(values(tensor, role, {out, in}), 1, out, in, dtype);
  };
  LayerWeights w;
  w.config = m;
  w.dtype = dtype;
  if (m.query_latent > 0) {
    w.query_down = linear(t.query_down, "query_down", m.query_latent, m.hidden);
    w.query_norm = values(t.query_norm, "query_norm", {m.query_latent});
  }
  w.query = linear(t.query, "query", m.heads * m.query_key(), m.query_latent > 0 ? m.query_latent : m.hidden);
  w.kv_down = linear(t.kv_down, "kv_down", m.entry(), m.hidden);
  w.kv_norm = values(t.kv_norm, "kv_norm", {m.latent});
  w.output = linear(t.output, "output", m.hidden, m.heads * m.value);

  // kv_up's rows are, per head, P rows of W_UK (a [P, L] block: the absorbed map's transpose) and V rows of W_UV ([V,
  // L]).
  const std::vector<float> up = values(t.kv_up, "kv_up", {m.heads * (m.nope + m.value), m.latent});
  w.kv_up = backend.pack(up, 1, m.heads * (m.nope + m.value), m.latent, dtype);
  std::vector<float> key(static_cast<size_t>(m.heads * m.latent * m.nope)),
      value(static_cast<size_t>(m.heads * m.value * m.latent));
  for (int64_t h = 0; h < m.heads; ++h) {
    const float* head = up.data() + h * (m.nope + m.value) * m.latent;
    for (int64_t p = 0; p < m.nope; ++p)
      for (int64_t l = 0; l < m.latent; ++l) key[(h * m.latent + l) * m.nope + p] = head[p * m.latent + l];
    std::copy_n(head + m.nope * m.latent, m.value * m.latent, value.begin() + h * m.value * m.latent);
  }
  w.absorb_key = backend.pack(key, m.heads, m.latent, m.nope, dtype);
  w.value_up = backend.pack(value, m.heads, m.value, m.latent, dtype);
  return w;
}

}  // namespace mla
