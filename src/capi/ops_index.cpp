#include "capi/op.hpp"
#include "core/find_twice.hpp"

using namespace mla;
using namespace mla::capi;

static_assert(offsetof(IndexItem, q_begin) == offsetof(mla_index_item, q_begin) &&
              offsetof(IndexItem, q_count) == offsetof(mla_index_item, q_count) &&
              offsetof(IndexItem, kv_begin) == offsetof(mla_index_item, kv_begin) &&
              offsetof(IndexItem, kv_end) == offsetof(mla_index_item, kv_end) &&
              offsetof(IndexItem, visible) == offsetof(mla_index_item, visible) &&
              offsetof(IndexItem, row) == offsetof(mla_index_item, row));

namespace {

int64_t read_topk(int64_t topk) {
  if (topk < 1 || topk > kMostTopk)
    throw ShapeError("topk is " + std::to_string(topk) + ", allowed 1 to " + std::to_string(kMostTopk));
  return topk;
}

// Rows that are written in no order.
std::span<const int32_t> read_distinct(const char* name, const int32_t* data, int64_t count) {
  const std::span<const int32_t> list = read_list(name, data, count);
  if (const auto twice = find_twice(list))
    throw ShapeError(std::string(name) + "[" + std::to_string(twice->second) + "] is " +
                     std::to_string(list[twice->second]) + ", that of " + name + "[" + std::to_string(twice->first) +
                     "] too");
  return list;
}

// As many rows as the memory has room for.
ops::TopkState read_state(void* data, size_t bytes, int64_t topk) {
  const std::span<std::byte> memory = read_memory("state", data, bytes);
  return {memory.data(), static_cast<int64_t>(memory.size() / topk_state_bytes(read_topk(topk))), topk};
}

}  // namespace

mla_status mla_index_append(mla_stream* stream, const mla_index_append_args* args) {
  return op("mla_index_append", stream, args, [](const OpCall& c, const mla_index_append_args& a) {
    const auto cache = c.cache("cache", a.cache);
    c.run(ops::IndexAppendArgs{.keys = c.tensors.read_as<float, Token, IndexDim>("keys", a.keys),
                               .slots = read_slots(a.slots, a.slots_count),
                               .cache = cache->view});
  });
}

mla_status mla_index_gather(mla_stream* stream, const mla_index_gather_args* args) {
  return op("mla_index_gather", stream, args, [](const OpCall& c, const mla_index_gather_args& a) {
    const auto cache = c.cache("cache", a.cache);
    c.run(ops::IndexGatherArgs{
        .cache = cache->view,
        .block_table = read_block_table(a.block_table),
        .pieces = read_items<GatherPiece>(a.pieces, a.pieces_count),
        .keys = c.tensors.write<Key, IndexDim>("keys", a.keys, {Dtype::f32, Dtype::bf16, Dtype::fp8_e4m3}),
        .scales = c.tensors.write_optional_as<float, Key>("scales", a.scales)});
  });
}

mla_status mla_index_query(mla_stream* stream, const mla_index_query_args* args) {
  return op("mla_index_query", stream, args, [](const OpCall& c, const mla_index_query_args& a) {
    c.run(ops::IndexQueryArgs{
        .q = c.tensors.read_as<float, Token, IndexHead, IndexDim>("q", a.q),
        .weights = c.tensors.read_as<float, Token, IndexHead>("weights", a.weights),
        .codes = c.tensors.write_as<fp8_e4m3, Token, IndexHead, IndexDim>("codes", a.codes),
        .scaled_weights = c.tensors.write_as<float, Token, IndexHead>("scaled_weights", a.scaled_weights)});
  });
}

mla_status mla_index_score(mla_stream* stream, const mla_index_score_args* args) {
  return op("mla_index_score", stream, args, [](const OpCall& c, const mla_index_score_args& a) {
    const auto cache = c.cache("cache", a.cache);
    c.run(ops::IndexScoreArgs{
        .q = c.tensors.read<Token, IndexHead, IndexDim>("q", a.q, {Dtype::f32, Dtype::bf16, Dtype::fp8_e4m3}),
        .weights = c.tensors.read_as<float, Token, IndexHead>("weights", a.weights),
        .scale = a.scale,
        .cache = cache->view,
        .block_table = read_block_table(a.block_table),
        .items = read_items<IndexItem>(a.items, a.items_count),
        .first = a.first,
        .scores = c.tensors.write_as<float, Token, Key>("scores", a.scores),
        .arithmetic = read_enum("arithmetic", a.arithmetic, IndexArithmetic::fp8),
        .scratch = c.scratch(a.scratch, a.scratch_bytes)});
  });
}

mla_status mla_topk_state_bytes(int64_t topk, size_t* row_bytes) {
  return guarded("mla_topk_state_bytes", [&] { required("row_bytes", row_bytes) = topk_state_bytes(read_topk(topk)); });
}

mla_status mla_select_topk(mla_stream* stream, const mla_select_topk_args* args) {
  return op("mla_select_topk", stream, args, [](const OpCall& c, const mla_select_topk_args& a) {
    c.run(ops::SelectTopkArgs{.scores = c.tensors.read_as<float, Token, Key>("scores", a.scores),
                              .items = read_items<IndexItem>(a.items, a.items_count),
                              .first = a.first,
                              .positions = c.tensors.read_optional_as<int32_t, Token, Key>("positions", a.positions),
                              .begin = read_flag("begin", a.begin),
                              .state = read_state(a.state, a.state_bytes, a.topk),
                              .scratch = c.scratch(a.scratch, a.scratch_bytes),
                              .indices = c.tensors.write_optional_as<int32_t, Token, Topk>("indices", a.indices)});
  });
}

mla_status mla_finish_topk(mla_stream* stream, const mla_finish_topk_args* args) {
  return op("mla_finish_topk", stream, args, [](const OpCall& c, const mla_finish_topk_args& a) {
    c.run(ops::FinishTopkArgs{.state = read_state(a.state, a.state_bytes, a.topk),
                              .items = read_items<IndexItem>(a.items, a.items_count),
                              .indices = c.tensors.write_as<int32_t, Token, Topk>("indices", a.indices),
                              .scores = c.tensors.write_optional_as<float, Token, Topk>("scores", a.scores)});
  });
}

mla_status mla_fill_topk(mla_stream* stream, const mla_fill_topk_args* args) {
  return op("mla_fill_topk", stream, args, [](const OpCall& c, const mla_fill_topk_args& a) {
    c.run(ops::FillTopkArgs{.items = read_items<IndexItem>(a.items, a.items_count),
                            .indices = c.tensors.write_as<int32_t, Token, Topk>("indices", a.indices)});
  });
}

mla_status mla_map_to_slots(mla_stream* stream, const mla_map_to_slots_args* args) {
  return op("mla_map_to_slots", stream, args, [](const OpCall& c, const mla_map_to_slots_args& a) {
    c.run(ops::MapToSlotsArgs{.positions = c.tensors.read_as<int32_t, Token, Topk>("positions", a.positions),
                              .requests = read_list("requests", a.requests, a.requests_count),
                              .block_table = read_block_table(a.block_table),
                              .page_size = a.page_size,
                              .pages = a.pages,
                              .lengths = read_list("lengths", a.lengths, a.lengths_count),
                              .slots = c.tensors.write_as<int32_t, Token, Topk>("slots", a.slots)});
  });
}

mla_status mla_map_to_workspace(mla_stream* stream, const mla_map_to_workspace_args* args) {
  return op("mla_map_to_workspace", stream, args, [](const OpCall& c, const mla_map_to_workspace_args& a) {
    c.run(ops::MapToWorkspaceArgs{.positions = c.tensors.read_as<int32_t, Token, Topk>("positions", a.positions),
                                  .requests = read_list("requests", a.requests, a.requests_count),
                                  .starts = read_list("starts", a.starts, a.starts_count),
                                  .counts = read_list("counts", a.counts, a.counts_count),
                                  .rows = c.tensors.write_as<int32_t, Token, Topk>("rows", a.rows)});
  });
}

mla_status mla_pick_rows(mla_stream* stream, const mla_pick_rows_args* args) {
  return op("mla_pick_rows", stream, args, [](const OpCall& c, const mla_pick_rows_args& a) {
    c.run(ops::PickRowsArgs{.positions = c.tensors.read_as<int32_t, Token, Topk>("positions", a.positions),
                            .rows = read_list("rows", a.rows, a.rows_count),
                            .picked = c.tensors.write_as<int32_t, Token, Topk>("picked", a.picked)});
  });
}

mla_status mla_map_to_mask(mla_stream* stream, const mla_map_to_mask_args* args) {
  return op("mla_map_to_mask", stream, args, [](const OpCall& c, const mla_map_to_mask_args& a) {
    c.run(ops::MapToMaskArgs{.positions = c.tensors.read_as<int32_t, Token, Topk>("positions", a.positions),
                             .rows = read_distinct("rows", a.rows, a.rows_count),
                             .mask = as_words(c.tensors.write_as<int32_t, Token, Word>("mask", a.mask))});
  });
}
