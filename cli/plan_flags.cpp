#include "cli/plan_flags.hpp"

#include "cli/batch_file.hpp"
#include "cli/rates_file.hpp"
#include "model/json.hpp"

namespace mla::cli {

PlanFlags::PlanFlags(CLI::App& c) {
  const auto text = [&](const char* flag, std::string& value, const char* help) {
    c.add_option(flag, value, help)->capture_default_str();
  };
  text("--cache", cache_, "cache format");
  text("--weights", weights_, "dtype of prepared weights: f32 or bf16");
  c.add_option("--compute", compute_, "operands of attention: f32 or bf16; by default the weights' dtype");
  text("--up-weights", up_, "W_UK and W_UV of the latent path: plain, fp8 or mxfp4");
  text("--product-weights", products_,
       "the other maps: plain, or fp8 by blocks, an fp8 checkpoint's codes and scales as they are");
  text("--activations", activations_, "inputs of products with fp8 weights: plain or fp8_128");
  text(
      "--activation-dtype", activation_dtype_,
      "of hidden states, or of queries and new rows of form attention: native (f32 on a CPU, --compute on a GPU), f32, "
      "bf16 or f16");
  text("--prefill", prefill_,
       "what the expanded path multiplies: compute, or e4m3 by the checkpoint's scales as fp8, or fp8_raw (faster on "
       "Hopper, its error grows with the context)");
  text("--q-scale", q_scale_,
       "latent queries as fp8, over a cache of fp8: their scale, or auto: the checkpoint's, a layer's own each");
  text("--decode", decode_,
       "what the latent path multiplies fp8 queries and rows as: compute, or fp8, on Hopper codes by codes");
  text("--path", path_,
       "automatic, latent, expanded, by_length, or by_prompt: prompts expanded, tokens behind them latent");
  add_file(
      c, "--rates", rates_,
      "JSON file of rates by which --path automatic and --sparse automatic choose, as mla bench --fit --json writes "
      "it; by default what is known of the device");
  add_number<int64_t>(c, "--decode-length", reorder_threshold_,
                      "by_length: longest query that takes the latent path; sparse: longest decode", 0, kMostTokens);
  text("--split", split_,
       "fast, or batch_invariant: a request's bits follow from its tokens alone, not from other requests or how its "
       "prompt was cut into steps; --path automatic and by_length are then latent, by_prompt has prompts in less time "
       "(and is what a run of a dense model does, if --path is not given)");
  text("--sparse", sparse_, "automatic, mixed, direct, upconvert, masked or dense");
  text("--index-cache", index_cache_, "format of the indexer's keys: f32, bf16 or fp8");
  text("--index-arithmetic", index_arithmetic_,
       "products of an fp8 index cache's scores: exact, or fp8 as Hopper multiplies it");
  add_number<int64_t>(c, "--context-rows", context_rows_, "rows of the context workspace; 0: by the default rule", 0,
                      kMostTokens);
}

void PlanFlags::read_fp8_queries(PlanOptions& o) const {
  o.fp8_query = q_scale_ != "none";
  if (o.fp8_query && cache() != CacheFormat::fp8)
    throw InputError("--q-scale is " + q_scale_ + ", --cache is " + cache_ + ": fp8 queries need a cache of fp8");
  if (q_scale_ == "auto") o.q_scale = 0;
  else if (o.fp8_query) o.q_scale = static_cast<float>(parse_number("--q-scale", q_scale_, 1e-30, 1e30));
  o.decode = read_option("--decode", decode_, parse_decode_operands);
  if (o.decode != DecodeOperands::compute && !o.fp8_query)
    throw InputError("--decode " + decode_ + " is of fp8 queries, --q-scale gives their scale");
}

void PlanFlags::read(PlanOptions& o) const {
  o.activations = read_option("--activations", activations_, parse_activations);
  if (o.activations != Activations::plain && products() == WeightFormat::plain)
    throw InputError("--activations " + activations_ + " needs --product-weights fp8: it is their inputs' format");
  read_fp8_queries(o);
  o.compute = compute_.empty() ? weights() : parse_operands("--compute", compute_);
  o.up = up();
  o.activation_dtype = read_option("--activation-dtype", activation_dtype_, parse_activation_dtype);
  o.prefill = read_option("--prefill", prefill_, parse_prefill_operands);
  o.path = read_option("--path", path_, parse_path_policy);
  o.reorder_batch_threshold = reorder_threshold_;
  o.split = read_option("--split", split_, parse_split_policy);
  o.sparse = read_option("--sparse", sparse_, parse_sparse_policy);
  o.index_format = read_option("--index-cache", index_cache_, parse_index_cache_format);
  o.index_arithmetic = read_option("--index-arithmetic", index_arithmetic_, parse_index_arithmetic);
  o.context_rows = context_rows_;
  if (!rates_.empty())
    o.rates = read_option("--rates", rates_,
                          [&](const std::string& file) { return parse_rates(read_text(file), file, o.compute); });
}

}  // namespace mla::cli
