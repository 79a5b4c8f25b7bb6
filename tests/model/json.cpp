// What strict JSON is, in every file that is read with it; and what is not a file.
#include "model/json.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "mla/error.hpp"
#include "mla/model.hpp"
#include "mla/weights.hpp"
#include "support/safetensors_writer.hpp"

namespace mla {
namespace {

std::string refusal(const std::string& text) {
  try {
    parse_object(text, "f.json");
  } catch (const CheckpointError& e) {
    return e.what();
  }
  return "read";
}

TEST(StrictJson, KeysOccurOnceInEachObject) {
  EXPECT_EQ(refusal(R"({"a":1,"b":{"a":1},"c":[{"a":1},{"a":1}],"d":[[{}],{}]})"), "read");
  EXPECT_EQ(refusal(R"({"a":1,"b":2,"a":1})"), "f.json: key 'a' occurs twice");
  EXPECT_EQ(refusal(R"({"a":1,"\u0061":1})"), "f.json: key 'a' occurs twice");
  EXPECT_EQ(refusal(R"({"a":[1,{"b":{},"c":[],"b":{}}]})"), "f.json: key 'b' occurs twice");
  EXPECT_EQ(refusal(R"({"":1,"":1})"), "f.json: key '' occurs twice");
  EXPECT_EQ(refusal(R"({"a\n":1,"a\n":1})"), "f.json: key 'a\\x0a' occurs twice");
}

TEST(StrictJson, NothingBesideTheObject) {
  EXPECT_EQ(refusal(" {\"a\":1}\r\n\t "), "read");
  EXPECT_EQ(refusal("{}x"), "f.json: not valid JSON at byte 2, the end of '{}x'");
  EXPECT_EQ(refusal("{}{}"), "f.json: not valid JSON at byte 2, the end of '{}{'");
  EXPECT_EQ(refusal(""), "f.json: not valid JSON: it is empty");
  EXPECT_EQ(refusal(" \r\n\t"), "f.json: not valid JSON: it is empty");
  EXPECT_EQ(refusal("\"a\""), "f.json: not a JSON object");
  using namespace std::string_literals;
  EXPECT_EQ(refusal("{}\0garbage"s), "f.json: not valid JSON: a NUL at byte 2");
  EXPECT_EQ(refusal("{}\0"s), "f.json: not valid JSON: a NUL at byte 2");
  EXPECT_EQ(refusal("{\"a\0b\":1}"s), "f.json: not valid JSON: a NUL at byte 3");
  EXPECT_EQ(refusal("\0"s), "f.json: not valid JSON: a NUL at byte 0");
  EXPECT_EQ(refusal(R"({"a":"\u0000"})"), "read");  // escaped, it is text like any other
  EXPECT_EQ(refusal("{\"a\":1e999}"), "f.json: not valid JSON at byte 9, the end of '{\"a\":1e999'");
  EXPECT_EQ(refusal("{\"a\":\"\xff\"}"), "f.json: not valid JSON at byte 6, the end of '{\"a\":\"\\xff'");
}

// Bytes count from 0, lines and columns from 1; a line is named where there is more than one.
TEST(StrictJson, ErrorsSayWhere) {
  EXPECT_EQ(refusal("{\"a\":1,,\"b\":2}"), "f.json: not valid JSON at byte 7, the end of '{\"a\":1,,'");
  EXPECT_EQ(refusal("{\n  \"a\": 1,\n  ,\n}"),
            "f.json: not valid JSON at byte 14 (line 3, column 3), the end of '  ,'");
  EXPECT_EQ(refusal("{\"a\":[1,\n2"), "f.json: not valid JSON at byte 10 (line 2, column 2): it ends there");
  EXPECT_EQ(refusal("{\"a\":tru}"), "f.json: not valid JSON at byte 8, the end of '{\"a\":tru}'");
  EXPECT_EQ(refusal("\xef\xbb\xbf{,"), "f.json: not valid JSON at byte 4, the end of '\xef\xbb\xbf{,'");
  const std::string large = refusal("{\"a\":1 \"" + std::string(1 << 20, 'x') + "\"}");
  EXPECT_EQ(large, "f.json: not valid JSON at byte 1048584, the end of '" + std::string(20, 'x') + "\"'");
  EXPECT_EQ(refusal("{\"a\":1 \"b\n\"}").find('\n'), std::string::npos);
}

TEST(StrictJson, DepthIsBounded) {
  const auto nested = [](int arrays) { return R"({"a":)" + std::string(arrays, '[') + std::string(arrays, ']') + "}"; };
  EXPECT_EQ(refusal(nested(63)), "read");
  EXPECT_EQ(refusal(nested(64)), "f.json: nested deeper than 64");
}

// Every reader takes it: what one of them lets through, a file says twice.
TEST(StrictJson, ConfigAndIndexAreReadWithIt) {
  test::TempFolder folder;
  const std::string config =
      R"({"hidden_size":48,"num_hidden_layers":2,"num_attention_heads":3,"kv_lora_rank":40,"qk_nope_head_dim":24,)"
      R"("qk_rope_head_dim":8,"v_head_dim":20)";
  const auto message = [&] {
    try {
      Checkpoint c(folder.path());
    } catch (const CheckpointError& e) {
      return std::string(e.what()).substr(folder.path().string().size());
    }
    return std::string("read");
  };
  using namespace std::string_literals;
  const auto file = folder / "config.json", index = folder / "model.safetensors.index.json";
  test::write_file(index, R"({"weight_map":{}})");
  test::write_file(file, config + "}");
  EXPECT_EQ(message(), "read");
  test::write_file(file, config + R"(,"kv_lora_rank":41})");
  EXPECT_EQ(message(), "/config.json: key 'kv_lora_rank' occurs twice");
  test::write_file(file, config + R"(,"rope_scaling":{"type":"yarn","type":"default"}})");
  EXPECT_EQ(message(), "/config.json: key 'type' occurs twice");
  test::write_file(file, config + "}\0"s);
  EXPECT_EQ(message(), "/config.json: not valid JSON: a NUL at byte " + std::to_string(config.size() + 1));
  test::write_file(file, config + "}");
  test::write_file(index, R"({"weight_map":{},"weight_map":{}})");
  EXPECT_EQ(message(), "/model.safetensors.index.json: key 'weight_map' occurs twice");
  test::write_file(index, R"({"weight_map":{"a":"s","a":"t"}})");
  EXPECT_EQ(message(), "/model.safetensors.index.json: key 'a' occurs twice");
  test::write_file(index, "{\"weight_map\":{}}\0{}"s);
  EXPECT_EQ(message(), "/model.safetensors.index.json: not valid JSON: a NUL at byte 17");
}

TEST(Files, LargerOnesAreNotRead) {
  test::TempFolder folder;
  test::write_file(folder / "config.json", "{}");
  std::filesystem::resize_file(folder / "config.json", 100'000'001);
  try {
    read_config(folder / "config.json");
    FAIL();
  } catch (const CheckpointError& e) {
    EXPECT_EQ(std::string(e.what()), (folder / "config.json").string() + ": has 100000001 bytes, at most 100000000");
  }
}

// A FIFO has no writer here: who opens one to read and waits would wait for ever.
TEST(Files, WhatIsNotARegularFileIsRefusedAtOnce) {
  test::TempFolder folder;
  const auto fifo = folder / "fifo";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  alarm(60);
  for (const std::filesystem::path& path : {fifo, std::filesystem::path("/dev/zero"), folder.path()}) {
    EXPECT_THROW(read_text(path), CheckpointError) << path;
    EXPECT_THROW(read_config(path), CheckpointError) << path;
    EXPECT_THROW(Safetensors{path}, CheckpointError) << path;
  }
  // As parts of a checkpoint.
  test::write_file(folder / "config.json",
                   R"({"hidden_size":48,"num_hidden_layers":1,"num_attention_heads":3,"kv_lora_rank":40,)"
                   R"("qk_nope_head_dim":24,"qk_rope_head_dim":8,"v_head_dim":20})");
  const auto index = folder / "model.safetensors.index.json";
  test::write_file(index, R"({"weight_map":{"a":"fifo"}})");
  EXPECT_THROW(Checkpoint{folder.path()}, CheckpointError);
  std::filesystem::remove(index);
  ASSERT_EQ(mkfifo(index.c_str(), 0600), 0);
  EXPECT_THROW(Checkpoint{folder.path()}, CheckpointError);
  std::filesystem::remove(folder / "config.json");
  ASSERT_EQ(mkfifo((folder / "config.json").c_str(), 0600), 0);
  EXPECT_THROW(Checkpoint{folder.path()}, CheckpointError);
  alarm(0);
}

}  // namespace
}  // namespace mla
