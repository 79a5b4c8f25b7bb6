// One layer of deepseek-v3 or deepseek-v3.2, or its attention form, on a GPU: decode steps as captured graphs, prefill
// and context steps call by call, each beside the sum of its ops' own times. Rows of bf16 attention again with products
// in fp8, weights and activations, by names that end in ", fp8 products". Of deepseek-v3.2 decode steps over
// fp8_ds_mla, with an indexer;
// ", maxima": a step captured without a batch, for any of as many requests and twice the context.
//   layer_bench [json=FILE] [only=SUBSTRING]... [replays=N]
#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda/bench.hpp"
#include "mla/mla.hpp"

namespace {

using namespace mla;

constexpr Device kGpu{DeviceKind::cuda, 0};

struct Shape {
  const char* name;
  int64_t requests, query, context;
  CacheFormat format;
  bool fp8_query = false;
  PrefillOperands prefill = PrefillOperands::compute;
  const char* output = nullptr;  ///< the attention form's, by its name
  bool batch_invariant = false;
  PathPolicy path = PathPolicy::automatic;
  DecodeOperands decode = DecodeOperands::compute;
  bool sparse = false;  ///< deepseek-v3.2
  bool maxima = false;
};
constexpr Shape sparse(const char* name, int64_t requests, int64_t context, bool maxima = false) {
  return {.name = name,
          .requests = requests,
          .query = 1,
          .context = context,
          .format = CacheFormat::fp8_ds_mla,
          .sparse = true,
          .maxima = maxima};
}
/// The attention form over a bf16 cache, with an output by its name.
constexpr Shape attention(const char* name, int64_t requests, int64_t query, int64_t context, const char* output) {
  return {name, requests, query, context, CacheFormat::bf16, false, PrefillOperands::compute, output};
}
constexpr Shape invariant(const char* name, int64_t requests, int64_t query, int64_t context,
                          PathPolicy path = PathPolicy::automatic) {
  return {.name = name,
          .requests = requests,
          .query = query,
          .context = context,
          .format = CacheFormat::bf16,
          .batch_invariant = true,
          .path = path};
}
constexpr Shape kShapes[] = {
    {"decode b1 8K", 1, 1, 8191, CacheFormat::bf16},
    {"decode b8 8K", 8, 1, 8191, CacheFormat::bf16},
    {"decode b16 8K", 16, 1, 8191, CacheFormat::bf16},
    {"decode b64 8K", 64, 1, 8191, CacheFormat::bf16},
    {"decode b64 8K fp8", 64, 1, 8191, CacheFormat::fp8},
    {"decode b64 8K fp8_ds_mla", 64, 1, 8191, CacheFormat::fp8_ds_mla},
    {"decode b128 4K", 128, 1, 4095, CacheFormat::bf16},
    {"decode b128 4K fp8", 128, 1, 4095, CacheFormat::fp8},
    {"decode b128 4K fp8, fp8 queries", 128, 1, 4095, CacheFormat::fp8, true},
    {.name = "decode b128 4K fp8, products of codes",
     .requests = 128,
     .query = 1,
     .context = 4095,
     .format = CacheFormat::fp8,
     .fp8_query = true,
     .decode = DecodeOperands::fp8},
    {"prefill 8K", 1, 8192, 0, CacheFormat::bf16},
    {"prefill 16 x 512", 16, 512, 0, CacheFormat::bf16},
    {"prefill 8K, e4m3", 1, 8192, 0, CacheFormat::bf16, false, PrefillOperands::fp8},
    {"prefill 16 x 512, e4m3", 16, 512, 0, CacheFormat::bf16, false, PrefillOperands::fp8},
    {"context 4K over 60K", 1, 4096, 61440, CacheFormat::bf16},
    {"context 4K over 60K fp8", 1, 4096, 61440, CacheFormat::fp8},
    {"context 4K over 60K fp8, e4m3", 1, 4096, 61440, CacheFormat::fp8, false, PrefillOperands::fp8},
    {"context 4K over 60K fp8, e4m3 raw", 1, 4096, 61440, CacheFormat::fp8, false, PrefillOperands::fp8_raw},
    invariant("decode b8 8K, batch invariant", 8, 1, 8191),
    invariant("decode b64 8K, batch invariant", 64, 1, 8191),
    invariant("decode b128 4K, batch invariant", 128, 1, 4095),
    invariant("prefill 8K, batch invariant", 1, 8192, 0),
    invariant("prefill 16 x 512, batch invariant", 16, 512, 0),
    invariant("prefill 8K, batch invariant, path expanded", 1, 8192, 0, PathPolicy::expanded),
    invariant("prefill 16 x 512, batch invariant, path expanded", 16, 512, 0, PathPolicy::expanded),
    sparse("v3.2 decode b1 5K", 1, 5119),
    sparse("v3.2 decode b16 5K", 16, 5119),
    sparse("v3.2 decode b16 5K, maxima", 16, 5119, true),
    sparse("v3.2 decode b16 64K", 16, 65535),
    sparse("v3.2 decode b64 5K", 64, 5119),
    sparse("v3.2 decode b128 5K", 128, 5119),
    attention("attention 4 x 1024", 4, 1024, 0, "none"),
    attention("attention 4 x 1024, fp8 output", 4, 1024, 0, "fp8"),
    attention("attention 4 x 1024, fp8_128 output", 4, 1024, 0, "fp8_128"),
    attention("attention 4 x 1024, nvfp4 output", 4, 1024, 0, "nvfp4"),
    attention("attention 4K over 60K", 1, 4096, 61440, "none"),
    attention("attention 4K over 60K, fp8_128 output", 1, 4096, 61440, "fp8_128"),
    attention("attention b64 8K", 64, 1, 8191, "none"),
    attention("attention b64 8K, fp8_128 output", 64, 1, 8191, "fp8_128"),
};

struct OpRow {
  std::string op;
  double us = 0, bytes = 0, flops = 0;
  int64_t calls = 0;
};
struct Measured {
  cuda::bench::Times times;
  double sum = 0;  // of the ops, us
  std::vector<OpRow> ops;
};

class Layer {
 public:
  Layer(bool fp8, bool sparse)
      : model_(preset(sparse ? "deepseek-v3.2" : "deepseek-v3")),
        weights_(prepare(model_, random_layer(model_, 0, 1, Dtype::bf16),
                         {.dtype = Dtype::bf16, .products = fp8 ? WeightFormat::fp8 : WeightFormat::plain}, kGpu)),
        options_{.activations = fp8 ? Activations::fp8_128 : Activations::plain, .compute = Dtype::bf16} {}

  Measured measure(const Shape& s, int replays) {
    const CacheSpec spec = cache_spec(model_, s.format);
    const int64_t length = s.context + s.query, pages = (length + 63) / 64, tokens = s.requests * s.query,
                  most_length = s.maxima ? 2 * length : length;
    Cache cache(spec, s.requests * pages, kGpu);
    fill(cache, spec);
    IndexCache index;
    RotaryTable index_rotary;
    if (s.sparse) {
      index = IndexCache(index_cache_spec(model_, spec, IndexCacheFormat::fp8), s.requests * pages, kGpu);
      fill(index);
      index_rotary = RotaryTable(model_.index_rotary(), model_.rope, most_length, kGpu);
    }
    const RotaryTable rotary(model_.rotary, model_.rope, most_length, kGpu);
    std::vector<int32_t> starts{0}, lengths, table, slots;
    for (int64_t r = 0; r < s.requests; ++r) {
      starts.push_back(static_cast<int32_t>((r + 1) * s.query));
      lengths.push_back(static_cast<int32_t>(length));
      for (int64_t p = 0; p < pages; ++p) table.push_back(static_cast<int32_t>(p * s.requests + r));  // not in order
      for (int64_t at = s.context; at < length; ++at)
        slots.push_back(static_cast<int32_t>(table[static_cast<size_t>(r * pages + at / 64)] * 64 + at % 64));
    }
    const Batch batch{starts, lengths, {table.data(), {s.requests, pages}}, slots};
    PlanOptions options = options_;
    options.fp8_query = s.fp8_query;
    options.decode = s.decode;
    options.prefill = s.prefill;
    options.path = s.path;
    if (s.batch_invariant) options.split = SplitPolicy::batch_invariant;
    if (s.output) options.form = LayerForm::attention, options.output = parse_output_spec(s.output);
    const DeviceInfo device = device_info(stream_, model_);
    StepOfMaxima most;
    if (s.maxima) {
      options.maxima =
          StepMaxima{.requests = s.requests, .tokens = tokens, .query_len = s.query, .seq_len = most_length};
      most = plan_maxima(model_, spec, device, options);
    }
    const Plan own = plan(model_, spec, s.requests * pages, batch, device, options);
    const Plan& p = s.maxima ? most.plan : own;
    const Buffer workspace(p.workspace_bytes, kGpu), selection(p.selection_bytes, kGpu);
    // Hidden rows, or of the attention form q, kv_c and k_pe one behind another.
    const int64_t in_width = s.output ? model_.heads * model_.query_key() + model_.entry() : model_.hidden,
                  out_width = s.output ? model_.heads * model_.value : model_.hidden;
    std::vector<bf16> numbers(static_cast<size_t>(tokens * in_width));
    uint32_t state = 7;
    for (bf16& x : numbers)
      x = to_bf16(static_cast<float>((state = state * 1664525u + 1013904223u) >> 16) * 0x1p-15f - 1.0f);
    const size_t outputs = static_cast<size_t>(tokens * out_width);
    const Buffer hidden = Buffer::copy_of(numbers.data(), numbers.size() * 2, kGpu), out(outputs * 2, kGpu),
                 scales(options.output.scale_bytes(tokens, out_width), kGpu);
    const QuantizedView codes{options.output, tokens, out_width, out.data(), options.output.row_bytes(out_width),
                              scales.data()};
    StagedStep staged(stream_);
    staged.stage(p, s.maxima ? most.batch : batch);
    const auto call = [&](Profile* profile) {
      const LayerContext context{.plan = p,
                                 .batch = s.maxima ? most.batch : batch,
                                 .weights = weights_,
                                 .rotary = rotary,
                                 .cache = cache.view(),
                                 .workspace = {workspace.data(), workspace.size()},
                                 .profile = profile,
                                 .index_cache = index.view(),
                                 .index_rotary = &index_rotary,
                                 .selection = {selection.data(), selection.size()},
                                 .staged = &staged};
      if (!s.output)
        return forward(stream_, context, AnyView<Token, Hidden>(Dtype::bf16, hidden.data(), {tokens, model_.hidden}),
                       AnyMutableView<Token, Hidden>(Dtype::bf16, out.data(), {tokens, model_.hidden}));
      const bf16* const q = hidden.as<bf16>();
      const bf16* const kv_c = q + tokens * model_.heads * model_.query_key();
      const AnyView<Token, Head, QueryKey> queries(Dtype::bf16, q, {tokens, model_.heads, model_.query_key()});
      const AnyView<Token, Latent> latents(Dtype::bf16, kv_c, {tokens, model_.latent});
      const AnyView<Token, Rope> ropes(Dtype::bf16, kv_c + tokens * model_.latent, {tokens, model_.rope});
      if (codes) return attend(stream_, context, queries, latents, ropes, codes);
      attend(stream_, context, queries, latents, ropes,
             AnyMutableView<Token, Head, Value>(Dtype::bf16, out.data(), {tokens, model_.heads, model_.value}));
    };
    if (s.maxima) staged.restage(own, batch);
    call(nullptr);
    stream_.synchronize();
    if (codes) require_numbers(out, codes);
    else require_finite(out, outputs);

    // The weights alone, 374 MB or, in fp8, 204, leave nothing of a step's inputs in the caches: steps follow each
    // other as they are. Prefill is long enough by itself.
    const int calls = tokens <= 512 ? cuda::bench::calls_for(1) : 1;
    const Graph graph(stream_, [&] {
      for (int i = 0; i < calls; ++i) call(nullptr);
    });
    Measured m;
    m.times = cuda::bench::time_launches(static_cast<cudaStream_t>(stream_.native()), calls, replays,
                                         [&] { graph.launch(stream_); });

    // Each op by the median of its rounds.
    std::vector<std::vector<double>> seconds;
    for (int i = 0; i < replays + 2; ++i) {
      Profile profile;
      {
        const HeldStream held(stream_);
        call(&profile);
      }
      const auto& rows = profile.rows();
      seconds.resize(rows.size());
      m.ops.clear();
      for (size_t k = 0; k < rows.size(); ++k) {
        if (i >= 2) seconds[k].push_back(1e6 * rows[k].seconds);
        m.ops.push_back({std::string(rows[k].op), 0, rows[k].bytes, rows[k].flops, rows[k].calls});
      }
    }
    for (size_t k = 0; k < m.ops.size(); ++k) {
      std::sort(seconds[k].begin(), seconds[k].end());
      m.sum += m.ops[k].us = seconds[k][seconds[k].size() / 2];
    }
    return m;
  }

 private:
  // Rows of finite numbers in any format: small floats, small codes, scales of one.
  void fill(Cache& cache, const CacheSpec& spec) {
    std::vector<uint16_t> page(spec.page_bytes() / 2);
    uint32_t state = 3;
    for (uint16_t& x : page) x = static_cast<uint16_t>(((state = state * 1664525u + 1013904223u) >> 16) & 0xbfbf);
    if (spec.format == CacheFormat::fp8_ds_mla)
      for (int64_t t = 0; t < spec.page_size; ++t)
        for (int g = 0; g < 4; ++g) {
          const float one = 1.0f;
          std::memcpy(reinterpret_cast<char*>(page.data()) + t * 656 + 512 + 4 * g, &one, 4);
        }
    for (int64_t i = 0; i < cache.pages(); ++i) copy(stream_, cache.view().page(i), page.data(), spec.page_bytes());
    stream_.synchronize();
  }
  // Small codes, of each page its own, so that few scores are alike; scales of one.
  void fill(IndexCache& cache) {
    const IndexCacheSpec& spec = cache.spec();
    const auto page = static_cast<int64_t>(spec.page_bytes());
    std::vector<uint8_t> bytes(static_cast<size_t>(cache.pages() * page));
    std::mt19937 random(5);
    for (uint8_t& x : bytes) x = static_cast<uint8_t>(random() & 0xbf);
    const float one = 1.0f;
    for (int64_t i = 0; i < cache.pages(); ++i)
      for (int64_t t = 0; t < spec.page_size; ++t)
        std::memcpy(bytes.data() + i * page + spec.page_size * spec.dim + 4 * t, &one, sizeof one);
    copy(stream_, cache.view().data, bytes.data(), bytes.size());
    stream_.synchronize();
  }
  void require_finite(const Buffer& out, size_t n) {
    std::vector<bf16> x(n);
    copy(stream_, x.data(), out.data(), n * 2);
    stream_.synchronize();
    for (size_t i = 0; i < n; ++i)
      if (!((x[i].bits & 0x7f80) != 0x7f80))
        throw Error("layer: output element " + std::to_string(i) + " is not finite");
  }

  // No e4m3 code is NaN, and of e2m1 codes some are not 0.
  void require_numbers(const Buffer& out, const QuantizedView& codes) {
    std::vector<uint8_t> x(static_cast<size_t>(codes.spec.data_bytes(codes.tokens, codes.width)));
    copy(stream_, x.data(), out.data(), x.size());
    stream_.synchronize();
    const auto nan = [&](uint8_t c) { return !codes.spec.is_e2m1() && (c & 0x7f) == 0x7f; };
    if (std::any_of(x.begin(), x.end(), nan) || std::all_of(x.begin(), x.end(), [](uint8_t c) { return c == 0; }))
      throw Error("layer: codes of output " + to_string(codes.spec) + " are NaN, or all 0");
  }

  Stream stream_{kGpu};
  ModelConfig model_;
  LayerWeights weights_;
  PlanOptions options_;
};

void measure_all(cuda::bench::Report& report) {
  std::unique_ptr<Layer> layers[2][2];
  for (const Shape& s : kShapes)
    for (const bool fp8 : {false, true}) {
      if (fp8 && (s.fp8_query || s.prefill != PrefillOperands::compute || s.output || s.batch_invariant || s.sparse))
        continue;
      const std::string name = std::string(s.name) + (fp8 ? ", fp8 products" : "");
      if (!report.wants(name)) continue;
      std::unique_ptr<Layer>& layer = layers[s.sparse][fp8];
      if (!layer) layer = std::make_unique<Layer>(fp8, s.sparse);
      const Measured m = layer->measure(s, report.replays());
      cuda::bench::Row ops = cuda::bench::Row::array();
      for (const OpRow& r : m.ops)
        ops.push_back({{"op", r.op},
                       {"us", cuda::bench::rounded(r.us, 2)},
                       {"calls", r.calls},
                       {"bytes", r.bytes},
                       {"flops", r.flops}});
      report.add({{"op", "layer"},
                  {"shape", name},
                  {"model", s.sparse ? "deepseek-v3.2" : "deepseek-v3"},
                  {"products", fp8 ? "fp8" : "bf16"},
                  {"requests", s.requests},
                  {"query", s.query},
                  {"context", s.context},
                  {"cache", to_string(s.format)},
                  {"output", s.output ? s.output : "none"},
                  {"sum_of_ops_us", cuda::bench::rounded(m.sum, 2)},
                  {"of_sum", cuda::bench::rounded(m.times.median / m.sum, 3)},
                  {"ops", ops}},
                 m.times, true);
    }
}

}  // namespace

int main(int argc, char** argv) {
  return mla::cuda::bench::run(argc, argv,
                               {.columns = {"sum_of_ops_us", "of_sum"},
                                .head = {{"model", "deepseek-v3 or deepseek-v3.2, 1 layer"}},
                                .hopper = false},
                               measure_all);
}
