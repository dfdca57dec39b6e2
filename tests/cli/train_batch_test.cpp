// The arithmetic of batches: two numbers give the third, and a file gives way to flags.
#include "cli/train_batch.h"

#include <set>
#include <string>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/support/contains.h"

namespace tessera::cli {
namespace {

struct BatchCase {
  std::string file;  // of DeepSpeed's keys
  std::int64_t batch_flag = 0;
  std::int64_t accumulate_flag = 0;
  int num_ranks = 1;
};

Config batch_config(const BatchCase& given) {
  Config config = Config::from_json("{" + given.file + "}", "ds.json");
  if (given.batch_flag > 0) {
    config.set("batch.total", given.batch_flag, "--batch");
  }
  if (given.accumulate_flag > 0) {
    config.set("batch.accumulate", given.accumulate_flag, "--accumulate");
  }
  return config;
}

// "total = micro x accumulate x ranks", or the refusal.
std::string resolved(const BatchCase& given) {
  Config config = batch_config(given);
  try {
    const BatchShape batch = resolve_batch(config, given.num_ranks, 8);
    EXPECT_NO_THROW(config.check());
    EXPECT_EQ(config.get_int("batch.total"), batch.total);
    EXPECT_EQ(config.get_int("batch.accumulate"), batch.accumulate);
    return std::to_string(batch.total) + " = " + std::to_string(batch.per_micro_batch()) + " x " +
           std::to_string(batch.accumulate) + " x " + std::to_string(batch.num_ranks);
  } catch (const ConfigError& error) {
    return error.what();
  }
}

const std::string kTotal16 = R"("train_batch_size": 16)";
const std::string kMicro4 = R"("train_micro_batch_size_per_gpu": 4)";
const std::string kAccumulate2 = R"("gradient_accumulation_steps": 2)";

TEST(ResolveBatch, TwoNumbersGiveTheThird) {
  EXPECT_EQ(resolved({"", 0, 0, 3}), "9 = 3 x 1 x 3");
  EXPECT_EQ(resolved({kTotal16, 0, 0, 2}), "16 = 8 x 1 x 2");
  EXPECT_EQ(resolved({kMicro4, 0, 0, 2}), "8 = 4 x 1 x 2");
  EXPECT_EQ(resolved({kTotal16 + "," + kMicro4, 0, 0, 2}), "16 = 4 x 2 x 2");
  EXPECT_EQ(resolved({kTotal16 + "," + kAccumulate2, 0, 0, 2}), "16 = 4 x 2 x 2");
  EXPECT_EQ(resolved({kMicro4 + "," + kAccumulate2, 0, 0, 3}), "24 = 4 x 2 x 3");
  EXPECT_EQ(resolved({kTotal16 + "," + kMicro4 + "," + kAccumulate2, 0, 0, 2}), "16 = 4 x 2 x 2");
}

TEST(ResolveBatch, WhatAFileSaysGivesWayToFlagsThatItContradicts) {
  const std::string all = kTotal16 + "," + kMicro4 + "," + kAccumulate2;
  EXPECT_EQ(resolved({all, 8, 0, 2}), "8 = 2 x 2 x 2") << "a rank takes less at a time";
  EXPECT_EQ(resolved({all, 4, 0, 4}), "4 = 1 x 1 x 4") << "neither of the other two can be kept";
  EXPECT_EQ(resolved({all, 0, 4, 2}), "16 = 2 x 4 x 2");
  EXPECT_EQ(resolved({all, 20, 5, 2}), "20 = 2 x 5 x 2");
  EXPECT_EQ(resolved({all, 16, 2, 2}), "16 = 4 x 2 x 2") << "flags that agree change nothing";
  Config config = batch_config({all, 8, 0, 2});
  resolve_batch(config, 2, 8);
  EXPECT_EQ(config.shown("batch.micro_per_rank"), "batch.micro_per_rank = 2 (derived)");
  EXPECT_EQ(config.shown("batch.total"), "batch.total = 8 (--batch)");
}

TEST(ResolveBatch, AContradictionNamesTheValuesAndWhereEachCameFrom) {
  EXPECT_EQ(resolved({kTotal16 + "," + kMicro4 + "," + kAccumulate2, 0, 0, 1}),
            "batch.total = 16 (ds.json: train_batch_size) is not batch.micro_per_rank = 4 "
            "(ds.json: train_micro_batch_size_per_gpu) times batch.accumulate = 2 (ds.json: "
            "gradient_accumulation_steps) times 1 rank, which is 8; change one of them or leave it "
            "out");
  EXPECT_EQ(resolved({kTotal16 + "," + kMicro4, 0, 0, 3}),
            "batch.total = 16 (ds.json: train_batch_size) is not batch.micro_per_rank = 4 "
            "(ds.json: train_micro_batch_size_per_gpu) times batch.accumulate = 1 (a default) "
            "times 3 ranks, which is 12; change one of them or leave it out");
  EXPECT_EQ(resolved({kTotal16 + "," + kAccumulate2, 0, 0, 3}),
            "batch.total = 16 (ds.json: train_batch_size) with batch.accumulate = 2 (ds.json: "
            "gradient_accumulation_steps) cannot be shared by 3 ranks with 2 micro-batches each: "
            "it must be a multiple of 6; the nearest is 18");
  EXPECT_EQ(resolved({"", 7, 0, 2}),
            "--batch 7 cannot be shared by 2 ranks with 1 micro-batch each: it must be a multiple "
            "of 2; the nearest is 6");
}

TEST(ResolveBatch, NumbersThatNoMachineHoldsAreRefusedWithTheRange) {
  EXPECT_EQ(resolved({R"("train_batch_size": 1e9)"}),
            "batch.total = 1000000000 (ds.json: train_batch_size): expected a whole number from 1 "
            "to 16777216");
  EXPECT_EQ(
      resolved({R"("train_micro_batch_size_per_gpu": 1e7, "gradient_accumulation_steps": 10)"}),
      "batch.micro_per_rank = 10000000 (ds.json: train_micro_batch_size_per_gpu) times "
      "batch.accumulate = 10 (ds.json: gradient_accumulation_steps): expected a product from "
      "1 to 16777216");
}

TEST(BatchShape, EverySequenceBelongsToOneMicroBatchOfOneRank) {
  for (int num_ranks = 1; num_ranks <= 4; ++num_ranks) {
    for (std::int64_t accumulate = 1; accumulate <= 3; ++accumulate) {
      const BatchShape shape{24 * accumulate, num_ranks, accumulate};
      shape.check("this");
      std::multiset<std::int64_t> seen;
      for (int rank = 0; rank < num_ranks; ++rank) {
        for (std::int64_t micro = 0; micro < accumulate; ++micro) {
          const SequenceRange range = micro_batch_of(shape, rank, micro);
          // A rank's sequences are one slice of the batch.
          EXPECT_EQ(range.begin / (shape.total / num_ranks), rank);
          for (std::int64_t i = 0; i < range.count; ++i) {
            seen.insert(range.begin + i);
          }
        }
      }
      EXPECT_EQ(seen.size(), static_cast<std::size_t>(shape.total));
      EXPECT_EQ(*seen.rbegin(), shape.total - 1);
      EXPECT_EQ(std::set<std::int64_t>(seen.begin(), seen.end()).size(), seen.size());
    }
  }
}

TEST(BatchShape, ARefusalNamesTheNearestTotal) {
  EXPECT_HAS(resolved({"", 9, 2, 2}), "multiple of 4; the nearest is 8");
  EXPECT_HAS(resolved({"", 11, 2, 2}), "the nearest is 12");
  EXPECT_HAS(resolved({"", 1, 1, 4}), "the nearest is 4");
  EXPECT_EQ(shareable_total(8, 16, 1), 16) << "the default is rounded up for the ranks";
  EXPECT_EQ(shareable_total(8, 2, 3), 12);
}

}  // namespace
}  // namespace tessera::cli
