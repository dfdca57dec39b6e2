// How a run ends badly and what is kept: divergence, a save that fails, memory that a GPU lacks.
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "cli/divergence.h"
#include "cli/final_save.h"
#include "cli/out_of_memory.h"
#include "tessera/core/error.h"
#include "tests/support/contains.h"

namespace tessera::cli {
namespace {

constexpr double kNotANumber = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinite = std::numeric_limits<double>::infinity();

struct Step {
  double loss = 4;
  double grad_norm = 1;
  bool skipped = false;
  double loss_scale = 1;
};

Divergence after(const std::vector<Step>& steps) {
  Divergence divergence;
  std::int64_t number = 1;
  for (const Step& step : steps) {
    StepMetrics metrics;
    metrics.step = number++;
    metrics.loss = step.loss;
    metrics.grad_norm = step.grad_norm;
    metrics.skipped = step.skipped;
    metrics.loss_scale = step.loss_scale;
    divergence.add(metrics);
  }
  return divergence;
}

const Step kGood{};
const Step kSkipped{.grad_norm = kInfinite, .skipped = true};

TEST(Divergence, AFiniteRunHasNone) {
  EXPECT_FALSE(after({}).has_diverged());
  EXPECT_FALSE(after({kGood, kGood}).has_diverged());
  EXPECT_FALSE(after({kGood, kSkipped, kGood}).has_diverged());
}

TEST(Divergence, TheLastLossDecides) {
  const Step lost{.loss = kNotANumber, .grad_norm = kNotANumber, .skipped = true};
  EXPECT_TRUE(after({kGood, kGood, kGood, lost}).has_diverged());
  EXPECT_FALSE(after({kGood, kGood, lost, kGood}).has_diverged());
  EXPECT_TRUE(after({kGood, kGood, {.loss = kInfinite}}).has_diverged());
}

TEST(Divergence, MoreThanHalfOfTheStepsLostIsOne) {
  EXPECT_FALSE(after({kSkipped, kGood}).has_diverged());
  EXPECT_TRUE(after({kSkipped, kSkipped, kGood}).has_diverged());
}

TEST(Divergence, TenLostInARowAreGoingOn) {
  std::vector<Step> steps(100, kGood);
  steps.insert(steps.end(), 9, kSkipped);
  EXPECT_FALSE(after(steps).is_going_on());
  EXPECT_FALSE(after(steps).has_diverged());
  steps.push_back(kSkipped);
  EXPECT_TRUE(after(steps).is_going_on());
  EXPECT_TRUE(after(steps).has_diverged());
  EXPECT_HAS(after(steps).text(DType::kFloat32), "10 of 110 steps");
  steps.push_back(kGood);
  EXPECT_FALSE(after(steps).is_going_on());
}

TEST(Divergence, ALossScaleMayLookForItsValue) {
  std::vector<Step> steps;
  for (int scale = 65536; scale > 1; scale /= 2) {
    steps.push_back(
        {.grad_norm = kInfinite, .skipped = true, .loss_scale = static_cast<double>(scale)});
  }
  EXPECT_FALSE(after(steps).has_diverged());
  // At its end it looks for nothing any more.
  steps.insert(steps.end(), 10, kSkipped);
  EXPECT_TRUE(after(steps).is_going_on());
  // A loss that is not finite is no matter of scales.
  EXPECT_TRUE(after({{.loss = kNotANumber, .skipped = true, .loss_scale = 65536}}).has_diverged());
}

TEST(Divergence, SaysWhatToTry) {
  const Divergence lost = after({{.loss = kNotANumber}});
  EXPECT_LACKS(lost.text(DType::kFloat32), "--precision");
  EXPECT_HAS(lost.text(DType::kFloat16), "--precision fp32");
}

TEST(Divergence, AnUpdateWithWhatIsNotFiniteSpoilsParameters) {
  EXPECT_FALSE(after({kGood, kSkipped}).has_spoilt_parameters());
  const Divergence spoilt =
      after({kGood, {.grad_norm = kNotANumber}, {.loss = kNotANumber, .grad_norm = kNotANumber}});
  EXPECT_TRUE(spoilt.has_spoilt_parameters());
  EXPECT_HAS(spoilt.text(DType::kFloat32), "not finite since step 2");
}

SaveTarget target(const std::string& path) { return {"--save", "the parameters are", path}; }

TEST(FinalSave, CallsADirectoryByItsLastName) {
  EXPECT_HAS(rescue_paths("runs/one/")[0], "/one.rescued-");
  EXPECT_HAS(rescue_paths("runs/one")[0], "/one.rescued-");
}

TEST(FinalSave, TriesNothingElseWhereItWorks) {
  std::vector<std::string> tried;
  const RescuedSave outcome =
      save_or_rescue(target("a/model"), [&](const std::string& path) { tried.push_back(path); });
  EXPECT_EQ(tried, std::vector<std::string>{"a/model"});
  EXPECT_EQ(outcome.path, "a/model");
  EXPECT_EQ(outcome.failure, "");
}

TEST(FinalSave, TakesTheFirstPlaceThatWorksAndSaysWhere) {
  std::vector<std::string> tried;
  const RescuedSave outcome = save_or_rescue(target("a/model"), [&](const std::string& path) {
    tried.push_back(path);
    if (tried.size() < 3) {
      throw IoError("disk " + std::to_string(tried.size()) + " is full");
    }
  });
  ASSERT_EQ(tried.size(), 3U);
  EXPECT_EQ(outcome.path, tried[2]);
  EXPECT_HAS(tried[2], "/model.rescued-");
  EXPECT_HAS(outcome.failure, "--save: disk 1 is full; the parameters are saved in ");
  EXPECT_HAS(outcome.failure, tried[2]);
}

// As on a rank that does not write: it is refused by the one that does.
TEST(FinalSave, TriesAsManyPlacesWhereAnotherRankRefuses) {
  int num_tried = 0;
  const RescuedSave outcome = save_or_rescue(target("model"), [&](const std::string&) {
    ++num_tried;
    throw ConfigError("rank 0 cannot");
  });
  EXPECT_EQ(num_tried, 3);
  EXPECT_EQ(outcome.path, "");
  EXPECT_HAS(outcome.failure, "could not be saved anywhere else");
}

TEST(FinalSave, DoesNotTryAgainWhenTheRanksAreLost) {
  int num_tried = 0;
  EXPECT_THROW(save_or_rescue(target("model"),
                              [&](const std::string&) {
                                ++num_tried;
                                throw PeerError("lost rank 1");
                              }),
               PeerError);
  EXPECT_EQ(num_tried, 1);
}

constexpr const char* kTorchMessage =
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.81 GiB of "
    "which 1.20 GiB is free.\nException raised from malloc at somewhere";

TEST(OutOfMemory, ReadsWhatTorchTriedToAllocate) {
  EXPECT_EQ(asked_bytes(kTorchMessage), std::size_t{5} << 29);
  EXPECT_EQ(asked_bytes("Tried to allocate 20.00 MiB."), std::size_t{20} << 20);
  EXPECT_EQ(asked_bytes("Tried to allocate 512 bytes."), 512U);
  EXPECT_EQ(asked_bytes("Tried to allocate much"), 0U);
  EXPECT_EQ(asked_bytes("something else"), 0U);
  EXPECT_EQ(asked_bytes("Tried to allocate 3.00 parsecs"), 0U);
}

TEST(OutOfMemory, NamesWhoHoldsWhatAndWhatWouldFit) {
  Ledger ledger;
  ledger.charge(Tier::kDevice, Role::kOptimizer, std::size_t{100} << 30);
  const std::string text =
      out_of_memory_text(kTorchMessage, ledger, {std::size_t{140} << 30, std::size_t{1} << 30});
  EXPECT_EQ(text.find("CUDA out of memory. Tried to allocate 2.50 GiB."), 0U);
  EXPECT_LACKS(text, "Exception raised");
  EXPECT_HAS(text, "optimizer");
  EXPECT_HAS(text, "place.optimizer");
}

}  // namespace
}  // namespace tessera::cli
