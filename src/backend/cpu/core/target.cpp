#include "backend/cpu/core/target.hpp"

#include <algorithm>
#include <string>

#include "backend/cpu/backend.hpp"
#include "backend/cpu/core/rates.hpp"
#include "backend/cpu/core/tile_registers.hpp"
#include "hwy/highway.h"
#include "mla/error.hpp"

namespace mla::cpu {
namespace {

bool bf16_dot_allowed = true, amx_allowed = true, asked = false;  // asked: for the best that is allowed, by name

constexpr std::string_view kAmx = "amx_bf16";
#if defined(__aarch64__)
constexpr std::string_view kBf16Dot = "neon_bf16";
#else
constexpr std::string_view kBf16Dot = "avx512_bf16";
#endif

struct Named {
  std::string_view name;
  int64_t bit;
};
// Best first. "portable" is the baseline every CPU of the architecture has.
constexpr Named kTargets[] = {
#if defined(__x86_64__)
    {"avx512", HWY_AVX3},
    {"avx2", HWY_AVX2},
    {"sse4", HWY_SSE4},
#elif defined(__aarch64__)
    {"neon", HWY_NEON},
#endif
    {"portable", HWY_STATIC_TARGET}};

int64_t unrestricted() {
  hwy::SetSupportedTargetsForTest(0);
  return hwy::SupportedTargets() & HWY_TARGETS;
}

}  // namespace

bool native_bf16_dot() {
  static const bool has = has_bf16_dot();
  return has && bf16_dot_allowed;
}

bool native_amx() { return native_bf16_dot() && amx_allowed && has_amx_bf16(); }

Bf16Products bf16_products() {
  if (!native_bf16_dot()) return Bf16Products::widened;
  if (asked) return native_amx() ? Bf16Products::amx : Bf16Products::dot;
  // Widened operands cost a conversion less than pairs do.
  const Bf16Rates& rates = bf16_rates();
  if (native_amx() && rates.amx > 1.5 * std::max(1.0, rates.dot)) return Bf16Products::amx;
  return rates.dot > 1.5 ? Bf16Products::dot : Bf16Products::widened;
}

std::vector<std::string_view> targets() {
  std::vector<std::string_view> names;
#ifdef __x86_64__
  names = {kAmx, kBf16Dot};
#elif defined(__aarch64__)
  names = {kBf16Dot};
#endif
  int64_t before = 0;
  for (const Named& t : kTargets) {
    if (t.bit != before) names.push_back(t.name);
    before = t.bit;
  }
  return names;
}

std::string_view target() {
  if (native_amx()) return kAmx;
  if (native_bf16_dot()) return kBf16Dot;
  const int64_t supported = hwy::SupportedTargets();
  for (const Named& t : kTargets)
    if (supported & t.bit) return t.name;
  return "portable";
}

void restrict_target(std::string_view name) {
  const int64_t all = unrestricted();
  bf16_dot_allowed = amx_allowed = true;
  asked = name == kAmx || name == kBf16Dot;
  if (asked) {
    amx_allowed = name == kAmx;
    if (name == kAmx ? !native_amx() : !native_bf16_dot()) {
      asked = false;
      amx_allowed = true;
      throw UnsupportedError("this CPU lacks target " + std::string(name));
    }
  } else if (!name.empty()) {
    const auto* t =
        std::find_if(std::begin(kTargets), std::end(kTargets), [&](const Named& n) { return n.name == name; });
    if (t == std::end(kTargets)) {
      std::string known;
      for (const std::string_view n : targets()) known += " " + std::string(n);
      throw InputError("unknown target '" + std::string(name) + "'; known:" + known);
    }
    if (!(all & t->bit)) throw UnsupportedError("this CPU lacks target " + std::string(name));
    // Better targets have lower bits.
    hwy::SetSupportedTargetsForTest(all & ~(t->bit - 1));
    bf16_dot_allowed = false;
  }
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

size_t scratch_per_worker(const backend::ScratchShape& shape) {
  const size_t most = std::max({project_scratch(shape), attend_expanded_scratch(shape), attend_latent_scratch(shape),
                                attend_sparse_scratch(shape), index_score_scratch(shape), select_topk_scratch(shape)});
  return (most + 63) / 64 * 64;
}

}  // namespace mla::cpu
