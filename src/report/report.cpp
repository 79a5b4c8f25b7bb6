#include "report/report.hpp"

#include <string_view>

#include "mla/error.hpp"

namespace mla::report {

// Made at build time of the files beside this one.
extern const char page_html[], style_css[], script_js[];

namespace {

using nlohmann::json;

// A script element ends at the first "</script", wherever that stands, and "<!--" changes how it is read: no "<" is
// left. JSON has it within strings alone, where an escape means the same.
std::string for_script(const json& data) {
  const std::string text = data.dump(-1, ' ', false, json::error_handler_t::replace);
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    if (c == '<') out += "\\u003c";
    else out += c;
  }
  return out;
}

}  // namespace

std::string html(const json& data) {
  const std::string command =
      data.is_object() && data.contains("command") && data["command"].is_string() ? data["command"] : json("");
  if (command != "run" && command != "bench")
    throw InputError("report: data[\"command\"] is '" + command + "', 'run' or 'bench' is needed");
  const std::string embedded = for_script(data);
  // One pass over the template: what is put in is not searched again.
  std::string page;
  std::string_view rest = page_html;
  while (true) {
    const size_t at = rest.find("{{");
    page += rest.substr(0, at);
    if (at == std::string_view::npos) return page;
    const size_t end = rest.find("}}", at);
    const std::string_view name = rest.substr(at + 2, end - at - 2);
    if (name == "style") page += style_css;
    else if (name == "script") page += script_js;
    else if (name == "data") page += embedded;
    else if (name == "command") page += command;
    rest.remove_prefix(end + 2);
  }
}

}  // namespace mla::report
