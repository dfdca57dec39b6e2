#include "tessera/core/ledger.h"

#include <string>

#include <gtest/gtest.h>

namespace tessera {
namespace {

constexpr std::size_t kMib = std::size_t{1} << 20;

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::size_t place_of(const std::string& text, const std::string& part) {
  EXPECT_TRUE(has(text, part)) << "no \"" << part << "\" in:\n" << text;
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
  EXPECT_TRUE(has(text, "asked for 12582912 B (12.0 MiB) of device memory")) << text;
  EXPECT_TRUE(has(text, "5242880 B (5.00 MiB) of 104857600 B (100 MiB) are free")) << text;
  EXPECT_TRUE(has(text, "7340032 B (7.00 MiB) are missing")) << text;
  EXPECT_NE(text.back(), '\n');
}

TEST_F(MemoryReport, CarriesTheWholeLedgerAndWhatIsBeyondIt) {
  const std::string text = report(12);
  EXPECT_TRUE(has(text, ledger_.table())) << text;
  EXPECT_TRUE(has(text, "beyond this: 15728640 B (15.0 MiB)")) << text;
}

TEST_F(MemoryReport, NamesTheChangesThatFitTheSmallestFirst) {
  const std::string text = report(12);  // 7 MiB are missing
  const std::size_t live = place_of(text, "live.limit_bytes lower");
  const std::size_t batch = place_of(text, "a smaller batch");
  const std::size_t parameters = place_of(text, "place.parameters=host: gives 20971520 B");
  const std::size_t optimizer = place_of(text, "place.optimizer=host: gives 52428800 B");
  EXPECT_LT(live, batch);
  EXPECT_LT(batch, parameters);
  EXPECT_LT(parameters, optimizer);
  EXPECT_TRUE(has(text, "needs to give 7340032 B (7.00 MiB) of 10485760 B")) << text;
}

TEST_F(MemoryReport, LeavesOutWhatIsNotEnoughAlone) {
  const std::string text = report(5 + 30);  // 30 MiB: only the optimizer's 50 are enough
  EXPECT_TRUE(has(text, "place.optimizer=host")) << text;
  EXPECT_FALSE(has(text, "place.parameters=host")) << text;
  EXPECT_FALSE(has(text, "live.limit_bytes")) << text;
  EXPECT_FALSE(has(text, "a smaller batch")) << text;
}

TEST_F(MemoryReport, PutsChangesTogetherWhereNoneIsEnough) {
  const std::string text = report(5 + 65);  // 50 + 15 of others or 20
  EXPECT_TRUE(has(text, "together they fit")) << text;
  const std::size_t optimizer = place_of(text, "place.optimizer=host");
  EXPECT_LT(optimizer, place_of(text, "place.parameters=host"));
  EXPECT_FALSE(has(text, "live.limit_bytes")) << "two are enough:\n" << text;
}

TEST_F(MemoryReport, SaysSoWhereNothingFits) {
  const std::string text = report(5 + 96);  // 95 could come free
  EXPECT_TRUE(has(text, "1048576 B (1.00 MiB) would still be missing")) << text;
  EXPECT_TRUE(has(text, "live.limit_bytes lower")) << text;
  const Ledger empty;
  EXPECT_TRUE(has(memory_report(empty, Tier::kHost, 2, 1, 1), "nothing in the ledger"));
}

TEST_F(MemoryReport, KnowsThatFreeMemoryMayBeInPieces) {
  const std::string text = report(4);
  EXPECT_TRUE(has(text, "not in one piece")) << text;
  EXPECT_TRUE(has(text, "needs to give 4194304 B")) << text;
}

TEST_F(MemoryReport, SendsHostMemoryToNvmeAndCountsPinnedAndPageableTogether) {
  ledger_.charge(Tier::kHost, Role::kOptimizer, 4 * kMib);
  ledger_.charge(Tier::kPinned, Role::kOptimizer, 2 * kMib);
  const std::string text = memory_report(ledger_, Tier::kPinned, 6 * kMib, 0, 0);
  EXPECT_TRUE(has(text, "place.optimizer=nvme: gives 6291456 B (6.00 MiB)")) << text;
  EXPECT_FALSE(has(text, "=host")) << text;
  EXPECT_FALSE(has(text, "beyond")) << "nothing is known of a total of 0:\n" << text;
}

TEST_F(MemoryReport, DoesNotSendACpusMemoryToTheHost) {
  ledger_.charge(Tier::kHost, Role::kShard, 4 * kMib);
  const std::string text =
      memory_report(ledger_, Tier::kDevice, 24 * kMib, 0, 100 * kMib, /*device_is_host=*/true);
  EXPECT_TRUE(has(text, "place.parameters=nvme: gives 25165824 B")) << text;
  EXPECT_FALSE(has(text, "=host")) << text;
}

}  // namespace
}  // namespace tessera
