#include <mla/c/mla.h>
#include <stdio.h>

int main(void) {
  mla_stream* stream = NULL;
  mla_model* model = NULL;
  mla_plan* plan = NULL;
  mla_cache_spec cache = mla_cache_spec_default();
  const int32_t starts[] = {0, 3}, lengths[] = {3}, table[] = {0}, slots[] = {0, 1, 2};
  const mla_batch batch = {sizeof batch, 1, 3, starts, lengths, table, 1, 0, slots};
  mla_plan_info info = {0};
  char text[4096];
  info.struct_size = sizeof info;
  if (mla_stream_create_cpu(1, &stream) || mla_model_create_preset("deepseek-v2-lite", &model) ||
      mla_plan_create(stream, model, &cache, 1, &batch, NULL, &plan) || mla_plan_get(plan, &info) ||
      mla_plan_describe(plan, text, sizeof text, NULL)) {
    fprintf(stderr, "%s\n", mla_last_error());
    return 1;
  }
  printf("libmla %s\n%s", mla_version(), text);
  mla_plan_destroy(plan);
  mla_model_destroy(model);
  mla_stream_destroy(stream);
  return info.tokens == 3 ? 0 : 1;
}
