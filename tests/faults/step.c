/* step CHECKPOINT [cuda]: one step of a small checkpoint's layer, three times over. The first may fail, when the
 * injector is preloaded: with a status, which this prints. The other two must not, with the same numbers, and nothing
 * may be held that was not held before. On a GPU the step is staged and captured, too, and one without faults comes
 * before all: a CUDA runtime that could not begin stays so. */
#include <dirent.h>
#include <mla/c/mla.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern void fault_window(int on) __attribute__((weak));
extern long fault_live(void) __attribute__((weak));

enum { kTokens = 5, kHidden = 64, kPages = 2, kPageSize = 16 };

typedef struct {
  mla_stream* stream;
  const mla_layer_args* layer;
  const DLTensor *x, *y;
} forward_call;
static mla_status forward(void* context) {
  const forward_call* f = context;
  return mla_forward(f->stream, f->layer, f->x, f->y);
}

static mla_status step(const char* folder, int gpu, float* out) {
  const DLDevice device = {gpu ? kDLCUDA : kDLCPU, 0};
  mla_stream* stream = NULL;
  mla_checkpoint* checkpoint = NULL;
  mla_model *model = NULL, *drawn = NULL;
  mla_weights *weights = NULL, *random = NULL;
  mla_rotary* rotary = NULL;
  mla_cache* cache = NULL;
  mla_plan* plan = NULL;
  mla_buffer *workspace = NULL, *rows = NULL;
  mla_staged_step* staged = NULL;
  mla_graph* graph = NULL;
  static const char config[] =
      "{\"model_type\":\"deepseek_v3\",\"hidden_size\":64,\"num_hidden_layers\":1,\"num_attention_heads\":2,\"kv_lora_"
      "rank\":"
      "32,"
      "\"qk_nope_head_dim\":16,\"qk_rope_head_dim\":16,\"v_head_dim\":16,\"rope_scaling\":{\"type\":\"yarn\","
      "\"factor\":4,"
      "\"original_max_position_embeddings\":64}}";
  mla_status status = MLA_OK;
#define TRY(call)                   \
  do {                              \
    status = (call);                \
    if (status != MLA_OK) goto end; \
  } while (0)
  TRY(gpu ? mla_stream_create_cuda(0, NULL, &stream) : mla_stream_create_cpu(3, &stream));
  TRY(mla_checkpoint_open(folder, &checkpoint));
  TRY(mla_checkpoint_model(checkpoint, &model));
  mla_prepare_options prepare = mla_prepare_options_default();
  if (gpu) prepare.dtype = MLA_BF16;
  TRY(mla_weights_create_checkpoint(checkpoint, 0, &prepare, device, &weights));
  TRY(mla_model_create_config(config, sizeof config - 1, &drawn));
  prepare.dtype = MLA_BF16;
  TRY(mla_weights_create_random(drawn, 0, 1, MLA_BF16, &prepare, device, &random));
  TRY(mla_rotary_create(model, 0, 64, device, &rotary));
  mla_cache_spec spec = mla_cache_spec_default();
  TRY(mla_cache_spec_of(model, MLA_CACHE_BF16, kPageSize, &spec));
  TRY(mla_cache_create(&spec, kPages, device, &cache));

  const int32_t starts[] = {0, 4, kTokens}, lengths[] = {4, 1}, table[] = {0, 1}, slots[] = {0, 1, 2, 3, kPageSize};
  mla_batch batch = {0};
  batch.struct_size = sizeof batch;
  batch.requests = 2;
  batch.tokens = kTokens;
  batch.query_start_loc = starts;
  batch.seq_lens = lengths;
  batch.block_table = table;
  batch.block_table_pages = 1;
  batch.slot_mapping = slots;
  mla_plan_options options = mla_plan_options_default();
  if (gpu) options.compute = MLA_BF16;
  TRY(mla_plan_create(stream, model, &spec, kPages, &batch, &options, &plan));
  mla_plan_info info = {0};
  info.struct_size = sizeof info;
  TRY(mla_plan_get(plan, &info));
  TRY(mla_buffer_create(device, info.workspace_bytes, &workspace));
  mla_layer_args layer = {0};
  layer.struct_size = sizeof layer;
  layer.plan = plan;
  layer.weights = weights;
  layer.rotary = rotary;
  layer.cache = cache;
  TRY(mla_buffer_data(workspace, &layer.workspace, &layer.workspace_bytes));
  float hidden[kTokens * kHidden];
  for (int i = 0; i < kTokens * kHidden; ++i) hidden[i] = (float)(i % 13) * 0.125f - 0.5f;
  int64_t shape[] = {kTokens, kHidden};
  DLTensor x = {hidden, device, 2, {kDLFloat, 32, 1}, shape, NULL, 0}, y = x;
  y.data = out;
  if (!gpu) {
    TRY(mla_forward(stream, &layer, &x, &y));
  } else {
    void* memory = NULL;
    TRY(mla_buffer_create(device, 2 * sizeof hidden, &rows));
    TRY(mla_buffer_data(rows, &memory, NULL));
    x.data = memory;
    y.data = (char*)memory + sizeof hidden;
    TRY(mla_copy(stream, x.data, hidden, sizeof hidden));
    TRY(mla_staged_step_create(stream, &staged));
    TRY(mla_staged_step_stage(staged, plan));
    layer.staged = staged;
    forward_call call = {stream, &layer, &x, &y};
    TRY(forward(&call));
    TRY(mla_graph_create(stream, forward, &call, &graph));
    TRY(mla_graph_launch(graph));
    TRY(mla_copy(stream, out, y.data, sizeof hidden));
    TRY(mla_stream_synchronize(stream));
  }

end:;
  char message[1100];
  snprintf(message, sizeof message, "%s", mla_last_error());
  mla_status destroyed = MLA_OK;
#define DESTROY(kind, handle) \
  if (handle && mla_##kind##_destroy(handle) != MLA_OK) destroyed = MLA_ERROR_INTERNAL
  /* Its kernels may still read what goes now. The one call that fails may be this one: then the next does not. */
  if (gpu && stream && mla_stream_synchronize(stream) != MLA_OK) mla_stream_synchronize(stream);
  DESTROY(graph, graph);
  DESTROY(staged_step, staged);
  DESTROY(buffer, rows);
  DESTROY(buffer, workspace);
  DESTROY(plan, plan);
  DESTROY(cache, cache);
  DESTROY(rotary, rotary);
  DESTROY(weights, weights);
  DESTROY(weights, random);
  DESTROY(model, model);
  DESTROY(model, drawn);
  DESTROY(checkpoint, checkpoint);
  DESTROY(stream, stream);
  if (status == MLA_OK) return destroyed;
  fprintf(stderr, "step: %s (%s)\n", message, mla_status_name(status));
  return destroyed == MLA_OK ? status : destroyed;
}

static int open_files(void) {
  DIR* folder = opendir("/proc/self/fd");
  int n = 0;
  while (folder && readdir(folder)) ++n;
  if (folder) closedir(folder);
  return n;
}

static int broken(const char* what) {
  fprintf(stderr, "step: %s\n", what);
  return 3;
}

int main(int argc, char** argv) {
  static float outs[3][kTokens * kHidden];
  const int gpu = argc == 3 && strcmp(argv[2], "cuda") == 0;
  if (argc != 2 + gpu) return broken("usage: step CHECKPOINT [cuda]");
  if (gpu && step(argv[1], gpu, outs[0]) != MLA_OK) return broken("a step without a fault fails");
  if (fault_window) fault_window(1);
  const mla_status first = step(argv[1], gpu, outs[0]);
  if (fault_window) fault_window(0);
  if (first == MLA_ERROR_INTERNAL || first == MLA_ERROR_HANDLE) return broken("no error of a failing system");
  if (step(argv[1], gpu, outs[1]) != MLA_OK) return broken("the next calls fail");
  const long live = fault_live ? fault_live() : 0;
  const int files = open_files();
  if (step(argv[1], gpu, outs[2]) != MLA_OK) return broken("later calls fail");
  if (memcmp(outs[1], outs[2], sizeof outs[1]) != 0) return broken("numbers differ after a failure");
  if (first == MLA_OK && memcmp(outs[0], outs[1], sizeof outs[1]) != 0) return broken("numbers differ under a failure");
  if (open_files() != files) return broken("files stay open");
  if (gpu) return first == MLA_OK ? 0 : 2; /* what the driver holds is its own */
  if (fault_live && fault_live() != live) return broken("memory stays held");
  if (fault_live) printf("%ld %d\n", live, files);
  return first == MLA_OK ? 0 : 2;
}
