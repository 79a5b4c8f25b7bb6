#include <string>

#include "backend/cuda/backend.hpp"
#include "backend/cuda/core/find_item.cuh"
#include "backend/cuda/core/launch.hpp"
#include "backend/cuda/generic/attention/cache_attention.hpp"
#include "backend/cuda/generic/attention/join.cuh"
#include "mla/error.hpp"

namespace mla::cuda {
namespace generic {
namespace {

constexpr int kJoinThreads = 128;

struct MergeSparse {
  Parts parts;
  Destination out;
  const SplitRows* items = nullptr;
  const float* sinks = nullptr;
  int32_t count = 0, heads = 0, width = 0;
};

// A block a (row, head).
__global__ void __launch_bounds__(kJoinThreads) merge_sparse_kernel(const MergeSparse a) {
  const int64_t row = blockIdx.x / static_cast<unsigned>(a.heads);
  const int head = static_cast<int>(blockIdx.x % static_cast<unsigned>(a.heads));
  const auto rows = [&](int32_t i) { return static_cast<int64_t>(a.items[i].rows); };
  const Found found = find_item(a.count, row, rows, rows);
  if (found.item < 0) return;
  const SplitRows item = a.items[found.item];
  join_row(a.parts, static_cast<int64_t>(item.partial) + found.tile, item.rows, item.splits, a.out,
           static_cast<int64_t>(item.row) + found.tile, head, a.width, a.sinks);
}

}  // namespace
}  // namespace generic

void merge_sparse(Stream& stream, const ops::MergeSparseArgs& a) {
  constexpr std::string_view op = "merge_sparse";
  const Queue& queue = stream.queue();
  int64_t rows = 0;
  for (const SplitRows& s : a.items) rows += s.rows;
  const int64_t heads = a.out.extent<Head>(), blocks = rows * heads;
  if (blocks == 0) return;
  const std::string shape = "rows " + std::to_string(rows) + ", heads " + std::to_string(heads);
  if (blocks >= int64_t{1} << 31) throw UnsupportedError("merge_sparse: " + shape + " need too many blocks");
  const generic::MergeSparse call{.parts = {.out = a.partial_out.data(),
                                            .out_row = a.partial_out.stride<Partial>(),
                                            .out_head = a.partial_out.stride<Head>(),
                                            .lse = a.partial_lse.data(),
                                            .lse_row = a.partial_lse.stride<Partial>(),
                                            .lse_head = a.partial_lse.stride<Head>(),
                                            .max = a.partial_max.data(),
                                            .max_row = a.partial_max.stride<Partial>(),
                                            .max_head = a.partial_max.stride<Head>()},
                                  .out = {.out = a.out.data(),
                                          .out_row = a.out.stride<Token>(),
                                          .out_head = a.out.stride<Head>(),
                                          .lse = a.lse.data(),
                                          .lse_row = a.lse.stride<Token>(),
                                          .lse_head = a.lse.stride<Head>(),
                                          .max = a.max_logits.data(),
                                          .max_row = a.max_logits.stride<Token>(),
                                          .max_head = a.max_logits.stride<Head>(),
                                          .dtype = a.out.dtype()},
                                  .items = queue.reads(a.items, op, "items"),
                                  .sinks = queue.reads(a.sinks, op, "sinks"),
                                  .count = static_cast<int32_t>(a.items.size()),
                                  .heads = static_cast<int32_t>(heads),
                                  .width = static_cast<int32_t>(a.out.extent<Value>())};
  launch(generic::merge_sparse_kernel,
         {.grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(generic::kJoinThreads)}, queue.stream(), op,
         "join of splits", shape, call);
}

}  // namespace mla::cuda
