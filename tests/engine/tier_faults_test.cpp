// A disk that fails under training: every failure is an error with path, offset and parameter on
// the rank that met it, all ranks end, nothing of ours is left, and the next run starts clean.
#include <atomic>
#include <filesystem>
#include <string>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "testing/fault_engine.h"
#include "tests/engine/training_run.h"
#include "tests/support/temporary_directory.h"

namespace tessera::testing {
namespace {

struct Fault {
  std::string name;
  IoCall call = IoCall::kRead;
  IoFault fault = IoFault::kFail;
  std::string where;  // in the name of what is moved
  std::string says;   // in the message
};

RunSettings settings_in(const std::filesystem::path& directory, int ranks) {
  RunSettings settings;
  settings.model = models::gpt_preset("micro");
  settings.ranks = ranks;
  settings.steps = 3;
  settings.data = "random";
  settings.options = {{"place.parameters", "nvme"},
                      {"place.optimizer", "nvme"},
                      {"optim.sub_group_bytes", "8KiB"},
                      {"nvme.optimizer_buffers", "2"},
                      {"nvme.verify", "true"},
                      {"nvme.paths", directory.string()},
                      {"nvme.block_bytes", "64KiB"},
                      {"nvme.queue_depth", "4"},
                      {"nvme.threads", "2"}};
  return settings;
}

// Beside a device whose host holds no gradients.
RunSettings offloading_settings_in(const std::filesystem::path& directory, int ranks) {
  RunSettings settings = settings_in(directory, ranks);
  settings.model.width = 208;
  settings.model.vocabulary = 661;
  settings.model.sequence = 8;
  settings.accumulate = 2;
  settings.device = RunDevice::kMock;
  settings.options.emplace_back("memory.host", ranks == 1 ? "1800KiB" : "8800KiB");
  return settings;
}

void expect_end_of_all_ranks(const Fault& fault,
                             RunSettings (*make)(const std::filesystem::path&, int)) {
  for (const int ranks : {1, 2}) {
    const DiskDirectory directory;
    RunSettings settings = make(directory.path(), ranks);
    const RunOutcome good = train(settings);
    EXPECT_EQ(settings.device != RunDevice::kCpu,
              good.placement && good.placement->bytes(Tier::kNvme, Role::kGradient) > 0);
    std::atomic<int> num_engines{0};
    settings.wrap_io = [&](std::unique_ptr<tier::IoEngine> inner) {
      auto engine = std::make_unique<FaultEngine>(std::move(inner));
      if (num_engines++ == 0) {  // one rank's disk
        engine->set_where_named(fault.call, fault.where, fault.fault);
      }
      return engine;
    };
    std::string message;
    try {
      train(settings);
    } catch (const Error& error) {
      message = error.what();
    }
    EXPECT_NE(message.find(fault.says), std::string::npos) << ranks << " ranks: " << message;
    EXPECT_NE(message.find("parameter '"), std::string::npos) << message;
    EXPECT_NE(message.find(directory.path().string()), std::string::npos) << message;
    EXPECT_NE(message.find("offset"), std::string::npos) << message;
    EXPECT_TRUE(std::filesystem::is_empty(directory.path())) << "scratch files are left";
    settings.wrap_io = nullptr;
    EXPECT_TRUE(same_bits(train(settings), good)) << "the next run is not the same";
  }
}

class TierFaults : public ::testing::TestWithParam<Fault> {};

TEST_P(TierFaults, EndWithTheParameterThePathAndAllRanks) {
  expect_end_of_all_ranks(GetParam(), settings_in);
}

TEST(TierFaultsBesideADevice, OfAGradientEndWithTheParameterThePathAndAllRanks) {
  const std::string gradient = "gradient of parameter 'blocks.1";
  for (const Fault& fault :
       {Fault{"Write", IoCall::kWrite, IoFault::kFail, gradient, "write"},
        Fault{"Read", IoCall::kRead, IoFault::kFail, gradient, "read"},
        Fault{"Flip", IoCall::kRead, IoFault::kCorrupt, gradient, "checksum"}}) {
    SCOPED_TRACE(fault.name);
    expect_end_of_all_ranks(fault, offloading_settings_in);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Of, TierFaults,
    ::testing::Values(
        Fault{"ReadOfAState", IoCall::kRead, IoFault::kFail, "exp_avg", "read"},
        Fault{"WriteOfAState", IoCall::kWrite, IoFault::kFail, "exp_avg", "write"},
        Fault{"ReadOfAParameter", IoCall::kRead, IoFault::kFail, "parameter 'blocks.1", "read"},
        Fault{"WriteOfAParameter", IoCall::kWrite, IoFault::kFail, "parameter 'blocks.0", "write"},
        Fault{"ShortReadOfAParameter", IoCall::kRead, IoFault::kShort, "parameter 'blocks.1",
              "read"},
        Fault{"ShortWriteOfAState", IoCall::kWrite, IoFault::kShort, "exp_avg", "write"},
        Fault{"FlippedByteOfAState", IoCall::kRead, IoFault::kCorrupt, "exp_avg", "checksum"},
        Fault{"FlippedByteOfAParameter", IoCall::kRead, IoFault::kCorrupt, "parameter 'blocks.1",
              "checksum"}),
    [](const ::testing::TestParamInfo<Fault>& info) { return info.param.name; });

TEST(TierRefusals, ComeBeforeAnythingIsWritten) {
  const DiskDirectory directory;
  const auto refused = [&](std::vector<std::pair<std::string, std::string>> options) {
    RunSettings settings;
    settings.model = models::gpt_preset("micro");
    settings.steps = 1;
    settings.options = std::move(options);
    try {
      train(settings);
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string("nothing was refused");
  };
  EXPECT_NE(refused({{"place.optimizer", "nvme"}}).find("nvme.paths"), std::string::npos);
  EXPECT_NE(refused({{"nvme.paths", (directory.path() / "gone").string()}}).find("gone"),
            std::string::npos);
  EXPECT_NE(refused({{"memory.host", "64KiB"}}).find("memory.host"), std::string::npos);
  const std::string tmpfs = "/dev/shm";
  if (std::filesystem::exists(tmpfs)) {
    const std::string said = refused({{"nvme.paths", tmpfs}});
    EXPECT_NE(said.find("memory"), std::string::npos) << said;
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

}  // namespace
}  // namespace tessera::testing
