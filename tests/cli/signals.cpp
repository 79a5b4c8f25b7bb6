// Signals that come to a program with threads. That a run ends with what it has is in command.cpp.
#include "cli/signals.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <thread>

namespace mla::cli {
namespace {

auto handler_of(int signal) {
  struct sigaction now {};
  sigaction(signal, nullptr, &now);
  return now.sa_handler;
}

TEST(StopOnSignal, TheFirstStopsEveryThreadAndTheNextEndsTheProgram) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const auto before = handler_of(signal);
    {
      const StopOnSignal signals;
      EXPECT_FALSE(signals.stop());
      EXPECT_EQ(signals.exit_code(), 0);
      const auto wait = [&] {
        while (!signals.stop()) std::this_thread::yield();
      };
      std::thread one(wait), other(wait);
      kill(getpid(), signal);  // whichever thread it comes to
      one.join();
      other.join();
      EXPECT_EQ(signals.exit_code(), 128 + signal);
      EXPECT_EQ(handler_of(signal), SIG_DFL);
    }
    EXPECT_EQ(handler_of(signal), before);
  }
}

TEST(StopOnSignal, AClosedPipeStaysHarmless) {
  const StopOnSignal signals;
  for (int i = 0; i < 3; ++i) raise(SIGPIPE);
  EXPECT_TRUE(signals.stop());
  EXPECT_EQ(signals.exit_code(), 128 + SIGPIPE);
}

TEST(StopOnSignal, WhatWasIgnoredStaysIgnored) {
  const auto before = std::signal(SIGHUP, SIG_IGN);
  {
    const StopOnSignal signals;
    raise(SIGHUP);
    EXPECT_FALSE(signals.stop());
  }
  EXPECT_EQ(handler_of(SIGHUP), SIG_IGN);
  std::signal(SIGHUP, before);
}

}  // namespace
}  // namespace mla::cli
