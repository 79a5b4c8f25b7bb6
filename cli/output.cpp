#include "cli/output.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <iostream>
#include <streambuf>
#include <utility>

#include "cli/version.hpp"

namespace mla::cli {
namespace {

namespace fs = std::filesystem;

// Writes to a descriptor and remembers why it could not.
class DescriptorBuffer : public std::streambuf {
 public:
  explicit DescriptorBuffer(int descriptor) : descriptor_(descriptor), room_(1 << 16) {
    setp(room_.data(), room_.data() + room_.size());
  }
  int error() const { return error_; }

 private:
  int overflow(int c) override {
    if (sync() != 0) return traits_type::eof();
    if (c != traits_type::eof()) sputc(static_cast<char>(c));
    return traits_type::not_eof(c);
  }
  int sync() override {
    for (const char* at = pbase(); at < pptr() && error_ == 0;) {
      const ssize_t n = ::write(descriptor_, at, static_cast<size_t>(pptr() - at));
      if (n > 0) at += n;
      else if (n < 0 && errno != EINTR) error_ = errno;
    }
    setp(room_.data(), room_.data() + room_.size());
    return error_ == 0 ? 0 : -1;
  }
  int descriptor_, error_ = 0;
  std::vector<char> room_;
};

// "" when all of it was written.
std::string write_to(int descriptor, const Outputs::Fill& fill) {
  DescriptorBuffer buffer(descriptor);
  std::ostream out(&buffer);
  try {
    fill(out);
  } catch (const std::exception& e) {
    return e.what();
  }
  out.flush();
  return buffer.error() == 0 ? "" : std::strerror(buffer.error());
}

// A new file in the folder; its name replaces `folder`. -1 with errno.
int open_beside(fs::path& folder) {
  std::string name = (folder.empty() ? fs::path(".") : folder) / ".mla-XXXXXX";
  const int descriptor = mkostemp(name.data(), O_CLOEXEC);
  folder = name;
  return descriptor;
}

bool is_descriptor(int descriptor, const struct stat& file) {
  struct stat other {};
  const int flags = fcntl(descriptor, F_GETFL);
  return flags != -1 && (flags & O_ACCMODE) != O_RDONLY && fstat(descriptor, &other) == 0 &&
         other.st_dev == file.st_dev && other.st_ino == file.st_ino;
}

bool same_file(const fs::path& a, const fs::path& b) {
  std::error_code error;
  // Absolute first: what is not there yet stays as it is spelled otherwise.
  const auto place = [&](const fs::path& p) { return fs::weakly_canonical(fs::absolute(p, error), error); };
  return fs::equivalent(a, b, error) || place(a) == place(b);
}

bool reads(const fs::path& input, const fs::path& output) {
  std::error_code error;
  if (!fs::is_directory(input, error)) return same_file(input, output);
  return (output.filename() == "config.json" || output.filename() == "model.safetensors.index.json" ||
          output.extension() == ".safetensors") &&
         same_file(input / output.filename(), output);
}

std::string quoted(const std::string& argument) {
  if (!argument.empty() && argument.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                                      "-_./:,=+@%") == std::string::npos)
    return argument;
  std::string q = "'";
  for (const char c : argument) q += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return q + "'";
}

std::string command_line = "mla";

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%MZ", &utc);
  return text;
}

}  // namespace

Outputs::File Outputs::open(const NamedPath& name) {
  const auto refuse = [&](const std::string& why) {
    throw InputError(std::string(name.flag) + ": " + name.path + " cannot be written: " + why);
  };
  if (name.path == "-") refuse("standard output is named /dev/stdout, a file of this name ./-");
  File file{.flag = name.flag, .path = name.path, .error = {}};
  struct stat there {};
  if (stat(name.path.c_str(), &there) != 0) {
    if (errno != ENOENT) refuse(std::strerror(errno));
    const mode_t mask = umask(0);
    umask(mask);
    file.mode = 0666 & ~mask;
  } else if (is_descriptor(STDOUT_FILENO, there) || is_descriptor(STDERR_FILENO, there)) {
    file.descriptor = fcntl(is_descriptor(STDOUT_FILENO, there) ? STDOUT_FILENO : STDERR_FILENO, F_DUPFD_CLOEXEC, 3);
    if (file.descriptor < 0) refuse(std::strerror(errno));
  } else if (S_ISDIR(there.st_mode) || S_ISBLK(there.st_mode)) {
    refuse(S_ISDIR(there.st_mode) ? "it is a folder" : "it is a block device");
  } else if (!S_ISREG(there.st_mode)) {
    // A pipe without a reader would wait for one.
    file.descriptor = ::open(name.path.c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (file.descriptor < 0) refuse(errno == ENXIO ? "nobody reads it" : std::strerror(errno));
    fcntl(file.descriptor, F_SETFL, fcntl(file.descriptor, F_GETFL) & ~O_NONBLOCK);
  } else if (access(name.path.c_str(), W_OK) != 0) {
    refuse(std::strerror(errno));
  } else {
    file.mode = there.st_mode & 07777;
    file.old = true;
  }
  if (file.descriptor >= 0) return file;
  file.target = fs::weakly_canonical(name.path);
  fs::path beside = file.target.parent_path();
  const int descriptor = open_beside(beside);
  if (descriptor < 0) refuse(std::strerror(errno));
  close(descriptor);
  unlink(beside.c_str());
  return file;
}

Outputs::Outputs(const std::vector<NamedPath>& outputs, const std::vector<NamedPath>& inputs) {
  for (const NamedPath& name : outputs) {
    if (name.path.empty()) continue;
    for (const File& other : files_)
      if (same_file(other.path, name.path) && !fs::is_character_file(name.path))
        throw InputError(std::string(name.flag) + " is " + name.path + ", which " + other.flag + " writes");
    for (const NamedPath& input : inputs)
      if (!input.path.empty() && reads(input.path, name.path))
        throw InputError(std::string(name.flag) + " is " + name.path + ", which " + input.flag + " reads");
    files_.push_back(open(name));
  }
}

Outputs::~Outputs() {
  for (const File& file : files_)
    if (file.descriptor >= 0) close(file.descriptor);
}

bool Outputs::wants(std::string_view flag) const {
  for (const File& file : files_)
    if (file.flag == flag) return true;
  return false;
}

void Outputs::put(File& file, const Fill& fill) {
  file.kept = keep_old_ && file.old && !file.written;
  if (file.kept) return;
  file.written = true;
  file.error.clear();
  if (file.descriptor >= 0) {
    std::fflush(stdout);  // its text comes first where both are one
    file.error = write_to(file.descriptor, fill);
    return;
  }
  fs::path beside = file.target.parent_path();
  const int descriptor = open_beside(beside);
  if (descriptor < 0) {
    file.error = std::strerror(errno);
    return;
  }
  file.error = write_to(descriptor, fill);
  const auto check = [&](int result) {
    if (result != 0 && file.error.empty()) file.error = std::strerror(errno);
  };
  check(fchmod(descriptor, file.mode));
  check(fsync(descriptor));
  check(close(descriptor));
  if (!file.error.empty()) {
    unlink(beside.c_str());
  } else if (rename(beside.c_str(), file.target.c_str()) != 0) {
    file.error = std::string(std::strerror(errno)) + "; what was to be there is in " + beside.string();
  }
}

void Outputs::write(std::string_view flag, const Fill& fill) {
  for (File& file : files_)
    if (file.flag == flag) put(file, fill);
}

void Outputs::write_so_far(std::string_view flag, const Fill& fill) {
  for (File& file : files_)
    if (file.flag == flag && file.descriptor < 0) put(file, fill);
}

void Outputs::finish() {
  std::string errors, written, kept;
  for (const File& file : files_) {
    if (file.kept) kept += (kept.empty() ? "" : ", ") + file.path;
    if (!file.written) continue;
    if (!file.error.empty())
      errors += (errors.empty() ? "" : "; ") + file.flag + ": " + file.path + " was not written: " + file.error;
    else if (file.descriptor < 0) written += (written.empty() ? "" : ", ") + file.path;
  }
  if (!written.empty()) std::printf("written    %s\n", written.c_str());
  if (!kept.empty()) std::printf("kept       %s as it was\n", kept.c_str());
  if (!errors.empty()) throw OutputError(errors);
}

void hold_standard_descriptors() {
  for (const int d : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (fcntl(d, F_GETFD) == -1 && errno == EBADF)
      (void)!::open("/dev/null", d == STDIN_FILENO ? O_WRONLY : O_RDONLY);  // the lowest that is free: d
}

std::string standard_output_error() {
  if (std::fflush(stdout) != 0) return std::strerror(errno);
  std::cout.flush();
  return std::ferror(stdout) != 0 || !std::cout ? "not all of it was taken" : "";
}

void remember_command_line(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) command_line += " " + quoted(argv[i]);
}

nlohmann::json provenance(const CLI::App& command) {
  nlohmann::json options = nlohmann::json::object();
  for (const CLI::Option* o : command.get_options()) {
    std::string key = o->get_single_name();
    if (key == "help") continue;
    std::replace(key.begin(), key.end(), '-', '_');
    const bool number = o->get_type_name().starts_with("INT") || o->get_type_name().starts_with("UINT") ||
                        o->get_type_name().starts_with("FLOAT");
    const auto value = [&](const std::string& text) {
      const nlohmann::json parsed = number ? nlohmann::json::parse(text, nullptr, false) : nlohmann::json();
      return parsed.is_number() ? parsed : nlohmann::json(text);
    };
    if (o->get_expected_max() == 0) {  // a flag
      options[key] = o->count() > 0;
    } else if (o->get_expected_max() > 1) {
      options[key] = nlohmann::json::array();
      for (const std::string& text : o->results()) options[key].push_back(value(text));
    } else {
      options[key] = value(o->count() > 0 ? o->results().back() : o->get_default_str());
    }
  }
  return {{"command", command.get_name()},
          {"command_line", command_line},
          {"version", MLA_VERSION},
          {"commit", commit()},
          {"date", utc_now()},
          {"options", options}};
}

std::string dump(const nlohmann::json& value) {
  return value.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace mla::cli
