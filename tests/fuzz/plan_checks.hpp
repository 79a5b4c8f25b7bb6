// What holds for every plan, whatever it was made from.
#pragma once

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "fuzz/fuzz.hpp"
#include "mla/plan.hpp"

namespace mla::fuzz {

/// Which positions a rank holds, by a reckoning of its own; one rank holds all.
struct Member {
  int64_t ranks = 1, interleave = 1, index = 0;
  bool shared() const { return ranks > 1; }
  bool holds(int64_t position) const { return position / interleave % ranks == index; }
  /// Of the first `tokens` positions.
  int64_t held(int64_t tokens) const {
    const int64_t round = ranks * interleave;
    return tokens / round * interleave + std::clamp<int64_t>(tokens % round - index * interleave, 0, interleave);
  }
  /// Of the rank's own token `i`.
  int64_t position(int64_t i) const { return (i / interleave * ranks + index) * interleave + i % interleave; }
};

/// Keys [begin, end) that a row sees.
struct Seen {
  int64_t row, begin, end;
};

/// What rows see, in order of the rows: each from key 0 to its end, none twice; ends: of each row, 0 where nothing is.
inline void check_seen(std::vector<Seen>& seen, const std::vector<int64_t>& ends) {
  std::sort(seen.begin(), seen.end(),
            [](const Seen& a, const Seen& b) { return std::tie(a.row, a.begin) < std::tie(b.row, b.begin); });
  size_t at = 0;
  for (size_t row = 0; row < ends.size(); ++row) {
    int64_t end = 0;
    for (; at < seen.size() && seen[at].row == static_cast<int64_t>(row); ++at) {
      FUZZ_CHECK(seen[at].begin == end);
      end = seen[at].end;
    }
    FUZZ_CHECK(end == ends[row]);
  }
  FUZZ_CHECK(at == seen.size());
}

/// Keys are cut at multiples of `step`, or where the row's end.
inline void check_cuts(const std::vector<Seen>& seen, const std::vector<int64_t>& ends, int64_t step) {
  for (const Seen& s : seen)
    FUZZ_CHECK(s.begin % step == 0 && (s.end % step == 0 || s.end == ends[static_cast<size_t>(s.row)]));
}

/// Each partial row is written once and joined once.
inline void check_partials(std::vector<uint8_t>& written, const std::vector<SplitRows>& splits, int64_t rows) {
  for (const SplitRows& s : splits) {
    FUZZ_CHECK(s.rows > 0 && s.splits > 0 && s.partial >= 0 && s.row >= 0 && s.row + s.rows <= rows);
    FUZZ_CHECK(s.partial + int64_t{s.splits} * s.rows <= static_cast<int64_t>(written.size()));
    for (int64_t i = 0; i < int64_t{s.splits} * s.rows; ++i) {
      uint8_t& n = written[static_cast<size_t>(s.partial + i)];
      FUZZ_CHECK(n == 1);
      n = 0;
    }
  }
  FUZZ_CHECK(std::all_of(written.begin(), written.end(), [](uint8_t n) { return n == 0; }));
}

inline void write_partials(std::vector<uint8_t>& written, int64_t partial, int64_t rows) {
  FUZZ_CHECK(partial == -1 || (partial >= 0 && partial + rows <= static_cast<int64_t>(written.size())));
  for (int64_t i = 0; partial >= 0 && i < rows; ++i) FUZZ_CHECK(++written[static_cast<size_t>(partial + i)] == 1);
}

inline void check_regions(const Plan& p) {
  std::vector<Region> regions = p.regions;
  std::sort(regions.begin(), regions.end(),
            [](const Region& a, const Region& b) { return std::tie(a.offset, a.bytes) < std::tie(b.offset, b.bytes); });
  size_t end = 0;
  for (const Region& r : regions) {
    FUZZ_CHECK(r.offset % 64 == 0 && r.offset >= end && r.bytes <= p.workspace_bytes &&
               r.offset <= p.workspace_bytes - r.bytes);
    end = std::max(end, r.offset + r.bytes);
  }
}

/// Who sent the rows of chunk `c` is check_group()'s.
inline void check_chunk(const Plan& p, const ContextChunk& c, const std::vector<int64_t>& lengths,
                        std::vector<Seen>* seen) {
  FUZZ_CHECK(c.rows > 0 && c.rows <= p.context_rows && !c.pieces.empty());
  int64_t end = 0;  // pieces follow one another
  for (const GatherPiece& g : c.pieces) {
    FUZZ_CHECK(g.request >= 0 && g.request < static_cast<int64_t>(lengths.size()));
    FUZZ_CHECK(g.start >= 0 && g.count > 0 && g.start + g.count <= lengths[static_cast<size_t>(g.request)] &&
               g.row >= end && g.row + g.count <= c.rows);
    end = g.row + g.count;
  }
  for (const ExpandedItem& i : c.items) {
    FUZZ_CHECK(i.q_begin >= 0 && i.q_count > 0 && i.q_begin + i.q_count <= p.tokens);
    FUZZ_CHECK(i.k_begin >= 0 && i.k_count > 0 && i.k_begin + i.k_count <= c.rows);
    const auto g = std::find_if(c.pieces.begin(), c.pieces.end(), [&](const GatherPiece& piece) {
      return piece.row <= i.k_begin && i.k_begin + i.k_count <= piece.row + piece.count;
    });
    FUZZ_CHECK(g != c.pieces.end());
    const RequestPlan& r = p.requests[static_cast<size_t>(g->request)];
    FUZZ_CHECK(i.q_begin >= r.q_begin && i.q_begin + i.q_count <= r.q_begin + r.query_len);
    const int64_t first = g->start + i.k_begin - g->row;
    FUZZ_CHECK(i.masked == r.masked && (!i.masked || i.mask_begin == first));
    for (int64_t q = 0; seen && q < i.q_count; ++q)
      if (const int64_t keys = std::min<int64_t>(i.k_count, int64_t{i.visible} + q + 1); keys > 0)
        seen->push_back({i.q_begin + q, first, first + keys});
  }
}

/// Launches of sparse rows: each attends to every place of its selection once.
inline void check_groups(const Plan& p, const std::vector<int64_t>& lengths, const Member& who) {
  const bool invariant = p.options.split == SplitPolicy::batch_invariant;
  FUZZ_CHECK(static_cast<int64_t>(p.sparse_positions.size()) == p.sparse_rows());
  int64_t sparse = 0;
  std::vector<Seen> seen;
  for (const SparseGroup& g : p.sparse_groups) {
    FUZZ_CHECK(g.begin == sparse && g.count >= 0 && g.rows >= 0 && g.work.partial_rows <= p.partial_rows);
    sparse += g.count;
    std::vector<uint8_t> written(static_cast<size_t>(g.work.partial_rows));
    for (const SparseItem& i : g.work.items) {
      FUZZ_CHECK(i.q_begin >= 0 && i.q_count > 0 && i.q_begin + i.q_count <= g.count);
      FUZZ_CHECK(i.k_begin >= 0 && i.k_begin < i.k_end && i.k_end <= p.topk);
      write_partials(written, i.partial, i.q_count);
      for (int64_t q = 0; q < i.q_count; ++q) seen.push_back({g.begin + i.q_begin + q, i.k_begin, i.k_end});
    }
    check_partials(written, g.work.splits, g.count);
    FUZZ_CHECK(g.work.part_keys == (invariant ? kInvariantKeys : 0) && (!invariant || g.rows == 0));
    int64_t row = 0;
    for (const GatherPiece& piece : g.pieces) {
      FUZZ_CHECK(piece.start == 0 && piece.count == who.held(lengths[static_cast<size_t>(piece.request)]) &&
                 piece.row == row);
      row += piece.count;
    }
    FUZZ_CHECK(row == g.rows);
  }
  FUZZ_CHECK(sparse == p.masked_begin && p.masked_begin <= p.sparse_rows());
  FUZZ_CHECK(static_cast<int64_t>(p.sparse_tokens.size()) == p.sparse_rows());
  const std::vector<int64_t> ends(static_cast<size_t>(sparse), p.topk);
  if (invariant) check_cuts(seen, ends, kInvariantKeys);
  check_seen(seen, ends);
  for (int64_t i = 0; i < p.sparse_rows(); ++i) {
    const int32_t token = p.sparse_tokens[static_cast<size_t>(i)], request = p.sparse_requests[static_cast<size_t>(i)];
    const RequestPlan& r = p.requests[static_cast<size_t>(request)];
    FUZZ_CHECK(r.masked == (i >= p.masked_begin));
    FUZZ_CHECK(r.masked || token == p.latent_tokens[static_cast<size_t>(p.sparse_begin + i)]);
    FUZZ_CHECK(!r.masked || p.positions[static_cast<size_t>(token)] < 32 * p.mask_words);
    FUZZ_CHECK(r.path == Path::sparse && token >= r.q_begin && token < r.q_begin + r.query_len);
    FUZZ_CHECK(p.sparse_positions[static_cast<size_t>(i)] == p.positions[static_cast<size_t>(token)]);
  }
}

/// The indexer's tiles: every sparse row has all of its positions, or is scored against each of the rank's own keys
/// that it sees; of those all members send, no more than `candidates` are the best.
inline void check_index(const Plan& p, const Member& who) {
  const IndexSchedule& s = p.index_schedule;
  if (!p.serves_block() || p.sparse_rows() == 0) {
    FUZZ_CHECK(s.all.empty() && s.selected.empty());
    return;
  }
  std::vector<uint8_t> there(static_cast<size_t>(p.sparse_rows()));
  const auto visit = [&](const IndexItem& item, const Member& keys, bool whole) {
    FUZZ_CHECK(item.q_begin >= 0 && item.q_count > 0 && item.q_begin + item.q_count <= p.sparse_rows());
    FUZZ_CHECK(item.kv_begin == 0 && item.row >= 0);
    for (int64_t q = 0; q < item.q_count; ++q) {
      const size_t row = static_cast<size_t>(item.q_begin + q);
      const int64_t sees = int64_t{p.sparse_positions[row]} + 1;
      FUZZ_CHECK(++there[row] == 1 && p.sparse_requests[row] == item.request);
      FUZZ_CHECK(item.columns(q) == keys.held(sees) && (sees <= p.topk) == whole);
      FUZZ_CHECK(whole || !who.shared() || std::min(p.topk, keys.held(sees)) <= s.candidates);
    }
  };
  for (const IndexItem& item : s.all) visit(item, Member{}, true);
  for (const IndexTile& tile : s.selected) {
    int64_t rows = 0, keys = 0;
    for (const IndexItem& item : tile.rows) {
      visit(item, who, false);
      FUZZ_CHECK(item.row == rows);
      rows += item.q_count;
      keys = std::max<int64_t>(keys, item.kv_end);
    }
    FUZZ_CHECK(rows > 0 && rows <= s.tiles.rows && tile.rounds(s.tiles.keys) * s.tiles.keys >= keys);
    FUZZ_CHECK(tile.joined.size() == size_t{who.shared()});
    for (const IndexItem& joined : tile.joined)
      for (int64_t q = 0; q < rows; ++q)
        FUZZ_CHECK(joined.q_count == rows && joined.columns(q) == who.ranks * s.candidates);
  }
  FUZZ_CHECK(std::all_of(there.begin(), there.end(), [](uint8_t n) { return n == 1; }));
}

/// Regions lie apart and within the workspace; every item names rows, keys and partial rows that exist; partial rows
/// are written once and joined once; a token's dense rows see each key of the rank's own exactly once, its sparse ones
/// each place of their selection, where there are few enough to count. Under batch_invariant keys are cut at fixed
/// places.
inline void check_plan(const Plan& p, const std::vector<int64_t>& queries, const std::vector<int64_t>& contexts,
                       const Member& who = {}) {
  FUZZ_CHECK(p.requests.size() == queries.size());
  const bool invariant = p.options.split == SplitPolicy::batch_invariant;
  const bool whole = invariant && p.uses_cache();  // chunks have all keys, paths do not follow from lengths
  std::optional<Path> path;  // under batch_invariant one for all, or one for prompts and one for what is behind them
  int64_t tokens = 0, parts = 0, widest = 0;
  std::vector<int64_t> lengths(queries.size());
  for (size_t r = 0; r < queries.size(); ++r) {
    const RequestPlan& q = p.requests[r];
    FUZZ_CHECK(q.q_begin == tokens && q.query_len == queries[r] && (queries[r] == 0 || q.context == contexts[r]));
    for (int64_t i = 0; i < queries[r]; ++i)
      FUZZ_CHECK(p.positions[static_cast<size_t>(tokens + i)] == contexts[r] + i);
    tokens += queries[r];
    lengths[r] = contexts[r] + queries[r];
    if (queries[r] == 0) continue;
    widest = std::max(widest, queries[r]);
    if (whole && !path) path = q.path;
    FUZZ_CHECK(!path || q.path == *path ||
               (p.options.path == PathPolicy::by_prompt && q.path != Path::sparse && *path != Path::sparse));
  }
  FUZZ_CHECK(p.tokens == tokens && static_cast<int64_t>(p.positions.size()) == tokens);
  check_regions(p);
  if (p.options.dummy) {
    FUZZ_CHECK(p.lists.empty() && p.latent_items.empty() && p.suffix_items.empty() && p.chunks.empty());
    return;
  }

  for (const ContextChunk& c : p.chunks) parts += static_cast<int64_t>(c.items.size());
  const bool few = parts * widest <= 20000;
  std::vector<Seen> latent, expanded;
  std::vector<int64_t> latent_ends(static_cast<size_t>(tokens)), expanded_ends(static_cast<size_t>(tokens));
  std::vector<int32_t> request_of;
  for (const RequestPlan& r : p.requests)
    for (int64_t i = 0; i < r.query_len; ++i) {
      const size_t token = request_of.size();
      request_of.push_back(static_cast<int32_t>(&r - p.requests.data()));
      if (r.path == Path::latent) latent_ends[token] = who.held(int64_t{r.context} + i + 1);
      if (r.expands()) expanded_ends[token] = int64_t{r.context} + i + 1;
    }

  const int64_t compact = static_cast<int64_t>(p.latent_tokens.size());
  std::vector<uint8_t> named(static_cast<size_t>(tokens));
  for (int32_t t : p.latent_tokens) FUZZ_CHECK(t >= 0 && t < tokens && ++named[static_cast<size_t>(t)] == 1);
  FUZZ_CHECK(p.sparse_begin >= 0 && p.sparse_begin + p.masked_begin == compact);
  std::vector<uint8_t> written(static_cast<size_t>(p.latent_items.empty() ? 0 : p.partial_rows));
  for (const LatentItem& i : p.latent_items) {
    FUZZ_CHECK(i.request >= 0 && i.request < static_cast<int64_t>(queries.size()));
    FUZZ_CHECK(i.q_begin >= 0 && i.q_count > 0 && i.q_begin + i.q_count <= p.sparse_begin);
    FUZZ_CHECK(i.kv_begin >= 0 && i.kv_begin <= i.kv_end &&
               i.kv_end <= who.held(lengths[static_cast<size_t>(i.request)]));
    write_partials(written, i.partial, i.q_count);
    const RequestPlan& r = p.requests[static_cast<size_t>(i.request)];
    const auto end = [&](int64_t q) { return std::min<int64_t>(i.kv_end, int64_t{i.visible} + q + 1); };
    // A GPU cuts keys itself, rows of an item alike.
    if (invariant && p.device.device.kind == DeviceKind::cuda)
      FUZZ_CHECK((std::max<int64_t>(end(0), 1) - 1) / kInvariantKeys ==
                 (std::max<int64_t>(end(i.q_count - 1), 1) - 1) / kInvariantKeys);
    for (int64_t q = 0; q < i.q_count; ++q) {
      const int64_t token = p.latent_tokens[static_cast<size_t>(i.q_begin + q)];
      FUZZ_CHECK(token >= r.q_begin && token < r.q_begin + r.query_len);
      if (i.kv_begin < end(q)) latent.push_back({token, i.kv_begin, end(q)});
    }
  }
  check_partials(written, p.splits, p.sparse_begin);
  if (invariant && p.device.device.kind == DeviceKind::cpu) check_cuts(latent, latent_ends, kInvariantKeys);
  check_seen(latent, latent_ends);
  FUZZ_CHECK(p.rank_splits.size() == size_t{who.shared() && compact > 0});
  for (const SplitRows& s : p.rank_splits)
    FUZZ_CHECK(s.row == 0 && s.rows == compact && s.partial == 0 && s.splits == who.ranks);

  const int64_t keys = static_cast<int64_t>(p.expanded_tokens.size());
  for (int32_t t : p.expanded_tokens) FUZZ_CHECK(t >= 0 && t < tokens);
  FUZZ_CHECK(!whole || keys == 0);
  for (const ExpandedItem& i : p.suffix_items) {
    FUZZ_CHECK(i.q_begin >= 0 && i.q_count > 0 && i.q_begin + i.q_count <= tokens);
    FUZZ_CHECK(i.k_begin >= 0 && i.k_count > 0 && i.k_begin + i.k_count <= keys);
    // The keys are tokens one behind another.
    const int64_t first = p.expanded_tokens[static_cast<size_t>(i.k_begin)];
    for (int64_t j = 0; j < i.k_count; ++j)
      FUZZ_CHECK(p.expanded_tokens[static_cast<size_t>(i.k_begin + j)] == first + j);
    const int32_t request = request_of[static_cast<size_t>(first)];
    FUZZ_CHECK(request == request_of[static_cast<size_t>(first + i.k_count - 1)] &&
               request == request_of[static_cast<size_t>(i.q_begin)] &&
               request == request_of[static_cast<size_t>(i.q_begin + i.q_count - 1)]);
    const int64_t position = p.positions[static_cast<size_t>(first)];
    FUZZ_CHECK(i.masked == p.requests[static_cast<size_t>(request)].masked && (!i.masked || i.mask_begin == position));
    for (int64_t q = 0; q < i.q_count; ++q)
      expanded.push_back(
          {i.q_begin + q, position, position + std::min<int64_t>(i.k_count, int64_t{i.visible} + q + 1)});
  }
  for (const ContextChunk& c : p.chunks) {
    check_chunk(p, c, lengths, few ? &expanded : nullptr);
    const int64_t step = p.options.context_rows > 0 ? std::min<int64_t>(p.options.context_rows, 4096) : 4096;
    for (const GatherPiece& g : c.pieces)
      FUZZ_CHECK(!whole || (g.start % step == 0 &&
                            (g.count == step || g.start + g.count == lengths[static_cast<size_t>(g.request)])));
  }
  if (few) check_seen(expanded, expanded_ends);
  check_groups(p, lengths, who);
  check_index(p, who);
}

/// Plans of all members of a group, in order: what they exchange fits, and every key of a dense row on the latent path
/// is seen by one of them.
inline void check_group(const std::vector<Plan>& plans, int64_t interleave) {
  const Plan& p = plans.front();
  const int64_t ranks = static_cast<int64_t>(plans.size());
  for (const Plan& other : plans) {
    FUZZ_CHECK(other.digest == p.digest && other.topk == p.topk);
    FUZZ_CHECK(other.latent_tokens == p.latent_tokens && other.sparse_begin == p.sparse_begin &&
               other.sparse_requests == p.sparse_requests && other.expanded_tokens == p.expanded_tokens);
    FUZZ_CHECK(other.chunks.size() == p.chunks.size() &&
               other.index_schedule.candidates == p.index_schedule.candidates &&
               other.index_schedule.selected.size() == p.index_schedule.selected.size());
    for (size_t r = 0; r < p.requests.size(); ++r) FUZZ_CHECK(other.requests[r].path == p.requests[r].path);
  }
  if (p.options.dummy) return;
  // Latent rows end where their members' keys do (check_plan); positions of these are each other's complement.
  for (const RequestPlan& r : p.requests)
    for (int64_t sees = int64_t{r.context} + 1; r.path != Path::expanded && sees <= int64_t{r.context} + r.query_len;
         ++sees) {
      int64_t sum = 0;
      for (int64_t m = 0; m < ranks; ++m) {
        const Member who{ranks, interleave, m};
        const int64_t held = who.held(sees);
        FUZZ_CHECK(held == 0 || (who.holds(who.position(held - 1)) && who.position(held - 1) < sees));
        FUZZ_CHECK(who.position(held) >= sees);
        sum += held;
      }
      FUZZ_CHECK(sum == sees);
    }
  for (size_t i = 0; i < p.chunks.size(); ++i) {
    const ContextChunk& c = p.chunks[i];
    std::vector<std::pair<int32_t, int64_t>> sent;  // request and position of each row, member 0's first
    for (int64_t m = 0; m < ranks; ++m) {
      const ContextChunk& own = plans[static_cast<size_t>(m)].chunks[i];
      FUZZ_CHECK(own.rows == c.rows && own.held_rows == c.held_rows && own.sources == c.sources);
      const size_t before = sent.size();
      for (const GatherPiece& held : own.held) {
        FUZZ_CHECK(held.row == static_cast<int64_t>(sent.size() - before) && held.count > 0);
        for (int64_t k = 0; k < held.count; ++k)
          sent.emplace_back(held.request, Member{ranks, interleave, m}.position(held.start + k));
      }
      FUZZ_CHECK(std::ssize(c.held_rows) == ranks &&
                 static_cast<int64_t>(sent.size() - before) == c.held_rows[static_cast<size_t>(m)]);
    }
    FUZZ_CHECK(std::ssize(c.sources) == c.rows);
    size_t rows = 0;
    for (const GatherPiece& piece : c.pieces)
      for (int64_t k = 0; k < piece.count; ++k, ++rows) {
        const int64_t source = c.sources[static_cast<size_t>(piece.row + k)];
        FUZZ_CHECK(source >= 0 && source < std::ssize(sent));
        FUZZ_CHECK(sent[static_cast<size_t>(source)] == std::pair(piece.request, int64_t{piece.start} + k));
      }
    FUZZ_CHECK(rows == sent.size());
    FUZZ_CHECK(c.placed.size() == 1 && c.placed[0].request == 0 && c.placed[0].start == 0 && c.placed[0].row == 0 &&
               c.placed[0].count == c.rows);
  }
}

}  // namespace mla::fuzz
