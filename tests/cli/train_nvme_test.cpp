// `tessera train` with NVMe as a user runs it: what is left when a run is killed, when two share a
// directory, and when the directory goes away.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/cli/program.h"
#include "tests/support/contains.h"
#include "tests/support/temporary_directory.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;

// Options that are given are not measured: nothing but scratch files is in the directory.
std::vector<std::string> train_on(const fs::path& directory, const std::vector<std::string>& more) {
  std::vector<std::string> arguments{TESSERA_BINARY, "train",     "--preset",
                                     "micro",        "--threads", "1"};
  for (const char* option : {"place.parameters=nvme", "place.optimizer=nvme",
                             "nvme.block_bytes=64KiB", "nvme.queue_depth=4", "nvme.threads=2"}) {
    arguments.insert(arguments.end(), {"--set", option});
  }
  arguments.insert(arguments.end(), {"--nvme", directory.string()});
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

std::size_t num_scratch_files(const fs::path& directory) {
  std::size_t count = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
    count += entry.path().extension() == ".scratch" ? 1 : 0;
  }
  return count;
}

TEST(TrainOnNvme, AKilledRunLeavesFilesThatTheNextOneRemoves) {
  const DiskDirectory directory;
  const fs::path decoy = directory.path() / "tessera-notes.scratch";
  std::ofstream(decoy) << "not ours";
  {
    Process run(train_on(directory.path(), {"--ranks", "2", "--steps", "1000000"}), {});
    ASSERT_TRUE(run.wait_for_output("loss "));
    ::kill(run.pid(), SIGKILL);  // the launcher's ranks die with it
    run.wait();
  }
  EXPECT_GT(num_scratch_files(directory.path()), 1U);
  const ProcessResult next = run_process(train_on(directory.path(), {"--steps", "2"}));
  EXPECT_EQ(next.exit_code, 0) << next.err;
  EXPECT_EQ(num_scratch_files(directory.path()), 1U) << "the decoy, and nothing of ours";
  std::string text;
  std::getline(std::ifstream(decoy), text);
  EXPECT_EQ(text, "not ours");
}

TEST(TrainOnNvme, InspectPredictsTimeWhereTheDiskHasBeenMeasured) {
  const DiskDirectory directory;
  const std::vector<std::string> model{"--preset",    "tiny",   "--host-budget",
                                       "2MiB",        "--nvme", directory.path().string(),
                                       "--optimizer", "nvme"};
  const auto run = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), TESSERA_BINARY);
    arguments.insert(arguments.end(), model.begin(), model.end());
    ProcessResult result = run_process(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result.out;
  };
  const std::string before = run({"inspect"});
  EXPECT_HAS(before, "the disk has not been measured");
  run({"train", "--steps", "1"});
  const std::string after = run({"inspect"});
  EXPECT_HAS(after, "the disk takes at least ");
}

TEST(TrainOnNvme, ATraceHasWhatTheDiskDoes) {
  const DiskDirectory directory;
  const fs::path trace = directory.path() / "trace.json";
  const ProcessResult run =
      run_process(train_on(directory.path(), {"--steps", "2", "--trace", trace.string()}));
  ASSERT_EQ(run.exit_code, 0) << run.err;
  std::ostringstream text;
  text << std::ifstream(trace).rdbuf();
  for (const char* part : {"\"disk reads 1\"", "\"disk writes 1\"", "\"read\"", "\"write\"",
                           "parameter 'blocks.0.up.weight'", "\"update\""}) {
    EXPECT_HAS(text.str(), part);
  }
}

// Over Gloo, whose calls need scratch. The summary's table has a line per tier and role, with what
// was planned and what was held at most; gives back which lines there were.
std::set<std::string> expect_held_as_planned(const std::string& budget) {
  const DiskDirectory directory;
  const ProcessResult run =
      run_process({TESSERA_BINARY, "train", "--preset", "tiny", "--ranks", "2", "--steps", "4",
                   "--host-budget", budget, "--nvme", directory.path().string()});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  std::istringstream lines(
      run.out.substr(std::min(run.out.find("what went where\n"), run.out.size())));
  std::string line;
  std::getline(lines, line);
  std::getline(lines, line);  // the heads of columns
  std::set<std::string> cells;
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    std::string tier, role, planned, planned_unit, held, held_unit;
    words >> tier >> role >> planned >> planned_unit >> held >> held_unit;
    EXPECT_EQ(held + " " + held_unit, planned + " " + planned_unit) << line;
    cells.insert(tier + " " + role);
  }
  return cells;
}

TEST(TrainOnNvme, RanksHoldExactlyWhatWasPlanned) {
  const std::set<std::string> stored = expect_held_as_planned("3MiB");
  EXPECT_TRUE(stored.count("host staging") == 1 && stored.count("nvme optimizer") == 1);
  const std::set<std::string> in_memory = expect_held_as_planned("64MiB");
  EXPECT_TRUE(in_memory.count("host staging") == 1 && in_memory.count("nvme optimizer") == 0);
}

TEST(TrainOnNvme, TwoRunsShareADirectory) {
  const DiskDirectory directory;
  Process first(train_on(directory.path(), {"--steps", "200"}), {});
  Process second(train_on(directory.path(), {"--steps", "200"}), {});
  const ProcessResult one = first.wait();
  const ProcessResult other = second.wait();
  EXPECT_EQ(one.exit_code, 0) << one.err;
  EXPECT_EQ(other.exit_code, 0) << other.err;
  EXPECT_EQ(num_scratch_files(directory.path()), 0U);
}

TEST(TrainOnNvme, ADirectoryThatIsDeletedUnderARunHurtsNobodyElse) {
  const DiskDirectory parent;
  const fs::path directory = parent.path() / "scratch";
  fs::create_directory(directory);
  Process run(train_on(directory, {"--steps", "300"}), {});
  ASSERT_TRUE(run.wait_for_output("loss "));
  fs::remove_all(directory);  // open files live on until they are closed
  const ProcessResult result = run.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_FALSE(fs::exists(directory));
  const ProcessResult next = run_process(train_on(directory, {"--steps", "1"}));
  EXPECT_EQ(next.exit_code, 2) << next.out;
  EXPECT_HAS(next.err, directory.string());
}

TEST(TrainOnNvme, ADirectoryThatMayNotBeWrittenIsRefusedAtOnce) {
  if (::geteuid() == 0) {
    GTEST_SKIP() << "root may write everywhere";
  }
  const DiskDirectory directory;
  fs::permissions(directory.path(), fs::perms::owner_read | fs::perms::owner_exec);
  const ProcessResult result = run_process(train_on(directory.path(), {"--steps", "1"}));
  fs::permissions(directory.path(), fs::perms::owner_all);
  EXPECT_EQ(result.exit_code, 2) << result.out;
  EXPECT_HAS(result.err, directory.path().string());
}

}  // namespace
}  // namespace tessera::testing
