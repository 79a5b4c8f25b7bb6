// Pairs of e2m1 codes in bytes, the element with the even column in the low four bits, and a scale for each group of
// neighbours in a row.
//
//   NVFP4, ModelOpt             w = e2m1 * e4m3 scale of 16 * weight_scale_2
//   NVFP4, compressed-tensors   w = e2m1 * e4m3 scale of 16 / weight_global_scale
//   MXFP4                       w = e2m1 * 2^(E8M0 scale of 32 - 127)
//
// Sources: OCP Microscaling Formats 1.0 (e2m1, E8M0, groups of 32); ModelOpt's and compressed-tensors' exporters.

#include "mla/quant.hpp"
#include "model/quantised/formats.hpp"

namespace mla {
namespace {

class Fp4Matrix : public QuantisedMatrix {
 public:
  std::shared_ptr<const Buffer> codes;
  std::vector<float> scales;
  MatrixPart held_pairs, held_groups;  // whose codes and scales these are
  int64_t group = 16;
  double factor = 1, divisor = 1;  // one of the two stays 1

  void decode(int64_t row, int64_t rows, int64_t col, int64_t count, double* out) const override {
    const uint8_t* pairs = codes->as<uint8_t>();
    for (int64_t r = row; r < row + rows; ++r)
      for (int64_t c = col; c < col + count; ++c) {
        const uint8_t pair = pairs[held_pairs.at(r, c / 2)];
        const auto at = static_cast<size_t>(held_groups.at(r, c / group));
        const double code = from_e2m1(c % 2 == 0 ? pair & 15u : pair >> 4);
        // At most 2 + 4 + 24 bits. A quotient of 6 by 24 bits is nowhere so close to a border between two numbers of
        // at most 24 bits that float64's 53 would move it there.
        *out++ = code * scales[at] * factor / divisor;
      }
  }
};

double one_scale(const StoredMatrix& m, std::string_view part, bool divides) {
  m.take(part, {"F32", "BF16", "F16"}, {{}, {1}}, "the nvfp4 weight");
  if (!m.data) return 1;
  const float x = m.scales(part)[0];
  if (divides && x == 0) m.fail(part, "is 0 at element 0, it divides the scales");
  return x;
}

}  // namespace

HostTensor read_fp4(const StoredMatrix& m, std::string_view part) {
  const bool product = m.has("weight_scale_2"), quotient = m.has("weight_global_scale"), nv = product || quotient;
  if (product && quotient)
    m.fail("weight_scale_2", "is there beside '" + m.name("weight_global_scale") + "': one of the two is needed");
  const std::string what = nv ? "the nvfp4 weight" : "the mxfp4 weight";
  auto x = std::make_shared<Fp4Matrix>();
  x->group = nv ? 16 : 32;
  if (m.cols % x->group != 0)
    m.unsupported(part, "has " + std::to_string(m.cols) + " columns; " + what.substr(4) + "s with whole groups of " +
                            std::to_string(x->group) + " are supported");
  m.take(part, {"U8"}, {{m.rows, m.cols / 2}}, what);
  const std::vector<std::vector<int64_t>> groups{{m.rows, m.cols / x->group}};
  if (nv) m.take("weight_scale", {"F8_E4M3"}, groups, what);
  else m.take("weight_scale", {"U8", "F8_E8M0"}, groups, what);
  if (product) x->factor = one_scale(m, "weight_scale_2", false);
  if (quotient) x->divisor = one_scale(m, "weight_global_scale", true);
  x->held_pairs = blocks_of(m.wanted, 1, 2);
  x->held_groups = blocks_of(m.wanted, 1, x->group);
  x->codes = m.bytes(part, x->held_pairs);
  x->scales = m.scales("weight_scale", x->held_groups);
  const std::string form = std::string(nv ? "nvfp4" : "mxfp4") + ", groups of " + std::to_string(x->group);
  return m.tensor(part, form, std::move(x));
}

}  // namespace mla
