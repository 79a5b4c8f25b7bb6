// A layer whose output map is stored in some form or nearly one, its neighbours' tensors beside it: refused, or its
// values are as many as there are elements, the same from a part as from the whole, cut or read, and bf16 is what is
// nearest to them.
#include <cmath>
#include <string>
#include <vector>

#include "fuzz/fuzz.hpp"
#include "fuzz/memory_file.hpp"
#include "mla/parallel.hpp"
#include "mla/weights.hpp"
#include "support/safetensors_writer.hpp"

using namespace mla;

namespace {

constexpr const char* kMethods[] = {"", "fp8", "compressed-tensors", "awq", "gptq", "modelopt"};
constexpr const char* kParts[] = {"weight",
                                  "weight_scale",
                                  "weight_scale_inv",
                                  "weight_scale_2",
                                  "weight_packed",
                                  "weight_shape",
                                  "weight_zero_point",
                                  "weight_g_idx",
                                  "qweight",
                                  "qzeros",
                                  "scales",
                                  "g_idx",
                                  "input_scale",
                                  "weight_global_scale"};
struct Type {
  const char* name;
  int64_t bytes;
};
constexpr Type kTypes[] = {{"F32", 4}, {"BF16", 2}, {"F16", 2}, {"F8_E4M3", 1}, {"F8_E8M0", 1},
                           {"U8", 1},  {"I8", 1},   {"I32", 4}, {"I64", 8},     {"F8_E5M2", 1}};

// Numbers that a part's extents may be made of: the matrix's own, and as words, pairs and groups of them.
std::vector<int64_t> extents(int64_t rows, int64_t cols, int64_t group) {
  return {rows,
          cols,
          (rows + 7) / 8,
          (cols + 7) / 8,
          (cols + 3) / 4,
          cols / 2,
          cols / 16,
          cols / 32,
          (cols + group - 1) / group,
          1,
          2,
          0};
}

void add(test::SafetensorsWriter& w, const std::string& name, fuzz::Source& in, const std::vector<int64_t>& sizes) {
  const Type type = kTypes[in.within(0, std::size(kTypes) - 1)];
  std::vector<int64_t> shape;
  int64_t bytes = type.bytes;
  for (int64_t n = in.within(0, 3) % 3; n > 0; --n) {
    shape.push_back(sizes[static_cast<size_t>(in.within(0, static_cast<int64_t>(sizes.size()) - 1))]);
    bytes *= shape.back();
  }
  std::string data(static_cast<size_t>(bytes), '\0');
  uint64_t state = in.raw<uint16_t>();  // 0: zeros, such as indices may be
  for (char& c : data) {
    state *= 6364136223846793005u;
    c = static_cast<char>(state >> 56);
    state += state != 0;
  }
  w.add(name, type.name, shape, data);
}

bool same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

void check(const ModelConfig& m, const LayerTensors& t, const Safetensors& file) {
  const std::vector<float> whole = t.output.to_f32(), narrow = t.output.to_f32(Dtype::bf16);
  FUZZ_CHECK(whole.size() == static_cast<size_t>(m.hidden * m.heads * m.value) && narrow.size() == whole.size());
  for (size_t i = 0; i < whole.size(); ++i) {
    FUZZ_CHECK(same(narrow[i], to_float(to_bf16(narrow[i]))));
    // Within half of bf16's last bit, and as much as f32 itself may be off.
    FUZZ_CHECK(same(narrow[i], whole[i]) || std::isinf(narrow[i]) ||
               std::fabs(narrow[i] - whole[i]) <= std::fabs(whole[i]) * 0x1.001p-8f + 0x1p-133f);
  }
  const LayerTensors part = part_of(m, t, {m.heads - 1, 1});
  const std::vector<float> some = part.output.to_f32();
  const uint64_t before = file.bytes_read();
  const LayerTensors read = layer_tensors(file, "", m, 0, {}, HeadRange{m.heads - 1, 1});
  FUZZ_CHECK(file.bytes_read() - before <= before);
  const std::vector<float> again = read.output.to_f32();
  FUZZ_CHECK(read.output.shape == part.output.shape && again.size() == some.size());
  for (size_t i = 0; i < some.size(); ++i) FUZZ_CHECK(same(again[i], some[i]));
  for (int64_t r = 0; r < m.hidden; ++r)
    for (int64_t c = 0; c < m.value; ++c)
      FUZZ_CHECK(same(some[static_cast<size_t>(r * m.value + c)],
                      whole[static_cast<size_t>((r * m.heads + m.heads - 1) * m.value + c)]));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Source in(data, size);
  ModelConfig m;
  m.name = "fuzzed";
  m.layers = 1;
  m.heads = in.within(1, 3);
  m.hidden = in.within(0, 4) * 8 + in.within(0, 3) % 3;
  m.value = in.within(0, 4) * 16 + in.within(0, 3) % 3;
  m.hidden += m.hidden == 0, m.value += m.value == 0;
  m.latent = 2, m.nope = 2, m.rope = 2;
  const int64_t rows = m.hidden, cols = m.heads * m.value, group = 1 + in.within(0, 63);
  m.quantisation = {.method = kMethods[in.within(0, std::size(kMethods) - 1)],
                    .bits = {},
                    .group_sizes = {group},
                    .zero_points = in.flag(),
                    .zero_offset = in.within(0, 1)};
  if (in.flag()) m.quantisation.bits = {in.flag() ? 4 : 8};
  if (in.flag()) m.fp8_block_rows = in.within(1, 40), m.fp8_block_cols = in.within(1, 40);
  test::SafetensorsWriter w;
  const auto plain = [&](const char* role, std::vector<int64_t> shape) {
    w.add(role, "F32", shape, std::vector<float>(static_cast<size_t>(shape[0] * (shape.size() > 1 ? shape[1] : 1)), 1));
  };
  plain("q_proj.weight", {m.heads * 4, rows});
  plain("kv_a_proj_with_mqa.weight", {4, rows});
  plain("kv_a_layernorm.weight", {2});
  plain("kv_b_proj.weight", {m.heads * (2 + m.value), 2});
  const std::vector<int64_t> sizes = extents(rows, cols, group);
  uint32_t there = 0;
  for (int i = 0; i < 6 && !in.empty(); ++i) {
    const int64_t part = in.within(0, std::size(kParts) - 1);
    if (there >> part & 1) continue;
    there |= 1u << part;
    if (std::string_view(kParts[part]) == "weight_shape" && in.flag()) {
      w.add("o_proj.weight_shape", "I64", {2}, std::vector<int64_t>{rows, cols});
      continue;
    }
    add(w, std::string("o_proj.") + kParts[part], in, sizes);
  }
  static fuzz::MemoryFile memory;
  const std::string bytes = w.bytes();
  memory.write(bytes.data(), bytes.size());
  fuzz::refused([&] {
    const Safetensors file(memory.path());
    check(m, layer_tensors(file, "", m), file);
  });
  return 0;
}
