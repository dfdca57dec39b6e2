// How a mismatch is put into words: who is said to differ, and what is left of long names.
#include "tessera/comm/tag.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace tessera::comm {
namespace {

struct Calls {
  std::vector<CallTag> tags;
  std::vector<CallWords> words;
  std::vector<int> world_ranks;

  // A gather of one tensor per name.
  void add(std::string_view unit, const std::vector<std::string>& names) {
    CallWords said({unit, names.front()});
    for (const std::string& name : names) {
      said.add_tensor(name);
    }
    CallTag tag;
    tag.sequence = 5;
    tag.op = Op::kAllGather;
    tag.num_tensors = static_cast<std::uint32_t>(names.size());
    tag.label_hash = said.hash();
    tags.push_back(tag);
    words.push_back(said);
    world_ranks.push_back(10 + static_cast<int>(world_ranks.size()));
  }
  std::string mismatch() const { return find_mismatch(tags, words, world_ranks).value_or(""); }
};

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Tag, RanksThatAgreeAreNoMismatch) {
  Calls calls;
  calls.add("h.0", {"a"});
  calls.add("h.0", {"a"});
  EXPECT_TRUE(tags_agree(calls.tags));
  EXPECT_EQ(calls.mismatch(), "");
}

TEST(Tag, TheOddOneOutIsNamedAlsoIfItIsRankZero) {
  Calls calls;
  calls.add("h.9", {"a"});
  calls.add("h.0", {"a"});
  calls.add("h.0", {"a"});
  EXPECT_TRUE(has(calls.mismatch(), "rank 10 called")) << calls.mismatch();
  EXPECT_TRUE(has(calls.mismatch(), "where ranks 11, 12 called")) << calls.mismatch();
}

TEST(Tag, WithoutAMajorityTheLowestRankIsTheOneThatOthersDifferFrom) {
  Calls calls;
  calls.add("h.0", {"a"});
  calls.add("h.1", {"a"});
  calls.add("h.2", {"a"});
  EXPECT_TRUE(has(calls.mismatch(), "rank 11 called")) << calls.mismatch();
  EXPECT_TRUE(has(calls.mismatch(), "where rank 10 called")) << calls.mismatch();
  EXPECT_TRUE(has(calls.mismatch(), "; rank 12 differs, too")) << calls.mismatch();
}

TEST(Tag, ManyRanksAreCounted) {
  Calls calls;
  for (int rank = 0; rank < 20; ++rank) {
    calls.add(rank == 7 ? "h.1" : "h.0", {"a"});
  }
  EXPECT_TRUE(has(calls.mismatch(), "rank 17 called")) << calls.mismatch();
  EXPECT_TRUE(has(calls.mismatch(), "ranks 10, 11, 12, 13, 14, 15, 16, 18 and 11 more called"))
      << calls.mismatch();
}

TEST(Tag, OfALongNameTheEndIsKept) {
  const std::string shared(1000, 'x');
  Calls calls;
  calls.add("h.0", {shared + ".weight"});
  calls.add("h.0", {shared + ".bias"});
  EXPECT_TRUE(has(calls.mismatch(), "xxx.weight'")) << calls.mismatch();
  EXPECT_TRUE(has(calls.mismatch(), "'...xxx")) << calls.mismatch();
  EXPECT_TRUE(has(calls.mismatch(), "xxx.bias'")) << calls.mismatch();
}

TEST(Tag, NamesThatFindNoRoomStillCountForTheComparison) {
  std::vector<std::string> names(200, std::string(100, 'n'));
  Calls calls;
  calls.add("h.0", names);
  names.back() = "other";
  calls.add("h.0", names);
  EXPECT_FALSE(tags_agree(calls.tags));
  EXPECT_LE(calls.words[0].bytes().size(), CallWords::kMaxBytes);
  EXPECT_LT(calls.words[0].tensors().size(), 200U);
  // A short name behind those that were left out must not be taken for an earlier tensor's.
  EXPECT_EQ(calls.words[1].tensors().size(), calls.words[0].tensors().size());
  EXPECT_FALSE(has(calls.mismatch(), "the first tensor that differs")) << calls.mismatch();
}

TEST(Tag, WordsSurviveTheJourney) {
  CallWords words({"h.0", ""});
  words.add_tensor("a");
  words.add_tensor("b");
  const CallWords arrived = CallWords::from_bytes(words.bytes());
  EXPECT_EQ(arrived.unit(), "h.0");
  EXPECT_EQ(arrived.parameter(), "");
  EXPECT_EQ(arrived.tensors(), (std::vector<std::string_view>{"a", "b"}));
}

TEST(Tag, WithoutWordsTheCallsAreStillNamed) {
  Calls calls;
  calls.add("h.0", {"a"});
  calls.add("h.0", {"a", "b"});
  const std::string text = find_mismatch(calls.tags, {}, calls.world_ranks).value_or("");
  EXPECT_TRUE(has(text, "rank 11 called all_gather #5 (2 tensors")) << text;
  EXPECT_TRUE(has(text, "where rank 10 called all_gather #5 (1 tensor,")) << text;
}

}  // namespace
}  // namespace tessera::comm
