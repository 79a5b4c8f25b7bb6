#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <string>

#include "backend/cuda/core/check.hpp"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/core/tensor_map.hpp"
#include "backend/cuda/sm90/attention/attention.hpp"
#include "backend/cuda/sm90/attention/kernels.hpp"
#include "backend/cuda/sm90/attention/schedule.cuh"
#include "mla/error.hpp"

namespace mla::cuda {
namespace {

constexpr int invariant_blocks = kInvariantKeys / 64;

int64_t up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

bool is_fp8(CacheFormat f) {
  return f == CacheFormat::fp8 || f == CacheFormat::fp8_ds_mla || f == CacheFormat::fp8_ds_v4;
}
/// Columns of a query row.
int q_width(const AttendLatent& a) { return latent::width + (a.format == CacheFormat::fp8_ds_v4 ? 0 : a.rope); }

int64_t dense_page_stride(const AttendLatent& a) {
  return int64_t{a.page_size} * (a.format == CacheFormat::fp8          ? latent::entry
                                 : a.format == CacheFormat::fp8_ds_mla ? 656
                                                                       : 2 * q_width(a));
}

/// Of what rows of a cache of 16 bits are numbered by: rows, where pages lie so apart.
int number_bytes(const AttendLatent& a) {
  const int row = 2 * q_width(a);
  return a.page_units || (a.page_stride && a.page_stride % row != 0) ? 16 : row;
}

/// Are partials f16? The wide kernels'.
bool half_partials(const AttendLatentChoice& c, CacheFormat format) {
  return c.tile_rows >= 64 && (!is_fp8(format) || c.converts || c.codes);
}

/// Pieces that may have partials at a time.
int64_t partial_slots(const AttendLatentLimits& l, const AttendLatentChoice& c) {
  if (!c.split_blocks) return 2 * static_cast<int64_t>(c.workers);
  const int64_t per_request = up(static_cast<int64_t>(l.query_tokens) * l.heads, c.tile_rows) / c.tile_rows;
  const int64_t tiles =
      std::min(per_request * l.requests, static_cast<int64_t>(l.tokens) * l.heads / c.tile_rows + l.requests);
  const int64_t piece = static_cast<int64_t>(c.split_blocks) * latent::block_tokens;
  const int64_t most = tiles * (up(l.seq_len, piece) / piece);
  return l.positions ? std::min(most, per_request * l.positions / piece + tiles) : most;
}

std::string shape_of(const AttendLatent& a) {
  return "tokens " + std::to_string(a.limits.tokens) + ", requests " + std::to_string(a.limits.requests) + ", heads " +
         std::to_string(a.limits.heads) + ", pages " + std::to_string(a.pages) + " of " + std::to_string(a.page_size);
}

void require(bool holds, const std::string& text) {
  if (!holds) throw ShapeError("attend_latent: " + text);
}

bool aligned(const void* p, uintptr_t to) { return p && reinterpret_cast<uintptr_t>(p) % to == 0; }

// Who attends what, and where page numbers are.
void check_items(const AttendLatent& a, const AttendLatentChoice& c) {
  const AttendLatentLimits& l = a.limits;
  require(l.heads >= 1 && l.heads <= 128, "heads is " + std::to_string(l.heads) + ", allowed 1 to 128");
  require(l.tokens >= 0 && l.requests >= 0 && l.query_tokens >= 0 && l.seq_len >= 0,
          "limits are negative: tokens " + std::to_string(l.tokens) + ", requests " + std::to_string(l.requests) +
              ", query tokens " + std::to_string(l.query_tokens) + ", seq_len " + std::to_string(l.seq_len));
  require(static_cast<int64_t>(l.tokens) * l.heads < int64_t{1} << 31,
          "tokens " + std::to_string(l.tokens) + " x heads " + std::to_string(l.heads) + " is not below 2^31");
  require(a.page_size >= 1, "page size is " + std::to_string(a.page_size) + ", at least 1 is needed");
  const int64_t needed = (static_cast<int64_t>(l.seq_len) + a.page_size - 1) / a.page_size;
  require(a.lists || a.table_stride >= needed, "block_table Page is " + std::to_string(a.table_stride) + ", seq_len " +
                                                   std::to_string(l.seq_len) + " needs " + std::to_string(needed));
  // Without requests a table has no address, and nobody to read it.
  require(a.lists || (aligned(a.lengths ? static_cast<const void*>(a.lengths) : a.items, 4) &&
                      (l.seq_len == 0 || aligned(a.block_table, 4))),
          "items or lengths, and block_table are needed");
  require(c.box_rows == 0 || a.page_size % c.box_rows == 0, "the choice was made for pages of a multiple of " +
                                                                std::to_string(c.box_rows) + ", page size is " +
                                                                std::to_string(a.page_size));
  require(c.workers >= 1 && c.workers <= latent::most_pieces,
          "workers is " + std::to_string(c.workers) + ", allowed 1 to " + std::to_string(latent::most_pieces));
  const size_t schedule = attend_latent_schedule_bytes(c);
  require(!a.schedule || aligned(a.schedule, 16), "schedule must be 16-byte aligned");
  require(!a.schedule || a.schedule_bytes >= schedule,
          "schedule is " + std::to_string(a.schedule_bytes) + " bytes, " + std::to_string(schedule) + " are needed");
}

void check_args(const AttendLatent& a, const AttendLatentChoice& c) {
  check_items(a, c);
  const AttendLatentLimits& l = a.limits;
  if (a.lists)
    require((a.format == CacheFormat::fp8_ds_mla || a.format == CacheFormat::fp8_ds_v4) && a.lists->item_count <= 1 &&
                l.query_tokens == 1,
            "lists are read by the kernels of fp8_ds_mla and fp8_ds_v4, one item of single rows");
  else if (a.format == CacheFormat::fp8_ds_v4)
    throw UnsupportedError(
        "attend_latent: a cache of bf16, f16, fp8 or fp8_ds_mla is needed on sm90, fp8_ds_v4 is read by lists alone");
  require(a.lists || (a.pages >= 1 && a.pages * a.page_size < int64_t{1} << 31),
          "cache has " + std::to_string(a.pages) + " pages of " + std::to_string(a.page_size) +
              ", 1 to 2^31 - 1 slots are allowed");
  require(a.scale > 0 && std::isfinite(a.scale),
          "scale is " + std::to_string(a.scale) + ", a positive number is needed");
  const bool fp8 = is_fp8(a.format);
  if (!fp8 && a.format != CacheFormat::bf16 && a.format != CacheFormat::f16)
    throw UnsupportedError("attend_latent: a cache of bf16, f16, fp8 or fp8_ds_mla is needed on sm90");
  require(a.rope == 64 || (a.rope == 0 && !fp8),
          "rope is " + std::to_string(a.rope) + ", 64 is needed, or none over a cache of bf16 or f16");
  require(!a.page_units || (a.page_size == 1 && a.page_stride == 0 && c.box_rows <= 1),
          "pages in units of 16 bytes hold one row, page size is " + std::to_string(a.page_size) + ", stride " +
              std::to_string(a.page_stride));
  const int64_t dense = dense_page_stride(a);
  require(a.page_stride == 0 || (a.page_stride >= dense && a.page_stride % 16 == 0),
          "page stride is " + std::to_string(a.page_stride) + " bytes, a multiple of 16 from " + std::to_string(dense) +
              " on is needed");
  if (!fp8 && a.page_stride) {
    const int row = 2 * q_width(a);
    require(c.box_rows == 0 || a.page_stride % row == 0, "page stride is " + std::to_string(a.page_stride) +
                                                             " bytes, copies of " + std::to_string(c.box_rows) +
                                                             " rows need a multiple of " + std::to_string(row));
    const int64_t units = a.pages * (a.page_stride / number_bytes(a));
    require(units < int64_t{1} << 31, "pages take " + std::to_string(units) + " units of " +
                                          std::to_string(number_bytes(a)) + " bytes, 2^31 - 1 are allowed");
  }
  require(a.format != CacheFormat::fp8 || (a.k_scale > 0 && std::isfinite(a.k_scale)),
          "k_scale is " + std::to_string(a.k_scale) + ", a positive number is needed");
  const int most = a.format == CacheFormat::fp8 ? 64 : 16;  // rows of a tile, where they are not converted
  require(c.codes == (a.q_dtype == Dtype::fp8_e4m3) && (!c.codes || (c.box_rows >= 1 && c.tile_rows >= 64)),
          "the choice was made for other queries than " + std::string(to_string(a.q_dtype)));
  require(!c.codes || c.box_rows % 2 == 0,
          "q of fp8_e4m3 needs pages of an even number of rows, page size is " + std::to_string(a.page_size));
  require(!fp8 || c.codes ||
              (c.box_rows >= 1 && c.box_rows <= 16 && (c.converts ? c.tile_rows >= 64 : c.tile_rows <= most)),
          "the choice was made for another cache format: tile of " + std::to_string(c.tile_rows) + " rows, copies of " +
              std::to_string(c.box_rows));
  if (a.max_logits && !attend_latent_gives_max_logits(c, a.format))
    throw UnsupportedError("attend_latent: largest logits of an fp8 cache are not made by tiles of few rows on sm90");
  const bool half = a.q_dtype == Dtype::f16 && a.format == CacheFormat::f16;
  if (a.q_dtype != Dtype::bf16 && !half && !(c.codes && a.format == CacheFormat::fp8))
    throw UnsupportedError(
        "attend_latent: q of bf16, or over a cache of f16 of f16, over one of fp8 of fp8_e4m3, is needed on sm90");
  if (a.out_dtype != Dtype::bf16 && a.out_dtype != Dtype::f32 && !(half && a.out_dtype == Dtype::f16))
    throw UnsupportedError("attend_latent: out of bf16 or f32, or of f16 queries of f16, is needed on sm90");
  require(aligned(a.q, 16) && aligned(a.cache, 16) && aligned(a.out, 16), "q, cache and out must be 16-byte aligned");
  const size_t count = attend_latent_counters(l, c), bytes = attend_latent_partials(l, c, a.format);
  require(aligned(a.counters, 4) && a.counter_count >= count, "counters are " +
                                                                  std::to_string(a.counters ? a.counter_count : 0) +
                                                                  ", " + std::to_string(count) + " are needed");
  require(aligned(a.partials, 256), "partials must be 256-byte aligned");
  if ((a.given_q_scale || a.given_k_scale) && a.format != CacheFormat::fp8)
    throw UnsupportedError("attend_latent: scales on the device are of a cache of fp8 on sm90");
  require(a.partials_bytes >= bytes,
          "partials are " + std::to_string(a.partials_bytes) + " bytes, " + std::to_string(bytes) + " are needed");
}

latent::Params params_of(const AttendLatent& a, const AttendLatentChoice& c) {
  const AttendLatentLimits& l = a.limits;
  latent::Params p{};
  p.starts = static_cast<const latent::Start*>(a.schedule);
  p.items = a.items;
  p.lengths = a.lengths;
  p.by_lengths = a.lengths != nullptr;
  p.length_stride = a.length_stride;
  p.query_tokens = l.query_tokens;
  p.most_positions = l.seq_len;
  p.causal = a.causal;
  p.block_table = a.block_table;
  p.table_stride = a.table_stride;
  p.cache = a.cache;
  p.shared_keys = a.shared_keys;
  p.q = a.q;
  p.q_f16 = a.q_dtype == Dtype::f16;
  p.page_stride = a.page_units ? 16 : a.page_stride ? a.page_stride : dense_page_stride(a);
  p.row_bytes = static_cast<uint16_t>(number_bytes(a));
  p.row_step = static_cast<uint16_t>(!c.codes && p.row_bytes == 16 ? q_width(a) / 8 : 1);
  p.no_rope = a.rope == 0;
  // Boxes of codes have pages as a dimension: rows are numbered as if pages followed one another.
  p.page_step = c.codes ? a.page_size : static_cast<int>(p.page_stride / p.row_bytes);
  p.requests = l.requests;
  p.heads = l.heads;
  p.page_size = a.page_size;
  p.by_heads = Divisor(l.heads);
  p.by_page = Divisor(a.page_size);
  p.by_workers = Divisor(c.workers);
  p.box_shift = c.box_rows ? std::countr_zero(static_cast<unsigned>(c.box_rows)) : -1;
  p.value_scale = a.format == CacheFormat::fp8 ? a.k_scale : 1.0f;
  p.q_scale = a.given_q_scale;
  p.k_scale = a.given_k_scale;
  p.scale_log2 = a.scale * 1.4426950408889634f * p.value_scale;
  p.out = a.out;
  p.out_f32 = a.out_dtype == Dtype::f32;
  p.out_f16 = a.out_dtype == Dtype::f16;
  p.lse = a.lse;
  p.lse_token_stride = a.lse_token_stride;
  p.lse_head_stride = a.lse_head_stride;
  p.queries = std::max(a.lse_queries, 1);
  p.lse_by_requests = p.queries > 1;
  p.by_queries = Divisor(p.queries);
  p.lse_query_stride = a.lse_query_stride;
  p.lse_empty_up = a.lse_empty_up;
  p.extras = a.sinks || a.max_logits;
  p.peaks = a.max_logits != nullptr;
  p.sinks = a.sinks;
  p.max_logits = a.max_logits;
  p.max_token_stride = a.max_token_stride;
  p.max_head_stride = a.max_head_stride;
  p.late = c.late_items;
  p.counters = a.counters;
  p.left = a.counters + (c.split_blocks ? partial_slots(l, c) : c.workers) * c.ctas();
  p.patience = c.patience;
  const bool half = half_partials(c, a.format);
  const int64_t rows = partial_slots(l, c) * c.tile_rows;
  p.partial_out = static_cast<float*>(a.partials);
  p.partial_lse = p.partial_out + rows * latent::width / (half ? 2 : 1);
  p.partial_max = p.partial_lse + rows * (half ? 2 : 1);
  p.workers = c.workers;
  p.split_blocks = c.split_blocks;
  p.min_blocks = c.min_blocks;
  p.relay = c.relay && latent::may_relay(c.tile_rows, c.split_blocks) && !is_fp8(a.format);
  p.one_tile = static_cast<int64_t>(l.query_tokens) * l.heads <= c.tile_rows;
  p.one_each = p.one_tile && l.requests <= 32;
  p.line_overhead = c.line_overhead;
  p.settled = c.settled;
  p.q_width = q_width(a);
  if (a.lists) {
    p.lists = *a.lists;
    for (int i = 0; i < 2; ++i) p.by_slot_page[i] = Divisor(static_cast<uint32_t>(a.lists->source[i].page_size));
  }
  return p;
}

}  // namespace

AttendLatentChoice attend_latent_choice(const AttendLatentLimits& l, int page_size, int multiprocessors,
                                        CacheFormat format, Dtype q_dtype) {
  AttendLatentChoice c;
  // Kernels sum in different orders: which one runs must then not follow from the longest query.
  const int64_t rows = l.batch_invariant ? l.heads : static_cast<int64_t>(l.heads) * l.query_tokens;
  const int fit = std::gcd(page_size, latent::block_tokens);
  c.box_rows = fit >= 8 ? fit : 0;
  c.tile_rows = rows <= 16 ? 16 : rows <= 32 ? 32 : rows <= 64 ? 64 : 128;
  if (is_fp8(format)) {
    c.box_rows = std::gcd(page_size, 16);
    if (c.tile_rows == 32 && format == CacheFormat::fp8_ds_mla) c.tile_rows = 64;
    if (format == CacheFormat::fp8_ds_v4) c.tile_rows = std::max(c.tile_rows, 64);
    c.converts = c.tile_rows == 128 || (c.tile_rows == 64 && format != CacheFormat::fp8);
    if (!c.converts) c.line_overhead = 6;
  }
  if (q_dtype == Dtype::fp8_e4m3) {
    c.codes = true, c.converts = false, c.line_overhead = 3;
    c.tile_rows = std::max(c.tile_rows, 64), c.box_rows = fit;
  }
  const int64_t tiles = up(static_cast<int64_t>(l.query_tokens) * l.heads, c.tile_rows) / c.tile_rows * l.requests,
                blocks = (l.seq_len + latent::block_tokens - 1) / latent::block_tokens;
  // Without conversion e4m3's warpgroups take blocks in turn; converted, more than 32 pieces gain less than they cost.
  c.min_blocks = c.converts || c.codes ? (blocks > 32 ? 2 : 1) : c.tile_rows <= 32 && !is_fp8(format) ? 1 : 2;
  if (l.batch_invariant)
    c.split_blocks =
        std::max(invariant_blocks, static_cast<int>((blocks + latent::most_pieces - 1) / latent::most_pieces));
  // No more workers than there can be pieces.
  const int piece = c.split_blocks ? c.split_blocks : c.min_blocks;
  c.workers = static_cast<int>(
      std::clamp<int64_t>(tiles * ((blocks + piece - 1) / piece), 1, std::max(multiprocessors / c.ctas(), 1)));
  c.relay = c.workers == multiprocessors;  // fewer leave room for the next call's beside them
  return c;
}

bool attend_latent_gives_max_logits(const AttendLatentChoice& c, CacheFormat format) {
  return !is_fp8(format) || c.converts || c.codes;
}

// A tile's pieces are counted by number of its first piece, or of its first worker; then a word for each piece.
size_t attend_latent_counters(const AttendLatentLimits& l, const AttendLatentChoice& c) {
  const int64_t slots = partial_slots(l, c);
  return static_cast<size_t>((slots + (c.split_blocks ? slots : c.workers)) * c.ctas());
}

// A row's outputs, its lse (two numbers where outputs are f16) and its largest logit.
size_t attend_latent_partials(const AttendLatentLimits& l, const AttendLatentChoice& c, CacheFormat format) {
  const int numbers = half_partials(c, format) ? latent::width / 2 + 3 : latent::width + 2;
  return static_cast<size_t>(up(partial_slots(l, c) * c.tile_rows * numbers * 4, 256));
}

size_t attend_latent_schedule_bytes(const AttendLatentChoice& choice) {
  return static_cast<size_t>(choice.workers) * sizeof(latent::Start);
}

void attend_latent_schedule(const AttendLatent& a, const AttendLatentChoice& c, cudaStream_t stream) {
  check_items(a, c);
  require(a.schedule, "there is no room for a schedule");
  if (a.limits.tokens == 0 || a.limits.requests == 0) return;
  latent::launch_starts(is_fp8(a.format) && !c.codes, c, params_of(a, c), static_cast<latent::Start*>(a.schedule),
                        shape_of(a), stream);
}

void attend_latent(const AttendLatent& a, const AttendLatentChoice& c, cudaStream_t stream) {
  check_args(a, c);
  const AttendLatentLimits& l = a.limits;
  if (l.tokens == 0 || l.requests == 0) return;
  const std::string shape = shape_of(a);
  const latent::Params p = params_of(a, c);
  if (c.codes) return latent::launch_codes(a, c, p, shape, stream);

  const uint64_t row_bytes = static_cast<uint64_t>(q_width(a)) * 2;  // boxes past it are zeros
  const uint64_t q_extents[2] = {row_bytes / 2, static_cast<uint64_t>(l.tokens) * l.heads};
  const uint32_t q_box[2] = {64, static_cast<uint32_t>(std::min(c.tile_rows, 64))};
  const CUtensorMap q_map =
      tensor_map("attend_latent", "q", MapType::bf16, a.q, q_extents, {&row_bytes, 1}, q_box, Swizzle::b128);
  if (c.converts) return latent::launch_converted(a.format, a.lists != nullptr, c, p, q_map, shape, stream);
  if (is_fp8(a.format))
    return latent::launch_fp8(a.format == CacheFormat::fp8_ds_mla, a.lists != nullptr, c, p, q_map, shape, stream);
  const uint64_t extents[2] = {
      row_bytes / 2, p.row_bytes < row_bytes ? 1 : static_cast<uint64_t>(a.pages - 1) * p.page_step + a.page_size};
  const uint32_t box[2] = {64, static_cast<uint32_t>(c.box_rows ? c.box_rows : 8)};
  const MapType type = a.format == CacheFormat::bf16 ? MapType::bf16 : MapType::f16;
  const CUtensorMap cache_map =
      tensor_map("attend_latent", "cache", type, a.cache, extents, {&row_bytes, 1}, box, Swizzle::b128);

  if (a.format == CacheFormat::bf16) latent::launch_kernel<__nv_bfloat16>(c, p, q_map, cache_map, shape, stream);
  else latent::launch_kernel<__half>(c, p, q_map, cache_map, shape, stream);
}

}  // namespace mla::cuda
