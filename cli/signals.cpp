#include "cli/signals.hpp"

namespace mla::cli {
namespace {

constexpr std::array<int, 4> kSignals{SIGINT, SIGTERM, SIGHUP, SIGPIPE};

std::atomic<bool> stopped{false};
std::atomic<int> number{0};
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<int>::is_always_lock_free);

void on_signal(int signal) {
  int none = 0;
  number.compare_exchange_strong(none, signal);
  stopped = true;
  struct sigaction action {};
  action.sa_handler = SIG_DFL;
  for (const int s : kSignals)
    if (s != SIGPIPE) sigaction(s, &action, nullptr);
}

}  // namespace

StopOnSignal::StopOnSignal() {
  stopped = false;
  number = 0;
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  for (size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], nullptr, &before_[i]);
    if (before_[i].sa_handler != SIG_IGN) sigaction(kSignals[i], &action, nullptr);
  }
}

StopOnSignal::~StopOnSignal() {
  for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &before_[i], nullptr);
}

const std::atomic<bool>& StopOnSignal::stop() const { return stopped; }

int StopOnSignal::exit_code() const { return number == 0 ? 0 : 128 + number; }

}  // namespace mla::cli
