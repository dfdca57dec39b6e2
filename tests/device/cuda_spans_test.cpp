// The times of a GPU's work as spans, on the clock of the host's. Needs a GPU; what can be tested
// without one is in span_track_test.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/clock.h"
#include "tessera/core/error.h"
#include "tessera/core/spans.h"
#include "tessera/device/device_cuda.h"
#include "testing/manual_clock.h"

namespace tessera::device {
namespace {

constexpr std::size_t kBytes = std::size_t{1} << 20;
// Far above the error of an anchor, far below what a wrong unit or a wrong clock would give.
constexpr std::int64_t kClockErrorNs = 1'000'000;

class CudaSpans : public ::testing::Test {
 protected:
  void SetUp() override {
    if (num_cuda_devices() == 0) {
      GTEST_SKIP() << "no GPU: " << cuda_description();
    }
    device_ = make(spans_);
  }

  static std::unique_ptr<Device> make(Spans& spans) {
    CudaDeviceOptions options;
    options.spans = &spans;
    return make_cuda_device(options);
  }

  Stream& stream(StreamKind kind) { return device_->stream(kind); }

  // On the track of a stream, in the order of their ends.
  std::vector<Span> on(StreamKind kind) {
    const TrackId track = spans_.add_track(detail::concat("gpu ", to_string(kind)));
    std::vector<Span> spans = spans_.snapshot();
    std::erase_if(spans, [track](const Span& span) { return span.track != track; });
    return spans;
  }

  static std::vector<std::string> names(const std::vector<Span>& spans) {
    std::vector<std::string> texts;
    for (const Span& span : spans) {
      texts.emplace_back(span.name);
    }
    return texts;
  }

  using Names = std::vector<std::string>;

  SteadyClock clock_;
  Spans spans_{clock_, 4096};
  std::unique_ptr<Device> device_;
};

TEST_F(CudaSpans, NamesWhatRanOnEachStreamWithItsBytes) {
  const Memory host = device_->allocate(Tier::kPinned, kBytes, Role::kOther);
  const Memory up = device_->allocate(Tier::kDevice, kBytes, Role::kOther);
  const Memory beside = device_->allocate(Tier::kDevice, kBytes, Role::kOther);
  (void)device_->start_fill(host.data(), 1, kBytes, stream(StreamKind::kRead));
  (void)device_->start_copy(up.data(), host.data(), kBytes, stream(StreamKind::kRead));
  (void)device_->start_copy(beside.data(), up.data(), kBytes, stream(StreamKind::kRead));
  (void)device_->start_fill(beside.data(), 2, kBytes / 2, stream(StreamKind::kRead));
  (void)stream(StreamKind::kRead).record();  // no work, no span
  stream(StreamKind::kRead).synchronize();
  (void)device_->start_copy(host.data(), up.data(), kBytes, stream(StreamKind::kWrite));
  (void)stream(StreamKind::kWrite).enqueue([] {});
  stream(StreamKind::kWrite).synchronize();
  device_->collect_spans();

  const std::vector<Span> read = on(StreamKind::kRead);
  EXPECT_EQ(names(read), (Names{"fill", "copy H2D", "copy", "fill"}));
  EXPECT_EQ(names(on(StreamKind::kWrite)), (Names{"copy D2H", "host function"}));
  EXPECT_TRUE(on(StreamKind::kGather).empty());
  ASSERT_EQ(read.size(), 4U);
  EXPECT_EQ(read[1].args.bytes, static_cast<std::int64_t>(kBytes));
  EXPECT_EQ(read[3].args.bytes, static_cast<std::int64_t>(kBytes / 2));
}

// Work that knows when it began and ended by the host's clock, and takes long enough for a wrong
// unit or a wrong origin to show.
TEST_F(CudaSpans, AreOnTheClockOfTheHost) {
  struct Times {
    std::int64_t begin_ns = 0;
    std::int64_t end_ns = 0;
  };
  std::vector<Times> ran(3);
  for (Times& times : ran) {
    (void)stream(StreamKind::kReduce).enqueue([this, &times] {
      times.begin_ns = spans_.now_ns();
      do {
        times.end_ns = spans_.now_ns();
      } while (times.end_ns - times.begin_ns < 10 * kClockErrorNs);
    });
  }
  stream(StreamKind::kReduce).synchronize();
  const std::int64_t after_ns = spans_.now_ns();
  device_->collect_spans();
  const std::vector<Span> spans = on(StreamKind::kReduce);
  ASSERT_EQ(spans.size(), ran.size());
  for (std::size_t i = 0; i < ran.size(); ++i) {
    EXPECT_LE(spans[i].start_ns, ran[i].begin_ns + kClockErrorNs);
    EXPECT_GE(spans[i].end_ns, ran[i].end_ns - kClockErrorNs);
    EXPECT_LE(spans[i].end_ns, after_ns + kClockErrorNs);
    if (i > 0) {  // in the order of the stream
      EXPECT_GE(spans[i].start_ns, ran[i - 1].end_ns - kClockErrorNs);
    }
  }
}

// The host's clock goes ahead of the GPU's by hours: as drift would, only more.
TEST_F(CudaSpans, FollowAClockThatDrifts) {
  constexpr std::int64_t kHour = 3'600'000'000'000;
  ManualClock clock;
  Spans spans(clock, 16);
  const auto device = make(spans);
  for (int hour = 0; hour < 3; ++hour) {
    device->stream(StreamKind::kRead).enqueue([] {}).wait();
    device->collect_spans();
    clock.advance_ns(kHour);
  }
  const std::vector<Span> all = spans.snapshot();
  ASSERT_EQ(all.size(), 3U);
  for (std::int64_t hour = 0; hour < 3; ++hour) {
    const Span& span = all[static_cast<std::size_t>(hour)];
    EXPECT_GT(span.start_ns, hour * kHour - kHour / 2) << hour;
    EXPECT_LT(span.end_ns, hour * kHour + kHour / 2) << hour;
    EXPECT_LE(span.start_ns, span.end_ns) << hour;
  }
}

TEST_F(CudaSpans, ShowThatAWaitWasKept) {
  const Memory host = device_->allocate(Tier::kPinned, 64 * kBytes, Role::kOther);
  const Memory full = device_->allocate(Tier::kDevice, 64 * kBytes, Role::kOther);
  Stream& gather = stream(StreamKind::kGather);
  Stream& compute = stream(StreamKind::kCompute);
  compute.wait(device_->start_copy(full.data(), host.data(), 64 * kBytes, gather));
  compute.begin_span("forward");
  (void)device_->start_fill(full.data(), 0, kBytes, compute);
  compute.end_span();
  compute.synchronize();
  device_->collect_spans();
  const std::vector<Span> copies = on(StreamKind::kGather);
  const std::vector<Span> computed = on(StreamKind::kCompute);
  ASSERT_EQ(names(copies), (Names{"copy H2D"}));
  ASSERT_EQ(names(computed), (Names{"fill", "forward"}));
  EXPECT_GT(copies[0].end_ns, copies[0].start_ns);
  EXPECT_GE(computed[1].start_ns + kClockErrorNs / 10, copies[0].end_ns)
      << "the copy takes a millisecond: without the wait they would begin together";
  EXPECT_LE(computed[1].start_ns, computed[0].start_ns);
  EXPECT_GE(computed[1].end_ns, computed[0].end_ns);
}

TEST_F(CudaSpans, AreCollectedWithoutWaitingForWhatStillRuns) {
  const auto gate = std::make_shared<Completion>();
  const Pending done = stream(StreamKind::kRead).enqueue([] {});
  const Pending held = stream(StreamKind::kRead).enqueue([gate] { Pending(gate).wait(); });
  done.wait();
  device_->collect_spans();  // would not return if it waited
  EXPECT_EQ(on(StreamKind::kRead).size(), 1U) << "what is done is there, what runs is not";
  gate->succeed();
  held.wait();
  stream(StreamKind::kRead).synchronize();
  device_->collect_spans();
  EXPECT_EQ(on(StreamKind::kRead).size(), 2U);
}

TEST_F(CudaSpans, AreAllThereWhenTheDeviceIsGone) {
  {
    const Memory memory = device_->allocate(Tier::kDevice, kBytes, Role::kOther);
    for (int i = 0; i < 500; ++i) {
      (void)device_->start_fill(memory.data(), 0, kBytes, stream(StreamKind::kGather));
    }
    stream(StreamKind::kGather).synchronize();
  }
  device_.reset();
  const std::vector<Span> fills = on(StreamKind::kGather);
  ASSERT_EQ(fills.size(), 500U);
  for (std::size_t i = 1; i < fills.size(); ++i) {
    EXPECT_GE(fills[i].start_ns, fills[i - 1].end_ns) << "spans of one stream must not overlap";
  }
}

TEST_F(CudaSpans, SurviveWorkThatFails) {
  Stream& read = stream(StreamKind::kRead);
  (void)read.enqueue([] { throw IoError("disk"); });
  (void)read.enqueue([] {});
  EXPECT_THROW(read.synchronize(), IoError);
  device_->collect_spans();
  EXPECT_EQ(names(on(StreamKind::kRead)), (Names{"host function", "host function"}));
}

TEST_F(CudaSpans, RefuseAnEndWithoutABegin) {
  EXPECT_THROW(stream(StreamKind::kCompute).end_span(), InternalError);
}

TEST_F(CudaSpans, AreNotTakenWhereTracingIsOff) {
  Spans off(clock_, 0);
  const auto device = make(off);
  device->stream(StreamKind::kCompute).begin_span("forward");
  device->stream(StreamKind::kCompute).end_span();
  device->stream(StreamKind::kRead).enqueue([] {}).wait();
  device->collect_spans();
  EXPECT_EQ(off.num_recorded(), 0U);
}

}  // namespace
}  // namespace tessera::device
