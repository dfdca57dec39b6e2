#include "tessera/coordinator/arena_plan.h"

#include <algorithm>
#include <random>

#include <gtest/gtest.h>

namespace tessera::coordinator {
namespace {

void expect_no_overlap(const std::vector<Lifetime>& lives, const ArenaPlan& plan,
                       std::int64_t capacity) {
  ASSERT_EQ(plan.offsets.size(), lives.size());
  std::int64_t num_unplaced = 0;
  for (std::size_t i = 0; i < lives.size(); ++i) {
    if (plan.offsets[i] < 0) {
      num_unplaced += lives[i].bytes > 0 ? 1 : 0;
      continue;
    }
    EXPECT_EQ(plan.offsets[i] % 256, 0);
    EXPECT_LE(plan.offsets[i] + lives[i].bytes, std::min(capacity, plan.height));
    for (std::size_t j = 0; j < i; ++j) {
      const bool meets = lives[i].begin < lives[j].end && lives[j].begin < lives[i].end;
      if (meets && plan.offsets[j] >= 0 && lives[i].bytes > 0 && lives[j].bytes > 0) {
        EXPECT_TRUE(plan.offsets[i] + lives[i].bytes <= plan.offsets[j] ||
                    plan.offsets[j] + lives[j].bytes <= plan.offsets[i])
            << i << " and " << j;
      }
    }
  }
  EXPECT_EQ(plan.num_unplaced, num_unplaced);
}

TEST(ArenaPlan, ReusesBytesAsSoonAsTheyAreFree) {
  std::vector<Lifetime> lives;
  for (int i = 0; i < 10; ++i) {
    lives.push_back({1000, i, i + 2});  // two at a time
  }
  const ArenaPlan plan = assign_offsets(lives, 1 << 20);
  expect_no_overlap(lives, plan, 1 << 20);
  EXPECT_EQ(plan.height, 2 * 1024);
  EXPECT_EQ(plan.num_unplaced, 0);
}

TEST(ArenaPlan, FindsAPlaceThatTheOrderOfTimeDoesNot) {
  // In the order of time the small ones lie at the bottom and leave no hole for the large one.
  const std::vector<Lifetime> lives = {{256, 0, 2}, {256, 0, 4}, {256, 0, 3},
                                       {256, 0, 9}, {512, 4, 9}, {256, 5, 9}};
  const ArenaPlan tight = assign_offsets(lives, 1024);
  expect_no_overlap(lives, tight, 1024);
  EXPECT_EQ(tight.num_unplaced, 0);
}

TEST(ArenaPlan, SaysWhatDoesNotFit) {
  const std::vector<Lifetime> lives = {{1024, 0, 4}, {1024, 1, 3}, {0, 0, 9}, {256, 0, 1}};
  const ArenaPlan plan = assign_offsets(lives, 1024);
  expect_no_overlap(lives, plan, 1024);
  EXPECT_GE(plan.num_unplaced, 1);
  EXPECT_EQ(assign_offsets({}, 0).height, 0);
}

TEST(ArenaPlan, NeverPutsTwoLivesOverEachOther) {
  std::mt19937 random(9);
  for (int round = 0; round < 500 && !testing::Test::HasFailure(); ++round) {
    std::vector<Lifetime> lives;
    std::int64_t time = 0;
    for (unsigned i = 0; i < 1 + random() % 40; ++i) {
      time += static_cast<std::int64_t>(random() % 2);
      lives.push_back({static_cast<std::int64_t>(random() % 5) * 300, time,
                       time + 1 + static_cast<std::int64_t>(random() % 6)});
    }
    const auto capacity = static_cast<std::int64_t>(256 * (random() % 40));
    expect_no_overlap(lives, assign_offsets(lives, capacity), capacity);
  }
}

}  // namespace
}  // namespace tessera::coordinator
