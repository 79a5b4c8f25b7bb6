#include <limits>

#include "backend/run.hpp"
#include "cases/padded.hpp"
#include "cases/poisoned_cache.hpp"

namespace mla::cases {
namespace {

// requests * query_len keys into permuted pages. Ragged: some slots are negative, some are skipped, a few inputs are
// infinite or NaN, and fp8 scales are not rounded to powers of two. The cache must then hold, byte for byte, what the
// portable codec writes, and nothing else.
class IndexAppendCase final : public Case {
 public:
  explicit IndexAppendCase(const Params& p) : IndexAppendCase(p, Random(p.seed)) {}
  void run(Stream& stream) override { ops::run(stream, args_); }
  Verdict verify() override {
    std::vector<std::byte> expected(cache_.bytes().size(), std::byte{0xff});
    ops::IndexAppendArgs plain = args_;
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
  IndexAppendCase(const Params& p, Random random)
      : cache_(
            {.format = p.index_format, .dim = p.index_dim, .page_size = p.page_size, .power_of_two_scales = !p.ragged},
            (p.ragged ? 3 : 1) * p.requests * p.query_len / p.page_size + 2, random),
        keys_(Dtype::f32, {p.requests * p.query_len + 2, p.index_dim}, gap_of(p)) {
    keys_.fill_normal(random, 4.0f);
    constexpr float kInf = std::numeric_limits<float>::infinity();
    const float odd[] = {kInf, -kInf, poison(), 0.0f, -0.0f, 1e-42f, std::numeric_limits<float>::max()};
    int64_t next = 0;
    for (int64_t t = 0; t < p.requests * p.query_len; ++t) {
      if (p.ragged && random.integer(0, 3) == 0) {
        slots_.push_back(static_cast<int32_t>(random.integer(std::numeric_limits<int32_t>::min(), -1)));
      } else {
        slots_.push_back(cache_.slot(next));
        next += p.ragged ? random.integer(1, 3) : 1;
      }
      if (p.ragged && random.integer(0, 3) == 0)
        for (float x : odd) keys_.view()(t, random.integer(0, p.index_dim - 1)) = x;
      if (p.ragged && random.integer(0, 7) == 0)  // smaller than the least scale's amax
        for (int64_t d = 0; d < p.index_dim; ++d) keys_.view()(t, d) *= 1e-6f;
    }
    args_ = {.keys = keys_.view(), .slots = slots_, .cache = cache_.view()};
  }

  PoisonedIndexCache cache_;
  Padded<Token, IndexDim> keys_;
  std::vector<int32_t> slots_;
  ops::IndexAppendArgs args_;
};

std::vector<Params> sweep(uint64_t seed) {
  std::vector<Params> cases;
  for (IndexCacheFormat format : index_cache_formats())
    for (int64_t page_size : {1, 3, 16, 64})
      for (int64_t tokens : {0, 1, 200})
        for (int64_t dim : {128, 1, 77, 256})
          for (bool ragged : {false, true})
            cases.push_back({.requests = tokens,
                             .ragged = ragged,
                             .page_size = page_size,
                             .index_dim = dim,
                             .index_format = format,
                             .seed = ++seed});
  return cases;
}

}  // namespace

const CaseType index_append{
    "index_append", [](const Params& p) -> std::unique_ptr<Case> { return std::make_unique<IndexAppendCase>(p); },
    sweep};

}  // namespace mla::cases
