// The contracts over shared memory, with ranks as threads and as processes: in step and late, with
// memory that is read in place and memory that passes through chunks.
#include <vector>

#include "tests/comm/contract.h"
#include "tests/comm/random_call.h"
#include "tests/comm/shm_network.h"
#include "tests/support/sizes.h"

namespace tessera::comm {
namespace {

ContractWorld threads_over_shm(const std::string& name, Role role, std::uint32_t max_delay_us) {
  return shm_world(name, role, max_delay_us, false);
}
ContractWorld processes_over_shm(const std::string& name, Role role, std::uint32_t max_delay_us) {
  return shm_world(name, role, max_delay_us, true);
}

INSTANTIATE_TEST_SUITE_P(Shm, MemoryContract,
                         ::testing::Values(threads_over_shm("InPlace", Role::kGradient, 0),
                                           threads_over_shm("InPlaceAndLate", Role::kGradient, 300),
                                           threads_over_shm("Chunked", Role::kOther, 0),
                                           threads_over_shm("ChunkedAndLate", Role::kOther, 100)),
                         world_name);
INSTANTIATE_TEST_SUITE_P(Shm, GroupContract,
                         ::testing::Values(threads_over_shm("InStep", Role::kGradient, 0),
                                           threads_over_shm("OutOfStep", Role::kGradient, 300)),
                         world_name);
INSTANTIATE_TEST_SUITE_P(Shm, LimitContract,
                         ::testing::Values(threads_over_shm("InStep", Role::kGradient, 0)),
                         world_name);

// A sanitizer sees in processes what it sees in threads: there one of them is enough.
std::vector<ContractWorld> process_worlds() {
  std::vector<ContractWorld> worlds = {processes_over_shm("Chunked", Role::kOther, 0)};
  if (!support::kIsSanitized) {
    worlds.push_back(processes_over_shm("InPlaceAndLate", Role::kGradient, 100));
  }
  return worlds;
}

INSTANTIATE_TEST_SUITE_P(ShmProcesses, MemoryContract, ::testing::ValuesIn(process_worlds()),
                         world_name);
INSTANTIATE_TEST_SUITE_P(ShmProcesses, GroupContract,
                         ::testing::Values(processes_over_shm("OutOfStep", Role::kGradient, 100)),
                         world_name);

// Each group has its own, as long as it lives.
class ShmChunks : public Contract {};
INSTANTIATE_TEST_SUITE_P(Shm, ShmChunks,
                         ::testing::Values(threads_over_shm("Threads", Role::kGradient, 0),
                                           processes_over_shm("Processes", Role::kGradient, 0)),
                         world_name);

TEST_P(ShmChunks, AreChargedWhileTheirGroupLives) {
  run(2, [](ContractRank& here) {
    const auto held = [&] { return here.ledger.current_bytes(Tier::kHost, Role::kStaging); };
    EXPECT_EQ(here.group.held_memory().bytes, kShmChunks.bytes);
    EXPECT_EQ(held(), kShmChunks.bytes);
    {
      const auto both = here.group.split(0, "both");
      EXPECT_EQ(held(), 2 * kShmChunks.bytes);
      const auto alone = here.group.split(here.group.rank(), "alone");
      EXPECT_EQ(held(), 2 * kShmChunks.bytes);
    }
    EXPECT_EQ(held(), kShmChunks.bytes);
  });
}

// More ranks than most machines of the tests have cores.
class ManyRanksContract : public Contract {};
INSTANTIATE_TEST_SUITE_P(ShmProcesses, ManyRanksContract,
                         ::testing::Values(processes_over_shm("InPlace", Role::kGradient, 0),
                                           processes_over_shm("ChunkedAndLate", Role::kOther, 100)),
                         world_name);

TEST_P(ManyRanksContract, RandomCallsOfFourAndSevenRanksEqualTheReference) {
  run_each({4, 7}, [](ContractRank& here) { run_random_calls(here, support::rounds(150, 15), 8); });
}

}  // namespace
}  // namespace tessera::comm
