#include "tessera/device/pending.h"

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/device/device_support.h"

namespace tessera::device {
namespace {

using std::chrono::nanoseconds;

std::string message_of(const Pending& pending) {
  try {
    pending.wait();
  } catch (const Error& error) {
    return error.what();
  }
  return "no failure";
}

TEST(Pending, IsDoneWhenThereIsNothingToWaitFor) {
  const Pending nothing;
  EXPECT_TRUE(nothing.done());
  EXPECT_TRUE(nothing.wait_for(nanoseconds(0)));
  nothing.wait();
  EXPECT_TRUE(Pending::all({}).done());
  EXPECT_EQ(Pending::all({Pending(), Pending()}).state(), nullptr);
}

TEST(Pending, ThatFailedThrowsTheSameErrorEveryTime) {
  const Pending failed = Pending::failed(io_error("disk 3 is full"));
  EXPECT_TRUE(failed.done());
  EXPECT_EQ(message_of(failed), "disk 3 is full");
  EXPECT_EQ(message_of(failed), "disk 3 is full");
  EXPECT_THROW(failed.wait_for(nanoseconds(0)), IoError);
}

TEST(Pending, NeedsAnErrorToFailWith) {
  EXPECT_THROW((void)Pending::failed(nullptr), InternalError);
  Completion completion;
  EXPECT_THROW(completion.fail(nullptr), InternalError);
}

TEST(PendingAll, IsDoneOnlyWhenAllPartsAre) {
  const auto first = std::make_shared<Completion>();
  const auto second = std::make_shared<Completion>();
  const Pending all = Pending::all({Pending(first), Pending(), Pending(second)});
  EXPECT_FALSE(all.done());
  second->succeed();
  EXPECT_FALSE(all.done());
  EXPECT_FALSE(all.wait_for(nanoseconds(0)));
  first->succeed();
  EXPECT_TRUE(all.done());
  EXPECT_TRUE(all.wait_for(nanoseconds(0)));
}

TEST(PendingAll, ThrowsTheFailureOfTheFirstInTheListNotInTime) {
  const auto first = std::make_shared<Completion>();
  const auto second = std::make_shared<Completion>();
  const Pending all = Pending::all({Pending(first), Pending(second)});
  second->fail(io_error("second"));
  first->fail(io_error("first"));
  EXPECT_EQ(message_of(all), "first");
  EXPECT_THROW(all.wait_for(nanoseconds(0)), IoError);
}

TEST(PendingAll, WaitsForTheOtherPartsBeforeItThrows) {
  const auto slow = std::make_shared<Completion>();
  const Pending all = Pending::all({Pending::failed(io_error("early")), Pending(slow)});
  // A limit that ends while a part still runs is no failure: memory is still in use.
  EXPECT_FALSE(all.wait_for(nanoseconds(0)));
  std::atomic<bool> is_fulfilled{false};
  std::thread worker([&] {
    is_fulfilled = true;
    slow->succeed();
  });
  EXPECT_EQ(message_of(all), "early");
  EXPECT_TRUE(is_fulfilled);
  worker.join();
}

TEST(PendingAll, OfOnePartIsThatPart) {
  const auto part = std::make_shared<Completion>();
  EXPECT_EQ(Pending::all({Pending(), Pending(part)}).state(), part);
}

TEST(PendingAll, ShowsItsPartsToDevices) {
  const auto first = std::make_shared<Completion>();
  const auto second = std::make_shared<Completion>();
  const Pending all = Pending::all({Pending(first), Pending(second)});
  ASSERT_EQ(all.state()->parts().size(), 2U);
  EXPECT_EQ(all.state()->parts()[1].state(), second);
  EXPECT_TRUE(first->parts().empty());
}

TEST(PendingAll, GivesAllPartsOneCommonLimit) {
  // Each part takes its whole limit and no more; a limit per part would take three times as long.
  class UsesItsLimit final : public PendingState {
   public:
    explicit UsesItsLimit(std::vector<nanoseconds>& limits) : limits_(limits) {}
    bool done() override { return false; }
    void wait() override {}
    bool wait_for(nanoseconds limit) override {
      limits_.push_back(limit);
      return true;
    }

   private:
    std::vector<nanoseconds>& limits_;
  };
  std::vector<nanoseconds> limits;
  std::vector<Pending> parts;
  for (int i = 0; i < 3; ++i) {
    parts.emplace_back(std::make_shared<UsesItsLimit>(limits));
  }
  const nanoseconds limit = std::chrono::hours(1);
  EXPECT_TRUE(Pending::all(parts).wait_for(limit));
  ASSERT_EQ(limits.size(), 3U);
  EXPECT_LE(limits[0], limit);
  EXPECT_LE(limits[1], limits[0]);
  EXPECT_LE(limits[2], limits[1]);
}

TEST(Completion, TakesTheLongestLimitThereIs) {
  const auto completion = std::make_shared<Completion>();
  std::thread worker([&] { completion->succeed(); });
  EXPECT_TRUE(Pending(completion).wait_for(nanoseconds::max()));
  worker.join();
}

TEST(Completion, WakesEveryWaiter) {
  const auto completion = std::make_shared<Completion>();
  std::atomic<int> num_failures{0};
  std::vector<std::thread> waiters;
  for (int i = 0; i < 4; ++i) {
    waiters.emplace_back([&] {
      try {
        completion->wait();
      } catch (const IoError&) {
        ++num_failures;
      }
    });
  }
  completion->fail(io_error("gone"));
  for (std::thread& waiter : waiters) {
    waiter.join();
  }
  EXPECT_EQ(num_failures, 4);
}

TEST(Completion, RunsCallbacksOnceWhetherAddedBeforeOrAfter) {
  Completion completion;
  int before = 0;
  int after = 0;
  completion.when_done([&] { ++before; });
  EXPECT_EQ(before, 0);
  completion.succeed();
  completion.when_done([&] { ++after; });
  EXPECT_EQ(before, 1);
  EXPECT_EQ(after, 1);
}

TEST(Completion, RunsCallbacksAfterFailuresToo) {
  Completion completion;
  bool is_done = false;
  completion.when_done([&] { is_done = completion.done(); });
  completion.fail(io_error("gone"));
  EXPECT_TRUE(is_done);
}

TEST(Completion, IsFulfilledOnlyOnce) {
  Completion completion;
  completion.succeed();
  EXPECT_THROW(completion.succeed(), InternalError);
  EXPECT_THROW(completion.fail(io_error("late")), InternalError);
  completion.wait();
}

}  // namespace
}  // namespace tessera::device
