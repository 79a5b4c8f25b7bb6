#include "layer/selection.hpp"

#include <cstring>
#include <string>

#include "core/counted.hpp"
#include "core/gpu.hpp"
#include "core/selection_log.hpp"
#include "mla/error.hpp"

namespace mla::layer {
namespace {

// The choice's stamp stands behind it, after a number that memory with anything in it does not hold.
struct Stamp {
  uint64_t chosen = 0, stamp = 0;
};
constexpr uint64_t kChosen = 0xc4053e2be91f7a61u;

std::byte* stamp_of(const LayerContext& c) { return c.selection.data() + c.plan.selection_bytes - Plan::kStampBytes; }

}  // namespace

void begin_choice(Stream& stream, const LayerContext& c) {
  if (stream.device().kind == DeviceKind::cuda) return stream.selections().forget(c.selection.data());
  const Stamp none;
  std::memcpy(stamp_of(c), &none, sizeof none);
}

void end_choice(Stream& stream, const LayerContext& c) {
  if (stream.device().kind == DeviceKind::cuda)
    return stream.selections().note(c.selection.data(), c.plan.selection_stamp, gpu::capturing(stream.queue()));
  const Stamp made{kChosen, c.plan.selection_stamp};
  std::memcpy(stamp_of(c), &made, sizeof made);
}

void require_chosen(Stream& stream, const LayerContext& c) {
  if (c.plan.sparse_rows() == 0) return;
  using Found = SelectionLog::Found;
  Found found;
  if (stream.device().kind == DeviceKind::cuda) {
    found = stream.selections().look(c.selection.data(), c.plan.selection_stamp);
  } else {
    Stamp there;
    std::memcpy(&there, stamp_of(c), sizeof there);
    found = there.chosen != kChosen ? Found::none : there.stamp != c.plan.selection_stamp ? Found::other : Found::same;
  }
  if (found == Found::same) return;
  throw BatchError("layer: " + counted(c.plan.sparse_rows(), "token") +
                   (c.plan.sparse_rows() == 1 ? " attends" : " attend") + " to chosen keys, and the selection " +
                   (found == Found::none ? "holds no choice" : "holds the choice of another step") +
                   ": select() or a layer with an indexer makes it first");
}

}  // namespace mla::layer
