// Random weights by counter: element i of a tensor depends on (seed, layer, tensor, i) alone, so any part can be made
// anywhere.
#include <cmath>
#include <cstring>

#include "core/named_buffer.hpp"
#include "mla/error.hpp"
#include "mla/weights.hpp"

namespace mla {
namespace {

uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// Sum of four 16-bit uniforms, centred and scaled to variance 1: normal enough for weights, one multiplication chain a
// number.
float normal(uint64_t key, uint64_t i) {
  const uint64_t u = mix(key + i * 0x9e3779b97f4a7c15u);
  const int64_t sum = static_cast<int64_t>(u & 0xffff) + static_cast<int64_t>((u >> 16) & 0xffff) +
                      static_cast<int64_t>((u >> 32) & 0xffff) + static_cast<int64_t>(u >> 48) - 2 * 65535;
  return static_cast<float>(sum) * (1.0f / 37837.227f);  // sqrt(4 * 65536^2 / 12)
}

template <class T>
void fill(T* out, int64_t n, uint64_t key, float mean, float stddev) {
  for (int64_t i = 0; i < n; ++i) out[i] = from_float<T>(mean + stddev * normal(key, static_cast<uint64_t>(i)));
}

}  // namespace

LayerTensors random_layer(const ModelConfig& m, int64_t layer, uint64_t seed, Dtype dtype) {
  m.validate();
  if (dtype == Dtype::fp8_e4m3) throw UnsupportedError("random weights in fp8_e4m3; f32, bf16 and f16 are made");
  uint64_t role = 0;
  auto make = [&](const char* name, std::vector<int64_t> shape, float mean, float stddev) {
    HostTensor t;
    t.name = "model.layers." + std::to_string(layer) + ".self_attn." + name;
    t.dtype = dtype;
    t.shape = std::move(shape);
    const uint64_t key = mix(mix(seed ^ 0x6d6c61u) + static_cast<uint64_t>(layer) * 64 + role++);
    auto memory = std::make_shared<Buffer>(
        named_buffer("random weights '" + t.name + "'", static_cast<size_t>(t.size()) * size_of(dtype)));
    switch (dtype) {
      case Dtype::bf16: fill(memory->as<bf16>(), t.size(), key, mean, stddev); break;
      case Dtype::f16: fill(memory->as<f16>(), t.size(), key, mean, stddev); break;
      default: fill(memory->as<float>(), t.size(), key, mean, stddev); break;
    }
    t.data = memory->data();
    t.owner = std::move(memory);
    return t;
  };
  auto matrix = [&](const char* name, int64_t out, int64_t in) {
    return make(name, {out, in}, 0.0f, 1.0f / std::sqrt(static_cast<float>(in)));
  };
  auto norm = [&](const char* name, int64_t n) { return make(name, {n}, 1.0f, 0.1f); };
  LayerTensors t;
  if (m.query_latent > 0) {
    t.query_down = matrix("q_a_proj.weight", m.query_latent, m.hidden);
    t.query_norm = norm("q_a_layernorm.weight", m.query_latent);
    t.query = matrix("q_b_proj.weight", m.heads * m.query_key(), m.query_latent);
  } else {
    t.query = matrix("q_proj.weight", m.heads * m.query_key(), m.hidden);
  }
  t.kv_down = matrix("kv_a_proj_with_mqa.weight", m.entry(), m.hidden);
  t.kv_norm = norm("kv_a_layernorm.weight", m.latent);
  t.kv_up = matrix("kv_b_proj.weight", m.heads * (m.nope + m.value), m.latent);
  t.output = matrix("o_proj.weight", m.hidden, m.heads * m.value);
  if (m.layer_has_indexer(layer)) {
    const IndexerConfig& x = *m.indexer;
    t.indexer.emplace();
    t.indexer->query = matrix("indexer.wq_b.weight", x.heads * x.dim, m.query_latent);
    t.indexer->key = matrix("indexer.wk.weight", x.dim, m.hidden);
    t.indexer->key_norm = norm("indexer.k_norm.weight", x.dim);
    t.indexer->key_norm_bias = make("indexer.k_norm.bias", {x.dim}, 0.0f, 0.1f);
    t.indexer->head_weights = matrix("indexer.weights_proj.weight", x.heads, m.hidden);
  }
  return t;
}

}  // namespace mla
