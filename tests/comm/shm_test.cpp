// The contracts over shared memory, with ranks as threads and as processes: in step and late, with
// memory that is read in place and memory that passes through chunks.
#include <algorithm>
#include <atomic>
#include <future>
#include <memory>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/device/device_cpu.h"
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

// The worker is held up between two calls, of which the second has all it needs: when abort() has
// returned, the owner of its memory may free it.
TEST(ShmAbort, TouchesNoMemoryOfCallsThatAreNotWorkedOn) {
  constexpr std::size_t kBytes = 5000;
  std::promise<void> peer_has_posted;  // for its second call
  ShmNetwork network(2, false, [&, num = 0](int rank, ShmPhase phase) mutable {
    if (rank == 1 && phase == ShmPhase::kPosted && ++num == 2) {
      peer_has_posted.set_value();
    }
  });
  auto made = std::async(std::launch::async, [&] { return network.make_backend(1); });
  const auto backend = network.make_backend(0);
  const auto peer = made.get();
  const auto device = device::make_cpu_device({nullptr, {}, nullptr});
  const device::Memory shards = device->allocate(Tier::kDevice, 2 * kBytes, Role::kGradient);
  Bytes full(2 * kBytes, std::byte{0xee});
  Bytes peers_full(2 * kBytes);

  std::promise<void> is_held;
  std::promise<void> may_go_on;
  std::atomic<bool> flag{false};
  Call first;
  first.met = {&flag, [&](std::atomic<bool>*) {  // dropped with the first call
                 is_held.set_value();
                 may_go_on.get_future().wait();
               }};
  const Pending done = backend->start_all_gather({}, std::exchange(first, {}));
  const GatherBytes own{shards.data(), full.data(), kBytes};
  const Pending aborted = backend->start_all_gather({&own, 1}, {});
  const Pending peers_done = peer->start_all_gather({}, {});
  const GatherBytes peers{shards.data() + kBytes, peers_full.data(), kBytes};
  const Pending peers_aborted = peer->start_all_gather({&peers, 1}, {});
  is_held.get_future().wait();
  peer_has_posted.get_future().wait();
  backend->abort("enough of it");
  may_go_on.set_value();
  done.wait();
  peers_done.wait();
  EXPECT_THROW(aborted.wait(), PeerError);
  EXPECT_THROW(peers_aborted.wait(), PeerError);
  EXPECT_EQ(std::count(full.begin(), full.end(), std::byte{0xee}), std::ssize(full));
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
