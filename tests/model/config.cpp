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
  EXPECT_EQ(mini.rotary.scaling, RopeConfig::Scaling::none);
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
  EXPECT_THROW(RotaryTable(RopeConfig{}, 64, int64_t{1} << 62), ShapeError);
}

// Only what a test changes differs from this.
std::string config(const std::string& more) {
  return R"({"model_type":"deepseek_v3","hidden_size":48,"num_hidden_layers":2,"num_attention_heads":3,"kv_lora_rank":40,)"
         R"("qk_nope_head_dim":24,"qk_rope_head_dim":8,"v_head_dim":20)" +
         more + "}";
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
      parse_config(config(R"(,"q_lora_rank":20,"index_n_heads":4,"index_head_dim":128,"index_topk":64)"));
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
  EXPECT_EQ(message("{"), "c.json: not valid JSON");
  EXPECT_EQ(message("[]"), "c.json: not a JSON object");
  EXPECT_EQ(message("{}"), "c.json: hidden_size is missing");
  EXPECT_EQ(message(config(R"(,"rope_theta":"x")")), "c.json: rope_theta is \"x\", a number is needed");
  EXPECT_EQ(message(config(R"(,"q_lora_rank":1.5)")), "c.json: q_lora_rank is 1.5, an integer is needed");
  EXPECT_EQ(message(config(R"(,"q_lora_rank":-3)")),
            "c.json: model deepseek_v3: query latent is -3, allowed 0 to 1048576");
  EXPECT_EQ(message(config(R"(,"rms_norm_eps":-1)")),
            "c.json: model deepseek_v3: rms_eps is -1.000000, must not be negative");
  EXPECT_EQ(message(config(R"(,"rope_scaling":{"type":"longrope"})")),
            "c.json: rope type 'longrope' is not supported (default and yarn are)");
  EXPECT_EQ(message(config(R"(,"sliding_window":4096)")),
            "c.json: sliding_window is 4096: a sliding window is not supported");
  EXPECT_EQ(message(config(R"(,"use_sliding_window":false,"sliding_window":4096)")), "read");
  EXPECT_EQ(message(config(R"(,"attn_logit_softcapping":30.0)")),
            "c.json: attn_logit_softcapping is 30.0: a logit soft cap is not supported");
  EXPECT_EQ(message(config(R"(,"alibi":true)")), "c.json: alibi is true: ALiBi is not supported");
  EXPECT_EQ(message(config(R"(,"quantization_config":{"weight_block_size":[0,1]})")),
            "c.json: quantization_config: weight_block_size is [0,1], two positive integers are needed");
  EXPECT_EQ(message(config(R"(,"quantization_config":3)")), "c.json: quantization_config is 3, an object is needed");
  EXPECT_EQ(message(config(R"(,"index_n_heads":4,"index_head_dim":128,"index_topk":-5)")),
            "c.json: model deepseek_v3: indexer topk is -5, allowed 1 to 1048576");
  EXPECT_EQ(message(config(R"(,"index_n_heads":4,"index_head_dim":4,"index_topk":5)")),
            "c.json: model deepseek_v3: indexer dim is 4, allowed 8 to 1048576");
  EXPECT_EQ(message(config(R"(,"index_topk":5)")), "c.json: index_n_heads is missing");
  const auto sparse = [](const std::string& more) {
    return message(config(R"(,"q_lora_rank":20,"index_n_heads":4,"index_head_dim":16,"index_topk":5)" + more));
  };
  EXPECT_EQ(sparse(""), "read");
  EXPECT_EQ(message(config(R"(,"index_n_heads":4,"index_head_dim":16,"index_topk":5)")),
            "c.json: model deepseek_v3: query latent of a model with an indexer is 0, allowed 1 to 1048576");
  EXPECT_EQ(sparse(R"(,"indexer_types":["full"])"), "c.json: indexer_types has 1 entries, the model has 2 layers");
  EXPECT_EQ(sparse(R"(,"indexer_types":["full","half"])"),
            "c.json: indexer_types holds 'half', full or shared (F or S) are known");
  EXPECT_EQ(sparse(R"(,"indexer_types":["full",3])"),
            "c.json: indexer_types holds '3', full or shared (F or S) are known");
  EXPECT_EQ(sparse(R"(,"indexer_types":3)"), "c.json: indexer_types is 3, a list or a string is needed");
  EXPECT_EQ(sparse(R"(,"index_topk_pattern":"SF")"),
            "c.json: model deepseek_v3: indexer of layer 0 is shared, there is no layer before it");
  EXPECT_EQ(sparse(R"(,"index_topk_freq":0)"), "c.json: index_topk_freq is 0, at least 1 is needed");
  EXPECT_EQ(sparse(R"(,"index_topk_freq":2,"index_skip_topk_offset":0)"),
            "c.json: model deepseek_v3: indexer of layer 0 is shared, there is no layer before it");
  std::string many = config(R"(,"q_lora_rank":20,"index_n_heads":4,"index_head_dim":16,"index_topk":5)");
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
  EXPECT_EQ(yarn(R"(,"beta_slow":0)"), where + "beta_slow is 0.000000, must be above 0");
  EXPECT_EQ(yarn(R"(,"mscale":-1)"), where + "mscale is -1.000000, must not be negative");
  EXPECT_EQ(yarn(R"(,"mscale_all_dim":-1)"), where + "mscale_all_dim is -1.000000, must not be negative");
  EXPECT_EQ(yarn(R"(,"attn_factor":0)"), where + "attention factor is 0.000000, must be above 0");
  EXPECT_EQ(yarn(R"(,"original_max_position_embeddings":0)"), where + "original max position is 0, must be above 0");
  EXPECT_THROW(read_config("/nowhere/config.json"), CheckpointError);
}

TEST(Config, MessagesStayOnOneReadableLine) {
  EXPECT_EQ(message(config(R"(,"rope_scaling":{"type":"a\nb"})")),
            "c.json: rope type 'a\\x0ab' is not supported (default and yarn are)");
  const std::string deep = std::string(1 << 20, '[') + std::string(1 << 20, ']');
  EXPECT_EQ(message(config(R"(,"rope_theta":)" + deep)), "c.json: nested deeper than 64");
  const std::string wide = message(config(R"(,"rope_theta":")" + std::string(1 << 20, 'x') + "\""));
  EXPECT_LT(wide.size(), 1100u);
  EXPECT_TRUE(wide.ends_with("a number is needed")) << wide;
}

TEST(Config, RandomDamageNeverEscapes) {
  const std::string whole = config(
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
