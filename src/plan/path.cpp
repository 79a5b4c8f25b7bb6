// Which path a request takes: counted work over measured rates.
#include <array>
#include <string>

#include "mla/error.hpp"
#include "mla/plan.hpp"

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

std::string_view to_string(Path p) { return p == Path::latent ? "latent" : "expanded"; }

std::string_view to_string(PathPolicy p) {
  switch (p) {
    case PathPolicy::automatic: return "automatic";
    case PathPolicy::latent: return "latent";
    case PathPolicy::expanded: return "expanded";
    case PathPolicy::by_length: return "by_length";
  }
  return "?";
}

std::string_view to_string(SplitPolicy p) { return p == SplitPolicy::fast ? "fast" : "batch_invariant"; }

PathPolicy parse_path_policy(std::string_view name) {
  return parse("path policy", name,
               std::array{PathPolicy::automatic, PathPolicy::latent, PathPolicy::expanded, PathPolicy::by_length});
}

SplitPolicy parse_split_policy(std::string_view name) {
  return parse("split policy", name, std::array{SplitPolicy::fast, SplitPolicy::batch_invariant});
}

// A core of an AVX-512 BF16 machine, bf16 operands: `mla bench` there finds attend_latent at 16 heads 210,
// attend_expanded 280, products 450 GFLOP/s and 20 GB/s a core. f32 operands and AVX2 keep nearly the same ratios
// between the paths.
CostModel default_cost_model(Device) {
  return {.latent_flops = 210e9, .expanded_flops = 280e9, .projection_flops = 450e9, .bytes = 20e9};
}

double path_cost(const ModelConfig& m, const CacheSpec& cache, const CostModel& rates, Path path, int64_t new_tokens,
                 int64_t context) {
  const double t = static_cast<double>(new_tokens), c = static_cast<double>(context),
               heads = static_cast<double>(m.heads);
  const double pairs = t * c + t * (t + 1) / 2;
  const double l = static_cast<double>(m.latent), p = static_cast<double>(m.nope), r = static_cast<double>(m.rope),
               v = static_cast<double>(m.value);
  double projected, attended, bytes;
  if (path == Path::latent) {
    projected = heads * t * 2 * l * (p + v);
    attended = heads * pairs * 2 * (l + r + static_cast<double>(cache.value_width()));
    bytes = (c + t) * cache.token_bytes();
  } else {
    projected = heads * (c + t) * 2 * l * (p + v);
    attended = heads * pairs * 2 * (p + r + v);
    bytes = c * cache.token_bytes() +
            (c + t) * (heads * (p + v) + r) * 4 * 2;  // gathered, and expanded rows written and read
  }
  const double attention = attended / (path == Path::latent ? rates.latent_flops : rates.expanded_flops);
  return projected / rates.projection_flops + attention + (rates.bytes > 0 ? bytes / rates.bytes : 0.0);
}

}  // namespace mla
