// Flags that describe a case's shape, shared by `mla check` and `mla bench`; and what both need around them.
#pragma once

#include <CLI/CLI.hpp>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cases/case.hpp"
#include "core/one_line.hpp"
#include "mla/error.hpp"
#include "mla/model.hpp"
#include "mla/plan.hpp"

namespace mla::cli {

std::string number_text(double x);
template <class T>
std::string number_text(T x) {
  return std::to_string(x);
}

/// All of the text as a number from least to most; InputError naming what it is, the text and the limits.
template <class T>
T parse_number(const std::string& what, const std::string& text, T least, T most) {
  T value{};
  const char *begin = text.data(), *end = begin + text.size();
  const auto [at, error] = std::from_chars(begin, end, value);
  if (at != end || error == std::errc::invalid_argument || begin == end || value != value)
    throw InputError(what + " is '" + text + "', a " + (std::is_integral_v<T> ? "whole " : "") + "number from " +
                     number_text(least) + " to " + number_text(most) + " is needed");
  if (error != std::errc() || !(value >= least && value <= most))
    throw InputError(what + " is " + text + ", allowed " + number_text(least) + " to " + number_text(most));
  return value;
}

/// An option whose value is a number from least to most: CLI11 alone takes -1 and what overflows for an unsigned one.
template <class T>
CLI::Option* add_number(CLI::App& command, const std::string& flag, T& value, const std::string& help,
                        T least = std::numeric_limits<T>::lowest(), T most = std::numeric_limits<T>::max()) {
  CLI::Validator strict(
      [=](std::string& text) {
        parse_number<T>(flag, text, least, most);
        return std::string();
      },
      "");
  return command.add_option(flag, value, help)->capture_default_str()->check(std::move(strict));
}

/// An option whose value is the name of a file: an empty one is a mistake, of a variable that was not set for instance.
inline CLI::Option* add_file(CLI::App& command, const std::string& flag, std::string& value, const std::string& help) {
  return command.add_option(flag, value, help)
      ->check(CLI::Validator(
          [=](std::string& text) {
            if (text.empty()) throw InputError(flag + " is '': the name of a file is needed");
            return std::string();
          },
          ""));
}

/// An option's value as `parse` reads it: a choice by its name, a file, a model. Errors say which option it was of.
template <class Parse>
auto read_option(const char* flag, const std::string& text, Parse&& parse) {
  try {
    return parse(text);
  } catch (const Error& e) {
    throw InputError(std::string(flag) + ": " + e.what());
  }
}

/// A dtype of weights or operands: f32 or bf16.
Dtype parse_operands(const char* flag, const std::string& text);

/// Numbers separated by commas; InputError for an empty one or one that is none.
std::vector<int64_t> parse_numbers(const std::string& flag, const std::vector<std::string>& texts, int64_t least,
                                   int64_t most);

/// The config of --model: a preset, a config.json, or a checkpoint folder's.
ModelConfig read_model(const std::string& name, const ReadOptions& options);

/// InputError when one of `flags` was given beside `other`: it would not be read.
void refuse_beside(const CLI::App& command, const char* other, std::initializer_list<const char*> flags);

class ShapeFlags {
 public:
  explicit ShapeFlags(CLI::App& command);
  /// Some flag other than --seed was given.
  bool any() const;
  /// --splits was given.
  bool splits() const { return splits_->count() > 0; }
  /// InputError or an error of the cache's for what cannot be.
  cases::Params params() const;

 private:
  cases::Params p_;
  std::string format_, dtype_, output_, weights_, inputs_, index_format_, index_arithmetic_;
  bool full_ = false;
  std::vector<CLI::Option*> options_;
  CLI::Option *splits_ = nullptr, *topk_ = nullptr;
};

/// A pool's threads, and where they run.
struct Threads {
  int count = 1;
  bool pinned = false;
  Pinning pinning() const { return pinned ? Pinning::cores : Pinning::none; }
};
/// "2 threads", "8 threads pinned on 2 nodes".
std::string text_of(const ThreadPool& pool);

/// --threads: 1 to most_threads(), by default all of the machine's; and --pin.
void add_threads(CLI::App& command, Threads& threads);
/// --device: cpu, cuda or cuda:N. InputError for another name.
class DeviceFlag {
 public:
  explicit DeviceFlag(CLI::App& command);
  /// DeviceError when no such GPU is there.
  Device device() const;
  /// Whether it is there or not.
  Device named() const;

 private:
  std::string name_ = "cpu";
};

/// --allow-unknown: goes on past keys and tensors of a model that are not understood.
void add_allow_unknown(CLI::App& command, ReadOptions& options);
/// --target: limits the instruction set when the command runs; an empty name does not.
void add_target(CLI::App& command, std::string& target);

/// Refuses --sparse, --topk, --index-cache, --index-arithmetic and --hadamard for a model without an indexer: nothing
/// would read them.
void require_indexer(const CLI::App& command, const ModelConfig& model);

/// InputError unless the cache is split over all of --tp's ranks, or over none.
void require_dcp(int dcp, int tp);
void add_dcp_exchange(CLI::App& command, std::string& exchange);

}  // namespace mla::cli
