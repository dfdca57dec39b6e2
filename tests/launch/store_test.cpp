#include "tessera/comm/store.h"

#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/comm/socket_probe.h"
#include "tessera/comm/store_board.h"
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
  // A listener on all addresses would have it.
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

TEST(Store, ListensOnLoopbackOnlyForALocalRun) {
  const auto server = serve_store("127.0.0.1", 0, kLimit);
  EXPECT_EQ(connect_within("127.0.0.2", server->port(), milliseconds(0)).fd, -1);
  const ConnectResult local = connect_within("127.0.0.1", server->port(), kLimit);
  EXPECT_GE(local.fd, 0);
  close(local.fd);
}

// As ranks find it in their environment.
std::string prefix_of(const LaunchStore& launch) {
  return find_rendezvous({{kSecretVariable, launch.secret}}).key_prefix;
}

TEST(StoreBoard, IsNotFoundWithoutTheSecretOfItsRun) {
  LaunchStore launch = serve_launch_store(2, kLimit);
  LaunchStore other = serve_launch_store(2, kLimit);
  EXPECT_GE(launch.secret.size(), 32U);
  EXPECT_NE(launch.secret, other.secret);
  launch.board->post_failure(1, "disk is full");
  EXPECT_TRUE(launch.board->reachable());
  const auto board_with = [&](const std::string& prefix) {
    return make_store_board(connect_store(launch.host, launch.port, kLimit, prefix), 2);
  };
  EXPECT_EQ(board_with(prefix_of(launch))->failures().size(), 1U);
  EXPECT_EQ(board_with(Rendezvous{}.key_prefix)->failures().size(), 0U);
  EXPECT_EQ(board_with(prefix_of(other))->failures().size(), 0U);
}

TEST(StoreBoard, ShowsEntriesOfOtherRanks) {
  LaunchStore launch = serve_launch_store(2, kLimit);
  const auto board =
      make_store_board(connect_store(launch.host, launch.port, kLimit, prefix_of(launch)), 2);
  EXPECT_EQ(board->read("world", 1), std::nullopt);
  BoardEntry entry;
  entry.launched = 7;
  entry.completed = 6;
  entry.beat = 3;
  entry.text = "all_gather #7";
  launch.board->post("world", 1, entry);
  // A post is not answered: only an answer on the same connection says that the store has it.
  EXPECT_TRUE(launch.board->reachable());
  const auto read = board->read("world", 1);
  ASSERT_TRUE(read);
  EXPECT_EQ(read->launched, 7U);
  EXPECT_EQ(read->completed, 6U);
  EXPECT_EQ(read->beat, 3U);
  EXPECT_EQ(read->text, "all_gather #7");
  EXPECT_EQ(board->read("other", 1), std::nullopt);
}

TEST(StoreBoard, KeepsTheFirstFailureOfEachRank) {
  LaunchStore launch = serve_launch_store(4, kLimit);
  const auto board =
      make_store_board(connect_store(launch.host, launch.port, kLimit, prefix_of(launch)), 4);
  EXPECT_TRUE(board->failures().empty());
  board->post_failure(3, "disk is full");
  launch.board->post_failure(3, "exited with code 1");
  launch.board->post_failure(0, "killed");
  const std::map<int, std::string> expected{{0, "killed"}, {3, "disk is full"}};
  EXPECT_EQ(board->failures(), expected);
  EXPECT_EQ(launch.board->failures(), expected);
}

TEST(StoreBoard, WithoutItsStoreIsEmptyAndSaysSo) {
  LaunchStore launch = serve_launch_store(2, kLimit);
  const auto board =
      make_store_board(connect_store(launch.host, launch.port, kLimit, prefix_of(launch)), 2);
  board->post_failure(1, "disk is full");
  EXPECT_TRUE(board->reachable());
  launch.board.reset();
  ::testing::internal::CaptureStderr();
  EXPECT_FALSE(board->reachable());
  EXPECT_TRUE(board->failures().empty());
  EXPECT_EQ(board->read("world", 0), std::nullopt);
  board->post("world", 0, BoardEntry{});
  board->post_failure(0, "late");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "") << "c10d speaks";
}

TEST(StoreBoard, IsSafeFromSeveralThreads) {
  LaunchStore launch = serve_launch_store(8, kLimit);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 8; ++rank) {
    threads.emplace_back([&, rank] {
      for (std::uint64_t beat = 1; beat <= 50; ++beat) {
        BoardEntry entry;
        entry.beat = beat;
        launch.board->post("world", rank, entry);
        launch.board->failures();
      }
      launch.board->post_failure(rank, std::to_string(rank));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(launch.board->failures().size(), 8U);
  EXPECT_EQ(launch.board->read("world", 5)->beat, 50U);
}

}  // namespace
}  // namespace tessera::comm
