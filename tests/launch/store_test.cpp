#include "tessera/comm/store.h"

#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "cli/launch/launch_store.h"
#include "tessera/comm/socket_probe.h"
#include "tessera/comm/status_store.h"
#include "tessera/comm/tag.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds kLimit{60000};

template <typename Body>
std::string comm_error(const Body& body) {
  try {
    body();
  } catch (const CommError& error) {
    return error.what();
  }
  return "";
}

// A port that was free a moment ago.
std::uint16_t free_port() {
  const int fd = bind_listener("127.0.0.1", 0);
  const std::uint16_t port = bound_port(fd);
  close(fd);
  return port;
}

TEST(Store, HandsValuesFromOneConnectionToAnother) {
  const auto server = serve_store("127.0.0.1", 0, kLimit);
  const auto client = connect_store("127.0.0.1", server->port(), kLimit);
  const std::string bytes("a\0b\xff", 4);
  server->set("key", bytes);
  EXPECT_EQ(client->get("key", kLimit), bytes);
  EXPECT_EQ(client->try_get("key"), bytes);
  EXPECT_EQ(client->try_get("other"), std::nullopt);
  EXPECT_EQ(client->add("counter", 5), 5);
  EXPECT_EQ(server->add("counter", -2), 3);
  EXPECT_EQ(client->address(), "127.0.0.1:" + std::to_string(server->port()));
}

TEST(Store, WaitsInGetForAValueThatComesLater) {
  const auto server = serve_store("127.0.0.1", 0, kLimit);
  const auto client = connect_store("127.0.0.1", server->port(), kLimit);
  std::string value;
  std::thread reader([&] { value = client->get("late", kLimit); });
  server->set("late", "here");
  reader.join();
  EXPECT_EQ(value, "here");
}

TEST(Store, NamesKeyAndAddressWhenAValueDoesNotCome) {
  const auto server = serve_store("127.0.0.1", 0, kLimit);
  ::testing::internal::CaptureStderr();
  const std::string error = comm_error([&] { server->get("nobody/sets/this", milliseconds(20)); });
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "") << "c10d speaks";
  EXPECT_NE(error.find("nobody/sets/this"), std::string::npos) << error;
  EXPECT_NE(error.find(server->address()), std::string::npos) << error;
  EXPECT_EQ(error.find('\n'), std::string::npos) << error;
  // The connection is still good.
  server->set("key", "value");
  EXPECT_EQ(server->get("key", kLimit), "value");
}

TEST(Store, KeepsKeysOfDifferentPrefixesApart) {
  const auto server = serve_store("127.0.0.1", 0, kLimit, "tessera/0/");
  const auto same = connect_store("127.0.0.1", server->port(), kLimit, "tessera/0/");
  const auto other = connect_store("127.0.0.1", server->port(), kLimit, "tessera/1/");
  server->set("key", "value");
  EXPECT_EQ(same->try_get("key"), "value");
  EXPECT_EQ(other->try_get("key"), std::nullopt);
}

TEST(Store, SaysInOneLineThatNobodyAnswers) {
  const std::string port = std::to_string(free_port());
  ::testing::internal::CaptureStderr();
  const std::string error = comm_error([&] {
    connect_store("127.0.0.1", static_cast<std::uint16_t>(std::stoi(port)), milliseconds(30));
  });
  // c10d would print a warning with a stack trace for each attempt.
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(error.find("store at 127.0.0.1:" + port +
                       " does not answer after 0.03 s (Connection refused); is rank 0 running"),
            0U)
      << error;
}

TEST(Store, SaysThatAHostIsUnknown) {
  const std::string error =
      comm_error([] { connect_store("no-such-host.invalid", 1, milliseconds(1)); });
  EXPECT_NE(error.find("store at no-such-host.invalid:1 does not answer"), std::string::npos)
      << error;
}

TEST(Store, SaysThatThePortIsTaken) {
  const auto server = serve_store("127.0.0.1", 0, kLimit);
  const std::string error = comm_error([&] { serve_store("127.0.0.1", server->port(), kLimit); });
  EXPECT_NE(error.find("127.0.0.1:" + std::to_string(server->port()) + ": the port is in use"),
            std::string::npos)
      << error;
  EXPECT_NE(error.find("MASTER_PORT"), std::string::npos) << error;
}

// What other hosts see of this one is never loopback, whatever its name stands for.
TEST(AddressTowards, IsOneOfThisMachineThatIsNotLoopback) {
  for (const char* host : {"127.0.0.1", "192.0.2.1"}) {
    const std::string address = address_towards(host, 29500);
    EXPECT_NE(address.substr(0, 4), "127.") << host;
    if (!address.empty()) {
      EXPECT_EQ(listen_scope(address), ListenScope::kNamed) << address;
    }
  }
}

TEST(Store, ListensOnTheNamedAddressOnly) {
  const auto server = serve_store("127.0.0.2", 0, kLimit);
  EXPECT_EQ(listen_scope("127.0.0.2"), ListenScope::kNamed);
  // A listener on all addresses would have it, and answer there.
  EXPECT_EQ(connect_within("127.0.0.1", server->port(), milliseconds(0)).fd, -1);
  close(bind_listener("127.0.0.1", server->port()));
  const auto client = connect_store("127.0.0.2", server->port(), kLimit);
  client->set("key", "value");
  EXPECT_EQ(server->try_get("key"), "value");
}

TEST(Store, ListensEverywhereWhereTheNameIsAnotherMachines) {
  EXPECT_EQ(listen_scope("192.0.2.1"), ListenScope::kNotHere);  // of no machine: RFC 5737
}

TEST(Store, ThatHasGoneIsAnErrorInOneLine) {
  auto server = serve_store("127.0.0.1", 0, kLimit);
  const auto client = connect_store("127.0.0.1", server->port(), kLimit);
  server.reset();
  const std::string error = comm_error([&] { client->set("key", "value"); });
  EXPECT_NE(error.find("cannot set key 'key': the connection was closed; the process that holds"),
            std::string::npos)
      << error;
}

TEST(Store, ThatIsAnotherProgramIsAnError) {
  const int fd = bind_listener("127.0.0.1", 0);
  ASSERT_EQ(listen(fd, 8), 0);
  // It takes connections and never says a word. It stays open: the thread that connect_store leaves
  // behind would speak of its end.
  const std::string error =
      comm_error([&] { connect_store("127.0.0.1", bound_port(fd), milliseconds(100)); });
  EXPECT_NE(error.find("answers, but not as a store"), std::string::npos) << error;
}

TEST(Store, FreesItsPortWhenItEnds) {
  std::uint16_t port = 0;
  for (int round = 0; round < 5; ++round) {
    const auto server = serve_store("127.0.0.1", port, kLimit);
    const auto client = connect_store("127.0.0.1", server->port(), kLimit);
    client->set("key", "value");
    port = server->port();
  }
}

// As the launcher and its ranks see it.
class StatusStoreTest : public ::testing::Test {
 protected:
  static constexpr int kNumRanks = 8;

  std::unique_ptr<StatusStore> connect(const std::string& secret) const {
    const std::string prefix = find_rendezvous({{kSecretVariable, secret}}).key_prefix;
    return std::make_unique<StatusStore>(connect_store(launch_.host, launch_.port, kLimit, prefix),
                                         kNumRanks);
  }

  cli::LaunchStore launch_ = cli::serve_launch_store(kNumRanks, kLimit);
  std::unique_ptr<StatusStore> rank_ = connect(launch_.secret);
};

TEST_F(StatusStoreTest, IsNotFoundWithoutTheSecretOfItsRun) {
  const cli::LaunchStore other = cli::serve_launch_store(kNumRanks, kLimit);
  EXPECT_GE(launch_.secret.size(), 32U);
  EXPECT_NE(launch_.secret, other.secret);
  launch_.status->post_failure(1, RankFailure{"disk is full"});
  EXPECT_EQ(rank_->failures().size(), 1U);
  EXPECT_EQ(connect("")->failures().size(), 0U);
  EXPECT_EQ(connect(other.secret)->failures().size(), 0U);
}

TEST_F(StatusStoreTest, ShowsTheStatusOfOtherRanks) {
  EXPECT_EQ(rank_->read("world", 1), std::nullopt);
  const RankStatus posted{7, 6, 3, "all_gather #7"};
  launch_.status->post("world", 1, posted);
  // A post is not answered: only an answer on the same connection says that the store has it.
  EXPECT_TRUE(launch_.status->is_reachable());
  EXPECT_EQ(rank_->read("world", 1), posted);
  EXPECT_EQ(rank_->read("other", 1), std::nullopt);
}

TEST_F(StatusStoreTest, KeepsTheFirstFailureOfEachRank) {
  EXPECT_TRUE(rank_->failures().empty());
  rank_->post_failure(3, MismatchError("ranks differ"));
  launch_.status->post_failure(3, RankFailure{"exited with code 1"});
  launch_.status->post_failure(0, RankFailure{"killed"});
  const std::map<int, RankFailure> expected{{0, {"killed", false}}, {3, {"ranks differ", true}}};
  EXPECT_EQ(rank_->failures(), expected);
  EXPECT_EQ(launch_.status->failures(), expected);
}

TEST_F(StatusStoreTest, WithoutItsStoreIsEmptyAndSaysSo) {
  rank_->post_failure(1, RankFailure{"disk is full"});
  EXPECT_TRUE(rank_->is_reachable());
  launch_.status.reset();
  ::testing::internal::CaptureStderr();
  EXPECT_FALSE(rank_->is_reachable());
  EXPECT_TRUE(rank_->failures().empty());
  EXPECT_EQ(rank_->read("world", 0), std::nullopt);
  rank_->post("world", 0, RankStatus{});
  rank_->post_failure(0, RankFailure{"late"});
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "") << "c10d speaks";
}

TEST_F(StatusStoreTest, IsSafeFromSeveralThreads) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kNumRanks; ++rank) {
    threads.emplace_back([&, rank] {
      for (std::uint64_t heartbeat = 1; heartbeat <= 50; ++heartbeat) {
        launch_.status->post("world", rank, {0, 0, heartbeat, ""});
        launch_.status->failures();
      }
      launch_.status->post_failure(rank, RankFailure{std::to_string(rank)});
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(launch_.status->failures().size(), static_cast<std::size_t>(kNumRanks));
  EXPECT_EQ(launch_.status->read("world", 5)->heartbeat, 50U);
}

}  // namespace
}  // namespace tessera::comm
