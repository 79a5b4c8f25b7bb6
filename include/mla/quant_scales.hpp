// Static scales of fp8 queries and caches from observed activations: one explicit call, no state.
#pragma once

#include <optional>

#include "mla/device.hpp"
#include "mla/view.hpp"
#include "mla/weights.hpp"

namespace mla {

/// Divisors of the largest magnitudes: below e4m3's 448, so that later activations may exceed what was seen.
struct KvScaleConstants {
  float q = 200.0f, k = 200.0f, v = 100.0f;
};

struct KvScales {
  float q_scale = 1.0f;  ///< PlanOptions::q_scale
  float k_scale = 1.0f;  ///< CacheSpec::k_scale
  float v_scale = 1.0f;  ///< of values held apart from keys; a latent cache's values are scaled by k_scale
};

/// q_scale = max|q| / constants.q, k_scale = max|kv_c| / constants.k, v_scale = max|kv_c| / constants.v. NaN does not
/// count; where nothing but zeros (or NaN, or nothing) was seen the scale is 1; a scale is at least FLT_MIN. InputError
/// naming the element for infinity, and the constant for one that is not finite and above 0.
KvScales calc_kv_scales(View<const float, Token, Head, QueryKey> q, View<const float, Token, Latent> kv_c,
                        const KvScaleConstants& constants = {});

/// The same of arrays on the stream's device, each f32, bf16 or f16, of any strides. A GPU reads them where they lie,
/// and is waited for: not while a stream is captured. InputError then names the array that holds an infinity.
KvScales calc_kv_scales(Stream& stream, AnyView<Token, Head, QueryKey> q, AnyView<Token, Latent> kv_c,
                        const KvScaleConstants& constants = {});

/// CacheSpec::k_scale of an fp8 latent cache by the scales that come with a checkpoint's layer: that of keys, as vLLM's
/// caches take it for the whole row; nothing where there is none. UnsupportedError where heads have different ones: a
/// latent row is all heads'.
std::optional<float> latent_k_scale(const StoredScales& scales);

}  // namespace mla
