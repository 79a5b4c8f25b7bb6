// The index of a checkpoint's shards, beside a config and two shards that are good: refused, or every tensor that it
// names is found in a file of the folder, and layers are read from there or refused.
#include <stdlib.h>

#include <filesystem>
#include <string>

#include "fuzz/fuzz.hpp"
#include "fuzz/memory_file.hpp"
#include "mla/weights.hpp"
#include "support/safetensors_writer.hpp"

using namespace mla;

namespace {

constexpr const char* kConfig =
    R"({"model_type":"deepseek_v3","hidden_size":8,"num_hidden_layers":2,"num_attention_heads":2,"kv_lora_rank":4,)"
    R"("qk_nope_head_dim":4,"qk_rope_head_dim":2,"v_head_dim":4})";

// In memory where the system has such a folder.
bool in_memory() { return access("/dev/shm", W_OK) == 0 && setenv("TMPDIR", "/dev/shm", 0) == 0; }

struct Folder {
  bool memory = in_memory();
  test::TempFolder folder;
  fuzz::MemoryFile index{folder / "model.safetensors.index.json"};
  std::string root = std::filesystem::canonical(folder.path()).string() + "/";
  Folder() {
    test::write_file(folder / "config.json", kConfig);
    std::filesystem::create_directory(folder / "d");
    const std::pair<const char*, std::vector<int64_t>> tensors[] = {{"q_proj.weight", {12, 8}},
                                                                    {"kv_a_proj_with_mqa.weight", {6, 8}},
                                                                    {"kv_a_layernorm.weight", {4}},
                                                                    {"kv_b_proj.weight", {16, 4}},
                                                                    {"o_proj.weight", {8, 8}}};
    for (int layer = 0; layer < 2; ++layer) {
      test::SafetensorsWriter w;
      for (const auto& [role, shape] : tensors)
        w.add("model.layers." + std::to_string(layer) + ".self_attn." + role, "F32", shape,
              std::vector<float>(static_cast<size_t>(shape[0] * (shape.size() > 1 ? shape[1] : 1)), 0.5f));
      w.write(layer == 0 ? folder / "a.safetensors" : folder / "d/b.safetensors");
    }
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Folder* const files = new Folder;  // left behind by a fuzzer that is killed, whatever is done here
  static const bool cleaned = std::atexit([] { delete files; }) == 0;
  FUZZ_CHECK(cleaned);
  files->index.write(data, size);
  fuzz::refused([&] {
    const Checkpoint c(files->root);
    FUZZ_CHECK(c.config().layers == 2);
    for (int64_t layer = 0; layer < 2; ++layer) {
      for (const SafetensorsEntry& e : c.attention_entries(layer)) FUZZ_CHECK(!e.name.empty());
      fuzz::refused([&] {
        const LayerTensors t = c.layer(layer);
        FUZZ_CHECK(t.query.shape == (std::vector<int64_t>{12, 8}) && t.query.to_f32()[95] == 0.5f);
        FUZZ_CHECK(t.kv_up.shape == (std::vector<int64_t>{16, 4}) && t.kv_up.to_f32()[63] == 0.5f);
        const std::string file = c.file_of(t.output.name).lexically_normal().string();  // no link is in the folder
        FUZZ_CHECK(file.starts_with(files->root) && file.ends_with(".safetensors"));
      });
    }
    FUZZ_CHECK(fuzz::refused([&] { c.layer(2); }));
  });
  return 0;
}
