#include "serve/kv_scales.hpp"

#include <algorithm>
#include <cmath>
#include <string>
#include <unordered_set>

#include "mla/quant_scales.hpp"
#include "model/json.hpp"
#include "model/quantised/cache_scales.hpp"
#include "model/text.hpp"
#include "serve/hidden.hpp"

namespace mla::serve {
namespace {

constexpr int64_t kRows = 256;

// One for all layers, or one for each.
std::vector<float> spread(const std::string& where, std::vector<float> x, int64_t layers) {
  if (x.size() != 1 && static_cast<int64_t>(x.size()) != layers)
    throw InputError(where + ": k_scale has " + std::to_string(x.size()) + " elements, 1 or one for each of " +
                     std::to_string(layers) + " layers is needed");
  for (size_t i = 0; i < x.size(); ++i)
    if (!(x[i] > 0) || !std::isfinite(x[i]))
      throw InputError(where + ": k_scale is " + std::to_string(x[i]) + " at element " + std::to_string(i) +
                       ", scales must be finite and above 0");
  if (x.size() == 1) x.resize(static_cast<size_t>(layers), x[0]);
  return x;
}

std::vector<float> from_json(const std::filesystem::path& file, int64_t layers) {
  const std::string where = file.string();
  const JsonDocument document = parse_object(read_text(file), where);
  require_keys(document.root, {"k_scale", "v_scale"}, where);  // a latent's row has the keys' scale alone
  const auto found = document.root.find("k_scale");
  if (found == document.root.end()) throw InputError(where + ": k_scale is missing");
  const nlohmann::json list = found->is_array() ? *found : nlohmann::json::array({*found});
  std::vector<float> x;
  for (const nlohmann::json& e : list) {
    if (!e.is_number()) throw InputError(where + ": k_scale holds " + e.dump() + ", a number is needed");
    x.push_back(e.get<float>());
  }
  return spread(where, std::move(x), layers);
}

std::vector<float> from_tensors(const std::filesystem::path& path, const ModelConfig& m, int64_t layers) {
  const Safetensors file(path);
  if (file.find("k_scale")) return spread(path.string(), file.tensor("k_scale").to_f32(), layers);
  const FindTensor find = [&](const std::string& name) { return file.find(name) ? &file : nullptr; };
  std::unordered_set<std::string> used;
  std::vector<float> x;
  for (int64_t l = 0; l < layers; ++l) {
    std::optional<float> scale;
    for (const char* above : {"model.", "language_model.model.", "model.language_model.", ""})
      if (!scale) scale = latent_k_scale(read_cache_scales(find, above + m.attention_name(l), m.heads, true, used));
    if (!scale)
      throw InputError(path.string() + ": neither k_scale nor a scale of layer " + std::to_string(l) + " ('model." +
                       m.attention_name(l) + "k_scale' or the like) is there");
    x.push_back(*scale);
  }
  return x;
}

}  // namespace

std::vector<float> checkpoint_k_scales(const Checkpoint& checkpoint, int64_t layers) {
  std::vector<float> x;
  for (int64_t l = 0; l < layers; ++l) x.push_back(latent_k_scale(checkpoint.scales(l)).value_or(0.0f));
  return x;
}

std::vector<float> read_k_scales(const std::filesystem::path& file, const ModelConfig& m, int64_t layers) {
  return file.extension() == ".safetensors" ? from_tensors(file, m, layers) : from_json(file, layers);
}

std::vector<float> first_hidden(const Trace& trace, const Options& o) {
  const size_t width = static_cast<size_t>(o.model.hidden);
  std::vector<float> x;
  for (size_t i = 0; i < trace.requests.size(); ++i)
    for (int64_t p = 0; p < trace.requests[i].input && x.size() < kRows * width; ++p) {
      x.resize(x.size() + width);
      hidden_row(o.seed, token_key(trace, static_cast<int64_t>(i), p), p, std::span(x).last(width));
    }
  return x;
}

int64_t saturated_codes(std::span<const std::byte> codes) {
  return std::count_if(codes.begin(), codes.end(),
                       [](std::byte code) { return (code & std::byte{0x7f}) == std::byte{0x7e}; });
}

}  // namespace mla::serve
