// Which trace a pass follows, where it switches, and what is foreseen.
#include "tessera/coordinator/trace_book.h"

#include <random>

#include <gtest/gtest.h>

#include "tessera/core/error.h"

namespace tessera::coordinator {
namespace {

using Move = TraceBook::Move;

Use f(UnitId unit) { return {unit, Phase::kForward}; }
Use b(UnitId unit) { return {unit, Phase::kBackward}; }
Use e(UnitId unit) { return {unit, Phase::kInference}; }

using Moves = std::vector<Move>;

// As the coordinator does where each use ends before the next begins.
Moves run(TraceBook& book, const std::vector<Use>& uses) {
  Moves moves;
  for (const Use& use : uses) {
    if (book.is_root(use)) {
      book.end_pass(false);
    }
    moves.push_back(book.advance(use));
  }
  return moves;
}

const std::vector<Use> kTrain = {f(0), f(1), f(2), b(2), b(1), b(0)};
const std::vector<Use> kEval = {e(0), e(1), e(2)};
const Moves kSixFollowed(6, Move::kFollowed);

TEST(TraceBook, RecordsTheFirstStepAndFollowsItFromThenOn) {
  TraceBook book;
  EXPECT_EQ(book.mode(), TraceMode::kRecord);
  EXPECT_EQ(run(book, kTrain), Moves(6, Move::kRecorded));
  book.end_pass(true);
  EXPECT_EQ(book.mode(), TraceMode::kComplete) << "known before the next step begins";
  for (int step = 0; step < 3; ++step) {
    EXPECT_EQ(book.position(), 0U);
    EXPECT_EQ(run(book, kTrain), kSixFollowed);
    book.end_pass(true);
  }
  EXPECT_EQ(book.num_traces(), 1U);
}

TEST(TraceBook, MicroBatchesOfAStepAreOnePass) {
  TraceBook book;
  for (int step = 0; step < 3; ++step) {
    const Moves first = run(book, kTrain);
    const Moves second = run(book, kTrain);
    EXPECT_EQ(first, Moves(6, step == 0 ? Move::kRecorded : Move::kFollowed));
    EXPECT_EQ(second, first);
    EXPECT_EQ(book.position(), 12U);
    book.end_pass(true);
    EXPECT_EQ(book.num_traces(), 1U);
  }
  // One micro-batch less: the pass ends early. One more: a miss where the end was expected.
  EXPECT_EQ(run(book, kTrain), kSixFollowed);
  book.end_pass(true);
  run(book, kTrain);
  run(book, kTrain);
  EXPECT_EQ(run(book, kTrain)[0], Move::kMissed);
}

TEST(TraceBook, TrainingAndEvaluationInTurnAreForeseen) {
  TraceBook book;
  for (int round = 0; round < 4; ++round) {
    const Moves train = run(book, kTrain);
    book.end_pass(true);
    const Moves first = run(book, kEval);
    const Moves second = run(book, kEval);
    if (round >= 2) {
      EXPECT_EQ(train, kSixFollowed) << round;
      EXPECT_EQ(first, Moves(3, Move::kFollowed)) << round;
      EXPECT_EQ(second, Moves(3, Move::kFollowed)) << round;
      EXPECT_FALSE(book.expected_next()->is_step);
    }
  }
  EXPECT_EQ(book.num_traces(), 2U);
}

TEST(TraceBook, BranchesInTurnAreForeseenAndOthersAreFoundAtTheBranch) {
  const std::vector<Use> left = {f(0), f(1), f(3), b(3), b(1), b(0)};
  const std::vector<Use> right = {f(0), f(2), f(3), b(3), b(2), b(0)};
  TraceBook book;
  for (int step = 0; step < 8; ++step) {
    const Moves moves = run(book, step % 2 == 0 ? left : right);
    book.end_pass(true);
    if (step >= 4) {
      EXPECT_EQ(moves, kSixFollowed) << step;
    }
  }
  // Out of turn: one switch, and what follows is known again.
  const Moves moves = run(book, right);
  EXPECT_EQ(moves, (Moves{Move::kFollowed, Move::kSwitched, Move::kFollowed, Move::kFollowed,
                          Move::kFollowed, Move::kFollowed}));
  EXPECT_EQ(*book.expected_use(), f(1));
}

TEST(TraceBook, AnOrderThatWasMissedIsKnownTheNextTime) {
  TraceBook book;
  run(book, kTrain);
  book.end_pass(true);
  EXPECT_EQ(run(book, {f(0), f(2), b(2), b(0)}),
            (Moves{Move::kFollowed, Move::kMissed, Move::kRecorded, Move::kRecorded}));
  EXPECT_EQ(book.mode(), TraceMode::kInvalid);
  EXPECT_EQ(*book.expected_use(), f(1));
  book.end_pass(true);
  run(book, kTrain);
  book.end_pass(true);
  EXPECT_EQ(run(book, {f(0), f(2), b(2), b(0)})[1], Move::kFollowed)
      << "it came after that one before";
}

TEST(TraceBook, SharedBlocksAndTwoForwardsAreOnePass) {
  TraceBook book;
  const std::vector<Use> uses = {f(0), f(0), f(1), f(0), f(0), f(1), b(1), b(0), b(1), b(0)};
  run(book, uses);
  book.end_pass(true);
  EXPECT_EQ(run(book, uses), Moves(uses.size(), Move::kFollowed));
  book.end_pass(true);
  EXPECT_EQ(book.num_traces(), 1U);
}

TEST(TraceBook, AnEndlessEvaluationStaysSmall) {
  TraceBook book;
  for (int i = 0; i < 5000; ++i) {
    run(book, kEval);
  }
  EXPECT_EQ(book.num_traces(), 1U);
  EXPECT_EQ(book.position(), 3U);
}

TEST(TraceBook, KeepsTheTracesThatWereSeenLast) {
  TraceBook book(3);
  std::vector<std::vector<Use>> traces;
  for (UnitId i = 0; i < 5; ++i) {
    traces.push_back({f(0), f(1 + i), b(1 + i), b(0)});
    run(book, traces.back());
    book.end_pass(true);
    EXPECT_LE(book.num_traces(), 3U);
  }
  EXPECT_NE(run(book, traces[3])[1], Move::kMissed);
  book.end_pass(true);
  EXPECT_EQ(run(book, traces[0])[1], Move::kMissed);
}

TEST(TraceBook, NotesWhichForwardsRunInsideOthers) {
  TraceBook book;
  book.advance(f(0));
  book.advance(f(1));
  book.note_end(1);
  book.advance(f(2));
  book.note_end(2);
  book.note_end(0);
  const TraceId id = book.end_pass(true);
  EXPECT_EQ(book.trace(id).open_until, (std::vector<std::uint32_t>{3, 2, 3}));
}

TEST(TraceBook, AForgottenPassLeavesNothingBehind) {
  TraceBook book;
  run(book, kTrain);
  book.end_pass(true);
  run(book, {f(0), f(1)});
  book.forget_pass();
  EXPECT_EQ(book.position(), 0U);
  EXPECT_EQ(book.num_traces(), 1U);
  EXPECT_EQ(run(book, kTrain)[0], Move::kSwitched) << "found by its first use";
  EXPECT_THROW(std::ignore = book.trace(77), InternalError);
}

// Whatever comes, in whatever order: two books that see the same uses are in the same state.
TEST(TraceBook, IsAFunctionOfTheUses) {
  std::mt19937 random(5);
  TraceBook left(4);
  TraceBook right(4);
  for (int i = 0; i < 20000; ++i) {
    const Use use{static_cast<UnitId>(random() % 3), static_cast<Phase>(random() % 3)};
    const bool ends = random() % 7 == 0;
    for (TraceBook* book : {&left, &right}) {
      if (book->is_root(use)) {
        book->end_pass(false);
      }
    }
    ASSERT_EQ(left.advance(use), right.advance(use));
    if (ends) {
      ASSERT_EQ(left.end_pass(true), right.end_pass(true));
    }
    ASSERT_EQ(left.following(), right.following());
    ASSERT_LE(left.num_traces(), 4U);
    ASSERT_EQ(left.following() != kNoTrace, left.mode() == TraceMode::kComplete);
  }
}

}  // namespace
}  // namespace tessera::coordinator
