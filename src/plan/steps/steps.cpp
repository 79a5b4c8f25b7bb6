#include "plan/steps/steps.hpp"

#include "plan/internal.hpp"

namespace mla {

std::string_view to_string(Memory m) {
  switch (m) {
    case Memory::none: return "none";
    case Memory::workspace: return "workspace";
    case Memory::selection: return "selection";
    case Memory::hidden: return "hidden";
    case Memory::hidden_out: return "hidden out";
    case Memory::q: return "q";
    case Memory::kv_c: return "kv_c";
    case Memory::k_pe: return "k_pe";
    case Memory::heads: return "heads";
    case Memory::heads_out: return "heads out";
    case Memory::positions: return "positions";
  }
  return "";
}

std::string_view to_string(Weight w) {
  switch (w) {
    case Weight::query_down: return "query_down";
    case Weight::query: return "query";
    case Weight::query_rope: return "query_rope";
    case Weight::kv_down: return "kv_down";
    case Weight::kv_up: return "kv_up";
    case Weight::absorb_key: return "absorb_key";
    case Weight::value_up: return "value_up";
    case Weight::output: return "output";
    case Weight::absorbed_query: return "absorbed_query";
    case Weight::absorbed_output: return "absorbed_output";
    case Weight::index_query: return "index_query";
    case Weight::index_key: return "index_key";
    case Weight::index_head_weights: return "index_head_weights";
  }
  return "";
}

namespace planning {

void append_steps(Plan& plan) {
  plan.steps.reserve(24);
  Steps s(plan);
  if (plan.options.absorbed) return absorbed_steps(s);
  if (plan.serves_block()) return block_steps(s);
  choice_steps(s);
  attention_steps(s, kAttend);
}

}  // namespace planning
}  // namespace mla
