// Flags that describe a case's shape, shared by `mla check` and `mla bench`; and what both need around them.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "cases/case.hpp"
#include "mla/model.hpp"

namespace mla::cli {

class ShapeFlags {
 public:
  explicit ShapeFlags(CLI::App& command);
  /// Some flag other than --seed was given.
  bool any() const;
  /// --splits was given.
  bool splits() const { return splits_->count() > 0; }
  /// InputError or an error of the cache's for what cannot be.
  cases::Params params() const;

 private:
  cases::Params p_;
  std::string format_, dtype_, output_, weights_, inputs_, index_format_;
  bool full_ = false;
  std::vector<CLI::Option*> options_;
  CLI::Option *splits_ = nullptr, *topk_ = nullptr;
};

/// --threads: at least 1, by default all of the machine's.
void add_threads(CLI::App& command, int& threads);
/// --device: cpu, cuda or cuda:N. InputError for another name.
class DeviceFlag {
 public:
  explicit DeviceFlag(CLI::App& command);
  /// DeviceError when no such GPU is there.
  Device device() const;
  /// Whether it is there or not.
  Device named() const;

 private:
  std::string name_ = "cpu";
};

/// --allow-unknown: goes on past keys and tensors of a model that are not understood.
void add_allow_unknown(CLI::App& command, ReadOptions& options);
/// --target: limits the instruction set when the command runs; an empty name does not.
void add_target(CLI::App& command, std::string& target);

/// Refuses --sparse, --topk, --index-cache and --hadamard for a model without an indexer: nothing would read them.
void require_indexer(const CLI::App& command, const ModelConfig& model);

}  // namespace mla::cli
