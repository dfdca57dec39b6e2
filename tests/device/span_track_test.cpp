// Marks become spans in the order of the stream, whenever their times are known.
#include "tessera/device/span_track.h"

#include <map>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "testing/manual_clock.h"

namespace tessera::device {
namespace {

// Events are numbers; a test says when the stream comes to them.
class FakeTimes final : public MarkTimes {
 public:
  void* take() { return &events_[events_.size()]; }
  void reach(void* event, std::int64_t time_ns) { reached_[event] = time_ns; }
  void fail() { is_failing_ = true; }
  std::size_t num_out() const { return events_.size() - num_given_back_; }

  std::optional<std::int64_t> time_ns(void* event) override {
    TESSERA_CHECK(!is_failing_, DeviceError, "the device is gone");
    const auto found = reached_.find(event);
    return found == reached_.end() ? std::nullopt : std::optional(found->second);
  }
  void give_back(void* event) noexcept override {
    reached_.erase(event);
    ++num_given_back_;
  }

 private:
  std::map<std::size_t, char> events_;  // addresses stay
  std::map<void*, std::int64_t> reached_;
  std::size_t num_given_back_ = 0;
  bool is_failing_ = false;
};

class SpanTrackTest : public ::testing::Test {
 protected:
  // An event that the stream reaches at this time; below zero: not yet.
  void* at(std::int64_t time_ns) {
    void* const event = times_.take();
    if (time_ns >= 0) {
      times_.reach(event, time_ns);
    }
    return event;
  }

  std::vector<std::string> recorded() const {
    std::vector<std::string> texts;
    for (const Span& span : spans_.snapshot()) {
      EXPECT_EQ(span.track, compute_);
      texts.push_back(detail::concat(span.name, " ", span.start_ns, "..", span.end_ns));
    }
    return texts;
  }

  using Texts = std::vector<std::string>;

  ManualClock clock_;
  Spans spans_{clock_, 16};
  const TrackId compute_ = spans_.add_track("gpu compute");
  FakeTimes times_;
  SpanTrack track_{spans_, "gpu compute", times_};
};

TEST_F(SpanTrackTest, RecordsASpanOnceBothEndsAreReached) {
  void* const last = at(-1);
  track_.begin(at(10), "copy H2D", {.bytes = 64});
  track_.end(last);
  track_.resolve();
  EXPECT_TRUE(recorded().empty());
  times_.reach(last, 30);
  track_.resolve();
  EXPECT_EQ(recorded(), (Texts{"copy H2D 10..30"}));
  EXPECT_EQ(spans_.snapshot()[0].args.bytes, 64);
  EXPECT_EQ(times_.num_out(), 0U);
}

TEST_F(SpanTrackTest, NestsAsTheMarksDo) {
  track_.begin(at(10), "forward", {});
  track_.begin(at(12), "kernel", {});
  track_.end(at(15));
  track_.begin(at(20), "copy", {});
  track_.end(at(22));
  EXPECT_EQ(track_.num_open(), 1U);
  track_.end(at(30));
  EXPECT_EQ(track_.num_open(), 0U);
  track_.resolve();
  EXPECT_EQ(recorded(), (Texts{"kernel 12..15", "copy 20..22", "forward 10..30"}));
}

TEST_F(SpanTrackTest, KeepsSpansThatAreStillOpenForLater) {
  track_.begin(at(10), "forward", {});
  track_.resolve();
  EXPECT_EQ(times_.num_out(), 0U) << "the event of a mark that is resolved is free again";
  track_.end(at(30));
  track_.resolve();
  EXPECT_EQ(recorded(), (Texts{"forward 10..30"}));
}

TEST_F(SpanTrackTest, DoesNotLookBeyondAMarkThatIsNotReached) {
  track_.begin(at(-1), "late", {});
  track_.end(at(20));
  track_.begin(at(21), "done", {});
  track_.end(at(22));
  track_.resolve();
  EXPECT_TRUE(recorded().empty());
  EXPECT_EQ(times_.num_out(), 4U);
}

// An anchor that is taken anew moves all later times a little.
TEST_F(SpanTrackTest, HoldsATimeThatGoesBackAtTheOneAhead) {
  track_.begin(at(10), "first", {});
  track_.end(at(20));
  track_.begin(at(18), "second", {});
  track_.end(at(19));
  track_.begin(at(25), "third", {});
  track_.end(at(26));
  track_.resolve();
  EXPECT_EQ(recorded(), (Texts{"first 10..20", "second 20..20", "third 25..26"}));
}

TEST_F(SpanTrackTest, ResolvesNoMoreMarksThanItIsAskedTo) {
  for (std::int64_t i = 0; i < 3; ++i) {
    track_.begin(at(10 * i), "kernel", {});
    track_.end(at(10 * i + 5));
  }
  track_.resolve(4);
  EXPECT_EQ(recorded(), (Texts{"kernel 0..5", "kernel 10..15"}));
  EXPECT_EQ(times_.num_out(), 2U);
}

TEST_F(SpanTrackTest, RefusesAnEndWithoutABegin) {
  void* const event = at(1);
  EXPECT_THROW(track_.end(event), InternalError);
  track_.begin(at(1), "kernel", {});
  track_.end(at(2));
  EXPECT_THROW(track_.end(event), InternalError);
}

TEST_F(SpanTrackTest, GivesEveryEventBackAfterAFailureAndAtItsEnd) {
  {
    SpanTrack track(spans_, "gpu read", times_);
    track.begin(at(1), "copy H2D", {});
    track.end(at(-1));
    times_.fail();
    EXPECT_THROW(track.resolve(), DeviceError);
    EXPECT_EQ(times_.num_out(), 2U);
  }
  EXPECT_EQ(times_.num_out(), 0U);
}

}  // namespace
}  // namespace tessera::device
