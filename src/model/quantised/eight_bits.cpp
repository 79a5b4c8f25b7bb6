// A code of eight bits an element: e4m3 (OCP 8-bit Floating Point), or int8 with zero points.
//
//   w[r][c] = code[r][c] * scale[of r, c]                 fp8
//   w[r][c] = (code[r][c] - zero[of r, c]) * scale[...]   int8
//
// One scale (fp8's and ModelOpt's FP8 per tensor), one a row (fbgemm_fp8, compressed-tensors' channels), one a block
// (DeepSeek's, compressed-tensors' blocks), or E8M0 for 32 in a row (MXFP8, OCP Microscaling Formats 1.0). Despite its
// name weight_scale_inv is multiplied, too.
#include <algorithm>
#include <array>

#include "mla/error.hpp"
#include "model/part.hpp"
#include "model/quantised/formats.hpp"
#include "model/text.hpp"

namespace mla {
namespace {

constexpr int64_t kMx = 32;

int64_t blocks(int64_t n, int64_t block) { return (n + block - 1) / block; }

/// Which elements share a scale, and in which words.
struct Sharing {
  int64_t rows = 0, cols = 0;
  bool one = false;
  std::string words;
};

Sharing block_of(const StoredMatrix& m) {
  Sharing s{.rows = m.model.fp8_block_rows, .cols = m.model.fp8_block_cols};
  if (s.rows == 0) s.rows = s.cols = 128;
  s.words = "scales of " + std::to_string(s.rows) + " x " + std::to_string(s.cols);
  return s;
}

std::string_view scale_part(const StoredMatrix& m) {
  if (m.has("weight_scale_inv") && m.has("weight_scale"))
    m.fail("weight_scale_inv", "is there beside '" + m.name("weight_scale") + "': one of the two is needed");
  if (m.has("weight_scale_inv") || m.has("weight_scale"))
    return m.has("weight_scale") ? "weight_scale" : "weight_scale_inv";
  const std::string& method = m.model.quantisation.method;
  return method.empty() || method == "fp8" || method == "blockwise_int8" ? "weight_scale_inv" : "weight_scale";
}

Sharing sharing_of(const StoredMatrix& m, std::string_view part, bool mx, std::string_view what) {
  const Sharing block = block_of(m);
  std::vector<std::vector<int64_t>> shapes{{blocks(m.rows, block.rows), blocks(m.cols, block.cols)}};
  const SafetensorsEntry* e = m.entry(part);
  if (!e) m.missing(part, "expected shape " + shape_text(shapes[0]) + " for " + std::string(what));
  if (e->dtype == "F8_E4M3") m.fail(part, "is fp8, a float is needed");
  for (std::vector<int64_t> shape : {std::vector<int64_t>{}, {1}, {1, 1}, {m.rows}, {m.rows, 1}})
    shapes.push_back(std::move(shape));
  mx = mx && m.cols % kMx == 0;
  if (mx) shapes.push_back({m.rows, m.cols / kMx});
  const auto& shape = e->shape;
  if (mx && shape == shapes.back() && (e->dtype == "U8" || e->dtype == "F8_E8M0")) {
    m.take(part, {"U8", "F8_E8M0"}, shapes, what);
    return {.rows = 1, .cols = kMx, .words = "an E8M0 scale for 32 in a row"};
  }
  m.take(part, {"F32", "BF16", "F16", "F8_E8M0"}, shapes, what);
  if (std::all_of(shape.begin(), shape.end(), [](int64_t n) { return n == 1; }) &&
      (shape.size() < 2 || shape != shapes[0]))
    return {.rows = block.rows, .cols = block.cols, .one = true, .words = "one scale"};
  if (shape == shapes[0]) return block;
  if (mx && shape == shapes.back() && m.cols > kMx)
    m.fail(part, "has shape " + shape_text(shape) + " and dtype " + e->dtype + ", a scale for 32 in a row is E8M0");
  return {.rows = 1, .cols = m.cols, .words = "a scale for each row"};
}

// As many as the part has blocks of the sharing.
template <class T>
std::vector<T> spread(const MatrixPart& of, const Sharing& s, std::vector<T> x) {
  if (s.one && !x.empty()) x.assign(static_cast<size_t>(of.rows * of.cols), x[0]);
  return x;
}
std::vector<float> scales_of(const StoredMatrix& m, std::string_view part, const Sharing& s, const MatrixPart& of) {
  return spread(of, s, s.one ? m.scales(part) : m.scales(part, of));
}

// Whether blocks that are counted from the part's first row, or column, are those of the whole.
bool on_a_border(int64_t begin, int64_t block, int64_t all) { return block >= all || begin % block == 0; }

// A part that begins within a block: its values, by scales that are laid out for each row, or column, of it.
HostTensor cut(HostTensor t, const MatrixPart& p, const MatrixPart& of, bool rows, bool cols) {
  const int64_t block_rows = t.block_rows, block_cols = t.block_cols, down = rows ? p.rows : of.rows,
                across = cols ? p.cols : of.cols;
  std::vector<float> scales(static_cast<size_t>(down * across));
  for (int64_t r = 0; r < down; ++r)
    for (int64_t c = 0; c < across; ++c) {
      const int64_t row = rows ? (p.row + r) / block_rows - of.row : r,
                    col = cols ? (p.col + c) / block_cols - of.col : c;
      scales[static_cast<size_t>(r * across + c)] = t.block_scales[static_cast<size_t>(row * of.cols + col)];
    }
  t.block_scales = std::move(scales);
  if (rows) t.block_rows = 1;
  if (cols) t.block_cols = 1;
  return values_of(t);
}

class Int8Matrix : public QuantisedMatrix {
 public:
  std::shared_ptr<const Buffer> codes;
  std::vector<float> scales;
  std::vector<int8_t> zeros;  // as scales, or empty
  MatrixPart held, held_blocks;
  int64_t block_rows = 1, block_cols = 1;

  void decode(int64_t row, int64_t rows, int64_t col, int64_t count, double* out) const override {
    const int8_t* q = codes->as<int8_t>();
    for (int64_t r = row; r < row + rows; ++r)
      for (int64_t c = col; c < col + count; ++c) {
        const auto at = static_cast<size_t>(held_blocks.at(r / block_rows, c / block_cols));
        const int zero = zeros.empty() ? 0 : zeros[at];
        const int code = q[held.at(r, c)];
        *out++ = static_cast<double>(code - zero) * scales[at];  // 9 bits times 24
      }
  }
};

}  // namespace

HostTensor read_fp8(const StoredMatrix& m) {
  const std::string_view what = "the fp8 weight";
  m.take("weight", {"F8_E4M3"}, {{m.rows, m.cols}}, what);
  const std::string_view part = scale_part(m);
  const Sharing s = sharing_of(m, part, true, what);
  HostTensor t = m.tensor("weight", "fp8, " + s.words);
  t.dtype = Dtype::fp8_e4m3;
  t.block_rows = s.rows;
  t.block_cols = s.cols;
  if (!m.data) return t;
  const MatrixPart of = blocks_of(m.wanted, s.rows, s.cols);
  t.block_scales = scales_of(m, part, s, of);
  const auto codes = m.bytes("weight", m.wanted);
  t.data = codes->data();
  t.owner = codes;
  const bool rows = on_a_border(m.wanted.row, s.rows, m.rows), cols = on_a_border(m.wanted.col, s.cols, m.cols);
  if (rows && cols) return t;
  return cut(std::move(t), m.wanted, of, !rows, !cols);
}

HostTensor read_int8(const StoredMatrix& m) {
  constexpr std::array<std::string_view, 3> kMethods{"compressed-tensors", "blockwise_int8", "w8a8_int8"};
  const std::string& method = m.model.quantisation.method;
  if (std::find(kMethods.begin(), kMethods.end(), method) == kMethods.end())
    m.unsupported("weight", "is I8 with quant_method '" + method +
                                "', which is read with compressed-tensors, blockwise_int8 or w8a8_int8");
  const std::string_view what = "the int8 weight";
  m.take("weight", {"I8"}, {{m.rows, m.cols}}, what);
  const std::string_view part = scale_part(m);
  const Sharing s = sharing_of(m, part, false, what);
  auto x = std::make_shared<Int8Matrix>();
  const MatrixPart of = blocks_of(m.wanted, s.rows, s.cols);
  x->held = m.wanted;
  x->held_blocks = of;
  x->block_rows = s.rows;
  x->block_cols = s.cols;
  x->codes = m.bytes("weight", m.wanted);
  x->scales = scales_of(m, part, s, of);
  const bool zero_points = m.has("weight_zero_point");
  if (!zero_points && m.model.quantisation.zero_points)
    m.missing("weight_zero_point", "the config says that its integer weights have zero points");
  if (zero_points) {
    m.take("weight_zero_point", {"I8"}, {m.entry(part)->shape}, what);
    if (const auto zeros = s.one ? m.bytes("weight_zero_point") : m.bytes("weight_zero_point", of))
      x->zeros = spread(of, s, std::vector<int8_t>(zeros->as<int8_t>(), zeros->as<int8_t>() + zeros->size()));
  }
  return m.tensor("weight", "int8, " + s.words + (zero_points ? ", zero points" : ""), std::move(x));
}

}  // namespace mla
