// `tessera train --device cuda` with more ranks than GPUs, as processes that talk over Gloo.
#include <algorithm>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/device/device_cuda.h"
#include "tests/cli/program.h"
#include "tests/support/contains.h"
#include "tests/support/temporary_directory.h"

namespace tessera::testing {
namespace {

class TrainOnSharedCudaDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    if (device::num_cuda_devices() == 0) {
      GTEST_SKIP() << "no GPU: " << device::cuda_description();
    }
    num_ranks_ = std::to_string(device::num_cuda_devices() + 1);
  }

  // One rank more than there are GPUs.
  ProcessResult train(const std::vector<std::string>& more) const {
    std::vector<std::string> arguments{TESSERA_BINARY, "train",   "--preset", "micro",
                                       "--device",     "cuda",    "--ranks",  num_ranks_,
                                       "--batch",      num_ranks_};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_process(arguments);
  }
  ProcessResult train_over_gloo(std::vector<std::string> more) const {
    more.insert(more.end(), {"--set", "comm.backend=gloo"});
    return train(more);
  }

  std::string num_ranks_;
};

TEST_F(TrainOnSharedCudaDevice, IsRefusedWithTheRemedyWhereTheNetworkDoesNotAllowIt) {
  for (const char* backend : {"comm.backend=auto", "comm.backend=nccl"}) {
    const ProcessResult run = train({"--steps", "1", "--set", backend});
    EXPECT_EQ(run.exit_code, 2) << run.out;
    EXPECT_HAS(run.err, "--device cuda needs a GPU for every rank");
    EXPECT_HAS(run.err, "--set comm.backend=gloo");
  }
}

TEST_F(TrainOnSharedCudaDevice, EqualsUnshardedTraining) {
  for (const char* precision : {"fp32", "bf16"}) {
    const ProcessResult run = train_over_gloo({"--verify", "3", "--precision", precision});
    EXPECT_EQ(run.exit_code, 0) << run.err;
    EXPECT_HAS(run.out, "verified: 3 steps of " + num_ranks_ + " ranks");
  }
}

TEST_F(TrainOnSharedCudaDevice, GivesTheSameFileWhereverShardsLive) {
  const DiskDirectory directory;
  const auto saved = [&](const std::vector<std::string>& places) {
    const std::string path = (directory.path() / "trained.safetensors").string();
    std::vector<std::string> arguments{"--steps", "4",  "--precision",    "bf16",
                                       "--save",  path, "--deterministic"};
    arguments.insert(arguments.end(), places.begin(), places.end());
    const ProcessResult run = train_over_gloo(arguments);
    EXPECT_EQ(run.exit_code, 0) << run.err;
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const std::string resident = saved({});
  ASSERT_FALSE(resident.empty());
  EXPECT_TRUE(saved({"--parameters", "host", "--optimizer", "host"}) == resident);
  const std::string nvme = (directory.path() / "nvme").string();
  std::filesystem::create_directory(nvme);
  EXPECT_TRUE(saved({"--nvme", nvme, "--parameters", "nvme", "--optimizer", "nvme"}) == resident);
}

// The summary's table has a line per tier and role, with what was planned and what was held.
TEST_F(TrainOnSharedCudaDevice, HoldsThePinnedStagingThatWasPlanned) {
  const ProcessResult run =
      train_over_gloo({"--steps", "4", "--parameters", "host", "--optimizer", "host"});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  std::istringstream lines(
      run.out.substr(std::min(run.out.find("what went where\n"), run.out.size())));
  std::string line;
  bool is_there = false;
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    std::string tier, role, planned, planned_unit, held, held_unit;
    words >> tier >> role >> planned >> planned_unit >> held >> held_unit;
    if (tier == "pinned" && role == "staging") {
      is_there = true;
      EXPECT_EQ(held + " " + held_unit, planned + " " + planned_unit) << line;
    }
  }
  EXPECT_TRUE(is_there) << run.out;
}

}  // namespace
}  // namespace tessera::testing
