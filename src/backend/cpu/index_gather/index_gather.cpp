#include <algorithm>
#include <cstring>

#include "backend/cpu/backend.hpp"
#include "backend/cpu/core/convert.hpp"
#include "backend/cpu/core/index_rows.hpp"
#include "cache/index/codec.hpp"

namespace mla::cpu {
namespace {

constexpr int64_t kRowsPerTask = 64, kPart = 128;

// Positions [first, first + count) of a page at row `to`.
void copy(const ops::IndexGatherArgs& a, const std::byte* page, int64_t first, int64_t count, int64_t to) {
  const IndexCacheSpec& spec = a.cache.spec;
  if (a.keys.dtype() == Dtype::f32) {
    load_index_rows(spec, page, first, count, static_cast<float*>(a.keys.at(to, 0)), a.keys.stride<Key>());
    return;
  }
  for (int64_t t = 0; t < count; ++t) {
    const std::byte* row = page + cache::index::row_at(spec, first + t);
    void* out = a.keys.at(to + t, 0);
    if (spec.format == IndexCacheFormat::fp8) {
      const float scale = cache::get<float>(page + cache::index::scale_at(spec, first + t), 0);
      if (a.keys.dtype() == Dtype::fp8_e4m3) {
        std::memcpy(out, row, static_cast<size_t>(spec.dim));
        a.scales(to + t) = scale;
      } else {
        for (int64_t d = 0; d < spec.dim; d += kPart) {
          float part[kPart];
          const int64_t n = std::min(kPart, spec.dim - d);
          convert(reinterpret_cast<const fp8_e4m3*>(row) + d, part, n, scale);
          convert(part, static_cast<bf16*>(out) + d, n);
        }
      }
    } else if (spec.format == IndexCacheFormat::bf16) {
      std::memcpy(out, row, static_cast<size_t>(spec.dim) * sizeof(bf16));
    } else {
      convert(reinterpret_cast<const float*>(row), static_cast<bf16*>(out), spec.dim);
    }
  }
}

}  // namespace

void index_gather(Stream& stream, const ops::IndexGatherArgs& a) {
  const int64_t page_size = a.cache.spec.page_size;
  int64_t tasks = 0;
  for (const GatherPiece& p : a.pieces) tasks += (p.count + kRowsPerTask - 1) / kRowsPerTask;
  stream.pool().run(tasks, [&](int64_t task, int) {
    const GatherPiece* piece = a.pieces.data();
    for (int64_t n; task >= (n = (piece->count + kRowsPerTask - 1) / kRowsPerTask); ++piece) task -= n;
    const int64_t end = std::min<int64_t>(piece->count, (task + 1) * kRowsPerTask);
    for (int64_t i = task * kRowsPerTask, count; i < end; i += count) {
      const int64_t position = piece->start + i, offset = position % page_size;
      count = std::min(end - i, page_size - offset);
      copy(a, a.cache.page(a.block_table(piece->request, position / page_size)), offset, count, piece->row + i);
    }
  });
}

}  // namespace mla::cpu
