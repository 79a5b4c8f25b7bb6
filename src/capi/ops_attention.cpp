#include <array>

#include "capi/op.hpp"
#include "ops/require.hpp"

using namespace mla;
using namespace mla::capi;

static_assert(offsetof(ExpandedItem, q_count) == offsetof(mla_expanded_item, q_count) &&
              offsetof(ExpandedItem, k_begin) == offsetof(mla_expanded_item, k_begin) &&
              offsetof(ExpandedItem, k_count) == offsetof(mla_expanded_item, k_count) &&
              offsetof(ExpandedItem, visible) == offsetof(mla_expanded_item, visible) &&
              offsetof(ExpandedItem, last) == offsetof(mla_expanded_item, last) &&
              offsetof(ExpandedItem, masked) == offsetof(mla_expanded_item, masked) &&
              offsetof(ExpandedItem, mask_begin) == offsetof(mla_expanded_item, mask_begin));
static_assert(offsetof(LatentItem, q_begin) == offsetof(mla_latent_item, q_begin) &&
              offsetof(LatentItem, q_count) == offsetof(mla_latent_item, q_count) &&
              offsetof(LatentItem, kv_begin) == offsetof(mla_latent_item, kv_begin) &&
              offsetof(LatentItem, kv_end) == offsetof(mla_latent_item, kv_end) &&
              offsetof(LatentItem, visible) == offsetof(mla_latent_item, visible) &&
              offsetof(LatentItem, partial) == offsetof(mla_latent_item, partial));
static_assert(offsetof(SparseItem, q_count) == offsetof(mla_sparse_item, q_count) &&
              offsetof(SparseItem, k_begin) == offsetof(mla_sparse_item, k_begin) &&
              offsetof(SparseItem, k_end) == offsetof(mla_sparse_item, k_end) &&
              offsetof(SparseItem, partial) == offsetof(mla_sparse_item, partial));
static_assert(offsetof(SplitRows, rows) == offsetof(mla_split_rows, rows) &&
              offsetof(SplitRows, partial) == offsetof(mla_split_rows, partial) &&
              offsetof(SplitRows, splits) == offsetof(mla_split_rows, splits));

namespace {

constexpr std::initializer_list<Dtype> kQueries{Dtype::f32, Dtype::bf16, Dtype::fp8_e4m3};

}  // namespace

mla_status mla_attend_expanded(mla_stream* stream, const mla_attend_expanded_args* args) {
  return op("mla_attend_expanded", stream, args, [args](const OpCall& c, const mla_attend_expanded_args& a) {
    if (args->struct_size < sizeof a && a.items_count > 0)
      throw ShapeError("args struct_size is " + std::to_string(args->struct_size) + ": an older header's items, " +
                       std::to_string(sizeof a) + " is needed");
    ops::AttendExpandedArgs e{.q = c.tensors.read<Token, Head, QueryKey>("q", a.q, c.rows()),
                              .k_nope = c.tensors.read<Key, Head, Nope>("k_nope", a.k_nope, kFloatOrBf16),
                              .k_pe = c.tensors.read<Key, Rope>("k_pe", a.k_pe, kFloatOrBf16),
                              .v = c.tensors.read<Key, Head, Value>("v", a.v, kFloatOrBf16),
                              .items = read_items<ExpandedItem>(a.items, a.items_count),
                              .mask = as_words(c.tensors.read_optional_as<int32_t, Token, Word>("mask", a.mask)),
                              .scale = a.scale,
                              .lse = c.tensors.write_as<float, Token, Head>("lse", a.lse),
                              .accumulate = read_flag("accumulate", a.accumulate),
                              .scratch = c.scratch(a.scratch, a.scratch_bytes)};
    for (int64_t i = 0; i < a.items_count; ++i) {
      read_flag("item last", a.items[i].last);
      read_flag("item masked", a.items[i].masked);
    }
    if (a.quantized) e.quantized = read_quantized("quantized", a.quantized, c.device());
    if (a.out || !a.quantized) e.out = c.tensors.write<Token, Head, Value>("out", a.out, c.rows());
    else e.out = {Dtype::f32, nullptr, {0, e.q.extent<Head>(), e.v.extent<Value>()}};
    c.run(e);
  });
}

mla_status mla_attend_latent(mla_stream* stream, const mla_attend_latent_args* args) {
  return op("mla_attend_latent", stream, args, [](const OpCall& c, const mla_attend_latent_args& a) {
    const auto cache = c.cache("cache", a.cache);
    const ops::AttendLatentArgs l{
        .q = c.tensors.read<Token, Head, Entry>("q", a.q, kQueries),
        .q_scale = a.q_scale,
        .cache = cache->view,
        .block_table = read_block_table(a.block_table),
        .items = read_items<LatentItem>(a.items, a.items_count),
        .scale = a.scale,
        .out = c.tensors.write<Token, Head, Value>("out", a.out, c.rows()),
        .lse = c.tensors.write_as<float, Token, Head>("lse", a.lse),
        .partial_out = c.tensors.write_optional_as<float, Partial, Head, Value>("partial_out", a.partial_out),
        .partial_lse = c.tensors.write_optional_as<float, Partial, Head>("partial_lse", a.partial_lse),
        .batch_invariant = read_flag("batch_invariant", a.batch_invariant),
        .scratch = c.scratch(a.scratch, a.scratch_bytes)};
    if (a.partial_lse) ops::require_same<Head>("attend_latent", "partial_lse", l.partial_lse, "q", l.q);
    c.run(l);
  });
}

mla_status mla_attend_sparse(mla_stream* stream, const mla_attend_sparse_args* args) {
  return op("mla_attend_sparse", stream, args, [](const OpCall& c, const mla_attend_sparse_args& a) {
    constexpr int64_t kMostSources = 8;
    std::array<std::shared_ptr<mla_cache>, kMostSources> caches;
    std::array<ops::SparseSource, kMostSources> sources;
    if (a.sources_count < 1 || a.sources_count > kMostSources)
      throw ShapeError("sources_count is " + std::to_string(a.sources_count) + ", allowed 1 to " +
                       std::to_string(kMostSources));
    required("sources", a.sources);
    for (int64_t i = 0; i < a.sources_count; ++i) {
      const mla_sparse_source& s = a.sources[i];
      caches[i] = c.cache("source's cache", s.cache);
      sources[i] = {.cache = caches[i]->view,
                    .slots = c.tensors.read_as<int32_t, Token, Topk>("slots", s.slots),
                    .lengths = read_list("lengths", s.lengths, s.lengths_count)};
    }
    c.run(ops::AttendSparseArgs{
        .q = c.tensors.read<Token, Head, Entry>("q", a.q, kQueries),
        .q_scale = a.q_scale,
        .sources = {sources.data(), static_cast<size_t>(a.sources_count)},
        .items = read_items<SparseItem>(a.items, a.items_count),
        .part_keys = a.part_keys,
        .scale = a.scale,
        .sinks = read_list("sinks", a.sinks, a.sinks_count),
        .out = c.tensors.write<Token, Head, Value>("out", a.out, c.rows()),
        .lse = c.tensors.write_as<float, Token, Head>("lse", a.lse),
        .max_logits = c.tensors.write_optional_as<float, Token, Head>("max_logits", a.max_logits),
        .partial_out = c.tensors.write_optional_as<float, Partial, Head, Value>("partial_out", a.partial_out),
        .partial_lse = c.tensors.write_optional_as<float, Partial, Head>("partial_lse", a.partial_lse),
        .partial_max = c.tensors.write_optional_as<float, Partial, Head>("partial_max", a.partial_max),
        .scratch = c.scratch(a.scratch, a.scratch_bytes)});
  });
}

mla_status mla_merge(mla_stream* stream, const mla_merge_args* args) {
  return op("mla_merge", stream, args, [](const OpCall& c, const mla_merge_args& a) {
    c.run(ops::MergeArgs{.out = c.tensors.write_as<float, Token, Head, Value>("out", a.out),
                         .lse = c.tensors.write_as<float, Token, Head>("lse", a.lse),
                         .other = c.tensors.read_as<float, Token, Head, Value>("other", a.other),
                         .other_lse = c.tensors.read_as<float, Token, Head>("other_lse", a.other_lse),
                         .rows = read_list("rows", a.rows, a.rows_count)});
  });
}

mla_status mla_merge_splits(mla_stream* stream, const mla_merge_splits_args* args) {
  return op("mla_merge_splits", stream, args, [](const OpCall& c, const mla_merge_splits_args& a) {
    c.run(ops::MergeSplitsArgs{
        .partial_out = c.tensors.read_as<float, Partial, Head, Value>("partial_out", a.partial_out),
        .partial_lse = c.tensors.read_as<float, Partial, Head>("partial_lse", a.partial_lse),
        .items = read_items<SplitRows>(a.items, a.items_count),
        .out = c.tensors.write<Token, Head, Value>("out", a.out, {Dtype::f32, Dtype::bf16, Dtype::f16}),
        .lse = c.tensors.write_as<float, Token, Head>("lse", a.lse)});
  });
}

mla_status mla_merge_sparse(mla_stream* stream, const mla_merge_sparse_args* args) {
  return op("mla_merge_sparse", stream, args, [](const OpCall& c, const mla_merge_sparse_args& a) {
    c.run(ops::MergeSparseArgs{
        .partial_out = c.tensors.read_as<float, Partial, Head, Value>("partial_out", a.partial_out),
        .partial_lse = c.tensors.read_as<float, Partial, Head>("partial_lse", a.partial_lse),
        .partial_max = c.tensors.read_optional_as<float, Partial, Head>("partial_max", a.partial_max),
        .items = read_items<SplitRows>(a.items, a.items_count),
        .sinks = read_list("sinks", a.sinks, a.sinks_count),
        .out = c.tensors.write<Token, Head, Value>("out", a.out, kFloatOrBf16),
        .lse = c.tensors.write_as<float, Token, Head>("lse", a.lse),
        .max_logits = c.tensors.write_optional_as<float, Token, Head>("max_logits", a.max_logits)});
  });
}
