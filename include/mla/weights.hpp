// A layer's attention weights: from a checkpoint or random, as stored, and prepared for a device.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mla/device.hpp"
#include "mla/dtype.hpp"
#include "mla/model.hpp"
#include "mla/view.hpp"

namespace mla {

/// A matrix [out, in] as a quantised checkpoint stores it: packed codes, scales, zero points.
class QuantisedMatrix {
 public:
  virtual ~QuantisedMatrix() = default;
  /// The values that the format defines, of rows [row, row + rows) and columns [col, col + cols), into out [rows,
  /// cols]: exact in float64, or where the format divides, so close that rounding them is rounding the exact ones.
  virtual void decode(int64_t row, int64_t rows, int64_t col, int64_t cols, double* out) const = 0;
};

/// A tensor in host memory, which `owner` keeps alive, or the caller where it is null.
struct HostTensor {
  std::string name;
  Dtype dtype = Dtype::f32;
  std::vector<int64_t> shape;
  const std::byte* data = nullptr;
  std::shared_ptr<const void> owner;
  /// Scales of an fp8 weight, [ceil(rows / block_rows), ceil(cols / block_cols)]: w = fp8 * scale[r / block_rows][c /
  /// block_cols]; empty otherwise.
  std::vector<float> block_scales;
  int64_t block_rows = 0, block_cols = 0;
  /// Where the values are when a checkpoint stores another form than those above: the matrix from this row and column
  /// on. data then only says that the tensor is there, and dtype nothing.
  std::shared_ptr<const QuantisedMatrix> quantised;
  int64_t first_row = 0, first_col = 0;
  /// The form of a quantised tensor in words, for display; empty: plain.
  std::string format;

  explicit operator bool() const { return data != nullptr; }
  int64_t size() const;
  /// Values as f32, each rounded once to `rounded`: f32 or bf16. UnsupportedError for another.
  std::vector<float> to_f32(Dtype rounded = Dtype::f32) const;
};

/// The sparse indexer's tensors; linear maps are [out, in] row-major.
struct IndexerTensors {
  HostTensor query;          ///< indexer.wq_b [Ni*Di, Lq]
  HostTensor key;            ///< indexer.wk [Di, H]
  HostTensor key_norm;       ///< indexer.k_norm.weight [Di]
  HostTensor key_norm_bias;  ///< indexer.k_norm.bias [Di]
  HostTensor head_weights;   ///< indexer.weights_proj [Ni, H]
};

/// Static scales that a checkpoint has for fp8 queries, keys and values: a value is its code times its scale. Each has
/// one element, or one for each head, or none where the checkpoint has no such scale.
struct StoredScales {
  std::vector<float> q, k, v;
};

/// One layer's tensors by role, as a checkpoint stores them: linear maps are [out, in] row-major.
struct LayerTensors {
  HostTensor query;                       ///< q_proj [N*(P+R), H], or q_b_proj [N*(P+R), Lq] with a query latent
  HostTensor query_down;                  ///< q_a_proj [Lq, H]; empty without a query latent
  HostTensor query_norm;                  ///< q_a_layernorm [Lq]; empty without a query latent
  HostTensor kv_down;                     ///< kv_a_proj_with_mqa [L+R, H]
  HostTensor kv_norm;                     ///< kv_a_layernorm [L]
  HostTensor kv_up;                       ///< kv_b_proj [N*(P+V), L]: per head, P rows of W_UK then V rows of W_UV
  HostTensor output;                      ///< o_proj [H, N*V]
  std::optional<IndexerTensors> indexer;  ///< of a layer that has its own
  StoredScales scales;
  /// Of ranks that share a cache and send each other heads (ContextExchange::heads): kv_up of each member of the group,
  /// member 0's first; else empty.
  std::vector<HostTensor> group_kv_up;
};

/// A tensor of a safetensors file: where it lies and what it is. dtype is the file's own name ("BF16", "F8_E4M3",
/// "I32", ...).
struct SafetensorsEntry {
  std::string name, dtype;
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;  ///< bytes from the start of the data section
};

/// A rectangle of a tensor's bytes: of its rows, which have row_bytes each, those from `row` on, `rows` of them, and of
/// each of these the bytes from `first` on, `size` of them.
struct ByteRows {
  uint64_t row_bytes = 0, row = 0, rows = 0, first = 0, size = 0;
};

/// One safetensors file, open while the object lives. The parser is strict: see docs/numerics.md, "Checkpoints".
class Safetensors {
 public:
  /// CheckpointError naming file, tensor and reason for anything malformed.
  explicit Safetensors(const std::filesystem::path& file);
  const std::filesystem::path& file() const;
  std::span<const SafetensorsEntry> entries() const;  ///< in file order
  const SafetensorsEntry* find(std::string_view name) const;
  /// Value of a `__metadata__` key, or nullptr.
  const std::string* metadata(std::string_view key) const;
  /// A tensor, read now; CheckpointError when the file no longer holds all of it.
  Buffer bytes(const SafetensorsEntry& entry) const;
  /// The rectangle's rows one behind another; nothing beside it is asked of the file. InputError naming the tensor for
  /// rows that it is not made of, or bytes outside it.
  Buffer bytes(const SafetensorsEntry& entry, const ByteRows& part) const;
  /// Bytes of tensors that the file has given so far, to all copies of this object and all threads; without its header.
  uint64_t bytes_read() const;
  /// The same for a float tensor (F32, BF16, F16, F8_E4M3); CheckpointError also for another dtype or no such tensor.
  HostTensor tensor(std::string_view name) const;
  /// tensor() without its data.
  HostTensor outline(std::string_view name) const;

 private:
  struct File;
  std::shared_ptr<const File> file_;
};

/// A Hugging Face checkpoint folder: config.json with model.safetensors or model.safetensors.index.json and its shards.
class Checkpoint {
 public:
  /// Path of the folder. CheckpointError for anything missing or malformed; a weight_map path that leaves the folder is
  /// refused. UnsupportedError as parse_config().
  explicit Checkpoint(const std::filesystem::path& folder, const ReadOptions& options = {});
  const ModelConfig& config() const;
  /// Tensors of attention `index`, checked against the config's shapes: under `model.`, `language_model.model.` or
  /// `model.language_model.`, then ModelConfig::attention_name(). UnsupportedError naming a tensor there that nothing
  /// reads (a bias, a gate, sinks, an indexer of a model without one, scales beside a plain weight), unless ReadOptions
  /// allows it. Matrices may be stored in any form that docs/models.md lists: HostTensor::format says which.
  LayerTensors layer(int64_t index) const;
  /// What part_of(config(), layer(index), heads) gives (mla/parallel.hpp), bit for bit, from fewer bytes. Of the
  /// query's and kv_up's rows and of output's columns it reads those of these heads, with their scales and zero points;
  /// all of what heads share. What is stored for several rows or columns at once (a word, a block's scale, a group's)
  /// is read where one of them is these heads'. Holds no more than the part. A number that is refused, such as a scale
  /// that is not finite, is noticed where it is read. InputError unless the heads are one at least and all the model's.
  /// group: heads of each member of the rank's group, for group_kv_up.
  LayerTensors layer(int64_t index, HeadRange heads, std::span<const HeadRange> group = {}) const;
  /// The scales that come with a layer, under vLLM's, SGLang's, ModelOpt's, compressed-tensors' and Quark's names.
  /// CheckpointError naming a tensor of the wrong dtype or size, or whose number is not finite and above 0.
  StoredScales scales(int64_t index) const;
  /// What layer() gives without data: names, shapes and formats.
  LayerTensors outline(int64_t index) const;
  /// Throws what layer() would but for reading: no tensor's data is touched.
  void check(int64_t index) const;
  /// All attention tensors of a layer as found: for display.
  std::vector<SafetensorsEntry> attention_entries(int64_t index) const;
  /// The file that holds a tensor; empty when there is none.
  std::filesystem::path file_of(const std::string& tensor) const;
  /// Bytes of tensors that were read so far, by all copies of this object and all threads. Files' headers are not among
  /// them, and neither is what the system reads beside what it is asked for: whole pages, and ahead.
  uint64_t bytes_read() const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

/// Picks a layer's tensors out of one safetensors file under a prefix (for instance "weights."), checked against the
/// config. `layer` says whether an indexer's are among them. `heads`: their part alone is read. Errors as of
/// Checkpoint::layer().
LayerTensors layer_tensors(const Safetensors& file, std::string_view prefix, const ModelConfig& config,
                           int64_t layer = 0, const ReadOptions& options = {}, std::optional<HeadRange> heads = {});

/// Weights of the right shapes and a trained model's scale (normal, std 1/sqrt(in)), a pure function of (config, layer,
/// seed), stored in dtype.
LayerTensors random_layer(const ModelConfig& config, int64_t layer, uint64_t seed, Dtype dtype);

/// How a matrix's elements are held.
enum class WeightFormat : uint8_t {
  plain,  ///< in the dtype that products take
  fp8,    ///< e4m3 codes and f32 scales, one for the tensor or one a block
  mxfp4,  ///< e2m1 codes, two a byte, and a power-of-two scale for each 32 along the reduction (OCP MX 1.0)
};
std::string_view to_string(WeightFormat f);
/// InputError listing the names when there is no such format.
WeightFormat parse_weight_format(std::string_view name);
/// Bytes of heads matrices [out, in] in a format, scales included; block_rows 0: one fp8 scale for the tensor.
double weight_bytes(WeightFormat format, Dtype dtype, int64_t heads, int64_t out, int64_t in, int64_t block_rows = 0,
                    int64_t block_cols = 0);

/// y = x W^T for one matrix or one per head, in the backend's own layout. Made by prepare().
class Linear {
 public:
  virtual ~Linear() = default;
  /// Of LayerWeights::place().
  virtual void place(ThreadPool&) const {}
  int64_t heads = 1;  ///< matrices in the batch
  int64_t in = 0, out = 0;
  Dtype dtype = Dtype::f32;  ///< of the product's operands: x and the (dequantised) weights are rounded to it
  WeightFormat format = WeightFormat::plain;
  int64_t block_rows = 0, block_cols = 0;  ///< fp8: outputs and inputs that share a scale; 0: one for the tensor
  size_t bytes = 0;                        ///< memory held
};

/// What products with fp8 weights take their inputs as.
enum class Activations : uint8_t {
  plain,    ///< rounded to the products' dtype, as the weights' values are
  fp8_128,  ///< e4m3 codes with an f32 scale, max(amax, 1e-10) / 448, for each row and 128 inputs (mla/quant.hpp)
};
std::string_view to_string(Activations a);
/// InputError listing the names when there are no such activations.
Activations parse_activations(std::string_view name);

/// Where W_UK and W_UV go on the latent path.
enum class Absorption : uint8_t {
  runtime,   ///< each step multiplies queries by W_UK^T and outputs by W_UV; both paths are served
  full,      ///< W_Q W_UK^T and W_UV W_O are multiplied out once; only the latent path is served
  full_fp8,  ///< full, both products held as fp8: a scale for each block of the checkpoint's size, else for the tensor
};
std::string_view to_string(Absorption a);
/// InputError listing the names when there is no such absorption.
Absorption parse_absorption(std::string_view name);

struct PrepareOptions {
  Dtype dtype = Dtype::f32;  ///< of products: f32 or bf16
  Absorption absorption = Absorption::runtime;
  /// W_UK^T and W_UV of the latent path under runtime absorption; fp8 takes one scale for each of the two. Other than
  /// plain with full absorption: UnsupportedError.
  WeightFormat up = WeightFormat::plain;
  /// Down projections, and under runtime absorption the query's, W_O and the expanded path's kv_up: plain, or fp8 with
  /// a scale for each block, of the checkpoint's size or else 128 x 128. Tensors that are stored so keep their codes
  /// and scales. The indexer's maps stay plain. mxfp4: UnsupportedError.
  WeightFormat products = WeightFormat::plain;
};

/// A vector of weights on a device.
class WeightVector {
 public:
  WeightVector() = default;
  WeightVector(std::span<const float> values, Device device)
      : memory_(std::make_shared<Buffer>(Buffer::copy_of(values.data(), values.size_bytes(), device))) {}
  std::span<const float> values() const {
    return memory_ ? std::span<const float>(memory_->as<float>(), memory_->size() / sizeof(float))
                   : std::span<const float>();
  }

 private:
  std::shared_ptr<const Buffer> memory_;
};

/// The sparse indexer's weights (DeepSeek V3.2, GLM-5).
struct IndexerWeights {
  std::shared_ptr<const Linear> query;         ///< query latent -> Ni*Di
  std::shared_ptr<const Linear> key;           ///< hidden -> Di
  std::shared_ptr<const Linear> head_weights;  ///< hidden -> Ni
  WeightVector key_norm, key_norm_bias;        ///< LayerNorm of keys [Di], eps 1e-6
};

/// Scales of the expanded path's e4m3 operands, on a device: a value is its code times its scale. One a head; without
/// elements: 1. Rotated keys are all heads' and have one scale, k_rope; a head's rotated queries make up for what its
/// keys' scale is beside that: q_rope k_rope = q k.
struct PrefillScales {
  WeightVector q, q_rope, k, k_rope, v;
};

/// What the paths need, on a device.
struct LayerWeights {
  ModelConfig config;
  Device device;
  Dtype dtype = Dtype::f32;  ///< bf16: activations round to bf16 before each product; sums are f32
  Absorption absorption = Absorption::runtime;
  std::shared_ptr<const Linear> query_down;  ///< hidden -> query latent; null without one
  std::shared_ptr<const Linear> kv_down;     ///< hidden -> L+R
  WeightVector query_norm, kv_norm;
  std::optional<IndexerWeights> indexer;  ///< of a layer that has its own
  PrefillScales prefill;                  ///< of LayerTensors::scales
  /// Of their queries, where all heads have the same: that of fp8 latent queries, if PlanOptions::q_scale is 0; 0:
  /// there is none.
  float query_scale = 0;

  // Runtime absorption; null otherwise.
  std::shared_ptr<const Linear> query;       ///< query latent (or hidden) -> N*(P+R)
  std::shared_ptr<const Linear> kv_up;       ///< latent -> N*(P+V): the expanded path's keys and values in one product
  std::shared_ptr<const Linear> absorb_key;  ///< per head nope -> latent: W_UK^T; of the group's with group_kv_up
  std::shared_ptr<const Linear> value_up;    ///< per head latent -> value: W_UV; likewise
  std::shared_ptr<const Linear> output;      ///< N*V -> hidden

  // Full absorption; null otherwise.
  std::shared_ptr<const Linear> absorbed_query;   ///< per head query latent (or hidden) -> latent: W_Q W_UK^T
  std::shared_ptr<const Linear> query_rope;       ///< query latent (or hidden) -> N*R: W_QR; null without rope
  std::shared_ptr<const Linear> absorbed_output;  ///< N*L -> hidden: W_UV W_O

  bool absorbed() const { return absorption != Absorption::runtime; }
  /// How W_UK and W_UV of the latent path are held under runtime absorption.
  WeightFormat up() const { return absorb_key ? absorb_key->format : WeightFormat::plain; }
  /// Some map is held in fp8, so that Activations matter.
  bool any_fp8() const;
  /// Moves the matrices of a CPU's weights near the workers whose tasks read them: Buffer::place() in ranges, as
  /// products are cut. UnsupportedError on a GPU.
  void place(ThreadPool& pool) const;
  size_t bytes() const;
};

/// Converts and lays out a layer's tensors for a device. dtype: f32 or bf16 (f16 checkpoints prepare to either).
/// ShapeError naming tensor, found and expected shape; UnsupportedError for another dtype; InputError naming a tensor
/// that is to be quantised and holds NaN or infinity.
LayerWeights prepare(const ModelConfig& config, const LayerTensors& tensors, const PrepareOptions& options,
                     Device device = {});
inline LayerWeights prepare(const ModelConfig& config, const LayerTensors& tensors, Dtype dtype, Device device = {}) {
  return prepare(config, tensors, PrepareOptions{.dtype = dtype}, device);
}

/// Bytes of a layer's weights under options, as LayerWeights::bytes() without the padding of a backend's layout.
/// group_heads: of LayerTensors::group_kv_up; 0: there is none.
double prepared_bytes(const ModelConfig& config, int64_t layer, const PrepareOptions& options, int64_t group_heads = 0);

}  // namespace mla
