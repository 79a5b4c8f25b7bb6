// mla: what will this model, this cache format and this traffic cost on this machine?
//
// Every error is one line on stderr; kExitCodes says what the program returns.
#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "cli/commands.hpp"
#include "cli/no_memory.hpp"
#include "cli/output.hpp"
#include "cli/version.hpp"
#include "core/nearest.hpp"
#include "core/one_line.hpp"
#include "mla/error.hpp"

namespace {

constexpr int kFailed = 1, kBadUsage = 2;

int fail(const std::string& message, int status = kBadUsage) {
  std::cout.flush();
  std::fflush(stdout);
  std::cerr << "mla: " << mla::one_line(message) << std::endl;
  return status;
}

constexpr const char* kExamples =
    "Examples:\n"
    "  mla run                                                replay the built-in request trace\n"
    "  mla run --trace requests.jsonl --model deepseek-v2-lite --layers 2 --verify 50\n"
    "  mla bench                                              every op and the layer, in percent of this machine's "
    "roof\n"
    "  mla bench attend_latent --heads 128 --context 4096     one op at one shape\n"
    "  mla bench comm --ranks 2                               calls between ranks, for mla plan --link\n"
    "  mla check                                              every op against float64\n"
    "  mla check attend_latent --format fp8_ds_mla --page-size 16\n"
    "  mla plan --help                                        how a batch would be executed\n"
    "  mla info                                               machine, roofs, models, cache formats\n"
    "  mla info CHECKPOINT                                    a checkpoint's attention tensors\n"
    "Exit codes: 0; 1, a check failed, every request was refused, or results could not be written; 2, bad usage or "
    "input;\n128 + n, ended by signal n (130 Ctrl-C, 143 SIGTERM, 129 SIGHUP, 141 SIGPIPE): mla run and mla bench "
    "still "
    "print and write what they have.";

// The options of a command; of the program alone its commands, too.
std::string nearest_name(const CLI::App& app, const std::string& argument) {
  std::vector<std::string> names;
  for (const CLI::Option* o : app.get_options(nullptr))
    for (const std::string& name : o->get_lnames()) names.push_back("--" + name);
  for (const CLI::App* command : app.get_subcommands(nullptr)) names.push_back(command->get_name());
  const std::vector<std::string_view> known(names.begin(), names.end());
  return mla::did_you_mean(argument.substr(0, argument.find('=')), known);
}

// With the name that the first option was meant to be, if one is near.
std::string unexpected(const CLI::App& app) {
  std::string all, meant;
  for (const CLI::App* command : app.get_subcommands())
    for (const std::string& argument : command->remaining()) {
      all += " '" + argument + "'";
      if (meant.empty() && argument.starts_with("-")) meant = nearest_name(*command, argument);
    }
  return all + meant;
}

// What is wrong with a command line beside names: an option that may stand once and did not, else what CLI11 says.
std::string misused(const CLI::App& app, const CLI::ParseError& e) {
  for (const CLI::App* command : app.get_subcommands())
    for (const CLI::Option* o : command->get_options(nullptr))
      if (o->count() > 1 && o->count() > static_cast<size_t>(o->get_items_expected_max()))
        return o->get_name() + " was given " + (o->count() == 2 ? "twice" : std::to_string(o->count()) + " times");
  return e.what();
}

int run(int argc, char** argv) try {
  CLI::App app("Multi-head Latent Attention for LLM serving: replay, measure, check, plan", "mla");
  app.set_version_flag("--version", std::string(MLA_VERSION) + " (commit " + mla::cli::commit() + ")");
  app.require_subcommand(1);
  app.footer(kExamples);
  app.get_formatter()->column_width(36);

  int status = 0;
  mla::cli::add_run(app, status);
  mla::cli::add_bench(app, status);
  mla::cli::add_check(app, status);
  mla::cli::add_plan(app, status);
  mla::cli::add_info(app, status);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& e) {  // --help, --version
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    if (const auto rest = app.remaining(); app.get_subcommands().empty() && !rest.empty()) {
      std::string known;
      for (const CLI::App* command : app.get_subcommands(nullptr)) known += " " + command->get_name();
      return fail("unknown command or option '" + rest[0] + "'; commands:" + known + nearest_name(app, rest[0]));
    }
    const std::string extras = dynamic_cast<const CLI::ExtrasError*>(&e) ? unexpected(app) : "";
    return fail((extras.empty() ? misused(app, e) : "not expected:" + extras) + " (see mla --help)");
  }
  return status;
} catch (const mla::cli::OutputError& e) {
  return fail(e.what(), kFailed);
} catch (const mla::Error& e) {
  return fail(e.what());
} catch (const std::bad_alloc&) {
  return fail("out of memory");
} catch (const std::exception& e) {
  return fail(e.what());
}

}  // namespace

int main(int argc, char** argv) {
  std::set_terminate(mla::cli::end_without_memory);
  signal(SIGXFSZ, SIG_IGN);  // a write past a limit on files is then an error like others
  mla::cli::hold_standard_descriptors();
  mla::cli::remember_command_line(argc, argv);
  const int status = run(argc, argv);
  // What a reader that left did not take is known by SIGPIPE's status.
  const std::string error = mla::cli::standard_output_error();
  return error.empty() || status != 0 ? status : fail("standard output could not be written: " + error, kFailed);
}
