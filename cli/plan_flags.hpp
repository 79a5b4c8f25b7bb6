// Flags of how a model's layers are prepared and planned, shared by `mla plan` and `mla run`.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

#include "cli/params.hpp"
#include "mla/plan.hpp"

namespace mla::cli {

class PlanFlags {
 public:
  explicit PlanFlags(CLI::App& command);

  // InputError for a name that is none.
  CacheFormat cache() const { return read_option("--cache", cache_, parse_cache_format); }
  Dtype weights() const { return parse_operands("--weights", weights_); }
  WeightFormat up() const { return read_option("--up-weights", up_, parse_weight_format); }
  WeightFormat products() const { return read_option("--product-weights", products_, parse_weight_format); }
  /// What else they say of plans. InputError for fp8 activations without fp8 products, fp8 queries over another cache
  /// than fp8, and --decode without those.
  void read(PlanOptions& options) const;

 private:
  void read_fp8_queries(PlanOptions& options) const;

  std::string cache_ = "bf16", weights_ = "bf16", compute_, up_ = "plain", products_ = "plain", activations_ = "plain",
              activation_dtype_ = "native", prefill_ = "compute", q_scale_ = "none", decode_ = "compute",
              path_ = "automatic", split_ = "fast", sparse_ = "automatic", index_cache_ = "fp8",
              index_arithmetic_ = "exact", rates_;
  int64_t reorder_threshold_ = 1, context_rows_ = 0;
};

}  // namespace mla::cli
