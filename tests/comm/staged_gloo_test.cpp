// Calls that are given memory of a device, over Gloo: on a double whose memory the host cannot
// touch.
#include "tests/comm/gloo_network.h"
#include "tests/comm/guarded_device.h"
#include "tests/comm/staged_contract.h"

namespace tessera::comm {
namespace {

StagedWorld gloo() {
  StagedWorld world;
  world.name = "Gloo";
  world.make_network = [](int num_ranks) { return std::make_unique<GlooNetwork>(num_ranks); };
  world.make_device = [](int rank, Ledger& ledger) {
    device::MockDeviceOptions options;
    options.mode = device::LateMode::kRandom;
    options.seed = static_cast<std::uint64_t>(rank) + 1;
    options.host.ledger = &ledger;
    return make_guarded_device(std::move(options));
  };
  return world;
}

INSTANTIATE_TEST_SUITE_P(Double, StagedContract, ::testing::Values(gloo()), staged_world_name);

}  // namespace
}  // namespace tessera::comm
