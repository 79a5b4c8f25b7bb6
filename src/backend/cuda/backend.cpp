#include "backend/cuda/backend.hpp"

#include "backend/cuda/core/queue.hpp"
#include "backend/cuda/sm90/ops.hpp"

namespace mla::cuda {

std::string_view target() { return "sm_80 and newer, sm_90a kernels on Hopper"; }
// Hopper's kernels where they serve the call, the generic ones everywhere else.
void attend_latent(Stream& stream, const ops::AttendLatentArgs& a) {
  if (sm90::serves(stream.queue(), a)) sm90::attend_latent(stream.queue(), a);
  else generic::attend_latent(stream, a);
}
void attend_expanded(Stream& stream, const ops::AttendExpandedArgs& a) {
  if (sm90::serves(stream.queue(), a)) sm90::attend_expanded(stream, a);
  else generic::attend_expanded(stream, a);
}

size_t scratch_per_worker(const backend::ScratchShape&) { return kScratch; }

}  // namespace mla::cuda
