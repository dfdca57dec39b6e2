// Real processes: what a user sees, and what is left behind, when ranks end in all their ways.
#include "cli/launch/launcher.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/launch/launch_support.h"

namespace tessera::testing {
namespace {

constexpr const char* kProgram = "rank_program_plain";

// Ranks of these tests that wait would wait forever, so the launcher need not give them time.
std::vector<std::string> ranks(int num_ranks, std::vector<std::string> behaviour) {
  std::vector<std::string> arguments{
      "--ranks", std::to_string(num_ranks), "--settle", "20", "--grace", "0"};
  arguments.insert(arguments.end(), behaviour.begin(), behaviour.end());
  return arguments;
}

ProcessResult run(int num_ranks, std::vector<std::string> behaviour,
                  std::map<std::string, std::string> environment = {}) {
  return MarkedRun(kProgram, ranks(num_ranks, std::move(behaviour)), std::move(environment))
      .finish();
}

TEST(Launcher, ReturnsZeroAndSaysNothingWhenAllRanksSucceed) {
  for (const int num_ranks : {1, 2, 16}) {
    const ProcessResult result = run(num_ranks, {"succeed"});
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_EQ(result.err, "");
  }
}

TEST(Launcher, GivesEachRankItsNumberAndTheArguments) {
  const ProcessResult result = run(3, {"print", "a b", "--flag"});
  for (const char* rank : {"0", "1", "2"}) {
    const std::string line = std::string("rank ") + rank + " of 3: a b --flag threads=1\n";
    EXPECT_EQ(count(result.out, line), 1) << result.out;
  }
}

TEST(Launcher, SharesTheCoresAmongTheRanksAndSaysSo) {
  const ProcessResult one = run(1, {"print"}, {{"OMP_NUM_THREADS", ""}});
  const std::string cores =
      std::to_string(std::max(1, static_cast<int>(std::thread::hardware_concurrency())));
  EXPECT_EQ(count(one.out, "threads=" + cores + "\n"), 1) << one.out;
  EXPECT_EQ(one.err, "launcher: OMP_NUM_THREADS=" + cores + " in each rank (ranks: 1, cores: " +
                         cores + "); set it to choose another number\n");
  // More ranks than cores: one thread each, never none.
  const ProcessResult many = run(20, {"print"}, {{"OMP_NUM_THREADS", ""}});
  if (std::stoi(cores) < 40) {
    EXPECT_EQ(count(many.out, "threads=1\n"), 20) << many.out;
  }
}

TEST(Launcher, LeavesTheUsersNumberOfThreadsAlone) {
  const ProcessResult result = run(2, {"print"}, {{"OMP_NUM_THREADS", "3"}});
  EXPECT_EQ(count(result.out, "threads=3\n"), 2) << result.out;
  EXPECT_EQ(result.err, "");
}

TEST(Launcher, ShowsTheErrorOfTheRankThatFailedOnceAndReturnsItsCode) {
  struct Case {
    std::vector<std::string> behaviour;
    int exit_code;
    const char* said;
  };
  for (const Case& item :
       {Case{{"throw", "2"}, 1, "rank 2 failed: disk is full; make room on it"},
        Case{{"throw-config", "1"}, 2, "rank 1 failed: lr=-1 is negative"},
        Case{{"throw-nonsense", "0"}, 1, "rank 0 failed: an exception of unknown type"},
        Case{{"exit", "1", "3"}, 3, "rank 1 exited with code 3"},
        Case{{"signal", "1", "9"}, 137, "rank 1 was killed by signal 9 (SIGKILL)"},
        Case{{"signal", "1", "11"}, 139, "rank 1 was killed by signal 11 (SIGSEGV)"},
        Case{{"signal", "1", "6"}, 134, "rank 1 was killed by signal 6 (SIGABRT)"}}) {
    const ProcessResult result = run(3, item.behaviour);
    EXPECT_EQ(result.exit_code, item.exit_code);
    EXPECT_EQ(count(result.err, item.said), 1) << result.err;
    EXPECT_EQ(result.err_lines().size(), 1U) << result.err;
  }
}

TEST(Launcher, ShowsOneErrorWhenAllRanksFailAlike) {
  const ProcessResult result = run(5, {"all-throw"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.err_lines().size(), 1U) << result.err;
  EXPECT_EQ(count(result.err, "has a bad config"), 1);
}

TEST(Launcher, WatchesASingleRankLikeMany) {
  EXPECT_EQ(run(1, {"exit", "0", "7"}).exit_code, 7);
  EXPECT_EQ(run(1, {"signal", "0", "9"}).exit_code, 137);
}

TEST(Launcher, ShowsTheKilledRankAndNotThoseThatLostIt) {
  // Settling ends when all have ended; its limit is far away, so the choice does not hang on time.
  MarkedRun launch(kProgram, {"--ranks", "4", "--settle", "100000", "lose", "3"});
  const ProcessResult result = launch.finish();
  EXPECT_EQ(result.exit_code, 137);
  EXPECT_EQ(count(result.err, "rank 3 was killed"), 1) << result.err;
  EXPECT_EQ(count(result.err, "lost rank"), 0) << result.err;
}

TEST(Launcher, EndsAFailedRankThoughOneOfItsThreadsIsStuck) {
  const ProcessResult result = run(1, {"throw-beside-stuck-thread"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.err, "rank 0 failed: rank 0 gives up\n");
}

TEST(Launcher, EndsARunThatIsLostWithinTwoSeconds) {
  const cli::LaunchOptions options;
  EXPECT_LT(options.settle + options.grace + options.terminate, std::chrono::seconds(2));
  EXPECT_FALSE(options.stop) << "a run that was told to stop takes the time of a step";
}

TEST(Launcher, PassesASignalOnAndReturnsItsCode) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    MarkedRun launch(kProgram, {"--ranks", "3", "wait"});
    launch.wait_until_ready(3);
    kill(launch.process().pid(), signal);
    const ProcessResult result = launch.finish();
    EXPECT_EQ(result.exit_code, 128 + signal);
    EXPECT_EQ(count(result.err, ": stopping 3 ranks; a second signal kills them\n"), 1)
        << result.err;
    EXPECT_EQ(result.err_lines().size(), 1U) << result.err;
  }
}

TEST(Launcher, KillsRanksThatIgnoreTheSignal) {
  MarkedRun launch(kProgram, {"--ranks", "2", "--stop", "10", "ignore-signals"});
  launch.wait_until_ready(2);
  kill(launch.process().pid(), SIGTERM);
  EXPECT_EQ(launch.finish().exit_code, 143);
}

TEST(Launcher, KillsAtOnceOnTheSecondCtrlC) {
  MarkedRun launch(kProgram, {"--ranks", "2", "ignore-signals"});
  launch.wait_until_ready(2);
  kill(launch.process().pid(), SIGINT);
  ASSERT_TRUE(launch.process().wait_for_output("launcher: SIGINT: stopping 2 ranks;"));
  kill(launch.process().pid(), SIGINT);
  EXPECT_EQ(launch.finish().exit_code, 130);
}

TEST(Launcher, TakesItsRanksAlongWhenItIsKilled) {
  MarkedRun launch(kProgram, {"--ranks", "4", "ignore-signals"});
  launch.wait_until_ready(4);
  EXPECT_GE(launch.survivors().size(), 5U) << "the mark does not work";
  kill(launch.process().pid(), SIGKILL);
  // The end of the output is the end of the last rank: all of them hold it.
  EXPECT_EQ(launch.finish().exit_code, 137);
}

TEST(Launcher, EndsWhatItsRanksStarted) {
  EXPECT_EQ(run(2, {"grandchild", "0"}).exit_code, 0);
  EXPECT_EQ(run(2, {"grandchild", "5"}).exit_code, 5);
}

TEST(Launcher, LeavesNoRankWhenTheLastCannotBeStarted) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "the sanitizer opens files of its own, and this test leaves it none";
#endif
  // In this process: ranks end with their launcher anyway, and here it lives on.
  cli::LaunchOptions options;
  options.num_ranks = 16;
  options.program = beside_this_program(kProgram);
  options.argv = {kProgram, "wait"};
  std::vector<int> taken;
  // After the launcher has looked whether it may open enough: all but a few are gone.
  options.serve_store = [&taken] {
    for (int fd = dup(STDERR_FILENO); fd >= 0; fd = dup(STDERR_FILENO)) taken.push_back(fd);
    for (int i = 0; i < 8 && !taken.empty(); ++i) {
      close(taken.back());
      taken.pop_back();
    }
    return cli::LaunchStore{"127.0.0.1", 1, nullptr, ""};
  };
  options.print = [](const std::string&) {};
  setenv("LAUNCH_TEST_MARK", "in this process", 1);

  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const int next_fd = dup(STDERR_FILENO);
  close(next_fd);
  const rlimit few{static_cast<rlim_t>(next_fd) + 8, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  std::string error;
  try {
    cli::launch_local_ranks(options);
  } catch (const CommError& thrown) {
    error = thrown.what();
  }
  setrlimit(RLIMIT_NOFILE, &before);
  for (const int fd : taken) close(fd);
  EXPECT_EQ(count(error, "ulimit -n"), 1) << error;
  EXPECT_EQ(pids_with_mark("in this process"), std::vector<int>());
  unsetenv("LAUNCH_TEST_MARK");
}

TEST(Launcher, SaysWhyAProgramCannotBeStarted) {
  MarkedRun launch(kProgram, {"--ranks", "2", "--program", "/nowhere/tessera", "succeed"});
  const ProcessResult result = launch.finish();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.err, "tessera: cannot start /nowhere/tessera: No such file or directory\n");
}

TEST(Launcher, RefusesRanksOfItsOwnInsideAnotherLauncher) {
  const ProcessResult result =
      run(2, {"succeed"},
          {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "1"}});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(count(result.err, "already rank 1 of 2, started by torchrun"), 1) << result.err;
}

TEST(RankProcess, PrintsItsErrorItselfWhenAnotherLauncherStartedIt) {
  MarkedRun rank(
      kProgram, {"throw", "1"},
      {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "1"}});
  const ProcessResult result = rank.finish();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.err, "rank 1: disk is full; make room on it\n");
}

TEST(RankProcess, AloneSpeaksForTheProgram) {
  MarkedRun rank(kProgram, {"throw-config", "0"});
  const ProcessResult result = rank.finish();
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.err, "tessera: lr=-1 is negative\n");
}

TEST(RankProcess, GivesUpIfItsLauncherIsAlreadyGone) {
  MarkedRun rank(kProgram, {"wait"},
                 {{"TESSERA_LAUNCHER_PID", "999999999"}, {"TESSERA_REPORT_FD", "1"}});
  const ProcessResult result = rank.finish();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(count(result.err, "is not its parent"), 1) << result.err;
}

}  // namespace
}  // namespace tessera::testing
