// What products of e4m3 codes cost attention over expanded keys in accuracy, by the length of the row: a row at a time,
// on the CPU, with the roundings of Hopper's kernel (src/backend/cuda/sm90/attend_expanded/fp8.cu) and the sums of its
// tensor cores as ops/index_score/cut_product.hpp describes them. A model of the kernel, not the kernel.
//   expanded_accuracy [rows=N]
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cases/compare.hpp"
#include "mla/dtype.hpp"

namespace mla {
namespace {

constexpr int64_t kDepth = 192, kWidth = 128, kBlock = 128, kChain = 512, kStep = 32;

enum class Inputs { random, outliers, needle };

/// A query, its keys and values, of bf16.
struct Row {
  int64_t n;
  std::vector<float> q, k, v;  // [kDepth], [n, kDepth], [kWidth, n]
  std::vector<float> needle;   // [kWidth], of Inputs::needle: its values beside the mean
};

float bf(float x) { return to_float(to_bf16(x)); }

/// random: everything normal, scores of deviation 1. outliers: a few channels of keys and queries eight times as large,
/// values with a mean of their own in each channel, and a first key that takes scores of 10 more than others and has
/// small values. needle: as random, values with a mean of their own, and one key with half of the weight whose values
/// are 2 or -2 beside it.
Row make(Inputs inputs, int64_t n, uint64_t seed) {
  cases::Random random(seed);
  Row r{n,
        {},
        std::vector<float>(static_cast<size_t>(n * kDepth)),
        std::vector<float>(static_cast<size_t>(n * kWidth)),
        {}};
  const bool large = inputs == Inputs::outliers;
  const auto size = [&](int64_t d) { return large && d % 48 == 5 ? 8.0f : 1.0f; };
  for (int64_t d = 0; d < kDepth; ++d) r.q.push_back(bf(random.normal() * (large && d % 48 == 5 ? 0.25f : 1.0f)));
  for (int64_t j = 0; j < n; ++j)
    for (int64_t d = 0; d < kDepth; ++d) r.k[j * kDepth + d] = bf(random.normal() * size(d));
  double norm = 0;
  for (float x : r.q) norm += static_cast<double>(x) * x;
  // Key j's score becomes its own plus `more`: along q.
  const auto lift = [&](int64_t j, double more) {
    for (int64_t d = 0; d < kDepth; ++d)
      r.k[j * kDepth + d] =
          bf(static_cast<float>(r.k[j * kDepth + d] + more * std::sqrt(double{kDepth}) / norm * r.q[d]));
  };
  if (large) lift(0, 10);
  const int64_t place = n / 3;
  if (inputs == Inputs::needle) lift(place, std::log(static_cast<double>(n)) + 0.5);
  for (int64_t d = 0; d < kWidth; ++d) {
    const float mean = inputs == Inputs::random ? 0.0f : random.normal();
    for (int64_t j = 0; j < n; ++j) r.v[d * n + j] = bf((mean + random.normal()) * (large && j == 0 ? 0.05f : 1.0f));
    if (inputs == Inputs::needle) {
      r.needle.push_back(random.integer(0, 1) == 0 ? 2.0f : -2.0f);
      r.v[d * n + place] = bf(mean + r.needle.back());
    }
  }
  return r;
}

/// The outputs in float64.
std::vector<double> exact(const Row& r) {
  std::vector<double> s(static_cast<size_t>(r.n)), out(kWidth);
  double high = -INFINITY, sum = 0;
  for (int64_t j = 0; j < r.n; ++j) {
    for (int64_t d = 0; d < kDepth; ++d) s[j] += static_cast<double>(r.q[d]) * r.k[j * kDepth + d];
    s[j] /= std::sqrt(double{kDepth});
    high = std::max(high, s[j]);
  }
  for (double& x : s) sum += x = std::exp(x - high);
  for (int64_t d = 0; d < kWidth; ++d) {
    for (int64_t j = 0; j < r.n; ++j) out[d] += s[j] * r.v[d * r.n + j];
    out[d] /= sum;
  }
  return out;
}

/// 32 products more in a tensor core's sum: all are aligned to the largest and cut off 13 bits below its leading bit.
double cut_step(double sum, const float* a, const float* b) {
  double largest = std::abs(sum);
  for (int64_t i = 0; i < kStep; ++i) largest = std::max(largest, std::abs(static_cast<double>(a[i]) * b[i]));
  if (!(largest > 0)) return 0;
  const double unit = std::ldexp(1.0, std::ilogb(largest) - 13);
  double units = std::trunc(sum / unit);
  for (int64_t i = 0; i < kStep; ++i) units += std::trunc(static_cast<double>(a[i]) * b[i] / unit);
  sum = units * unit;
  if (sum == 0) return 0;
  const double last = std::ldexp(1.0, std::ilogb(sum) - 13);
  return std::trunc(sum / last) * last;
}

struct Outputs {
  std::vector<double> precise, by_block, raw, bf16_products;  // by_block: f32 sums between blocks of 128 keys
};

std::vector<float> codes_of(const std::vector<float>& x, float& scale) {
  float most = 0;
  for (float e : x) most = std::max(most, std::abs(e));
  scale = most / 448;
  std::vector<float> codes;
  for (float e : x) codes.push_back(to_float(to_fp8_e4m3(e / scale)));
  return codes;
}

Outputs modelled(const Row& r) {
  float q_scale, k_scale, v_scale;
  const std::vector<float> q = codes_of(r.q, q_scale), k = codes_of(r.k, k_scale), v = codes_of(r.v, v_scale);
  const float to_log2 = static_cast<float>(1.4426950408889634 / std::sqrt(double{kDepth}));
  std::vector<double> whole(kWidth), chain(kWidth), blocks(kWidth), raw(kWidth), plain(kWidth);
  float reference = -INFINITY, sum = 0, plain_reference = -INFINITY, plain_sum = 0;
  std::vector<float> s(kBlock), weights(kBlock), plain_s(kBlock);
  for (int64_t block = (r.n - 1) / kBlock; block >= 0; --block) {
    const int64_t first = block * kBlock, count = std::min(kBlock, r.n - first);
    float high = -INFINITY, plain_high = -INFINITY;
    for (int64_t j = 0; j < kBlock; ++j) {
      double dot = 0;
      float plain_dot = 0;
      for (int64_t d = 0; j < count && d < kDepth; d += kStep) dot = cut_step(dot, &q[d], &k[(first + j) * kDepth + d]);
      for (int64_t d = 0; j < count && d < kDepth; ++d) plain_dot += r.q[d] * r.k[(first + j) * kDepth + d];
      s[j] = j < count ? static_cast<float>(dot) * (q_scale * k_scale * to_log2) : -INFINITY;
      plain_s[j] = j < count ? plain_dot * to_log2 : -INFINITY;
      high = std::max(high, s[j]);
      plain_high = std::max(plain_high, plain_s[j]);
    }
    if (high - 7 > reference + 1.75f) {
      const double factor = std::exp2(static_cast<double>(reference) - (high - 7));
      for (std::vector<double>* x : {&whole, &chain, &blocks, &raw})
        for (double& e : *x) e *= factor;
      sum *= static_cast<float>(factor);
      reference = high - 7;
    }
    if (plain_high > plain_reference) {
      const double factor = std::exp2(static_cast<double>(plain_reference) - plain_high);
      for (double& e : plain) e *= factor;
      plain_sum *= static_cast<float>(factor);
      plain_reference = plain_high;
    }
    for (int64_t j = 0; j < kBlock; ++j) {
      const float w = std::exp2(s[j] - reference), p = std::exp2(plain_s[j] - plain_reference);
      sum += w;
      plain_sum += p;
      weights[j] = to_float(to_fp8_e4m3(w));
      plain_s[j] = bf(p);
    }
    std::vector<float> column(kBlock);
    for (int64_t d = 0; d < kWidth; ++d) {
      for (int64_t j = 0; j < count; ++j) column[j] = v[d * r.n + first + j];
      std::fill(column.begin() + count, column.end(), 0.0f);
      double one = 0;
      for (int64_t j = 0; j < kBlock; j += kStep) {
        one = cut_step(one, &weights[j], &column[j]);
        chain[d] = cut_step(chain[d], &weights[j], &column[j]);
        raw[d] = cut_step(raw[d], &weights[j], &column[j]);
      }
      blocks[d] = static_cast<float>(blocks[d] + one);
      for (int64_t j = 0; j < count; ++j)
        plain[d] = static_cast<float>(plain[d] + static_cast<double>(plain_s[j]) * r.v[d * r.n + first + j]);
    }
    if (first % kChain == 0)
      for (int64_t d = 0; d < kWidth; ++d) whole[d] = static_cast<float>(whole[d] + chain[d]), chain[d] = 0;
  }
  Outputs out;
  for (int64_t d = 0; d < kWidth; ++d) {
    out.precise.push_back(whole[d] * v_scale / sum);
    out.by_block.push_back(blocks[d] * v_scale / sum);
    out.raw.push_back(raw[d] * v_scale / sum);
    out.bf16_products.push_back(plain[d] / plain_sum);
  }
  return out;
}

/// Root mean square of the difference, of that of `want`, both summed over rows.
struct Error {
  double difference = 0, size = 0;
  void add(const std::vector<double>& got, const std::vector<double>& want) {
    for (size_t d = 0; d < want.size(); ++d) {
      difference += (got[d] - want[d]) * (got[d] - want[d]);
      size += want[d] * want[d];
    }
  }
  double relative() const { return std::sqrt(difference / size); }
};

void table(Inputs inputs, const char* name, int rows) {
  for (const int64_t n : {512, 2048, 8192, 32768, 131072}) {
    Error bf16_products, by_block, precise, raw, between;
    for (int i = 0; i < rows; ++i) {
      const Row r = make(inputs, n, static_cast<uint64_t>(1000 * n + i));
      const std::vector<double> want = exact(r);
      const Outputs got = modelled(r);
      bf16_products.add(got.bf16_products, want);
      precise.add(got.precise, want);
      by_block.add(got.by_block, want);
      raw.add(got.raw, want);
      between.add(got.raw, got.precise);
    }
    std::printf("| %s | %lld | %.2e | %.2e | %.2e | %.2e | %.2e |\n", name, static_cast<long long>(n),
                bf16_products.relative(), by_block.relative(), precise.relative(), raw.relative(), between.relative());
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace mla

int main(int argc, char** argv) {
  int rows = 4;
  for (int i = 1; i < argc; ++i) {
    const char* const end = argv[i] + std::strlen(argv[i]);
    if (std::strncmp(argv[i], "rows=", 5) != 0 || std::from_chars(argv[i] + 5, end, rows).ptr != end || rows < 1) {
      std::fprintf(stderr, "argument %d is %s, known is rows=N, N from 1\n", i, argv[i]);
      return 1;
    }
  }
  std::printf(
      "| inputs | keys | bf16 | e4m3, 128 keys a sum | precise, 512 | raw | raw against precise "
      "|\n|---|---|---|---|---|---|---|\n");
  mla::table(mla::Inputs::random, "random", rows);
  mla::table(mla::Inputs::outliers, "outliers and a sink", rows);
  mla::table(mla::Inputs::needle, "a needle", rows);
}
