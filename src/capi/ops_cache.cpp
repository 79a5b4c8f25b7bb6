#include <unordered_map>

#include "capi/op.hpp"

using namespace mla;
using namespace mla::capi;

static_assert(offsetof(ops::PageCopy, to) == offsetof(mla_page_copy, to));
static_assert(offsetof(GatherPiece, start) == offsetof(mla_gather_piece, start) &&
              offsetof(GatherPiece, count) == offsetof(mla_gather_piece, count) &&
              offsetof(GatherPiece, row) == offsetof(mla_gather_piece, row));

namespace {

// Pages are copied at once: what is written is neither read nor written by another copy.
std::span<const ops::PageCopy> read_copies(const mla_page_copy* data, int64_t count) {
  const std::span<const mla_page_copy> given = read_list("copies", data, count);
  const std::span<const ops::PageCopy> copies(reinterpret_cast<const ops::PageCopy*>(given.data()), given.size());
  std::unordered_map<int32_t, size_t> writers;  // of pages
  const auto fail = [&](size_t i, const char* end, size_t other) {
    throw ShapeError("copies[" + std::to_string(i) + "]" + end + " is page " + std::to_string(copies[other].to) +
                     ", which copies[" + std::to_string(other) + "] writes");
  };
  for (size_t i = 0; i < copies.size(); ++i)
    if (const auto [writer, first] = writers.emplace(copies[i].to, i); !first) fail(i, ".to", writer->second);
  for (size_t i = 0; i < copies.size(); ++i)
    if (const auto writer = writers.find(copies[i].from); writer != writers.end() && writer->second != i)
      fail(i, ".from", writer->second);
  return copies;
}

}  // namespace

mla_status mla_append(mla_stream* stream, const mla_append_args* args) {
  return op("mla_append", stream, args, [](const OpCall& c, const mla_append_args& a) {
    const auto cache = c.cache("cache", a.cache);
    const std::initializer_list<Dtype> cpu{Dtype::f32, Dtype::bf16, Dtype::f16},
        dtypes = c.device().kind == DeviceKind::cpu ? cpu : c.rows();
    c.run(ops::AppendArgs{.kv_c = c.tensors.read<Token, Latent>("kv_c", a.kv_c, dtypes),
                          .k_pe = c.tensors.read<Token, Rope>("k_pe", a.k_pe, dtypes),
                          .slots = read_slots(a.slots, a.slots_count),
                          .cache = cache->view});
  });
}

mla_status mla_rope_append(mla_stream* stream, const mla_rope_append_args* args) {
  return op("mla_rope_append", stream, args, [](const OpCall& c, const mla_rope_append_args& a) {
    const auto table = c.table(a.table);
    const auto cache = c.cache("cache", a.cache);
    c.run(ops::RopeAppendArgs{.q_pe = c.tensors.write<Token, Head, Rope>("q_pe", a.q_pe, c.rows()),
                              .kv_c = c.tensors.read<Token, Latent>("kv_c", a.kv_c, c.rows()),
                              .k_pe = c.tensors.write<Token, Rope>("k_pe", a.k_pe, c.rows()),
                              .positions = read_list("positions", a.positions, a.positions_count),
                              .table = &table->table,
                              .slots = read_slots(a.slots, a.slots_count),
                              .cache = cache->view});
  });
}

mla_status mla_norm_rope_append(mla_stream* stream, const mla_norm_rope_append_args* args) {
  return op("mla_norm_rope_append", stream, args, [](const OpCall& c, const mla_norm_rope_append_args& a) {
    const auto table = c.table(a.table);
    const auto cache = c.cache("cache", a.cache);
    c.run(ops::NormRopeAppendArgs{.q_pe = c.tensors.write<Token, Head, Rope>("q_pe", a.q_pe, c.rows()),
                                  .kv_c = c.tensors.write<Token, Latent>("kv_c", a.kv_c, c.rows()),
                                  .k_pe = c.tensors.write<Token, Rope>("k_pe", a.k_pe, c.rows()),
                                  .weight = c.tensors.list<const float, Latent>("weight", a.weight),
                                  .eps = a.eps,
                                  .positions = read_list("positions", a.positions, a.positions_count),
                                  .table = &table->table,
                                  .slots = read_slots(a.slots, a.slots_count),
                                  .cache = cache->view});
  });
}

mla_status mla_copy_pages(mla_stream* stream, const mla_copy_pages_args* args) {
  return op("mla_copy_pages", stream, args, [](const OpCall& c, const mla_copy_pages_args& a) {
    if ((a.cache != nullptr) == (a.index_cache != nullptr))
      throw InputError(a.cache ? "cache and index_cache are both given, one is needed"
                               : "neither cache nor index_cache is given");
    const std::span<const ops::PageCopy> copies = read_copies(a.copies, a.copies_count);
    if (a.cache) {
      const auto cache = c.cache("cache", a.cache);
      c.run(ops::CopyPagesArgs{cache->view, copies});
    } else {
      const auto cache = c.cache("index_cache", a.index_cache);
      c.run(ops::CopyPagesArgs{cache->view, copies});
    }
  });
}

mla_status mla_gather(mla_stream* stream, const mla_gather_args* args) {
  return op("mla_gather", stream, args, [](const OpCall& c, const mla_gather_args& a) {
    const auto cache = c.cache("cache", a.cache);
    const std::initializer_list<Dtype> dtypes{Dtype::f32, Dtype::bf16, Dtype::f16};
    c.run(ops::GatherArgs{.cache = cache->view,
                          .block_table = read_block_table(a.block_table),
                          .pieces = read_items<GatherPiece>(a.pieces, a.pieces_count),
                          .kv_c = c.tensors.write<Key, Latent>("kv_c", a.kv_c, dtypes),
                          .k_pe = c.tensors.write<Key, Rope>("k_pe", a.k_pe, dtypes)});
  });
}
