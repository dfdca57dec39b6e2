#include "tessera/core/config.h"

#include <cstdio>
#include <fstream>
#include <string>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/core/unread_options.h"
#include "tests/support/contains.h"

namespace tessera {
namespace {

std::string failure(std::string_view json) {
  try {
    Config::from_json(json, "run.json").check();
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "accepted";
}

TEST(Config, StartsWithTheDefaultsOfTheTable) {
  const Config config;
  EXPECT_EQ(config.get_string("comm.backend"), "auto");
  EXPECT_EQ(config.get_seconds("comm.timeout_s"), 600.0);
  EXPECT_EQ(config.get_bytes("comm.pack_below_bytes"), 65536);
  EXPECT_EQ(config.get_int("shard.group_size"), 0);
  EXPECT_FALSE(config.get_bool("log.all_ranks"));
  EXPECT_TRUE(config.get_list("nvme.paths").empty());
  EXPECT_FALSE(config.is_set("comm.timeout_s"));
  EXPECT_TRUE(config.notices().empty());
  EXPECT_EQ(config.describe(), "");
  EXPECT_NO_THROW(config.check());
}

TEST(Config, ReadsNestedAndDottedNames) {
  const auto config = Config::from_json(
      R"({"comm": {"backend": "gloo", "timeout_s": "2min"}, "log.level": "debug", "seed": 1e3,
          "memory": {"host": "300MiB", "nvme": 0}, "nvme": {"paths": ["/a", "/b"]}})",
      "run.json");
  EXPECT_EQ(config.get_string("comm.backend"), "gloo");
  EXPECT_EQ(config.get_seconds("comm.timeout_s"), 120.0);
  EXPECT_EQ(config.get_string("log.level"), "debug");
  EXPECT_EQ(config.get_int("seed"), 1000);
  EXPECT_EQ(config.get_bytes("memory.host"), 300 << 20);
  EXPECT_EQ(config.get_list("nvme.paths"), (std::vector<std::string>{"/a", "/b"}));
  EXPECT_TRUE(config.is_set("seed"));
}

TEST(Config, DescribesWhatDiffersFromTheDefaultsAndWhereItCameFrom) {
  auto config = Config::from_json(R"({"comm": {"timeout_s": 30, "backend": "auto"}})", "run.json");
  config.set("memory.host", "2GiB");
  config.set("memory.host", "1GiB");  // later settings win
  config.apply_flag("log.level=warn");
  EXPECT_EQ(config.describe(),
            "comm.timeout_s = 30  (run.json: comm.timeout_s)\n"
            "memory.host = 1GiB  (code)\n"
            "log.level = warn  (command line)\n");
  EXPECT_EQ(config.changed(),
            (std::map<std::string, std::string>{
                {"comm.timeout_s", "30"}, {"log.level", "warn"}, {"memory.host", "1GiB"}}));
}

TEST(Config, AValueIsShownWithWhereItCameFrom) {
  auto config = Config::from_json(
      R"({"seed": 7, "scheduler": {"type": "WarmupLR"}, "train_batch_size": 4})", "run.json");
  config.set("optim.lr", 0.5, "--lr");
  EXPECT_EQ(config.shown("seed"), "seed = 7 (run.json)");
  EXPECT_EQ(config.shown("batch.total"), "batch.total = 4 (run.json: train_batch_size)");
  EXPECT_EQ(config.shown("optim.lr"), "optim.lr = 0.5 (--lr)");
  EXPECT_EQ(config.shown("batch.accumulate"), "batch.accumulate = 1 (a default)");
  EXPECT_EQ(config.shown("schedule.warmup_steps"),
            "schedule.warmup_steps = 1000 (a default, DeepSpeed's)");
  EXPECT_TRUE(config.is_given("seed"));
  EXPECT_TRUE(config.is_from_file("batch.total"));
  EXPECT_TRUE(config.is_given("optim.lr"));
  EXPECT_FALSE(config.is_from_file("optim.lr"));
  EXPECT_TRUE(config.is_set("schedule.warmup_steps"));
  EXPECT_FALSE(config.is_given("schedule.warmup_steps"));
  EXPECT_FALSE(config.is_given("batch.accumulate"));
}

TEST(Config, OnlyWhatSomebodyGaveAndNothingReadsIsUnread) {
  auto config = Config::from_json(
      R"({"quant": {"error_beta": 0.5, "error_feedback": false}, "seed": 7})", "run.json");
  EXPECT_EQ(config.unread(),
            std::vector<std::string>{"quant.error_beta (run.json: quant.error_beta)"});
  EXPECT_TRUE(Config::from_json(R"({"zero_optimization": {"stage": 3}})", "d").unread().empty());
}

TEST(Config, WhatIsUnreadIsNamedWithTheWayOut) {
  const auto config = Config::from_json(
      R"({"zero_optimization": {"stage": 3, "zero_quantized_gradients": true,
                                "zeropp_loco_param": {"err_beta": 0.5, "reset_T": 1024}}})",
      "ds.json");
  EXPECT_EQ(unread_warning(config),
            "set, but not built yet, and without effect: quant.error_feedback (ds.json: "
            "zero_optimization.zeropp_loco_param), quant.error_beta (ds.json: "
            "zero_optimization.zeropp_loco_param.err_beta); the rounding error of quantised "
            "gradients (LoCo) is not carried over. Remove these options; quant.gradient_bits = 8 "
            "(--quantize-gradients=8) is what rounds less");
  EXPECT_EQ(unread_warning(Config()), "");
}

TEST(Config, AWrongNameOrValueIsTheUsersErrorAndAWrongTypeOurs) {
  Config config;
  EXPECT_THROW(config.get_int("no.such_option"), ConfigError);
  try {
    config.set("optim.lrr", 1.0);
    FAIL() << "expected ConfigError";
  } catch (const ConfigError& error) {
    EXPECT_EQ(std::string(error.what()), "\"optim.lrr\": unknown option; did you mean optim.lr?");
  }
  EXPECT_THROW(config.get_int("comm.backend"), InternalError) << "read as another type";
  EXPECT_THROW(config.get_string("seed"), InternalError);
  EXPECT_THROW(config.set("comm.timeout_s", -1), ConfigError);
  EXPECT_FALSE(config.is_set("comm.timeout_s"));
}

TEST(Config, AFlagThatIsWrongSaysHow) {
  Config config;
  const auto message = [&config](const char* flag) -> std::string {
    try {
      config.apply_flag(flag);
    } catch (const ConfigError& e) {
      return e.what();
    }
    return "accepted";
  };
  EXPECT_EQ(message("comm.timeout=3"),
            "\"comm.timeout\": unknown option; did you mean comm.timeout_s?");
  EXPECT_EQ(message("qqqqqqqqq=3"), "\"qqqqqqqqq\": unknown option; `tessera options` lists all");
  EXPECT_EQ(message("place.parameters_pinned=false"),
            "\"place.parameters_pinned\": there is no such option any more: host memory is pinned "
            "where a GPU reads or writes it, and nowhere else; leave it out");
  EXPECT_EQ(message("verbose"), "\"verbose\": expected name=value, for example comm.timeout_s=30");
  EXPECT_EQ(message("seed=-1"), "seed = -1: expected a whole number from 0 to 9007199254740992");
}

TEST(Config, AnUnknownKeyIsNamedInFullWithTheNearestKnownOne) {
  EXPECT_EQ(failure(R"({"comm": {"timeout": 3}})"),
            "run.json: comm.timeout: unknown key; did you mean comm.timeout_s?");
  EXPECT_EQ(failure(R"({"com": {"timeout_s": 3}})"),
            "run.json: com: unknown key; did you mean comm?");
  EXPECT_EQ(failure(R"({"comm": {"backend": {"deep": 1}}})"),
            "run.json: comm.backend: expected a value, got object");
  EXPECT_EQ(failure(R"({"place": {"optimizer_pinned": true}})"),
            "run.json: place.optimizer_pinned: there is no such option any more: host memory is "
            "pinned where a GPU reads or writes it, and nowhere else; leave it out");
  EXPECT_EQ(failure(R"({"wholly different": 3})"),
            "run.json: wholly different: unknown key; `tessera options` lists all");
  EXPECT_EQ(failure("{\"a\\nb\": 3}"), "run.json: a\\nb: unknown key; `tessera options` lists all");
}

TEST(Config, AValueIsRejectedWithItsKeyAndWhatIsAllowed) {
  EXPECT_EQ(failure(R"({"comm": {"timeout_s": 0}})"),
            "run.json: comm.timeout_s = 0: expected seconds or a duration like \"10min\", "
            "from 0.001 to 1e+09");
  EXPECT_EQ(failure(R"({"comm": {"timeout_s": null}})"),
            "run.json: comm.timeout_s: expected a value, got null");
  EXPECT_EQ(failure(R"({"comm": [1]})"),
            "run.json: comm: expected an object with the options of this section, it is of type "
            "array");
  EXPECT_EQ(failure(R"({"nvme": {"paths": ["/a", 3]}})"),
            "run.json: nvme.paths: every item of a list must be a string, one is of type number");
}

// The place is ours to promise; the words behind it are the JSON library's and change with it.
TEST(Config, TextThatIsNotJsonIsRejectedWithLineAndColumn) {
  const auto expect_place = [](std::string_view json, const std::string& place) {
    const std::string message = failure(json);
    EXPECT_TRUE(message.starts_with("run.json: not valid JSON" + place + ": ")) << message;
    EXPECT_LACKS(message, "json.exception");
    EXPECT_LACKS(message, "parse error");
  };
  expect_place("{\n  \"seed\": 1,\n  \"seed2\" 3\n}", " at line 3, column 11");
  expect_place("", " at line 1, column 1");
  expect_place(R"({"seed": 1e999})", "");
  EXPECT_EQ(failure("[]"),
            "run.json: the outermost value must be an object in braces, it is of type array");
  EXPECT_EQ(failure(R"({"seed": 1, "seed": 2})"),
            "run.json: key \"seed\" is given twice in one object; remove one of them");
  EXPECT_EQ(failure(std::string(100000, '[')),
            "run.json: nested deeper than 32 levels; no option is that deep");
}

TEST(Config, TheSameOptionTwiceInOneFileMustAgree) {
  EXPECT_EQ(failure(R"({"comm.timeout_s": 1, "comm": {"timeout_s": 2}})"),
            "run.json: comm.timeout_s: given twice with different values, 2 and 1");
  EXPECT_EQ(failure(R"({"comm.timeout_s": 2, "comm": {"timeout_s": 2}})"), "accepted");
}

TEST(Config, OptionsThatContradictEachOtherAreRejectedByCheck) {
  EXPECT_EQ(failure(R"({"place": {"optimizer": "nvme"}})"),
            "place.optimizer = nvme: nvme.paths is empty; give a directory on the disk");
  EXPECT_EQ(failure(R"({"place": {"optimizer": "nvme"}, "nvme": {"paths": "/a"},
                        "memory": {"nvme": 0}})"),
            "place.optimizer = nvme, but memory.nvme = 0 allows nothing there; raise it");
  EXPECT_EQ(failure(R"({"memory": {"nvme": "1GiB"}})"),
            "memory.nvme = 1GiB: nvme.paths is empty; give a directory on the disk");
  EXPECT_EQ(failure(R"({"batch": {"total": 10, "accumulate": 3}})"),
            "batch.total = 10 (run.json) is not a multiple of batch.accumulate = 3 (run.json)");
  EXPECT_EQ(failure(R"({"batch": {"total": 12, "accumulate": 3, "micro_per_rank": 3}})"),
            "batch.total = 12 (run.json) is not a multiple of batch.micro_per_rank = 3 (run.json) "
            "times batch.accumulate = 3 (run.json)");
  EXPECT_EQ(
      failure(R"({"quant": {"frozen_bits": 5}})"),
      "quant.frozen_bits = 5 (run.json): integers have 4 or 8 bits; 0 keeps frozen parameters "
      "as they are");
  EXPECT_EQ(failure(R"({"quant": {"frozen_names": ["a.*"]}})"),
            "quant.frozen_names is given, and quant.frozen_bits = 0; set that to 4 or 8");
  EXPECT_EQ(failure(R"({"quant": {"block_numel": 100}})"),
            "quant.block_numel = 100 (run.json) is not a multiple of 32; take one, the default is "
            "128");
  EXPECT_EQ(failure(R"({"quant": {"error_feedback": true}})"),
            "quant.error_feedback = true needs quant.gradients = true");
  EXPECT_EQ(failure(R"({"loss_scale": {"min": 8, "initial": 4}})"),
            "loss_scale.min = 8 is above loss_scale.initial = 4");
}

TEST(Config, ReadsAFileAndNamesOneThatIsMissing) {
  const std::string path = testing::TempDir() + "config_test.json";
  std::ofstream(path) << R"({"log": {"level": "trace"}})";
  EXPECT_EQ(Config::from_file(path).get_string("log.level"), "trace");
  std::remove(path.c_str());
  try {
    Config::from_file(path);
    FAIL() << "expected ConfigError";
  } catch (const ConfigError& e) {
    EXPECT_EQ(std::string(e.what()),
              "config file \"" + path + "\": cannot be opened: No such file or directory");
  }
  EXPECT_THROW(Config::from_file(testing::TempDir()), ConfigError) << "a directory";
  EXPECT_THROW(Config::from_file("/dev/zero"), ConfigError) << "a file without an end";
}

}  // namespace
}  // namespace tessera
