// Quantised outputs of attend_expanded's kernels against f32 rows of the same launch and codes of those by two_step.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "backend/cuda/sm90/attend_expanded/attend_expanded.hpp"
#include "cuda/device.hpp"
#include "mla/quant.hpp"
#include "mla/work.hpp"
#include "support/quantised.hpp"

namespace mla::cuda::test {

using mla::test::QuantisedMemory;
using mla::test::two_step;

/// A kind of batch with what codes are compared for: ragged items, one without queries and one without keys, rows of no
/// item around them.
template <class Batch>
Batch for_codes(Batch b, bool accumulate) {
  b.out = Dtype::f32;
  b.accumulate = accumulate;
  b.padded = true;
  b.heads = 3;
  b.before = 2;
  b.after = 5;
  b.queries = {70, 0, 1, 133};
  b.keys = {90, 40, 0, 333};
  return b;
}

/// Every format of e4m3; of the items, some are the rows' last part. What differs, or nothing. Outputs are f32.
template <class Problem>
std::string compare_codes(Problem& p, uint32_t seed) {
  std::mt19937 random(seed);
  const int64_t width = int64_t{p.batch.heads} * p.batch.dims.value;
  p.run();
  const std::vector<uint32_t> plain = p.out_bits(), lse = p.lse_bits();
  std::vector<float> rows(plain.size());
  std::memcpy(rows.data(), plain.data(), plain.size() * sizeof(float));
  std::vector<ExpandedItem> items = p.items_dev.download();
  std::vector<bool> last(static_cast<size_t>(p.tokens));
  for (ExpandedItem& i : items) {
    i.last = random() % 3 > 0;
    for (int32_t r = 0; i.last && r < i.q_count; ++r) last[static_cast<size_t>(i.q_begin + r)] = true;
  }
  p.items_dev.upload(items);
  for (OutputSpec spec : output_specs()) {
    if (spec.kind != OutputKind::fp8 && spec.kind != OutputKind::fp8_groups) continue;
    if (spec.kind == OutputKind::fp8) spec.scale = random() % 2 ? 0.037f : std::bit_cast<float>(0x3d000041u);
    const int64_t room = p.tokens + 3;
    QuantisedMemory got(spec, room, width, 8), all(spec, room, width, 8), right(spec, room, width, 8);
    DeviceArray<std::byte> codes(got.codes), scales(got.scales);
    auto args = p.args();
    args.quantized = got.view();
    if (!sm90::writes_codes(args.quantized, p.batch.dims.value)) return to_string(spec) + " is not written";
    args.quantized.data = codes.data(), args.quantized.scales = scales.data();
    p.poison_outputs();
    sm90::attend_expanded(nullptr, args);
    check(cudaDeviceSynchronize(), "test", "attend_expanded");
    got.codes = codes.download(), got.scales = scales.download();
    two_step(rows, p.tokens, all.view());
    const std::vector<uint32_t> out = p.out_bits();
    for (int64_t t = 0; t < p.tokens; ++t) {
      const auto words = [&](const std::vector<uint32_t>& x) {
        return std::vector<uint32_t>(x.begin() + t * width, x.begin() + (t + 1) * width);
      };
      const bool codes_only = last[static_cast<size_t>(t)];
      if (words(out) != words(codes_only ? p.out_before : plain))
        return to_string(spec) + ": f32 row " + std::to_string(t) + (codes_only ? " was written" : " is another");
      if (!codes_only) continue;
      std::copy_n(all.view().codes(t), spec.row_bytes(width), right.view().codes(t));
      const bool word = spec.kind == OutputKind::fp8_groups && spec.form != ScaleForm::packed_ue8m0;
      for (int64_t g = 0; g < spec.groups(width); ++g)
        std::copy_n(all.view().scale(t, g), word ? 4 : 1, right.view().scale(t, g));
    }
    const auto first_other = [](const std::vector<std::byte>& a, const std::vector<std::byte>& b) {
      return std::to_string(std::mismatch(a.begin(), a.end(), b.begin()).first - a.begin());
    };
    if (got.codes != right.codes) return to_string(spec) + ": codes from byte " + first_other(got.codes, right.codes);
    if (got.scales != right.scales)
      return to_string(spec) + ": scales from byte " + first_other(got.scales, right.scales);
    if (p.lse_bits() != lse) return to_string(spec) + ": lse";
  }
  return "";
}

}  // namespace mla::cuda::test
