#include "model/json.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "model/text.hpp"

namespace mla {

std::string read_text(const std::filesystem::path& file) {
  constexpr uintmax_t kMost = 100'000'000;
  // Without O_NONBLOCK a FIFO would wait here for someone to write.
  const int fd = ::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) refuse(file.string(), std::string("cannot be read: ") + std::strerror(errno));
  const struct Close {
    int fd;
    ~Close() { ::close(fd); }
  } close{fd};
  struct stat info {};
  if (fstat(fd, &info) != 0) refuse(file.string(), std::string("cannot be examined: ") + std::strerror(errno));
  if (!S_ISREG(info.st_mode)) refuse(file.string(), "cannot be read: not a regular file");
  const uintmax_t size = static_cast<uintmax_t>(info.st_size);
  if (size > kMost) refuse(file.string(), "has " + std::to_string(size) + " bytes, at most " + std::to_string(kMost));
  std::string text(size, '\0');
  for (size_t at = 0; at < text.size();) {
    const ssize_t n = ::read(fd, text.data() + at, text.size() - at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0)
      refuse(file.string(),
             "cannot be read to its end: " + std::string(n < 0 ? std::strerror(errno) : "it became shorter"));
    at += static_cast<size_t>(n);
  }
  return text;
}

namespace {

using Json = nlohmann::json;

// Leaves an empty object or array, or a scalar: nlohmann destroys those without allocating.
void take_apart(Json& value) noexcept {
  if (auto* object = value.get_ptr<Json::object_t*>()) {
    for (auto& [key, member] : *object) take_apart(member);
    object->clear();
  } else if (auto* array = value.get_ptr<Json::array_t*>()) {
    for (Json& element : *array) take_apart(element);
    array->clear();
  }
}

// Builds the document as it is read, so that what an error leaves behind is the document's to take apart.
class Builder : public nlohmann::json_sax<Json> {
 public:
  Builder(Json& root, const std::function<void(const std::string&)>& fail) : root_(root), fail_(fail) {}

  bool null() override { return put(nullptr); }
  bool boolean(bool v) override { return put(v); }
  bool number_integer(number_integer_t v) override { return put(v); }
  bool number_unsigned(number_unsigned_t v) override { return put(v); }
  bool number_float(number_float_t v, const string_t&) override { return put(v); }
  bool string(string_t& v) override { return put(std::move(v)); }
  bool binary(binary_t&) override { return false; }
  bool start_object(size_t) override { return open(Json::object()); }
  bool start_array(size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& v) override {
    auto [at, fresh] = open_[depth_ - 1]->get_ref<Json::object_t&>().try_emplace(v);
    if (!fresh) fail_("key '" + v + "' occurs twice");
    member_ = &at->second;
    return true;
  }
  bool parse_error(size_t read, const std::string&, const nlohmann::detail::exception&) override {
    read_ = read;
    return false;
  }
  /// Bytes up to an error, with the one that it was seen at.
  size_t read() const { return read_; }

 private:
  static constexpr size_t kMostDepth = 64;  // printing a value and taking it apart recurse

  Json* place(Json value) {
    Json* at = &root_;
    if (depth_ > 0) {
      auto* array = open_[depth_ - 1]->get_ptr<Json::array_t*>();
      at = array ? &array->emplace_back() : member_;
    }
    *at = std::move(value);
    return at;
  }
  bool put(Json value) { return place(std::move(value)); }
  bool open(Json value) {
    if (depth_ == kMostDepth) fail_("nested deeper than " + std::to_string(kMostDepth));
    open_[depth_] = place(std::move(value));
    ++depth_;
    return true;
  }
  bool close() {
    --depth_;
    return true;
  }

  Json& root_;
  const std::function<void(const std::string&)>& fail_;
  std::array<Json*, kMostDepth> open_{};  // the objects and arrays around the place
  size_t depth_ = 0;
  Json* member_ = nullptr;  // of the object that is read
  size_t read_ = 0;
};

// Where text is no JSON: bytes count from 0, lines and columns from 1.
std::string place(std::string_view text, size_t read) {
  if (text.find_first_not_of(" \t\r\n") == text.npos) return ": it is empty";
  constexpr size_t kShown = 20;
  const bool ended = read > text.size();
  const size_t at = ended ? text.size() : std::max<size_t>(read, 1) - 1;
  const std::string_view before = text.substr(0, at);
  const size_t newline = before.rfind('\n'), line = newline == before.npos ? 0 : newline + 1;
  std::string s = " at byte " + std::to_string(at);
  if (line > 0)
    s += " (line " + std::to_string(1 + std::count(before.begin(), before.end(), '\n')) + ", column " +
         std::to_string(at - line + 1) + ")";
  if (ended) return s + ": it ends there";
  const size_t first = std::max(line, at - std::min(at, kShown));
  return s + ", the end of '" + std::string(text.substr(first, at + 1 - first)) + "'";
}

}  // namespace

JsonDocument::~JsonDocument() { take_apart(root); }

JsonDocument parse_strict(std::string_view text, const std::function<void(const std::string&)>& fail) {
  // nlohmann's lexer takes a NUL for the end of its input, and JSON has no place for one.
  if (const size_t at = text.find('\0'); at != text.npos) fail("not valid JSON: a NUL at byte " + std::to_string(at));
  JsonDocument document;
  Builder builder(document.root, fail);
  if (!Json::sax_parse(text, &builder)) fail("not valid JSON" + place(text, builder.read()));
  return document;
}

JsonDocument parse_object(std::string_view text, std::string_view where) {
  JsonDocument document = parse_strict(text, [&](const std::string& why) { refuse(where, why); });
  if (!document.root.is_object()) refuse(where, "not a JSON object");
  return document;
}

void require_keys(const Json& object, std::span<const std::string_view> known, std::string_view where) {
  for (const auto& [key, value] : object.items()) {
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    std::string list;
    for (const std::string_view k : known) list.append(list.empty() ? "" : ", ").append(k);
    throw InputError(std::string(where) + ": " + key + " is " + value.dump() + ", known are " + list);
  }
}

}  // namespace mla
