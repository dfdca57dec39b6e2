#include "cli/launch/rank_end.h"

#include <unistd.h>

#include <csignal>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace tessera::cli {
namespace {

RankEnd killed(int rank, int signal, std::int64_t at_ns) {
  return {rank, 0, signal, at_ns, std::nullopt};
}
RankEnd reported(int rank, comm::FailureKind kind, std::int64_t at_ns, const std::string& text) {
  // The launcher sees ends in an order that has nothing to do with when they happened.
  return {rank, 1, 0, 1000 - at_ns, comm::RankReport{kind, at_ns, text}};
}

int root_rank(const std::vector<RankEnd>& ends) {
  const auto root = find_root_cause(ends);
  return root ? ends[*root].rank : -1;
}

TEST(RootCause, IsNobodyIfNoRankFailed) {
  EXPECT_EQ(root_rank({}), -1);
  EXPECT_EQ(root_rank({{0, 0, 0, 1, std::nullopt}}), -1);
}

TEST(RootCause, IsTheRankThatWasKilledThoughItsPeersReportedFirst) {
  EXPECT_EQ(root_rank({reported(0, comm::FailureKind::kPeerLoss, 1, "lost rank 2"),
                       reported(1, comm::FailureKind::kPeerLoss, 2, "lost rank 2"),
                       killed(2, SIGKILL, 9)}),
            2);
}

TEST(RootCause, IsTheEarliestOfSeveralCauses) {
  EXPECT_EQ(root_rank({reported(0, comm::FailureKind::kCause, 7, "late"),
                       reported(1, comm::FailureKind::kCause, 5, "early"),
                       reported(2, comm::FailureKind::kPeerLoss, 1, "lost rank 1")}),
            1);
}

TEST(RootCause, IsTheEarliestConsequenceIfThereIsNothingElse) {
  EXPECT_EQ(root_rank({reported(3, comm::FailureKind::kPeerLoss, 4, "b"),
                       reported(1, comm::FailureKind::kPeerLoss, 3, "a")}),
            1);
}

TEST(RankEnd, IsDescribedInOneLineWithTheRank) {
  EXPECT_EQ(describe_end(reported(2, comm::FailureKind::kCause, 1, "no such file")),
            "rank 2 failed: no such file");
  EXPECT_EQ(describe_end(killed(2, SIGKILL, 1)),
            "rank 2 was killed by signal 9 (SIGKILL); the kernel does that when memory runs out: "
            "see dmesg");
  EXPECT_EQ(describe_cause(killed(2, SIGTERM, 1)), "killed by signal 15 (SIGTERM)");
  EXPECT_EQ(describe_end({4, 3, 0, 1, std::nullopt}).substr(0, 25), "rank 4 exited with code 3");
}

TEST(RankEnd, GivesTheExitCodeOfAShell) {
  EXPECT_EQ(killed(0, SIGKILL, 0).shell_code(), 137);
  EXPECT_EQ((RankEnd{0, 3, 0, 0, std::nullopt}).shell_code(), 3);
}

TEST(RankReport, ComesBackAsItWasWritten) {
  const int fd = comm::make_report_file();
  EXPECT_FALSE(comm::read_report(fd));
  ASSERT_TRUE(comm::write_report(fd, {comm::FailureKind::kPeerLoss, 42, "lost\nrank 1"}));
  const auto report = comm::read_report(fd);
  ASSERT_TRUE(report);
  EXPECT_EQ(report->kind, comm::FailureKind::kPeerLoss);
  EXPECT_EQ(report->at_ns, 42);
  EXPECT_EQ(report->text, "lost\nrank 1");
  close(fd);
}

TEST(RankReport, IsCutBeforeItBecomesAFlood) {
  const int fd = comm::make_report_file();
  ASSERT_TRUE(comm::write_report(fd, {comm::FailureKind::kCause, 0, std::string(1 << 20, 'a')}));
  EXPECT_EQ(comm::read_report(fd)->text.size(), 64U * 1024);
  close(fd);
}

TEST(RankReport, IsNothingIfTheRankDiedWhileItWrote) {
  const int fd = comm::make_report_file();
  ASSERT_TRUE(comm::write_report(fd, {comm::FailureKind::kCause, 0, "a long message"}));
  ASSERT_EQ(ftruncate(fd, 30), 0);
  EXPECT_FALSE(comm::read_report(fd));
  close(fd);
}

TEST(RankReport, ThatCannotBeWrittenSaysSo) {
  EXPECT_FALSE(comm::write_report(-1, {comm::FailureKind::kCause, 0, "text"}));
}

}  // namespace
}  // namespace tessera::cli
