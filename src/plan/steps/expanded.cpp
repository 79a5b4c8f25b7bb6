// The expanded path: latent rows become keys and values of each head.
#include "plan/steps/steps.hpp"

namespace mla::planning {
namespace {

// Keys and values of `rows` latent rows, in the compute dtype; the shared rope part keeps its own array.
struct Expanded {
  Operand<Key, Head, Nope> k_nope;
  Operand<Key, Rope> k_pe;
  Operand<Key, Head, Value> v;
};
Expanded expand(Steps& s, Calls calls, const Operand<Token, Head, In>& kv_c, const Operand<Token, Head, In>& k_pe,
                const RowList& list, int64_t rows) {
  const ModelConfig& m = s.m;
  const Dtype t = s.plan.options.compute;
  const int64_t n = m.heads, width = m.nope + m.value;
  const auto keys = s.region<Key, Head, Out>("keys", t, {rows, n, width});
  s.project("kv_up", calls, kv_c, list, Weight::kv_up, s.region<Token, Head, Out>("keys", t, {rows, 1, n * width}), {},
            rows);
  if (m.rope > 0)
    s.add("key_rope", calls,
          steps::Cast{.x = k_pe, .x_rows = list, .y = s.region<Token, Head, In>("key_rope", t, {rows, 1, m.rope})});
  return {keys.part<Key, Head, Nope>(0, {rows, n, m.nope}), s.region<Key, Rope>("key_rope", t, {rows, m.rope}),
          keys.part<Key, Head, Value>(m.nope, {rows, n, m.value})};
}

void attend(Steps& s, Calls calls, const Expanded& e, const ListOf<ExpandedItem>& items, bool accumulate) {
  const ModelConfig& m = s.m;
  s.add(accumulate ? "attend_context" : "attend_expanded", calls,
        steps::AttendExpanded{
            .q = s.input<Token, Head, QueryKey>(Memory::q, s.act, {s.tokens, m.heads, m.query_key()}),
            .k_nope = e.k_nope,
            .k_pe = e.k_pe,
            .v = e.v,
            .items = items,
            .scale = static_cast<float>(m.softmax_scale()),
            .out = s.input<Token, Head, Value>(Memory::heads, s.act, {s.plan.head_rows, m.heads, m.value}),
            .lse = s.region<Token, Head>("heads_lse", Dtype::f32, {s.tokens, m.heads}),
            .accumulate = accumulate,
            .quantized = s.plan.fused_output});
}

}  // namespace

void expanded_steps(Steps& s, Calls calls) {
  const ModelConfig& m = s.m;
  const Plan& p = s.plan;
  const int64_t rows = static_cast<int64_t>(p.expanded_tokens.size());
  attend(s, calls,
         expand(s, calls, s.input<Token, Head, In>(Memory::kv_c, s.act, {s.tokens, 1, m.latent}),
                s.input<Token, Head, In>(Memory::k_pe, s.act, {s.tokens, 1, m.rope}),
                s.list(ListKind::expanded_tokens, p.expanded_tokens), rows),
         s.list(ListKind::suffix_items, p.suffix_items), false);
  for (size_t c = 0; c < p.chunks.size(); ++c) {
    const ContextChunk& chunk = p.chunks[c];
    const auto context = s.region<Key, Entry>("context", s.act, {chunk.rows, m.entry()});
    const auto kv_c = context.part<Key, Latent>(0, {chunk.rows, m.latent});
    const auto k_pe = context.part<Key, Rope>(m.latent, {chunk.rows, m.rope});
    s.add("gather", calls, steps::Gather{s.list(ListKind::context_pieces, chunk.pieces, c), kv_c, k_pe});
    const auto flat = [&](const auto& rope_or_latent, int64_t width) {
      return Operand<Token, Head, In>(Memory::workspace, s.act, rope_or_latent.offset, {chunk.rows, 1, width},
                                      {context.stride<Key>(), 0, 1});
    };
    attend(s, calls, expand(s, calls, flat(kv_c, m.latent), flat(k_pe, m.rope), {}, chunk.rows),
           s.list(ListKind::context_items, chunk.items, c), true);
  }
}

}  // namespace mla::planning
