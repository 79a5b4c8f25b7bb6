// Static scales of arrays on any device, of any float dtype.
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "core/clear.hpp"
#include "core/device_largest.hpp"
#include "core/gpu.hpp"
#include "mla/error.hpp"
#include "mla/quant_scales.hpp"
#include "ops/require.hpp"

namespace mla {
namespace {

constexpr std::string_view kOp = "calc_kv_scales";

template <class... D>
void check(std::string_view name, const AnyView<D...>& x) {
  ops::require_dtype(kOp, name, x.dtype(), {Dtype::f32, Dtype::bf16, Dtype::f16});
  if (!ops::is_empty(x)) ops::require_view(kOp, name, x);
}

// Rows as f32: the array's own, or a copy in `memory`.
template <class... D>
View<const float, D...> as_f32(const AnyView<D...>& x, std::vector<float>& memory) {
  if (x.dtype() == Dtype::f32) return x.template as<float>();
  memory.reserve(static_cast<size_t>(x.size()));
  if constexpr (sizeof...(D) == 3) {
    for (int64_t t = 0; t < x.extents()[0]; ++t)
      for (int64_t h = 0; h < x.extents()[1]; ++h)
        for (int64_t i = 0; i < x.extents()[2]; ++i) memory.push_back(x(t, h, i));
  } else {
    for (int64_t t = 0; t < x.extents()[0]; ++t)
      for (int64_t i = 0; i < x.extents()[1]; ++i) memory.push_back(x(t, i));
  }
  return {memory.data(), x.extents()};
}

}  // namespace

KvScales calc_kv_scales(Stream& stream, AnyView<Token, Head, QueryKey> q, AnyView<Token, Latent> kv_c,
                        const KvScaleConstants& constants) {
  check("q", q);
  check("kv_c", kv_c);
  if (stream.device().kind == DeviceKind::cpu) {
    std::vector<float> q_memory, kv_memory;
    return calc_kv_scales(as_f32(q, q_memory), as_f32(kv_c, kv_memory), constants);
  }
  std::array<float, 2> largest{};
  const Buffer found(sizeof largest, stream.device());
  const gpu::OnDevice on(stream.device());
  clear(stream, found.data(), sizeof largest, 1, sizeof largest);
  gpu::raise_to_largest(stream.queue(),
                        {q.dtype(), q.data(), {q.extent<Token>(), q.extent<Head>(), q.extent<QueryKey>()}, q.strides()},
                        found.as<float>());
  gpu::raise_to_largest(stream.queue(),
                        {kv_c.dtype(),
                         kv_c.data(),
                         {kv_c.extent<Token>(), 1, kv_c.extent<Latent>()},
                         {kv_c.stride<Token>(), 0, kv_c.stride<Latent>()}},
                        found.as<float>() + 1);
  copy(stream, largest.data(), found.data(), sizeof largest);
  stream.synchronize();
  for (size_t i = 0; i < largest.size(); ++i)
    if (std::isinf(largest[i]))
      throw InputError(std::string(kOp) + ": " + (i == 0 ? "q" : "kv_c") + " holds an infinity");
  // The numbers that the arrays come to.
  return calc_kv_scales({&largest[0], {1, 1, 1}}, {&largest[1], {1, 1}}, constants);
}

}  // namespace mla
