// What a block step leaves in its workspace, for the attention form to be given.
#pragma once

#include <cstddef>
#include <cstring>
#include <variant>
#include <vector>

#include "mla/plan.hpp"

namespace mla::test {

/// Queries as attend() takes them, in the plan's activations: rotated parts lie where the append placed them, or beside
/// the others. read(offset, bytes): of the workspace.
template <class Read>
std::vector<std::byte> block_queries(const Plan& p, Read&& read) {
  const ModelConfig& m = p.model;
  const auto size = static_cast<int64_t>(size_of(p.activations()));
  std::vector<std::byte> q =
      read(p.region("query").offset, static_cast<size_t>(p.tokens * m.heads * m.query_key() * size));
  for (const Step& step : p.steps) {
    const auto* append = std::get_if<steps::NormRopeAppend>(&step.work);
    if (!append || !append->q_placed) continue;
    const Operand<Token, Head, Rope>& o = append->q_placed;
    const int64_t rows = o.extent<Token>(), row = o.stride<Token>(), head = o.stride<Head>(),
                  last = (rows - 1) * row + (m.heads - 1) * head + m.rope;
    const std::vector<std::byte> placed = read(static_cast<size_t>(o.offset), static_cast<size_t>(last * size));
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t h = 0; h < m.heads; ++h) {
        const int64_t to = (int64_t{p.latent_tokens[static_cast<size_t>(r)]} * m.heads + h) * m.query_key() + m.nope;
        std::memcpy(q.data() + to * size, placed.data() + (r * row + h * head) * size,
                    static_cast<size_t>(m.rope * size));
      }
  }
  return q;
}

/// The same as numbers, of f32.
template <class Read>
std::vector<float> block_queries_f32(const Plan& p, Read&& read) {
  const std::vector<std::byte> bytes = block_queries(p, read);
  std::vector<float> q(bytes.size() / sizeof(float));
  std::memcpy(q.data(), bytes.data(), bytes.size());
  return q;
}

}  // namespace mla::test
