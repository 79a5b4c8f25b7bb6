// Rates of a cost model as files have them: what `mla bench --fit --json` writes, `mla plan` and `mla run` read.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

#include "mla/plan.hpp"

namespace mla::cli {

nlohmann::json rates_json(const CostModel& rates);

/// Of operands of `compute`: an object of rates_json(), of which latent_flops, expanded_flops, projection_flops and
/// bytes must be there, or a whole file of `mla bench --fit --json`, of which the fitted ones are taken.
/// CheckpointError for text that is no JSON object, InputError for keys that are unknown or missing and numbers that
/// are no rates.
CostModel parse_rates(std::string_view text, std::string_view where, Dtype compute);

}  // namespace mla::cli
