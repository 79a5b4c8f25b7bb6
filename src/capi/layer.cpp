#include "capi/objects.hpp"
#include "capi/tensor.hpp"

using namespace mla;
using namespace mla::capi;

namespace {

// One call of a layer: its handles kept alive, everything on the stream's device.
class Call {
 public:
  Call(const mla_stream* stream, const mla_layer_args* args)
      : turn_(stream), args_(read_struct("args", args)), tensors_(turn_.device()) {
    plan_ = get("plan", args_.plan);
    weights_ = get("weights", args_.weights);
    rotary_ = get("rotary", args_.rotary);
    cache_ = plan_->plan.uses_cache() ? get("cache", args_.cache) : get_optional("cache", args_.cache);
    index_cache_ = get_optional("index_cache", args_.index_cache);
    index_rotary_ = get_optional("index_rotary", args_.index_rotary);
    profile_ = get_optional("profile", args_.profile);
    staged_ = get_optional("staged", args_.staged);
    if (staged_ && !(staged_->stream == get("stream", stream) && staged_->staged))
      throw HandleError("staged is of another stream, or destroyed");
    if (plan_->plan.options.tensor_parallel > 1) ranks_ = get("ranks", args_.ranks);
    constexpr double kMostSeconds = 86400;
    if (!(args_.rank_seconds >= 0 && args_.rank_seconds <= kMostSeconds))
      throw InputError("rank_seconds is " + std::to_string(args_.rank_seconds) + ", allowed 0 to 86400");
    const Device device = turn_.device();
    if (!(plan_->plan.device.device == device))
      throw ShapeError("plan was made for " + mla::to_string(plan_->plan.device.device) + ", the stream is on " +
                       mla::to_string(device));
    require_on(device, "weights", *weights_);
    require_on(device, "rotary", *rotary_);
    if (index_cache_) require_on(device, "index_cache", *index_cache_);
    if (index_rotary_) require_on(device, "index_rotary", *index_rotary_);
    if (!cache_) return;
    require_on(device, "cache", *cache_);
    same("cache latent", cache_->view.spec.latent, plan_->plan.cache.latent);
    same("cache rope", cache_->view.spec.rope, plan_->plan.cache.rope);
  }

  Stream& stream() const { return turn_.stream(); }
  Device device() const { return turn_.device(); }
  const Plan& plan() const { return plan_->plan; }
  const Tensors& tensors() const { return tensors_; }
  LayerContext context() const {
    return {.plan = plan_->plan,
            .batch = plan_->batch,
            .weights = weights_->weights,
            .rotary = rotary_->table,
            .cache = cache_ ? cache_->view : CacheView{},
            .workspace = read_memory("workspace", args_.workspace, args_.workspace_bytes),
            .profile = profile_ ? &profile_->profile : nullptr,
            .index_cache = index_cache_ ? index_cache_->view : IndexCacheView{},
            .index_rotary = index_rotary_ ? &index_rotary_->table : nullptr,
            .selection = read_memory("selection", args_.selection, args_.selection_bytes),
            .staged = staged_ ? staged_->staged.get() : nullptr,
            .ranks = ranks_ ? &ranks_->communicator : nullptr,
            .deadline = std::chrono::nanoseconds(
                static_cast<int64_t>((args_.rank_seconds > 0 ? args_.rank_seconds : 60) * 1e9))};
  }

 private:
  static void same(const char* what, int64_t found, int64_t planned) {
    if (found != planned)
      throw ShapeError(std::string(what) + " is " + std::to_string(found) + ", plan was made for " +
                       std::to_string(planned));
  }

  Turn turn_;
  mla_layer_args args_;
  Tensors tensors_;
  std::shared_ptr<mla_plan> plan_;
  std::shared_ptr<mla_weights> weights_;
  std::shared_ptr<mla_rotary> rotary_, index_rotary_;
  std::shared_ptr<mla_cache> cache_;
  std::shared_ptr<mla_index_cache> index_cache_;
  std::shared_ptr<mla_profile> profile_;
  std::shared_ptr<const mla_staged_step> staged_;
  std::shared_ptr<mla_communicator> ranks_;
};

struct Inputs {
  AnyView<Token, Head, QueryKey> q;
  AnyView<Token, Latent> kv_c;
  AnyView<Token, Rope> k_pe;
};

Inputs read_inputs(const Call& call, const DLTensor* q, const DLTensor* kv_c, const DLTensor* k_pe) {
  const Dtype dtype = call.plan().inputs();
  const auto dense = [](const char* name, int64_t extent, int64_t stride) {
    if (extent > 1 && stride != 1)
      throw ShapeError(std::string(name) + " has stride " + std::to_string(stride) + ", 1 is needed");
  };
  Inputs in;
  if (call.plan().options.dummy) return in;
  in.q = call.tensors().read<Token, Head, QueryKey>("q", q, {dtype});
  dense("q QueryKey", in.q.extent<QueryKey>(), in.q.stride<QueryKey>());
  if (!call.plan().reads_new_rows()) return in;
  in.kv_c = call.tensors().read<Token, Latent>("kv_c", kv_c, {dtype});
  in.k_pe = call.tensors().read<Token, Rope>("k_pe", k_pe, {dtype});
  dense("kv_c Latent", in.kv_c.extent<Latent>(), in.kv_c.stride<Latent>());
  dense("k_pe Rope", in.k_pe.extent<Rope>(), in.k_pe.stride<Rope>());
  return in;
}

}  // namespace

mla_status mla_staged_step_create(mla_stream* stream, mla_staged_step** staged) {
  return guarded("mla_staged_step_create", [&] {
    expect_handle("staged", staged);
    auto made = std::make_shared<mla_staged_step>();
    made->stream = get("stream", stream);
    const Turn turn(stream);
    made->staged = std::make_unique<StagedStep>(turn.stream());
    put(staged, std::move(made));
  });
}

mla_status mla_staged_step_destroy(mla_staged_step* staged) {
  return guarded("mla_staged_step_destroy", [&] {
    if (!staged) return;
    const auto s = get("staged", staged);
    const std::scoped_lock turn(s->stream->turn);
    if (!remove(staged)) get("staged", staged);  // another thread was first
    s->staged.reset();
  });
}

mla_status mla_staged_step_stage(mla_staged_step* staged, const mla_plan* plan) {
  return guarded("mla_staged_step_stage", [&] {
    const auto s = get("staged", staged);
    auto p = get("plan", plan);
    const std::scoped_lock turn(s->stream->turn);
    if (!s->staged) throw HandleError("staged is no handle, or a destroyed one");
    s->staged->stage(p->plan, p->batch);
    s->plan = std::move(p);
  });
}

mla_status mla_staged_step_restage(mla_staged_step* staged, const mla_plan* plan) {
  return guarded("mla_staged_step_restage", [&] {
    const auto s = get("staged", staged);
    const auto p = get("plan", plan);
    const std::scoped_lock turn(s->stream->turn);
    if (!s->staged) throw HandleError("staged is no handle, or a destroyed one");
    s->staged->restage(p->plan, p->batch);
  });
}

mla_status mla_profile_create(mla_profile** profile) {
  return guarded("mla_profile_create", [&] {
    expect_handle("profile", profile);
    put(profile, std::make_shared<mla_profile>());
  });
}

mla_status mla_profile_destroy(mla_profile* profile) { return destroy("mla_profile_destroy", "profile", profile); }

mla_status mla_profile_count(mla_profile* profile, int64_t* rows) {
  return guarded("mla_profile_count", [&] {
    required("rows", rows) = static_cast<int64_t>(get("profile", profile)->profile.rows().size());
  });
}

mla_status mla_profile_get(mla_profile* profile, int64_t index, mla_profile_row* row) {
  return guarded("mla_profile_get", [&] {
    const auto held = get("profile", profile);
    const auto& rows = held->profile.rows();
    if (index < 0 || index >= static_cast<int64_t>(rows.size()))
      throw InputError("index is " + std::to_string(index) + ", the profile has " + std::to_string(rows.size()) +
                       " rows");
    const Profile::Row& r = rows[index];
    write_struct("row", row,
                 mla_profile_row{sizeof(mla_profile_row), r.op.data(), r.seconds, r.bytes, r.flops, r.calls});
  });
}

mla_status mla_profile_clear(mla_profile* profile) {
  return guarded("mla_profile_clear", [&] { get("profile", profile)->profile.clear(); });
}

mla_status mla_forward(mla_stream* stream, const mla_layer_args* args, const DLTensor* hidden, const DLTensor* out) {
  return guarded("mla_forward", [&] {
    const Call call(stream, args);
    AnyView<Token, Hidden> h;
    if (!call.plan().options.dummy)
      h = call.tensors().read<Token, Hidden>("hidden", hidden, {Dtype::f32, Dtype::bf16, Dtype::f16});
    const auto o = call.tensors().write<Token, Hidden>("out", out, {Dtype::f32, Dtype::bf16, Dtype::f16});
    forward(call.stream(), call.context(), h, o);
  });
}

mla_status mla_select(mla_stream* stream, const mla_layer_args* args, const DLTensor* positions) {
  return guarded("mla_select", [&] {
    const Call call(stream, args);
    const auto p = call.tensors().read_as<int32_t, Token, Topk>("positions", positions);
    select(call.stream(), call.context(), p);
  });
}

mla_status mla_attend(mla_stream* stream, const mla_layer_args* args, const DLTensor* q, const DLTensor* kv_c,
                      const DLTensor* k_pe, const DLTensor* out) {
  return guarded("mla_attend", [&] {
    const Call call(stream, args);
    const Inputs in = read_inputs(call, q, kv_c, k_pe);
    const auto o = call.tensors().write<Token, Head, Value>("out", out, {Dtype::f32, Dtype::bf16, Dtype::f16});
    attend(call.stream(), call.context(), in.q, in.kv_c, in.k_pe, o);
  });
}

mla_status mla_attend_quantized(mla_stream* stream, const mla_layer_args* args, const DLTensor* q, const DLTensor* kv_c,
                                const DLTensor* k_pe, const mla_quantized* out) {
  return guarded("mla_attend_quantized", [&] {
    const Call call(stream, args);
    const Inputs in = read_inputs(call, q, kv_c, k_pe);
    attend(call.stream(), call.context(), in.q, in.kv_c, in.k_pe, read_quantized("out", out, call.device()));
  });
}
