#include "cli/final_save.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/support/contains.h"

namespace tessera::cli {
namespace {

TEST(FinalSave, TriesNothingElseWhereItWorks) {
  std::vector<std::string> tried;
  const SaveOutcome outcome =
      save_or_rescue("a/model", [&](const std::string& path) { tried.push_back(path); });
  EXPECT_EQ(tried, std::vector<std::string>{"a/model"});
  EXPECT_EQ(outcome.path, "a/model");
  EXPECT_EQ(outcome.failure, "");
}

TEST(FinalSave, TakesTheFirstPlaceThatWorksAndSaysWhere) {
  std::vector<std::string> tried;
  const SaveOutcome outcome = save_or_rescue("a/model", [&](const std::string& path) {
    tried.push_back(path);
    if (tried.size() < 3) {
      throw IoError("disk " + std::to_string(tried.size()) + " is full");
    }
  });
  ASSERT_EQ(tried.size(), 3U);
  EXPECT_EQ(outcome.path, tried[2]);
  EXPECT_HAS(tried[2], "/model.rescued-");
  EXPECT_HAS(outcome.failure, "disk 1 is full");
  EXPECT_HAS(outcome.failure, tried[2]);
}

// As on a rank that does not write: it is refused by the one that does.
TEST(FinalSave, TriesAsManyPlacesWhereAnotherRankRefuses) {
  int num_tried = 0;
  const SaveOutcome outcome = save_or_rescue("model", [&](const std::string&) {
    ++num_tried;
    throw ConfigError("rank 0 cannot");
  });
  EXPECT_EQ(num_tried, 3);
  EXPECT_EQ(outcome.path, "");
  EXPECT_HAS(outcome.failure, "could not be saved anywhere else");
}

TEST(FinalSave, DoesNotTryAgainWhenTheRanksAreLost) {
  int num_tried = 0;
  EXPECT_THROW(save_or_rescue("model",
                              [&](const std::string&) {
                                ++num_tried;
                                throw PeerError("lost rank 1");
                              }),
               PeerError);
  EXPECT_EQ(num_tried, 1);
}

}  // namespace
}  // namespace tessera::cli
