// A part of a layer's heads, read alone: what part_of() makes of the whole, bit for bit, in every form that weights are
// stored in; the bytes that are read for it; files that end too soon; memory.
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <map>
#include <new>
#include <random>
#include <set>

#include "mla/error.hpp"
#include "mla/parallel.hpp"
#include "support/message.hpp"
#include "support/safetensors_writer.hpp"

namespace mla {
namespace {

using test::message_of;
using Writer = test::SafetensorsWriter;

const std::string kLayer = "model.layers.0.self_attn.";

class Random {
 public:
  /// As many elements of dtype as the shape has.
  void add(Writer& w, const std::string& name, const std::string& dtype, const std::vector<int64_t>& shape) {
    int64_t n = 1;
    for (int64_t e : shape) n *= e;
    std::string bytes;
    for (int64_t i = 0; i < n; ++i) {
      const float scale = 0.25f + static_cast<float>(engine_() % 4096) / 4096;
      if (dtype == "F32") append(bytes, scale);
      else if (dtype == "BF16") append(bytes, to_bf16(scale));
      else if (dtype == "F16") append(bytes, to_f16(scale));
      else if (dtype == "I32") append(bytes, static_cast<uint32_t>(engine_()));
      else if (dtype == "F8_E8M0" || dtype == "U8 scale") append(bytes, static_cast<uint8_t>(120 + engine_() % 12));
      else if (dtype == "F8_E4M3") append(bytes, static_cast<uint8_t>(engine_() % 127));
      else append(bytes, static_cast<uint8_t>(engine_()));
    }
    w.add(name, dtype.substr(0, dtype.find(' ')), shape, bytes);
  }

 private:
  template <class T>
  static void append(std::string& bytes, const T& x) {
    bytes.append(reinterpret_cast<const char*>(&x), sizeof x);
  }
  std::mt19937_64 engine_{3};
};

// What lies in a file together, so that it is read as one: `rows` x `cols` elements of the matrix. With 0, all.
struct Unit {
  int64_t rows, cols, bytes;
  bool reversed = false;  // columns are counted from the last one on
};

struct Form {
  const char* name;
  const char* quantisation;
  /// Writes module's tensors [rows, cols], and says what they are made of.
  std::function<std::vector<Unit>(Writer&, const std::string&, int64_t, int64_t, Random&)> write;
};

int64_t up(int64_t n, int64_t by) { return (n + by - 1) / by; }

Form plain(const char* dtype, int64_t size) {
  return {dtype, "", [=](Writer& w, const std::string& m, int64_t rows, int64_t cols, Random& x) {
            x.add(w, m + "weight", dtype, {rows, cols});
            return std::vector<Unit>{{1, 1, size}};
          }};
}

enum class Scales { one, rows, rows_column, blocks };

// Codes of a byte with scales.
Form eight_bits(const char* name, const char* quantisation, const char* code, const char* part, Scales kind,
                const char* dtype, int64_t scale_bytes, int64_t block_rows = 0, int64_t block_cols = 0,
                bool zero_points = false) {
  return {name, quantisation, [=](Writer& w, const std::string& m, int64_t rows, int64_t cols, Random& x) {
            const std::vector<int64_t> shape = kind == Scales::one    ? std::vector<int64_t>{}
                                               : kind == Scales::rows ? std::vector<int64_t>{rows}
                                               : kind == Scales::rows_column
                                                   ? std::vector<int64_t>{rows, 1}
                                                   : std::vector<int64_t>{up(rows, block_rows), up(cols, block_cols)};
            x.add(w, m + "weight", code, {rows, cols});
            x.add(w, m + part, dtype, shape);
            x.add(w, m + "input_scale", "F32", {});  // static, of inputs: not read
            const Unit sharing = kind == Scales::one      ? Unit{0, 0, 1}
                                 : kind == Scales::blocks ? Unit{block_rows, block_cols, 1}
                                                          : Unit{1, cols, 1};
            std::vector<Unit> units{{1, 1, 1}, {sharing.rows, sharing.cols, scale_bytes}};
            if (!zero_points) return units;
            x.add(w, m + "weight_zero_point", "I8", shape);
            units.push_back(sharing);
            return units;
          }};
}

Form fp4(const char* name, const char* quantisation, const char* codes, int64_t group, const char* one) {
  return {name, quantisation, [=](Writer& w, const std::string& m, int64_t rows, int64_t cols, Random& x) {
            x.add(w, m + codes, "U8", {rows, cols / 2});
            x.add(w, m + "weight_scale", group == 16 ? "F8_E4M3" : "U8 scale", {rows, cols / group});
            std::vector<Unit> units{{1, 2, 1}, {1, group, 1}};
            if (!one) return units;
            x.add(w, m + one, "F32", {});
            x.add(w, m + "input_global_scale", "F32", {1});
            units.push_back({0, 0, 4});
            return units;
          }};
}

// The group of each column, the last group first.
void add_index(Writer& w, const std::string& name, int64_t cols, int64_t group) {
  std::vector<int32_t> index;
  for (int64_t c = 0; c < cols; ++c) index.push_back(static_cast<int32_t>((cols - 1 - c) / group));
  w.add(name, "I32", {cols}, index);
}

constexpr int64_t kGroup = 16;

Form packed(const char* name, const char* quantisation, int64_t bits, const char* zeros, bool index) {
  return {name, quantisation, [=](Writer& w, const std::string& m, int64_t rows, int64_t cols, Random& x) {
            const int64_t in_word = 32 / bits, groups = cols / kGroup;
            x.add(w, m + "weight_packed", "I32", {rows, up(cols, in_word)});
            x.add(w, m + "weight_scale", "BF16", {rows, groups});
            w.add(m + "weight_shape", "I64", {2}, std::vector<int64_t>{rows, cols});
            std::vector<Unit> units{{1, in_word, 4}, {1, kGroup, 2, index}, {0, 0, 16}};
            if (zeros) {
              const int64_t together = std::string_view(zeros) == "I32" ? in_word : 1;
              x.add(w, m + "weight_zero_point", zeros, {up(rows, together), groups});
              units.push_back({together, kGroup, together == 1 ? 1 : 4, index});
            }
            if (!index) return units;
            add_index(w, m + "weight_g_idx", cols, kGroup);
            units.push_back({0, 0, 4 * cols});
            return units;
          }};
}

Form awq() {
  return {"awq", R"({"quant_method":"awq","bits":4,"group_size":16})",
          [](Writer& w, const std::string& m, int64_t rows, int64_t cols, Random& x) {
            x.add(w, m + "qweight", "I32", {cols, rows / 8});
            x.add(w, m + "qzeros", "I32", {cols / kGroup, rows / 8});
            x.add(w, m + "scales", "F16", {cols / kGroup, rows});
            return std::vector<Unit>{{8, 1, 4}, {8, kGroup, 4}, {1, kGroup, 2}};
          }};
}

Form gptq(const char* name, const char* quantisation, int64_t bits, bool index) {
  return {name, quantisation, [=](Writer& w, const std::string& m, int64_t rows, int64_t cols, Random& x) {
            const int64_t in_word = 32 / bits;
            x.add(w, m + "qweight", "I32", {cols / in_word, rows});
            x.add(w, m + "qzeros", "I32", {cols / kGroup, rows / in_word});
            x.add(w, m + "scales", "F16", {cols / kGroup, rows});
            std::vector<Unit> units{{1, in_word, 4}, {in_word, kGroup, 4, index}, {1, kGroup, 2, index}};
            if (!index) return units;
            add_index(w, m + "g_idx", cols, kGroup);
            units.push_back({0, 0, 4 * cols});
            return units;
          }};
}

const char* const kFp8 = R"({"quant_method":"fp8"})";
const char* const kBlocks = R"({"quant_method":"fp8","weight_block_size":[16,24]})";
const char* const kTensors = R"({"quant_method":"compressed-tensors"})";
const char* const kGptq4 = R"({"quant_method":"gptq","bits":4,"group_size":16,"checkpoint_format":"gptq_v2"})";

std::vector<Form> forms() {
  const auto integers = [](const char* symmetric, const char* bits) {
    static std::set<std::string> kept;
    return kept
        .insert(std::string(R"({"quant_method":"compressed-tensors","format":"pack-quantized","config_groups":{"g":)") +
                R"({"weights":{"num_bits":)" + bits + R"(,"strategy":"group","group_size":16,"symmetric":)" +
                symmetric + "}}}}")
        .first->c_str();
  };
  return {
      plain("F32", 4),
      plain("BF16", 2),
      plain("F16", 2),
      eight_bits("fp8, one scale", kFp8, "F8_E4M3", "weight_scale", Scales::one, "F32", 4),
      eight_bits("fp8, rows", kTensors, "F8_E4M3", "weight_scale", Scales::rows, "BF16", 2),
      eight_bits("fp8, rows in a column", kFp8, "F8_E4M3", "weight_scale", Scales::rows_column, "F32", 4),
      eight_bits("fp8, 128 x 128", kFp8, "F8_E4M3", "weight_scale_inv", Scales::blocks, "F32", 4, 128, 128),
      eight_bits("fp8, 16 x 24", kBlocks, "F8_E4M3", "weight_scale_inv", Scales::blocks, "BF16", 2, 16, 24),
      eight_bits("fp8, 128 x 128 of powers of two", kFp8, "F8_E4M3", "weight_scale_inv", Scales::blocks, "F8_E8M0", 1,
                 128, 128),
      eight_bits("mxfp8", R"({"quant_method":"mxfp8"})", "F8_E4M3", "weight_scale", Scales::blocks, "U8 scale", 1, 1,
                 32),
      eight_bits("int8, one scale", R"({"quant_method":"w8a8_int8"})", "I8", "weight_scale", Scales::one, "F32", 4),
      eight_bits("int8, rows", kTensors, "I8", "weight_scale", Scales::rows_column, "F32", 4, 0, 0, true),
      eight_bits("int8, blocks", R"({"quant_method":"blockwise_int8","weight_block_size":[16,24]})", "I8",
                 "weight_scale_inv", Scales::blocks, "F32", 4, 16, 24, true),
      fp4("nvfp4, ModelOpt", R"({"quant_method":"modelopt","quant_algo":"NVFP4"})", "weight", 16, "weight_scale_2"),
      fp4("nvfp4, compressed-tensors", kTensors, "weight_packed", 16, "weight_global_scale"),
      fp4("mxfp4", R"({"quant_method":"quark"})", "weight", 32, nullptr),
      packed("packed int4", integers("true", "4"), 4, nullptr, false),
      packed("packed int4, packed zero points", integers("false", "4"), 4, "I32", false),
      packed("packed int8, zero points", integers("false", "8"), 8, "I8", false),
      packed("packed int4 in g_idx's order", integers("false", "4"), 4, "I32", true),
      awq(),
      gptq("gptq, 4 bits", kGptq4, 4, false),
      gptq("gptq, 4 bits in g_idx's order", kGptq4, 4, true),
      gptq("gptq, 2 bits", R"({"quant_method":"gptq","bits":2,"group_size":16,"checkpoint_format":"gptq_v2"})", 2,
           false),
      gptq("gptq, 8 bits", R"({"quant_method":"gptq","bits":8,"group_size":16,"checkpoint_format":"gptq_v2"})", 8,
           false),
  };
}

// Heads whose borders lie on blocks, words and groups, or within them, down to half a byte of two columns.
struct Size {
  int64_t heads, nope, rope, value;
  bool query_latent, indexer;
};
constexpr Size kSizes[] = {{11, 16, 16, 32, true, true}, {12, 4, 4, 8, false, false}, {32, 4, 2, 3, true, false}};
constexpr int64_t kHidden = 64, kLatent = 32, kQueryLatent = 64;

struct Stored {
  std::string role;
  int64_t rows, cols;
  bool by_columns;  // heads are
  int64_t of_one;   // rows, or columns
  std::vector<Unit> units;
};

// A checkpoint whose maps with heads are in the form, o_proj's file being their last.
class Folder {
 public:
  Folder(const Form& form, const Size& s) : size(s) {
    std::string config =
        std::string(R"({"model_type":")") + (s.indexer ? "deepseek_v32" : "deepseek_v3") +
        R"(","num_hidden_layers":1,"num_attention_heads":)" + std::to_string(s.heads) + R"(,"q_lora_rank":)" +
        (s.query_latent ? std::to_string(kQueryLatent) : "null") + R"(,"kv_lora_rank":)" + std::to_string(kLatent) +
        R"(,"hidden_size":)" + std::to_string(kHidden) + R"(,"qk_nope_head_dim":)" + std::to_string(s.nope) +
        R"(,"qk_rope_head_dim":)" + std::to_string(s.rope) + R"(,"v_head_dim":)" + std::to_string(s.value);
    if (s.indexer) config += R"(,"index_n_heads":2,"index_head_dim":16,"index_topk":8)";
    if (*form.quantisation) config += std::string(R"(,"quantization_config":)") + form.quantisation;
    test::write_file(path() / "config.json", config + "}");

    Random random;
    Writer w;
    const auto shared_by_heads = [&](const std::string& role, const char* dtype, const std::vector<int64_t>& shape,
                                     int64_t element) {
      random.add(w, kLayer + role, dtype, shape);
      shared += element * shape[0] * (shape.size() > 1 ? shape[1] : 1);
    };
    if (s.query_latent) {
      shared_by_heads("q_a_proj.weight", "BF16", {kQueryLatent, kHidden}, 2);
      shared_by_heads("q_a_layernorm.weight", "BF16", {kQueryLatent}, 2);
    }
    shared_by_heads("kv_a_proj_with_mqa.weight", "BF16", {kLatent + s.rope, kHidden}, 2);
    shared_by_heads("kv_a_layernorm.weight", "BF16", {kLatent}, 2);
    shared_by_heads("k_scale", "F32", {s.heads}, 4);
    shared_by_heads("v_scale", "F32", {1}, 4);
    if (s.indexer) {
      shared_by_heads("indexer.wq_b.weight", "BF16", {32, kQueryLatent}, 2);
      shared_by_heads("indexer.wk.weight", "BF16", {16, kHidden}, 2);
      shared_by_heads("indexer.k_norm.weight", "BF16", {16}, 2);
      shared_by_heads("indexer.k_norm.bias", "BF16", {16}, 2);
      shared_by_heads("indexer.weights_proj.weight", "BF16", {2, kHidden}, 2);
    }
    const int64_t query = s.nope + s.rope, both = s.nope + s.value;
    stored = {{s.query_latent ? "q_b_proj." : "q_proj.",
               s.heads * query,
               s.query_latent ? kQueryLatent : kHidden,
               false,
               query,
               {}},
              {"kv_b_proj.", s.heads * both, kLatent, false, both, {}},
              {"o_proj.", kHidden, s.heads * s.value, true, s.value, {}}};
    for (Stored& m : stored) m.units = form.write(w, kLayer + m.role, m.rows, m.cols, random);
    w.write(path() / "model.safetensors");
  }

  const std::filesystem::path& path() const { return folder_.path(); }

  /// Numbers of the units of one map's tensor that are read for some heads, along the axis that heads are on.
  static std::set<int64_t> units(const Stored& m, const Unit& u, HeadRange heads) {
    std::set<int64_t> found;
    if (u.rows == 0) return {0};
    for (int64_t i = heads.begin * m.of_one; i < (heads.begin + heads.count) * m.of_one; ++i)
      found.insert(!m.by_columns ? i / u.rows : (u.reversed ? m.cols - 1 - i : i) / u.cols);
    return found;
  }
  /// Bytes of one of them, over the whole of the other axis.
  static int64_t unit_bytes(const Stored& m, const Unit& u) {
    return u.rows == 0 ? u.bytes : u.bytes * (m.by_columns ? up(m.rows, u.rows) : up(m.cols, u.cols));
  }
  int64_t bytes(HeadRange heads) const {
    int64_t n = shared;
    for (const Stored& m : stored)
      for (const Unit& u : m.units) n += unit_bytes(m, u) * std::ssize(units(m, u, heads));
    return n;
  }

  const Size size;
  int64_t shared = 0;  // bytes of what heads share, but for what each map has once
  std::vector<Stored> stored;

 private:
  test::TempFolder folder_;
};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

void expect_same(const HostTensor& read, const HostTensor& cut) {
  SCOPED_TRACE(cut.name);
  EXPECT_EQ(read.name, cut.name);
  ASSERT_EQ(read.shape, cut.shape);
  EXPECT_EQ(read.dtype, cut.dtype);
  EXPECT_EQ(read.format, cut.format);
  EXPECT_EQ(read.block_rows, cut.block_rows);
  EXPECT_EQ(read.block_cols, cut.block_cols);
  EXPECT_TRUE(same_bits(read.block_scales, cut.block_scales));
  EXPECT_EQ(read.first_row, cut.first_row);
  EXPECT_EQ(read.first_col, cut.first_col);
  ASSERT_EQ(read.quantised != nullptr, cut.quantised != nullptr);
  ASSERT_TRUE(read && cut);
  if (!read.quantised) {
    EXPECT_EQ(std::memcmp(read.data, cut.data, static_cast<size_t>(cut.size()) * size_of(cut.dtype)), 0);
  }
  for (const Dtype t : {Dtype::f32, Dtype::bf16}) EXPECT_TRUE(same_bits(read.to_f32(t), cut.to_f32(t)));
}

void expect_same(const LayerTensors& read, const LayerTensors& cut) {
  expect_same(read.query, cut.query);
  if (cut.query_down) {
    expect_same(read.query_down, cut.query_down);
    expect_same(read.query_norm, cut.query_norm);
  }
  expect_same(read.kv_down, cut.kv_down);
  expect_same(read.kv_norm, cut.kv_norm);
  expect_same(read.kv_up, cut.kv_up);
  expect_same(read.output, cut.output);
  ASSERT_EQ(read.indexer.has_value(), cut.indexer.has_value());
  if (cut.indexer) {
    expect_same(read.indexer->query, cut.indexer->query);
    expect_same(read.indexer->key, cut.indexer->key);
    expect_same(read.indexer->key_norm, cut.indexer->key_norm);
    expect_same(read.indexer->key_norm_bias, cut.indexer->key_norm_bias);
    expect_same(read.indexer->head_weights, cut.indexer->head_weights);
  }
  EXPECT_EQ(read.scales.q, cut.scales.q);
  EXPECT_EQ(read.scales.k, cut.scales.k);
  EXPECT_EQ(read.scales.v, cut.scales.v);
}

std::vector<std::vector<HeadRange>> divisions(int64_t heads) {
  std::vector<std::vector<HeadRange>> all;
  for (const int ranks : {2, 3, 5}) {
    all.emplace_back();
    for (int r = 0; r < ranks; ++r) all.back().push_back(head_share(heads, r, ranks));
  }
  all.push_back({{0, heads}});
  all.push_back({{0, 1}, {1, heads - 1}});
  all.push_back({{0, heads - 4}, {heads - 4, 1}, {heads - 3, 3}});
  return all;
}

class Parts : public testing::TestWithParam<size_t> {};

TEST_P(Parts, AreThoseOfTheWholeFromTheirOwnBytes) {
  const Form form = forms()[GetParam()];
  for (const Size& size : kSizes) {
    const Folder folder(form, size);
    const Checkpoint whole_of(folder.path());
    const ModelConfig& m = whole_of.config();
    const LayerTensors whole = whole_of.layer(0);
    EXPECT_EQ(whole_of.bytes_read(), static_cast<uint64_t>(folder.bytes({0, size.heads})));
    for (const std::vector<HeadRange>& ranks : divisions(size.heads)) {
      uint64_t sum = 0;
      for (const HeadRange heads : ranks) {
        SCOPED_TRACE(std::string(form.name) + ", " + std::to_string(size.heads) + " heads, from " +
                     std::to_string(heads.begin) + " on " + std::to_string(heads.count));
        const Checkpoint own(folder.path());
        ASSERT_NO_FATAL_FAILURE(expect_same(own.layer(0, heads), part_of(m, whole, heads)));
        EXPECT_EQ(own.bytes_read(), static_cast<uint64_t>(folder.bytes(heads)));
        sum += own.bytes_read();
        const LayerTensors read = own.layer(0, heads, ranks), cut = part_of(m, whole, heads, ranks);
        ASSERT_EQ(read.group_kv_up.size(), ranks.size());
        ASSERT_EQ(cut.group_kv_up.size(), ranks.size());
        for (size_t r = 0; r < ranks.size(); ++r)
          ASSERT_NO_FATAL_FAILURE(expect_same(read.group_kv_up[r], cut.group_kv_up[r]));
      }
      // The whole, once more for every further rank what all share, and what is on both sides of a border.
      const uint64_t further = ranks.size() - 1;
      int64_t shared = folder.shared, overlap = 0;
      for (const Stored& map : folder.stored)
        for (const Unit& u : map.units) {
          if (u.rows == 0) {
            shared += u.bytes;
            continue;
          }
          std::map<int64_t, int64_t> readers;
          for (const HeadRange heads : ranks)
            for (const int64_t unit : Folder::units(map, u, heads)) ++readers[unit];
          for (const auto& [unit, n] : readers) overlap += (n - 1) * Folder::unit_bytes(map, u);
        }
      EXPECT_EQ(sum, whole_of.bytes_read() + further * static_cast<uint64_t>(shared) + static_cast<uint64_t>(overlap));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, Parts, testing::Range<size_t>(0, forms().size()), [](const auto& at) {
  std::string name = forms()[at.param].name;
  std::replace_if(
      name.begin(), name.end(), [](unsigned char c) { return !std::isalnum(c); }, '_');
  return name;
});

TEST(PartsOfCheckpoints, HeadsThatCannotBe) {
  const Folder folder(plain("BF16", 2), kSizes[1]);
  const Checkpoint c(folder.path());
  const auto of = [&](HeadRange heads) { return message_of([&] { c.layer(0, heads); }); };
  EXPECT_EQ(of({3, 10}), "layer: heads 3 and the 10 from there on, deepseek_v3 has 12");
  EXPECT_EQ(of({12, 1}), "layer: heads 12 and the 1 from there on, deepseek_v3 has 12");
  EXPECT_EQ(of({-1, 2}), "layer: heads -1 and the 2 from there on, deepseek_v3 has 12");
  EXPECT_EQ(of({4, 0}), "layer: heads 4 and the 0 from there on, deepseek_v3 has 12");
  EXPECT_EQ(of({1, INT64_MAX}), "layer: heads 1 and the 9223372036854775807 from there on, deepseek_v3 has 12");
  EXPECT_THROW(c.layer(0, {0, 13}), InputError);
  EXPECT_THROW(c.layer(1, {0, 1}), InputError);
  EXPECT_EQ(c.bytes_read(), 0u);
  EXPECT_EQ(message_of([&] { c.layer(0, head_share(12, 3, 3)); }), "head_share: rank is 3, allowed 0 to 2");
  EXPECT_EQ(message_of([&] { c.layer(0, head_share(12, 0, 13)); }),
            "head_share: ranks is 13, allowed 1 to 12, the number of heads");
}

// Numbers that are refused are refused of those who read them, by their place in the whole.
TEST(PartsOfCheckpoints, NumbersOfOtherHeadsAreOthers) {
  const Form form{"fp8", kFp8, [](Writer& w, const std::string& m, int64_t rows, int64_t cols, Random& x) {
                    x.add(w, m + "weight", "F8_E4M3", {rows, cols});
                    std::vector<float> scales(static_cast<size_t>(rows), 1);
                    if (m.ends_with("kv_b_proj.")) scales[90] = NAN;  // of head 7: each has 12 rows
                    w.add(m + "weight_scale", "F32", {rows}, scales);
                    return std::vector<Unit>();
                  }};
  const Folder folder(form, kSizes[1]);
  const Checkpoint c(folder.path());
  const std::string why = message_of([&] { c.layer(0); });
  EXPECT_TRUE(why.ends_with("kv_b_proj.weight_scale' is nan at element 90, scales must be finite")) << why;
  EXPECT_EQ(message_of([&] { c.layer(0, {0, 7}); }), "no error");
  EXPECT_EQ(message_of([&] { c.layer(0, {7, 1}); }), why);
  EXPECT_EQ(message_of([&] { c.layer(0, {8, 4}); }), "no error");
}

// A file that gets shorter after it was opened is refused by who needs what is gone, and by nobody else.
TEST(PartsOfCheckpoints, FilesThatWereShortened) {
  const Size& size = kSizes[0];
  for (const Form& form : {plain("BF16", 2), awq(), gptq("gptq", kGptq4, 4, true), forms()[7]}) {
    SCOPED_TRACE(form.name);
    const Folder folder(form, size);
    const std::filesystem::path file = folder.path() / "model.safetensors";
    const uint64_t bytes = std::filesystem::file_size(file);
    const std::string all = [&] {
      std::ifstream in(file, std::ios::binary);
      return std::string(std::istreambuf_iterator<char>(in), {});
    }();
    const Checkpoint c(folder.path());
    for (const HeadRange heads : {HeadRange{0, 6}, HeadRange{6, 5}}) {
      bool could = false, could_not = false;
      const LayerTensors whole = part_of(c.config(), c.layer(0), heads);
      for (uint64_t left = bytes; left > 1000; left -= std::min<uint64_t>(left, 397)) {
        std::filesystem::resize_file(file, left);
        const std::string why = message_of([&] { expect_same(c.layer(0, heads), whole); });
        if (why == "no error") {
          EXPECT_FALSE(could_not);  // once it is too short, it stays so
          could = true;
        } else {
          EXPECT_NE(why.find(": the file was shortened after it was opened"), std::string::npos) << why;
          could_not = true;
        }
      }
      EXPECT_TRUE(could && could_not);
      test::write_file(file, all);
    }
  }
}

// The last byte of the first heads' columns is a whole row's rest before the end.
TEST(PartsOfCheckpoints, TheLastByteCounts) {
  const Folder folder(plain("BF16", 2), kSizes[0]);
  const std::filesystem::path file = folder.path() / "model.safetensors";
  const Checkpoint c(folder.path());
  const uint64_t rest = 5 * 32 * 2, needed = std::filesystem::file_size(file) - rest, output = kHidden * 11 * 32 * 2;
  std::filesystem::resize_file(file, needed);
  EXPECT_EQ(message_of([&] { c.layer(0, {0, 6}); }), "no error");
  std::filesystem::resize_file(file, needed - 1);
  EXPECT_EQ(message_of([&] {
              c.layer(0, {0, 6});
            }),
            file.string() + ": tensor '" + kLayer + "o_proj.weight' has " + std::to_string(output - rest - 1) +
                " bytes left of " + std::to_string(output) + ": the file was shortened after it was opened");
}

TEST(PartsOfCheckpoints, RectanglesOfBytes) {
  test::TempFolder folder;
  Writer w;
  w.add("first", "U8", {3}, std::vector<uint8_t>{9, 9, 9});
  w.add("t", "U8", {3, 4}, std::vector<uint8_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11});
  w.add("none", "U8", {0, 4}, std::vector<uint8_t>{});
  w.write(folder / "f");
  const Safetensors file(folder / "f");
  const auto of = [&](const ByteRows& part) {
    const Buffer b = file.bytes(*file.find("t"), part);
    return std::vector<uint8_t>(b.as<uint8_t>(), b.as<uint8_t>() + b.size());
  };
  using Bytes = std::vector<uint8_t>;
  EXPECT_EQ(of({.row_bytes = 4, .row = 1, .rows = 2, .first = 1, .size = 2}), (Bytes{5, 6, 9, 10}));
  EXPECT_EQ(file.bytes_read(), 4u);
  EXPECT_EQ(of({.row_bytes = 4, .row = 1, .rows = 1, .first = 0, .size = 4}), (Bytes{4, 5, 6, 7}));
  EXPECT_EQ(of({.row_bytes = 6, .row = 0, .rows = 2, .first = 5, .size = 1}), (Bytes{5, 11}));
  EXPECT_EQ(of({.row_bytes = 4, .row = 3, .rows = 0, .first = 4, .size = 0}), Bytes());
  EXPECT_EQ(file.bytes_read(), 10u);
  EXPECT_EQ(file.bytes(*file.find("none"), {.row_bytes = 4, .rows = 0, .size = 4}).size(), 0u);
  for (const ByteRows& bad : {ByteRows{0, 0, 1, 0, 1}, ByteRows{5, 0, 1, 0, 1}, ByteRows{4, 2, 2, 0, 1},
                              ByteRows{4, UINT64_MAX, 2, 0, 1}, ByteRows{4, 0, UINT64_MAX, 0, 1},
                              ByteRows{4, 0, 1, 3, 2}, ByteRows{4, 0, 1, UINT64_MAX, 2}, ByteRows{4, 0, 1, 0, 5}})
    EXPECT_THROW(of(bad), InputError);
  EXPECT_EQ(message_of([&] { of({.row_bytes = 4, .row = 2, .rows = 2, .first = 0, .size = 4}); }),
            "tensor 't': rows from 2 on, 2 of 3, and bytes from 0 on, 4 of 4, are not all in it");
  EXPECT_EQ(message_of([&] { of({.row_bytes = 5, .row = 0, .rows = 1, .first = 0, .size = 1}); }),
            "tensor 't' has 12 bytes, not whole rows of 5");
  EXPECT_EQ(file.bytes_read(), 10u);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

// A layer of 740 MB, a file of holes, read by a process that may have 160 MB more than it has.
TEST(PartsOfCheckpoints, APartFitsWhereTheWholeDoesNot) {
  test::TempFolder folder;
  test::write_file(folder / "config.json",
                   R"({"model_type":"deepseek_v3","num_hidden_layers":1,"num_attention_heads":128,"q_lora_rank":1536,)"
                   R"("kv_lora_rank":512,"hidden_size":7168,"qk_nope_head_dim":128,"qk_rope_head_dim":64,)"
                   R"("v_head_dim":128})");
  std::string header;
  uint64_t end = 0;
  const auto add = [&](const std::string& role, int64_t rows, int64_t cols) {
    const uint64_t bytes = static_cast<uint64_t>(rows * std::max<int64_t>(cols, 1)) * 4;
    header += (header.empty() ? "{\"" : ",\"") + kLayer + role + R"(.weight":{"dtype":"F32","shape":[)" +
              std::to_string(rows) + (cols > 0 ? "," + std::to_string(cols) : "") + R"(],"data_offsets":[)" +
              std::to_string(end) + "," + std::to_string(end + bytes) + "]}";
    end += bytes;
  };
  add("q_a_proj", 1536, 7168);
  add("q_a_layernorm", 1536, 0);
  add("q_b_proj", 128 * 192, 1536);
  add("kv_a_proj_with_mqa", 576, 7168);
  add("kv_a_layernorm", 512, 0);
  add("kv_b_proj", 128 * 256, 512);
  add("o_proj", 7168, 128 * 128);
  const std::string head = test::raw_safetensors(header + "}", 0);
  test::write_file(folder / "model.safetensors", head);
  std::filesystem::resize_file(folder / "model.safetensors", head.size() + end);
  const Checkpoint c(folder.path());

  enum Found { part_only = 7, whole_fits, part_does_not };
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    malloc_trim(0);
    long pages = 0;
    if (FILE* f = std::fopen("/proc/self/statm", "r")) {
      if (std::fscanf(f, "%ld", &pages) != 1) pages = 0;
      std::fclose(f);
    }
    const rlim_t most = static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE)) + (rlim_t{160} << 20);
    const rlimit limit{most, most};
    setrlimit(RLIMIT_AS, &limit);
    // 60 MB are shared, 86 MB are a part of 16 heads.
    try {
      for (int rank = 0; rank < 8; rank += 7) c.layer(0, head_share(128, rank, 8));
    } catch (...) {
      _exit(part_does_not);
    }
    try {
      c.layer(0);
    } catch (const std::bad_alloc&) {
      _exit(part_only);
    } catch (const Error&) {
      _exit(part_only);
    }
    _exit(whole_fits);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), part_only);
}

#endif

}  // namespace
}  // namespace mla
