#include "tessera/checkpoint/comparison.h"

#include <cstddef>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/checkpoint/made_checkpoint.h"
#include "tests/checkpoint/manifest_file.h"
#include "tests/checkpoint/safetensors_file.h"
#include "tests/support/temporary_directory.h"

namespace tessera::checkpoint {
namespace {

using testing::changed;
using testing::MadeCheckpoint;
using testing::make_checkpoint;
using testing::read_text;
using testing::TemporaryDirectory;
using testing::write_text;

const std::vector<testing::MadeParam> kComparedParams = {{"w", DType::kFloat32, {50, 3}},
                                                         {"b", DType::kBFloat16, {5}}};

std::string shown(const std::optional<std::string>& text) { return text.value_or("-"); }

TEST(Comparison, TheSameStatesOnOtherRanksDifferInTheirRanksAlone) {
  const TemporaryDirectory folder;
  const MadeCheckpoint one = make_checkpoint(folder.path(), {.params = kComparedParams});
  const MadeCheckpoint two =
      make_checkpoint(folder.path(), {.params = kComparedParams, .num_ranks = 3});
  const CheckpointReader first(one.path);
  EXPECT_TRUE(compare(first, CheckpointReader(one.path)).empty());
  const CheckpointDifferences differences = compare(first, CheckpointReader(two.path));
  EXPECT_TRUE(differences.forms.empty());
  EXPECT_TRUE(differences.tensors.empty());
  ASSERT_EQ(differences.values.size(), 1U);
  EXPECT_EQ(differences.values[0].name, "ranks");
  EXPECT_EQ(shown(differences.values[0].first), "2");
  EXPECT_EQ(shown(differences.values[0].second), "3");
}

TEST(Comparison, ElementsThatDifferAreCountedAndTheLargestDifferenceIsFound) {
  const TemporaryDirectory folder;
  const MadeCheckpoint one = make_checkpoint(folder.path(), {.params = kComparedParams});
  const MadeCheckpoint two =
      make_checkpoint(folder.path(), {.params = kComparedParams, .num_ranks = 2},
                      [](const std::string& name, std::vector<std::byte>& bytes) {
                        const auto put = [&bytes](std::size_t index, float value) {
                          std::memcpy(&bytes[index * sizeof(value)], &value, sizeof(value));
                        };
                        if (name == "value of w") {
                          put(7, 1e30F);
                          put(149, std::numeric_limits<float>::quiet_NaN());
                        } else if (name == "exp_avg of b") {
                          put(0, -1e25F);
                        }
                      });
  const CheckpointDifferences differences =
      compare(CheckpointReader(one.path), CheckpointReader(two.path));
  EXPECT_TRUE(differences.values.empty());
  ASSERT_EQ(differences.tensors.size(), 2U);
  const TensorDifference& weight = differences.tensors[0];
  EXPECT_EQ(weight.what, "tensor \"value\" of parameter \"w\"");
  EXPECT_EQ(weight.numel, 150);
  EXPECT_EQ(weight.num_different, 2);
  EXPECT_EQ(weight.num_nan, 1);
  float before = 0;
  std::memcpy(&before, &one.contents.at("value of w")[28], sizeof(before));
  EXPECT_EQ(weight.largest, static_cast<double>(1e30F) - static_cast<double>(before));
  EXPECT_EQ(differences.tensors[1].what, "tensor \"exp_avg\" of parameter \"b\"");
  EXPECT_EQ(differences.tensors[1].num_different, 1);
}

TEST(Comparison, WhatRanksHaveForThemselvesIsComparedRankByRank) {
  const TemporaryDirectory folder;
  const MadeCheckpoint one = make_checkpoint(folder.path(), {.params = {}, .seed = 1});
  const MadeCheckpoint two = make_checkpoint(folder.path(), {.params = {}, .seed = 2});
  const CheckpointDifferences differences =
      compare(CheckpointReader(one.path), CheckpointReader(two.path));
  ASSERT_EQ(differences.tensors.size(), 4U);
  EXPECT_EQ(differences.tensors[1].what, "buffer \"mean\" of rank 1");
  EXPECT_EQ(differences.tensors[2].what, "generator \"cpu\" of rank 0");
}

TEST(Comparison, ParametersShapesTypesAndValuesThatDifferAreListed) {
  const TemporaryDirectory folder;
  const MadeCheckpoint one =
      make_checkpoint(folder.path(), {.params = {{"w", DType::kFloat32, {6}},
                                                 {"b", DType::kFloat32, {4}},
                                                 {"old", DType::kFloat32, {1}}}});
  const MadeCheckpoint two =
      make_checkpoint(folder.path(), {.params = {{"new", DType::kFloat32, {1}},
                                                 {"b", DType::kBFloat16, {4}},
                                                 {"w", DType::kFloat32, {2, 3}}},
                                      .step = 61});
  const auto give = [](const std::string& path, const std::string& from, const std::string& to) {
    write_text(path + "/manifest.json", changed(read_text(path + "/manifest.json"), from, to));
  };
  give(one.path, "\"user\": {}", "\"user\": {\"only\": \"here\"}");
  give(two.path, "\"state\": {}", "\"state\": {\"scale\": \"2\"}");
  give(two.path, "\"config\": {}", "\"config\": {\"lr\": \"0.1\"}");
  give(one.path, "\"config\": {}", "\"config\": {\"lr\": \"0.2\"}");
  const CheckpointDifferences differences =
      compare(CheckpointReader(one.path), CheckpointReader(two.path));
  std::string text;
  for (const ValueDifference& value : differences.values) {
    text += value.name + ": " + shown(value.first) + " | " + shown(value.second) + "\n";
  }
  EXPECT_EQ(text,
            "step: 60 | 61\nstate: scale: - | 2\nconfig: lr: 0.2 | 0.1\nuser: only: here | -\n"
            "updates of parameter \"w\": 60 | 61\nupdates of parameter \"b\": 60 | 61\n");
  text.clear();
  for (const FormDifference& form : differences.forms) {
    text += form.what + ": " + form.first + " | " + form.second + "\n";
  }
  EXPECT_EQ(text,
            "parameter \"w\": [6] | [2, 3]\ntensor \"value\" of parameter \"b\": F32 | BF16\n"
            "parameter \"old\": [1] | \nparameter \"new\":  | [1]\n");
}

}  // namespace
}  // namespace tessera::checkpoint
