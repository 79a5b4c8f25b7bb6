// Steps as calls: each operand, list and weight that a step names is found in a layer's context.
#pragma once

#include <algorithm>
#include <array>

#include "backend/run.hpp"
#include "mla/layer.hpp"
#include "plan/lists.hpp"

namespace mla::layer {

class Binder {
 public:
  /// Borrows the context. Memory of the call is named by the functions below.
  explicit Binder(const LayerContext& context)
      : c_(context),
        plan_(context.plan),
        lane_scratch_{scratch("scratch"), scratch("scratch_1"), scratch("scratch_2")},
        batch_invariant_(plan_.options.split == SplitPolicy::batch_invariant) {}

  /// Whose the calls are that follow.
  void use_lane(int lane) { scratch_ = lane_scratch_[static_cast<size_t>(lane)]; }

  /// Rows of the call's that are only read, and those that are written.
  template <class... D>
  void read(Memory memory, const AnyView<D...>& v) {
    at(memory) = {static_cast<const std::byte*>(v.data()), nullptr, v.dtype(), strides_of(v)};
  }
  void read(Memory memory, const View<const int32_t, Token, Topk>& v) {
    at(memory) = {reinterpret_cast<const std::byte*>(v.data()), nullptr, Dtype::f32, strides_of(v)};
  }
  template <class... D>
  void write(Memory memory, const AnyMutableView<D...>& v) {
    std::byte* data = static_cast<std::byte*>(v.data());
    at(memory) = {data, data, v.dtype(), strides_of(v)};
  }
  void write(const QuantizedView& out) { quantized_ = out; }
  std::byte* region(std::string_view name) const { return c_.workspace.data() + plan_.region(name).offset; }

  ops::ProjectArgs operator()(const steps::Project& s) const;
  ops::CastArgs operator()(const steps::Cast& s) const;
  ops::ExpandArgs operator()(const steps::Expand& s) const;
  ops::NormArgs operator()(const steps::Norm& s) const;
  ops::LayerNormArgs operator()(const steps::LayerNorm& s) const;
  ops::RopeArgs operator()(const steps::Rotate& s) const;
  ops::HadamardArgs operator()(const steps::Hadamard& s) const;
  ops::AppendArgs operator()(const steps::Append& s) const;
  ops::NormRopeAppendArgs operator()(const steps::NormRopeAppend& s) const;
  ops::GatherArgs operator()(const steps::Gather& s) const;
  ops::GatherArgs operator()(const steps::PackRows& s) const;
  ops::AttendLatentArgs operator()(const steps::AttendLatent& s) const;
  ops::MergeSplitsArgs operator()(const steps::MergeSplits& s) const;
  ops::AttendExpandedArgs operator()(const steps::AttendExpanded& s) const;
  /// Its source is the binder's own: good until the next call.
  ops::AttendSparseArgs operator()(const steps::AttendSparse& s);
  ops::MergeSparseArgs operator()(const steps::MergeSparse& s) const;
  ops::IndexAppendArgs operator()(const steps::IndexAppend& s) const;
  ops::IndexQueryArgs operator()(const steps::IndexQuery& s) const;
  ops::IndexScoreArgs operator()(const steps::IndexScore& s) const;
  ops::SelectTopkArgs operator()(const steps::SelectTopk& s) const;
  ops::FinishTopkArgs operator()(const steps::FinishTopk& s) const;
  ops::FillTopkArgs operator()(const steps::FillTopk& s) const;
  ops::PickRowsArgs operator()(const steps::PickRows& s) const;
  ops::MapToSlotsArgs operator()(const steps::MapToSlots& s) const;
  ops::MapToWorkspaceArgs operator()(const steps::MapToWorkspace& s) const;
  ops::MapToMaskArgs operator()(const steps::MapToMask& s) const;
  ops::QuantizeArgs operator()(const steps::Quantize& s) const;
  ops::QuantizePaddingArgs operator()(const steps::QuantizePadding& s) const;
  /// Where an operand in the workspace begins.
  std::byte* in_workspace(const auto& operand) const { return c_.workspace.data() + operand.offset; }
  AnyView<Token, Head, Entry> operator()(const steps::GatherQueries& s) const;
  AnyMutableView<Token, In> operator()(const steps::AllReduce& s) const;
  AnyMutableView<Token, In> operator()(const steps::ReduceScatter& s) const;
  AnyMutableView<Token, Head, Out> operator()(const steps::AllGather& s) const;
  AnyMutableView<Token, Head, In> operator()(const steps::Zero& s) const;

 private:
  struct Rows {
    const std::byte* data = nullptr;
    std::byte* writable = nullptr;  // null: rows are only read
    Dtype dtype = Dtype::f32;
    std::array<int64_t, 3> strides{};  // of a token, a head and an element
  };
  Rows& at(Memory m) { return rows_[static_cast<size_t>(m)]; }
  const Rows& at(Memory m) const { return rows_[static_cast<size_t>(m)]; }
  template <class V>
  static std::array<int64_t, 3> strides_of(const V& v) {
    if constexpr (V::rank == 2) return {v.strides()[0], 0, v.strides()[1]};
    else return v.strides();
  }

  // Lane 0's has a part for each worker.
  ops::Scratch scratch(std::string_view name) const {
    const Region& r = plan_.region(name);
    return {c_.workspace.data() + r.offset, std::min(r.bytes, plan_.device.scratch_per_worker)};
  }

  // Where an operand lies: its view's data, dtype and strides.
  template <class... D>
  struct Found {
    const std::byte* data;
    std::byte* writable;
    Dtype dtype;
    typename Operand<D...>::Extents strides;
  };
  template <class... D>
  Found<D...> find(const Operand<D...>& o) const;
  template <class... D>
  AnyView<D...> in(const Operand<D...>& o) const {
    if (!o) return {};
    const auto f = find(o);
    return {f.dtype, f.data, o.extents(), f.strides};
  }
  template <class... D>
  AnyMutableView<D...> out(const Operand<D...>& o) const {
    if (!o) return {};
    const auto f = find(o);
    return {f.dtype, f.writable, o.extents(), f.strides};
  }
  template <class T, class... D>
  View<T, D...> values(const Operand<D...>& o) const {
    return out(o).template as<T>();
  }
  View<int32_t, Token, Topk> positions(const Operand<Token, Topk>& o) const {
    if (!o) return {};
    const auto f = find(o);
    return {reinterpret_cast<int32_t*>(f.writable), o.extents(), f.strides};
  }
  View<uint32_t, Token, Word> words(const Operand<Token, Word>& o) const {
    if (!o) return {};
    const auto f = find(o);
    return {reinterpret_cast<uint32_t*>(f.writable), o.extents(), f.strides};
  }
  View<const int32_t, Token, Topk> chosen(const Operand<Token, Topk>& o) const {
    const auto f = find(o);
    return {reinterpret_cast<const int32_t*>(f.data), o.extents(), f.strides};
  }
  View<const int32_t, Token, Key> columns(const Operand<Token, Key>& o) const {
    if (!o) return {};
    const auto f = find(o);
    return {reinterpret_cast<const int32_t*>(f.data), o.extents(), f.strides};
  }
  ops::HeldTokens held() const {
    const ContextParallel& c = plan_.options.context_parallel;
    return {c.sharding, c.member()};
  }
  ops::TopkState state(const Operand<Token, Topk>& o) const {
    return {find(o).writable, o.extent<Token>(), o.extent<Topk>()};
  }
  template <class T>
  ops::List<T> list(const ListOf<T>& l) const {
    if (l.key.kind == ListKind::none) return {};
    const planning::HostList host = planning::host_list(plan_, c_.batch, l.key);
    const T* const device = c_.staged ? reinterpret_cast<const T*>(c_.staged->list(l.key, host.count)) : nullptr;
    return {planning::part(host, l), device ? device + l.begin : nullptr};
  }
  ops::BlockTable block_table() const {
    return {c_.batch.block_table, c_.staged ? c_.staged->block_table(c_.batch.block_table) : nullptr};
  }
  const Linear& weights(Weight w) const;
  /// A step's scale of fp8 queries, or for 0 the layer's own; 1 where weights are but outlined.
  float query_scale(float planned) const {
    return planned > 0 ? planned : c_.weights.query_scale > 0 ? c_.weights.query_scale : 1.0f;
  }
  /// A step's scale of scores, or for 0 the softmax's times the layer's own of queries.
  float score_scale(float planned) const {
    return planned > 0 ? planned : static_cast<float>(plan_.model.softmax_scale()) * query_scale(0);
  }
  Activations activations_of(const Linear& w) const {
    return w.format == WeightFormat::fp8 ? plan_.options.activations : Activations::plain;
  }
  View<const float, Head> scales(Scales s) const;

  const LayerContext& c_;
  const Plan& plan_;
  std::array<Rows, 14> rows_{};
  QuantizedView quantized_;
  std::array<ops::Scratch, kLanes> lane_scratch_;
  ops::Scratch scratch_ = lane_scratch_[0];
  bool batch_invariant_;
  ops::SparseSource source_;
};

}  // namespace mla::layer
