// attend_sparse at the sizes that Hopper's kernels serve: dense rows of 512 values in bf16 over one or two caches,
// whole lists.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "cases/case.hpp"
#include "cases/compare.hpp"
#include "mla/device.hpp"
#include "mla/error.hpp"
#include "support/print.hpp"

namespace mla::cases {
namespace {

constexpr Device kGpu{DeviceKind::cuda, 0};
constexpr CacheFormat kFormats[] = {CacheFormat::bf16, CacheFormat::f16, CacheFormat::fp8, CacheFormat::fp8_ds_mla,
                                    CacheFormat::fp8_ds_v4};

class SparseOnGpu : public testing::TestWithParam<CacheFormat> {
 protected:
  void SetUp() override {
    if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
    const char* most = std::getenv("MLA_TEST_MAX_FLOPS");
    most_ = most ? std::atof(most) : 1e30;
  }

  // Runs a case of the test's format, on Hopper's kernels.
  void expect_right(Params p) {
    p.device = kGpu;
    p.format = GetParam();
    p.latent = p.format == CacheFormat::fp8_ds_v4 ? 448 : 512;
    p.dtype = Dtype::bf16;
    p.dense = true;
    const int without = p.format == CacheFormat::fp8 ? 64 : p.format == CacheFormat::fp8_ds_mla ? 16 : 0;
    if (p.heads <= without) p.max_logits = false;  // those kernels do not make them
    p.seed = ++seed_;
    const std::string what = describe(p, "attend_sparse");
    Stream stream(kGpu);
    const auto c = find("attend_sparse").make(p);
    if (c->cost().flops + c->cost().bytes > most_) return;
    ASSERT_TRUE(c->kernel().starts_with("cuda/sm90")) << what << " runs " << c->kernel();
    c->run(stream);
    stream.synchronize();
    const Verdict v = c->verify();
    EXPECT_TRUE(v.ok) << what << ": error " << v.error << " above bound " << v.bound << "; " << v.detail;
  }

  double most_ = 0;
  uint64_t seed_ = 77;
};

// Each height of tile and the heads beside it, lists that end in, at and past a block.
TEST_P(SparseOnGpu, Heads) {
  for (const int64_t heads : {1, 5, 16, 17, 32, 33, 64, 65, 100, 128})
    for (const int64_t topk : {1, 63, 64, 65, 200})
      expect_right({.requests = 2,
                    .query_len = 2,
                    .context = 230,
                    .ragged = topk == 200 || topk == 64,
                    .heads = heads,
                    .page_size = 16,
                    .activations = heads % 2 ? Dtype::f32 : Dtype::bf16,
                    .topk = topk,
                    .sinks = heads % 3 == 1});
}

// Long lists of few rows are cut into pieces; of many, workers take stretches of the line.
TEST_P(SparseOnGpu, Pieces) {
  for (const int64_t heads : {16, 64, 128})
    for (const int64_t rows : {2, 140})
      for (const bool ragged : {false, true})
        expect_right({.requests = rows,
                      .context = rows > 100 ? 300 : 2600,
                      .ragged = ragged,
                      .heads = heads,
                      .page_size = 64,
                      .activations = ragged ? Dtype::bf16 : Dtype::f32,
                      .topk = rows > 100 ? 256 : 2048,
                      .sinks = ragged});
}

TEST_P(SparseOnGpu, BatchInvariant) {
  for (const int64_t heads : {16, 40, 128})
    for (const int64_t requests : {1, 5})
      for (const int64_t sources : {1, 2})
        expect_right({.requests = requests,
                      .query_len = 2,
                      .context = 2500,
                      .ragged = requests > 1,
                      .heads = heads,
                      .page_size = 64,
                      .activations = Dtype::bf16,
                      .batch_invariant = true,
                      .splits = 2,
                      .topk = sources == 1 ? 2048 : 1365,  // and 683 of the second
                      .sources = sources,
                      .sinks = true});
}

// Lists that go on in a second cache, at any place of a block.
TEST_P(SparseOnGpu, TwoCaches) {
  for (const int64_t heads : {16, 64, 128})
    for (const int64_t topk : {1, 60, 64, 130})
      for (const bool ragged : {false, true})
        expect_right({.requests = topk == 130 ? 90 : 3,
                      .query_len = 2,
                      .context = 300,
                      .ragged = ragged,
                      .heads = heads,
                      .page_size = topk == 60 ? 7 : 64,
                      .activations = Dtype::bf16,
                      .topk = topk,
                      .sources = 2,
                      .sinks = true});
}

TEST_P(SparseOnGpu, RandomBatches) {
  Random random(5);
  for (int i = 0; i < 60; ++i)
    expect_right({.requests = random.integer(1, 9),
                  .query_len = random.integer(1, 4),
                  .context = random.integer(0, 500),
                  .ragged = random.integer(0, 4) > 0,
                  .heads = random.integer(1, 128),
                  .page_size = random.integer(1, 70),
                  .activations = random.integer(0, 1) ? Dtype::bf16 : Dtype::f32,
                  .topk = random.integer(1, 400),
                  .sources = random.integer(1, 2),
                  .sinks = random.integer(0, 1) == 0,
                  .nonfinite = i % 3 == 2});
}

// Rows of values alone, of one cache and of two.
class SparseOnGpuWithoutRope : public SparseOnGpu {};
TEST_P(SparseOnGpuWithoutRope, AnyBatch) {
  for (const int64_t heads : {1, 16, 30, 64, 128})
    for (const int64_t topk : {1, 64, 200})
      for (const int64_t sources : {1, 2})
        expect_right({.requests = topk == 64 ? 90 : 3,
                      .query_len = 2,
                      .context = 230,
                      .ragged = topk != 64,
                      .heads = heads,
                      .rope = 0,
                      .page_size = sources == 1 ? 64 : 7,
                      .activations = Dtype::bf16,
                      .topk = topk,
                      .sources = sources,
                      .sinks = heads == 64,
                      .nonfinite = topk == 200});
}
INSTANTIATE_TEST_SUITE_P(Formats, SparseOnGpuWithoutRope, testing::Values(CacheFormat::bf16, CacheFormat::f16),
                         [](const auto& i) { return std::string(to_string(i.param)); });

INSTANTIATE_TEST_SUITE_P(Formats, SparseOnGpu, testing::ValuesIn(kFormats),
                         [](const auto& i) { return std::string(to_string(i.param)); });

}  // namespace
}  // namespace mla::cases
