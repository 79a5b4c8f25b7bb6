// The safetensors reader: every malformation it must refuse, by name, and thousands of random ones that must not crash
// it.
#include <gtest/gtest.h>

#include "cases/compare.hpp"
#include "mla/error.hpp"
#include "mla/weights.hpp"
#include "support/golden.hpp"
#include "support/safetensors_writer.hpp"
#include "support/sanitized.hpp"

namespace mla {
namespace {

using test::raw_safetensors;

class SafetensorsFile : public testing::Test {
 protected:
  std::string refusal(std::string_view bytes) {
    test::write_file(folder_ / "f", bytes);
    try {
      Safetensors file(folder_ / "f");
    } catch (const CheckpointError& e) {
      const std::string text = e.what(), where = (folder_ / "f").string() + ": ";
      EXPECT_EQ(text.rfind(where, 0), 0u) << text;
      EXPECT_EQ(text.find('\n'), std::string::npos);
      return text.substr(where.size());
    }
    return "read";
  }
  std::string refusal(const char* header, size_t data) { return refusal(raw_safetensors(header, data)); }
  test::TempFolder folder_;
};

TEST_F(SafetensorsFile, ReadsWhatIsWellFormed) {
  test::SafetensorsWriter w;
  w.add("a", "BF16", {2, 2}, std::vector<bf16>{to_bf16(1), to_bf16(2), to_bf16(-3), to_bf16(4)});
  w.add("b", "F32", {}, std::vector<float>{2.5f});
  w.add("empty", "F16", {0, 7}, std::string_view{});
  w.add("codes", "F8_E4M3", {3}, std::vector<uint8_t>{0x38, 0x7e, 0x80});
  w.write(folder_ / "f");
  const Safetensors file(folder_ / "f");
  EXPECT_EQ(file.entries().size(), 4u);
  EXPECT_EQ(file.tensor("a").to_f32(), (std::vector<float>{1, 2, -3, 4}));
  EXPECT_EQ(file.tensor("b").to_f32(), (std::vector<float>{2.5f}));
  EXPECT_TRUE(file.tensor("empty").to_f32().empty());
  EXPECT_EQ(file.tensor("codes").to_f32(), (std::vector<float>{1, 448, -0.0f}));
  EXPECT_EQ(file.find("c"), nullptr);
  EXPECT_THROW(file.tensor("c"), CheckpointError);
  EXPECT_EQ(refusal(R"({})", 0), "read");
  EXPECT_EQ(
      refusal(
          R"( { "__metadata__" : { "k" : "v\u00e9\ud83d\ude00\n" } , "t":{"shape":[1],"dtype":"U8","data_offsets":[0,1]} }   )",
          1),
      "read");
  EXPECT_EQ(*Safetensors(folder_ / "f").metadata("k"), "v\xc3\xa9\xf0\x9f\x98\x80\n");
  EXPECT_EQ(Safetensors(folder_ / "f").metadata("absent"), nullptr);
  EXPECT_EQ(refusal("\r\n\t{ }\n\t\r", 0), "read");
}

TEST_F(SafetensorsFile, RefusesByName) {
  EXPECT_EQ(refusal("short"), "not a safetensors file: has 5 bytes, a header length alone takes 8");
  EXPECT_EQ(
      refusal(std::string("\xff\xff\xff\xff\xff\xff\xff\x7f", 8) + "{}"),
      "not a safetensors file: its first 8 bytes would be the length of a header of 9223372036854775807 bytes, at "
      "most 100000000");
  EXPECT_EQ(refusal(std::string("\x20\0\0\0\0\0\0\0", 8) + "{}"), "header of 32 bytes ends past the file's 10");
  EXPECT_EQ(refusal("", 0), "'{' is needed in the header at byte 0");
  EXPECT_EQ(refusal("{}x", 0), "header has text after its object at byte 2");
  EXPECT_EQ(
      refusal(
          R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"t":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
          2),
      "key 't' occurs twice");
  EXPECT_EQ(refusal(R"({"t":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1),
            "tensor 't': key 'dtype' occurs twice");
  EXPECT_EQ(refusal(R"({"__metadata__":{"a":"1","a":"2"}})", 0), "__metadata__ key 'a' occurs twice");
  EXPECT_EQ(refusal(R"({"t":{"dtype":"U8","shape":[1]}})", 0), "tensor 't': data_offsets is missing");
  EXPECT_EQ(refusal(R"({"t":{"shape":[1],"data_offsets":[0,1]}})", 1), "tensor 't': dtype is missing");
  EXPECT_EQ(refusal(R"({"t":{"dtype":"U8","data_offsets":[0,1]}})", 1), "tensor 't': shape is missing");
  EXPECT_EQ(refusal(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"extra":1}})", 1),
            "tensor 't': unknown key 'extra'");
  EXPECT_EQ(refusal(R"({"t":{"dtype":"Q7","shape":[1],"data_offsets":[0,1]}})", 1), "tensor 't': unknown dtype 'Q7'");
  EXPECT_EQ(refusal(R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4),
            "tensor 't': has 4 bytes, its shape needs 8");
  EXPECT_EQ(refusal(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,9]}})", 1),
            "tensor 't': ends at 9, past the data's 1 bytes");
  EXPECT_EQ(refusal(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[2,1]}})", 2),
            "tensor 't': ends at 1 before it begins at 2");
  EXPECT_EQ(refusal(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})", 2),
            "tensor 't': begins at 1, a gap after 0");
  EXPECT_EQ(
      refusal(
          R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
          3),
      "tensor 'b': begins at 1, inside the tensor that ends at 2");
  EXPECT_EQ(refusal(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 5), "tensors end at 1, the data at 5");
  EXPECT_EQ(refusal(R"({"t":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0),
            "tensor 't': shape passes 64 bits");
  EXPECT_EQ(refusal(R"({"t":{"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,0]}})", 0),
            "number at byte 28 passes 64 bits");
  EXPECT_EQ(refusal(R"({"t":{"dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,0]}})", 0),
            "tensor 't': extent 9223372036854775808 is too large");
  EXPECT_EQ(refusal(R"({"t":{"dtype":"U8","shape":[-1],"data_offsets":[0,0]}})", 0),
            "a non-negative integer is needed at byte 28");
  EXPECT_EQ(refusal(R"({"t":{"dtype":"U8","shape":[1.5],"data_offsets":[0,1]}})", 1),
            "']' is needed in the header at byte 29");
  EXPECT_EQ(refusal(R"({"t":{"dtype":"U8","shape":[01],"data_offsets":[0,1]}})", 1),
            "number at byte 28 has a leading zero");
  EXPECT_EQ(refusal(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}})", 1),
            "tensor 't': data_offsets has 3 numbers, 2 are needed");
  EXPECT_EQ(refusal(R"({"t":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}})", 1),
            "tensor 't': more than 16 dimensions");
  EXPECT_EQ(refusal("{\"t\xc3(\":{}}", 0), "bad UTF-8 at byte 3");
  EXPECT_EQ(refusal(R"({"\x":{}})", 0), "unknown escape in a string at byte 3");
  EXPECT_EQ(refusal(R"({"\ud800":{}})", 0), "half a surrogate pair at byte 8");
  EXPECT_EQ(refusal("{\"a\nb\":{}}", 0), "control character in a string at byte 3");
  EXPECT_EQ(refusal(R"({"open)", 0), "string without end");
  EXPECT_EQ(refusal(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},})", 1),
            "'\"' is needed in the header at byte 53");
  EXPECT_THROW(Safetensors(folder_ / "missing"), CheckpointError);
  EXPECT_THROW(Safetensors(folder_.path()), CheckpointError);
}

TEST_F(SafetensorsFile, EveryPublishedDtypeIsKnown) {
  struct Row {
    const char* dtype;
    int bits;
  };
  for (const Row& r :
       {Row{"F64", 64},        Row{"F32", 32},       Row{"F16", 16},    Row{"BF16", 16},   Row{"C64", 64},
        Row{"I64", 64},        Row{"I32", 32},       Row{"I16", 16},    Row{"I8", 8},      Row{"U64", 64},
        Row{"U32", 32},        Row{"U16", 16},       Row{"U8", 8},      Row{"BOOL", 8},    Row{"F8_E4M3", 8},
        Row{"F8_E5M2", 8},     Row{"F8_E8M0", 8},    Row{"F6_E2M3", 6}, Row{"F6_E3M2", 6}, Row{"F4", 4},
        Row{"F8_E4M3FNUZ", 8}, Row{"F8_E5M2FNUZ", 8}}) {
    const std::string bytes = std::to_string(r.bits / 2), header = std::string(R"({"t":{"dtype":")") + r.dtype +
                                                                   R"(","shape":[2,2],"data_offsets":[0,)" + bytes +
                                                                   "]}}";
    EXPECT_EQ(refusal(header.c_str(), static_cast<size_t>(r.bits) / 2), "read") << r.dtype;
    const Safetensors file(folder_ / "f");
    const std::string_view name = r.dtype;
    if (name == "F32" || name == "F16" || name == "BF16" || name == "F8_E4M3") EXPECT_EQ(file.tensor("t").size(), 4);
    else EXPECT_THROW(file.tensor("t"), CheckpointError) << r.dtype;
  }
  EXPECT_EQ(refusal(R"({"t":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}})", 1),
            "tensor 't': has 12 bits, not whole bytes");
}

// The extents of an empty tensor are multiplied by its readers, in whatever order they stand.
TEST_F(SafetensorsFile, EmptyTensorsMayNotOverflow) {
  EXPECT_EQ(refusal(R"({"t":{"dtype":"U8","shape":[4294967296,4294967296,0],"data_offsets":[0,0]}})", 0),
            "tensor 't': shape passes 64 bits");
  EXPECT_EQ(refusal(R"({"t":{"dtype":"U8","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}})", 0),
            "tensor 't': shape passes 64 bits");
  EXPECT_EQ(refusal(R"({"t":{"dtype":"U8","shape":[4294967296,0],"data_offsets":[0,0]}})", 0), "read");
}

TEST_F(SafetensorsFile, NamesCannotBreakTheLine) {
  EXPECT_EQ(refusal(R"({"a\nb\u0000":{"dtype":"Q7","shape":[1],"data_offsets":[0,1]}})", 1),
            "tensor 'a\\x0ab\\x00': unknown dtype 'Q7'");
  const std::string longest =
      refusal(("{\"" + std::string(1 << 20, 'n') + R"(":{"dtype":"Q7","shape":[1],"data_offsets":[0,1]}})").c_str(), 1);
  EXPECT_LT(longest.size(), 1100u);
  EXPECT_TRUE(longest.ends_with("unknown dtype 'Q7'")) << longest;
}

// Deep nesting must not recurse: the grammar has no value that nests.
// Names are JSON strings: each escape and each length of UTF-8, and what is neither.
TEST_F(SafetensorsFile, NamesAreDecodedOrRefused) {
  const auto named = [&](const std::string& name) {
    return refusal(raw_safetensors("{\"" + name + R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})", 0));
  };
  const auto reads = [&](const std::string& name, const std::string& as) {
    EXPECT_EQ(named(name), "read") << name;
    EXPECT_NE(Safetensors(folder_ / "f").find(as), nullptr) << name;
  };
  reads(R"(\"\\\/\b\f\n\r\t)", "\"\\/\b\f\n\r\t");
  reads(R"(\u0041\u00e9\u20Ac\ud83d\ude00)", "A\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80");
  reads("A\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", "A\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80");
  EXPECT_EQ(named(R"(\x)"), "unknown escape in a string at byte 3");
  EXPECT_EQ(named(R"(\u00g0)"), "bad \\u escape at byte 6");
  for (const char* digit : {"-", ":", "G", "`"})
    EXPECT_EQ(named("\\u00" + std::string(digit) + "0"), "bad \\u escape at byte 6") << digit;
  reads(R"(\ue000\uFFFD)", "\xee\x80\x80\xef\xbf\xbd");
  for (const char* half : {R"(\ud83d)", R"(\ud83dx\ude00)", R"(\ud83d\u0041)", R"(\ud83d\ue000)", R"(\ude00)"})
    EXPECT_EQ(named(half).substr(0, 24), "half a surrogate pair at") << half;
  // A stray continuation, forms that are too long, a surrogate, past Unicode's end, cut off.
  for (const char* bad : {"\x80", "\xc0\xaf", "\xc1\xbf", "\xe0\x80\xaf", "\xf0\x80\x80\xaf", "\xed\xa0\x80",
                          "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xe2\x82", "\xc3"})
    EXPECT_EQ(named(bad), "bad UTF-8 at byte 2");
  for (const char* open : {R"({")", R"({"a)", R"({"\)", R"({"\u00)", R"({"t":{"shape":[1)", "{\"\xe2\x82"})
    EXPECT_NE(refusal(open, 0), "read") << open;
}

TEST_F(SafetensorsFile, DeepNestingIsRefused) {
  EXPECT_NE(refusal(raw_safetensors(std::string(R"({"t":)") + std::string(1 << 20, '['), 0)).find("is needed"),
            std::string::npos);
}

// A map of the file would be a bus error.
TEST_F(SafetensorsFile, ShortenedAfterItWasOpened) {
  test::SafetensorsWriter w;
  w.add("a", "F32", {4096}, std::vector<float>(4096, 1.0f));
  w.add("b", "F32", {4096}, std::vector<float>(4096, 2.0f));
  w.write(folder_ / "f");
  const Safetensors file(folder_ / "f");
  const size_t whole = std::filesystem::file_size(folder_ / "f");
  const HostTensor early = file.tensor("a");
  auto said = [&](size_t size) -> std::string {
    std::filesystem::resize_file(folder_ / "f", size);
    try {
      file.tensor("b").to_f32();
    } catch (const CheckpointError& e) {
      return e.what();
    }
    return "read";
  };
  EXPECT_EQ(said(whole), "read");
  const std::string where = (folder_ / "f").string() + ": tensor 'b' has ";
  EXPECT_EQ(said(whole - 6000), where + "10384 bytes left of 16384: the file was shortened after it was opened");
  EXPECT_EQ(said(0), where + "0 bytes left of 16384: the file was shortened after it was opened");
  EXPECT_EQ(early.to_f32(), std::vector<float>(4096, 1.0f));
}

TEST_F(SafetensorsFile, RandomDamageNeverCrashes) {
  test::SafetensorsWriter w;
  w.add("model.layers.0.self_attn.o_proj.weight", "BF16", {4, 3}, std::vector<uint16_t>(12, 0x3f80));
  w.add("b", "F32", {5}, std::vector<float>(5, 1.0f));
  const std::string whole = w.bytes();
  cases::Random random(11);
  int read = 0;
  for (int i = 0; i < (test::kSanitized ? 1500 : 6000); ++i) {
    std::string damaged = whole;
    for (int64_t n = random.integer(1, 4); n > 0; --n) {
      const size_t at = static_cast<size_t>(random.integer(0, static_cast<int64_t>(damaged.size()) - 1));
      switch (random.integer(0, 3)) {
        case 0: damaged[at] = static_cast<char>(random.next()); break;
        case 1: damaged[at] ^= static_cast<char>(1 << random.integer(0, 7)); break;
        case 2: damaged.erase(at, static_cast<size_t>(random.integer(1, 8))); break;
        default: damaged.insert(at, 1, static_cast<char>(random.next()));
      }
      if (damaged.empty()) damaged = "x";
    }
    test::write_file(folder_ / "f", damaged);
    try {
      const Safetensors file(folder_ / "f");
      for (const SafetensorsEntry& e : file.entries())
        if (e.dtype == "F32" || e.dtype == "BF16") file.tensor(e.name).to_f32();
      ++read;
    } catch (const CheckpointError&) {
    }
  }
  EXPECT_GT(read, 0);  // damage to the data alone is not seen
}

TEST(GoldenFiles, EveryLayerReads) {
  for (const test::GoldenCase& which : test::golden_cases()) {
    const test::Golden g = test::read_golden(which);
    EXPECT_GT(g.length, 0) << which.name();
    EXPECT_EQ(static_cast<int64_t>(g.tensors.kv_up.to_f32().size()),
              g.config.heads * (g.config.nope + g.config.value) * g.config.latent);
  }
}

}  // namespace
}  // namespace mla
