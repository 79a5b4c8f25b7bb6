// What the ops' C functions share: a stream's turn, lists, block tables, scratch.
#pragma once

#include "backend/run.hpp"
#include "capi/objects.hpp"
#include "capi/tensor.hpp"

namespace mla::capi {

inline constexpr std::initializer_list<Dtype> kFloat{Dtype::f32}, kFloatOrBf16{Dtype::f32, Dtype::bf16};

/// f(call, args) on a stream, args read from the caller's struct.
struct OpCall {
  Turn turn;
  Tensors tensors;

  explicit OpCall(const mla_stream* stream) : turn(stream), tensors(turn.device()) {}
  Device device() const { return turn.device(); }
  /// Of rows between ops: the CPU's are f32, a GPU's may be bf16.
  std::initializer_list<Dtype> rows() const { return device().kind == DeviceKind::cpu ? kFloat : kFloatOrBf16; }
  template <class Args>
  void run(const Args& args) const {
    ops::run(turn.stream(), args);
  }

  std::shared_ptr<mla_cache> cache(const char* name, const mla_cache* handle) const { return on(name, handle); }
  std::shared_ptr<mla_index_cache> cache(const char* name, const mla_index_cache* handle) const {
    return on(name, handle);
  }
  std::shared_ptr<mla_rotary> table(const mla_rotary* handle) const { return on("table", handle); }
  std::shared_ptr<mla_linear> linear(const mla_linear* handle) const { return on("weights", handle); }

  /// Cut for the stream's workers. The CPU's ops say themselves how much they need, a GPU's take one size for all.
  ops::Scratch scratch(void* data, size_t bytes) const {
    const std::span<std::byte> memory = read_memory("scratch", data, bytes);
    const size_t each = memory.size() / static_cast<size_t>(turn.stream().workers()) / 64 * 64;
    if (device().kind == DeviceKind::cuda && data)
      if (const size_t needed = backend::backend(device()).scratch_per_worker({}); each < needed)
        throw ShapeError("scratch is " + std::to_string(bytes) + " bytes, " + std::to_string(needed) + " are needed");
    return {memory.data(), each};
  }

 private:
  template <class T>
  std::shared_ptr<T> on(const char* name, const T* handle) const {
    std::shared_ptr<T> found = get(name, handle);
    require_on(device(), name, *found);
    return found;
  }
};

template <class Args, class F>
mla_status op(const char* function, const mla_stream* stream, const Args* args, F&& f) noexcept {
  return guarded(function, [&] {
    const OpCall call(stream);
    f(call, read_struct("args", args));
  });
}

inline View<const int32_t, Request, Page> read_block_table(const mla_block_table& t) {
  constexpr int64_t kMost = int64_t{1} << 31;
  const auto range = [](const char* what, int64_t value, int64_t least) {
    if (value < least || value > kMost)
      throw ShapeError(std::string("block_table ") + what + " is " + std::to_string(value) + ", allowed " +
                       std::to_string(least) + " to 2^31");
  };
  range("requests", t.requests, 0);
  range("pages", t.pages, 0);
  const int64_t stride = t.stride == 0 ? t.pages : t.stride;
  range("stride", stride, t.pages);
  if (t.requests > 0 && t.pages > 0) required("block_table data", t.data);
  return {t.data, {t.requests, t.pages}, {stride, 1}};
}

/// Words of bits in an int32 tensor: few frameworks have unsigned ones.
template <class... D>
View<uint32_t, D...> as_words(const View<int32_t, D...>& t) {
  return {reinterpret_cast<uint32_t*>(t.data()), t.extents(), t.strides()};
}
template <class... D>
View<const uint32_t, D...> as_words(const View<const int32_t, D...>& t) {
  return {reinterpret_cast<const uint32_t*>(t.data()), t.extents(), t.strides()};
}

/// Items as the ops' own structs, which have the same fields at the same places. A GPU's kernels read them where they
/// lie.
template <class To, class From>
std::span<const To> read_items(const From* items, int64_t count) {
  static_assert(sizeof(To) == sizeof(From) && alignof(To) == alignof(From));
  const std::span<const From> list = read_list("items", items, count);
  return {reinterpret_cast<const To*>(list.data()), list.size()};
}

}  // namespace mla::capi
