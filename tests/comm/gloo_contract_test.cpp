// The contract of Group over Gloo: ranks are threads of this process, each with its own sockets,
// store connection and status store; what processes add is tested in tests/launch.
#include <numeric>
#include <thread>

#include "tessera/comm/backend.h"
#include "tessera/comm/gloo_backend.h"
#include "tessera/comm/status_store.h"
#include "tessera/comm/store.h"
#include "tessera/core/error.h"
#include "tests/comm/group_contract.h"
#include "tests/comm/told.h"

namespace tessera::comm {
namespace {

constexpr std::chrono::seconds kStoreTimeout{60};

std::vector<std::exception_ptr> run_gloo_ranks(int num_ranks, const GroupOptions& group_options,
                                               const std::function<void(Group&)>& body) {
  const auto server = serve_store("127.0.0.1", 0, kStoreTimeout);
  std::vector<std::exception_ptr> failures(static_cast<std::size_t>(num_ranks));
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < num_ranks; ++rank) {
    ranks.emplace_back([&, rank] {
      GroupOptions options = group_options;
      options.status = std::make_shared<StatusStore>(
          connect_store("127.0.0.1", server->port(), kStoreTimeout), num_ranks);
      try {
        GlooOptions gloo;
        gloo.timeout = options.timeout;
        gloo.bind_host = "127.0.0.1";
        std::unique_ptr<Backend> backend =
            num_ranks == 1
                ? make_solo_backend()
                : make_gloo_backend(connect_store("127.0.0.1", server->port(), kStoreTimeout), rank,
                                    num_ranks, "world", gloo);
        std::vector<int> world_ranks(static_cast<std::size_t>(num_ranks));
        std::iota(world_ranks.begin(), world_ranks.end(), 0);
        Group group(std::move(backend), "world", world_ranks, options);
        run_told(*options.status, rank, [&] { body(group); });
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

INSTANTIATE_TEST_SUITE_P(Gloo, GroupContract,
                         ::testing::Values(ContractWorld{"Sockets", run_gloo_ranks}),
                         contract_name);

TEST(GlooBackend, ARankThatNeverJoinsIsNamed) {
  const auto server = serve_store("127.0.0.1", 0, kStoreTimeout);
  GlooOptions gloo;
  gloo.timeout = std::chrono::milliseconds(300);
  gloo.bind_host = "127.0.0.1";
  try {
    make_gloo_backend(connect_store("127.0.0.1", server->port(), kStoreTimeout), 1, 3, "world",
                      gloo);
    FAIL() << "expected CommError";
  } catch (const CommError& error) {
    EXPECT_NE(std::string(error.what()).find("rank 0, rank 2 did not join within 0.3 s"),
              std::string::npos)
        << error.what();
  }
}

TEST(GlooBackend, AnAddressThatIsNotOursIsAnErrorThatSaysSo) {
  const auto server = serve_store("127.0.0.1", 0, kStoreTimeout);
  GlooOptions gloo;
  gloo.interface = "nosuchinterface0";
  try {
    make_gloo_backend(connect_store("127.0.0.1", server->port(), kStoreTimeout), 0, 1, "world",
                      gloo);
    FAIL() << "expected CommError";
  } catch (const CommError& error) {
    EXPECT_NE(std::string(error.what()).find("nosuchinterface0"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("GLOO_SOCKET_IFNAME"), std::string::npos);
  }
}

}  // namespace
}  // namespace tessera::comm
