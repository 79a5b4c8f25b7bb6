// What tests of attention over a caller's device arrays share: arrays that lie as they like, caches of which some rows
// live, a row of attention in float64, calls by themselves and captured.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "cache/format.hpp"
#include "cases/compare.hpp"
#include "core/device_attention.hpp"
#include "cuda/device.hpp"
#include "mla/cache.hpp"

namespace mla::test {

using cases::Random;
using cuda::check;
using cuda::test::DeviceArray;

constexpr double kInf = std::numeric_limits<double>::infinity();

struct Layout {
  std::array<int64_t, 4> gaps{};  ///< unused elements that follow those of each dimension
  int64_t offset = 0;             ///< and those before the first
  bool heads_first = false;       ///< are heads the outermost dimension?
};

/// Elements in device memory as a view of any strides. What lies beside them is made of one byte: of numbers NaN.
template <class... Dims>
class Array {
 public:
  using Extents = std::array<int64_t, sizeof...(Dims)>;
  Array(size_t element, const Extents& extents, const Layout& layout = {}, int beside = 0xff)
      : element_(element), offset_(layout.offset), beside_(beside), extents_(extents) {
    int64_t step = 1;
    const auto place = [&](size_t d) { strides_[d] = step, step *= extents[d] + layout.gaps[d]; };
    size_t head = extents.size();
    if constexpr ((std::is_same_v<Head, Dims> || ...))
      if (layout.heads_first) head = mla::detail::index_of<Head, Dims...>();
    for (size_t d = extents.size(); d-- > 0;)
      if (d != head) place(d);
    if (head < extents.size()) place(head);
    memory_ = DeviceArray<std::byte>((offset_ + step + 8) * element, beside);
  }
  Array(Array&&) = default;

  AnyMutableView<Dims...> any(Dtype dtype) const { return {dtype, at(), extents_, strides_}; }
  template <class T>
  View<T, Dims...> view() const {
    return {static_cast<T*>(at()), extents_, strides_};
  }

  void put(const void* dense) {
    std::vector<std::byte> bytes(memory_.size(), static_cast<std::byte>(beside_));
    const auto* from = static_cast<const std::byte*>(dense);
    for_each([&](size_t to) { std::memcpy(&bytes[to], from, element_), from += element_; });
    memory_.upload(bytes);
  }
  /// The elements one after another; nothing may have been written beside them.
  std::vector<std::byte> take() const {
    std::vector<std::byte> bytes = memory_.download(), found;
    for_each([&](size_t from) {
      found.insert(found.end(), &bytes[from], &bytes[from] + element_);
      std::memset(&bytes[from], beside_, element_);
    });
    EXPECT_TRUE(std::all_of(bytes.begin(), bytes.end(), [&](auto b) { return b == static_cast<std::byte>(beside_); }))
        << "written beside an output";
    return found;
  }
  std::vector<float> numbers(Dtype dtype) const {
    const auto bytes = take();
    std::vector<float> x(bytes.size() / element_);
    for (size_t i = 0; i < x.size(); ++i) x[i] = load_float(dtype, bytes.data(), static_cast<int64_t>(i));
    return x;
  }
  void poison() { memory_.poison(); }

 private:
  void* at() const { return memory_.data() + offset_ * element_; }
  template <class F>
  void for_each(F f) const {
    for (int64_t i = 0, n = detail::Shape<Dims...>(extents_).size(); i < n; ++i) {
      int64_t at = offset_, rest = i;
      for (size_t d = extents_.size(); d-- > 0; rest /= extents_[d]) at += rest % extents_[d] * strides_[d];
      f(at * element_);
    }
  }

  size_t element_;
  int64_t offset_;
  int beside_;
  Extents extents_, strides_{};
  DeviceArray<std::byte> memory_;
};

/// Random numbers as a dtype holds them.
struct Numbers {
  Numbers(Dtype dtype, int64_t n, Random& random, float spread = 1.0f) : bytes(n * size_of(dtype)) {
    for (int64_t i = 0; i < n; ++i) {
      store_float(dtype, bytes.data(), i, spread * random.normal());
      x.push_back(load_float(dtype, bytes.data(), i));
    }
  }
  std::vector<std::byte> bytes;
  std::vector<float> x;
};

/// A cache of random rows, of which those that live are there.
class Rows {
 public:
  Rows(const CacheSpec& spec, int64_t pages, size_t page_gap, Random& random)
      : view{spec, nullptr, pages, spec.page_bytes() + page_gap},
        raw_(Dtype::f32, pages * spec.page_size * spec.entry(), random),
        memory_(pages * view.page_stride),
        rows_(raw_.x.size()) {
    view.data = memory_.data();
  }
  int64_t count() const { return view.pages * view.spec.page_size; }
  void keep(const std::vector<bool>& live) {
    const CacheSpec& s = view.spec;
    const auto& format = cache::format(s.format);
    std::vector<std::byte> bytes(memory_.size(), std::byte{0xff});
    for (int64_t i = 0; i < count(); ++i) {
      if (!live[i]) continue;
      std::byte* const page = bytes.data() + (i / s.page_size) * view.page_stride;
      const float* const x = &raw_.x[i * s.entry()];
      format.encode(s, page, i % s.page_size, x, x + s.latent);
      format.decode(s, page, i % s.page_size, 1, &rows_[i * s.entry()], s.entry());
    }
    memory_.upload(bytes);
  }
  const float* row(int64_t i) const { return &rows_[i * view.spec.entry()]; }

  CacheView view;

 private:
  Numbers raw_;
  DeviceArray<std::byte> memory_;
  std::vector<float> rows_;
};

inline CacheSpec spec_of(CacheFormat format, int64_t page_size) {
  return {.format = format,
          .latent = format == CacheFormat::fp8_ds_v4 ? 448 : 512,
          .page_size = page_size,
          .k_scale = format == CacheFormat::fp8 ? 0.5f : 1.0f};
}

/// int32 numbers two apart, absurd ones between them.
inline View<const int32_t, Request> upload_spaced(DeviceArray<int32_t>& to, const std::vector<int>& x) {
  std::vector<int32_t> spaced;
  for (const int n : x) spaced.push_back(n), spaced.push_back(1 << 30);
  to.upload(spaced);
  return {to.data(), {static_cast<int64_t>(x.size())}, {2}};
}

/// Lengths of a later launch: none above the first ones' largest, nor their sum.
inline std::vector<int> changed(std::vector<int> lengths, int turn) {
  if (turn == 1) std::reverse(lengths.begin(), lengths.end());
  for (int& n : lengths)
    if (turn == 2) n /= 2;
  return lengths;
}

/// What probabilities round to, or f32: what is multiplied is exact in it.
inline Dtype operands_of(Dtype q, CacheFormat format) {
  if (q == Dtype::f32 || format == CacheFormat::f32) return Dtype::f32;
  if (q == Dtype::bf16 || q == Dtype::fp8_e4m3) return Dtype::bf16;
  return format == CacheFormat::f16 ? Dtype::f16 : Dtype::f32;
}

struct SeenKey {
  const float *k, *v;
};

/// A row in float64, and in straight loops of the operands' precision.
struct Row {
  Row(const float* q, size_t depth, size_t width, const std::vector<SeenKey>& keys, float scale, Dtype operands,
      Dtype dtype, const float* sink = nullptr)
      : out(width), plain(width) {
    std::vector<double> s;
    std::vector<float> plain_s;
    float plain_max = -INFINITY, plain_total = 0;
    double largest = 1;  // of the scores' partial sums, at most
    for (const SeenKey& key : keys) {
      double exact = 0, q_square = 0, k_square = 0;
      float sum = 0;
      for (size_t i = 0; i < depth; ++i) {
        exact += static_cast<double>(q[i]) * key.k[i], sum += q[i] * key.k[i];
        q_square += static_cast<double>(q[i]) * q[i], k_square += static_cast<double>(key.k[i]) * key.k[i];
      }
      largest = std::max(largest, std::sqrt(q_square * k_square) * scale);
      s.push_back(exact * scale), plain_s.push_back(sum * scale);
      max = std::max(max, s.back()), plain_max = std::max(plain_max, plain_s.back());
    }
    double total = 0;
    for (size_t j = 0; j < keys.size(); ++j) {
      const double p = std::exp(s[j] - max);
      const float e = std::exp(plain_s[j] - plain_max), rounded = cases::stored(operands, e);
      total += p, plain_total += e;
      for (size_t i = 0; i < width; ++i) out[i] += p * keys[j].v[i], plain[i] += rounded * keys[j].v[i];
    }
    if (!keys.empty()) lse = max + std::log(total);
    const double kept = sink ? 1 / (1 + std::exp(*sink - lse)) : 1;
    for (size_t i = 0; i < width && !keys.empty(); ++i) {
      out[i] *= kept / total;
      plain[i] = cases::stored(dtype, plain[i] / plain_total * static_cast<float>(kept));
    }
    const auto unit_of = [&](Dtype d) {
      return d == Dtype::bf16 ? 0x1p-9 : d == Dtype::f16 ? 0x1p-12 : 0x1p-24 * std::max(largest, std::abs(lse));
    };
    unit = keys.empty() ? 0 : std::max(unit_of(operands), unit_of(dtype));
  }

  /// What is wrong with these results; nothing: all is right. Scores are f32 sums of exact products, whose error moves
  /// lse and the largest of them.
  std::optional<std::string> fault(std::span<const float> found, float found_lse, double lse_of_none) const {
    if (lse == -kInf) {
      if (std::any_of(found.begin(), found.end(), [](float x) { return x != 0; })) return "sees nothing, out is not 0";
      if (found_lse != lse_of_none) return "sees nothing, lse is " + std::to_string(found_lse);
      return std::nullopt;
    }
    if (const cases::Verdict v = cases::compare(found, out, plain, unit); !v.ok)
      return "out: " + v.detail + ", error " + std::to_string(v.error) + " above " + std::to_string(v.bound);
    if (!near(found_lse, lse)) return "lse is " + std::to_string(found_lse) + ", exactly " + std::to_string(lse);
    return std::nullopt;
  }
  static bool near(float found, double wanted) { return std::abs(found - wanted) <= 3e-5 * (1 + std::abs(wanted)); }

  std::vector<double> out;
  std::vector<float> plain;
  double lse = -kInf, max = -kInf, unit = 0;
};

/// fault(i) for i in [0, n); the first few that are one fail the test.
template <class F>
void expect_none(int64_t n, F fault) {
  std::vector<std::optional<std::string>> faults(n);
  cuda::test::parallel(n, [&](int64_t i) { faults[i] = fault(i); });
  int shown = 0;
  for (size_t i = 0; i < faults.size(); ++i)
    if (faults[i] && ++shown <= 3) ADD_FAILURE() << "row " << i << ": " << *faults[i];
}

inline void synchronize() { check(cudaDeviceSynchronize(), "test", "run"); }

/// A call in a workspace of exactly its size.
template <class Attention>
class Call {
 public:
  explicit Call(const Attention& a) : a_(a), bytes_(gpu::workspace_bytes(a)), workspace_(bytes_ + kGuard) {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "test", "stream");
  }
  Call(const Call&) = delete;
  ~Call() {
    if (exec_) cudaGraphExecDestroy(exec_);
    cudaStreamDestroy(stream_);
  }
  /// layers: so many calls, which share a schedule.
  void capture(cudaStreamCaptureMode mode, int layers) {
    cudaGraph_t graph;
    check(cudaStreamBeginCapture(stream_, mode), "test", "capture");
    if (layers > 1) schedule_.data = schedule_memory_.data();
    for (int i = 0; i < layers; ++i) attend();
    check(cudaStreamEndCapture(stream_, &graph), "test", "capture");
    check(cudaGraphInstantiate(&exec_, graph, 0), "test", "instantiate");
    cudaGraphDestroy(graph);
  }
  /// As it was captured, or by itself.
  void run() {
    workspace_.poison(), schedule_memory_.poison();
    synchronize();
    if (exec_) check(cudaGraphLaunch(exec_, stream_), "test", "replay");
    else attend();
    synchronize();
    for (const std::byte b : workspace_.download(bytes_, kGuard)) ASSERT_EQ(b, std::byte{0xff}) << "past the workspace";
  }

 private:
  static constexpr size_t kGuard = 256;
  void attend() {
    gpu::attend(a_, {.device = 0,
                     .native = stream_,
                     .workspace = workspace_.data(),
                     .schedule = schedule_.data ? &schedule_ : nullptr});
  }

  Attention a_;
  size_t bytes_;
  DeviceArray<std::byte> workspace_, schedule_memory_{CapturedSchedule::kBytes};
  CapturedSchedule schedule_;
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

template <class Inputs>
void run(Inputs& inputs) {
  Call call(inputs.args);
  inputs.poison();
  call.run();
}

/// Called and right; then of the same bits, out's and lse's, from arrays that lie otherwise; then captured in each
/// mode, once or as layers that share a schedule, and launched with other lengths, right again.
template <class Inputs, class Case>
void expect_right_however_called(const Case& c, const std::vector<typename Inputs::Layouts>& others) {
  Inputs inputs(c, {});
  run(inputs);
  inputs.verify();
  for (size_t i = 0; i < others.size(); ++i) {
    SCOPED_TRACE("layout " + std::to_string(i));
    Inputs apart(c, others[i]);
    run(apart);
    EXPECT_TRUE(inputs.out.take() == apart.out.take()) << "bits of out";
    EXPECT_TRUE(inputs.lse.take() == apart.lse.take()) << "bits of lse";
  }
  for (const auto mode :
       {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed}) {
    Inputs captured(c, mode == cudaStreamCaptureModeGlobal ? typename Inputs::Layouts{} : others.back());
    Call call(captured.args);
    call.capture(mode, mode == cudaStreamCaptureModeRelaxed ? 1 : 4);
    for (const int turn : {1, 2}) {
      SCOPED_TRACE("captured in mode " + std::to_string(mode) + ", launch " + std::to_string(turn));
      captured.change(turn);
      captured.poison();
      call.run();
      captured.verify();
    }
  }
}

}  // namespace mla::test
