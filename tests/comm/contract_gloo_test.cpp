// The contracts over Gloo: ranks are threads of this process, each with its own sockets, store
// connection and status store; what processes add is tested in tests/launch. With memory of the
// host, of a double that the host cannot touch, and of a GPU that several ranks share.
#include <chrono>
#include <memory>

#include "tessera/comm/gloo_backend.h"
#include "tessera/comm/store.h"
#include "tessera/core/error.h"
#include "tessera/device/device_cuda.h"
#include "tests/comm/contract.h"
#include "tests/comm/guarded_device.h"

namespace tessera::comm {
namespace {

constexpr std::chrono::seconds kStoreTimeout{60};

class GlooNetwork final : public Network {
 public:
  explicit GlooNetwork(int num_ranks) : num_ranks_(num_ranks) {}

  std::unique_ptr<Backend> make_backend(int rank) override {
    GlooOptions options;
    options.bind_host = "127.0.0.1";
    return make_gloo_backend(connect(), rank, num_ranks_, "world", options);
  }
  std::shared_ptr<StatusStore> make_status() override {
    return std::make_shared<StatusStore>(connect(), num_ranks_);
  }

 private:
  std::unique_ptr<Store> connect() {
    return connect_store("127.0.0.1", server_->port(), kStoreTimeout);
  }

  const int num_ranks_;
  const std::shared_ptr<Store> server_ = serve_store("127.0.0.1", 0, kStoreTimeout);
};

std::unique_ptr<Network> make_gloo(int num_ranks) {
  return std::make_unique<GlooNetwork>(num_ranks);
}

ContractWorld sockets() { return {.name = "Sockets", .make_network = make_gloo}; }

ContractWorld double_sockets() {
  ContractWorld world = sockets();
  world.make_device = [](int rank, Ledger& ledger) {
    return make_guarded_device(device::LateMode::kRandom, rank, ledger);
  };
  return world;
}

ContractWorld on_gpu(const std::string& name,
                     const std::function<std::unique_ptr<Network>(int)>& make_network) {
  return {.name = name,
          .make_network = make_network,
          .make_device =
              [](int rank, Ledger& ledger) {
                device::CudaDeviceOptions options;
                options.index = rank % device::num_cuda_devices();
                options.ledger = &ledger;
                return device::make_cuda_device(options);
              },
          .needs_gpu = true};
}

const auto kCudaWorlds = ::testing::Values(
    on_gpu("Threads", [](int num_ranks) { return make_thread_network(num_ranks, 0); }),
    on_gpu("Gloo", make_gloo));

INSTANTIATE_TEST_SUITE_P(Gloo, MemoryContract, ::testing::Values(sockets()), world_name);
INSTANTIATE_TEST_SUITE_P(Gloo, GroupContract, ::testing::Values(sockets()), world_name);
INSTANTIATE_TEST_SUITE_P(Gloo, LimitContract, ::testing::Values(sockets()), world_name);
INSTANTIATE_TEST_SUITE_P(Double, MemoryContract, ::testing::Values(double_sockets()), world_name);
INSTANTIATE_TEST_SUITE_P(Double, StagedContract, ::testing::Values(double_sockets()), world_name);
INSTANTIATE_TEST_SUITE_P(Cuda, MemoryContract, kCudaWorlds, world_name);
INSTANTIATE_TEST_SUITE_P(Cuda, StagedContract, kCudaWorlds, world_name);

// Joins as one rank of several that never join.
std::string error_of_joining(int rank, int num_ranks, const GlooOptions& options) {
  const auto server = serve_store("127.0.0.1", 0, kStoreTimeout);
  try {
    make_gloo_backend(connect_store("127.0.0.1", server->port(), kStoreTimeout), rank, num_ranks,
                      "world", options);
  } catch (const CommError& error) {
    return error.what();
  }
  return "";
}

TEST(GlooBackend, ARankThatNeverJoinsIsNamed) {
  GlooOptions options;
  options.timeout = std::chrono::milliseconds(300);
  options.bind_host = "127.0.0.1";
  const std::string error = error_of_joining(1, 3, options);
  EXPECT_NE(error.find("rank 0, rank 2 did not join within 0.3 s"), std::string::npos) << error;
}

TEST(GlooBackend, AnAddressThatIsNotOursIsAnErrorThatSaysSo) {
  GlooOptions options;
  options.interface = "nosuchinterface0";
  const std::string error = error_of_joining(0, 1, options);
  EXPECT_NE(error.find("nosuchinterface0"), std::string::npos) << error;
  EXPECT_NE(error.find("GLOO_SOCKET_IFNAME"), std::string::npos) << error;
}

}  // namespace
}  // namespace tessera::comm
