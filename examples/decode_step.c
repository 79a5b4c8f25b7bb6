// decode_step.cpp in C: two requests in one step, one prefills a prompt of 100 tokens, the other decodes its next token
// after 40 cached ones.
#include <mla/c/mla.h>
#include <stdio.h>
#include <stdlib.h>

static void check(mla_status status) {
  if (status == MLA_OK) return;
  fprintf(stderr, "decode_step: %s (%s)\n", mla_last_error(), mla_status_name(status));
  exit(1);
}

static DLTensor rows(float* data, int64_t shape[2]) {
  const DLTensor t = {data, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape, NULL, 0};
  return t;
}

int main(void) {
  const DLDevice cpu = {kDLCPU, 0};
  mla_stream* stream;
  check(mla_stream_create_cpu(2, &stream));

  mla_model* model;
  check(mla_model_create_preset("deepseek-v2-lite", &model));
  mla_model_fields fields = mla_model_fields_default();
  check(mla_model_get(model, &fields));

  mla_prepare_options prepare = mla_prepare_options_default();
  prepare.dtype = MLA_BF16;
  mla_weights* weights;
  check(mla_weights_create_random(model, /*layer=*/0, /*seed=*/1, MLA_BF16, &prepare, cpu, &weights));
  mla_rotary* rotary;
  check(mla_rotary_create(model, /*indexer=*/0, /*positions=*/4096, cpu, &rotary));

  mla_cache_spec spec = mla_cache_spec_default();
  check(mla_cache_spec_of(model, MLA_CACHE_BF16, /*page_size=*/64, &spec));
  mla_cache* cache;
  check(mla_cache_create(&spec, /*pages=*/8, cpu, &cache));

  // The batch, as an engine's scheduler would describe it: pages 2 and 5 belong to the prompt, page 0 to the other
  // request.
  const int32_t query_start_loc[] = {0, 100, 101}, seq_lens[] = {100, 41}, block_table[] = {2, 5, 0, -1};
  int32_t slots[101];
  for (int t = 0; t < 100; ++t) slots[t] = (t < 64 ? 2 * 64 : 5 * 64) + t % 64;
  slots[100] = 40;
  mla_batch batch = {0};
  batch.struct_size = sizeof batch;
  batch.requests = 2;
  batch.tokens = 101;
  batch.query_start_loc = query_start_loc;
  batch.seq_lens = seq_lens;
  batch.block_table = block_table;
  batch.block_table_pages = 2;
  batch.slot_mapping = slots;

  mla_plan* plan;
  check(mla_plan_create(stream, model, &spec, /*pages=*/8, &batch, /*options=*/NULL, &plan));
  char text[4096];
  check(mla_plan_describe(plan, text, sizeof text, NULL));
  printf("%s\n", text);
  mla_plan_info info = {0};
  info.struct_size = sizeof info;
  check(mla_plan_get(plan, &info));

  mla_buffer* workspace;
  check(mla_buffer_create(cpu, info.workspace_bytes, &workspace));
  mla_layer_args layer = {0};
  layer.struct_size = sizeof layer;
  layer.plan = plan;
  layer.weights = weights;
  layer.rotary = rotary;
  layer.cache = cache;
  check(mla_buffer_data(workspace, &layer.workspace, &layer.workspace_bytes));

  int64_t shape[] = {101, fields.hidden};
  const size_t elements = (size_t)(shape[0] * shape[1]);
  float *hidden = malloc(elements * sizeof *hidden), *out = malloc(elements * sizeof *out);
  if (!hidden || !out) return 1;
  for (size_t i = 0; i < elements; ++i) hidden[i] = 0.5f;
  const DLTensor x = rows(hidden, shape), y = rows(out, shape);
  check(mla_forward(stream, &layer, &x, &y));
  const float* last = out + 100 * fields.hidden;
  printf("out[100][0..3] = %g %g %g %g\n", last[0], last[1], last[2], last[3]);

  free(hidden);
  free(out);
  check(mla_buffer_destroy(workspace));
  check(mla_plan_destroy(plan));
  check(mla_cache_destroy(cache));
  check(mla_rotary_destroy(rotary));
  check(mla_weights_destroy(weights));
  check(mla_model_destroy(model));
  check(mla_stream_destroy(stream));
  return 0;
}
