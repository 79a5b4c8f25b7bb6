// Products by cuBLASLt. Operands go to it as they lie where they can; rows by list, other dtypes and quantised weights
// are brought to the products' dtype in scratch first, as many rows (or outputs) at a time as fit. On Hopper, few rows
// meet quantised weights in a kernel that reads those once and as they are, and fp8 weights in blocks of 128 x 128 meet
// fp8 activations as codes: scratch then holds the activations' codes and scales.
#include <algorithm>
#include <cstring>
#include <span>
#include <string>

#include "backend/cuda/backend.hpp"
#include "backend/cuda/core/blas.hpp"
#include "backend/cuda/core/queue.hpp"
#include "backend/cuda/core/run_of.hpp"
#include "backend/cuda/generic/cast/cast.hpp"
#include "backend/cuda/generic/project/activations.hpp"
#include "backend/cuda/generic/project/dequantise.hpp"
#include "backend/cuda/generic/project/plain.hpp"
#include "backend/cuda/generic/project/sum_slices.hpp"
#include "backend/cuda/gpu_model.hpp"
#include "backend/cuda/sm90/project/quantised.hpp"
#include "mla/error.hpp"

namespace mla::cuda {
namespace {

void require_dtype(Dtype dtype) {
  if (dtype != Dtype::f32 && dtype != Dtype::bf16)
    throw UnsupportedError("cuda weights for products in " + std::string(to_string(dtype)) +
                           "; f32 and bf16 are supported");
}

size_t up(size_t n) { return (n + 255) / 256 * 256; }

// Whether cuBLASLt may take codes of both sides as they are: on Hopper, in sums that tensor cores make, which are not
// quite f32's, so not for products in f32.
bool takes_codes(const backend::GpuModel& gpu, const ops::ProjectArgs& a) {
  const Linear& w = *a.weights;
  return a.activations == Activations::fp8_128 && gpu.hopper && w.dtype == Dtype::bf16 && w.heads == 1 &&
         w.block_rows == 128 && w.block_cols == 128 && w.in % 16 == 0 && w.out % 16 == 0;
}

// Of rows that are brought to another form first.
size_t bytes_of_rows(const ops::ProjectArgs& a) {
  return static_cast<size_t>(a.rows * a.weights->heads * a.weights->in) * sizeof(bf16);
}

// Large matrices are read at memory's speed, small ones bound by latency.
bool is_large(const Linear& w) { return w.heads * w.out * w.in > int64_t{1} << 24; }

// Which of Hopper's kernels widens weights while it multiplies, as measured: docs/log/2026-11-26-products.md.
enum class Widens { nowhere, few_rows, many_rows };
Widens widens(const backend::GpuModel& gpu, const ops::ProjectArgs& a) {
  const Linear& w = *a.weights;
  // Not where sums must not depend on the number of rows.
  if (!gpu.hopper || a.batch_invariant || !sm90::serves_quantised(w, a.y.dtype()) ||
      bytes_of_rows(a) > a.scratch.per_worker)
    return Widens::nowhere;
  // cuBLASLt multiplies codes faster from 9 rows on, those of small matrices from 33 on.
  if (takes_codes(gpu, a)) return a.rows <= (is_large(w) ? 8 : 32) ? Widens::few_rows : Widens::nowhere;
  if (a.activations == Activations::fp8_128) return a.rows <= 64 ? Widens::few_rows : Widens::nowhere;
  if (a.rows <= (is_large(w) ? 8 : 16)) return Widens::few_rows;
  // Beyond, weights are dequantised once, which costs what a product of some more rows does.
  return a.rows <= (w.in < 512 ? 128 : 256) && w.heads * w.out < int64_t{1} << 31 ? Widens::many_rows : Widens::nowhere;
}
// Slower than the same weights in bf16?
bool loses(const ops::ProjectArgs& a, Widens by) {
  if (by == Widens::few_rows) return a.rows > 16;
  return by == Widens::nowhere || a.rows > 64 || !is_large(*a.weights);
}

// Do rows lie as a tensor map can say?
bool can_be_mapped(const sm90::QuantisedProduct& f) {
  const auto can = [](int64_t stride, int64_t count) { return count < 2 || (stride > 0 && stride < int64_t{1} << 38); };
  return can(f.x_row, f.rows) && can(f.x_head, f.heads);
}

void project_widened(const Queue& queue, const ops::ProjectArgs& a, const generic::QuantisedLinear& w, Widens by) {
  sm90::QuantisedProduct f{.codes = w.codes.as<const uint8_t>(),
                           .e4m3 = w.format == WeightFormat::fp8,
                           .scales = w.scales.as<const float>(),
                           .scale_rows = w.scale_rows,
                           .scale_cols = std::min(w.scale_cols, w.in),
                           .row_blocks = w.row_blocks,
                           .scale_stride = w.scale_stride,
                           .y = a.y.data(),
                           .y_dtype = a.y.dtype(),
                           .y_row = a.y.stride<Token>(),
                           .y_head = a.y.stride<Head>(),
                           .rows = a.rows,
                           .heads = w.heads,
                           .out = w.out,
                           .in = w.in};
  const int64_t x_first = run_of(a.x_rows), y_first = run_of(a.y_rows);
  const int32_t* const x_rows = x_first < 0 ? queue.reads(a.x_rows, "project", "x_rows") : nullptr;
  if (y_first < 0) f.y_rows = queue.reads(a.y_rows, "project", "y_rows");
  else f.y = a.y.at(y_first, 0, 0);
  f.x = x_rows ? a.x.data() : a.x.at(x_first, 0, 0);
  f.x_row = a.x.stride<Token>(), f.x_head = a.x.stride<Head>();
  f.x_rows = x_rows;
  const AnyView<Token, Head, In> x(a.x.dtype(), f.x, {a.rows, f.heads, f.in}, a.x.strides());
  if (a.activations == Activations::fp8_128) {
    const size_t codes = static_cast<size_t>(x.size());
    auto* const at = reinterpret_cast<uint8_t*>(a.scratch.data);
    auto* const scales = reinterpret_cast<float*>(a.scratch.data + up(codes));
    generic::quantise_activations(
        queue.stream(),
        {.x = x, .x_rows = x_rows, .rows = a.rows, .padded = a.rows, .codes = at, .scales = scales, .overlap = true});
    f.x = at, f.x_scales = scales, f.x_scale_row = a.rows;
  } else if (x.dtype() != Dtype::bf16 || reinterpret_cast<uintptr_t>(f.x) % 16 != 0 || f.x_row % 8 != 0 ||
             f.x_head % 8 != 0 || (by == Widens::many_rows && (x_rows || !can_be_mapped(f)))) {
    const AnyMutableView<Token, Head, In> taken(Dtype::bf16, a.scratch.data, x.extents());
    generic::copy_rows(queue, {.x = x, .y = taken, .x_rows = x_rows, .y_rows = nullptr, .rows = a.rows}, "project");
    f.x = taken.data();
  }
  if (f.x != x.data()) f.x_row = f.heads * f.in, f.x_head = f.in, f.x_rows = nullptr;  // in scratch, in order
  const auto multiply = by == Widens::few_rows ? sm90::multiply_few_rows : sm90::multiply_many_rows;
  multiply(f, queue.multiprocessors(), queue.stream());
}

// Pieces of about one size, whole tiles of the product: cuBLASLt took 10 times as long for 21845 outputs of a matrix,
// whose rows then lie at odd addresses, as for 24576.
int64_t piece_size(int64_t all, int64_t most) {
  constexpr int64_t kTile = 128;
  if (most >= all || most < kTile) return std::min(all, most);
  const int64_t pieces = (all + most - 1) / most, even = (all + pieces - 1) / pieces;
  return std::min((even + kTile - 1) / kTile * kTile, most / kTile * kTile);
}

// How many parts a batch-invariant sum is cut into, by the matrix alone: one algorithm for any number of rows sums in
// one piece, and where a matrix has few outputs, few multiprocessors then read it. Of 7168 x 1536 for 8 rows it took
// 166 us.
int64_t slices_of(const Linear& w) {
  constexpr int64_t kTile = 128, kBusy = 96, kLeast = 256;
  int64_t slices = 1;
  while ((w.out + kTile - 1) / kTile * slices < kBusy && w.in % (slices * 2 * 64) == 0 && w.in / (slices * 2) >= kLeast)
    slices *= 2;
  return slices;
}

// Products of codes. False where cuBLASLt has no algorithm: what may have been written of y is then to be written
// again.
bool project_codes(const Queue& queue, const ops::ProjectArgs& a, const generic::QuantisedLinear& w) {
  constexpr int64_t kFour = 4;  // cuBLASLt takes rows in fours alone: zeros follow where they are not
  const int64_t x_first = run_of(a.x_rows), y_first = run_of(a.y_rows), groups = (w.in + 127) / 128;
  const size_t y_size = size_of(a.y.dtype());
  const bool aligned =
      ((reinterpret_cast<uintptr_t>(a.y.data()) | static_cast<size_t>(a.y.stride<Token>()) * y_size) & 15) == 0;
  const bool stage_y = y_first < 0 || !aligned;

  // Scratch: codes | their scales | y rows.
  const size_t code_row = static_cast<size_t>(w.in), scale_row = static_cast<size_t>(groups) * sizeof(float),
               y_row = stage_y || a.rows % kFour != 0 ? static_cast<size_t>(w.out) * y_size : 0;
  if (a.scratch.per_worker < 3 * 256) return false;
  const int64_t room = static_cast<int64_t>((a.scratch.per_worker - 3 * 256) / (code_row + scale_row + y_row)),
                rows = std::min((a.rows + kFour - 1) / kFour, room / kFour) * kFour;
  if (rows == 0) return false;
  std::byte* const codes = a.scratch.data + (-reinterpret_cast<uintptr_t>(a.scratch.data) & 255);
  float* const scales = reinterpret_cast<float*>(codes + up(code_row * static_cast<size_t>(rows)));
  std::byte* const staged = reinterpret_cast<std::byte*>(scales) + up(scale_row * static_cast<size_t>(rows));
  const int32_t* const x_rows = x_first < 0 ? queue.reads(a.x_rows, "project", "x_rows") : nullptr;
  const int32_t* const y_rows = y_first < 0 ? queue.reads(a.y_rows, "project", "y_rows") : nullptr;

  for (int64_t first = 0; first < a.rows; first += rows) {
    const int64_t n = std::min(rows, a.rows - first), padded = (n + kFour - 1) / kFour * kFour;
    generic::quantise_activations(
        queue.stream(),
        {.x = {a.x.dtype(), x_rows ? a.x.data() : a.x.at(x_first + first, 0, 0), {n, 1, w.in}, a.x.strides()},
         .x_rows = x_rows ? x_rows + first : nullptr,
         .rows = n,
         .padded = padded,
         .codes = reinterpret_cast<uint8_t*>(codes),
         .scales = scales});
    const AnyMutableView<Token, Head, Out> target(a.y.dtype(), y_rows ? a.y.data() : a.y.at(y_first + first, 0, 0),
                                                  {n, 1, w.out}, a.y.strides());
    const bool through = stage_y || n != padded;
    if (!queue.blas().try_multiply({.rows = padded,
                                    .out = w.out,
                                    .in = w.in,
                                    .dtype = Dtype::fp8_e4m3,
                                    .y_dtype = a.y.dtype(),
                                    .x = codes,
                                    .w = w.codes.data(),
                                    .y = through ? static_cast<void*>(staged) : target.data(),
                                    .x_row = w.in,
                                    .w_row = w.in,
                                    .y_row = through ? w.out : target.stride<Token>(),
                                    .x_scales = scales,
                                    .w_scales = w.scales.as<const float>(),
                                    .invariant = a.batch_invariant},
                                   queue.stream(), "project"))
      return false;
    if (through)
      generic::copy_rows(queue,
                         {.x = {a.y.dtype(), staged, {n, 1, w.out}},
                          .y = {target.dtype(), target.data(), target.extents(), target.strides()},
                          .x_rows = nullptr,
                          .y_rows = y_rows ? y_rows + first : nullptr,
                          .rows = n},
                         "project");
  }
  return true;
}

// Slices of `in` are the product's batch; as many rows at a time as `parts` hold. They lie as far apart for any number
// of rows: an algorithm is chosen for where operands lie.
void multiply_slices(const Queue& queue, const Product& whole, int64_t slices, std::span<float> parts) {
  const int64_t most = static_cast<int64_t>(parts.size()) / (slices * whole.out);
  if (most < 1)
    throw ShapeError("project: scratch has room for " + std::to_string(parts.size()) + " sums, one row needs " +
                     std::to_string(slices * whole.out));
  const int64_t at_once = piece_size(whole.rows, most);
  for (int64_t first = 0; first < whole.rows; first += at_once) {
    Product p = whole;
    p.rows = std::min(at_once, whole.rows - first);
    p.x = static_cast<const std::byte*>(whole.x) + static_cast<size_t>(first * whole.x_row) * size_of(whole.dtype);
    p.in = p.x_matrix = p.w_matrix = whole.in / slices;
    p.batch = slices;
    p.y = parts.data(), p.y_dtype = Dtype::f32, p.y_row = whole.out, p.y_matrix = most * whole.out;
    queue.blas().multiply(p, queue.stream(), "project");
    std::byte* const y =
        static_cast<std::byte*>(whole.y) + static_cast<size_t>(first * whole.y_row) * size_of(whole.y_dtype);
    generic::sum_slices(queue, {.slices = parts.data(),
                                .count = slices,
                                .most_rows = most,
                                .y = {whole.y_dtype, y, {p.rows, whole.out}, {whole.y_row, 1}}});
  }
}

}  // namespace

std::shared_ptr<const Linear> pack(std::span<const float> w, int64_t heads, int64_t out, int64_t in, Dtype dtype,
                                   Device device) {
  require_dtype(dtype);
  auto linear = std::make_shared<generic::PlainLinear>();
  linear->heads = heads;
  linear->out = out;
  linear->in = in;
  linear->dtype = dtype;
  if (dtype == Dtype::f32) {
    linear->memory = Buffer::copy_of(w.data(), w.size_bytes(), device);
  } else {
    std::vector<bf16> narrow(w.size());
    std::transform(w.begin(), w.end(), narrow.begin(), to_bf16);
    linear->memory = Buffer::copy_of(narrow.data(), narrow.size() * sizeof(bf16), device);
  }
  linear->bytes = linear->memory.size();
  return linear;
}

std::shared_ptr<const Linear> pack_quantised(const QuantisedWeights& w, Dtype dtype, Device device) {
  require_dtype(dtype);
  auto linear = std::make_shared<generic::QuantisedLinear>();
  linear->heads = w.heads;
  linear->out = w.out;
  linear->in = w.in;
  linear->dtype = dtype;
  linear->format = w.format;
  if (w.format == WeightFormat::fp8) {
    linear->block_rows = w.block_rows;
    linear->block_cols = w.block_cols;
  }
  linear->scale_rows = w.block_rows;
  linear->scale_cols = w.block_cols;
  linear->row_blocks = w.row_blocks();
  // As cuBLASLt wants rows of scales: in fours.
  const bool blocks = w.format == WeightFormat::fp8 && w.block_rows > 0;
  linear->scale_stride = blocks ? (w.col_blocks() + 3) / 4 * 4 : w.col_blocks();
  std::vector<float> scales = w.scales;
  if (linear->scale_stride != w.col_blocks()) {
    scales.assign(static_cast<size_t>(w.heads * w.row_blocks() * linear->scale_stride), 0.0f);
    for (int64_t r = 0; r < w.heads * w.row_blocks(); ++r)
      std::copy_n(w.scales.begin() + r * w.col_blocks(), w.col_blocks(), scales.begin() + r * linear->scale_stride);
  }
  std::vector<uint8_t> codes = w.codes;
  if (w.format == WeightFormat::mxfp4) {
    codes.assign((w.codes.size() + 1) / 2, 0);
    for (size_t i = 0; i < w.codes.size(); ++i) codes[i / 2] |= static_cast<uint8_t>(w.codes[i] << (i % 2 * 4));
  }
  if (w.format == WeightFormat::fp8)
    linear->finite = std::none_of(codes.begin(), codes.end(), [](uint8_t c) { return (c & 0x7f) == 0x7f; });
  linear->codes = Buffer::copy_of(codes.data(), codes.size(), device);
  linear->scales = Buffer::copy_of(scales.data(), scales.size() * sizeof(float), device);
  linear->bytes = linear->codes.size() + linear->scales.size();
  return linear;
}

std::string project_kernel(const backend::GpuModel& gpu, const ops::ProjectArgs& a) {
  const Linear& w = *a.weights;
  const Widens by = widens(gpu, a);
  const std::string format(to_string(w.format)),
      slower = w.dtype == Dtype::bf16 && loses(a, by) ? ", slower than weights in bf16" : "";
  if (by != Widens::nowhere)
    return "cuda/sm90, " + format + " weights, " + (by == Widens::few_rows ? "few rows" : "many rows") + slower;
  if (takes_codes(gpu, a))
    return "cuda/sm90, fp8 inputs and weights by cuBLASLt, dequantised where it has no algorithm";
  const std::string product = "cuBLASLt in " + std::string(to_string(w.dtype));
  if (w.format == WeightFormat::plain) return "cuda/generic, " + product;
  return "cuda/generic, " + format + " weights dequantised for " + product + slower;
}

void project(Stream& stream, const ops::ProjectArgs& a) {
  const Linear& w = *a.weights;
  if (a.rows == 0 || w.heads == 0 || w.out == 0) return;
  const Queue& queue = stream.queue();
  const auto* quantised = w.format == WeightFormat::plain ? nullptr : static_cast<const generic::QuantisedLinear*>(&w);
  if (a.quantized)
    throw UnsupportedError("project: cuda writes no quantised output itself; the plan must quantise finished heads");

  const backend::GpuModel gpu = model_of(queue);
  if (const Widens by = widens(gpu, a); by != Widens::nowhere && quantised->finite)
    return project_widened(queue, a, *quantised, by);
  if (takes_codes(gpu, a) && project_codes(queue, a, *quantised)) return;
  // What codes stand for comes out the same but for rounding, wherever they are not multiplied as they are.
  const bool fp8 = a.activations == Activations::fp8_128;

  const int64_t x_first = run_of(a.x_rows), y_first = run_of(a.y_rows);
  // cuBLASLt writes f32 products as f32 alone.
  const Dtype y_dtype = w.dtype == Dtype::f32 ? Dtype::f32 : a.y.dtype();
  const bool stage_x = fp8 || x_first < 0 || a.x.dtype() != w.dtype, stage_y = y_first < 0 || a.y.dtype() != y_dtype;
  const size_t size = size_of(w.dtype), y_size = size_of(y_dtype);

  // Scratch: x rows | y rows | dequantised weights of some outputs.
  const size_t x_row = stage_x ? static_cast<size_t>(w.heads * w.in) * size : 0,
               y_row = stage_y ? static_cast<size_t>(w.heads * w.out) * y_size : 0,
               w_out = quantised ? static_cast<size_t>(w.heads * w.in) * size : 0;
  // Sums of slices have half of it, or all that nothing else needs.
  const int64_t slices = a.batch_invariant && w.heads == 1 ? slices_of(w) : 1;
  const bool alone = x_row + y_row + w_out == 0;
  const size_t room = slices == 1 ? a.scratch.per_worker : alone ? 0 : a.scratch.per_worker / 2;
  float* const parts = reinterpret_cast<float*>(a.scratch.data + up(room));
  const size_t for_weights = w_out > 0 ? (x_row + y_row > 0 ? room / 2 : room) : 0;
  const int64_t outs = w_out > 0 ? piece_size(w.out, static_cast<int64_t>(for_weights / w_out)) : w.out;
  const int64_t rows = x_row + y_row > 0 ? std::min<int64_t>(a.rows, (static_cast<int64_t>(room - for_weights) - 512) /
                                                                         static_cast<int64_t>(x_row + y_row))
                                         : a.rows;
  if (outs < 1 || rows < 1)
    throw ShapeError("project: scratch is " + std::to_string(room) + " bytes, one row and one output need " +
                     std::to_string(x_row + y_row + w_out + 512));
  std::byte* const x_at = a.scratch.data;
  std::byte* const y_at = x_at + up(x_row * static_cast<size_t>(rows));
  std::byte* const w_at = a.scratch.data + (room - for_weights);
  const int32_t* const x_rows = x_first < 0 ? queue.reads(a.x_rows, "project", "x_rows") : nullptr;
  const int32_t* const y_rows = y_first < 0 ? queue.reads(a.y_rows, "project", "y_rows") : nullptr;

  for (int64_t out = 0; out < w.out; out += outs) {
    const int64_t count = std::min(outs, w.out - out);
    const std::byte* weights = w_at;
    if (quantised) generic::dequantise(queue, *quantised, out, count, w_at);
    else weights = static_cast<const generic::PlainLinear&>(w).memory.data() + static_cast<size_t>(out * w.in) * size;
    for (int64_t first = 0; first < a.rows; first += rows) {
      const int64_t n = std::min(rows, a.rows - first);
      AnyView<Token, Head, In> x(a.x.dtype(), a.x.at(std::max<int64_t>(x_first, 0) + (x_rows ? 0 : first), 0, 0),
                                 {n, w.heads, w.in}, a.x.strides());
      if (stage_x) {
        const AnyMutableView<Token, Head, In> staged(w.dtype, x_at, {n, w.heads, w.in});
        if (fp8 && (out == 0 || rows < a.rows))
          generic::quantise_activations(queue.stream(),
                                        {.x = {a.x.dtype(), x_rows ? a.x.data() : x.data(), x.extents(), a.x.strides()},
                                         .x_rows = x_rows ? x_rows + first : nullptr,
                                         .rows = n,
                                         .padded = n,
                                         .values = x_at,
                                         .value_dtype = w.dtype});
        else if (out == 0 || rows < a.rows)
          generic::copy_rows(queue,
                             {.x = {a.x.dtype(), x_rows ? a.x.data() : x.data(), x.extents(), a.x.strides()},
                              .y = staged,
                              .x_rows = x_rows ? x_rows + first : nullptr,
                              .y_rows = nullptr,
                              .rows = n},
                             "project");
        x = staged;
      }
      AnyMutableView<Token, Head, Out> y(a.y.dtype(),
                                         a.y.at(std::max<int64_t>(y_first, 0) + (y_rows ? 0 : first), 0, out),
                                         {n, w.heads, count}, a.y.strides());
      const AnyMutableView<Token, Head, Out> target = y;
      if (stage_y) y = {y_dtype, y_at, {n, w.heads, count}};
      Product product{.rows = n,
                      .out = count,
                      .in = w.in,
                      .batch = w.heads,
                      .dtype = w.dtype,
                      .y_dtype = y_dtype,
                      .x = x.data(),
                      .w = weights,
                      .y = y.data(),
                      .x_row = x.stride<Token>(),
                      .x_matrix = x.stride<Head>(),
                      .w_row = w.in,
                      .w_matrix = (quantised ? count : w.out) * w.in,
                      .y_row = y.stride<Token>(),
                      .y_matrix = y.stride<Head>(),
                      .invariant = a.batch_invariant};
      if (slices > 1)
        multiply_slices(queue, product, slices, {parts, (a.scratch.per_worker - up(room)) / sizeof(float)});
      else queue.blas().multiply(product, queue.stream(), "project");
      if (stage_y)
        generic::copy_rows(queue,
                           {.x = {y_dtype, y.data(), {n, w.heads, count}, y.strides()},
                            .y = {target.dtype(), target.data(), target.extents(), target.strides()},
                            .x_rows = nullptr,
                            .y_rows = y_rows ? y_rows + first : nullptr,
                            .rows = n},
                           "project");
    }
  }
}

}  // namespace mla::cuda
