// Structs of older and newer headers, options and defaults.
#include "call.hpp"

extern "C" size_t mla_test_struct_sizes_c();
extern "C" size_t mla_test_struct_sizes_cpp();

namespace capi {
namespace {

TEST(CStructs, AreTheSameInCAndCpp) { EXPECT_EQ(mla_test_struct_sizes_c(), mla_test_struct_sizes_cpp()); }

TEST(CStructs, FieldsThatAnOlderHeaderLacksHaveTheirDefaults) {
  // As if a header had ended after `rope`: what lies behind is not the struct's.
  mla_cache_spec spec = mla_cache_spec_default();
  spec.struct_size = offsetof(mla_cache_spec, page_size);
  spec.page_size = -7;
  spec.power_of_two_scales = -7;
  size_t old_bytes = 0, bytes = 0;
  ASSERT_OK(mla_cache_page_bytes(&spec, &old_bytes));
  const mla_cache_spec whole = mla_cache_spec_default();
  ASSERT_OK(mla_cache_page_bytes(&whole, &bytes));
  EXPECT_EQ(old_bytes, bytes);
  EXPECT_EQ(bytes, 64u * 1152);
}

TEST(CStructs, ResultsFillWhatAnOlderHeaderHasRoomFor) {
  Model model;
  make_model(&model);
  mla_model_fields f = mla_model_fields_default();
  f.struct_size = offsetof(mla_model_fields, latent);
  f.latent = -7;
  ASSERT_OK(mla_model_get(model, &f));
  EXPECT_EQ(f.query_latent, 48);
  EXPECT_EQ(f.latent, -7);
  EXPECT_EQ(f.struct_size, offsetof(mla_model_fields, latent));
}

TEST(CStructs, NewerOnesAreTakenWhileTheirNewFieldsAreZero) {
  struct {
    mla_cache_spec spec;
    int64_t of_tomorrow;
  } newer{mla_cache_spec_default(), 0};
  newer.spec.struct_size = sizeof newer;
  size_t bytes = 0;
  EXPECT_OK(mla_cache_page_bytes(&newer.spec, &bytes));
  newer.of_tomorrow = 1;
  EXPECT_FAILS(MLA_ERROR_UNSUPPORTED, mla_cache_page_bytes(&newer.spec, &bytes), "struct_size is 56");
}

TEST(CStructs, SizesThatNoHeaderHasAreRefused) {
  size_t bytes = 0;
  mla_cache_spec spec = mla_cache_spec_default();
  for (size_t size : {size_t{0}, size_t{7}, size_t{12}, sizeof spec + 1, ~size_t{7}}) {
    spec.struct_size = size;
    EXPECT_FAILS(MLA_ERROR_SHAPE, mla_cache_page_bytes(&spec, &bytes), std::to_string(size));
  }
}

TEST(CStructs, NumbersOutsideAnEnumeratorOrFlagAreRefused) {
  size_t bytes = 0;
  mla_cache_spec spec = mla_cache_spec_default();
  spec.format = 6;
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_cache_page_bytes(&spec, &bytes), "spec format is 6, allowed 0 to 5");
  spec = mla_cache_spec_default();
  spec.power_of_two_scales = 2;
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_cache_page_bytes(&spec, &bytes), "power_of_two_scales is 2, allowed 0 and 1");
}

TEST(CStructs, ModelsGoThroughTheirFieldsUnchanged) {
  for (int32_t i = 0; mla_preset_name(i); ++i) {
    Model preset, again;
    ASSERT_OK(mla_model_create_preset(mla_preset_name(i), &preset));
    mla_model_fields f = mla_model_fields_default(), g = f;
    ASSERT_OK(mla_model_get(preset, &f));
    ASSERT_OK(mla_model_create(&f, &again));
    ASSERT_OK(mla_model_get(again, &g));
    EXPECT_STREQ(f.name, g.name);
    EXPECT_EQ(f.indexer_full == nullptr, g.indexer_full == nullptr);
    EXPECT_EQ(f.short_factors == nullptr, g.short_factors == nullptr);
    for (int64_t pair = 0; f.short_factors && pair < f.rope / 2; ++pair) {
      EXPECT_EQ(f.short_factors[pair], g.short_factors[pair]);
      EXPECT_EQ(f.long_factors[pair], g.long_factors[pair]);
    }
    f.name = g.name = nullptr;
    f.indexer_full = g.indexer_full = nullptr;
    f.short_factors = f.long_factors = g.short_factors = g.long_factors = nullptr;
    EXPECT_EQ(0, std::memcmp(&f, &g, sizeof f)) << mla_preset_name(i);
    double a = 0, b = 1;
    EXPECT_OK(mla_model_softmax_scale(preset, &a));
    EXPECT_OK(mla_model_softmax_scale(again, &b));
    EXPECT_EQ(a, b);
  }
}

TEST(CStructs, ModelsOfConfigs) {
  Model model;
  const std::string json =
      R"({"hidden_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 16, "q_lora_rank": null,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "max_position_embeddings": 4096, "model_type": "deepseek_v2"})";
  ASSERT_OK(mla_model_create_config(json.data(), json.size(), &model));
  mla_model_fields f = mla_model_fields_default();
  ASSERT_OK(mla_model_get(model, &f));
  EXPECT_EQ(f.hidden, 2048);
  EXPECT_EQ(f.query_latent, 0);
  mla_model* none = model;
  EXPECT_EQ(MLA_ERROR_CHECKPOINT, mla_model_create_config("{", 1, &none));
  EXPECT_EQ(none, nullptr);
  EXPECT_EQ(MLA_ERROR_CHECKPOINT, mla_model_read_config("/no/such/config.json", &none));
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_model_create_preset("gpt-2", &none), "gpt-2");
  mla_checkpoint* checkpoint = nullptr;
  EXPECT_EQ(MLA_ERROR_CHECKPOINT, mla_checkpoint_open("/no/such/folder", &checkpoint));
  EXPECT_EQ(checkpoint, nullptr);
}

TEST(CStructs, ModelsOfFamiliesGoThroughTheirFields) {
  const std::string longcat = R"({"model_type": "longcat_flash", "num_layers": 3})",
                    kimi = R"({"model_type": "kimi_linear"})", mistral = R"({"model_type": "mistral4"})";
  for (const std::string& json : {longcat, kimi, mistral}) {
    Model model, again;
    ASSERT_OK(mla_model_create_config(json.data(), json.size(), &model));
    mla_model_fields f = mla_model_fields_default(), g = f;
    ASSERT_OK(mla_model_get(model, &f));
    ASSERT_OK(mla_model_create(&f, &again));
    ASSERT_OK(mla_model_get(again, &g));
    EXPECT_EQ(f.query_scale, g.query_scale);
    EXPECT_EQ(f.latent_scale, g.latent_scale);
    EXPECT_EQ(f.query_growth_beta, g.query_growth_beta);
    EXPECT_EQ(f.query_growth_length, g.query_growth_length);
    EXPECT_EQ(f.attentions_per_layer, g.attentions_per_layer);
    ASSERT_EQ(f.model_layers == nullptr, g.model_layers == nullptr);
    for (int64_t l = 0; f.model_layers && l < f.layers; ++l) EXPECT_EQ(f.model_layers[l], g.model_layers[l]);
  }
  Model model;
  ASSERT_OK(mla_model_create_config(longcat.data(), longcat.size(), &model));
  mla_model_fields f = mla_model_fields_default();
  ASSERT_OK(mla_model_get(model, &f));
  EXPECT_EQ(f.layers, 6);
  EXPECT_EQ(f.attentions_per_layer, 2);
  EXPECT_EQ(f.query_scale, 2);  // sqrt(6144 / 1536)
}

TEST(CStructs, UnknownKeysOfAttentionAreRefusedUnlessAllowed) {
  const std::string json = R"({"model_type": "deepseek_v3", "attention_twist": 3})";
  mla_model* none = nullptr;
  EXPECT_FAILS(MLA_ERROR_UNSUPPORTED, mla_model_create_config(json.data(), json.size(), &none), "attention_twist is 3");
  mla_read_options options = mla_read_options_default();
  EXPECT_FAILS(MLA_ERROR_UNSUPPORTED, mla_model_create_config_with(json.data(), json.size(), &options, &none),
               "attention_twist is 3");
  options.allow_unknown = 1;
  Model model;
  EXPECT_OK(mla_model_create_config_with(json.data(), json.size(), &options, &model));
  options.allow_unknown = 2;
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_model_create_config_with(json.data(), json.size(), &options, &none),
               "allow_unknown is 2");
  EXPECT_EQ(MLA_ERROR_CHECKPOINT, mla_model_read_config_with("/no/such/config.json", nullptr, &none));
  mla_checkpoint* checkpoint = nullptr;
  EXPECT_EQ(MLA_ERROR_CHECKPOINT, mla_checkpoint_open_with("/no/such/folder", nullptr, &checkpoint));
}

TEST(CStructs, ImpossibleModelsAreRefused) {
  mla_model* none = nullptr;
  mla_model_fields f = mla_model_fields_default();
  EXPECT_EQ(MLA_ERROR_INPUT, mla_model_create(&f, &none));  // no layers
  f.layers = 1;
  EXPECT_EQ(MLA_ERROR_SHAPE, mla_model_create(&f, &none));
  EXPECT_EQ(none, nullptr);
}

TEST(CStructs, LayersThatShareAnIndexerHaveNone) {
  Model model;
  make_model(&model);
  mla_model_fields f = mla_model_fields_default();
  ASSERT_OK(mla_model_get(model, &f));
  const uint8_t full[] = {1, 0};
  f.indexer_full = full;
  Model shared;
  ASSERT_OK(mla_model_create(&f, &shared));
  int32_t has = -1;
  EXPECT_OK(mla_model_layer_has_indexer(model, 1, &has));
  EXPECT_EQ(has, 1);
  EXPECT_OK(mla_model_layer_has_indexer(shared, 0, &has));
  EXPECT_EQ(has, 1);
  EXPECT_OK(mla_model_layer_has_indexer(shared, 1, &has));
  EXPECT_EQ(has, 0);
  EXPECT_FAILS(MLA_ERROR_INPUT, mla_model_layer_has_indexer(shared, 2, &has), "layer is 2, allowed 0 to 1");
}

TEST(CStructs, TextsAreCutAndMeasured) {
  char text[8] = "xxxxxxx";
  size_t length = 0;
  EXPECT_OK(mla_device_describe(kCpu, nullptr, 0, &length));
  EXPECT_EQ(length, 3u);
  EXPECT_OK(mla_device_describe(kCpu, text, 3, &length));
  EXPECT_STREQ(text, "cp");
  EXPECT_EQ(length, 3u);
  EXPECT_OK(mla_device_describe(kCpu, text, sizeof text, nullptr));
  EXPECT_STREQ(text, "cpu");
  EXPECT_EQ(MLA_ERROR_HANDLE, mla_device_describe(kCpu, nullptr, 4, &length));
}

TEST(CStructs, VersionsAgree) {
  int major = 0, minor = 0, patch = 0;
  ASSERT_EQ(3, std::sscanf(mla_version(), "%d.%d.%d", &major, &minor, &patch));
  EXPECT_EQ(mla_version_number(), 10000 * major + 100 * minor + patch);
}

}  // namespace
}  // namespace capi
