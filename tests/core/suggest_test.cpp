#include "tessera/core/suggest.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/printable.h"

namespace tessera {
namespace {

TEST(EditDistance, CountsInsertionsDeletionsReplacementsAndExchanges) {
  EXPECT_EQ(edit_distance("", ""), 0U);
  EXPECT_EQ(edit_distance("stage", "stage"), 0U);
  EXPECT_EQ(edit_distance("", "abc"), 3U);
  EXPECT_EQ(edit_distance("stage", "stge"), 1U);
  EXPECT_EQ(edit_distance("stage", "stages"), 1U);
  EXPECT_EQ(edit_distance("stage", "stafe"), 1U);
  EXPECT_EQ(edit_distance("stage", "satge"), 1U);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3U);
  EXPECT_EQ(edit_distance("ab", "ba"), edit_distance("ba", "ab"));
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
