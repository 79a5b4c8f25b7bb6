// Files of rates: what is read of them, and what is refused.
#include "cli/rates_file.hpp"

#include <gtest/gtest.h>

#include <string>

#include "mla/error.hpp"

namespace mla::cli {
namespace {

std::string refusal(const std::string& text) {
  try {
    parse_rates(text, "f.json", Dtype::bf16);
  } catch (const Error& e) {
    return e.what();
  }
  return "read";
}

constexpr const char* kNeeded = R"("latent_flops": 2e9, "expanded_flops": 3e9, "projection_flops": 4e9, "bytes": 5e9)";

TEST(RatesFile, WhatIsWrittenIsRead) {
  CostModel rates{.latent_flops = 1e9, .expanded_flops = 2e9, .projection_flops = 3e9, .bytes = 4e9};
  rates.row_element = 2, rates.plain_elements = 5, rates.fp8_elements = 6, rates.expanded_tiles = 7;
  rates.context_seconds = 8e-6;
  const CostModel read = parse_rates(rates_json(rates).dump(), "f.json", Dtype::f32);
  EXPECT_EQ(rates_json(read), rates_json(rates));
}

TEST(RatesFile, OthersAreAsUsual) {
  const CostModel read = parse_rates("{" + std::string(kNeeded) + "}", "f.json", Dtype::f32);
  EXPECT_EQ(read.bytes, 5e9);
  EXPECT_EQ(read.row_element, CostModel().row_element);
  EXPECT_EQ(read.expanded_tiles, 0);
}

TEST(RatesFile, AWholeFileOfFittedRates) {
  const std::string file = R"({"machine": {}, "paths": [{"compute": "f32", "rates_fitted": {)" + std::string(kNeeded) +
                           R"(}}, {"compute": "bf16", "times": [], "rates_fitted": {"expanded_tiles": 132, )" +
                           kNeeded + "}}]}";
  EXPECT_EQ(parse_rates(file, "f.json", Dtype::bf16).expanded_tiles, 132);
  EXPECT_EQ(parse_rates(file, "f.json", Dtype::f32).expanded_tiles, 0);
}

TEST(RatesFile, WhatIsRefused) {
  const std::string needed = kNeeded;
  EXPECT_EQ(refusal("{" + needed + R"(, "byte": 1})").find("f.json: byte"), 0u);
  EXPECT_EQ(refusal(R"({"latent_flops": 1})"), "f.json: expanded_flops is missing");
  EXPECT_EQ(refusal("{" + needed + R"(, "expanded_tiles": -1})"),
            "f.json: expanded_tiles is -1, must be a number of at least 0");
  EXPECT_EQ(refusal("{" + needed + R"(, "row_element": "two"})"),
            "f.json: row_element is \"two\", must be a number of at least 0");
  EXPECT_EQ(refusal(R"({"latent_flops": 0, "expanded_flops": 1, "projection_flops": 1, "bytes": 1})"),
            "f.json: latent_flops is 0, must be a number above 0");
  EXPECT_EQ(refusal(R"({"latent_flops": 1e400})").find("f.json"), 0u);
  EXPECT_EQ(refusal(R"({"paths": [{"compute": "f32", "rates_fitted": {}}]})"),
            "f.json has rates of f32, bf16 are asked for");
  EXPECT_EQ(refusal(R"({"paths": []})"), "f.json has rates of no operands, bf16 are asked for");
  EXPECT_EQ(refusal(R"({"paths": [{"compute": "bf16"}]})"), "f.json: rates_fitted is missing");
  EXPECT_EQ(refusal(R"({"paths": [{"compute": "bf16", "rates_fitted": 1}]})"),
            "f.json: rates_fitted is not an object of rates");
  EXPECT_EQ(refusal(R"({"paths": [1]})"), "f.json: an entry of paths does not say of which operands it is");
  EXPECT_EQ(refusal(R"({"paths": 1})"), "f.json: paths is not an array");
  EXPECT_NE(refusal("[]"), "read");
}

}  // namespace
}  // namespace mla::cli
