// Which path a request takes: counted work over measured rates.
#include <algorithm>
#include <array>
#include <string>

#include "mla/error.hpp"
#include "plan/internal.hpp"

namespace mla {
namespace {

template <class E, size_t N>
E parse(std::string_view what, std::string_view name, const std::array<E, N>& all) {
  std::string known;
  for (E e : all) {
    if (to_string(e) == name) return e;
    known += ' ';
    known += to_string(e);
  }
  throw InputError("unknown " + std::string(what) + " '" + std::string(name) + "'; known:" + known);
}

}  // namespace

std::string_view to_string(Path p) {
  switch (p) {
    case Path::latent: return "latent";
    case Path::expanded: return "expanded";
    case Path::sparse: return "sparse";
  }
  return "?";
}

std::string_view to_string(PathPolicy p) {
  switch (p) {
    case PathPolicy::automatic: return "automatic";
    case PathPolicy::latent: return "latent";
    case PathPolicy::expanded: return "expanded";
    case PathPolicy::by_length: return "by_length";
    case PathPolicy::by_prompt: return "by_prompt";
  }
  return "?";
}

std::string_view to_string(SplitPolicy p) { return p == SplitPolicy::fast ? "fast" : "batch_invariant"; }

std::string_view to_string(SparsePolicy p) {
  switch (p) {
    case SparsePolicy::automatic: return "automatic";
    case SparsePolicy::mixed: return "mixed";
    case SparsePolicy::direct: return "direct";
    case SparsePolicy::upconvert: return "upconvert";
    case SparsePolicy::dense: return "dense";
    case SparsePolicy::masked: return "masked";
  }
  return "?";
}

std::string_view to_string(ActivationDtype t) {
  return t == ActivationDtype::native ? "native" : to_string(static_cast<Dtype>(static_cast<int>(t) - 1));
}

std::string_view to_string(PrefillOperands p) {
  switch (p) {
    case PrefillOperands::compute: return "compute";
    case PrefillOperands::fp8: return "fp8";
    case PrefillOperands::fp8_raw: return "fp8_raw";
  }
  return "?";
}

std::string_view to_string(DecodeOperands d) {
  switch (d) {
    case DecodeOperands::compute: return "compute";
    case DecodeOperands::fp8: return "fp8";
  }
  return "?";
}

std::string_view to_string(HiddenSums s) { return s == HiddenSums::all ? "all" : "own"; }

std::string_view to_string(ContextExchange e) { return e == ContextExchange::latents ? "latents" : "heads"; }

std::string_view to_string(LayerForm f) { return f == LayerForm::block ? "block" : "attention"; }

std::string_view to_string(CacheUse u) {
  switch (u) {
    case CacheUse::append: return "append";
    case CacheUse::read: return "read";
    case CacheUse::none: return "none";
  }
  return "?";
}

PathPolicy parse_path_policy(std::string_view name) {
  return parse("path policy", name,
               std::array{PathPolicy::automatic, PathPolicy::latent, PathPolicy::expanded, PathPolicy::by_length,
                          PathPolicy::by_prompt});
}

SplitPolicy parse_split_policy(std::string_view name) {
  return parse("split policy", name, std::array{SplitPolicy::fast, SplitPolicy::batch_invariant});
}

SparsePolicy parse_sparse_policy(std::string_view name) {
  return parse("sparse policy", name,
               std::array{SparsePolicy::automatic, SparsePolicy::mixed, SparsePolicy::direct, SparsePolicy::upconvert,
                          SparsePolicy::dense, SparsePolicy::masked});
}

PrefillOperands parse_prefill_operands(std::string_view name) {
  return parse("prefill operands", name,
               std::array{PrefillOperands::compute, PrefillOperands::fp8, PrefillOperands::fp8_raw});
}

DecodeOperands parse_decode_operands(std::string_view name) {
  return parse("decode operands", name, std::array{DecodeOperands::compute, DecodeOperands::fp8});
}

ActivationDtype parse_activation_dtype(std::string_view name) {
  return parse("activation dtype", name,
               std::array{ActivationDtype::native, ActivationDtype::f32, ActivationDtype::bf16, ActivationDtype::f16});
}

HiddenSums parse_hidden_sums(std::string_view name) {
  return parse("hidden sums", name, std::array{HiddenSums::all, HiddenSums::own});
}

ContextExchange parse_context_exchange(std::string_view name) {
  return parse("context exchange", name, std::array{ContextExchange::latents, ContextExchange::heads});
}

LayerForm parse_layer_form(std::string_view name) {
  return parse("layer form", name, std::array{LayerForm::block, LayerForm::attention});
}

CacheUse parse_cache_use(std::string_view name) {
  return parse("cache use", name, std::array{CacheUse::append, CacheUse::read, CacheUse::none});
}

// A core of an AVX-512 BF16 machine, bf16 operands: `mla bench` there finds attend_latent at 16 heads 210,
// attend_expanded 280, products 450 GFLOP/s and 20 GB/s a core. Dequantising fp8 rows on the way into a tile costs
// nothing that can be measured beside the arithmetic (sparse prefill at 16 heads: 98 ms from bf16, 100 from fp8_ds_mla,
// 96 from fp8), so its rates are left out and sparse rows are read in place. f32 operands and AVX2 keep nearly the same
// ratios between the paths.
//
// An H200 (bench/results/h200): attend_latent 590 TFLOP/s at 128 requests of 128 heads, attend_expanded 640 over
// prompts of 2K to 16K, products 700 (kv_up 590, W_O 770), 4.3 TB/s. Rows between ops are bf16 there. attend_expanded
// gives each of the 132 multiprocessors a tile, and cuts no keys. Context has launches of its own there: with 4 us for
// them the choices of path on an H100 and an H200 cost least (bench/results/*/fit.json).
CostModel default_cost_model(Device device) {
  if (device.kind == DeviceKind::cuda)
    return {.latent_flops = 590e12,
            .expanded_flops = 640e12,
            .projection_flops = 700e12,
            .bytes = 4.3e12,
            .row_element = 2,
            .expanded_tiles = 132,
            .context_seconds = 4e-6};
  return {.latent_flops = 210e9, .expanded_flops = 280e9, .projection_flops = 450e9, .bytes = 20e9};
}

namespace {

// pairs: of a query and a key it attends to. beside: path_cost's.
double form_cost(const ModelConfig& m, const CacheSpec& cache, const CostModel& rates, bool latent, int64_t new_tokens,
                 int64_t context, double pairs, int64_t beside) {
  const double t = static_cast<double>(new_tokens), c = static_cast<double>(context),
               heads = static_cast<double>(m.heads);
  const double l = static_cast<double>(m.latent), p = static_cast<double>(m.nope), r = static_cast<double>(m.rope),
               v = static_cast<double>(m.value);
  const double moved = 2 * rates.row_element;
  double projected, attended, bytes;
  if (latent) {
    projected = heads * t * 2 * l * (p + v);
    attended = heads * pairs * 2 * (l + r + static_cast<double>(cache.value_width()));
    // Cached rows, and queries and outputs in the latent space written and read.
    bytes = (c + t) * cache.token_bytes() + t * heads * (l + r + static_cast<double>(cache.value_width())) * moved;
  } else {
    projected = heads * (c + t) * 2 * l * (p + v);
    attended = heads * pairs * 2 * (p + r + v);
    bytes = c * cache.token_bytes() + (c + t) * (heads * (p + v) + r) * moved;  // gathered; keys and values
  }
  double attention = attended / (latent ? rates.latent_flops : rates.expanded_flops);
  if (!latent)
    attention *= std::max(1.0, rates.expanded_tiles / static_cast<double>(std::max<int64_t>(
                                                          expanded_tiles(m.heads, new_tokens) + beside, 1)));
  const double launches = !latent && context > 0 && beside == 0 ? rates.context_seconds : 0.0;
  return projected / rates.projection_flops + attention + (rates.bytes > 0 ? bytes / rates.bytes : 0.0) + launches;
}

// Sum over new tokens of the keys that each sees, `most` of them at most.
double pairs_of(double new_tokens, double context, double most) {
  const double growing = std::clamp(most - context, 0.0, new_tokens);
  return growing * context + growing * (growing + 1) / 2 + (new_tokens - growing) * most;
}

}  // namespace

int64_t expanded_tiles(int64_t heads, int64_t new_tokens) { return heads * planning::ceil_div(new_tokens, 128); }

double path_cost(const ModelConfig& m, const CacheSpec& cache, const CostModel& rates, Path path, int64_t new_tokens,
                 int64_t context, int64_t beside) {
  const double t = static_cast<double>(new_tokens), c = static_cast<double>(context);
  return form_cost(m, cache, rates, path == Path::latent, new_tokens, context, pairs_of(t, c, t + c), beside);
}

double sparse_cost(const ModelConfig& m, const CacheSpec& cache, const CostModel& rates, SparseForm form,
                   int64_t new_tokens, int64_t context) {
  auto over = [](double amount, double rate) { return rate > 0 ? amount / rate : 0.0; };
  const double t = static_cast<double>(new_tokens), c = static_cast<double>(context),
               topk = static_cast<double>(m.indexer ? m.indexer->topk : 0);
  if (form == SparseForm::masked)
    return planning::kMasking * form_cost(m, cache, rates, false, new_tokens, context, pairs_of(t, c, t + c), 0);
  const bool plain =
      cache.format == CacheFormat::f32 || cache.format == CacheFormat::bf16 || cache.format == CacheFormat::f16;
  const double pairs = pairs_of(t, c, topk), attended = form_cost(m, cache, rates, true, new_tokens, context, pairs, 0);
  const double entry = static_cast<double>(m.entry()), load = plain ? rates.plain_elements : rates.fp8_elements;
  if (form == SparseForm::direct) return attended + over(pairs * entry, load);
  return attended + over((c + t) * entry, load) + over((c + t) * entry * 2 * 2, rates.bytes) +
         over(pairs * entry, rates.plain_elements);
}

}  // namespace mla
