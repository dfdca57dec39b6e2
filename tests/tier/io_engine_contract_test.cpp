// What every engine promises, once for each engine and each kind of file.
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/tier/io_engine.h"
#include "tests/support/aligned_bytes.h"
#include "tests/support/temporary_directory.h"

namespace tessera::tier {
namespace {

using testing::AlignedBytes;

struct Kind {
  IoKind engine;
  DirectIo direct;
};

std::string kind_name(const ::testing::TestParamInfo<Kind>& info) {
  return std::string(info.param.engine == IoKind::kUring ? "Uring" : "Threads") +
         (info.param.direct == DirectIo::kOn ? "Direct" : "Buffered");
}

std::string failure_of(const Pending& pending) {
  try {
    pending.wait();
  } catch (const IoError& error) {
    return error.what();
  }
  return "no failure";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

class IoEngineContract : public ::testing::TestWithParam<Kind> {
 protected:
  static constexpr std::size_t kRequest = 4 * kBlockBytes;

  // Small requests and few of them in flight, so that small ranges meet every limit.
  IoEngineContract() {
    options_.kind = GetParam().engine;
    options_.block_bytes = kRequest;
    options_.queue_depth = 2;
    options_.num_threads = 2;
  }

  void SetUp() override {
    try {
      engine_ = make_io_engine(options_, nullptr);
    } catch (const ConfigError& error) {
      GTEST_SKIP() << error.what();
    }
    try {
      file_ = open("data");
    } catch (const ConfigError& error) {
      GTEST_SKIP() << error.what();
    }
  }

  std::unique_ptr<IoFile> open(const std::string& name, int flags = O_RDWR | O_CREAT) {
    return open_io_file((directory_.path() / name).string(), flags, GetParam().direct);
  }
  bool is_direct() const { return GetParam().direct == DirectIo::kOn; }

  void write(std::uint64_t offset, const AlignedBytes& from) {
    engine_->start_write(*file_, offset, from.data(), from.bytes(), "test data").wait();
  }
  AlignedBytes read(std::uint64_t offset, std::size_t bytes) {
    AlignedBytes to(bytes);
    engine_->start_read(*file_, offset, to.data(), bytes, "test data").wait();
    return to;
  }

  testing::TemporaryDirectory directory_;
  IoOptions options_;
  std::unique_ptr<IoEngine> engine_;
  std::unique_ptr<IoFile> file_;
};

class BufferedIoContract : public IoEngineContract {};
class DirectIoContract : public IoEngineContract {};

TEST_P(IoEngineContract, AFileIsDirectOnlyIfThatWasAskedFor) {
  EXPECT_EQ(file_->is_direct(), is_direct());
  EXPECT_EQ((::fcntl(file_->fd(), F_GETFL) & O_DIRECT) != 0, is_direct());
}

TEST_P(IoEngineContract, WhatWasWrittenIsReadBackWhateverItsSize) {
  for (const std::size_t blocks : {0, 1, 3, 4, 5, 16, 67}) {
    SCOPED_TRACE(std::to_string(blocks) + " blocks");
    const AlignedBytes written = AlignedBytes::pattern(blocks * kBlockBytes, blocks);
    write(2 * kBlockBytes, written);
    EXPECT_TRUE(read(2 * kBlockBytes, written.bytes()) == written);
  }
}

TEST_P(BufferedIoContract, AnyOffsetAndLengthIsTaken) {
  for (const std::size_t bytes : {1UL, 4095UL, 4097UL, kRequest - 1, 9 * kRequest + 13}) {
    SCOPED_TRACE(std::to_string(bytes) + " bytes");
    const AlignedBytes written = AlignedBytes::pattern(bytes, bytes);
    write(777, written);
    EXPECT_TRUE(read(777, bytes) == written);
  }
}

TEST_P(IoEngineContract, NothingBesideARangeIsTouched) {
  const AlignedBytes before = AlignedBytes::pattern(12 * kBlockBytes, 1);
  write(0, before);
  const AlignedBytes middle = AlignedBytes::pattern(5 * kBlockBytes, 2);
  write(4 * kBlockBytes, middle);
  AlignedBytes expected = AlignedBytes::pattern(12 * kBlockBytes, 1);
  std::memcpy(expected.data() + 4 * kBlockBytes, middle.data(), middle.bytes());
  EXPECT_TRUE(read(0, 12 * kBlockBytes) == expected);
}

TEST_P(IoEngineContract, RangesOfManyThreadsDoNotMix) {
  constexpr int kNumThreads = 6;
  constexpr int kNumRounds = 8;
  constexpr std::size_t kBytes = 7 * kBlockBytes;
  std::atomic<int> num_wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kNumThreads; ++t) {
    threads.emplace_back([&, t] {
      const std::uint64_t base = static_cast<std::uint64_t>(t) * kNumRounds * kBytes;
      std::vector<AlignedBytes> written;
      std::vector<Pending> writes;
      for (int i = 0; i < kNumRounds; ++i) {
        written.push_back(AlignedBytes::pattern(kBytes, static_cast<std::uint64_t>(t * 100 + i)));
        writes.push_back(engine_->start_write(*file_, base + static_cast<std::uint64_t>(i) * kBytes,
                                              written.back().data(), kBytes, "test data"));
      }
      Pending::all(writes).wait();
      for (int i = 0; i < kNumRounds; ++i) {
        AlignedBytes to(kBytes);
        engine_
            ->start_read(*file_, base + static_cast<std::uint64_t>(i) * kBytes, to.data(), kBytes,
                         "test data")
            .wait();
        num_wrong += to == written[static_cast<std::size_t>(i)] ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(num_wrong, 0);
  const IoCounts counts = engine_->counts();
  EXPECT_EQ(counts.num_writes, kNumThreads * kNumRounds);
  EXPECT_EQ(counts.num_reads, kNumThreads * kNumRounds);
  EXPECT_EQ(counts.written_bytes, kNumThreads * kNumRounds * kBytes);
  EXPECT_EQ(counts.read_bytes, kNumThreads * kNumRounds * kBytes);
}

TEST_P(IoEngineContract, OnlyWhatWasDoneIsCounted) {
  const AlignedBytes data = AlignedBytes::pattern(9 * kBlockBytes, 5);
  write(0, data);
  write(0, AlignedBytes(0));
  AlignedBytes to(16 * kBlockBytes);
  const Pending too_far = engine_->start_read(*file_, 0, to.data(), to.bytes(), "test data");
  EXPECT_THROW(too_far.wait(), IoError);
  read(kBlockBytes, 2 * kBlockBytes);
  const IoCounts counts = engine_->counts();
  EXPECT_EQ(counts.num_writes, 2U);
  EXPECT_EQ(counts.written_bytes, 9 * kBlockBytes);
  EXPECT_EQ(counts.num_reads, 1U);
  EXPECT_EQ(counts.read_bytes, 2 * kBlockBytes);
}

TEST_P(IoEngineContract, ReadingBehindTheEndFailsAndSaysWhere) {
  write(0, AlignedBytes::pattern(2 * kBlockBytes, 3));
  AlignedBytes to(kBlockBytes);
  const std::string message = failure_of(engine_->start_read(
      *file_, 8 * kBlockBytes, to.data(), to.bytes(), "exp_avg of parameter 'h.0'"));
  EXPECT_EQ(message, "read of 4096 bytes at offset 32768 of " + file_->path() +
                         " failed: the file ends after 0 of them; exp_avg of parameter 'h.0'; it "
                         "was cut off, or it belongs to another run");
}

TEST_P(IoEngineContract, AFileThatEndsInsideABlockIsNoWholeRead) {
  write(0, AlignedBytes::pattern(4 * kBlockBytes, 3));
  ASSERT_EQ(::ftruncate(file_->fd(), 2 * kBlockBytes + 100), 0);
  AlignedBytes to(4 * kBlockBytes);
  const std::string message =
      failure_of(engine_->start_read(*file_, 0, to.data(), to.bytes(), "test data"));
  EXPECT_TRUE(contains(message, "the file ends after 8292 of them")) << message;
}

TEST_P(IoEngineContract, AFileThatIsNotOpenForWritingRefusesAWrite) {
  write(0, AlignedBytes::pattern(kBlockBytes, 3));
  const std::unique_ptr<IoFile> read_only = open("data", O_RDONLY);
  const AlignedBytes data = AlignedBytes::pattern(kBlockBytes, 4);
  const std::string message =
      failure_of(engine_->start_write(*read_only, 0, data.data(), data.bytes(), "test data"));
  EXPECT_TRUE(contains(message, "write of 4096 bytes at offset 0 of " + file_->path() +
                                    " failed: Bad file descriptor (9); test data; "))
      << message;
}

// The kernel takes what is below the limit, so this is a short write, too.
TEST_P(IoEngineContract, AWriteThatIsCutShortIsNeverDone) {
  class FileSizeLimit {
   public:
    explicit FileSizeLimit(rlim_t bytes) {
      ::getrlimit(RLIMIT_FSIZE, &before_);
      rlimit lower = before_;
      lower.rlim_cur = bytes;
      ::setrlimit(RLIMIT_FSIZE, &lower);
    }
    ~FileSizeLimit() { ::setrlimit(RLIMIT_FSIZE, &before_); }

   private:
    rlimit before_{};
  };
  const AlignedBytes data = AlignedBytes::pattern(6 * kBlockBytes, 9);
  std::string message;
  {
    const FileSizeLimit limit(3 * kBlockBytes);
    message = failure_of(engine_->start_write(*file_, 0, data.data(), data.bytes(), "test data"));
  }
  EXPECT_TRUE(contains(message, "write of 16384 bytes at offset 0 of ")) << message;
  EXPECT_TRUE(contains(message, "File too large (27); test data; ")) << message;
  EXPECT_EQ(engine_->counts().written_bytes, 0U);
  write(0, data);  // the engine is as good as before
  EXPECT_TRUE(read(0, data.bytes()) == data);
}

TEST_P(BufferedIoContract, AFullDiskIsAFailureWithARemedy) {
  const std::unique_ptr<IoFile> full = open_io_file("/dev/full", O_WRONLY, DirectIo::kOff);
  const AlignedBytes data(kBlockBytes);
  EXPECT_EQ(failure_of(engine_->start_write(*full, 4096, data.data(), data.bytes(),
                                            "exp_avg of parameter 'x'")),
            "write of 4096 bytes at offset 4096 of /dev/full failed: No space left on device (28); "
            "exp_avg of parameter 'x'; make room on that disk, or name a directory on another");
}

TEST_P(IoEngineContract, AFailureConcernsItsOwnRangeOnly) {
  const AlignedBytes data = AlignedBytes::pattern(20 * kBlockBytes, 11);
  write(0, data);
  std::vector<AlignedBytes> buffers;
  std::vector<Pending> reads;
  for (int i = 0; i < 12; ++i) {
    buffers.emplace_back(10 * kBlockBytes);
    const std::uint64_t offset = i % 3 == 1 ? 15 * kBlockBytes : 0;  // five blocks too far
    reads.push_back(engine_->start_read(*file_, offset, buffers.back().data(), 10 * kBlockBytes,
                                        "range " + std::to_string(i)));
  }
  for (std::size_t i = 0; i < reads.size(); ++i) {
    if (i % 3 == 1) {
      EXPECT_TRUE(contains(failure_of(reads[i]), "range " + std::to_string(i)));
    } else {
      EXPECT_NO_THROW(reads[i].wait());
      EXPECT_EQ(std::memcmp(buffers[i].data(), data.data(), 10 * kBlockBytes), 0);
    }
  }
}

TEST_P(IoEngineContract, RangesAreBegunInTheOrderGiven) {
  IoOptions one = options_;
  one.queue_depth = 1;
  one.num_threads = 1;
  engine_ = make_io_engine(one, nullptr);
  write(0, AlignedBytes::pattern(20 * kBlockBytes, 1));
  std::vector<AlignedBytes> buffers;
  std::vector<Pending> reads;
  for (int i = 0; i < 16; ++i) {
    buffers.emplace_back(static_cast<std::size_t>(1 + i * 7 % 5) * kBlockBytes);
    reads.push_back(
        engine_->start_read(*file_, 0, buffers.back().data(), buffers.back().bytes(), "test data"));
  }
  for (int i = 15; i >= 0; --i) {
    reads[static_cast<std::size_t>(i)].wait();
    for (int earlier = 0; earlier < i; ++earlier) {
      EXPECT_TRUE(reads[static_cast<std::size_t>(earlier)].done()) << earlier << " before " << i;
    }
  }
}

TEST_P(IoEngineContract, ACompletionMayStartTheNextRange) {
  const AlignedBytes data = AlignedBytes::pattern(3 * kBlockBytes, 21);
  AlignedBytes back(3 * kBlockBytes);
  Pending second;
  device::Completion chained;
  const Pending first = engine_->start_write(*file_, 0, data.data(), data.bytes(), "first");
  const auto completion = std::dynamic_pointer_cast<device::Completion>(first.state());
  ASSERT_NE(completion, nullptr);
  completion->when_done([&] {
    second = engine_->start_read(*file_, 0, back.data(), back.bytes(), "second");
    chained.succeed();
  });
  chained.wait();
  second.wait();
  EXPECT_TRUE(back == data);
}

TEST_P(IoEngineContract, DestructionWaitsForAllThatWasStarted) {
  const AlignedBytes data = AlignedBytes::pattern(400 * kBlockBytes, 31);
  std::vector<Pending> writes;
  for (std::size_t i = 0; i < 400; i += 40) {
    writes.push_back(engine_->start_write(*file_, i * kBlockBytes, data.data() + i * kBlockBytes,
                                          40 * kBlockBytes, "test data"));
  }
  engine_.reset();
  for (const Pending& write : writes) {
    EXPECT_TRUE(write.done());
    EXPECT_NO_THROW(write.wait());
  }
  engine_ = make_io_engine(options_, nullptr);
  EXPECT_TRUE(read(0, data.bytes()) == data);
}

TEST_P(DirectIoContract, OnlyWholeBlocksAreTaken) {
  AlignedBytes data(2 * kBlockBytes);
  const auto start = [&](std::uint64_t offset, std::byte* memory, std::size_t bytes) {
    static_cast<void>(engine_->start_read(*file_, offset, memory, bytes, "test data"));
  };
  EXPECT_THROW(start(1, data.data(), kBlockBytes), InternalError);
  EXPECT_THROW(start(0, data.data() + 512, kBlockBytes), InternalError);
  EXPECT_THROW(start(0, data.data(), 100), InternalError);
}

constexpr Kind kThreadsBuffered{IoKind::kThreads, DirectIo::kOff};
constexpr Kind kThreadsDirect{IoKind::kThreads, DirectIo::kOn};
constexpr Kind kUringBuffered{IoKind::kUring, DirectIo::kOff};
constexpr Kind kUringDirect{IoKind::kUring, DirectIo::kOn};

INSTANTIATE_TEST_SUITE_P(Engines, IoEngineContract,
                         ::testing::Values(kThreadsBuffered, kThreadsDirect, kUringBuffered,
                                           kUringDirect),
                         kind_name);
INSTANTIATE_TEST_SUITE_P(Engines, BufferedIoContract,
                         ::testing::Values(kThreadsBuffered, kUringBuffered), kind_name);
INSTANTIATE_TEST_SUITE_P(Engines, DirectIoContract, ::testing::Values(kThreadsDirect, kUringDirect),
                         kind_name);

}  // namespace
}  // namespace tessera::tier
