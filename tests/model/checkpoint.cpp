// Checkpoint folders: single file, shards, prefixes, fp8 with block scales, and what is missing or misshaped.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <thread>

#include "mla/error.hpp"
#include "mla/quant_scales.hpp"
#include "mla/weights.hpp"
#include "support/safetensors_writer.hpp"

namespace mla {
namespace {

constexpr const char* kConfig =
    R"({"model_type":"deepseek_v3","hidden_size":48,"num_hidden_layers":2,"num_attention_heads":3,"q_lora_rank":20,"kv_lora_rank":40,)"
    R"("qk_nope_head_dim":24,"qk_rope_head_dim":8,"v_head_dim":20})";

struct Tensor {
  std::string role;
  std::vector<int64_t> shape;
};
const std::vector<Tensor> kTensors{{"q_a_proj.weight", {20, 48}},   {"q_a_layernorm.weight", {20}},
                                   {"q_b_proj.weight", {96, 20}},   {"kv_a_proj_with_mqa.weight", {48, 48}},
                                   {"kv_a_layernorm.weight", {40}}, {"kv_b_proj.weight", {132, 40}},
                                   {"o_proj.weight", {48, 60}}};

void add(test::SafetensorsWriter& w, const std::string& prefix, const Tensor& t) {
  int64_t n = 1;
  for (int64_t e : t.shape) n *= e;
  std::vector<bf16> values;
  for (int64_t i = 0; i < n; ++i) values.push_back(to_bf16(static_cast<float>(i % 17)));
  w.add(prefix + t.role, "BF16", t.shape, values);
}

template <class F>
std::string refusal(const std::filesystem::path& folder, F&& use) {
  try {
    use(Checkpoint(folder));
  } catch (const Error& e) {
    std::string text = e.what();
    for (size_t at; (at = text.find(folder.string())) != std::string::npos;)
      text.replace(at, folder.string().size(), "F");
    return text;
  }
  return "read";
}

std::string refusal(const std::filesystem::path& folder) {
  const std::string why = refusal(folder, [](const Checkpoint& c) { c.layer(1); });
  EXPECT_EQ(refusal(folder, [](const Checkpoint& c) { c.check(1); }), why);
  return why;
}

class CheckpointFolder : public testing::Test {
 protected:
  CheckpointFolder() { test::write_file(folder_ / "config.json", kConfig); }
  void write_single(
      const std::string& prefix, const std::function<void(std::vector<Tensor>&)>& change = [](auto&) {}) {
    test::SafetensorsWriter w;
    for (int layer = 0; layer < 2; ++layer) {
      std::vector<Tensor> tensors = kTensors;
      if (layer == 1) change(tensors);
      for (const Tensor& t : tensors) add(w, prefix + "model.layers." + std::to_string(layer) + ".self_attn.", t);
    }
    w.write(folder_ / "model.safetensors");
  }
  test::TempFolder folder_;
};

TEST_F(CheckpointFolder, SingleFileUnderEitherPrefix) {
  for (const char* prefix : {"", "language_model."}) {
    write_single(prefix);
    const Checkpoint c(folder_.path());
    EXPECT_EQ(c.config().latent, 40);
    const LayerTensors t = c.layer(1);
    EXPECT_EQ(t.kv_up.shape, (std::vector<int64_t>{132, 40}));
    EXPECT_EQ(t.query.to_f32()[18], 1.0f);
    EXPECT_EQ(c.attention_entries(0).size(), kTensors.size());
    EXPECT_THROW(c.layer(2), InputError);
    EXPECT_THROW(c.layer(-1), InputError);
  }
}

TEST_F(CheckpointFolder, ShardsAndTheirIndex) {
  std::string map;
  for (int shard = 0; shard < 2; ++shard) {
    test::SafetensorsWriter w;
    for (size_t i = 0; i < kTensors.size(); ++i)
      for (int layer = 0; layer < 2; ++layer)
        if ((i + layer) % 2 == static_cast<size_t>(shard)) {
          const std::string prefix = "model.layers." + std::to_string(layer) + ".self_attn.";
          add(w, prefix, kTensors[i]);
          map += (map.empty() ? "\"" : ",\"") + prefix + kTensors[i].role + "\":\"part-" + std::to_string(shard) +
                 ".safetensors\"";
        }
    w.write(folder_ / ("part-" + std::to_string(shard) + ".safetensors"));
  }
  const auto index = folder_ / "model.safetensors.index.json";
  test::write_file(index, "{\"weight_map\":{" + map + "}}");
  EXPECT_EQ(refusal(folder_.path()), "read");
  EXPECT_EQ(Checkpoint(folder_.path()).file_of("model.layers.1.self_attn.o_proj.weight"),
            folder_ / "part-1.safetensors");
  EXPECT_EQ(Checkpoint(folder_.path()).file_of("no tensor"), std::filesystem::path());

  auto with = [&](const std::string& text) {
    test::write_file(index, text);
    return refusal(folder_.path());
  };
  EXPECT_EQ(with("{"), "F/model.safetensors.index.json: not valid JSON at byte 1: it ends there");
  EXPECT_EQ(with("[]"), "F/model.safetensors.index.json: not a JSON object");
  EXPECT_EQ(with("{}"), "F/model.safetensors.index.json: weight_map is missing or not an object");
  EXPECT_EQ(with(R"({"weight_map":["a"]})"), "F/model.safetensors.index.json: weight_map is missing or not an object");
  EXPECT_EQ(with(R"({"weight_map":{"a":""}})"),
            "F/model.safetensors.index.json: weight_map of 'a' is '', which leaves the folder");
  EXPECT_EQ(with(R"({"weight_map":{"a":"b\u0000c"}})"),
            "F/model.safetensors.index.json: weight_map of 'a' is 'b\\x00c', which leaves the folder");
  EXPECT_EQ(with(R"({"weight_map":{"a":"part-7.safetensors"}})"),
            "F/part-7.safetensors: cannot be opened: No such file or directory");
  EXPECT_EQ(with(R"({"weight_map":{"a":3}})"), "F/model.safetensors.index.json: weight_map of 'a' is not a string");
  EXPECT_EQ(with(R"({"weight_map":{"a":"../x.safetensors"}})"),
            "F/model.safetensors.index.json: weight_map of 'a' is '../x.safetensors', which leaves the folder");
  EXPECT_EQ(with(R"({"weight_map":{"a":"/etc/passwd"}})"),
            "F/model.safetensors.index.json: weight_map of 'a' is '/etc/passwd', which leaves the folder");
  EXPECT_EQ(with(R"({"weight_map":{"a":"part-0.safetensors"}})"),
            "F/model.safetensors.index.json: tensor 'a' is not in its shard 'part-0.safetensors'");
}

TEST_F(CheckpointFolder, OneFileIsOpenedOnceHoweverItIsSpelled) {
  test::SafetensorsWriter w;
  std::string map, path = "s.safetensors";
  for (const Tensor& t : kTensors)
    for (int layer = 0; layer < 2; ++layer) {
      const std::string prefix = "model.layers." + std::to_string(layer) + ".self_attn.";
      add(w, prefix, t);
      map += (map.empty() ? "\"" : ",\"") + prefix + t.role + "\":\"" + path + "\"";
      path = layer == 0 ? "./" + path : "linked.safetensors";
    }
  w.write(folder_ / "s.safetensors");
  std::filesystem::create_hard_link(folder_ / "s.safetensors", folder_ / "linked.safetensors");
  test::write_file(folder_ / "model.safetensors.index.json", "{\"weight_map\":{" + map + "}}");
  const Checkpoint checkpoint(folder_.path());
  EXPECT_EQ(refusal(folder_.path()), "read");
  // Open files and maps of this process.
  int64_t uses = 0;
  std::error_code gone;
  for (const auto& fd : std::filesystem::directory_iterator("/proc/self/fd"))
    uses += std::filesystem::read_symlink(fd.path(), gone).string().starts_with(folder_.path().string());
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) uses += line.find(folder_.path()) != std::string::npos;
  EXPECT_EQ(uses, 1);
}

// Each stays open, so that an index may not name as many as it likes.
TEST_F(CheckpointFolder, ShardsAreCounted) {
  constexpr int kMost = 4096;
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit open = before;
  open.rlim_cur = std::max<rlim_t>(before.rlim_cur, kMost + 100);
  if (setrlimit(RLIMIT_NOFILE, &open) != 0) GTEST_SKIP() << "fewer than " << kMost << " files may be open";
  std::string map;
  int there = 0;
  const auto with = [&](int shards) {
    for (; there < shards; ++there) {
      const std::string name = std::to_string(there);
      test::SafetensorsWriter w;
      w.add(name, "U8", {0}, std::string_view());
      w.write(folder_ / name);
      map += (map.empty() ? "\"" : ",\"") + name + "\":\"" + name + "\"";
    }
    test::write_file(folder_ / "model.safetensors.index.json", R"({"weight_map":{)" + map + "}}");
    return refusal(folder_.path(), [](const Checkpoint&) {});
  };
  EXPECT_EQ(with(kMost), "read");
  EXPECT_EQ(with(kMost + 1), "F/model.safetensors.index.json: weight_map names more than 4096 files");
  setrlimit(RLIMIT_NOFILE, &before);
}

TEST_F(CheckpointFolder, MissingAndMisshapedTensors) {
  EXPECT_EQ(refusal(folder_.path()), "F: neither model.safetensors nor model.safetensors.index.json is there");
  write_single("", [](auto& t) { t.pop_back(); });
  EXPECT_EQ(refusal(folder_.path()),
            "F: tensor 'model.layers.1.self_attn.o_proj.weight' is missing, expected shape [48, 60]");
  write_single("", [](auto& t) { t.erase(t.begin() + 1); });
  EXPECT_EQ(refusal(folder_.path()),
            "F: tensor 'model.layers.1.self_attn.q_a_layernorm.weight' is missing, expected shape [20]");
  write_single("", [](auto& t) { t[5].shape = {130, 40}; });
  EXPECT_EQ(refusal(folder_.path()),
            "F/model.safetensors: tensor 'model.layers.1.self_attn.kv_b_proj.weight' has shape [130, 40], expected "
            "[132, 40]");
  EXPECT_EQ(refusal(folder_ / "nowhere"), "F: not a folder");
}

TEST_F(CheckpointFolder, WhatIsNotAFile) {
  std::filesystem::create_directory(folder_ / "model.safetensors.index.json");
  EXPECT_EQ(refusal(folder_.path()), "F/model.safetensors.index.json: cannot be read: not a regular file");
  std::filesystem::remove(folder_ / "config.json");
  std::filesystem::create_directory(folder_ / "config.json");
  EXPECT_EQ(refusal(folder_.path()), "F/config.json: cannot be read: not a regular file");
  EXPECT_THROW(Checkpoint(std::string(5000, 'a')), CheckpointError);
}

TEST_F(CheckpointFolder, ManyReadersAtOnce) {
  write_single("");
  const Checkpoint c(folder_.path());
  const std::vector<float> expected = c.layer(0).kv_up.to_f32();
  std::atomic<int> equal{0};
  std::vector<std::thread> readers;
  for (int i = 0; i < 4; ++i)
    readers.emplace_back([&] {
      for (int n = 0; n < 50; ++n) equal += c.layer(n % 2).kv_up.to_f32() == expected;
    });
  for (std::thread& t : readers) t.join();
  EXPECT_EQ(equal, 200);  // both layers hold the same values
}

// What lies under a layer's attention and is read by nothing would change its outputs: a gate, sinks, a bias.
TEST_F(CheckpointFolder, TensorsThatNothingReadsAreNamed) {
  for (const char* role : {"gate_proj.weight", "sinks", "q_a_proj.bias", "indexer.wk.weight", "q_norm.weight",
                           "o_proj.weight_scale", "kv_b_proj.qweight"}) {
    write_single("", [&](auto& t) { t.push_back({role, {3}}); });
    EXPECT_EQ(refusal(folder_.path()), "F/model.safetensors: tensor 'model.layers.1.self_attn." + std::string(role) +
                                           "' is not one that attention of model deepseek_v3 has (allow_unknown goes "
                                           "on past it)");
    EXPECT_NO_THROW(Checkpoint(folder_.path()).layer(0));
    EXPECT_NO_THROW(Checkpoint(folder_.path(), {.allow_unknown = true}).layer(1));
  }
  write_single("", [&](auto& t) { t.push_back({"rotary_emb.inv_freq", {4}}); });
  EXPECT_EQ(refusal(folder_.path()), "read");
}

// A file alone, of which one layer is read whole or some of its heads.
TEST_F(CheckpointFolder, ALayerOfAFile) {
  write_single("", [](auto& t) { t.push_back({"sinks", {3}}); });
  const Safetensors file(folder_ / "model.safetensors");
  const ModelConfig m = read_config(folder_ / "config.json");
  const std::string prefix = "model.layers.0.self_attn.", odd = "model.layers.1.self_attn.";
  EXPECT_EQ(layer_tensors(file, prefix, m, 0).kv_up.shape, (std::vector<int64_t>{132, 40}));
  const LayerTensors one = layer_tensors(file, prefix, m, 0, {}, HeadRange{2, 1});
  EXPECT_EQ(one.kv_up.shape, (std::vector<int64_t>{44, 40}));
  EXPECT_EQ(one.kv_up.to_f32()[0], static_cast<float>(88 * 40 % 17));
  EXPECT_EQ(one.output.shape, (std::vector<int64_t>{48, 20}));
  EXPECT_THROW(layer_tensors(file, prefix, m, 0, {}, HeadRange{2, 2}), Error);
  EXPECT_THROW(layer_tensors(file, odd, m, 1), UnsupportedError);
  EXPECT_EQ(layer_tensors(file, odd, m, 1, {.allow_unknown = true}).kv_up.shape, (std::vector<int64_t>{132, 40}));
}

// Where attentions are: two in each of LongCat's layers, some layers of Kimi Linear's, behind a wrapper's names.
TEST_F(CheckpointFolder, NamesByFamily) {
  const std::string dims = R"("hidden_size":48,"num_attention_heads":3,"q_lora_rank":20,"kv_lora_rank":40,)"
                           R"("qk_nope_head_dim":24,"qk_rope_head_dim":8,"v_head_dim":20,)";
  const auto write = [&](const std::vector<std::string>& prefixes) {
    test::SafetensorsWriter w;
    for (const std::string& prefix : prefixes)
      for (const Tensor& t : kTensors) add(w, prefix, t);
    w.write(folder_ / "model.safetensors");
  };
  test::write_file(folder_ / "config.json", "{" + dims + R"("model_type":"longcat_flash","num_layers":1})");
  write({"model.layers.0.self_attn.0.", "model.layers.0.self_attn.1."});
  const Checkpoint pair(folder_.path());
  EXPECT_EQ(pair.config().layers, 2);
  EXPECT_EQ(pair.layer(0).output.name, "model.layers.0.self_attn.0.o_proj.weight");
  EXPECT_EQ(pair.layer(1).output.name, "model.layers.0.self_attn.1.o_proj.weight");
  EXPECT_EQ(pair.attention_entries(1).size(), kTensors.size());
  EXPECT_THROW(pair.layer(2), InputError);

  test::write_file(folder_ / "config.json",
                   "{" + dims + R"("model_type":"kimi_linear","num_hidden_layers":4,"linear_attn_config":)" +
                       R"({"full_attn_layers":[2,4],"kda_layers":[1,3]}})");
  write({"model.layers.1.self_attn.", "model.layers.3.self_attn."});
  const Checkpoint map(folder_.path());
  EXPECT_EQ(map.config().layers, 2);
  EXPECT_EQ(map.layer(1).output.name, "model.layers.3.self_attn.o_proj.weight");

  test::write_file(folder_ / "config.json",
                   R"({"text_config":{)" + dims + R"("model_type":"kimi_k2","num_hidden_layers":1}})");
  for (const char* above : {"model.language_model.", "language_model.model."}) {
    write({std::string(above) + "layers.0.self_attn."});
    EXPECT_EQ(Checkpoint(folder_.path()).layer(0).output.name, std::string(above) + "layers.0.self_attn.o_proj.weight");
  }
}

// Two layers, the second of which shares the first one's indexer; the query projection in fp8 with block scales.
class IndexerFolder : public testing::Test {
 protected:
  IndexerFolder() {
    std::string config = kConfig;
    config.pop_back();
    config.replace(config.find("deepseek_v3"), 11, "deepseek_v32");
    test::write_file(folder_ / "config.json",
                     config +
                         R"(,"index_n_heads":9,"index_head_dim":16,"index_topk":64,"indexer_types":["full","shared"],)"
                         R"("quantization_config":{"weight_block_size":[128,128]}})");
  }
  void write(
      const std::function<void(std::vector<Tensor>&)>& change = [](auto&) {},
      const std::vector<Tensor>& of_second = {}) {
    test::SafetensorsWriter w;
    for (int layer = 0; layer < 2; ++layer) {
      const std::string prefix = "model.layers." + std::to_string(layer) + ".self_attn.";
      for (const Tensor& t : kTensors) add(w, prefix, t);
      if (layer == 1) {
        for (const Tensor& t : of_second) add(w, prefix, t);
        continue;
      }
      w.add(prefix + "indexer.wq_b.weight", "F8_E4M3", {144, 20}, std::vector<uint8_t>(144 * 20, 0x38));  // 1.0
      w.add(prefix + "indexer.wq_b.weight_scale_inv", "F32", {2, 1}, std::vector<float>{0.5f, 3.0f});
      std::vector<Tensor> tensors{{"indexer.wk.weight", {16, 48}},
                                  {"indexer.k_norm.weight", {16}},
                                  {"indexer.k_norm.bias", {16}},
                                  {"indexer.weights_proj.weight", {9, 48}}};
      change(tensors);
      for (const Tensor& t : tensors) add(w, prefix, t);
    }
    w.write(folder_ / "model.safetensors");
  }
  std::string refusal_of_first() const { return refusal_of(0); }
  std::string refusal_of(int64_t layer) const {
    try {
      Checkpoint(folder_.path()).layer(layer);
    } catch (const Error& e) {
      return std::string(e.what()).substr(folder_.path().string().size());
    }
    return "read";
  }
  test::TempFolder folder_;
};

TEST_F(IndexerFolder, ReadWhereALayerHasItsOwn) {
  write();
  const Checkpoint c(folder_.path());
  const LayerTensors t = c.layer(0);
  ASSERT_TRUE(t.indexer);
  const std::vector<float> query = t.indexer->query.to_f32();
  EXPECT_EQ(query[127 * 20 + 19], 0.5f);
  EXPECT_EQ(query[128 * 20], 3.0f);
  EXPECT_EQ(t.indexer->key.shape, (std::vector<int64_t>{16, 48}));
  EXPECT_EQ(t.indexer->key_norm.to_f32()[3], 3);
  EXPECT_EQ(t.indexer->key_norm_bias.to_f32()[15], 15);
  EXPECT_EQ(t.indexer->head_weights.shape, (std::vector<int64_t>{9, 48}));
  EXPECT_FALSE(c.layer(1).indexer);
  const LayerWeights w = prepare(c.config(), t, Dtype::f32);
  EXPECT_EQ(w.indexer->query->out, 144);
  EXPECT_FALSE(prepare(c.config(), c.layer(1), Dtype::f32).indexer);
}

TEST_F(IndexerFolder, MissingAndMisshapedTensorsAreNamed) {
  write([](auto& t) { t.pop_back(); });
  EXPECT_EQ(refusal_of_first(),
            ": tensor 'model.layers.0.self_attn.indexer.weights_proj.weight' is missing, expected shape [9, 48]");
  write([](auto& t) { t[0].shape = {16, 47}; });
  EXPECT_EQ(refusal_of_first(),
            "/model.safetensors: tensor 'model.layers.0.self_attn.indexer.wk.weight' has shape [16, 47], expected [16, "
            "48]");
  write([](auto& t) { t[2].shape = {15}; });
  EXPECT_EQ(refusal_of_first(),
            "/model.safetensors: tensor 'model.layers.0.self_attn.indexer.k_norm.bias' has shape [15], expected [16]");
}

// An indexer's own tensors, and one that none has.
TEST_F(IndexerFolder, TensorsThatNothingReadsAreNamed) {
  write([](auto& t) { t.push_back({"indexer.gate.weight", {3}}); });
  EXPECT_EQ(refusal_of_first(),
            "/model.safetensors: tensor 'model.layers.0.self_attn.indexer.gate.weight' is not one "
            "that attention of model deepseek_v32 has (allow_unknown goes on past it)");
  // A part that no matrix has, and one that this layer's form has no use for.
  for (const char* role : {"indexer.wk.twist", "indexer.wk.qweight"}) {
    write([&](auto& t) { t.push_back({role, {3}}); });
    EXPECT_EQ(refusal_of_first(), "/model.safetensors: tensor 'model.layers.0.self_attn." + std::string(role) +
                                      "' is not one that attention of model deepseek_v32 has (allow_unknown goes on "
                                      "past it)");
  }
}

TEST_F(IndexerFolder, ALayerThatSharesMayBringTensorsOfAnIndexer) {
  write([](auto&) {}, {{"indexer.wk.weight", {16, 48}}, {"indexer.k_norm.bias", {7}}});
  EXPECT_EQ(refusal_of(1), "read");
  EXPECT_FALSE(Checkpoint(folder_.path()).layer(1).indexer);
  write([](auto&) {}, {{"indexer.gate.weight", {3}}});
  EXPECT_EQ(refusal_of(1),
            "/model.safetensors: tensor 'model.layers.1.self_attn.indexer.gate.weight' is not one that attention of "
            "model deepseek_v32 has (allow_unknown goes on past it)");
}

// Of fp8 tensors: blocks of 128 unless the config says otherwise, scales that are there and are floats, matrices alone.
TEST_F(CheckpointFolder, BlockScalesAreAskedFor) {
  const std::string prefix = "model.layers.0.self_attn.";
  const auto write = [&](const std::string& fp8, const std::function<void(test::SafetensorsWriter&)>& scales) {
    test::SafetensorsWriter w;
    for (const Tensor& t : kTensors) {
      int64_t n = 1;
      for (int64_t e : t.shape) n *= e;
      if (t.role == fp8) w.add(prefix + t.role, "F8_E4M3", t.shape, std::vector<uint8_t>(n, 0x38));  // 1.0
      else add(w, prefix, t);
    }
    scales(w);
    w.write(folder_ / "model.safetensors");
  };
  const auto refused = [&] {
    const std::string why = refusal(folder_.path(), [](const Checkpoint& c) { c.layer(0); });
    EXPECT_EQ(refusal(folder_.path(), [](const Checkpoint& c) { c.check(0); }), why);
    return why;
  };
  write("kv_b_proj.weight", [&](auto& w) {
    w.add(prefix + "kv_b_proj.weight_scale_inv", "F32", {2, 1}, std::vector<float>{0.5f, 2});
  });
  EXPECT_EQ(refused(), "read");
  EXPECT_EQ(Checkpoint(folder_.path()).layer(0).kv_up.to_f32()[131 * 40], 2);
  write("kv_b_proj.weight", [](auto&) {});
  EXPECT_EQ(refused(),
            "F: tensor 'model.layers.0.self_attn.kv_b_proj.weight_scale_inv' is missing, expected shape "
            "[2, 1] for the fp8 weight");
  write("kv_b_proj.weight", [&](auto& w) {
    w.add(prefix + "kv_b_proj.weight_scale_inv", "F8_E4M3", {2, 1}, std::vector<uint8_t>{0x38, 0x38});
  });
  EXPECT_EQ(refused(),
            "F/model.safetensors: tensor 'model.layers.0.self_attn.kv_b_proj.weight_scale_inv' is fp8, a "
            "float is needed");
  write("kv_a_layernorm.weight", [](auto&) {});
  EXPECT_EQ(refused(),
            "F: tensor 'model.layers.0.self_attn.kv_a_layernorm.weight' is fp8 with shape [40], only "
            "matrices may be");
  const Safetensors file(folder_ / "model.safetensors");
  const ModelConfig model = read_config(folder_ / "config.json");
  EXPECT_THROW(layer_tensors(file, prefix, model, 0), CheckpointError);
  EXPECT_THROW(layer_tensors(file, "model.", model, 0), UnsupportedError);
  EXPECT_THROW(layer_tensors(file, "model.", model, 0, {.allow_unknown = true}), CheckpointError);
}

// Scales of an fp8 cache that come with a model, under the names of those who write them.
TEST_F(CheckpointFolder, ScalesOfQueriesKeysAndValues) {
  using List = std::vector<float>;
  const std::string prefix = "model.layers.1.self_attn.";
  const auto write = [&](const std::function<void(test::SafetensorsWriter&)>& scales) {
    test::SafetensorsWriter w;
    for (int layer = 0; layer < 2; ++layer)
      for (const Tensor& t : kTensors) add(w, "model.layers." + std::to_string(layer) + ".self_attn.", t);
    scales(w);
    w.write(folder_ / "model.safetensors");
  };
  const auto read = [&] {
    const Checkpoint c(folder_.path());
    const StoredScales alone = c.scales(1), with_weights = c.layer(1).scales;
    EXPECT_EQ(alone.q, with_weights.q);
    EXPECT_EQ(alone.k, with_weights.k);
    EXPECT_EQ(alone.v, with_weights.v);
    return alone;
  };
  write([](auto&) {});
  EXPECT_TRUE(read().q.empty() && read().k.empty() && read().v.empty());
  EXPECT_FALSE(latent_k_scale(read()));
  EXPECT_THROW(Checkpoint(folder_.path()).scales(2), InputError);
  struct Names {
    const char *q, *k, *v;
  };
  for (const Names& n : {Names{"q_scale", "k_scale", "v_scale"},
                         {"q_proj.q_scale", "k_proj.k_scale", "v_proj.v_scale"},
                         {"q_proj.output_scale", "k_proj.output_scale", "v_proj.output_scale"},
                         {"attn.q_scale", "attn.k_scale", "attn.v_scale"},
                         {"mla_attn.q_scale", "mla_attn.k_scale", "mla_attn.v_scale"},
                         {"attn_mqa.q_scale", "kv_a_proj_with_mqa.k_scale", "kv_a_proj_with_mqa.v_scale"},
                         {"mla_attn.mla_attn.q_scale", "mla_attn.mla_attn.k_scale", "attn_mqa.v_scale"}}) {
    write([&](auto& w) {
      w.add(prefix + n.q, "F32", {}, List{0.5f});
      w.add(prefix + n.k, "F32", {1}, List{0.25f});
      w.add(prefix + n.v, "BF16", {3, 1, 1}, std::vector<bf16>{to_bf16(1), to_bf16(2), to_bf16(3)});
      w.add(prefix + "attn.prob_scale", "F32", {}, List{7});
    });
    const StoredScales s = read();
    EXPECT_EQ(s.q, List{0.5f}) << n.q;
    EXPECT_EQ(s.k, List{0.25f}) << n.k;
    EXPECT_EQ(s.v, (List{1, 2, 3})) << n.v;
    EXPECT_EQ(latent_k_scale(s), 0.25f);
  }
  write([&](auto& w) {
    w.add(prefix + "kv_scale", "F32", {}, List{0.125f});
    w.add(prefix + "v_scale", "F32", {}, List{3});
  });
  EXPECT_EQ(read().k, List{0.125f});
  EXPECT_EQ(read().v, List{3});

  const std::string tensor = "F/model.safetensors: tensor '" + prefix;
  write([&](auto& w) { w.add(prefix + "k_scale", "F32", {2}, List{1, 1}); });
  EXPECT_EQ(refusal(folder_.path()),
            tensor + "k_scale' has shape [2], expected one element or one for each of 3 heads");
  write([&](auto& w) { w.add(prefix + "k_scale", "I32", {}, List{1}); });
  EXPECT_EQ(refusal(folder_.path()), tensor + "k_scale': dtype I32 is not one of F32 BF16 F16 F8_E4M3");
  write([&](auto& w) { w.add(prefix + "k_scale", "F8_E4M3", {}, std::vector<uint8_t>{0x38}); });
  EXPECT_EQ(refusal(folder_.path()), tensor + "k_scale' is fp8, a float is needed");
  write([&](auto& w) {
    w.add(prefix + "k_scale", "F32", {}, List{1});
    w.add(prefix + "k_proj.k_scale", "F32", {}, List{1});
  });
  EXPECT_EQ(refusal(folder_.path()), tensor + "k_proj.k_scale' is there beside '" + prefix + "k_scale': one is needed");
  for (const auto& [number, text] :
       {std::pair(0.0f, "0.000000"), {-1.0f, "-1.000000"}, {NAN, "nan"}, {INFINITY, "inf"}}) {
    write([&, x = number](auto& w) { w.add(prefix + "v_scale", "F32", {3}, List{1, x, 1}); });
    EXPECT_EQ(refusal(folder_.path(), [](const Checkpoint& c) { c.layer(1); }),
              tensor + "v_scale' is " + text + " at element 1, scales must be finite and above 0");
  }
  // What a projection gave before its norm is not what the cache holds.
  write([&](auto& w) { w.add(prefix + "kv_a_proj_with_mqa.output_scale", "F32", {}, List{1}); });
  EXPECT_EQ(refusal(folder_.path()), tensor +
                                         "kv_a_proj_with_mqa.output_scale' is not one that attention of model "
                                         "deepseek_v3 has (allow_unknown goes on past it)");
  EXPECT_EQ(latent_k_scale({.q = {}, .k = {2, 2, 2}, .v = {}}), 2.0f);
  EXPECT_THROW(latent_k_scale({.q = {}, .k = {2, 2, 3}, .v = {}}), UnsupportedError);
}

// 5 x 3 blocks of a 576 x 260 weight: the last row and column of blocks are partial.
TEST(BlockScales, PartialEdges) {
  test::TempFolder folder;
  test::write_file(
      folder / "config.json",
      R"({"model_type":"deepseek_v3","hidden_size":260,"num_hidden_layers":1,"num_attention_heads":1,"kv_lora_rank":512,)"
      R"("qk_nope_head_dim":8,"qk_rope_head_dim":64,"v_head_dim":8,"q_lora_rank":null,"quantization_config":{"weight_block_size":[128,128]}})");
  const std::string prefix = "model.layers.0.self_attn.";
  auto file = [&](std::vector<int64_t> scale_shape) {
    test::SafetensorsWriter w;
    add(w, prefix, {"q_proj.weight", {72, 260}});
    w.add(prefix + "kv_a_proj_with_mqa.weight", "F8_E4M3", {576, 260}, std::vector<uint8_t>(576 * 260, 0x38));  // 1.0
    std::vector<float> scales;
    for (int64_t i = 0; i < scale_shape[0] * scale_shape[1]; ++i) scales.push_back(0.3f + static_cast<float>(i));
    w.add(prefix + "kv_a_proj_with_mqa.weight_scale_inv", "F32", scale_shape, scales);
    add(w, prefix, {"kv_a_layernorm.weight", {512}});
    add(w, prefix, {"kv_b_proj.weight", {16, 512}});
    add(w, prefix, {"o_proj.weight", {260, 8}});
    w.write(folder / "model.safetensors");
  };
  file({5, 3});
  const std::vector<float> w = Checkpoint(folder.path()).layer(0).kv_down.to_f32();
  for (int64_t r : {0, 127, 128, 511, 512, 575})
    for (int64_t c : {0, 127, 128, 255, 256, 259})
      EXPECT_EQ(w[r * 260 + c], 0.3f + static_cast<float>(r / 128 * 3 + c / 128)) << r << " " << c;
  file({4, 3});
  try {
    Checkpoint(folder.path()).layer(0);
    FAIL();
  } catch (const CheckpointError& e) {
    EXPECT_NE(std::string(e.what()).find("weight_scale_inv' has shape [4, 3], expected [5, 3]"), std::string::npos)
        << e.what();
  }
}

}  // namespace
}  // namespace mla
