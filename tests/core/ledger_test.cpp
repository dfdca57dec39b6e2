#include "tessera/core/ledger.h"

#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"

namespace tessera {
namespace {

TEST(Ledger, CountsEachCellAndTheSumOfItsTier) {
  Ledger ledger;
  ledger.charge(Tier::kHost, Role::kShard, 100);
  ledger.charge(Tier::kHost, Role::kOptimizer, 50);
  ledger.charge(Tier::kDevice, Role::kFull, 7);
  EXPECT_EQ(ledger.current_bytes(Tier::kHost, Role::kShard), 100U);
  EXPECT_EQ(ledger.current_bytes(Tier::kHost), 150U);
  EXPECT_EQ(ledger.current_bytes(Tier::kDevice), 7U);
  EXPECT_EQ(ledger.current_bytes(Tier::kNvme), 0U);
}

TEST(Ledger, ThePeakOfATierIsNotTheSumOfThePeaks) {
  Ledger ledger;
  ledger.charge(Tier::kHost, Role::kShard, 100);
  ledger.discharge(Tier::kHost, Role::kShard, 100);
  ledger.charge(Tier::kHost, Role::kOptimizer, 60);
  EXPECT_EQ(ledger.peak_bytes(Tier::kHost, Role::kShard), 100U);
  EXPECT_EQ(ledger.peak_bytes(Tier::kHost, Role::kOptimizer), 60U);
  EXPECT_EQ(ledger.peak_bytes(Tier::kHost), 100U);
}

TEST(Ledger, GivingBackMoreThanIsHeldIsOurErrorAndChangesNothing) {
  Ledger ledger;
  ledger.charge(Tier::kPinned, Role::kStaging, 10);
  ledger.charge(Tier::kPinned, Role::kShard, 10);
  try {
    ledger.discharge(Tier::kPinned, Role::kStaging, 11);
    FAIL() << "expected InternalError";
  } catch (const InternalError& e) {
    EXPECT_NE(std::string(e.what()).find("11 B given back to pinned/staging, which holds 10 B"),
              std::string::npos)
        << e.what();
  }
  EXPECT_EQ(ledger.current_bytes(Tier::kPinned, Role::kStaging), 10U);
  EXPECT_EQ(ledger.current_bytes(Tier::kPinned), 20U);
}

TEST(Ledger, PeaksStartAgainFromWhatIsHeld) {
  Ledger ledger;
  ledger.charge(Tier::kDevice, Role::kFull, 100);
  ledger.discharge(Tier::kDevice, Role::kFull, 70);
  ledger.reset_peaks();
  EXPECT_EQ(ledger.peak_bytes(Tier::kDevice, Role::kFull), 30U);
  EXPECT_EQ(ledger.peak_bytes(Tier::kDevice), 30U);
}

TEST(Ledger, TheTableHasALineForEachCellThatWasEverUsed) {
  Ledger ledger;
  ledger.charge(Tier::kHost, Role::kGradient, 3U << 20);
  ledger.discharge(Tier::kHost, Role::kGradient, 3U << 20);
  const std::string expected =
      "tier    role                        now                peak\n"
      "host    gradient                    0 B            3.00 MiB\n"
      "host    all                         0 B            3.00 MiB\n";
  EXPECT_EQ(ledger.table(), expected);
  ledger.reset_peaks();
  EXPECT_NE(ledger.table().find("gradient"), std::string::npos);
  EXPECT_EQ(ledger.table().find("device"), std::string::npos);
}

TEST(Ledger, StaysExactWhenManyThreadsChargeAtOnce) {
  Ledger ledger;
  constexpr int kThreads = 8;
  constexpr int kRounds = 5000;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&ledger, t] {
      const auto role = static_cast<Role>(t % 2);
      for (int i = 0; i < kRounds; ++i) {
        ledger.charge(Tier::kHost, role, 3);
        ledger.charge(Tier::kHost, role, 4);
        ledger.discharge(Tier::kHost, role, 3);
        if (i % 1000 == 0) {
          ledger.reset_peaks();
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  const std::size_t held = std::size_t{kThreads} * kRounds * 4;
  EXPECT_EQ(ledger.current_bytes(Tier::kHost), held);
  EXPECT_EQ(ledger.current_bytes(Tier::kHost, Role::kShard), held / 2);
  EXPECT_EQ(ledger.current_bytes(Tier::kHost, Role::kFull), held / 2);
  EXPECT_GE(ledger.peak_bytes(Tier::kHost), held);
  EXPECT_LE(ledger.peak_bytes(Tier::kHost), held + kThreads * 3);
}

TEST(Ledger, EveryTierAndRoleHasAName) {
  for (std::size_t i = 0; i < kNumTiers; ++i) {
    EXPECT_NE(to_string(static_cast<Tier>(i)), "unknown");
  }
  for (std::size_t i = 0; i < kNumRoles; ++i) {
    EXPECT_NE(to_string(static_cast<Role>(i)), "unknown");
  }
}

}  // namespace
}  // namespace tessera
