// `tessera train` that is told to stop, or that loses what it writes to: the model is kept.
#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/cli/program.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;

// The ranks that a launcher has started, by their numbers.
std::vector<pid_t> ranks_of(pid_t launcher) {
  std::ifstream file("/proc/" + std::to_string(launcher) + "/task/" + std::to_string(launcher) +
                     "/children");
  std::vector<std::pair<int, pid_t>> found;
  for (pid_t pid = 0; file >> pid;) {
    std::ifstream environment("/proc/" + std::to_string(pid) + "/environ", std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(environment), {}};
    const std::size_t at = text.find("TESSERA_RANK=");
    if (at != std::string::npos) {
      found.emplace_back(std::stoi(text.substr(at + 13)), pid);
    }
  }
  std::sort(found.begin(), found.end());
  std::vector<pid_t> pids;
  for (const auto& [rank, pid] : found) {
    pids.push_back(pid);
  }
  return pids;
}

class StoppedTraining : public ProgramTest {
 protected:
  // Long enough that only a signal ends it.
  std::unique_ptr<Process> start(const Arguments& flags) {
    const Arguments first = {TESSERA_BINARY, "train",   "--preset",  "micro",
                             "--steps",      "1000000", "--threads", "1"};
    auto process = std::make_unique<Process>(joined(first, flags), here());
    EXPECT_TRUE(process->wait_for_output("\nstep")) << process->wait().err;
    return process;
  }

  // What a run that ends by itself saves after so many steps.
  std::string parameters_after(const std::string& steps, const std::string& ranks) {
    const ProcessResult result =
        shell(std::string(TESSERA_BINARY) + " train --preset micro --threads 1 --ranks " + ranks +
              " --steps " + steps + " --save whole.safetensors");
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return read("whole.safetensors");
  }

  static std::string num_steps(const ProcessResult& result, const char* signal) {
    std::smatch found;
    const std::regex line(std::string("stopped by ") + signal +
                          " after ([0-9]+) of 1000000 steps\n");
    return std::regex_search(result.out, found, line) ? found[1].str() : "none: " + result.out;
  }
};

TEST_F(StoppedTraining, AloneKeepsSaveTraceAndSummaryOfTheStepsThatItHasDone) {
  const auto process = start({"--save", "model.safetensors", "--trace", "trace.json"});
  kill(process->pid(), SIGINT);
  const ProcessResult result = process->wait();
  EXPECT_EQ(result.exit_code, 128 + SIGINT);
  EXPECT_HAS(result.err, "told to stop");
  EXPECT_HAS(result.out, "tokens/s, median step");
  EXPECT_TRUE(fs::exists(path("trace.json")));
  EXPECT_EQ(read("model.safetensors"), parameters_after(num_steps(result, "SIGINT"), "1"));
}

TEST_F(StoppedTraining, OfTheLauncherStopsAllRanksBehindTheSameStep) {
  const auto process =
      start({"--ranks", "2", "--save", "model.safetensors", "--trace", "trace.json"});
  kill(process->pid(), SIGTERM);
  const ProcessResult result = process->wait();
  EXPECT_EQ(result.exit_code, 128 + SIGTERM) << result.err;
  EXPECT_HAS(result.err, "launcher: SIGTERM: stopping 2 ranks");
  EXPECT_LACKS(result.err, "failed");
  EXPECT_TRUE(fs::exists(path("trace.json")) && fs::exists(path("trace.rank1.json")));
  EXPECT_EQ(read("model.safetensors"), parameters_after(num_steps(result, "SIGTERM"), "2"));
}

TEST_F(StoppedTraining, OfOneRankStopsTheOthersToo) {
  const auto process = start({"--ranks", "3", "--batch", "6", "--save", "model.safetensors"});
  const std::vector<pid_t> ranks = ranks_of(process->pid());
  ASSERT_EQ(ranks.size(), 3U);
  kill(ranks[2], SIGHUP);
  const ProcessResult result = process->wait();
  EXPECT_EQ(result.exit_code, 128 + SIGHUP) << result.err;
  EXPECT_HAS(result.out, "stopped by SIGHUP after ");
  EXPECT_FALSE(contains(result.err, "failed") || contains(result.err, "killed")) << result.err;
  EXPECT_TRUE(fs::exists(path("model.safetensors")));
}

TEST_F(StoppedTraining, CountsASignalToAllProcessesOnce) {
  const auto process = start({"--ranks", "2", "--save", "model.safetensors"});
  std::vector<pid_t> all = ranks_of(process->pid());
  ASSERT_EQ(all.size(), 2U);
  all.insert(all.begin() + 1, process->pid());  // before it, and after it
  for (const pid_t pid : all) {
    kill(pid, SIGTERM);
  }
  const ProcessResult result = process->wait();
  EXPECT_EQ(result.exit_code, 128 + SIGTERM) << result.err;
  EXPECT_HAS(result.out, "stopped by SIGTERM after ");
  EXPECT_TRUE(fs::exists(path("model.safetensors")));
}

TEST_F(StoppedTraining, LeavesNoScratchFiles) {
  const DiskDirectory disk;
  const auto process = start({"--ranks", "2", "--nvme", disk.path().string(), "--set",
                              "place.optimizer=nvme", "--set", "nvme.block_bytes=64KiB", "--set",
                              "nvme.queue_depth=4", "--set", "nvme.threads=2"});
  const auto num_scratch = [&disk] {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(disk.path())) {
      if (entry.path().extension() == ".scratch") {
        names.insert(entry.path().filename());
      }
    }
    return names.size();
  };
  EXPECT_GT(num_scratch(), 0U) << "nothing is on the disk, so nothing can be left there";
  kill(process->pid(), SIGTERM);
  EXPECT_EQ(process->wait().exit_code, 128 + SIGTERM);
  EXPECT_EQ(num_scratch(), 0U);
}

TEST_F(StoppedTraining, SavesSomewhereElseIfItsDirectoryIsGone) {
  fs::create_directory(path("gone"));
  const auto process =
      start({"--ranks", "2", "--save", "gone/model.safetensors", "--trace", "gone/trace.json"});
  fs::remove_all(path("gone"));
  kill(process->pid(), SIGTERM);
  const ProcessResult result = process->wait();
  EXPECT_NE(result.exit_code, 0);
  EXPECT_HAS(result.err, "--save: gone/model.safetensors: cannot write");
  EXPECT_HAS(result.err, "the trace is lost: ");
  std::smatch found;
  ASSERT_TRUE(std::regex_search(result.err, found, std::regex("saved in \"([^\"]+)\" instead")))
      << result.err;
  EXPECT_HAS(found[1].str(), "/model.safetensors.rescued-");
  EXPECT_GT(fs::file_size(found[1].str()), 1000U);
}

TEST_F(StoppedTraining, IsNotWhatOutputThatCannotBeWrittenDoes) {
  const std::string train = std::string(TESSERA_BINARY) + " train --preset micro --steps 3 ";
  const ProcessResult full = shell(train + "--save full.safetensors > /dev/full");
  EXPECT_EQ(full.exit_code, 0);
  EXPECT_HAS(full.err, "warning: standard output cannot be written");
  EXPECT_TRUE(fs::exists(path("full.safetensors")));
  // A reader that never reads, so that the first line meets a closed pipe.
  const ProcessResult piped =
      shell("set -o pipefail; " + train + "--save piped.safetensors --ranks 2 2>&1 | true");
  EXPECT_EQ(piped.exit_code, 0);
  EXPECT_TRUE(fs::exists(path("piped.safetensors")));
}

TEST_F(StoppedTraining, ThroughALinkReplacesWhatItPointsTo) {
  fs::create_directory(path("store"));
  fs::create_symlink("store/model.safetensors", path("link"));
  for (const char* round : {"dangling", "there"}) {
    const ProcessResult result =
        shell(std::string(TESSERA_BINARY) + " train --preset micro --steps 1 --save link");
    EXPECT_EQ(result.exit_code, 0) << round << result.err;
    EXPECT_TRUE(fs::is_symlink(path("link"))) << round;
    EXPECT_TRUE(fs::is_regular_file(path("store/model.safetensors"))) << round;
  }
}

TEST_F(StoppedTraining, SaysWhichTwoProcessesCameAsOneRank) {
  const std::string train = "WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port " +
                            std::string(TESSERA_BINARY) +
                            " train --preset micro --steps 1 --batch 3 --set comm.timeout_s=60 ";
  const ProcessResult result = shell("port=$((20000 + $$ % 10000)); (RANK=0 " + train +
                                     "& RANK=1 " + train + "& RANK=1 " + train + "& wait)");
  EXPECT_HAS(result.err, "two processes joined as rank 1 of 3: process ");
  EXPECT_HAS(result.err, "rank 0: group 'world' was aborted: rank 1 failed: two ");
}

TEST_F(StoppedTraining, NamesTheLimitOfOpenFiles) {
  const ProcessResult result = shell("ulimit -n 30; " + std::string(TESSERA_BINARY) +
                                     " train --preset micro --steps 1 --ranks 4 --batch 4");
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_HAS(result.err, "may have 30 files and connections open at a time");
  EXPECT_HAS(result.err, "ulimit -n 1024");
}

// Nobody watches ranks that were started by hand: the one that fails tells the other.
TEST_F(StoppedTraining, ByAFailureInSetUpEndsARankThatWaits) {
  const std::string address =
      "MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + $$ % 10000)) WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 ";
  const ProcessResult result = shell(
      address + "RANK=0 LOCAL_RANK=0 " + TESSERA_BINARY + " train --preset micro & " + address +
      "RANK=1 LOCAL_RANK=1 " + TESSERA_BINARY + " train --preset micro --data text:none.txt; wait");
  EXPECT_FALSE(result.timed_out);
  EXPECT_HAS(result.err, "rank 1: data: none.txt: cannot open");
  EXPECT_HAS(result.err, "rank 1 failed: data: none.txt: cannot open");
}

}  // namespace
}  // namespace tessera::testing
