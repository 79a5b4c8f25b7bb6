// Times products as a layer of deepseek-v3 and the indexer of deepseek-v3.2 make them, of bf16 rows with weights as
// they are or quantised, whole calls: matrices are rotated past the caches. Answers are checked in the same run, some
// outputs against float64.
//   project_bench [json=FILE] [only=SUBSTRING]... [replays=N]
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "backend/cuda/core/queue.hpp"
#include "backend/run.hpp"
#include "core/quantised_weights.hpp"
#include "cuda/bench.hpp"
#include "mla/device.hpp"

namespace mla::cuda {
namespace {

constexpr Device kGpu{DeviceKind::cuda, 0};

struct Map {
  const char* name;
  int64_t heads, out, in;
  Dtype y = Dtype::bf16;
  int64_t most_rows() const { return heads == 1 ? 4096 : 256; }
};
constexpr Map kMaps[] = {{"query_down", 1, 1536, 7168},
                         {"query", 1, 24576, 1536},
                         {"kv_down", 1, 576, 7168},
                         {"absorb", 128, 512, 128},
                         {"value_up", 128, 128, 512},
                         {"output", 1, 7168, 16384},
                         {"index_query", 1, 8192, 1536, Dtype::f32},
                         {"index_key", 1, 128, 7168, Dtype::f32},
                         {"index_weights", 1, 64, 7168, Dtype::f32}};

struct Kind {
  const char* name;
  WeightFormat format;
  Activations activations = Activations::plain;
  int64_t block = 0;
};
constexpr Kind kKinds[] = {{"bf16", WeightFormat::plain},
                           {"fp8 blocks", WeightFormat::fp8, Activations::plain, 128},
                           {"fp8 blocks, fp8_128 rows", WeightFormat::fp8, Activations::fp8_128, 128},
                           {"fp8, one scale", WeightFormat::fp8, Activations::plain, 0},
                           {"mxfp4", WeightFormat::mxfp4}};

struct Matrices {
  std::vector<std::shared_ptr<const Linear>> sets;
  std::vector<float> first;  // of the first set, some outputs
};

std::vector<int64_t> checked_outputs(const Map& m) { return {0, m.out / 3, m.out - 1}; }

Matrices matrices_of(const Map& m, const Kind& k) {
  const backend::Backend& backend = backend::backend(kGpu);
  std::mt19937 random(7);
  const int64_t n = m.heads * m.out * m.in;
  const auto value = [&] { return static_cast<float>(static_cast<int32_t>(random())) * 0x1p-36f; };  // within 1/32
  Matrices all;
  double bytes = 0;
  do {
    std::shared_ptr<const Linear> linear;
    std::vector<float> w;
    if (k.format == WeightFormat::plain) {
      w.resize(static_cast<size_t>(n));
      std::generate(w.begin(), w.end(), value);
      for (float& x : w) x = to_float(to_bf16(x));
      linear = backend.pack(w, m.heads, m.out, m.in, Dtype::bf16, kGpu);
    } else {
      QuantisedWeights q{.format = k.format, .heads = m.heads, .out = m.out, .in = m.in};
      const bool fp8 = k.format == WeightFormat::fp8;
      q.block_rows = fp8 ? k.block : 1, q.block_cols = fp8 ? k.block : kMxGroup;
      q.codes.resize(static_cast<size_t>(n));
      for (uint8_t& c : q.codes) {
        c = static_cast<uint8_t>(random() >> 8) & (fp8 ? 0xff : 0x0f);
        if (fp8 && (c & 0x7f) == 0x7f) c = 0;
      }
      q.scales.resize(q.block_rows == 0 ? 1 : static_cast<size_t>(m.heads * q.row_blocks() * q.col_blocks()));
      for (float& s : q.scales)
        s = fp8 ? 1e-4f * static_cast<float>(1 + random() % 8) : std::ldexp(1.0f, -5 - static_cast<int>(random() % 4));
      linear = backend.pack_quantised(q, Dtype::bf16, kGpu);
      if (all.sets.empty())
        for (int64_t h : {int64_t{0}, m.heads - 1})
          for (int64_t o : checked_outputs(m))
            for (int64_t i = 0; i < m.in; ++i) all.first.push_back(q.value(h, o, i));
    }
    if (all.sets.empty() && !w.empty())
      for (int64_t h : {int64_t{0}, m.heads - 1})
        for (int64_t o : checked_outputs(m))
          for (int64_t i = 0; i < m.in; ++i) all.first.push_back(w[static_cast<size_t>((h * m.out + o) * m.in + i)]);
    bytes += static_cast<double>(linear->bytes);
    all.sets.push_back(std::move(linear));
  } while (bytes < 150e6 && all.sets.size() < 24);
  return all;
}

class Rows {
 public:
  Rows(Stream& stream, const Map& m) : stream_(stream), map_(m) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    x_.resize(static_cast<size_t>(m.most_rows() * m.heads * m.in));
    for (bf16& x : x_) x = to_bf16(normal(random));
    on_device_ = Buffer::copy_of(x_.data(), x_.size() * sizeof(bf16), kGpu);
    y_ = Buffer(static_cast<size_t>(m.most_rows() * m.heads * m.out) * size_of(m.y), kGpu);
    scratch_ = Buffer(backend::backend(kGpu).scratch_per_worker({.heads = m.heads, .hidden = m.in}), kGpu);
  }
  void call(const Linear& w, int64_t rows, Activations activations) const {
    ops::run(stream_, ops::ProjectArgs{.x = {Dtype::bf16, on_device_.data(), {rows, map_.heads, map_.in}},
                                       .x_rows = {},
                                       .weights = &w,
                                       .y = {map_.y, y_.data(), {rows, map_.heads, map_.out}},
                                       .y_rows = {},
                                       .rows = rows,
                                       .activations = activations,
                                       .scratch = {scratch_.data(), scratch_.size()}});
  }
  // Largest error of the checked outputs, of the root of the sum of squares of their terms.
  double error(const Matrices& w, int64_t rows, Activations activations) const {
    call(*w.sets[0], rows, activations);
    std::vector<float> y(static_cast<size_t>(rows * map_.heads * map_.out));
    std::vector<std::byte> bytes(y.size() * size_of(map_.y));
    copy(stream_, bytes.data(), y_.data(), bytes.size());
    stream_.synchronize();
    if (map_.y == Dtype::f32) std::memcpy(y.data(), bytes.data(), bytes.size());
    else
      std::transform(reinterpret_cast<const bf16*>(bytes.data()),
                     reinterpret_cast<const bf16*>(bytes.data()) + y.size(), y.data(),
                     [](bf16 x) { return to_float(x); });
    double worst = 0;
    for (int64_t r : {int64_t{0}, rows - 1}) {
      const float* at = w.first.data();
      for (int64_t h : {int64_t{0}, map_.heads - 1})
        for (int64_t o : checked_outputs(map_)) {
          double sum = 0, squares = 0;
          for (int64_t i = 0; i < map_.in; ++i, ++at) {
            const double term = double{*at} * to_float(x_[static_cast<size_t>((r * map_.heads + h) * map_.in + i)]);
            sum += term, squares += term * term;
          }
          const double got = y[static_cast<size_t>((r * map_.heads + h) * map_.out + o)];
          const double e = std::abs(got - sum) / std::sqrt(squares);
          worst = e <= worst ? worst : std::isnan(e) ? 1e9 : e;
        }
    }
    return worst;
  }

 private:
  Stream& stream_;
  const Map& map_;
  std::vector<bf16> x_;
  Buffer on_device_, y_, scratch_;
};

void measure_all(bench::Report& report) {
  Stream stream(kGpu);
  for (const Map& m : kMaps) {
    const Rows rows(stream, m);
    for (const Kind& k : kKinds) {
      const bool up = m.heads > 1;
      if (k.activations != Activations::plain && up) continue;
      std::unique_ptr<Matrices> matrices;
      for (int64_t n : {1, 4, 8, 16, 32, 48, 64, 96, 128, 256, 4096}) {
        if (n > m.most_rows()) continue;
        const std::string shape = std::string(m.name) + ", " + k.name + ", rows " + std::to_string(n);
        if (!report.wants(shape)) continue;
        if (!matrices) matrices = std::make_unique<Matrices>(matrices_of(m, k));
        const double error = rows.error(*matrices, n, k.activations);
        const int sets = static_cast<int>(matrices->sets.size());
        const bench::Times times = bench::time_calls(
            stream.queue().stream(), bench::calls_for(sets), report.replays(),
            [&](int i) { rows.call(*matrices->sets[static_cast<size_t>(i % sets)], n, k.activations); });
        const double bytes =
            static_cast<double>(matrices->sets[0]->bytes) +
            static_cast<double>(n * m.heads) * (static_cast<double>(m.in) * sizeof(bf16) +
                                                static_cast<double>(m.out) * static_cast<double>(size_of(m.y)));
        report.add({{"op", "project"},
                    {"shape", shape},
                    {"map", m.name},
                    {"weights", k.name},
                    {"rows", n},
                    {"bytes", bytes},
                    {"gb_per_s", bench::rounded(bytes / times.median * 1e-3, 0)},
                    {"error", error}},
                   times, error < (k.activations == Activations::plain ? 0.02 : 0.15));
      }
    }
  }
}

}  // namespace
}  // namespace mla::cuda

int main(int argc, char** argv) {
  return mla::cuda::bench::run(argc, argv, {.columns = {"gb_per_s", "error"}, .hopper = false}, mla::cuda::measure_all);
}
