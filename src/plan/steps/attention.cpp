// Attention, as both forms have it: the step's rows are in the cache, queries attend, heads are finished.
#include "plan/internal.hpp"
#include "plan/steps/steps.hpp"

namespace mla::planning {

void finish_heads(Steps& s) {
  const ModelConfig& m = s.m;
  const Plan& p = s.plan;
  const int64_t t = s.tokens, n = m.heads;
  if (p.options.output.kind == OutputKind::none)
    s.add("cast", kNarrowed,
          steps::Cast{.x = s.region<Token, Head, In>("heads", p.head_dtype(), {t, n, m.value}),
                      .x_rows = {},
                      .y = s.input<Token, Head, In>(Memory::heads_out, s.act, {t, n, m.value}),
                      .y_rows = s.written()});
  else if (p.fused_output && (value_up_quantises(p) || p.latent_tokens.empty()))
    s.add("scale_padding", kAttend, steps::QuantizePadding{t});
  else
    s.add("quantize", kAttend,
          steps::Quantize{s.region<Token, HeadValue>("heads", p.head_dtype(), {t, n * m.value}),
                          p.fused_output ? s.list(ListKind::latent_tokens, p.latent_tokens) : RowList()});
}

namespace {

// attend()'s inputs in the dtype of rows between ops.
void cast_inputs(Steps& s) {
  const ModelConfig& m = s.m;
  const int64_t t = s.tokens;
  const auto cast = [&](Memory from, Memory to, int64_t heads, int64_t width) {
    if (width == 0) return;
    s.add("cast", kAttend,
          steps::Cast{.x = s.input<Token, Head, In>(from, s.plan.inputs(), {t, heads, width}),
                      .x_rows = {},
                      .y = s.input<Token, Head, In>(to, s.act, {t, heads, width})});
  };
  cast(Memory::given_q, Memory::q, m.heads, m.query_key());
  if (!s.plan.reads_new_rows()) return;
  cast(Memory::given_kv_c, Memory::kv_c, 1, m.latent);
  cast(Memory::given_k_pe, Memory::k_pe, 1, m.rope);
}

}  // namespace

void attention_steps(Steps& s, Calls calls) {
  const ModelConfig& m = s.m;
  const Plan& p = s.plan;
  const int64_t t = s.tokens;
  if (p.casts_inputs()) cast_inputs(s);
  if (p.options.cache_use == CacheUse::append)
    s.add("append", kAttend,
          steps::Append{s.input<Token, Latent>(Memory::kv_c, s.act, {t, m.latent}),
                        s.input<Token, Rope>(Memory::k_pe, s.act, {t, m.rope}), s.list(ListKind::slot_mapping, t)});
  if (!p.latent_tokens.empty()) latent_steps(s, calls);
  if (p.expands()) expanded_steps(s, calls);
  finish_heads(s);
}

}  // namespace mla::planning
