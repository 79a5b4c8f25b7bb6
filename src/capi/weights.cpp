#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "backend/backend.hpp"
#include "capi/objects.hpp"
#include "capi/tensor.hpp"
#include "core/quantised_weights.hpp"

using namespace mla;
using namespace mla::capi;

static_assert(static_cast<int>(Dtype::fp8_e4m3) == MLA_FP8_E4M3 && static_cast<int>(Dtype::f16) == MLA_F16 &&
              static_cast<int>(Dtype::bf16) == MLA_BF16);
static_assert(static_cast<int>(WeightFormat::mxfp4) == MLA_WEIGHTS_MXFP4 &&
              static_cast<int>(WeightFormat::fp8) == MLA_WEIGHTS_FP8);
static_assert(static_cast<int>(Activations::fp8_128) == MLA_ACTIVATIONS_FP8_128);
static_assert(static_cast<int>(Absorption::full_fp8) == MLA_ABSORB_FULL_FP8 &&
              static_cast<int>(Absorption::full) == MLA_ABSORB_FULL);

namespace {

// A dense tensor of any rank from 1 to 2, borrowed for the call.
HostTensor host_tensor(const char* name, const mla_host_tensor& t) {
  HostTensor h;
  if (!t.values) return h;
  const Tensors host(Device{});
  const auto dense = [](const std::string& what, const auto& view) {
    if (!view.dense()) throw ShapeError(what + " is not dense");
  };
  const auto take = [&](const auto& view) {
    dense(name, view);
    h.dtype = view.dtype();
    h.shape.assign(view.extents().begin(), view.extents().end());
    h.data = static_cast<const std::byte*>(view.data());
  };
  h.name = name;
  if (t.values->ndim == 1) take(host.read<Out>(name, t.values, {Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::fp8_e4m3}));
  else take(host.read<Out, In>(name, t.values, {Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::fp8_e4m3}));
  if (!t.block_scales) return h;

  const std::string scales = std::string(name) + " block_scales";
  if (h.shape.size() != 2) throw ShapeError(scales + " of a tensor with one dimension");
  const auto view = host.read_as<float, Out, In>(scales.c_str(), t.block_scales);
  dense(scales, view);
  h.block_rows = read_range((std::string(name) + " block_rows").c_str(), t.block_rows, 1, int64_t{1} << 40);
  h.block_cols = read_range((std::string(name) + " block_cols").c_str(), t.block_cols, 1, int64_t{1} << 40);
  const int64_t rows = (h.shape[0] + h.block_rows - 1) / h.block_rows,
                cols = (h.shape[1] + h.block_cols - 1) / h.block_cols;
  if (view.extent<Out>() != rows || view.extent<In>() != cols)
    throw ShapeError(scales + " are [" + std::to_string(view.extent<Out>()) + ", " + std::to_string(view.extent<In>()) +
                     "], blocks of " + std::to_string(h.block_rows) + " x " + std::to_string(h.block_cols) + " need [" +
                     std::to_string(rows) + ", " + std::to_string(cols) + "]");
  h.block_scales.assign(view.data(), view.data() + view.size());
  return h;
}

LayerTensors read_tensors(const mla_layer_tensors& t, const ModelConfig& m) {
  LayerTensors l;
  l.query = host_tensor("query", t.query);
  if (m.query_latent > 0) {
    l.query_down = host_tensor("query_down", t.query_down);
    l.query_norm = host_tensor("query_norm", t.query_norm);
  }
  l.kv_down = host_tensor("kv_down", t.kv_down);
  l.kv_norm = host_tensor("kv_norm", t.kv_norm);
  l.kv_up = host_tensor("kv_up", t.kv_up);
  l.output = host_tensor("output", t.output);
  if (t.indexer_query.values)
    l.indexer = IndexerTensors{.query = host_tensor("indexer_query", t.indexer_query),
                               .key = host_tensor("indexer_key", t.indexer_key),
                               .key_norm = host_tensor("indexer_key_norm", t.indexer_key_norm),
                               .key_norm_bias = host_tensor("indexer_key_norm_bias", t.indexer_key_norm_bias),
                               .head_weights = host_tensor("indexer_head_weights", t.indexer_head_weights)};
  const auto scales = [](const char* name, const DLTensor* x) {
    if (!x) return std::vector<float>();
    const View<const float, Out> view = Tensors(Device{}).read_as<float, Out>(name, x);
    if (!view.dense()) throw ShapeError(std::string(name) + " is not dense");
    return std::vector<float>(view.data(), view.data() + view.size());
  };
  l.scales = {scales("q_scales", t.q_scales), scales("k_scales", t.k_scales), scales("v_scales", t.v_scales)};
  return l;
}

mla_prepare_options read_options(const mla_prepare_options* options) {
  const mla_prepare_options defaults = mla_prepare_options_default();
  return options ? read_struct("options", options, defaults) : defaults;
}

PrepareOptions prepare_options(const mla_prepare_options& o) {
  return {.dtype = read_enum("options dtype", o.dtype, Dtype::fp8_e4m3),
          .absorption = read_enum("options absorption", o.absorption, Absorption::full_fp8),
          .up = read_enum("options up", o.up, WeightFormat::mxfp4),
          .products = read_enum("options products", o.products, WeightFormat::mxfp4)};
}

// Count 0: all of them.
HeadRange heads_of(const mla_prepare_options& o) {
  if (o.head_count == 0 && o.head_begin != 0)
    throw InputError("options head_begin is " + std::to_string(o.head_begin) + ", head_count is 0: no heads");
  return {o.head_begin, o.head_count};
}

std::vector<HeadRange> group_of(const mla_prepare_options& o) {
  const int64_t members = read_range("options group_members", o.group_members, 0, 1 << 16);
  if (members > 0 && o.head_count == 0)
    throw InputError("options group_members is " + std::to_string(members) + ", head_count is 0: of a part alone");
  if (members > 0) required("options group_heads", o.group_heads);
  std::vector<HeadRange> group;
  for (int64_t i = 0; i < members; ++i) group.push_back({o.group_heads[2 * i], o.group_heads[2 * i + 1]});
  return group;
}

LayerTensors own(const ModelConfig& m, LayerTensors t, HeadRange heads, std::span<const HeadRange> group) {
  return heads.count == 0 ? std::move(t) : part_of(m, t, heads, group);
}

// tensors(heads, group, use): use(model, these heads' tensors).
template <class Tensors>
mla_status create_weights(const char* function, mla_weights** weights, const mla_prepare_options* options,
                          DLDevice device, Tensors&& tensors) noexcept {
  return guarded(function, [&] {
    expect_handle("weights", weights);
    const mla_prepare_options fields = read_options(options);
    const PrepareOptions o = prepare_options(fields);
    auto made = std::make_shared<mla_weights>();
    made->device = read_device(device);
    const HeadRange heads = heads_of(fields);
    const std::vector<HeadRange> group = group_of(fields);
    tensors(heads, group, [&](const ModelConfig& m, const LayerTensors& part) {
      made->weights = prepare(heads.count == 0 ? m : part_of(m, heads), part, o, made->device);
    });
    put(weights, std::move(made));
  });
}

}  // namespace

mla_status mla_checkpoint_open(const char* folder, mla_checkpoint** checkpoint) {
  return guarded("mla_checkpoint_open", [&] {
    expect_handle("checkpoint", checkpoint);
    put(checkpoint, std::make_shared<mla_checkpoint>(&required("folder", folder)));
  });
}

mla_status mla_checkpoint_open_with(const char* folder, const mla_read_options* options, mla_checkpoint** checkpoint) {
  return guarded("mla_checkpoint_open_with", [&] {
    expect_handle("checkpoint", checkpoint);
    put(checkpoint, std::make_shared<mla_checkpoint>(&required("folder", folder), read_read_options(options)));
  });
}

mla_status mla_checkpoint_destroy(mla_checkpoint* checkpoint) {
  return destroy("mla_checkpoint_destroy", "checkpoint", checkpoint);
}

mla_status mla_checkpoint_model(const mla_checkpoint* checkpoint, mla_model** model) {
  return guarded("mla_checkpoint_model", [&] {
    expect_handle("model", model);
    auto made = std::make_shared<mla_model>();
    made->config = get("checkpoint", checkpoint)->checkpoint.config();
    put(model, std::move(made));
  });
}

mla_status mla_checkpoint_scales(const mla_checkpoint* checkpoint, int64_t layer, int32_t which, float* scales,
                                 int64_t room, int64_t* count) {
  return guarded("mla_checkpoint_scales", [&] {
    const auto c = get("checkpoint", checkpoint);
    read_range("layer", layer, 0, c->checkpoint.config().layers - 1);
    read_range("which", which, MLA_SCALES_Q, MLA_SCALES_V);
    read_range("room", room, 0, int64_t{1} << 40);
    required("count", count);
    if (room > 0) required("scales", scales);
    const StoredScales s = c->checkpoint.scales(layer);
    const std::vector<float>& x = which == MLA_SCALES_Q ? s.q : which == MLA_SCALES_K ? s.k : s.v;
    std::copy_n(x.begin(), std::min(room, std::ssize(x)), scales);
    *count = std::ssize(x);
  });
}

mla_status mla_checkpoint_bytes_read(const mla_checkpoint* checkpoint, uint64_t* bytes) {
  return guarded("mla_checkpoint_bytes_read",
                 [&] { required("bytes", bytes) = get("checkpoint", checkpoint)->checkpoint.bytes_read(); });
}

mla_status mla_weights_create_random(const mla_model* model, int64_t layer, uint64_t seed, int32_t stored,
                                     const mla_prepare_options* options, DLDevice device, mla_weights** weights) {
  return create_weights("mla_weights_create_random", weights, options, device,
                        [&](HeadRange heads, std::span<const HeadRange> group, auto&& use) {
                          const auto m = get("model", model);
                          read_range("layer", layer, 0, m->config.layers - 1);
                          const Dtype dtype = read_enum("stored", stored, Dtype::fp8_e4m3);
                          use(m->config, own(m->config, random_layer(m->config, layer, seed, dtype), heads, group));
                        });
}

mla_status mla_weights_create_checkpoint(const mla_checkpoint* checkpoint, int64_t layer,
                                         const mla_prepare_options* options, DLDevice device, mla_weights** weights) {
  return create_weights("mla_weights_create_checkpoint", weights, options, device,
                        [&](HeadRange heads, std::span<const HeadRange> group, auto&& use) {
                          const auto c = get("checkpoint", checkpoint);
                          const ModelConfig& m = c->checkpoint.config();
                          read_range("layer", layer, 0, m.layers - 1);
                          use(m,
                              heads.count == 0 ? c->checkpoint.layer(layer) : c->checkpoint.layer(layer, heads, group));
                        });
}

mla_status mla_weights_create(const mla_model* model, const mla_layer_tensors* tensors,
                              const mla_prepare_options* options, DLDevice device, mla_weights** weights) {
  return create_weights("mla_weights_create", weights, options, device,
                        [&](HeadRange heads, std::span<const HeadRange> group, auto&& use) {
                          const auto m = get("model", model);
                          use(m->config,
                              own(m->config, read_tensors(read_struct("tensors", tensors), m->config), heads, group));
                        });
}

mla_status mla_weights_destroy(mla_weights* weights) { return destroy("mla_weights_destroy", "weights", weights); }

mla_status mla_weights_place(mla_weights* weights, mla_stream* stream) {
  return guarded("mla_weights_place", [&] {
    const auto w = get("weights", weights);
    const Turn turn(stream);
    w->weights.place(turn.stream().pool());
  });
}

mla_status mla_weights_bytes(const mla_weights* weights, size_t* bytes) {
  return guarded("mla_weights_bytes", [&] { required("bytes", bytes) = get("weights", weights)->weights.bytes(); });
}

mla_status mla_linear_create(const DLTensor* w, int32_t dtype, int32_t format, int64_t block_rows, int64_t block_cols,
                             DLDevice device, mla_linear** linear) {
  return guarded("mla_linear_create", [&] {
    expect_handle("linear", linear);
    const auto view = Tensors(Device{}).read_as<float, Head, Out, In>("w", w);
    if (!view.dense()) throw ShapeError("w is not dense");
    const int64_t heads = view.extent<Head>(), out = view.extent<Out>(), in = view.extent<In>();
    for (const auto& [name, extent] : {std::pair{"w Head", heads}, {"w Out", out}, {"w In", in}})
      if (extent < 1) throw ShapeError(std::string(name) + " is 0, at least 1 is needed");
    const Dtype d = read_enum("dtype", dtype, Dtype::fp8_e4m3);
    if (d != Dtype::f32 && d != Dtype::bf16)
      throw UnsupportedError("dtype is " + std::string(mla::to_string(d)) + "; f32 and bf16 are supported");
    const WeightFormat f = read_enum("format", format, WeightFormat::mxfp4);
    auto made = std::make_shared<mla_linear>();
    made->device = read_device(device);
    const backend::Backend& b = backend::backend(made->device);
    const std::span<const float> values(view.data(), static_cast<size_t>(view.size()));
    if (f == WeightFormat::plain) {
      made->linear = b.pack(values, heads, out, in, d, made->device);
    } else {
      if (!b.pack_quantised)
        throw UnsupportedError("backend " + std::string(b.name) + " holds no weights in " +
                               std::string(mla::to_string(f)));
      const bool blocks = f == WeightFormat::fp8 && (block_rows != 0 || block_cols != 0);
      if (blocks) {
        read_range("block_rows", block_rows, 1, int64_t{1} << 40);
        read_range("block_cols", block_cols, 1, int64_t{1} << 40);
      }
      for (size_t i = 0; i < values.size(); ++i)
        if (!std::isfinite(values[i]))
          throw InputError("w is " + std::to_string(values[i]) + " at element " + std::to_string(i) +
                           ", weights to be quantised must be finite");
      made->linear = b.pack_quantised(
          quantise(values, heads, out, in, f, blocks ? block_rows : 0, blocks ? block_cols : 0), d, made->device);
    }
    put(linear, std::move(made));
  });
}

mla_status mla_linear_destroy(mla_linear* linear) { return destroy("mla_linear_destroy", "linear", linear); }
