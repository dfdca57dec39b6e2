// The promises of device.h, kept by every Device.
#include "tests/device/device_contract.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/device/device_support.h"

namespace tessera::device {
namespace {

constexpr std::size_t kMib = std::size_t{1} << 20;

void expect_io_error(const Pending& pending, const std::string& text) {
  try {
    pending.wait();
    ADD_FAILURE() << "expected IoError: " << text;
  } catch (const IoError& error) {
    EXPECT_EQ(std::string(error.what()), text);
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, DeviceContract, ::testing::ValuesIn(all_devices()),
                         [](const auto& info) { return info.param.name; });

TEST_P(DeviceContract, HasAStreamOfEachKind) {
  for (const StreamKind kind : kAllStreams) {
    EXPECT_EQ(stream(kind).kind(), kind) << to_string(kind);
    EXPECT_EQ(&stream(kind), &stream(kind));
  }
  EXPECT_FALSE(device_->name().empty());
}

TEST_P(DeviceContract, RunsTheWorkOfOneStreamInOrder) {
  for (const StreamKind kind : kAllStreams) {
    std::vector<int> order;
    for (int i = 0; i < 100; ++i) {
      (void)stream(kind).enqueue([&order, i] { order.push_back(i); });
    }
    stream(kind).synchronize();
    std::vector<int> expected(100);
    std::iota(expected.begin(), expected.end(), 0);
    EXPECT_EQ(order, expected) << to_string(kind);
  }
}

TEST_P(DeviceContract, RecordsADoneEventOnAnEmptyStream) {
  for (const StreamKind kind : kAllStreams) {
    const Pending nothing = stream(kind).record();
    nothing.wait();
    EXPECT_TRUE(nothing.done());
    EXPECT_TRUE(nothing.wait_for(std::chrono::nanoseconds(0)));
    stream(kind).synchronize();
  }
}

TEST_P(DeviceContract, KeepsDoneWorkDone) {
  const Pending work = stream(StreamKind::kRead).enqueue([] {});
  EXPECT_TRUE(work.wait_for(std::chrono::nanoseconds::max()));
  EXPECT_TRUE(work.done());
  (void)stream(StreamKind::kRead).enqueue([] {});
  EXPECT_TRUE(work.done());
  work.wait();
}

TEST_P(DeviceContract, OrdersStreamsBehindOneAnother) {
  std::vector<int> order;  // never two at a time, if the streams are ordered
  Pending last;
  for (int i = 0; i < 200; ++i) {
    Stream& next = stream(kAllStreams[(i * 7 / 3) % 5]);
    next.wait(last);
    (void)next.enqueue([&order, i] { order.push_back(i); });
    last = next.record();
  }
  last.wait();
  ASSERT_EQ(order.size(), 200U);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST_P(DeviceContract, OrdersAStreamBehindAListOfEvents) {
  int num_done = 0;
  int seen = 0;
  std::vector<Pending> parts;
  Pending last;
  for (const StreamKind kind : {StreamKind::kGather, StreamKind::kRead, StreamKind::kWrite}) {
    stream(kind).wait(last);
    last = stream(kind).enqueue([&num_done] { ++num_done; });
    parts.push_back(last);
  }
  stream(StreamKind::kReduce).wait(Pending::all(parts));
  stream(StreamKind::kReduce).enqueue([&] { seen = num_done; }).wait();
  EXPECT_EQ(seen, 3);
}

TEST_P(DeviceContract, OrdersAStreamBehindWorkOfAHostThread) {
  const auto arrived = std::make_shared<Completion>();
  int value = 0;
  int seen = 0;
  std::thread network([&] {
    value = 17;
    arrived->succeed();
  });
  stream(StreamKind::kGather).wait(Pending(arrived));
  stream(StreamKind::kGather).enqueue([&] { seen = value; }).wait();
  EXPECT_EQ(seen, 17);
  network.join();
}

TEST_P(DeviceContract, CopiesAnySizeBetweenAllKindsOfMemory) {
  for (const std::size_t bytes :
       {std::size_t{0}, std::size_t{1}, std::size_t{15}, std::size_t{4097}, 3 * kMib + 5}) {
    const Bytes expected = pattern(bytes, static_cast<std::uint32_t>(bytes));
    for (const Tier from_kind : kAllKinds) {
      const Memory from = upload(from_kind, expected);
      for (const Tier to_kind : kAllKinds) {
        const Memory to = device_->allocate(to_kind, bytes, Role::kOther);
        device_->start_copy(to.data(), from.data(), bytes, stream(StreamKind::kRead)).wait();
        EXPECT_EQ(download(to.data(), bytes), expected)
            << bytes << " bytes from " << to_string(from_kind) << " to " << to_string(to_kind);
      }
    }
  }
}

TEST_P(DeviceContract, CopiesMisalignedRangesAndNothingBesideThem) {
  constexpr std::size_t kWhole = 1000;
  const Memory from = upload(Tier::kPinned, pattern(kWhole, 1));
  for (const std::size_t shift : {1U, 2U, 3U, 7U, 13U}) {
    const Memory to = upload(Tier::kDevice, pattern(kWhole, 2));
    const std::size_t bytes = 500 + shift;
    device_
        ->start_copy(to.data() + shift, from.data() + 2 * shift + 1, bytes,
                     stream(StreamKind::kGather))
        .wait();
    Bytes expected = pattern(kWhole, 2);
    const Bytes source = pattern(kWhole, 1);
    std::copy_n(source.begin() + static_cast<std::ptrdiff_t>(2 * shift + 1), bytes,
                expected.begin() + static_cast<std::ptrdiff_t>(shift));
    EXPECT_EQ(download(to.data(), kWhole), expected) << "shift " << shift;
  }
}

TEST_P(DeviceContract, CarriesBytesThroughAllStreamsAndTiers) {
  const Bytes expected = pattern(2 * kMib + 3, 9);
  const std::size_t bytes = expected.size();
  const Memory host = upload(Tier::kHost, expected);
  const Memory pinned = device_->allocate(Tier::kPinned, bytes, Role::kStaging);
  const Memory full = device_->allocate(Tier::kDevice, bytes, Role::kFull);
  const Memory down = device_->allocate(Tier::kPinned, bytes, Role::kStaging);
  const Memory back = device_->allocate(Tier::kHost, bytes, Role::kShard);
  Stream& read = stream(StreamKind::kRead);
  Stream& gather = stream(StreamKind::kGather);
  Stream& write = stream(StreamKind::kWrite);
  Stream& reduce = stream(StreamKind::kReduce);
  gather.wait(device_->start_copy(pinned.data(), host.data(), bytes, read));
  write.wait(device_->start_copy(full.data(), pinned.data(), bytes, gather));
  reduce.wait(device_->start_copy(down.data(), full.data(), bytes, write));
  stream(StreamKind::kCompute).wait(device_->start_copy(back.data(), down.data(), bytes, reduce));
  EXPECT_EQ(download(back.data(), bytes), expected);
}

TEST_P(DeviceContract, KeepsTheOrderOfCopiesThatReuseBytesOnOneStream) {
  constexpr std::size_t kBytes = 5001;
  for (const StreamKind kind : kAllStreams) {
    const Memory a = upload(Tier::kDevice, pattern(kBytes, 1));
    const Memory b = upload(Tier::kDevice, pattern(kBytes, 2));
    const Memory c = upload(Tier::kPinned, pattern(kBytes, 3));
    (void)device_->start_copy(b.data(), a.data(), kBytes, stream(kind));
    (void)device_->start_copy(a.data(), c.data(), kBytes, stream(kind));
    (void)device_->start_copy(c.data(), b.data(), kBytes, stream(kind));
    (void)device_->start_fill(b.data(), 9, kBytes, stream(kind));
    stream(kind).synchronize();
    EXPECT_EQ(download(a.data(), kBytes), pattern(kBytes, 3)) << to_string(kind);
    EXPECT_EQ(download(b.data(), kBytes), Bytes(kBytes, 9)) << to_string(kind);
    EXPECT_EQ(download(c.data(), kBytes), pattern(kBytes, 1)) << to_string(kind);
  }
}

// The source is written by work in the stream that takes its time: a copy that read it when it was
// enqueued would find zeros.
TEST_P(DeviceContract, ReadsSourcesWhenTheStreamComesThere) {
  for (const Tier tier : {Tier::kHost, Tier::kPinned}) {
    const Memory source = upload(tier, Bytes(kMib, 0));
    const Memory full = upload(Tier::kDevice, Bytes(kMib, 0));
    const Memory back = upload(tier, Bytes(kMib, 0));
    Bytes seen;
    Stream& read = stream(StreamKind::kRead);
    Stream& gather = stream(StreamKind::kGather);
    gather.wait(read.enqueue([&source] {
      const Bytes bytes = pattern(kMib, 6);
      std::memcpy(source.data(), bytes.data(), kMib);
    }));
    (void)device_->start_copy(full.data(), source.data(), kMib, gather);
    (void)device_->start_copy(back.data(), full.data(), kMib, gather);
    gather
        .enqueue([&] {
          const auto* const data = reinterpret_cast<const std::uint8_t*>(back.data());
          seen.assign(data, data + kMib);
        })
        .wait();
    EXPECT_EQ(seen, pattern(kMib, 6)) << to_string(tier);
  }
}

TEST_P(DeviceContract, FillsAllKindsOfMemoryAndNothingBeside) {
  for (const Tier tier : kAllKinds) {
    for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{777}}) {
      const Memory memory = upload(tier, pattern(1000, 3));
      device_->start_fill(memory.data() + 5, 0xab, bytes, stream(StreamKind::kReduce)).wait();
      Bytes expected = pattern(1000, 3);
      std::fill_n(expected.begin() + 5, bytes, std::uint8_t{0xab});
      EXPECT_EQ(download(memory.data(), 1000), expected) << to_string(tier) << " " << bytes;
    }
  }
  device_->start_fill(nullptr, 1, 0, stream(StreamKind::kRead)).wait();
  device_->start_copy(nullptr, nullptr, 0, stream(StreamKind::kRead)).wait();
}

TEST_P(DeviceContract, ThrowsAFailureFromItsPendingAndFromAllThatFollows) {
  for (const StreamKind kind : kAllStreams) {
    Stream& failing = stream(kind);
    const Pending before = failing.enqueue([] {});
    const Pending failed = failing.enqueue([] { throw IoError("disk 7 is gone"); });
    const Pending later = failing.enqueue([] {});
    std::uint8_t byte = 0;
    const Pending filled = device_->start_fill(&byte, 1, 1, failing);
    const Pending recorded = failing.record();
    before.wait();
    for (int i = 0; i < 2; ++i) {
      expect_io_error(failed, "disk 7 is gone");
      expect_io_error(later, "disk 7 is gone");
      expect_io_error(filled, "disk 7 is gone");
      expect_io_error(recorded, "disk 7 is gone");
      EXPECT_THROW(failing.synchronize(), IoError);
    }
    EXPECT_TRUE(failed.done());
    expect_io_error(failing.record(), "disk 7 is gone");
    before.wait();
  }
}

TEST_P(DeviceContract, KeepsTheFirstFailureOfAStream) {
  Stream& failing = stream(StreamKind::kWrite);
  (void)failing.enqueue([] { throw IoError("first"); });
  const Pending second = failing.enqueue([] { throw IoError("second"); });
  expect_io_error(second, "first");
}

TEST_P(DeviceContract, DoesNotRunHostWorkBehindAFailure) {
  Stream& failing = stream(StreamKind::kRead);
  bool has_run = false;
  (void)failing.enqueue([] { throw IoError("gone"); });
  const Pending later = failing.enqueue([&] { has_run = true; });
  stream(StreamKind::kWrite).wait(later);
  expect_io_error(stream(StreamKind::kWrite).enqueue([&] { has_run = true; }), "gone");
  EXPECT_FALSE(has_run);
}

TEST_P(DeviceContract, CarriesAFailureAlongWaitsAndNowhereElse) {
  Stream& gather = stream(StreamKind::kGather);
  Stream& read = stream(StreamKind::kRead);
  Stream& write = stream(StreamKind::kWrite);
  const Pending early = read.enqueue([] {});
  const Pending failed = gather.enqueue([] { throw IoError("gone"); });
  read.wait(failed);
  const Pending behind = read.record();
  write.wait(behind);
  const Pending far_behind = write.enqueue([] {});
  expect_io_error(far_behind, "gone");
  expect_io_error(behind, "gone");
  early.wait();
  stream(StreamKind::kReduce).enqueue([] {}).wait();
  stream(StreamKind::kReduce).synchronize();
}

TEST_P(DeviceContract, FailsAStreamThatWaitsForAFailureFromOutside) {
  Stream& gather = stream(StreamKind::kGather);
  gather.wait(Pending::failed(io_error("network")));
  expect_io_error(gather.record(), "network");

  const auto late = std::make_shared<Completion>();
  std::thread network([&] { late->fail(io_error("late network")); });
  Stream& read = stream(StreamKind::kRead);
  read.wait(Pending::all({Pending(), Pending(late), stream(StreamKind::kWrite).record()}));
  expect_io_error(read.enqueue([] {}), "late network");
  network.join();
}

TEST_P(DeviceContract, LetsAnybodyMarkSpans) {
  for (const StreamKind kind : kAllStreams) {
    stream(kind).begin_span("outer");
    stream(kind).begin_span("inner", {.bytes = 1});
    bool has_run = false;
    (void)stream(kind).enqueue([&has_run] { has_run = true; });
    stream(kind).end_span();
    stream(kind).end_span();
    stream(kind).synchronize();
    EXPECT_TRUE(has_run) << to_string(kind);
  }
  device_->collect_spans();
}

TEST_P(DeviceContract, RefusesAStreamOfAnotherDevice) {
  const auto other = GetParam().make(nullptr);
  std::uint8_t byte = 0;
  EXPECT_THROW((void)device_->start_fill(&byte, 1, 1, other->stream(StreamKind::kRead)),
               InternalError);
}

TEST_P(DeviceContract, FinishesWhatIsInFlightBeforeItIsDestroyed) {
  constexpr std::size_t kBytes = 100'003;
  const Bytes source = pattern(kBytes, 4);
  std::vector<Bytes> copies(5, Bytes(kBytes));
  int num_run = 0;
  Pending last;
  for (std::size_t i = 0; i < 5; ++i) {
    Stream& next = stream(kAllStreams[i]);
    next.wait(last);
    (void)device_->start_copy(copies[i].data(), i == 0 ? source.data() : copies[i - 1].data(),
                              kBytes, next);
    last = next.enqueue([&num_run] { ++num_run; });
  }
  device_.reset();
  EXPECT_EQ(num_run, 5);
  for (const Bytes& copy : copies) {
    EXPECT_EQ(copy, source);
  }
  last.wait();
}

TEST_P(DeviceContract, TakesWorkForOneStreamFromManyThreads) {
  int num_run = 0;  // not atomic: a stream runs one piece of work at a time
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < 100; ++j) {
        (void)stream(StreamKind::kRead).enqueue([&num_run] { ++num_run; });
      }
      stream(StreamKind::kRead).synchronize();
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  stream(StreamKind::kRead).synchronize();
  EXPECT_EQ(num_run, 400);
}

TEST_P(DeviceContract, LetsManyThreadsWaitForTheSameWork) {
  int value = 0;
  const Pending work = stream(StreamKind::kReduce).enqueue([&value] { value = 5; });
  std::vector<int> seen(4);
  std::vector<std::thread> threads;
  for (int& mine : seen) {
    threads.emplace_back([&work, &value, &mine] {
      work.wait();
      mine = value;
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(seen, std::vector<int>(4, 5));
}

}  // namespace
}  // namespace tessera::device
