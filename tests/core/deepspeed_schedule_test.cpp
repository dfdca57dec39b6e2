// DeepSpeed's schedulers: every parameter of every type, and what does not belong together.
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/config.h"
#include "tessera/core/deepspeed_keys.h"
#include "tessera/core/error.h"
#include "tests/support/contains.h"

namespace tessera {
namespace {

Config scheduled(const std::string& type, const std::string& params, const std::string& more = "") {
  return Config::from_json(
      R"({"scheduler": {"type": ")" + type + R"(", "params": {)" + params + "}}" + more + "}",
      "ds.json");
}

std::string refusal_of(const std::string& type, const std::string& params,
                       const std::string& more = "") {
  try {
    scheduled(type, params, more);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(DeepSpeedScheduler, EveryParameterOfTheTableBelongsToAType) {
  for (const DeepSpeedKey& key : deepspeed_keys()) {
    constexpr std::string_view kParams = "scheduler.params.";
    if (!key.path.starts_with(kParams)) {
      continue;
    }
    const std::string name(key.path.substr(kParams.size()));
    const Option* const target = find_option(key.option);
    const OptionType type = target != nullptr ? target->type : key.type;
    const std::string value = type == OptionType::kBool     ? "false"
                              : type == OptionType::kChoice ? "\"log\""
                                                            : "1";
    bool accepted = false;
    for (const char* type :
         {"WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"}) {
      std::string params = '"' + name + "\": " + value;
      if (std::string(type) == "OneCycle") {
        for (const char* needed : {"cycle_min_lr", "cycle_max_lr"}) {
          params += name == needed ? "" : std::string(", \"") + needed + "\": 1";
        }
        params += name == "cycle_momentum" ? "" : ", \"cycle_momentum\": false";
      }
      accepted = accepted || refusal_of(type, params) == "accepted";
    }
    EXPECT_TRUE(accepted) << key.path;
  }
}

TEST(DeepSpeedScheduler, DefaultsOfATypeAreItsOwn) {
  const Config warmup = scheduled("WarmupLR", "");
  EXPECT_EQ(warmup.get_int("schedule.warmup_steps"), 1000);
  EXPECT_FALSE(warmup.is_given("schedule.warmup_steps"));
  EXPECT_EQ(warmup.get_string("schedule.warmup_shape"), "log");
  EXPECT_EQ(scheduled("WarmupCosineLR", "").get_double("schedule.final_lr"), 0.001 * 0.0001);
  const Config range = scheduled("LRRangeTest", "");
  EXPECT_EQ(range.get_double("schedule.warmup_start_lr"), 0.001);
  EXPECT_FALSE(range.is_set("schedule.warmup_steps"));
  EXPECT_FALSE(range.is_set("schedule.deepspeed_timing"));
  const Config stairs = scheduled("OneCycle", R"("cycle_min_lr": 0, "cycle_max_lr": 1,
      "cycle_momentum": false, "cycle_first_stair_count": 5)");
  EXPECT_EQ(stairs.get_int("schedule.cycle_down_stairs"), 5) << "as many as up";
}

TEST(DeepSpeedScheduler, AWarmupOfOneStepIsTakenForTwoAndNoneForNone) {
  EXPECT_EQ(scheduled("WarmupLR", R"("warmup_num_steps": 1)").get_int("schedule.warmup_steps"), 2);
  EXPECT_EQ(scheduled("WarmupLR", R"("warmup_num_steps": 0)").get_int("schedule.warmup_steps"), 0);
}

TEST(DeepSpeedScheduler, TheLargestLearningRateOfTheSchedulerGoesBeforeTheOptimizers) {
  const std::string optimizer = R"(, "optimizer": {"type": "AdamW", "params": {"lr": 0.5}})";
  EXPECT_EQ(scheduled("WarmupLR", R"("warmup_max_lr": 0.25)", optimizer).get_double("optim.lr"),
            0.25);
  EXPECT_EQ(scheduled("WarmupLR", "", optimizer).get_double("optim.lr"), 0.5);
  EXPECT_EQ(scheduled("LRRangeTest", "", optimizer).get_double("optim.lr"), 0.5);
}

TEST(DeepSpeedScheduler, RatiosFollowALearningRateThatAFlagSets) {
  Config config = scheduled("WarmupCosineLR", R"("warmup_min_ratio": 0.5, "cos_min_ratio": 0.25)",
                            R"(, "optimizer": {"type": "AdamW", "params": {"lr": 4}})");
  EXPECT_EQ(config.get_double("schedule.warmup_start_lr"), 2);
  EXPECT_EQ(config.get_double("schedule.final_lr"), 1);
  config.set("optim.lr", 8.0, "--lr");
  EXPECT_EQ(config.get_double("schedule.warmup_start_lr"), 4);
  EXPECT_EQ(config.get_double("schedule.final_lr"), 2);
  EXPECT_EQ(refusal_of("WarmupCosineLR", R"("cos_min_ratio": 2)"),
            "ds.json: scheduler.params.cos_min_ratio = 2: expected a number from 0 to 1");
}

TEST(DeepSpeedScheduler, TheLastIterationIsWhereTheRunBegins) {
  EXPECT_EQ(scheduled("WarmupLR", R"("last_batch_iteration": -1)").get_int("schedule.first_step"),
            0);
  EXPECT_EQ(
      scheduled("LRRangeTest", R"("last_batch_iteration": 41)").get_int("schedule.first_step"), 42);
  EXPECT_EQ(refusal_of("WarmupLR", R"("last_batch_iteration": -2)"),
            "ds.json: scheduler.params.last_batch_iteration = -2: expected a whole number from -1, "
            "the beginning, to 9007199254740991");
}

TEST(DeepSpeedScheduler, CycledMomentumIsRefusedUnlessTheOptimizerHasNoBetas) {
  const std::string cycle = R"("cycle_min_lr": 0.1, "cycle_max_lr": 1)";
  EXPECT_HAS(refusal_of("OneCycle", cycle + R"(, "cycle_momentum": true)"),
             "cycle_momentum = true: OneCycle changes the learning rate alone");
  EXPECT_EQ(refusal_of("OneCycle", cycle, R"(, "optimizer": {"type": "SGD"})"), "accepted");
  EXPECT_EQ(refusal_of("OneCycle", R"("cycle_min_lr": 0.1, "cycle_momentum": false)"),
            "ds.json: scheduler.params.cycle_max_lr is missing; OneCycle needs cycle_min_lr and "
            "cycle_max_lr");
}

TEST(DeepSpeedScheduler, ParametersWithoutATypeAreRefused) {
  try {
    Config::from_json(R"({"scheduler": {"params": {"warmup_num_steps": 3}}})", "ds.json");
    FAIL() << "expected ConfigError";
  } catch (const ConfigError& error) {
    EXPECT_EQ(std::string(error.what()),
              "ds.json: scheduler.params are given without scheduler.type; give the type too");
  }
}

}  // namespace
}  // namespace tessera
