#include "tessera/comm/nodelist.h"

#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using Hosts = std::vector<std::string>;

std::string error_of(const std::string& text) {
  try {
    parse_nodelist(text);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(Nodelist, ReadsPlainNames) {
  EXPECT_EQ(parse_nodelist("gpu5"), Hosts({"gpu5"}));
  EXPECT_EQ(parse_nodelist("a,b-1,c.example.org"), Hosts({"a", "b-1", "c.example.org"}));
}

TEST(Nodelist, ExpandsRangesAndKeepsLeadingZeros) {
  EXPECT_EQ(parse_nodelist("n[01-03,7],gpu5"), Hosts({"n01", "n02", "n03", "n7", "gpu5"}));
  EXPECT_EQ(parse_nodelist("n[8-11]"), Hosts({"n8", "n9", "n10", "n11"}));
  EXPECT_EQ(parse_nodelist("n[098-101]"), Hosts({"n098", "n099", "n100", "n101"}));
}

TEST(Nodelist, MultipliesSeveralBrackets) {
  EXPECT_EQ(parse_nodelist("r[1-2]n[1-2]x"), Hosts({"r1n1x", "r1n2x", "r2n1x", "r2n2x"}));
}

TEST(Nodelist, SaysWhatIsWrongAndWhere) {
  EXPECT_EQ(error_of("n[1-"), "host list 'n[1-': expected a number at character 5");
  for (const char* text : {"", ",", "a,", "n[", "n[]", "n[1", "n[3-1]", "n[a]", "n[1-2-3]", "n]",
                           "a b", "n[1,]", "n[-1]", "n[1234567890]", "a;rm"}) {
    EXPECT_NE(error_of(text), "") << "'" << text << "' was taken";
  }
}

TEST(Nodelist, BoundsWhatAShortTextCanExpandTo) {
  EXPECT_EQ(parse_nodelist("n[0-65535]").size(), kMaxHosts);
  EXPECT_NE(error_of("n[0-65536]").find("too many hosts"), std::string::npos);
  EXPECT_NE(error_of("n[0-999999999]").find("too many hosts"), std::string::npos);
  EXPECT_NE(error_of("n[0-999]m[0-999]").find("too many hosts"), std::string::npos);
  EXPECT_NE(error_of("n[0-65535],m").find("too many hosts"), std::string::npos);
  std::string brackets = "n";
  for (int i = 0; i < 1000; ++i) brackets += "[1]";
  EXPECT_NE(error_of(brackets).find("too long"), std::string::npos);
  EXPECT_NE(error_of(std::string(300, 'a')).find("too long"), std::string::npos);
}

TEST(Nodelist, ShowsHostileTextWithoutItsControlCharacters) {
  const std::string error = error_of("n\x1b[31m\n");
  EXPECT_NE(error, "");
  EXPECT_EQ(error.find('\x1b'), std::string::npos);
  EXPECT_EQ(error.find('\n'), std::string::npos);
}

TEST(Nodelist, ReturnsHostsOrThrowsForAnyText) {
  std::mt19937 random(1);
  const std::string alphabet = "n0123[]-,,[]x. (";
  int num_taken = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string text;
    for (unsigned length = random() % 12; length > 0; --length) {
      text += alphabet[random() % alphabet.size()];
    }
    try {
      const Hosts hosts = parse_nodelist(text);
      ++num_taken;
      ASSERT_FALSE(hosts.empty()) << text;
      for (const std::string& host : hosts) {
        ASSERT_EQ(host.find_first_of("[], ("), std::string::npos) << text;
        ASSERT_FALSE(host.empty()) << text;
      }
    } catch (const ConfigError&) {  // as good as hosts
    }
  }
  EXPECT_GT(num_taken, 100);
}

TEST(TasksPerNode, RepeatsCounts) {
  EXPECT_EQ(parse_tasks_per_node("4(x2),1"), std::vector<int>({4, 4, 1}));
  EXPECT_EQ(parse_tasks_per_node("2"), std::vector<int>({2}));
}

TEST(TasksPerNode, RefusesWhatItCannotRead) {
  for (const char* text : {"", "x", "4(", "4(x", "4(x2", "4(2)", "4,", "4(x999999999)", "-1"}) {
    EXPECT_THROW(parse_tasks_per_node(text), ConfigError) << "'" << text << "' was taken";
  }
}

}  // namespace
}  // namespace tessera::comm
