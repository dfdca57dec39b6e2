// The parts of `tessera train` that hold no tensor: shares, metrics, summary and verdict.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "cli/metrics.h"
#include "cli/train_batch.h"
#include "cli/train_compare.h"
#include "cli/train_summary.h"
#include "tessera/core/error.h"
#include "tests/support/contains.h"
#include "tests/support/temporary_directory.h"

namespace tessera::cli {
namespace {

// Whether a line of `table` consists of these words.
bool has_row(const std::string& table, const std::vector<std::string>& words) {
  std::istringstream lines(table);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream row(line);
    std::vector<std::string> found;
    for (std::string word; row >> word;) {
      found.push_back(word);
    }
    if (found == words) {
      return true;
    }
  }
  return false;
}

TEST(ThreadsPerRank, ShareTheCoresAndAreNeverNone) {
  EXPECT_EQ(threads_per_rank(16, 1), 16);
  EXPECT_EQ(threads_per_rank(16, 3), 5);
  EXPECT_EQ(threads_per_rank(2, 4), 1);
}

TEST(Metrics, KeepEveryBitOfANumberAndWhatIsNoneIsNull) {
  const auto document_of = [](const StepMetrics& metrics) {
    return nlohmann::json::parse(metrics_json(metrics));
  };
  StepMetrics metrics;
  EXPECT_FALSE(document_of(metrics).contains("eval_loss")) << "only of steps that have one";
  metrics.loss = 0.1 + 0.2;
  metrics.grad_norm = std::nextafter(1.0, 2.0);
  metrics.lr = 1e-300;
  metrics.eval_loss = 0.1 + 0.2;
  metrics.gathered_bytes = std::numeric_limits<std::uint64_t>::max();
  const nlohmann::json document = document_of(metrics);
  EXPECT_EQ(document.at("loss").get<double>(), metrics.loss);
  EXPECT_EQ(document.at("grad_norm").get<double>(), metrics.grad_norm);
  EXPECT_EQ(document.at("lr").get<double>(), metrics.lr);
  EXPECT_EQ(document.at("eval_loss").get<double>(), *metrics.eval_loss);
  EXPECT_EQ(document.at("gathered_bytes").get<std::uint64_t>(), metrics.gathered_bytes);
  metrics.grad_norm = std::numeric_limits<double>::infinity();
  metrics.loss = std::numeric_limits<double>::quiet_NaN();
  metrics.eval_loss = metrics.loss;
  for (const char* name : {"loss", "grad_norm", "eval_loss"}) {
    EXPECT_TRUE(document_of(metrics).at(name).is_null()) << name;
  }
}

TEST(MetricsFile, IsEmptiedAtTheStartAndReadableWhileItGrows) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory.path() / "run.jsonl";
  std::ofstream(path) << "old\n";
  MetricsFile file(path, 0, {});
  for (std::int64_t step = 1; step <= 3; ++step) {
    StepMetrics metrics;
    metrics.step = step;
    file.append(metrics);
    std::ifstream in(path);
    std::string line;
    for (std::int64_t i = 1; i <= step; ++i) {
      ASSERT_TRUE(std::getline(in, line)) << "line " << i << " after step " << step;
      EXPECT_EQ(nlohmann::json::parse(line).at("step"), i);
    }
  }
}

TEST(Totals, MedianIsTheMiddle) {
  RunTotals totals;
  EXPECT_EQ(totals.median_step_s(), 0);
  for (const double step_s : {9.0, 1.0, 2.0, 4.0}) {
    StepMetrics metrics;
    metrics.step_s = step_s;
    metrics.tokens_per_s = 16 / step_s;
    totals.add(metrics);
  }
  EXPECT_EQ(totals.median_step_s(), 3.0);
  EXPECT_EQ(totals.tokens_per_s(), 4.0);
}

TEST(Memory, UnshardedBytesAreTheClosedForm) {
  const ModelBytes full{1000, 800, DType::kFloat32, 2};
  EXPECT_EQ(full.unsharded(Role::kShard), 4000);
  EXPECT_EQ(full.unsharded(Role::kGradient), 3200);
  EXPECT_EQ(full.unsharded(Role::kOptimizer), 6400);
  EXPECT_EQ(full.unsharded(Role::kFull), 0);
  const ModelBytes half{1000, 1000, DType::kBFloat16, 2};
  EXPECT_EQ(half.unsharded(Role::kShard), 2000);
  EXPECT_EQ(half.unsharded(Role::kOptimizer), 12000);
}

TEST(PinnedText, SaysWhatPageLockingTookWhereThereWasAny) {
  EXPECT_EQ(pinned_text({}), "");
  EXPECT_EQ(pinned_text({5.25, std::size_t{24} << 30}),
            "pinned: 24.0 GiB of host memory, which took 5.25 s\n");
  EXPECT_EQ(pinned_text({0.004, 8192}), "pinned: 8.00 KiB of host memory, which took 4.00 ms\n");
}

TEST(Places, PlannedStandsBesideHeldAndNvmeBesideWhatAStepMoved) {
  planner::MemoryPlan placement;
  placement.ledger = {{Tier::kDevice, Role::kShard, 2048}, {Tier::kNvme, Role::kOptimizer, 8192}};
  Ledger ledger;
  ledger.charge(Tier::kDevice, Role::kShard, 4096);
  ledger.discharge(Tier::kDevice, Role::kShard, 1024);
  NvmeTotals nvme;
  for (int step = 0; step < 2; ++step) {
    nvme.add(Role::kOptimizer, 3 << 20, 5 << 20);
    nvme.add(Role::kShard, 1 << 20, 0);
    EXPECT_EQ(nvme.step_read_bytes(), std::uint64_t{4} << 20);
    EXPECT_EQ(nvme.step_written_bytes(), std::uint64_t{5} << 20);
    nvme.end_step();
  }
  const std::string text = places_text(placement, ledger, nvme);
  EXPECT_TRUE(has_row(text, {"device", "shard", "2.00", "KiB", "4.00", "KiB", "-", "-"})) << text;
  EXPECT_TRUE(
      has_row(text, {"nvme", "optimizer", "8.00", "KiB", "0", "B", "3.00", "MiB", "5.00", "MiB"}))
      << text;
}

TEST(Memory, TheTableHasEveryRoleThatIsHeldOrWouldBe) {
  Ledger ledger;
  ledger.charge(Tier::kDevice, Role::kShard, 2048);
  ledger.charge(Tier::kHost, Role::kStaging, 512);
  const std::string table = memory_text({1024, 1024, DType::kFloat32, 2}, ledger);
  EXPECT_HAS(table, "2.00 KiB");
  EXPECT_HAS(table, "4.00 KiB");
  EXPECT_HAS(table, "optimizer");
  EXPECT_HAS(table, "staging");
  EXPECT_LACKS(table, "full");
}

class Verdict : public ::testing::Test {
 protected:
  Comparison two_ranks_{rounding_bounds(DType::kFloat32, 2)};
  Comparison one_rank_{kBitForBit};
};

TEST_F(Verdict, NoiseBetweenRankCountsAgrees) {
  two_ranks_.add_loss(0, 5.0, 5.0 * (1 + 3e-7));
  two_ranks_.add_grad_norm(0, 1.0 + 1e-6, 1.0);
  two_ranks_.add_param({"head.weight", 1.9e-6, 1.0, 0.1});
  EXPECT_EQ(two_ranks_.failure(), "");
}

TEST_F(Verdict, OneRankMustAgreeToTheBit) {
  one_rank_.add_loss(0, 5.0, 5.0);
  one_rank_.add_param({"head.weight", 0, 1.0, 0.1});
  EXPECT_EQ(one_rank_.failure(), "");
  EXPECT_TRUE(one_rank_.equal());
  EXPECT_HAS(one_rank_.table(), "equal everywhere");
  one_rank_.add_param({"norm.bias", 1e-30, 1.0, 0.1});
  EXPECT_FALSE(one_rank_.equal());
  EXPECT_HAS(one_rank_.failure(), "norm.bias");
}

TEST_F(Verdict, AFailureNamesStepAndValuesOrTheWorstParameter) {
  two_ranks_.add_param({"head.weight", 3e-4, 1.0, 0.1});
  two_ranks_.add_param({"blocks.0.norm1.weight", 1e-3, 2.0, 0.1});
  two_ranks_.add_param({"norm.weight", 2e-4, 1.0, 0.1});
  EXPECT_HAS(two_ranks_.failure(), "parameter blocks.0.norm1.weight differs by 0.001");
  Comparison steps(rounding_bounds(DType::kFloat32, 2));
  steps.add_grad_norm(7, 2.5, 1.25);
  EXPECT_HAS(steps.failure(), "grad_norm of step 7 is 2.5 sharded and 1.25 unsharded");
}

TEST_F(Verdict, NoiseHasABoundOfItsOwn) {
  two_ranks_.add_noise({"qkv.bias", 0.9e-2, 1.0, 1e-2}, 1e-2);
  EXPECT_EQ(two_ranks_.failure(), "");
  EXPECT_FALSE(two_ranks_.equal());
  two_ranks_.add_noise({"qkv.bias", 1.1e-2, 1.0, 1e-2}, 1e-2);
  EXPECT_HAS(two_ranks_.failure(), "qkv.bias");
}

TEST_F(Verdict, TheFirstStepThatDiffersIsTheCauseOfWhatFollows) {
  two_ranks_.add_loss(1, 5.0, 5.1);
  two_ranks_.add_loss(2, 5.0, 6.1);
  two_ranks_.add_param({"norm.weight", 1, 1, 1});
  EXPECT_HAS(two_ranks_.failure(), "loss of step 1");
}

TEST_F(Verdict, NaNIsADifferenceUnlessBothHaveIt) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  two_ranks_.add_grad_norm(0, infinity, infinity);
  EXPECT_EQ(two_ranks_.failure(), "");
  Comparison one_sided(rounding_bounds(DType::kFloat32, 2));
  one_sided.add_loss(0, nan, 1.0);
  EXPECT_NE(one_sided.failure(), "");
  Comparison param(rounding_bounds(DType::kFloat32, 2));
  param.add_param({"norm.weight", nan, 1.0, 0.1});
  EXPECT_NE(param.failure(), "");
  Comparison reverse(rounding_bounds(DType::kFloat32, 2));
  reverse.add_loss(0, 1.0, infinity);
  EXPECT_NE(reverse.failure(), "");
}

TEST_F(Verdict, AFrozenZeroMustStayZero) {
  two_ranks_.add_param({"blocks.0.up.bias", 0, 0, 0});
  EXPECT_EQ(two_ranks_.failure(), "");
  two_ranks_.add_param({"blocks.0.down.bias", 1e-12, 0, 0});
  EXPECT_NE(two_ranks_.failure(), "");
}

// Whatever the precision and depth, a parameter that is never updated is found out where rounding
// is small beside its movement, and so is a gradient that is doubled.
TEST(VerdictBounds, StayBelowTheDefectsTheyMustShow) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const std::int64_t layers : {1, 2, 12, 200}) {
      const CompareBounds bounds = rounding_bounds(dtype, layers);
      Comparison comparison(bounds);
      comparison.add_param({"up.weight", 1.0, 1.0, 1.0});
      EXPECT_NE(comparison.failure(), "") << layers;
      EXPECT_LT(bounds.step, 0.5) << layers;
    }
  }
  EXPECT_LT(rounding_bounds(DType::kFloat16, 2).step, rounding_bounds(DType::kBFloat16, 2).step);
}

}  // namespace
}  // namespace tessera::cli
