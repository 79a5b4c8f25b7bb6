// Times how latent rows become codes of keys and values, whole calls of the op expand, beside what it replaces: project
// and two casts. Sets of codes are rotated past the caches. Answers are checked in the same run, some codes against
// float64.
//   expand_bench [json=FILE] [only=SUBSTRING]... [replays=N]
#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "backend/cuda/core/queue.hpp"
#include "backend/run.hpp"
#include "cuda/bench.hpp"
#include "mla/device.hpp"

namespace mla::cuda {
namespace {

constexpr Device kGpu{DeviceKind::cuda, 0};
constexpr int64_t kLatent = 512, kRoom = 1024;  // rows whose products have room, as a plan gives it

struct Shape {
  const char* name;
  int64_t rows, heads, nope, value;
  int64_t width() const { return nope + value; }
  int64_t out() const { return heads * width(); }
};
constexpr Shape kShapes[] = {
    {"h128 128+128, 256 rows", 256, 128, 128, 128},   {"h128 128+128, 1K rows", 1024, 128, 128, 128},
    {"h128 128+128, 4K rows", 4096, 128, 128, 128},   {"h128 128+128, 16K rows", 16384, 128, 128, 128},
    {"h128 128+128, 60K rows", 61440, 128, 128, 128}, {"h16 128+128, 8K rows", 8192, 16, 128, 128},
    {"h64 192+256, 16K rows", 16384, 64, 192, 256},
};

template <class T>
Buffer copy_of(const std::vector<T>& x) {
  return Buffer::copy_of(x.data(), x.size() * sizeof(T), kGpu);
}

class Expansion {
 public:
  Expansion(Stream& stream, const Shape& s) : stream_(stream), s_(s) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    x_.resize(static_cast<size_t>(s.rows * kLatent));
    for (bf16& x : x_) x = to_bf16(normal(random));
    weights_.resize(static_cast<size_t>(s.out() * kLatent));
    for (float& w : weights_) w = to_float(to_bf16(static_cast<float>(static_cast<int32_t>(random())) * 0x1p-36f));
    std::vector<float> scales(static_cast<size_t>(2 * s.heads));
    for (float& x : scales) x = 0.002f + 1e-5f * static_cast<float>(random() % 256);
    scales_of_ = scales;
    const backend::Backend& backend = backend::backend(kGpu);
    linear_ = backend.pack(weights_, 1, s.out(), kLatent, Dtype::bf16, kGpu);
    rows_ = copy_of(x_), scales_ = copy_of(scales);
    const int64_t bytes = s.rows * s.out();
    sets_ = static_cast<int>(std::clamp<int64_t>(150'000'000 / bytes + 1, 2, 24));
    codes_ = Buffer(static_cast<size_t>(sets_ * (bytes + s.heads * s.value * 16)), kGpu);
    all_products_ = Buffer(static_cast<size_t>(2 * bytes), kGpu);
    scratch_ = Buffer(backend.scratch_per_worker({.heads = s.heads, .latent = kLatent, .hidden = kLatent}), kGpu);
  }
  int sets() const { return sets_; }
  void expand(int set) const {
    const float* const scales = scales_.as<const float>();
    ops::run(stream_,
             ops::ExpandArgs{.x = {Dtype::bf16, rows_.data(), {s_.rows, kLatent}},
                             .x_rows = {},
                             .weights = linear_.get(),
                             .keys = keys(set),
                             .values = values(set),
                             .key_scales = {scales, {s_.heads}},
                             .value_scales = {scales + s_.heads, {s_.heads}},
                             .products = {Dtype::bf16, all_products_.data(), {std::min(kRoom, s_.rows), s_.out()}},
                             .scratch = {scratch_.data(), scratch_.size()}});
  }
  void multiply() const {
    ops::run(stream_, ops::ProjectArgs{.x = {Dtype::bf16, rows_.data(), {s_.rows, 1, kLatent}},
                                       .x_rows = {},
                                       .weights = linear_.get(),
                                       .y = {Dtype::bf16, all_products_.data(), {s_.rows, 1, s_.out()}},
                                       .y_rows = {},
                                       .rows = s_.rows,
                                       .scratch = {scratch_.data(), scratch_.size()}});
  }
  void apart(int set) const {
    multiply();
    const auto cast = [&](int64_t begin, int64_t width, const auto& y, const float* scales) {
      ops::run(stream_,
               ops::CastArgs{.x = {Dtype::bf16,
                                   static_cast<const bf16*>(static_cast<const void*>(all_products_.data())) + begin,
                                   {s_.rows, s_.heads, width},
                                   {s_.out(), s_.width(), 1}},
                             .x_rows = {},
                             .y = {Dtype::fp8_e4m3, y.data(), {s_.rows, s_.heads, width}, y.strides()},
                             .scales = {scales, {s_.heads}}});
    };
    const float* const scales = scales_.as<const float>();
    cast(0, s_.nope, keys(set), scales);
    cast(s_.nope, s_.value, values(set), scales + s_.heads);
  }
  /// Of sampled codes of the last set, those that are not the quotient's, or that of a number within rounding of it.
  int64_t wrong() const {
    const int set = sets_ - 1;
    std::vector<uint8_t> codes(static_cast<size_t>(set_bytes()));
    copy(stream_, codes.data(), codes_.data() + set * set_bytes(), codes.size());
    stream_.synchronize();
    const auto* const begin = codes_.data() + set * set_bytes();
    int64_t found = 0;
    for (int64_t i = 0; i < s_.rows; i += std::max<int64_t>(1, s_.rows / 97))
      for (int64_t h = 0; h < s_.heads; h += 5)
        for (int64_t o = 0; o < s_.width(); o += 7) {
          double sum = 0, all = 0;
          for (int64_t k = 0; k < kLatent; ++k) {
            const double term = static_cast<double>(to_float(x_[static_cast<size_t>(i * kLatent + k)])) *
                                weights_[static_cast<size_t>((h * s_.width() + o) * kLatent + k)];
            sum += term, all += std::abs(term);
          }
          const bool key = o < s_.nope;
          const double scale = scales_of_[static_cast<size_t>(key ? h : s_.heads + h)],
                       off = std::abs(sum) * 0x1p-8 + all * 0x1p-16;
          const void* const at = key ? keys(set).at(i, h, o) : values(set).at(i, h, o - s_.nope);
          const float got = to_float(fp8_e4m3{codes[static_cast<size_t>(static_cast<const std::byte*>(at) - begin)]});
          const auto code = [&](double y) { return to_float(to_fp8_e4m3(static_cast<float>(y / scale))); };
          found += !(code(sum - off) <= got && got <= code(sum + off));
        }
    return found;
  }

 private:
  int64_t pitch() const { return (s_.rows + 15) / 16 * 16; }
  int64_t set_bytes() const { return s_.rows * s_.heads * s_.nope + pitch() * s_.heads * s_.value; }
  AnyMutableView<Key, Head, Nope> keys(int set) const {
    return {Dtype::fp8_e4m3, codes_.data() + set * set_bytes(), {s_.rows, s_.heads, s_.nope}};
  }
  AnyMutableView<Key, Head, Value> values(int set) const {
    return {Dtype::fp8_e4m3,
            codes_.data() + set * set_bytes() + s_.rows * s_.heads * s_.nope,
            {s_.rows, s_.heads, s_.value},
            {1, s_.value * pitch(), pitch()}};
  }

  Stream& stream_;
  const Shape& s_;
  std::vector<bf16> x_;
  std::vector<float> weights_, scales_of_;
  std::shared_ptr<const Linear> linear_;
  int sets_ = 0;
  Buffer rows_, scales_, codes_, all_products_, scratch_;
};

void measure_all(bench::Report& report) {
  Stream stream(kGpu);
  for (const Shape& s : kShapes) {
    if (!report.wants(s.name)) continue;
    const Expansion e(stream, s);
    const auto time = [&](const auto& call) {
      return bench::time_calls(stream.queue().stream(), bench::calls_for(e.sets()), report.replays(),
                               [&](int i) { call(i % e.sets()); });
    };
    const bench::Times product = time([&](int) { e.multiply(); }), apart = time([&](int set) { e.apart(set); }),
                       whole = time([&](int set) { e.expand(set); });
    const double flops = 2.0 * static_cast<double>(s.rows) * static_cast<double>(s.out()) * kLatent;
    report.add({{"op", "expand"},
                {"shape", s.name},
                {"rows", s.rows},
                {"heads", s.heads},
                {"tflop_per_s", bench::rounded(flops / whole.median * 1e-6, 1)},
                {"product_us", bench::rounded(product.median, 1)},
                {"apart_us", bench::rounded(apart.median, 1)}},
               whole, e.wrong() == 0);
  }
}

}  // namespace
}  // namespace mla::cuda

int main(int argc, char** argv) {
  return mla::cuda::bench::run(argc, argv, {.columns = {"tflop_per_s", "product_us", "apart_us"}},
                               mla::cuda::measure_all);
}
