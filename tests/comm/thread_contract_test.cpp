// The contract of Group over ranks as threads: in step, late, and very late; and late with little
// staging, for which calls wait.
#include "testing/thread_backend.h"
#include "tests/comm/group_contract.h"

namespace tessera::comm {
namespace {

ContractWorld threads(const std::string& name, std::uint32_t max_delay_us, std::uint64_t seed) {
  return {name,
          [=](int num_ranks, const GroupOptions& options, const std::function<void(Group&)>& body) {
            ThreadWorldOptions world;
            world.num_ranks = num_ranks;
            world.max_delay_us = max_delay_us;
            world.seed = seed;
            return run_ranks_collecting(world, options, body);
          }};
}

// Some calls of the contract share the region, many wait for it, and the largest have none of it.
ContractWorld reserved(const std::string& name, std::size_t staging_bytes) {
  const ContractWorld late = threads(name, 30, 4);
  return {name,
          [=](int num_ranks, const GroupOptions& options, const std::function<void(Group&)>& body) {
            return late.run(num_ranks, options, [&](Group& group) {
              group.reserve_staging(staging_bytes);
              body(group);
            });
          }};
}

INSTANTIATE_TEST_SUITE_P(Threads, GroupContract,
                         ::testing::Values(threads("InStep", 0, 1), threads("Late", 30, 2),
                                           threads("OutOfStep", 300, 3),
                                           reserved("Reserved", 40000)),
                         contract_name);

}  // namespace
}  // namespace tessera::comm
