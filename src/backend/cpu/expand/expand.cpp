#include "backend/cpu/backend.hpp"
#include "backend/expand_by_products.hpp"

namespace mla::cpu {

void expand(Stream& stream, const ops::ExpandArgs& a) { backend::expand_by_products<project, cast>(stream, a); }

}  // namespace mla::cpu
