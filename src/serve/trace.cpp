#include "serve/trace.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "mla/error.hpp"
#include "serve/hidden.hpp"

namespace mla::serve {
namespace {

constexpr int64_t kMooncakeBlock = 512;
constexpr int64_t kMostTokens = 100'000'000;

class Lines {
 public:
  Lines(std::istream& in, std::string name) : in_(in), name_(std::move(name)) {}
  bool next() {
    if (!std::getline(in_, text)) return false;
    ++line_;
    if (!text.empty() && text.back() == '\r') text.pop_back();
    return true;
  }
  [[noreturn]] void fail(const std::string& why) const {
    throw InputError(name_ + ":" + std::to_string(line_) + ": " + why);
  }
  const std::string& name() const { return name_; }
  bool blank() const { return text.find_first_not_of(" \t") == std::string::npos; }
  std::string text;

 private:
  std::istream& in_;
  std::string name_;
  int64_t line_ = 0;
};

std::string shortest(double x) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.15g", x);
  return text;
}

int64_t token_count(const Lines& at, const std::string& key, double value, int64_t least) {
  if (!(value >= static_cast<double>(least) && value <= static_cast<double>(kMostTokens)) ||
      value != std::floor(value)) {
    at.fail(key + " is " + shortest(value) + ", a whole number from " + std::to_string(least) + " to " +
            std::to_string(kMostTokens) + " is needed");
  }
  return static_cast<int64_t>(value);
}

// Traces record some requests that generated nothing: their prefill still makes one token.
int64_t output_count(const Lines& at, const std::string& key, double value) {
  return std::max<int64_t>(1, token_count(at, key, value, 0));
}

uint64_t private_block(size_t request, int64_t block) {
  return mix(mix(request + 1) + static_cast<uint64_t>(block)) | (uint64_t{1} << 63);
}

void give_private_blocks(Trace& t) {
  for (size_t r = 0; r < t.requests.size(); ++r) {
    TraceRequest& q = t.requests[r];
    const int64_t blocks = (q.input + t.block_tokens - 1) / t.block_tokens;
    for (int64_t b = 0; b < blocks; ++b) q.blocks.push_back(private_block(r, b));
  }
}

TraceRequest mooncake(const Lines& at) {
  const auto json = nlohmann::json::parse(at.text, nullptr, false);
  if (json.is_discarded() || !json.is_object()) at.fail("not a JSON object");
  auto number = [&](const char* key) {
    const auto it = json.find(key);
    if (it == json.end() || !it->is_number()) at.fail(std::string(key) + " is missing or not a number");
    return it->get<double>();
  };
  TraceRequest r;
  const double milliseconds = number("timestamp");
  if (!(milliseconds >= 0 && milliseconds < 1e15))
    at.fail("timestamp is " + shortest(milliseconds) + ", milliseconds from 0 are needed");
  r.arrival = milliseconds * 1e-3;
  r.input = token_count(at, "input_length", number("input_length"), 1);
  r.output = output_count(at, "output_length", number("output_length"));
  const auto ids = json.find("hash_ids");
  if (ids == json.end() || !ids->is_array()) at.fail("hash_ids is missing or not an array");
  const int64_t needed = (r.input + kMooncakeBlock - 1) / kMooncakeBlock;
  if (static_cast<int64_t>(ids->size()) != needed)
    at.fail("hash_ids has " + std::to_string(ids->size()) + " blocks, input_length " + std::to_string(r.input) +
            " needs " + std::to_string(needed));
  for (const auto& id : *ids) {
    if (!id.is_number_integer() || (!id.is_number_unsigned() && id.get<int64_t>() < 0))
      at.fail("hash_ids holds " +
              (id.is_structured() ? "an " + std::string(id.type_name()) : id.dump()) +  // dump recurses
              ", non-negative integers are needed");
    r.blocks.push_back(id.get<uint64_t>());
  }
  return r;
}

std::vector<std::string> fields_of(const std::string& line) {
  std::vector<std::string> fields{""};
  bool quoted = false;
  for (char c : line) {
    if (c == '"') quoted = !quoted;
    else if (c == ',' && !quoted) fields.emplace_back();
    else fields.back() += c;
  }
  for (std::string& f : fields) {
    const size_t first = f.find_first_not_of(" \t"), last = f.find_last_not_of(" \t");
    f = first == std::string::npos ? "" : f.substr(first, last - first + 1);
  }
  return fields;
}

double number_of(const Lines& at, const std::string& key, const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value))
    at.fail(key + " is '" + text + "', a number is needed");
  return value;
}

// "2023-11-16 18:15:46.6805900" to seconds.
double date_time(const Lines& at, const std::string& text) {
  int year = 0, month = 0, day = 0, hour = 0, minute = 0, used = 0;
  double second = 0;
  if (std::sscanf(text.c_str(), "%4d-%2d-%2d %2d:%2d:%lf%n", &year, &month, &day, &hour, &minute, &second, &used) !=
          6 ||
      used != static_cast<int>(text.size()) || month < 1 || month > 12 || day < 1 || day > 31 || hour < 0 ||
      hour > 23 || minute < 0 || minute > 59 || !(second >= 0 && second < 61))
    at.fail("TIMESTAMP is '" + text + "', YYYY-MM-DD hh:mm:ss is needed");
  // Days since the civil epoch, with years counted from March.
  const int y = year - (month <= 2), era = y / 400, of_era = y - era * 400;
  const int of_year = (153 * (month + (month > 2 ? -3 : 9)) + 2) / 5 + day - 1;
  const int64_t days = static_cast<int64_t>(era) * 146097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year;
  return static_cast<double>(days * 86400 + hour * 3600 + minute * 60) + second;
}

void read_csv(Lines& lines, Trace& t, int64_t max_requests) {
  const std::vector<std::string> header = fields_of(lines.text);
  auto column = [&](const char* name) {
    const auto it = std::find(header.begin(), header.end(), name);
    return it == header.end() ? size_t{0} - 1 : static_cast<size_t>(it - header.begin());
  };
  const bool azure = column("TIMESTAMP") < header.size();
  const char* names[] = {azure ? "TIMESTAMP" : "Timestamp", azure ? "ContextTokens" : "Request tokens",
                         azure ? "GeneratedTokens" : "Response tokens"};
  size_t columns[3];
  for (int i = 0; i < 3; ++i) {
    columns[i] = column(names[i]);
    if (columns[i] >= header.size())
      lines.fail(std::string("column '") + names[i] +
                 "' is missing; known traces: Mooncake jsonl, Azure csv, BurstGPT csv");
  }
  t.format = azure ? "Azure csv" : "BurstGPT csv";
  while ((max_requests == 0 || static_cast<int64_t>(t.requests.size()) < max_requests) && lines.next()) {
    if (lines.blank()) continue;
    const std::vector<std::string> f = fields_of(lines.text);
    if (f.size() != header.size())
      lines.fail("has " + std::to_string(f.size()) + " fields, the header has " + std::to_string(header.size()));
    TraceRequest r;
    r.arrival = azure ? date_time(lines, f[columns[0]]) : number_of(lines, names[0], f[columns[0]]);
    const double output = number_of(lines, names[2], f[columns[2]]);
    if (!azure && output == 0) continue;  // BurstGPT records failures so
    r.input = std::max<int64_t>(1, token_count(lines, names[1], number_of(lines, names[1], f[columns[1]]), 0));
    r.output = output_count(lines, names[2], output);
    t.requests.push_back(std::move(r));
  }
  give_private_blocks(t);
}

}  // namespace

Trace read_trace(std::istream& in, const std::string& name, int64_t max_requests) {
  Lines lines(in, name);
  Trace t{.source = name, .format = {}, .requests = {}};
  bool any = false;
  while (!any && lines.next()) any = !lines.blank();
  if (!any) throw InputError(name + ": empty, a trace is needed");
  if (lines.text[lines.text.find_first_not_of(" \t")] == '{') {
    t.format = "Mooncake jsonl";
    t.block_tokens = kMooncakeBlock;
    do {
      if (!lines.blank()) t.requests.push_back(mooncake(lines));
    } while ((max_requests == 0 || static_cast<int64_t>(t.requests.size()) < max_requests) && lines.next());
  } else {
    read_csv(lines, t, max_requests);
  }
  if (t.requests.empty()) throw InputError(name + ": holds no request");
  // Traces are in order of arrival but for clock skew between recorders; ties keep their place.
  std::stable_sort(t.requests.begin(), t.requests.end(),
                   [](const auto& a, const auto& b) { return a.arrival < b.arrival; });
  const double start = t.requests.front().arrival;
  for (TraceRequest& r : t.requests) r.arrival -= start;
  return t;
}

Trace read_trace(const std::filesystem::path& file, int64_t max_requests) {
  std::ifstream in(file);
  if (!in || std::filesystem::is_directory(file)) throw InputError(file.string() + ": cannot be read");
  return read_trace(in, file.string(), max_requests);
}

Trace generate_trace(const Generated& o) {
  auto positive = [](const char* what, int64_t x) {
    if (x < 1 || x > kMostTokens)
      throw InputError(std::string("generated trace: ") + what + " is " + std::to_string(x) + ", allowed 1 to " +
                       std::to_string(kMostTokens));
  };
  positive("requests", o.requests);
  positive("input length", o.input);
  positive("output length", o.output);
  if (!(o.rate >= 0)) throw InputError("generated trace: rate is " + std::to_string(o.rate) + ", must not be negative");
  Trace t{
      .source = "generated, seed " + std::to_string(o.seed), .format = "generated", .block_tokens = 64, .requests = {}};
  uint64_t state = mix(o.seed);
  auto uniform = [&] { return static_cast<double>((state = mix(state + 0x9e3779b97f4a7c15u)) >> 11) * 0x1p-53; };
  auto around = [&](int64_t mean) {
    return std::max<int64_t>(1, static_cast<int64_t>(std::llround(static_cast<double>(mean) * (0.5 + uniform()))));
  };
  double now = 0;
  for (int64_t i = 0; i < o.requests; ++i) {
    TraceRequest r;
    r.arrival = now;
    if (o.rate > 0) now += -std::log(1 - uniform()) / o.rate;
    r.input = around(o.input);
    r.output = around(o.output);
    const int64_t blocks = (r.input + t.block_tokens - 1) / t.block_tokens;
    if (i > 0 && uniform() < 1.0 / 3) {
      const auto& earlier = t.requests[static_cast<size_t>(uniform() * static_cast<double>(i))];
      const int64_t shared = std::min<int64_t>(earlier.input, r.input) / t.block_tokens;
      r.blocks.assign(earlier.blocks.begin(), earlier.blocks.begin() + shared);
    }
    while (static_cast<int64_t>(r.blocks.size()) < blocks)
      r.blocks.push_back(private_block(static_cast<size_t>(i), static_cast<int64_t>(r.blocks.size())));
    t.requests.push_back(std::move(r));
  }
  return t;
}

Trace scale_lengths(Trace t, double factor) {
  if (!(factor > 0 && factor <= 1))
    throw InputError("scale-lengths is " + std::to_string(factor) + ", above 0 and at most 1 is needed");
  if (factor == 1) return t;
  auto scaled = [&](int64_t n) { return std::max<int64_t>(1, std::llround(static_cast<double>(n) * factor)); };
  t.block_tokens = scaled(t.block_tokens);
  for (TraceRequest& r : t.requests) {
    // Rounding the block down may leave a prompt a few tokens longer than its blocks.
    r.input = std::min(scaled(r.input), static_cast<int64_t>(r.blocks.size()) * t.block_tokens);
    r.output = scaled(r.output);
  }
  return t;
}

}  // namespace mla::serve
