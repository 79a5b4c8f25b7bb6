// Helpers of the C interface's tests: tensors that own their memory, handles that end themselves.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "mla/c/mla.h"

namespace capi {

constexpr DLDevice kCpu{kDLCPU, 0};

#define EXPECT_OK(call) EXPECT_EQ(MLA_OK, call) << mla_last_error()
#define ASSERT_OK(call) ASSERT_EQ(MLA_OK, call) << mla_last_error()

/// A failing call and what its message must hold.
#define EXPECT_FAILS(status, call, text)                                                                       \
  do {                                                                                                         \
    EXPECT_EQ(status, call) << mla_last_error();                                                               \
    EXPECT_NE(std::string(mla_last_error()).find(text), std::string::npos) << "message: " << mla_last_error(); \
  } while (false)

template <class T>
struct Type;
template <>
struct Type<float> {
  static constexpr DLDataType value{kDLFloat, 32, 1};
};
template <>
struct Type<int32_t> {
  static constexpr DLDataType value{kDLInt, 32, 1};
};
template <>
struct Type<uint16_t> {  // of bf16
  static constexpr DLDataType value{kDLBfloat, 16, 1};
};
template <>
struct Type<uint8_t> {
  static constexpr DLDataType value{kDLUInt, 8, 1};
};

inline float from_bf16(uint16_t bits) {
  const uint32_t u = uint32_t{bits} << 16;
  float f;
  std::memcpy(&f, &u, sizeof f);
  return f;
}

/// A dense tensor with memory of its own.
template <class T>
class Tensor {
 public:
  explicit Tensor(std::vector<int64_t> shape, T value = {}) : shape_(std::move(shape)) {
    int64_t n = 1;
    for (int64_t e : shape_) n *= e;
    data.assign(static_cast<size_t>(n), value);
    tensor_ = {data.data(), kCpu, static_cast<int32_t>(shape_.size()), Type<T>::value, shape_.data(), nullptr, 0};
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  /// Values that differ, in [-1, 1], a function of the seed.
  Tensor& random(uint32_t seed) {
    for (T& x : data) {
      seed = seed * 1664525u + 1013904223u;
      x = static_cast<T>(static_cast<float>(seed >> 8) / 8388608.0f - 1.0f);
    }
    return *this;
  }
  DLTensor& operator*() { return tensor_; }
  operator const DLTensor*() const { return &tensor_; }
  T& operator[](int64_t i) { return data[static_cast<size_t>(i)]; }

  std::vector<T> data;

 private:
  std::vector<int64_t> shape_;
  DLTensor tensor_;
};

template <class T, mla_status (*destroy)(T*)>
class Handle {
 public:
  Handle() = default;
  ~Handle() { EXPECT_OK(destroy(handle_)); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  T** operator&() { return &handle_; }
  operator T*() const { return handle_; }

 private:
  T* handle_ = nullptr;
};
using StreamHandle = Handle<mla_stream, mla_stream_destroy>;
using Model = Handle<mla_model, mla_model_destroy>;
using Rotary = Handle<mla_rotary, mla_rotary_destroy>;
using Weights = Handle<mla_weights, mla_weights_destroy>;
using Linear = Handle<mla_linear, mla_linear_destroy>;
using Cache = Handle<mla_cache, mla_cache_destroy>;
using IndexCache = Handle<mla_index_cache, mla_index_cache_destroy>;
using Pages = Handle<mla_pages, mla_pages_destroy>;
using Graph = Handle<mla_graph, mla_graph_destroy>;
using StagedStep = Handle<mla_staged_step, mla_staged_step_destroy>;
using Plan = Handle<mla_plan, mla_plan_destroy>;
using Memory = Handle<mla_buffer, mla_buffer_destroy>;
using Profile = Handle<mla_profile, mla_profile_destroy>;

/// A zeroed struct with its size.
template <class T>
T make() {
  T t;
  std::memset(&t, 0, sizeof t);
  t.struct_size = sizeof t;
  return t;
}

/// A stream of two threads.
struct Stream {
  StreamHandle handle;
  Stream() { EXPECT_OK(mla_stream_create_cpu(2, &handle)); }
  operator mla_stream*() const { return handle; }
};

/// 64-byte aligned memory.
struct Bytes {
  Memory memory;
  void* data = nullptr;
  size_t size = 0;
  explicit Bytes(size_t bytes) {
    EXPECT_OK(mla_buffer_create(kCpu, bytes, &memory));
    EXPECT_OK(mla_buffer_data(memory, &data, &size));
  }
};

/// Scratch for ops at any of the tests' dimensions.
Bytes scratch(mla_stream* stream);

/// A small model with an indexer: hidden 96, 4 heads, latent 128, nope 32, rope 16, value 64; index 4 x 32, topk 16.
void make_model(mla_model** model);

}  // namespace capi
