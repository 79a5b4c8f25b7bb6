// The C interface on a GPU: the layer on staged steps agrees with the CPU, captured steps serve smaller ones. Without a
// GPU these skip.
#include <algorithm>

#include "call.hpp"

namespace capi {
namespace {

constexpr DLDevice kGpu{kDLCUDA, 0};
constexpr int64_t kPageSize = 16, kPagesEach = 4, kMost = 4, kHidden = 512;

class OnGpu : public testing::Test {
 protected:
  void SetUp() override {
    int32_t count = 0;
    ASSERT_OK(mla_device_count(kDLCUDA, &count));
    if (count == 0) GTEST_SKIP() << "no GPU";
  }
};

// A small layer on a device with the pages of kMost requests; request r has pages [r, r + 1) * kPagesEach.
struct Engine {
  DLDevice device;
  StreamHandle stream;
  Model model;
  Weights weights;
  Rotary rotary;
  mla_cache_spec spec = mla_cache_spec_default();
  Cache cache;
  StagedStep staged;

  explicit Engine(DLDevice on) : device(on) {
    if (on.device_type == kDLCPU) EXPECT_OK(mla_stream_create_cpu(2, &stream));
    else EXPECT_OK(mla_stream_create_cuda(on.device_id, nullptr, &stream));
    Model lite;
    EXPECT_OK(mla_model_create_preset("deepseek-v2-lite", &lite));
    mla_model_fields f = mla_model_fields_default();
    EXPECT_OK(mla_model_get(lite, &f));
    f.hidden = kHidden;
    EXPECT_OK(mla_model_create(&f, &model));
    mla_prepare_options prepare = mla_prepare_options_default();
    prepare.dtype = MLA_BF16;
    EXPECT_OK(mla_weights_create_random(model, 0, 3, MLA_BF16, &prepare, device, &weights));
    EXPECT_OK(mla_rotary_create(model, 0, kPagesEach * kPageSize, device, &rotary));
    EXPECT_OK(mla_cache_spec_of(model, MLA_CACHE_BF16, kPageSize, &spec));
    EXPECT_OK(mla_cache_create(&spec, kMost * kPagesEach, device, &cache));
    EXPECT_OK(mla_staged_step_create(stream, &staged));
  }

  // queries[r] new tokens of request r after contexts[r]. writes: 0 for a step whose rows go nowhere.
  void plan(const std::vector<int32_t>& queries, const std::vector<int32_t>& contexts, int32_t path, bool writes,
            mla_plan** out) const {
    std::vector<int32_t> starts{0}, lengths, table, slots;
    for (size_t r = 0; r < queries.size(); ++r) {
      starts.push_back(starts.back() + queries[r]);
      lengths.push_back(contexts[r] + queries[r]);
      const int32_t first = static_cast<int32_t>(static_cast<int64_t>(r) * kPagesEach);
      for (int32_t p = 0; p < kPagesEach; ++p) table.push_back(first + p);
      for (int32_t t = contexts[r]; t < lengths.back(); ++t)
        slots.push_back(writes ? first * static_cast<int32_t>(kPageSize) + t : -1);
    }
    mla_batch batch = make<mla_batch>();
    batch.requests = static_cast<int64_t>(queries.size());
    batch.tokens = starts.back();
    batch.query_start_loc = starts.data();
    batch.seq_lens = lengths.data();
    batch.block_table = table.data();
    batch.block_table_pages = kPagesEach;
    batch.slot_mapping = slots.data();
    mla_plan_options options = mla_plan_options_default();
    options.path = path;
    options.compute = MLA_BF16;
    EXPECT_OK(mla_plan_create(stream, model, &spec, kMost * kPagesEach, &batch, &options, out));
  }
};

// A device's memory for a step of `tokens`.
struct Rows {
  const Engine& engine;
  Memory hidden, out, workspace;
  int64_t shape[2];
  DLTensor x, y;
  mla_layer_args args = make<mla_layer_args>();

  Rows(const Engine& e, mla_plan* plan, int64_t tokens) : engine(e), shape{tokens, kHidden} {
    mla_plan_info info = make<mla_plan_info>();
    EXPECT_OK(mla_plan_get(plan, &info));
    const size_t bytes = static_cast<size_t>(tokens * kHidden) * sizeof(float);
    EXPECT_OK(mla_buffer_create(e.device, bytes, &hidden));
    EXPECT_OK(mla_buffer_create(e.device, bytes, &out));
    EXPECT_OK(mla_buffer_create(e.device, info.workspace_bytes, &workspace));
    x = y = {nullptr, e.device, 2, Type<float>::value, shape, nullptr, 0};
    EXPECT_OK(mla_buffer_data(hidden, &x.data, nullptr));
    EXPECT_OK(mla_buffer_data(out, &y.data, nullptr));
    args.plan = plan;
    args.weights = e.weights;
    args.rotary = e.rotary;
    args.cache = e.cache;
    args.staged = e.staged;
    EXPECT_OK(mla_buffer_data(workspace, &args.workspace, &args.workspace_bytes));
  }
  void fill(const std::vector<float>& from) {
    EXPECT_OK(mla_copy(engine.stream, x.data, from.data(), from.size() * sizeof(float)));
    EXPECT_OK(mla_stream_synchronize(engine.stream));
  }
  std::vector<float> read(int64_t tokens) {
    std::vector<float> rows(static_cast<size_t>(tokens * kHidden));
    EXPECT_OK(mla_copy(engine.stream, rows.data(), y.data, rows.size() * sizeof(float)));
    EXPECT_OK(mla_stream_synchronize(engine.stream));
    return rows;
  }
  mla_status forward() { return mla_forward(engine.stream, &args, &x, &y); }
};

std::vector<float> hidden(int64_t tokens, uint32_t seed) { return Tensor<float>({tokens, kHidden}).random(seed).data; }

std::vector<float> step(Engine& e, const std::vector<int32_t>& queries, const std::vector<int32_t>& contexts,
                        int32_t path, uint32_t seed) {
  int64_t tokens = 0;
  for (int32_t q : queries) tokens += q;
  Plan plan;
  e.plan(queries, contexts, path, true, &plan);
  Rows rows(e, plan, tokens);
  rows.fill(hidden(tokens, seed));
  EXPECT_OK(mla_staged_step_stage(e.staged, plan));
  EXPECT_OK(rows.forward());
  return rows.read(tokens);
}

// Rows between ops are bf16 on a GPU and f32 on the CPU: 2^-8 a rounding, a few of them one after another.
void expect_close(const std::vector<float>& gpu, const std::vector<float>& cpu) {
  ASSERT_EQ(gpu.size(), cpu.size());
  float most = 0, error = 0;
  for (size_t i = 0; i < cpu.size(); ++i) {
    ASSERT_TRUE(std::isfinite(gpu[i])) << i;
    most = std::max(most, std::abs(cpu[i]));
    error = std::max(error, std::abs(gpu[i] - cpu[i]));
  }
  EXPECT_GT(most, 0.01f);
  EXPECT_LT(error, 0.02f * most);
}

TEST_F(OnGpu, StepsAgreeWithTheCpus) {
  Engine gpu(kGpu), cpu(kCpu);
  for (int32_t path : {MLA_PATHS_LATENT, MLA_PATHS_EXPANDED}) {
    SCOPED_TRACE(path);
    expect_close(step(gpu, {40, 1, 17}, {0, 0, 0}, path, 5), step(cpu, {40, 1, 17}, {0, 0, 0}, path, 5));
    expect_close(step(gpu, {3, 30, 1}, {40, 1, 17}, path, 6), step(cpu, {3, 30, 1}, {40, 1, 17}, path, 6));
  }
}

TEST_F(OnGpu, ACapturedStepServesSmallerOnes) {
  Engine gpu(kGpu), cpu(kCpu);
  for (Engine* e : {&gpu, &cpu}) step(*e, {40, 7, 17, 20}, {0, 0, 0, 0}, MLA_PATHS_EXPANDED, 5);

  StagedStep staged;
  ASSERT_OK(mla_staged_step_create(gpu.stream, &staged));
  Plan maxima;
  const int32_t longest = static_cast<int32_t>(kPagesEach * kPageSize) - 1;
  gpu.plan(std::vector<int32_t>(kMost, 1), std::vector<int32_t>(kMost, longest), MLA_PATHS_LATENT, false, &maxima);
  Rows rows(gpu, maxima, kMost);
  rows.args.staged = staged;
  rows.fill(hidden(kMost, 1));
  ASSERT_OK(mla_staged_step_stage(staged, maxima));
  ASSERT_OK(rows.forward());
  ASSERT_OK(mla_stream_synchronize(gpu.stream));
  Graph graph;
  ASSERT_OK(mla_graph_create(
      gpu.stream, [](void* r) { return static_cast<Rows*>(r)->forward(); }, &rows, &graph));

  const std::vector<std::vector<int32_t>> contexts{{40, 7, 17, 20}, {41, 8}, {42}};
  for (const std::vector<int32_t>& context : contexts) {
    SCOPED_TRACE(context.size());
    const std::vector<int32_t> ones(context.size(), 1);
    const auto tokens = static_cast<int64_t>(context.size());
    Plan plan;
    gpu.plan(ones, context, MLA_PATHS_LATENT, true, &plan);
    rows.fill(hidden(tokens, 9));
    ASSERT_OK(mla_staged_step_restage(staged, plan));
    ASSERT_OK(mla_graph_launch(graph));
    expect_close(rows.read(tokens), step(cpu, ones, context, MLA_PATHS_LATENT, 9));
  }
}

TEST_F(OnGpu, ACaptureThatFailsLeavesTheStreamAsItWas) {
  Engine gpu(kGpu);
  Plan plan;
  gpu.plan({2}, {0}, MLA_PATHS_LATENT, true, &plan);
  Rows rows(gpu, plan, 2);
  rows.fill(hidden(2, 1));
  ASSERT_OK(mla_staged_step_stage(gpu.staged, plan));
  rows.args.workspace_bytes = 0;
  rows.args.workspace = nullptr;
  mla_graph* graph = nullptr;
  EXPECT_FAILS(MLA_ERROR_SHAPE,
               mla_graph_create(
                   gpu.stream, [](void* r) { return static_cast<Rows*>(r)->forward(); }, &rows, &graph),
               "record returned 2 (MLA_ERROR_SHAPE)");
  EXPECT_EQ(graph, nullptr);
  EXPECT_OK(mla_buffer_data(rows.workspace, &rows.args.workspace, &rows.args.workspace_bytes));
  EXPECT_OK(rows.forward());
  EXPECT_OK(mla_stream_synchronize(gpu.stream));
}

TEST_F(OnGpu, AStepThatIsNotTheStagedOneIsRefused) {
  Engine gpu(kGpu);
  Plan plan, other;
  gpu.plan({2}, {0}, MLA_PATHS_LATENT, true, &plan);
  gpu.plan({2}, {0}, MLA_PATHS_LATENT, true, &other);
  Rows rows(gpu, plan, 2);
  rows.fill(hidden(2, 1));
  EXPECT_FAILS(MLA_ERROR_SHAPE, rows.forward(), "staged is of another plan, batch or stream");
  ASSERT_OK(mla_staged_step_stage(gpu.staged, other));
  EXPECT_FAILS(MLA_ERROR_SHAPE, rows.forward(), "staged is of another plan, batch or stream");
  rows.args.staged = nullptr;
  EXPECT_FAILS(MLA_ERROR_SHAPE, rows.forward(), "lies in host memory that cuda:0 does not read; stage the step first");
  rows.args.staged = gpu.staged;
  ASSERT_OK(mla_staged_step_stage(gpu.staged, plan));
  EXPECT_OK(rows.forward());
  EXPECT_OK(mla_stream_synchronize(gpu.stream));
}

TEST_F(OnGpu, HostMemoryIsRefused) {
  Engine gpu(kGpu);
  Plan plan;
  gpu.plan({2}, {0}, MLA_PATHS_LATENT, true, &plan);
  Rows rows(gpu, plan, 2);
  Tensor<float> host({2, kHidden});
  EXPECT_FAILS(MLA_ERROR_SHAPE, mla_forward(gpu.stream, &rows.args, host, &rows.y),
               "hidden is on cpu, the call is on cuda:0");
  void* native = nullptr;
  EXPECT_OK(mla_stream_native(gpu.stream, &native));
  EXPECT_NE(native, nullptr);
}

}  // namespace
}  // namespace capi
