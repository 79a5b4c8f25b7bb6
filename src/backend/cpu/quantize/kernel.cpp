#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/quantize/kernel.cpp"
#include "hwy/foreach_target.h"  // before highway.h
#include "hwy/highway.h"
//
#include "backend/cpu/core/convert.hpp"
#include "backend/cpu/core/narrow-inl.hpp"
#include "backend/cpu/quantize/kernel.hpp"
#include "ops/quantize/codec.hpp"

#ifndef MLA_QUANTIZE_BATCH
#define MLA_QUANTIZE_BATCH
namespace mla::cpu {

// Whole groups, wherever they lie. Their scales are computed together: one after another, each group would wait for its
// own maximum, two divisions and a broadcast. No more elements than that takes: with larger batches a core reads and
// computes in turns instead of at once.
struct GroupBatch {
  static constexpr int64_t kMost = 16, kElements = 512;
  int64_t count = 0;
  const float* x[kMost];
  std::byte *codes[kMost], *scales[kMost];
};

}  // namespace mla::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace mla::cpu::HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR
void EncodeFp8(const OutputSpec& spec, const GroupBatch& b) {
  for (int64_t k = 0; k < b.count; ++k) ops::encode_group(spec, b.x[k], spec.group, b.codes[k], b.scales[k]);
}
void EncodeNvfp4(const OutputSpec& spec, const GroupBatch& b) {
  for (int64_t k = 0; k < b.count; ++k) ops::encode_group(spec, b.x[k], 16, b.codes[k], b.scales[k]);
}
void EncodeMxfp4(const OutputSpec& spec, const GroupBatch& b) {
  for (int64_t k = 0; k < b.count; ++k) ops::encode_group(spec, b.x[k], 32, b.codes[k], b.scales[k]);
}
#else

void EncodeFp8(const OutputSpec& spec, const GroupBatch& b) {
  const hn::CappedTag<float, GroupBatch::kMost> df;
  const hn::RebindToUnsigned<decltype(df)> du;
  const hn::Rebind<uint8_t, decltype(df)> d8;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df)), size = spec.group;
  const bool powers = spec.form != ScaleForm::f32, packed = spec.form == ScaleForm::packed_ue8m0;
  alignas(64) float scales[GroupBatch::kMost] = {};
  alignas(64) uint32_t stored[GroupBatch::kMost];
  for (int64_t k = 0; k < b.count; ++k) scales[k] = LargestMagnitude(b.x[k], size);
  for (int64_t k = 0; k < GroupBatch::kMost; k += lanes) {
    auto s = hn::Div(hn::Max(hn::Load(df, scales + k), hn::Set(df, 1e-10f)), hn::Set(df, 448.0f));
    auto bits = hn::BitCast(du, s);
    if (powers) {
      const auto exponent = hn::ShiftRight<23>(hn::Add(bits, hn::Set(du, 0x7fffff)));  // rounded up
      bits = hn::ShiftLeft<23>(exponent);
      // The inverse of a power of two is exact, and so the product with it rounds as the quotient does.
      s = hn::Div(hn::Set(df, 1.0f), hn::BitCast(df, bits));
      if (packed) bits = exponent;
    }
    hn::Store(s, df, scales + k);
    hn::Store(bits, du, stored + k);
  }
  for (int64_t k = 0; k < b.count; ++k) {
    if (packed) cache::put(b.scales[k], 0, static_cast<uint8_t>(stored[k]));
    else cache::put(b.scales[k], 0, stored[k]);
    const auto scale = hn::Set(df, scales[k]);
    uint8_t* to = reinterpret_cast<uint8_t*>(b.codes[k]);
    auto encode = [&](auto&& scaled) {
      for (int64_t j = 0; j < size; j += lanes)  // 64 and 128 are multiples of every vector
        hn::StoreU(hn::TruncateTo(d8, NarrowE4m3(df, scaled(hn::LoadU(df, b.x[k] + j)))), d8, to + j);
    };
    if (powers) encode([&](auto v) { return hn::Mul(v, scale); });
    else encode([&](auto v) { return hn::Div(v, scale); });
  }
}

// Codes in the low bits of each lane, two a byte.
template <class DU, class U>
HWY_INLINE void StorePairs(DU, U code, uint8_t* to) {
  const hn::RepartitionToWide<DU> d64;
  const hn::Rebind<uint8_t, decltype(d64)> d8;
  const auto pair = hn::BitCast(d64, code);  // the lower code in the lower half
  hn::StoreU(hn::TruncateTo(d8, hn::Or(pair, hn::ShiftRight<28>(pair))), d8, to);
}

void EncodeNvfp4(const OutputSpec& spec, const GroupBatch& b) {
  constexpr int64_t kSize = 16;
  const hn::CappedTag<float, kSize> df;
  const hn::RebindToUnsigned<decltype(df)> du;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  const auto g = hn::Set(df, spec.global_scale);
  alignas(64) float scales[GroupBatch::kMost] = {};
  alignas(64) uint32_t stored[GroupBatch::kMost];
  for (int64_t k = 0; k < b.count; ++k) scales[k] = LargestMagnitude(b.x[k], kSize);
  for (int64_t k = 0; k < GroupBatch::kMost; k += lanes) {
    const auto code = NarrowE4m3(df, hn::Div(hn::Mul(g, hn::Load(df, scales + k)), hn::Set(df, 6.0f)));
    hn::Store(code, du, stored + k);
    // Back to f32: never NaN or negative, so the bits moved into place are the value times 2^-120.
    hn::Store(hn::Mul(hn::BitCast(df, hn::ShiftLeft<20>(code)), hn::Set(df, 0x1p120f)), df, scales + k);
  }
  for (int64_t k = 0; k < b.count; ++k) {
    cache::put(b.scales[k], 0, static_cast<uint8_t>(stored[k]));
    const bool zero = stored[k] == 0;
    const auto scale = hn::Set(df, zero ? 1.0f : scales[k]);
    uint8_t* to = reinterpret_cast<uint8_t*>(b.codes[k]);
    for (int64_t j = 0; j < kSize; j += lanes) {
      auto code = NarrowE2m1(df, hn::Div(hn::Mul(hn::LoadU(df, b.x[k] + j), g), scale));
      if (zero) code = hn::Zero(du);
      StorePairs(du, code, to + j / 2);
    }
  }
}

// A scale is its group's largest exponent less 2: no arithmetic on floats, and so nothing to do for all groups at once.
void EncodeMxfp4(const OutputSpec&, const GroupBatch& b) {
  constexpr int64_t kSize = 32;
  const hn::CappedTag<float, 16> df;
  const hn::RebindToUnsigned<decltype(df)> du;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  for (int64_t k = 0; k < b.count; ++k) {
    const uint32_t exponent = LargestBits(b.x[k], kSize) >> 23;
    const bool finite = exponent < 255;
    const uint32_t scale = finite ? std::max(exponent, 2u) - 2 : 255;
    cache::put(b.scales[k], 0, static_cast<uint8_t>(scale));
    // The inverse of a power of two is exact, and so is the product with it, above what rounds to 0.
    const auto inverse = hn::BitCast(df, hn::Set(du, finite ? (254 - scale) << 23 : 0));
    uint8_t* to = reinterpret_cast<uint8_t*>(b.codes[k]);
    for (int64_t j = 0; j < kSize; j += lanes) {
      auto code = NarrowE2m1(df, hn::Mul(hn::LoadU(df, b.x[k] + j), inverse));
      if (!finite) code = hn::Zero(du);
      StorePairs(du, code, to + j / 2);
    }
  }
}
#endif

}  // namespace mla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mla::cpu {
HWY_EXPORT(EncodeFp8);
HWY_EXPORT(EncodeNvfp4);
HWY_EXPORT(EncodeMxfp4);

QuantizedWriter::QuantizedWriter(const QuantizedView& y) : y_(y), e2m1_(y.spec.is_e2m1()), size_(y.spec.group_size()) {
  if (size_ == 0) return;
  auto place = [&](int64_t row, int64_t group) { return y.spec.scale_offset(y.tokens, y.width, row, group); };
  row_ = place(1, 0);
  step_ = place(0, 1);
  four_ = place(0, 4);
  tiles_ = place(128, 0);
}

void QuantizedWriter::write(int64_t first, const int32_t* list, int64_t rows, int64_t column, const float* x,
                            int64_t stride, int64_t n) const {
  GroupBatch batch;
  const int64_t most = size_ == 0 ? 0 : std::min(GroupBatch::kMost, GroupBatch::kElements / size_);
  auto flush = [&] {
    if (y_.spec.kind == OutputKind::mxfp4) HWY_DYNAMIC_DISPATCH(EncodeMxfp4)(y_.spec, batch);
    else if (e2m1_) HWY_DYNAMIC_DISPATCH(EncodeNvfp4)(y_.spec, batch);
    else HWY_DYNAMIC_DISPATCH(EncodeFp8)(y_.spec, batch);
    batch.count = 0;
  };
  for (int64_t r = 0; r < rows; ++r, x += stride) {
    const int64_t row = list ? list[r] : first + r;
    if (row < 0) continue;
    std::byte* codes = y_.codes(row) + y_.spec.row_bytes(column);
    if (size_ == 0) {
      convert(x, reinterpret_cast<fp8_e4m3*>(codes), n, y_.spec.scale);
      continue;
    }
    std::byte* scales = scales_of(row);
    int64_t group = column / size_;
    for (int64_t i = 0; i < n; i += size_, ++group) {
      std::byte* to = codes + (e2m1_ ? i / 2 : i);
      if (n - i < size_) {
        ops::encode_group(y_.spec, x + i, n - i, to, scale_in(scales, group));
        break;
      }
      batch.x[batch.count] = x + i;
      batch.codes[batch.count] = to;
      batch.scales[batch.count] = scale_in(scales, group);
      if (++batch.count == most) flush();
    }
  }
  if (batch.count > 0) flush();
}

}  // namespace mla::cpu
#endif
