// mla check: any op, shape, format and dtype against float64.
#include <cstdio>

#include "backend/cpu/core/target.hpp"
#include "cli/commands.hpp"
#include "cli/params.hpp"

namespace mla::cli {
namespace {

struct Tally {
  int64_t cases = 0, failed = 0;
  double nearest = 0;  ///< largest error / bound
  Tally& operator+=(const Tally& o) {
    cases += o.cases;
    failed += o.failed;
    nearest = std::max(nearest, o.nearest);
    return *this;
  }
};

class Check {
 public:
  explicit Check(CLI::App& command) : shape_(command) {
    command.add_option("op", ops_, "Ops to check; all by default");
    command.add_flag("-v,--verbose", verbose_, "One line a case");
    add_threads(command, threads_);
    add_target(command, target_);
    std::string names;
    for (const cases::CaseType& c : cases::all()) names += " " + std::string(c.op);
    command.footer(
        "Without shape flags every op runs its sweep of shapes; with them, the one case they describe.\nOps:" + names +
        "\n\nExamples:\n"
        "  mla check\n"
        "  mla check attend_latent --context 4096 --heads 128 --format fp8_ds_mla --splits 8\n"
        "  mla check project --dtype bf16 --requests 33 --in 2048 --out 576 --target avx2");
  }

  bool run() {
    std::vector<const cases::CaseType*> types;
    for (const std::string& op : ops_) types.push_back(&cases::find(op));
    if (types.empty())
      for (const cases::CaseType& c : cases::all()) types.push_back(&c);
    const cases::Params params = shape_.params();
    cpu::restrict_target(target_);
    ThreadPool pool(threads_.count, threads_.pinning());
    Stream stream(pool);

    Tally total;
    const bool one = shape_.any();
    for (const cases::CaseType* type : types) {
      Tally tally;
      for (const cases::Params& p : one ? std::vector{params} : type->sweep(params.seed))
        tally += judge(*type, p, stream, one);
      if (!one)
        std::printf("%-16s %4lld cases  largest error %.3f of its bound  %s\n", std::string(type->op).c_str(),
                    static_cast<long long>(tally.cases), tally.nearest, tally.failed ? "FAILED" : "ok");
      std::fflush(stdout);
      total += tally;
    }
    std::printf("%lld of %lld cases within their bounds\n", static_cast<long long>(total.cases - total.failed),
                static_cast<long long>(total.cases));
    return total.failed == 0;
  }

 private:
  Tally judge(const cases::CaseType& type, const cases::Params& p, Stream& stream, bool one) const {
    const std::unique_ptr<cases::Case> c = type.make(p);
    c->run(stream);
    const cases::Verdict v = c->verify();
    if (one || verbose_ || !v.ok)
      std::printf("%s  error %.3g  bound %.3g  %s%s\n", cases::describe(p, type.op).c_str(), v.error, v.bound,
                  v.ok ? "ok" : "FAILED: ", v.ok ? "" : v.detail.c_str());
    return {.cases = 1, .failed = v.ok ? 0 : 1, .nearest = v.bound > 0 ? v.error / v.bound : v.error};
  }

  ShapeFlags shape_;
  std::vector<std::string> ops_;
  std::string target_;
  bool verbose_ = false;
  Threads threads_;
};

}  // namespace

void add_check(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("check", "Judge ops against float64: error, bound, verdict");
  auto check = std::make_shared<Check>(*command);
  command->callback([check, &status] { status = check->run() ? 0 : 1; });
}

}  // namespace mla::cli
