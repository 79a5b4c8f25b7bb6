#include <algorithm>

#include "backend/cpu/backend.hpp"
#include "backend/cpu/core/convert.hpp"
#include "backend/cpu/core/load_rows.hpp"
#include "mla/error.hpp"

namespace mla::cpu {
namespace {

constexpr int64_t kRowsPerTask = 32, kEntryBlock = 4096;

// One row to a destination.
void store(const float* x, Dtype t, void* y, int64_t n) {
  switch (t) {
    case Dtype::f32: std::copy_n(x, n, static_cast<float*>(y)); break;
    case Dtype::bf16: convert(x, static_cast<bf16*>(y), n); break;
    default: convert(x, static_cast<f16*>(y), n);
  }
}

}  // namespace

void gather(Stream& stream, const ops::GatherArgs& a) {
  if (a.kv_c.extent<Key>() == 0) return;
  const CacheSpec& spec = a.cache.spec;
  // [latent | rope] of one f32 array, as the layer lays it out: decoded in place.
  const bool joined = a.kv_c.dtype() == Dtype::f32 && a.kv_c.stride<Key>() == a.k_pe.stride<Key>() &&
                      (spec.rope == 0 || a.k_pe.data() == a.kv_c.at(0, spec.latent));
  if (!joined && spec.entry() > kEntryBlock)
    throw UnsupportedError("gather: cache latent + rope is " + std::to_string(spec.entry()) + ", at most " +
                           std::to_string(kEntryBlock) + " unless kv_c and k_pe are one f32 array");
  int64_t tasks = 0;
  for (const GatherPiece& p : a.pieces) tasks += (p.count + kRowsPerTask - 1) / kRowsPerTask;
  stream.pool().run(tasks, [&](int64_t task, int) {
    const GatherPiece* piece = a.pieces.data();
    for (int64_t n; task >= (n = (piece->count + kRowsPerTask - 1) / kRowsPerTask); ++piece) task -= n;
    const int64_t end = std::min<int64_t>(piece->count, (task + 1) * kRowsPerTask);
    for (int64_t i = task * kRowsPerTask; i < end;) {
      const int64_t position = piece->start + i, offset = position % spec.page_size;
      const int64_t count = joined ? std::min(end - i, spec.page_size - offset) : 1;
      const std::byte* page = a.cache.page(a.block_table(piece->request, position / spec.page_size));
      const int64_t row = piece->row + i;
      if (joined) {
        load_rows(spec, page, offset, count, static_cast<float*>(a.kv_c.at(row, 0)), a.kv_c.stride<Key>());
      } else {
        float entry[kEntryBlock];
        load_rows(spec, page, offset, 1, entry, spec.entry());
        store(entry, a.kv_c.dtype(), a.kv_c.at(row, 0), spec.latent);
        store(entry + spec.latent, a.k_pe.dtype(), a.k_pe.at(row, 0), spec.rope);
      }
      i += count;
    }
  });
}

}  // namespace mla::cpu
