#include "cases/compare.hpp"

#include <bit>
#include <cmath>
#include <numbers>

namespace mla::cases {
namespace {

double largest(std::span<const float> got, std::span<const double> exact, size_t* at) {
  double worst = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    const double e = std::isfinite(exact[i]) ? std::abs(got[i] - exact[i]) : 0.0;
    if (e > worst || std::isnan(e)) {
      worst = e;
      if (at) *at = i;
      if (std::isnan(e)) break;
    }
  }
  return worst;
}

}  // namespace

Verdict compare(std::span<const float> got, std::span<const double> exact, std::span<const float> plain, double unit) {
  Verdict v;
  if (got.size() != exact.size() || plain.size() != exact.size()) {
    v.detail = "sizes differ: " + std::to_string(got.size()) + ", " + std::to_string(exact.size()) + ", " +
               std::to_string(plain.size());
    return v;
  }
  double sum = 0;
  int64_t finite = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    if (std::isfinite(exact[i])) {
      sum += exact[i] * exact[i];
      ++finite;
    } else if (std::isnan(exact[i]) ? !std::isnan(got[i]) : static_cast<double>(got[i]) != exact[i]) {
      v.error = INFINITY;
      v.detail =
          "element " + std::to_string(i) + " is " + std::to_string(got[i]) + ", expected " + std::to_string(exact[i]);
      return v;
    }
  }
  const double rms = finite ? std::sqrt(sum / static_cast<double>(finite)) : 0.0;
  const double scale = rms > 0 ? rms : 1.0;
  size_t at = 0;
  v.error = largest(got, exact, &at) / scale;
  v.bound = 2 * largest(plain, exact, nullptr) / scale + 8 * unit;
  v.ok = v.error <= v.bound;
  if (!exact.empty())
    v.detail =
        "element " + std::to_string(at) + " is " + std::to_string(got[at]) + ", exactly " + std::to_string(exact[at]);
  return v;
}

Verdict unless_moved(Verdict v, int64_t width, std::span<const float> got, std::span<const double> exact,
                     std::span<const float> clean_got, std::span<const double> clean_exact) {
  const size_t n = static_cast<size_t>(width);
  for (size_t row = 0; row + n <= exact.size() && n > 0; row += n) {
    if (!std::equal(exact.begin() + row, exact.begin() + row + n, clean_exact.begin() + row)) continue;
    for (size_t i = row; v.ok && i < row + n; ++i) {
      if (got[i] == clean_got[i] || std::bit_cast<uint32_t>(got[i]) == std::bit_cast<uint32_t>(clean_got[i])) continue;
      v.ok = false;
      v.error = INFINITY;
      v.detail = "element " + std::to_string(i) + " is " + std::to_string(got[i]) + ", but " +
                 std::to_string(clean_got[i]) + " without what it does not see";
    }
  }
  return v;
}

float odd_number(Random& random, bool infinities) {
  switch (infinities ? random.integer(0, 2) : 0) {
    case 1: return INFINITY;
    case 2: return -INFINITY;
    default: return poison();
  }
}

uint64_t Random::next() {
  uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

double Random::uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

int64_t Random::integer(int64_t lo, int64_t hi) {
  return lo + static_cast<int64_t>(next() % static_cast<uint64_t>(hi - lo + 1));
}

float Random::normal() {
  const double u = 1.0 - uniform(), v = uniform();
  return static_cast<float>(std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v));
}

void Random::fill_normal(std::span<float> x, float stddev) {
  for (float& e : x) e = stddev * normal();
}

std::vector<float> random_values(int64_t n, uint64_t seed, float stddev) {
  std::vector<float> x(static_cast<size_t>(n));
  Random(seed).fill_normal(x, stddev);
  return x;
}

float stored(Dtype dtype, float x) {
  std::byte bytes[4];
  store_float(dtype, bytes, 0, x);
  return load_float(dtype, bytes, 0);
}

float poison() { return std::bit_cast<float>(0x7fc0dead); }

}  // namespace mla::cases
