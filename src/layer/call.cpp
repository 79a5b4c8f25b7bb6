#include "layer/call.hpp"

#include <vector>

namespace mla::layer {

std::function<Profile::Work()> work_of_selection(const Stream& stream, const ops::AttendSparseArgs& args) {
  return [stream = Stream(stream), here = args,
          sources = std::vector(args.sources.begin(), args.sources.end())]() mutable {
    std::vector<std::vector<int32_t>> lists;
    for (ops::SparseSource& s : sources) {
      const int64_t rows = s.slots.extent<Token>(), topk = s.slots.extent<Topk>();
      if (rows == 0) continue;
      std::vector<int32_t>& list = lists.emplace_back(static_cast<size_t>((rows - 1) * s.slots.stride<Token>() + topk));
      copy(stream, list.data(), s.slots.data(), list.size() * sizeof(int32_t));
      s.slots = {list.data(), s.slots.extents(), s.slots.strides()};
    }
    stream.synchronize();
    here.sources = sources;
    const ops::Cost cost = ops::cost(here);
    return Profile::Work{cost.bytes, cost.flops};
  };
}

}  // namespace mla::layer
