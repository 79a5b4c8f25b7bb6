// The page of a report as text: whole, alone, and unmoved by what its data says.
#include "report/report.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "mla/error.hpp"

namespace mla::report {
namespace {

using nlohmann::json;

constexpr const char* kOpen = "<script id=\"data\" type=\"application/json\">";

// What a browser takes for the data: all up to the first end of a script.
std::string embedded(const std::string& page) {
  const size_t at = page.find(kOpen);
  if (at == std::string::npos) return "";
  const size_t from = at + std::string(kOpen).size();
  return page.substr(from, page.find("</script", from) - from);
}

size_t occurrences(const std::string& text, const std::string& of) {
  size_t n = 0;
  for (size_t at = text.find(of); at != std::string::npos; at = text.find(of, at + 1)) ++n;
  return n;
}

TEST(Report, CarriesItsDataUnchanged) {
  const json data{{"command", "bench"},
                  {"rows", {{{"name", "norm, \"quoted\" \\ µ"}, {"median_s", 1.25e-6}, {"ok", true}}}},
                  {"none", nullptr}};
  const std::string page = html(data);
  EXPECT_EQ(json::parse(embedded(page)), data);
  EXPECT_NE(page.find("<title>mla bench</title>"), std::string::npos);
  EXPECT_EQ(page.find("{{"), std::string::npos) << "a part of the template was not filled in";
}

TEST(Report, NamesAreNotMarkup) {
  for (const std::string evil : {"</script><script>alert(1)</script>", "</SCRIPT >", "<!--<script>", "]]>", "{{data}}",
                                 "{{script}}", "<img src=x onerror=alert(1)>", "\xe2\x80\xa8"}) {
    const json data{{"command", "run"}, {"model", {{"name", evil}}}, {evil, evil}};
    const std::string page = html(data), plain = html({{"command", "run"}});
    EXPECT_EQ(json::parse(embedded(page)), data) << evil;
    EXPECT_EQ(occurrences(page, "<script"), occurrences(plain, "<script")) << evil;
    EXPECT_EQ(occurrences(page, "</script"), occurrences(plain, "</script")) << evil;
    EXPECT_EQ(occurrences(page, "<!--"), occurrences(plain, "<!--")) << evil;
    EXPECT_EQ(occurrences(page, "<img"), 0u) << evil;
  }
}

TEST(Report, BytesThatAreNotUtf8AreReplaced) {
  const std::string page = html({{"command", "run"}, {"trace", {{"source", "a\xff\xfe.jsonl"}}}});
  EXPECT_EQ(json::parse(embedded(page))["trace"]["source"], "a\xef\xbf\xbd\xef\xbf\xbd.jsonl");
}

TEST(Report, LoadsNothing) {
  const std::string page = html({{"command", "run"}});
  EXPECT_NE(page.find("default-src 'none'"), std::string::npos);
  // The one address is SVG's name space, which is never fetched.
  const std::string name_space = "http://www.w3.org/2000/svg";
  std::string rest = page;
  for (size_t at; (at = rest.find(name_space)) != std::string::npos;) rest.erase(at, name_space.size());
  for (const char* s : {"http:", "https:", "@import", "url(", " src=", "innerHTML", "insertAdjacentHTML",
                        "document.write", "eval(", "fetch(", "XMLHttpRequest"})
    EXPECT_EQ(rest.find(s), std::string::npos) << s;
}

TEST(Report, OtherDataIsRefused) {
  for (const json& data :
       {json{{"command", "plan"}}, json::object(), json::array(), json{{"command", 3}}, json(nullptr)})
    EXPECT_THROW(html(data), InputError) << data;
}

}  // namespace
}  // namespace mla::report
