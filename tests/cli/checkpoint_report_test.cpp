// What is said of saves: tables made from manifests, and the sums of a run.
#include "cli/checkpoint_report.h"

#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "cli/resume.h"
#include "cli/save_totals.h"
#include "tessera/core/error.h"
#include "tests/support/contains.h"
#include "tests/support/expect_names.h"

namespace tessera::cli {
namespace {

using checkpoint::Fragment;
using checkpoint::StoredParam;

StoredParam some_param(const std::string& name, std::vector<std::int64_t> shape) {
  StoredParam param;
  param.name = name;
  param.shape = std::move(shape);
  param.updates = 60;
  param.tensors["value"].dtype = DType::kBFloat16;
  for (const char* state : {"master", "exp_avg", "exp_avg_sq"}) {
    param.tensors[state].dtype = DType::kFloat32;
  }
  return param;
}

SaveView some_save() {
  SaveView save;
  save.name = "save-00007-step-60";
  save.made_at_s = 1'700'000'000;
  checkpoint::Manifest& manifest = save.manifest;
  manifest.step = 60;
  manifest.num_ranks = 2;
  manifest.files = {{"rank-0.safetensors", 3 << 20}, {"rank-1.safetensors", 1 << 20}};
  manifest.params.push_back(some_param("tokens.weight", {1024, 1024}));
  manifest.params.back().tied = {"head.weight"};
  for (const char* block : {"blocks.0", "blocks.1", "blocks.11"}) {
    manifest.params.push_back(some_param(std::string(block) + ".norm.weight", {32}));
  }
  manifest.params.push_back(some_param("blocks.2.norm.weight", {32}));
  manifest.params.back().trainable = false;
  manifest.params.back().tensors.erase("exp_avg");
  checkpoint::StoredRankTensor buffer;
  buffer.name = "running_mean";
  buffer.dtype = DType::kFloat32;
  buffer.ranks = {Fragment{0, 0, 0, 256, 0}, Fragment{1, 0, 0, 256, 0}};
  manifest.buffers.push_back(buffer);
  manifest.state["loss_scale.value"] = "65536";
  manifest.user["note"] = "two\nlines";
  return save;
}

TEST(CheckpointReport, ParametersThatAreAlikeAreOneRow) {
  const std::string text = save_screen(some_save(), 1'700'000'000 + 600);
  EXPECT_HAS(text,
             "save-00007-step-60: step 60, by 2 ranks, 4.00 MiB in 2 files, made 2023-11-14 "
             "22:13:20 UTC, 10 min ago\n60 updates of every trainable parameter\n");
  EXPECT_HAS(text,
             "\ntokens.weight                                        1024 x 1024       1,048,576  "
             "bf16  tied: head.weight, exp_avg, exp_avg_sq, master\n");
  EXPECT_HAS(text, "\nblocks.*.norm.weight, 3 times");
  EXPECT_HAS(text, "frozen, exp_avg_sq, master\n");
  EXPECT_HAS(text, "\nall 5 ");
  EXPECT_HAS(text, " 1,048,704\n");
}

TEST(CheckpointReport, BytesAreToldByKind) {
  const std::string text = save_screen(some_save(), 0);
  EXPECT_HAS(text, "\nvalues                           5      2.00 MiB  bf16\n");
  EXPECT_HAS(text, "\nmasters                          5      4.00 MiB  fp32\n");
  EXPECT_HAS(text, "\nstate exp_avg                    4 ");
  EXPECT_HAS(text, "\nbuffers                          1      2.00 KiB  fp32\n");
  EXPECT_LACKS(text, "generators");
  EXPECT_HAS(text, "\n  loss_scale.value = 65536\n");
  EXPECT_HAS(text, "\noptions: all have their defaults\n");
  EXPECT_HAS(text, "\n  note = two\\nlines\n");
}

TEST(CheckpointReport, UpdatesOfParametersThatSomeStepsHaveNotUsedAreARange) {
  SaveView save = some_save();
  save.manifest.params[1].updates = 7;
  EXPECT_HAS(save_screen(save, 0), "\n7 to 60 updates of trainable parameters\n");
}

TEST(CheckpointReport, SavesAreATable) {
  const std::string text = saves_table({some_save(), some_save()}, 1'700'000'000 + 3 * 86400);
  EXPECT_HAS(text,
             "save-00007-step-60                    60       2      4.00 MiB  2023-11-14 22:13:20 "
             "UTC, 3 days ago\n");
}

TEST(CheckpointReport, AgesAreOfOneUnit) {
  EXPECT_EQ(age_text(-5), "0 s");
  EXPECT_EQ(age_text(119), "119 s");
  EXPECT_EQ(age_text(7199), "119 min");
  EXPECT_EQ(age_text(7200), "2 h");
  EXPECT_EQ(age_text(172800), "2 days");
}

TEST(CheckpointReport, DifferencesAreNamedWithBothSides) {
  checkpoint::CheckpointDifferences differences;
  EXPECT_EQ(differences_table(differences), "");
  differences.values.push_back({"step", "2", "3"});
  differences.values.push_back({"user: note", std::nullopt, "text"});
  differences.forms.push_back({"parameter \"x\"", "[3, 5]", ""});
  differences.tensors.push_back({"tensor \"value\" of parameter \"y\"", 1000, 7, 1, 0.5});
  const std::string text = differences_table(differences);
  for (const char* part :
       {"\nstep ", " 2 ", "  3\n", "\nuser: note ", " -  text\n", "\nparameter \"x\" ",
        "[3, 5]  -\n", "\ntensor \"value\" of parameter \"y\": 7 of 1,000 elements differ",
        ", by up to 0.5; 1 is", " NaN in one of them\n"}) {
    EXPECT_HAS(text, part);
  }
}

TEST(CheckpointReport, OfManyDifferencesTheFirstAreShown) {
  checkpoint::CheckpointDifferences differences;
  for (int i = 0; i < 23; ++i) {
    differences.values.push_back({"value " + std::to_string(i), "1", "2"});
    differences.tensors.push_back({"tensor " + std::to_string(i), 8, 1, 0, 1});
  }
  const std::string text = differences_table(differences);
  for (const char* part : {"\nvalue 19 ", "\nand 3 more\ntensor 0: ", "\ntensor 19: "}) {
    EXPECT_HAS(text, part);
  }
  EXPECT_EQ(text.rfind("and 3 more\n"), text.size() - 11);
  EXPECT_LACKS(text, " 20");
}

TEST(SaveTotals, SayWhatSavesTookAndWhatTheyCost) {
  SaveTotals totals;
  EXPECT_EQ(totals.text(), "");
  totals.add({.step = 10, .path = "run/a", .failure = "", .seconds = 0.5});
  totals.add({.step = 20,
              .path = "run/b",
              .failure = "",
              .seconds = 2,
              .is_async = true,
              .bytes = 3 << 20,
              .stall_s = 0.25});
  totals.add({.step = 30, .path = "", .failure = "the disk is full"});
  EXPECT_EQ(totals.text(),
            "saves           2, each in up to 2.00 s; the last is of step 20: run/b\n"
            "                1 beside training, 3.00 MiB of rank 0 each: updates waited 0.25 s in "
            "all, 0.25 s at most\n"
            "                1 failed, the last of step 30: the disk is full\n");
}

TEST(SaveTotals, SayBeforeASaveWhatItIsExpectedToCost) {
  EXPECT_EQ(expected_save_text({std::int64_t{2} << 30, 1 << 30, 0.44}),
            "save of 2.00 GiB beside training, 1.00 GiB of buffer: updates wait about 0.44 s");
  EXPECT_HAS(expected_save_text({1 << 20, 1 << 20, 0}), ": updates do not wait");
  EXPECT_HAS(expected_save_text({1 << 20, 0, std::nullopt}),
             ": how long updates wait is not known yet");
}

TEST(SaveTotals, SayWhatALoadTook) {
  EXPECT_EQ(load_time_text(7.418, 5.1), ", in 7.42 s, 5.10 s of them reading");
}

ResumePoint some_point() {
  DataIdentity data;
  data.sources = {"text:a.txt"};
  data.batch = 8;
  data.next_batch = 1;
  ResumePoint point;
  point.path = "run/save-00001-step-2";
  point.step = 2;
  point.identity = describe(data);
  point.identity["model.width"] = "32";
  point.identity["model.dtype"] = "fp32";
  return point;
}

TEST(ResumePoint, TheSameRunMayHaveOtherPrecisionAndOtherPaths) {
  const ResumePoint point = some_point();
  RunIdentity now = point.identity;
  now["model.dtype"] = "bf16";
  now["data.sources"] = "text:elsewhere/a.txt";
  check_same_run(point, now);
}

TEST(ResumePoint, OfAProgramThatSaysNothingOfItsRunIsTaken) {
  ResumePoint point = some_point();
  const RunIdentity now = std::exchange(point.identity, {{"imported.from", "elsewhere"}});
  check_same_run(point, now);
}

TEST(ResumePoint, EveryDifferenceIsNamedAtOnce) {
  const ResumePoint point = some_point();
  RunIdentity now = point.identity;
  now["model.width"] = "64";
  now["data.batch"] = "6";
  now["model.heads"] = "2";
  now["data.next_batch"] = "other";
  support::expect_names<ConfigError>(
      [&] { check_same_run(point, now); },
      "is of another run: --batch was 8 and is 6, --heads was not said and is 2, --width was 32 "
      "and is 64; give what it was trained with");
}

// It has other tokens, and nothing else says why.
TEST(ResumePoint, DataThatHasChangedIsNoticedByItsTokens) {
  const ResumePoint point = some_point();
  RunIdentity now = point.identity;
  now["data.next_batch"] = "other";
  support::expect_names<ConfigError>([&] { check_same_run(point, now); },
                                     "the data, text:a.txt, has changed");
  now["data.sources"] = "demo";
  support::expect_names<ConfigError>([&] { check_same_run(point, now); },
                                     "--data was text:a.txt and is demo");
}

}  // namespace
}  // namespace tessera::cli
