// Ranks that join at a store: the launcher's, or that of rank 0 under another launcher.
#include <unistd.h>

#include <csignal>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/comm/socket_probe.h"
#include "tests/launch/launch_support.h"

namespace tessera::testing {
namespace {

std::set<int> ports_in(const std::string& text) {
  std::set<int> ports;
  const std::regex port("at port ([0-9]+)");
  for (std::sregex_iterator at(text.begin(), text.end(), port), end; at != end; ++at) {
    ports.insert(std::stoi((*at)[1]));
  }
  return ports;
}

// Throws if anybody still listens there.
void expect_free(int port) {
  const int fd = comm::bind_listener("127.0.0.1", static_cast<std::uint16_t>(port));
  close(fd);
}

TEST(LaunchWithStore, LetsAllRanksJoinAndFreesThePort) {
  MarkedRun launch(kStoreProgram, {"--ranks", "3", "join"});
  const ProcessResult result = launch.finish();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err, "");
  EXPECT_EQ(count(result.out, " joined 3 at port "), 3) << result.out;
  const std::set<int> ports = ports_in(result.out);
  ASSERT_EQ(ports.size(), 1U) << result.out;
  expect_free(*ports.begin());
}

TEST(LaunchWithStore, TellsTheOtherRanksWhoWasKilled) {
  MarkedRun launch(kStoreProgram, {"--ranks", "4", "killed-beside-readers", "2"});
  const ProcessResult result = launch.finish();
  EXPECT_EQ(result.exit_code, 137);
  EXPECT_EQ(count(result.out, "read rank 2: killed by signal 9 (SIGKILL)"), 3) << result.out;
  EXPECT_EQ(count(result.err, "rank 2 was killed by signal 9 (SIGKILL)"), 1) << result.err;
  EXPECT_EQ(result.err_lines().size(), 1U) << result.err;
}

TEST(LaunchWithStore, TellsTheOtherRanksWhyOneFailed) {
  MarkedRun launch(kStoreProgram, {"--ranks", "3", "throw-beside-readers", "0"});
  const ProcessResult result = launch.finish();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(count(result.out, "read rank 0: disk is full\n"), 2) << result.out;
  EXPECT_EQ(result.err, "rank 0 failed: disk is full\n");
}

TEST(LaunchWithStore, StopsOnCtrlC) {
  MarkedRun launch(kStoreProgram, {"--ranks", "2", "wait"});
  launch.wait_until_ready(2);
  kill(launch.process().pid(), SIGINT);
  const ProcessResult result = launch.finish();
  EXPECT_EQ(result.exit_code, 130);
  EXPECT_EQ(result.err, "launcher: SIGINT: stopping 2 ranks; a second signal kills them\n");
}

TEST(OtherLaunchers, LetRankZeroHoldTheStore) {
  const int fd = comm::bind_listener("127.0.0.1", 0);
  const std::string port = std::to_string(comm::bound_port(fd));
  close(fd);
  const auto environment = [&](const char* rank) {
    return std::map<std::string, std::string>{
        {"RANK", rank}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port}};
  };
  // The one that connects starts first: it must wait for the one that serves.
  MarkedRun second(kStoreProgram, {"join"}, environment("1"));
  MarkedRun first(kStoreProgram, {"join"}, environment("0"));
  for (MarkedRun* rank : {&first, &second}) {
    const ProcessResult result = rank->finish();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(count(result.out, " joined 2 at port " + port), 1) << result.out;
    EXPECT_EQ(result.err, "");
  }
  expect_free(std::stoi(port));
}

}  // namespace
}  // namespace tessera::testing
