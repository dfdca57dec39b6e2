#include "tests/comm/staged_contract.h"

#include <numeric>
#include <thread>

#include "tessera/core/error.h"
#include "tessera/device/device_cuda.h"
#include "testing/thread_backend.h"
#include "tests/comm/time_limits.h"
#include "tests/comm/told.h"

namespace tessera::comm {
namespace {

class ThreadNetwork final : public Network {
 public:
  explicit ThreadNetwork(const ThreadWorldOptions& options) : world_(options) {}
  std::unique_ptr<Backend> make_backend(int rank) override { return world_.make_backend(rank); }
  std::shared_ptr<StatusStore> make_status() override { return world_.status(); }

 private:
  ThreadWorld world_;
};

}  // namespace

std::unique_ptr<Network> make_thread_network(int num_ranks, std::uint32_t max_delay_us) {
  ThreadWorldOptions options;
  options.num_ranks = num_ranks;
  options.max_delay_us = max_delay_us;
  options.seed = 5;
  return std::make_unique<ThreadNetwork>(options);
}

void StagedContract::SetUp() {
  if (GetParam().needs_gpu && device::num_cuda_devices() == 0) {
    GTEST_SKIP() << "no GPU: " << device::cuda_description();
  }
}

void StagedContract::run(int num_ranks, const Body& body) {
  const auto failures = run_collecting(num_ranks, body);
  for (std::size_t rank = 0; rank < failures.size(); ++rank) {
    if (failures[rank]) {
      try {
        std::rethrow_exception(failures[rank]);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    }
  }
}

std::vector<std::exception_ptr> StagedContract::run_collecting(int num_ranks, const Body& body) {
  const StagedWorld& world = GetParam();
  const std::unique_ptr<Network> network = world.make_network(num_ranks);
  std::vector<std::exception_ptr> failures(static_cast<std::size_t>(num_ranks));
  std::vector<int> world_ranks(failures.size());
  std::iota(world_ranks.begin(), world_ranks.end(), 0);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < num_ranks; ++rank) {
    ranks.emplace_back([&, rank] {
      GroupOptions options = patient();
      options.status = network->make_status();
      Ledger ledger;
      try {
        const auto device = world.make_device(rank, ledger);
        options.device = device.get();
        Group group(network->make_backend(rank), "world", world_ranks, options);
        if (world.staging_bytes > 0) {
          group.reserve_staging(world.staging_bytes);
        }
        StagedRank here{group, *device, ledger};
        run_told(*options.status, rank, [&] { body(here); });
      } catch (const std::exception&) {
        failures[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& rank : ranks) {
    rank.join();
  }
  return failures;
}

}  // namespace tessera::comm
