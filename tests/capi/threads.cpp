// What mla/c/base.h lets several threads do at once.
#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <thread>

#include "step.hpp"

namespace capi {
namespace {

constexpr int kThreads = 4;

void on_threads(const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) threads.emplace_back(work, t);
  for (std::thread& t : threads) t.join();
}

// A stream with what its calls write.
struct Lane {
  Stream stream;
  Cache cache;
  IndexCache index_cache;
  Profile profile;
  Bytes workspace, selection;
  Tensor<float> hidden{{40, 96}}, out{{40, 96}};
  mla_layer_args args;

  Lane(Step& s, mla_plan* plan)
      : workspace(describe(plan).workspace_bytes), selection(describe(plan).selection_bytes + 64) {
    EXPECT_OK(mla_cache_create(&s.spec, kPages, kCpu, &cache));
    EXPECT_OK(mla_index_cache_create(&s.index_spec, kPages, kCpu, &index_cache));
    EXPECT_OK(mla_profile_create(&profile));
    hidden.random(5);
    args = s.args(plan, workspace);
    args.cache = cache;
    args.index_cache = index_cache;
    args.selection = selection.data;
    args.selection_bytes = selection.size;
    args.profile = profile;
  }
  mla_status forward() { return mla_forward(stream, &args, hidden, out); }
};

std::string text_of(mla_plan* plan) {
  size_t length = 0;
  EXPECT_OK(mla_plan_describe(plan, nullptr, 0, &length));
  std::string text(length, ' ');
  EXPECT_OK(mla_plan_describe(plan, text.data(), length + 1, nullptr));
  return text;
}

TEST(CThreads, StreamsShareModelWeightsTablesAndPlan) {
  for (int32_t sparse : {MLA_SPARSE_DENSE, MLA_SPARSE_MIXED}) {
    Step s;
    s.options.sparse = sparse;
    Plan plan;
    ASSERT_OK(mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, &plan));
    Lane first(s, plan);
    ASSERT_OK(first.forward());
    const std::string text = text_of(plan);
    on_threads([&](int) {
      Lane lane(s, plan);
      for (int64_t i = 1; i <= 5; ++i) {
        std::fill(lane.out.data.begin(), lane.out.data.end(), -9.0f);
        EXPECT_OK(lane.forward());
        EXPECT_EQ(lane.out.data, first.out.data);
        mla_profile_row row = make<mla_profile_row>();
        EXPECT_OK(mla_profile_get(lane.profile, 0, &row));
        EXPECT_EQ(row.calls % i, 0);
        EXPECT_EQ(text_of(plan), text);
      }
    });
  }
}

TEST(CThreads, OneModelIsPlannedAndPreparedAtOnce) {
  Step s;
  Plan expected;
  ASSERT_OK(mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, &expected));
  const std::string text = text_of(expected);
  Lane first(s, expected);
  ASSERT_OK(first.forward());
  on_threads([&](int t) {
    // Two of the threads plan for one stream.
    StreamHandle own;
    EXPECT_OK(mla_stream_create_cpu(2, &own));
    mla_stream* stream = t < 2 ? s.stream.handle : own;
    Plan plan;
    EXPECT_OK(mla_plan_create(stream, s.model, &s.spec, kPages, &s.batch, &s.options, &plan));
    EXPECT_EQ(text_of(plan), text);
    Weights weights;
    Rotary rotary;
    const mla_prepare_options prepare = mla_prepare_options_default();
    EXPECT_OK(mla_weights_create_random(s.model, 0, 3, MLA_F32, &prepare, kCpu, &weights));
    EXPECT_OK(mla_rotary_create(s.model, 0, 256, kCpu, &rotary));
    double scale = 0;
    EXPECT_OK(mla_model_softmax_scale(s.model, &scale));
    EXPECT_GT(scale, 0);
    Lane lane(s, plan);
    lane.args.weights = weights;
    lane.args.rotary = rotary;
    EXPECT_OK(lane.forward());
    EXPECT_EQ(lane.out.data, first.out.data);
  });
}

TEST(CThreads, ACacheHasManyReaders) {
  Step s;
  Plan plan;
  ASSERT_OK(mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, &plan));
  Lane filled(s, plan);
  ASSERT_OK(filled.forward());
  const auto gather = [&](mla_stream* stream) {
    Tensor<float> kv({40, kLatent}), rope({40, kRope});
    const mla_gather_piece piece{0, 0, 40, 0};
    mla_gather_args g = make<mla_gather_args>();
    g.cache = filled.cache;
    g.block_table = {s.table.data(), 1, 7, 7};
    g.pieces = &piece;
    g.pieces_count = 1;
    g.kv_c = kv;
    g.k_pe = rope;
    EXPECT_OK(mla_gather(stream, &g));
    kv.data.insert(kv.data.end(), rope.data.begin(), rope.data.end());
    return kv.data;
  };
  const std::vector<float> rows = gather(s.stream);
  EXPECT_TRUE(std::any_of(rows.begin(), rows.end(), [](float x) { return x != 0; }));
  on_threads([&](int) {
    const Stream stream;
    for (int i = 0; i < 20; ++i) EXPECT_EQ(gather(stream), rows);
  });
}

TEST(CThreads, CallsOnOneStreamTakeTurns) {
  Step s;
  Plan plan;
  ASSERT_OK(mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, &plan));
  Lane first(s, plan);
  ASSERT_OK(first.forward());
  on_threads([&](int) {
    Lane lane(s, plan);
    for (int i = 0; i < 5; ++i) {
      EXPECT_OK(mla_forward(s.stream, &lane.args, lane.hidden, lane.out));
      EXPECT_EQ(lane.out.data, first.out.data);
      EXPECT_OK(mla_stream_synchronize(s.stream));
    }
  });
}

// A running call keeps its handles: each call gives the rows or says that the handle is gone.
TEST(CThreads, HandlesMayGoDuringACall) {
  Step s;
  Plan kept;
  ASSERT_OK(mla_plan_create(s.stream, s.model, &s.spec, kPages, &s.batch, &s.options, &kept));
  Lane first(s, kept);
  ASSERT_OK(first.forward());
  const std::array<std::string, 5> names{"stream", "plan", "weights", "rotary", "cache"};
  for (size_t kind = 0; kind < names.size(); ++kind) {
    mla_stream* stream = nullptr;
    mla_plan* plan = nullptr;
    mla_weights* weights = nullptr;
    mla_rotary* rotary = nullptr;
    mla_cache* cache = nullptr;
    const mla_prepare_options prepare = mla_prepare_options_default();
    ASSERT_OK(mla_stream_create_cpu(2, &stream));
    ASSERT_OK(mla_plan_create(stream, s.model, &s.spec, kPages, &s.batch, &s.options, &plan));
    ASSERT_OK(mla_weights_create_random(s.model, 0, 3, MLA_F32, &prepare, kCpu, &weights));
    ASSERT_OK(mla_rotary_create(s.model, 0, 256, kCpu, &rotary));
    ASSERT_OK(mla_cache_create(&s.spec, kPages, kCpu, &cache));
    Lane lane(s, plan);
    lane.args.weights = weights;
    lane.args.rotary = rotary;
    lane.args.cache = cache;
    std::atomic<bool> running{false};
    std::thread caller([&] {
      for (;;) {
        const mla_status status = mla_forward(stream, &lane.args, lane.hidden, lane.out);
        if (status != MLA_OK) {
          EXPECT_FAILS(MLA_ERROR_HANDLE, status, names[kind] + " is no handle, or a destroyed one");
          return;
        }
        EXPECT_EQ(lane.out.data, first.out.data);
        running = true;
      }
    });
    while (!running) std::this_thread::yield();
    const std::array<std::function<mla_status()>, 5> destroy{
        [&] { return mla_stream_destroy(stream); }, [&] { return mla_plan_destroy(plan); },
        [&] { return mla_weights_destroy(weights); }, [&] { return mla_rotary_destroy(rotary); },
        [&] { return mla_cache_destroy(cache); }};
    EXPECT_OK(destroy[kind]());
    caller.join();
    for (size_t k = 0; k < destroy.size(); ++k)
      EXPECT_EQ(destroy[k](), k == kind ? MLA_ERROR_HANDLE : MLA_OK) << mla_last_error();
  }
}

TEST(CThreads, NoHandleIsGivenTwice) {
  constexpr int kEach = 200;
  std::array<std::vector<mla_buffer*>, kThreads> given;
  on_threads([&](int t) {
    for (int i = 0; i < kEach; ++i) {
      mla_buffer* buffer = nullptr;
      EXPECT_OK(mla_buffer_create(kCpu, 64, &buffer));
      given[t].push_back(buffer);
      if (i % 2 == 1) continue;
      EXPECT_OK(mla_buffer_destroy(buffer));
    }
  });
  std::vector<mla_buffer*> all;
  for (const auto& part : given) all.insert(all.end(), part.begin(), part.end());
  std::sort(all.begin(), all.end());
  EXPECT_EQ(std::adjacent_find(all.begin(), all.end()), all.end());
  // Another thread may end what one made.
  on_threads([&](int t) {
    const auto& others = given[(t + 1) % kThreads];
    for (int i = 1; i < kEach; i += 2) EXPECT_OK(mla_buffer_destroy(others[i]));
  });
}

TEST(CThreads, EachThreadHasItsLastMessage) {
  on_threads([](int t) {
    for (int i = 0; i < 200; ++i) {
      mla_model* model = nullptr;
      const std::string name = "model " + std::to_string(t) + " " + std::to_string(i);
      EXPECT_FAILS(MLA_ERROR_INPUT, mla_model_create_preset(name.c_str(), &model), name);
    }
  });
}

}  // namespace
}  // namespace capi
