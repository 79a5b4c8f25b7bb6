// A dummy step: results are zeros, nothing is read.
#include "plan/steps/steps.hpp"

namespace mla::planning {

void dummy_steps(Steps& s) {
  const ModelConfig& m = s.m;
  if (s.plan.serves_block())
    s.add("zero", kForward,
          steps::Zero{s.input<Token, Head, In>(Memory::hidden_out, s.act, {s.plan.own_rows().count, 1, m.hidden})});
  if (s.plan.options.absorbed) return;
  s.add("zero", kAttend, steps::Zero{s.input<Token, Head, In>(Memory::heads, s.act, {s.tokens, m.heads, m.value})});
  finish_heads(s);
}

}  // namespace mla::planning
