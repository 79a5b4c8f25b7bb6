// Captured steps of an engine's maxima: one graph serves every batch within them, of any mix of lengths, and leaves
// what is not the batch's alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>

#include "layer/reference.hpp"
#include "support/engine.hpp"
#include "support/message.hpp"
#include "support/models.hpp"

namespace mla::test {
namespace {

constexpr int64_t kPage = 16, kTopk = 64;

ModelConfig dense_dims(int64_t heads) {
  ModelConfig m = preset("deepseek-v2-lite");  // of the sizes that Hopper's kernels serve
  m.heads = heads;
  m.hidden = 512;
  return m;
}
ModelConfig sparse_dims(int64_t heads) {
  ModelConfig m = dense_dims(heads);
  m.query_latent = 128;
  m.indexer = IndexerConfig{.heads = 8, .dim = 128, .topk = kTopk};
  return m;
}

struct Request {
  int32_t tokens = 0, length = 0;
};
using Mix = std::vector<Request>;

std::string shape_of(const Mix& mix) {
  std::string text;
  for (const Request& r : mix)
    text += (text.empty() ? "" : ", ") + std::to_string(r.tokens) + " of " + std::to_string(r.length);
  return "[" + text + "]";
}

// Within the maxima: lengths below, at and past what an indexer chooses, some at the maxima's own.
Mix random_mix(cases::Random& random, const StepMaxima& m) {
  Mix mix;
  auto left = static_cast<int32_t>(m.tokens);
  for (int64_t r = random.integer(0, m.requests); r > 0; --r) {
    const auto tokens =
        std::min(left, static_cast<int32_t>(random.integer(random.integer(0, 4) == 0 ? 0 : 1, m.query_len)));
    const int64_t lengths[] = {random.integer(tokens, m.seq_len), random.integer(tokens, kTopk), kTopk, kTopk + 1,
                               m.seq_len};
    mix.push_back({tokens, static_cast<int32_t>(std::min(lengths[random.integer(0, 4)], m.seq_len))});
    left -= tokens;
  }
  return mix;
}

struct Setting {
  std::string name;
  ModelConfig model;
  CacheFormat format = CacheFormat::bf16;
  IndexCacheFormat index = IndexCacheFormat::bf16;
  PlanOptions plan = {};
  StepMaxima maxima = {};
  int layers = 1;  ///< of one indexer: layers behind the first take its choice
  friend void PrintTo(const Setting& s, std::ostream* to) { *to << s.name; }
};

/// A batch with its own pages; the plan by its own lengths, and the one of the maxima.
struct Step {
  std::vector<int32_t> starts{0}, lengths, table, slots;
  Batch batch;
  Plan own, shaped;
};

class Captured {
 public:
  explicit Captured(const Setting& s)
      : s_(s),
        weights_(prepare(s.model, random_layer(s.model, 0, 3, Dtype::bf16), Dtype::bf16, kDevice)),
        sharing_(weights_),
        spec_(cache_spec(s.model, s.format, kPage)),
        pages_((s.maxima.seq_len + kPage - 1) / kPage),
        cache_(spec_, s.maxima.requests * pages_, kDevice),
        rotary_(s.model.rotary, s.model.rope, s.maxima.seq_len, kDevice),
        index_rotary_(s.model.indexer ? RotaryTable(s.model.index_rotary(), s.model.rope, s.maxima.seq_len, kDevice)
                                      : RotaryTable()),
        staged_(stream_),
        captured_(stream_) {
    sharing_.indexer.reset();
    plain_ = s.plan;
    plain_.path = PathPolicy::latent;
    plain_.index_format = s.index;
    shaped_ = plain_;
    shaped_.maxima = s.maxima;
    if (s.model.indexer) index_cache_ = IndexCache(index_cache_spec(s.model, spec_, s.index), cache_.pages(), kDevice);
    fresh_ = random_rows(static_cast<size_t>(cache_.pages()) * spec_.page_bytes(), 5, s.format != CacheFormat::bf16);
    if (s.model.indexer)
      fresh_index_ = random_rows(static_cast<size_t>(cache_.pages()) * index_cache_.spec().page_bytes(), 6,
                                 s.index != IndexCacheFormat::bf16);
    reset();
    device_ = device_info(stream_, s.model);
    whole_ = plan_maxima(s.model, spec_, device_, shaped_);
    workspace_ = filled(whole_.plan.workspace_bytes, std::byte{0xff});
    selection_ = filled(whole_.plan.selection_bytes, std::byte{0xff});
    const size_t bytes = static_cast<size_t>(whole_.plan.tokens * s.model.hidden) * sizeof(float);
    in_ = filled(bytes, std::byte{0xff});
    out_ = filled(bytes, std::byte{0x5a});
    captured_.stage(whole_.plan, whole_.batch);
    const auto calls = [&] { run(whole_.plan, whole_.batch, workspace_, selection_, in_, out_); };
    calls();  // algorithms are chosen and kernels loaded before the capture
    stream_.synchronize();
    untouched_by_warm_up =
        read(stream_, out_.data(), bytes) == std::vector<std::byte>(bytes, std::byte{0x5a}) && cache_bytes() == fresh_;
    graph_ = Graph(stream_, calls);
  }

  std::unique_ptr<Step> step(const Mix& mix) {
    auto s = std::make_unique<Step>();
    const int64_t columns = pages_ + 3;  // an engine's table is for its longest model, not for these maxima
    for (size_t r = 0; r < mix.size(); ++r) {
      s->starts.push_back(s->starts.back() + mix[r].tokens);
      s->lengths.push_back(mix[r].length);
      for (int64_t p = 0; p < columns; ++p)
        s->table.push_back(p < pages_ ? static_cast<int32_t>((static_cast<int64_t>(r) * pages_ + p) % cache_.pages())
                                      : -7);
      for (int32_t at = mix[r].length - mix[r].tokens; at < mix[r].length; ++at)
        s->slots.push_back((static_cast<int32_t>(static_cast<int64_t>(r) * pages_ * kPage) + at) %
                           static_cast<int32_t>(cache_.pages() * kPage));
    }
    s->batch = {s->starts, s->lengths, {s->table.data(), {std::ssize(mix), columns}}, s->slots};
    s->own = plan(s_.model, spec_, cache_.pages(), s->batch, device_, plain_);
    s->shaped = plan(s_.model, spec_, cache_.pages(), s->batch, device_, shaped_);
    return s;
  }

  struct Ran {
    std::vector<float> out;                      ///< of the batch's tokens
    std::vector<std::vector<int32_t>> selected;  ///< of each token; empty: nothing is selected for it
    std::vector<std::byte> cache;
    bool rest_untouched = true;  ///< output rows past the tokens
  };
  /// Call by call, by a plan of the batch's.
  Ran eager(const Plan& p, const Batch& batch, std::span<const float> hidden) {
    const size_t bytes = static_cast<size_t>(p.tokens * s_.model.hidden) * sizeof(float);
    const Buffer workspace = filled(p.workspace_bytes, std::byte{0xff}),
                 selection = filled(p.selection_bytes, std::byte{0xff}), in = filled(bytes, std::byte{0xff}),
                 out = filled(bytes, std::byte{0x5a});
    copy(stream_, in.data(), hidden.data(), hidden.size_bytes());
    staged_.stage(p, batch);
    run(p, batch, workspace, selection, in, out);
    return ran(p, selection, out, hidden.size());
  }
  Ran replay(const Step& s, std::span<const float> hidden) {
    fill(stream_, in_.data(), in_.size(), std::byte{0xff});
    fill(stream_, out_.data(), out_.size(), std::byte{0x5a});
    copy(stream_, in_.data(), hidden.data(), hidden.size_bytes());
    captured_.restage(s.shaped, s.batch);
    graph_.launch(stream_);
    return ran(s.shaped, selection_, out_, hidden.size());
  }

  /// Caches as they were at first.
  void reset() {
    copy(stream_, cache_.view().data, fresh_.data(), fresh_.size());
    if (!fresh_index_.empty()) copy(stream_, index_cache_.view().data, fresh_index_.data(), fresh_index_.size());
    stream_.synchronize();
  }
  std::vector<std::byte> cache_bytes() {
    return read(stream_, cache_.view().data, static_cast<size_t>(cache_.pages()) * spec_.page_bytes());
  }
  /// The cache is as it was but for the batch's slots. Of formats whose tokens lie one behind another.
  bool only_slots_written(const Step& s, const std::vector<std::byte>& cache) const {
    const auto row = static_cast<size_t>(spec_.page_bytes() / kPage);
    std::vector<bool> written(static_cast<size_t>(cache_.pages() * kPage));
    for (const int32_t slot : s.slots) written[static_cast<size_t>(slot)] = true;
    for (size_t slot = 0; slot < written.size(); ++slot)
      if (!written[slot] && std::memcmp(&cache[slot * row], &fresh_[slot * row], row) != 0) return false;
    return true;
  }

  bool untouched_by_warm_up = false;
  StagedStep& staged() { return captured_; }
  const ModelConfig& model() const { return s_.model; }

 private:
  static std::vector<std::byte> random_rows(size_t bytes, uint64_t seed, bool codes) {
    cases::Random random(seed);
    std::vector<std::byte> all(bytes);
    for (size_t i = 0; i + sizeof(bf16) <= bytes; i += sizeof(bf16)) {
      bf16 x = to_bf16(random.normal());
      if (codes) x.bits &= 0x3f3f;  // no NaN, nothing large, no scale either
      std::memcpy(&all[i], &x, sizeof(x));
    }
    return all;
  }

  void run(const Plan& p, const Batch& batch, const Buffer& workspace, const Buffer& selection, const Buffer& in,
           const Buffer& out) {
    for (int l = 0; l < s_.layers; ++l)
      forward(stream_,
              {.plan = p,
               .batch = batch,
               .weights = l == 0 ? weights_ : sharing_,
               .rotary = rotary_,
               .cache = cache_.view(),
               .workspace = {workspace.data(), workspace.size()},
               .index_cache = index_cache_.view(),
               .index_rotary = &index_rotary_,
               .selection = {selection.data(), selection.size()},
               .staged = &p == &whole_.plan ? &captured_ : &staged_},
              View<const float, Token, Hidden>(in.as<const float>(), {p.tokens, s_.model.hidden}),
              View<float, Token, Hidden>(out.as<float>(), {p.tokens, s_.model.hidden}));
  }
  Ran ran(const Plan& p, const Buffer& selection, const Buffer& out, size_t count) {
    Ran r;
    stream_.synchronize();
    const std::vector<std::byte> all = read(stream_, out.data(), out.size());
    r.out.resize(count);
    std::memcpy(r.out.data(), all.data(), count * sizeof(float));
    r.rest_untouched = std::all_of(all.begin() + static_cast<int64_t>(count * sizeof(float)), all.end(),
                                   [](std::byte b) { return b == std::byte{0x5a}; });
    std::vector<std::byte> chosen = read(stream_, selection.data(), selection.size());
    r.selected.resize(static_cast<size_t>(p.batch_tokens));
    const View<int32_t, Token, Topk> positions = p.selected(chosen);
    for (int64_t row = 0; row < p.sparse_rows(); ++row) {
      const int32_t token = p.sparse_tokens[static_cast<size_t>(row)];
      if (token >= p.batch_tokens) continue;
      for (int64_t k = 0; k < p.topk; ++k)
        if (positions(row, k) >= 0) r.selected[static_cast<size_t>(token)].push_back(positions(row, k));
    }
    r.cache = cache_bytes();
    return r;
  }

  Setting s_;
  LayerWeights weights_, sharing_;
  CacheSpec spec_;
  int64_t pages_;
  Stream stream_{kDevice};
  Cache cache_;
  RotaryTable rotary_, index_rotary_;
  IndexCache index_cache_;
  PlanOptions plain_, shaped_;
  DeviceInfo device_;
  StagedStep staged_, captured_;
  StepOfMaxima whole_;
  Buffer workspace_, selection_, in_, out_;
  std::vector<std::byte> fresh_, fresh_index_;
  Graph graph_;
};

std::vector<float> hidden_of(const Captured& c, const Mix& mix, uint64_t seed) {
  int64_t tokens = 0;
  for (const Request& r : mix) tokens += r.tokens;
  std::vector<float> x = cases::random_values(tokens * c.model().hidden, seed);
  for (float& v : x) v = to_float(to_bf16(v));
  return x;
}

// Rows that chose the same keys agree; products take the algorithm of the rows there are, so that near the last place
// chosen a score may fall to either side: of few rows.
void expect_agrees(const Captured::Ran& found, const Captured::Ran& right, const Step& s, int64_t width,
                   const std::string& how) {
  int64_t other = 0, tokens = s.shaped.batch_tokens;
  for (int64_t r = 0; r < s.batch.requests(); ++r)
    for (int64_t t = s.starts[static_cast<size_t>(r)]; t < s.starts[static_cast<size_t>(r + 1)]; ++t) {
      const auto at = static_cast<size_t>(t);
      std::vector<int32_t> expected = right.selected[at];
      if (expected.empty() && !found.selected[at].empty()) {  // attended densely by its own plan: all that it sees
        expected.resize(static_cast<size_t>(s.shaped.positions[at]) + 1);
        std::iota(expected.begin(), expected.end(), 0);
        EXPECT_EQ(found.selected[at], expected) << how << " token " << t << " of request " << r;
      }
      if (found.selected[at] != expected) {
        ++other;
        continue;
      }
      const auto row = [&](const std::vector<float>& x) {
        return std::span(x).subspan(at * static_cast<size_t>(width), static_cast<size_t>(width));
      };
      const auto want = row(right.out);
      EXPECT_LE(reference::relative_error(row(found.out), std::vector<double>(want.begin(), want.end())), 0x1p-6)
          << how << " token " << t << " of request " << r;
    }
  EXPECT_LE(other, 1 + tokens / 4) << how << ": rows with other choices";
}

std::vector<Setting> settings() {
  const StepMaxima decodes{.requests = 5, .tokens = 5, .query_len = 1, .seq_len = 900},
      few{.requests = 6, .tokens = 17, .query_len = 4, .seq_len = 900},
      all{.requests = 4, .tokens = 16, .query_len = 4, .seq_len = 700};
  std::vector<Setting> of;
  for (const SplitPolicy split : {SplitPolicy::fast, SplitPolicy::batch_invariant}) {
    const PlanOptions bf{.split = split, .compute = Dtype::bf16}, f32{.split = split, .compute = Dtype::f32};
    const std::string how = split == SplitPolicy::fast ? ", fast" : ", invariant";
    for (const CacheFormat format : {CacheFormat::bf16, CacheFormat::fp8, CacheFormat::fp8_ds_mla})
      for (const int64_t heads : {16, 128}) {
        const std::string what = ", " + std::string(to_string(format)) + ", heads " + std::to_string(heads) + how;
        of.push_back({"dense" + what, dense_dims(heads), format, {}, bf, heads == 16 ? few : all});
        of.push_back({"sparse" + what, sparse_dims(heads), format,
                      format == CacheFormat::bf16 ? IndexCacheFormat::bf16 : IndexCacheFormat::fp8, bf,
                      heads == 16 ? few : all});
      }
    of.push_back({"dense decodes" + how, dense_dims(16), CacheFormat::bf16, {}, bf, decodes});
    of.push_back({"sparse decodes" + how, sparse_dims(16), CacheFormat::bf16, IndexCacheFormat::bf16, bf, decodes});
    // The generic kernels'.
    of.push_back({"dense in f32" + how, dense_dims(16), CacheFormat::f32, {}, f32, few});
    of.push_back({"sparse in f32" + how, sparse_dims(16), CacheFormat::f32, IndexCacheFormat::f32, f32, few});
    of.push_back(
        {"layers that share a choice" + how, sparse_dims(16), CacheFormat::bf16, IndexCacheFormat::bf16, bf, few, 3});
  }
  PlanOptions nobody{.compute = Dtype::bf16, .sparse = SparsePolicy::dense};
  of.push_back({"selected by nobody", sparse_dims(16), CacheFormat::bf16, IndexCacheFormat::bf16, nobody, few});
  of.push_back({"more requests than a warp",
                dense_dims(16),
                CacheFormat::bf16,
                {},
                {.compute = Dtype::bf16},
                {.requests = 70, .tokens = 100, .query_len = 3, .seq_len = 200}});
  of.push_back({"more sparse requests than a warp",
                sparse_dims(16),
                CacheFormat::bf16,
                IndexCacheFormat::bf16,
                {.compute = Dtype::bf16},
                {.requests = 70, .tokens = 100, .query_len = 3, .seq_len = 200}});
  of.push_back({"sequences that all fit what is selected",
                sparse_dims(16),
                CacheFormat::bf16,
                IndexCacheFormat::bf16,
                {.compute = Dtype::bf16},
                {.requests = 4, .tokens = 9, .query_len = 4, .seq_len = kTopk}});
  return of;
}

class CapturedMaxima : public testing::TestWithParam<Setting> {};

TEST_P(CapturedMaxima, ServeEveryBatchWithinThem) {
  const Setting& setting = GetParam();
  Captured c(setting);
  EXPECT_TRUE(c.untouched_by_warm_up) << "the call before the capture wrote to its output or the cache";
  cases::Random random(31);
  std::vector<Mix> mixes{{}, {{0, 0}, {0, 5}}, {{1, 1}}, {{1, static_cast<int32_t>(setting.maxima.seq_len)}}};
  Mix longest;
  for (auto left = static_cast<int32_t>(setting.maxima.tokens);
       left > 0 && std::ssize(longest) < setting.maxima.requests;)
    longest.push_back(
        {std::min(left, static_cast<int32_t>(setting.maxima.query_len)), static_cast<int32_t>(setting.maxima.seq_len)}),
        left -= longest.back().tokens;
  mixes.push_back(longest);
  for (int i = 0; i < 12; ++i) mixes.push_back(random_mix(random, setting.maxima));
  for (const Mix& mix : mixes) {
    const std::string how = setting.name + ' ' + shape_of(mix);
    const auto s = c.step(mix);
    const auto hidden = hidden_of(c, mix, mix.size() + 1);
    c.reset();
    const auto own = c.eager(s->own, s->batch, hidden);
    c.reset();
    const auto shaped = c.eager(s->shaped, s->batch, hidden);
    c.reset();
    const auto replayed = c.replay(*s, hidden);
    c.reset();
    const auto again = c.replay(*s, hidden);
    expect_agrees(shaped, own, *s, c.model().hidden, how + ", call by call");
    expect_agrees(replayed, own, *s, c.model().hidden, how + ", captured");
    EXPECT_TRUE(replayed.out == again.out) << how << ": repeated";
    EXPECT_TRUE(shaped.rest_untouched) << how << ", call by call: rows past the tokens were written";
    EXPECT_TRUE(replayed.rest_untouched) << how << ", captured: rows past the tokens were written";
    EXPECT_TRUE(c.only_slots_written(*s, replayed.cache)) << how << ": the cache beside the batch's slots was written";
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Settings, CapturedMaxima, testing::ValuesIn(settings()),
                         [](const testing::TestParamInfo<Setting>& of) {
                           std::string name = of.param.name;
                           const auto other = [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); };
                           std::replace_if(name.begin(), name.end(), other, '_');
                           return name;
                         });

// A request's bits among others, by whatever graph launch, are those of it alone.
TEST(CapturedMaximaBits, BatchInvariantOnesAreThoseOfOneRequestAlone) {
  for (const bool sparse : {false, true}) {
    Setting setting{"", sparse ? sparse_dims(16) : dense_dims(16)};
    setting.plan = {.split = SplitPolicy::batch_invariant, .compute = Dtype::bf16};
    setting.maxima = {.requests = 6, .tokens = 18, .query_len = 4, .seq_len = 3000};
    Captured c(setting);
    for (const Request first : {Request{3, 2900}, Request{1, 40}, Request{4, 66}}) {
      const Mix alone{first}, among{first, {4, 3000}, {1, 1}, {2, 65}, {3, 1024}};
      const auto hidden = hidden_of(c, among, 1);
      const auto rows = static_cast<size_t>(first.tokens * c.model().hidden);
      c.reset();
      const auto a = c.replay(*c.step(alone), std::span(hidden).first(rows));
      c.reset();
      const auto b = c.replay(*c.step(among), hidden);
      EXPECT_TRUE(std::equal(a.out.begin(), a.out.end(), b.out.begin()))
          << (sparse ? "sparse, " : "dense, ") << first.tokens << " of " << first.length;
    }
  }
}

// The attention form into f32 and bf16 heads, captured: rows of the caller's past the tokens stay as they are.
TEST(CapturedAttention, LeavesTheCallersRowsAlone) {
  for (const SplitPolicy split : {SplitPolicy::fast, SplitPolicy::batch_invariant})
    for (const Dtype out_dtype : {Dtype::f32, Dtype::bf16}) {
      const ModelConfig m = dense_dims(16);
      const StepMaxima maxima{.requests = 4, .tokens = 10, .query_len = 3, .seq_len = 300};
      const LayerWeights weights = prepare(m, random_layer(m, 0, 3, Dtype::bf16), Dtype::bf16, kDevice);
      Stream stream(kDevice);
      const CacheSpec spec = cache_spec(m, CacheFormat::bf16, kPage);
      const int64_t pages = (maxima.seq_len + kPage - 1) / kPage;
      Cache cache(spec, maxima.requests * pages, kDevice);
      fill(stream, cache.view().data, static_cast<size_t>(cache.pages()) * spec.page_bytes(), std::byte{0x3c});
      const RotaryTable rotary;
      PlanOptions o{.form = LayerForm::attention, .split = split, .compute = Dtype::bf16};
      o.maxima = maxima;
      const StepOfMaxima whole = plan_maxima(m, spec, device_info(stream, m), o);
      const int64_t rows = whole.plan.tokens, width = m.heads * m.value;
      const auto inputs = [&](int64_t row, uint64_t seed, int64_t tokens) {
        const auto x = cases::random_values(rows * row, seed);
        std::vector<bf16> narrow(x.size());
        std::transform(x.begin(), x.end(), narrow.begin(), to_bf16);
        std::fill(narrow.begin() + tokens * row, narrow.end(), bf16{0xffff});
        return Buffer::copy_of(narrow.data(), narrow.size() * sizeof(bf16), kDevice);
      };
      const size_t out_bytes = static_cast<size_t>(rows * width) * size_of(out_dtype);
      const Buffer out = filled(out_bytes, std::byte{0x5a}),
                   workspace = filled(whole.plan.workspace_bytes, std::byte{0xff});
      StagedStep staged(stream), captured(stream);
      const auto call = [&](const Plan& p, const Batch& b, const Buffer& q, const Buffer& kv_c, const Buffer& k_pe) {
        attend(stream,
               {.plan = p,
                .batch = b,
                .weights = weights,
                .rotary = rotary,
                .cache = cache.view(),
                .workspace = {workspace.data(), workspace.size()},
                .staged = &p == &whole.plan ? &captured : &staged},
               AnyView<Token, Head, QueryKey>(Dtype::bf16, q.data(), {rows, m.heads, m.query_key()}),
               AnyView<Token, Latent>(Dtype::bf16, kv_c.data(), {rows, m.latent}),
               AnyView<Token, Rope>(Dtype::bf16, k_pe.data(), {rows, m.rope}),
               AnyMutableView<Token, Head, Value>(out_dtype, out.data(), {rows, m.heads, m.value}));
      };
      const std::vector<int32_t> starts{0, 3, 3, 5}, lengths{300, 0, 17};
      std::vector<int32_t> table(static_cast<size_t>(3 * pages)), slots;
      std::iota(table.begin(), table.end(), 0);
      for (int32_t at = 297; at < 300; ++at) slots.push_back(at);
      for (int32_t at = 15; at < 17; ++at) slots.push_back(static_cast<int32_t>(2 * pages * kPage) + at);
      const Batch batch{starts, lengths, {table.data(), {3, pages}}, slots};
      const Plan p = plan(m, spec, cache.pages(), batch, device_info(stream, m), o);
      const Buffer q = inputs(m.heads * m.query_key(), 1, 5), kv_c = inputs(m.latent, 2, 5),
                   k_pe = inputs(m.rope, 3, 5);
      staged.stage(p, batch);
      call(p, batch, q, kv_c, k_pe);
      const auto right = read(stream, out.data(), out_bytes);
      captured.stage(whole.plan, whole.batch);
      call(whole.plan, whole.batch, q, kv_c, k_pe);
      stream.synchronize();
      const Graph graph(stream, [&] { call(whole.plan, whole.batch, q, kv_c, k_pe); });
      fill(stream, out.data(), out_bytes, std::byte{0x5a});
      captured.restage(p, batch);
      graph.launch(stream);
      const auto found = read(stream, out.data(), out_bytes);
      const std::string how = std::string(to_string(split)) + ", " + std::string(to_string(out_dtype));
      std::vector<float> a, b;
      for (int64_t i = 0; i < 5 * width; ++i)
        a.push_back(load_float(out_dtype, found.data(), i)), b.push_back(load_float(out_dtype, right.data(), i));
      EXPECT_LE(reference::relative_error(a, std::vector<double>(b.begin(), b.end())), 0x1p-6) << how;
      const auto rest = static_cast<size_t>(5 * width) * size_of(out_dtype);
      for (const auto* all : {&right, &found})
        EXPECT_TRUE(std::all_of(all->begin() + static_cast<int64_t>(rest), all->end(),
                                [](std::byte x) { return x == std::byte{0x5a}; }))
            << how << (all == &found ? ", captured" : ", call by call");
    }
}

TEST(CapturedMaximaErrors, OtherMaximaAreNamed) {
  Setting setting{"", dense_dims(16)};
  setting.plan.compute = Dtype::bf16;
  setting.maxima = {.requests = 2, .tokens = 4, .query_len = 2, .seq_len = 100};
  Captured c(setting);
  Setting larger = setting;
  larger.maxima.requests = 3;
  Captured other(larger);
  const auto step = other.step({{1, 5}});
  EXPECT_EQ(message_of([&] { c.staged().restage(step->shaped, step->batch); }),
            "restage: the plan's maxima (PlanOptions::maxima) are requests 3, tokens 4, query_len 2, seq_len 100, the "
            "staged step's are requests 2, tokens 4, query_len 2, seq_len 100");
  EXPECT_EQ(message_of([&] {
              (void)c.step({{1, 5}, {1, 6}, {1, 7}});
            }),
            "batch: 3 requests, the step's maxima allow 2 (PlanOptions::maxima, requests)");
  EXPECT_EQ(message_of([&] {
              (void)c.step({{3, 5}});
            }),
            "batch: request 0: 3 new tokens, the step's maxima allow 2 (PlanOptions::maxima, query_len)");
}

}  // namespace
}  // namespace mla::test
