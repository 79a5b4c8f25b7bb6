// Handles that are none, messages by thread, destruction in any order.
#include <sched.h>

#include <atomic>
#include <thread>

#include "call.hpp"

namespace capi {
namespace {

TEST(CHandles, NullStaleAndForeignOnesAreErrors) {
  mla_plan_info info = make<mla_plan_info>();
  EXPECT_FAILS(MLA_ERROR_HANDLE, mla_plan_get(nullptr, &info), "mla_plan_get: plan is NULL");
  int on_the_stack[64] = {};
  EXPECT_FAILS(MLA_ERROR_HANDLE, mla_plan_get(reinterpret_cast<mla_plan*>(on_the_stack), &info), "no handle");
  EXPECT_FAILS(MLA_ERROR_HANDLE, mla_plan_get(reinterpret_cast<mla_plan*>(uintptr_t{8}), &info), "no handle");

  mla_model* model = nullptr;
  ASSERT_OK(mla_model_create_preset("deepseek-v3", &model));
  EXPECT_FAILS(MLA_ERROR_HANDLE, mla_plan_get(reinterpret_cast<mla_plan*>(model), &info),
               "plan is a model, needed: plan");
  EXPECT_FAILS(MLA_ERROR_HANDLE, mla_plan_destroy(reinterpret_cast<mla_plan*>(model)), "needed: plan");
  double scale = 0;
  EXPECT_OK(mla_model_softmax_scale(model, &scale));
  EXPECT_OK(mla_model_destroy(model));
  EXPECT_FAILS(MLA_ERROR_HANDLE, mla_model_destroy(model), "mla_model_destroy: model is no handle, or a destroyed one");
  EXPECT_FAILS(MLA_ERROR_HANDLE, mla_model_softmax_scale(model, &scale), "destroyed");
}

// What is created next often lies where the destroyed object lay: it must not answer for it, nor end with it.
template <class T, class Create, class Destroy, class Use>
void expect_never_again(Create create, Destroy destroy, Use use) {
  for (int i = 0; i < 20; ++i) {
    T *first = nullptr, *second = nullptr;
    ASSERT_OK(create(&first));
    ASSERT_OK(destroy(first));
    ASSERT_OK(create(&second));
    EXPECT_NE(first, second);
    EXPECT_FAILS(MLA_ERROR_HANDLE, use(first), "destroyed");
    EXPECT_FAILS(MLA_ERROR_HANDLE, destroy(first), "destroyed");
    EXPECT_OK(use(second));
    EXPECT_OK(destroy(second));
  }
}

TEST(CHandles, ADestroyedOneIsNeverTheNextObjects) {
  expect_never_again<mla_model>([](mla_model** m) { return mla_model_create_preset("deepseek-v3", m); },
                                mla_model_destroy,
                                [](mla_model* m) {
                                  double scale = 0;
                                  return mla_model_softmax_scale(m, &scale);
                                });
  expect_never_again<mla_stream>([](mla_stream** s) { return mla_stream_create_cpu(1, s); }, mla_stream_destroy,
                                 mla_stream_synchronize);
  const mla_cache_spec spec = mla_cache_spec_default();
  expect_never_again<mla_cache>([&](mla_cache** c) { return mla_cache_create(&spec, 1, kCpu, c); }, mla_cache_destroy,
                                [](mla_cache* c) {
                                  int64_t pages = 0;
                                  return mla_cache_get(c, nullptr, &pages, nullptr, nullptr);
                                });
  expect_never_again<mla_buffer>([](mla_buffer** b) { return mla_buffer_create(kCpu, 64, b); }, mla_buffer_destroy,
                                 [](mla_buffer* b) {
                                   void* data = nullptr;
                                   size_t bytes = 0;
                                   return mla_buffer_data(b, &data, &bytes);
                                 });
}

TEST(CHandles, OfManyThreadsThatDestroyOneHandleOneSucceeds) {
  for (int round = 0; round < 50; ++round) {
    mla_buffer* buffer = nullptr;
    ASSERT_OK(mla_buffer_create(kCpu, 64, &buffer));
    std::atomic<int> ended = 0;
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t)
      threads.emplace_back([&] {
        const mla_status status = mla_buffer_destroy(buffer);
        EXPECT_TRUE(status == MLA_OK || status == MLA_ERROR_HANDLE) << mla_last_error();
        ended += status == MLA_OK;
      });
    for (std::thread& t : threads) t.join();
    EXPECT_EQ(ended, 1);
  }
}

TEST(CHandles, DestroyTakesNull) {
  EXPECT_OK(mla_stream_destroy(nullptr));
  EXPECT_OK(mla_buffer_destroy(nullptr));
  EXPECT_OK(mla_model_destroy(nullptr));
  EXPECT_OK(mla_rotary_destroy(nullptr));
  EXPECT_OK(mla_checkpoint_destroy(nullptr));
  EXPECT_OK(mla_weights_destroy(nullptr));
  EXPECT_OK(mla_linear_destroy(nullptr));
  EXPECT_OK(mla_cache_destroy(nullptr));
  EXPECT_OK(mla_index_cache_destroy(nullptr));
  EXPECT_OK(mla_pages_destroy(nullptr));
  EXPECT_OK(mla_plan_destroy(nullptr));
  EXPECT_OK(mla_staged_step_destroy(nullptr));
  EXPECT_OK(mla_profile_destroy(nullptr));
  EXPECT_OK(mla_graph_destroy(nullptr));
}

TEST(CHandles, MissingResultPlacesAreErrors) {
  Stream stream;
  Model model;
  make_model(&model);
  EXPECT_EQ(MLA_ERROR_HANDLE, mla_stream_create_cpu(1, nullptr));
  EXPECT_EQ(MLA_ERROR_HANDLE, mla_model_create_preset("deepseek-v3", nullptr));
  EXPECT_EQ(MLA_ERROR_HANDLE, mla_model_create_preset(nullptr, &model + 0));
  EXPECT_EQ(MLA_ERROR_HANDLE, mla_device_count(kDLCPU, nullptr));
  EXPECT_EQ(MLA_ERROR_HANDLE, mla_stream_device(stream, nullptr));
  const mla_cache_spec spec = mla_cache_spec_default();
  EXPECT_EQ(MLA_ERROR_HANDLE, mla_cache_page_bytes(&spec, nullptr));
  EXPECT_EQ(MLA_ERROR_HANDLE, mla_cache_page_bytes(nullptr, nullptr));
  EXPECT_EQ(MLA_ERROR_HANDLE, mla_plan_create(nullptr, nullptr, nullptr, 0, nullptr, nullptr, nullptr));
}

// The one limit of the C++ pool, the command and Python.
const std::string kThreads = "allowed 1 to " + std::to_string(std::max(64u, 4 * std::thread::hardware_concurrency())) +
                             ": four for each processor, or 64";

TEST(CHandles, AFailedCreateLeavesNull) {
  int some = 0;
  mla_stream* stream = reinterpret_cast<mla_stream*>(&some);
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_stream_create_cpu(0, &stream), "threads is 0, " + kThreads);
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_stream_create_cpu(1000000000, &stream), "threads is 1000000000, " + kThreads);
  EXPECT_EQ(stream, nullptr);
}

TEST(CHandles, StreamsMayBePinned) {
  cpu_set_t mask;
  ASSERT_EQ(sched_getaffinity(0, sizeof mask, &mask), 0);
  mla_stream* stream = nullptr;
  ASSERT_OK(mla_stream_create_cpu_with(1, MLA_PINNING_CORES, &stream));
  EXPECT_OK(mla_stream_destroy(stream));
  ASSERT_OK(mla_stream_create_cpu_with(3, MLA_PINNING_NONE, &stream));
  EXPECT_OK(mla_stream_destroy(stream));
  const int32_t many = CPU_COUNT(&mask) + 1;
  EXPECT_FAILS(
      MLA_ERROR_INPUT, mla_stream_create_cpu_with(many, MLA_PINNING_CORES, &stream),
      "mla_stream_create_cpu_with: threads is " + std::to_string(many) + ", each pinned to a processor of its own");
  EXPECT_EQ(stream, nullptr);
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_stream_create_cpu_with(1, 2, &stream), "pinning is 2, allowed 0 to 1");
}

TEST(CHandles, WeightsAndCachesArePlacedForAStream) {
  Stream stream;
  Model model;
  make_model(&model);
  Weights weights;
  ASSERT_OK(mla_weights_create_random(model, 0, 1, MLA_BF16, nullptr, kCpu, &weights));
  EXPECT_OK(mla_weights_place(weights, stream));
  EXPECT_EQ(MLA_ERROR_HANDLE, mla_weights_place(nullptr, stream));
  EXPECT_EQ(MLA_ERROR_HANDLE, mla_weights_place(weights, nullptr));
  const mla_cache_spec spec = mla_cache_spec_default();
  Cache own, borrowed;
  ASSERT_OK(mla_cache_create(&spec, 3, kCpu, &own));
  EXPECT_OK(mla_cache_place(own, stream));
  size_t bytes = 0;
  ASSERT_OK(mla_cache_page_bytes(&spec, &bytes));
  const Bytes memory(bytes);
  ASSERT_OK(mla_cache_create_in(&spec, 1, memory.data, 0, kCpu, &borrowed));
  EXPECT_FAILS(MLA_ERROR_UNSUPPORTED, mla_cache_place(borrowed, stream), "cache lies in the caller's memory");
  const mla_index_cache_spec index_spec = mla_index_cache_spec_default();
  IndexCache index;
  ASSERT_OK(mla_index_cache_create(&index_spec, 3, kCpu, &index));
  EXPECT_OK(mla_index_cache_place(index, stream));
}

TEST(CHandles, MessagesBelongToTheirThread) {
  EXPECT_EQ(MLA_ERROR_HANDLE, mla_stream_synchronize(nullptr));
  const std::string here = mla_last_error();
  std::string before, after;
  std::thread([&] {
    before = mla_last_error();
    EXPECT_EQ(MLA_ERROR_INPUT, mla_stream_create_cpu(-3, std::make_unique<mla_stream*>().get()));
    after = mla_last_error();
  }).join();
  EXPECT_EQ(before, "");
  EXPECT_EQ(after, "mla_stream_create_cpu: threads is -3, " + kThreads);
  EXPECT_EQ(here, "mla_stream_synchronize: stream is NULL");
  EXPECT_EQ(here, mla_last_error());
}

TEST(CHandles, MessagesAreOneBoundedLineWhateverTheyQuote) {
  mla_model* model = nullptr;
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_model_create_preset("a\nb\x1b[31m", &model), "a\\x0ab\\x1b[31m");
  EXPECT_EQ(std::string(mla_last_error()).find('\n'), std::string::npos);
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_model_create_preset(std::string(5'000'000, 'x').c_str(), &model), "bytes left out");
  EXPECT_LT(std::strlen(mla_last_error()), 1100u);
}

TEST(CHandles, StatusesHaveNames) {
  EXPECT_STREQ(mla_status_name(MLA_OK), "MLA_OK");
  EXPECT_STREQ(mla_status_name(MLA_ERROR_INTERNAL), "MLA_ERROR_INTERNAL");
  for (int s = MLA_OK; s <= MLA_ERROR_INTERNAL; ++s)
    EXPECT_EQ(std::string(mla_status_name(static_cast<mla_status>(s))).substr(0, 4), "MLA_") << s;
  EXPECT_STREQ(mla_status_name(static_cast<mla_status>(11)), "unknown status");
}

TEST(CHandles, OneStreamServesManyThreadsInTurn) {
  Stream stream;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      Tensor<float> x({64, 256}), weight({256}, 1.0f), y({64, 256});
      x.random(7);
      mla_norm_args a = make<mla_norm_args>();
      a.x = x;
      a.weight = weight;
      a.eps = 1e-6;
      a.y = y;
      for (int i = 0; i < 50; ++i) EXPECT_OK(mla_norm(stream, &a));
    });
  for (std::thread& t : threads) t.join();
}

TEST(CHandles, DevicesAreCountedAndStreamsKnowTheirs) {
  int32_t count = -1;
  EXPECT_OK(mla_device_count(kDLCPU, &count));
  EXPECT_EQ(count, 1);
  EXPECT_OK(mla_device_count(kDLCUDA, &count));
  EXPECT_GE(count, 0);
  mla_stream* none = nullptr;
  EXPECT_EQ(MLA_ERROR_DEVICE, mla_stream_create_cuda(count, nullptr, &none)) << mla_last_error();
  EXPECT_EQ(MLA_ERROR_INPUT, mla_stream_create_cuda(-1, nullptr, &none)) << mla_last_error();
  EXPECT_FAILS(MLA_ERROR_UNSUPPORTED, mla_device_count(8, &count), "device type is 8");
  Stream stream;
  DLDevice device{kDLCUDA, 9};
  EXPECT_OK(mla_stream_device(stream, &device));
  EXPECT_EQ(device.device_type, kDLCPU);
  EXPECT_EQ(device.device_id, 0);
  EXPECT_OK(mla_stream_synchronize(stream));
  void* native = &stream;
  EXPECT_OK(mla_stream_native(stream, &native));
  EXPECT_EQ(native, nullptr);
  int from = 5, to = 0;
  EXPECT_OK(mla_copy(stream, &to, &from, sizeof to));
  EXPECT_EQ(to, 5);
  EXPECT_EQ(MLA_ERROR_HANDLE, mla_copy(stream, nullptr, &from, 4));
}

TEST(CHandles, TheCpusCallsAreNotCaptured) {
  Stream stream;
  bool recorded = false;
  const auto record = [](void* context) {
    *static_cast<bool*>(context) = true;
    return MLA_OK;
  };
  mla_graph* graph = nullptr;
  EXPECT_FAILS(MLA_ERROR_UNSUPPORTED, mla_graph_create(stream, record, &recorded, &graph), "cpu");
  EXPECT_EQ(graph, nullptr);
  EXPECT_FALSE(recorded);
  EXPECT_FAILS(MLA_ERROR_HANDLE, mla_graph_create(stream, nullptr, nullptr, &graph), "record is NULL");
  EXPECT_FAILS(MLA_ERROR_HANDLE, mla_graph_launch(nullptr), "graph is NULL");
}

TEST(CHandles, BuffersAreAlignedAndRefuseWhatIsTooLarge) {
  Bytes b(100);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(b.data) % 64, 0u);
  EXPECT_EQ(b.size, 100u);
  mla_buffer* none = nullptr;
  EXPECT_EQ(MLA_ERROR_DEVICE, mla_buffer_create(kCpu, size_t{1} << 62, &none)) << mla_last_error();
  EXPECT_EQ(none, nullptr);
}

}  // namespace
}  // namespace capi
