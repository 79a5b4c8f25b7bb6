#include "serve/trace.hpp"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>

#include "core/counted.hpp"
#include "mla/error.hpp"
#include "model/json.hpp"
#include "serve/hidden.hpp"

namespace mla::serve {
namespace {

constexpr int64_t kMooncakeBlock = 512;
constexpr int64_t kMostTokens = 100'000'000;
constexpr double kMostSeconds = 1e12;  // differences keep a fraction of a millisecond
// Of a trace, so that memory stays bounded whatever its lines say.
constexpr size_t kMostLine = size_t{4} << 20;
constexpr int64_t kMostBytes = int64_t{1} << 30, kMostRequests = int64_t{1} << 23, kMostIds = int64_t{1} << 24;

class Lines {
 public:
  Lines(std::istream& in, std::string name) : in_(in), name_(std::move(name)) {
    in_.exceptions(std::ios_base::badbit);  // or a read error would look like the end
  }
  /// The next line into `text`; false at the end.
  bool next() {
    ++line_;
    text.clear();
    for (bool more = true; more;) {
      try {
        in_.getline(piece_, sizeof piece_);
      } catch (const std::ios_base::failure& e) {
        fail("cannot be read: " + std::string(e.what()));
      }
      const size_t taken = static_cast<size_t>(in_.gcount());
      bytes_ += static_cast<int64_t>(taken);
      if (bytes_ > kMostBytes) fail("the trace has more than " + std::to_string(kMostBytes) + " bytes");
      if (taken == 0) return false;  // a piece that is full at the end of the file has seen the end
      more = in_.fail();             // the piece is full, the line goes on
      if (more) in_.clear();
      text.append(piece_, taken - (more || in_.eof() ? 0 : 1));
      if (text.size() > kMostLine) fail("the line has more than " + std::to_string(kMostLine) + " bytes");
    }
    if (line_ == 1 && text.starts_with("\xef\xbb\xbf")) text.erase(0, 3);  // a mark that spreadsheets write
    if (!text.empty() && text.back() == '\r') text.pop_back();
    return true;
  }
  [[noreturn]] void fail(const std::string& why) const {
    throw InputError(name_ + ":" + std::to_string(line_) + ": " + why);
  }
  bool blank() const {
    return std::all_of(text.begin(), text.end(), [](char c) { return c == ' ' || c == '\t'; });
  }
  int64_t number() const { return line_; }
  std::string text;

 private:
  std::istream& in_;
  std::string name_;
  char piece_[size_t{1} << 14];
  int64_t line_ = 0, bytes_ = 0;
};

std::string shortest(double x) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.15g", x);
  return text;
}

int64_t token_count(const Lines& at, std::string_view key, double value, int64_t least) {
  if (!(value >= static_cast<double>(least) && value <= static_cast<double>(kMostTokens)) ||
      value != std::floor(value)) {
    at.fail(std::string(key) + " is " + shortest(value) + ", a whole number from " + std::to_string(least) + " to " +
            std::to_string(kMostTokens) + " is needed");
  }
  return static_cast<int64_t>(value);
}

// Traces record some requests that generated nothing: their prefill still makes one token.
int64_t output_count(const Lines& at, std::string_view key, double value) {
  return std::max<int64_t>(1, token_count(at, key, value, 0));
}

int64_t blocks_of(const Trace& t, const TraceRequest& r) { return (r.input + t.block_tokens - 1) / t.block_tokens; }

// In the order of the file, where clocks may be askew.
void add(Trace& t, TraceRequest r, const Lines& at) {
  r.own = t.requests.size();
  if (static_cast<int64_t>(r.own) == kMostRequests)
    at.fail("the trace has more than " + std::to_string(kMostRequests) + " requests");
  if (!t.requests.empty() && r.arrival < t.requests.back().arrival && t.descending++ == 0)
    t.first_descending = at.number();
  t.requests.push_back(std::move(r));
}

TraceRequest mooncake(const Lines& at) {
  const JsonDocument line = parse_strict(at.text, [&](const std::string& why) { at.fail(why); });
  const nlohmann::json& json = line.root;
  if (!json.is_object()) at.fail("not a JSON object");
  auto number = [&](const char* key) {
    const auto it = json.find(key);
    if (it == json.end() || !it->is_number()) at.fail(std::string(key) + " is missing or not a number");
    return it->get<double>();
  };
  TraceRequest r;
  const double milliseconds = number("timestamp");
  if (!(milliseconds >= 0 && milliseconds < kMostSeconds * 1e3))
    at.fail("timestamp is " + shortest(milliseconds) + ", milliseconds from 0 are needed");
  r.arrival = milliseconds * 1e-3;
  r.input = token_count(at, "input_length", number("input_length"), 1);
  r.output = output_count(at, "output_length", number("output_length"));
  const auto ids = json.find("hash_ids");
  if (ids == json.end() || !ids->is_array()) at.fail("hash_ids is missing or not an array");
  const int64_t needed = (r.input + kMooncakeBlock - 1) / kMooncakeBlock;
  if (static_cast<int64_t>(ids->size()) != needed)
    at.fail("hash_ids has " + counted(static_cast<int64_t>(ids->size()), "block") + ", input_length " +
            std::to_string(r.input) + " needs " + std::to_string(needed));
  for (const auto& id : *ids) {
    if (!id.is_number_integer() || (!id.is_number_unsigned() && id.get<int64_t>() < 0))
      at.fail("hash_ids holds " + id.dump() + ", non-negative integers are needed");
    r.blocks.push_back(id.get<uint64_t>());
  }
  return r;
}

std::vector<std::string> fields_of(const std::string& line) {
  std::vector<std::string> fields(1);
  bool quoted = false;
  for (char c : line) {
    if (c == '"') quoted = !quoted;
    else if (c == ',' && !quoted) fields.emplace_back();
    else fields.back() += c;
  }
  for (std::string& f : fields) {
    const size_t first = f.find_first_not_of(" \t"), last = f.find_last_not_of(" \t");
    if (first == std::string::npos) f.clear();
    else f = f.substr(first, last - first + 1);
  }
  return fields;
}

double number_of(const Lines& at, std::string_view key, const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value))
    at.fail(std::string(key) + " is '" + text + "', a number is needed");
  return value;
}

double seconds_of(const Lines& at, std::string_view key, const std::string& text) {
  const double value = number_of(at, key, text);
  if (!(std::fabs(value) < kMostSeconds))
    at.fail(std::string(key) + " is " + shortest(value) + ", seconds from -1e12 to 1e12 are needed");
  return value;
}

// "2023-11-16 18:15:46.6805900" to seconds.
double date_time(const Lines& at, const std::string& text) {
  const char *next = text.data(), *const end = next + text.size();
  bool good = true;
  auto number = [&](int digits, char then) {
    int value = 0;
    const char* const last = next + std::min<ptrdiff_t>(digits, end - next);
    const auto [stop, error] = std::from_chars(next, last, value);
    good = good && error == std::errc() && stop == next + digits && *next != '-' && stop != end && *stop == then;
    if (good) next = stop + 1;
    return value;
  };
  const int year = number(4, '-');
  const unsigned month = static_cast<unsigned>(number(2, '-')), day = static_cast<unsigned>(number(2, ' '));
  const int hour = number(2, ':'), minute = number(2, ':');
  double second = 0;
  const auto [stop, error] = std::from_chars(next, end, second, std::chars_format::fixed);
  const std::chrono::year_month_day date{std::chrono::year(year), std::chrono::month(month), std::chrono::day(day)};
  if (!good || error != std::errc() || stop != end || hour > 23 || minute > 59 || std::signbit(second) ||
      !(second < 61))
    at.fail("TIMESTAMP is '" + text + "', YYYY-MM-DD hh:mm:ss is needed");
  if (!date.ok()) at.fail("TIMESTAMP is '" + text + "', a day that no month has");
  const int64_t days = std::chrono::sys_days(date).time_since_epoch().count();
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
  if (column(names[0]) >= header.size())
    lines.fail(
        "not a known trace: neither Mooncake jsonl, nor Azure csv (TIMESTAMP, ContextTokens, GeneratedTokens), nor "
        "BurstGPT csv (Timestamp, Request tokens, Response tokens)");
  size_t columns[3];
  for (int i = 0; i < 3; ++i) {
    columns[i] = column(names[i]);
    if (columns[i] >= header.size())
      lines.fail(std::string("column '") + names[i] + "' of " + (azure ? "an Azure" : "a BurstGPT") +
                 " csv is missing");
  }
  t.format = azure ? "Azure csv" : "BurstGPT csv";
  while ((max_requests == 0 || static_cast<int64_t>(t.requests.size()) < max_requests) && lines.next()) {
    if (lines.blank()) continue;
    const std::vector<std::string> f = fields_of(lines.text);
    if (f.size() != header.size())
      lines.fail("has " + counted(static_cast<int64_t>(f.size()), "field") + ", the header has " +
                 std::to_string(header.size()));
    TraceRequest r;
    r.arrival = azure ? date_time(lines, f[columns[0]]) : seconds_of(lines, names[0], f[columns[0]]);
    const double output = number_of(lines, names[2], f[columns[2]]);
    if (!azure && output == 0) continue;  // BurstGPT records failures so
    r.input = std::max<int64_t>(1, token_count(lines, names[1], number_of(lines, names[1], f[columns[1]]), 0));
    r.output = output_count(lines, names[2], output);
    add(t, std::move(r), lines);
  }
}

}  // namespace

uint64_t block_id(const TraceRequest& r, int64_t block) {
  if (block < static_cast<int64_t>(r.blocks.size())) return r.blocks[static_cast<size_t>(block)];
  return mix(mix(r.own + 1) + static_cast<uint64_t>(block)) | (uint64_t{1} << 63);
}

Trace read_trace(std::istream& in, const std::string& name, int64_t max_requests) {
  Lines lines(in, name);
  Trace t{.source = name, .format = {}, .requests = {}};
  bool any = false;
  while (!any && lines.next()) any = !lines.blank();
  if (!any) throw InputError(name + ": empty, a trace is needed");
  if (lines.text[lines.text.find_first_not_of(" \t")] == '{') {
    t.format = "Mooncake jsonl";
    t.block_tokens = kMooncakeBlock;
    int64_t ids = 0;
    do {
      if (lines.blank()) continue;
      add(t, mooncake(lines), lines);
      ids += static_cast<int64_t>(t.requests.back().blocks.size());
      if (ids > kMostIds) lines.fail("the trace has more than " + std::to_string(kMostIds) + " hash_ids");
    } while ((max_requests == 0 || static_cast<int64_t>(t.requests.size()) < max_requests) && lines.next());
  } else {
    read_csv(lines, t, max_requests);
  }
  if (t.requests.empty()) throw InputError(name + ": holds no request");
  // Ties keep their place.
  std::stable_sort(t.requests.begin(), t.requests.end(),
                   [](const auto& a, const auto& b) { return a.arrival < b.arrival; });
  const double start = t.requests.front().arrival;
  for (TraceRequest& r : t.requests) r.arrival -= start;
  return t;
}

Trace read_trace(const std::filesystem::path& file, int64_t max_requests) {
  std::error_code error;
  const auto status = std::filesystem::status(file, error);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))  // a FIFO would wait for a writer
    throw InputError(file.string() + ": cannot be read: not a regular file");
  std::ifstream in(file, std::ios::binary);
  if (!in) throw InputError(file.string() + ": cannot be read: " + std::strerror(errno));
  return read_trace(in, file.string(), max_requests);
}

Trace generate_trace(const Generated& o) {
  auto within = [](const char* what, int64_t x, int64_t most) {
    if (x < 1 || x > most)
      throw InputError(std::string("generated trace: ") + what + " is " + std::to_string(x) + ", allowed 1 to " +
                       std::to_string(most));
  };
  within("--requests", o.requests, kMostRequests);
  within("--input-len", o.input, kMostTokens);
  within("--output-len", o.output, kMostTokens);
  if (!(o.rate >= 0 && std::isfinite(o.rate)))
    throw InputError("generated trace: --rate is " + shortest(o.rate) + ", a number from 0 is needed");
  Trace t;
  t.source = "generated, seed " + std::to_string(o.seed);
  t.format = "generated";
  t.block_tokens = 64;
  uint64_t state = mix(o.seed);
  auto uniform = [&] { return static_cast<double>((state = mix(state + 0x9e3779b97f4a7c15u)) >> 11) * 0x1p-53; };
  auto around = [&](int64_t mean) {
    return std::max<int64_t>(1, static_cast<int64_t>(std::llround(static_cast<double>(mean) * (0.5 + uniform()))));
  };
  double now = 0;
  int64_t ids = 0;
  for (int64_t i = 0; i < o.requests; ++i) {
    TraceRequest r{.own = static_cast<uint64_t>(i)};
    if (!(now < kMostSeconds))
      throw InputError("generated trace: --rate is " + shortest(o.rate) + ", request " + std::to_string(i) +
                       " would arrive after 1e12 seconds");
    r.arrival = now;
    if (o.rate > 0) now += -std::log(1 - uniform()) / o.rate;
    r.input = around(o.input);
    r.output = around(o.output);
    if (i > 0 && uniform() < 1.0 / 3) {
      const auto& earlier = t.requests[static_cast<size_t>(uniform() * static_cast<double>(i))];
      const int64_t shared = std::min<int64_t>(earlier.input, r.input) / t.block_tokens;
      if ((ids += shared) > kMostIds)
        throw InputError("generated trace: " + std::to_string(o.requests) + " requests of " + std::to_string(o.input) +
                         " tokens share more than " + std::to_string(kMostIds) + " blocks");
      for (int64_t b = 0; b < shared; ++b) r.blocks.push_back(block_id(earlier, b));
    }
    t.requests.push_back(std::move(r));
  }
  return t;
}

Trace scale_lengths(Trace t, double factor) {
  if (!(factor > 0 && factor <= 1))
    throw InputError("--scale-lengths is " + shortest(factor) + ", above 0 and at most 1 is needed");
  if (factor == 1) return t;
  auto scaled = [&](int64_t n) { return std::max<int64_t>(1, std::llround(static_cast<double>(n) * factor)); };
  const int64_t block_tokens = scaled(t.block_tokens);
  for (TraceRequest& r : t.requests) {
    // Rounding the block down may leave a prompt a few tokens longer than its blocks.
    r.input = std::min(scaled(r.input), blocks_of(t, r) * block_tokens);
    r.output = scaled(r.output);
  }
  t.block_tokens = block_tokens;
  return t;
}

}  // namespace mla::serve
