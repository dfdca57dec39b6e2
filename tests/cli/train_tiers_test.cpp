// `tessera train` with shards elsewhere, as a user runs it. On NVMe: what is left when a run is
// killed, when two share a directory, and when the directory goes away. On CUDA: more ranks than
// GPUs, as processes that talk over Gloo.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include <gtest/gtest.h>

#include "tessera/device/device_cuda.h"
#include "tests/cli/program.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;

// The summary's table has a line per tier and role, with what was planned and what was held at
// most. Compares those whose "tier role" begins with `cell`, and gives them back.
std::set<std::string> expect_held_as_planned(const std::string& out, const std::string& cell) {
  std::istringstream lines(out.substr(std::min(out.find("what went where\n"), out.size())));
  std::string line;
  std::getline(lines, line);
  std::getline(lines, line);  // the heads of columns
  std::set<std::string> cells;
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    std::string tier, role, planned, planned_unit, held, held_unit;
    words >> tier >> role >> planned >> planned_unit >> held >> held_unit;
    if ((tier + " " + role).starts_with(cell)) {
      EXPECT_EQ(held + " " + held_unit, planned + " " + planned_unit) << line;
      cells.insert(tier + " " + role);
    }
  }
  return cells;
}

// Options that are given are not measured: nothing but scratch files is in the directory.
Arguments train_on(const fs::path& directory, const Arguments& more) {
  Arguments arguments{TESSERA_BINARY, "train", "--preset", "micro",
                      "--threads",    "1",     "--nvme",   directory.string()};
  for (const char* option : {"place.parameters=nvme", "place.optimizer=nvme",
                             "nvme.block_bytes=64KiB", "nvme.queue_depth=4", "nvme.threads=2"}) {
    arguments.insert(arguments.end(), {"--set", option});
  }
  return joined(arguments, more);
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
  const auto run = [&](const Arguments& arguments) {
    const ProcessResult result =
        run_tessera(joined(arguments, {"--preset", "tiny", "--host-budget", "2MiB", "--nvme",
                                       directory.path().string(), "--optimizer", "nvme"}));
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
  for (const char* part : {"\"disk reads 1\"", "\"disk writes 1\"", "\"read\"", "\"write\"",
                           "parameter 'blocks.0.up.weight'", "\"update\""}) {
    EXPECT_HAS(read_whole(trace), part);
  }
}

std::set<std::string> cells_of_budget(const std::string& budget, const std::string& backend) {
  const DiskDirectory directory;
  const ProcessResult run = run_tessera(
      {"train", "--preset", "tiny", "--ranks", "2", "--steps", "4", "--host-budget", budget,
       "--nvme", directory.path().string(), "--set", "comm.backend=" + backend});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  return expect_held_as_planned(run.out, "");
}

// Staging is that of the disk, over Gloo that of the calls, and over shm the groups' chunks.
TEST(TrainOnNvme, RanksHoldExactlyWhatWasPlanned) {
  for (const std::string backend : {"shm", "gloo"}) {
    const std::set<std::string> on_nvme = cells_of_budget("4MiB", backend);
    EXPECT_EQ(on_nvme.count("host staging"), 1U) << backend;
    EXPECT_EQ(on_nvme.count("nvme optimizer"), 1U) << backend;
    const std::set<std::string> in_memory = cells_of_budget("64MiB", backend);
    EXPECT_EQ(in_memory.count("host staging"), 1U) << backend;
    EXPECT_EQ(in_memory.count("nvme optimizer"), 0U) << backend;
  }
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

class TrainOnSharedCudaDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    if (device::num_cuda_devices() == 0) {
      GTEST_SKIP() << "no GPU: " << device::cuda_description();
    }
    num_ranks_ = std::to_string(device::num_cuda_devices() + 1);
  }

  // One rank more than there are GPUs.
  ProcessResult train(const Arguments& more) const {
    return run_tessera(joined({"train", "--preset", "micro", "--device", "cuda", "--ranks",
                               num_ranks_, "--batch", num_ranks_},
                              more));
  }
  ProcessResult train_over(const std::string& backend, const Arguments& more) const {
    return train(joined(more, {"--set", "comm.backend=" + backend}));
  }

  std::string num_ranks_;
};

TEST_F(TrainOnSharedCudaDevice, IsRefusedWithTheRemedyWhereTheNetworkDoesNotAllowIt) {
  const ProcessResult run = train_over("nccl", {"--steps", "1"});
  EXPECT_EQ(run.exit_code, 2) << run.out;
  EXPECT_HAS(run.err, "--device cuda needs a GPU for every rank");
  EXPECT_HAS(run.err, "--set comm.backend=ipc");
}

TEST_F(TrainOnSharedCudaDevice, EqualsUnshardedTraining) {
  for (const char* backend : {"gloo", "auto"}) {
    for (const char* precision : {"fp32", "bf16"}) {
      const ProcessResult run = train_over(backend, {"--verify", "3", "--precision", precision});
      EXPECT_EQ(run.exit_code, 0) << run.err;
      EXPECT_HAS(run.out, "verified: 3 steps of " + num_ranks_ + " ranks");
    }
  }
}

TEST_F(TrainOnSharedCudaDevice, GivesTheSameFileWhereverShardsLiveOverEveryNetwork) {
  const DiskDirectory directory;
  const auto saved = [&](const std::string& backend, const Arguments& tiers) {
    const std::string path = (directory.path() / "trained.safetensors").string();
    const ProcessResult run = train_over(
        backend,
        joined({"--steps", "4", "--precision", "bf16", "--save", path, "--deterministic"}, tiers));
    EXPECT_EQ(run.exit_code, 0) << run.err;
    return read_whole(path);
  };
  const std::string nvme = (directory.path() / "nvme").string();
  std::filesystem::create_directory(nvme);
  const std::string resident = saved("gloo", {});
  ASSERT_FALSE(resident.empty());
  EXPECT_TRUE(saved("ipc", {}) == resident);
  for (const char* backend : {"gloo", "ipc"}) {
    EXPECT_TRUE(saved(backend, {"--parameters", "host", "--optimizer", "host"}) == resident)
        << backend;
    EXPECT_TRUE(saved(backend, {"--nvme", nvme, "--parameters", "nvme", "--optimizer", "nvme"}) ==
                resident)
        << backend;
  }
}

TEST_F(TrainOnSharedCudaDevice, HoldsThePinnedStagingThatWasPlanned) {
  const ProcessResult run =
      train_over("gloo", {"--steps", "4", "--parameters", "host", "--optimizer", "host"});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(expect_held_as_planned(run.out, "pinned staging").size(), 1U) << run.out;
}

}  // namespace
}  // namespace tessera::testing
