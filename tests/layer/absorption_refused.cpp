// Calls that layers of absorbed weights refuse by name. The context is the test's own, of host memory, hence on the CPU
// alone.
#include <gtest/gtest.h>

#include <vector>

#include "mla/mla.hpp"
#include "support/message.hpp"
#include "support/models.hpp"

namespace mla::test {
namespace {

TEST(Absorption, AttentionFormAndOtherPlansAreRefused) {
  const ModelConfig m = small_deepseek();
  const LayerTensors tensors = random_layer(m, 0, 1, Dtype::f32);
  const LayerWeights weights = prepare(m, tensors, PrepareOptions{.absorption = Absorption::full});
  const RotaryTable rotary(m.rotary, m.rope, 16);
  const std::vector<int32_t> starts{0, 1}, lengths{1}, table{0}, slots{0};
  const Batch batch{starts, lengths, {table.data(), {1, 1}}, slots};
  ThreadPool pool(1);
  Stream stream(pool);
  Cache cache(cache_spec(m, CacheFormat::f32), 1);
  const Plan p = plan(m, cache.spec(), 1, batch, device_info(stream, m), {.absorbed = true});
  EXPECT_NE(p.describe().find("fully absorbed weights"), std::string::npos);
  EXPECT_EQ(p.region("heads").bytes, 0u);
  EXPECT_EQ(p.region("query").bytes, static_cast<size_t>(m.heads * m.rope) * sizeof(float));
  const Buffer workspace(p.workspace_bytes);
  const LayerContext context{p, batch, weights, rotary, cache.view(), {workspace.data(), workspace.size()}};
  // One held otherwise than the plan says is refused alike.
  const LayerWeights narrow = prepare(m, tensors, PrepareOptions{.up = WeightFormat::mxfp4});
  const Plan plain = plan(m, cache.spec(), 1, batch, device_info(stream, m));
  const LayerContext other{plain, batch, narrow, rotary, cache.view(), {workspace.data(), workspace.size()}};
  EXPECT_EQ(message_of<UnsupportedError>([&] { attend(stream, other, {}, {}, {}, View<float, Token, Head, Value>()); }),
            "layer: weights hold W_UK and W_UV as mxfp4, the plan is for plain (PlanOptions::up)");
  EXPECT_EQ(
      message_of<UnsupportedError>([&] { attend(stream, context, {}, {}, {}, View<float, Token, Head, Value>()); }),
      "layer: the attention form takes queries and gives values per head, weights with absorption full know "
      "neither");
}

}  // namespace
}  // namespace mla::test
