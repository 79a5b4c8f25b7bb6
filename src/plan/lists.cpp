#include "plan/lists.hpp"

namespace mla::planning {

HostList host_list(const Plan& p, const Batch& batch, ListKey key) {
  const auto of = [](const char* name, const auto& list, std::byte padding = std::byte{0}) {
    return HostList{name, list.data(), list.size(), sizeof(*list.data()), padding};
  };
  const auto rows = [&](const char* name, const std::vector<int32_t>& list) {
    HostList l = of(name, list);
    l.rows = true;
    return l;
  };
  const size_t part = static_cast<size_t>(key.part);
  const bool padded = p.options.maxima.has_value();
  switch (key.kind) {
    case ListKind::none: return {};
    case ListKind::slot_mapping:
      return padded ? of("slot_mapping", p.slots) : of("slot_mapping", batch.slot_mapping, std::byte{0xff});
    case ListKind::seq_lens: return padded ? of("seq_lens", p.lengths) : of("seq_lens", batch.seq_lens);
    case ListKind::positions: return of("positions", p.positions);
    case ListKind::latent_tokens: return rows("latent_tokens", p.latent_tokens);
    case ListKind::latent_items: return of("latent_items", p.latent_items);
    case ListKind::splits: return of("splits", p.splits);
    case ListKind::rank_splits: return of("rank_splits", p.rank_splits);
    case ListKind::expanded_tokens: return rows("expanded_tokens", p.expanded_tokens);
    case ListKind::suffix_items: return of("suffix_items", p.suffix_items);
    case ListKind::context_pieces: return of("context pieces", p.chunks[part].pieces);
    case ListKind::context_items: return of("context items", p.chunks[part].items);
    case ListKind::context_held: return of("held context", p.chunks[part].held);
    case ListKind::context_sources: return of("sources of context", p.chunks[part].sources);
    case ListKind::context_placed: return of("placed context", p.chunks[part].placed);
    case ListKind::sparse_requests: return of("sparse_requests", p.sparse_requests);
    case ListKind::sparse_positions: return of("sparse_positions", p.sparse_positions);
    case ListKind::sparse_tokens: return rows("sparse_tokens", p.sparse_tokens);
    case ListKind::gathered_starts: return of("gathered_starts", p.gathered_starts);
    case ListKind::gathered_counts: return of("gathered_counts", p.gathered_counts);
    case ListKind::sparse_items: return of("sparse items", p.sparse_groups[part].work.items);
    case ListKind::sparse_splits: return of("sparse splits", p.sparse_groups[part].work.splits);
    case ListKind::sparse_pieces: return of("sparse pieces", p.sparse_groups[part].pieces);
    case ListKind::index_rows: return of("index rows", p.index_schedule.all);
    case ListKind::written_rows: return rows("written_rows", p.written_rows);
    case ListKind::written_sums: return rows("written_sums", p.written_sums);
    case ListKind::index_joined: return of("index candidates", p.index_schedule.selected[part].joined);
    case ListKind::index_tile: return of("index tile", p.index_schedule.selected[part].rows);
  }
  return {};
}

}  // namespace mla::planning
