// Tasks are (item, head, group of query rows). A task walks the keys its rows can see in blocks: keys and values are
// copied once into dense tiles and meet all of the task's rows there (core/block_attention). Roofline and figures:
// README.md.
#include <algorithm>
#include <cstring>
#include <string>

#include "backend/cpu/backend.hpp"
#include "backend/cpu/core/convert.hpp"
#include "backend/cpu/core/merge_weights.hpp"
#include "backend/cpu/core/target.hpp"
#include "backend/cpu/core/tiles.hpp"
#include "backend/cpu/quantize/kernel.hpp"
#include "mla/error.hpp"

namespace mla::cpu {
namespace {

template <class Form>
struct Scratch {
  using Element = typename Form::Element;
  static constexpr int kTiles = Form::kExpandedTiles;
  RowTiles<Form, kTiles, std::is_same_v<Form, AmxForm> ? 2 : 1> tiles;
  Element* k;       // a block of keys
  uint32_t* v;      // its values, in f32 or pairs of bf16
  uint32_t* shown;  // of a masked item: each tile's bits of the block's keys
  // Of e4m3 operands: a tile's queries, two keys' values, and a block's values with the keys outermost.
  float* queries;
  Element* rows;
  fp8_e4m3* codes;
  Scratch(Cutter& cut, int64_t qk, int64_t width)
      : tiles(cut, qk, width),
        k(cut.take<Element>(Form::kKeys * key_stride(qk))),
        v(cut.take<uint32_t>(Form::block_values(width))),
        shown(cut.take<uint32_t>(kTiles * kShown)),
        queries(cut.take<float>(kTileRows * qk)),
        rows(cut.take<Element>(2 * width)),
        codes(cut.take<fp8_e4m3>(Form::kKeys * width)) {}
  static constexpr int64_t kShown = Form::kKeys / 32 * kTileRows;  // words of a tile
  static int64_t key_stride(int64_t qk) { return tile_stride(Form::key_elements(qk), sizeof(Element)); }
};

// Rows of operands as rows of elements; `scale` is that of codes.
void copy(const float* x, float* y, int64_t n, float) { std::memcpy(y, x, static_cast<size_t>(n) * sizeof(float)); }
void copy(const bf16* x, bf16* y, int64_t n, float) { std::memcpy(y, x, static_cast<size_t>(n) * sizeof(bf16)); }
void copy(const bf16* x, float* y, int64_t n, float) { convert(x, y, n); }
void copy(const fp8_e4m3* x, float* y, int64_t n, float scale) { convert(x, y, n, scale); }
void copy(const fp8_e4m3* x, bf16* y, int64_t n, float scale) { convert_fp8_bf16(x, y, n, scale); }

// Stored is the operands' element.
template <class Stored, class Form>
class Kernel {
  using Element = typename Form::Element;

 public:
  explicit Kernel(const ops::AttendExpandedArgs& a)
      : a_(a),
        q_(kCodes ? View<const float, Token, Head, QueryKey>{} : a.q.as<float>()),
        q_codes_(kCodes ? a.q.as<fp8_e4m3>() : View<const fp8_e4m3, Token, Head, QueryKey>{}),
        out_(a.out.as<float>()),
        k_nope_(a.k_nope.as<Stored>()),
        k_pe_(a.k_pe.as<Stored>()),
        v_(a.v.as<Stored>()) {}

  void run(int64_t number, int64_t head, int64_t first, int64_t rows, std::byte* memory) const {
    const ExpandedItem& item = a_.items[number];
    const ScaleRow scales(a_.scales, number, head);
    Cutter cut(memory);
    Scratch<Form> scratch(cut, qk_, width_);
    RowTile* tiles = scratch.tiles.tiles;
    const int64_t used = (rows + kTileRows - 1) / kTileRows;
    KeyGroup groups[AmxForm::kKeys / kSquareRows];
    for (int64_t g = 0; kAmx && g < AmxForm::kKeys / kSquareRows; ++g) {
      const int64_t stride = scratch.key_stride(qk_);
      groups[g] = {reinterpret_cast<bf16*>(scratch.k) + g * kSquareRows * stride,
                   static_cast<size_t>(stride) * sizeof(bf16)};
    }
    int64_t end = 0;
    for (int64_t i = 0; i < used; ++i) {
      begin(item, head, first + i * kTileRows, std::min(kTileRows, rows - i * kTileRows), scales, scratch, tiles[i]);
      end = std::max<int64_t>(end, tiles[i].last_last + 1);
    }
    for (int64_t key = 0; key < end; key += Form::kKeys) {
      KeyBlock block{.qk_dim = qk_,
                     .v_dim = width_,
                     .first_key = key,
                     .count = std::min(Form::kKeys, end - key),
                     .scale = a_.scale};
      load_block(item.k_begin, key, head, block.count, scales, scratch, block);
      // All of a masked item's blocks may hide keys: their values are looked at once, not by every tile.
      block.finite = item.masked && finite_values(block);
      AmxTile together[Form::kExpandedTiles];
      size_t count = 0;
      for (int64_t i = 0; i < used; ++i) {
        // Under a causal mask a tile sees no more than a part of its last block.
        block.count = std::min<int64_t>(Form::kKeys, tiles[i].last_last + 1 - key);
        if (block.count <= 0) continue;
        if (item.masked && !show(item, first + i * kTileRows, block, scratch.shown + i * scratch.kShown, tiles[i]))
          continue;
        if constexpr (kAmx) {
          together[count] = {&tiles[i], block.count,
                             scratch.tiles.scores + static_cast<int64_t>(count % 2) * Form::kScores};
          ++count;
        } else {
          Form::attend(tiles[i], block, scratch.tiles.scores);
        }
      }
      if (count > 0) attend_tiles_amx({together, count}, block, groups, scratch.tiles.probabilities);
    }
    const bool quantise = quantized_ && item.last;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t token = item.q_begin + first + r;
      const float* row = store_row(token, head, tiles[r / kTileRows], r % kTileRows, quantise, scratch.tiles.row);
      if (quantise) quantized_.write(token, nullptr, 1, head * width_, row, 0, width_);
    }
  }

 private:
  static constexpr bool kAmx = std::is_same_v<Form, AmxForm>, kCodes = std::is_same_v<Stored, fp8_e4m3>;

  // Scales of an item's rows and a head.
  class ScaleRow {
   public:
    ScaleRow(const ops::ExpandedScales& s, int64_t item, int64_t head)
        : s_(s), first_(s.rows.empty() ? ops::ScaleRows{} : s.rows[item]), head_(head) {}
    float q(int64_t row) const { return at(s_.q, first_.q, row); }
    float k(int64_t row) const { return at(s_.k, first_.k, row); }
    float v(int64_t row) const { return at(s_.v, first_.k, row); }

   private:
    float at(const View<const float, Group, Head>& x, int64_t first, int64_t row) const {
      if (!x) return 1.0f;
      return x(s_.rows.empty() ? 0 : first + row / ops::ExpandedScales::kRows, head_);
    }
    const ops::ExpandedScales& s_;
    ops::ScaleRows first_;
    int64_t head_;
  };

  void begin(const ExpandedItem& item, int64_t head, int64_t first, int64_t rows, const ScaleRow& scales,
             const Scratch<Form>& scratch, RowTile& tile) const {
    tile.rows = rows;
    tile.width = RowTile::width_for(rows, Form::kLeast);
    for (int64_t lane = 0; lane < rows; ++lane)
      tile.last[lane] = static_cast<int32_t>(std::clamp<int64_t>(first + lane + item.visible, -1, item.k_count - 1));
    const float* queries = kCodes ? scratch.queries : &q_(item.q_begin + first, head, 0);
    const int64_t stride = kCodes ? qk_ : q_.template stride<Token>();
    for (int64_t lane = 0; kCodes && lane < rows; ++lane)
      convert(&q_codes_(item.q_begin + first + lane, head, 0), scratch.queries + lane * qk_, qk_,
              scales.q(first + lane));
    if constexpr (kAmx) {
      set_queries_amx(tile, queries, stride, qk_);
    } else {
      if (rows < tile.width)
        std::memset(tile.q, 0, static_cast<size_t>(Form::query_words(qk_) * tile.width) * sizeof(float));
      for (int64_t lane = 0; lane < rows; ++lane) {
        const float* q = queries + lane * stride;
        if constexpr (Form::kPairs) set_query_bf16(tile, lane, q, qk_);
        else set_query_f32(tile, lane, q, qk_);
      }
    }
    begin_tile(tile, width_);
  }

  // The rows' bits of a block's first keys, from where they lie in the mask. False: no row sees any, and the block
  // would leave the tile as it is.
  bool show(const ExpandedItem& item, int64_t first, const KeyBlock& block, uint32_t* words, RowTile& tile) const {
    const int64_t column = item.mask_begin + block.first_key, w = tile.width, count = (block.count + 31) / 32,
                  after = a_.mask.extent<Word>() - column / 32, stride = a_.mask.stride<Token>();
    const uint32_t* row = &a_.mask(item.q_begin + first, column / 32);
    uint32_t any = 0;
    for (int64_t lane = 0; lane < tile.rows; ++lane, row += stride)
      for (int64_t n = 0; n < count; ++n) {
        const uint64_t next = n + 1 < after ? row[n + 1] : 0;
        any |= words[n * w + lane] = static_cast<uint32_t>((next << 32 | row[n]) >> column % 32);
      }
    for (int64_t n = 0; n < count; ++n) std::fill(words + n * w + tile.rows, words + (n + 1) * w, 0u);
    tile.shown = words;
    return any != 0;
  }

  // Keys far apart in memory become rows side by side: a head's rows lie a power of two apart and would share cache
  // sets.
  void load_block(int64_t first, int64_t key, int64_t head, int64_t count, const ScaleRow& scales,
                  const Scratch<Form>& s, KeyBlock& block) const {
    block.k = s.k;
    block.v = s.v;
    block.paired = Form::kPairs;
    const int64_t row = first + key;
    // Rows a head's stride apart are not foreseen by the hardware.
    constexpr int64_t kAhead = 12, kLine = 64 / sizeof(Stored);
    const bool turned = v_.template stride<Value>() != 1;  // keys innermost
    auto ask = [&](int64_t j) {
      for (int64_t d = 0; d < nope_; d += kLine) __builtin_prefetch(&k_nope_(row + j, head, 0) + d);
      for (int64_t d = 0; !turned && d < width_; d += kLine) __builtin_prefetch(&v_(row + j, head, 0) + d);
    };
    Element* k = s.k;
    block.k_stride = s.key_stride(qk_);
    for (int64_t j = 0; j < count; ++j, k += block.k_stride) {
      if (kAmx && j + kAhead < count) ask(j + kAhead);
      copy(&k_nope_(row + j, head, 0), k, nope_, scales.k(key + j));
      if (rope_ > 0) copy(&k_pe_(row + j, 0), k + nope_, rope_, scales.k(key + j));
      std::fill(k + qk_, k + Form::key_elements(qk_), Element{});
    }
    const int64_t padded = (count + Form::kStep - 1) / Form::kStep * Form::kStep;
    std::fill_n(k, (padded - count) * block.k_stride, Element{});
    if constexpr (kCodes) {
      if (turned)
        for (int64_t d = 0; d < width_; ++d)
          for (int64_t j = 0; j < count; ++j) s.codes[j * width_ + d] = v_(row + j, head, d);
    }
    // Key j's values as elements; the two keys of a pair have room for codes each.
    const auto values = [&](int64_t j) -> const Element* {
      if constexpr (kCodes) {
        Element* const to = s.rows + j % 2 * width_;
        copy(turned ? s.codes + j * width_ : &v_(row + j, head, 0), to, width_, scales.v(key + j));
        return to;
      } else if constexpr (std::is_same_v<Stored, Element>) {
        return &v_(row + j, head, 0);
      } else {
        return nullptr;
      }
    };
    if constexpr (kAmx) {
      block.squares = true;
      for (int64_t j = 0; j < padded; j += 2) {
        const Element* const a = j < count ? values(j) : nullptr;
        set_values_amx(s.v, j, a, j + 1 < count ? values(j + 1) : nullptr, width_);
      }
    } else if constexpr (Form::kPairs) {
      block.v_stride = tile_stride(width_, sizeof(float));
      uint32_t* v = s.v;
      for (int64_t j = 0; j < count; j += 2, v += block.v_stride) {
        const Element* const a = values(j);  // a missing last key has probability 0: any number will do
        interleave_bf16(a, j + 1 < count ? values(j + 1) : a, v, width_);
      }
    } else {
      block.v_stride = tile_stride(width_, sizeof(float));
      float* v = reinterpret_cast<float*>(s.v);
      for (int64_t j = 0; j < count; ++j)
        copy(kCodes && turned ? reinterpret_cast<const Stored*>(s.codes) + j * width_ : &v_(row + j, head, 0),
             v + j * block.v_stride, width_, scales.v(key + j));
    }
  }

  // Where the row's result lies: in out, or, if it is to go on from there, in `part` when that spares out a write.
  const float* store_row(int64_t token, int64_t head, const RowTile& tile, int64_t lane, bool goes_on,
                         float* part) const {
    float& lse = a_.lse(token, head);
    if (!a_.accumulate) {
      float* to = goes_on ? part : &out_(token, head, 0);
      lse = finish_row(tile, lane, width_, to);
      return to;
    }
    float* out = &out_(token, head, 0);
    const float part_lse = finish_row(tile, lane, width_, part);
    if (part_lse == kEmptyLse || nan_row(out, lse, width_)) return out;
    float* to = goes_on ? part : out;
    if (nan_row(part, part_lse, width_)) {
      lse = part_lse;
      if (to != part) std::copy_n(part, width_, to);
      return to;
    }
    const MergeWeights w = merge_weights(lse, part_lse);
    if (w.a == 0)
      for (int64_t d = 0; d < width_; ++d) to[d] = w.b * part[d];
    else set_weighted(to, w.a, out, w.b, part, width_);
    lse = w.lse;
    return to;
  }

  const ops::AttendExpandedArgs& a_;
  const QuantizedWriter quantized_{a_.quantized};
  const View<const float, Token, Head, QueryKey> q_;
  const View<const fp8_e4m3, Token, Head, QueryKey> q_codes_;
  const View<float, Token, Head, Value> out_;
  const View<const Stored, Key, Head, Nope> k_nope_;
  const View<const Stored, Key, Rope> k_pe_;
  const View<const Stored, Key, Head, Value> v_;
  const int64_t nope_ = k_nope_.template extent<Nope>(), rope_ = k_pe_.template extent<Rope>(), qk_ = nope_ + rope_;
  const int64_t width_ = v_.template extent<Value>();
};

template <class Stored, class Form>
void attend(Stream& stream, const ops::AttendExpandedArgs& a) {
  const int64_t heads = a.q.extent<Head>(), items = static_cast<int64_t>(a.items.size());
  auto groups = [](const ExpandedItem& i, int64_t rows) { return (i.q_count + rows - 1) / rows; };
  // Full groups use a block best; smaller ones where threads would go idle. A row's bits do not depend on its group.
  int64_t group = Form::kExpandedTiles * kTileRows;
  for (; group > kTileRows && stream.pool().threads() > 1; group /= 2) {
    int64_t tasks = 0;
    for (const ExpandedItem& i : a.items) tasks += groups(i, group) * heads;
    if (tasks >= 4 * stream.pool().threads()) break;
  }
  int64_t most = 0;
  for (const ExpandedItem& i : a.items) most = std::max(most, groups(i, group));
  const Kernel<Stored, Form> kernel(a);
  // A head's groups follow one another, so that all but the first find its keys in the last-level cache; the last
  // groups, which see the most keys under a causal mask, go first. Items with fewer groups than others leave some tasks
  // empty.
  stream.pool().run(most * heads * items, [&](int64_t task, int worker) {
    const int64_t number = task / most / heads;
    const ExpandedItem& item = a.items[number];
    const int64_t head = task / most % heads, first = (most - 1 - task % most) * group;
    if (first < item.q_count)
      kernel.run(number, head, first, std::min(group, item.q_count - first), a.scratch.worker(worker));
  });
}

}  // namespace

size_t attend_expanded_scratch(const backend::ScratchShape& s) {
  return largest_of_forms([&](auto form) {
    Cutter cut(nullptr);
    const Scratch<decltype(form)> scratch(cut, s.nope + s.rope, s.value);
    return cut.used();
  });
}

void attend_expanded(Stream& stream, const ops::AttendExpandedArgs& a) {
  const size_t needed = attend_expanded_scratch({.nope = a.q.extent<QueryKey>(), .value = a.v.extent<Value>()});
  if (a.scratch.per_worker < needed)
    throw ShapeError("attend_expanded: scratch is " + std::to_string(a.scratch.per_worker) + " bytes a worker, " +
                     std::to_string(needed) + " are needed");
  if (a.k_nope.dtype() == Dtype::f32) attend<float, F32Form>(stream, a);
  else if (a.k_nope.dtype() == Dtype::fp8_e4m3)
    with_form(true, [&](auto form) { attend<fp8_e4m3, decltype(form)>(stream, a); });
  else with_form(true, [&](auto form) { attend<bf16, decltype(form)>(stream, a); });
}

}  // namespace mla::cpu
