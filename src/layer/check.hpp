// What a layer's calls must have, refused by name before anything runs.
#pragma once

#include "mla/layer.hpp"

namespace mla::layer {

/// Context and plan fit one another, the device and its workers.
void check(const LayerContext& context, Device device, int workers);
/// forward()'s inputs, and the tables that it rotates with.
void check_block(const LayerContext& context, const AnyView<Token, Hidden>& hidden,
                 const AnyMutableView<Token, Hidden>& out);
void check_tables(const LayerContext& context, Device device);
/// The ranks that forward() sums over, and those that share a cache.
void check_ranks(const LayerContext& context, bool forward);
/// attend()'s, of either output.
void check_attention(const LayerContext& context, const AnyView<Token, Head, QueryKey>& q,
                     const AnyView<Token, Latent>& kv_c, const AnyView<Token, Rope>& k_pe,
                     const AnyMutableView<Token, Head, Value>& out);
void check_attention(const LayerContext& context, const AnyView<Token, Head, QueryKey>& q,
                     const AnyView<Token, Latent>& kv_c, const AnyView<Token, Rope>& k_pe, const QuantizedView& out);
/// select()'s.
void check_choice(const LayerContext& context, View<const int32_t, Token, Topk> positions);

}  // namespace mla::layer
