#include "tessera/coordinator/access_trace.h"

#include <gtest/gtest.h>

namespace tessera::coordinator {
namespace {

constexpr Use kFirst{0, Phase::kForward};
constexpr Use kSecond{1, Phase::kForward};
constexpr Use kSecondBack{1, Phase::kBackward};

AccessTrace recorded() {
  AccessTrace trace;
  trace.advance(kFirst);
  trace.advance(kSecond);
  trace.advance(kSecondBack);
  trace.end_step();
  return trace;
}

TEST(AccessTrace, RecordsTheFirstStepAndComparesTheNext) {
  AccessTrace trace;
  EXPECT_EQ(trace.mode(), TraceMode::kRecord);
  EXPECT_TRUE(trace.advance(kFirst));
  EXPECT_EQ(trace.position(), 1U);
  EXPECT_TRUE(trace.advance(kSecond));
  trace.end_step();
  EXPECT_EQ(trace.mode(), TraceMode::kComplete);
  EXPECT_EQ(trace.position(), 0U);
  EXPECT_TRUE(trace.advance(kFirst));
  EXPECT_TRUE(trace.advance(kSecond));
  EXPECT_EQ(trace.uses(), (std::vector<Use>{kFirst, kSecond}));
}

TEST(AccessTrace, AStepWithoutUsesCompletesNothing) {
  AccessTrace trace;
  trace.end_step();
  EXPECT_EQ(trace.mode(), TraceMode::kRecord);
}

TEST(AccessTrace, AStepMayEndEarly) {
  AccessTrace trace = recorded();
  EXPECT_TRUE(trace.advance(kFirst));
  trace.end_step();
  EXPECT_EQ(trace.mode(), TraceMode::kComplete);
  EXPECT_EQ(trace.position(), 0U);
  EXPECT_EQ(trace.uses().size(), 3U);
}

TEST(AccessTrace, AnotherUseDepartsAndTheNextStepRecords) {
  AccessTrace trace = recorded();
  EXPECT_TRUE(trace.advance(kFirst));
  EXPECT_FALSE(trace.advance(kSecondBack));
  EXPECT_EQ(trace.mode(), TraceMode::kInvalid);
  EXPECT_EQ(trace.position(), 1U);
  EXPECT_FALSE(trace.advance(kSecond)) << "a step that departed does not come back";
  EXPECT_EQ(trace.position(), 1U);
  trace.end_step();
  EXPECT_EQ(trace.mode(), TraceMode::kRecord);
  EXPECT_TRUE(trace.uses().empty());
  EXPECT_TRUE(trace.advance(kSecond));
  trace.end_step();
  EXPECT_EQ(trace.uses(), std::vector<Use>{kSecond});
}

TEST(AccessTrace, AUseBeyondTheEndDeparts) {
  AccessTrace trace = recorded();
  for (const Use& use : std::vector<Use>(trace.uses())) {
    EXPECT_TRUE(trace.advance(use));
  }
  EXPECT_FALSE(trace.advance(kFirst));
  EXPECT_EQ(trace.mode(), TraceMode::kInvalid);
  EXPECT_EQ(trace.position(), 3U);
}

TEST(AccessTrace, AnInvalidatedStepIsForgotten) {
  AccessTrace trace;
  trace.advance(kFirst);
  trace.invalidate();
  EXPECT_EQ(trace.mode(), TraceMode::kInvalid);
  trace.end_step();
  EXPECT_EQ(trace.mode(), TraceMode::kRecord);
  EXPECT_TRUE(trace.uses().empty());
  EXPECT_EQ(trace.position(), 0U);
}

TEST(AccessTrace, ModesAndPhasesHaveNames) {
  EXPECT_EQ(to_string(TraceMode::kRecord), "record");
  EXPECT_EQ(to_string(TraceMode::kComplete), "complete");
  EXPECT_EQ(to_string(TraceMode::kInvalid), "invalid");
  EXPECT_EQ(to_string(Phase::kForward), "forward");
  EXPECT_EQ(to_string(Phase::kBackward), "backward");
}

}  // namespace
}  // namespace tessera::coordinator
