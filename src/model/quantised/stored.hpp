// What a checkpoint stores of one matrix [rows, cols]: the tensors under its module's name, looked up, checked, read.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "mla/weights.hpp"

namespace mla {

/// Where tensors are looked up by name: one file, or the shards of an index.
using FindTensor = std::function<const Safetensors*(const std::string&)>;

/// Rows [row, row + rows) and columns [col, col + cols) of a matrix.
struct MatrixPart {
  int64_t row = 0, rows = 0, col = 0, cols = 0;
  /// Where the part, its rows one behind another, has the matrix's element (r, c).
  int64_t at(int64_t r, int64_t c) const { return (r - row) * cols + c - col; }
};
/// The blocks that have an element of the part, counted in blocks.
MatrixPart blocks_of(const MatrixPart& part, int64_t block_rows, int64_t block_cols);
/// The same elements of the transposed matrix.
inline MatrixPart transposed(const MatrixPart& p) {
  return {.row = p.col, .rows = p.cols, .col = p.row, .cols = p.rows};
}

class StoredMatrix {
 public:
  /// `module`: the name that its tensors' names begin with, "...o_proj.". `part`: what is wanted of its values. Without
  /// data tensors are looked up and checked, not read. `used` takes the names of those that were.
  StoredMatrix(const FindTensor& find, std::string module, std::string where, int64_t out, int64_t in,
               const MatrixPart& part, const ModelConfig& config, bool reads, std::unordered_set<std::string>& used)
      : rows(out),
        cols(in),
        wanted(part),
        model(config),
        data(reads),
        find_(find),
        module_(std::move(module)),
        where_(std::move(where)),
        used_(used) {}

  const int64_t rows, cols;  // of the whole, as its tensors' shapes are
  const MatrixPart wanted;
  const ModelConfig& model;
  const bool data;

  std::string name(std::string_view part) const { return module_ + std::string(part); }
  /// Null where there is none.
  const SafetensorsEntry* entry(std::string_view part) const;
  bool has(std::string_view part) const { return entry(part) != nullptr; }
  const Safetensors& file(std::string_view part) const;

  /// The tensor of one of these dtypes and of one of these shapes; CheckpointError naming it and what it is for
  /// otherwise.
  const SafetensorsEntry& take(std::string_view part, std::initializer_list<std::string_view> dtypes,
                               const std::vector<std::vector<int64_t>>& shapes, std::string_view what) const;
  /// Nothing is read of it, and nothing has to be.
  void pass(std::string_view part) const { used_.insert(name(part)); }
  /// All of the tensor; null without data.
  std::shared_ptr<const Buffer> bytes(std::string_view part) const;
  /// These of its elements alone, rows one behind another. One dimension is a column.
  std::shared_ptr<const Buffer> bytes(std::string_view part, const MatrixPart& elements) const;
  /// Scales in F32, BF16, F16, F8_E4M3 or F8_E8M0, U8 read as E8M0; empty without data. CheckpointError naming the
  /// element that is not finite.
  std::vector<float> scales(std::string_view part) const;
  std::vector<float> scales(std::string_view part, const MatrixPart& elements) const;

  /// A tensor of the wanted shape and the form in words; without values until it is given some.
  HostTensor tensor(std::string_view part, std::string format) const;
  /// The same with its values.
  HostTensor tensor(std::string_view part, std::string format, std::shared_ptr<const QuantisedMatrix> values) const;

  [[noreturn]] void missing(std::string_view part, const std::string& why) const;
  [[noreturn]] void fail(std::string_view part, const std::string& why) const;
  [[noreturn]] void unsupported(std::string_view part, const std::string& why) const;

 private:
  const FindTensor& find_;
  std::string module_, where_;
  std::unordered_set<std::string>& used_;
};

}  // namespace mla
