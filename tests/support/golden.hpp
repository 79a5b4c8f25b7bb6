// Golden files: an attention module's weights, inputs and outputs, computed elsewhere (see tests/data/README.md).
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "mla/weights.hpp"

namespace mla::test {

struct Golden {
  std::string name;
  ModelConfig config;
  LayerTensors tensors;
  int64_t length =
      0;  ///< rows to check: up to the indexer's top-k where there is one, since those see the whole context
  std::vector<float> hidden, kv_c_normed, output;  ///< [length, ...]
  std::vector<int32_t> topk;                       ///< [length, topk]: of a model with an indexer
};

/// $MLA_GOLDEN_DIR, or the folder in the source tree.
inline std::filesystem::path golden_folder() {
  const char* set = std::getenv("MLA_GOLDEN_DIR");
  return set ? set : MLA_GOLDEN_DEFAULT;
}

inline std::vector<std::filesystem::path> golden_files() {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(golden_folder()))
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  if (files.empty()) throw std::runtime_error("no golden files in " + golden_folder().string());
  return files;
}

/// `whole`: all rows of a model with an indexer too.
inline Golden read_golden(const std::filesystem::path& path, bool whole = false) {
  const Safetensors file(path);
  const std::string* config = file.metadata("config");
  if (!config) throw std::runtime_error(path.string() + " has no config");
  Golden g{.name = path.stem().string(),
           .config = parse_config(*config, path.string()),
           .tensors = {},
           .hidden = {},
           .kv_c_normed = {},
           .output = {},
           .topk = {}};
  g.tensors = layer_tensors(file, "weights.", g.config);
  g.hidden = file.tensor("hidden_states").to_f32();
  g.kv_c_normed = file.tensor("kv_c_normed").to_f32();
  g.output = file.tensor("output").to_f32();
  g.length = static_cast<int64_t>(g.hidden.size()) / g.config.hidden;
  if (const SafetensorsEntry* e = file.find("topk_indices")) {
    g.topk.resize(file.bytes(*e).size() / sizeof(int32_t));
    std::memcpy(g.topk.data(), file.bytes(*e).data(), file.bytes(*e).size());
  }
  if (g.config.indexer && !whole) g.length = std::min(g.length, g.config.indexer->topk);
  g.hidden.resize(g.length * g.config.hidden);
  g.kv_c_normed.resize(g.length * g.config.latent);
  g.output.resize(g.length * g.config.hidden);
  return g;
}

}  // namespace mla::test
