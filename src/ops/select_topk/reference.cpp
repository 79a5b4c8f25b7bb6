#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/select_topk/op.hpp"

namespace mla::ops {

void reference(const SelectTopkArgs& a, View<int32_t, Token, Topk> indices, View<float, Token, Topk> scores) {
  struct Candidate {
    float score;
    int32_t position;
  };
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  for (const IndexItem& whole : a.items) {
    const IndexItem item = clipped(whole, a.first, a.scores.extent<Key>());
    for (int64_t i = 0; i < item.q_count; ++i) {
      std::vector<Candidate> seen;
      for (int32_t c = 0; c < item.columns(i); ++c) {
        const float s = a.scores(item.row + i, c);
        const int32_t position = a.positions ? a.positions(item.row + i, c) : item.kv_begin + c;
        if (position >= 0) seen.push_back({std::isnan(s) ? kLowest : s + 0.0f, position});
      }
      std::sort(seen.begin(), seen.end(), [](const Candidate& x, const Candidate& y) {
        return x.score != y.score ? x.score > y.score : x.position < y.position;
      });
      seen.resize(std::min(seen.size(), static_cast<size_t>(a.state.topk)));
      std::sort(seen.begin(), seen.end(),
                [](const Candidate& x, const Candidate& y) { return x.position < y.position; });
      for (int64_t k = 0; k < a.state.topk; ++k) {
        const bool some = k < static_cast<int64_t>(seen.size());
        indices(item.q_begin + i, k) = some ? seen[k].position : -1;
        if (scores) scores(item.q_begin + i, k) = some ? seen[k].score : kLowest;
      }
    }
  }
}

}  // namespace mla::ops
