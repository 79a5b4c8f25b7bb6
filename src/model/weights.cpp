#include "mla/weights.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "backend/backend.hpp"
#include "backend/run.hpp"
#include "core/quantised_weights.hpp"
#include "mla/error.hpp"
#include "model/outline.hpp"
#include "model/text.hpp"

namespace mla {
namespace {

std::vector<float> values(const HostTensor& t, const char* role, const std::vector<int64_t>& shape,
                          Dtype rounded = Dtype::f32) {
  if (!t) throw ShapeError(std::string("prepare: ") + role + " is missing, expected shape " + shape_text(shape));
  if (t.shape != shape)
    throw ShapeError(std::string("prepare: ") + role + " (" + t.name + ") has shape " + shape_text(t.shape) +
                     ", expected " + shape_text(shape));
  return t.to_f32(rounded);
}

}  // namespace

std::string_view to_string(Absorption a) {
  return a == Absorption::runtime ? "runtime" : a == Absorption::full ? "full" : "full_fp8";
}

Absorption parse_absorption(std::string_view name) {
  for (Absorption a : {Absorption::runtime, Absorption::full, Absorption::full_fp8})
    if (name == to_string(a)) return a;
  throw InputError("unknown absorption '" + std::string(name) + "'; known: runtime full full_fp8");
}

namespace {

template <class F>
void each_map(const LayerWeights& w, F f) {
  for (const auto* map : {&w.query_down, &w.query, &w.kv_down, &w.kv_up, &w.absorb_key, &w.value_up, &w.output,
                          &w.absorbed_query, &w.query_rope, &w.absorbed_output})
    if (*map) f(**map);
  if (w.indexer)
    for (const auto* map : {&w.indexer->query, &w.indexer->key, &w.indexer->head_weights}) f(**map);
}

}  // namespace

size_t LayerWeights::bytes() const {
  size_t total = query_norm.values().size_bytes() + kv_norm.values().size_bytes();
  each_map(*this, [&](const Linear& map) { total += map.bytes; });
  for (const WeightVector* x : {&prefill.q, &prefill.q_rope, &prefill.k, &prefill.k_rope, &prefill.v})
    total += x->values().size_bytes();
  if (indexer) total += indexer->key_norm.values().size_bytes() + indexer->key_norm_bias.values().size_bytes();
  return total;
}

void LayerWeights::place(ThreadPool& pool) const {
  if (device.kind != DeviceKind::cpu)
    throw UnsupportedError("place: weights on " + to_string(device) + " are not near any of the pool's threads");
  each_map(*this, [&](const Linear& map) { map.place(pool); });
}

bool LayerWeights::any_fp8() const {
  bool any = false;
  each_map(*this, [&](const Linear& map) { any = any || map.format == WeightFormat::fp8; });
  return any;
}

std::pair<int64_t, int64_t> product_block(const ModelConfig& m) {
  return m.fp8_block_rows > 0 ? std::pair{m.fp8_block_rows, m.fp8_block_cols} : std::pair<int64_t, int64_t>{128, 128};
}

bool stored_as_fp8(const HostTensor& t) { return t.dtype == Dtype::fp8_e4m3 && !t.block_scales.empty(); }

namespace {

void check_options(const PrepareOptions& o) {
  if (o.dtype != Dtype::f32 && o.dtype != Dtype::bf16)
    throw UnsupportedError("weights prepared in " + std::string(to_string(o.dtype)) + "; f32 and bf16 are supported");
  if (o.products == WeightFormat::mxfp4)
    throw UnsupportedError("prepare: products in mxfp4; plain and fp8 are supported");
  if (o.absorption != Absorption::runtime && o.up != WeightFormat::plain)
    throw UnsupportedError("prepare: W_UK and W_UV in " + std::string(to_string(o.up)) + " with absorption " +
                           std::string(to_string(o.absorption)) + ", which holds neither");
}

class Preparation {
 public:
  Preparation(const ModelConfig& m, const LayerTensors& t, const PrepareOptions& o, Device device)
      : m_(m), t_(t), o_(o), device_(device), backend_(backend::backend(device)), stream_(pool_) {}

  LayerWeights run() {
    const int64_t query_in = m_.query_latent > 0 ? m_.query_latent : m_.hidden;
    LayerWeights w;
    w.config = m_;
    w.device = device_;
    w.dtype = o_.dtype;
    w.absorption = o_.absorption;
    if (m_.query_latent > 0) {
      w.query_down = product(t_.query_down, "query_down", m_.query_latent, m_.hidden);
      w.query_norm = vector(t_.query_norm, "query_norm", m_.query_latent, m_.query_scale);
    }
    w.kv_down = product(t_.kv_down, "kv_down", m_.entry(), m_.hidden);
    w.kv_norm = vector(t_.kv_norm, "kv_norm", m_.latent, m_.latent_scale);
    if (t_.indexer) w.indexer = indexer(*t_.indexer);
    w.prefill = prefill_scales();
    if (const auto& q = t_.scales.q; !q.empty() && std::ranges::count(q, q[0]) == std::ssize(q)) w.query_scale = q[0];

    const int64_t query_out = m_.heads * m_.query_key(), up_out = m_.heads * (m_.nope + m_.value),
                  value_in = m_.heads * m_.value;
    // Whatever is made of kv_up beyond its own values starts from these in f32.
    const bool as_it_is = o_.up == WeightFormat::plain && !w.absorbed();
    const Dtype rounded = as_it_is ? o_.dtype : Dtype::f32;
    const std::vector<float> up =
        t_.group_kv_up.empty() ? values(t_.kv_up, "kv_up", {up_out, m_.latent}, rounded) : group_values(rounded);
    split(up);
    if (w.absorbed()) {
      if (!t_.group_kv_up.empty())
        throw UnsupportedError("prepare: group_kv_up with absorption " + std::string(to_string(o_.absorption)) +
                               ", which holds neither W_UK nor W_UV");
      absorbed(w, values(t_.query, "query", {query_out, query_in}), query_in, up,
               values(t_.output, "output", {m_.hidden, value_in}));
      return w;
    }
    w.query = product(t_.query, "query", query_out, query_in);
    w.output = product(t_.output, "output", m_.hidden, value_in);
    w.kv_up = product(t_.kv_up, "kv_up", up_out, m_.latent);
    if (o_.up != WeightFormat::plain) finite(up, "kv_up", t_.kv_up.name);
    w.absorb_key = pack(key_, up_heads_, m_.latent, m_.nope, o_.up, 0, 0);
    w.value_up = pack(value_, up_heads_, m_.value, m_.latent, o_.up, 0, 0);
    return w;
  }

 private:
  // Rows of kv_up of all the group's heads.
  std::vector<float> group_values(Dtype rounded) {
    const int64_t rows = m_.nope + m_.value;
    std::vector<float> all;
    up_heads_ = 0;
    for (const HostTensor& t : t_.group_kv_up) {
      const int64_t heads = t.shape.empty() ? 0 : std::max<int64_t>(t.shape[0] / rows, 1);
      const std::vector<float> own = values(t, "group_kv_up", {heads * rows, m_.latent}, rounded);
      all.insert(all.end(), own.begin(), own.end());
      up_heads_ += heads;
    }
    return all;
  }
  // A norm's weights take what its result is multiplied by.
  WeightVector vector(const HostTensor& tensor, const char* role, int64_t n, double scale = 1.0) const {
    std::vector<float> v = values(tensor, role, {n});
    if (scale != 1.0)
      for (float& e : v) e = static_cast<float>(e * scale);
    return {v, device_};
  }
  PrefillScales prefill_scales() const {
    const StoredScales& stored = t_.scales;
    if (stored.q.empty() && stored.k.empty() && stored.v.empty()) return {};
    const auto each_head = [&](const char* role, const std::vector<float>& x) {
      const size_t heads = static_cast<size_t>(m_.heads);
      for (size_t i = 0; i < x.size(); ++i)
        if (!(x[i] > 0) || !std::isfinite(x[i]))
          throw InputError(std::string("prepare: ") + role + " scale is " + std::to_string(x[i]) + " at element " +
                           std::to_string(i) + ", must be finite and above 0");
      if (x.size() > 1 && x.size() != heads)
        throw ShapeError(std::string("prepare: ") + role + " scales have " + std::to_string(x.size()) +
                         " elements, expected 1 or one for each of " + std::to_string(heads) + " heads");
      return x.size() == heads ? x : std::vector<float>(heads, x.empty() ? 1.0f : x[0]);
    };
    const std::vector<float> q = each_head("q", stored.q), k = each_head("k", stored.k), v = each_head("v", stored.v);
    const float k_rope = *std::max_element(k.begin(), k.end());
    std::vector<float> q_rope(q);
    for (size_t h = 0; h < q.size(); ++h)
      if (k[h] != k_rope) q_rope[h] = static_cast<float>(double{q[h]} * double{k[h]} / double{k_rope});
    return {{q, device_}, {q_rope, device_}, {k, device_}, {{&k_rope, 1}, device_}, {v, device_}};
  }
  std::shared_ptr<const Linear> linear(const HostTensor& tensor, const char* role, int64_t out, int64_t in) const {
    return backend_.pack(values(tensor, role, {out, in}, o_.dtype), 1, out, in, o_.dtype, device_);
  }

  // A map as PrepareOptions::products says. Codes and scales of a stored tensor are taken as they are.
  std::shared_ptr<const Linear> product(const HostTensor& t, const char* role, int64_t out, int64_t in) const {
    if (o_.products == WeightFormat::plain) return linear(t, role, out, in);
    const std::vector<float> w = values(t, role, {out, in});
    finite(w, role, t.name);
    const auto [rows, cols] = product_block(m_);
    if (!stored_as_fp8(t)) return pack(w, 1, out, in, WeightFormat::fp8, rows, cols);
    QuantisedWeights q{.format = WeightFormat::fp8,
                       .heads = 1,
                       .out = out,
                       .in = in,
                       .block_rows = t.block_rows,
                       .block_cols = t.block_cols,
                       .scales = t.block_scales};
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(t.data);
    q.codes.assign(codes, codes + w.size());
    return pack(q);
  }

  std::shared_ptr<const Linear> pack(const QuantisedWeights& w) const {
    if (!backend_.pack_quantised)
      throw UnsupportedError("prepare: backend " + std::string(backend_.name) + " holds no weights in " +
                             std::string(to_string(w.format)));
    return backend_.pack_quantised(w, o_.dtype, device_);
  }
  std::shared_ptr<const Linear> pack(std::span<const float> w, int64_t heads, int64_t out, int64_t in,
                                     WeightFormat format, int64_t block_rows, int64_t block_cols) const {
    if (format == WeightFormat::plain) return backend_.pack(w, heads, out, in, o_.dtype, device_);
    return pack(quantise(w, heads, out, in, format, block_rows, block_cols));
  }

  static void finite(std::span<const float> w, const std::string& role, const std::string& tensor) {
    for (size_t i = 0; i < w.size(); ++i)
      if (!std::isfinite(w[i]))
        throw InputError("prepare: " + role + (tensor.empty() ? "" : " (" + one_line(tensor) + ")") + " is " +
                         std::to_string(w[i]) + " at element " + std::to_string(i) +
                         ", weights to be quantised must be finite");
  }

  IndexerWeights indexer(const IndexerTensors& t) const {
    if (!m_.indexer) throw ShapeError("prepare: tensors of an indexer are there, model " + m_.name + " has none");
    const IndexerConfig& x = *m_.indexer;
    return {.query = linear(t.query, "indexer query", x.heads * x.dim, m_.query_latent),
            .key = linear(t.key, "indexer key", x.dim, m_.hidden),
            .head_weights = linear(t.head_weights, "indexer head_weights", x.heads, m_.hidden),
            .key_norm = vector(t.key_norm, "indexer key_norm", x.dim),
            .key_norm_bias = vector(t.key_norm_bias, "indexer key_norm_bias", x.dim)};
  }

  // kv_up's rows are, per head, P rows of W_UK (a [P, L] block: the absorbed map's transpose) and V rows of W_UV ([V,
  // L]).
  void split(std::span<const float> up) {
    key_.resize(static_cast<size_t>(up_heads_ * m_.latent * m_.nope));
    value_.resize(static_cast<size_t>(up_heads_ * m_.value * m_.latent));
    for (int64_t h = 0; h < up_heads_; ++h) {
      const float* head = up.data() + h * (m_.nope + m_.value) * m_.latent;
      for (int64_t p = 0; p < m_.nope; ++p)
        for (int64_t l = 0; l < m_.latent; ++l) key_[(h * m_.latent + l) * m_.nope + p] = head[p * m_.latent + l];
      std::copy_n(head + m_.nope * m_.latent, m_.value * m_.latent, value_.begin() + h * m_.value * m_.latent);
    }
  }

  // Both products of weights are products like any other: rows of one matrix as x, the other one packed. In f32.
  void absorbed(LayerWeights& w, std::span<const float> query, int64_t query_in, std::span<const float> up,
                std::span<const float> output) {
    const bool fp8 = o_.absorption == Absorption::full_fp8;
    if (fp8) {
      finite(query, "query", t_.query.name);
      finite(up, "kv_up", t_.kv_up.name);
      finite(output, "output", t_.output.name);
    }
    const int64_t n = m_.heads, l = m_.latent, rows = m_.query_key();
    // W_Q's unrotated rows of a head, transposed; its rotated rows of all heads.
    std::vector<float> nope(static_cast<size_t>(n * query_in * m_.nope)), rope;
    rope.reserve(static_cast<size_t>(n * m_.rope * query_in));
    for (int64_t h = 0; h < n; ++h) {
      const float* head = query.data() + h * rows * query_in;
      for (int64_t p = 0; p < m_.nope; ++p)
        for (int64_t q = 0; q < query_in; ++q) nope[(h * query_in + q) * m_.nope + p] = head[p * query_in + q];
      rope.insert(rope.end(), head + m_.nope * query_in, head + rows * query_in);
    }
    if (m_.rope > 0) w.query_rope = backend_.pack(rope, 1, n * m_.rope, query_in, o_.dtype, device_);

    const WeightFormat format = fp8 ? WeightFormat::fp8 : WeightFormat::plain;
    std::vector<float> product(static_cast<size_t>(n * l * query_in));  // [head, latent, query in]
    multiply({key_.data(), {l, n, m_.nope}, {m_.nope, l * m_.nope, 1}}, nope, query_in,
             {product.data(), {l, n, query_in}, {query_in, l * query_in, 1}});
    if (fp8) finite(product, "W_Q W_UK^T", "");
    w.absorbed_query = pack(product, n, l, query_in, format, m_.fp8_block_rows, m_.fp8_block_cols);

    std::vector<float> value(value_.size());  // [head, latent, value]
    for (int64_t h = 0; h < n; ++h)
      for (int64_t v = 0; v < m_.value; ++v)
        for (int64_t i = 0; i < l; ++i) value[(h * l + i) * m_.value + v] = value_[(h * m_.value + v) * l + i];
    product.assign(static_cast<size_t>(m_.hidden * n * l), 0.0f);  // [hidden, head, latent]
    multiply({output.data(), {m_.hidden, n, m_.value}}, value, l, {product.data(), {m_.hidden, n, l}});
    if (fp8) finite(product, "W_UV W_O", "");
    w.absorbed_output = pack(product, 1, m_.hidden, n * l, format, m_.fp8_block_rows, m_.fp8_block_cols);
  }

  void multiply(View<const float, Token, Head, In> x, std::span<const float> w, int64_t out,
                View<float, Token, Head, Out> y) {
    const backend::Backend& cpu = backend::backend({});  // once a model, in host memory
    const auto packed = cpu.pack(w, x.extent<Head>(), out, x.extent<In>(), Dtype::f32, {});
    const size_t scratch = cpu.scratch_per_worker({.heads = m_.heads, .hidden = x.extent<In>()});
    const Buffer memory(scratch);
    ops::run(stream_, ops::ProjectArgs{.x = x,
                                       .x_rows = {},
                                       .weights = packed.get(),
                                       .y = y,
                                       .y_rows = {},
                                       .rows = x.extent<Token>(),
                                       .scratch = {memory.data(), scratch}});
  }

  const ModelConfig& m_;
  const LayerTensors& t_;
  PrepareOptions o_;
  Device device_;
  const backend::Backend& backend_;
  ThreadPool pool_{1};
  Stream stream_;
  int64_t up_heads_ = m_.heads;     // of key_ and value_
  std::vector<float> key_, value_;  // W_UK^T [head, latent, nope], W_UV [head, value, latent]
};

}  // namespace

LayerWeights prepare(const ModelConfig& m, const LayerTensors& t, const PrepareOptions& o, Device device) {
  m.validate();
  check_options(o);
  return Preparation(m, t, o, device).run();
}

LayerWeights outline(const ModelConfig& m, bool indexer, const PrepareOptions& o, Device device, int64_t group_heads) {
  check_options(o);
  const int64_t query_in = m.query_latent > 0 ? m.query_latent : m.hidden, n = m.heads;
  auto map = [&](int64_t heads, int64_t out, int64_t in, WeightFormat format = WeightFormat::plain, int64_t rows = 0,
                 int64_t cols = 0) {
    auto w = std::make_shared<Linear>();
    w->heads = heads;
    w->in = in;
    w->out = out;
    w->dtype = o.dtype;
    w->format = format;
    if (format == WeightFormat::fp8) {
      w->block_rows = rows;
      w->block_cols = cols;
    }
    return w;
  };
  const auto vector = [](int64_t size) { return WeightVector(std::vector<float>(static_cast<size_t>(size)), {}); };
  const auto [rows, cols] = product_block(m);
  const auto product = [&, r = rows, c = cols](int64_t out, int64_t in) { return map(1, out, in, o.products, r, c); };
  LayerWeights w;
  w.config = m;
  w.device = device;
  w.dtype = o.dtype;
  w.absorption = o.absorption;
  if (m.query_latent > 0) {
    w.query_down = product(m.query_latent, m.hidden);
    w.query_norm = vector(m.query_latent);
  }
  w.kv_down = product(m.entry(), m.hidden);
  w.kv_norm = vector(m.latent);
  if (indexer) {
    const IndexerConfig& x = *m.indexer;
    w.indexer = IndexerWeights{.query = map(1, x.heads * x.dim, m.query_latent),
                               .key = map(1, x.dim, m.hidden),
                               .head_weights = map(1, x.heads, m.hidden),
                               .key_norm = vector(x.dim),
                               .key_norm_bias = vector(x.dim)};
  }
  if (o.absorption == Absorption::runtime) {
    w.query = product(n * m.query_key(), query_in);
    w.kv_up = product(n * (m.nope + m.value), m.latent);
    w.output = product(m.hidden, n * m.value);
    const int64_t up_heads = group_heads > 0 ? group_heads : n;
    w.absorb_key = map(up_heads, m.latent, m.nope, o.up);
    w.value_up = map(up_heads, m.value, m.latent, o.up);
    return w;
  }
  if (m.rope > 0) w.query_rope = map(1, n * m.rope, query_in);
  const WeightFormat format = o.absorption == Absorption::full ? WeightFormat::plain : WeightFormat::fp8;
  w.absorbed_query = map(n, m.latent, query_in, format, m.fp8_block_rows, m.fp8_block_cols);
  w.absorbed_output = map(1, m.hidden, n * m.latent, format, m.fp8_block_rows, m.fp8_block_cols);
  return w;
}

double prepared_bytes(const ModelConfig& m, int64_t layer, const PrepareOptions& o, int64_t group_heads) {
  const LayerWeights w = outline(m, m.layer_has_indexer(layer), o, {}, group_heads);
  double total = 4.0 * static_cast<double>(m.query_latent + m.latent);
  if (w.indexer) total += 8.0 * static_cast<double>(m.indexer->dim);
  each_map(w, [&](const Linear& map) {
    total += weight_bytes(map.format, map.dtype, map.heads, map.out, map.in, map.block_rows, map.block_cols);
  });
  return total;
}

}  // namespace mla
