// What holds for every plan, whatever it was made from.
#pragma once

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "fuzz/fuzz.hpp"
#include "mla/plan.hpp"

namespace mla::fuzz {

/// Regions lie apart and within the workspace; every item names rows, keys and partial rows that exist; partial rows
/// are written once and joined once; a token's dense rows see each of their positions exactly once, where there are few
/// enough to count.
inline void check_plan(const Plan& p, const std::vector<int64_t>& queries, const std::vector<int64_t>& contexts) {
  FUZZ_CHECK(p.requests.size() == queries.size());
  int64_t tokens = 0, pairs = 0;
  for (size_t r = 0; r < queries.size(); ++r) {
    const RequestPlan& q = p.requests[r];
    FUZZ_CHECK(q.q_begin == tokens && q.query_len == queries[r] && (queries[r] == 0 || q.context == contexts[r]));
    for (int64_t i = 0; i < queries[r]; ++i)
      FUZZ_CHECK(p.positions[static_cast<size_t>(tokens + i)] == contexts[r] + i);
    tokens += queries[r];
    pairs += queries[r] * (contexts[r] + queries[r]);
  }
  FUZZ_CHECK(p.tokens == tokens && static_cast<int64_t>(p.positions.size()) == tokens);

  std::vector<Region> regions = p.regions;
  std::sort(regions.begin(), regions.end(), [](const Region& a, const Region& b) {
    return std::pair(a.offset, a.bytes) < std::pair(b.offset, b.bytes);
  });
  size_t end = 0;
  for (const Region& r : regions) {
    FUZZ_CHECK(r.offset % 64 == 0 && r.offset >= end && r.bytes <= p.workspace_bytes &&
               r.offset <= p.workspace_bytes - r.bytes);
    end = std::max(end, r.offset + r.bytes);
  }

  if (p.options.dummy) {
    FUZZ_CHECK(p.lists.empty() && p.latent_items.empty() && p.suffix_items.empty() && p.chunks.empty());
    return;
  }
  const bool few = pairs <= 20000;
  std::map<std::pair<int64_t, int64_t>, int> seen;
  const auto see = [&](int64_t token, int64_t position) {
    if (few) FUZZ_CHECK(++seen[{token, position}] == 1);
  };
  const int64_t compact = static_cast<int64_t>(p.latent_tokens.size());
  for (int32_t t : p.latent_tokens) FUZZ_CHECK(t >= 0 && t < tokens);
  FUZZ_CHECK(p.sparse_begin >= 0 && p.sparse_begin + p.sparse_rows() == compact);
  std::vector<int> written(static_cast<size_t>(p.partial_rows)), joined(static_cast<size_t>(p.partial_rows));
  for (const LatentItem& i : p.latent_items) {
    FUZZ_CHECK(i.request >= 0 && i.request < static_cast<int64_t>(queries.size()));
    FUZZ_CHECK(i.q_begin >= 0 && i.q_count > 0 && i.q_begin + i.q_count <= p.sparse_begin);
    FUZZ_CHECK(i.kv_begin >= 0 && i.kv_begin <= i.kv_end && i.kv_end <= contexts[i.request] + queries[i.request]);
    FUZZ_CHECK(i.partial == -1 || (i.partial >= 0 && i.partial + i.q_count <= p.partial_rows));
    for (int64_t q = 0; q < i.q_count; ++q) {
      const int64_t token = p.latent_tokens[static_cast<size_t>(i.q_begin + q)];
      const RequestPlan& r = p.requests[i.request];
      FUZZ_CHECK(token >= r.q_begin && token < r.q_begin + r.query_len);
      if (i.partial >= 0) ++written[static_cast<size_t>(i.partial + q)];
      if (few)
        for (int64_t j = i.kv_begin; j < std::min<int64_t>(i.kv_end, int64_t{i.visible} + q + 1); ++j) see(token, j);
    }
  }
  for (const SplitRows& s : p.splits) {
    FUZZ_CHECK(s.rows > 0 && s.splits > 0 && s.partial >= 0 && s.row >= 0 && s.row + s.rows <= compact);
    FUZZ_CHECK(s.partial + int64_t{s.splits} * s.rows <= p.partial_rows);
    for (int64_t i = 0; i < int64_t{s.splits} * s.rows; ++i) ++joined[static_cast<size_t>(s.partial + i)];
  }
  FUZZ_CHECK(written == joined && std::all_of(written.begin(), written.end(), [](int n) { return n <= 1; }));

  const int64_t expanded = static_cast<int64_t>(p.expanded_tokens.size());
  for (int32_t t : p.expanded_tokens) FUZZ_CHECK(t >= 0 && t < tokens);
  for (const ExpandedItem& i : p.suffix_items) {
    FUZZ_CHECK(i.q_begin >= 0 && i.q_count > 0 && i.q_begin + i.q_count <= tokens);
    FUZZ_CHECK(i.k_begin >= 0 && i.k_count >= 0 && i.k_begin + i.k_count <= expanded);
    if (!few) continue;
    for (int64_t q = 0; q < i.q_count; ++q)
      for (int64_t j = 0; j < std::min<int64_t>(i.k_count, int64_t{i.visible} + q + 1); ++j)
        see(i.q_begin + q, p.positions[static_cast<size_t>(p.expanded_tokens[static_cast<size_t>(i.k_begin + j)])]);
  }
  for (const ContextChunk& c : p.chunks) {
    FUZZ_CHECK(c.rows > 0 && c.rows <= p.context_rows);
    std::vector<std::pair<int64_t, int64_t>> rows(static_cast<size_t>(few ? c.rows : 0),
                                                  {-1, -1});  // request, position
    for (const GatherPiece& g : c.pieces) {
      FUZZ_CHECK(g.request >= 0 && g.request < static_cast<int64_t>(queries.size()));
      FUZZ_CHECK(g.start >= 0 && g.count > 0 && g.start + g.count <= contexts[g.request] + queries[g.request] &&
                 g.row >= 0 && g.row + g.count <= c.rows);
      for (int64_t i = 0; few && i < g.count; ++i) {
        FUZZ_CHECK(rows[static_cast<size_t>(g.row + i)].first == -1);
        rows[static_cast<size_t>(g.row + i)] = {g.request, g.start + i};
      }
    }
    for (const ExpandedItem& i : c.items) {
      FUZZ_CHECK(i.q_begin >= 0 && i.q_count > 0 && i.q_begin + i.q_count <= tokens);
      FUZZ_CHECK(i.k_begin >= 0 && i.k_count > 0 && i.k_begin + i.k_count <= c.rows);
      for (int64_t q = i.q_begin; few && q < i.q_begin + i.q_count; ++q)
        for (int64_t j = i.k_begin; j < i.k_begin + std::min<int64_t>(i.k_count, q - i.q_begin + i.visible + 1); ++j) {
          const auto [request, position] = rows[static_cast<size_t>(j)];
          FUZZ_CHECK(request >= 0);
          const RequestPlan& r = p.requests[static_cast<size_t>(request)];
          FUZZ_CHECK(q >= r.q_begin && q < r.q_begin + r.query_len);
          see(q, position);
        }
    }
  }
  // Dense tokens see all up to themselves; sparse ones their selection, which is not a plan's to say.
  if (few)
    for (size_t r = 0; r < queries.size(); ++r)
      for (int64_t i = 0; i < queries[r]; ++i)
        for (int64_t j = 0; j < contexts[r] + queries[r]; ++j)
          FUZZ_CHECK((seen.count({p.requests[r].q_begin + i, j}) == 1) ==
                     (p.requests[r].path != Path::sparse && j <= contexts[r] + i));

  FUZZ_CHECK(static_cast<int64_t>(p.sparse_positions.size()) == p.sparse_rows());
  int64_t sparse = 0;
  for (const SparseGroup& g : p.sparse_groups) {
    FUZZ_CHECK(g.begin == sparse && g.count >= 0 && g.rows >= 0 && g.work.partial_rows <= p.partial_rows);
    sparse += g.count;
    for (const SparseItem& i : g.work.items) {
      FUZZ_CHECK(i.q_begin >= 0 && i.q_count > 0 && i.q_begin + i.q_count <= g.count);
      FUZZ_CHECK(i.k_begin >= 0 && i.k_begin <= i.k_end && i.k_end <= p.topk);
      FUZZ_CHECK(i.partial == -1 || i.partial + i.q_count <= g.work.partial_rows);
    }
    for (const GatherPiece& piece : g.pieces)
      FUZZ_CHECK(piece.start == 0 && piece.count == contexts[piece.request] + queries[piece.request] &&
                 piece.row >= 0 && piece.row + piece.count <= g.rows);
  }
  FUZZ_CHECK(sparse == p.sparse_rows());
  for (int64_t i = 0; i < p.sparse_rows(); ++i) {
    const int32_t token = p.latent_tokens[static_cast<size_t>(p.sparse_begin + i)],
                  request = p.sparse_requests[static_cast<size_t>(i)];
    FUZZ_CHECK(p.sparse_positions[static_cast<size_t>(i)] == p.positions[static_cast<size_t>(token)]);
    FUZZ_CHECK(token >= p.requests[request].q_begin &&
               token < p.requests[request].q_begin + p.requests[request].query_len);
  }
  FUZZ_CHECK(!p.describe().empty());
}

}  // namespace mla::fuzz
