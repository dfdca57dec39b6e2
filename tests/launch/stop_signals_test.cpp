#include "cli/launch/stop_signals.h"

#include <unistd.h>

#include <csignal>

#include <gtest/gtest.h>

namespace tessera::cli {
namespace {

void say_cleaned() { [[maybe_unused]] const ssize_t done = write(STDERR_FILENO, "cleaned\n", 8); }

// The launcher of these tests is the process itself.
StopOptions quiet(pid_t launcher_pid = 0) { return {launcher_pid, say_cleaned, false}; }

TEST(StopSignalsDeathTest, EndAtOnceInSetUp) {
  EXPECT_EXIT(
      {
        const StopSignals signals(quiet());
        raise(SIGTERM);
      },
      ::testing::KilledBySignal(SIGTERM), "cleaned");
}

TEST(StopSignalsDeathTest, AreNotedOnceDeferredAndEndAtTheSecond) {
  EXPECT_EXIT(
      {
        StopSignals signals(quiet());
        signals.defer();
        raise(SIGHUP);
        if (signals.pending() != SIGHUP) _exit(1);
        raise(SIGINT);
      },
      ::testing::KilledBySignal(SIGINT), "cleaned");
}

TEST(StopSignalsDeathTest, OfTheLauncherAreNeverTheSecond) {
  EXPECT_EXIT(
      {
        StopSignals signals(quiet(getpid()));
        signals.defer();
        raise(SIGTERM);
        raise(SIGTERM);
        _exit(signals.pending());
      },
      ::testing::ExitedWithCode(SIGTERM), "");
}

TEST(StopSignalsDeathTest, AreDroppedWhenAllIsWritten) {
  EXPECT_EXIT(
      {
        StopSignals signals(quiet());
        signals.defer();
        raise(SIGTERM);
        signals.close();
        raise(SIGTERM);
        _exit(0);
      },
      ::testing::ExitedWithCode(0), "");
}

TEST(StopSignalsDeathTest, StayIgnoredIfTheyWere) {
  EXPECT_EXIT(
      {
        std::signal(SIGHUP, SIG_IGN);  // as nohup does
        const StopSignals signals(quiet());
        raise(SIGHUP);
        _exit(0);
      },
      ::testing::ExitedWithCode(0), "");
}

TEST(StopSignals, GiveBackWhatWasThere) {
  struct sigaction before {};
  sigaction(SIGTERM, nullptr, &before);
  { const StopSignals signals(quiet()); }
  struct sigaction after {};
  sigaction(SIGTERM, nullptr, &after);
  EXPECT_EQ(before.sa_handler, after.sa_handler);
}

}  // namespace
}  // namespace tessera::cli
