// The block form of fully absorbed weights: the latent path alone.
#include "plan/steps/steps.hpp"

namespace mla::planning {

void absorbed_steps(Steps& s) {
  const ModelConfig& m = s.m;
  const int64_t t = s.tokens, n = m.heads, rows = static_cast<int64_t>(s.plan.latent_tokens.size());
  const auto hidden = hidden_rows(s);
  const auto source = begin_block(s, hidden);
  const auto q_pe = s.region<Token, Head, Rope>("query", s.act, {t, n, m.rope});
  if (m.rope > 0)
    s.project("query_rope", kForward, source, {}, Weight::query_rope,
              s.region<Token, Head, Out>("query", s.act, {t, 1, n * m.rope}), {}, t);
  append_new_rows(s, q_pe);
  if (rows == 0) return s.join(kAnyCall);

  const int64_t width = source.extent<In>();
  const Operand<Token, Head, In> shared(source.memory, source.dtype, source.offset, {t, n, width},
                                        {source.stride<Token>(), 0, source.stride<In>()});
  const RowList tokens = s.list(ListKind::latent_tokens, s.plan.latent_tokens);
  s.project("absorbed_query", kForward, shared, tokens, Weight::absorbed_query,
            staged_queries(s).part<Token, Head, Out>(0, {rows, n, m.latent}), {}, rows);
  place_rope(s, kForward, q_pe, tokens);
  attend_latent(s, kForward);
  s.join(kAnyCall);
  project_hidden(s, "absorbed_output", s.region<Token, Head, In>("latent_out", s.act, {rows, 1, n * m.latent}),
                 Weight::absorbed_output, tokens, rows);
}

}  // namespace mla::planning
