#include "tessera/core/option_table.h"

#include <set>
#include <string>
#include <variant>

#include <gtest/gtest.h>

#include "tessera/core/deepspeed_keys.h"
#include "tessera/core/error.h"
#include "tessera/core/option_value.h"

namespace tessera {
namespace {

const Option& option(std::string_view name) { return *find_option(name); }

std::string failure(const Option& option, const OptionValue& value) {
  try {
    check_value(option, value, "here");
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "accepted";
}

TEST(OptionTable, NamesAreUniqueAndTextsAreSentences) {
  std::set<std::string_view> names;
  for (const Option& each : option_table()) {
    EXPECT_TRUE(names.insert(each.name).second) << each.name << " is there twice";
    ASSERT_FALSE(each.text.empty()) << each.name;
    EXPECT_EQ(each.text.back(), '.') << each.name;
    EXPECT_EQ(find_option(each.name), &each);
  }
  EXPECT_EQ(find_option("comm"), nullptr);
}

TEST(OptionTable, EveryDefaultIsAllowedAndShownAsItCanBeWritten) {
  for (const Option& each : option_table()) {
    OptionValue value;
    ASSERT_NO_THROW(value = default_value(each)) << each.name;
    if (each.type != OptionType::kString && each.type != OptionType::kList) {
      EXPECT_EQ(parse_value(each, to_text(each, value), each.name), value) << each.name;
    }
    EXPECT_FALSE(allowed_text(each).empty());
  }
}

TEST(OptionTable, OptionsThatExistForAReaderNameIt) {
  for (const Option& each : option_table()) {
    const std::string_view section = section_of(each.name);
    const bool is_still_to_come = section == "quant" && each.name != "quant.weights" &&
                                  each.name != "quant.block_numel" &&
                                  !each.name.starts_with("quant.frozen_");
    EXPECT_EQ(each.read_by.empty(), is_still_to_come) << each.name;
  }
}

TEST(OptionTable, AnOptionThatWasRemovedIsGoneAndSaysWhatHoldsInstead) {
  for (const char* name :
       {"place.parameters_pinned", "place.optimizer_pinned", "grad.accumulate_dtype",
        "grad.reduction", "optim.master_dtype", "optim.state_dtype"}) {
    EXPECT_EQ(find_option(name), nullptr) << name;
    EXPECT_NE(why_removed(name).find("leave it out"), std::string_view::npos) << name;
  }
  for (const Option& each : option_table()) {
    EXPECT_EQ(why_removed(each.name), "") << each.name;
  }
}

TEST(DeepSpeedKeys, EveryTargetExistsAndEveryDefaultIsAllowedThere) {
  std::set<std::string_view> paths;
  for (const DeepSpeedKey& key : deepspeed_keys()) {
    EXPECT_TRUE(paths.insert(key.path).second) << key.path << " is there twice";
    EXPECT_EQ(find_deepspeed_key(key.path), &key);
    if (!key.option.empty()) {
      ASSERT_NE(find_option(key.option), nullptr) << key.path << " -> " << key.option;
    }
    if (key.meaning == DeepSpeedMeaning::kSame && !key.default_text.empty()) {
      EXPECT_NO_THROW(parse_value(option(key.option), key.default_text, key.path)) << key.path;
    }
    EXPECT_EQ(find_option(section_of(key.path)), nullptr) << key.path;
    for (const Option& each : option_table()) {
      EXPECT_NE(section_of(each.name), section_of(key.path))
          << "one word would mean Tessera's and DeepSpeed's section";
    }
  }
}

TEST(OptionValue, ValuesOfTheWrongTypeOrOutOfRangeNameWhatIsAllowed) {
  EXPECT_EQ(failure(option("batch.accumulate"), std::int64_t{0}),
            "here = 0: expected a whole number from 1 to 9007199254740992");
  EXPECT_EQ(failure(option("batch.accumulate"), 1.5),
            "here = 1.5: expected a whole number from 1 to 9007199254740992");
  EXPECT_EQ(failure(option("batch.accumulate"), true),
            "here = true: expected a whole number from 1 to 9007199254740992");
  EXPECT_EQ(failure(option("batch.accumulate"), "4"),
            "here = \"4\": expected a whole number from 1 to 9007199254740992");
  EXPECT_EQ(failure(option("optim.beta1"), 1.5), "here = 1.5: expected a number from 0 to 1");
  EXPECT_EQ(failure(option("optim.lr"), 1.0 / 0.0),
            "here = inf: expected a finite number of at least 0");
  EXPECT_EQ(failure(option("log.all_ranks"), std::int64_t{1}), "here = 1: expected true or false");
  EXPECT_EQ(failure(option("precision"), "bf61"),
            "here = \"bf61\": expected fp32, bf16 or fp16; did you mean bf16?");
  EXPECT_EQ(failure(option("nvme.block_bytes"), "1KiB"),
            "here = 1024: expected a byte size like \"300MiB\", from 4KiB to 1GiB, or \"auto\"");
  EXPECT_EQ(failure(option("trace.path"), std::int64_t{3}), "here = 3: expected a string");
  EXPECT_EQ(failure(option("nvme.paths"), false), "here = false: expected a list of strings");
}

// A maximum that a message hides makes a refused value look like an allowed one.
TEST(OptionValue, AMessageNamesBothEndsOfARange) {
  EXPECT_EQ(failure(option("seed"), std::int64_t{9223372036854775807}),
            "here = 9223372036854775807: expected a whole number from 0 to 9007199254740992");
  EXPECT_EQ(failure(option("seed"), std::int64_t{9007199254740993}),
            "here = 9007199254740993: expected a whole number from 0 to 9007199254740992")
      << "the number above the largest, which no double holds";
  EXPECT_EQ(failure(option("seed"), std::int64_t{9007199254740992}), "accepted");
  EXPECT_THROW(parse_value(option("seed"), "9007199254740993", "here"), ConfigError);
  EXPECT_EQ(failure(option("memory.host"), std::int64_t{-1}),
            "here = -1: expected a byte size like \"300MiB\", from 0B to \"unlimited\"");
  for (const Option& each : option_table()) {
    const bool is_whole = each.type == OptionType::kInt || each.type == OptionType::kBytes;
    const bool is_real = each.type == OptionType::kDouble || each.type == OptionType::kSeconds;
    const bool has_two_ends = is_whole || (is_real && each.max != kNoLimit);
    EXPECT_EQ(allowed_text(each).find(" from ") != std::string::npos, has_two_ends)
        << each.name << ": " << allowed_text(each);
  }
}

TEST(OptionValue, NumbersMayBeWrittenWithAnExponentOrAsAKeyword) {
  EXPECT_EQ(check_value(option("batch.total"), 1e8, "here"), OptionValue(std::int64_t{100000000}));
  EXPECT_EQ(check_value(option("memory.host"), 1.5e9, "here"),
            OptionValue(std::int64_t{1500000000}));
  EXPECT_EQ(check_value(option("memory.host"), "unlimited", "here"), OptionValue(kUnlimitedBytes));
  EXPECT_EQ(check_value(option("nvme.queue_depth"), "auto", "here"), OptionValue(std::int64_t{0}));
  EXPECT_EQ(check_value(option("optim.cpu_share"), "auto", "here"), OptionValue(-1.0));
  EXPECT_EQ(to_text(option("memory.host"), kUnlimitedBytes), "unlimited");
}

TEST(OptionValue, FlagTextIsReadByTheTypeOfTheOption) {
  EXPECT_EQ(parse_value(option("log.all_ranks"), "on", "x"), OptionValue(true));
  EXPECT_EQ(parse_value(option("log.all_ranks"), "0", "x"), OptionValue(false));
  EXPECT_EQ(parse_value(option("batch.total"), "1e3", "x"), OptionValue(std::int64_t{1000}));
  EXPECT_EQ(parse_value(option("comm.timeout_s"), "2min", "x"), OptionValue(120.0));
  const std::vector<std::string> paths = {"/a", "/b"};
  EXPECT_EQ(parse_value(option("nvme.paths"), "/a,/b", "x"), OptionValue(paths));
  EXPECT_THROW(parse_value(option("log.all_ranks"), "yes!", "x"), ConfigError);
  EXPECT_THROW(parse_value(option("batch.total"), "many", "x"), ConfigError);
}

}  // namespace
}  // namespace tessera
