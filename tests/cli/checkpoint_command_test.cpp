// `tessera checkpoint` as a user runs it: what it shows of saves, finds wrong with them, and in
// what two of them differ.
#include <filesystem>
#include <fstream>
#include <string>

#include <gtest/gtest.h>

#include "tests/cli/program.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;

class CheckpointCommand : public ProgramTest {
 protected:
  ProcessResult checkpoint(const Arguments& arguments) const {
    return run_tessera_forked(joined({"checkpoint"}, arguments), here());
  }
  void train(const std::string& root, const Arguments& flags = {}) const {
    run_well({"train", "--preset", "micro", "--threads", "1", "--steps", "2", "--checkpoint", root},
             flags);
  }
  // The largest file of a save.
  fs::path data_file(const std::string& save) const {
    fs::path largest;
    for (const auto& entry : fs::directory_iterator(path(save))) {
      if (largest.empty() || entry.file_size() > fs::file_size(largest)) {
        largest = entry.path();
      }
    }
    return largest;
  }
  static void flip_bit(const fs::path& file, std::streamoff from_end) {
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(-from_end, std::ios::end);
    const int byte = stream.get();
    stream.seekp(-from_end, std::ios::end);
    stream.put(static_cast<char>(byte ^ 1));
  }
};

TEST_F(CheckpointCommand, ShowsAllSavesAndWhatIsInTheNewest) {
  train("run", {"--ranks", "2", "--batch", "6", "--save-every", "1", "--lr", "0.5"});
  const ProcessResult result = checkpoint({"run"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  for (const char* part :
       {"\nsave-00001-step-1 ", "\nsave-00002-step-2 ", "\nsave-00002-step-2: step 2, by 2 ranks",
        " ago\n", "\n2 updates of every trainable parameter\n", "\ntokens.weight ", ", 2 times ",
        "\nvalues ", "\nstate ", "\n  optim.lr = 0.5\n", "\n  data.batch = 6\n",
        "\n  model.width = 32\n"}) {
    EXPECT_HAS(result.out, part);
  }
  const ProcessResult one = checkpoint({"run/save-00001-step-1"});
  EXPECT_EQ(one.out.rfind("save-00001-step-1: step 1", 0), 0U) << one.out;
}

TEST_F(CheckpointCommand, NamesEveryFileThatIsNotAsItWasWritten) {
  train("run", {"--save-every", "1"});
  const ProcessResult good = checkpoint({"run", "--verify"});
  EXPECT_EQ(good.exit_code, 0) << good.err << good.out;
  EXPECT_HAS(good.out, "save-00001-step-1: every byte is as it was written\n");
  EXPECT_HAS(good.out, "save-00002-step-2: every byte is as it was written\n");

  const fs::path flipped = data_file("run/save-00001-step-1");
  flip_bit(flipped, 100);
  const fs::path short_file = data_file("run/save-00002-step-2");
  fs::resize_file(short_file, fs::file_size(short_file) - 1);
  const ProcessResult bad = checkpoint({"run", "--verify"});
  EXPECT_EQ(bad.exit_code, 1);
  EXPECT_HAS(bad.out, flipped.filename().string() + ": ");
  EXPECT_HAS(bad.out, short_file.filename().string());
  EXPECT_HAS(bad.out, "save-00001-step-1: not as it was written\n");
  EXPECT_HAS(bad.out, "save-00002-step-2: not as it was written\n");
  EXPECT_HAS(bad.err, "checkpoint --verify: 2 problems");
}

TEST_F(CheckpointCommand, ComparesSavesOfAnyNumbersOfRanks) {
  // Without a learning rate values stay the initial ones, while moments are sums in another order.
  train("one", {"--lr", "0"});
  train("two", {"--lr", "0", "--ranks", "2"});
  train("three", {"--lr", "0.1"});
  EXPECT_EQ(checkpoint({"one", "--diff", "one"}).exit_code, 0);
  const ProcessResult ranks = checkpoint({"one", "--diff", "two"});
  EXPECT_EQ(ranks.exit_code, 1);
  EXPECT_HAS(ranks.out, "\nranks ");
  EXPECT_HAS(ranks.out, "tensor \"exp_avg\" of parameter \"tokens.weight\"");
  EXPECT_EQ(ranks.out.find("tensor \"value\""), std::string::npos) << ranks.out;
  const ProcessResult other = checkpoint({"one", "--diff", "three/save-00001-step-2"});
  EXPECT_EQ(other.exit_code, 1);
  EXPECT_HAS(other.out, "tensor \"value\" of parameter \"tokens.weight\"");
}

TEST_F(CheckpointCommand, WhatIsNoCheckpointIsRefused) {
  fs::create_directory(path("empty"));
  expect_refusal({"checkpoint"}, "DIR");
  expect_refusal({"checkpoint", "nowhere"}, "nowhere");
  expect_refusal({"checkpoint", "empty"}, "empty");
  expect_refusal({"checkpoint", "empty", "--verify", "--diff", "empty"}, "ask one at a time");
}

}  // namespace
}  // namespace tessera::testing
