// What a plan asks of a backend.
#include "backend/backend.hpp"
#include "mla/plan.hpp"

namespace mla {

DeviceInfo device_info(Device device, int threads, const ModelConfig& m) {
  const backend::Backend& b = backend::backend(device);
  return {.device = device,
          .threads = threads,
          .scratch_per_worker = b.scratch_per_worker({.heads = m.heads,
                                                      .latent = m.latent,
                                                      .rope = m.rope,
                                                      .nope = m.nope,
                                                      .value = m.value,
                                                      .hidden = m.hidden,
                                                      .query_latent = m.query_latent,
                                                      .index_heads = m.indexer ? m.indexer->heads : 0,
                                                      .index_dim = m.indexer ? m.indexer->dim : 0,
                                                      .topk = m.indexer ? m.indexer->topk : 0}),
          .split_keys = b.split_keys(),
          .f32_rates = b.cost_model(Dtype::f32, m.heads),
          .bf16_rates = b.cost_model(Dtype::bf16, m.heads)};
}

DeviceInfo device_info(const Stream& stream, const ModelConfig& m) {
  return device_info(stream.device(), stream.workers(), m);
}

}  // namespace mla
