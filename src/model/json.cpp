#include "model/json.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <unordered_set>
#include <vector>

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
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) refuse(file.string(), "cannot be read: not a regular file");
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

nlohmann::json parse_strict(std::string_view text, const std::function<void(const std::string&)>& fail) {
  constexpr size_t kMostDepth = 64;  // the parser does not recurse, but printing a value does
  // nlohmann's lexer takes a NUL for the end of its input, and JSON has no place for one.
  if (const size_t at = text.find('\0'); at != text.npos) fail("not valid JSON: a NUL at byte " + std::to_string(at));
  using Event = nlohmann::json::parse_event_t;
  std::vector<std::unordered_set<std::string>> keys;  // of the objects and arrays that are open
  const auto strict = [&](int, Event event, nlohmann::json& value) {
    switch (event) {
      case Event::object_start:
      case Event::array_start:
        if (keys.size() == kMostDepth) fail("nested deeper than " + std::to_string(kMostDepth));
        keys.emplace_back();
        break;
      case Event::object_end:
      case Event::array_end: keys.pop_back(); break;
      case Event::key:
        if (!keys.back().insert(value.get_ref<const std::string&>()).second)
          fail("key '" + value.get_ref<const std::string&>() + "' occurs twice");
        break;
      case Event::value: break;
    }
    return true;
  };
  nlohmann::json json = nlohmann::json::parse(text, strict, /*allow_exceptions=*/false);
  if (json.is_discarded()) fail("not valid JSON");
  return json;
}

nlohmann::json parse_object(std::string_view text, std::string_view where) {
  nlohmann::json json = parse_strict(text, [&](const std::string& why) { refuse(where, why); });
  if (!json.is_object()) refuse(where, "not a JSON object");
  return json;
}

}  // namespace mla
