#include "tessera/core/suggest.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/printable.h"

namespace tessera {
namespace {

TEST(Nearest, AllowsInsertionsDeletionsReplacementsAndExchangesOfAThird) {
  const std::vector<std::string_view> known = {"stages"};
  for (const char* name : {"stage", "stagess", "stafes", "satges", "stagse", "tsages"}) {
    EXPECT_EQ(nearest(name, known), "stages") << name;
  }
  EXPECT_EQ(nearest("abages", known), "stages") << "two of six";
  EXPECT_EQ(nearest("abcges", known), "") << "three of six";
}

TEST(Nearest, FindsTheMeantNameAndNothingWhenAllAreFar) {
  const std::vector<std::string_view> known = {"comm.backend", "comm.timeout_s", "log.level"};
  EXPECT_EQ(nearest("comm.timeout", known), "comm.timeout_s");
  EXPECT_EQ(nearest("comm.bakcend", known), "comm.backend");
  EXPECT_EQ(nearest("loglevel", known), "log.level");
  EXPECT_EQ(nearest("zzzzzzzzzz", known), "");
  EXPECT_EQ(nearest("", known), "");
  EXPECT_EQ(nearest(std::string(100000, 'c'), known), "");
}

TEST(Nearest, DoesNotReplaceAWholeShortName) {
  const std::vector<std::string_view> known = {"lr"};
  EXPECT_EQ(nearest("xy", known), "");
  EXPECT_EQ(nearest("lrs", known), "lr");
}

TEST(Printable, KeepsForeignTextOnOneBoundedLine) {
  EXPECT_EQ(printable("plain"), "plain");
  EXPECT_EQ(printable("a\nb\tc\x01\xff"), "a\\nb\\tc\\x01\\xff");
  EXPECT_EQ(printable(std::string(500, 'a'), 10), "aaaaaaaaaa...");
  EXPECT_EQ(in_quotes("x"), "\"x\"");
}

}  // namespace
}  // namespace tessera
