// A file of what was there at one moment, while everything changes: whoever changes a tensor waits
// only until it has been read, and never for a failure.
#include "tessera/checkpoint/snapshot.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <filesystem>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/checkpoint/checksum.h"
#include "tessera/checkpoint/save_stall.h"
#include "tessera/core/error.h"
#include "tessera/device/device_cpu.h"
#include "testing/fault_engine.h"
#include "testing/manual_clock.h"
#include "testing/mock_device.h"
#include "tests/support/expect_names.h"
#include "tests/support/sizes.h"
#include "tests/support/temporary_directory.h"

namespace tessera::checkpoint {
namespace {

using device::Pending;
using testing::FaultEngine;
using testing::IoCall;
using testing::IoFault;
using tier::kBlockBytes;

constexpr std::size_t kStagingBlocks = 4;

// What the buffer needs for so many floats.
std::size_t buffered_bytes(std::int64_t numel) {
  return static_cast<std::size_t>((numel + kTileStep - 1) / kTileStep * kTileStep) * sizeof(float);
}

// Owners with tensors in host memory, and a save of them.
class SnapshotTest : public ::testing::Test {
 protected:
  struct Tensor {
    int owner = 0;
    std::vector<float> values;
    std::vector<float> before;  // when it was made
    std::exception_ptr throws;  // by start_read(), from some element on
    std::exception_ptr fails;   // its Pending
    std::int64_t bad_from = 0;
  };

  void add(int owner, std::int64_t numel) {
    auto tensor = std::make_unique<Tensor>();
    tensor->owner = owner;
    tensor->values.resize(static_cast<std::size_t>(numel));
    const auto first = static_cast<float>(1000 * tensors_.size());
    std::iota(tensor->values.begin(), tensor->values.end(), first);
    tensor->before = tensor->values;
    tensors_.push_back(std::move(tensor));
  }
  // Small and ragged, empty, of several tiles; several tensors of one owner, and of nobody.
  void add_many() {
    for (int round = 0; round < 3; ++round) {
      for (const std::int64_t numel : {1, 5000, 0, 20001, 2048}) {
        const int owner = static_cast<int>(tensors_.size() % 6);
        add(owner == 5 ? -1 : owner, numel);
      }
    }
  }

  void make_buffer(std::size_t bytes) {
    snapshot_.reset();
    buffer_ = std::make_unique<tier::BufferPool>(*device_, Tier::kHost, bytes, "a snapshot's room");
  }

  // Little of everything, so that little is far.
  SnapshotOptions options() {
    SnapshotOptions options;
    path_ = (directory_.path() / ("file-" + std::to_string(num_files_++))).string();
    options.path = path_;
    options.writer = {engine_.get(), kStagingBlocks * kBlockBytes};
    options.device = device_.get();
    options.tile_bytes = 0;
    options.num_threads = num_threads_;
    options.buffer = buffer_.get();
    options.clock = &clock_;
    return options;
  }

  SnapshotTensor describe(Tensor& tensor, std::size_t number) {
    SnapshotTensor described;
    described.entry = {"t" + std::to_string(number),
                       DType::kFloat32,
                       {static_cast<std::int64_t>(tensor.values.size())}};
    described.owner = tensor.owner;
    described.content_begin = 8 * number;
    described.start_read = [&tensor](std::int64_t begin, std::int64_t numel, std::byte* to) {
      EXPECT_EQ(begin % kTileStep, 0);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(to) % kBlockBytes, 0U);
      const bool is_bad = begin + numel > tensor.bad_from;
      if (is_bad && tensor.throws) {
        std::rethrow_exception(tensor.throws);
      }
      std::memset(to, 0xff, buffered_bytes(numel));  // there is room for that
      std::memcpy(to, tensor.values.data() + begin,
                  static_cast<std::size_t>(numel) * sizeof(float));
      return is_bad && tensor.fails ? Pending::failed(tensor.fails) : Pending();
    };
    return described;
  }

  std::vector<SnapshotTensor> describe_all() {
    std::vector<SnapshotTensor> all;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      tensors_[i]->before = tensors_[i]->values;
      all.push_back(describe(*tensors_[i], i));
    }
    return all;
  }
  Snapshot& start() {
    snapshot_.reset();
    snapshot_ = std::make_unique<Snapshot>(describe_all(), options());
    return *snapshot_;
  }

  // As an update does.
  void change(int owner) {
    for (const auto& tensor : tensors_) {
      if (tensor->owner == owner) {
        for (float& value : tensor->values) {
          value = -value - 1;
        }
      }
    }
  }

  void expect_file() {
    EXPECT_TRUE(snapshot_->done());
    const SafetensorsReader reader(path_);
    ASSERT_EQ(snapshot_->results().size(), tensors_.size());
    std::uint64_t total_bytes = 0;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const std::vector<float>& expected = tensors_[i]->before;
      const auto bytes = std::as_bytes(std::span(expected));
      std::vector<float> found(expected.size());
      reader.read("t" + std::to_string(i), 0, std::as_writable_bytes(std::span(found)));
      EXPECT_TRUE(found == expected) << i;
      ContentHash content(8 * i);
      content.add(bytes);
      EXPECT_EQ(snapshot_->results()[i].content, content.value()) << i;
      EXPECT_EQ(snapshot_->results()[i].written.xxh3, xxh3(bytes)) << i;
      total_bytes += bytes.size();
    }
    EXPECT_EQ(snapshot_->bytes_so_far(), total_bytes);
    EXPECT_EQ(snapshot_->file_bytes(), std::filesystem::file_size(path_));
    expect_buffer_is_free();
  }
  void expect_buffer_is_free() {
    if (buffer_) {
      EXPECT_EQ(buffer_->free_bytes(), buffer_->capacity_bytes());
    }
  }

  // The writer stands inside owner 0, of which most is not read yet.
  void hold_in_first() {
    engine_->set_where_named(IoCall::kWrite, "", IoFault::kHold);
    start();
    engine_->wait_until_held(kStagingBlocks);
  }
  void let_go() {
    engine_->clear_faults();
    engine_->release();
  }
  // Tensors in the order in which they lie in the file.
  std::vector<std::size_t> order() {
    std::vector<std::size_t> numbers(tensors_.size());
    std::iota(numbers.begin(), numbers.end(), std::size_t{0});
    std::ranges::sort(numbers, {},
                      [this](std::size_t i) { return snapshot_->results()[i].written.offset; });
    return numbers;
  }
  // Owner 0 is large, the others are small and alike.
  void add_large_and_small(int num_small) {
    add(0, 50000);
    for (int i = 1; i <= num_small; ++i) {
      add(i, 2000);
    }
  }

  testing::MemoryDirectory directory_;
  ManualClock clock_;
  std::unique_ptr<FaultEngine> engine_ = make_engine();
  std::unique_ptr<device::Device> device_ = device::make_cpu_device();
  std::unique_ptr<tier::BufferPool> buffer_;
  std::vector<std::unique_ptr<Tensor>> tensors_;
  std::string path_;
  int num_files_ = 0;
  int num_threads_ = 3;
  std::unique_ptr<Snapshot> snapshot_;

  static std::unique_ptr<FaultEngine> make_engine() {
    tier::IoOptions options;
    options.kind = tier::IoKind::kThreads;
    options.num_threads = 2;
    return std::make_unique<FaultEngine>(tier::make_io_engine(options, [](const std::string&) {}));
  }
};

TEST_F(SnapshotTest, WritesEverythingIfNobodyChangesIt) {
  add_many();
  start().wait();
  expect_file();
  tensors_.clear();
  start().wait();
  expect_file();
}

// Tiles are larger and smaller than the file's staging, and end anywhere in its buffers.
TEST_F(SnapshotTest, WritesTheSameFileWithAnyNumberOfThreads) {
  add(0, 700001);
  add(1, 1);
  add(1, 0);
  add(2, 150000);
  add(-1, 3);
  for (const std::size_t tile_bytes : {std::size_t{0}, std::size_t{100000}, std::size_t{2} << 20}) {
    for (const std::size_t staging_bytes : {std::size_t{0}, std::size_t{1} << 20}) {
      for (const int threads : {-1, 1, 2, 5, 1000}) {
        SnapshotOptions given = options();
        given.tile_bytes = tile_bytes;
        given.writer.staging_bytes = staging_bytes;
        given.num_threads = threads;
        snapshot_ = std::make_unique<Snapshot>(describe_all(), given);
        snapshot_->wait();
        expect_file();
        EXPECT_EQ(order(), (std::vector<std::size_t>{0, 1, 2, 3, 4}));
        std::filesystem::remove(path_);
      }
    }
  }
}

// The bytes of a tile that was taken early may be the last to come.
TEST_F(SnapshotTest, PutsTilesInTheirPlacesInWhateverOrderTheyCome) {
  add(0, 60001);
  add(1, 5000);
  add(2, 60001);
  for (int round = 0; round < support::rounds(20, 5); ++round) {
    std::vector<SnapshotTensor> all = describe_all();
    std::mutex mutex;
    std::vector<std::shared_ptr<device::Completion>> reads;
    std::vector<std::thread> late;
    for (SnapshotTensor& tensor : all) {
      tensor.start_read = [&, start_read = tensor.start_read](std::int64_t begin,
                                                              std::int64_t numel, std::byte* to) {
        const auto done = std::make_shared<device::Completion>();
        const std::lock_guard<std::mutex> lock(mutex);
        reads.push_back(done);
        if (reads.size() % 3 == 0) {  // at once
          start_read(begin, numel, to).wait();
          done->succeed();
        } else {
          late.emplace_back([start_read, begin, numel, to, done] {
            start_read(begin, numel, to).wait();
            done->succeed();
          });
        }
        return Pending(done);
      };
    }
    SnapshotOptions given = options();
    given.num_threads = 1 + round % 4;
    snapshot_ = std::make_unique<Snapshot>(std::move(all), given);
    snapshot_->wait();
    expect_file();
    for (std::thread& thread : late) {
      thread.join();
    }
    snapshot_.reset();
  }
}

TEST_F(SnapshotTest, WritesWhatWasThereWhenItWasMadeWhoeverChangesIt) {
  add_many();
  const std::size_t all_bytes = 40 * 8192;
  std::mt19937 random(7);
  for (const std::size_t buffer_bytes : {std::size_t{0}, kBlockBytes, all_bytes / 4, all_bytes}) {
    make_buffer(buffer_bytes);
    for (int round = 0; round < support::rounds(40, 8); ++round) {
      num_threads_ = 1 + round % 4;
      start();
      std::vector<int> owners = {0, 1, 2, 3, 4};
      std::shuffle(owners.begin(), owners.end(), random);
      std::vector<std::thread> updating;
      for (const int half : {0, 1}) {
        updating.emplace_back([&, half] {
          for (std::size_t i = half == 0 ? 0 : 3; i < (half == 0 ? 3U : 5U); ++i) {
            snapshot_->release(owners[i]).wait();
            change(owners[i]);
            snapshot_->release(owners[i]).wait();  // the next update asks again
            change(owners[i]);
          }
        });
      }
      for (std::thread& thread : updating) {
        thread.join();
      }
      snapshot_->wait();
      expect_file();
    }
  }
}

TEST_F(SnapshotTest, AnswersTwoThatAskForTheSameOwner) {
  add_many();
  make_buffer(40 * 8192);
  for (int round = 0; round < support::rounds(50, 10); ++round) {
    start();
    std::atomic<int> num_ready{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i) {
      threads.emplace_back([&] {
        snapshot_->release(4).wait();
        if (++num_ready == 2) {
          change(4);
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    snapshot_->wait();
    expect_file();
  }
}

TEST_F(SnapshotTest, LetsChangeAtOnceWhatTheBufferHasRoomFor) {
  add_large_and_small(3);
  make_buffer(2 * buffered_bytes(2000));
  hold_in_first();
  for (const int owner : {2, 3}) {
    EXPECT_TRUE(snapshot_->release(owner).done());
    change(owner);
  }
  const Pending refused = snapshot_->release(1);
  EXPECT_FALSE(refused.done());
  EXPECT_FALSE(snapshot_->release(1).done()) << "asked again";
  EXPECT_TRUE(snapshot_->release(2).done()) << "asked again";
  EXPECT_FALSE(snapshot_->done());
  let_go();
  refused.wait();
  change(1);
  snapshot_->wait();
  expect_file();
}

// A buffer has no memory for it.
TEST_F(SnapshotTest, WritesAnOwnerWithoutElementsThatWasBuffered) {
  add_large_and_small(1);
  add(2, 0);
  make_buffer(std::size_t{1} << 20);
  hold_in_first();
  EXPECT_TRUE(snapshot_->release(2).done());
  let_go();
  snapshot_->wait();
  expect_file();
}

TEST_F(SnapshotTest, LetsChangeWhatIsBeingWrittenWhenItHasBeenRead) {
  add_large_and_small(1);
  make_buffer(std::size_t{1} << 20);
  hold_in_first();
  const Pending released = snapshot_->release(0);
  EXPECT_FALSE(released.done());
  EXPECT_FALSE(released.wait_for(std::chrono::nanoseconds(0)));
  let_go();
  released.wait();
  change(0);
  snapshot_->wait();
  expect_file();
}

// Not when it is on disk: the last tile is read while those before it are held.
TEST_F(SnapshotTest, DoesNotHoldAnUpdateUntilItsOwnerIsOnDisk) {
  add(0, 2048);
  add(1, 50000);
  engine_->set_where_named(IoCall::kWrite, "", IoFault::kHold);
  start();
  snapshot_->release(0).wait();
  change(0);
  EXPECT_FALSE(snapshot_->done());
  engine_->wait_until_held(kStagingBlocks);
  let_go();
  snapshot_->wait();
  expect_file();
}

TEST_F(SnapshotTest, CountsTheTimeThatUpdatesAreHeld) {
  constexpr std::int64_t kSecond = 1'000'000'000;
  add_large_and_small(2);
  hold_in_first();
  clock_.advance_ns(kSecond);  // nobody waits
  const Pending first = snapshot_->release(1);
  clock_.advance_ns(2 * kSecond);
  const Pending second = snapshot_->release(2);
  clock_.advance_ns(3 * kSecond);
  let_go();
  Pending::all({first, second}).wait();
  snapshot_->wait();
  EXPECT_EQ(snapshot_->times().held_s, 5.0);
  EXPECT_EQ(snapshot_->times().writing_s, 6.0);
}

// A disk that takes a second for each kDiskBytes, by a clock that only it moves: an update asks for
// one owner after the other, as it does when it begins before the save is over.
TEST_F(SnapshotTest, UpdatesWaitAsLongAsIsPredicted) {
  constexpr double kDiskBytes = 65536;
  constexpr std::int64_t kSecond = 1'000'000'000;
  constexpr int kNumOwners = 24;
  num_threads_ = 1;  // which stops when all of the staging is full, and not before
  for (const bool has_frozen : {false, true}) {
    for (const int num_buffered : {0, 6, kNumOwners}) {
      for (const double before_s : {0.0, 20.0, 1e3}) {
        SCOPED_TRACE(::testing::Message() << has_frozen << " " << num_buffered << " " << before_s);
        tensors_.clear();
        SaveBytes bytes;
        constexpr std::int64_t kNumel = 30000;
        const auto is_frozen = [&](int owner) { return has_frozen && owner % 3 == 1; };
        for (int owner = 0; owner < kNumOwners; ++owner) {
          add(owner, kNumel);
          bytes.add(kNumel * sizeof(float), !is_frozen(owner));
        }
        make_buffer(static_cast<std::size_t>(num_buffered) * buffered_bytes(kNumel));
        engine_->set_where_named(IoCall::kWrite, "", IoFault::kHold);
        start();
        std::uint64_t num_written = 0;
        // The oldest of at least so many held writes, in its time. False: what is asked for is
        // over before there are so many.
        const auto write_one = [&](std::size_t num_held, const auto& is_over) {
          while (engine_->num_held() < num_held) {
            if (is_over()) {
              return false;
            }
            std::this_thread::yield();
          }
          if (is_over()) {
            return false;
          }
          const std::size_t write_bytes = engine_->oldest_held_bytes();
          num_written += write_bytes;
          clock_.advance_ns(static_cast<std::int64_t>(static_cast<double>(write_bytes) /
                                                      kDiskBytes * static_cast<double>(kSecond)));
          engine_->release_one();
          return true;
        };
        const auto is_saved = [&] { return snapshot_->done(); };
        SavePace pace;
        pace.buffer_bytes = buffer_->capacity_bytes();
        pace.bytes_per_s = kDiskBytes;
        pace.before_update_s = before_s;
        const double predicted_s = predicted_stall_s(bytes, pace);
        while (static_cast<double>(num_written) < before_s * kDiskBytes && write_one(1, is_saved)) {
        }
        for (int owner = 0; owner < kNumOwners; ++owner) {
          if (is_frozen(owner)) {
            continue;
          }
          const Pending released = snapshot_->release(owner);
          // As long as it is not read, the staging is full or is being filled.
          while (write_one(kStagingBlocks, [&] { return released.done(); })) {
          }
          change(owner);
        }
        while (write_one(1, is_saved)) {
        }
        snapshot_->wait();
        expect_file();
        // What is read and not written yet is in the staging and the tiles, or in the buffer of an
        // owner that has no room in it as a whole; what is asked for comes behind what is begun.
        const double slack_s = static_cast<double>(kStagingBlocks * kBlockBytes + 8 * 16384 +
                                                   2 * buffered_bytes(kNumel)) /
                               kDiskBytes;
        EXPECT_NEAR(snapshot_->times().held_s, predicted_s, slack_s);
      }
    }
  }
}

TEST_F(SnapshotTest, WaitsUntilSoManyBytesAreTaken) {
  add_large_and_small(1);
  hold_in_first();
  snapshot_->wait_for_bytes(1, std::chrono::hours(1));
  EXPECT_GE(snapshot_->bytes_so_far(), 1U);
  snapshot_->wait_for_bytes(1 << 20, std::chrono::nanoseconds(1));
  EXPECT_LT(snapshot_->bytes_so_far(), 1U << 20) << "the time was over";
  let_go();
  snapshot_->wait_for_bytes(1 << 20, std::chrono::hours(1));
  EXPECT_TRUE(snapshot_->done()) << "there is no more";
  expect_file();
}

TEST_F(SnapshotTest, WritesFirstWhatAnUpdateWaitsFor) {
  add_large_and_small(4);
  hold_in_first();
  const Pending third = snapshot_->release(3);
  const Pending second = snapshot_->release(2);
  let_go();
  Pending::all({second, third}).wait();
  snapshot_->wait();
  EXPECT_EQ(order(), (std::vector<std::size_t>{0, 3, 2, 4, 1}));
  expect_file();
}

// An update that follows the writer would wait for each owner that is just being read.
TEST_F(SnapshotTest, ReadsFromTheOtherEndOnceAnUpdateHasBegun) {
  add_large_and_small(4);
  make_buffer(std::size_t{1} << 20);
  hold_in_first();
  EXPECT_FALSE(snapshot_->release(0).done());
  let_go();
  snapshot_->wait();
  EXPECT_EQ(order(), (std::vector<std::size_t>{0, 4, 3, 2, 1}));
  expect_file();
}

TEST_F(SnapshotTest, WritesWhatIsBufferedLastUnlessItsRoomIsNeeded) {
  add_large_and_small(4);
  make_buffer(buffered_bytes(2000));
  hold_in_first();
  EXPECT_TRUE(snapshot_->release(1).done());
  let_go();
  snapshot_->wait();
  EXPECT_EQ(order(), (std::vector<std::size_t>{0, 4, 3, 2, 1}));
  expect_file();

  hold_in_first();
  EXPECT_TRUE(snapshot_->release(1).done());
  EXPECT_FALSE(snapshot_->release(4).done());  // refused
  let_go();
  snapshot_->wait();
  EXPECT_EQ(order(), (std::vector<std::size_t>{0, 4, 1, 3, 2}));
  expect_file();
}

TEST_F(SnapshotTest, MakesNoRoomForAnOwnerThatIsLargerThanTheBuffer) {
  add_large_and_small(3);
  add(4, 30000);
  make_buffer(buffered_bytes(2000));
  hold_in_first();
  EXPECT_TRUE(snapshot_->release(1).done());
  EXPECT_FALSE(snapshot_->release(4).done());
  let_go();
  snapshot_->wait();
  EXPECT_EQ(order(), (std::vector<std::size_t>{0, 4, 3, 2, 1}));
  expect_file();
}

TEST_F(SnapshotTest, KnowsNothingOfOwnersWithoutTensors) {
  add(3, 100);
  start();
  EXPECT_TRUE(snapshot_->release(0).done());
  EXPECT_TRUE(snapshot_->release(99).done());
  snapshot_->wait();
  expect_file();
}

TEST_F(SnapshotTest, ReleasesEverythingWhicheverWriteFails) {
  add_many();
  start().wait();
  const std::size_t num_writes = engine_->seen().size();
  ASSERT_GT(num_writes, 10U);
  for (std::size_t n = 0; n < num_writes; ++n) {
    engine_ = make_engine();
    engine_->set_nth(IoCall::kWrite, n, IoFault::kFail);
    make_buffer(n % 2 * 8 * 8192);
    start();
    for (const int owner : {3, 1, 4, 0, 2}) {
      snapshot_->release(owner).wait();
      change(owner);
    }
    support::expect_names<IoError>([&] { snapshot_->wait(); }, path_);
    EXPECT_THROW(snapshot_->wait(), IoError) << "asked again";
    EXPECT_TRUE(snapshot_->done());
    EXPECT_TRUE(snapshot_->release(3).done());
    EXPECT_THROW(const SafetensorsReader reader(path_), CorruptError);
    expect_buffer_is_free();
    snapshot_.reset();
  }
}

TEST_F(SnapshotTest, FailsWithWhateverCannotBeRead) {
  const auto error = std::make_exception_ptr(IoError("a broken disk"));
  for (const bool throws : {true, false}) {
    for (const std::int64_t bad_from : {0, 40000}) {
      for (const int bad_owner : {0, 1, 2}) {
        for (const bool is_buffered : {true, false}) {
          tensors_.clear();
          for (const int owner : {0, 1, 2}) {
            add(owner, 50000);
            add(owner, 3000);
          }
          Tensor& bad = *tensors_[static_cast<std::size_t>(2 * bad_owner)];
          (throws ? bad.throws : bad.fails) = error;
          bad.bad_from = bad_from;
          make_buffer(is_buffered ? std::size_t{1} << 20 : 0);
          start();
          for (const int owner : {2, 1, 0}) {
            snapshot_->release(owner).wait();
            change(owner);
          }
          support::expect_names<IoError>([&] { snapshot_->wait(); }, "a broken disk");
          expect_buffer_is_free();
        }
      }
    }
  }
}

TEST_F(SnapshotTest, StopsEarlyAndLetsEverybodyGo) {
  for (const std::size_t buffer_bytes : {std::size_t{0}, 4 * buffered_bytes(2000)}) {
    tensors_.clear();
    add_large_and_small(6);
    make_buffer(buffer_bytes);
    hold_in_first();
    std::vector<Pending> asked;
    for (int owner = 1; owner < 6; ++owner) {
      asked.push_back(snapshot_->release(owner));
    }
    Snapshot& dying = *snapshot_;
    std::atomic<bool> is_over{false};
    std::thread updating([&] {
      while (!is_over) {
        std::ignore = dying.release(0);  // it is being read: nobody waits for it here
        std::ignore = dying.release(6);
      }
    });
    std::thread letting_go([&] {
      asked.back().wait();  // while writes are still held, and with them the destructor
      is_over = true;
      updating.join();
      let_go();
    });
    snapshot_.reset();
    letting_go.join();
    for (const Pending& each : asked) {
      each.wait();
    }
    expect_buffer_is_free();
    EXPECT_THROW(const SafetensorsReader reader(path_), CorruptError);
  }
}

// What updates on a device are ordered behind is the copies alone.
TEST_F(SnapshotTest, OrdersStreamsOfADeviceBehindCopiesIntoTheBuffer) {
  device::MockDeviceOptions mock;
  mock.own_memory = true;  // lazy: copies end only when somebody waits for them
  const std::unique_ptr<device::Device> gpu = device::make_mock_device(mock);
  device::Stream& writes = gpu->stream(device::StreamKind::kWrite);
  device::Stream& updates = gpu->stream(device::StreamKind::kReduce);
  for (const std::size_t buffer_bytes : {std::size_t{0}, std::size_t{1} << 20}) {
    tensors_.clear();
    add_large_and_small(4);
    std::vector<device::Memory> memories;
    std::vector<SnapshotTensor> all = describe_all();
    for (std::size_t i = 0; i < all.size(); ++i) {
      const std::size_t bytes = tensors_[i]->values.size() * sizeof(float);
      memories.push_back(gpu->allocate(Tier::kDevice, bytes, Role::kShard));
      gpu->start_copy(memories[i].data(), tensors_[i]->values.data(), bytes, writes).wait();
      all[i].start_read = [&, i](std::int64_t begin, std::int64_t numel, std::byte* to) {
        return gpu->start_copy(to, memories[i].data() + begin * 4,
                               static_cast<std::size_t>(numel) * 4,
                               gpu->stream(device::StreamKind::kComm));
      };
    }
    tier::BufferPool buffer(*gpu, Tier::kPinned, buffer_bytes, "a snapshot's room");
    SnapshotOptions given = options();
    given.device = gpu.get();
    given.tier = Tier::kPinned;
    given.buffer = &buffer;
    snapshot_ = std::make_unique<Snapshot>(std::move(all), given);
    for (int owner = 4; owner >= 0; --owner) {
      const auto i = static_cast<std::size_t>(owner);
      updates.wait(snapshot_->release(owner));
      std::ignore = gpu->start_fill(memories[i].data(), 0xee, memories[i].bytes(), updates);
    }
    snapshot_->wait();
    expect_file();
    updates.synchronize();
    snapshot_.reset();
  }
}

}  // namespace
}  // namespace tessera::checkpoint
