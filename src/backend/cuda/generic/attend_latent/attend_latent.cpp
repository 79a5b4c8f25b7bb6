#include "backend/cuda/backend.hpp"
#include "backend/cuda/generic/attention/cache_attention.hpp"

namespace mla::cuda {

void generic::attend_latent(Stream& stream, const ops::AttendLatentArgs& a) {
  generic::attend_positions(stream.queue(), a);
}

}  // namespace mla::cuda
