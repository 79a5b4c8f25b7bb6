// Messages: one line that any terminal can show, whatever was put into them.
#include "mla/error.hpp"

#include <gtest/gtest.h>

#include <random>

#include "core/one_line.hpp"

namespace mla {
namespace {

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
