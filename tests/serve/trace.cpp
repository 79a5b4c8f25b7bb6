// Trace formats, what is wrong with a line, scaling, generation, hidden states.
#include "serve/trace.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <sstream>
#include <tuple>

#include "mla/dtype.hpp"
#include "mla/error.hpp"
#include "serve/hidden.hpp"

namespace mla::serve {
namespace {

Trace read(const std::string& text, int64_t most = 0) {
  std::istringstream in(text);
  return read_trace(in, "t", most);
}

std::string refusal(const std::string& text) {
  try {
    read(text);
  } catch (const InputError& e) {
    return e.what();
  }
  return "read";
}

constexpr const char* kMooncake =
    "{\"timestamp\": 0, \"input_length\": 700, \"output_length\": 5, \"hash_ids\": [0, 1]}\r\n"
    "{\"timestamp\": 27000, \"input_length\": 512, \"output_length\": 0, \"hash_ids\": [0]}\n\n";

TEST(Trace, Mooncake) {
  const Trace t = read(kMooncake);
  ASSERT_EQ(t.requests.size(), 2u);
  EXPECT_EQ(t.block_tokens, 512);
  EXPECT_EQ(t.requests[0].input, 700);
  EXPECT_EQ(t.requests[0].blocks, (std::vector<uint64_t>{0, 1}));
  EXPECT_EQ(t.requests[1].arrival, 27);
  EXPECT_EQ(t.requests[1].output, 1);  // a prefill makes a token
  EXPECT_EQ(read(kMooncake, 1).requests.size(), 1u);
}

TEST(Trace, Azure) {
  const Trace t = read(
      "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-17 "
      "00:00:00.1805900,396,109\n");
  ASSERT_EQ(t.requests.size(), 2u);
  EXPECT_EQ(t.requests[0].arrival, 0);
  EXPECT_NEAR(t.requests[1].arrival, 5 * 3600 + 44 * 60 + 13.5, 1e-5);
  EXPECT_EQ(t.requests[1].input, 396);
  EXPECT_EQ(t.requests[1].output, 109);
  EXPECT_NE(t.requests[0].blocks, t.requests[1].blocks);  // no ids: nothing shared
}

TEST(Trace, BurstGpt) {
  const Trace t = read(
      "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
      "5,,1.5,ChatGPT,472,18,490,Conversation log\n45,,2.5,\"GPT,4\",1087,0,1087,API "
      "log\n118.5,x,,GPT-4,417,276,693,API log\n");
  ASSERT_EQ(t.requests.size(), 2u);  // no response: a failure
  EXPECT_EQ(t.requests[0].input, 472);
  EXPECT_EQ(t.requests[1].arrival, 113.5);
  EXPECT_EQ(t.requests[1].output, 276);
}

TEST(Trace, MalformedLinesAreNamed) {
  EXPECT_EQ(refusal(""), "t: empty, a trace is needed");
  EXPECT_EQ(refusal("TIMESTAMP,ContextTokens,GeneratedTokens\n"), "t: holds no request");
  EXPECT_EQ(refusal("a,b,c\n1,2,3\n"),
            "t:1: column 'Timestamp' is missing; known traces: Mooncake jsonl, Azure csv, BurstGPT csv");
  EXPECT_EQ(refusal("TIMESTAMP,ContextTokens\n"),
            "t:1: column 'GeneratedTokens' is missing; known traces: Mooncake jsonl, Azure csv, BurstGPT csv");
  const std::string azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,1\n";
  EXPECT_EQ(refusal(azure + "2023-11-16 18:15:46,1\n"), "t:3: has 2 fields, the header has 3");
  EXPECT_EQ(refusal(azure + "yesterday,1,1\n"), "t:3: TIMESTAMP is 'yesterday', YYYY-MM-DD hh:mm:ss is needed");
  EXPECT_EQ(refusal(azure + "2023-13-16 18:15:46,1,1\n"),
            "t:3: TIMESTAMP is '2023-13-16 18:15:46', YYYY-MM-DD hh:mm:ss is needed");
  EXPECT_EQ(refusal(azure + "2023-11-16 18:15:46,x,1\n"), "t:3: ContextTokens is 'x', a number is needed");
  EXPECT_EQ(refusal(azure + "2023-11-16 18:15:46,-4,1\n"),
            "t:3: ContextTokens is -4, a whole number from 0 to 100000000 is needed");
  EXPECT_EQ(refusal(azure + "2023-11-16 18:15:46,1,1e99\n"),
            "t:3: GeneratedTokens is 1e+99, a whole number from 0 to 100000000 is needed");
  const std::string good(kMooncake);
  EXPECT_EQ(refusal(good + "{\"timestamp\": 1\n"), "t:4: not a JSON object");
  EXPECT_EQ(refusal(good + "[1]\n"), "t:4: not a JSON object");
  EXPECT_EQ(refusal(good + "{\"timestamp\": 1}\n"), "t:4: input_length is missing or not a number");
  EXPECT_EQ(refusal(good + R"({"timestamp":1,"input_length":0,"output_length":1,"hash_ids":[]})"),
            "t:4: input_length is 0, a whole number from 1 to 100000000 is needed");
  EXPECT_EQ(refusal(good + R"({"timestamp":1,"input_length":513,"output_length":1,"hash_ids":[7]})"),
            "t:4: hash_ids has 1 blocks, input_length 513 needs 2");
  EXPECT_EQ(refusal(good + R"({"timestamp":1,"input_length":5,"output_length":1,"hash_ids":[-7]})"),
            "t:4: hash_ids holds -7, non-negative integers are needed");
  const std::string deep = std::string(1'000'000, '[') + std::string(1'000'000, ']');
  EXPECT_EQ(refusal(good + R"({"timestamp":1,"input_length":5,"output_length":1,"hash_ids":[)" + deep + "]}"),
            "t:4: hash_ids holds an array, non-negative integers are needed");
  EXPECT_EQ(refusal(good + R"({"timestamp":-1,"input_length":5,"output_length":1,"hash_ids":[7]})"),
            "t:4: timestamp is -1, milliseconds from 0 are needed");
  EXPECT_THROW(read_trace(std::filesystem::path("/nowhere/trace.csv")), InputError);
  EXPECT_THROW(read_trace(std::filesystem::path("/tmp")), InputError);
}

TEST(Trace, ScalingKeepsBlocksAndLengthsTogether) {
  for (double factor : {1.0, 0.5, 0.05, 0.047, 0.001}) {
    const Trace t = scale_lengths(read(kMooncake), factor);
    for (const TraceRequest& r : t.requests) {
      EXPECT_GE(r.input, 1);
      EXPECT_GE(r.output, 1);
      EXPECT_LE(r.input, static_cast<int64_t>(r.blocks.size()) * t.block_tokens);
      EXPECT_NEAR(static_cast<double>(r.input), 700 * factor, r.blocks.size() == 2 ? 1 + 700 * factor * 0.05 : 1e9);
    }
    EXPECT_EQ(t.block_tokens, std::max<int64_t>(1, std::llround(512 * factor)));
  }
  for (double factor : {0.0, -1.0, 1.5, std::nan("")}) EXPECT_THROW(scale_lengths(read(kMooncake), factor), InputError);
}

TEST(Trace, GeneratedOnesAreReproducible) {
  const Trace a = generate_trace({.requests = 300, .input = 200, .output = 10, .rate = 5, .seed = 4});
  const Trace b = generate_trace({.requests = 300, .input = 200, .output = 10, .rate = 5, .seed = 4});
  double input = 0;
  std::map<uint64_t, int> first_blocks;
  for (size_t i = 0; i < a.requests.size(); ++i) {
    EXPECT_EQ(a.requests[i].blocks, b.requests[i].blocks);
    EXPECT_EQ(a.requests[i].arrival, b.requests[i].arrival);
    if (i > 0) {
      EXPECT_GE(a.requests[i].arrival, a.requests[i - 1].arrival);
    }
    EXPECT_EQ(static_cast<int64_t>(a.requests[i].blocks.size()),
              (a.requests[i].input + a.block_tokens - 1) / a.block_tokens);
    input += static_cast<double>(a.requests[i].input);
    ++first_blocks[a.requests[i].blocks[0]];
  }
  EXPECT_NEAR(input / 300, 200, 15);
  EXPECT_NEAR(a.requests.back().arrival, 60, 15);
  EXPECT_LT(first_blocks.size(), 260u);  // some prompts continue others
  EXPECT_THROW(generate_trace({.requests = 0}), InputError);
  EXPECT_THROW(generate_trace({.rate = -1}), InputError);
}

TEST(Hidden, PureUnitVarianceExactInBf16) {
  std::vector<float> a(4096), b(4096), c(4096);
  hidden_row(1, 2, 3, a);
  hidden_row(1, 2, 3, b);
  EXPECT_EQ(a, b);
  for (auto [seed, key, position] : {std::tuple<uint64_t, uint64_t, int64_t>{2, 2, 3}, {1, 3, 3}, {1, 2, 4}}) {
    hidden_row(seed, key, position, c);
    EXPECT_NE(a, c);
  }
  double sum = 0, square = 0;
  for (float x : a) {
    sum += x;
    square += x * x;
    EXPECT_EQ(to_float(to_bf16(x)), x);
  }
  EXPECT_NEAR(sum / 4096, 0, 0.1);
  EXPECT_NEAR(square / 4096, 1, 0.15);
}

TEST(Hidden, KeysFollowPromptBlocksThenTheRequest) {
  const Trace t = read(kMooncake);
  EXPECT_EQ(token_key(t, 0, 0), token_key(t, 1, 511));
  EXPECT_NE(token_key(t, 0, 511), token_key(t, 0, 512));
  EXPECT_EQ(token_key(t, 0, 700), token_key(t, 0, 701));
  EXPECT_NE(token_key(t, 0, 700), token_key(t, 1, 512));
}

}  // namespace
}  // namespace mla::serve
