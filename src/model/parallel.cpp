#include "mla/parallel.hpp"

#include <cstring>
#include <string>

#include "core/even_ranges.hpp"
#include "mla/error.hpp"
#include "model/part.hpp"

namespace mla {
namespace {

void require_shape(const HostTensor& t, const char* role, int64_t out, int64_t in) {
  if (!t || t.shape != std::vector<int64_t>{out, in})
    throw ShapeError("part_of: " + std::string(role) + " is " + (t ? "of another shape" : "missing") +
                     ", the model's is [" + std::to_string(out) + ", " + std::to_string(in) + "]");
}

// The tensor, or, where a cut falls within a block of scales, its values.
HostTensor cuttable(const HostTensor& t, bool between_blocks) {
  return t.block_scales.empty() || between_blocks ? t : values_of(t);
}

int64_t blocks(int64_t n, int64_t block) { return (n + block - 1) / block; }

HostTensor rows_of(const HostTensor& whole, int64_t begin, int64_t count) {
  const int64_t in = whole.shape[1];
  const bool one_block = whole.block_rows >= whole.shape[0];
  HostTensor t = cuttable(whole, whole.block_rows > 0 && (one_block || begin % whole.block_rows == 0));
  t.shape[0] = count;
  if (t.quantised) {
    t.first_row += begin;
    return t;
  }
  t.data += static_cast<size_t>(begin * in) * size_of(t.dtype);
  if (t.block_scales.empty()) return t;
  const auto first = t.block_scales.begin() + begin / t.block_rows * blocks(in, t.block_cols);
  t.block_scales = {first, first + blocks(count, t.block_rows) * blocks(in, t.block_cols)};
  return t;
}

HostTensor columns_of(const HostTensor& whole, int64_t begin, int64_t count) {
  const int64_t out = whole.shape[0], in = whole.shape[1];
  if (whole.quantised) {
    HostTensor t = whole;
    t.shape[1] = count;
    t.first_col += begin;
    return t;
  }
  const bool one_block = whole.block_cols >= in;  // a scale for each row
  const HostTensor from = cuttable(whole, whole.block_cols > 0 && (one_block || begin % whole.block_cols == 0));
  const size_t element = size_of(from.dtype), row = static_cast<size_t>(count) * element;
  const auto memory = std::make_shared<Buffer>(static_cast<size_t>(out) * row);
  for (int64_t r = 0; r < out; ++r)
    std::memcpy(memory->data() + static_cast<size_t>(r) * row,
                from.data + static_cast<size_t>(r * in + begin) * element, row);
  HostTensor t = from;
  t.shape[1] = count;
  t.data = memory->data(), t.owner = memory;
  t.block_scales.clear();
  for (int64_t r = 0; !from.block_scales.empty() && r < blocks(out, t.block_rows); ++r) {
    const auto first = from.block_scales.begin() + r * blocks(in, t.block_cols) + begin / t.block_cols;
    t.block_scales.insert(t.block_scales.end(), first, first + blocks(count, t.block_cols));
  }
  return t;
}

}  // namespace

HostTensor values_of(const HostTensor& t) {
  const auto values = std::make_shared<const std::vector<float>>(t.to_f32());
  return {.name = t.name,
          .dtype = Dtype::f32,
          .shape = t.shape,
          .data = reinterpret_cast<const std::byte*>(values->data()),
          .owner = values};
}

void require_heads(const char* call, const ModelConfig& model, HeadRange heads) {
  if (heads.begin < 0 || heads.count < 1 || heads.begin > model.heads || heads.count > model.heads - heads.begin)
    throw InputError(std::string(call) + ": heads " + std::to_string(heads.begin) + " and the " +
                     std::to_string(heads.count) + " from there on, " + model.name + " has " +
                     std::to_string(model.heads));
}

StoredScales part_of(const ModelConfig& model, StoredScales scales, HeadRange heads) {
  for (std::vector<float>* x : {&scales.q, &scales.k, &scales.v})
    if (std::ssize(*x) == model.heads && model.heads > 1)
      *x = {x->begin() + heads.begin, x->begin() + heads.begin + heads.count};
  return scales;
}

namespace {

// Range {first, number} of `n` things.
template <class Range>
Range even_share(const char* call, int64_t n, int rank, int ranks) {
  if (rank < 0 || rank >= ranks)
    throw InputError(std::string(call) + ": rank is " + std::to_string(rank) + ", allowed 0 to " +
                     std::to_string(ranks - 1));
  const int64_t begin = even_begin(n, rank, ranks);
  return {begin, even_begin(n, rank + 1, ranks) - begin};
}

}  // namespace

HeadRange head_share(int64_t heads, int rank, int ranks) {
  if (ranks < 1 || ranks > heads)
    throw InputError("head_share: ranks is " + std::to_string(ranks) + ", allowed 1 to " + std::to_string(heads) +
                     ", the number of heads");
  return even_share<HeadRange>("head_share", heads, rank, ranks);
}

RowRange row_share(int64_t rows, int rank, int ranks) {
  if (rows < 0 || ranks < 1)
    throw InputError("row_share: rows is " + std::to_string(rows) + " and ranks is " + std::to_string(ranks) +
                     ", at least 0 and 1");
  return even_share<RowRange>("row_share", rows, rank, ranks);
}

ModelConfig part_of(const ModelConfig& model, HeadRange heads) {
  require_heads("part_of", model, heads);
  ModelConfig part = model;
  part.heads = heads.count;
  return part;
}

LayerTensors part_of(const ModelConfig& m, const LayerTensors& layer, HeadRange heads,
                     std::span<const HeadRange> group) {
  require_heads("part_of", m, heads);
  for (const HeadRange& member : group) require_heads("part_of", m, member);
  const int64_t up = m.nope + m.value;
  require_shape(layer.query, "query", m.heads * m.query_key(), m.query_latent > 0 ? m.query_latent : m.hidden);
  require_shape(layer.kv_up, "kv_up", m.heads * up, m.latent);
  require_shape(layer.output, "output", m.hidden, m.heads * m.value);
  LayerTensors part = layer;
  part.query = rows_of(layer.query, heads.begin * m.query_key(), heads.count * m.query_key());
  part.kv_up = rows_of(layer.kv_up, heads.begin * up, heads.count * up);
  part.output = columns_of(layer.output, heads.begin * m.value, heads.count * m.value);
  part.group_kv_up.clear();
  for (const HeadRange& member : group)
    part.group_kv_up.push_back(rows_of(layer.kv_up, member.begin * up, member.count * up));
  part.scales = part_of(m, layer.scales, heads);
  return part;
}

}  // namespace mla
