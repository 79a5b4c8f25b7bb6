// Two requests in one step: one prefills a prompt of 100 tokens, the other decodes its next token after 40 cached ones.
#include <cstdio>
#include <mla/mla.hpp>
#include <vector>

int main() try {
  using namespace mla;
  const ModelConfig model = preset("deepseek-v2-lite");
  const LayerWeights weights = prepare(model, random_layer(model, /*layer=*/0, /*seed=*/1, Dtype::bf16), Dtype::bf16);
  const RotaryTable rotary(model.rotary, model.rope, /*positions=*/4096);
  Cache cache(cache_spec(model, CacheFormat::bf16, /*page_size=*/64), /*pages=*/8);

  // The batch, as an engine's scheduler would describe it: pages 2 and 5 belong to the prompt, page 0 to the other
  // request.
  const std::vector<int32_t> query_start_loc{0, 100, 101}, seq_lens{100, 41}, block_table{2, 5, 0, -1};
  std::vector<int32_t> slots;
  for (int t = 0; t < 100; ++t) slots.push_back((t < 64 ? 2 * 64 : 5 * 64) + t % 64);
  slots.push_back(40);
  const Batch batch{query_start_loc, seq_lens, {block_table.data(), {2, 2}}, slots};

  ThreadPool pool(2);
  Stream stream(pool);
  const Plan step = plan(model, cache.spec(), cache.pages(), batch, device_info(stream, model));
  std::printf("%s\n", step.describe().c_str());

  Buffer workspace(step.workspace_bytes);
  std::vector<float> hidden(101 * model.hidden, 0.5f), out(hidden.size());
  forward(stream, {step, batch, weights, rotary, cache.view(), {workspace.data(), workspace.size()}},
          View<const float, Token, Hidden>(hidden.data(), {101, model.hidden}),
          View<float, Token, Hidden>(out.data(), {101, model.hidden}));
  std::printf("out[100][0..3] = %g %g %g %g\n", out[100 * model.hidden], out[100 * model.hidden + 1],
              out[100 * model.hidden + 2], out[100 * model.hidden + 3]);
} catch (const mla::Error& e) {
  std::fprintf(stderr, "decode_step: %s\n", e.what());
  return 1;
}
