// The layer on a GPU beyond what the CPU's own tests, built for the GPU, cover: captured steps that serve smaller ones,
// agreement with the CPU, repeated bits, errors.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstring>
#include <utility>
#include <variant>

#include "layer/reference.hpp"
#include "support/engine.hpp"
#include "support/message.hpp"
#include "support/models.hpp"

namespace mla::test {

namespace {

// A model of the sizes that Hopper's kernels serve.
ModelConfig full_dims(int64_t heads) {
  ModelConfig m = preset("deepseek-v2-lite");
  m.heads = heads;
  m.hidden = 512;
  return m;
}

std::vector<float> random_rows(int64_t n, uint64_t seed) {
  std::vector<float> x = cases::random_values(n, seed);
  for (float& v : x) v = to_float(to_bf16(v));
  return x;
}

// The same with an indexer that chooses 64 positions.
ModelConfig sparse_dims(int64_t heads) {
  ModelConfig m = full_dims(heads);
  m.query_latent = 128;
  m.indexer = IndexerConfig{.heads = 8, .dim = 128, .topk = 64};
  return m;
}

/// Decode steps over a cache full of random rows, launched call by call or as a captured step for the most requests.
class Decode {
 public:
  Decode(const ModelConfig& m, CacheFormat format, SplitPolicy split, int64_t most, int64_t longest)
      : model_(m),
        most_(most),
        longest_(longest),
        weights_(prepare(m, random_layer(m, 0, 3, Dtype::bf16), Dtype::bf16, kDevice)),
        spec_(cache_spec(m, format, 16)),
        pages_per_request_((longest + 15) / 16),
        cache_(spec_, most * pages_per_request_, kDevice),
        rotary_(m.rotary, m.rope, longest, kDevice),
        index_rotary_(m.indexer ? RotaryTable(m.index_rotary(), m.rope, longest, kDevice) : RotaryTable()),
        staged_(stream_),
        captured_(stream_) {
    options_.compute = Dtype::bf16;
    options_.split = split;
    options_.path = PathPolicy::latent;
    cases::Random random(5);
    std::vector<bf16> rows(cache_.pages() * spec_.page_bytes() / sizeof(bf16));
    for (bf16& x : rows) x = to_bf16(random.normal());
    if (format != CacheFormat::bf16)
      for (bf16& x : rows) x.bits &= 0x3f3f;  // no NaN, nothing large, no scale either
    copy(stream_, cache_.view().data, rows.data(), rows.size() * sizeof(bf16));
    stream_.synchronize();
    if (!m.indexer) return;
    options_.index_format = IndexCacheFormat::bf16;
    const IndexCacheSpec index = index_cache_spec(m, spec_, options_.index_format);
    index_cache_ = IndexCache(index, cache_.pages(), kDevice);
    rows.resize(cache_.pages() * index.page_bytes() / sizeof(bf16));
    for (bf16& x : rows) x = to_bf16(random.normal());
    copy(stream_, index_cache_.view().data, rows.data(), rows.size() * sizeof(bf16));
    stream_.synchronize();
  }

  struct Step {
    std::vector<int32_t> starts, lengths, table, slots;
    Batch batch;
    Plan plan;
  };
  // Request r has lengths[r] positions, the last of which is new; its pages are the r-th run of them.
  std::unique_ptr<Step> step(const std::vector<int32_t>& lengths, bool writes = true) {
    auto s = std::make_unique<Step>();
    s->lengths = lengths;
    for (size_t r = 0; r <= lengths.size(); ++r) s->starts.push_back(static_cast<int32_t>(r));
    for (size_t r = 0; r < lengths.size(); ++r) {
      for (int64_t p = 0; p < pages_per_request_; ++p)
        s->table.push_back(static_cast<int32_t>(static_cast<int64_t>(r) * pages_per_request_ + p));
      const int32_t at = lengths[r] - 1;
      s->slots.push_back(
          writes ? s->table[r * static_cast<size_t>(pages_per_request_) + static_cast<size_t>(at / 16)] * 16 + at % 16
                 : -1);
    }
    s->batch = {
        s->starts, s->lengths, {s->table.data(), {static_cast<int64_t>(lengths.size()), pages_per_request_}}, s->slots};
    s->plan = plan(model_, spec_, cache_.pages(), s->batch, device_info(stream_, model_), options_);
    return s;
  }

  std::vector<float> eager(const std::vector<int32_t>& lengths, std::span<const float> hidden) {
    const auto s = step(lengths);
    const Buffer workspace = filled(s->plan.workspace_bytes, std::byte{0xff});
    selection_ = filled(s->plan.selection_bytes, std::byte{0xff});
    const Buffer in = Buffer::copy_of(hidden.data(), hidden.size_bytes(), kDevice),
                 out = filled(hidden.size_bytes(), std::byte{0xff});
    staged_.stage(s->plan, s->batch);
    if (profile) {
      {
        const HeldStream held(stream_);
        forward_on(*s, workspace, in, out);
      }
      stream_.synchronize();
      (void)profile->rows();
    } else {
      forward_on(*s, workspace, in, out);
    }
    stream_.synchronize();
    return download(out, lengths.size());
  }
  Profile* profile = nullptr;  ///< of eager steps, which are then held back until they are queued

  /// calls: of the layer, one after another, as a step's layers are. scheduled: by what was made when the step was
  /// staged; otherwise every call works it out itself.
  void capture(int calls = 1, bool scheduled = true) {
    maxima_ = step(std::vector<int32_t>(static_cast<size_t>(most_), static_cast<int32_t>(longest_)), false);
    for (mla::Step& s : maxima_->plan.steps)
      if (auto* attend = std::get_if<steps::AttendLatent>(&s.work)) attend->scheduled = attend->scheduled && scheduled;
    workspace_ = filled(maxima_->plan.workspace_bytes, std::byte{0xff});
    captured_selection_ = filled(maxima_->plan.selection_bytes, std::byte{0xff});
    const size_t bytes = static_cast<size_t>(most_ * model_.hidden) * sizeof(float);
    in_ = filled(bytes, std::byte{0});
    out_ = filled(bytes, std::byte{0xff});
    captured_.stage(maxima_->plan, maxima_->batch);
    forward_on(*maxima_, workspace_, in_, out_);  // algorithms are chosen before the capture
    stream_.synchronize();
    graph_ = Graph(stream_, [&] {
      for (int i = 0; i < calls; ++i) forward_on(*maxima_, workspace_, in_, out_);
    });
  }
  std::vector<float> replay(const std::vector<int32_t>& lengths, std::span<const float> hidden) {
    const auto s = step(lengths);
    copy(stream_, in_.data(), hidden.data(), hidden.size_bytes());
    captured_.restage(s->plan, s->batch);
    graph_.launch(stream_);
    stream_.synchronize();
    return download(out_, lengths.size());
  }

  void use_wild_cache() { wild_ = true; }
  StagedStep& captured() { return captured_; }
  std::vector<std::byte> schedule() {
    std::vector<std::byte> bytes(captured_.schedule().size());
    copy(stream_, bytes.data(), captured_.schedule().data(), bytes.size());
    stream_.synchronize();
    return bytes;
  }
  Stream& stream() { return stream_; }
  const ModelConfig& model() const { return model_; }

 private:
  void forward_on(const Step& s, const Buffer& workspace, const Buffer& in, const Buffer& out) {
    forward(stream_,
            {.plan = s.plan,
             .batch = s.batch,
             .weights = weights_,
             .rotary = rotary_,
             .cache = wild_ ? CacheView{spec_, reinterpret_cast<std::byte*>(0x1000), cache_.pages(), spec_.page_bytes()}
                            : cache_.view(),
             .workspace = {workspace.data(), workspace.size()},
             .profile = profile,
             .index_cache = index_cache_.view(),
             .index_rotary = &index_rotary_,
             .selection = selection_of(s),
             .staged = &s == maxima_.get() ? &captured_ : &staged_},
            View<const float, Token, Hidden>(in.as<const float>(), {s.plan.tokens, model_.hidden}),
            View<float, Token, Hidden>(out.as<float>(), {s.plan.tokens, model_.hidden}));
  }
  std::span<std::byte> selection_of(const Step& s) {
    const Buffer& b = &s == maxima_.get() ? captured_selection_ : selection_;
    return {b.data(), b.size()};
  }
  std::vector<float> download(const Buffer& out, size_t rows) {
    std::vector<float> x(rows * static_cast<size_t>(model_.hidden));
    copy(stream_, x.data(), out.data(), x.size() * sizeof(float));
    stream_.synchronize();
    return x;
  }

  ModelConfig model_;
  int64_t most_, longest_;
  LayerWeights weights_;
  CacheSpec spec_;
  int64_t pages_per_request_;
  Stream stream_{kDevice};
  Cache cache_;
  RotaryTable rotary_, index_rotary_;
  IndexCache index_cache_;
  Buffer selection_, captured_selection_;
  PlanOptions options_;
  StagedStep staged_, captured_;
  std::unique_ptr<Step> maxima_;
  Buffer workspace_, in_, out_;
  Graph graph_;
  bool wild_ = false;
};

double difference(std::span<const float> a, std::span<const float> b) {
  return reference::relative_error(a, std::vector<double>(b.begin(), b.end()));
}

// Products take the algorithm of the rows they were captured for, so that bits differ where smaller batches would have
// had another one; the answers do not.
TEST(CapturedStep, ServesSmallerBatches) {
  for (CacheFormat format : {CacheFormat::bf16, CacheFormat::fp8}) {
    for (int64_t heads : {16, 128}) {
      Decode d(full_dims(heads), format, SplitPolicy::fast, 6, 900);
      d.capture();
      for (const std::vector<int32_t>& lengths :
           {std::vector<int32_t>{900, 900, 900, 900, 900, 900}, {17, 900, 1, 64}, {300}, {5, 6, 7, 8, 9}}) {
        const auto hidden = random_rows(static_cast<int64_t>(lengths.size()) * d.model().hidden, lengths.size());
        const auto replayed = d.replay(lengths, hidden), again = d.replay(lengths, hidden);
        EXPECT_EQ(replayed, again);
        EXPECT_LE(difference(replayed, d.eager(lengths, hidden)), 0x1p-7)
            << to_string(format) << " heads " << heads << " requests " << lengths.size();
      }
    }
  }
}

// All calls attend by the schedule of the step that is staged, and to the bit as if each had worked it out.
TEST(CapturedStep, LayersShareASchedule) {
  for (CacheFormat format : {CacheFormat::bf16, CacheFormat::fp8, CacheFormat::fp8_ds_mla})
    for (int64_t heads : {16, 32, 64, 128})
      for (SplitPolicy split : {SplitPolicy::fast, SplitPolicy::batch_invariant}) {
        const std::string of = std::string(to_string(format)) + " heads " + std::to_string(heads);
        Decode alone(full_dims(heads), format, split, 6, 2500), shared(full_dims(heads), format, split, 6, 2500);
        alone.capture(1, false), shared.capture(2);
        std::vector<std::byte> before = shared.schedule();
        EXPECT_FALSE(before.empty()) << of;
        for (const std::vector<int32_t>& lengths :
             {std::vector<int32_t>{2500, 2400, 2500, 2500, 2500, 2500}, {17, 900, 1, 64}, {2300}}) {
          const auto hidden = random_rows(static_cast<int64_t>(lengths.size()) * alone.model().hidden, lengths.size());
          const auto want = alone.replay(lengths, hidden), got = shared.replay(lengths, hidden);
          EXPECT_TRUE(want == got) << of << " requests " << lengths.size();
          std::vector<std::byte> now = shared.schedule();
          EXPECT_TRUE(now != before) << of << " requests " << lengths.size();
          before = std::move(now);
        }
      }
}

TEST(CapturedStep, BatchInvariantBitsAreThoseOfOneRequestAlone) {
  Decode d(full_dims(16), CacheFormat::bf16, SplitPolicy::batch_invariant, 8, 3000);
  d.capture();
  const auto hidden = random_rows(8 * d.model().hidden, 1);
  const std::span<const float> first = std::span(hidden).first(static_cast<size_t>(d.model().hidden));
  const auto alone = d.replay({2900}, first);
  const auto among = d.replay({2900, 3, 1000, 2000, 3000, 1, 64, 65}, hidden);
  EXPECT_TRUE(std::equal(alone.begin(), alone.end(), among.begin()));
}

// Of requests that are all longer than what the indexer chooses.
TEST(CapturedStep, SparseStepsServeSmallerBatches) {
  for (CacheFormat format : {CacheFormat::bf16, CacheFormat::fp8_ds_mla}) {
    Decode d(sparse_dims(16), format, SplitPolicy::fast, 5, 900);
    d.capture();
    for (const std::vector<int32_t>& lengths : {std::vector<int32_t>{900, 900, 900, 900, 900}, {100, 900, 65}, {300}}) {
      const auto hidden = random_rows(static_cast<int64_t>(lengths.size()) * d.model().hidden, lengths.size());
      const auto replayed = d.replay(lengths, hidden), again = d.replay(lengths, hidden);
      EXPECT_EQ(replayed, again);
      EXPECT_LE(difference(replayed, d.eager(lengths, hidden)), 0x1p-6)
          << to_string(format) << " requests " << lengths.size();
    }
  }
}

// What a sparse row attends to is on the device, and a profile counts it: that must not wait for a stream that waits
// for the host.
TEST(LayerOnGpu, SparseStepsAreProfiledOnAHeldStream) {
  Decode d(sparse_dims(16), CacheFormat::bf16, SplitPolicy::fast, 3, 500);
  const auto hidden = random_rows(3 * d.model().hidden, 1);
  const std::vector<int32_t> lengths{500, 100, 70};
  const auto plain = d.eager(lengths, hidden);
  Profile profile;
  d.profile = &profile;
  EXPECT_EQ(d.eager(lengths, hidden), plain);
  const auto row = std::find_if(profile.rows().begin(), profile.rows().end(),
                                [](const Profile::Row& r) { return r.op == "attend_sparse"; });
  ASSERT_NE(row, profile.rows().end());
  EXPECT_EQ(row->flops, 2.0 * 3 * 64 * 16 * (576 + 512));
}

// The driver keeps about a thousand commands of a stream: who queues the next one waits, and cannot let the stream go.
TEST(Streams, MoreIsQueuedOnAHeldStreamThanTheDriverKeeps) {
  Stream stream(kDevice);
  const Buffer from(256, kDevice), to(256, kDevice);
  {
    const HeldStream held(stream);
    for (int i = 0; i < 5000; ++i) copy(stream, to.data(), from.data(), 256);
  }
  stream.synchronize();
}

TEST(CapturedStep, LargerStepsAreRefusedByName) {
  Decode d(full_dims(16), CacheFormat::bf16, SplitPolicy::fast, 2, 100);
  d.capture();
  Decode larger(full_dims(16), CacheFormat::bf16, SplitPolicy::fast, 3, 100);
  const auto step = larger.step({5, 6, 7});
  try {
    d.captured().restage(step->plan, step->batch);
    FAIL() << "a larger step was staged";
  } catch (const ShapeError& e) {
    EXPECT_STREQ(e.what(), "restage: positions has 3 entries, the staged step's has 2");
  }
}

TEST(LayerOnGpu, RepeatsBits) {
  Decode d(full_dims(16), CacheFormat::bf16, SplitPolicy::fast, 8, 2000);
  d.capture();
  const auto hidden = random_rows(5 * d.model().hidden, 1);
  const auto first = d.replay({2000, 3, 1000, 777, 64}, hidden);
  for (int i = 0; i < 1000; ++i) ASSERT_TRUE(d.replay({2000, 3, 1000, 777, 64}, hidden) == first) << "repeat " << i;
}

TEST(LayerOnGpu, AllocatesNothingAfterThePlan) {
  Decode d(full_dims(16), CacheFormat::bf16, SplitPolicy::fast, 4, 500);
  d.capture();  // the capture of a call that allocates or waits would fail
  const auto hidden = random_rows(4 * d.model().hidden, 1);
  d.replay({500, 400, 300, 200}, hidden);
  size_t before = 0, after = 0, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&before, &total), cudaSuccess);
  for (int i = 0; i < 50; ++i) d.replay({500, 400, 300, 200}, hidden);
  ASSERT_EQ(cudaMemGetInfo(&after, &total), cudaSuccess);
  EXPECT_EQ(before, after);
}

TEST(DeviceErrors, MissingThingsAreNamed) {
  EXPECT_EQ(message_of([] { Stream({DeviceKind::cuda, 77}); }).substr(0, 26), "cuda:77: no such GPU, this");
  const std::string memory = message_of([] { Buffer(size_t{1} << 50, kDevice); });
  EXPECT_NE(memory.find("cuda:0 has no 1125899906842624 bytes to give (1.0 PiB)"), std::string::npos) << memory;
}

TEST(DeviceErrors, UnstagedArraysAreNamed) {
  const ModelConfig m = full_dims(16);
  const LayerWeights weights = prepare(m, random_layer(m, 0, 1, Dtype::bf16), Dtype::bf16, kDevice);
  Stream stream(kDevice);
  Cache cache(cache_spec(m, CacheFormat::bf16), 2, kDevice);
  const RotaryTable rotary(m.rotary, m.rope, 64, kDevice);
  // On the stack: the rest of this program's memory is the GPU's to read.
  const int32_t starts[] = {0, 1}, lengths[] = {1}, table[] = {0}, slots[] = {0};
  const Batch batch{starts, lengths, {table, {1, 1}}, slots};
  const Plan p = plan(m, cache.spec(), 2, batch, device_info(stream, m), {.compute = Dtype::bf16});
  const Buffer workspace(p.workspace_bytes, kDevice), hidden = filled(static_cast<size_t>(m.hidden) * 4, std::byte{0});
  const std::string text = message_of([&] {
    forward(stream,
            {.plan = p,
             .batch = batch,
             .weights = weights,
             .rotary = rotary,
             .cache = cache.view(),
             .workspace = {workspace.data(), workspace.size()}},
            View<const float, Token, Hidden>(hidden.as<const float>(), {1, m.hidden}),
            View<float, Token, Hidden>(hidden.as<float>(), {1, m.hidden}));
  });
  EXPECT_NE(text.find("stage the step first"), std::string::npos) << text;
}

// A wild address ends the context: every later call must say so, and name itself.
void call_after_a_fault() {
  Decode d(full_dims(16), CacheFormat::bf16, SplitPolicy::fast, 1, 64);
  d.use_wild_cache();
  const auto hidden = random_rows(d.model().hidden, 1);
  const std::string first = message_of([&] { d.eager({5}, hidden); });
  const std::string second = message_of([&] { d.eager({5}, hidden); });
  std::fprintf(stderr, "%s\n%s\n", first.c_str(), second.c_str());
  std::_Exit(first != "no error" && second != "no error" ? 3 : 4);
}
TEST(DeviceErrorsDeathTest, StickyErrorsComeBackWithTheCall) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(call_after_a_fault(), testing::ExitedWithCode(3), "cudaError");
}

}  // namespace
}  // namespace mla::test
