// The golden DeepSeek V3.2 module, its float64 reference and what its file chose.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "layer/reference.hpp"
#include "mla/weights.hpp"
#include "support/device.hpp"
#include "support/golden.hpp"

namespace mla::test {

struct V32 {
  Golden golden = read_golden({golden_folder() / "v32.safetensors"}, true);
  reference::Weights plain = reference::plain_weights(golden.tensors, Dtype::f32);
  LayerWeights weights = prepare(golden.config, golden.tensors, Dtype::f32, kDevice);
  LayerWeights without_indexer = weights;
  std::vector<int64_t> rows = std::vector<int64_t>(static_cast<size_t>(golden.length));
  std::vector<std::vector<double>> scores;

  V32() {
    without_indexer.indexer.reset();
    std::iota(rows.begin(), rows.end(), 0);
    scores = reference::index_scores(golden.config, plain, golden.hidden, rows);
  }
  int64_t topk() const { return golden.config.indexer->topk; }
  /// The file's choice for a row, ascending; masked (future) tokens dropped.
  std::vector<int32_t> chosen(int64_t row) const {
    std::vector<int32_t> c;
    for (int64_t k = 0; k < topk(); ++k)
      if (const int32_t j = golden.topk[row * topk() + k]; j <= row) c.push_back(j);
    std::sort(c.begin(), c.end());
    return c;
  }
};

inline const V32& v32() {
  static const V32 v;
  return v;
}

}  // namespace mla::test
