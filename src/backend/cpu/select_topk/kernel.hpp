// One row of a running selection.
//
// A score becomes an integer key of the same order (NaN as -inf, -0 as 0). Candidates that the row's threshold lets
// through are appended to its buffer; when that is full, all but the best topk are dropped and the threshold rises.
// What is kept stays in the order it came in.
#pragma once

#include <bit>
#include <cstdint>

#include "ops/select_topk/op.hpp"

namespace mla::cpu {

struct Selection {
  ops::TopkState::Row* row = nullptr;
  int32_t *keys = nullptr, *positions = nullptr;  ///< capacity, and 16 to spare
  int64_t topk = 0, capacity = 0;
};

/// Offers n scores at positions[0..n), or from `first` on when positions is null.
void select_offer(const Selection& s, const float* scores, int64_t n, const int32_t* positions, int32_t first);
/// The same, by a guessed threshold where a selection begins with more scores than it has room for.
void select_feed(const Selection& s, const float* scores, int64_t n, const int32_t* positions, int32_t first);
/// Raises the threshold of a selection without candidates to what somewhat more than topk of n scores reach, as every
/// so many-th of them tells: a guess, to be taken back unless topk candidates get past it. n is kSelectSample or more.
void select_guess(const Selection& s, const float* scores, int64_t n, const int32_t* positions);
/// The same of n candidates; s.keys[0..sampled) are the keys of some of them.
void select_guess_among(const Selection& s, int64_t sampled, int64_t n);
constexpr int64_t kSelectSample = 1024;
/// Offers the candidates of another selection.
void select_join(const Selection& s, const Selection& part);
/// Drops all but the best topk.
void select_reduce(const Selection& s);

/// The score that a key stands for, and the key of a score that is a number.
constexpr float key_score(int32_t key) { return std::bit_cast<float>(key ^ ((key >> 31) & 0x7fffffff)); }
constexpr int32_t score_key(float score) {
  const int32_t bits = std::bit_cast<int32_t>(score);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

}  // namespace mla::cpu
