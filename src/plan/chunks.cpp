// Context on the expanded path, packed into chunks of bounded rows.
#include <algorithm>
#include <limits>
#include <string>

#include "mla/error.hpp"
#include "plan/internal.hpp"

namespace mla {

int64_t default_context_rows(int64_t max_model_len, int64_t max_requests, int64_t page_size) {
  constexpr int64_t kMost = 64 * 1024;
  const int64_t wanted = std::min(std::max(8 * max_model_len, 4 * max_requests * page_size), kMost);
  return std::max(wanted, max_requests * page_size);
}

std::vector<std::vector<GatherPiece>> pack_context_chunks(std::span<const int32_t> contexts, int64_t rows,
                                                          int64_t page_size, int64_t fixed_rows, int64_t grain) {
  if (rows < 1 || rows > std::numeric_limits<int32_t>::max())
    throw ShapeError("context rows is " + std::to_string(rows) + ", allowed 1 to " +
                     std::to_string(std::numeric_limits<int32_t>::max()));
  if (fixed_rows < 0 || fixed_rows > rows)
    throw ShapeError("fixed context rows is " + std::to_string(fixed_rows) + ", allowed 0 to " + std::to_string(rows));
  if (grain < 1) throw ShapeError("context grain is " + std::to_string(grain) + ", at least 1");
  // A cut inside a page would read that page twice; with less than a page of room there is no other choice.
  const int64_t aligned = rows >= page_size ? rows / page_size * page_size : rows;
  std::vector<std::vector<GatherPiece>> chunks;
  int64_t used = rows;  // no chunk is open
  auto place = [&](int64_t request, int64_t start, int64_t count) {
    chunks.back().push_back({static_cast<int32_t>(request), static_cast<int32_t>(start), static_cast<int32_t>(count),
                             static_cast<int32_t>(used)});
    used = std::min(rows, planning::round_up(used + count, grain));
  };
  const auto open = [&] {
    chunks.emplace_back();
    used = 0;
  };
  const int64_t longest = contexts.empty() ? 0 : *std::max_element(contexts.begin(), contexts.end());
  for (int64_t start = 0; fixed_rows > 0 && start < longest; start += fixed_rows, used = rows)
    for (int64_t r = 0; r < static_cast<int64_t>(contexts.size()); ++r) {
      const int64_t count = std::min(contexts[r] - start, fixed_rows);
      if (count <= 0) continue;
      if (used + count > rows) open();
      place(r, start, count);
    }
  for (int64_t r = 0; fixed_rows == 0 && r < static_cast<int64_t>(contexts.size()); ++r)
    for (int64_t start = 0; start < contexts[r];) {
      const int64_t left = contexts[r] - start, room = rows - used;
      int64_t count = left <= room ? left : room / page_size * page_size;
      if (used == rows || count == 0) {
        open();
        count = left <= rows ? left : aligned;
      }
      place(r, start, count);
      start += count;
    }
  return chunks;
}

}  // namespace mla
