// Tasks are (item, group of tokens, range of positions). A task lays out its tokens' queries once, then walks its range
// in blocks: a block's keys are converted once and meet each token in turn (kernel.hpp). Roofline and figures:
// README.md.
#include <algorithm>
#include <cstring>
#include <string>

#include "backend/cpu/backend.hpp"
#include "backend/cpu/core/block_attention.hpp"
#include "backend/cpu/core/convert.hpp"
#include "backend/cpu/core/index_rows.hpp"
#include "backend/cpu/core/target.hpp"
#include "backend/cpu/core/tile_registers.hpp"
#include "backend/cpu/core/tiles.hpp"
#include "backend/cpu/index_score/kernel.hpp"
#include "cache/index/codec.hpp"
#include "mla/error.hpp"

namespace mla::cpu {
namespace {

// Tokens that share a converted block, and positions over which a query's layout is spread.
constexpr int64_t kTokens = 8, kRange = 1024;

// How a block's keys meet a token's queries. words: 32-bit words of a query's and a key's row, over a cache of codes or
// of plain numbers.
struct F32 {
  using Element = float;
  static int64_t words(int64_t dim, bool) { return dim; }
  static void score(const IndexBlock& b, float*) { score_block_f32(b); }
};
struct Dot {
  using Element = bf16;
  static int64_t words(int64_t dim, bool) { return (dim + 1) / 2; }
  static constexpr auto widen = widen_codes;
  static void score(const IndexBlock& b, float*) { score_block_bf16(b); }
};
struct Amx {
  using Element = bf16;
  static int64_t words(int64_t dim, bool codes) {
    const int64_t step = codes ? kCodeBlock : kTileInputs;
    return (dim + step - 1) / step * step / 2;
  }
  static constexpr auto widen = widen_codes_amx;
  static constexpr auto score = score_block_amx;
};

bool has_codes(const ops::IndexScoreArgs& a) { return a.cache.spec.format == IndexCacheFormat::fp8; }

template <class Form>
struct Scratch {
  float *q[kTokens], *weights[kTokens];
  float *k, *scales, *scores, *rows, *products;
  int64_t stride;  // of keys, in elements
  Scratch(Cutter& cut, int64_t heads, int64_t dim, bool codes) {
    constexpr int64_t kSize = sizeof(typename Form::Element);
    const int64_t padded = padded_heads(heads), words = Form::words(dim, codes);
    stride = tile_stride(words * static_cast<int64_t>(sizeof(float)) / kSize, kSize);
    for (int64_t t = 0; t < kTokens; ++t) {
      q[t] = cut.take<float>(padded * words);
      weights[t] = cut.take<float>(padded);
    }
    k = cut.take<float>(kIndexKeys * stride * kSize / static_cast<int64_t>(sizeof(float)));
    scales = cut.take<float>(kIndexKeys);
    scores = cut.take<float>(kIndexKeys);
    rows = cut.take<float>(4 * words);
    products = cut.take<float>(std::is_same_v<Form, Amx> ? 2 * kTileSide * padded : 0);
  }
};

// Head h of token t, converted.
void query_row(const ops::IndexScoreArgs& a, int64_t t, int64_t h, float* row) {
  const int64_t dim = a.q.extent<IndexDim>();
  const void* q = a.q.at(t, h, 0);
  switch (a.q.dtype()) {
    case Dtype::bf16: convert(static_cast<const bf16*>(q), row, dim); break;
    case Dtype::fp8_e4m3: convert(static_cast<const fp8_e4m3*>(q), row, dim, 1.0f); break;
    default: std::memcpy(row, q, static_cast<size_t>(dim) * sizeof(float));
  }
}
void query_row(const ops::IndexScoreArgs& a, int64_t t, int64_t h, bf16* row) {
  const int64_t dim = a.q.extent<IndexDim>();
  const void* q = a.q.at(t, h, 0);
  if (a.q.dtype() == Dtype::fp8_e4m3) convert_fp8_bf16(static_cast<const fp8_e4m3*>(q), row, dim, 1.0f);
  else std::memcpy(row, q, static_cast<size_t>(dim) * sizeof(bf16));
}

// [chunk][word][head]: four heads at a time become columns. A word is a float, or a pair of bf16.
template <class Form>
void lay_out_query(const ops::IndexScoreArgs& a, int64_t t, const Scratch<Form>& s, float* to, float* weights) {
  const int64_t heads = a.q.extent<IndexHead>(), padded = padded_heads(heads);
  const int64_t words = Form::words(a.q.extent<IndexDim>(), has_codes(a));
  uint32_t* rows = reinterpret_cast<uint32_t*>(s.rows);
  for (int64_t h = 0; h < padded; h += 4) {
    const int64_t chunk = h / kHeadChunk * kHeadChunk, width = std::min(kHeadChunk, padded - chunk);
    std::fill_n(rows, 4 * words, 0u);
    for (int64_t i = 0; i < 4 && h + i < heads; ++i) {
      uint32_t* row = rows + i * words;
      query_row(a, t, h + i, reinterpret_cast<typename Form::Element*>(row));
      if constexpr (std::is_same_v<Form, Amx>) {
        if (has_codes(a)) order_as_codes(reinterpret_cast<bf16*>(row), 2 * words);
      }
    }
    transpose(rows, words, 4, words, reinterpret_cast<uint32_t*>(to) + chunk * words + (h - chunk), width);
  }
  for (int64_t h = 0; h < padded; ++h) weights[h] = h < heads ? a.weights(t, h) * a.scale : 0.0f;
}

// f(page, offset, n, i) for each run of the positions [first, first + count) within a page: n tokens from position
// first + i on.
template <class F>
void for_runs(const ops::IndexScoreArgs& a, int32_t request, int64_t first, int64_t count, F&& f) {
  const int64_t page_size = a.cache.spec.page_size;
  for (int64_t i = 0, n; i < count; i += n) {
    const int64_t offset = (first + i) % page_size;
    n = std::min(count - i, page_size - offset);
    f(static_cast<const std::byte*>(a.cache.page(a.block_table(request, (first + i) / page_size))), offset, n, i);
  }
}

template <class Form>
void load_keys(const ops::IndexScoreArgs& a, int32_t request, int64_t first, int64_t count, const Scratch<Form>& s) {
  using Element = typename Form::Element;
  const IndexCacheSpec& spec = a.cache.spec;
  for_runs(a, request, first, count, [&](const std::byte* page, int64_t offset, int64_t n, int64_t i) {
    Element* rows = reinterpret_cast<Element*>(s.k) + i * s.stride;
    if constexpr (std::is_same_v<Element, float>) {
      load_index_codes(spec, page, offset, n, rows, s.stride);
    } else {
      const std::byte* from = page + cache::index::row_at(spec, offset);
      const int64_t end = 2 * Form::words(spec.dim, has_codes(a));
      if (spec.format == IndexCacheFormat::fp8) {
        Form::widen(reinterpret_cast<const fp8_e4m3*>(from), n, spec.dim, rows, s.stride);
      } else {
        const size_t bytes = static_cast<size_t>(spec.dim) * sizeof(bf16);
        for (int64_t t = 0; t < n; ++t) std::memcpy(rows + t * s.stride, from + static_cast<size_t>(t) * bytes, bytes);
      }
      if (spec.dim < end && !(std::is_same_v<Form, Amx> && has_codes(a)))
        for (int64_t t = 0; t < n; ++t) std::fill(rows + t * s.stride + spec.dim, rows + t * s.stride + end, bf16{});
    }
    for (int64_t t = 0; t < n; ++t) s.scales[i + t] = index_scale(spec, page, offset + t);
  });
}

// The bytes of the positions from `first` on, for a block to fetch ahead; its own keys when there are none. A stretch
// that crosses the end of a page is fetched up to there.
void look_ahead(const ops::IndexScoreArgs& a, int32_t request, int64_t first, int64_t end, IndexBlock& block) {
  const IndexCacheSpec& spec = a.cache.spec;
  block.ahead_row = first < end ? cache::index::row_at(spec, 1) : 0;
  for (const std::byte*& at : block.ahead) {
    at = static_cast<const std::byte*>(block.k);
    if (first >= end) continue;
    at = a.cache.page(a.block_table(request, first / spec.page_size)) +
         cache::index::row_at(spec, first % spec.page_size);
    first += kAheadKeys;
  }
}

// Tokens [first_token, first_token + tokens) of an item over columns [begin, end) of its positions.
template <class Form>
void run_task(const ops::IndexScoreArgs& a, const IndexItem& item, int64_t first_token, int64_t tokens, int64_t begin,
              int64_t end, std::byte* memory) {
  end = std::min<int64_t>(end, item.columns(first_token + tokens - 1));
  if (begin >= end) return;
  const int64_t heads = a.q.extent<IndexHead>(), dim = a.q.extent<IndexDim>();
  Cutter cut(memory);
  const Scratch<Form> s(cut, heads, dim, has_codes(a));
  for (int64_t t = 0; t < tokens; ++t) lay_out_query(a, item.q_begin + first_token + t, s, s.q[t], s.weights[t]);
  IndexBlock block{
      .heads = padded_heads(heads), .real_heads = heads, .k = s.k, .k_stride = s.stride, .scores = s.scores};
  block.dim = std::is_same_v<Form, Amx> ? 2 * Form::words(dim, has_codes(a)) : dim;
  for (int64_t first = begin; first < end; first += kIndexKeys) {
    const int64_t count = std::min(kIndexKeys, end - first), ahead = item.kv_begin + first + kIndexKeys;
    load_keys(a, item.request, item.kv_begin + first, count, s);
    for (int64_t t = 0; t < tokens; ++t) {
      block.count = std::min(count, item.columns(first_token + t) - first);
      if (block.count <= 0) continue;
      // The last token sees the most: every block has one to fetch for the next.
      look_ahead(a, item.request, ahead, t == tokens - 1 ? item.kv_begin + end : ahead, block);
      block.q = s.q[t];
      block.weights = s.weights[t];
      Form::score(block, s.products);
      float* to = &a.scores(item.row + first_token + t, first);
      for (int64_t i = 0; i < block.count; ++i) to[i] = s.scores[i] * s.scales[i];
    }
  }
}

template <class Form>
size_t scratch_of(int64_t heads, int64_t dim) {
  Cutter codes(nullptr), plain(nullptr);
  (void)Scratch<Form>(codes, heads, dim, true);
  (void)Scratch<Form>(plain, heads, dim, false);
  return std::max(codes.used(), plain.used());
}

// A bf16 operand may be widened to f32 anywhere.
decltype(&run_task<F32>) task_of(const ops::IndexScoreArgs& a) {
  if (a.q.dtype() == Dtype::f32 || a.cache.spec.format == IndexCacheFormat::f32) return run_task<F32>;
  switch (bf16_products()) {
    case Bf16Products::amx: return serves_index_amx() ? run_task<Amx> : run_task<F32>;
    case Bf16Products::dot: return run_task<Dot>;
    default: return run_task<F32>;
  }
}

}  // namespace

size_t index_score_scratch(const backend::ScratchShape& s) {
  const int64_t heads = s.index_heads, dim = s.index_dim;
  return std::max({scratch_of<F32>(heads, dim), scratch_of<Dot>(heads, dim), scratch_of<Amx>(heads, dim)});
}

void index_score(Stream& stream, const ops::IndexScoreArgs& a) {
  if (a.items.empty()) return;
  const size_t needed =
      index_score_scratch({.index_heads = a.q.extent<IndexHead>(), .index_dim = a.q.extent<IndexDim>()});
  if (a.scratch.per_worker < needed)
    throw ShapeError("index_score: scratch is " + std::to_string(a.scratch.per_worker) + " bytes a worker, " +
                     std::to_string(needed) + " are needed");
  const auto run = task_of(a);
  auto window = [&](const IndexItem& i) { return clipped(i, a.first, a.scores.extent<Key>()); };
  auto groups = [](const IndexItem& i) { return (i.q_count + kTokens - 1) / kTokens; };
  auto ranges = [&](const IndexItem& i) {
    const IndexItem w = window(i);
    return (int64_t{w.kv_end} - w.kv_begin + kRange - 1) / kRange;
  };
  int64_t tasks = 0;
  for (const IndexItem& i : a.items) tasks += groups(i) * ranges(i);
  stream.pool().run(tasks, [&](int64_t task, int worker) {
    const IndexItem* item = a.items.data();
    for (int64_t n; task >= (n = groups(*item) * ranges(*item)); ++item) task -= n;
    const int64_t token = task / ranges(*item) * kTokens, begin = task % ranges(*item) * kRange;
    const IndexItem w = window(*item);
    run(a, w, token, std::min<int64_t>(kTokens, w.q_count - token), begin,
        std::min<int64_t>(begin + kRange, int64_t{w.kv_end} - w.kv_begin), a.scratch.worker(worker));
  });
}

}  // namespace mla::cpu
