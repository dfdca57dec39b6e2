// Calls that are given memory of a device, over ranks as threads: on a double whose memory the host
// cannot touch, as late as it may be, and late at random with little staging.
#include "tests/comm/guarded_device.h"
#include "tests/comm/staged_contract.h"

namespace tessera::comm {
namespace {

StagedWorld staged_threads(const std::string& name, device::LateMode mode,
                           std::uint32_t max_delay_us, std::size_t staging_bytes) {
  StagedWorld world;
  world.name = name;
  world.make_network = [=](int num_ranks) { return make_thread_network(num_ranks, max_delay_us); };
  world.make_device = [=](int rank, Ledger& ledger) {
    device::MockDeviceOptions options;
    options.mode = mode;
    options.seed = static_cast<std::uint64_t>(rank) + 1;
    options.host.ledger = &ledger;
    return make_guarded_device(std::move(options));
  };
  world.staging_bytes = staging_bytes;
  return world;
}

INSTANTIATE_TEST_SUITE_P(Threads, StagedContract,
                         ::testing::Values(staged_threads("Lazy", device::LateMode::kLazy, 0, 0),
                                           staged_threads("LateAndReserved",
                                                          device::LateMode::kRandom, 30, 200000)),
                         staged_world_name);

}  // namespace
}  // namespace tessera::comm
