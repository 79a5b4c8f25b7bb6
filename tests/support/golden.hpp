// Golden files: an attention module's weights, inputs and outputs, computed elsewhere (see tests/data/README.md).
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <ostream>
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
/// Of further families: the folder beside it whose name ends in 2.
inline std::filesystem::path golden2_folder() { return golden_folder().string() + "2"; }

/// One attention of a file; most have one, under plain names.
struct GoldenCase {
  std::filesystem::path path;
  int64_t attention = -1;  ///< of several: their names have its number

  std::string name() const { return path.stem().string() + (attention < 0 ? "" : "_" + std::to_string(attention)); }
  bool operator<(const GoldenCase& o) const { return name() < o.name(); }
};

/// For GoogleTest: its name in place of its bytes.
inline void PrintTo(const GoldenCase& c, std::ostream* out) { *out << c.name(); }

inline std::vector<GoldenCase> golden_cases() {
  std::vector<GoldenCase> cases;
  for (const std::filesystem::path& folder : {golden_folder(), golden2_folder()}) {
    if (!std::filesystem::is_directory(folder)) continue;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      if (entry.path().extension() != ".safetensors") continue;
      const Safetensors file(entry.path());
      if (file.find("output")) cases.push_back({entry.path()});
      for (int64_t i = 0; file.find("output." + std::to_string(i)); ++i) cases.push_back({entry.path(), i});
    }
  }
  std::sort(cases.begin(), cases.end());
  if (cases.empty()) throw std::runtime_error("no golden files in " + golden_folder().string());
  return cases;
}

/// `whole`: all rows of a model with an indexer too.
inline Golden read_golden(const GoldenCase& which, bool whole = false) {
  const std::filesystem::path& path = which.path;
  const std::string number = which.attention < 0 ? "" : "." + std::to_string(which.attention);
  const Safetensors file(path);
  const std::string* config = file.metadata("config");
  if (!config) throw std::runtime_error(path.string() + " has no config");
  Golden g{.name = which.name(),
           .config = parse_config(*config, path.string()),
           .tensors = {},
           .hidden = {},
           .kv_c_normed = {},
           .output = {},
           .topk = {}};
  g.tensors = layer_tensors(file, "weights" + number + ".", g.config, std::max<int64_t>(which.attention, 0));
  g.hidden = file.tensor("hidden_states").to_f32();
  g.kv_c_normed = file.tensor("kv_c_normed" + number).to_f32();
  g.output = file.tensor("output" + number).to_f32();
  g.length = static_cast<int64_t>(g.hidden.size()) / g.config.hidden;
  // The files' code decides by the longest sequence that it sees, which is the file's.
  g.config.rotary.max_position = g.length;
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
