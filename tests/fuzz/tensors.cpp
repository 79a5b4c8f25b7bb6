// DLPack tensors, items and tables of any kind into the C interface's ops: a call does what it says, or fails with a
// status and a line that begin with its name, and has changed nothing. Memory is exactly as large as each tensor says
// it is, so that a sanitizer sees what lies outside.
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "fuzz/fuzz.hpp"
#include "mla/c/mla.h"

using mla::fuzz::Source;

namespace {

constexpr int64_t kMostBytes = 1 << 16;

// A tensor's description, hostile or not, and memory for exactly what it spans.
struct Tensor {
  int64_t shape[8] = {}, strides[8] = {};
  DLTensor tensor{};
  std::unique_ptr<uint8_t[]> memory;
  size_t bytes = 0;
  bool missing = false;  // a null pointer where a tensor is needed
  bool lost = false;     // has elements but no memory: what is not to be worked on
  std::vector<uint8_t> before;

  Tensor(Source& in, std::vector<int64_t> want, DLDataType type) {
    missing = in.byte() == 255;
    tensor.device = {kDLCPU, 0};
    tensor.dtype = type;
    tensor.ndim = static_cast<int32_t>(want.size());
    for (size_t i = 0; i < want.size(); ++i) shape[i] = want[i];
    int64_t dense = 1;
    for (size_t i = want.size(); i-- > 0;) {
      strides[i] = dense;
      if (__builtin_mul_overflow(dense, shape[i] > 0 ? shape[i] : 1, &dense)) dense = INT64_MAX;
    }
    tensor.shape = shape;
    tensor.strides = in.flag() ? strides : nullptr;
    bool null = false;
    for (int64_t damage = in.byte() < 200 ? 0 : in.within(1, 2); damage > 0; --damage) {
      const size_t at = static_cast<size_t>(in.within(0, 3));
      switch (in.within(0, 9)) {
        case 0:
        case 1: shape[at] = in.odd(0, 9); break;
        case 2:
        case 3:
          strides[at] = in.odd(0, 40);
          tensor.strides = strides;
          break;
        case 4: tensor.ndim = static_cast<int32_t>(in.odd(0, 5)); break;
        case 5: tensor.dtype = {in.byte(), in.byte(), static_cast<uint16_t>(in.within(0, 2))}; break;
        case 6: tensor.byte_offset = static_cast<uint64_t>(in.odd(0, 16)); break;
        case 7: tensor.device = {static_cast<DLDeviceType>(in.within(0, 4)), static_cast<int32_t>(in.odd(0, 1))}; break;
        case 8: tensor.shape = nullptr; break;
        default: null = true;
      }
    }
    // What it spans, in numbers wide enough; arrays of eight whatever ndim says.
    using Wide = __int128;
    Wide last = 0;
    bool empty = false, odd = tensor.ndim < 0 || tensor.ndim > 8 || !tensor.shape;
    Wide count = 1;
    for (int32_t i = 0; !odd && i < tensor.ndim; ++i) empty = empty || shape[i] == 0;
    for (int32_t i = odd ? -1 : tensor.ndim - 1; i >= 0; --i) {
      odd = odd || shape[i] < 0 || (tensor.strides && strides[i] < 0);
      if (odd) break;
      last += Wide(shape[i] > 0 ? shape[i] - 1 : 0) * (tensor.strides ? Wide(strides[i]) : count);
      count *= shape[i];
      odd = odd || count > (Wide(1) << 62) || last > (Wide(1) << 100);
    }
    const Wide element = (Wide(tensor.dtype.bits) * tensor.dtype.lanes + 7) / 8;
    const Wide size = odd ? kMostBytes + 1 : (empty ? 0 : (last + 1) * element) + Wide(tensor.byte_offset);
    const bool huge = size > kMostBytes;
    bytes = huge ? 0 : static_cast<size_t>(size);
    memory = std::make_unique<uint8_t[]>(bytes);
    // Floats of ordinary size whatever the type: 0x3c3c.. and thereabouts.
    for (size_t i = 0; i < bytes; ++i) memory[i] = static_cast<uint8_t>(0x38 + (i * 7 + (i >> 3)) % 8);
    tensor.data = huge || null ? nullptr : memory.get();
    lost = (huge || null) && !empty;
  }
  /// The tensor where it is used; otherwise it may be anything.
  const DLTensor* when(bool used) {
    missing = missing || !used;
    return *this;
  }
  operator const DLTensor*() const { return missing ? nullptr : &tensor; }
  void print(std::FILE* to) const {
    std::fprintf(to, "%s%stensor of %d dimensions, dtype %d %d x %d, offset %llu, %zu bytes:", missing ? "unused " : "",
                 lost ? "lost " : "", tensor.ndim, tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes,
                 static_cast<unsigned long long>(tensor.byte_offset), bytes);
    for (int i = 0; i < 8 && i < tensor.ndim; ++i)
      std::fprintf(to, " %lld (%lld)", static_cast<long long>(shape[i]),
                   static_cast<long long>(tensor.strides ? strides[i] : 0));
    std::fputs("\n", to);
  }
  void remember() { before.assign(memory.get(), memory.get() + bytes); }
  bool changed() const { return !std::equal(before.begin(), before.end(), memory.get()); }
  const float* floats() const {
    return reinterpret_cast<const float*>(static_cast<const uint8_t*>(tensor.data) + tensor.byte_offset);
  }
  int64_t stride(int i) const {
    if (tensor.strides) return strides[i];
    int64_t s = 1;
    for (int32_t j = tensor.ndim - 1; j > i; --j) s *= shape[j];
    return s;
  }
};

constexpr DLDataType kF32{kDLFloat, 32, 1}, kBf16{kDLBfloat, 16, 1}, kU8{kDLUInt, 8, 1}, kI32{kDLInt, 32, 1};

void ok(mla_status status) { FUZZ_CHECK(status == MLA_OK); }

// Everything that outlives a call.
struct World {
  mla_stream* stream = nullptr;
  mla_model* model = nullptr;
  mla_rotary* rotary = nullptr;
  mla_linear* linear = nullptr;
  mla_buffer* scratch = nullptr;
  void* scratch_data = nullptr;
  size_t scratch_bytes = 0;
  mla_cache* cache[3] = {};
  World() {
    ok(mla_stream_create_cpu(2, &stream));
    const char* config =
        R"({"model_type":"deepseek_v2","hidden_size":16,"num_hidden_layers":1,"num_attention_heads":2,"kv_lora_rank":8,)"
        R"("qk_nope_head_dim":8,"qk_rope_head_dim":4,"v_head_dim":8})";
    ok(mla_model_create_config(config, std::strlen(config), &model));
    ok(mla_rotary_create(model, 0, 32, DLDevice{kDLCPU, 0}, &rotary));
    std::vector<float> w(2 * 6 * 8, 0.5f);
    int64_t shape[] = {2, 6, 8};
    DLTensor t{w.data(), {kDLCPU, 0}, 3, kF32, shape, nullptr, 0};
    ok(mla_linear_create(&t, MLA_F32, 0, 0, 0, DLDevice{kDLCPU, 0}, &linear));
    mla_scratch_shape dims;
    std::memset(&dims, 0, sizeof dims);
    dims.struct_size = sizeof dims;
    dims.heads = dims.hidden = 16;
    dims.latent = dims.nope = dims.value = dims.rope = dims.query_latent = 16;
    ok(mla_scratch_bytes(stream, &dims, &scratch_bytes));
    ok(mla_buffer_create(DLDevice{kDLCPU, 0}, scratch_bytes, &scratch));
    ok(mla_buffer_data(scratch, &scratch_data, &scratch_bytes));
    const int32_t formats[] = {MLA_CACHE_F32, MLA_CACHE_BF16, MLA_CACHE_FP8};
    for (int i = 0; i < 3; ++i) {
      mla_cache_spec spec = mla_cache_spec_default();
      ok(mla_cache_spec_of(model, formats[i], 4, &spec));
      ok(mla_cache_create(&spec, 3, DLDevice{kDLCPU, 0}, &cache[i]));
    }
  }
};

World& world() {
  static World* w = new World;
  return *w;
}

template <class T>
T args_of(Source& in) {
  T a;
  std::memset(&a, 0, sizeof a);
  a.struct_size = in.byte() < 250 ? sizeof a : static_cast<size_t>(in.odd(0, 2 * sizeof a));
  if (a.struct_size > sizeof a) a.struct_size = sizeof a;  // a newer header's struct is as long as it says
  return a;
}

// Exactly `count` of them, on the heap.
template <class T>
struct List {
  std::unique_ptr<T[]> items;
  int64_t count;
  const T* data;
  List(Source& in, int64_t n) : items(std::make_unique<T[]>(static_cast<size_t>(n))), count(n), data(items.get()) {
    if (in.byte() > 250) {
      const bool lost = in.flag();
      if (lost) data = nullptr;
      else count = in.odd(-1, 0);
      if (count > n) count = n;
    }
  }
};

// Calls, then judges how it ended. whole: the struct holds all of its fields.
template <class F>
bool call(const char* name, bool whole, std::vector<Tensor*> tensors, F&& f) {
  bool lost = false;
  for (Tensor* t : tensors) {
    t->remember();
    lost = lost || (t->lost && !t->missing);
  }
  const mla_status status = f();
  FUZZ_CHECK(status >= MLA_OK && status < MLA_ERROR_INTERNAL);
  if (status == MLA_OK) {
    if (whole && lost)
      for (Tensor* t : tensors) t->print(stderr);
    FUZZ_CHECK(!whole || !lost);
    return true;
  }
  const std::string message = mla_last_error();
  mla::fuzz::check_message(message);
  FUZZ_CHECK(message.starts_with(std::string(name) + ": "));
  for (Tensor* t : tensors) FUZZ_CHECK(!t->changed());
  return false;
}

DLDataType row_type(Source& in) { return in.byte() < 64 ? kBf16 : kF32; }

void norm(Source& in) {
  const int64_t rows = in.within(0, 4), width = in.within(1, 12);
  const DLDataType type = row_type(in);
  Tensor x(in, {rows, width}, type), weight(in, {width}, kF32), y(in, {rows, width}, type);
  auto a = args_of<mla_norm_args>(in);
  a.x = x;
  a.weight = weight;
  a.eps = in.byte() < 240 ? 1e-6 : in.raw<double>();
  const bool place = in.byte() >= 64, whole = a.struct_size == sizeof a;
  a.y = y.when(place);
  if (!place) a.y = x;
  if (!call("mla_norm", a.struct_size == sizeof a, {&x, &weight, &y}, [&] { return mla_norm(world().stream, &a); }))
    return;
  if (!whole || !place || y.missing || x.tensor.dtype.code != kDLFloat || !std::isfinite(a.eps)) return;
  for (int64_t r = 0; r < x.shape[0]; ++r) {
    double sum = 0;
    for (int64_t i = 0; i < x.shape[1]; ++i) {
      const double e = x.floats()[r * x.stride(0) + i];
      sum += e * e;
    }
    for (int64_t i = 0; i < x.shape[1]; ++i) {
      const double expected = x.floats()[r * x.stride(0) + i] /
                              std::sqrt(sum / static_cast<double>(x.shape[1]) + a.eps) *
                              weight.floats()[i * weight.stride(0)];
      const double got = y.floats()[r * y.stride(0) + i];
      FUZZ_CHECK(!std::isfinite(expected) || std::abs(got - expected) <= 1e-4 * std::abs(expected) + 1e-30);
    }
  }
}

void layer_norm(Source& in) {
  const int64_t rows = in.within(0, 4), width = in.within(1, 12);
  Tensor x(in, {rows, width}, kF32), weight(in, {width}, kF32), bias(in, {width}, kF32), y(in, {rows, width}, kF32);
  auto a = args_of<mla_layer_norm_args>(in);
  a.x = x;
  a.weight = weight;
  a.bias = bias;
  a.eps = in.byte() < 240 ? 1e-6 : in.raw<double>();
  const bool place = in.byte() >= 64;
  a.y = y.when(place);
  if (!place) a.y = x;
  call("mla_layer_norm", a.struct_size == sizeof a, {&x, &weight, &bias, &y},
       [&] { return mla_layer_norm(world().stream, &a); });
}

void rope(Source& in) {
  const int64_t tokens = in.within(0, 4), heads = in.within(1, 3);
  const DLDataType type = row_type(in);
  Tensor q(in, {tokens, heads, 4}, type), k(in, {tokens, 4}, type);
  List<int32_t> positions(in, tokens);
  for (int64_t i = 0; i < tokens; ++i) positions.items[i] = static_cast<int32_t>(in.odd(0, 31));
  auto a = args_of<mla_rope_args>(in);
  a.q = q.when(in.byte() < 200);
  a.k = k;
  a.positions = positions.data;
  a.positions_count = positions.count;
  a.table = world().rotary;
  call("mla_rope", a.struct_size == sizeof a, {&q, &k}, [&] { return mla_rope(world().stream, &a); });
}

void cast(Source& in) {
  const int64_t rows = in.within(0, 4), heads = in.within(1, 3), width = in.within(1, 9);
  Tensor x(in, {rows, heads, width}, row_type(in)), y(in, {rows, heads, width},
                                                      in.flag()   ? kBf16
                                                      : in.flag() ? kU8
                                                                  : kF32);
  List<int32_t> map(in, rows);
  for (int64_t i = 0; i < rows; ++i) map.items[i] = static_cast<int32_t>(in.odd(0, rows - 1 > 0 ? rows - 1 : 0));
  auto a = args_of<mla_cast_args>(in);
  a.x = x;
  a.y = y;
  if (in.flag()) a.x_rows = map.data, a.x_rows_count = map.count;
  a.scale = in.byte() < 240 ? 1 : in.raw<float>();
  call("mla_cast", a.struct_size == sizeof a, {&x, &y}, [&] { return mla_cast(world().stream, &a); });
}

void project(Source& in) {
  const int64_t rows = in.within(0, 4);
  const DLDataType type = row_type(in);
  Tensor x(in, {rows, 2, 8}, type), y(in, {rows, 2, 6}, row_type(in));
  List<int32_t> from(in, rows), to(in, rows);
  for (int64_t i = 0; i < rows; ++i)
    from.items[i] = static_cast<int32_t>(in.odd(0, 3)),
    to.items[i] = static_cast<int32_t>(in.byte() < 230 ? i : in.odd(0, 3));
  auto a = args_of<mla_project_args>(in);
  a.x = x;
  a.y = y;
  a.weights = world().linear;
  if (in.flag()) a.x_rows = from.data, a.x_rows_count = from.count;
  if (in.flag()) a.y_rows = to.data, a.y_rows_count = to.count;
  a.rows = in.odd(0, 4);
  if (in.byte() < 200) a.rows = rows;
  a.scratch = world().scratch_data;
  a.scratch_bytes = in.byte() < 240 ? world().scratch_bytes : static_cast<size_t>(in.within(0, 64));
  a.batch_invariant = static_cast<int32_t>(in.odd(0, 1));
  call("mla_project", a.struct_size == sizeof a, {&x, &y}, [&] { return mla_project(world().stream, &a); });
}

void merge(Source& in) {
  const int64_t rows = in.within(0, 4), heads = in.within(1, 3), width = in.within(1, 9);
  Tensor out(in, {rows, heads, width}, kF32), lse(in, {rows, heads}, kF32), other(in, {rows, heads, width}, kF32),
      other_lse(in, {rows, heads}, kF32);
  List<int32_t> map(in, rows);
  for (int64_t i = 0; i < rows; ++i) map.items[i] = static_cast<int32_t>(in.byte() < 230 ? i : in.odd(0, 4));
  auto a = args_of<mla_merge_args>(in);
  a.out = out;
  a.lse = lse;
  a.other = other;
  a.other_lse = other_lse;
  if (in.flag()) a.rows = map.data, a.rows_count = map.count;
  call("mla_merge", a.struct_size == sizeof a, {&out, &lse, &other, &other_lse},
       [&] { return mla_merge(world().stream, &a); });
}

void quantize(Source& in) {
  const int64_t rows = in.within(0, 5), width = in.within(1, 40) * 8;
  mla_output_spec spec = mla_output_spec_default();
  spec.kind = static_cast<int32_t>(in.odd(1, 3));
  spec.form = static_cast<int32_t>(in.odd(0, 2));
  spec.layout = static_cast<int32_t>(in.odd(0, 2));
  spec.group = in.byte() < 230 ? (in.flag() ? 128 : 64) : in.odd(0, 300);
  if (in.byte() < 16) spec.scale = in.raw<float>();
  if (in.byte() < 16) spec.global_scale = in.raw<float>();
  int64_t row_bytes = width, scale_bytes = 64;
  const bool sized = mla_output_bytes(&spec, rows, width, &row_bytes, &scale_bytes) == MLA_OK;
  if (!sized || row_bytes > 4096 || scale_bytes > 8192 || row_bytes < 0 || scale_bytes < 0)
    row_bytes = width, scale_bytes = 64;
  Tensor x(in, {rows, width}, row_type(in)), codes(in, {rows, row_bytes}, kU8), scales(in, {scale_bytes}, kU8);
  mla_quantized y;
  std::memset(&y, 0, sizeof y);
  y.struct_size = sizeof y;
  y.spec = &spec;
  y.width = in.byte() < 240 ? width : in.odd(0, 400);
  y.codes = codes;
  y.scales = scales.when(spec.kind != MLA_OUTPUT_FP8);
  if (codes.shape[0] == 0) scales.lost = false;  // nobody looks at the scales of no rows
  auto a = args_of<mla_quantize_args>(in);
  a.x = x;
  a.y = &y;
  call("mla_quantize", a.struct_size == sizeof a, {&x, &codes, &scales},
       [&] { return mla_quantize(world().stream, &a); });
}

void append_and_gather(Source& in) {
  mla_cache* cache = world().cache[in.within(0, 2)];
  const int64_t tokens = in.within(0, 6);
  const DLDataType type = kF32;
  Tensor kv(in, {tokens, 8}, type), pe(in, {tokens, 4}, type);
  List<int32_t> slots(in, tokens);
  for (int64_t i = 0; i < tokens; ++i)
    slots.items[i] = static_cast<int32_t>(in.byte() < 230 ? (i * 5) % 12 : in.odd(-1, 12));
  auto a = args_of<mla_append_args>(in);
  a.kv_c = kv;
  a.k_pe = pe;
  a.slots = slots.data;
  a.slots_count = slots.count;
  a.cache = cache;
  call("mla_append", a.struct_size == sizeof a, {&kv, &pe}, [&] { return mla_append(world().stream, &a); });

  const int64_t pages = in.within(1, 3), requests = in.within(1, 2), count = in.within(0, 2);
  List<int32_t> table(in, pages * requests);
  for (int64_t i = 0; i < pages * requests; ++i)
    table.items[i] = static_cast<int32_t>(in.byte() < 230 ? i % 3 : in.odd(-1, 3));
  List<mla_gather_piece> pieces(in, count);
  int32_t row = 0;
  for (int64_t i = 0; i < count; ++i) {
    mla_gather_piece& p = pieces.items[i];
    p = {static_cast<int32_t>(in.within(0, requests - 1)), static_cast<int32_t>(in.within(0, 3)),
         static_cast<int32_t>(in.within(0, 4)), row};
    if (in.byte() > 230)
      (in.flag() ? p.request : in.flag() ? p.start : in.flag() ? p.count : p.row) = static_cast<int32_t>(in.odd(-1, 9));
    row += p.count > 0 && p.count < 100 ? p.count : 0;
  }
  Tensor to(in, {row, 8}, row_type(in)), to_pe(in, {row, 4}, to.tensor.dtype);
  auto g = args_of<mla_gather_args>(in);
  g.cache = cache;
  g.block_table = {table.data, requests, pages, in.byte() < 230 ? 0 : in.odd(0, pages)};
  if (g.block_table.stride > pages && requests > 1) g.block_table.stride = pages;  // rows lie where it says
  g.pieces = pieces.data;
  g.pieces_count = pieces.count;
  g.kv_c = to;
  g.k_pe = to_pe;
  call("mla_gather", g.struct_size == sizeof g, {&to, &to_pe}, [&] { return mla_gather(world().stream, &g); });
}

void attend_latent(Source& in) {
  mla_cache* cache = world().cache[in.within(0, 2)];
  const int64_t tokens = in.within(1, 5), heads = in.within(1, 3), pages = 3, requests = in.within(1, 3);
  Tensor q(in, {tokens, heads, 12}, row_type(in)), out(in, {tokens, heads, 8}, kF32), lse(in, {tokens, heads}, kF32);
  List<int32_t> table(in, pages * requests);
  for (int64_t i = 0; i < pages * requests; ++i)
    table.items[i] = static_cast<int32_t>(in.byte() < 240 ? i % 3 : in.odd(-1, 3));
  const int64_t count = in.within(0, 3);
  List<mla_latent_item> items(in, count);
  int32_t row = 0;
  for (int64_t i = 0; i < count; ++i) {
    mla_latent_item& p = items.items[i];
    const int32_t rows = static_cast<int32_t>(in.within(0, 2)), end = static_cast<int32_t>(in.within(0, 12));
    p = {static_cast<int32_t>(in.within(0, requests - 1)),
         row,
         rows,
         static_cast<int32_t>(in.byte() < 200 ? 0 : in.within(0, 12)),
         end,
         end - rows,
         -1};
    if (in.byte() > 220) {
      int32_t* fields[] = {&p.request, &p.q_begin, &p.q_count, &p.kv_begin, &p.kv_end, &p.visible, &p.partial};
      *fields[in.within(0, 6)] = static_cast<int32_t>(in.odd(-2, 14));
    }
    row += rows;
  }
  Tensor partial(in, {in.within(0, 4), heads, 8}, kF32), partial_lse(in, {partial.shape[0], heads}, kF32);
  auto a = args_of<mla_attend_latent_args>(in);
  a.q = q;
  a.q_scale = 1;
  a.scale = in.byte() < 240 ? 0.25f : in.raw<float>();
  a.cache = cache;
  a.block_table = {table.data, requests, pages, 0};
  a.items = items.data;
  a.items_count = items.count;
  a.out = out;
  a.lse = lse;
  const bool parts = in.byte() < 128;
  a.partial_out = partial.when(parts);
  a.partial_lse = partial_lse.when(parts);
  a.scratch = world().scratch_data;
  a.scratch_bytes = in.byte() < 240 ? world().scratch_bytes : static_cast<size_t>(in.within(0, 64));
  a.batch_invariant = static_cast<int32_t>(in.odd(0, 1));
  call("mla_attend_latent", a.struct_size == sizeof a, {&q, &out, &lse, &partial, &partial_lse},
       [&] { return mla_attend_latent(world().stream, &a); });
}

void attend_expanded(Source& in) {
  const int64_t tokens = in.within(1, 5), keys = in.within(0, 6), heads = in.within(1, 3);
  const DLDataType type = row_type(in);
  Tensor q(in, {tokens, heads, 12}, type), k(in, {keys, heads, 8}, type), pe(in, {keys, 4}, type),
      v(in, {keys, heads, 8}, type), out(in, {tokens, heads, 8}, kF32), lse(in, {tokens, heads}, kF32),
      mask(in, {tokens, in.within(1, 2)}, kI32);
  const int64_t count = in.within(0, 3);
  List<mla_expanded_item> items(in, count);
  int32_t row = 0;
  for (int64_t i = 0; i < count; ++i) {
    mla_expanded_item& p = items.items[i];
    const int32_t rows = static_cast<int32_t>(in.within(0, 2));
    p = {row,
         rows,
         0,
         static_cast<int32_t>(keys),
         static_cast<int32_t>(in.within(0, 6)),
         1,
         in.byte() < 64,
         {},
         static_cast<int32_t>(in.within(0, 40))};
    if (in.byte() > 220) {
      int32_t* fields[] = {&p.q_begin, &p.q_count, &p.k_begin, &p.k_count, &p.visible, &p.mask_begin};
      *fields[in.within(0, 5)] = static_cast<int32_t>(in.odd(-2, 8));
    }
    if (in.byte() > 240) p.last = in.byte();
    if (in.byte() > 240) p.masked = in.byte();
    row += rows;
  }
  auto a = args_of<mla_attend_expanded_args>(in);
  a.q = q;
  a.k_nope = k;
  a.k_pe = pe;
  a.v = v;
  a.items = items.data;
  a.items_count = items.count;
  a.scale = in.byte() < 240 ? 0.25f : in.raw<float>();
  a.accumulate = in.byte() < 128 ? 0 : static_cast<int32_t>(in.odd(0, 1));
  a.out = out;
  a.lse = lse;
  a.scratch = world().scratch_data;
  a.scratch_bytes = in.byte() < 240 ? world().scratch_bytes : static_cast<size_t>(in.within(0, 64));
  a.mask = mask.when(in.byte() < 200);
  call("mla_attend_expanded", a.struct_size == sizeof a, {&q, &k, &pe, &v, &out, &lse, &mask},
       [&] { return mla_attend_expanded(world().stream, &a); });
}

void attend_sparse(Source& in) {
  mla_cache* cache = world().cache[in.within(0, 2)];
  const int64_t tokens = in.within(1, 5), heads = in.within(1, 3), topk = in.within(1, 6);
  Tensor q(in, {tokens, heads, 12}, row_type(in)), out(in, {tokens, heads, 8}, kF32), lse(in, {tokens, heads}, kF32),
      slots(in, {tokens, topk}, kI32);
  for (size_t i = 0; i + 4 <= slots.bytes; i += 4) {
    const int32_t slot = static_cast<int32_t>(in.odd(-1, 12));
    std::memcpy(slots.memory.get() + i, &slot, 4);
  }
  mla_sparse_source source{cache, slots, nullptr, 0};
  List<int32_t> lengths(in, tokens);
  for (int64_t i = 0; i < tokens; ++i) lengths.items[i] = static_cast<int32_t>(in.odd(0, topk));
  if (in.byte() < 64) source.lengths = lengths.data, source.lengths_count = lengths.count;
  const int64_t count = in.within(0, 3);
  List<mla_sparse_item> items(in, count);
  int32_t row = 0;
  for (int64_t i = 0; i < count; ++i) {
    mla_sparse_item& p = items.items[i];
    const int32_t rows = static_cast<int32_t>(in.within(0, 2));
    p = {row, rows, 0, static_cast<int32_t>(topk), -1};
    if (in.byte() > 220) {
      int32_t* fields[] = {&p.q_begin, &p.q_count, &p.k_begin, &p.k_end, &p.partial};
      *fields[in.within(0, 4)] = static_cast<int32_t>(in.odd(-2, 8));
    }
    row += rows;
  }
  auto a = args_of<mla_attend_sparse_args>(in);
  a.q = q;
  a.q_scale = 1;
  a.scale = 0.25f;
  a.sources = &source;
  a.sources_count = in.byte() < 250 ? 1 : 0;
  a.items = items.data;
  a.items_count = items.count;
  a.out = out;
  a.lse = lse;
  a.scratch = world().scratch_data;
  a.scratch_bytes = in.byte() < 240 ? world().scratch_bytes : static_cast<size_t>(in.within(0, 64));
  a.part_keys = in.byte() < 200 ? 0 : static_cast<int32_t>(in.odd(0, 8));
  call("mla_attend_sparse", a.struct_size == sizeof a, {&q, &out, &lse, &slots},
       [&] { return mla_attend_sparse(world().stream, &a); });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Source in(data, size);
  constexpr void (*kCalls[])(Source&) = {norm,          layer_norm,      rope,         cast,
                                         project,       merge,           quantize,     append_and_gather,
                                         attend_latent, attend_expanded, attend_sparse};
  kCalls[in.byte() % (sizeof kCalls / sizeof *kCalls)](in);
  return 0;
}
