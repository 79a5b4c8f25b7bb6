// Times the GPU's row ops, whole calls, against the bytes that must be read and written at a copy's speed. Answers are
// checked in the same run, sampled rows against a plain computation on the host.
//   rows_bench [json=FILE] [only=SUBSTRING]... [replays=N]     only: of an op's name
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "backend/cuda/core/queue.hpp"
#include "backend/run.hpp"
#include "cache/format.hpp"
#include "cuda/bench.hpp"
#include "cuda/device.hpp"
#include "cuda/kernels.hpp"
#include "cuda/staged.hpp"
#include "mla/device.hpp"
#include "mla/rotary.hpp"
#include "ops/quantize/codec.hpp"

namespace mla::cuda {
namespace {

using bench::Staged;
using test::DeviceArray;
constexpr Device kGpu{DeviceKind::cuda, 0};
constexpr double kCopyRoof = 3996;  // GB/s, read and written, of an H200

template <class T>
DeviceArray<T> random_array(size_t n, uint32_t seed) {
  DeviceArray<T> a(n);
  bench::fill_uniform(nullptr, dtype_of<T>::value, a.data(), n, seed);
  return a;
}

/// One way of calling an op: call(set) on inputs number `set`, and what a call moves.
struct Job {
  std::string op, shape;
  double bytes = 0;
  int sets = 1;
  std::function<void(int)> call;
  std::function<bool()> right;  // of set 0's answer
};

int sets_for(double bytes) { return static_cast<int>(std::clamp(std::ceil(320e6 / bytes), 1.0, 64.0)); }

template <class T>
using Sets = std::vector<DeviceArray<T>>;
template <class T>
Sets<T> random_sets(int sets, size_t n, uint32_t seed) {
  Sets<T> all;
  for (int i = 0; i < sets; ++i) all.push_back(random_array<T>(n, seed + 77 * i));
  return all;
}

// --- jobs: each made when its turn comes, so that memory is held for one at a time ---

CacheSpec spec_of(CacheFormat f) {
  CacheSpec s{.format = f, .page_size = 64, .k_scale = 0.05f};
  if (f == CacheFormat::fp8_ds_v4) s.latent = 448;
  return s;
}

/// A permutation of pages, so that rows lie all over the cache.
std::vector<int32_t> shuffled(int64_t n, uint32_t seed) {
  std::vector<int32_t> v(static_cast<size_t>(n));
  std::iota(v.begin(), v.end(), 0);
  std::shuffle(v.begin(), v.end(), std::mt19937(seed));
  return v;
}

Job append_job(Stream& stream, CacheFormat format, int64_t tokens) {
  const CacheSpec spec = spec_of(format);
  const int64_t pages = (tokens + 63) / 64, entry = spec.entry();
  Job job{.op = "append", .shape = std::string(to_string(format)) + " from bf16, tokens " + std::to_string(tokens)};
  job.bytes = static_cast<double>(tokens) * (2.0 * static_cast<double>(entry) + spec.token_bytes());
  job.sets = sets_for(job.bytes);
  auto x = std::make_shared<Sets<bf16>>(random_sets<bf16>(job.sets, static_cast<size_t>(tokens * entry), 1));
  auto caches = std::make_shared<std::vector<Cache>>();
  for (int i = 0; i < job.sets; ++i) caches->emplace_back(spec, pages, kGpu);
  std::vector<int32_t> order = shuffled(pages, 3), slots(static_cast<size_t>(tokens));
  for (int64_t t = 0; t < tokens; ++t) slots[t] = static_cast<int32_t>(order[t / 64] * 64 + t % 64);
  auto staged = std::make_shared<Staged<int32_t>>(slots);
  const auto args = [=](int set) {
    bf16* const at = (*x)[set].data();
    return ops::AppendArgs{.kv_c = View<const bf16, Token, Latent>(at, {tokens, spec.latent}, {entry, 1}),
                           .k_pe = View<const bf16, Token, Rope>(at + spec.latent, {tokens, spec.rope}, {entry, 1}),
                           .slots = staged->list(),
                           .cache = (*caches)[set].view()};
  };
  job.call = [=, &stream](int set) { ops::run(stream, args(set)); };
  job.right = [=] {
    const std::vector<bf16> in = (*x)[0].download();
    std::vector<std::byte> got(spec.page_bytes()), right(spec.page_bytes());
    for (int64_t page = 0; page < pages; page += std::max<int64_t>(1, pages / 5)) {
      check(cudaMemcpy(got.data(), (*caches)[0].view().page(order[page]), got.size(), cudaMemcpyDeviceToHost), "bench",
            "download");
      std::vector<float> row(static_cast<size_t>(entry));
      const int64_t count = std::min<int64_t>(64, tokens - page * 64);
      std::fill(right.begin(), right.end(), std::byte{0});
      for (int64_t t = 0; t < count; ++t) {
        for (int64_t i = 0; i < entry; ++i) row[i] = to_float(in[(page * 64 + t) * entry + i]);
        cache::format(format).encode(spec, right.data(), t, row.data(), row.data() + spec.latent);
      }
      if (count == 64 && got != right) return false;
    }
    return true;
  };
  return job;
}

Job rope_append_job(Stream& stream, CacheFormat format, int64_t tokens, int64_t heads) {
  const CacheSpec spec = spec_of(format);
  const int64_t pages = (tokens + 63) / 64, entry = spec.entry(), row = heads * 192;
  Job job{.op = "rope_append",
          .shape = std::string(to_string(format)) + ", tokens " + std::to_string(tokens) + ", heads " +
                   std::to_string(heads)};
  job.bytes = static_cast<double>(tokens) * (2.0 * static_cast<double>(entry) + spec.token_bytes() +
                                             4.0 * static_cast<double>((heads + 1) * spec.rope));
  job.sets = sets_for(job.bytes);
  auto x = std::make_shared<Sets<bf16>>(random_sets<bf16>(job.sets, static_cast<size_t>(tokens * entry), 1));
  auto q = std::make_shared<Sets<bf16>>(random_sets<bf16>(job.sets, static_cast<size_t>(tokens * row), 2));
  auto caches = std::make_shared<std::vector<Cache>>();
  for (int i = 0; i < job.sets; ++i) caches->emplace_back(spec, pages, kGpu);
  std::vector<int32_t> slots(static_cast<size_t>(tokens)), positions(static_cast<size_t>(tokens));
  std::iota(slots.begin(), slots.end(), 0);
  for (int64_t t = 0; t < tokens; ++t) positions[t] = static_cast<int32_t>(t * 37 % 16384);
  auto slots_at = std::make_shared<Staged<int32_t>>(slots);
  auto positions_at = std::make_shared<Staged<int32_t>>(positions);
  auto table = std::make_shared<RotaryTable>(RopeConfig{}, spec.rope, 16384, kGpu);
  auto host = std::make_shared<RotaryTable>(RopeConfig{}, spec.rope, 16384);
  auto before = std::make_shared<std::vector<bf16>>((*q)[0].download(0, static_cast<size_t>(row)));
  job.call = [=, &stream](int set) {
    bf16* const at = (*x)[set].data();
    ops::run(stream,
             ops::RopeAppendArgs{.q_pe = View<bf16, Token, Head, Rope>((*q)[set].data() + 128,
                                                                       {tokens, heads, spec.rope}, {row, 192, 1}),
                                 .kv_c = View<const bf16, Token, Latent>(at, {tokens, spec.latent}, {entry, 1}),
                                 .k_pe = View<bf16, Token, Rope>(at + spec.latent, {tokens, spec.rope}, {entry, 1}),
                                 .positions = positions_at->list(),
                                 .table = table.get(),
                                 .slots = slots_at->list(),
                                 .cache = (*caches)[set].view()});
  };
  job.right = [=] {
    const std::vector<bf16> after = (*q)[0].download(0, static_cast<size_t>(row));
    const float *cos = host->cos(positions[0]), *sin = host->sin(positions[0]);
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < 192; ++i) {
        float want = to_float((*before)[h * 192 + i]);
        if (i >= 128) {
          const int64_t p = (i - 128) / 2, even = h * 192 + 128 + 2 * p;
          const float a = to_float((*before)[even]), b = to_float((*before)[even + 1]);
          want = i % 2 == 0 ? a * cos[p] - b * sin[p] : b * cos[p] + a * sin[p];
        }
        if (!(std::abs(to_float(after[h * 192 + i]) - want) <= 0x1p-8f * std::abs(want) + 1e-6f)) return false;
      }
    return true;
  };
  return job;
}

Job gather_job(Stream& stream, CacheFormat format, Dtype dtype, int64_t tokens, bool skewed) {
  const CacheSpec spec = spec_of(format);
  const int64_t pages = (tokens + 63) / 64 + 64, entry = spec.entry();
  Job job{.op = "gather",
          .shape = std::string(to_string(format)) + " to " + std::string(to_string(dtype)) + ", tokens " +
                   std::to_string(tokens) + (skewed ? " skewed" : "")};
  job.bytes = static_cast<double>(tokens) *
              (static_cast<double>(entry) * static_cast<double>(size_of(dtype)) + spec.token_bytes());
  job.sets = sets_for(job.bytes);
  auto caches = std::make_shared<std::vector<Cache>>();
  for (int i = 0; i < job.sets; ++i) {
    caches->emplace_back(spec, pages, kGpu);
    // Any bytes are codes but NaN; scales must be numbers: rows are encoded for one page and copied to all.
    std::vector<std::byte> page(spec.page_bytes());
    std::mt19937 random(static_cast<uint32_t>(i));
    std::vector<float> row(static_cast<size_t>(entry));
    for (int64_t t = 0; t < 64; ++t) {
      for (float& v : row) v = static_cast<float>(static_cast<int32_t>(random())) * 0x1p-30f;
      cache::format(format).encode(spec, page.data(), t, row.data(), row.data() + spec.latent);
    }
    check(cudaMemcpy(caches->back().view().data, page.data(), page.size(), cudaMemcpyHostToDevice), "bench", "upload");
    for (int64_t p = 1; p < pages; ++p)
      check(cudaMemcpyAsync(caches->back().view().page(p), caches->back().view().data, page.size(),
                            cudaMemcpyDeviceToDevice),
            "bench", "copy");
  }
  const int64_t requests = 32;
  std::vector<GatherPiece> list;
  int32_t row = 0;
  for (int64_t r = 0; r < requests; ++r) {
    int64_t count = tokens / requests;
    if (skewed) count = r == 5 ? tokens - 16 * (requests - 1) : 16;
    list.push_back({.request = static_cast<int32_t>(r), .start = 0, .count = static_cast<int32_t>(count), .row = row});
    row += static_cast<int32_t>(count);
  }
  const int64_t rows = row, columns = (tokens + 63) / 64;
  std::vector<int32_t> table(static_cast<size_t>(requests * columns)), order = shuffled(pages, 9);
  for (size_t i = 0; i < table.size(); ++i) table[i] = order[i * 7919 % order.size()];
  for (int64_t r = 0; r < requests && !skewed; ++r)  // pages of their own
    for (int64_t c = 0; c * 64 < tokens / requests; ++c)
      table[r * columns + c] = order[(r * ((tokens / requests + 63) / 64) + c) % pages];
  if (skewed)
    for (int64_t c = 0; c < columns; ++c) table[5 * columns + c] = order[c];
  auto table_at = std::make_shared<Staged<int32_t>>(table);
  auto pieces = std::make_shared<Staged<GatherPiece>>(list);
  const int64_t out_bytes = rows * entry * static_cast<int64_t>(size_of(dtype));
  auto out = std::make_shared<Sets<std::byte>>();
  for (int i = 0; i < job.sets; ++i) out->emplace_back(static_cast<size_t>(out_bytes));
  check(cudaDeviceSynchronize(), "bench", "inputs");
  job.call = [=, &stream](int set) {
    std::byte* const at = (*out)[set].data();
    ops::run(
        stream,
        ops::GatherArgs{
            .cache = (*caches)[set].view(),
            .block_table = {{table_at->list().data(), {requests, columns}}, table_at->list().device()},
            .pieces = pieces->list(),
            .kv_c = {dtype, at, {rows, spec.latent}, {entry, 1}},
            .k_pe = {dtype, at + spec.latent * static_cast<int64_t>(size_of(dtype)), {rows, spec.rope}, {entry, 1}}});
  };
  job.right = [=] {
    const std::vector<std::byte> got = (*out)[0].download();
    std::vector<std::byte> page(spec.page_bytes());
    check(cudaMemcpy(page.data(), (*caches)[0].view().data, page.size(), cudaMemcpyDeviceToHost), "bench", "download");
    std::vector<float> want(static_cast<size_t>(64 * entry));
    cache::format(format).decode(spec, page.data(), 0, 64, want.data(), entry);
    for (const GatherPiece& p : list)
      for (int64_t i = 0; i < p.count; i += 13)
        for (int64_t d = 0; d < entry; ++d) {
          std::byte stored[4];
          store_float(dtype, stored, 0, want[i % 64 * entry + d]);
          if (std::memcmp(stored, got.data() + ((p.row + i) * entry + d) * static_cast<int64_t>(size_of(dtype)),
                          size_of(dtype)) != 0)
            return false;
        }
    return true;
  };
  return job;
}

Job merge_job(Stream& stream, int64_t tokens, int64_t heads, int64_t width, bool with_rows) {
  const int64_t n = tokens * heads;
  Job job{.op = "merge",
          .shape = "tokens " + std::to_string(tokens) + ", heads " + std::to_string(heads) + ", width " +
                   std::to_string(width) + (with_rows ? ", rows listed" : "")};
  job.bytes = static_cast<double>(n) * (12.0 * static_cast<double>(width) + 12);
  job.sets = sets_for(job.bytes);
  auto out = std::make_shared<Sets<float>>(random_sets<float>(job.sets, static_cast<size_t>(n * width), 1));
  auto other = std::make_shared<Sets<float>>(random_sets<float>(job.sets, static_cast<size_t>(n * width), 2));
  auto lse = std::make_shared<Sets<float>>(random_sets<float>(job.sets, static_cast<size_t>(n), 3));
  auto other_lse = std::make_shared<Sets<float>>(random_sets<float>(job.sets, static_cast<size_t>(n), 4));
  auto rows = std::make_shared<Staged<int32_t>>(with_rows ? shuffled(tokens, 4) : std::vector<int32_t>{});
  auto before = std::make_shared<std::vector<float>>((*out)[0].download());
  auto lse_before = std::make_shared<std::vector<float>>((*lse)[0].download());
  job.call = [=, &stream](int set) {
    ops::run(stream, ops::MergeArgs{.out = {(*out)[set].data(), {tokens, heads, width}},
                                    .lse = {(*lse)[set].data(), {tokens, heads}},
                                    .other = {(*other)[set].data(), {tokens, heads, width}},
                                    .other_lse = {(*other_lse)[set].data(), {tokens, heads}},
                                    .rows = rows->list()});
  };
  job.right = [=] {
    const std::vector<float> after = (*out)[0].download(), add = (*other)[0].download(),
                             add_lse = (*other_lse)[0].download();
    for (int64_t t = 0; t < tokens; t += std::max<int64_t>(1, tokens / 40))
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t row = with_rows ? rows->list()[t] : t;
        const double a = (*lse_before)[row * heads + h], b = add_lse[t * heads + h], m = std::max(a, b),
                     wa = std::exp(a - m), wb = std::exp(b - m);
        for (int64_t d = 0; d < width; ++d) {
          const double want =
              (wa * (*before)[(row * heads + h) * width + d] + wb * add[(t * heads + h) * width + d]) / (wa + wb);
          if (!(std::abs(after[(row * heads + h) * width + d] - want) <= 2e-6)) return false;
        }
      }
    return true;
  };
  return job;
}

Job merge_splits_job(Stream& stream, int64_t tokens, int64_t heads, int64_t width, int64_t splits) {
  const int64_t n = tokens * heads;
  Job job{.op = "merge_splits",
          .shape = "tokens " + std::to_string(tokens) + ", heads " + std::to_string(heads) + ", width " +
                   std::to_string(width) + ", splits " + std::to_string(splits)};
  job.bytes =
      static_cast<double>(n) * (4.0 * static_cast<double>(width * (splits + 1)) + 4.0 * static_cast<double>(splits));
  job.sets = sets_for(job.bytes);
  auto part = std::make_shared<Sets<float>>(random_sets<float>(job.sets, static_cast<size_t>(n * splits * width), 1));
  auto part_lse = std::make_shared<Sets<float>>(random_sets<float>(job.sets, static_cast<size_t>(n * splits), 2));
  auto out = std::make_shared<DeviceArray<float>>(static_cast<size_t>(n * width));
  auto lse = std::make_shared<DeviceArray<float>>(static_cast<size_t>(n));
  std::vector<SplitRows> list;
  for (int64_t t = 0; t < tokens; ++t)
    list.push_back({static_cast<int32_t>(t), 1, static_cast<int32_t>(t * splits), static_cast<int32_t>(splits)});
  auto items = std::make_shared<Staged<SplitRows>>(list);
  job.call = [=, &stream](int set) {
    ops::run(stream, ops::MergeSplitsArgs{.partial_out = {(*part)[set].data(), {tokens * splits, heads, width}},
                                          .partial_lse = {(*part_lse)[set].data(), {tokens * splits, heads}},
                                          .items = items->list(),
                                          .out = {out->data(), {tokens, heads, width}},
                                          .lse = {lse->data(), {tokens, heads}}});
  };
  job.right = [=] {
    const std::vector<float> got = out->download(), x = (*part)[0].download(), l = (*part_lse)[0].download();
    for (int64_t t = 0; t < tokens; t += std::max<int64_t>(1, tokens / 10))
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t d = 0; d < width; d += 7) {
          double sum = 0, total = 0;
          for (int64_t s = 0; s < splits; ++s) {
            const int64_t at = (t * splits + s) * heads + h;
            sum += std::exp(static_cast<double>(l[at])) * x[at * width + d];
            total += std::exp(static_cast<double>(l[at]));
          }
          if (!(std::abs(got[(t * heads + h) * width + d] - sum / total) <= 4e-6)) return false;
        }
    return true;
  };
  return job;
}

template <class T>
Job quantize_job(Stream& stream, const char* output, int64_t tokens, int64_t width) {
  OutputSpec spec = parse_output_spec(output);
  spec.scale = 0.0123f;
  spec.global_scale = 448.0f * 6.0f / 2.0f;
  Job job{.op = "quantize",
          .shape = std::string(output) + " from " + std::string(to_string(dtype_of<T>::value)) + ", tokens " +
                   std::to_string(tokens) + ", width " + std::to_string(width)};
  const QuantizedView shape{spec, tokens, width, nullptr, spec.row_bytes(width), nullptr};
  job.bytes =
      static_cast<double>(tokens * width * static_cast<int64_t>(sizeof(T))) + ops::quantized_bytes(shape, tokens);
  job.sets = sets_for(job.bytes);
  auto x = std::make_shared<Sets<T>>(random_sets<T>(job.sets, static_cast<size_t>(tokens * width), 5));
  auto codes = std::make_shared<Sets<std::byte>>();
  auto scales = std::make_shared<Sets<std::byte>>();
  for (int i = 0; i < job.sets; ++i) {
    codes->emplace_back(static_cast<size_t>(spec.data_bytes(tokens, width)));
    scales->emplace_back(static_cast<size_t>(spec.scale_bytes(tokens, width)));
  }
  job.call = [=, &stream](int set) {
    ops::run(stream, ops::QuantizeArgs{.x = View<const T, Token, HeadValue>((*x)[set].data(), {tokens, width}),
                                       .y = {spec, tokens, width, (*codes)[set].data(), spec.row_bytes(width),
                                             (*scales)[set].data()}});
  };
  job.right = [=] {
    const std::vector<T> in = (*x)[0].download();
    const std::vector<std::byte> got = (*codes)[0].download(), got_scales = (*scales)[0].download();
    std::vector<float> row(static_cast<size_t>(width));
    std::vector<std::byte> right(static_cast<size_t>(spec.row_bytes(width))), right_scale(4);
    const int64_t size = spec.group_size();
    for (int64_t t = 0; t < tokens; t += std::max<int64_t>(1, tokens / 40)) {
      for (int64_t i = 0; i < width; ++i) row[i] = to_float(in[t * width + i]);
      if (size == 0) cache::encode_e4m3(row.data(), right.data(), width, spec.scale);
      for (int64_t g = 0; g < spec.groups(width); ++g) {
        ops::encode_group(spec, &row[g * size], size, right.data() + spec.row_bytes(g * size), right_scale.data());
        if (std::memcmp(right_scale.data(), got_scales.data() + spec.scale_offset(tokens, width, t, g),
                        ops::scale_is_f32(spec) ? 4 : 1) != 0)
          return false;
      }
      if (std::memcmp(right.data(), got.data() + t * spec.row_bytes(width), right.size()) != 0) return false;
    }
    return true;
  };
  return job;
}

Job norm_job(Stream& stream, int64_t tokens, int64_t width) {
  Job job{.op = "norm", .shape = "bf16, tokens " + std::to_string(tokens) + ", width " + std::to_string(width)};
  job.bytes = 4.0 * static_cast<double>(tokens * width);
  job.sets = sets_for(job.bytes);
  auto x = std::make_shared<Sets<bf16>>(random_sets<bf16>(job.sets, static_cast<size_t>(tokens * width), 6));
  auto y = std::make_shared<Sets<bf16>>(random_sets<bf16>(job.sets, static_cast<size_t>(tokens * width), 7));
  auto weight = std::make_shared<DeviceArray<float>>(random_array<float>(static_cast<size_t>(width), 8));
  job.call = [=, &stream](int set) {
    ops::run(stream, ops::NormArgs{.x = View<const bf16, Token, In>((*x)[set].data(), {tokens, width}),
                                   .weight = {weight->data(), static_cast<size_t>(width)},
                                   .eps = 1e-6,
                                   .y = View<bf16, Token, In>((*y)[set].data(), {tokens, width})});
  };
  job.right = [=] {
    const std::vector<bf16> in = (*x)[0].download(), got = (*y)[0].download();
    const std::vector<float> w = weight->download();
    for (int64_t t = 0; t < tokens; t += std::max<int64_t>(1, tokens / 40)) {
      double sum = 0;
      for (int64_t i = 0; i < width; ++i)
        sum += static_cast<double>(to_float(in[t * width + i])) * to_float(in[t * width + i]);
      const double inverse = 1 / std::sqrt(sum / static_cast<double>(width) + 1e-6);
      for (int64_t i = 0; i < width; ++i) {
        const double want = to_float(in[t * width + i]) * inverse * w[i];
        if (!(std::abs(to_float(got[t * width + i]) - want) <= 0x1p-8 * std::abs(want) + 1e-6)) return false;
      }
    }
    return true;
  };
  return job;
}

Job map_job(Stream& stream, int64_t rows) {
  constexpr int64_t topk = 2048, columns = 2048;
  Job job{.op = "map_to_slots", .shape = "rows " + std::to_string(rows) + ", topk 2048"};
  job.bytes = 8.0 * static_cast<double>(rows * topk);
  job.sets = sets_for(job.bytes);
  auto in = std::make_shared<Sets<int32_t>>();
  auto out = std::make_shared<Sets<int32_t>>();
  std::vector<int32_t> positions(static_cast<size_t>(rows * topk)), requests(static_cast<size_t>(rows));
  std::mt19937 random(8);
  for (int32_t& p : positions) p = static_cast<int32_t>(random() % (columns * 64 + 100)) - 50;
  for (int64_t t = 0; t < rows; ++t) requests[t] = static_cast<int32_t>(t % 4);
  for (int i = 0; i < job.sets; ++i) in->emplace_back(positions), out->emplace_back(positions.size());
  auto requests_at = std::make_shared<Staged<int32_t>>(requests);
  auto table = std::make_shared<Staged<int32_t>>(shuffled(4 * columns, 5));
  const auto args = [=](int set) {
    return ops::MapToSlotsArgs{.positions = {(*in)[set].data(), {rows, topk}},
                               .requests = requests_at->list(),
                               .block_table = {{table->list().data(), {4, columns}}, table->list().device()},
                               .page_size = 64,
                               .pages = 4 * columns - 10,
                               .lengths = {},
                               .slots = {(*out)[set].data(), {rows, topk}}};
  };
  job.call = [=, &stream](int set) { ops::run(stream, args(set)); };
  job.right = [=] {
    ops::MapToSlotsArgs a = args(0);
    a.positions = {positions.data(), {rows, topk}};
    std::vector<int32_t> right(positions.size());
    ops::reference(a, {right.data(), {rows, topk}});
    return (*out)[0].download() == right;
  };
  return job;
}

/// The indexer's queries, rotated on their way to codes.
Job index_query_job(Stream& stream, int64_t tokens) {
  constexpr int64_t heads = 64, dim = 128, positions = 8192;
  Job job{.op = "index_query", .shape = "tokens " + std::to_string(tokens) + ", 64 heads of 128"};
  job.bytes = static_cast<double>(tokens * heads) * (dim * 5.0 + 8.0);
  job.sets = sets_for(job.bytes);
  const auto count = static_cast<size_t>(tokens * heads);
  auto q = std::make_shared<Sets<float>>(random_sets<float>(job.sets, count * dim, 3));
  auto weights = std::make_shared<DeviceArray<float>>(random_array<float>(count, 4));
  auto codes = std::make_shared<Sets<fp8_e4m3>>();
  for (int i = 0; i < job.sets; ++i) codes->emplace_back(count * dim);
  auto scaled = std::make_shared<DeviceArray<float>>(count);
  const RopeConfig config{.interleaved = false};
  auto table = std::make_shared<RotaryTable>(config, 64, positions, kGpu);
  std::vector<int32_t> at(static_cast<size_t>(tokens));
  for (int64_t t = 0; t < tokens; ++t) at[t] = static_cast<int32_t>(t % positions);
  auto staged = std::make_shared<Staged<int32_t>>(at);
  const auto args = [=](int set) {
    return ops::IndexQueryArgs{.q = {(*q)[set].data(), {tokens, heads, dim}},
                               .weights = {weights->data(), {tokens, heads}},
                               .codes = {(*codes)[set].data(), {tokens, heads, dim}},
                               .scaled_weights = {scaled->data(), {tokens, heads}},
                               .table = table.get(),
                               .positions = staged->list()};
  };
  job.call = [=, &stream](int set) { ops::run(stream, args(set)); };
  job.right = [=] {
    const std::vector<float> in = (*q)[0].download(), w = weights->download(), got_scaled = scaled->download();
    const std::vector<fp8_e4m3> got = (*codes)[0].download();
    const RotaryTable on_host(config, 64, positions);
    std::vector<fp8_e4m3> right(heads * dim);
    std::vector<float> right_scaled(heads);
    for (int64_t t = 0; t < tokens; t += std::max<int64_t>(1, tokens / 40)) {
      ops::reference({.q = {in.data() + t * heads * dim, {1, heads, dim}},
                      .weights = {w.data() + t * heads, {1, heads}},
                      .codes = {right.data(), {1, heads, dim}},
                      .scaled_weights = {right_scaled.data(), {1, heads}},
                      .table = &on_host,
                      .positions = {&at[static_cast<size_t>(t)], 1}});
      for (int64_t i = 0; i < heads * dim; ++i) {  // a code apart at most: the reference rotates in float64
        const float x = to_float(got[t * heads * dim + i]), y = to_float(right[i]);
        if (!(std::abs(x - y) <= std::abs(y) / 8 + 0x1p-9f)) return false;
      }
      if (!std::equal(right_scaled.begin(), right_scaled.end(), &got_scaled[t * heads])) return false;
    }
    return true;
  };
  return job;
}

void measure_all(bench::Report& report) {
  Stream stream(kGpu);
  std::vector<std::pair<const char*, std::function<Job()>>> jobs;
  for (const CacheFormat f : cache_formats()) {
    if (f == CacheFormat::f32 || f == CacheFormat::f16) continue;
    jobs.emplace_back("append", [=, &stream] { return append_job(stream, f, 65536); });
  }
  jobs.emplace_back("append", [&] { return append_job(stream, CacheFormat::bf16, 64); });
  jobs.emplace_back("append", [&] { return append_job(stream, CacheFormat::bf16, 393216); });
  jobs.emplace_back("rope_append", [&] { return rope_append_job(stream, CacheFormat::bf16, 8192, 128); });
  jobs.emplace_back("rope_append", [&] { return rope_append_job(stream, CacheFormat::bf16, 32768, 16); });
  jobs.emplace_back("rope_append", [&] { return rope_append_job(stream, CacheFormat::bf16, 64, 128); });
  jobs.emplace_back("rope_append", [&] { return rope_append_job(stream, CacheFormat::bf16, 1, 16); });
  jobs.emplace_back("rope_append", [&] { return rope_append_job(stream, CacheFormat::fp8_ds_mla, 64, 128); });
  for (const CacheFormat f : {CacheFormat::bf16, CacheFormat::fp8, CacheFormat::fp8_ds_mla, CacheFormat::fp8_ds_v4})
    jobs.emplace_back("gather", [=, &stream] { return gather_job(stream, f, Dtype::bf16, 65536, false); });
  jobs.emplace_back("gather", [&] { return gather_job(stream, CacheFormat::bf16, Dtype::bf16, 65536, true); });
  jobs.emplace_back("gather", [&] { return gather_job(stream, CacheFormat::bf16, Dtype::f32, 65536, false); });
  jobs.emplace_back("gather", [&] { return gather_job(stream, CacheFormat::bf16, Dtype::bf16, 393216, false); });
  jobs.emplace_back("gather", [&] { return gather_job(stream, CacheFormat::bf16, Dtype::bf16, 1024, false); });
  jobs.emplace_back("merge", [&] { return merge_job(stream, 4096, 16, 128, false); });
  jobs.emplace_back("merge", [&] { return merge_job(stream, 4096, 128, 128, true); });
  jobs.emplace_back("merge", [&] { return merge_job(stream, 1024, 128, 512, false); });
  jobs.emplace_back("merge", [&] { return merge_job(stream, 16, 16, 128, false); });
  jobs.emplace_back("merge_splits", [&] { return merge_splits_job(stream, 64, 128, 512, 8); });
  jobs.emplace_back("merge_splits", [&] { return merge_splits_job(stream, 1, 128, 512, 32); });
  jobs.emplace_back("merge_splits", [&] { return merge_splits_job(stream, 1, 16, 512, 128); });
  for (const char* output :
       {"fp8", "fp8_128", "fp8_64_tma", "fp8_128_column", "fp8_128_ue8m0", "fp8_128_packed", "nvfp4", "mxfp4"}) {
    jobs.emplace_back("quantize", [=, &stream] { return quantize_job<float>(stream, output, 4096, 16384); });
    jobs.emplace_back("quantize", [=, &stream] { return quantize_job<bf16>(stream, output, 8192, 16384); });
  }
  jobs.emplace_back("quantize", [&] { return quantize_job<float>(stream, "fp8_128", 64, 16384); });
  jobs.emplace_back("quantize", [&] { return quantize_job<float>(stream, "fp8_128", 65536, 2048); });
  jobs.emplace_back("norm", [&] { return norm_job(stream, 65536, 512); });
  jobs.emplace_back("norm", [&] { return norm_job(stream, 32768, 1536); });
  jobs.emplace_back("norm", [&] { return norm_job(stream, 8192, 7168); });
  jobs.emplace_back("norm", [&] { return norm_job(stream, 64, 1536); });
  jobs.emplace_back("map_to_slots", [&] { return map_job(stream, 4096); });
  jobs.emplace_back("index_query", [&] { return index_query_job(stream, 4096); });
  jobs.emplace_back("index_query", [&] { return index_query_job(stream, 16); });

  for (const auto& [name, make] : jobs) {
    if (!report.wants(name)) continue;
    const Job job = make();
    check(cudaDeviceSynchronize(), "bench", "inputs");
    job.call(0);
    stream.synchronize();
    const bool right = job.right();
    const bench::Times times = bench::time_calls(stream.queue().stream(), bench::calls_for(job.sets), report.replays(),
                                                 [&](int i) { job.call(i % job.sets); });
    const double rate = job.bytes / times.median * 1e-3;
    report.add({{"op", job.op},
                {"shape", job.shape},
                {"bytes", static_cast<int64_t>(job.bytes)},
                {"gb_per_s", bench::rounded(rate, 0)},
                {"percent_of_copy", bench::rounded(100 * rate / kCopyRoof, 1)}},
               times, right);
  }
}

}  // namespace
}  // namespace mla::cuda

int main(int argc, char** argv) {
  return mla::cuda::bench::run(
      argc, argv,
      {.columns = {"bytes", "gb_per_s", "percent_of_copy"}, .head = {{"copy_roof_gb_per_s", mla::cuda::kCopyRoof}}},
      mla::cuda::measure_all);
}
