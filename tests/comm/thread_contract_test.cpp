// The contract of Group over ranks as threads: in step, late, and very late.
#include "tessera/comm/thread_backend.h"
#include "tests/comm/group_contract.h"

namespace tessera::comm {
namespace {

ContractWorld threads(const std::string& name, std::uint32_t max_delay_us, std::uint64_t seed) {
  return {name, [=](int num_ranks, GroupOptions options, const std::function<void(Group&)>& body) {
            ThreadWorldOptions world;
            world.num_ranks = num_ranks;
            world.max_delay_us = max_delay_us;
            world.seed = seed;
            return run_ranks_collecting(world, options, body);
          }};
}

INSTANTIATE_TEST_SUITE_P(Threads, GroupContract,
                         ::testing::Values(threads("InStep", 0, 1), threads("Late", 30, 2),
                                           threads("OutOfStep", 300, 3)),
                         contract_name);

}  // namespace
}  // namespace tessera::comm
