// Calls that are given memory of a GPU which several ranks share: over threads and over Gloo.
#include "tessera/device/device_cuda.h"
#include "tests/comm/gloo_network.h"
#include "tests/comm/staged_contract.h"

namespace tessera::comm {
namespace {

StagedWorld on_gpu(const std::string& name,
                   std::function<std::unique_ptr<Network>(int num_ranks)> make_network) {
  StagedWorld world;
  world.name = name;
  world.make_network = std::move(make_network);
  world.make_device = [](int rank, Ledger& ledger) {
    device::CudaDeviceOptions options;
    options.index = rank % device::num_cuda_devices();
    options.ledger = &ledger;
    return device::make_cuda_device(options);
  };
  world.needs_gpu = true;
  return world;
}

INSTANTIATE_TEST_SUITE_P(
    Cuda, StagedContract,
    ::testing::Values(
        on_gpu("Threads", [](int num_ranks) { return make_thread_network(num_ranks, 0); }),
        on_gpu("Gloo", [](int num_ranks) { return std::make_unique<GlooNetwork>(num_ranks); })),
    staged_world_name);

}  // namespace
}  // namespace tessera::comm
