#include "mla/rotary.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numbers>
#include <string>

#include "mla/error.hpp"

namespace mla {

namespace {

constexpr int64_t kMostPositions = int64_t{1} << 30;  // of a table

std::vector<double> frequencies_of(const RopeConfig& c, int64_t rope) {
  const int64_t pairs = rope / 2;
  std::vector<double> frequencies(pairs);
  for (int64_t i = 0; i < pairs; ++i)
    frequencies[i] = std::pow(c.theta, -2.0 * static_cast<double>(i) / static_cast<double>(rope));
  if (c.scaling == RopeConfig::Scaling::longrope) {
    const std::vector<double>& divisors = c.max_position > c.original_max_position ? c.long_factors : c.short_factors;
    if (static_cast<int64_t>(divisors.size()) != pairs)
      throw ShapeError("rotary table: longrope has " + std::to_string(divisors.size()) + " divisors, rope " +
                       std::to_string(rope) + " needs " + std::to_string(pairs));
    for (int64_t i = 0; i < pairs; ++i) frequencies[i] /= divisors[i];
  }
  if (c.scaling != RopeConfig::Scaling::yarn) return frequencies;

  // The dim whose wavelength makes `turns` full turns over the original context.
  auto correction_dim = [&](double turns) {
    return static_cast<double>(rope) *
           std::log(static_cast<double>(c.original_max_position) / (turns * 2 * std::numbers::pi)) /
           (2 * std::log(c.theta));
  };
  double low = correction_dim(c.beta_fast), high = correction_dim(c.beta_slow);
  if (c.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(rope - 1));
  if (low == high) high += 0.001;
  for (int64_t i = 0; i < pairs; ++i) {
    const double interpolated = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    frequencies[i] *= (1 - interpolated) + interpolated / c.factor;
  }
  return frequencies;
}

}  // namespace

std::vector<double> inverse_frequencies(const RopeConfig& c, int64_t rope) {
  std::vector<double> frequencies = frequencies_of(c, rope);
  // Constants that are finite may come to angles that are not.
  for (size_t i = 0; i < frequencies.size(); ++i) {
    if (std::isfinite(frequencies[i] * static_cast<double>(kMostPositions))) continue;
    char text[32];
    std::snprintf(text, sizeof text, "%g", frequencies[i]);
    throw ShapeError("rope frequency of pair " + std::to_string(i) + " is " + text + ", its angles must be finite");
  }
  return frequencies;
}

double rotary_magnitude(const RopeConfig& c) {
  if (c.scaling == RopeConfig::Scaling::none) return 1.0;
  if (c.scaling == RopeConfig::Scaling::longrope) return c.attention_factor;
  return yarn_mscale(c.factor, c.mscale) / yarn_mscale(c.factor, c.mscale_all_dim) * c.attention_factor;
}

std::string RotaryTable::difference(const RopeConfig& model, int64_t rope) const {
  const bool rotated = model.rotate && rope > 0;
  if (rotates_ != rotated)
    return rotated ? "rotates nothing, the model's rope does" : "rotates, the model's rope does not";
  if (!rotated) return {};
  if (2 * pairs_ != rope)
    return "is of rope " + std::to_string(2 * pairs_) + ", the model's is " + std::to_string(rope);
  if (config_ == model) return {};
  if (config_.interleaved != model.interleaved)
    return model.interleaved ? "is of NeoX halves, the model's pairs are interleaved"
                             : "is of interleaved pairs, the model's are NeoX halves";
  // Other words for the same numbers are as good.
  const std::vector<double> mine = inverse_frequencies(config_, rope), its = inverse_frequencies(model, rope);
  auto other = [](const std::string& what, double a, double b) {
    char text[80];
    std::snprintf(text, sizeof(text), " is %.9g, the model's is %.9g", a, b);
    return "is not the model's: " + what + text;
  };
  for (size_t i = 0; i < its.size(); ++i)
    if (mine[i] != its[i]) return other("inverse frequency " + std::to_string(i), mine[i], its[i]);
  const double a = rotary_magnitude(config_), b = rotary_magnitude(model);
  return a == b ? std::string() : other("magnitude of cos and sin", a, b);
}

RotaryTable::RotaryTable(const RopeConfig& config, int64_t rope, int64_t positions, Device device)
    : positions_(positions), pairs_(rope / 2), rotates_(config.rotate && rope > 0), config_(config) {
  if (rope < 0 || rope % 2 != 0)
    throw ShapeError("rotary table: rope is " + std::to_string(rope) + ", must be even and not negative");
  if (positions < 1 || positions > kMostPositions)
    throw ShapeError("rotary table: positions is " + std::to_string(positions) + ", allowed 1 to " +
                     std::to_string(kMostPositions));
  if (!rotates_) return;
  const std::vector<double> frequencies = inverse_frequencies(config, rope);
  const double magnitude = rotary_magnitude(config);
  std::vector<float> table(static_cast<size_t>(2 * positions * pairs_));
  for (int64_t p = 0; p < positions; ++p)
    for (int64_t i = 0; i < pairs_; ++i) {
      const double angle = static_cast<double>(p) * frequencies[i];
      table[2 * p * pairs_ + i] = static_cast<float>(std::cos(angle) * magnitude);
      table[(2 * p + 1) * pairs_ + i] = static_cast<float>(std::sin(angle) * magnitude);
    }
  try {
    table_ = std::make_shared<Buffer>(Buffer::copy_of(table.data(), table.size() * sizeof(float), device));
  } catch (const DeviceError& e) {
    throw DeviceError("rotary table of " + std::to_string(positions) + " positions: " + e.what());
  }
}

}  // namespace mla
