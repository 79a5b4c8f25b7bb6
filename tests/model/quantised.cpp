// Weights in the forms that checkpoints are published in: values worked out by hand from each format's specification,
// random codes against decoders of float64 that are written here for that, odd shapes, and what is missing, misshaped,
// of another dtype or not finite.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <functional>
#include <random>

#include "mla/error.hpp"
#include "mla/parallel.hpp"
#include "mla/weights.hpp"
#include "support/safetensors_writer.hpp"

namespace mla {
namespace {

using Floats = std::vector<float>;
using Bytes = std::vector<uint8_t>;
using Words = std::vector<uint32_t>;
using Writer = test::SafetensorsWriter;

const std::string kLayer = "model.layers.0.self_attn.", kName = kLayer + "o_proj.";

// A checkpoint of one layer, whose o_proj [rows, cols] is for the test to write; the rest is plain.
class Folder {
 public:
  Folder(int64_t rows, int64_t cols, const std::string& quantisation, const std::function<void(Writer&)>& output)
      : rows_(rows), cols_(cols) {
    test::write_file(folder_ / "config.json",
                     R"({"model_type":"deepseek_v3","num_hidden_layers":1,"num_attention_heads":1,"q_lora_rank":null,)"
                     R"("kv_lora_rank":4,"qk_nope_head_dim":2,"qk_rope_head_dim":2,"hidden_size":)" +
                         std::to_string(rows) + R"(,"v_head_dim":)" + std::to_string(cols) +
                         (quantisation.empty() ? "" : R"(,"quantization_config":)" + quantisation) + "}");
    Writer w;
    plain(w, "q_proj.weight", {4, rows});
    plain(w, "kv_a_proj_with_mqa.weight", {6, rows});
    plain(w, "kv_a_layernorm.weight", {4});
    plain(w, "kv_b_proj.weight", {2 + cols, 4});
    output(w);
    w.write(folder_ / "model.safetensors");
  }

  Checkpoint open(const ReadOptions& options = {}) const { return Checkpoint(folder_.path(), options); }
  HostTensor output() const { return open().layer(0).output; }
  // In words, the same of a layer that is looked at alone.
  std::string form() const {
    const std::string read = output().format;
    EXPECT_EQ(open().outline(0).output.format, read);
    return read;
  }
  // The values, in rows of `cols`.
  Floats values(Dtype rounded = Dtype::f32) const {
    const HostTensor t = output();
    EXPECT_EQ(t.shape, (std::vector<int64_t>{rows_, cols_}));
    return t.to_f32(rounded);
  }
  // What is said of a layer that cannot be read; check() says the same unless it is about what tensors hold.
  std::string refusal(bool of_values = false) const {
    const auto said = [&](const auto& use) -> std::string {
      try {
        use(open());
      } catch (const Error& e) {
        std::string text = e.what();
        for (size_t at; (at = text.find(folder_.path().string())) != std::string::npos;)
          text.replace(at, folder_.path().string().size(), "F");
        for (size_t at; (at = text.find(kName)) != std::string::npos;) text.replace(at, kName.size(), "W.");
        return text;
      }
      return "read";
    };
    const std::string why = said([](const Checkpoint& c) { c.layer(0); });
    EXPECT_EQ(said([](const Checkpoint& c) { c.check(0); }), of_values ? "read" : why);
    return why;
  }

 private:
  static void plain(Writer& w, const std::string& role, std::vector<int64_t> shape) {
    w.add(kLayer + role, "F32", shape, Floats(static_cast<size_t>(shape[0] * (shape.size() > 1 ? shape[1] : 1)), 0.5f));
  }
  test::TempFolder folder_;
  int64_t rows_, cols_;
};

// Decoders by the definitions of the formats' elements.
double e4m3(uint8_t code) {
  const int sign = code >> 7 ? -1 : 1, exponent = code >> 3 & 15, mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  return sign * (exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10));
}
double e2m1(uint32_t code) {
  const int sign = code & 8 ? -1 : 1, exponent = code >> 1 & 3, mantissa = code & 1;
  return sign * (exponent == 0 ? std::ldexp(mantissa, -1) : std::ldexp(2 + mantissa, exponent - 2));
}
double e8m0(uint8_t code) { return std::ldexp(1, code - 127); }

// The nearest bf16 by distance.
float nearest(double x) {
  const uint16_t near = to_bf16(static_cast<float>(x)).bits;
  uint16_t best = near;
  const auto away = [&](uint16_t b) { return std::fabs(static_cast<double>(to_float(bf16{b})) - x); };
  for (int step : {-1, 1}) {
    const uint16_t other = static_cast<uint16_t>(near + step);
    if ((near & 0x7fff) == 0 && step < 0) continue;  // no neighbour by bits
    if (away(other) < away(best) || (away(other) == away(best) && other % 2 == 0)) best = other;
  }
  return to_float(bf16{best});
}

void expect_values(const Folder& folder, const std::vector<double>& exact) {
  Floats f32, b16;
  for (double x : exact) {
    f32.push_back(static_cast<float>(x));
    b16.push_back(nearest(x));
  }
  EXPECT_EQ(folder.values(), f32);
  EXPECT_EQ(folder.values(Dtype::bf16), b16);
}

struct Random {
  std::mt19937_64 engine{7};
  uint32_t below(uint32_t n) { return static_cast<uint32_t>(engine() % n); }
  template <class T>
  std::vector<T> codes(int64_t n, uint32_t most = 256) {
    std::vector<T> x;
    for (int64_t i = 0; i < n; ++i) x.push_back(static_cast<T>(below(most)));
    return x;
  }
  Bytes finite_fp8(int64_t n) {
    Bytes x = codes<uint8_t>(n);
    for (uint8_t& c : x)
      if ((c & 0x7f) == 0x7f) c = 0x3b;
    return x;
  }
  Words words(int64_t n) {
    Words x;
    for (int64_t i = 0; i < n; ++i) x.push_back(static_cast<uint32_t>(engine()));
    return x;
  }
  Floats scales(int64_t n) {
    Floats x;
    for (int64_t i = 0; i < n; ++i) x.push_back(std::ldexp(1.0f + static_cast<float>(below(1 << 23)) * 0x1p-23f, -6));
    return x;
  }
};

std::vector<bf16> as_bf16(const Floats& x) {
  std::vector<bf16> y;
  for (float e : x) y.push_back(to_bf16(e));
  return y;
}
std::vector<f16> as_f16(const Floats& x) {
  std::vector<f16> y;
  for (float e : x) y.push_back(to_f16(e));
  return y;
}
template <class T>
double value(const std::vector<T>& x, int64_t i) {
  return to_float(x[static_cast<size_t>(i)]);
}

// ---- fp8

constexpr const char* kFp8 = R"({"quant_method":"fp8","activation_scheme":"static"})";

TEST(Fp8Weights, OneScaleByHand) {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{}, {1}, {1, 1}})
    for (const char* part : {"weight_scale", "weight_scale_inv"}) {
      const Folder folder(2, 3, kFp8, [&](Writer& w) {
        // 1, 1.125, 448; -2^-9, 0, -1.75
        w.add(kName + "weight", "F8_E4M3", {2, 3}, Bytes{0x38, 0x39, 0x7e, 0x81, 0x00, 0xbe});
        w.add(kName + part, "F32", shape, Floats{0.75f});
        w.add(kName + "input_scale", "F32", {}, Floats{3});
      });
      EXPECT_EQ(folder.values(), (Floats{0.75f, 0.84375f, 336, -0.00146484375f, 0, -1.3125f}));
      // One block is one scale, too.
      EXPECT_EQ(folder.form(), shape.size() == 2 ? "fp8, scales of 128 x 128" : "fp8, one scale");
    }
}

TEST(Fp8Weights, OneScaleOfSeveralBlocksByHand) {
  const Folder folder(2, 4, R"({"quant_method":"fp8","weight_block_size":[1,2]})", [](Writer& w) {
    w.add(kName + "weight", "F8_E4M3", {2, 4}, Bytes{0x38, 0x40, 0x44, 0x48, 0xb8, 0xc0, 0xc4, 0xc8});
    w.add(kName + "weight_scale", "F32", {1, 1}, Floats{0.5f});
  });
  EXPECT_EQ(folder.values(), (Floats{0.5f, 1, 1.5f, 2, -0.5f, -1, -1.5f, -2}));
  EXPECT_EQ(folder.form(), "fp8, one scale");
}

TEST(Fp8Weights, AScaleForEachRowByHand) {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{3}, {3, 1}}) {
    const Folder folder(3, 2, R"({"quant_method":"compressed-tensors","format":"float-quantized"})", [&](Writer& w) {
      w.add(kName + "weight", "F8_E4M3", {3, 2}, Bytes{0x38, 0x40, 0x38, 0x40, 0x38, 0x40});  // 1, 2
      w.add(kName + "weight_scale", "BF16", shape, as_bf16({0.5f, 3, -0.25f}));
    });
    EXPECT_EQ(folder.values(), (Floats{0.5f, 1, 3, 6, -0.25f, -0.5f}));
    EXPECT_EQ(folder.form(), "fp8, a scale for each row");
  }
}

TEST(Fp8Weights, BlocksByHand) {
  const Folder folder(
      3, 5,
      R"({"quant_method":"compressed-tensors","config_groups":{"group_0":{"weights":{"num_bits":8,"type":"float",)"
      R"("strategy":"block","block_structure":[2,2]}}}})",
      [&](Writer& w) {
        w.add(kName + "weight", "F8_E4M3", {3, 5}, Bytes(15, 0x40));  // 2
        w.add(kName + "weight_scale", "F8_E8M0", {2, 3}, Bytes{127, 128, 126, 130, 0, 254});
      });
  EXPECT_EQ(folder.values(), (Floats{2, 2, 4, 4, 1, 2, 2, 4, 4, 1, 16, 16, 0x1p-126f, 0x1p-126f,
                                     std::numeric_limits<float>::infinity()}));  // 2 * 2^127 is past f32
  EXPECT_EQ(folder.form(), "fp8, scales of 2 x 2");
}

TEST(Fp8Weights, MicroscalesByHand) {
  Bytes codes(2 * 64, 0x38);
  codes[32] = 0x40;
  for (const char* dtype : {"U8", "F8_E8M0"}) {
    const Folder folder(2, 64, R"({"quant_method":"mxfp8"})", [&](Writer& w) {
      w.add(kName + "weight", "F8_E4M3", {2, 64}, codes);
      w.add(kName + "weight_scale", dtype, {2, 2}, Bytes{127, 120, 129, 1});
    });
    const Floats x = folder.values();
    EXPECT_EQ(x[31], 1);
    EXPECT_EQ(x[32], 0x1p-6f);
    EXPECT_EQ(x[33], 0x1p-7f);
    EXPECT_EQ(x[64], 4);
    EXPECT_EQ(x[127], 0x1p-126f);
  }
}

TEST(Fp8Weights, RandomCodesOfEverySharing) {
  Random random;
  struct Size {
    int64_t rows, cols;
  };
  for (const Size& size : {Size{1, 1}, {7, 13}, {130, 260}, {128, 128}, {257, 64}})
    for (int kind = 0; kind < 4; ++kind) {
      const int64_t rows = size.rows, cols = size.cols;
      const int64_t down = (rows + 127) / 128, across = (cols + 127) / 128;
      const Bytes codes = random.finite_fp8(rows * cols);
      const std::vector<int64_t> shape = kind == 0   ? std::vector<int64_t>{1}
                                         : kind == 1 ? std::vector<int64_t>{rows, 1}
                                                     : std::vector<int64_t>{down, across};
      const Floats scales = random.scales(kind == 0 ? 1 : kind == 1 ? rows : down * across);
      const std::vector<bf16> narrow = as_bf16(scales);
      const Folder folder(rows, cols, kFp8, [&](Writer& w) {
        w.add(kName + "weight", "F8_E4M3", {rows, cols}, codes);
        if (kind == 3) w.add(kName + "weight_scale_inv", "BF16", shape, narrow);
        else w.add(kName + "weight_scale_inv", "F32", shape, scales);
      });
      std::vector<double> exact;
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < cols; ++c) {
          const int64_t at = kind == 0 ? 0 : kind == 1 ? r : r / 128 * across + c / 128;
          exact.push_back(e4m3(codes[static_cast<size_t>(r * cols + c)]) *
                          (kind == 3 ? value(narrow, at) : value(scales, at)));
        }
      expect_values(folder, exact);
    }
}

// Codes and scales go on to products in fp8 as they are.
TEST(Fp8Weights, ProductsKeepCodes) {
  const auto prepared = [](const std::vector<int64_t>& shape, const Floats& scales) {
    const Folder folder(200, 130, kFp8, [&](Writer& w) {
      w.add(kName + "weight", "F8_E4M3", {200, 130}, Bytes(200 * 130, 0x39));
      w.add(kName + "weight_scale", "F32", shape, scales);
    });
    const Checkpoint c = folder.open();
    return prepare(c.config(), c.layer(0), {.dtype = Dtype::f32, .products = WeightFormat::fp8}).output;
  };
  const auto one = prepared({}, {0.7f});
  EXPECT_EQ(one->block_rows, 128);
  EXPECT_EQ(one->block_cols, 128);
  const auto rows = prepared({200}, Floats(200, 0.7f));
  EXPECT_EQ(rows->block_rows, 1);
  EXPECT_EQ(rows->block_cols, 130);
}

TEST(Fp8Weights, WhatIsRefused) {
  const auto with = [](const std::function<void(Writer&)>& scales, const std::string& config = kFp8) {
    return Folder(4, 64, config, [&](Writer& w) {
      w.add(kName + "weight", "F8_E4M3", {4, 64}, Bytes(256, 0x38));
      scales(w);
    });
  };
  EXPECT_EQ(with([](Writer&) {}).refusal(),
            "F: tensor 'W.weight_scale_inv' is missing, expected shape [1, 1] for the fp8 weight");
  EXPECT_EQ(with([](Writer&) {}, R"({"quant_method":"modelopt","quant_algo":"FP8"})").refusal(),
            "F: tensor 'W.weight_scale' is missing, expected shape [1, 1] for the fp8 weight");
  const std::string shapes = "[1, 1] or [] or [1] or [1, 1] or [4] or [4, 1] or [4, 2] for the fp8 weight";
  EXPECT_EQ(with([](Writer& w) {
              w.add(kName + "weight_scale", "F32", {2, 2}, Floats(4, 1));
            }).refusal(),
            "F/model.safetensors: tensor 'W.weight_scale' has shape [2, 2], expected " + shapes);
  EXPECT_EQ(with([](Writer& w) { w.add(kName + "weight_scale", "I32", {4}, Words(4, 1)); }).refusal(),
            "F/model.safetensors: tensor 'W.weight_scale' has dtype I32, expected one of F32 BF16 F16 F8_E8M0 for the "
            "fp8 weight");
  EXPECT_EQ(with([](Writer& w) {
              w.add(kName + "weight_scale", "F32", {4, 2}, Floats(8, 1));
            }).refusal(),
            "F/model.safetensors: tensor 'W.weight_scale' has shape [4, 2] and dtype F32, a scale for 32 in a row is "
            "E8M0");
  EXPECT_EQ(with([](Writer& w) {
              w.add(kName + "weight_scale", "F32", {4}, Floats{1, 2, NAN, 4});
            }).refusal(true),
            "F/model.safetensors: tensor 'W.weight_scale' is nan at element 2, scales must be finite");
  EXPECT_EQ(with([](Writer& w) { w.add(kName + "weight_scale", "F32", {}, Floats{INFINITY}); }).refusal(true),
            "F/model.safetensors: tensor 'W.weight_scale' is inf at element 0, scales must be finite");
  EXPECT_EQ(with([](Writer& w) {
              w.add(kName + "weight_scale", "U8", {4, 2}, Bytes{1, 2, 3, 255, 5, 6, 7, 8});
            }).refusal(true),
            "F/model.safetensors: tensor 'W.weight_scale' is nan at element 3, scales must be finite");
  EXPECT_EQ(with([](Writer& w) {
              w.add(kName + "weight_scale", "F32", {}, Floats{1});
              w.add(kName + "weight_scale_inv", "F32", {}, Floats{1});
            }).refusal(),
            "F/model.safetensors: tensor 'W.weight_scale_inv' is there beside 'W.weight_scale': one of the two is "
            "needed");
  // Of another form, and of none: an input scale of NVIDIA's for each channel changes what the weight means.
  for (const char* part : {"weight_scale_2", "weight_zero_point", "qzeros", "weight_global_scale", "pre_quant_scale"})
    EXPECT_EQ(with([&](Writer& w) {
                w.add(kName + "weight_scale", "F32", {}, Floats{1});
                w.add(kName + part, "F32", {}, Floats{1});
              }).refusal(),
              "F/model.safetensors: tensor 'W." + std::string(part) +
                  "' is not one that attention of model deepseek_v3 has (allow_unknown goes on past it)");
}

TEST(PlainWeights, StayPlainInAQuantisedCheckpoint) {
  for (const char* method : {"fp8", "compressed-tensors", "awq", "gptq", "modelopt", "mxfp4"}) {
    const Folder folder(2, 2,
                        R"({"quant_method":")" + std::string(method) + R"(","modules_to_not_convert":["o_proj"]})",
                        [](Writer& w) {
                          w.add(kName + "weight", "F32", {2, 2}, Floats{1, 2, 3, 4});
                        });
    EXPECT_EQ(folder.values(), (Floats{1, 2, 3, 4}));
    EXPECT_EQ(folder.form(), "");
  }
}

// A model of no width, as a caller may make one: nothing is read, and nothing is divided by it.
TEST(PlainWeights, OfNoElements) {
  test::TempFolder folder;
  Writer w;
  const auto add = [&](const std::string& role, const std::vector<int64_t>& shape, size_t n) {
    w.add(role, "F32", shape, Floats(n, 1));
  };
  add("q_proj.weight", {4, 0}, 0);
  add("kv_a_proj_with_mqa.weight", {6, 0}, 0);
  add("kv_a_layernorm.weight", {4}, 4);
  add("kv_b_proj.weight", {4, 4}, 16);
  add("o_proj.weight", {0, 2}, 0);
  w.write(folder / "f");
  ModelConfig m;
  m.hidden = 0;
  m.layers = m.heads = 1;
  m.latent = 4;
  m.nope = m.rope = m.value = 2;
  const LayerTensors t = layer_tensors(Safetensors(folder / "f"), "", m);
  EXPECT_EQ(t.query.shape, (std::vector<int64_t>{4, 0}));
  EXPECT_EQ(t.output.shape, (std::vector<int64_t>{0, 2}));
}

// Numbers beside which something says that they are not what they seem.
TEST(PlainWeights, ButNotBesideScales) {
  for (const char* part : {"weight_scale", "weight_scale_inv", "scales", "weight_packed", "qweight", "input_scale"}) {
    const Folder folder(2, 2, R"({"quant_method":"compressed-tensors"})", [&](Writer& w) {
      w.add(kName + "weight", "F32", {2, 2}, Floats(4, 1));
      w.add(kName + part, "F32", {}, Floats{1});
    });
    EXPECT_EQ(folder.refusal(), "F/model.safetensors: tensor 'W." + std::string(part) +
                                    "' is not one that attention of model deepseek_v3 has (allow_unknown goes on past "
                                    "it)");
    EXPECT_NO_THROW(folder.open({.allow_unknown = true}).layer(0));
  }
  for (const char* dtype : {"F8_E5M2", "F8_E4M3FNUZ", "BOOL"})
    EXPECT_EQ(
        Folder(2, 2, "",
               [&](Writer& w) {
                 w.add(kName + "weight", dtype, {2, 2}, Bytes(4, 1));
               })
            .refusal(),
        "F/model.safetensors: tensor 'W.weight': dtype " + std::string(dtype) + " is not one of F32 BF16 F16 F8_E4M3");
  EXPECT_EQ(Folder(2, 2, "", [](Writer&) {}).refusal(), "F: tensor 'W.weight' is missing, expected shape [2, 2]");
}

// ---- int8

TEST(Int8Weights, ByHand) {
  const std::vector<int8_t> codes{-128, 127, 0, 5, -5, 1};
  const Folder rows(2, 3, R"({"quant_method":"compressed-tensors","format":"int-quantized"})", [&](Writer& w) {
    w.add(kName + "weight", "I8", {2, 3}, codes);
    w.add(kName + "weight_scale", "F32", {2, 1}, Floats{0.5f, 2});
    w.add(kName + "weight_zero_point", "I8", {2, 1}, std::vector<int8_t>{-1, 3});
  });
  EXPECT_EQ(rows.values(), (Floats{-63.5f, 64, 0.5f, 4, -16, -4}));
  EXPECT_EQ(rows.form(), "int8, a scale for each row, zero points");
  const Folder blocks(2, 3, R"({"quant_method":"blockwise_int8","weight_block_size":[1,2]})", [&](Writer& w) {
    w.add(kName + "weight", "I8", {2, 3}, codes);
    w.add(kName + "weight_scale_inv", "F32", {2, 2}, Floats{1, 2, 4, 8});
  });
  EXPECT_EQ(blocks.values(), (Floats{-128, 127, 0, 20, -20, 8}));
  const Folder one(2, 3, R"({"quant_method":"w8a8_int8"})", [&](Writer& w) {
    w.add(kName + "weight", "I8", {2, 3}, codes);
    w.add(kName + "weight_scale", "F32", {}, Floats{0.5f});
    w.add(kName + "weight_zero_point", "I8", {}, std::vector<int8_t>{3});
  });
  EXPECT_EQ(one.values(), (Floats{-65.5f, 62, -1.5f, 1, -4, -1}));
  EXPECT_EQ(one.form(), "int8, one scale, zero points");
}

TEST(Int8Weights, WhatIsRefused) {
  const auto with = [](const std::string& config, const std::function<void(Writer&)>& more) {
    return Folder(2, 3, config,
                  [&](Writer& w) {
                    w.add(kName + "weight", "I8", {2, 3}, std::vector<int8_t>(6, 1));
                    more(w);
                  })
        .refusal();
  };
  EXPECT_EQ(with("", [](Writer&) {}),
            "F/model.safetensors: tensor 'W.weight' is I8 with quant_method '', which is read with compressed-tensors, "
            "blockwise_int8 or w8a8_int8");
  EXPECT_EQ(with(R"({"quant_method":"w8a8_int8"})", [](Writer&) {}),
            "F: tensor 'W.weight_scale' is missing, expected shape [1, 1] for the int8 weight");
  EXPECT_EQ(with(R"({"quant_method":"blockwise_int8"})", [](Writer&) {}),
            "F: tensor 'W.weight_scale_inv' is missing, expected shape [1, 1] for the int8 weight");
  EXPECT_EQ(with(R"({"quant_method":"compressed-tensors","config_groups":{"g":{"weights":{"symmetric":false}}}})",
                 [](Writer& w) {
                   w.add(kName + "weight_scale", "F32", {2, 1}, Floats{1, 1});
                 }),
            "F: tensor 'W.weight_zero_point' is missing, the config says that its integer weights have zero points");
  EXPECT_EQ(with(R"({"quant_method":"compressed-tensors"})",
                 [](Writer& w) {
                   w.add(kName + "weight_scale", "F32", {2, 1}, Floats{1, 1});
                   w.add(kName + "weight_zero_point", "I8", {1}, Bytes{1});
                 }),
            "F/model.safetensors: tensor 'W.weight_zero_point' has shape [1], expected [2, 1] for the int8 weight");
}

// ---- fp4

constexpr const char* kNvidia = R"({"quant_method":"modelopt","quant_algo":"NVFP4"})";

TEST(Nvfp4Weights, ByHandInBothConventions) {
  Bytes codes(2 * 8);
  for (int i = 0; i < 8; ++i)
    codes[static_cast<size_t>(i)] = static_cast<uint8_t>((2 * i + 1) << 4 | 2 * i);  // 0 to 15
  for (int i = 8; i < 16; ++i) codes[static_cast<size_t>(i)] = 0x2e;                 // -4, 1
  const Floats expected{0,       0.375f, 0.75f,  1.125f, 1.5f,  2.25f, 3,    4.5f, -0.0f, -0.375f, -0.75f,
                        -1.125f, -1.5f,  -2.25f, -3,     -4.5f, -2,    0.5f, -2,   0.5f,  -2,      0.5f,
                        -2,      0.5f,   -2,     0.5f,   -2,    0.5f,  -2,   0.5f, -2,    0.5f};
  // Scales 1.5 and 1, times 0.5 or over 2.
  const Folder product(2, 16, kNvidia, [&](Writer& w) {
    w.add(kName + "weight", "U8", {2, 8}, codes);
    w.add(kName + "weight_scale", "F8_E4M3", {2, 1}, Bytes{0x3c, 0x38});
    w.add(kName + "weight_scale_2", "F32", {}, Floats{0.5f});
    w.add(kName + "input_scale", "F32", {}, Floats{9});
  });
  EXPECT_EQ(product.values(), expected);
  EXPECT_EQ(product.form(), "nvfp4, groups of 16");
  const Folder quotient(2, 16, R"({"quant_method":"compressed-tensors","format":"nvfp4-pack-quantized"})",
                        [&](Writer& w) {
                          w.add(kName + "weight_packed", "U8", {2, 8}, codes);
                          w.add(kName + "weight_scale", "F8_E4M3", {2, 1}, Bytes{0x3c, 0x38});
                          w.add(kName + "weight_global_scale", "F32", {1}, Floats{2});
                          w.add(kName + "input_global_scale", "F32", {1}, Floats{9});
                        });
  EXPECT_EQ(quotient.values(), expected);
}

TEST(Mxfp4Weights, ByHandUnderEachName) {
  Bytes codes(2 * 16, 0x72);  // 1, 6
  for (const char* part : {"weight", "weight_packed"})
    for (const char* dtype : {"U8", "F8_E8M0"}) {
      const Folder folder(2, 32, R"({"quant_method":"quark"})", [&](Writer& w) {
        w.add(kName + part, "U8", {2, 16}, codes);
        w.add(kName + "weight_scale", dtype, {2, 1}, Bytes{125, 0});
      });
      const Floats x = folder.values();
      EXPECT_EQ(x[0], 0.25f);
      EXPECT_EQ(x[1], 1.5f);
      EXPECT_EQ(x[62], 0x1p-127f);
      EXPECT_EQ(x[63], 6 * 0x1p-127f);
      EXPECT_EQ(folder.form(), "mxfp4, groups of 32");
    }
}

TEST(Fp4Weights, RandomCodes) {
  Random random;
  struct Size {
    int64_t rows, cols;
  };
  for (const Size& size : {Size{1, 32}, {5, 96}, {33, 544}, {70, 64}})
    for (int kind = 0; kind < 3; ++kind) {  // product, quotient, E8M0
      const int64_t rows = size.rows, cols = size.cols, group = kind == 2 ? 32 : 16;
      const Bytes codes = random.codes<uint8_t>(rows * cols / 2);
      Bytes scales = random.finite_fp8(rows * cols / group);
      if (kind == 2)
        for (uint8_t& s : scales) s = static_cast<uint8_t>(100 + s % 50);
      const float global = random.scales(1)[0] * 1000;
      const Folder folder(rows, cols, "{}", [&](Writer& w) {
        w.add(kName + (kind == 0 ? "weight" : "weight_packed"), "U8", {rows, cols / 2}, codes);
        w.add(kName + "weight_scale", kind == 2 ? "U8" : "F8_E4M3", {rows, cols / group}, scales);
        if (kind < 2) w.add(kName + (kind == 0 ? "weight_scale_2" : "weight_global_scale"), "F32", {1}, Floats{global});
      });
      std::vector<double> exact;
      for (int64_t i = 0; i < rows * cols; ++i) {
        const uint8_t scale = scales[static_cast<size_t>(i / group)];
        const double x = e2m1(codes[static_cast<size_t>(i / 2)] >> (i % 2 * 4) & 15u);
        // long double, whose quotient is closer than float64's.
        const long double wide = static_cast<long double>(x) * (kind == 2 ? e8m0(scale) : e4m3(scale));
        exact.push_back(static_cast<double>(kind == 0 ? wide * global : kind == 1 ? wide / global : wide));
      }
      expect_values(folder, exact);
    }
}

TEST(Fp4Weights, WhatIsRefused) {
  const auto with = [](const std::function<void(Writer&)>& more, int64_t cols = 32) {
    return Folder(2, cols, kNvidia, [&](Writer& w) {
      w.add(kName + "weight", "U8", {2, cols / 2}, Bytes(static_cast<size_t>(cols), 1));
      more(w);
    });
  };
  const auto scale = [](Writer& w, const char* dtype, std::vector<int64_t> shape, const Bytes& x) {
    w.add(kName + "weight_scale", dtype, shape, x);
  };
  const auto second = [](Writer& w, float x) { w.add(kName + "weight_scale_2", "F32", {}, Floats{x}); };
  EXPECT_EQ(with([](Writer&) {}).refusal(),
            "F: tensor 'W.weight_scale' is missing, expected shape [2, 1] for the mxfp4 weight");
  EXPECT_EQ(with([&](Writer& w) { second(w, 1); }).refusal(),
            "F: tensor 'W.weight_scale' is missing, expected shape [2, 2] for the nvfp4 weight");
  EXPECT_EQ(with([&](Writer& w) {
              scale(w, "F8_E4M3", {2, 2}, Bytes(4, 1));
            }).refusal(),
            "F/model.safetensors: tensor 'W.weight_scale' has shape [2, 2], expected [2, 1] for the mxfp4 weight");
  EXPECT_EQ(with([&](Writer& w) {
              scale(w, "F8_E4M3", {2, 1}, Bytes(2, 1));
            }).refusal(),
            "F/model.safetensors: tensor 'W.weight_scale' has dtype F8_E4M3, expected one of U8 F8_E8M0 for the mxfp4 "
            "weight");
  EXPECT_EQ(with([&](Writer& w) {
              scale(w, "U8", {2, 1}, Bytes{1, 255});
            }).refusal(true),
            "F/model.safetensors: tensor 'W.weight_scale' is nan at element 1, scales must be finite");
  const auto nvfp4 = [&](const Bytes& scales, float global) {
    return with([&](Writer& w) {
      scale(w, "F8_E4M3", {2, 2}, scales);
      second(w, global);
    });
  };
  EXPECT_EQ(nvfp4({1, 2, 0x7f, 4}, 1).refusal(true),
            "F/model.safetensors: tensor 'W.weight_scale' is nan at element 2, scales must be finite");
  EXPECT_EQ(nvfp4({1, 2, 3, 4}, NAN).refusal(true),
            "F/model.safetensors: tensor 'W.weight_scale_2' is nan at element 0, scales must be finite");
  EXPECT_EQ(nvfp4({1, 2, 3, 4}, 0).refusal(true), "read");
  EXPECT_EQ(with([&](Writer& w) {
              scale(w, "F8_E4M3", {2, 2}, Bytes(4, 1));
              w.add(kName + "weight_global_scale", "F32", {}, Floats{0});
            }).refusal(true),
            "F/model.safetensors: tensor 'W.weight_global_scale' is 0 at element 0, it divides the scales");
  EXPECT_EQ(with([&](Writer& w) {
              scale(w, "F8_E4M3", {2, 2}, Bytes(4, 1));
              second(w, 1);
              w.add(kName + "weight_global_scale", "F32", {}, Floats{1});
            }).refusal(),
            "F/model.safetensors: tensor 'W.weight_scale_2' is there beside 'W.weight_global_scale': one of the two is "
            "needed");
  EXPECT_EQ(
      with([&](Writer& w) { second(w, 1); }, 24).refusal(),
      "F/model.safetensors: tensor 'W.weight' has 24 columns; nvfp4 weights with whole groups of 16 are supported");
  EXPECT_EQ(
      with([&](Writer&) {}, 48).refusal(),
      "F/model.safetensors: tensor 'W.weight' has 48 columns; mxfp4 weights with whole groups of 32 are supported");
  EXPECT_EQ(Folder(2, 32, kNvidia,
                   [](Writer& w) {
                     w.add(kName + "weight", "U8", {2, 32}, Bytes(64, 1));
                   })
                .refusal(),
            "F/model.safetensors: tensor 'W.weight' has shape [2, 32], expected [2, 16] for the mxfp4 weight");
  EXPECT_EQ(Folder(2, 32, kNvidia,
                   [](Writer& w) {
                     w.add(kName + "weight_packed", "F32", {2, 4}, Floats(8, 1));
                   })
                .refusal(),
            "F/model.safetensors: tensor 'W.weight_packed' has dtype F32, expected U8 or I32");
}

// ---- compressed-tensors' packed integers

std::string packed_config(int bits, const std::string& group_size, bool symmetric = true) {
  return R"({"quant_method":"compressed-tensors","format":"pack-quantized","config_groups":{"group_0":{"weights":{)"
         R"("num_bits":)" +
         std::to_string(bits) + R"(,"type":"int","strategy":")" + (group_size == "null" ? "channel" : "group") +
         R"(","group_size":)" + group_size + R"(,"symmetric":)" + (symmetric ? "true" : "false") + "}}}}";
}

void add_shape(Writer& w, int64_t rows, int64_t cols) {
  w.add(kName + "weight_shape", "I64", {2}, std::vector<int64_t>{rows, cols});
}

TEST(PackedIntegers, SymmetricByHand) {
  // Row 0: -8 to 7 less one column filled up; stored is the number plus 8, lowest bits first.
  const Folder folder(2, 10, packed_config(4, "5"), [](Writer& w) {
    w.add(kName + "weight_packed", "I32", {2, 2}, Words{0x76543210, 0x000000f8, 0x88888888, 0x00000097});
    w.add(kName + "weight_scale", "BF16", {2, 2}, as_bf16({0.5f, 2, 1, 4}));
    add_shape(w, 2, 10);
  });
  EXPECT_EQ(folder.values(), (Floats{-4, -3.5f, -3, -2.5f, -2, -6, -4, -2, 0, 14, 0, 0, 0, 0, 0, 0, 0, 0, -4, 4}));
  EXPECT_EQ(folder.form(), "int4 (packed), groups of 5");
}

TEST(PackedIntegers, ZeroPointsAlongRowsByHand) {
  // Zero points of rows 0 to 2 are -8, 0, 7: stored 0, 8, 15 in one word of a group.
  const Folder folder(3, 2, packed_config(4, "null", false), [](Writer& w) {
    w.add(kName + "weight_packed", "I32", {3, 1}, Words{0xf0, 0xf0, 0xf0});  // -8, 7
    w.add(kName + "weight_scale", "F32", {3, 1}, Floats{1, 1, 0.5f});
    w.add(kName + "weight_zero_point", "I32", {1, 1}, Words{0xf80});
    add_shape(w, 3, 2);
  });
  EXPECT_EQ(folder.refusal(),
            "F/model.safetensors: tensor 'W.weight_packed' may have 4 or 8 bits: its rows are too short "
            "to tell");
  const Folder wide(3, 5, packed_config(4, "null", false), [](Writer& w) {
    w.add(kName + "weight_packed", "I32", {3, 1}, Words{0x801f0, 0x801f0, 0x801f0});  // -8, 7, -7, -8, 0
    w.add(kName + "weight_scale", "F32", {3, 1}, Floats{1, 1, 0.5f});
    w.add(kName + "weight_zero_point", "I32", {1, 1}, Words{0xf80});
    add_shape(w, 3, 5);
  });
  EXPECT_EQ(wide.values(), (Floats{0, 15, 1, 0, 8, -8, 7, -7, -8, 0, -7.5f, 0, -7, -7.5f, -3.5f}));
  EXPECT_EQ(wide.form(), "int4 (packed), a scale for each row, zero points");
}

TEST(PackedIntegers, EightBitsAndAnOrderByHand) {
  const Folder folder(1, 6, packed_config(8, "3"), [](Writer& w) {
    w.add(kName + "weight_packed", "I32", {1, 2}, Words{0xff008081, 0x00007f7e});  // 1, 0, -128, 127, -2, -1
    w.add(kName + "weight_scale", "F32", {1, 2}, Floats{1, 10});
    w.add(kName + "weight_g_idx", "I32", {6}, Words{1, 0, 0, 1, 1, 0});
    add_shape(w, 1, 6);
  });
  EXPECT_EQ(folder.values(), (Floats{10, 0, -128, 1270, -20, -1}));
  EXPECT_EQ(folder.form(), "int8 (packed), 2 groups in g_idx's order");
  const Folder unordered(1, 6, packed_config(8, "3"), [](Writer& w) {
    w.add(kName + "weight_packed", "I32", {1, 2}, Words{0xff008081, 0x00007f7e});
    w.add(kName + "weight_scale", "F32", {1, 2}, Floats{1, 10});
    w.add(kName + "weight_g_idx", "I32", {6}, Words(6, 0xffffffff));  // -1: none
    add_shape(w, 1, 6);
  });
  EXPECT_EQ(unordered.values(), (Floats{1, 0, -128, 1270, -20, -10}));
}

// What a caller says of the groups need not come from a config.
TEST(PackedIntegers, SizesOfGroupsThatAreSaidTwice) {
  const Folder folder(1, 10, packed_config(4, "5"), [](Writer& w) {
    w.add(kName + "weight_packed", "I32", {1, 2}, Words{0x76543210, 0xf8});
    w.add(kName + "weight_scale", "F32", {1, 2}, Floats{1, 2});
    add_shape(w, 1, 10);
  });
  const Checkpoint c = folder.open();
  const Safetensors file(c.file_of(kName + "weight_packed"));
  ModelConfig m = c.config();
  m.quantisation.group_sizes = {5, 5};
  EXPECT_EQ(layer_tensors(file, kLayer, m).output.to_f32(), folder.values());
  m.quantisation.group_sizes = {5, 6};
  EXPECT_THROW(layer_tensors(file, kLayer, m), UnsupportedError);
}

TEST(PackedIntegers, ShapesOfEitherWidth) {
  for (const uint32_t cols : {5u, 6u}) {
    const Folder folder(1, 5, packed_config(4, "null"), [&](Writer& w) {
      w.add(kName + "weight_packed", "I32", {1, 1}, Words{0x12345});
      w.add(kName + "weight_scale", "F32", {1, 1}, Floats{1});
      w.add(kName + "weight_shape", "I32", {2}, Words{1, cols});
    });
    EXPECT_EQ(folder.refusal(true), cols == 5 ? "read"
                                              : "F/model.safetensors: tensor 'W.weight_shape' is 6 at element 1, the "
                                                "model's is 5");
  }
}

TEST(PackedIntegers, RandomCodes) {
  Random random;
  struct Case {
    int64_t rows, cols, bits, group;
    int zeros;  // 0: none, 1: packed, 2: int8
  };
  for (const Case& k : {Case{7, 40, 4, 8, 0},
                        {13, 50, 4, 10, 1},
                        {9, 130, 8, 64, 2},
                        {33, 1030, 4, 128, 1},
                        {5, 24, 8, 24, 1},
                        {64, 72, 4, 32, 2}}) {
    const int64_t in_word = 32 / k.bits, words = (k.cols + in_word - 1) / in_word,
                  groups = (k.cols + k.group - 1) / k.group, zero_words = (k.rows + in_word - 1) / in_word;
    const Words codes = random.words(k.rows * words), packed_zeros = random.words(zero_words * groups);
    const std::vector<int8_t> plain_zeros = random.codes<int8_t>(k.rows * groups, k.bits == 4 ? 8 : 128);
    const std::vector<f16> scales = as_f16(random.scales(k.rows * groups));
    const Folder folder(k.rows, k.cols, packed_config(static_cast<int>(k.bits), std::to_string(k.group), k.zeros == 0),
                        [&](Writer& w) {
                          w.add(kName + "weight_packed", "I32", {k.rows, words}, codes);
                          w.add(kName + "weight_scale", "F16", {k.rows, groups}, scales);
                          if (k.zeros == 1)
                            w.add(kName + "weight_zero_point", "I32", {zero_words, groups}, packed_zeros);
                          if (k.zeros == 2) w.add(kName + "weight_zero_point", "I8", {k.rows, groups}, plain_zeros);
                          add_shape(w, k.rows, k.cols);
                        });
    const int64_t span = int64_t{1} << k.bits, half = span / 2;
    std::vector<double> exact;
    for (int64_t r = 0; r < k.rows; ++r)
      for (int64_t c = 0; c < k.cols; ++c) {
        const auto number = [&](uint32_t word, int64_t place) {
          for (; place > 0; --place) word /= static_cast<uint32_t>(span);
          return static_cast<int64_t>(word % static_cast<uint32_t>(span)) - half;
        };
        const int64_t g = c / k.group;
        const int64_t q = number(codes[static_cast<size_t>(r * words + c / in_word)], c % in_word);
        const int64_t z = k.zeros == 0 ? 0
                          : k.zeros == 1
                              ? number(packed_zeros[static_cast<size_t>(r / in_word * groups + g)], r % in_word)
                              : plain_zeros[static_cast<size_t>(r * groups + g)];
        exact.push_back(static_cast<double>(q - z) * value(scales, r * groups + g));
      }
    expect_values(folder, exact);
  }
}

TEST(PackedIntegers, WhatIsRefused) {
  struct Parts {
    std::vector<int64_t> packed{2, 3}, scale{2, 3}, shape_of{2}, zero{};
    std::string packed_dtype = "I32", scale_dtype = "F32", zero_dtype = "I32";
    Floats scales = Floats(6, 1);
    std::vector<int64_t> shape{2, 24};
    Words index{};
  };
  const auto with = [](const std::string& config, const std::function<void(Parts&)>& change) {
    Parts p;
    change(p);
    return Folder(2, 24, config, [&](Writer& w) {
      const auto count = [](const std::vector<int64_t>& s) {
        size_t n = 1;
        for (int64_t e : s) n *= static_cast<size_t>(e);
        return n;
      };
      w.add(kName + "weight_packed", p.packed_dtype, p.packed, Words(count(p.packed), 1));
      if (!p.scale.empty()) w.add(kName + "weight_scale", p.scale_dtype, p.scale, p.scales);
      if (!p.shape_of.empty()) w.add(kName + "weight_shape", "I64", p.shape_of, p.shape);
      if (!p.zero.empty()) w.add(kName + "weight_zero_point", p.zero_dtype, p.zero, Words(count(p.zero), 1));
      if (!p.index.empty()) w.add(kName + "weight_g_idx", "I32", {static_cast<int64_t>(p.index.size())}, p.index);
    });
  };
  const std::string four = packed_config(4, "8"), file = "F/model.safetensors: tensor 'W.";
  EXPECT_EQ(with(four, [](Parts&) {}).refusal(), "read");
  for (const std::vector<int64_t>& packed : std::vector<std::vector<int64_t>>{{3, 3}, {1, 6}})
    EXPECT_NE(with(four, [&](Parts& p) { p.packed = packed; }).refusal().find(", expected [2, 3] or [2, 6] for a"),
              std::string::npos);
  EXPECT_EQ(with(four, [](Parts& p) { p.scale = {6}; }).refusal(),
            file + "weight_scale' has shape [6], expected [2, 1] for the packed integer weight");
  // No group at all, whatever says in which one a column is.
  for (const Words& index : {Words(), Words(24, 0), Words(24, 0xffffffff)})
    EXPECT_EQ(with(four,
                   [&](Parts& p) {
                     p.scale = {2, 0};
                     p.scales.clear();
                     p.index = index;
                   })
                  .refusal(),
              file + "weight_scale' has shape [2, 0], expected [2, 1] for the packed integer weight");
  const auto groups_of_config = [](const std::string& a, const std::string& b) {
    return R"({"quant_method":"compressed-tensors","config_groups":{"a":{"weights":{)" + a + R"(}},"b":{"weights":{)" +
           b + "}}}}";
  };
  EXPECT_EQ(with(groups_of_config(R"("num_bits":2)", R"("num_bits":3)"), [](Parts&) {}).refusal(),
            file + "weight_packed' holds integers of 4 bits, the config has 2, 3");
  // Rows that have one scale, in other layers, are no groups.
  EXPECT_EQ(
      with(groups_of_config(R"("num_bits":4,"strategy":"channel")", R"("num_bits":4,"group_size":8)"), [](Parts&) {})
          .refusal(),
      "read");
  EXPECT_EQ(with(four,
                 [](Parts& p) {
                   p.packed = {2, 4};
                 })
                .refusal(),
            file + "weight_packed' has shape [2, 4], expected [2, 3] or [2, 6] for a weight of 4 or 8 bits");
  EXPECT_EQ(with(four, [](Parts& p) { p.packed = {6}; }).refusal(),
            file + "weight_packed' has shape [6], expected [2, 3] or [2, 6] for a weight of 4 or 8 bits");
  EXPECT_EQ(with(four,
                 [](Parts& p) {
                   p.packed = {2, 6};
                 })
                .refusal(),
            file + "weight_packed' holds integers of 8 bits, the config has 4");
  EXPECT_EQ(with(four, [](Parts& p) { p.scale = {}; }).refusal(),
            "F: tensor 'W.weight_scale' is missing, expected shape [2, 1] for the packed integer weight");
  EXPECT_EQ(with(four,
                 [](Parts& p) {
                   p.scale = {3, 2};
                 })
                .refusal(),
            file + "weight_scale' has shape [3, 2], expected [2, 2] for the packed integer weight");
  EXPECT_EQ(with(four, [](Parts& p) { p.scale_dtype = "I32"; }).refusal(),
            file + "weight_scale' has dtype I32, expected one of F32 BF16 F16 for the packed integer weight");
  EXPECT_EQ(with(four, [](Parts& p) { p.scales[4] = NAN; }).refusal(true),
            file + "weight_scale' is nan at element 4, scales must be finite");
  EXPECT_EQ(with(four, [](Parts& p) { p.shape_of = {}; }).refusal(),
            "F: tensor 'W.weight_shape' is missing, expected shape [2] for the packed integer weight");
  EXPECT_EQ(with(four,
                 [](Parts& p) {
                   p.shape = {2, 23};
                 })
                .refusal(true),
            file + "weight_shape' is 23 at element 1, the model's is 24");
  EXPECT_EQ(with(packed_config(4, "7"), [](Parts&) {}).refusal(),
            file + "weight_scale' has 3 groups of 24 columns, which no group_size of the config comes to (7)");
  EXPECT_EQ(
      with("", [](Parts&) {}).refusal(),
      file + "weight_scale' has 3 groups of 24 columns, which no group_size of the config comes to (it has none)");
  EXPECT_EQ(with(packed_config(4, "8", false), [](Parts&) {}).refusal(),
            "F: tensor 'W.weight_zero_point' is missing, the config says that its integer weights have zero points");
  EXPECT_EQ(with(four,
                 [](Parts& p) {
                   p.zero = {2, 3};
                 })
                .refusal(),
            file + "weight_zero_point' has shape [2, 3], expected [1, 3] for the packed integer weight");
  EXPECT_EQ(with(four, [](Parts& p) { p.index = Words(23, 0); }).refusal(),
            file + "weight_g_idx' has shape [23], expected [24] for the groups of columns");
  EXPECT_EQ(with(four, [](Parts& p) { p.index = Words(24, 0), p.index[5] = 3; }).refusal(true),
            file + "weight_g_idx' is 3 at element 5, groups are 0 to 2");
  EXPECT_EQ(with(four, [](Parts& p) { p.index = Words(24, 0), p.index[5] = 0xffffffff; }).refusal(true),
            file + "weight_g_idx' is -1 at element 5, groups are 0 to 2");
  const std::string both =
      R"({"quant_method":"compressed-tensors","config_groups":{"a":{"weights":{"num_bits":4,"strategy":"group",)"
      R"("group_size":8}},"b":{"weights":{"num_bits":4,"strategy":"group","group_size":9}}}})";
  EXPECT_EQ(with(both, [](Parts&) {}).refusal(),
            file + "weight_scale' has 3 groups of 24 columns, which groups of 8 and of 9 come to: the config has both");
}

// ---- AWQ

constexpr const char* kAwq = R"({"quant_method":"awq","bits":4,"group_size":2,"zero_point":true,"version":"gemm"})";

TEST(AwqWeights, ByHand) {
  // Rows 0 to 7 of a column hold 0 to 7. From the lowest bits up a word has rows 0 2 4 6 1 3 5 7: 0x75316420.
  const Folder folder(8, 4, kAwq, [](Writer& w) {
    w.add(kName + "qweight", "I32", {4, 1}, Words{0x75316420, 0x75316420, 0xffffffff, 0x00000010});
    w.add(kName + "qzeros", "I32", {2, 1}, Words{0x75316420, 0x00010000});  // group 1: row 1 has 1
    std::vector<f16> scales(16, to_f16(1));
    scales[8 + 2] = to_f16(0.5f);  // group 1, row 2
    w.add(kName + "scales", "F16", {2, 8}, scales);
  });
  Floats expected;
  for (int r = 0; r < 8; ++r) {
    expected.insert(expected.end(), {0, 0});  // each code is its zero point
    expected.push_back(r == 1 ? 14 : r == 2 ? 7.5f : 15);
    expected.push_back(r == 1 ? -1 : r == 2 ? 0.5f : 0);  // the word holds 1 for row 2
  }
  EXPECT_EQ(folder.values(), expected);
  EXPECT_EQ(folder.form(), "int4 (awq), groups of 2, zero points");
}

TEST(AwqWeights, RandomCodes) {
  Random random;
  constexpr int kOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  struct Size {
    int64_t rows, cols, group;
  };
  for (const Size& size : {Size{8, 6, 2}, {40, 96, 32}, {72, 530, 128}, {64, 33, -1}}) {
    const int64_t rows = size.rows, cols = size.cols, group = size.group;
    const int64_t groups = group < 0 ? 1 : (cols + group - 1) / group, words = rows / 8;
    const std::vector<uint32_t> codes = random.codes<uint32_t>(cols * rows, 16),
                                zeros = random.codes<uint32_t>(groups * rows, 16);
    const std::vector<f16> scales = as_f16(random.scales(groups * rows));
    const auto pack = [&](const std::vector<uint32_t>& x) {  // [n, rows], as AutoAWQ goes about it
      Words packed;
      for (size_t at = 0; at < x.size(); at += 8) {
        uint32_t word = 0;
        for (int i = 0; i < 8; ++i) word |= x[at + static_cast<size_t>(kOrder[i])] << (4 * i);
        packed.push_back(word);
      }
      return packed;
    };
    const Folder folder(rows, cols, R"({"quant_method":"awq","bits":4,"group_size":)" + std::to_string(group) + "}",
                        [&](Writer& w) {
                          w.add(kName + "qweight", "I32", {cols, words}, pack(codes));
                          w.add(kName + "qzeros", "I32", {groups, words}, pack(zeros));
                          w.add(kName + "scales", "F16", {groups, rows}, scales);
                        });
    std::vector<double> exact;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < cols; ++c) {
        const int64_t g = group < 0 ? 0 : c / group;
        exact.push_back(
            (static_cast<double>(codes[static_cast<size_t>(c * rows + r)]) - zeros[static_cast<size_t>(g * rows + r)]) *
            value(scales, g * rows + r));
      }
    expect_values(folder, exact);
  }
}

TEST(AwqWeights, WhatIsRefused) {
  const auto with = [](const std::string& config, int64_t rows, std::vector<int64_t> qweight,
                       std::vector<int64_t> qzeros, std::vector<int64_t> scales, float scale = 1) {
    return Folder(rows, 4, config, [&](Writer& w) {
      const auto n = [](const std::vector<int64_t>& s) {
        return static_cast<size_t>(s.size() < 2 ? s[0] : s[0] * s[1]);
      };
      w.add(kName + "qweight", "I32", qweight, Words(n(qweight), 1));
      if (!qzeros.empty()) w.add(kName + "qzeros", "I32", qzeros, Words(n(qzeros), 1));
      if (!scales.empty()) w.add(kName + "scales", "F32", scales, Floats(n(scales), scale));
    });
  };
  const std::string file = "F/model.safetensors: tensor 'W.";
  EXPECT_EQ(with(kAwq, 8, {4, 1}, {2, 1}, {2, 8}).refusal(), "read");
  EXPECT_EQ(with(kAwq, 8, {4, 1}, {2, 1}, {8}).refusal(),
            file + "scales' has shape [8], expected [1, 8] for the awq weight");
  EXPECT_EQ(with(kAwq, 8, {4, 1}, {0, 1}, {0, 8}).refusal(),
            file + "scales' has shape [0, 8], expected [1, 8] for the awq weight");
  EXPECT_EQ(with(kAwq, 8, {1, 4}, {2, 1}, {2, 8}).refusal(),
            file + "qweight' has shape [1, 4], expected [4, 1] for the awq weight");
  EXPECT_EQ(with(kAwq, 9, {4, 1}, {2, 1}, {2, 8}).refusal(),
            file + "qweight' has 9 rows; whole words of 8 are supported");
  EXPECT_EQ(with(kAwq, 8, {4, 1}, {}, {2, 8}).refusal(),
            "F: tensor 'W.qzeros' is missing, expected shape [2, 1] for the awq weight");
  EXPECT_EQ(with(kAwq, 8, {4, 1}, {2, 1}, {}).refusal(),
            "F: tensor 'W.scales' is missing, expected shape [1, 8] for the awq weight");
  EXPECT_EQ(with(kAwq, 8, {4, 1}, {1, 1}, {2, 8}).refusal(),
            file + "qzeros' has shape [1, 1], expected [2, 1] for the awq weight");
  EXPECT_EQ(with(kAwq, 8, {4, 1}, {3, 1}, {3, 8}).refusal(),
            file + "scales' has 3 groups of 4 columns, which no group_size of the config comes to (2)");
  EXPECT_EQ(with(kAwq, 8, {4, 1}, {2, 1}, {2, 8}, NAN).refusal(true),
            file + "scales' is nan at element 0, scales must be finite");
  EXPECT_EQ(with(R"({"quant_method":"awq","bits":8,"group_size":2})", 8, {4, 1}, {2, 1}, {2, 8}).refusal(),
            file + "qweight' holds integers of 4 bits, the config has 8");
  for (const char* config : {"", R"({"quant_method":"fp8"})"})
    EXPECT_EQ(with(config, 8, {4, 1}, {2, 1}, {2, 8}).refusal(),
              file + "qweight' is there with quant_method '" + (*config ? "fp8" : "") +
                  "' in the config, which says not how it is packed: awq or gptq is needed");
}

// ---- GPTQ

std::string gptq_config(int bits, int64_t group, bool second = false) {
  return R"({"quant_method":"gptq","bits":)" + std::to_string(bits) + R"(,"group_size":)" + std::to_string(group) +
         R"(,"desc_act":true,"sym":false,"checkpoint_format":")" + (second ? "gptq_v2" : "gptq") + R"("})";
}

TEST(GptqWeights, ByHandInBothFormats) {
  for (bool second : {false, true}) {
    const Folder folder(8, 8, gptq_config(4, 4, second), [](Writer& w) {
      // Columns 0 to 7 of a row hold 0 to 7.
      w.add(kName + "qweight", "I32", {1, 8}, Words(8, 0x76543210));
      w.add(kName + "qzeros", "I32", {2, 1},
            Words{0xe0000003, 0x00000007});  // rows 0 and 7 of group 0, row 0 of group 1
      std::vector<f16> scales(16, to_f16(1));
      scales[8] = to_f16(0.5f);  // group 1, row 0
      w.add(kName + "scales", "F16", {2, 8}, scales);
    });
    const Floats x = folder.values();
    const float one = second ? 0 : 1;  // what a stored zero point lacks
    for (int c = 0; c < 8; ++c) {
      const float code = static_cast<float>(c);
      EXPECT_EQ(x[static_cast<size_t>(c)], c < 4 ? code - (3 + one) : (code - (7 + one)) * 0.5f) << c;
      EXPECT_EQ(x[static_cast<size_t>(8 + c)], code - one) << c;
      EXPECT_EQ(x[static_cast<size_t>(56 + c)], c < 4 ? code - (14 + one) : code - one) << c;
    }
    EXPECT_EQ(folder.form(), "int4 (gptq), groups of 4, zero points");
  }
}

TEST(GptqWeights, AnOrderOfActivationsByHand) {
  const Folder folder(4, 4, gptq_config(8, 2), [](Writer& w) {
    w.add(kName + "qweight", "I32", {1, 4}, Words(4, 0x0a0a0a0a));
    w.add(kName + "g_idx", "I32", {4}, Words{1, 0, 1, 0});
    w.add(kName + "qzeros", "I32", {2, 1}, Words(2, 0x07070707));  // 8
    w.add(kName + "scales", "F32", {2, 4}, Floats{1, 1, 1, 1, 3, 3, 3, 3});
  });
  EXPECT_EQ(folder.values(), (Floats{6, 2, 6, 2, 6, 2, 6, 2, 6, 2, 6, 2, 6, 2, 6, 2}));
  EXPECT_EQ(folder.form(), "int8 (gptq), 2 groups in g_idx's order, zero points");
}

TEST(GptqWeights, RandomCodes) {
  Random random;
  struct Case {
    int64_t rows, cols, bits, group;
    bool index, second;
  };
  for (const Case& k : {Case{8, 16, 4, 8, false, false},
                        {40, 96, 4, 32, true, false},
                        {64, 528, 4, 128, true, true},
                        {32, 64, 2, -1, false, false},
                        {12, 36, 8, 12, true, true}}) {
    const int64_t in_word = 32 / k.bits, groups = k.group < 0 ? 1 : (k.cols + k.group - 1) / k.group;
    const uint32_t span = 1u << k.bits;
    const std::vector<uint32_t> codes = random.codes<uint32_t>(k.rows * k.cols, span),
                                zeros = random.codes<uint32_t>(groups * k.rows, k.second ? span : span - 1),
                                index = random.codes<uint32_t>(k.cols, static_cast<uint32_t>(groups));
    const std::vector<f16> scales = as_f16(random.scales(groups * k.rows));
    Words qweight(static_cast<size_t>(k.cols / in_word * k.rows)),
        qzeros(static_cast<size_t>(groups * k.rows / in_word));
    for (int64_t r = 0; r < k.rows; ++r) {
      for (int64_t c = 0; c < k.cols; ++c)
        qweight[static_cast<size_t>(c / in_word * k.rows + r)] += codes[static_cast<size_t>(r * k.cols + c)]
                                                                  << (c % in_word * k.bits);
      for (int64_t g = 0; g < groups; ++g)
        qzeros[static_cast<size_t>((g * k.rows + r) / in_word)] += zeros[static_cast<size_t>(g * k.rows + r)]
                                                                   << (r % in_word * k.bits);
    }
    const Folder folder(k.rows, k.cols, gptq_config(static_cast<int>(k.bits), k.group, k.second), [&](Writer& w) {
      w.add(kName + "qweight", "I32", {k.cols / in_word, k.rows}, qweight);
      w.add(kName + "qzeros", "I32", {groups, k.rows / in_word}, qzeros);
      w.add(kName + "scales", "F16", {groups, k.rows}, scales);
      if (k.index) w.add(kName + "g_idx", "I32", {k.cols}, index);
    });
    std::vector<double> exact;
    for (int64_t r = 0; r < k.rows; ++r)
      for (int64_t c = 0; c < k.cols; ++c) {
        const int64_t g = k.index ? index[static_cast<size_t>(c)] : k.group < 0 ? 0 : c / k.group;
        const double zero = zeros[static_cast<size_t>(g * k.rows + r)] + (k.second ? 0.0 : 1.0);
        exact.push_back((codes[static_cast<size_t>(r * k.cols + c)] - zero) * value(scales, g * k.rows + r));
      }
    expect_values(folder, exact);
  }
}

TEST(GptqWeights, WhatIsRefused) {
  const auto with = [](const std::string& config, std::vector<int64_t> qweight, std::vector<int64_t> qzeros,
                       const Words& index = {}, int64_t rows = 8, int64_t cols = 16) {
    return Folder(rows, cols, config, [&](Writer& w) {
      const auto n = [](const std::vector<int64_t>& s) {
        return static_cast<size_t>(s.size() < 2 ? s[0] : s[0] * s[1]);
      };
      w.add(kName + "qweight", "I32", qweight, Words(n(qweight), 1));
      w.add(kName + "qzeros", "I32", qzeros, Words(n(qzeros), 1));
      w.add(kName + "scales", "F32", {2, rows}, Floats(static_cast<size_t>(2 * rows), 1));
      if (!index.empty()) w.add(kName + "g_idx", "I32", {static_cast<int64_t>(index.size())}, index);
    });
  };
  const std::string four = gptq_config(4, 8), file = "F/model.safetensors: tensor 'W.";
  EXPECT_EQ(with(four, {2, 8}, {2, 1}).refusal(), "read");
  for (bool second : {false, true}) {
    const Folder largest(8, 16, gptq_config(4, 8, second), [](Writer& w) {
      w.add(kName + "qweight", "I32", {2, 8}, Words(16, 1));
      w.add(kName + "qzeros", "I32", {2, 1}, Words{0x77777777, 0x77777f77});
      w.add(kName + "scales", "F32", {2, 8}, Floats(16, 1));
    });
    EXPECT_EQ(largest.refusal(true),
              second ? "read"
                     : file +
                           "qzeros' is 15 at group 1, row 2, which readers of checkpoint_format gptq take for 16 or "
                           "for 0");
  }
  for (const auto& [shape, said] : std::vector<std::pair<std::vector<int64_t>, std::string>>{
           {{3, 8}, "[3, 8]"}, {{2, 9}, "[2, 9]"}, {{16}, "[16]"}})
    EXPECT_EQ(with(four, shape, {2, 1}).refusal(),
              file + "qweight' has shape " + said +
                  ", expected [1, 8] or [2, 8] or [4, 8] for a weight of 2, 4 or 8 bits in whole words");
  EXPECT_EQ(Folder(8, 16, four,
                   [](Writer& w) {
                     w.add(kName + "qweight", "I32", {2, 8}, Words(16, 1));
                   })
                .refusal(),
            "F: tensor 'W.scales' is missing, expected shape [1, 8] for the gptq weight");
  for (const auto& [shape, said] :
       std::vector<std::pair<std::vector<int64_t>, std::string>>{{{8}, "[8]"}, {{0, 8}, "[0, 8]"}}) {
    const Folder folder(8, 16, four, [&, s = shape](Writer& w) {
      w.add(kName + "qweight", "I32", {2, 8}, Words(16, 1));
      w.add(kName + "qzeros", "I32", {s[0] / 8, 1}, Words(static_cast<size_t>(s[0] / 8), 1));
      w.add(kName + "scales", "F32", s, Floats(s.size() < 2 ? 8 : 0, 1));
      w.add(kName + "g_idx", "I32", {16}, Words(16, 0));
    });
    EXPECT_EQ(folder.refusal(), file + "scales' has shape " + said + ", expected [1, 8] for the gptq weight");
  }
  EXPECT_EQ(with(four, {4, 8}, {2, 1}).refusal(), file + "qweight' holds integers of 8 bits, the config has 4");
  EXPECT_EQ(with(four, {2, 8}, {1, 2}).refusal(),
            file + "qzeros' has shape [1, 2], expected [2, 1] for the gptq weight");
  EXPECT_EQ(with(gptq_config(4, 5), {2, 8}, {2, 1}).refusal(),
            file + "scales' has 2 groups of 16 columns, which no group_size of the config comes to (5)");
  EXPECT_EQ(with(four, {2, 8}, {2, 1}, Words(15, 0)).refusal(),
            file + "g_idx' has shape [15], expected [16] for the groups of columns");
  Words index(16, 0);
  index[9] = 2;
  EXPECT_EQ(with(four, {2, 8}, {2, 1}, index).refusal(true), file + "g_idx' is 2 at element 9, groups are 0 to 1");
  EXPECT_EQ(with(four, {2, 9}, {2, 1}, {}, 9).refusal(),
            file + "qweight' has 9 rows; whole words of 8 zero points are supported");
  EXPECT_EQ(with(four, {2, 8}, {2, 1}, {}, 8, 17).refusal(),
            file + "qweight' has 17 columns; whole words of 2, 4 or 8 bits are supported");
}

// ---- Parts of a layer

// Some heads' rows and columns of every map are those of the whole, whatever stores them.
TEST(QuantisedLayers, PartsOfHeads) {
  Random random;
  test::TempFolder folder;
  test::write_file(
      folder / "config.json",
      R"({"model_type":"deepseek_v3","num_hidden_layers":1,"num_attention_heads":3,"q_lora_rank":null,"hidden_size":64,)"
      R"("kv_lora_rank":32,"qk_nope_head_dim":24,"qk_rope_head_dim":8,"v_head_dim":16,)"
      R"("quantization_config":{"quant_method":"gptq","bits":4,"group_size":16}})");
  Writer w;
  const auto plain = [&](const char* role, std::vector<int64_t> shape) {
    w.add(kLayer + role, "F32", shape, random.scales(shape[0] * (shape.size() > 1 ? shape[1] : 1)));
  };
  w.add(kLayer + "q_proj.weight", "U8", {96, 32}, random.codes<uint8_t>(96 * 32));  // mxfp4
  w.add(kLayer + "q_proj.weight_scale", "U8", {96, 2}, random.codes<uint8_t>(96 * 2, 200));
  plain("kv_a_proj_with_mqa.weight", {40, 64});
  plain("kv_a_layernorm.weight", {32});
  w.add(kLayer + "kv_b_proj.weight", "F8_E4M3", {120, 32}, random.finite_fp8(120 * 32));  // a scale for each row
  w.add(kLayer + "kv_b_proj.weight_scale", "F32", {120, 1}, random.scales(120));
  w.add(kName + "qweight", "I32", {6, 64}, random.words(6 * 64));
  w.add(kName + "qzeros", "I32", {3, 8}, Words(3 * 8, 0x75310246));
  w.add(kName + "scales", "F32", {3, 64}, random.scales(3 * 64));
  w.write(folder / "model.safetensors");
  const Checkpoint checkpoint(folder.path());
  const ModelConfig& m = checkpoint.config();
  LayerTensors all = checkpoint.layer(0);
  all.scales = {.q = {}, .k = {5}, .v = {1, 2, 3}};
  for (const HeadRange heads : {HeadRange{0, 1}, HeadRange{1, 2}, HeadRange{2, 1}}) {
    const LayerTensors part = part_of(m, all, heads);
    EXPECT_EQ(part.kv_up.dtype, Dtype::fp8_e4m3);  // not its values
    EXPECT_EQ(part.scales.k, Floats{5});
    ASSERT_EQ(std::ssize(part.scales.v), heads.count);
    EXPECT_EQ(part.scales.v[0], static_cast<float>(1 + heads.begin));
    for (Dtype t : {Dtype::f32, Dtype::bf16}) {
      const auto rows = [&](const HostTensor& whole, int64_t per_head) {
        const Floats x = whole.to_f32(t);
        const int64_t n = per_head * whole.shape[1];
        return Floats(x.begin() + heads.begin * n, x.begin() + (heads.begin + heads.count) * n);
      };
      EXPECT_EQ(part.query.to_f32(t), rows(all.query, 32));
      EXPECT_EQ(part.kv_up.to_f32(t), rows(all.kv_up, 40));
      const Floats whole = all.output.to_f32(t), some = part.output.to_f32(t);
      for (int64_t r = 0; r < 64; ++r)
        for (int64_t c = 0; c < heads.count * 16; ++c)
          ASSERT_EQ(some[static_cast<size_t>(r * heads.count * 16 + c)],
                    whole[static_cast<size_t>(r * 48 + heads.begin * 16 + c)]);
    }
  }
  EXPECT_NO_THROW(prepare(m, all, Dtype::bf16));
  EXPECT_NO_THROW(prepare(m, all, {.dtype = Dtype::bf16, .absorption = Absorption::full_fp8}));
}

}  // namespace
}  // namespace mla
