// Rows are brought to bf16 ones that the copy engine can read, where they are not, in the room for products.
#include <algorithm>
#include <string>

#include "backend/cuda/core/aligned.hpp"
#include "backend/cuda/core/queue.hpp"
#include "backend/cuda/core/run_of.hpp"
#include "backend/cuda/generic/cast/cast.hpp"
#include "backend/cuda/generic/project/plain.hpp"
#include "backend/cuda/sm90/expand/expand.hpp"
#include "backend/cuda/sm90/ops.hpp"

namespace mla::cuda::sm90 {
bool serves(const backend::GpuModel& gpu, const ops::ExpandArgs& a) {
  const Linear& w = *a.weights;
  const int64_t nope = a.keys.extent<Nope>(), value = a.values.extent<Value>(), rows = ops::rows_of(a),
                heads = a.keys.extent<Head>();
  const bool dims = (nope == 128 && value == 128) || (nope == 192 && value == 256);
  // Tiles of 256 rows by one head are counted in 32 bits.
  const bool fits =
      rows < int64_t{1} << 30 && heads < int64_t{1} << 20 && (rows + 255) / 256 * heads * 2 < int64_t{1} << 31;
  // Rows that have to be brought together go into the room for products, 16 at least.
  const bool room = a.products.extent<Token>() * w.out * static_cast<int64_t>(size_of(a.products.dtype())) >=
                    2 * w.in * std::min<int64_t>(rows, 16);
  return gpu.hopper && dims && fits && room && w.format == WeightFormat::plain && w.dtype == Dtype::bf16 &&
         a.products.dtype() == Dtype::bf16 && w.in > 0 && w.in % 64 == 0 && aligned(a.products.data(), 0, 0, 1) &&
         (a.values.stride<Key>() == 1 || rows == 1) &&
         aligned(a.keys.data(), rows > 1 ? a.keys.stride<Key>() : 0, heads > 1 ? a.keys.stride<Head>() : 0, 1) &&
         aligned(a.values.data(), a.values.stride<Value>(), heads > 1 ? a.values.stride<Head>() : 0, 1);
}

std::string kernel(const backend::GpuModel&, const ops::ExpandArgs& a) {
  return std::to_string(a.keys.extent<Nope>()) + " / " + std::to_string(a.values.extent<Value>());
}

void expand(const Queue& queue, const ops::ExpandArgs& a) {
  const int64_t rows = ops::rows_of(a), latent = a.x.extent<Latent>(), first_row = run_of(a.x_rows);
  const auto& w = static_cast<const generic::PlainLinear&>(*a.weights);
  const auto from = [&](const void* x, int64_t x_row, int64_t first, int64_t count) {
    expand(queue.stream(),
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
    if (aligned(x, a.x.stride<Token>(), 0, sizeof(bf16)) && a.x.stride<Token>() > 0)
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

}  // namespace mla::cuda::sm90
