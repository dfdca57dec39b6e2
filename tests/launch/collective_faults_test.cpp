// Collectives of real processes that go wrong: every rank ends by itself, the others are told the
// culprit's rank and what they waited for, one error is shown, nobody stays behind.
#include <csignal>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/launch/launch_support.h"

namespace tessera::testing {
namespace {

constexpr int kNumRanks = 3;
// Long for what should end at once, short for what must run into it.
constexpr const char* kPatient = "120000";
constexpr const char* kHasty = "8000";

struct Outcome {
  ProcessResult result;
  std::vector<std::string> told;  // one line per rank that was told something
};

// The culprit is rank 1.
Outcome run(const std::string& behaviour, const char* timeout_ms) {
  // A culprit that never ends is ended by the launcher, after the grace.
  MarkedRun launch(kStoreProgram, {"--ranks", std::to_string(kNumRanks), "--grace", "4000",
                                   behaviour, "1", timeout_ms});
  Outcome outcome{launch.finish(), {}};
  EXPECT_TRUE(launch.survivors().empty()) << behaviour;
  EXPECT_FALSE(outcome.result.timed_out);
  std::istringstream lines(outcome.result.out);
  for (std::string line; std::getline(lines, line);) {
    if (line.find(" was told: ") != std::string::npos) {
      outcome.told.push_back(line);
    }
  }
  return outcome;
}

void expect_all_told(const Outcome& outcome, std::size_t num_ranks,
                     const std::vector<std::string>& words) {
  EXPECT_EQ(outcome.told.size(), num_ranks) << outcome.result.out << outcome.result.err;
  for (const std::string& line : outcome.told) {
    for (const std::string& word : words) {
      EXPECT_NE(line.find(word), std::string::npos) << line << "\nlacks: " << word;
    }
  }
}

const std::vector<std::string> kWaitedFor = {"all_reduce #3", "unit 'h.3'",
                                             "parameter 'attn.weight'"};

std::vector<std::string> waited_for_and(const std::string& word) {
  std::vector<std::string> words = kWaitedFor;
  words.push_back(word);
  return words;
}

TEST(CollectiveFaults, NothingHappensWhenNothingIsWrong) {
  for (const char* behaviour : {"reduce", "copied-reduce"}) {
    const Outcome outcome = run(behaviour, kPatient);
    EXPECT_EQ(outcome.result.exit_code, 0) << outcome.result.err;
    EXPECT_EQ(outcome.result.err, "");
  }
}

TEST(Worlds, OfOneProcessMayBeSeveralAtOnceAndOneAfterTheOther) {
  const Outcome outcome = run("join-again", kPatient);
  EXPECT_EQ(outcome.result.exit_code, 0) << outcome.result.err;
  EXPECT_EQ(outcome.result.err, "");
}

ProcessResult run_on_pretended_hosts(const char* num_ranks, const char* ranks_per_host) {
  MarkedRun launch(kStoreProgram,
                   {"--ranks", num_ranks, "pretend-hosts", "0", kPatient, ranks_per_host});
  ProcessResult result = launch.finish();
  EXPECT_TRUE(launch.survivors().empty());
  return result;
}

TEST(Worlds, RanksOfPretendedHostsShareMemoryInsideThemAndNotAcross) {
  const ProcessResult result = run_on_pretended_hosts("4", "2");
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out,
            "world gloo, inside shm, across gloo; no shared memory: rank 0: rank 2 is on another "
            "host, as comm.ranks_per_host says\n");
}

TEST(Worlds, OfOnePretendedHostShareMemory) {
  const ProcessResult result = run_on_pretended_hosts("2", "2");
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, "world shm, inside shm, across solo; \n");
}

TEST(Worlds, AreNotCutIntoUnequalHosts) {
  const ProcessResult result = run_on_pretended_hosts("3", "2");
  EXPECT_EQ(result.exit_code, 2) << result.out;
  EXPECT_NE(result.err.find("comm.ranks_per_host = 2 (--ranks-per-host) does not divide the 3 "
                            "ranks"),
            std::string::npos)
      << result.err;
}

TEST(CollectiveFaults, ARankThatEndsBeforeTheOthersIsToldApartFromOneThatDied) {
  const Outcome outcome = run("reduce-end-early", kPatient);
  EXPECT_NE(outcome.result.exit_code, 0);
  expect_all_told(outcome, 2, {"rank 1 has ended its run", "unit.uneven_data=true", "join()"});
}

TEST(CollectiveFaults, AKilledRankIsNamedToTheOthers) {
  for (const char* behaviour : {"reduce-killed", "copied-reduce-killed"}) {
    const Outcome outcome = run(behaviour, kPatient);
    EXPECT_EQ(outcome.result.exit_code, 128 + SIGKILL);
    expect_all_told(outcome, 2, waited_for_and("rank 1 failed: killed by signal 9 (SIGKILL)"));
    EXPECT_EQ(outcome.result.err_lines().size(), 1U) << outcome.result.err;
    EXPECT_EQ(count(outcome.result.err, "rank 1 was killed by signal 9"), 1) << outcome.result.err;
  }
}

TEST(CollectiveFaults, ARankThatThrowsIsNamedToTheOthers) {
  const Outcome outcome = run("reduce-throw", kPatient);
  EXPECT_EQ(outcome.result.exit_code, 1);
  expect_all_told(outcome, 2, waited_for_and("rank 1 failed: disk is full"));
  EXPECT_EQ(outcome.result.err, "rank 1 failed: disk is full\n");
}

TEST(CollectiveFaults, ARankThatThrowsWithACallInFlightDoesNotWaitForIt) {
  for (const char* behaviour : {"reduce-throw-in-flight", "copied-reduce-throw-in-flight"}) {
    const Outcome outcome = run(behaviour, kPatient);
    EXPECT_EQ(outcome.result.exit_code, 1);
    // The others found a call that did not match, or the failure, whichever was first.
    EXPECT_EQ(outcome.told.size(), 2U) << outcome.result.out;
    EXPECT_EQ(outcome.result.err_lines().size(), 1U) << outcome.result.err;
  }
}

TEST(CollectiveFaults, ARankThatNeverComesIsNamedAtTheTimeLimit) {
  const Outcome outcome = run("reduce-never", kHasty);
  EXPECT_EQ(outcome.result.exit_code, 1);
  expect_all_told(outcome, 2, waited_for_and("rank 1 has not arrived"));
  EXPECT_EQ(outcome.result.err_lines().size(), 1U) << outcome.result.err;
  EXPECT_EQ(count(outcome.result.err, "waited 8 s"), 1) << outcome.result.err;
  EXPECT_EQ(count(outcome.result.err, "last completed all_reduce #2"), 1) << outcome.result.err;
}

TEST(CollectiveFaults, ARankThatCallsSomethingElseIsNamedToAll) {
  const Outcome outcome = run("reduce-other", kPatient);
  EXPECT_EQ(outcome.result.exit_code, 1);
  // The culprit's own call fails outside of what says so: the other two speak.
  expect_all_told(outcome, 2,
                  waited_for_and("rank 1 called broadcast #3 (1 tensor, 20000 bytes, fp32"));
  EXPECT_EQ(outcome.result.err_lines().size(), 1U) << outcome.result.err;
}

TEST(CollectiveFaults, ARankThatJustLeavesIsNamedToTheOthers) {
  const Outcome outcome = run("reduce-leave", kPatient);
  EXPECT_EQ(outcome.result.exit_code, 1);
  expect_all_told(outcome, 2, waited_for_and("rank 1"));
}

}  // namespace
}  // namespace tessera::testing
