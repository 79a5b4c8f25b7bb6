#include "plan/steps/steps.hpp"

#include "plan/internal.hpp"

namespace mla::planning {

void append_steps(Plan& plan) {
  plan.steps.reserve(24);
  Steps s(plan);
  if (plan.options.dummy) return dummy_steps(s);
  if (plan.options.absorbed) return absorbed_steps(s);
  if (plan.serves_block()) return block_steps(s);
  choice_steps(s);
  attention_steps(s, kAttend);
}

}  // namespace mla::planning
