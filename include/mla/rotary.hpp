// Rotary embedding tables: cos and sin of every position, made once a model.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mla/device.hpp"
#include "mla/model.hpp"

namespace mla {

/// Inverse frequencies [rope / 2] of a config, YaRN's blend or longrope's divisors included, in float64. ShapeError
/// when longrope has another number of divisors, or an angle would not be finite.
std::vector<double> inverse_frequencies(const RopeConfig& config, int64_t rope);
/// The factor YaRN or longrope puts on cos and sin; 1 without them.
double rotary_magnitude(const RopeConfig& config);

/// cos and sin for positions [0, positions), computed in float64, stored as f32 rows of rope / 2 pairs.
class RotaryTable {
 public:
  /// Rotates nothing, at any position.
  RotaryTable() = default;
  /// positions at least 1, rope even.
  RotaryTable(const RopeConfig& config, int64_t rope, int64_t positions, Device device = {});
  int64_t positions() const { return positions_; }
  int64_t pairs() const { return pairs_; }
  /// What it was made of.
  const RopeConfig& config() const { return config_; }
  /// Why this is not the table of a model with this rotary embedding: "is of NeoX halves, the model's pairs are
  /// interleaved"; empty when it is.
  std::string difference(const RopeConfig& model, int64_t rope) const;
  bool interleaved() const { return config_.interleaved; }
  bool rotates() const { return rotates_; }
  /// Of the table's memory; the CPU when nothing rotates.
  Device device() const { return table_ ? table_->device() : Device{}; }
  /// On the table's device: row p is pairs() cosines, then pairs() sines. Null when nothing rotates.
  const float* data() const { return table_ ? table_->as<float>() : nullptr; }
  const float* cos(int64_t position) const { return data() + 2 * position * pairs_; }
  const float* sin(int64_t position) const { return cos(position) + pairs_; }

 private:
  int64_t positions_ = 0, pairs_ = 0;
  bool rotates_ = false;
  RopeConfig config_;
  std::shared_ptr<const Buffer> table_;
};

}  // namespace mla
