// Messages: one line that any terminal can show, whatever was put into them.
#include "mla/error.hpp"

#include <gtest/gtest.h>

#include <random>

#include "core/counted.hpp"
#include "core/driver_text.hpp"
#include "core/nearest.hpp"
#include "core/one_line.hpp"

namespace mla {
namespace {

TEST(DidYouMean, TheNearestOfTheKnown) {
  constexpr std::string_view kKnown[] = {"run", "bench", "--layers", "--latent", "attend_latent", "attend_expanded"};
  EXPECT_EQ(did_you_mean("runn", kKnown), "; did you mean 'run'?");
  EXPECT_EQ(did_you_mean("rnu", kKnown), "; did you mean 'run'?");  // one swap
  EXPECT_EQ(did_you_mean("--layer", kKnown), "; did you mean '--layers'?");
  EXPECT_EQ(did_you_mean("attend_latnt", kKnown), "; did you mean 'attend_latent'?");
  EXPECT_EQ(did_you_mean("attnd_expandd", kKnown), "; did you mean 'attend_expanded'?");
  for (const std::string far : {"", "x", "rabbit", "-", "--requests", "attend"})
    EXPECT_EQ(did_you_mean(far, kKnown), "") << far;
  EXPECT_EQ(did_you_mean(std::string(100000, 'r'), kKnown), "");
  EXPECT_EQ(did_you_mean("run", {}), "");
}

TEST(DriverText, SaysWhatIsThereAndWhatIsNeeded) {
  EXPECT_EQ(driver_text(0, 13000), "no NVIDIA driver is installed, one for CUDA 13.0 or newer is needed");
  EXPECT_EQ(driver_text(12080, 13020),
            "the NVIDIA driver serves CUDA 12.8 at most, one for CUDA 13.0 or newer is needed");
  EXPECT_EQ(driver_text(13010, 13000), "the NVIDIA driver, for CUDA 13.1, shows no GPU");
}

TEST(Counted, OneHasNoPluralAndBytesHaveUnits) {
  EXPECT_EQ(counted(1, "row"), "1 row");
  EXPECT_EQ(counted(0, "row"), "0 rows");
  EXPECT_EQ(readable_bytes(0), "0 B");
  EXPECT_EQ(readable_bytes(1023), "1023 B");
  EXPECT_EQ(readable_bytes(1536), "1.5 KiB");
  EXPECT_EQ(readable_bytes(uint64_t{1} << 31), "2.0 GiB");
  EXPECT_EQ(readable_bytes(~uint64_t{0}), "16.0 EiB");
}

TEST(OneLine, WhatCanBeShownStays) {
  EXPECT_EQ(one_line(""), "");
  EXPECT_EQ(one_line("plan: topk is 3, allowed 1 to 2"), "plan: topk is 3, allowed 1 to 2");
  EXPECT_EQ(one_line("k\u00f6ln \u4e2d\u6587 \U0001f600 \u00a0"), "k\u00f6ln \u4e2d\u6587 \U0001f600 \u00a0");
  EXPECT_EQ(one_line(std::string(kLongestLine, 'x')), std::string(kLongestLine, 'x'));
}

TEST(OneLine, ControlsAndSeparatorsAreEscaped) {
  EXPECT_EQ(one_line("a\nb\tc\r\x1b[31m\x7f"), "a\\x0ab\\x09c\\x0d\\x1b[31m\\x7f");
  EXPECT_EQ(one_line(std::string_view("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(one_line("\u0085 \u009b \u2028 \u2029"), "\\xc2\\x85 \\xc2\\x9b \\xe2\\x80\\xa8 \\xe2\\x80\\xa9");
}

TEST(OneLine, BytesThatAreNotUtf8AreEscaped) {
  EXPECT_EQ(one_line("\x9b"
                     "1m"),
            "\\x9b1m");
  EXPECT_EQ(one_line("\xc3"), "\\xc3");                             // cut short
  EXPECT_EQ(one_line("\xc0\xaf"), "\\xc0\\xaf");                    // overlong
  EXPECT_EQ(one_line("\xed\xa0\x80"), "\\xed\\xa0\\x80");           // a surrogate
  EXPECT_EQ(one_line("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");  // past U+10ffff
  EXPECT_EQ(one_line("\xe4\xb8"), "\\xe4\\xb8");
}

TEST(OneLine, LongOnesAreCutAndSaySo) {
  const std::string text = "begin " + std::string(5'000'000, 'x') + " end", line = one_line(text);
  EXPECT_LE(line.size(), kLongestLine);
  EXPECT_EQ(line.substr(0, 7), "begin x");
  EXPECT_EQ(line.substr(line.size() - 5), "x end");
  EXPECT_NE(line.find(" ... (4999050 bytes left out) ... "), std::string::npos) << line;
  EXPECT_LE(one_line(std::string(kLongestLine, '\n')).size(), kLongestLine);
}

// A second time changes nothing, whatever the bytes; all of it is UTF-8, no character is cut in two.
TEST(OneLine, AnyBytes) {
  std::mt19937 random(5);
  const std::string pieces[] = {"a", "\n", "\x80", "\xc3\xa4", "\xe4\xb8\xad", "\xf0\x9f\x98\x80", "\xe2\x80", "\\x0"};
  for (int i = 0; i < 2000; ++i) {
    std::string text;
    for (size_t n = random() % 900; n > 0; --n) text += pieces[random() % std::size(pieces)];
    const std::string line = one_line(text);
    EXPECT_LE(line.size(), kLongestLine);
    EXPECT_EQ(one_line(line), line);
  }
}

TEST(Errors, AreOneBoundedLine) {
  const ShapeError error("first\nsecond " + std::string(1 << 20, 'y'));
  const std::string what = error.what();
  EXPECT_LE(what.size(), kLongestLine);
  EXPECT_EQ(what.substr(0, 17), "first\\x0asecond y");
}

}  // namespace
}  // namespace mla
