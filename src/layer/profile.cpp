#include "mla/layer.hpp"

namespace mla {

void Profile::add(std::string_view op, double seconds, double bytes, double flops) {
  for (Row& row : rows_)
    if (row.op == op) {
      row.seconds += seconds;
      row.bytes += bytes;
      row.flops += flops;
      ++row.calls;
      return;
    }
  rows_.push_back({op, seconds, bytes, flops, 1});
}

}  // namespace mla
