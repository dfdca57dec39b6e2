#include "tessera/core/ledger.h"

#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/support/contains.h"

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
    EXPECT_HAS(std::string(e.what()), "11 B given back to pinned/staging, which holds 10 B");
  }
  EXPECT_EQ(ledger.current_bytes(Tier::kPinned, Role::kStaging), 10U);
  EXPECT_EQ(ledger.current_bytes(Tier::kPinned), 20U);
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

constexpr std::size_t kMib = std::size_t{1} << 20;

std::size_t position_of(const std::string& text, const std::string& part) {
  EXPECT_HAS(text, part) << "no \"" << part << "\" in:\n" << text;
  return text.find(part);
}

// 100 MiB of memory: 80 in the ledger, 15 of others, 5 free.
class MemoryReport : public ::testing::Test {
 protected:
  MemoryReport() {
    ledger_.charge(Tier::kDevice, Role::kShard, 20 * kMib);
    ledger_.charge(Tier::kDevice, Role::kFull, 10 * kMib);
    ledger_.charge(Tier::kDevice, Role::kOptimizer, 50 * kMib);
    ledger_.charge(Tier::kPinned, Role::kGradient, 3 * kMib);
  }

  std::string report(std::size_t asked_mib) const {
    return memory_report(ledger_, Tier::kDevice, asked_mib * kMib, 5 * kMib, 100 * kMib);
  }

  Ledger ledger_;
};

TEST_F(MemoryReport, SaysWhatWasAskedForWhatIsFreeAndWhatIsMissing) {
  const std::string text = report(12);
  EXPECT_HAS(text, "asked for 12582912 B (12.0 MiB) of device memory");
  EXPECT_HAS(text, "5242880 B (5.00 MiB) of 104857600 B (100 MiB) are free");
  EXPECT_HAS(text, "7340032 B (7.00 MiB) are missing");
  EXPECT_NE(text.back(), '\n');
}

TEST_F(MemoryReport, CarriesTheWholeLedgerAndWhatIsBeyondIt) {
  const std::string text = report(12);
  EXPECT_HAS(text, ledger_.table());
  EXPECT_HAS(text, "beyond this: 15728640 B (15.0 MiB)");
}

TEST_F(MemoryReport, NamesTheChangesThatFitTheSmallestFirst) {
  const std::string text = report(12);  // 7 MiB are missing
  const std::size_t live = position_of(text, "live.limit_bytes lower");
  const std::size_t batch = position_of(text, "a smaller batch");
  const std::size_t parameters = position_of(text, "place.parameters=host: gives 20971520 B");
  const std::size_t optimizer = position_of(text, "place.optimizer=host: gives 52428800 B");
  EXPECT_LT(live, batch);
  EXPECT_LT(batch, parameters);
  EXPECT_LT(parameters, optimizer);
  EXPECT_HAS(text, "needs to give 7340032 B (7.00 MiB) of 10485760 B");
}

TEST_F(MemoryReport, LeavesOutWhatIsNotEnoughAlone) {
  const std::string text = report(5 + 30);  // 30 MiB: only the optimizer's 50 are enough
  EXPECT_HAS(text, "place.optimizer=host");
  EXPECT_LACKS(text, "place.parameters=host");
  EXPECT_LACKS(text, "live.limit_bytes");
  EXPECT_LACKS(text, "a smaller batch");
}

TEST_F(MemoryReport, PutsChangesTogetherWhereNoneIsEnough) {
  const std::string text = report(5 + 65);  // 50 + 15 of others or 20
  EXPECT_HAS(text, "together they fit");
  const std::size_t optimizer = position_of(text, "place.optimizer=host");
  EXPECT_LT(optimizer, position_of(text, "place.parameters=host"));
  EXPECT_LACKS(text, "live.limit_bytes") << "two are enough:\n" << text;
}

TEST_F(MemoryReport, SaysSoWhereNothingFits) {
  const std::string text = report(5 + 96);  // 95 could come free
  EXPECT_HAS(text, "1048576 B (1.00 MiB) would still be missing");
  EXPECT_HAS(text, "live.limit_bytes lower");
  const Ledger empty;
  EXPECT_HAS(memory_report(empty, Tier::kHost, 2, 1, 1), "nothing in the ledger");
}

TEST_F(MemoryReport, KnowsThatFreeMemoryMayBeInPieces) {
  const std::string text = report(4);
  EXPECT_HAS(text, "not in one piece");
  EXPECT_HAS(text, "needs to give 4194304 B");
}

TEST_F(MemoryReport, SendsHostMemoryToNvmeAndCountsPinnedAndPageableTogether) {
  ledger_.charge(Tier::kHost, Role::kOptimizer, 4 * kMib);
  ledger_.charge(Tier::kPinned, Role::kOptimizer, 2 * kMib);
  const std::string text = memory_report(ledger_, Tier::kPinned, 6 * kMib, 0, 0);
  EXPECT_HAS(text, "place.optimizer=nvme: gives 6291456 B (6.00 MiB)");
  EXPECT_LACKS(text, "=host");
  EXPECT_LACKS(text, "beyond") << "nothing is known of a total of 0:\n" << text;
}

TEST_F(MemoryReport, DoesNotSendACpusMemoryToTheHost) {
  ledger_.charge(Tier::kHost, Role::kShard, 4 * kMib);
  const std::string text =
      memory_report(ledger_, Tier::kDevice, 24 * kMib, 0, 100 * kMib, /*device_is_host=*/true);
  EXPECT_HAS(text, "place.parameters=nvme: gives 25165824 B");
  EXPECT_LACKS(text, "=host");
}

}  // namespace
}  // namespace tessera
