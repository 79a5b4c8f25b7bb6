#include "mla/model.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>

#include "mla/error.hpp"
#include "mla/rotary.hpp"
#include "mla/weights.hpp"
#include "path.hpp"
#include "ranks.hpp"
#include "stream.hpp"
#include "tensor.hpp"

namespace mla::python {
namespace {

using Weights = Placed<LayerWeights>;
using Rotary = Placed<RotaryTable>;

constexpr std::array<std::string_view, 3> kScalings{"none", "yarn", "longrope"};

// Copies, and pickles by every property that can be written.
template <class Config>
void make_copyable(nb::class_<Config>& c) {
  c.def("__copy__", [](const Config& x) { return x; });
  c.def(
      "__deepcopy__", [](const Config& x, nb::handle) { return x; }, nb::arg("memo"));
  c.def("__getstate__", [](nb::handle self) {
    nb::typed<nb::dict, nb::str, nb::object> state;
    for (nb::handle entry : nb::object(self.type().attr("__dict__").attr("items")())) {
      const nb::handle name = entry[0], value = entry[1];
      if (nb::hasattr(value, "fset") && !value.attr("fset").is_none()) state[name] = self.attr(name);
    }
    return state;
  });
  c.def("__setstate__", [](Config& self, const nb::typed<nb::dict, nb::str, nb::object>& state) {
    Config config;
    const nb::object fresh = nb::cast(&config, nb::rv_policy::reference);
    for (const auto& [name, value] : state) nb::setattr(fresh, name, value);
    new (&self) Config(std::move(config));
  });
}

void bind_config(nb::module_& m) {
  nb::class_<RopeConfig> rope(m, "RopeConfig", "Rotary embedding of a model.");
  rope.def(nb::init<>())
      .def_rw("rotate", &RopeConfig::rotate)
      .def_rw("interleaved", &RopeConfig::interleaved)
      .def_rw("theta", &RopeConfig::theta)
      .def_prop_rw(
          "yarn", [](const RopeConfig& r) { return r.scaling == RopeConfig::Scaling::yarn; },
          [](RopeConfig& r, bool yarn) {
            if (yarn) r.scaling = RopeConfig::Scaling::yarn;
            else if (r.scaling == RopeConfig::Scaling::yarn) r.scaling = RopeConfig::Scaling::none;
          })
      .def_prop_rw(
          "scaling", [](const RopeConfig& r) { return std::string(kScalings[static_cast<size_t>(r.scaling)]); },
          [](RopeConfig& r, const std::string& name) {
            const auto at = std::find(kScalings.begin(), kScalings.end(), name);
            if (at == kScalings.end())
              throw InputError("unknown rope scaling '" + name + "'; known: none yarn longrope");
            r.scaling = static_cast<RopeConfig::Scaling>(at - kScalings.begin());
          },
          "none, yarn or longrope")
      .def_rw("factor", &RopeConfig::factor)
      .def_rw("beta_fast", &RopeConfig::beta_fast)
      .def_rw("beta_slow", &RopeConfig::beta_slow)
      .def_rw("mscale", &RopeConfig::mscale)
      .def_rw("mscale_all_dim", &RopeConfig::mscale_all_dim)
      .def_rw("attention_factor", &RopeConfig::attention_factor)
      .def_rw("original_max_position", &RopeConfig::original_max_position)
      .def_rw("truncate", &RopeConfig::truncate, "YaRN's correction dims are rounded outwards")
      .def_rw("short_factors", &RopeConfig::short_factors, "longrope: divisors of frequencies, [rope / 2]; a copy")
      .def_rw("long_factors", &RopeConfig::long_factors,
              "likewise; they hold for every position when max_position is above original_max_position")
      .def_rw("max_position", &RopeConfig::max_position,
              "The longest sequence to be served: longrope's choice of factors; nothing else reads it.");
  make_copyable(rope);
  nb::class_<IndexerConfig> indexer(m, "IndexerConfig", "The indexer of sparse attention.");
  indexer.def(nb::init<>())
      .def_rw("heads", &IndexerConfig::heads)
      .def_rw("dim", &IndexerConfig::dim)
      .def_rw("topk", &IndexerConfig::topk)
      .def_rw("interleaved", &IndexerConfig::interleaved)
      .def_rw("full", &IndexerConfig::full,
              "[layers] 1: the layer has an indexer of its own, 0: it takes the choice of the last one before it that "
              "has; empty: every layer has. A copy.");
  make_copyable(indexer);
  nb::class_<ModelConfig> model(m, "ModelConfig",
                                "The attention of a model: dimensions, rotary embedding, softmax scale.");
  model.def(nb::init<>())
      .def(nb::init<const ModelConfig&>(), nb::arg("other"), "A copy.")
      .def_rw("name", &ModelConfig::name)
      .def_rw("hidden", &ModelConfig::hidden)
      .def_rw("layers", &ModelConfig::layers)
      .def_rw("heads", &ModelConfig::heads)
      .def_rw("query_latent", &ModelConfig::query_latent, "q_lora_rank; 0: queries are projected from hidden directly")
      .def_rw("latent", &ModelConfig::latent, "kv_lora_rank")
      .def_rw("nope", &ModelConfig::nope, "qk_nope_head_dim")
      .def_rw("rope", &ModelConfig::rope, "qk_rope_head_dim")
      .def_rw("value", &ModelConfig::value, "v_head_dim")
      .def_rw("rms_eps", &ModelConfig::rms_eps)
      .def_rw("rotary", &ModelConfig::rotary)
      .def_rw("indexer", &ModelConfig::indexer, nb::arg().none())
      .def_rw("fp8_block_rows", &ModelConfig::fp8_block_rows, "of a checkpoint's block scales; 0: none")
      .def_rw("fp8_block_cols", &ModelConfig::fp8_block_cols)
      .def_rw("query_scale", &ModelConfig::query_scale, "LongCat: what queries are multiplied by")
      .def_rw("latent_scale", &ModelConfig::latent_scale, "LongCat: what normed latents are, and cached so")
      .def_rw("query_growth_beta", &ModelConfig::query_growth_beta,
              "Mistral: a query at position p grows by 1 + beta ln(1 + floor(p / length)); 0: none")
      .def_rw("query_growth_length", &ModelConfig::query_growth_length)
      .def_rw("attentions_per_layer", &ModelConfig::attentions_per_layer, "LongCat: 2; layers counts attentions")
      .def_rw("model_layers", &ModelConfig::model_layers,
              "[layers / attentions_per_layer] layers of the model with MLA; empty: the first ones. A copy.")
      .def_rw("notes", &ModelConfig::notes,
              "What other readers of the same config take otherwise, or what was decided in reading it. A copy.")
      .def("query_growth", &ModelConfig::query_growth, nb::arg("position"),
           "What a query at this position is multiplied by; 1 without the rule.")
      .def("model_layer", &ModelConfig::model_layer, nb::arg("index"),
           "The model's layer that attention `index` is in.")
      .def("attention_name", &ModelConfig::attention_name, nb::arg("index"),
           "Where attention `index` is among the model's parts, for instance 'layers.3.self_attn.'.")
      .def_prop_ro("query_key", &ModelConfig::query_key, "nope + rope")
      .def_prop_ro("entry", &ModelConfig::entry, "latent + rope")
      .def_prop_ro("softmax_scale", &ModelConfig::softmax_scale)
      .def_prop_ro(
          "rotary_magnitude", [](const ModelConfig& c) { return rotary_magnitude(c.rotary); },
          "What cos and sin are multiplied by.")
      .def(
          "inverse_frequencies", [](const ModelConfig& c) { return inverse_frequencies(c.rotary, c.rope); },
          "Of the rotary embedding, [rope / 2] in float64.")
      .def("validate", &ModelConfig::validate, "ShapeError naming the field that is impossible.")
      .def("__repr__", [](const ModelConfig& c) {
        return "mla.ModelConfig('" + c.name + "', hidden=" + std::to_string(c.hidden) +
               ", heads=" + std::to_string(c.heads) + ", query_latent=" + std::to_string(c.query_latent) +
               ", latent=" + std::to_string(c.latent) + ", nope=" + std::to_string(c.nope) +
               ", rope=" + std::to_string(c.rope) + ", value=" + std::to_string(c.value) + ")";
      });
  make_copyable(model);
  m.def(
      "preset_names",
      [] {
        std::vector<std::string> names;
        for (std::string_view n : preset_names()) names.emplace_back(n);
        return names;
      },
      "Names of the built-in models.");
  m.def("preset", &preset, nb::arg("name"), "A built-in model; InputError listing the names when there is none.");
  m.def(
      "read_config",
      [](const PyPath& file, bool allow_unknown) { return read_config(file.path(), {.allow_unknown = allow_unknown}); },
      nb::arg("file"), nb::kw_only(), nb::arg("allow_unknown") = false,
      "A Hugging Face config.json; CheckpointError names the key that is missing or impossible, UnsupportedError the\n"
      "one that asks for what this library does not do, or that looks as if it concerned attention and is not\n"
      "understood. allow_unknown: go on past those.");
  m.def(
      "parse_config",
      [](std::string_view json, std::string_view where, bool allow_unknown) {
        return parse_config(json, where, {.allow_unknown = allow_unknown});
      },
      nb::arg("json"), nb::arg("where") = "config.json", nb::kw_only(), nb::arg("allow_unknown") = false,
      "The same of a string; `where` names it in messages.");
}

using ArraysByRole = nb::typed<nb::dict, nb::str, nb::ndarray<nb::numpy, float>>;

// f(role, tensor) for every tensor that a layer may have.
template <class Tensors, class F>
void for_roles(Tensors& t, F&& f) {
  f("query", t.query);
  f("query_down", t.query_down);
  f("query_norm", t.query_norm);
  f("kv_down", t.kv_down);
  f("kv_norm", t.kv_norm);
  f("kv_up", t.kv_up);
  f("output", t.output);
  if (!t.indexer) return;
  f("indexer.query", t.indexer->query);
  f("indexer.key", t.indexer->key);
  f("indexer.key_norm", t.indexer->key_norm);
  f("indexer.key_norm_bias", t.indexer->key_norm_bias);
  f("indexer.head_weights", t.indexer->head_weights);
}

HostTensor borrow_array(const std::string& role, nb::handle array) {
  // Freed by whichever thread drops it last.
  std::shared_ptr<Tensor> held(new Tensor(array, role, Access::read, Use::kept), [](Tensor* t) {
    nb::gil_scoped_acquire gil;
    delete t;
  });
  held->require_device({});
  HostTensor h{.name = role, .dtype = held->dtype(), .data = held->data(), .owner = held};
  int64_t step = 1;
  for (size_t i = held->rank(); i-- > 0; step *= held->extent(i))
    if (held->extent(i) > 1 && held->stride(i) != step)
      throw ShapeError(role + ": dimension " + std::to_string(i) + " has stride " + std::to_string(held->stride(i)) +
                       ", " + std::to_string(step) + " is needed");
  for (size_t i = 0; i < held->rank(); ++i) h.shape.push_back(held->extent(i));
  return h;
}

LayerTensors tensors_of(const nb::typed<nb::dict, nb::str, nb::object>& arrays) {
  LayerTensors t;
  for (const auto& [key, value] : arrays)
    if (nb::cast<std::string>(key).starts_with("indexer.")) t.indexer.emplace();
  size_t used = 0;
  for_roles(t, [&](const char* role, HostTensor& tensor) {
    if (!arrays.contains(role)) return;
    tensor = borrow_array(role, arrays[role]);
    ++used;
  });
  if (used == arrays.size()) return t;
  std::string roles;
  t.indexer.emplace();
  for_roles(t, [&](const char* role, HostTensor&) { roles += std::string(" ") + role; });
  for (const auto& [key, value] : arrays)
    if ((roles + " ").find(" " + nb::cast<std::string>(key) + " ") == std::string::npos)
      throw InputError("LayerTensors: no tensor is called '" + nb::cast<std::string>(key) + "'; there are" + roles);
  return t;
}

using ScalesByRole = nb::typed<nb::dict, nb::str, std::vector<float>>;
ArraysByRole arrays_of(const LayerTensors& t) {
  ArraysByRole d;
  for_roles(t, [&](const char* role, const HostTensor& tensor) {
    if (!tensor) return;
    auto* values = new std::vector<float>(tensor.to_f32());
    const nb::capsule owner(values, [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
    const std::vector<size_t> shape(tensor.shape.begin(), tensor.shape.end());
    d[role] = nb::cast(nb::ndarray<nb::numpy, float>(values->data(), shape.size(), shape.data(), owner));
  });
  return d;
}

ScalesByRole dict_of(const StoredScales& s) {
  ScalesByRole d;
  for (const auto& [name, x] : {std::pair("q", &s.q), {"k", &s.k}, {"v", &s.v}})
    if (!x->empty()) d[name] = nb::cast(*x);
  return d;
}
StoredScales scales_of(const ScalesByRole& d) {
  StoredScales s;
  for (const auto& [key, x] : d) {
    const std::string name = nb::cast<std::string>(key);
    std::vector<float>* to = name == "q" ? &s.q : name == "k" ? &s.k : name == "v" ? &s.v : nullptr;
    if (!to) throw InputError("LayerTensors: no scales are called '" + name + "'; there are q, k and v");
    *to = nb::cast<std::vector<float>>(x);
  }
  return s;
}

void bind_weights(nb::module_& m) {
  nb::class_<LayerTensors>(m, "LayerTensors",
                           "One layer's attention weights as a checkpoint stores them: maps are [out, in] row-major.")
      .def(nb::new_(&tensors_of), nb::arg("arrays"),
           "By role: query, query_down, query_norm, kv_down, kv_norm, kv_up, output, and indexer.query, indexer.key,\n"
           "indexer.key_norm, indexer.key_norm_bias, indexer.head_weights. f32, bf16 or f16, dense, in CPU memory;\n"
           "borrowed. `prepare` says which a model needs, and their shapes.")
      .def("arrays", &arrays_of, "Copies in f32, by role.")
      .def_prop_rw(
          "scales", [](const LayerTensors& t) { return dict_of(t.scales); },
          [](LayerTensors& t, const ScalesByRole& d) { t.scales = scales_of(d); },
          "Scales of e4m3 prefills (PlanOptions prefill), as Checkpoint.scales gives them: q, k and v, those that are\n"
          "there, each of one element or one a head. What is not there is 1.");
  nb::class_<Checkpoint>(m, "Checkpoint", "A Hugging Face checkpoint folder: config.json and safetensors.")
      .def(
          "__init__",
          [](Checkpoint* self, const PyPath& folder, bool allow_unknown) {
            new (self) Checkpoint(folder.path(), {.allow_unknown = allow_unknown});
          },
          nb::arg("folder"), nb::kw_only(), nb::arg("allow_unknown") = false,
          "allow_unknown: go on past keys of the config and tensors of a layer that are not understood.")
      .def_prop_ro("config", &Checkpoint::config)
      .def("layer", nb::overload_cast<int64_t>(&Checkpoint::layer, nb::const_), nb::arg("index"),
           nb::call_guard<nb::gil_scoped_release>(),
           "A layer's attention tensors, quantised ones as they are stored: arrays() and prepare() decode them.")
      .def(
          "layer",
          [](const Checkpoint& c, int64_t index, const std::pair<int64_t, int64_t>& heads,
             const std::vector<std::pair<int64_t, int64_t>>& group) {
            return c.layer(index, HeadRange{heads.first, heads.second}, head_ranges(group));
          },
          nb::arg("index"), nb::arg("heads"), nb::arg("group") = std::vector<std::pair<int64_t, int64_t>>(),
          nb::call_guard<nb::gil_scoped_release>(),
          "part_of(config, layer(index), heads), bit for bit; of the bytes that are other heads' none are read. "
          "heads:\n"
          "(first, number). InputError unless there is one at least, all of them the model's. group: as part_of's.")
      .def_prop_ro("bytes_read", &Checkpoint::bytes_read, "Bytes of tensors that were read so far, by all threads.")
      .def(
          "scales", [](const Checkpoint& c, int64_t index) { return dict_of(c.scales(index)); }, nb::arg("index"),
          "Scales of fp8 queries, keys and values that come with a layer: q, k and v, those that are there, each of "
          "one\n"
          "element or one a head. A latent cache's k_scale is that of keys.");
  m.def(
      "random_layer",
      [](const ModelConfig& config, int64_t layer, uint64_t seed, std::string_view dtype) {
        const Dtype t = parse_dtype(dtype);
        nb::gil_scoped_release released;
        return random_layer(config, layer, seed, t);
      },
      nb::arg("model"), nb::arg("layer") = 0, nb::arg("seed") = 1, nb::arg("dtype") = "bf16",
      "Weights of the right shapes and a trained model's scale, a pure function of the arguments.");
  nb::class_<Weights>(m, "LayerWeights",
                      "A layer's weights, prepared for a device. Immutable: copies share its memory.")
      .def(
          "__copy__", [](nb::object self) { return self; }, nb::sig("def __copy__(self) -> LayerWeights"))
      .def(
          "__deepcopy__", [](nb::object self, nb::handle) { return self; },
          nb::sig("def __deepcopy__(self, memo: object) -> LayerWeights"), nb::arg("memo"))
      .def(
          "__reduce__",
          [](nb::handle) -> nb::object {
            throw UnsupportedError("LayerWeights: not to be pickled; prepare the tensors in each process");
          },
          nb::sig("def __reduce__(self) -> str"))
      .def_prop_ro("model", [](const Weights& w) { return w.value.config; })
      .def_prop_ro("dtype", [](const Weights& w) { return std::string(to_string(w.value.dtype)); })
      .def_prop_ro("absorption", [](const Weights& w) { return std::string(to_string(w.value.absorption)); })
      .def_prop_ro("up", [](const Weights& w) { return std::string(to_string(w.value.up())); })
      .def_prop_ro("device", [](const Weights& w) { return to_string(w.device); })
      .def_prop_ro("nbytes", [](const Weights& w) { return w.value.bytes(); })
      .def(
          "place",
          [](const Weights& w, PyStream& stream) {
            const Turn turn(stream);
            w.value.place(stream.stream.pool());
          },
          nb::arg("stream"),
          "Moves the CPU's matrices near the threads of a pinned stream that read them; nothing where these are on\n"
          "one node. Nobody uses the weights meanwhile.")
      .def("__repr__", [](const Weights& w) {
        return "mla.LayerWeights('" + w.value.config.name + "', dtype='" + std::string(to_string(w.value.dtype)) +
               "', absorption='" + std::string(to_string(w.value.absorption)) + "', device='" + to_string(w.device) +
               "')";
      });
  m.def(
      "prepare",
      [](const ModelConfig& config, const LayerTensors& tensors, std::string_view dtype, std::string_view absorption,
         std::string_view up, std::string_view products, std::string_view device) {
        const PrepareOptions options{.dtype = parse_dtype(dtype),
                                     .absorption = parse_absorption(absorption),
                                     .up = parse_weight_format(up),
                                     .products = parse_weight_format(products)};
        const Device d = parse_device(device);
        nb::gil_scoped_release released;
        return Weights{prepare(config, tensors, options, d), d};
      },
      nb::arg("model"), nb::arg("tensors"), nb::kw_only(), nb::arg("dtype") = "bf16", nb::arg("absorption") = "runtime",
      nb::arg("up") = "plain", nb::arg("products") = "plain", nb::arg("device") = "cpu",
      "Converts and lays out a layer's tensors. dtype: f32 or bf16. absorption: runtime, full or full_fp8.\n"
      "up: how W_UK and W_UV of the latent path are held, plain, fp8 or mxfp4. products: the other maps but the\n"
      "indexer's, plain or fp8 by blocks, codes and scales of an fp8 checkpoint as they are.");
  nb::class_<Rotary>(m, "RotaryTable", "cos and sin for positions [0, positions), made once a model.")
      .def(
          "__init__",
          [](Rotary* self, const ModelConfig& model, int64_t positions, bool indexer, std::string_view device) {
            const Device d = parse_device(device);
            const RopeConfig config = indexer ? model.index_rotary() : model.rotary;
            nb::gil_scoped_release released;
            new (self) Rotary{RotaryTable(config, model.rope, positions, d), d};
          },
          nb::arg("model"), nb::arg("positions"), nb::kw_only(), nb::arg("indexer") = false, nb::arg("device") = "cpu",
          "indexer: of the model's indexer instead of its attention.")
      .def_prop_ro("positions", [](const Rotary& r) { return r.value.positions(); })
      .def_prop_ro("device", [](const Rotary& r) { return to_string(r.device); })
      .def("__repr__", [](const Rotary& r) {
        return "mla.RotaryTable(positions=" + std::to_string(r.value.positions()) +
               ", pairs=" + std::to_string(r.value.pairs()) + ", device='" + to_string(r.device) + "')";
      });
}

}  // namespace

void bind_model(nb::module_& m) {
  bind_config(m);
  bind_weights(m);
}

}  // namespace mla::python
