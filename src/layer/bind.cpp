#include "layer/bind.hpp"

namespace mla::layer {

template <class... D>
Binder::Found<D...> Binder::find(const Operand<D...>& o) const {
  switch (o.memory) {
    case Memory::workspace: {
      std::byte* data = c_.workspace.data() + o.offset;
      return {data, data, o.dtype, o.strides()};
    }
    case Memory::selection: {
      std::byte* data = c_.selection.data() + o.offset;
      return {data, data, o.dtype, o.strides()};
    }
    default: break;
  }
  const Rows& r = at(o.memory);
  Found<D...> f{r.data + o.offset, r.writable ? r.writable + o.offset : nullptr, r.dtype, {}};
  if constexpr (sizeof...(D) == 2) f.strides = {r.strides[0], r.strides[2]};
  else f.strides = r.strides;
  return f;
}

const Linear& Binder::weights(Weight w) const {
  const LayerWeights& l = c_.weights;
  switch (w) {
    case Weight::query_down: return *l.query_down;
    case Weight::query: return *l.query;
    case Weight::query_rope: return *l.query_rope;
    case Weight::kv_down: return *l.kv_down;
    case Weight::kv_up: return *l.kv_up;
    case Weight::absorb_key: return *l.absorb_key;
    case Weight::value_up: return *l.value_up;
    case Weight::output: return *l.output;
    case Weight::absorbed_query: return *l.absorbed_query;
    case Weight::absorbed_output: return *l.absorbed_output;
    case Weight::index_query: return *l.indexer->query;
    case Weight::index_key: return *l.indexer->key;
    case Weight::index_head_weights: return *l.indexer->head_weights;
  }
  throw Error("layer: no such weights");
}

View<const float, Head> Binder::scales(Scales s) const {
  const PrefillScales& p = c_.weights.prefill;
  std::span<const float> x;
  switch (s) {
    case Scales::none: break;
    case Scales::query: x = p.q.values(); break;
    case Scales::query_rope: x = p.q_rope.values(); break;
    case Scales::key: x = p.k.values(); break;
    case Scales::key_rope: x = p.k_rope.values(); break;
    case Scales::value: x = p.v.values(); break;
  }
  return {x.data(), {static_cast<int64_t>(x.size())}};
}

ops::ProjectArgs Binder::operator()(const steps::Project& s) const {
  const Linear& w = weights(s.weights);
  return {.x = in(s.x),
          .x_rows = list(s.x_rows),
          .weights = &w,
          .y = out(s.y),
          .y_rows = list(s.y_rows),
          .rows = s.rows,
          .batch_invariant = batch_invariant_,
          .activations = activations_of(w),
          .quantized = s.quantized ? quantized_ : QuantizedView(),
          .scratch = scratch_};
}

ops::CastArgs Binder::operator()(const steps::Cast& s) const {
  return {.x = in(s.x),
          .x_rows = list(s.x_rows),
          .y = out(s.y),
          .scale = query_scale(s.scale),
          .scales = scales(s.scales),
          .through_e4m3 = s.through_e4m3,
          .y_rows = list(s.y_rows)};
}

ops::ExpandArgs Binder::operator()(const steps::Expand& s) const {
  const Linear& w = weights(s.weights);
  return {.x = in(s.x),
          .x_rows = list(s.x_rows),
          .weights = &w,
          .keys = out(s.keys),
          .values = out(s.values),
          .key_scales = scales(Scales::key),
          .value_scales = scales(Scales::value),
          .products = out(s.products),
          .batch_invariant = batch_invariant_,
          .activations = activations_of(w),
          .scratch = scratch_};
}

ops::NormArgs Binder::operator()(const steps::Norm& s) const {
  ops::NormArgs a{.x = in(s.x), .weight = c_.weights.query_norm.values(), .eps = s.eps, .y = out(s.x)};
  if (s.growth_beta > 0) a.growth = {list(s.positions), s.growth_beta, s.growth_length};
  return a;
}

ops::LayerNormArgs Binder::operator()(const steps::LayerNorm& s) const {
  const View<float, Token, In> x = values<float>(s.x);
  const IndexerWeights& w = *c_.weights.indexer;
  return {.x = x, .weight = w.key_norm.values(), .bias = w.key_norm_bias.values(), .y = x};
}

ops::RopeArgs Binder::operator()(const steps::Rotate& s) const {
  return {.q = out(s.q), .k = out(s.k), .positions = list(s.positions), .table = c_.index_rotary};
}

ops::HadamardArgs Binder::operator()(const steps::Hadamard& s) const {
  return {.q = values<float>(s.q), .k = values<float>(s.k)};
}

ops::AppendArgs Binder::operator()(const steps::Append& s) const {
  return {in(s.kv_c), in(s.k_pe), list(s.slots), c_.cache};
}

ops::NormRopeAppendArgs Binder::operator()(const steps::NormRopeAppend& s) const {
  return {.q_pe = out(s.q_pe),
          .kv_c = out(s.kv_c),
          .k_pe = out(s.k_pe),
          .weight = c_.weights.kv_norm.values(),
          .eps = s.eps,
          .positions = list(s.positions),
          .table = &c_.rotary,
          .slots = list(s.slots),
          .cache = c_.cache,
          .placed = {out(s.q_placed), list(s.q_tokens)}};
}

ops::GatherArgs Binder::operator()(const steps::Gather& s) const {
  ops::GatherArgs a{.cache = c_.cache,
                    .block_table = block_table(),
                    .pieces = list(s.pieces),
                    .kv_c = out(s.kv_c),
                    .k_pe = out(s.k_pe)};
  if (s.sent) {
    CacheSpec spec = plan_.sent_rows;
    spec.k_scale = c_.cache.spec.k_scale;
    a.cache = {spec, find(s.sent).writable, s.sent.extent<Key>(), spec.page_bytes()};
    const ops::List<int32_t> sources = list(s.sources);
    a.block_table = {{sources.data(), {1, std::ssize(sources)}}, sources.device()};
  }
  return a;
}

ops::GatherArgs Binder::operator()(const steps::PackRows& s) const {
  constexpr int64_t kElement = sizeof(float);
  const int64_t rows = s.rows.extent<Key>(), width = s.rows.extent<Entry>() / kElement;
  std::byte* const to = find(s.rows).writable;
  ops::GatherArgs a{.cache = c_.cache, .block_table = block_table(), .pieces = list(s.pieces), .kv_c = {}, .k_pe = {}};
  // Stored rows of any format are copied, bit for bit, as a cache of so many f32.
  if (plan_.sent_rows.format == a.cache.spec.format)
    a.cache.spec = {.format = CacheFormat::f32, .latent = width, .rope = 0, .page_size = a.cache.spec.page_size};
  const int64_t latent = a.cache.spec.latent;
  a.kv_c = {Dtype::f32, to, {rows, latent}, {width, 1}};
  a.k_pe = {Dtype::f32, to + latent * kElement, {rows, width - latent}, {width, 1}};
  return a;
}

ops::AttendLatentArgs Binder::operator()(const steps::AttendLatent& s) const {
  return {.q = in(s.q),
          .q_scale = query_scale(s.q_scale),
          .cache = c_.cache,
          .block_table = block_table(),
          .items = list(s.items),
          .scale = score_scale(s.scale),
          .out = out(s.out),
          .lse = values<float>(s.lse),
          .partial_out = values<float>(s.partial_out),
          .partial_lse = values<float>(s.partial_lse),
          .batch_invariant = batch_invariant_,
          .cache_settled = true,  // queries are absorbed after the append
          .schedule = s.scheduled && c_.staged ? c_.staged->schedule() : std::span<const std::byte>(),
          .scratch = scratch_};
}

ops::MergeSplitsArgs Binder::operator()(const steps::MergeSplits& s) const {
  return {values<float>(s.partial_out), values<float>(s.partial_lse), list(s.items), out(s.out), values<float>(s.lse)};
}

ops::AttendExpandedArgs Binder::operator()(const steps::AttendExpanded& s) const {
  ops::ExpandedScales of_codes;
  if (s.q.dtype == Dtype::fp8_e4m3) {
    const auto every_row = [&](Scales role) {
      const View<const float, Head> x = scales(role);
      return View<const float, Group, Head>(x.data(), {1, x.extent<Head>()});
    };
    of_codes = {every_row(Scales::query), every_row(Scales::key), every_row(Scales::value), {}};
  }
  return {.q = in(s.q),
          .k_nope = in(s.k_nope),
          .k_pe = in(s.k_pe),
          .v = in(s.v),
          .scales = of_codes,
          .sums = s.raw_sums ? ops::ExpandedSums::raw : ops::ExpandedSums::precise,
          .items = list(s.items),
          .mask = words(s.mask),
          .scale = s.scale,
          .out = out(s.out),
          .lse = values<float>(s.lse),
          .accumulate = s.accumulate,
          .quantized = s.quantized ? quantized_ : QuantizedView(),
          .scratch = scratch_};
}

ops::AttendSparseArgs Binder::operator()(const steps::AttendSparse& s) {
  source_ = {c_.cache, chosen(s.slots), {}};
  if (s.gathered) {
    // Whole sequences as a cache of single-row pages in the compute dtype.
    const CacheSpec spec =
        cache_spec(plan_.model, s.gathered.dtype == Dtype::bf16 ? CacheFormat::bf16 : CacheFormat::f32, 1);
    source_.cache = {spec, find(s.gathered).writable, s.gathered.extent<Key>(), spec.page_bytes()};
  }
  return {.q = in(s.q),
          .q_scale = query_scale(s.q_scale),
          .sources = {&source_, 1},
          .items = list(s.items),
          .part_keys = s.part_keys,
          .many_holes = s.many_holes,
          .shared_keys = s.shared_keys,
          .scale = score_scale(s.scale),
          .sinks = {},
          .out = out(s.out),
          .lse = values<float>(s.lse),
          .max_logits = {},
          .partial_out = values<float>(s.partial_out),
          .partial_lse = values<float>(s.partial_lse),
          .partial_max = {},
          .scratch = scratch_};
}

ops::MergeSparseArgs Binder::operator()(const steps::MergeSparse& s) const {
  return {.partial_out = values<float>(s.partial_out),
          .partial_lse = values<float>(s.partial_lse),
          .partial_max = {},
          .items = list(s.items),
          .sinks = {},
          .out = out(s.out),
          .lse = values<float>(s.lse),
          .max_logits = {}};
}

ops::IndexAppendArgs Binder::operator()(const steps::IndexAppend& s) const {
  return {values<float>(s.keys), list(s.slots), c_.index_cache};
}

ops::IndexQueryArgs Binder::operator()(const steps::IndexQuery& s) const {
  const View<float, Token, IndexHead> weights = values<float>(s.weights);
  return {.q = values<float>(s.q),
          .weights = weights,
          .codes = values<fp8_e4m3>(s.codes),
          .scaled_weights = weights,
          .table = s.positions.key.kind == ListKind::none ? nullptr : c_.index_rotary,
          .positions = list(s.positions)};
}

ops::IndexScoreArgs Binder::operator()(const steps::IndexScore& s) const {
  return {.q = in(s.q),
          .weights = values<float>(s.weights),
          .scale = s.scale,
          .cache = c_.index_cache,
          .block_table = block_table(),
          .items = list(s.items),
          .first = s.first,
          .scores = values<float>(s.scores),
          .arithmetic = s.arithmetic,
          .scratch = scratch_};
}

ops::SelectTopkArgs Binder::operator()(const steps::SelectTopk& s) const {
  return {.scores = values<float>(s.scores),
          .items = list(s.items),
          .first = s.first,
          .positions = columns(s.positions),
          .begin = s.first == 0,
          .state = state(s.state),
          .scratch = scratch_,
          .indices = positions(s.indices)};
}

ops::FinishTopkArgs Binder::operator()(const steps::FinishTopk& s) const {
  return {.state = state(s.state),
          .items = list(s.items),
          .indices = positions(s.indices),
          .scores = values<float>(s.scores),
          .held = s.held ? held() : ops::HeldTokens{}};
}

ops::FillTopkArgs Binder::operator()(const steps::FillTopk& s) const { return {list(s.items), positions(s.indices)}; }

ops::PickRowsArgs Binder::operator()(const steps::PickRows& s) const {
  return {chosen(s.positions), list(s.rows), positions(s.picked)};
}

ops::MapToSlotsArgs Binder::operator()(const steps::MapToSlots& s) const {
  return {.positions = chosen(s.positions),
          .requests = list(s.requests),
          .block_table = block_table(),
          .page_size = c_.cache.spec.page_size,
          .pages = c_.cache.pages,
          .lengths = list(s.lengths),
          .slots = positions(s.slots),
          .held = held()};
}

ops::MapToWorkspaceArgs Binder::operator()(const steps::MapToWorkspace& s) const {
  return {.positions = chosen(s.positions),
          .requests = list(s.requests),
          .starts = list(s.starts),
          .counts = list(s.counts),
          .rows = positions(s.rows),
          .held = held()};
}

ops::MapToMaskArgs Binder::operator()(const steps::MapToMask& s) const {
  return {.positions = chosen(s.positions), .rows = list(s.rows), .mask = words(s.mask)};
}

ops::QuantizeArgs Binder::operator()(const steps::Quantize& s) const {
  return {.x = in(s.x), .rows = list(s.rows), .y = quantized_};
}

ops::QuantizePaddingArgs Binder::operator()(const steps::QuantizePadding& s) const { return {quantized_, s.rows}; }

AnyView<Token, Head, Entry> Binder::operator()(const steps::GatherQueries& s) const { return in(s.x); }
AnyMutableView<Token, In> Binder::operator()(const steps::AllReduce& s) const { return out(s.x); }
AnyMutableView<Token, In> Binder::operator()(const steps::ReduceScatter& s) const { return out(s.x); }
AnyMutableView<Token, Head, Out> Binder::operator()(const steps::AllGather& s) const { return out(s.y); }
AnyMutableView<Token, Head, In> Binder::operator()(const steps::Zero& s) const { return out(s.y); }

}  // namespace mla::layer
