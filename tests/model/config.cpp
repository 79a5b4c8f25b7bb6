// Presets, config.json in its generations, rotary frequencies and scales.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "cases/compare.hpp"
#include "mla/error.hpp"
#include "mla/rotary.hpp"

namespace mla {
namespace {

TEST(Presets, TrueDimensions) {
  struct Row {
    const char* name;
    int64_t hidden, layers, heads, query_latent, latent, nope, rope, value;
  };
  for (const Row& r :
       {Row{"deepseek-v2-lite", 2048, 27, 16, 0, 512, 128, 64, 128},
        Row{"deepseek-v3", 7168, 61, 128, 1536, 512, 128, 64, 128},
        Row{"deepseek-v3.2", 7168, 61, 128, 1536, 512, 128, 64, 128},
        Row{"kimi-k2", 7168, 61, 64, 1536, 512, 128, 64, 128}, Row{"minicpm3", 2560, 62, 40, 768, 256, 64, 32, 64}}) {
    const ModelConfig m = preset(r.name);
    EXPECT_EQ(m.hidden, r.hidden);
    EXPECT_EQ(m.layers, r.layers);
    EXPECT_EQ(m.heads, r.heads);
    EXPECT_EQ(m.query_latent, r.query_latent);
    EXPECT_EQ(m.latent, r.latent);
    EXPECT_EQ(m.nope, r.nope);
    EXPECT_EQ(m.rope, r.rope);
    EXPECT_EQ(m.value, r.value);
    EXPECT_NO_THROW(m.validate());
  }
  EXPECT_EQ(preset_names().size(), 5u);
  EXPECT_THROW(preset("gpt-2"), InputError);
  try {
    preset("glm-5");
    FAIL();
  } catch (const InputError& e) {
    EXPECT_STREQ(e.what(),
                 "no preset for 'glm-5': its dimensions come from its config.json; pass that file or its folder");
  }
}

TEST(Presets, TrueConstants) {
  struct Row {
    const char* name;
    double theta, factor, mscale, beta_fast, eps;
    int64_t block;
  };
  for (const Row& r :
       {Row{"deepseek-v2-lite", 1e4, 40, 0.707, 32, 1e-6, 0}, Row{"deepseek-v3", 1e4, 40, 1, 32, 1e-6, 128},
        Row{"deepseek-v3.2", 1e4, 40, 1, 32, 1e-6, 128}, Row{"kimi-k2", 5e4, 32, 1, 1, 1e-6, 128}}) {
    const ModelConfig m = preset(r.name);
    EXPECT_EQ(m.rotary.scaling, RopeConfig::Scaling::yarn) << r.name;
    EXPECT_TRUE(m.rotary.interleaved) << r.name;
    EXPECT_EQ(m.rotary.theta, r.theta) << r.name;
    EXPECT_EQ(m.rotary.factor, r.factor) << r.name;
    EXPECT_EQ(m.rotary.mscale, r.mscale) << r.name;
    EXPECT_EQ(m.rotary.mscale_all_dim, r.mscale) << r.name;
    EXPECT_EQ(m.rotary.beta_fast, r.beta_fast) << r.name;
    EXPECT_EQ(m.rotary.beta_slow, 1) << r.name;
    EXPECT_EQ(m.rotary.original_max_position, 4096) << r.name;
    EXPECT_EQ(m.rms_eps, r.eps) << r.name;
    EXPECT_EQ(m.fp8_block_rows, r.block) << r.name;
    EXPECT_EQ(m.fp8_block_cols, r.block) << r.name;
    EXPECT_EQ(m.indexer.has_value(), std::string_view(r.name) == "deepseek-v3.2") << r.name;
  }
  const ModelConfig mini = preset("minicpm3");
  EXPECT_EQ(mini.rotary.scaling, RopeConfig::Scaling::longrope);
  EXPECT_EQ(mini.rotary.short_factors.size(), 16u);
  EXPECT_EQ(mini.rotary.short_factors, mini.rotary.long_factors);
  EXPECT_EQ(mini.rotary.short_factors[5], 3.1446935121267696);
  EXPECT_EQ(rotary_magnitude(mini.rotary), 1);
  EXPECT_FALSE(mini.rotary.interleaved);
  EXPECT_EQ(mini.rms_eps, 1e-5);
  const IndexerConfig indexer = *preset("deepseek-v3.2").indexer;
  EXPECT_EQ(indexer.heads, 64);
  EXPECT_EQ(indexer.dim, 128);
  EXPECT_EQ(indexer.topk, 2048);
  EXPECT_FALSE(indexer.interleaved);
}

TEST(Scale, YarnSquaresItsTemperature) {
  const double m = 0.1 * std::log(40.0) + 1;
  EXPECT_NEAR(preset("deepseek-v3").softmax_scale(), m * m / std::sqrt(192.0), 1e-15);
  EXPECT_NEAR(m * m, 1.8739, 1e-4);
  ModelConfig plain = preset("deepseek-v3");
  plain.rotary = {};
  EXPECT_NEAR(plain.softmax_scale(), 1 / std::sqrt(192.0), 1e-15);
  EXPECT_EQ(yarn_mscale(1, 5), 1);
  EXPECT_EQ(yarn_mscale(0.5, 5), 1);
}

TEST(Rotary, YarnBlendsBetweenItsCorrectionDims) {
  const RopeConfig r = preset("deepseek-v3").rotary;
  const auto yarn = inverse_frequencies(r, 64);
  RopeConfig plain = r;
  plain.scaling = RopeConfig::Scaling::none;
  const auto base = inverse_frequencies(plain, 64);
  // beta_fast 32 turns over 4096 positions: dim floor(10.46) = 10; beta_slow 1: ceil(22.5) = 23.
  for (int i = 0; i <= 10; ++i) EXPECT_DOUBLE_EQ(yarn[i], base[i]) << i;
  for (int i = 23; i < 32; ++i) EXPECT_DOUBLE_EQ(yarn[i], base[i] / 40) << i;
  EXPECT_NEAR(yarn[15] / base[15], 1 - 5.0 / 13 * (1 - 1.0 / 40), 1e-12);
  EXPECT_EQ(rotary_magnitude(r), 1);
  RopeConfig uneven = r;
  uneven.mscale = 0.5;
  uneven.attention_factor = 2;
  EXPECT_NEAR(rotary_magnitude(uneven), 2 * yarn_mscale(40, 0.5) / yarn_mscale(40, 1), 1e-15);
}

TEST(Rotary, TableHoldsCosAndSin) {
  const RotaryTable t(RopeConfig{}, 8, 200000);
  for (int64_t p : {0, 1, 77, 199999})
    for (int64_t i = 0; i < 4; ++i) {
      const double angle = static_cast<double>(p) * std::pow(10000.0, -static_cast<double>(i) / 4);
      EXPECT_NEAR(t.cos(p)[i], std::cos(angle), 1e-6);
      EXPECT_NEAR(t.sin(p)[i], std::sin(angle), 1e-6);
    }
  EXPECT_FALSE(RotaryTable(RopeConfig{}, 0, 10).rotates());
  EXPECT_THROW(RotaryTable(RopeConfig{}, 7, 10), ShapeError);
  EXPECT_THROW(RotaryTable(RopeConfig{}, 8, -1), ShapeError);
  EXPECT_THROW(RotaryTable(RopeConfig{}, 8, 0), ShapeError);
  EXPECT_THROW(RotaryTable(RopeConfig{}, 64, int64_t{1} << 62), ShapeError);
}

// Only what a test changes differs from this.
std::string config(const std::string& more) {
  return R"({"model_type":"deepseek_v3","hidden_size":48,"num_hidden_layers":2,"num_attention_heads":3,"kv_lora_rank":40,)"
         R"("qk_nope_head_dim":24,"qk_rope_head_dim":8,"v_head_dim":20)" +
         more + "}";
}
// The same of a class whose attention is sparse.
std::string sparse_config(const std::string& more) {
  std::string text = config(more);
  text.replace(text.find("deepseek_v3"), 11, "deepseek_v32");
  return text;
}

TEST(Config, OldAndNewRopeKeys) {
  const std::string yarn =
      R"("factor":40,"beta_fast":31,"beta_slow":2,"mscale":0.7,"mscale_all_dim":0.9,"original_max_position_embeddings":4096)";
  for (const std::string& text :
       {config(R"(,"rope_theta":5000,"rope_scaling":{"type":"yarn",)" + yarn + "}"),
        config(R"(,"rope_theta":5000,"rope_scaling":{"rope_type":"yarn",)" + yarn + "}"),
        config(R"(,"rope_parameters":{"rope_theta":5000.0,"rope_type":"yarn",)" + yarn + "}")}) {
    const RopeConfig r = parse_config(text).rotary;
    EXPECT_EQ(r.scaling, RopeConfig::Scaling::yarn);
    EXPECT_EQ(r.theta, 5000);
    EXPECT_EQ(r.factor, 40);
    EXPECT_EQ(r.beta_fast, 31);
    EXPECT_EQ(r.beta_slow, 2);
    EXPECT_EQ(r.mscale, 0.7);
    EXPECT_EQ(r.mscale_all_dim, 0.9);
    EXPECT_EQ(r.original_max_position, 4096);
  }
  EXPECT_EQ(parse_config(config(R"(,"rope_scaling":null)")).rotary.scaling, RopeConfig::Scaling::none);
  EXPECT_EQ(parse_config(config(R"(,"rope_parameters":{"rope_theta":1e6,"rope_type":"default"})")).rotary.theta, 1e6);
}

// Magnitude of cos and sin: `attn_factor` multiplies the ratio of temperatures, `attention_factor` replaces it.
TEST(Config, AttentionFactors) {
  const std::string yarn = R"("type":"yarn","factor":40,"mscale":0.7,"mscale_all_dim":0.9)";
  const auto magnitude = [&](const std::string& more) {
    return rotary_magnitude(parse_config(config(R"(,"rope_scaling":{)" + yarn + more + "}")).rotary);
  };
  const double ratio = yarn_mscale(40, 0.7) / yarn_mscale(40, 0.9);
  EXPECT_DOUBLE_EQ(magnitude(""), ratio);
  EXPECT_DOUBLE_EQ(magnitude(R"(,"attn_factor":3)"), 3 * ratio);
  EXPECT_DOUBLE_EQ(magnitude(R"(,"attention_factor":1.25)"), 1.25);
}

TEST(Config, OptionalParts) {
  EXPECT_EQ(parse_config(config(R"(,"q_lora_rank":null)")).query_latent, 0);
  EXPECT_EQ(parse_config(config(R"(,"q_lora_rank":20)")).query_latent, 20);
  EXPECT_TRUE(parse_config(config("")).rotary.interleaved);
  EXPECT_FALSE(parse_config(config(R"(,"rope_interleave":false)")).rotary.interleaved);
  const ModelConfig fp8 =
      parse_config(config(R"(,"quantization_config":{"quant_method":"fp8","weight_block_size":[128,64]})"));
  EXPECT_EQ(fp8.fp8_block_rows, 128);
  EXPECT_EQ(fp8.fp8_block_cols, 64);
  const ModelConfig sparse =
      parse_config(sparse_config(R"(,"q_lora_rank":20,"index_n_heads":4,"index_head_dim":128,"index_topk":64)"));
  EXPECT_EQ(sparse.indexer->heads, 4);
  EXPECT_FALSE(sparse.indexer->interleaved);
  EXPECT_EQ(parse_config(R"({"text_config":)" + config("") + "}").latent, 40);
}

// "1101" for layers with, with, without and with an indexer of their own.
std::string own_indexers(const ModelConfig& m) {
  std::string s;
  for (int64_t l = 0; l < m.layers; ++l) s += m.layer_has_indexer(l) ? '1' : '0';
  return s;
}

TEST(Config, LayersThatShareAnIndexer) {
  auto with = [](int64_t layers, const std::string& more) {
    return parse_config(R"({"model_type":"glm_moe_dsa","hidden_size":48,"num_hidden_layers":)" +
                        std::to_string(layers) +
                        R"(,"num_attention_heads":3,"kv_lora_rank":40,"qk_nope_head_dim":24,"qk_rope_head_dim":8,)"
                        R"("v_head_dim":20,"q_lora_rank":20,"index_n_heads":4,"index_head_dim":16,"index_topk":64)" +
                        more + "}");
  };
  EXPECT_EQ(own_indexers(with(4, "")), "1111");
  EXPECT_TRUE(with(4, "").indexer->full.empty());
  EXPECT_EQ(own_indexers(with(4, R"(,"index_topk_freq":1,"index_topk_pattern":null)")), "1111");
  EXPECT_TRUE(with(3, R"(,"index_topk_pattern":"FFF")").indexer->full.empty());
  // GLM-5.2: 0, 1, 2, then each fourth from 6 on.
  EXPECT_EQ(own_indexers(with(12, R"(,"index_topk_freq":4,"index_skip_topk_offset":3)")), "111000100010");
  const ModelConfig glm = with(78, R"(,"index_topk_freq":4,"index_skip_topk_offset":3)");
  EXPECT_EQ(std::count(glm.indexer->full.begin(), glm.indexer->full.end(), 1), 21);
  EXPECT_EQ(own_indexers(with(8, R"(,"index_topk_freq":3)")), "11001001");  // the offset is 2 unless given
  EXPECT_EQ(own_indexers(with(4, R"(,"index_topk_pattern":"FSSF")")), "1001");
  EXPECT_EQ(own_indexers(with(4, R"(,"index_topk_pattern":["F","S","F","S"],"index_topk_freq":4)")), "1010");
  // The list of layers is the last word; it may go on past the model's layers.
  EXPECT_EQ(own_indexers(with(3, R"(,"indexer_types":["full","shared","shared","full"],"index_topk_pattern":"FFF")")),
            "100");
  const ModelConfig m = with(2, R"(,"indexer_rope_interleave":true)");
  EXPECT_TRUE(m.indexer->interleaved);
  EXPECT_FALSE(m.layer_has_indexer(-1));
  EXPECT_FALSE(m.layer_has_indexer(2));
  EXPECT_EQ(own_indexers(parse_config(config(""))), "00");
}

std::string message(const std::string& text) {
  try {
    parse_config(text, "c.json");
  } catch (const Error& e) {
    return e.what();
  }
  return "read";
}

TEST(Config, ErrorsNameKeyAndValue) {
  EXPECT_EQ(message("{"), "c.json: not valid JSON at byte 1: it ends there");
  EXPECT_EQ(message("[]"), "c.json: not a JSON object");
  EXPECT_EQ(message("{}"), "c.json: hidden_size is missing");
  EXPECT_EQ(message(R"({"hidden_size":1,"num_hidden_layers":1})"), "c.json: num_attention_heads is missing");
  EXPECT_EQ(message(config(R"(,"rope_theta":"x")")), "c.json: rope_theta is \"x\", a number is needed");
  EXPECT_EQ(message(config(R"(,"q_lora_rank":1.5)")), "c.json: q_lora_rank is 1.5, an integer is needed");
  EXPECT_EQ(message(config(R"(,"q_lora_rank":-3)")),
            "c.json: model deepseek_v3: query latent is -3, allowed 0 to 1048576");
  EXPECT_EQ(message(config(R"(,"rms_norm_eps":-1)")),
            "c.json: model deepseek_v3: rms_eps is -1.000000, must not be negative");
  EXPECT_EQ(message(config(R"(,"rope_scaling":{"type":"longrope"})")), "c.json: rope: short_factor is missing");
  EXPECT_EQ(message(config(R"(,"rope_scaling":{"type":"llama3","factor":8})")),
            "c.json: rope type 'llama3' is not supported (default, yarn and longrope are)");
  EXPECT_EQ(message(config(R"(,"qk_head_dim":100)")),
            "c.json: qk_head_dim is 100, qk_nope_head_dim and qk_rope_head_dim are 24 and 8: their sum is needed");
  EXPECT_EQ(message(config(R"(,"sliding_window":4096)")),
            "c.json: sliding_window is 4096: a sliding window is not supported");
  EXPECT_EQ(message(config(R"(,"use_sliding_window":false,"sliding_window":4096)")), "read");
  EXPECT_EQ(message(config(R"(,"attn_logit_softcapping":30.0)")),
            "c.json: attn_logit_softcapping is 30.0: a logit soft cap is not supported");
  EXPECT_EQ(message(config(R"(,"alibi":true)")), "c.json: alibi is true: ALiBi is not supported");
  EXPECT_EQ(message(config(R"(,"quantization_config":{"weight_block_size":[0,1]})")),
            "c.json: quantization_config: weight_block_size is [0,1], two positive integers are needed");
  EXPECT_EQ(message(config(R"(,"quantization_config":3)")), "c.json: quantization_config is 3, an object is needed");
  EXPECT_EQ(message(sparse_config(R"(,"index_n_heads":4,"index_head_dim":128,"index_topk":-5)")),
            "c.json: model deepseek_v32: indexer topk is -5, allowed 1 to 1048576");
  EXPECT_EQ(message(sparse_config(R"(,"index_n_heads":4,"index_head_dim":4,"index_topk":5)")),
            "c.json: model deepseek_v32: indexer dim is 4, allowed 8 to 1048576");
  const auto sparse = [](const std::string& more) {
    return message(sparse_config(R"(,"q_lora_rank":20,"index_n_heads":4,"index_head_dim":16,"index_topk":5)" + more));
  };
  EXPECT_EQ(sparse(""), "read");
  EXPECT_EQ(message(sparse_config(R"(,"q_lora_rank":null,"index_n_heads":4,"index_head_dim":16,"index_topk":5)")),
            "c.json: model deepseek_v32: query latent of a model with an indexer is 0, allowed 1 to 1048576");
  EXPECT_EQ(sparse(R"(,"indexer_types":["full"])"), "c.json: indexer_types has 1 entries, the model has 2 layers");
  EXPECT_EQ(sparse(R"(,"indexer_types":["full","half"])"),
            "c.json: indexer_types holds 'half', full or shared (F or S) are known");
  EXPECT_EQ(sparse(R"(,"indexer_types":["full",3])"),
            "c.json: indexer_types holds '3', full or shared (F or S) are known");
  EXPECT_EQ(sparse(R"(,"indexer_types":3)"), "c.json: indexer_types is 3, a list or a string is needed");
  EXPECT_EQ(sparse(R"(,"index_topk_pattern":"SF")"),
            "c.json: model deepseek_v32: indexer of layer 0 is shared, there is no layer before it");
  EXPECT_EQ(sparse(R"(,"index_topk_freq":0)"), "read");  // as 1
  EXPECT_EQ(sparse(R"(,"index_topk_freq":2,"index_skip_topk_offset":0)"),
            "c.json: model deepseek_v32: indexer of layer 0 is shared, there is no layer before it");
  std::string many = sparse_config(R"(,"q_lora_rank":20,"index_n_heads":4,"index_head_dim":16,"index_topk":5)");
  many.insert(many.find("layers\":2") + 9, "000000");
  EXPECT_EQ(message(many), "c.json: num_hidden_layers is 2000000, allowed 1 to 1048576 with an indexer");
  EXPECT_EQ(message(config(R"(,"rope_theta":0)")),
            "c.json: model deepseek_v3: rope theta is 0.000000, must be above 0");
  const auto yarn = [](const std::string& more) {
    return message(config(R"(,"rope_scaling":{"type":"yarn")" + more + "}"));
  };
  const std::string where = "c.json: model deepseek_v3: rope ";
  EXPECT_EQ(yarn(R"(,"rope_theta":1)"), where + "theta is 1.000000, must be above 1");
  EXPECT_EQ(yarn(R"(,"factor":0)"), where + "factor is 0.000000, must be above 0");
  EXPECT_EQ(yarn(R"(,"beta_fast":-1)"), where + "beta_fast is -1.000000, must be above 0");
  EXPECT_EQ(yarn(R"(,"beta_slow":-2)"), where + "beta_slow is -2.000000, must be above 0");
  EXPECT_EQ(yarn(R"(,"mscale":-1)"), where + "mscale is -1.000000, must not be negative");
  EXPECT_EQ(yarn(R"(,"mscale_all_dim":-1)"), where + "mscale_all_dim is -1.000000, must not be negative");
  EXPECT_EQ(yarn(R"(,"attn_factor":0)"), where + "attention factor is 0.000000, must be above 0");
  EXPECT_EQ(yarn(R"(,"original_max_position_embeddings":0)"), where + "original max position is 0, must be above 0");
  EXPECT_THROW(read_config("/nowhere/config.json"), CheckpointError);
}

// Constants that are finite, and numbers that would follow from them and are not.
TEST(Config, WhatFollowsIsFinite) {
  const std::string where = "c.json: model deepseek_v3: ";
  const auto yarn = [](const std::string& keys) {
    return message(config(R"(,"rope_scaling":{"type":"yarn",)" + keys + "}"));
  };
  EXPECT_EQ(yarn(R"("factor":1e300,"mscale_all_dim":1e300)"),
            where +
                "softmax scale is inf by rope factor 1e+300, mscale 1, mscale_all_dim 1e+300, must be within f32's "
                "range");
  EXPECT_NE(yarn(R"("factor":40,"mscale_all_dim":1e25)").find("softmax scale is"), std::string::npos);
  EXPECT_NE(yarn(R"("factor":40,"mscale":1e300,"mscale_all_dim":1)").find("magnitude of cos and sin is"),
            std::string::npos);
  EXPECT_NE(yarn(R"("factor":40,"attention_factor":1e300)").find("magnitude of cos and sin is"), std::string::npos);
  EXPECT_EQ(yarn(R"("factor":1e-310)"), "c.json: rope frequency of pair 2 is inf, its angles must be finite");
  EXPECT_NE(yarn(R"("factor":40,"beta_fast":1e-320,"beta_slow":1e-320)").find("its angles must be finite"),
            std::string::npos);
  std::string wide = config(R"(,"rope_theta":5e-324)");
  wide.replace(wide.find("rope_head_dim\":8") + 15, 1, "64");
  EXPECT_EQ(message(wide), "c.json: rope frequency of pair 30 is 1.2577e+303, its angles must be finite");
  EXPECT_NE(
      message(config(R"(,"rope_scaling":{"type":"longrope","short_factor":[1,1e-315,1,1],"long_factor":[1,1,1,1]})"))
          .find("c.json: rope frequency of pair 1 is inf"),
      std::string::npos);
  EXPECT_EQ(message(config(R"(,"rms_norm_eps":2)")), where + "rms_eps is 2.000000, must be at most 1");
  EXPECT_NE(
      message(config(R"(,"q_lora_rank":20,"llama_4_scaling":{"beta":1e300,"original_max_position_embeddings":32})"))
          .find("query growth at the last position is"),
      std::string::npos);
}

TEST(Config, MessagesStayOnOneReadableLine) {
  EXPECT_EQ(message(config(R"(,"rope_scaling":{"type":"a\nb"})")),
            "c.json: rope type 'a\\x0ab' is not supported (default, yarn and longrope are)");
  const std::string deep = std::string(1 << 20, '[') + std::string(1 << 20, ']');
  EXPECT_EQ(message(config(R"(,"rope_theta":)" + deep)), "c.json: nested deeper than 64");
  const std::string wide = message(config(R"(,"rope_theta":")" + std::string(1 << 20, 'x') + "\""));
  EXPECT_LT(wide.size(), 1100u);
  EXPECT_TRUE(wide.ends_with("a number is needed")) << wide;
}

// The magnitude and the score factor of YaRN by the keys that are there: transformers' reading, by its own formulas.
TEST(Config, YarnWithOneOfItsMscales) {
  const double s = 40;
  const auto m = [&](double k) { return 0.1 * k * std::log(s) + 1; };
  struct Row {
    const char* keys;
    double magnitude, score;
    bool noted;
  };
  for (const Row& r :
       {Row{R"("mscale":0.707,"mscale_all_dim":0.5)", m(0.707) / m(0.5), m(0.5) * m(0.5), false},
        Row{R"("mscale":1,"mscale_all_dim":1)", 1, m(1) * m(1), false}, Row{R"("beta_fast":null)", m(1), 1, false},
        Row{R"("mscale":1)", m(1), 1, false}, Row{R"("mscale":0.707)", m(1), 1, true},
        Row{R"("mscale":0.707,"mscale_all_dim":0)", m(1), 1, true},
        Row{R"("mscale_all_dim":0.5)", m(1), m(0.5) * m(0.5), true},
        Row{R"("mscale":0,"mscale_all_dim":1)", m(1), m(1) * m(1), true},
        Row{R"("mscale":1,"mscale_all_dim":1,"attention_factor":1.2)", 1.2, m(1) * m(1), true},
        Row{R"("attention_factor":1.2)", 1.2, 1, true}, Row{R"("apply_yarn_scaling":false)", m(1), 1, false},
        Row{R"("mscale":1,"mscale_all_dim":1,"apply_yarn_scaling":false)", 1, m(1) * m(1), true},
        Row{R"("mscale":1,"mscale_all_dim":1,"truncate":false)", 1, m(1) * m(1), true}}) {
    const ModelConfig c =
        parse_config(config(std::string(R"(,"rope_scaling":{"type":"yarn","factor":40,)") + r.keys + "}"));
    EXPECT_NEAR(rotary_magnitude(c.rotary), r.magnitude, 1e-12) << r.keys;
    EXPECT_NEAR(c.softmax_scale(), r.score / std::sqrt(32.0), 1e-12) << r.keys;
    EXPECT_EQ(!c.notes.empty(), r.noted) << r.keys;
  }
}

// Frequencies against the definition, written out again.
TEST(Config, YarnFrequencies) {
  for (const char* truncate : {"true", "false"})
    for (const char* betas : {R"("beta_fast":4,"beta_slow":1)", R"("beta_fast":0,"beta_slow":null)"}) {
      const ModelConfig c = parse_config(
          R"({"model_type":"deepseek_v3","qk_rope_head_dim":32,"max_position_embeddings":2560,"rope_parameters":{"rope_type":"yarn","rope_theta":5000,"factor":16,)"
          R"("original_max_position_embeddings":96,"truncate":)" +
          std::string(truncate) + "," + betas + "}}");
      const double theta = 5000, s = 16, length = 96, dims = 32;
      const double fast = betas[12] == '4' ? 4 : 32;
      const auto turns = [&](double r) {
        return dims * std::log(length / (2 * 3.141592653589793 * r)) / (2 * std::log(theta));
      };
      double low = turns(fast), high = turns(1);
      if (std::string_view(truncate) == "true") {
        low = std::floor(low);
        high = std::ceil(high);
      }
      low = std::max(low, 0.0);
      high = std::min(high, dims - 1);
      const std::vector<double> found = inverse_frequencies(c.rotary, 32);
      for (int i = 0; i < 16; ++i) {
        const double f = 1 / std::pow(theta, 2 * i / dims),
                     ramp = std::min(std::max((i - low) / (high - low), 0.0), 1.0);
        EXPECT_NEAR(found[i], f * (1 - ramp) + f / s * ramp, 1e-15) << truncate << betas << i;
      }
    }
}

TEST(Config, WhichRopeKeysWin) {
  // The old object over the new one, a theta within over one beside it, an original length beside over one within.
  EXPECT_EQ(
      parse_config(config(R"(,"rope_theta":1,"rope_scaling":{"rope_theta":2},"rope_parameters":{"rope_theta":3})"))
          .rotary.theta,
      2);
  const auto yarn = [](const std::string& inside, const std::string& beside) {
    return parse_config(
               config(R"(,"rope_scaling":{"rope_type":"yarn","type":"default","factor":2)" + inside + "}" + beside))
        .rotary;
  };
  EXPECT_EQ(yarn("", "").scaling, RopeConfig::Scaling::yarn);
  EXPECT_EQ(yarn("", "").original_max_position, 4096);  // the class's max_position_embeddings
  EXPECT_EQ(yarn("", R"(,"max_position_embeddings":512)").original_max_position, 512);
  EXPECT_EQ(yarn(R"(,"original_max_position_embeddings":64)", "").original_max_position, 64);
  EXPECT_EQ(yarn(R"(,"original_max_position_embeddings":64)", R"(,"original_max_position_embeddings":32)")
                .original_max_position,
            32);
}

TEST(Config, RopeObjectsOfLayerTypes) {
  const std::string object = R"({"rope_type":"yarn","factor":40,"mscale":1,"mscale_all_dim":1})";
  const double flat = parse_config(config(R"(,"rope_parameters":)" + object)).softmax_scale();
  EXPECT_EQ(parse_config(config(R"(,"rope_parameters":{"full_attention":)" + object + "}")).softmax_scale(), flat);
  EXPECT_EQ(parse_config(
                config(R"(,"rope_parameters":{"full_attention":)" + object + R"(,"other_attention":)" + object + "}"))
                .softmax_scale(),
            flat);
  EXPECT_EQ(
      message(config(R"(,"rope_parameters":{"full_attention":{"rope_theta":1},"sliding_attention":{"rope_theta":2}})")),
      "c.json: rope_parameters is {\"full_attention\":{\"rope_theta\":1},\"sliding_attention\":{\"rope_theta\":2}}: "
      "layers that rotate differently are not supported");
  EXPECT_EQ(message(config(R"(,"rope_parameters":{"sliding_attention":{"rope_theta":2}})")),
            "c.json: rope_parameters is for sliding_attention: such layers are not supported");
}

TEST(Config, Longrope) {
  const auto read = [](const std::string& more) {
    return parse_config(config(
        R"(,"max_position_embeddings":1024,"rope_scaling":{"type":"longrope","short_factor":[1,2,3,4],"long_factor":[5,6,7,8],)"
        R"("original_max_position_embeddings":64)" +
        more + "}"));
  };
  ModelConfig m = read("");
  EXPECT_NEAR(rotary_magnitude(m.rotary), std::sqrt(1 + std::log(16.0) / std::log(64.0)), 1e-12);
  EXPECT_NEAR(rotary_magnitude(read(R"(,"factor":4)").rotary), std::sqrt(1 + std::log(4.0) / std::log(64.0)), 1e-12);
  EXPECT_EQ(rotary_magnitude(read(R"(,"factor":0.5)").rotary), 1);
  // The magnitude divides by the logarithm of the original length.
  const auto original = [](int length) {
    return config(R"(,"max_position_embeddings":8,"rope_scaling":{"type":"longrope","short_factor":[1,1,1,1],)"
                  R"("long_factor":[1,1,1,1],"original_max_position_embeddings":)" +
                  std::to_string(length) + "}");
  };
  EXPECT_EQ(parse_config(original(1)).rotary.factor, 8);
  EXPECT_EQ(rotary_magnitude(parse_config(original(1)).rotary), 1);
  EXPECT_EQ(message(original(0)), "c.json: model deepseek_v3: rope original max position is 0, must be above 0");
  EXPECT_EQ(rotary_magnitude(read(R"(,"attention_factor":1.5)").rotary), 1.5);
  EXPECT_NEAR(m.softmax_scale(), 1 / std::sqrt(32.0), 1e-15);
  ASSERT_EQ(m.notes.size(), 1u);  // which factors hold
  for (int i = 0; i < 4; ++i)
    EXPECT_NEAR(inverse_frequencies(m.rotary, 8)[i], 1 / ((5 + i) * std::pow(1e4, i / 4.0)), 1e-15);
  m.rotary.max_position = 64;  // nothing longer is to be served
  for (int i = 0; i < 4; ++i)
    EXPECT_NEAR(inverse_frequencies(m.rotary, 8)[i], 1 / ((1 + i) * std::pow(1e4, i / 4.0)), 1e-15);
  EXPECT_THROW(inverse_frequencies(m.rotary, 16), ShapeError);
  EXPECT_EQ(message(config(R"(,"rope_scaling":{"type":"longrope","short_factor":[1,2,3],"long_factor":[5,6,7,8]})")),
            "c.json: model deepseek_v3: rope short factors are 3, rope 8 needs 4");
  EXPECT_EQ(message(config(R"(,"rope_scaling":{"type":"longrope","short_factor":[1,2,3,0],"long_factor":[5,6,7,8]})")),
            "c.json: model deepseek_v3: rope factor of a pair is 0.000000, must be above 0");
}

// What each class takes for keys that are not there.
TEST(Config, DefaultsOfFamilies) {
  struct Row {
    const char* type;
    int64_t hidden, layers, heads, query_latent, latent, nope, rope, value;
    double eps, theta;
    int64_t index_heads;
  };
  for (const Row& r : {Row{"deepseek_v2", 4096, 32, 32, 1536, 512, 128, 64, 128, 1e-6, 1e4, 0},
                       Row{"deepseek_v3", 7168, 61, 128, 1536, 512, 128, 64, 128, 1e-6, 1e4, 0},
                       Row{"deepseek_v32", 7168, 61, 128, 1536, 512, 128, 64, 128, 1e-6, 1e4, 64},
                       Row{"glm_moe_dsa", 6144, 78, 64, 2048, 512, 192, 64, 256, 1e-5, 1e4, 32},
                       Row{"glm4_moe_lite", 2048, 47, 20, 768, 512, 192, 64, 256, 1e-5, 1e4, 0},
                       Row{"longcat_flash", 6144, 56, 64, 1536, 512, 128, 64, 128, 1e-5, 1e7, 0},
                       Row{"mistral4", 4096, 36, 32, 1024, 256, 64, 64, 128, 1e-6, 1e4, 0},
                       Row{"kimi_linear", 2304, 6, 32, 0, 512, 128, 64, 128, 1e-5, 1e4, 0},
                       Row{"minicpm3", 2560, 62, 40, 768, 256, 64, 32, 64, 1e-5, 1e4, 0},
                       Row{"youtu", 2048, 32, 16, 1536, 512, 128, 64, 128, 1e-6, 1e4, 0},
                       Row{"axk1", 7168, 61, 64, 1536, 512, 128, 64, 128, 1e-6, 1e4, 0}}) {
    const ModelConfig m = parse_config(R"({"model_type":")" + std::string(r.type) + "\"}");
    EXPECT_EQ(m.hidden, r.hidden) << r.type;
    EXPECT_EQ(m.layers, r.layers) << r.type;
    EXPECT_EQ(m.heads, r.heads) << r.type;
    EXPECT_EQ(m.query_latent, r.query_latent) << r.type;
    EXPECT_EQ(m.latent, r.latent) << r.type;
    EXPECT_EQ(m.nope, r.nope) << r.type;
    EXPECT_EQ(m.rope, r.rope) << r.type;
    EXPECT_EQ(m.value, r.value) << r.type;
    EXPECT_EQ(m.rms_eps, r.eps) << r.type;
    EXPECT_EQ(m.rotary.theta, r.theta) << r.type;
    EXPECT_EQ(m.rotary.rotate, std::string_view(r.type) != "kimi_linear") << r.type;
    EXPECT_EQ(m.rotary.interleaved, std::string_view(r.type) != "minicpm3") << r.type;
    ASSERT_EQ(m.indexer.has_value(), r.index_heads > 0) << r.type;
    if (!m.indexer) continue;
    EXPECT_EQ(m.indexer->heads, r.index_heads);
    EXPECT_EQ(m.indexer->interleaved, std::string_view(r.type) == "glm_moe_dsa");
  }
  // Keys that a class does not read do not matter.
  EXPECT_TRUE(parse_config(R"({"model_type":"longcat_flash","rope_interleave":false})").rotary.interleaved);
  EXPECT_FALSE(parse_config(R"({"model_type":"minicpm3","rope_interleave":true})").rotary.interleaved);
  EXPECT_FALSE(parse_config(R"({"model_type":"glm_moe_dsa","indexer_rope_interleave":false})").indexer->interleaved);
  EXPECT_EQ(parse_config(R"({"architectures":["LongcatFlashForCausalLM"]})").attentions_per_layer, 2);
}

TEST(Config, Mistral) {
  const ModelConfig none = parse_config(R"({"model_type":"mistral4"})");
  const double m = 0.1 * std::log(128.0) + 1;
  EXPECT_NEAR(none.softmax_scale(), m * m / std::sqrt(128.0), 1e-12);
  EXPECT_EQ(none.rotary.original_max_position, 8192);
  EXPECT_EQ(none.query_growth(8191), 1);
  EXPECT_NEAR(none.query_growth(8192), 1 + 0.1 * std::log(2.0), 1e-12);
  EXPECT_NEAR(none.query_growth(5 * 8192 - 1), 1 + 0.1 * std::log(5.0), 1e-12);
  // In transformers' object and in the servers' own.
  const std::string yarn = R"({"rope_type":"yarn","factor":8,"original_max_position_embeddings":32)";
  for (const std::string& text : {config(R"(,"rope_parameters":)" + yarn + R"(,"llama_4_scaling_beta":0.2})"),
                                  config(R"(,"rope_parameters":)" + yarn +
                                         R"(},"llama_4_scaling":{"beta":0.2,"original_max_position_embeddings":32})")})
    EXPECT_NEAR(parse_config(text).query_growth(64), 1 + 0.2 * std::log(3.0), 1e-12);
  EXPECT_EQ(
      parse_config(R"({"model_type":"mistral4","rope_parameters":{"rope_type":"default"}})").query_growth(1 << 20), 1);
  EXPECT_EQ(
      message(config(R"(,"q_lora_rank":null,"llama_4_scaling":{"beta":0.2,"original_max_position_embeddings":32})")),
      "c.json: model deepseek_v3: queries that are scaled need a query latent, its q_lora_rank is 0");
  for (const char* length : {"0", "2147483648"})
    EXPECT_EQ(message(config(R"(,"llama_4_scaling":{"beta":0.2,"original_max_position_embeddings":)" +
                             std::string(length) + "}")),
              "c.json: model deepseek_v3: query growth length is " + std::string(length) + ", allowed 1 to 2147483647");
}

TEST(Config, LongcatHasTwoAttentionsALayer) {
  const auto read = [](const std::string& more) {
    return parse_config(R"({"model_type":"longcat_flash","hidden_size":96,"q_lora_rank":24,"kv_lora_rank":6)" + more +
                        "}");
  };
  const ModelConfig m = read(R"(,"num_layers":3)");
  EXPECT_EQ(m.layers, 6);
  EXPECT_EQ(m.query_scale, 2);
  EXPECT_EQ(m.latent_scale, 4);
  EXPECT_NEAR(m.softmax_scale(), 1 / std::sqrt(192.0), 1e-15);
  EXPECT_EQ(m.attention_name(0), "layers.0.self_attn.0.");
  EXPECT_EQ(m.attention_name(5), "layers.2.self_attn.1.");
  EXPECT_THROW(m.attention_name(6), InputError);
  EXPECT_EQ(read(R"(,"num_layers":3,"num_hidden_layers":6)").layers, 6);
  EXPECT_EQ(read(R"(,"num_layers":3,"num_hidden_layers":3)").layers, 6);
  EXPECT_EQ(read(R"(,"num_hidden_layers":6)").layers, 6);
  EXPECT_THROW(read(R"(,"num_layers":3,"num_hidden_layers":4)"), CheckpointError);
  const ModelConfig plain = read(R"(,"mla_scale_q_lora":false,"mla_scale_kv_lora":true)");
  EXPECT_EQ(plain.query_scale, 1);
  EXPECT_EQ(plain.latent_scale, 4);
  EXPECT_EQ(read(R"(,"head_dim":64)").rope, 64);
  EXPECT_THROW(read(R"(,"head_dim":32)"), UnsupportedError);
}

TEST(Config, LayerMapsCountLayersWithMla) {
  const auto read = [](const std::string& more) {
    return parse_config(R"({"model_type":"kimi_linear","num_hidden_layers":9)" + more + "}", "c.json");
  };
  const auto refused = [&](const std::string& more) {
    try {
      read(more);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string("read");
  };
  using Layers = std::vector<int64_t>;
  EXPECT_EQ(read("").model_layers, (Layers{4, 8}));  // each fourth after the first
  const ModelConfig listed = read(R"(,"linear_attn_config":{"full_attn_layers":[4,8,9],"kda_layers":[1,2,3,5,6,7]})");
  EXPECT_EQ(listed.model_layers, (Layers{3, 7, 8}));
  EXPECT_EQ(listed.layers, 3);
  EXPECT_EQ(listed.attention_name(1), "layers.7.self_attn.");
  EXPECT_FALSE(listed.rotary.rotate);
  EXPECT_NEAR(listed.softmax_scale(), 1 / std::sqrt(192.0), 1e-15);
  // YaRN would not count either: there is nothing to rotate.
  EXPECT_EQ(read(R"(,"rope_scaling":{"type":"yarn","factor":4,"mscale":1,"mscale_all_dim":1})").softmax_scale(),
            listed.softmax_scale());
  const std::string types =
      R"(,"layer_types":["full_attention","linear_attention","linear_attention","linear_attention",)"
      R"("linear_attention","linear_attention","full_attention","linear_attention","linear_attention"])";
  EXPECT_EQ(read(types + R"(,"linear_attn_config":{"full_attn_layers":[4],"kda_layers":[1,2]})").model_layers,
            (Layers{0, 6}));
  EXPECT_EQ(refused(R"(,"linear_attn_config":{"full_attn_layers":[4],"kda_layers":[1,2]})"),
            "c.json: linear_attn_config: full_attn_layers and kda_layers name no layer 3 of 9");
  EXPECT_EQ(refused(R"(,"linear_attn_config":{"full_attn_layers":[0],"kda_layers":[1]})"),
            "c.json: linear_attn_config: full_attn_layers holds 0, layers are 1 to 9");
  EXPECT_EQ(refused(R"(,"linear_attn_config":{"full_attn_layers":[1],"kda_layers":[1]})"),
            "c.json: linear_attn_config: kda_layers holds 1, which is named already");
  EXPECT_EQ(refused(R"(,"linear_attn_config":{"full_attn_layers":[1]})"),
            "c.json: linear_attn_config: full_attn_layers is there alone, full_attn_layers and kda_layers are needed");
  EXPECT_EQ(refused(R"(,"layer_types":["full_attention"])"),
            "c.json: layer_types has 1 entries, the model has 9 layers");
}

TEST(Config, NamesOfModelsOwnParameterFiles) {
  // DeepSeek's inference code.
  const ModelConfig demo = parse_config(
      R"({"vocab_size":129280,"dim":7168,"inter_dim":18432,"moe_inter_dim":2048,"n_layers":61,"n_dense_layers":3,"n_heads":128,)"
      R"("n_routed_experts":256,"n_shared_experts":1,"n_activated_experts":8,"n_expert_groups":8,"n_limited_groups":4,)"
      R"("route_scale":2.5,"score_func":"sigmoid","q_lora_rank":1536,"kv_lora_rank":512,"qk_nope_head_dim":128,)"
      R"("qk_rope_head_dim":64,"v_head_dim":128,"dtype":"fp8","scale_fmt":"ue8m0","index_n_heads":64,"index_head_dim":128,)"
      R"("index_topk":2048})");
  EXPECT_EQ(demo.hidden, 7168);
  EXPECT_EQ(demo.layers, 61);
  EXPECT_EQ(demo.heads, 128);
  EXPECT_EQ(demo.softmax_scale(), preset("deepseek-v3").softmax_scale());
  EXPECT_EQ(rotary_magnitude(demo.rotary), 1);
  EXPECT_EQ(inverse_frequencies(demo.rotary, 64), inverse_frequencies(preset("deepseek-v3").rotary, 64));
  EXPECT_EQ(demo.indexer->topk, 2048);
  EXPECT_FALSE(demo.indexer->interleaved);
  // Mistral's params.json.
  const auto mistral_with = [](const std::string& yarn, const ReadOptions& options) {
    return parse_config(
        R"({"dim":7168,"n_layers":61,"head_dim":128,"hidden_dim":16384,"n_heads":128,"n_kv_heads":128,"rope_theta":10000.0,)"
        R"("norm_eps":1e-06,"vocab_size":131072,"tied_embeddings":false,"max_position_embeddings":294912,)"
        R"("q_lora_rank":1536,"qk_rope_head_dim":64,"qk_nope_head_dim":128,"kv_lora_rank":512,"v_head_dim":128,)"
        R"("llama_4_scaling":{"original_max_position_embeddings":8192,"beta":0.1},)"
        R"("yarn":{"original_max_position_embeddings":8192,"factor":36,)" +
            yarn + R"("beta":32,"alpha":1},"moe":{"expert_parallel":1,"num_experts":128,"num_experts_per_tok":4}})",
        "c.json", options);
  };
  const auto mistral = [&](const std::string& apply) { return mistral_with("\"apply_scale\":" + apply + ",", {}); };
  EXPECT_EQ(mistral("false").layers, 61);
  EXPECT_EQ(mistral("false").rms_eps, 1e-6);
  EXPECT_NEAR(mistral("false").query_growth(8192), 1 + 0.1 * std::log(2.0), 1e-12);
  const double m = 0.1 * std::log(36.0) + 1;
  EXPECT_NEAR(mistral("false").softmax_scale(), 1 / std::sqrt(192.0), 1e-12);
  EXPECT_NEAR(mistral("true").softmax_scale(), m * m / std::sqrt(192.0), 1e-12);
  for (const char* apply : {"true", "false"}) {
    EXPECT_NEAR(rotary_magnitude(mistral(apply).rotary), 1, 1e-12);
    EXPECT_TRUE(mistral(apply).notes.empty());
    EXPECT_EQ(mistral(apply).rotary.factor, 36);
  }
  try {
    mistral_with(R"("gamma":2,)", {});
    ADD_FAILURE() << "a key of yarn that is not known was taken";
  } catch (const UnsupportedError& e) {
    EXPECT_STREQ(e.what(), "c.json: yarn: gamma is 2, a key that is not known (allow_unknown goes on past it)");
  }
  EXPECT_EQ(mistral_with(R"("gamma":2,)", {.allow_unknown = true}).rotary.factor, 36);
  // openPangu.
  const ModelConfig pangu = parse_config(
      R"({"architectures":["PanguUltraMoEForCausalLM"],"attention_kv_lora_dim":512,"attention_q_lora_dim":1536,)"
      R"("attention_qk_dim":128,"attention_qk_rope_dim":64,"attention_v_dim":128,"attention_dropout":0.0,"hidden_act":"silu",)"
      R"("hidden_size":7680,"num_hidden_layers":61,"num_attention_heads":128,"num_key_value_heads":128,"num_dense_layers":3,)"
      R"("num_routed_experts":256,"num_shared_experts":1,"num_mtp_layers":1,"rms_norm_eps":1e-05,"rope_theta":25600000,)"
      R"("sandwich_norm":true,"routed_scaling_factor":2.5,"model_type":"pangu_ultra_moe","max_position_embeddings":131072})");
  EXPECT_EQ(pangu.latent, 512);
  EXPECT_EQ(pangu.query_latent, 1536);
  EXPECT_EQ(pangu.nope, 128);
  EXPECT_EQ(pangu.value, 128);
  EXPECT_EQ(pangu.rotary.theta, 25600000);
  EXPECT_TRUE(pangu.rotary.interleaved);
  EXPECT_EQ(message(R"({"attention_kv_lora_dim":512,"kv_lora_rank":256})"),
            "c.json: attention_kv_lora_dim is 512, kv_lora_rank is 256");
}

TEST(Config, WhatIsNotDoneIsRefusedByName) {
  for (const auto& [more, why] : std::vector<std::pair<std::string, std::string>>{
           {R"(,"sliding_window":4096)", "sliding_window is 4096"},
           {R"(,"attention_bias":true)", "attention_bias is true"},
           {R"(,"use_qk_norm":true)", "use_qk_norm is true"},
           {R"(,"use_qknorm":true)", "use_qknorm is true"},
           {R"(,"qknorm":true)", "qknorm is true"},
           {R"(,"useQkNorm":true)", "useQkNorm is true"},
           {R"(,"zero_centered_norm":true)", "zero_centered_norm is true"},
           {R"(,"use_zero_centered_gamma":true)", "use_zero_centered_gamma is true"},
           {R"(,"norm_zero_centered":true)", "norm_zero_centered is true"},
           {R"(,"use_cla":true)", "use_cla is true"},
           {R"(,"use_mla":false)", "use_mla is false"},
           {R"(,"use_mla":0)", "use_mla is 0"},
           {R"(,"use_mla":"yes")", "use_mla is \"yes\""},
           {R"(,"pruned_heads":{"0":[1]})", "pruned_heads is {\"0\":[1]}"},
           {R"(,"cross_attention_hidden_size":64)", "cross_attention_hidden_size is 64"},
           {R"(,"use_bias":true)", "use_bias is true"},
           {R"(,"use_qkv_bias":true)", "use_qkv_bias is true"},
           {R"(,"mla_use_output_gate":true)", "mla_use_output_gate is true"},
           {R"(,"index_kpool":4)", "index_kpool is 4"},
           {R"(,"qk_latent_layernorm":false)", "qk_latent_layernorm is false"},
           {R"(,"learnable_sink_init":0.5)", "learnable_sink_init is 0.5"},
           {R"(,"param_sink_number":128)", "param_sink_number is 128"},
           {R"(,"layer_group_size":6)", "layer_group_size is 6"},
           {R"(,"compress_ratios":[4,128])", "compress_ratios is [4,128]"},
           {R"(,"o_lora_rank":1024)", "o_lora_rank is 1024"},
           {R"(,"window_size":128)", "window_size is 128"},
           {R"(,"use_mla_scaling_factor":true)", "use_mla_scaling_factor is true"},
           {R"(,"full_attention_layers":[3])", "full_attention_layers is [3]"},
           {R"(,"attention_method":"MHA")", "attention_method is \"MHA\""},
           {R"(,"layer_types":["full_attention","linear_attention"])", "layer_types holds \"linear_attention\""},
           {R"(,"layer_types":["full_attention","sliding_attention"])", "layer_types holds \"sliding_attention\""},
           {R"(,"partial_rotary_factor":0.5)", "partial_rotary_factor is 0.5"},
           {R"(,"rope_scaling":{"type":"yarn","factor":4,"finetuned":true})", "rope: finetuned is true"},
           {R"(,"index_topk":64)", "index_topk is 64"},
           {R"(,"index_n_heads":64)", "index_n_heads is 64"},
           {R"(,"quantization_config":{"quant_method":"bitsandbytes"})", "quant_method is 'bitsandbytes'"},
           {R"(,"quantization_config":{"quant_method":"modelopt","quant_algo":"W4A8_AWQ"})",
            "quant_algo is 'W4A8_AWQ'"},
           {R"(,"quantization":{"qformat_weight":"nvfp4"})", "qformat_weight is 'nvfp4'"}}) {
    EXPECT_NE(message(config(more)).find(why), std::string::npos) << more << ": " << message(config(more));
    EXPECT_THROW(parse_config(config(more)), UnsupportedError) << more;
  }
  for (const char* type : {"deepseek_v4", "hy_v4", "kimi_k3", "glm5_next", "glm5_next_text", "bailing_hybrid",
                           "bailing_moe_v2_5", "axk2", "dots3_note_text", "mistral_large4", "llama"}) {
    const std::string text = R"({"model_type":")" + std::string(type) + R"(","hidden_size":48})";
    EXPECT_NE(message(text).find("model_type is '" + std::string(type) + "'"), std::string::npos) << message(text);
    EXPECT_THROW(parse_config(text), UnsupportedError) << type;
  }
  // Experts alone are quantised here.
  EXPECT_EQ(
      message(config(
          R"(,"quantization_config":{"quant_method":"compressed-tensors","ignore":["lm_head","re:.*self_attn.*"]})")),
      "read");
}

TEST(Config, UnknownKeysThatLookLikeAttentions) {
  for (const char* key : {"attention_twist", "attn_twist",
                          "rope_twist",      "rotary_dim",
                          "num_twist_heads", "q_twist",
                          "twist_q",         "kv_twist",
                          "qk_twist",        "twist_lora_rank",
                          "index_twist",     "local_window",
                          "use_sink",        "logit_softcap",
                          "output_gate",     "key_norm",
                          "score_scale",     "latent_twist",
                          "position_twist",  "linear_twist",
                          "conv_size",       "moe_attention_twist",
                          "kvTwist",         "attention-twist",
                          "is_neox_style",   "interleave",
                          "rotate_half",     "zero_centered_twist",
                          "twist_gamma",     "unit_offset",
                          "rms_twist",       "norm2",
                          "ropetheta",       "useropestyle",
                          "kvnormsize",      "cla_share_factor",
                          "window_tokens",   "index_init_tokens",
                          "rotate_tokens",   "key_centred"}) {
    const std::string text = config(",\"" + std::string(key) + "\":7");
    EXPECT_EQ(message(text), "c.json: " + std::string(key) +
                                 " is 7: a key that looks as if it concerned attention and is not known (allow_unknown "
                                 "goes on past it)");
    EXPECT_EQ(parse_config(text, "c.json", {.allow_unknown = true}).latent, 40);
    EXPECT_EQ(message(config(",\"" + std::string(key) + "\":null")), "read");
  }
  for (const char* key :
       {"moe_gate_bias", "router_scaling", "expert_norm", "mtp_attention_twist", "tokenizer_index", "hc_mult",
        "swiglu_limit", "twist", "mlp_layer_types", "image_scale", "zero_expert_num", "image_token_index",
        "mask_token_id", "num_query_tokens", "ignore_index", "properties", "keynote", "ropes1ze"}) {
    EXPECT_EQ(message(config(",\"" + std::string(key) + "\":7")), "read") << key;
  }
  // Past what is missing or impossible it does not go.
  EXPECT_THROW(parse_config(config(R"(,"rope_theta":0)"), "c.json", {.allow_unknown = true}), CheckpointError);
  EXPECT_EQ(parse_config(R"({"model_type":"llama","hidden_size":48,"num_hidden_layers":2,"num_attention_heads":3,)"
                         R"("kv_lora_rank":40,"qk_nope_head_dim":24,"qk_rope_head_dim":8,"v_head_dim":20})",
                         "c.json", {.allow_unknown = true})
                .latent,
            40);
}

// Configs as they are published or as transformers saves them, whole but for long lists.
TEST(Config, WholeConfigsAreRead) {
  const std::string base =
      R"("architectures":["XForCausalLM"],"attention_dropout":0.0,"auto_map":{"AutoConfig":"c"},"bos_token_id":0,"eos_token_id":1,)"
      R"("pad_token_id":null,"hidden_act":"silu","initializer_range":0.02,"intermediate_size":18432,"tie_word_embeddings":false,)"
      R"("torch_dtype":"bfloat16","transformers_version":"4.33.1","use_cache":true,"vocab_size":129280,"pretraining_tp":1,)"
      R"("output_hidden_states":false,"return_dict":true,"dtype":null,"chunk_size_feed_forward":0,"is_encoder_decoder":false,)"
      R"("id2label":{"0":"LABEL_0"},"label2id":{"LABEL_0":0},"problem_type":null,"output_attentions":false,"_name_or_path":"",)"
      R"("pruned_heads":{},"top_k":50,"cross_attention_hidden_size":null,"add_cross_attention":false,"attention_bias":false,)";
  const std::string moe =
      R"("ep_size":1,"first_k_dense_replace":3,"moe_intermediate_size":2048,"moe_layer_freq":1,"n_group":8,"n_routed_experts":256,)"
      R"("n_shared_experts":1,"norm_topk_prob":true,"num_experts_per_tok":8,"routed_scaling_factor":2.5,"scoring_func":"sigmoid",)"
      R"("topk_group":4,"topk_method":"noaux_tc","aux_loss_alpha":0.001,"seq_aux":true,"num_nextn_predict_layers":1,)"
      R"("output_router_logits":false,"mlp_layer_types":["dense","sparse"],"mlp_bias":false,)";
  const std::string sizes =
      R"("hidden_size":7168,"kv_lora_rank":512,"num_attention_heads":128,"num_hidden_layers":61,"num_key_value_heads":128,)"
      R"("q_lora_rank":1536,"qk_nope_head_dim":128,"qk_rope_head_dim":64,"v_head_dim":128,"rms_norm_eps":1e-06,"qk_head_dim":192,)"
      R"("head_dim":64,"max_position_embeddings":163840,)";
  const std::string yarn =
      R"("rope_scaling":{"beta_fast":32,"beta_slow":1,"factor":40,"mscale":1.0,"mscale_all_dim":1.0,)"
      R"("original_max_position_embeddings":4096,"type":"yarn"},"rope_theta":10000,)";
  const std::string fp8 =
      R"("quantization_config":{"activation_scheme":"dynamic","fmt":"e4m3","quant_method":"fp8","scale_fmt":"ue8m0",)"
      R"("weight_block_size":[128,128]},)";
  const std::string all = base + moe + sizes;
  struct Row {
    std::string text;
    int64_t layers;
  };
  const std::vector<Row> rows{
      {"{" + all + yarn + fp8 + R"("model_type":"deepseek_v3"})", 61},
      {"{" + all + yarn + R"("model_type":"deepseek_v2"})", 61},
      {"{" + all + yarn + fp8 + R"("model_type":"kimi_k2"})", 61},
      {"{" + all + yarn + fp8 +
           R"("index_head_dim":128,"index_n_heads":64,"index_topk":2048,"layer_types":["indexed_attention"],"model_type":"deepseek_v32"})",
       61},
      {R"({"model_type":"kimi_k25","vision_config":{"num_attention_heads":16,"attn_sink":3},"image_token_index":5,"text_config":{)" +
           all + yarn + R"("model_type":"kimi_k2"}})",
       61},
      {"{" + all +
           R"("rope_parameters":{"rope_theta":1000000,"rope_type":"default"},"index_head_dim":128,"index_n_heads":32,"index_topk":2048,)"
           R"("indexer_rope_interleave":true,"index_topk_freq":4,"index_skip_topk_offset":3,"index_share_for_mtp_iteration":true,)"
           R"("indexer_types":null,"index_topk_pattern":null,"model_type":"glm_moe_dsa"})",
       61},
      {"{" + all +
           R"("partial_rotary_factor":1.0,"rope_scaling":null,"rope_theta":1000000,"model_type":"glm4_moe_lite"})",
       61},
      {"{" + base +
           R"("hidden_size":6144,"num_layers":28,"num_attention_heads":64,"ffn_hidden_size":12288,"expert_ffn_hidden_size":2048,)"
           R"("q_lora_rank":1536,"kv_lora_rank":512,"qk_nope_head_dim":128,"qk_rope_head_dim":64,"v_head_dim":128,"n_routed_experts":512,)"
           R"("moe_topk":12,"max_position_embeddings":131072,"rms_norm_eps":1e-05,"rope_theta":10000000.0,"attention_method":"MLA",)"
           R"("zero_expert_num":256,"zero_expert_type":"identity","routed_scaling_factor":6.0,"mla_scale_q_lora":true,)"
           R"("mla_scale_kv_lora":true,"router_bias":false,"norm_topk_prob":false,"nextn_use_scmoe":false,"head_dim":64,)"
           R"("model_type":"longcat_flash"})",
       56},
      {"{" + base + moe +
           R"("num_hidden_layers":36,"rope_interleave":true,"qk_head_dim":128,"head_dim":128,"rope_parameters":{"type":"yarn",)"
           R"("rope_theta":10000.0,"factor":128.0,"original_max_position_embeddings":8192,"max_position_embeddings":1048576,)"
           R"("beta_fast":32.0,"beta_slow":1.0,"mscale_all_dim":1.0,"mscale":1.0,"llama_4_scaling_beta":0.1,)"
           R"("partial_rotary_factor":0.5,"rope_type":"yarn"},"model_type":"mistral4"})",
       36},
      {"{" + base +
           R"("first_k_dense_replace":1,"head_dim":72,"hidden_size":2304,"kv_lora_rank":512,"linear_attn_config":{"full_attn_layers":)"
           R"([4,8,12,16,20,24,27],"head_dim":128,"kda_layers":[1,2,3,5,6,7,9,10,11,13,14,15,17,18,19,21,22,23,25,26],"num_heads":32,)"
           R"("short_conv_kernel_size":4},"mla_use_nope":true,"model_max_length":1048576,"moe_renormalize":true,)"
           R"("moe_router_activation_func":"sigmoid","num_attention_heads":32,"num_expert_group":1,"num_experts":256,)"
           R"("num_experts_per_token":8,"num_hidden_layers":27,"num_key_value_heads":32,"num_nextn_predict_layers":0,)"
           R"("num_shared_experts":1,"q_lora_rank":null,"qk_nope_head_dim":128,"qk_rope_head_dim":64,"rms_norm_eps":1e-05,)"
           R"("rope_scaling":null,"rope_theta":10000.0,"use_grouped_topk":true,"v_head_dim":128,"linear_conv_kernel_dim":4,)"
           R"("linear_head_dim":128,"linear_num_heads":32,"model_type":"kimi_linear"})",
       7},
      {"{" + base +
           R"("hidden_size":2560,"num_hidden_layers":62,"max_position_embeddings":32768,"num_attention_heads":40,"num_key_value_heads":40,)"
           R"("qk_nope_head_dim":64,"qk_rope_head_dim":32,"q_lora_rank":768,"kv_lora_rank":256,"rms_norm_eps":1e-05,"scale_emb":12,)"
           R"("dim_model_base":256,"scale_depth":1.4,"rope_scaling":{"type":"longrope","long_factor":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],)"
           R"("short_factor":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],"original_max_position_embeddings":32768},"model_type":"minicpm3"})",
       62},
      {"{" + base +
           R"("num_hidden_layers":32,"rope_interleave":true,"embedding_initializer_range":0.1,"mlp_bias":false,"model_type":"youtu"})",
       32},
      {"{" + base + moe + R"("num_hidden_layers":61,"rope_interleave":true,"model_type":"axk1"})", 61},
      {"{" + all + yarn + R"("qk_latent_layernorm":true,"position_embedding_type":"rope","model_type":"deepseek_v3"})",
       61}};
  for (const Row& r : rows) {
    const std::string found = message(r.text);
    EXPECT_EQ(found, "read") << r.text.substr(r.text.size() - 40);
    if (found != "read") continue;
    EXPECT_EQ(parse_config(r.text).layers, r.layers);
  }
}

TEST(Config, KindsOfValues) {
  EXPECT_EQ(message(config(R"(,"q_lora_rank":"7")")), "c.json: q_lora_rank is \"7\", an integer is needed");
  EXPECT_EQ(message(config(R"(,"q_lora_rank":1e13)")), "c.json: q_lora_rank is 10000000000000.0, an integer is needed");
  EXPECT_EQ(message(config(R"(,"rope_interleave":1)")), "c.json: rope_interleave is 1, true or false is needed");
  EXPECT_EQ(message(R"({"model_type":3})"), "c.json: model_type is 3, a string is needed");
  EXPECT_EQ(message(R"({"architectures":"DeepseekV3ForCausalLM"})"),
            "c.json: architectures is \"DeepseekV3ForCausalLM\", a list is needed");
  EXPECT_EQ(message(config(R"(,"rope_scaling":"yarn")")), "c.json: rope_scaling is \"yarn\", an object is needed");
  EXPECT_EQ(message(config(R"(,"layer_types":["full_attention","full_attention"])")), "read");
  EXPECT_EQ(message(config(R"(,"layer_types":["full_attention","sliding_attention"])")),
            "c.json: layer_types holds \"sliding_attention\": in this model only full_attention is supported");
  EXPECT_EQ(message(sparse_config(R"(,"q_lora_rank":20,"index_n_heads":4,"index_head_dim":16,"index_topk":5,)"
                                  R"("layer_types":["indexed_attention","full_attention"])")),
            "c.json: layer_types holds \"full_attention\": in this model only indexed_attention is supported");
  std::string none = sparse_config(R"(,"q_lora_rank":20,"index_n_heads":4,"index_head_dim":16,"index_topk":5)");
  none.replace(none.find("layers\":2") + 8, 1, "0");
  EXPECT_EQ(message(none), "c.json: num_hidden_layers is 0, allowed 1 to 1048576 with an indexer");
}

// A class by its model_type in every spelling, by the first of its architectures, or by its keys alone.
TEST(Config, NamesOfClasses) {
  const auto named = [](const std::string& name) {
    std::string text = config("");
    text.replace(text.find(R"("model_type":"deepseek_v3")"), 26, name);
    return message(text);
  };
  for (const char* known :
       {"deepseek_v3_text", "youtu_llm", "AXK1", "openpangu", "openpangu_ultra_moe", "openpangu_moe", "PanguUltraMoE"})
    EXPECT_EQ(named(R"("model_type":")" + std::string(known) + "\""), "read") << known;
  std::string pairs = R"({"model_type":"longcat_flash_ngram","hidden_size":96,"q_lora_rank":24,"kv_lora_rank":6})";
  EXPECT_EQ(parse_config(pairs).attentions_per_layer, 2);
  for (const char* by :
       {R"("architectures":["DeepseekV3ForCausalLM"])", R"("architectures":[])", R"("architectures":null)",
        R"("architectures":["DeepseekV3ForCausalLMNextN"])",
        R"("architectures":["DeepseekV3ForSequenceClassification"])", R"("architectures":["DeepseekV3Model"])",
        R"("model_type":"kimi_k2","architectures":["DeepseekV3ForCausalLM"])",
        R"("model_type":"axk1","architectures":["AXK1ForCausalLM"])"})
    EXPECT_EQ(named(by), "read") << by;
  EXPECT_EQ(named(R"("architectures":[3])"), "c.json: architectures holds 3, a string is needed");
  EXPECT_EQ(named(R"("model_type":"some_new")").rfind("c.json: model_type is 'some_new', which is not known", 0), 0u);
  EXPECT_EQ(parse_config(config(""), "c.json", {.allow_unknown = true}).latent, 40);
  std::string other = config("");
  other.replace(other.find("deepseek_v3"), 11, "some_new");
  EXPECT_EQ(parse_config(other, "c.json", {.allow_unknown = true}).name, "some_new");
}

// What architectures say counts beside a model_type, too.
TEST(Config, ArchitecturesOfOtherAttention) {
  const auto named = [](const std::string& name, const ReadOptions& options = {}) {
    std::string text = config("");
    text.replace(text.find(R"("model_type":"deepseek_v3")"), 26, name);
    try {
      return "read as " + parse_config(text, "c.json", options).name;
    } catch (const Error& e) {
      return std::string(e.what());
    }
  };
  for (const std::string type : {"", R"("model_type":"deepseek_v3",)"}) {
    for (const char* other : {"DeepseekV4ForCausalLM", "KimiK3ForConditionalGeneration", "GigaChat35ForCausalLM",
                              "BailingMoeV2_5ForCausalLM", "BailingMoeLinearForCausalLM", "AXK2ForCausalLM",
                              "HYV4ForCausalLM", "Glm5NextForCausalLM", "Dots3NoteForCausalLM"}) {
      const std::string text = type + R"("architectures":[")" + other + "\"]",
                        says = "c.json: architectures holds '" + std::string(other) + "': ";
      EXPECT_EQ(named(text).rfind(says, 0), 0u) << named(text);
      EXPECT_TRUE(named(text).ends_with(", not supported")) << named(text);
      EXPECT_EQ(named(text, {.allow_unknown = true}).rfind("read as ", 0), 0u) << named(text);
    }
    EXPECT_NE(named(type + R"("architectures":["DeepseekV3ForCausalLM","KimiK3ForCausalLM"])").find("an output gate"),
              std::string::npos);
  }
  for (const char* unknown : {"SomeNewForCausalLM", "LlamaForCausalLM", "DeepseekV5ForCausalLM",
                              "LongcatTwoForCausalLM", "DeepseekForCausalLM", ""}) {
    const std::string text = R"("architectures":[")" + std::string(unknown) + "\"]";
    EXPECT_EQ(named(text).rfind("c.json: architectures holds '" + std::string(unknown) +
                                    "', which is not known; known are deepseek_v2 ",
                                0),
              0u)
        << named(text);
    EXPECT_EQ(named(text, {.allow_unknown = true}), "read as model");
  }
  // A name that says nothing beside a model_type that is known.
  EXPECT_EQ(named(R"("model_type":"deepseek_v3","architectures":["SomeNewForCausalLM"])"), "read as deepseek_v3");
  std::string beside = config(R"(,"architectures":["SomeNewForCausalLM"])");
  EXPECT_EQ(parse_config(beside).notes,
            std::vector<std::string>{
                "architectures holds 'SomeNewForCausalLM', which is not known: model_type is 'deepseek_v3'"});
  // Two classes that are known and attend differently.
  EXPECT_EQ(
      named(R"("model_type":"deepseek_v3","architectures":["DeepseekV32ForCausalLM"])"),
      "c.json: model_type is 'deepseek_v3', architectures holds 'DeepseekV32ForCausalLM': their attention differs "
      "(allow_unknown goes by the first)");
  EXPECT_EQ(named(R"("model_type":"deepseek_v3","architectures":["MiniCPM3ForCausalLM"])", {.allow_unknown = true}),
            "read as deepseek_v3");
}

// What stands around a language model's config is not read, and must not say otherwise.
TEST(Config, WhatLiesAroundALanguageModel) {
  const auto around = [](const std::string& more, const std::string& inside, const ReadOptions& options = {}) {
    try {
      return "read as " + parse_config(R"({"text_config":)" + inside + more + "}", "c.json", options).name;
    } catch (const Error& e) {
      return std::string(e.what());
    }
  };
  std::string inside = config(""), unnamed = config("");
  unnamed.erase(unnamed.find(R"("model_type")"), 27);
  EXPECT_EQ(around("", unnamed), "read as model");
  EXPECT_EQ(around(R"(,"model_type":"kimi_k3","mla_use_output_gate":true)", unnamed),
            "c.json: model_type is 'kimi_k3': an output gate, not supported");
  EXPECT_EQ(around(R"(,"model_type":"kimi_k3")", inside),
            "c.json: model_type is 'kimi_k3': an output gate, not supported");
  EXPECT_EQ(around(R"(,"architectures":["KimiK3ForConditionalGeneration"])", inside),
            "c.json: architectures holds 'KimiK3ForConditionalGeneration': an output gate, not supported");
  EXPECT_EQ(around(R"(,"mla_use_output_gate":true)", inside),
            "c.json: mla_use_output_gate is true: an output gate is not supported");
  EXPECT_EQ(around(R"(,"model_type":"kimi_k3","mla_use_output_gate":true)", inside, {.allow_unknown = true}),
            "read as deepseek_v3");
  EXPECT_NE(around(R"(,"attention_twist":1)", inside).find("attention_twist is 1: a key that looks"),
            std::string::npos);
  // The class of the wrapper counts where the model's own says none.
  EXPECT_EQ(around(R"(,"model_type":"deepseek_v3")", unnamed), "read as deepseek_v3");
  EXPECT_EQ(around(R"(,"model_type":"some_wrapper")", inside), "read as deepseek_v3");
  EXPECT_EQ(around(R"(,"model_type":"some_wrapper")", unnamed).rfind("c.json: model_type is 'some_wrapper', which", 0),
            0u);
  EXPECT_NE(around(R"(,"model_type":"glm_moe_dsa")", inside).find("their attention differs"), std::string::npos);
  // Keys that would be read inside.
  EXPECT_EQ(around(R"(,"hidden_size":48,"rope_theta":null)", inside), "read as deepseek_v3");
  EXPECT_EQ(
      around(R"(,"hidden_size":64)", inside),
      "c.json: hidden_size is 64: beside the language model's own config, where it is 48 (allow_unknown takes the "
      "latter)");
  EXPECT_EQ(around(R"(,"rope_interleave":false)", inside),
            "c.json: rope_interleave is false: beside the language model's own config, where it is missing "
            "(allow_unknown takes the latter)");
  EXPECT_EQ(around(R"(,"rope_interleave":false)", inside, {.allow_unknown = true}), "read as deepseek_v3");
  // As wrappers are published.
  EXPECT_EQ(around(R"(,"architectures":["KimiK25ForConditionalGeneration"],"ignore_index":-100,)"
                   R"("media_placeholder_token_id":163605,"model_type":"kimi_k25","use_unified_vision_chunk":true,)"
                   R"("video_placeholder":"<|x|>","vision_config":{"vt_num_attention_heads":16}, "dtype":"bfloat16",)"
                   R"("quantization_config":{"quant_method":"fp8"},"tie_word_embeddings":false)",
                   inside),
            "read as deepseek_v3");
  EXPECT_EQ(around(R"(,"architectures":["Mistral3ForConditionalGeneration"],"image_token_index":10,)"
                   R"("model_type":"mistral3","multimodal_projector_bias":false,"projector_hidden_act":"gelu",)"
                   R"("spatial_merge_size":2,"vision_feature_layer":-1,"vision_config":{"rope_theta":1e4})",
                   inside),
            "read as deepseek_v3");
  EXPECT_EQ(around(R"(,"candidate_resolutions":[[384,384]],"global_view_pos":"head","tile_tag":"2D",)"
                   R"("model_type":"deepseek_vl_v2","projector_config":{"n_embed":1280})",
                   inside),
            "read as deepseek_v3");
}

TEST(Config, WhereALanguageModelLies) {
  const std::string inside = config("");
  for (const char* key : {"text_config", "language_config", "llm_config"})
    EXPECT_EQ(parse_config(R"({"a":1,")" + std::string(key) + "\":" + inside + "}").latent, 40) << key;
  // The first of them, and only an object.
  EXPECT_EQ(parse_config(R"({"text_config":)" + inside + R"(,"llm_config":{}})").latent, 40);
  EXPECT_EQ(message(R"({"text_config":3})"), "c.json: hidden_size is missing");
}

TEST(Config, NamesOfOwnParameterFilesInEveryForm) {
  const std::string dims = R"("n_layers":2,"n_heads":3,"kv_lora_rank":40,"qk_nope_head_dim":24,"qk_rope_head_dim":8,)"
                           R"("v_head_dim":20)";
  const auto said = [&](const std::string& more) { return message("{" + dims + more + "}"); };
  EXPECT_EQ(said(R"(,"dim":48)"), "read");
  EXPECT_EQ(said(R"(,"dim":48,"max_seq_len":4096)"), "read");
  EXPECT_EQ(parse_config("{" + dims + R"(,"dim":48,"max_seq_len":4096})").rotary.scaling, RopeConfig::Scaling::none);
  EXPECT_EQ(said(R"(,"dim":48,"num_hidden_layers":2)"), "read");
  EXPECT_EQ(said(R"(,"dim":48,"num_hidden_layers":null)"), "read");
  EXPECT_EQ(said(R"(,"dim":48,"num_hidden_layers":3)"), "c.json: n_layers is 2, num_hidden_layers is 3");
  EXPECT_EQ(said(R"(,"dim":48,"moe":{})"), "read");
  EXPECT_EQ(said(R"(,"dim":48,"hidden_dim":9)"), "read");
  EXPECT_EQ(said(R"(,"dim":48,"q_lora_rank":20,"llama_4_scaling":{"beta":0.1,"original_max_position_embeddings":8}})")
                .substr(0, 7),
            "c.json:");  // a brace too many
  EXPECT_EQ(said(R"(,"dim":48,"q_lora_rank":20,"llama_4_scaling":{"beta":0.1,"original_max_position_embeddings":8})"),
            "read");
  EXPECT_EQ(said(R"(,"dim":48,"q_lora_rank":20,"llama_4_scaling":{"alpha":null,"beta":0.1,"delta":2})"),
            "c.json: llama_4_scaling: delta is 2, a key that is not known (allow_unknown goes on past it)");
  EXPECT_NO_THROW(parse_config("{" + dims + R"(,"dim":48,"q_lora_rank":20,"norm_eps":1e-6,"llama_4_scaling":)" +
                                   R"({"beta":0.1,"original_max_position_embeddings":8,"delta":2}})",
                               "c.json", {.allow_unknown = true}));
  EXPECT_EQ(said(R"(,"dim":48,"yarn":{"factor":4,"gamma":null})"), "read");
  EXPECT_EQ(said(R"(,"dim":48,"yarn":{"factor":4,"gamma":1})"),
            "c.json: yarn: gamma is 1, a key that is not known (allow_unknown goes on past it)");
  EXPECT_EQ(said(R"(,"dim":48,"yarn":{"factor":4,"original_max_position_embeddings":64,"alpha":2,"beta":16})"), "read");
}

TEST(Config, RopeObjectsThatAreRefused) {
  EXPECT_EQ(message(config(R"(,"rope_parameters":{"full_attention":{"rope_theta":2},"other":null})")), "read");
  EXPECT_EQ(message(config(R"(,"rope_parameters":{"full_attention":{"rope_theta":2},"rope_theta":3})")),
            "c.json: rope_parameters has rope_theta beside objects of layer types");
  for (const char* type : {"indexed_attention", "deepseek_sparse_attention"})
    EXPECT_EQ(message(config(R"(,"rope_parameters":{")" + std::string(type) + R"(":{"rope_theta":2}})")), "read");
  const std::string odd = config(R"(,"rope_scaling":{"type":"yarn","factor":4,"gamma":1})");
  EXPECT_EQ(message(odd).rfind("c.json: rope: gamma is 1: ", 0), 0u) << message(odd);
  EXPECT_EQ(parse_config(odd, "c.json", {.allow_unknown = true}).rotary.factor, 4);
  EXPECT_EQ(message(config(R"(,"rope_scaling":{"type":"deepseek_yarn","factor":4})")), "read");
  EXPECT_EQ(message(config(R"(,"mla_use_nope":true)")), "read");
  EXPECT_EQ(message(R"({"model_type":"minicpm3","num_attention_heads":0})").substr(0, 7), "c.json:");
  EXPECT_FALSE(parse_config(config(R"(,"mla_use_nope":true,"partial_rotary_factor":0.5)")).rotary.rotate);
}

TEST(Config, LayerMapsThatAreRefused) {
  const auto read = [](const std::string& layers, const std::string& more) {
    return message(R"({"model_type":"kimi_linear","num_hidden_layers":)" + layers + more + "}");
  };
  EXPECT_EQ(read("0", ""), "c.json: num_hidden_layers is 0, allowed 1 to 1048576");
  EXPECT_EQ(read("1048577", ""), "c.json: num_hidden_layers is 1048577, allowed 1 to 1048576");
  EXPECT_EQ(read("2", R"(,"layer_types":["full_attention","other"])"),
            "c.json: layer_types holds \"other\": full_attention and linear_attention are known");
  EXPECT_EQ(read("2", R"(,"layer_types":["linear_attention","linear_attention"])"),
            "c.json: layer_types names no layer with MLA, of 2");
  EXPECT_EQ(read("2", R"(,"linear_attn_config":{"full_attn_layers":[1.5],"kda_layers":[1]})"),
            "c.json: linear_attn_config: full_attn_layers holds 1.5, layers are 1 to 2");
  EXPECT_EQ(read("2", R"(,"linear_attn_config":{"full_attn_layers":[3],"kda_layers":[1]})"),
            "c.json: linear_attn_config: full_attn_layers holds 3, layers are 1 to 2");
  EXPECT_EQ(read("2", R"(,"linear_attn_config":{"kda_layers":[1]})"),
            "c.json: linear_attn_config: kda_layers is there alone, full_attn_layers and kda_layers are needed");
  const ModelConfig all = parse_config(
      R"({"model_type":"kimi_linear","num_hidden_layers":2,"layer_types":["full_attention","full_attention"]})");
  EXPECT_EQ(all.layers, 2);
  EXPECT_TRUE(all.model_layers.empty());
}

// Each with what is read instead, and past all of them with allow_unknown.
TEST(Config, QuantisationsThatAreRefused) {
  const auto with = [](const std::string& object) { return config(R"(,"quantization_config":)" + object); };
  const std::string where = "c.json: quantization_config: ", not_read = ": weights of this form are not supported (";
  for (const char* block :
       {"3", "[1]", "[1,2,3]", "[1.5,1]", "[1,1.5]", "[1,0]", R"("1x0")", "[1,65537]", "[70000,1]", R"(["a",1])",
        R"("128")", R"("128x")", R"("0x1")", R"("128x128x")", R"("128x128000000000000")"})
    EXPECT_EQ(message(with(R"({"weight_block_size":)" + std::string(block) + "}")),
              where + "weight_block_size is " + block + ", two positive integers are needed");
  const std::string methods =
      "read are fp8 fbgemm_fp8 compressed-tensors modelopt modelopt_fp4 modelopt_mixed awq gptq mxfp4 mxfp8 quark "
      "blockwise_int8 w8a8_int8)";
  const std::string formats =
      "read are dense float-quantized int-quantized naive-quantized pack-quantized nvfp4-pack-quantized "
      "mxfp4-pack-quantized)";
  const std::string algos = "read are FP8 and its kinds, NVFP4, MXFP4, MXFP8)";
  const std::pair<const char*, std::string> refused[] = {
      {R"({"quant_method":"hqq"})", "quant_method is 'hqq'" + not_read + methods},
      {R"({"quant_algo":"W4A16_AWQ"})", "quant_algo is 'W4A16_AWQ'" + not_read + algos},
      {R"({"qformat_weight":"nvfp4"})", "qformat_weight is 'nvfp4'" + not_read + "fp8 is read)"},
      {R"({"fmt":"e5m2"})", "fmt is 'e5m2'" + not_read + "e4m3 is read)"},
      {R"({"quant_method":"compressed-tensors","format":"marlin-24"})", "format is 'marlin-24'" + not_read + formats},
      {R"({"quant_method":"compressed-tensors","transform_config":{"config_groups":{"R1":{}}}})",
       R"(transform_config is {"config_groups":{"R1":{}}})" + not_read + "weights without transforms are read)"},
      {R"({"quant_method":"compressed-tensors","sparsity_config":{"format":"sparse-24-bitmask"}})",
       R"(sparsity_config is {"format":"sparse-24-bitmask"})" + not_read + "dense weights are read)"},
      {R"({"quant_method":"gptq","checkpoint_format":"marlin"})",
       "checkpoint_format is 'marlin'" + not_read + "read are gptq and gptq_v2)"},
      {R"({"quant_method":"gptq","is_marlin_format":true})",
       "is_marlin_format is true" + not_read + "read are gptq and gptq_v2)"},
      {R"({"quant_method":"gptq","pack_dtype":"int16"})", "pack_dtype is 'int16'" + not_read + "int32 is read)"},
      {R"({"quant_method":"awq","version":"gemv"})", "version is 'gemv'" + not_read + "gemm is read)"}};
  for (const auto& [object, why] : refused) {
    EXPECT_EQ(message(with(object)), where + why);
    EXPECT_THROW(parse_config(with(object)), UnsupportedError) << object;
    EXPECT_NO_THROW(parse_config(with(object), "c.json", {.allow_unknown = true})) << object;
  }
  // A group of another format, and experts alone in one.
  const std::string groups = R"({"quant_method":"compressed-tensors","config_groups":{"g":{"format":"marlin-24"}})";
  EXPECT_EQ(message(with(groups + "}")), where + "config_groups: g: format is 'marlin-24'" + not_read + formats);
  EXPECT_EQ(message(with(groups + R"(,"ignore":["re:.*self_attn.*","lm_head"]})")), "read");
  EXPECT_EQ(message(with(R"({"quant_method":"gptq","group_size":0})")),
            where + "group_size is 0, -1 or 1 to 1048576 is needed");
  EXPECT_EQ(message(with(R"({"quant_method":"gptq","group_size":1048577})")),
            where + "group_size is 1048577, -1 or 1 to 1048576 is needed");
  EXPECT_EQ(message(with(R"({"quant_method":"gptq","bits":"4"})")), where + "bits is \"4\", an integer is needed");
  EXPECT_EQ(message(with(R"({"quant_method":"compressed-tensors","config_groups":{"a":{"weights":{"type":"float",)"
                         R"("block_structure":[128,128]}},"b":{"weights":{"block_structure":"64x128"}}}})")),
            where +
                "config_groups: b: weights: block_structure is \"64x128\", another one is 128 x 128: blocks of "
                "several sizes are not supported");
  const auto blocks = [&](const std::string& b) {
    return message(with(R"({"quant_method":"compressed-tensors","weight_block_size":[128,128],"config_groups":{"b":)"
                        R"({"weights":{"type":"float","block_structure":)" +
                        b + "}}}}"));
  };
  EXPECT_EQ(blocks(R"("128x128")"), "read");
  EXPECT_EQ(blocks("[128,64]"),
            where +
                "config_groups: b: weights: block_structure is [128,64], another one is 128 x 128: blocks of "
                "several sizes are not supported");
  // What spares attention is a list with the pattern for it.
  const std::string sparse =
      R"({"quant_method":"compressed-tensors","sparsity_config":{"format":"sparse-24-bitmask"},"ignore":)";
  EXPECT_EQ(message(with(sparse + R"(["lm_head","re:.*self_attn.*"]})")), "read");
  for (const char* ignore : {R"(["lm_head"])", "[]", R"("re:.*self_attn.*")"})
    EXPECT_EQ(message(with(sparse + ignore + "}")),
              where + R"(sparsity_config is {"format":"sparse-24-bitmask"})" + not_read + "dense weights are read)");
}

TEST(Config, QuantisationsThatAreRead) {
  using List = std::vector<int64_t>;
  const auto with = [](const std::string& object) {
    return parse_config(config(R"(,"quantization_config":)" + object));
  };
  EXPECT_EQ(parse_config(config("")).quantisation.method, "");
  EXPECT_EQ(with("{}").quantisation.method, "fp8");
  EXPECT_EQ(with(R"({"quant_algo":"FP8_PER_CHANNEL_PER_TOKEN","quant_method":"modelopt"})").quantisation.method,
            "modelopt");
  for (const char* algo : {"FP8", "fp8", "NVFP4", "NVFP4_AWQ", "MXFP8", "MIXED_PRECISION"})
    EXPECT_NO_THROW(with(R"({"quant_algo":")" + std::string(algo) + "\"}")) << algo;

  EXPECT_EQ(with(R"({"qformat_weight":"FP8_DYN","fmt":"float8_e4m3fn"})").quantisation.method, "fp8");

  const QuantisationConfig gptq =
      with(R"({"quant_method":"gptq","bits":4,"group_size":128,"desc_act":true})").quantisation;
  EXPECT_EQ(gptq.method, "gptq");
  EXPECT_EQ(gptq.bits, List{4});
  EXPECT_EQ(gptq.group_sizes, List{128});
  EXPECT_EQ(with(R"({"quant_method":"gptq","group_size":-1})").quantisation.group_sizes, List{-1});
  EXPECT_EQ(gptq.zero_offset, 1);
  EXPECT_EQ(with(R"({"quant_method":"gptq","checkpoint_format":"gptq_v2"})").quantisation.zero_offset, 0);
  EXPECT_EQ(with(R"({"quant_method":"gptq","format":"gptq_v2"})").quantisation.zero_offset, 0);
  EXPECT_TRUE(with(R"({"quant_method":"gptq","bits":4,"dynamic":{"a":{"bits":8}}})").quantisation.bits.empty());

  const QuantisationConfig awq =
      with(R"({"quant_method":"awq","w_bit":4,"q_group_size":64,"version":"GEMM"})").quantisation;
  EXPECT_EQ(awq.bits, List{4});
  EXPECT_EQ(awq.group_sizes, List{64});
  EXPECT_EQ(awq.zero_offset, 0);

  const ModelConfig mixed = with(
      R"({"quant_method":"compressed-tensors","format":"mixed-precision","ignore":["lm_head"],"config_groups":{)"
      R"("group_0":{"format":"pack-quantized","weights":{"num_bits":4,"type":"int","symmetric":false,"strategy":"group",)"
      R"("group_size":32}},"group_1":{"format":"pack-quantized","weights":{"num_bits":8,"symmetric":false,)"
      R"("strategy":"channel","group_size":null}},"group_2":{"format":"float-quantized","weights":{"num_bits":8,)"
      R"("type":"float","strategy":"block","block_structure":[128,64]}},"W8A8":["Linear"]}})");
  EXPECT_EQ(mixed.quantisation.bits, (List{4, 8}));
  EXPECT_EQ(mixed.quantisation.group_sizes, (List{32, -1}));
  EXPECT_TRUE(mixed.quantisation.zero_points);
  EXPECT_EQ(mixed.fp8_block_rows, 128);
  EXPECT_EQ(mixed.fp8_block_cols, 64);
  // Without a strategy a size says that there are groups.
  for (const auto& [size, groups] : {std::pair("32", List{32}), {"null", List{-1}}, {"-1", List{-1}}})
    EXPECT_EQ(with(R"({"quant_method":"compressed-tensors","config_groups":{"g":{"weights":{"group_size":)" +
                   std::string(size) + "}}}}")
                  .quantisation.group_sizes,
              groups);
  EXPECT_FALSE(with(R"({"quant_method":"compressed-tensors","config_groups":{"g":{"weights":{"num_bits":4}}}})")
                   .quantisation.zero_points);
}

TEST(Config, WhatAllowUnknownGoesPast) {
  const ReadOptions all{.allow_unknown = true};
  EXPECT_EQ(parse_config(config(R"(,"partial_rotary_factor":0.5)"), "c.json", all).rope, 8);
  EXPECT_FALSE(parse_config(config(R"(,"index_topk":5)"), "c.json", all).indexer);
  EXPECT_EQ(parse_config(R"({"model_type":"longcat_flash","hidden_size":96,"q_lora_rank":null,"kv_lora_rank":6,)"
                         R"("num_layers":1,"head_dim":32})",
                         "c.json", all)
                .query_scale,
            1);
}

TEST(Config, NamesOfPangu) {
  const std::string dims =
      R"("hidden_size":48,"num_hidden_layers":2,"num_attention_heads":3,"attention_kv_lora_dim":40,)"
      R"("attention_qk_dim":24,"attention_qk_rope_dim":8,"attention_v_dim":20)";
  const ModelConfig m = parse_config(R"({"model_type":"some_new","dim":3,"rms_norm_eps":1e-5,)" + dims + "}");
  EXPECT_EQ(m.latent, 40);
  EXPECT_EQ(m.rms_eps, 1e-5);
  EXPECT_EQ(parse_config("{" + dims + "}").value, 20);
  EXPECT_EQ(parse_config(config(R"(,"dim":3)")).hidden, 48);  // a name that means nothing beside hidden_size
}

// Words of a key are told apart by what is no letter, and by an upper case letter after a lower case one.
TEST(Config, WordsOfKeys) {
  for (const char* key : {"attentionSinkBias", "attention.sink", "Attention_Sink"})
    EXPECT_NE(message(config(",\"" + std::string(key) + "\":1")).find("looks as if it concerned attention"),
              std::string::npos)
        << key;
  for (const char* key : {"ABC", "fooBar", "X"})
    EXPECT_EQ(message(config(",\"" + std::string(key) + "\":1")), "read") << key;
}

// What a key that would change attention holds when it changes nothing.
TEST(Config, KeysThatSayNothing) {
  for (const char* value : {"null", "false", "0", "0.0", "[]", "{}", R"("")"})
    EXPECT_EQ(message(config(R"(,"attn_logit_softcapping":)" + std::string(value))), "read") << value;
  for (const char* value : {"true", "3", "[1]", R"({"a":1})", R"("a")"})
    EXPECT_EQ(message(config(R"(,"attn_logit_softcapping":)" + std::string(value))),
              "c.json: attn_logit_softcapping is " + std::string(value) + ": a logit soft cap is not supported");
  const std::string window = "c.json: sliding_window is 8: a sliding window is not supported";
  EXPECT_EQ(message(config(R"(,"use_sliding_window":true,"sliding_window":8)")).substr(0, 6), "c.json");
  EXPECT_EQ(message(config(R"(,"use_sliding_window":0,"sliding_window":8)")), window);
  EXPECT_EQ(message(config(R"(,"qk_latent_layernorm":true)")), "read");
  EXPECT_EQ(message(config(R"(,"qk_latent_layernorm":false)")),
            "c.json: qk_latent_layernorm is false: latents without norms are not supported");
  EXPECT_NE(message(config(R"(,"qk_latent_layernorm":3)")), "");
  EXPECT_EQ(message(config(R"(,"position_embedding_type":"rope")")), "read");
  EXPECT_EQ(message(config(R"(,"position_embedding_type":"rotary")")), "read");
  EXPECT_NE(message(config(R"(,"position_embedding_type":"alibi")")), "read");
  EXPECT_EQ(message(config(R"(,"attention_method":"MLA")")), "read");
  for (const char* usual : {R"("use_mla":true)", R"("use_mla":1)", R"("use_mla":null)", R"("use_qknorm":false)",
                            R"("zero_centered_norm":false)", R"("use_cla":false)", R"("pruned_heads":{})",
                            R"("add_cross_attention":false)", R"("cross_attention_hidden_size":null)"})
    EXPECT_EQ(message(config("," + std::string(usual))), "read");
}

// A word that could be taken apart in very many ways is not.
TEST(Config, LongWordsTakeNoTime) {
  std::string word;
  for (int i = 0; i < 40; ++i) word += "layernorm";
  EXPECT_EQ(message(config(",\"" + word + "x\":1")), "read");
}

TEST(Config, RandomDamageNeverEscapes) {
  const std::string whole = sparse_config(
      R"(,"q_lora_rank":20,"rms_norm_eps":1e-6,"rope_interleave":true,"index_n_heads":4,"index_head_dim":128,"index_topk":64,"index_topk_freq":2,"index_topk_pattern":"FS",)"
      R"("rope_parameters":{"rope_theta":5e3,"rope_type":"yarn","factor":40,"beta_fast":32,"beta_slow":1,"mscale":0.7,)"
      R"("mscale_all_dim":0.9},"quantization_config":{"weight_block_size":[128,64]})");
  cases::Random random(3);
  int read = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string damaged = whole;
    for (int64_t n = random.integer(1, 3); n > 0; --n) {
      const size_t at = static_cast<size_t>(random.integer(0, static_cast<int64_t>(damaged.size()) - 1));
      const char one = R"(0123456789-.eE[]{},:"ntf)"[random.integer(0, 23)];
      switch (random.integer(0, 3)) {
        case 0: damaged[at] = one; break;
        case 1: damaged[at] = static_cast<char>(random.next()); break;
        case 2: damaged.insert(at, 1, one); break;
        default: damaged.erase(at, static_cast<size_t>(random.integer(1, 4)));
      }
    }
    try {
      const ModelConfig m = parse_config(damaged);
      for (double f : inverse_frequencies(m.rotary, std::min<int64_t>(m.rope, 64)))
        EXPECT_TRUE(std::isfinite(f)) << damaged;
      EXPECT_TRUE(std::isfinite(rotary_magnitude(m.rotary)) && std::isfinite(m.softmax_scale())) << damaged;
      ++read;
    } catch (const Error& e) {
      EXPECT_EQ(std::string_view(e.what()).find('\n'), std::string_view::npos) << damaged;
    }
  }
  EXPECT_GT(read, 0);
}

}  // namespace
}  // namespace mla
