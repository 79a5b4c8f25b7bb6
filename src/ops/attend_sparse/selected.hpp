// The keys of a row's list, in order: those of its slots that exist.
#pragma once

#include <algorithm>

#include "ops/attend_sparse/op.hpp"

namespace mla::ops {

/// Slots that count in a row of a source.
inline int64_t list_length(const SparseSource& s, int64_t row) {
  return s.lengths.empty() ? s.slots.extent<Topk>() : s.lengths[row];
}

inline bool exists(const SparseSource& s, int32_t slot) {
  return slot >= 0 && slot < s.cache.pages * s.cache.spec.page_size;
}

/// f(source index, slot) for the existing slots among keys [k_begin, k_end) of a row's list.
template <class F>
void for_selected(std::span<const SparseSource> sources, int64_t row, int64_t k_begin, int64_t k_end, F&& f) {
  int64_t first = 0;  // the list's number of the source's first slot
  for (size_t i = 0; i < sources.size(); first += sources[i].slots.extent<Topk>(), ++i) {
    const SparseSource& s = sources[i];
    const int64_t end = std::min(k_end - first, list_length(s, row));
    for (int64_t k = std::max<int64_t>(0, k_begin - first); k < end; ++k)
      if (const int32_t slot = s.slots(row, k); exists(s, slot)) f(i, slot);
  }
}

}  // namespace mla::ops
