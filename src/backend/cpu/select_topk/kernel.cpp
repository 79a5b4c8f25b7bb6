#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/select_topk/kernel.cpp"
#include "hwy/foreach_target.h"  // before highway.h
#include "hwy/highway.h"
//
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "backend/cpu/select_topk/kernel.hpp"

HWY_BEFORE_NAMESPACE();
namespace mla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DI = hn::RebindToSigned<DF>;
using VI = hn::Vec<DI>;
using MI = hn::Mask<DI>;

// kLowestScore is -infinity's key, and NaN's.
constexpr int32_t kLowest = std::numeric_limits<int32_t>::min(), kHighest = std::numeric_limits<int32_t>::max(),
                  kLowestScore = score_key(-std::numeric_limits<float>::infinity());

HWY_INLINE int64_t Width() { return static_cast<int64_t>(hn::Lanes(DI())); }

HWY_INLINE VI Keys(const float* scores) {
  const DF df;
  const DI di;
  const auto s = hn::Add(hn::LoadU(df, scores), hn::Zero(df));  // -0 becomes 0
  const auto lowest = hn::Set(df, -std::numeric_limits<float>::infinity());
  const VI bits = hn::BitCast(di, hn::IfThenElse(hn::Eq(s, s), s, lowest));
  return hn::Xor(bits, hn::And(hn::ShiftRight<31>(bits), hn::Set(di, 0x7fffffff)));
}

// How many of n numbers hold; `holds` maps the index of a whole vector of them to a mask.
template <class Holds>
HWY_INLINE int64_t Count(int64_t n, Holds&& holds) {
  const DI di;
  const int64_t lanes = Width();
  // Sums of -1 for each that holds: cheaper than counting a mask's bits each time. 2^31 are never reached.
  VI s0 = hn::Zero(di), s1 = s0, s2 = s0, s3 = s0;
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    s0 = hn::Add(s0, hn::VecFromMask(di, holds(i)));
    s1 = hn::Add(s1, hn::VecFromMask(di, holds(i + lanes)));
    s2 = hn::Add(s2, hn::VecFromMask(di, holds(i + 2 * lanes)));
    s3 = hn::Add(s3, hn::VecFromMask(di, holds(i + 3 * lanes)));
  }
  for (; i < n; i += lanes) {
    const MI there = hn::FirstN(di, static_cast<size_t>(std::min(n - i, lanes)));
    s0 = hn::Add(s0, hn::VecFromMask(di, hn::And(there, holds(i))));
  }
  const VI sum = hn::Add(hn::Add(s0, s1), hn::Add(s2, s3));
  return -static_cast<int64_t>(hn::GetLane(hn::SumOfLanes(di, sum)));
}

// Largest x in [low, high] with count(x) >= wanted, where count falls with x and count(low) >= wanted; stops early at
// an x with exactly as many.
template <class CountFrom>
HWY_INLINE int32_t Bisect(int32_t low, int32_t high, int64_t wanted, bool& exact, CountFrom&& count) {
  exact = false;
  while (low < high && !exact) {
    const int32_t middle = static_cast<int32_t>(int64_t{low} + (int64_t{high} - low + 1) / 2);
    const int64_t n = count(middle);
    if (n >= wanted) low = middle;
    else high = middle - 1;
    exact = n == wanted;
  }
  return low;
}

// The smallest and the largest of n keys, one at least.
HWY_NOINLINE std::pair<int32_t, int32_t> Range(const int32_t* keys, int64_t n) {
  const DI di;
  VI least = hn::Set(di, keys[0]), most = least;
  for (int64_t i = 0; i < n; i += Width()) {
    const MI there = hn::FirstN(di, static_cast<size_t>(std::min(n - i, Width())));
    const VI k = hn::IfThenElse(there, hn::LoadU(di, keys + i), least);
    least = hn::Min(least, k);
    most = hn::Max(most, k);
  }
  return {hn::GetLane(hn::MinOfLanes(di, least)), hn::GetLane(hn::MaxOfLanes(di, most))};
}

// How many of n keys are x or above.
HWY_NOINLINE int64_t CountFrom(const int32_t* keys, int64_t n, int32_t x) {
  const DI di;
  const VI v = hn::Set(di, x);
  return Count(n, [&](int64_t i) { return hn::Not(hn::Gt(v, hn::LoadU(di, keys + i))); });
}

// Keeps, in place and in order, candidates above key, and those at key up to a position.
HWY_INLINE int64_t Keep(const Selection& s, int32_t key, int32_t position) {
  const DI di;
  const VI k = hn::Set(di, key), p = hn::Set(di, position);
  int64_t kept = 0;
  for (int64_t i = 0; i < s.row->count; i += Width()) {
    const VI keys = hn::LoadU(di, s.keys + i), positions = hn::LoadU(di, s.positions + i);
    const MI good = hn::Or(hn::Gt(keys, k), hn::And(hn::Eq(keys, k), hn::Not(hn::Gt(positions, p))));
    const MI there = hn::FirstN(di, static_cast<size_t>(std::min<int64_t>(s.row->count - i, Width())));
    const MI mask = hn::And(there, good);
    hn::StoreU(hn::Compress(keys, mask), di, s.keys + kept);
    hn::StoreU(hn::Compress(positions, mask), di, s.positions + kept);
    kept += static_cast<int64_t>(hn::CountTrue(di, mask));
  }
  return kept;
}

void Reduce(const Selection& s) {
  const DI di;
  const int64_t n = s.row->count;
  if (n <= s.topk) return;
  const auto [low, high] = Range(s.keys, n);
  bool exact;
  const int32_t key = Bisect(low, high, s.topk, exact, [&](int32_t x) { return CountFrom(s.keys, n, x); });
  if (exact) {  // the best topk are those from key on; an equal one that comes later may still be better
    s.row->count = static_cast<int32_t>(Keep(s, key, kHighest));
    s.row->key = key;
    s.row->position = kHighest;
    return;
  }
  // key is the topk-th best; of those equal to it the lowest positions complete the rest.
  const VI v = hn::Set(di, key);
  const int64_t above = Count(n, [&](int64_t i) { return hn::Gt(hn::LoadU(di, s.keys + i), v); });
  const int64_t equal = Count(n, [&](int64_t i) { return hn::Eq(hn::LoadU(di, s.keys + i), v); });
  const int64_t dropped = equal - (s.topk - above);
  int32_t position = kHighest;
  if (dropped > 0) {
    // The first position to drop is the largest x with `dropped` of the equal ones at x or behind.
    const int32_t first = Bisect(0, position, dropped, exact, [&](int32_t x) {
      const VI p = hn::Set(di, x);
      return Count(n, [&](int64_t i) {
        return hn::And(hn::Eq(hn::LoadU(di, s.keys + i), v), hn::Not(hn::Gt(p, hn::LoadU(di, s.positions + i))));
      });
    });
    position = first - 1;
  }
  s.row->count = static_cast<int32_t>(Keep(s, key, position));
  s.row->key = key;
  s.row->position = position;
}

void GuessAmong(const Selection& s, int64_t sampled, int64_t n) {
  const int32_t least = s.row->key;
  // Of the sample so many are among the best topk, with a deviation of the root at most; three of them are added.
  const double best = static_cast<double>(s.topk * sampled) / static_cast<double>(n);
  const int64_t wanted = static_cast<int64_t>(best + 3 * std::sqrt(best)) + 1;
  if (wanted >= sampled) return;
  const auto [low, high] = Range(s.keys, sampled);
  if (least >= low && CountFrom(s.keys, sampled, least + 1) < wanted) return;
  bool exact;
  const int32_t key =
      Bisect(std::max(low, least), high, wanted, exact, [&](int32_t x) { return CountFrom(s.keys, sampled, x); });
  if (key > least) *s.row = {.count = 0, .key = key, .position = kHighest};
}

void Guess(const Selection& s, const float* scores, int64_t n, const int32_t* positions) {
  const int64_t step = n / kSelectSample;
  for (int64_t i = 0; i < kSelectSample; i += Width()) {
    float some[64 / sizeof(float)];
    for (int64_t l = 0; l < Width(); ++l) {
      const int64_t at = (i + l) * step;
      some[l] = positions && positions[at] < 0 ? -std::numeric_limits<float>::infinity() : scores[at];
    }
    hn::StoreU(Keys(some), DI(), s.keys + i);
  }
  GuessAmong(s, kSelectSample, n);
}

// Where candidates enter a selection: what changes with each is held here and written back by close().
struct Gate {
  const Selection& s;
  int64_t count;
  bool reduced = false;
  VI key, position;
  hn::Vec<DF> score;
  bool all_enter;

  HWY_INLINE explicit Gate(const Selection& selection) : s(selection), count(selection.row->count) { take_threshold(); }

  HWY_INLINE void take_threshold() {
    const DI di;
    key = hn::Set(di, s.row->key);
    position = hn::Set(di, s.row->position);
    score = hn::Set(DF(), key_score(s.row->key));
    all_enter = s.row->key <= kLowestScore;
  }

  // Without a branch on what enters: among few better ones than topk it would be guessed wrong every other time.
  HWY_INLINE void offer(VI keys, VI at, MI there) {
    const DI di;
    const MI enters = hn::And(there, hn::Or(hn::Gt(keys, key), hn::And(hn::Eq(keys, key), hn::Gt(position, at))));
    hn::StoreU(hn::Compress(keys, enters), di, s.keys + count);
    hn::StoreU(hn::Compress(at, enters), di, s.positions + count);
    count += static_cast<int64_t>(hn::CountTrue(di, enters));
    if (count <= s.capacity) return;
    close();
    Reduce(s);
    count = s.row->count;
    reduced = true;
    take_threshold();
  }

  HWY_INLINE void close() const { s.row->count = static_cast<int32_t>(count); }
};

// Offers scores to a selection; whether it was reduced on the way.
bool OfferScores(const Selection& s, const float* scores, int64_t n, const int32_t* positions, int32_t first) {
  const DF df;
  const DI di;
  const int64_t lanes = Width();
  Gate gate(s);
  const VI columns = hn::Iota(di, 0);
  auto offer_whole = [&](int64_t i) {
    const VI at =
        positions ? hn::LoadU(di, positions + i) : hn::Add(columns, hn::Set(di, static_cast<int32_t>(first + i)));
    gate.offer(Keys(scores + i), at, hn::Not(hn::Lt(at, hn::Zero(di))));
  };
  auto reach = [&](int64_t i) { return hn::Ge(hn::LoadU(df, scores + i), gate.score); };
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    if (!gate.all_enter && hn::AllFalse(df, hn::Or(hn::Or(reach(i), reach(i + lanes)),
                                                   hn::Or(reach(i + 2 * lanes), reach(i + 3 * lanes)))))
      continue;
    for (int64_t v = i; v < i + 4 * lanes; v += lanes) offer_whole(v);
  }
  for (; i + lanes <= n; i += lanes) offer_whole(i);
  if (i < n) {
    // What lies behind the last column is not this row's to read.
    float last[64 / sizeof(float)] = {};
    int32_t at[64 / sizeof(int32_t)] = {};
    for (int64_t c = 0; i + c < n; ++c) {
      last[c] = scores[i + c];
      at[c] = positions ? positions[i + c] : static_cast<int32_t>(first + i + c);
    }
    const VI v = hn::LoadU(di, at);
    gate.offer(Keys(last), v, hn::And(hn::FirstN(di, static_cast<size_t>(n - i)), hn::Not(hn::Lt(v, hn::Zero(di)))));
  }
  gate.close();
  return gate.reduced;
}

void Offer(const Selection& s, const float* scores, int64_t n, const int32_t* positions, int32_t first) {
  OfferScores(s, scores, n, positions, first);
}

void Join(const Selection& s, const Selection& part) {
  const DI di;
  const int64_t n = part.row->count;
  Gate gate(s);
  for (int64_t i = 0; i < n; i += Width())
    gate.offer(hn::LoadU(di, part.keys + i), hn::LoadU(di, part.positions + i),
               hn::FirstN(di, static_cast<size_t>(std::min(n - i, Width()))));
  gate.close();
}

void Feed(const Selection& s, const float* scores, int64_t n, const int32_t* positions, int32_t first) {
  ops::TopkState::Row& row = *s.row;
  const ops::TopkState::Row open = row;
  if (open.count > 0 || open.key != kLowest || n <= s.capacity) {
    Offer(s, scores, n, positions, first);
    return;
  }
  // A selection that begins lets everything in, and would be reduced several times before its threshold is near the
  // last one. A guess is as good as found out once topk have passed it; else all are offered anew.
  Guess(s, scores, n, positions);
  const bool reduced = OfferScores(s, scores, n, positions, first);
  if (reduced || row.count >= s.topk || row.key == kLowest) return;
  row = open;
  Offer(s, scores, n, positions, first);
}

}  // namespace mla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mla::cpu {
HWY_EXPORT(Feed);
HWY_EXPORT(Guess);
HWY_EXPORT(GuessAmong);
HWY_EXPORT(Join);
HWY_EXPORT(Offer);
HWY_EXPORT(Reduce);

void select_feed(const Selection& s, const float* scores, int64_t n, const int32_t* positions, int32_t first) {
  HWY_DYNAMIC_DISPATCH(Feed)(s, scores, n, positions, first);
}
void select_guess(const Selection& s, const float* scores, int64_t n, const int32_t* positions) {
  HWY_DYNAMIC_DISPATCH(Guess)(s, scores, n, positions);
}
void select_guess_among(const Selection& s, int64_t sampled, int64_t n) {
  HWY_DYNAMIC_DISPATCH(GuessAmong)(s, sampled, n);
}
void select_offer(const Selection& s, const float* scores, int64_t n, const int32_t* positions, int32_t first) {
  HWY_DYNAMIC_DISPATCH(Offer)(s, scores, n, positions, first);
}
void select_join(const Selection& s, const Selection& part) { HWY_DYNAMIC_DISPATCH(Join)(s, part); }
void select_reduce(const Selection& s) { HWY_DYNAMIC_DISPATCH(Reduce)(s); }

}  // namespace mla::cpu
#endif
