// On Hopper rows are brought to bf16 ones that the copy engine can read, where they are not, in the room for products;
// everywhere else there are products, which then become codes.
#include "backend/cuda/sm90/expand/expand.hpp"

#include <algorithm>
#include <cstring>

#include "backend/cuda/backend.hpp"
#include "backend/cuda/core/queue.hpp"
#include "backend/cuda/core/run_of.hpp"
#include "backend/cuda/generic/cast/cast.hpp"
#include "backend/cuda/generic/project/plain.hpp"
#include "backend/cuda/gpu_model.hpp"
#include "backend/expand_by_products.hpp"

namespace mla::cuda {
namespace {

void expand_on_hopper(const Queue& queue, const ops::ExpandArgs& a) {
  const int64_t rows = ops::rows_of(a), latent = a.x.extent<Latent>(), first_row = run_of(a.x_rows);
  const auto& w = static_cast<const generic::PlainLinear&>(*a.weights);
  const auto from = [&](const void* x, int64_t x_row, int64_t first, int64_t count) {
    sm90::expand(queue.stream(),
                 {.x = x,
                  .x_row = x_row,
                  .weights = w.memory.data(),
                  .latent = latent,
                  .keys = a.keys.slice<Key>(first, count),
                  .values = a.values.slice<Key>(first, count),
                  .key_scales = a.key_scales,
                  .value_scales = a.value_scales},
                 queue.multiprocessors());
  };
  if (first_row >= 0 && a.x.dtype() == Dtype::bf16) {
    const void* const x = a.x.at(first_row, 0);
    if (reinterpret_cast<uintptr_t>(x) % 16 == 0 && a.x.stride<Token>() % 8 == 0 && a.x.stride<Token>() > 0)
      return from(x, a.x.stride<Token>(), 0, rows);
  }
  const int32_t* const x_rows = first_row < 0 ? queue.reads(a.x_rows, "expand", "x_rows") : nullptr;
  const int64_t room = a.products.size() * static_cast<int64_t>(size_of(a.products.dtype())) /
                       (latent * static_cast<int64_t>(sizeof(bf16)));
  // Whole multiples of 16: values of a piece begin where the copy engine may write.
  const int64_t most = std::min(rows, room >= 16 ? room / 16 * 16 : room);
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t count = std::min(most, rows - first);
    const void* const begin = x_rows ? a.x.data() : a.x.at(first_row + first, 0);
    generic::copy_rows(queue,
                       {.x = {a.x.dtype(), begin, {count, 1, latent}, {a.x.stride<Token>(), 0, 1}},
                        .y = {Dtype::bf16, a.products.data(), {count, 1, latent}},
                        .x_rows = x_rows ? x_rows + first : nullptr,
                        .rows = count},
                       "expand");
    from(a.products.data(), latent, first, count);
  }
}

}  // namespace

void expand(Stream& stream, const ops::ExpandArgs& a) {
  const Queue& queue = stream.queue();
  if (sm90::serves(model_of(queue), a)) expand_on_hopper(queue, a);
  else backend::expand_by_products<project, cast>(stream, a);
}

std::string expand_kernel(const backend::GpuModel& gpu, const ops::ExpandArgs& a) {
  if (!sm90::serves(gpu, a)) return "cuda/generic, products, then codes";
  return "cuda/sm90, " + std::to_string(a.keys.extent<Nope>()) + " / " + std::to_string(a.values.extent<Value>());
}

}  // namespace mla::cuda
