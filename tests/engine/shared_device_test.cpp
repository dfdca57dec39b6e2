// Ranks that share a device with memory of its own, so that their calls pass through memory of the
// host: the same bits as ranks on CPUs, wherever shards live, in the memory that was planned.
#include <string>

#include <gtest/gtest.h>

#include "tests/engine/run_options.h"
#include "tests/engine/training_run.h"
#include "tests/support/temporary_directory.h"

namespace tessera::testing {
namespace {

RunSettings two_ranks(DType dtype) {
  RunSettings settings;
  settings.model = models::gpt_preset("micro");
  settings.model.dtype = dtype;
  settings.model.width = 160;
  settings.model.vocabulary = 661;
  settings.model.sequence = 8;  // products of low precision are slow on most CPUs
  settings.steps = 3;
  settings.batch = 4;
  settings.accumulate = 2;
  settings.ranks = 2;
  settings.data = "random";
  settings.options = {{"grad.clip_norm", "0.5"}, {"batch.accumulate", "2"}};
  return settings;
}

void expect_bits_of_cpus(DType dtype) {
  const DiskDirectory directory;
  const Placed placements[] = {
      {"nothing planned", {}},
      {"on the device", {{"place.parameters", "device"}, {"place.optimizer", "device"}}},
      {"in host memory",
       {{"place.parameters", "host"}, {"place.optimizer", "host"}, {"optim.cpu_share", "0.5"}}},
      {"on NVMe",
       joined({{"place.parameters", "nvme"}, {"place.optimizer", "nvme"}}, nvme_in(directory))}};
  RunSettings settings = two_ranks(dtype);
  const RunOutcome on_cpus = train(settings);
  settings.device = RunDevice::kLate;
  settings.copies_calls = true;
  settings.gives_shapes = true;
  const Options common = settings.options;
  for (const auto& [name, options] : placements) {
    settings.options = joined(common, options);
    const RunOutcome shared = train(settings);
    EXPECT_TRUE(same_bits(shared, on_cpus))
        << name << ": " << difference(shared, on_cpus).describe();
    if (!options.empty()) {
      ASSERT_TRUE(shared.placement.has_value()) << name;
      EXPECT_EQ(shared.placement->comm_tier, Tier::kPinned) << name;
      EXPECT_EQ(shared.comm_peak_bytes, settings.ranks * shared.placement->comm_bytes) << name;
    }
  }
}

TEST(SharedDevice, GivesTheBitsOfCpusWithinThePlannedStaging) {
  expect_bits_of_cpus(DType::kFloat32);
}

TEST(SharedDevice, GivesTheBitsOfCpusWithinThePlannedStagingInBf16) {
  expect_bits_of_cpus(DType::kBFloat16);
}

}  // namespace
}  // namespace tessera::testing
