#include "layer/reference.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "cache/format.hpp"
#include "cache/index/codec.hpp"
#include "core/quantised_weights.hpp"
#include "mla/parallel.hpp"
#include "mla/rotary.hpp"
#include "model/outline.hpp"
#include "ops/index_score/cut_product.hpp"
#include "ops/project/activations.hpp"

namespace mla::reference {
namespace {

// The two loops that all of its time goes to stay out of the sanitizers' sight, under which they are 10 to 20 times
// slower: callers give ranges.
#define MLA_UNCHECKED [[gnu::no_sanitize("address", "undefined")]]

// Sum of a[i] * b[i] in T, sixteen partial sums at a time so that the compiler can use vectors without reordering
// anything else.
template <class T, class A, class B>
MLA_UNCHECKED T dot(const A* a, const B* b, int64_t n) {
  constexpr int64_t kLanes = 16;
  T lane[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t l = 0; l < kLanes; ++l) lane[l] += static_cast<T>(a[i + l]) * static_cast<T>(b[i + l]);
  T sum = 0;
  for (T x : lane) sum += x;
  for (; i < n; ++i) sum += static_cast<T>(a[i]) * static_cast<T>(b[i]);
  return sum;
}

// y[i] += factor * x[i]
template <class T, class X>
MLA_UNCHECKED void add_scaled(T* y, T factor, const X* x, size_t n) {
  for (size_t i = 0; i < n; ++i) y[i] += factor * static_cast<T>(x[i]);
}

template <class T>
void round_to(Dtype t, std::span<T> x, double moved = 0) {
  if (t == Dtype::f32) return;
  for (T& e : x) {
    std::byte stored[4];
    store_float(t, stored, 0, static_cast<float>(e + e * moved));
    e = load_float(t, stored, 0);
  }
}

template <class T>
class Sequence {
 public:
  Sequence(const ModelConfig& config, const Weights& weights, std::span<const float> hidden, const Rounding& rounding,
           const std::atomic<bool>* stop)
      : m_(config),
        w_(weights),
        r_(rounding),
        stop_(stop),
        hidden_(hidden),
        length_(static_cast<int64_t>(hidden.size()) / config.hidden) {
    frequencies_ = inverse_frequencies(m_.rotary, m_.rope);
    magnitude_ = rotary_magnitude(m_.rotary);
    entries_.resize(length_ * m_.entry());
    for (int64_t t = 0; t < length_ && !stopped(); ++t) append(t);
    cached_ = entries_;
    if (r_.cache) through_cache();
    if (r_.path == Path::expanded) {
      expanded_ = expand(cached_);
      if (r_.cache) fresh_ = expand(entries_);
    } else if (r_.round_keys) {
      round(r_.compute, cached_);
    }
  }

  bool stopped() const { return stop_ && stop_->load(std::memory_order_relaxed); }

  /// Attends to `keys`, ascending positions; to 0..position when it is empty. Tokens from `context` on came with it.
  void output(int64_t position, std::span<const int32_t> keys, int64_t context, std::span<double> y) const {
    std::vector<int32_t> all;
    if (keys.empty()) {
      all.resize(position + 1);
      std::iota(all.begin(), all.end(), 0);
      keys = all;
    }
    if (!w_.absorbed_query.empty()) return absorbed_output(position, keys, y);
    std::vector<T> q = query(position), heads(m_.heads * m_.value);
    for (int64_t h = 0; h < m_.heads && !stopped(); ++h) {
      std::span<const T> q_h(q.data() + h * m_.query_key(), m_.query_key());
      std::span<T> out(heads.data() + h * m_.value, m_.value);
      r_.path == Path::expanded ? expanded_head(h, keys, context, q_h, out) : latent_head(h, keys, q_h, out);
    }
    take(heads, w_.fp8_products);
    for (int64_t o = 0; o < m_.hidden; ++o)
      y[o] = static_cast<double>(dot<T>(heads.data(), w_.output.data() + o * m_.heads * m_.value, m_.heads * m_.value));
    round_outputs(y);
  }

  /// Scores of positions 0..position; keys as index_keys() gives them.
  std::vector<double> index_scores(int64_t position, std::span<const std::vector<T>> keys) const {
    const IndexerConfig& c = *m_.indexer;
    std::vector<T> q = product(query_source(position), w_.index_query),
                   weights = product(hidden_row(position), w_.index_head_weights);
    for (int64_t h = 0; h < c.heads; ++h) {
      const std::span<T> q_h = std::span(q).subspan(h * c.dim, c.dim);
      rotate(q_h.first(m_.rope), position, c.interleaved);
      hadamard(q_h);
      if (r_.index_cache && r_.index_cache->format == IndexCacheFormat::fp8) {
        T amax = 0;
        for (T e : q_h) amax = std::max(amax, std::abs(e));
        const T scale = static_cast<T>(cache::index::writer_scale(static_cast<float>(amax), true));
        for (T& e : q_h) e = to_float(to_fp8_e4m3(static_cast<float>(e / scale))) * scale;
      } else {
        round(r_.compute, q_h);
      }
    }
    const bool cut = r_.index_arithmetic == IndexArithmetic::fp8 && r_.index_cache &&
                     r_.index_cache->format == IndexCacheFormat::fp8;
    const T scale = T(1) / std::sqrt(static_cast<T>(c.heads * c.dim));
    std::vector<double> scores(position + 1);
    for (int64_t j = 0; j <= position && !stopped(); ++j) {
      T sum = 0;
      for (int64_t h = 0; h < c.heads; ++h) {
        const T* q_h = q.data() + h * c.dim;
        const T product =
            cut ? static_cast<T>(ops::cut_product(q_h, keys[j].data(), c.dim)) : dot<T>(q_h, keys[j].data(), c.dim);
        sum += scale * weights[h] * std::max(T(0), product);
      }
      scores[j] = static_cast<double>(sum);
    }
    return scores;
  }

  std::vector<std::vector<T>> index_keys() const {
    std::vector<std::vector<T>> keys(length_);
    for (int64_t t = 0; t < length_ && !stopped(); ++t) keys[t] = index_key(t);
    return keys;
  }

 private:
  // A sum's error goes with what is summed, not with what is left: small results are moved by as much as usual ones,
  // and all by four times as much as a usual error, which the largest of thousands comes to.
  void round_outputs(std::span<double> y) const {
    if (r_.outputs == Dtype::f32) return;
    double squares = 0;
    for (double e : y) squares += e * e;
    const double usual = std::sqrt(squares / static_cast<double>(y.size()));
    for (double& e : y) e += std::copysign(std::max(std::abs(e), usual), e) * 4 * r_.moved;
    round_to<double>(r_.outputs, y);
  }
  void round(Dtype t, std::span<T> x) const { round_to<T>(t, x, r_.moved); }
  float moved(T x) const { return static_cast<float>(x + x * r_.moved); }

  // Inputs as a product takes them.
  void take(std::span<T> x, bool fp8_weights) const {
    if (fp8_weights && r_.inputs == Activations::fp8_128) {
      // A group's scale follows its largest element, so that alone stays where it is.
      std::vector<float> values(x.begin(), x.end());
      for (size_t group = 0; group < x.size(); group += ops::kActivationGroup) {
        const auto first = x.begin() + static_cast<int64_t>(group),
                   last = x.begin() + static_cast<int64_t>(std::min(x.size(), group + ops::kActivationGroup)),
                   largest = std::max_element(first, last, [](T l, T r) { return std::abs(l) < std::abs(r); });
        for (auto e = first; e != last; ++e)
          if (e != largest) values[static_cast<size_t>(e - x.begin())] = moved(*e);
      }
      ops::through_fp8(values.data(), values.data(), static_cast<int64_t>(values.size()));
      std::copy(values.begin(), values.end(), x.begin());
    }
    round(r_.weights, x);
  }

  std::vector<T> product(std::span<const T> x, const std::vector<float>& w, bool fp8_weights = false) const {
    std::vector<T> rounded(x.begin(), x.end()), y(w.size() / x.size());
    take(rounded, fp8_weights);
    for (size_t o = 0; o < y.size(); ++o)
      y[o] = dot<T>(rounded.data(), w.data() + o * x.size(), static_cast<int64_t>(x.size()));
    return y;
  }

  std::vector<T> hidden_row(int64_t t) const {
    return {hidden_.begin() + t * m_.hidden, hidden_.begin() + (t + 1) * m_.hidden};
  }

  void norm(std::span<T> x, const std::vector<float>& weight) const {
    T sum = 0;
    for (T e : x) sum += e * e;
    const T inverse = T(1) / std::sqrt(sum / static_cast<T>(x.size()) + static_cast<T>(m_.rms_eps));
    for (size_t i = 0; i < x.size(); ++i) x[i] = x[i] * inverse * static_cast<T>(weight[i]);
  }

  void rotate(std::span<T> x, int64_t position) const { rotate(x, position, m_.rotary.interleaved); }
  void rotate(std::span<T> x, int64_t position, bool interleaved) const {
    if (!m_.rotary.rotate) return;
    const int64_t pairs = m_.rope / 2;
    for (int64_t i = 0; i < pairs; ++i) {
      const double angle = static_cast<double>(position) * frequencies_[i];
      const T c = static_cast<T>(std::cos(angle) * magnitude_), s = static_cast<T>(std::sin(angle) * magnitude_);
      T& a = x[interleaved ? 2 * i : i];
      T& b = x[interleaved ? 2 * i + 1 : i + pairs];
      const T rotated = a * c - b * s;
      b = b * c + a * s;
      a = rotated;
    }
  }

  void append(int64_t t) {
    std::vector<T> kv = product(hidden_row(t), w_.kv_down, w_.fp8_products);
    round(r_.activations, kv);
    norm(std::span(kv).first(m_.latent), w_.kv_norm);
    for (int64_t i = 0; i < m_.latent; ++i) kv[i] *= static_cast<T>(m_.latent_scale);
    rotate(std::span(kv).subspan(m_.latent), t);
    round(r_.activations, kv);
    std::copy(kv.begin(), kv.end(), entries_.begin() + t * m_.entry());
  }

  void through_cache() {
    CacheSpec spec = *r_.cache;
    spec.page_size = 1;
    const cache::Format& format = cache::format(spec.format);
    std::vector<std::byte> page(spec.page_bytes());
    std::vector<float> row(m_.entry());
    for (int64_t t = 0; t < length_; ++t) {
      for (int64_t i = 0; i < m_.entry(); ++i) row[i] = moved(entries_[t * m_.entry() + i]);
      format.encode(spec, page.data(), 0, row.data(), row.data() + m_.latent);
      format.decode(spec, page.data(), 0, 1, row.data(), m_.entry());
      std::copy(row.begin(), row.end(), cached_.begin() + t * m_.entry());
    }
  }

  // A scale of each head's, or all heads', or none.
  static float scale_of(const std::vector<float>& scales, int64_t head) {
    return scales.empty() ? 1.0f : scales[scales.size() > 1 ? static_cast<size_t>(head) : 0];
  }
  static float rope_scale(const std::vector<float>& keys) {
    return keys.empty() ? 1.0f : *std::max_element(keys.begin(), keys.end());
  }
  // Values as codes, whose values most kernels round to bf16.
  void through_codes(std::span<T> x, float scale) const {
    for (T& e : x) e = to_float(to_fp8_e4m3(moved(e) / scale)) * static_cast<T>(scale);
    if (!r_.float64) round(Dtype::bf16, x);
  }

  // Keys and values per head of rows as they were cached, or were to be; their rope parts round as operands.
  std::vector<T> expand(std::vector<T>& rows) const {
    const int64_t width = m_.heads * (m_.nope + m_.value);
    std::vector<T> expanded(length_ * width);
    for (int64_t t = 0; t < length_ && !stopped(); ++t) {
      std::vector<T> kv =
          product(std::span<const T>(rows.data() + t * m_.entry(), m_.latent), w_.kv_up, w_.fp8_products);
      round(r_.compute, kv);
      const std::span<T> rope(rows.data() + t * m_.entry() + m_.latent, m_.rope);
      if (r_.prefill) {
        for (int64_t h = 0; h < m_.heads; ++h) {
          const std::span<T> head = std::span<T>(kv).subspan(h * (m_.nope + m_.value), m_.nope + m_.value);
          through_codes(head.first(m_.nope), scale_of(r_.prefill->k, h));
          through_codes(head.subspan(m_.nope), scale_of(r_.prefill->v, h));
        }
        through_codes(rope, rope_scale(r_.prefill->k));
      } else {
        round(r_.compute, rope);
      }
      std::copy(kv.begin(), kv.end(), expanded.begin() + t * width);
    }
    return expanded;
  }

  std::vector<T> query_source(int64_t position) const {
    std::vector<T> x = hidden_row(position);
    if (m_.query_latent > 0) {
      x = product(x, w_.query_down, w_.fp8_products);
      round(r_.activations, x);
      norm(x, w_.query_norm);
      scale_query(x, position);
      round(r_.activations, x);
    }
    return x;
  }

  std::vector<T> query(int64_t position) const {
    std::vector<T> q = product(query_source(position), w_.query, w_.fp8_query());
    round(r_.activations, q);
    for (int64_t h = 0; h < m_.heads; ++h)
      rotate(std::span<T>(q.data() + h * m_.query_key() + m_.nope, m_.rope), position);
    round(r_.activations, q);
    return q;
  }

  // What a model multiplies its queries by: LongCat's constant, Mistral's growth with the position. As the layer does,
  // it is the latents that are multiplied, before they round.
  void scale_query(std::span<T> q, int64_t position) const {
    const double factor = m_.query_scale * m_.query_growth(position);
    if (factor != 1)
      for (T& e : q) e *= static_cast<T>(factor);
  }

  // Relative to the largest, which is 1.
  void round_probabilities(std::span<T> p) const {
    Dtype to = r_.latent_codes && r_.path == Path::latent ? Dtype::fp8_e4m3 : r_.compute;
    if (r_.prefill && r_.path == Path::expanded) to = r_.prefill_probabilities;
    if (to != Dtype::fp8_e4m3) return round(to, p);
    for (T& e : p) e = to_float(to_fp8_e4m3(static_cast<float>(e * 128))) / T(128);
  }

  // Softmax over scores, then the weighted sum of value rows; both products' operands round as asked.
  template <class Score, class ValueRow>
  void softmax_sum(std::span<const int32_t> keys, Score&& score, ValueRow&& value, std::span<T> out) const {
    std::vector<T> p(keys.size());
    T largest = -std::numeric_limits<T>::infinity();
    for (size_t j = 0; j < keys.size(); ++j) largest = std::max(largest, p[j] = score(keys[j]));
    T sum = 0;
    for (T& e : p) sum += (e = std::exp(e - largest));
    if (!r_.float64) round_probabilities(p);
    std::fill(out.begin(), out.end(), T(0));
    for (size_t j = 0; j < keys.size(); ++j) add_scaled(out.data(), p[j], value(keys[j]), out.size());
    for (T& e : out) e /= sum;
  }

  // Both projections as one map each, over the heads' outputs in the latent space.
  void absorbed_output(int64_t position, std::span<const int32_t> keys, std::span<double> y) const {
    const int64_t latent = m_.heads * m_.latent;
    const std::vector<T> q = query(position);
    const std::vector<T> latent_q = product(query_source(position), w_.absorbed_query, w_.fp8_absorbed);
    std::vector<T> latents(latent), entry(m_.entry());
    for (int64_t h = 0; h < m_.heads && !stopped(); ++h) {
      std::copy_n(latent_q.begin() + h * m_.latent, m_.latent, entry.begin());
      std::copy_n(q.begin() + h * m_.query_key() + m_.nope, m_.rope, entry.begin() + m_.latent);
      attend_latents(keys, entry, std::span<T>(latents).subspan(h * m_.latent, m_.latent));
    }
    take(latents, w_.fp8_absorbed);
    for (int64_t o = 0; o < m_.hidden; ++o)
      y[o] = static_cast<double>(dot<T>(latents.data(), w_.absorbed_output.data() + o * latent, latent));
    round_outputs(y);
  }

  void latent_head(int64_t h, std::span<const int32_t> keys, std::span<const T> q, std::span<T> out) const {
    // P rows of W_UK, then V rows of W_UV
    const float* w = (w_.latent_up.empty() ? w_.kv_up : w_.latent_up).data() + h * (m_.nope + m_.value) * m_.latent;
    std::vector<T> nope(q.begin(), q.begin() + m_.nope), entry(m_.entry()), latent(m_.latent);
    take(nope, w_.fp8_up);
    for (int64_t p = 0; p < m_.nope; ++p)
      add_scaled(entry.data(), nope[p], w + p * m_.latent, static_cast<size_t>(m_.latent));
    std::copy(q.begin() + m_.nope, q.end(), entry.begin() + m_.latent);
    attend_latents(keys, entry, latent);
    take(latent, w_.fp8_up);
    for (int64_t v = 0; v < m_.value; ++v) out[v] = dot<T>(latent.data(), w + (m_.nope + v) * m_.latent, m_.latent);
  }

  // One head's latent query [latent | rope] over the cached rows; latent becomes the weighted sum of their latents.
  void attend_latents(std::span<const int32_t> keys, std::span<T> entry, std::span<T> latent) const {
    if (r_.q_scale > 0)
      for (T& e : entry) e = to_float(to_fp8_e4m3(moved(e) / r_.q_scale)) * r_.q_scale;
    else round(r_.compute, entry);
    const T scale = static_cast<T>(m_.softmax_scale());
    softmax_sum(
        keys, [&](int64_t j) { return dot<T>(entry.data(), &cached_[j * m_.entry()], m_.entry()) * scale; },
        [&](int64_t j) { return &cached_[j * m_.entry()]; }, latent);
  }

  void expanded_head(int64_t h, std::span<const int32_t> keys, int64_t context, std::span<const T> q,
                     std::span<T> out) const {
    std::vector<T> rounded(q.begin(), q.end());
    if (r_.prefill) {
      const float query = scale_of(r_.prefill->q, h);
      through_codes(std::span(rounded).first(m_.nope), query);
      through_codes(std::span(rounded).subspan(m_.nope),
                    query * scale_of(r_.prefill->k, h) / rope_scale(r_.prefill->k));
    } else {
      round(r_.compute, rounded);
    }
    const int64_t per_head = m_.nope + m_.value, row = m_.heads * per_head;
    const T scale = static_cast<T>(m_.softmax_scale());
    const auto fresh = [&](int64_t j) { return j >= context && !fresh_.empty(); };
    auto key = [&](int64_t j) { return &(fresh(j) ? fresh_ : expanded_)[j * row + h * per_head]; };
    softmax_sum(
        keys,
        [&](int64_t j) {
          return (dot<T>(rounded.data(), key(j), m_.nope) +
                  dot<T>(rounded.data() + m_.nope, &(fresh(j) ? entries_ : cached_)[j * m_.entry() + m_.latent],
                         m_.rope)) *
                 scale;
        },
        [&](int64_t j) { return key(j) + m_.nope; }, out);
  }

  // y_i = n^-0.5 sum over j of (-1)^popcount(i & j) x_j
  void hadamard(std::span<T> x) const {
    if (!r_.index_hadamard) return;
    std::vector<T> y(x.size());
    for (size_t i = 0; i < x.size(); ++i)
      for (size_t j = 0; j < x.size(); ++j) y[i] += std::popcount(i & j) % 2 ? -x[j] : x[j];
    const T factor = T(1) / std::sqrt(static_cast<T>(x.size()));
    for (size_t i = 0; i < x.size(); ++i) x[i] = y[i] * factor;
  }

  std::vector<T> index_key(int64_t t) const {
    const IndexerConfig& c = *m_.indexer;
    std::vector<T> k = product(hidden_row(t), w_.index_key);
    T mean = 0, square = 0;
    for (T e : k) mean += e;
    mean /= static_cast<T>(c.dim);
    for (T e : k) square += (e - mean) * (e - mean);
    const T inverse = T(1) / std::sqrt(square / static_cast<T>(c.dim) + static_cast<T>(1e-6));
    for (int64_t i = 0; i < c.dim; ++i)
      k[i] = (k[i] - mean) * inverse * static_cast<T>(w_.index_key_norm[i]) + static_cast<T>(w_.index_key_norm_bias[i]);
    rotate(std::span(k).first(m_.rope), t, c.interleaved);
    hadamard(k);
    if (!r_.index_cache) return k;
    IndexCacheSpec spec = *r_.index_cache;
    spec.page_size = 1;
    std::vector<std::byte> page(spec.page_bytes());
    std::vector<float> row(k.begin(), k.end());
    cache::index::encode(spec, page.data(), 0, row.data());
    cache::index::decode(spec, page.data(), 0, row.data());
    return {row.begin(), row.end()};
  }

  const ModelConfig& m_;
  const Weights& w_;
  Rounding r_;
  const std::atomic<bool>* stop_;
  std::span<const float> hidden_;
  int64_t length_;
  std::vector<double> frequencies_;
  double magnitude_ = 1;
  std::vector<T> entries_, cached_, expanded_, fresh_;
};

// Weights as a format holds them; rows and columns as in the matrix that is multiplied.
std::vector<float> held(std::span<const float> w, int64_t heads, int64_t out, int64_t in, WeightFormat format,
                        int64_t block_rows, int64_t block_cols, Dtype dtype) {
  std::vector<float> x(w.begin(), w.end());
  if (format != WeightFormat::plain)
    x = dequantise(quantise(x, heads, out, in, format, block_rows, block_cols), Dtype::f32);
  round_to<float>(dtype, x);
  return x;
}

template <class T>
std::vector<double> rows_of(const ModelConfig& config, const Weights& weights, std::span<const float> hidden,
                            std::span<const int64_t> rows, const Rounding& rounding,
                            std::span<const std::vector<int32_t>> selections, std::span<const int64_t> contexts,
                            const std::atomic<bool>* stop) {
  const Sequence<T> sequence(config, weights, hidden, rounding, stop);
  std::vector<double> out(rows.size() * config.hidden);
  for (size_t i = 0; i < rows.size() && !sequence.stopped(); ++i)
    sequence.output(rows[i], selections.empty() ? std::span<const int32_t>() : selections[i],
                    contexts.empty() ? std::numeric_limits<int64_t>::max() : contexts[i],
                    std::span(out).subspan(i * config.hidden, config.hidden));
  return sequence.stopped() ? std::vector<double>() : out;
}

template <class T>
std::vector<std::vector<double>> scores_of(const ModelConfig& config, const Weights& weights,
                                           std::span<const float> hidden, std::span<const int64_t> rows,
                                           const Rounding& rounding, const std::atomic<bool>* stop) {
  const Sequence<T> sequence(config, weights, hidden, rounding, stop);
  const std::vector<std::vector<T>> keys = sequence.index_keys();
  std::vector<std::vector<double>> scores;
  for (int64_t row : rows) scores.push_back(sequence.index_scores(row, keys));
  if (sequence.stopped()) scores.clear();
  return scores;
}

}  // namespace

void round_rows(Dtype dtype, std::span<float> rows) { round_to(dtype, rows); }

Weights plain_weights(const LayerTensors& tensors, Dtype dtype) {
  auto plain = [&](const HostTensor& t, bool rounds) {
    std::vector<float> x;
    if (t) x = t.to_f32(rounds ? dtype : Dtype::f32);
    return x;
  };
  const IndexerTensors none, &index = tensors.indexer ? *tensors.indexer : none;
  return {.query_down = plain(tensors.query_down, true),
          .query_norm = plain(tensors.query_norm, false),
          .query = plain(tensors.query, true),
          .kv_down = plain(tensors.kv_down, true),
          .kv_norm = plain(tensors.kv_norm, false),
          .kv_up = plain(tensors.kv_up, true),
          .output = plain(tensors.output, true),
          .index_query = plain(index.query, true),
          .index_key = plain(index.key, true),
          .index_key_norm = plain(index.key_norm, false),
          .index_key_norm_bias = plain(index.key_norm_bias, false),
          .index_head_weights = plain(index.head_weights, true)};
}

namespace {

// What one rank holds.
Weights part_weights(const ModelConfig& m, const LayerTensors& tensors, const PrepareOptions& o, double moved) {
  Weights w = plain_weights(tensors, o.dtype);
  const bool runtime = o.absorption == Absorption::runtime;
  w.fp8_up = runtime && o.up == WeightFormat::fp8;
  w.fp8_absorbed = o.absorption == Absorption::full_fp8;
  const int64_t per_head = m.nope + m.value, l = m.latent, n = m.heads;
  const std::vector<float> up = tensors.kv_up.to_f32();
  if (o.products == WeightFormat::fp8) {
    w.fp8_products = true;
    if (runtime) w.latent_up = w.kv_up;  // the latent path's maps are made of what is stored
    const auto [rows, cols] = product_block(m);
    const auto hold = [&, r = rows, c = cols](std::vector<float>& x, const HostTensor& t) {
      if (t && !stored_as_fp8(t)) x = held(t.to_f32(), 1, t.shape[0], t.shape[1], WeightFormat::fp8, r, c, o.dtype);
    };
    hold(w.query_down, tensors.query_down);
    hold(w.kv_down, tensors.kv_down);
    if (runtime) {
      hold(w.query, tensors.query);
      hold(w.kv_up, tensors.kv_up);
      hold(w.output, tensors.output);
    }
  }
  if (runtime && o.up != WeightFormat::plain) {
    // W_UK^T [head, latent, nope] and W_UV [head, value, latent], each quantised by itself, and back to kv_up's rows.
    std::vector<float> key, value;
    for (int64_t h = 0; h < n; ++h) {
      for (int64_t i = 0; i < l; ++i)
        for (int64_t p = 0; p < m.nope; ++p) key.push_back(up[(h * per_head + p) * l + i]);
      value.insert(value.end(), up.begin() + (h * per_head + m.nope) * l, up.begin() + (h + 1) * per_head * l);
    }
    key = held(key, n, l, m.nope, o.up, 0, 0, o.dtype);
    value = held(value, n, m.value, l, o.up, 0, 0, o.dtype);
    w.latent_up.resize(up.size());
    for (int64_t h = 0; h < n; ++h) {
      for (int64_t p = 0; p < m.nope; ++p)
        for (int64_t i = 0; i < l; ++i) w.latent_up[(h * per_head + p) * l + i] = key[(h * l + i) * m.nope + p];
      std::copy_n(value.begin() + h * m.value * l, m.value * l, w.latent_up.begin() + (h * per_head + m.nope) * l);
    }
  }
  if (runtime) return w;
  const std::vector<float> query = tensors.query.to_f32(), output = tensors.output.to_f32();
  const int64_t in = m.query_latent > 0 ? m.query_latent : m.hidden;
  std::vector<float> q(static_cast<size_t>(n * l * in)), out(static_cast<size_t>(m.hidden * n * l));
  for (int64_t h = 0; h < n; ++h)
    for (int64_t i = 0; i < l; ++i)
      for (int64_t p = 0; p < m.nope; ++p)
        add_scaled(&q[(h * l + i) * in], up[(h * per_head + p) * l + i], &query[(h * m.query_key() + p) * in],
                   static_cast<size_t>(in));
  for (int64_t row = 0; row < m.hidden; ++row)
    for (int64_t h = 0; h < n; ++h)
      for (int64_t v = 0; v < m.value; ++v)
        add_scaled(&out[(row * n + h) * l], output[(row * n + h) * m.value + v], &up[(h * per_head + m.nope + v) * l],
                   static_cast<size_t>(l));
  // Sums in f32 before they become codes, whose error goes with their terms.
  for (std::vector<float>* x : {&q, &out}) {
    double squares = 0;
    for (float e : *x) squares += double{e} * e;
    const double usual = std::sqrt(squares / static_cast<double>(x->size()));
    for (float& e : *x) e = static_cast<float>(e + std::copysign(4 * moved * std::max<double>(std::fabs(e), usual), e));
  }
  const WeightFormat format = o.absorption == Absorption::full ? WeightFormat::plain : WeightFormat::fp8;
  w.absorbed_query = held(q, n, l, in, format, m.fp8_block_rows, m.fp8_block_cols, o.dtype);
  w.absorbed_output = held(out, 1, m.hidden, n * l, format, m.fp8_block_rows, m.fp8_block_cols, o.dtype);
  return w;
}

// The columns of `part` behind those of `all`, in each of `rows` rows.
void append_columns(std::vector<float>& all, const std::vector<float>& part, int64_t rows) {
  if (part.empty()) return;
  const size_t have = all.size() / rows, more = part.size() / rows;
  std::vector<float> joined;
  joined.reserve(all.size() + part.size());
  for (int64_t r = 0; r < rows; ++r) {
    joined.insert(joined.end(), all.begin() + r * have, all.begin() + (r + 1) * have);
    joined.insert(joined.end(), part.begin() + r * more, part.begin() + (r + 1) * more);
  }
  all = std::move(joined);
}

}  // namespace

Weights plain_weights(const ModelConfig& m, const LayerTensors& tensors, const PrepareOptions& o, int ranks,
                      double moved) {
  if (ranks == 1) return part_weights(m, tensors, o, moved);
  // A rank's scales are of what it holds, so that codes are not those of one rank.
  Weights all;
  for (int rank = 0; rank < ranks; ++rank) {
    const HeadRange heads = head_share(m.heads, rank, ranks);
    Weights part = part_weights(part_of(m, heads), part_of(m, tensors, heads), o, moved);
    if (rank == 0) {
      all = std::move(part);
      continue;
    }
    for (const auto rows : {&Weights::query, &Weights::kv_up, &Weights::latent_up, &Weights::absorbed_query})
      (all.*rows).insert((all.*rows).end(), (part.*rows).begin(), (part.*rows).end());
    for (const auto columns : {&Weights::output, &Weights::absorbed_output})
      append_columns(all.*columns, part.*columns, m.hidden);
  }
  return all;
}

std::vector<double> output_rows(const ModelConfig& config, const Weights& weights, std::span<const float> hidden,
                                std::span<const int64_t> rows, const Rounding* rounding,
                                std::span<const std::vector<int32_t>> selections, std::span<const int64_t> contexts,
                                const std::atomic<bool>* stop) {
  if (rounding && !rounding->float64)
    return rows_of<float>(config, weights, hidden, rows, *rounding, selections, contexts, stop);
  return rows_of<double>(config, weights, hidden, rows, rounding ? *rounding : Rounding{}, selections, contexts, stop);
}

std::vector<std::vector<double>> index_scores(const ModelConfig& config, const Weights& weights,
                                              std::span<const float> hidden, std::span<const int64_t> rows,
                                              const Rounding* rounding, const std::atomic<bool>* stop) {
  return rounding ? scores_of<float>(config, weights, hidden, rows, *rounding, stop)
                  : scores_of<double>(config, weights, hidden, rows, Rounding{}, stop);
}

std::vector<int32_t> best(std::span<const double> scores, int64_t k) {
  std::vector<int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return scores[a] > scores[b]; });
  order.resize(std::min<size_t>(order.size(), static_cast<size_t>(k)));
  std::sort(order.begin(), order.end());
  return order;
}

double selection_error(std::span<const int32_t> chosen, std::span<const double> exact, std::span<const double> plain,
                       int64_t k) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  if (chosen.size() != std::min<size_t>(exact.size(), static_cast<size_t>(k))) return kNever;
  std::vector<bool> in(exact.size());
  double lowest = kNever, highest = -kNever, error = 0, largest = 0;
  for (int32_t j : chosen) {
    if (j < 0 || static_cast<size_t>(j) >= exact.size() || in[j]) return kNever;
    in[j] = true;
    lowest = std::min(lowest, exact[j]);
  }
  for (size_t j = 0; j < exact.size(); ++j) {
    if (!in[j]) highest = std::max(highest, exact[j]);
    error = std::max(error, std::abs(exact[j] - plain[j]));
    largest = std::max(largest, std::abs(exact[j]));
  }
  // Two scores that each err by twice the plain error may stand in the wrong order while four errors apart.
  const double excused = 4 * error + 2e-6 * largest;
  if (highest <= lowest) return 0;
  return excused > 0 ? (highest - lowest) / excused : kNever;
}

double relative_error(std::span<const float> got, std::span<const double> exact) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    error += (got[i] - exact[i]) * (got[i] - exact[i]);
    norm += exact[i] * exact[i];
  }
  return norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
}

}  // namespace mla::reference
