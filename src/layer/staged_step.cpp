#include "mla/staged_step.hpp"

#include <optional>
#include <vector>

#include "backend/run.hpp"
#include "core/gpu.hpp"
#include "core/named_buffer.hpp"
#include "layer/staged_lists.hpp"
#include "mla/error.hpp"

namespace mla {

struct StagedStep::State {
  Stream stream;
  layer::StagedLists lists;       // laid out for the step that calls are made with
  const Plan* of_plan = nullptr;  // that step's; none while one is being staged
  Batch of_batch;                 // whose arrays are looked at by address alone
  Buffer device;
  // Made anew for every step from these, whose items are those of the step that calls are made with.
  std::optional<ops::ScheduleLatentArgs> schedule;
  std::vector<LatentItem> scheduled;
  struct Pinned {
    std::byte* data = nullptr;
    size_t bytes = 0;
    gpu::Mark copied;
  } pinned[2];
  int next = 0;

  explicit State(const Stream& s) : stream(s) {}
  ~State() {
    for (Pinned& p : pinned) give_back(p);
  }
  static void give_back(Pinned& p) noexcept {
    if (!p.data) return;
    try {
      p.copied.wait();
    } catch (const Error&) {  // the device failed: there is no copy to wait for
    }
    gpu::release_pinned(p.data);
    p.data = nullptr;
  }

  void lay_out(const Plan& plan, const Batch& batch) {
    lists.lay_out(plan, batch);
    const steps::ScheduleLatent* made = nullptr;
    for (const Step& step : plan.steps)
      if (step.calls.any_of(kStaging)) made = &std::get<steps::ScheduleLatent>(step.work);
    const size_t bytes = lists.bytes() + (made ? ops::kLatentScheduleBytes : 0);
    if (device.size() < bytes) {
      stream.synchronize();  // calls under way still read the old one
      device = named_buffer("arrays of a staged step", bytes + bytes / 4, stream.device());
    }
    schedule.reset();
    if (!made) return;
    scheduled = plan.latent_items;
    const auto on_device = [&](size_t offset) { return reinterpret_cast<const int32_t*>(device.data() + offset); };
    const size_t items = lists.offset_of(made->items.key, scheduled.size());
    schedule =
        ops::ScheduleLatentArgs{.tokens = made->q.extent<Token>(),
                                .heads = made->q.extent<Head>(),
                                .q_dtype = made->q.dtype,
                                .cache = plan.cache,
                                .block_table = {batch.block_table, on_device(lists.offset_of(batch.block_table))},
                                .items = {scheduled, reinterpret_cast<const LatentItem*>(device.data() + items)},
                                .batch_invariant = plan.options.split == SplitPolicy::batch_invariant,
                                .scratch_bytes = plan.device.scratch_per_worker,
                                .schedule = {device.data() + lists.bytes(), ops::kLatentScheduleBytes}};
  }

  void send(const layer::StagedLists::Fitted& step, const Batch& batch) {
    const size_t bytes = lists.bytes();
    Pinned& host = pinned[next];
    next ^= 1;
    if (host.bytes < bytes) {
      give_back(host);
      host.bytes = 0;
      host.data = gpu::allocate_pinned(bytes + bytes / 4);
      host.bytes = bytes + bytes / 4;
    }
    host.copied.wait();
    lists.write(step, batch, host.data);
    copy(stream, device.data(), host.data, bytes);
    host.copied.set(stream.queue());
    if (schedule) ops::run(stream, *schedule);
  }
};

StagedStep::StagedStep(Stream& stream) {
  if (stream.device().kind == DeviceKind::cuda) state_ = std::make_unique<State>(stream);
}
StagedStep::~StagedStep() = default;

void StagedStep::stage(const Plan& plan, const Batch& batch) {
  if (!state_) return;
  state_->of_plan = nullptr;
  state_->lay_out(plan, batch);
  state_->send(state_->lists.own(), batch);
  state_->of_plan = &plan, state_->of_batch = batch;
}

void StagedStep::restage(const Plan& plan, const Batch& batch) {
  if (!state_) return;
  if (!state_->of_plan) throw ShapeError("restage: no step is staged");
  state_->send(state_->lists.fit(plan, batch), batch);
}

bool StagedStep::serves(const Stream& stream, const Plan& plan, const Batch& b) const {
  if (!state_) return stream.device().kind == DeviceKind::cpu;
  const Batch& held = state_->of_batch;
  return stream.device().kind == DeviceKind::cuda && &stream.queue() == &state_->stream.queue() &&
         state_->of_plan == &plan && held.slot_mapping.data() == b.slot_mapping.data() &&
         held.seq_lens.data() == b.seq_lens.data() && held.block_table.data() == b.block_table.data();
}
const std::byte* StagedStep::list(ListKey key, size_t count) const {
  return state_ && count > 0 ? state_->device.data() + state_->lists.offset_of(key, count) : nullptr;
}
std::span<const std::byte> StagedStep::schedule() const {
  return state_ && state_->schedule ? state_->schedule->schedule : std::span<const std::byte>();
}
const int32_t* StagedStep::block_table(View<const int32_t, Request, Page> table) const {
  return state_ ? reinterpret_cast<const int32_t*>(state_->device.data() + state_->lists.offset_of(table)) : nullptr;
}

}  // namespace mla
