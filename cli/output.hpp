// What a command writes besides its text: files that are whole or not there, and what they say of how they were made.
#pragma once

#include <CLI/CLI.hpp>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "mla/error.hpp"

namespace mla::cli {

/// Results could not be written: exit code 1.
class OutputError : public Error {
 public:
  using Error::Error;
};

/// A file as an option names it; an empty path is none.
struct NamedPath {
  const char* flag;
  std::string path;
};

/// The files that a command writes. Each is written beside its place and takes it when it is whole, so that what stood
/// there before survives every failure. A device, a pipe or standard output is written as it is.
class Outputs {
 public:
  /// InputError, before any work, for a path that cannot be written, one named twice, or one of the inputs: a file, or
  /// a checkpoint's folder.
  Outputs(const std::vector<NamedPath>& outputs, const std::vector<NamedPath>& inputs);
  ~Outputs();
  Outputs(const Outputs&) = delete;
  Outputs& operator=(const Outputs&) = delete;

  bool wants(std::string_view flag) const;
  bool wants_any() const { return !files_.empty(); }
  using Fill = std::function<void(std::ostream&)>;
  /// Writes it, if the flag was given. A failure is kept for finish(), so that the others are still written.
  void write(std::string_view flag, const Fill& fill);
  /// The same with what is known so far, to be written again; not to what can only be written once.
  void write_so_far(std::string_view flag, const Fill& fill);
  /// For a run that has nothing to tell: from here on files that were there before it stay as they are.
  void keep_old() { keep_old_ = true; }
  /// Says what was written and what was kept; OutputError when something could not be written.
  void finish();

 private:
  struct File {
    std::string flag, path;
    std::filesystem::path target;  ///< without links
    int descriptor = -1;           ///< of what is not a regular file
    unsigned mode = 0;
    bool old = false;  ///< a regular file that was there before
    bool written = false, kept = false;
    std::string error;
  };
  static File open(const NamedPath& name);
  void put(File& file, const Fill& fill);
  std::vector<File> files_;
  bool keep_old_ = false;
};

/// Standard descriptors that are closed would be taken by the first files to be opened: they get ones that fail.
void hold_standard_descriptors();
/// What of standard output could not be written, or "".
std::string standard_output_error();

/// The program's arguments, for provenance().
void remember_command_line(int argc, char** argv);
/// Of a result: command, its line as a shell would take it, version, commit, date, and every option with its value.
nlohmann::json provenance(const CLI::App& command);

/// JSON by lines; bytes that are not UTF-8 become replacement characters, for names come from files.
std::string dump(const nlohmann::json& value);

}  // namespace mla::cli
