#include <cstdio>
#include <mla/mla.hpp>
#include <vector>

int main() {
  const mla::ModelConfig model = mla::preset("deepseek-v2-lite");
  const mla::CacheSpec cache = mla::cache_spec(model, mla::CacheFormat::bf16);
  mla::ThreadPool pool(1);
  const mla::Stream stream(pool);
  const std::vector<int32_t> starts{0, 3}, lengths{3}, table{0}, slots{0, 1, 2};
  const mla::Batch batch{starts, lengths, {table.data(), {1, 1}}, slots};
  const mla::Plan plan = mla::plan(model, cache, 1, batch, mla::device_info(stream, model));
  std::printf("%s", plan.describe().c_str());
  return plan.tokens == 3 ? 0 : 1;
}
