#include "backend/cuda/backend.hpp"
#include "backend/expand_by_products.hpp"

namespace mla::cuda::generic {

void expand(Stream& stream, const ops::ExpandArgs& a) { backend::expand_by_products<project, cast>(stream, a); }

}  // namespace mla::cuda::generic
