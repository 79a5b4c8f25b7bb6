// block_attention in AMX's tile registers: operands bf16, sums f32, as in the dot product form.
//
// Scores are keys times queries: keys are the row-major operand, queries the paired one, so that scores keep the shared
// layout, [key][row], and nothing is reduced across lanes. For the values probabilities are turned into rows of keys,
// 32 keys and 16 rows at a time; outputs are rows, [row][dim]. Keys are read as rows, wherever they lie; values lie in
// squares, a tile register's operand each.
#include "backend/cpu/core/block_attention.hpp"
#include "backend/cpu/core/tile_registers.hpp"

#ifdef MLA_HAS_AMX

// GCC 12 takes its own headers' undefined-value intrinsics for uninitialised reads (GCC bug 105593).
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#include <limits>

namespace mla::cpu {
namespace {

constexpr int64_t kLanes = 16;

// out[c] = (row 0's word c, row 1's word c, ..): a 16 x 16 square of 32-bit words.
MLA_AMX inline void transpose_square(__m512i (&r)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

// Bytes from one row of an operand to the next, in elements of 2 and of 4 bytes.
constexpr size_t kRow = 64;

// The intrinsics of tile registers do not tell the compiler that they read and write memory.
inline void memory_is_read() { asm volatile("" ::: "memory"); }

// Registers 0 to 3 hold sums throughout.
MLA_AMX inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// 2^x: a polynomial of the fraction, 1 at 0 and off by 1.5e-7 at most, times 2 to the floor. 0 at -inf.
MLA_AMX inline __m512 exp2_of(__m512 x) {
  const __m512 r = _mm512_reduce_ps(x, 0x09);  // x - floor(x)
  __m512 y = _mm512_set1_ps(0.0018671300495043397f);
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.009017030708491802f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.05579991266131401f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.24016444385051727f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.6931512951850891f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(y, x);
}

constexpr float kLog2e = 1.4426950408889634f;

// What softmax_block does for a tile, its probabilities as operands: [32 keys][16 rows] squares, a row's 16 pairs of
// keys each. In pieces of some 60 cycles, to be done between steps of other tiles' products: the tile unit multiplies
// meanwhile, and what waits for it does not keep vectors waiting.
class SoftmaxRows {
 public:
  // count: a multiple of 32.
  MLA_AMX void begin(const RowTile& tile, const KeyBlock& block, float* scores, uint32_t* rows) {
    tile_ = &tile;
    block_ = block;
    scores_ = scores;
    rows_ = rows;
    seen_ = tile.shown ? 0 : std::clamp<int64_t>(tile.first_last + 1 - block.first_key, 0, block.count);
    std::copy_n(tile.m, tile.width, maximum_);
    std::fill_n(zeros_, kLanes, 0.0f);
    group_ = key_ = part_ = 0;
    phase_ = Phase::maxima;
  }
  // The next piece; nothing once all are done.
  MLA_AMX [[gnu::noinline]] void step() {
    switch (phase_) {
      case Phase::maxima: return join_scores();
      case Phase::exponentials: return part_ < kParts ? exponentials() : lay_out();
      case Phase::done: return;
    }
  }
  void finish() {
    while (phase_ != Phase::done) step();
  }
  const RowTile& tile() const { return *tile_; }
  const KeyBlock& block() const { return block_; }
  const uint32_t* rows() const { return rows_; }
  const float* alpha() const { return alpha_; }                  // the factor for what each row had summed
  const bool* skip() const { return skips_ ? skip_ : nullptr; }  // keys whose values must not be multiplied

 private:
  enum class Phase { maxima, exponentials, done };
  static constexpr int64_t kParts = 4, kPairs = kTilePairs / kParts;  // of a square, a piece each

  // Scales 32 keys' scores of 16 rows and joins them into the maxima; hidden ones become -inf. zeros_ stay 0 until one
  // is no finite number.
  MLA_AMX void join_scores() {
    const __m512 scale = _mm512_set1_ps(block_.scale), none = _mm512_set1_ps(-kInfinity);
    const int64_t w = tile_->width, end = key_ + kTileInputs;
    float* at = scores_ + key_ * w + group_;
    __m512 m[4], zeros[4];
    m[0] = _mm512_load_ps(maximum_ + group_);
    zeros[0] = _mm512_load_ps(zeros_);
    m[1] = m[2] = m[3] = none;
    zeros[1] = zeros[2] = zeros[3] = _mm512_setzero_ps();
    if (end <= seen_) {
      for (int64_t t = key_; t < end; t += 4)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i, at += w) {
          const __m512 s = _mm512_mul_ps(_mm512_load_ps(at), scale);
          zeros[i] = _mm512_fmadd_ps(s, _mm512_setzero_ps(), zeros[i]);
          m[i] = _mm512_max_ps(s, m[i]);  // m where the score is NaN
          _mm512_store_ps(at, s);
        }
    } else {
      const __m512i last = _mm512_loadu_si512(tile_->last + group_);
      // A step's keys are those of one word.
      static_assert(kTileInputs == 32);
      __m512i words = _mm512_set1_epi32(-1);
      if (tile_->shown) words = _mm512_loadu_si512(tile_->shown + key_ / kTileInputs * w + group_);
      for (int64_t t = key_; t < end; ++t, at += w) {
        const __m512 s = _mm512_mul_ps(_mm512_load_ps(at), scale);
        zeros[0] = _mm512_fmadd_ps(s, _mm512_setzero_ps(), zeros[0]);
        const __m512i key = _mm512_set1_epi32(static_cast<int>(block_.first_key + t));
        const __mmask16 hidden = static_cast<__mmask16>(_mm512_cmpgt_epi32_mask(key, last) |
                                                        _mm512_testn_epi32_mask(words, _mm512_set1_epi32(1)));
        words = _mm512_srli_epi32(words, 1);
        const __m512 shown = _mm512_mask_blend_ps(hidden, s, none);
        m[0] = _mm512_max_ps(shown, m[0]);
        _mm512_store_ps(at, shown);
      }
    }
    _mm512_store_ps(maximum_ + group_, _mm512_max_ps(_mm512_max_ps(m[0], m[1]), _mm512_max_ps(m[2], m[3])));
    _mm512_store_ps(zeros_, _mm512_add_ps(_mm512_add_ps(zeros[0], zeros[1]), _mm512_add_ps(zeros[2], zeros[3])));
    key_ = end;
    if (key_ < block_.count) return;
    key_ = 0;
    if ((group_ += kLanes) == w) take_maxima();
  }

  MLA_AMX void take_maxima() {
    const __m512 zeros = _mm512_load_ps(zeros_);
    const bool odd = _mm512_cmp_ps_mask(zeros, zeros, _CMP_UNORD_Q) != 0;
    const bool looks = !block_.finite && seen_ < block_.count;
    skips_ = (odd || looks) && keep_out(*tile_, block_, scores_, odd ? 0 : seen_, odd, skip_);
    for (int64_t g = 0; g < tile_->width; g += kLanes) {
      const __m512 m = _mm512_load_ps(maximum_ + g);
      const __mmask16 empty = _mm512_cmp_ps_mask(m, _mm512_set1_ps(-kInfinity), _CMP_EQ_OQ);
      const __m512 from = _mm512_mask_blend_ps(empty, m, _mm512_setzero_ps());  // no difference of infinities
      const __m512 a =
          exp2_of(_mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(tile_->m + g), from), _mm512_set1_ps(kLog2e)));
      _mm512_store_ps(alpha_ + g, a);
      _mm512_store_ps(from_ + g, from);
      _mm512_storeu_ps(tile_->l + g, _mm512_mul_ps(_mm512_loadu_ps(tile_->l + g), a));
      _mm512_storeu_ps(tile_->m + g, m);
    }
    group_ = 0;
    phase_ = Phase::exponentials;
  }

  // A part of a square's pairs of keys: two keys' rows side by side, then pairs.
  MLA_AMX void exponentials() {
    const int64_t w = tile_->width;
    const __m512 from = _mm512_load_ps(from_ + group_), log2e = _mm512_set1_ps(kLog2e);
    const float* at = scores_ + (key_ + 2 * kPairs * part_) * w + group_;
    __m512 sum = _mm512_loadu_ps(tile_->l + group_);
#pragma GCC unroll 4
    for (int i = 0; i < kPairs; ++i, at += 2 * w) {
      const __m512 low = exp2_of(_mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(at), from), log2e)),
                   high = exp2_of(_mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(at + w), from), log2e));
      sum = _mm512_add_ps(_mm512_add_ps(sum, low), high);
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(high, low);
      _mm512_store_si512(
          pairs_ + (part_ * kPairs + i) * kLanes,
          _mm512_permutexvar_epi16(_mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                                    22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0),
                                   both));
    }
    _mm512_storeu_ps(tile_->l + group_, sum);
    ++part_;
  }

  // The square's words as rows.
  MLA_AMX void lay_out() {
    const int64_t w = tile_->width;
    uint32_t* to = rows_ + key_ / kTileInputs * w * kTilePairs + group_ * kTilePairs;
    __m512i pairs[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) pairs[i] = _mm512_load_si512(pairs_ + i * kLanes);
    transpose_square(pairs);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) _mm512_store_si512(to + i * kTilePairs, pairs[i]);
    part_ = 0;
    key_ += kTileInputs;
    if (key_ < block_.count) return;
    key_ = 0;
    if ((group_ += kLanes) == w) phase_ = Phase::done;
  }

  static constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const RowTile* tile_ = nullptr;
  KeyBlock block_;
  float* scores_ = nullptr;
  uint32_t* rows_ = nullptr;
  int64_t seen_ = 0, group_ = 0, key_ = 0, part_ = 0;  // keys that all rows see; what comes next
  Phase phase_ = Phase::done;
  bool skips_ = false;
  bool skip_[kAmxBlockKeys];
  alignas(64) float maximum_[kTileRows], from_[kTileRows], alpha_[kTileRows], zeros_[kLanes];
  alignas(64) uint32_t pairs_[kTilePairs * kLanes];
};

// Done between steps of products; null: nothing.
inline void do_a_piece(SoftmaxRows* beside) {
  if (beside) beside->step();
}

// scores[key][16 lanes] of 32 keys or of 64: two groups or `four`.
MLA_AMX void score_16(const uint32_t* q, const KeyGroup* k, bool four, int64_t steps, float* scores,
                      SoftmaxRows* beside) {
  const KeyGroup &k1 = k[1], &k2 = k[four ? 2 : 0], &k3 = k[four ? 3 : 0];
  zero_sums();
  for (int64_t s = 0; s < steps; ++s, q += kTilePairs * kSmallTile) {
    const int64_t d = s * kTileInputs;
    _tile_loadd(6, q, kRow);
    _tile_loadd(4, k->rows + d, k->row_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, k1.rows + d, k1.row_bytes);
    _tile_dpbf16ps(1, 5, 6);
    if (four) {
      _tile_loadd(7, k2.rows + d, k2.row_bytes);
      _tile_dpbf16ps(2, 7, 6);
      _tile_loadd(4, k3.rows + d, k3.row_bytes);
      _tile_dpbf16ps(3, 4, 6);
    }
    do_a_piece(beside);
  }
  constexpr int64_t kTo = kTileSide * kSmallTile;
  _tile_stored(0, scores, kRow);
  _tile_stored(1, scores + kTo, kRow);
  if (!four) return;
  _tile_stored(2, scores + 2 * kTo, kRow);
  _tile_stored(3, scores + 3 * kTo, kRow);
}

// scores[key][32 lanes] of 32 keys, two groups.
MLA_AMX void score_32(const uint32_t* q, const KeyGroup* k, int64_t steps, float* scores, SoftmaxRows* beside) {
  constexpr size_t kWide = kTileRows * sizeof(float);
  const KeyGroup &k0 = k[0], &k1 = k[1];
  zero_sums();
  for (int64_t s = 0; s < steps; ++s, q += kTilePairs * kTileRows) {
    const int64_t d = s * kTileInputs;
    _tile_loadd(6, q, kWide);
    _tile_loadd(4, k0.rows + d, k0.row_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, q + kLanes, kWide);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, k1.rows + d, k1.row_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    do_a_piece(beside);
  }
  float* second = scores + kTileSide * kTileRows;
  _tile_stored(0, scores, kWide);
  _tile_stored(1, scores + kLanes, kWide);
  _tile_stored(2, second, kWide);
  _tile_stored(3, second + kLanes, kWide);
}

// o[row][dim] += p . v over `steps` times 32 keys. Two squares of 16 dims or `four`, for 16 rows; `next` leads
// from 32 keys to the next. Fresh: o holds nothing yet.
MLA_AMX void value_16(const uint32_t* p, const uint32_t* v, int64_t next, int64_t steps, bool four, bool fresh,
                      float* o, int64_t o_stride, SoftmaxRows* beside) {
  const size_t out = static_cast<size_t>(o_stride) * sizeof(float);
  if (fresh) {
    zero_sums();
  } else {
    _tile_loadd(0, o, out);
    _tile_loadd(1, o + kLanes, out);
    if (four) {
      _tile_loadd(2, o + 2 * kLanes, out);
      _tile_loadd(3, o + 3 * kLanes, out);
    }
  }
  for (int64_t s = 0; s < steps; ++s, p += kTileSide * kTilePairs, v += next) {
    _tile_loadd(4, p, kRow);
    _tile_loadd(5, v, kRow);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, v + kValueSquare, kRow);
    _tile_dpbf16ps(1, 4, 6);
    if (four) {
      _tile_loadd(7, v + 2 * kValueSquare, kRow);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, v + 3 * kValueSquare, kRow);
      _tile_dpbf16ps(3, 4, 5);
    }
    do_a_piece(beside);
  }
  _tile_stored(0, o, out);
  _tile_stored(1, o + kLanes, out);
  if (!four) return;
  _tile_stored(2, o + 2 * kLanes, out);
  _tile_stored(3, o + 3 * kLanes, out);
}

// The same for 32 rows and two squares of dims.
MLA_AMX void value_32(const uint32_t* p, const uint32_t* v, int64_t next, int64_t steps, bool fresh, float* o,
                      int64_t o_stride, SoftmaxRows* beside) {
  const size_t out = static_cast<size_t>(o_stride) * sizeof(float);
  constexpr int64_t kSquare = kTileSide * kTilePairs;
  float* second = o + kTileSide * o_stride;
  if (fresh) {
    zero_sums();
  } else {
    _tile_loadd(0, o, out);
    _tile_loadd(1, o + kLanes, out);
    _tile_loadd(2, second, out);
    _tile_loadd(3, second + kLanes, out);
  }
  for (int64_t s = 0; s < steps; ++s, p += 2 * kSquare, v += next) {
    _tile_loadd(4, p, kRow);
    _tile_loadd(6, v, kRow);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, v + kValueSquare, kRow);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, p + kSquare, kRow);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    do_a_piece(beside);
  }
  _tile_stored(0, o, out);
  _tile_stored(1, o + kLanes, out);
  _tile_stored(2, second, out);
  _tile_stored(3, second + kLanes, out);
}

// `squares` of dims, an even number.
void values(const RowTile& tile, const uint32_t* p, const uint32_t* v, int64_t next, int64_t keys, int64_t squares,
            bool fresh, float* o, SoftmaxRows* beside) {
  const int64_t steps = keys / kTileInputs;
  const bool narrow = tile.width == kSmallTile;
  for (int64_t n = 0; n < squares; n += narrow ? 4 : 2, v += (narrow ? 4 : 2) * kValueSquare) {
    float* to = o + n * kLanes;
    if (narrow) value_16(p, v, next, steps, squares - n > 2, fresh, to, tile.o_stride, beside);
    else value_32(p, v, next, steps, fresh, to, tile.o_stride, beside);
  }
}

// The same without the keys in `skip`: 32 keys at a time, theirs from a copy in which they are zero.
void values_but(const bool* skip, const RowTile& tile, const uint32_t* p, const KeyBlock& b, bool fresh) {
  const uint32_t* v = static_cast<const uint32_t*>(b.v);
  const int64_t squares = value_squares(b.v_dim), next = squares * kValueSquare;
  for (int64_t t = 0; t < b.count; t += kTileInputs, p += tile.width * kTilePairs, v += next, fresh = false) {
    if (std::none_of(skip + t, skip + t + kTileInputs, [](bool out) { return out; })) {
      values(tile, p, v, next, kTileInputs, squares, fresh, tile.o, nullptr);
      continue;
    }
    for (int64_t n = 0; n < squares; n += 2) {
      alignas(64) uint32_t kept[2 * kValueSquare];
      std::copy_n(v + n * kValueSquare, 2 * kValueSquare, kept);
      for (int64_t i = 0; i < kTilePairs; ++i) {
        const uint32_t mask = (skip[t + 2 * i] ? 0 : 0xffffu) | (skip[t + 2 * i + 1] ? 0 : 0xffff0000u);
        for (uint32_t* square : {kept, kept + kValueSquare})
          for (int64_t c = 0; c < kLanes; ++c) square[i * kLanes + c] &= mask;
      }
      memory_is_read();
      values(tile, p, kept, 0, kTileInputs, 2, fresh, tile.o + n * kLanes, nullptr);
    }
  }
}

// A factor of 1 leaves a row as it is.
MLA_AMX void scale_outputs(const RowTile& tile, const float* alpha) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    if (alpha[r] == 1.0f) continue;
    float* o = tile.o + r * tile.o_stride;
    const __m512 factor = _mm512_set1_ps(alpha[r]);
    for (int64_t d = 0; d < tile.o_stride; d += kLanes)
      _mm512_store_ps(o + d, _mm512_mul_ps(_mm512_load_ps(o + d), factor));
  }
}

// Keys [first, end) of a block; registers are configured.
MLA_AMX void score(const RowTile& tile, const KeyGroup* groups, int64_t first, int64_t end, int64_t qk_dim,
                   float* scores, SoftmaxRows* beside) {
  const int64_t w = tile.width, steps = key_steps(qk_dim);
  const uint32_t* q = static_cast<const uint32_t*>(tile.q);
  for (int64_t t = first; t < end; t += w == kSmallTile ? 4 * kTileSide : 2 * kTileSide) {
    const KeyGroup* k = groups + t / kTileSide;
    if (w == kSmallTile) score_16(q, k, end - t > 2 * kTileSide, steps, scores + t * w, beside);
    else score_32(q, k, steps, scores + t * w, beside);
  }
}

// A tile's probabilities times the block's values, joined to its outputs.
MLA_AMX void join_values(RowTile& tile, const SoftmaxRows& found, SoftmaxRows* beside) {
  const KeyBlock& b = found.block();
  const int64_t squares = value_squares(b.v_dim);
  if (!tile.fresh) scale_outputs(tile, found.alpha());
  memory_is_read();
  if (found.skip()) values_but(found.skip(), tile, found.rows(), b, tile.fresh);
  else
    values(tile, found.rows(), static_cast<const uint32_t*>(b.v), squares * kValueSquare, b.count, squares, tile.fresh,
           tile.o, beside);
  memory_is_read();
  tile.fresh = false;
}

}  // namespace

MLA_AMX void score_keys_amx(const RowTile& tile, const KeyGroup* groups, int64_t first, int64_t end, int64_t qk_dim,
                            float* scores) {
  memory_is_read();
  _tile_loadconfig(&kWholeTiles);
  score(tile, groups, first, end, qk_dim, scores, nullptr);
  _tile_release();
  memory_is_read();
}

// While the tile unit multiplies for one tile, vectors do the softmax of another:
//
//   tile unit   scores 0 | scores 1          | scores 2, values 0 | scores 3, values 1 | ..
//   vectors              | softmax 0         | softmax 1          | softmax 2          | ..
MLA_AMX void attend_tiles_amx(std::span<const AmxTile> tiles, const KeyBlock& block, const KeyGroup* keys,
                              void* const (&probabilities)[2]) {
  SoftmaxRows softmax[2];
  const auto padded = [&](size_t i) { return padded_keys_amx(tiles[i].count); };  // what is past the end is hidden
  memory_is_read();
  _tile_loadconfig(&kWholeTiles);
  if (keys) score(*tiles[0].tile, keys, 0, padded(0), block.qk_dim, tiles[0].scores, nullptr);
  for (size_t i = 0; i <= tiles.size(); ++i) {
    SoftmaxRows* now = nullptr;
    memory_is_read();
    if (i < tiles.size()) {
      now = &softmax[i % 2];
      KeyBlock b = block;
      b.count = padded(i);
      now->begin(*tiles[i].tile, b, tiles[i].scores, static_cast<uint32_t*>(probabilities[i % 2]));
      if (keys && i + 1 < tiles.size())
        score(*tiles[i + 1].tile, keys, 0, padded(i + 1), block.qk_dim, tiles[i + 1].scores, now);
    }
    if (i > 0) join_values(*tiles[i - 1].tile, softmax[(i - 1) % 2], now);
    if (now) now->finish();
  }
  _tile_release();
}

namespace {

// Sixteen rows' words [d, d + 16) as columns.
MLA_AMX inline void store_queries(const RowTile& tile, int64_t g, __m512i (&words)[16], uint32_t* to) {
  transpose_square(words);
#pragma GCC unroll 16
  for (int64_t i = 0; i < kLanes; ++i) _mm512_store_si512(to + i * tile.width + g, words[i]);
}

}  // namespace

MLA_AMX void set_queries_amx(const RowTile& tile, const bf16* const* rows, int64_t qk_dim) {
  uint32_t* to = static_cast<uint32_t*>(tile.q);
  for (int64_t d = 0; d < qk_dim; d += kTileInputs, to += kTilePairs * tile.width) {
    const int64_t left = qk_dim - d;
    const __mmask32 kept = left >= kTileInputs ? 0xffffffffu : (1u << left) - 1;
    for (int64_t g = 0; g < tile.width; g += kLanes) {
      __m512i words[16];
      for (int64_t i = 0; i < kLanes; ++i)
        words[i] = g + i < tile.rows ? _mm512_maskz_loadu_epi16(kept, rows[g + i] + d) : _mm512_setzero_si512();
      store_queries(tile, g, words, to);
    }
  }
}

MLA_AMX void set_queries_amx(const RowTile& tile, const float* first, int64_t row_stride, int64_t qk_dim) {
  uint32_t* to = static_cast<uint32_t*>(tile.q);
  auto lanes = [](int64_t n) { return static_cast<__mmask16>(n >= kLanes ? 0xffff : n > 0 ? (1 << n) - 1 : 0); };
  constexpr int64_t kLine = 64 / sizeof(float);
  for (int64_t r = 0; r < tile.rows; ++r)
    for (int64_t d = 0; d < qk_dim; d += kLine) __builtin_prefetch(first + r * row_stride + d);
  for (int64_t d = 0; d < qk_dim; d += kTileInputs, to += kTilePairs * tile.width)
    for (int64_t g = 0; g < tile.width; g += kLanes) {
      __m512i words[16];
      for (int64_t i = 0; i < kLanes; ++i) {
        const float* x = first + (g + i) * row_stride + d;
        words[i] = g + i < tile.rows
                       ? (__m512i)_mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(lanes(qk_dim - d - kLanes), x + kLanes),
                                                      _mm512_maskz_loadu_ps(lanes(qk_dim - d), x))
                       : _mm512_setzero_si512();
      }
      store_queries(tile, g, words, to);
    }
}

namespace {

// Dims [d, d + 32) of a row, zeros past `dims` or of no row.
MLA_AMX inline __m512i dims_of(const bf16* row, int64_t d, int64_t dims) {
  if (!row) return _mm512_setzero_si512();
  const int64_t left = dims - d;
  return left >= kTileInputs ? _mm512_loadu_si512(row + d) : _mm512_maskz_loadu_epi16((1u << left) - 1, row + d);
}

// Square of values n and the next: the pairs of 32 dims in the order that unpacking leaves (finish_values_amx).
MLA_AMX inline void store_pairs(uint32_t* v, int64_t n, __m512i a, __m512i b) {
  _mm512_store_si512(v + n * kValueSquare, _mm512_unpacklo_epi16(a, b));
  _mm512_store_si512(v + (n + 1) * kValueSquare, _mm512_unpackhi_epi16(a, b));
}

inline uint32_t* pair_row(uint32_t* v, int64_t t, int64_t v_dim) {
  return v + t / kTileInputs * value_squares(v_dim) * kValueSquare + t % kTileInputs / 2 * kLanes;
}

}  // namespace

MLA_AMX void set_values_amx(uint32_t* v, int64_t t, const bf16* a, const bf16* b, int64_t v_dim) {
  uint32_t* to = pair_row(v, t, v_dim);
  for (int64_t d = 0; d < v_dim; d += kTileInputs)
    store_pairs(to, d / kLanes, dims_of(a, d, v_dim), dims_of(b, d, v_dim));
}

MLA_AMX void finish_values_amx(const float* o, int64_t v_dim, float factor, float* out) {
  const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0),
                second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  const __m512 times = _mm512_set1_ps(factor);
  for (int64_t d = 0; d < v_dim; d += kTileInputs) {
    const __m512 low = _mm512_load_ps(o + d), high = _mm512_load_ps(o + d + kLanes);
    const int64_t left = v_dim - d;
    auto lanes = [](int64_t n) { return static_cast<__mmask16>(n >= kLanes ? 0xffff : (1 << n) - 1); };
    _mm512_mask_storeu_ps(out + d, lanes(left), _mm512_mul_ps(_mm512_permutex2var_ps(low, first, high), times));
    if (left > kLanes)
      _mm512_mask_storeu_ps(out + d + kLanes, lanes(left - kLanes),
                            _mm512_mul_ps(_mm512_permutex2var_ps(low, second, high), times));
  }
}

}  // namespace mla::cpu

#else  // never called: has_amx_bf16() is false

namespace mla::cpu {
void score_keys_amx(const RowTile&, const KeyGroup*, int64_t, int64_t, int64_t, float*) {}
void attend_tiles_amx(std::span<const AmxTile>, const KeyBlock&, const KeyGroup*, void* const (&)[2]) {}
void set_queries_amx(const RowTile&, const bf16* const*, int64_t) {}
void set_queries_amx(const RowTile&, const float*, int64_t, int64_t) {}
void set_values_amx(uint32_t*, int64_t, const bf16*, const bf16*, int64_t) {}
void finish_values_amx(const float*, int64_t, float, float*) {}
}  // namespace mla::cpu

#endif
