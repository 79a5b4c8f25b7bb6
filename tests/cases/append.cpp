#include <limits>

#include "backend/run.hpp"
#include "cases/padded.hpp"
#include "cases/poisoned_cache.hpp"

namespace mla::cases {
namespace {

CacheSpec spec_of(const Params& p) {
  return {.format = p.format, .latent = p.latent, .rope = p.rope, .page_size = p.page_size, .k_scale = 0.05f};
}

// requests * query_len tokens into permuted pages. Ragged: some slots are negative, some are skipped, and a few inputs
// are infinite or NaN. The cache must then hold, byte for byte, what the portable codec writes, and nothing else.
class AppendCase final : public Case {
 public:
  explicit AppendCase(const Params& p) : AppendCase(p, Random(p.seed)) {}
  void run(Stream& stream) override { ops::run(stream, args_); }
  Verdict verify() override {
    std::vector<std::byte> expected(cache_.bytes().size(), std::byte{0xff});
    ops::AppendArgs plain = args_;
    plain.cache = cache_.view(expected);
    ops::reference(plain);
    Verdict v{.error = 0, .bound = 0, .ok = true, .detail = {}};
    for (size_t i = 0; i < expected.size(); ++i) {
      if (cache_.bytes()[i] == expected[i]) continue;
      if (v.ok)
        v.detail = "page " + std::to_string(i / plain.cache.page_stride) + " byte " +
                   std::to_string(i % plain.cache.page_stride) + " is " +
                   std::to_string(static_cast<int>(cache_.bytes()[i])) + ", expected " +
                   std::to_string(static_cast<int>(expected[i]));
      v.ok = false;
      ++v.error;  // bytes that differ
    }
    return v;
  }
  ops::Cost cost() const override { return ops::cost(args_); }

 private:
  AppendCase(const Params& p, Random random)
      : cache_(spec_of(p), (p.ragged ? 3 : 1) * p.requests * p.query_len / p.page_size + 2, random),
        kv_c_(p.activations, {p.requests * p.query_len + 2, p.latent}, gap_of(p)),
        k_pe_(p.activations, {p.requests * p.query_len + 2, p.rope}, gap_of(p)) {
    const int64_t tokens = p.requests * p.query_len;
    kv_c_.fill_normal(random, 4.0f);  // e4m3 / k_scale saturates at times
    k_pe_.fill_normal(random);
    constexpr float kInf = std::numeric_limits<float>::infinity();
    const float odd[] = {kInf, -kInf, poison(), 0.0f, -0.0f, 1e-42f, std::numeric_limits<float>::max()};
    int64_t next = 0;
    for (int64_t t = 0; t < tokens; ++t) {
      if (p.ragged && random.integer(0, 3) == 0) {
        slots_.push_back(static_cast<int32_t>(random.integer(std::numeric_limits<int32_t>::min(), -1)));
      } else {
        slots_.push_back(cache_.slot(next));
        next += p.ragged ? random.integer(1, 3) : 1;
      }
      if (p.ragged && random.integer(0, 3) == 0)
        for (float x : odd) store_float(p.activations, kv_c_.any().at(t, random.integer(0, p.latent - 1)), 0, x);
    }
    args_ = {.kv_c = kv_c_.any(), .k_pe = k_pe_.any(), .slots = slots_, .cache = cache_.view()};
  }

  PoisonedCache cache_;
  Padded<Token, Latent> kv_c_;
  Padded<Token, Rope> k_pe_;
  std::vector<int32_t> slots_;
  ops::AppendArgs args_;
};

std::vector<Params> sweep(uint64_t seed) {
  std::vector<Params> cases;
  for (CacheFormat format : cache_formats())
    for (int64_t page_size : {1, 3, 16, 64})
      for (int64_t tokens : {0, 1, 70}) {
        Params p{.requests = tokens, .format = format, .page_size = page_size};
        if (format == CacheFormat::fp8_ds_v4) p.latent = 448;
        for (bool ragged : {false, true}) {
          p.ragged = ragged;
          for (Dtype rows : {Dtype::f32, Dtype::bf16, Dtype::f16}) {  // the CPU's; a GPU's are the test's choice
            if (rows != Dtype::f32 && (tokens != 70 || page_size != 16)) continue;
            p.activations = rows;
            p.seed = ++seed;
            cases.push_back(p);
          }
          p.activations = Dtype::f32;
        }
        if (format == CacheFormat::fp8_ds_mla || format == CacheFormat::fp8_ds_v4) continue;
        for (auto [latent, rope] : {std::pair<int64_t, int64_t>{40, 8}, {40, 0}, {1, 1}, {77, 13}}) {
          p.latent = latent;
          p.rope = rope;
          p.seed = ++seed;
          cases.push_back(p);
        }
      }
  Random random(seed);
  constexpr CacheFormat kPlain[] = {CacheFormat::f32, CacheFormat::bf16, CacheFormat::f16, CacheFormat::fp8};
  for (int i = 0; i < 200; ++i)
    cases.push_back({.requests = random.integer(0, 60),
                     .query_len = random.integer(1, 3),
                     .ragged = random.integer(0, 5) > 0,
                     .latent = random.integer(1, 40),
                     .rope = random.integer(0, 10),
                     .format = kPlain[random.integer(0, 3)],
                     .page_size = random.integer(1, 40),
                     .seed = ++seed});
  return cases;
}

}  // namespace

const CaseType append{"append",
                      [](const Params& p) -> std::unique_ptr<Case> { return std::make_unique<AppendCase>(p); }, sweep};

}  // namespace mla::cases
