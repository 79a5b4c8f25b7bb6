#include "cases/case.hpp"

#include <array>

#include "core/nearest.hpp"

namespace mla::cases {

std::string describe(const Params& p, std::string_view op) {
  auto n = [](int64_t x) { return std::to_string(x); };
  return std::string(op) + " requests=" + n(p.requests) + " query_len=" + n(p.query_len) + " context=" + n(p.context) +
         (p.ragged ? " ragged" : "") + " heads=" + n(p.heads) + " latent=" + n(p.latent) + " rope=" + n(p.rope) +
         " nope=" + n(p.nope) + " value=" + n(p.value) + " in=" + n(p.in) + " out=" + n(p.out) +
         " format=" + std::string(to_string(p.format)) + " page_size=" + n(p.page_size) +
         " dtype=" + std::string(to_string(p.dtype)) +
         (p.activations == Dtype::f32 ? "" : " activations=" + std::string(to_string(p.activations))) +
         (p.neox ? " neox" : "") + (p.yarn_factor > 1 ? " yarn_factor=" + std::to_string(p.yarn_factor) : "") +
         (p.causal ? " causal" : " full") + (p.batch_invariant ? " batch_invariant" : "") + " splits=" + n(p.splits) +
         " output=" + to_string(p.output) +
         (p.weights == WeightFormat::plain ? "" : " weights=" + std::string(to_string(p.weights))) +
         (p.inputs == Activations::plain ? "" : " inputs=" + std::string(to_string(p.inputs))) +
         (p.weight_block > 0 ? " weight_block=" + n(p.weight_block) : "") + " topk=" + n(p.topk) +
         " sources=" + n(p.sources) + (p.sinks ? " sinks" : "") + (p.max_logits ? "" : " no max_logits") +
         (p.dense ? " dense" : "") + (p.masked ? " masked" : "") + (p.nonfinite ? " nonfinite" : "") +
         " index_dim=" + n(p.index_dim) + " index_format=" + std::string(to_string(p.index_format)) +
         " index_arithmetic=" + std::string(to_string(p.index_arithmetic)) + " seed=" + std::to_string(p.seed);
}

std::span<const CaseType> all() {
#define MLA_CASE(op) op,
  static const std::array kAll{MLA_OP_FOLDERS(MLA_CASE)};
#undef MLA_CASE
  return kAll;
}

InputError unknown_op(std::string_view op, std::initializer_list<std::string_view> more) {
  std::vector<std::string_view> known(more);
  for (const CaseType& c : all()) known.push_back(c.op);
  std::string list;
  for (const std::string_view k : known) (list += ' ') += k;
  return InputError("unknown op '" + std::string(op) + "'; known:" + list + did_you_mean(op, known));
}

const CaseType& find(std::string_view op) {
  for (const CaseType& c : all())
    if (c.op == op) return c;
  throw unknown_op(op);
}

}  // namespace mla::cases
