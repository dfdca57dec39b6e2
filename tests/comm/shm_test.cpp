// The contracts over shared memory, and what it must show by itself. Ranks are threads, each with
// its own control block, connections and mapping of the heap; processes are at the end.
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <thread>

#include "tessera/comm/shm_backend.h"
#include "tessera/core/error.h"
#include "testing/hash_store.h"
#include "tests/comm/contract.h"

namespace tessera::comm {
namespace {

// Holds a rank up for random times, as a busy machine does. Groups that are split off are, too,
// each by its own worker.
std::function<void(ShmPhase)> random_delays(int rank, std::uint32_t max_delay_us) {
  const auto num_calls = std::make_shared<std::atomic<std::uint32_t>>(0);
  return [rank, num_calls, max_delay_us](ShmPhase) {
    std::minstd_rand random(static_cast<unsigned>(rank) * 1000003U + ++*num_calls);
    random.discard(2);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % max_delay_us));
  };
}

class ShmNetwork final : public Network {
 public:
  ShmNetwork(int num_ranks, std::uint32_t max_delay_us)
      : num_ranks_(num_ranks), max_delay_us_(max_delay_us) {}

  std::unique_ptr<Backend> make_backend(int rank) override {
    ShmOptions options;
    if (max_delay_us_ > 0) {
      options.on_phase = random_delays(rank, max_delay_us_);
    }
    std::string why_not;
    auto backend = make_shm_backend(store_, rank, num_ranks_, "world", options, why_not);
    TESSERA_CHECK(backend != nullptr, CommError, why_not);
    return backend;
  }
  std::shared_ptr<StatusStore> make_status() override { return status_; }

 private:
  const int num_ranks_;
  const std::uint32_t max_delay_us_;
  const std::shared_ptr<HashStore> store_ = std::make_shared<HashStore>();
  const std::shared_ptr<StatusStore> status_ =
      std::make_shared<StatusStore>(std::make_unique<HashStore>(), num_ranks_);
};

// Gradients lie in the shared heap and are read in place; other memory passes through chunks.
ContractWorld shm(const std::string& name, Role role, std::uint32_t max_delay_us) {
  return {.name = name,
          .make_network =
              [=](int num_ranks) { return std::make_unique<ShmNetwork>(num_ranks, max_delay_us); },
          .role = role};
}

const auto kWorlds = ::testing::Values(
    shm("InPlace", Role::kGradient, 0), shm("InPlaceAndLate", Role::kGradient, 300),
    shm("Chunked", Role::kOther, 0), shm("ChunkedAndLate", Role::kOther, 100));

INSTANTIATE_TEST_SUITE_P(Shm, MemoryContract, kWorlds, world_name);
INSTANTIATE_TEST_SUITE_P(Shm, GroupContract,
                         ::testing::Values(shm("InStep", Role::kGradient, 0),
                                           shm("OutOfStep", Role::kGradient, 300)),
                         world_name);
INSTANTIATE_TEST_SUITE_P(Shm, LimitContract, ::testing::Values(shm("InStep", Role::kGradient, 0)),
                         world_name);

}  // namespace
}  // namespace tessera::comm
