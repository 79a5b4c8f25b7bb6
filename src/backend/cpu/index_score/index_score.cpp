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
#include "backend/cpu/core/tiles.hpp"
#include "backend/cpu/index_score/kernel.hpp"
#include "cache/index/codec.hpp"
#include "mla/error.hpp"

namespace mla::cpu {
namespace {

// Tokens that share a converted block, and positions over which a query's layout is spread.
constexpr int64_t kTokens = 8, kRange = 1024;

struct Scratch {
  float *q[kTokens], *weights[kTokens];
  float *k, *scales, *scores, *rows;
  Scratch(Cutter& cut, int64_t heads, int64_t dim) {
    const int64_t padded = padded_heads(heads), words = (dim + 1) / 2 * 2;
    for (int64_t t = 0; t < kTokens; ++t) {
      q[t] = cut.take<float>(padded * words);
      weights[t] = cut.take<float>(padded);
    }
    k = cut.take<float>(kIndexKeys * tile_stride(words, sizeof(float)));
    scales = cut.take<float>(kIndexKeys);
    scores = cut.take<float>(kIndexKeys);
    rows = cut.take<float>(4 * words);
  }
};

// Head h of token t as f32, or as bf16 with a zero behind an odd dim.
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
  if (dim % 2) row[dim] = {};
}

// [chunk][word][head]: four heads at a time become columns. Element is float, a word, or bf16, half of one.
template <class Element>
void lay_out_query(const ops::IndexScoreArgs& a, int64_t t, const Scratch& s, float* to, float* weights) {
  const int64_t heads = a.q.extent<IndexHead>(), padded = padded_heads(heads), dim = a.q.extent<IndexDim>();
  const int64_t words = sizeof(Element) == sizeof(float) ? dim : (dim + 1) / 2;
  uint32_t* rows = reinterpret_cast<uint32_t*>(s.rows);
  for (int64_t h = 0; h < padded; h += 4) {
    const int64_t chunk = h / kHeadChunk * kHeadChunk, width = std::min(kHeadChunk, padded - chunk);
    for (int64_t i = 0; i < 4; ++i) {
      uint32_t* row = rows + i * words;
      if (h + i < heads) query_row(a, t, h + i, reinterpret_cast<Element*>(row));
      else std::fill_n(row, words, 0u);
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

template <class Element>
void load_keys(const ops::IndexScoreArgs& a, int32_t request, int64_t first, int64_t count, const Scratch& s,
               int64_t stride) {
  const IndexCacheSpec& spec = a.cache.spec;
  for_runs(a, request, first, count, [&](const std::byte* page, int64_t offset, int64_t n, int64_t i) {
    Element* rows = reinterpret_cast<Element*>(s.k) + i * stride;
    if constexpr (std::is_same_v<Element, float>) {
      load_index_codes(spec, page, offset, n, rows, stride);
    } else {
      const std::byte* from = page + cache::index::row_at(spec, offset);
      if (spec.format == IndexCacheFormat::fp8) {
        widen_codes(reinterpret_cast<const fp8_e4m3*>(from), n, spec.dim, rows, stride);
      } else {
        const size_t bytes = static_cast<size_t>(spec.dim) * sizeof(bf16);
        for (int64_t t = 0; t < n; ++t) std::memcpy(rows + t * stride, from + static_cast<size_t>(t) * bytes, bytes);
      }
      if (spec.dim % 2)
        for (int64_t t = 0; t < n; ++t) rows[t * stride + spec.dim] = {};
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
template <class Element>
void run_task(const ops::IndexScoreArgs& a, const IndexItem& item, int64_t first_token, int64_t tokens, int64_t begin,
              int64_t end, std::byte* memory) {
  end = std::min<int64_t>(end, item.columns(first_token + tokens - 1));
  if (begin >= end) return;
  const int64_t heads = a.q.extent<IndexHead>(), dim = a.q.extent<IndexDim>();
  Cutter cut(memory);
  const Scratch s(cut, heads, dim);
  for (int64_t t = 0; t < tokens; ++t)
    lay_out_query<Element>(a, item.q_begin + first_token + t, s, s.q[t], s.weights[t]);
  IndexBlock block{.heads = padded_heads(heads), .dim = dim, .k = s.k, .scores = s.scores};
  block.k_stride = tile_stride((dim + 1) / 2 * 2, sizeof(Element));
  for (int64_t first = begin; first < end; first += kIndexKeys) {
    const int64_t count = std::min(kIndexKeys, end - first), ahead = item.kv_begin + first + kIndexKeys;
    load_keys<Element>(a, item.request, item.kv_begin + first, count, s, block.k_stride);
    for (int64_t t = 0; t < tokens; ++t) {
      block.count = std::min(count, item.columns(first_token + t) - first);
      if (block.count <= 0) continue;
      // The last token sees the most: every block has one to fetch for the next.
      look_ahead(a, item.request, ahead, t == tokens - 1 ? item.kv_begin + end : ahead, block);
      block.q = s.q[t];
      block.weights = s.weights[t];
      if constexpr (std::is_same_v<Element, bf16>) score_block_bf16(block);
      else score_block_f32(block);
      float* to = &a.scores(item.row + first_token + t, first);
      for (int64_t i = 0; i < block.count; ++i) to[i] = s.scores[i] * s.scales[i];
    }
  }
}

}  // namespace

size_t index_score_scratch(const backend::ScratchShape& s) {
  Cutter cut(nullptr);
  const Scratch scratch(cut, s.index_heads, s.index_dim);
  return cut.used();
}

void index_score(Stream& stream, const ops::IndexScoreArgs& a) {
  if (a.items.empty()) return;
  const size_t needed =
      index_score_scratch({.index_heads = a.q.extent<IndexHead>(), .index_dim = a.q.extent<IndexDim>()});
  if (a.scratch.per_worker < needed)
    throw ShapeError("index_score: scratch is " + std::to_string(a.scratch.per_worker) + " bytes a worker, " +
                     std::to_string(needed) + " are needed");
  const bool dot = a.q.dtype() != Dtype::f32 && a.cache.spec.format != IndexCacheFormat::f32 && native_bf16_dot();
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
    const auto run = dot ? run_task<bf16> : run_task<float>;
    const IndexItem w = window(*item);
    run(a, w, token, std::min<int64_t>(kTokens, w.q_count - token), begin,
        std::min<int64_t>(begin + kRange, int64_t{w.kv_end} - w.kv_begin), a.scratch.worker(worker));
  });
}

}  // namespace mla::cpu
