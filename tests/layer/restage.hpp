// A smaller step in the place of a captured one, without a GPU: its lists overwrite the captured step's where calls
// find them, in the host's memory.
#pragma once

#include <cstring>
#include <vector>

#include "layer/staged_lists.hpp"

namespace mla::test {

/// `captured` and `its_batch` are what `lists` was laid out for. ShapeError naming what does not fit.
inline void restage(const layer::StagedLists& lists, const Plan& captured, const Batch& its_batch, const Plan& p,
                    const Batch& b) {
  const auto step = lists.fit(p, b);
  std::vector<std::byte> block(lists.bytes() + 64);
  std::byte* const at = block.data() + (-reinterpret_cast<uintptr_t>(block.data()) & 63);
  lists.write(step, b, at);
  for (const ListKey key : captured.lists) {
    const planning::HostList host = planning::host_list(captured, its_batch, key);
    if (host.count > 0)
      std::memcpy(const_cast<void*>(host.data), at + lists.offset_of(key, host.count), host.count * host.element);
  }
  const auto& table = its_batch.block_table;
  const int32_t* const rows = reinterpret_cast<const int32_t*>(at + lists.offset_of(table));
  for (int64_t r = 0; r < table.extent<Request>(); ++r)
    for (int64_t page = 0; page < table.extent<Page>(); ++page)
      const_cast<int32_t&>(table(r, page)) = rows[r * table.stride<Request>() + page];
}

}  // namespace mla::test
