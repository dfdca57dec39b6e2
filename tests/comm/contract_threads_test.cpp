// The contracts over ranks as threads: in step, out of step, and late with little staging, for
// which calls wait; with memory of the host, and of a double that the host cannot touch.
#include "testing/guarded_device.h"
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

// Some calls of the contract share the region, many wait for it, and the largest have none of it.
const auto kHostWorlds = ::testing::Values(threads("InStep", 0, 0), threads("OutOfStep", 300, 0),
                                           threads("LateAndReserved", 30, 40000));
const auto kDoubleWorlds =
    ::testing::Values(double_threads("Lazy", device::LateMode::kLazy, 0, 0),
                      double_threads("LateAndReserved", device::LateMode::kRandom, 30, 200000));

INSTANTIATE_TEST_SUITE_P(Threads, MemoryContract, kHostWorlds, world_name);
INSTANTIATE_TEST_SUITE_P(Threads, GroupContract, kHostWorlds, world_name);
INSTANTIATE_TEST_SUITE_P(Threads, LimitContract, ::testing::Values(threads("InStep", 0, 0)),
                         world_name);
INSTANTIATE_TEST_SUITE_P(Double, MemoryContract, kDoubleWorlds, world_name);
INSTANTIATE_TEST_SUITE_P(Double, StagedContract, kDoubleWorlds, world_name);

}  // namespace
}  // namespace tessera::comm
