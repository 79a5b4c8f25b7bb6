// Ops that the GPU does not have yet.
#include <string>

#include "backend/cuda/backend.hpp"
#include "mla/error.hpp"

namespace mla::cuda {


}  // namespace mla::cuda
