// Trace formats, what is wrong with a line, scaling, generation, hidden states.
#include "serve/trace.hpp"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <streambuf>
#include <system_error>
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
  EXPECT_NE(block_id(t.requests[0], 0), block_id(t.requests[1], 0));  // no ids: nothing shared
  EXPECT_NE(block_id(t.requests[0], 0), block_id(t.requests[0], 1));
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
  for (const char* unknown : {"a,b,c\n1,2,3\n", "[1,2,3]\n", "\x89PNG\n", "\xff\xfe{\n"})
    EXPECT_EQ(refusal(unknown),
              "t:1: not a known trace: neither Mooncake jsonl, nor Azure csv (TIMESTAMP, ContextTokens, "
              "GeneratedTokens), nor BurstGPT csv (Timestamp, Request tokens, Response tokens)");
  EXPECT_EQ(refusal("TIMESTAMP,ContextTokens\n"), "t:1: column 'GeneratedTokens' of an Azure csv is missing");
  const std::string azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,1\n";
  EXPECT_EQ(refusal(azure + "2023-11-16 18:15:46,1\n"), "t:3: has 2 fields, the header has 3");
  EXPECT_EQ(refusal(azure + "2023-11-16 18:15:46\n"), "t:3: has 1 field, the header has 3");
  EXPECT_EQ(refusal(azure + "yesterday,1,1\n"), "t:3: TIMESTAMP is 'yesterday', YYYY-MM-DD hh:mm:ss is needed");
  EXPECT_EQ(refusal(azure + "2023-13-16 18:15:46,1,1\n"),
            "t:3: TIMESTAMP is '2023-13-16 18:15:46', a day that no month has");
  for (const char* day : {"2023-02-29", "2023-02-31", "2023-04-31", "2023-00-10", "2023-10-00", "2100-02-29"})
    EXPECT_EQ(refusal(azure + day + " 18:15:46,1,1\n"),
              "t:3: TIMESTAMP is '" + std::string(day) + " 18:15:46', a day that no month has");
  for (const char* time :
       {"2023-11-16 24:00:00", "2023-11-16 18:60:00", "2023-11-16 18:15:61", "2023-11-16 18:15", "2023-11-16T18:15:46",
        "23-11-16 18:15:46", "2023-1-16 18:15:46", "2023-11-16 +8:15:46", "2023-11-16 18:15:-4", "2023-11-16 18:15:46Z",
        "2023-11-16 18:15:nan", "2023-11-16 18:15:", "2023-11-16 18:15:-0", "-023-11-16 18:15:46"})
    EXPECT_EQ(refusal(azure + time + ",1,1\n"),
              "t:3: TIMESTAMP is '" + std::string(time) + "', YYYY-MM-DD hh:mm:ss is needed");
  EXPECT_EQ(refusal(azure + "2023-11-16 18:15:46,x,1\n"), "t:3: ContextTokens is 'x', a number is needed");
  EXPECT_EQ(refusal(azure + "2023-11-16 18:15:46,-4,1\n"),
            "t:3: ContextTokens is -4, a whole number from 0 to 100000000 is needed");
  EXPECT_EQ(refusal(azure + "2023-11-16 18:15:46,1,1e99\n"),
            "t:3: GeneratedTokens is 1e+99, a whole number from 0 to 100000000 is needed");
  for (const char* tokens : {"nan", "1e400", "1.5", "100000001", "", "4x"})
    EXPECT_NE(refusal(azure + "2023-11-16 18:15:46," + tokens + ",1\n"), "read") << tokens;
  EXPECT_EQ(refusal("Timestamp,Response tokens\n"), "t:1: column 'Request tokens' of a BurstGPT csv is missing");
  EXPECT_EQ(refusal("Timestamp,Request tokens,Response tokens\n1,2,0\n"), "t: holds no request");
  const std::string good(kMooncake);
  EXPECT_EQ(refusal(good + "{\"timestamp\": 1\n"), "t:4: not valid JSON at byte 15: it ends there");
  EXPECT_EQ(refusal(good + R"({"timestamp":1,"timestamp":2})"), "t:4: key 'timestamp' occurs twice");
  EXPECT_EQ(refusal(good + "{}" + '\0' + "{"), "t:4: not valid JSON: a NUL at byte 2");
  EXPECT_EQ(refusal(good + "[1]\n"), "t:4: not a JSON object");
  EXPECT_EQ(refusal(good + "{\"timestamp\": 1}\n"), "t:4: input_length is missing or not a number");
  EXPECT_EQ(refusal(good + R"({"timestamp":1,"input_length":0,"output_length":1,"hash_ids":[]})"),
            "t:4: input_length is 0, a whole number from 1 to 100000000 is needed");
  EXPECT_EQ(refusal(good + R"({"timestamp":1,"input_length":"5"})"), "t:4: input_length is missing or not a number");
  EXPECT_EQ(refusal(good + R"({"timestamp":1,"input_length":5.5,"output_length":1,"hash_ids":[7]})"),
            "t:4: input_length is 5.5, a whole number from 1 to 100000000 is needed");
  for (const char* ids : {"", R"(,"hash_ids":7)"})
    EXPECT_EQ(refusal(good + R"({"timestamp":1,"input_length":5,"output_length":1)" + ids + "}"),
              "t:4: hash_ids is missing or not an array");
  for (const char* id : {"1.5", "\"a\""})
    EXPECT_EQ(refusal(good + R"({"timestamp":1,"input_length":5,"output_length":1,"hash_ids":[)" + id + "]}"),
              "t:4: hash_ids holds " + std::string(id) + ", non-negative integers are needed");
  EXPECT_EQ(refusal(good + R"({"timestamp":1e15,"input_length":5,"output_length":1,"hash_ids":[7]})"),
            "t:4: timestamp is 1e+15, milliseconds from 0 are needed");
  EXPECT_EQ(refusal(good + R"({"timestamp":1,"input_length":513,"output_length":1,"hash_ids":[7]})"),
            "t:4: hash_ids has 1 block, input_length 513 needs 2");
  EXPECT_EQ(refusal(good + R"({"timestamp":1,"input_length":5,"output_length":1,"hash_ids":[-7]})"),
            "t:4: hash_ids holds -7, non-negative integers are needed");
  EXPECT_EQ(read(good + R"({"timestamp":27000,"input_length":5,"output_length":1,"hash_ids":[-0]})").requests[2].blocks,
            std::vector<uint64_t>{0});
  const std::string deep = std::string(1'000'000, '[') + std::string(1'000'000, ']');
  EXPECT_EQ(refusal(good + R"({"timestamp":1,"input_length":5,"output_length":1,"hash_ids":[)" + deep + "]}"),
            "t:4: nested deeper than 64");
  EXPECT_EQ(refusal(good + R"({"timestamp":-1,"input_length":5,"output_length":1,"hash_ids":[7]})"),
            "t:4: timestamp is -1, milliseconds from 0 are needed");
  EXPECT_THROW(read_trace(std::filesystem::path("/nowhere/trace.csv")), InputError);
  EXPECT_THROW(read_trace(std::filesystem::path("/tmp")), InputError);
}

TEST(Trace, MessagesAreOneBoundedLine) {
  const std::string header = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
  for (const std::string& bad :
       {header + "2023-11-16 18:15:46," + std::string(3'000'000, 'x') + ",1\n",
        header + std::string(3'000'000, 'y') + ",1,1\n", header + "2023-11-16 18:15:46,\x1b[31mred\x07,1\n"}) {
    const std::string why = refusal(bad);
    EXPECT_EQ(why.rfind("t:2: ", 0), 0u) << why;
    EXPECT_LE(why.size(), 1000u);
    for (char c : why) EXPECT_GE(static_cast<unsigned char>(c), 0x20u) << why;
  }
}

TEST(Trace, MostRequestsAndBlankLines) {
  const std::string csv =
      "TIMESTAMP,ContextTokens,GeneratedTokens\n \t\n2023-11-16 18:15:46,1,1\n\n"
      "2023-11-16 18:15:47,2,1\n2023-11-16 18:15:48,3,1";
  EXPECT_EQ(read(csv).requests.size(), 3u);
  EXPECT_EQ(read(csv, 2).requests.size(), 2u);
  EXPECT_EQ(read("\n\t\n" + std::string(kMooncake) + kMooncake).requests.size(), 4u);
  EXPECT_EQ(read(std::string(kMooncake) + kMooncake, 3).requests.size(), 3u);
  EXPECT_EQ(
      read("TIMESTAMP,\"a,b\",ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,\"x,y\",5,1\n").requests[0].input, 5);
}

TEST(Trace, FilesAreRead) {
  const std::filesystem::path file = std::filesystem::temp_directory_path() / ("mla_trace_" + std::to_string(getpid()));
  std::ofstream(file) << kMooncake;
  const Trace t = read_trace(file);
  EXPECT_EQ(t.requests.size(), 2u);
  EXPECT_EQ(t.source, file.string());
  EXPECT_EQ(read_trace(file, 1).requests.size(), 1u);
  std::filesystem::remove(file);
}

TEST(Trace, AByteOrderMarkIsNotPartOfTheFirstLine) {
  const std::string mark = "\xef\xbb\xbf";
  EXPECT_EQ(read(mark + "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46,374,44\r\n").requests[0].input,
            374);
  EXPECT_EQ(read(mark + kMooncake).requests.size(), 2u);
}

TEST(Trace, TimesThatGoBackAreCounted) {
  const std::string header = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
  const Trace t = read(header +
                       "2023-11-16 18:15:46,1,1\n2023-11-16 18:15:50,2,1\n2023-11-16 18:15:49,3,1\n"
                       "2023-11-16 18:15:48,4,1\n2023-11-16 18:15:51,5,1\n");
  EXPECT_EQ(t.descending, 2);
  EXPECT_EQ(t.first_descending, 4);
  EXPECT_EQ(t.requests[1].input, 4);  // sorted
  EXPECT_EQ(t.requests[1].arrival, 2);
  EXPECT_EQ(read(kMooncake).descending, 0);
}

// Times that are finite each, but whose difference is not: nothing that waits for it would run.
TEST(Trace, TimesHaveBounds) {
  const std::string header = "Timestamp,Request tokens,Response tokens\n";
  EXPECT_EQ(refusal(header + "-1e308,1,1\n1e308,1,1\n"),
            "t:2: Timestamp is -1e+308, seconds from -1e12 to 1e12 are needed");
  EXPECT_EQ(refusal(header + "0,1,1\n1e12,1,1\n"),
            "t:3: Timestamp is 1000000000000, seconds from -1e12 to 1e12 are needed");
  EXPECT_EQ(read(header + "-999999999999,1,1\n999999999999,1,1\n").requests[1].arrival, 1999999999998);
}

// A file whose reading fails after some blocks, as of a disk or a network that goes away.
class FailingFile : public std::streambuf {
 public:
  FailingFile(std::string text, size_t good) : text_(std::move(text)), good_(good) {}

 private:
  int underflow() override {
    if (at_ == good_) throw std::ios_base::failure("read", std::error_code(EIO, std::generic_category()));
    setg(&text_[at_], &text_[at_], &text_[at_] + 1);
    ++at_;
    return traits_type::to_int_type(*gptr());
  }
  std::string text_;
  size_t good_, at_ = 0;
};

TEST(Trace, AReadErrorIsNotTheEnd) {
  const std::string burst = "Timestamp,Request tokens,Response tokens\n5,472,18\n45,1087,3\n";
  for (const std::string& text : {std::string(kMooncake), burst})
    for (size_t good = 0; good < text.size(); ++good) {
      FailingFile file(text, good);
      std::istream in(&file);
      const int64_t line = 1 + std::count(text.begin(), text.begin() + static_cast<ptrdiff_t>(good), '\n');
      try {
        read_trace(in, "t");
        FAIL() << "read to the end after " << good << " bytes";
      } catch (const InputError& e) {
        const std::string why = e.what();
        EXPECT_EQ(why.rfind("t:" + std::to_string(line) + ": cannot be read: ", 0), 0u) << why;
        EXPECT_NE(why.find(std::strerror(EIO)), std::string::npos) << why;
      }
    }
}

// Lines are read in pieces: those that end with a piece, about it, and at the end of the file.
TEST(Trace, LinesOfEveryLength) {
  constexpr size_t kPiece = (size_t{1} << 14) - 1;
  const std::string header = "Timestamp,Request tokens,Response tokens\n";
  for (const size_t pieces : {1, 2})
    for (size_t size = pieces * kPiece - 2; size <= pieces * kPiece + 3; ++size)
      for (const char* end : {"", "\n", "\r\n", "\n5,7,9", "\n\n5,7,9\n"}) {
        const std::string line = "1,2," + std::string(size - 5, ' ') + "3";
        const Trace t = read(header + line + end);
        ASSERT_EQ(t.requests.size(), std::strchr(end, '5') ? 2u : 1u) << size << end;
        EXPECT_EQ(t.requests[0].input, 2);
        EXPECT_EQ(t.requests[0].output, 3);
        EXPECT_EQ(t.requests.back().input, std::strchr(end, '5') ? 7 : 2);
      }
}

// What does not end, without being kept.
class Endless : public std::streambuf {
 public:
  explicit Endless(std::string text) : text_(std::move(text)) {}

 private:
  int underflow() override {
    setg(text_.data(), text_.data(), text_.data() + text_.size());
    return traits_type::to_int_type(*gptr());
  }
  std::string text_;
};

TEST(Trace, WhatNeverEndsIsRefused) {
  const auto refused = [](const std::string& text) -> std::string {
    Endless file(text);
    std::istream in(&file);
    try {
      read_trace(in, "t");
    } catch (const InputError& e) {
      return e.what();
    }
    return "read";
  };
  EXPECT_EQ(refused("x"), "t:1: the line has more than 4194304 bytes");
  EXPECT_EQ(refused(std::string((1 << 20) - 1, ' ') + "\n"), "t:1025: the trace has more than 1073741824 bytes");
  // As many ids a line as the longest prompt has blocks.
  std::string ids = "0";
  for (int i = 1; i < 195'313; ++i) ids += ",0";
  EXPECT_EQ(refused(R"({"timestamp":0,"input_length":100000000,"output_length":1,"hash_ids":[)" + ids + "]}\n"),
            "t:86: the trace has more than 16777216 hash_ids");
}

TEST(Trace, OnlyRegularFilesAreRead) {
  const std::filesystem::path fifo = std::filesystem::temp_directory_path() / ("mla_fifo_" + std::to_string(getpid()));
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  for (const std::filesystem::path& file : {fifo, std::filesystem::path("/dev/zero"), fifo.parent_path()}) try {
      read_trace(file);
      ADD_FAILURE() << file << " was read";
    } catch (const InputError& e) {
      EXPECT_EQ(e.what(), file.string() + ": cannot be read: not a regular file");
    }
  std::filesystem::remove(fifo);
}

// A small file that asks for a lot: lengths cost nothing until they are served.
TEST(Trace, LongRequestsTakeNoMemory) {
  std::string text = "Timestamp,Request tokens,Response tokens\n";
  for (int i = 0; i < 30'000; ++i) text += std::to_string(i) + ",100000000,100000000\n";
  rusage before{}, after{};
  getrusage(RUSAGE_SELF, &before);
  const Trace t = scale_lengths(read(text), 0.5);
  EXPECT_EQ(t.requests.size(), 30'000u);
  EXPECT_EQ(t.requests[7].input, 50'000'000);
  const Trace g = generate_trace({.requests = 30, .input = 100'000'000, .seed = 5});
  EXPECT_EQ(g.requests.size(), 30u);
  getrusage(RUSAGE_SELF, &after);
  EXPECT_LT(after.ru_maxrss - before.ru_maxrss, 400 << 10);  // KiB; the 47 GB of all their blocks before
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
  std::set<uint64_t> blocks;
  for (size_t i = 0; i < a.requests.size(); ++i) {
    EXPECT_EQ(a.requests[i].blocks, b.requests[i].blocks);
    EXPECT_EQ(a.requests[i].arrival, b.requests[i].arrival);
    if (i > 0) {
      EXPECT_GE(a.requests[i].arrival, a.requests[i - 1].arrival);
    }
    EXPECT_LE(static_cast<int64_t>(a.requests[i].blocks.size()) * a.block_tokens, a.requests[i].input);
    // What it does not share is its own.
    const int64_t shared = static_cast<int64_t>(a.requests[i].blocks.size());
    for (int64_t block = shared; block * a.block_tokens < a.requests[i].input; ++block)
      EXPECT_TRUE(blocks.insert(block_id(a.requests[i], block)).second);
    for (int64_t block = 0; block < shared; ++block) EXPECT_TRUE(blocks.contains(block_id(a.requests[i], block)));
    input += static_cast<double>(a.requests[i].input);
    ++first_blocks[block_id(a.requests[i], 0)];
  }
  EXPECT_NEAR(input / 300, 200, 15);
  EXPECT_NEAR(a.requests.back().arrival, 60, 15);
  EXPECT_LT(first_blocks.size(), 260u);  // some prompts continue others
  for (const TraceRequest& r : generate_trace({.requests = 20, .input = 20, .output = 2, .rate = 0}).requests)
    EXPECT_EQ(r.arrival, 0);
  EXPECT_THROW(generate_trace({.requests = 0}), InputError);
  EXPECT_THROW(generate_trace({.rate = -1}), InputError);
  EXPECT_THROW(generate_trace({.rate = INFINITY}), InputError);
  try {
    generate_trace({.requests = 8, .rate = 1e-308});
    FAIL() << "a request arrived at no time";
  } catch (const InputError& e) {
    EXPECT_STREQ(e.what(), "generated trace: --rate is 1e-308, request 1 would arrive after 1e12 seconds");
  }
  EXPECT_THROW(generate_trace({.requests = int64_t{1} << 24}), InputError);
  EXPECT_THROW(generate_trace({.requests = 1000, .input = 100'000'000}), InputError);
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
