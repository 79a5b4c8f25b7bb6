#include <algorithm>

#include "ops/map_indices/op.hpp"
#include "ops/require.hpp"

namespace mla::ops {
namespace {

constexpr int64_t kMostRows = int64_t{1} << 31;

void check_held(const HeldTokens& held) {
  require_range("map_indices", "held rank", held.rank, 0, held.sharding.ranks());
}

void check_rows(const View<const int32_t, Token, Topk>& positions, std::span<const int32_t> requests,
                int64_t request_count, std::string_view to_name, const View<int32_t, Token, Topk>& to) {
  constexpr std::string_view op = "map_indices";
  const int64_t rows = static_cast<int64_t>(requests.size());
  require_view(op, "positions", positions);
  require_view(op, to_name, to);
  require_same<Topk>(op, to_name, to, "positions", positions);
  require_dense<Topk>(op, "positions", positions);
  require_dense<Topk>(op, to_name, to);
  require_range(op, "requests length", rows, 0, positions.extent<Token>() + 1);
  require_range(op, "requests length", rows, 0, to.extent<Token>() + 1);
  for (int32_t r : requests)
    if (r >= 0) require_range(op, "request", r, 0, request_count);
}

}  // namespace

void check(const MapToSlotsArgs& a) {
  constexpr std::string_view op = "map_indices";
  require_view(op, "block_table", a.block_table);
  require_range(op, "page_size", a.page_size, 1, kMostRows);
  require_range(op, "pages", a.pages, 0, kMostRows / a.page_size + 1);
  require_dense<Page>(op, "block_table", a.block_table);
  check_held(a.held);
  int64_t requests = a.block_table.extent<Request>();
  if (!a.lengths.empty()) requests = std::min(requests, std::ssize(a.lengths));
  check_rows(a.positions, a.requests, requests, "slots", a.slots);
}

void check(const MapToWorkspaceArgs& a) {
  constexpr std::string_view op = "map_indices";
  require_equal(op, "counts length", static_cast<int64_t>(a.counts.size()), "starts length",
                static_cast<int64_t>(a.starts.size()));
  for (size_t r = 0; r < a.starts.size(); ++r) {
    require_range(op, "start", a.starts[r], 0, kMostRows);
    require_range(op, "count", a.counts[r], 0, kMostRows - a.starts[r] + 1);
  }
  check_held(a.held);
  check_rows(a.positions, a.requests, static_cast<int64_t>(a.starts.size()), "rows", a.rows);
}

void check(const MapToMaskArgs& a) {
  constexpr std::string_view op = "map_indices";
  require_view(op, "positions", a.positions);
  require_view(op, "mask", a.mask);
  require_dense<Topk>(op, "positions", a.positions);
  require_dense<Word>(op, "mask", a.mask);
  require_range(op, "rows length", static_cast<int64_t>(a.rows.size()), 0, a.positions.extent<Token>() + 1);
  for (int32_t r : a.rows)
    if (r >= 0) require_range(op, "row", r, 0, a.mask.extent<Token>());
}

void check(const PickRowsArgs& a) {
  constexpr std::string_view op = "map_indices";
  require_view(op, "positions", a.positions);
  require_view(op, "picked", a.picked);
  require_same<Topk>(op, "picked", a.picked, "positions", a.positions);
  require_dense<Topk>(op, "positions", a.positions);
  require_dense<Topk>(op, "picked", a.picked);
  require_range(op, "rows length", static_cast<int64_t>(a.rows.size()), 0, a.picked.extent<Token>() + 1);
  for (int32_t r : a.rows) require_range(op, "row", r, 0, a.positions.extent<Token>());
}

}  // namespace mla::ops
