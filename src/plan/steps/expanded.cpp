// The expanded path: latent rows become keys and values of each head.
#include <algorithm>
#include <numeric>

#include "plan/internal.hpp"
#include "plan/steps/steps.hpp"

namespace mla::planning {
namespace {

// Keys and values of `rows` latent rows, in the compute dtype or as codes; the shared rope part keeps its own array.
struct Expanded {
  Operand<Key, Head, Nope> k_nope = {};
  Operand<Key, Rope> k_pe = {};
  Operand<Key, Head, Value> v = {};
};

// Codes of rows by the layer's scales.
void encode(Steps& s, std::string_view name, Calls calls, const Operand<Token, Head, In>& x, const RowList& list,
            const Operand<Token, Head, In>& y, Scales scales) {
  s.add(name, calls, steps::Cast{.x = x, .x_rows = list, .y = y, .scales = scales});
}

// The same rows, of one head.
template <class D>
Operand<Token, Head, In> of_one_head(const Operand<Token, D>& x) {
  const int64_t width = x.template extent<D>();
  return {x.memory, x.dtype, x.offset, {x.template extent<Token>(), 1, width}, {x.template stride<Token>(), 0, 1}};
}

Expanded products(Steps& s, Calls calls, const Operand<Token, Latent>& kv_c, const RowList& list, int64_t rows) {
  const ModelConfig& m = s.m;
  const Dtype t = s.plan.options.compute;
  const int64_t n = m.heads, width = m.nope + m.value;
  s.project("kv_up", calls, of_one_head(kv_c), list, Weight::kv_up,
            s.region<Token, Head, Out>("keys", t, {rows, 1, n * width}), {}, rows);
  const auto keys = s.region<Key, Head, Out>("keys", t, {rows, n, width});
  return {.k_nope = keys.part<Key, Head, Nope>(0, {rows, n, m.nope}),
          .v = keys.part<Key, Head, Value>(m.nope, {rows, n, m.value})};
}

Expanded codes(Steps& s, Calls calls, const Operand<Token, Latent>& kv_c, const RowList& list, int64_t rows) {
  const ModelConfig& m = s.m;
  const int64_t n = m.heads, pitch = round_up(rows, kCodeRows);
  constexpr Dtype e4m3 = Dtype::fp8_e4m3;
  // On a GPU a head's values lie with their rows innermost, as tensor cores take e4m3.
  const bool turned = s.plan.device.device.kind == DeviceKind::cuda;
  const Expanded made{
      .k_nope = s.region<Key, Head, Nope>("key_codes", e4m3, {rows, n, m.nope}),
      .v = turned ? s.region<Key, Head, Value>("value_codes", e4m3, {rows, n, m.value}, {1, m.value * pitch, pitch})
                  : s.region<Key, Head, Value>("value_codes", e4m3, {rows, n, m.value})};
  s.add("kv_up", calls,
        steps::Expand{.x = kv_c,
                      .x_rows = list,
                      .keys = made.k_nope,
                      .values = made.v,
                      .products = s.region<Token, Out>("keys", s.plan.options.compute,
                                                       {std::min(rows, kProductRows), n * (m.nope + m.value)})});
  return made;
}

Expanded expand(Steps& s, Calls calls, const Operand<Token, Latent>& kv_c, const Operand<Token, Rope>& k_pe,
                const RowList& list, int64_t rows) {
  const ModelConfig& m = s.m;
  const bool by_codes = s.plan.prefills_codes();
  const Dtype rope = by_codes ? Dtype::fp8_e4m3 : s.plan.options.compute;
  Expanded made = (by_codes ? codes : products)(s, calls, kv_c, list, rows);
  if (m.rope > 0)
    encode(s, "key_rope", calls, of_one_head(k_pe), list,
           s.region<Token, Head, In>("key_rope", rope, {rows, 1, m.rope}), by_codes ? Scales::key_rope : Scales::none);
  made.k_pe = s.region<Key, Rope>("key_rope", rope, {rows, m.rope});
  return made;
}

// The step's queries as the path multiplies them.
Operand<Token, Head, QueryKey> queries(Steps& s, Calls calls) {
  const ModelConfig& m = s.m;
  const auto q = s.input<Token, Head, QueryKey>(Memory::q, s.act, {s.tokens, m.heads, m.query_key()});
  if (!s.plan.prefills_codes()) return q;
  const auto codes =
      s.region<Token, Head, QueryKey>("query_codes", Dtype::fp8_e4m3, {s.tokens, m.heads, m.query_key()});
  const auto part = [&](std::string_view name, int64_t begin, int64_t width, Scales scales) {
    if (width == 0) return;
    encode(s, name, calls, q.part<Token, Head, In>(begin, {s.tokens, m.heads, width}), {},
           codes.part<Token, Head, In>(begin, {s.tokens, m.heads, width}), scales);
  };
  part("query_codes", 0, m.nope, Scales::query);
  part("query_rope_codes", m.nope, m.rope, Scales::query_rope);
  return codes;
}

void attend(Steps& s, Calls calls, const Operand<Token, Head, QueryKey>& q, const Expanded& e,
            const ListOf<ExpandedItem>& items, const Operand<Token, Word>& mask, bool accumulate) {
  const ModelConfig& m = s.m;
  s.add(accumulate ? "attend_context" : "attend_expanded", calls,
        steps::AttendExpanded{
            .q = q,
            .k_nope = e.k_nope,
            .k_pe = e.k_pe,
            .v = e.v,
            .items = items,
            .mask = mask,
            .scale = static_cast<float>(m.softmax_scale()),
            .out = s.input<Token, Head, Value>(Memory::heads, s.act, {s.plan.head_rows, m.heads, m.value}),
            .lse = s.region<Token, Head>("heads_lse", Dtype::f32, {s.tokens, m.heads}),
            .accumulate = accumulate,
            .quantized = s.plan.fused_output,
            .raw_sums = s.plan.options.prefill == PrefillOperands::fp8_raw});
}

// Of a split cache: members send the stored rows that they hold of a chunk; each row is then read straight to the place
// of its position, where one rank's gather would have put it.
void gather_sent(Steps& s, Calls calls, size_t c, const Operand<Key, Latent>& kv_c, const Operand<Key, Rope>& k_pe) {
  const Plan& p = s.plan;
  const ContextChunk& chunk = p.chunks[c];
  const auto own = chunk.held_rows.begin() + p.options.context_parallel.member();
  const int64_t all = std::accumulate(chunk.held_rows.begin(), chunk.held_rows.end(), int64_t{0}),
                before = std::accumulate(chunk.held_rows.begin(), own, int64_t{0});
  const auto sent =
      s.region<Key, Entry>("rank_rows", Dtype::fp8_e4m3, {all, static_cast<int64_t>(p.sent_rows.page_bytes())});
  if (!chunk.held.empty())
    s.add("pack_context", calls,
          steps::PackRows{s.list(ListKind::context_held, chunk.held, c), sent.rows(before, *own)});
  s.add("gather_context", calls, steps::GatherRows{sent, static_cast<int32_t>(c)});
  s.add("gather", calls,
        steps::Gather{s.list(ListKind::context_placed, chunk.placed, c), kv_c, k_pe, sent,
                      s.list(ListKind::context_sources, chunk.sources, c)});
}

}  // namespace

void expanded_steps(Steps& s, Calls calls) {
  const ModelConfig& m = s.m;
  const Plan& p = s.plan;
  const int64_t rows = static_cast<int64_t>(p.expanded_tokens.size());
  const auto q = queries(s, calls);
  const auto mask = mask_steps(s, calls);
  if (rows > 0)
    attend(s, calls, q,
           expand(s, calls, s.input<Token, Latent>(Memory::kv_c, s.act, {s.tokens, m.latent}),
                  s.input<Token, Rope>(Memory::k_pe, s.act, {s.tokens, m.rope}),
                  s.list(ListKind::expanded_tokens, p.expanded_tokens), rows),
           s.list(ListKind::suffix_items, p.suffix_items), mask, false);
  for (size_t c = 0; c < p.chunks.size(); ++c) {
    const ContextChunk& chunk = p.chunks[c];
    const auto context = s.region<Key, Entry>("context", s.act, {chunk.rows, m.entry()});
    const auto kv_c = context.part<Key, Latent>(0, {chunk.rows, m.latent});
    const auto k_pe = context.part<Key, Rope>(m.latent, {chunk.rows, m.rope});
    if (p.gathers_context()) gather_sent(s, calls, c, kv_c, k_pe);
    else s.add("gather", calls, steps::Gather{s.list(ListKind::context_pieces, chunk.pieces, c), kv_c, k_pe});
    attend(s, calls, q,
           expand(s, calls, context.part<Token, Latent>(0, {chunk.rows, m.latent}),
                  context.part<Token, Rope>(m.latent, {chunk.rows, m.rope}), {}, chunk.rows),
           s.list(ListKind::context_items, chunk.items, c), mask, !chunk.first);
  }
}

}  // namespace mla::planning
