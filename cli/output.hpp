// Files that a command writes at its end, and what they share.
#pragma once

#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

namespace mla::cli {

/// A file opened before the work that fills it, so that hours of work do not end in a path that cannot be written.
class OutputFile {
 public:
  /// InputError when it cannot be opened. An empty path: no file, and write() does nothing.
  explicit OutputFile(const std::string& path);
  explicit operator bool() const { return file_.is_open(); }
  /// InputError when not all of it could be written.
  void write(const std::function<void(std::ostream&)>& fill);

 private:
  std::string path_;
  std::ofstream file_;
};

/// JSON by lines; bytes that are not UTF-8 become replacement characters, for names come from files.
std::string dump(const nlohmann::json& value);

/// The time now, as 2031-05-09T14:03Z.
std::string utc_now();

}  // namespace mla::cli
