#include "cli/output.hpp"

#include <ctime>

#include "mla/error.hpp"

namespace mla::cli {

OutputFile::OutputFile(const std::string& path) : path_(path) {
  if (path_.empty()) return;
  file_.open(path_, std::ios::binary);
  if (!file_) throw InputError(path_ + ": cannot be written");
}

void OutputFile::write(const std::function<void(std::ostream&)>& fill) {
  if (!file_.is_open()) return;
  fill(file_);
  if (!file_.flush()) throw InputError(path_ + ": could not be written whole");
}

std::string dump(const nlohmann::json& value) {
  return value.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%MZ", &utc);
  return text;
}

}  // namespace mla::cli
