// The contracts over ranks as threads: in step, out of step, and late with little staging, for
// which calls wait; with memory of the host, and of a double that the host cannot touch; and as
// work of streams.
#include "testing/guarded_device.h"
#include "testing/mock_device.h"
#include "tests/comm/contract.h"

namespace tessera::comm {
namespace {

ContractWorld threads(const std::string& name, std::uint32_t max_delay_us,
                      std::size_t staging_bytes) {
  return {.name = name,
          .make_network = [=](int ranks) { return make_thread_network(ranks, max_delay_us); },
          .staging_bytes = staging_bytes};
}

ContractWorld double_threads(const std::string& name, device::LateMode mode,
                             std::uint32_t max_delay_us, std::size_t staging_bytes) {
  ContractWorld world = threads(name, max_delay_us, staging_bytes);
  world.make_device = [mode](int rank, Ledger& ledger) {
    return device::make_guarded_device(mode, rank, ledger);
  };
  return world;
}

// A network whose calls are work of streams, as NCCL's are.
ContractWorld on_streams(const std::string& name, device::LateMode mode,
                         std::uint32_t max_delay_us) {
  return {.name = name,
          .make_network = [=](int ranks) { return make_thread_network(ranks, max_delay_us, true); },
          .make_device =
              [mode](int rank, Ledger& ledger) {
                device::MockDeviceOptions options;
                options.mode = mode;
                options.seed = static_cast<std::uint64_t>(rank) + 3;
                options.host.ledger = &ledger;
                return device::make_mock_device(options);
              }};
}

// Some calls of the contract share the region, many wait for it, and the largest have none of it.
const auto kHostWorlds = ::testing::Values(threads("InStep", 0, 0), threads("OutOfStep", 300, 0),
                                           threads("LateAndReserved", 30, 40000));
const auto kDoubleWorlds =
    ::testing::Values(double_threads("Lazy", device::LateMode::kLazy, 0, 0),
                      double_threads("LateAndReserved", device::LateMode::kRandom, 30, 200000));

const auto kStreamWorld = ::testing::Values(on_streams("Lazy", device::LateMode::kLazy, 0));
const auto kStreamWorlds =
    ::testing::Values(on_streams("Lazy", device::LateMode::kLazy, 0),
                      on_streams("OutOfStep", device::LateMode::kRandom, 100));

INSTANTIATE_TEST_SUITE_P(Threads, MemoryContract, kHostWorlds, world_name);
INSTANTIATE_TEST_SUITE_P(Threads, GroupContract, kHostWorlds, world_name);
INSTANTIATE_TEST_SUITE_P(Threads, LimitContract, ::testing::Values(threads("InStep", 0, 0)),
                         world_name);
INSTANTIATE_TEST_SUITE_P(Streams, MemoryContract, kStreamWorlds, world_name);
INSTANTIATE_TEST_SUITE_P(Streams, GroupContract, kStreamWorlds, world_name);
INSTANTIATE_TEST_SUITE_P(Streams, LimitContract, kStreamWorld, world_name);
INSTANTIATE_TEST_SUITE_P(Streams, StreamLimitContract, kStreamWorld, world_name);
INSTANTIATE_TEST_SUITE_P(Streams, StreamContract, kStreamWorlds, world_name);
INSTANTIATE_TEST_SUITE_P(Double, MemoryContract, kDoubleWorlds, world_name);
INSTANTIATE_TEST_SUITE_P(Double, StagedContract, kDoubleWorlds, world_name);

}  // namespace
}  // namespace tessera::comm
