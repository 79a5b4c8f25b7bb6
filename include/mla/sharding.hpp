// Decode context parallelism: which rank of a group holds which token of a cache that is split over them. Arithmetic
// alone, every function constant-evaluable; who sends what is elsewhere.
//
// Positions go round the ranks in blocks of `interleave` tokens (ranks 2, interleave 2, a sequence of 9 tokens):
//
//     position   0 1 2 3 4 5 6 7 8
//     rank       0 0 1 1 0 0 1 1 0        a rank keeps its tokens without a gap, in order of position:
//     index      0 1 0 1 2 3 2 3 4        rank 0 holds 0 1 4 5 8, rank 1 holds 2 3 6 7
//
// One rank, or an interleave no shorter than the sequence, is a cache that is not split. This is the order of vLLM's
// decode context parallelism (its `cp_kv_cache_interleave_size`, by default 1); with interleave = the page size whole
// pages go round.
#pragma once

#include <cstdint>
#include <limits>
#include <span>

#include "mla/error.hpp"

namespace mla {

/// How the tokens of every sequence are split over a group's ranks. Positions, lengths and indices count tokens of one
/// sequence from 0; a rank's page table lists the pages of its own tokens alone, in its own cache.
///
/// InputError with value and limits for a rank outside the group, a negative position, index or length, a page size
/// below 1 and a page table that ends too early.
class CacheSharding {
 public:
  constexpr CacheSharding() = default;
  /// Both from 1 to 2^31 - 1, else InputError. interleave: tokens that lie together on a rank.
  constexpr CacheSharding(int64_t ranks, int64_t interleave)
      : ranks_(checked("ranks", ranks, 1, kMost32)), interleave_(checked("interleave", interleave, 1, kMost32)) {}

  constexpr int64_t ranks() const { return ranks_; }
  constexpr int64_t interleave() const { return interleave_; }
  friend constexpr bool operator==(const CacheSharding&, const CacheSharding&) = default;

  /// The rank that holds a position: (position / interleave) % ranks.
  constexpr int64_t owner(int64_t position) const {
    return checked("position", position, 0, kMost64) / interleave_ % ranks_;
  }

  /// Which of its owner's tokens a position is: position / (ranks interleave) * interleave + position % interleave.
  constexpr int64_t index(int64_t position) const {
    return checked("position", position, 0, kMost64) / round() * interleave_ + position % interleave_;
  }

  /// Of a rank's token at `index`, the position: what owner() and index() give back. InputError also when the position
  /// passes 64 bits.
  constexpr int64_t position(int64_t rank, int64_t index) const {
    checked("rank", rank, 0, ranks_ - 1);
    const int64_t block = checked("index", index, 0, kMost64) / interleave_;
    checked("block of the index", block, 0, kMost64 / round() - 1);
    return block * round() + rank * interleave_ + index % interleave_;
  }

  /// How many of the first `tokens` positions a rank holds; the sum over ranks is `tokens`. For a query at position p
  /// length(rank, p + 1) is its causal bound: the rank's tokens that it sees are [0, bound).
  constexpr int64_t length(int64_t rank, int64_t tokens) const {
    checked("rank", rank, 0, ranks_ - 1);
    const int64_t whole = checked("tokens", tokens, 0, kMost64) / round() * interleave_;
    const int64_t rest = tokens % round() - rank * interleave_;
    return whole + (rest < 0 ? 0 : rest < interleave_ ? rest : interleave_);
  }

  /// Length of a rank's page table for a sequence of `tokens`: ceil(length(rank, tokens) / page_size). No rank has more
  /// than rank 0.
  constexpr int64_t pages(int64_t rank, int64_t tokens, int64_t page_size) const {
    checked("page_size", page_size, 1, kMost32);
    const int64_t held = length(rank, tokens);
    return held / page_size + (held % page_size != 0);
  }

  /// Where a rank's cache holds a position, page * page_size + offset, as Batch::slot_mapping has it: -1, which writes
  /// nothing, where another rank is the owner. page_table: the rank's own pages of the sequence.
  constexpr int64_t slot(int64_t rank, int64_t position, std::span<const int32_t> page_table, int64_t page_size) const {
    checked("rank", rank, 0, ranks_ - 1);
    checked("page_size", page_size, 1, kMost32);
    if (owner(position) != rank) return -1;
    const int64_t at = index(position);
    const int64_t page = checked("page of the position", at / page_size, 0, std::ssize(page_table) - 1);
    return checked("page id", page_table[page], 0, kMost32) * page_size + at % page_size;
  }

  /// The position that a rank's slot holds: what slot() gives back. -1 where the page is not of this table. Looks
  /// through the table: O(its length).
  constexpr int64_t slot_position(int64_t rank, int64_t slot, std::span<const int32_t> page_table,
                                  int64_t page_size) const {
    checked("rank", rank, 0, ranks_ - 1);
    checked("page_size", page_size, 1, kMost32);
    const int64_t id = checked("slot", slot, 0, kMost64) / page_size;
    for (int64_t page = 0; page < std::ssize(page_table); ++page)
      if (page_table[page] == id) return position(rank, page * page_size + slot % page_size);
    return -1;
  }

 private:
  static constexpr int64_t kMost32 = std::numeric_limits<int32_t>::max(), kMost64 = std::numeric_limits<int64_t>::max();
  constexpr int64_t round() const { return ranks_ * interleave_; }  // tokens until rank 0's next block

  static constexpr int64_t checked(const char* name, int64_t value, int64_t least, int64_t most) {
    if (value < least || value > most) refuse(name, value, least, most);
    return value;
  }
  [[noreturn]] static void refuse(const char* name, int64_t value, int64_t least, int64_t most);

  int64_t ranks_ = 1, interleave_ = 1;
};

}  // namespace mla
