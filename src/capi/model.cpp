#include <cmath>

#include "capi/objects.hpp"
#include "capi/tensor.hpp"

using namespace mla;
using namespace mla::capi;

static_assert(static_cast<int>(RopeConfig::Scaling::yarn) == MLA_ROPE_SCALING_YARN &&
              static_cast<int>(RopeConfig::Scaling::longrope) == MLA_ROPE_SCALING_LONGROPE);

namespace {

template <class Make>
mla_status create_model(const char* function, mla_model** model, Make&& make) noexcept {
  return guarded(function, [&] {
    expect_handle("model", model);
    auto made = std::make_shared<mla_model>();
    made->config = make();
    made->config.validate();
    put(model, std::move(made));
  });
}

}  // namespace

ModelConfig mla::capi::read_fields(const mla_model_fields& f) {
  ModelConfig m;
  m.name = f.name ? f.name : "";
  m.hidden = f.hidden;
  m.layers = read_range("layers", f.layers, 1, 1 << 20);
  m.heads = f.heads;
  m.query_latent = f.query_latent;
  m.latent = f.latent;
  m.nope = f.nope;
  m.rope = f.rope;
  m.value = f.value;
  m.rms_eps = f.rms_eps;
  m.rotary = {.rotate = read_flag("rotate", f.rotate),
              .interleaved = read_flag("interleaved", f.interleaved),
              .theta = f.theta,
              .scaling = read_enum("rope_scaling", f.rope_scaling, RopeConfig::Scaling::longrope),
              .factor = f.factor,
              .beta_fast = f.beta_fast,
              .beta_slow = f.beta_slow,
              .mscale = f.mscale,
              .mscale_all_dim = f.mscale_all_dim,
              .attention_factor = f.attention_factor,
              .original_max_position = f.original_max_position,
              .truncate = read_flag("truncate", f.truncate),
              .max_position = f.max_position};
  if (f.short_factors || f.long_factors) {
    const int64_t pairs = read_range("rope", f.rope, 0, 1 << 20) / 2;
    if (f.short_factors) m.rotary.short_factors.assign(f.short_factors, f.short_factors + pairs);
    if (f.long_factors) m.rotary.long_factors.assign(f.long_factors, f.long_factors + pairs);
  }
  m.query_scale = f.query_scale;
  m.latent_scale = f.latent_scale;
  m.query_growth_beta = f.query_growth_beta;
  m.query_growth_length = f.query_growth_length;
  m.attentions_per_layer = read_range("attentions_per_layer", f.attentions_per_layer, 1, 1 << 20);
  if (f.model_layers) m.model_layers.assign(f.model_layers, f.model_layers + f.layers / m.attentions_per_layer);
  if (f.indexer_heads != 0 || f.indexer_dim != 0 || f.indexer_topk != 0) {
    IndexerConfig x{.heads = f.indexer_heads,
                    .dim = f.indexer_dim,
                    .topk = f.indexer_topk,
                    .interleaved = read_flag("indexer_interleaved", f.indexer_interleaved)};
    if (f.indexer_full) x.full.assign(f.indexer_full, f.indexer_full + f.layers);
    for (uint8_t own : x.full) read_flag("indexer_full entry", own);
    m.indexer = std::move(x);
  }
  m.fp8_block_rows = f.fp8_block_rows;
  m.fp8_block_cols = f.fp8_block_cols;
  return m;
}

ReadOptions mla::capi::read_read_options(const mla_read_options* options) {
  mla_read_options o = mla_read_options_default();
  if (options) o = read_struct("options", options, o);
  return {.allow_unknown = read_flag("options allow_unknown", o.allow_unknown)};
}

const char* mla_preset_name(int32_t index) {
  const auto names = preset_names();
  return index >= 0 && static_cast<size_t>(index) < names.size() ? names[index].data() : nullptr;
}

mla_status mla_model_create_preset(const char* name, mla_model** model) {
  return create_model("mla_model_create_preset", model, [&] { return preset(&required("name", name)); });
}

mla_status mla_model_create_config(const char* json, size_t length, mla_model** model) {
  return create_model("mla_model_create_config", model, [&] {
    return parse_config({&required("json", json), length});
  });
}

mla_status mla_model_read_config(const char* file, mla_model** model) {
  return create_model("mla_model_read_config", model, [&] { return read_config(&required("file", file)); });
}

mla_status mla_model_create_config_with(const char* json, size_t length, const mla_read_options* options,
                                        mla_model** model) {
  return create_model("mla_model_create_config_with", model, [&] {
    return parse_config({&required("json", json), length}, "config.json", read_read_options(options));
  });
}

mla_status mla_model_read_config_with(const char* file, const mla_read_options* options, mla_model** model) {
  return create_model("mla_model_read_config_with", model,
                      [&] { return read_config(&required("file", file), read_read_options(options)); });
}

mla_status mla_model_create(const mla_model_fields* fields, mla_model** model) {
  return create_model("mla_model_create", model,
                      [&] { return read_fields(read_struct("fields", fields, mla_model_fields_default())); });
}

mla_status mla_model_destroy(mla_model* model) { return destroy("mla_model_destroy", "model", model); }

mla_status mla_model_get(const mla_model* model, mla_model_fields* fields) {
  return guarded("mla_model_get", [&] {
    const auto held = get("model", model);
    const ModelConfig& m = held->config;
    mla_model_fields f = mla_model_fields_default();
    f.name = m.name.c_str();
    f.hidden = m.hidden;
    f.layers = m.layers;
    f.heads = m.heads;
    f.query_latent = m.query_latent;
    f.latent = m.latent;
    f.nope = m.nope;
    f.rope = m.rope;
    f.value = m.value;
    f.rms_eps = m.rms_eps;
    f.rotate = m.rotary.rotate;
    f.interleaved = m.rotary.interleaved;
    f.theta = m.rotary.theta;
    f.rope_scaling = static_cast<int32_t>(m.rotary.scaling);
    f.factor = m.rotary.factor;
    f.beta_fast = m.rotary.beta_fast;
    f.beta_slow = m.rotary.beta_slow;
    f.mscale = m.rotary.mscale;
    f.mscale_all_dim = m.rotary.mscale_all_dim;
    f.attention_factor = m.rotary.attention_factor;
    f.original_max_position = m.rotary.original_max_position;
    if (m.indexer) {
      f.indexer_heads = m.indexer->heads;
      f.indexer_dim = m.indexer->dim;
      f.indexer_topk = m.indexer->topk;
      f.indexer_interleaved = m.indexer->interleaved;
      if (!m.indexer->full.empty()) f.indexer_full = m.indexer->full.data();
    }
    f.max_position = m.rotary.max_position;
    f.truncate = m.rotary.truncate;
    if (!m.rotary.short_factors.empty()) f.short_factors = m.rotary.short_factors.data();
    if (!m.rotary.long_factors.empty()) f.long_factors = m.rotary.long_factors.data();
    f.query_scale = m.query_scale;
    f.latent_scale = m.latent_scale;
    f.query_growth_beta = m.query_growth_beta;
    f.query_growth_length = m.query_growth_length;
    f.attentions_per_layer = m.attentions_per_layer;
    if (!m.model_layers.empty()) f.model_layers = m.model_layers.data();
    f.fp8_block_rows = m.fp8_block_rows;
    f.fp8_block_cols = m.fp8_block_cols;
    write_struct("fields", fields, f);
  });
}

mla_status mla_model_softmax_scale(const mla_model* model, double* scale) {
  return guarded("mla_model_softmax_scale",
                 [&] { required("scale", scale) = get("model", model)->config.softmax_scale(); });
}

mla_status mla_model_layer_has_indexer(const mla_model* model, int64_t layer, int32_t* has) {
  return guarded("mla_model_layer_has_indexer", [&] {
    const auto m = get("model", model);
    read_range("layer", layer, 0, m->config.layers - 1);
    required("has", has) = m->config.layer_has_indexer(layer);
  });
}

mla_status mla_rotary_create(const mla_model* model, int32_t indexer, int64_t positions, DLDevice device,
                             mla_rotary** rotary) {
  return guarded("mla_rotary_create", [&] {
    expect_handle("rotary", rotary);
    const auto m = get("model", model);
    const bool index = read_flag("indexer", indexer);
    if (index && !m->config.indexer) throw UnsupportedError("model " + m->config.name + " has no indexer");
    auto made = std::make_shared<mla_rotary>();
    made->device = read_device(device);
    made->table = RotaryTable(index ? m->config.index_rotary() : m->config.rotary, m->config.rope,
                              read_range("positions", positions, 1, 1 << 24), made->device);
    put(rotary, std::move(made));
  });
}

mla_status mla_rotary_destroy(mla_rotary* rotary) { return destroy("mla_rotary_destroy", "rotary", rotary); }
