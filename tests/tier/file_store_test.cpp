// Stores in files: where the bytes are, and what is said when they are lost.
#include "tessera/tier/file_store.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "testing/fault_engine.h"
#include "tests/support/process.h"
#include "tests/support/temporary_directory.h"
#include "tests/tier/blocks.h"
#include "tests/tier/disk_support.h"

namespace tessera::tier {
namespace {

namespace fs = std::filesystem;
using testing::Blocks;
using testing::contents;
using testing::expect_words;
using testing::FaultEngine;
using testing::IoCall;
using testing::IoFault;
using testing::message_of;
using testing::TemporaryDirectory;

constexpr std::uint64_t kHeader = ScratchFile::kDataOffset;

std::unique_ptr<IoEngine> make_threads() {
  IoOptions options;
  options.kind = IoKind::kThreads;
  options.num_threads = 2;
  return make_io_engine(options, [](const std::string&) {});
}

class FileStoreTest : public ::testing::Test {
 protected:
  FileStoreOptions options(std::size_t num_directories = 1) {
    FileStoreOptions options;
    for (std::size_t i = 0; i < num_directories; ++i) {
      options.directories.push_back((directory_.path() / ("disk" + std::to_string(i))).string());
      fs::create_directory(options.directories.back());
    }
    options.name = {"run", 0, "states"};
    options.role = Role::kOptimizer;
    options.direct_io = DirectIo::kOff;  // so that bytes changed from outside are seen
    options.stripe_bytes = 2 * kBlockBytes;
    options.engine = &engine_;
    options.ledger = &ledger_;
    return options;
  }
  fs::path disk(int index) const { return directory_.path() / ("disk" + std::to_string(index)); }

  static void write(FileStore& store, std::uint64_t offset, const Blocks& from) {
    store.start_write(offset, from.data(), from.bytes()).wait();
  }
  static Blocks read(FileStore& store, std::uint64_t offset, std::size_t num_blocks) {
    Blocks to(num_blocks, 0xa5);
    store.start_read(offset, to.data(), to.bytes()).wait();
    return to;
  }
  // The extents a, b and c, of 2, 3 and 4 blocks, with different words in all of them.
  static Blocks fill(FileStore& store) {
    for (const std::size_t blocks : {2, 3, 4}) {
      store.allocate(blocks * kBlockBytes,
                     std::string("exp_avg of parameter '") + "__abc"[blocks] + "'");
    }
    Blocks all(9);
    all.number(1);
    write(store, 0, all);
    return all;
  }
  static void flip(const std::string& path, std::uint64_t offset) {
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    char byte = 0;
    ASSERT_EQ(::pread(fd, &byte, 1, static_cast<off_t>(offset)), 1);
    byte = static_cast<char>(byte ^ 4);
    ASSERT_EQ(::pwrite(fd, &byte, 1, static_cast<off_t>(offset)), 1);
    ::close(fd);
  }

  TemporaryDirectory directory_;
  Ledger ledger_;
  FaultEngine engine_{make_threads()};
};

TEST_F(FileStoreTest, FilesHoldTheStripesInTurnAndNothingElse) {
  FileStore store(options(3));
  const Blocks all = fill(store);
  // Stripes of two blocks: 0 1 | 2 3 | 4 5 || 6 7 | 8.
  const std::vector<std::vector<std::size_t>> expected = {{0, 1, 6, 7}, {2, 3, 8}, {4, 5}};
  ASSERT_EQ(store.num_files(), 3U);
  for (std::size_t i = 0; i < 3; ++i) {
    const std::string file = contents(store.file(i).path());
    ASSERT_EQ(file.size(), kHeader + expected[i].size() * kBlockBytes);
    for (std::size_t k = 0; k < expected[i].size(); ++k) {
      EXPECT_EQ(std::memcmp(file.data() + kHeader + k * kBlockBytes, all.block(expected[i][k]),
                            kBlockBytes),
                0)
          << "block " << k << " of file " << i;
    }
  }
  EXPECT_EQ(ledger_.current_bytes(Tier::kNvme, Role::kOptimizer), 9 * kBlockBytes);
}

TEST_F(FileStoreTest, RequestsCarryTheNamesOfTheirExtents) {
  FileStore store(options());
  fill(store);
  read(store, 2 * kBlockBytes, 1);
  read(store, kBlockBytes, 5);
  const auto seen = engine_.seen();
  ASSERT_EQ(seen.size(), 3U);
  EXPECT_EQ(seen[1].what, "exp_avg of parameter 'b'");
  EXPECT_EQ(seen[1].offset, kHeader + 2 * kBlockBytes);
  EXPECT_EQ(seen[2].what, "exp_avg of parameter 'a' to exp_avg of parameter 'c'");
}

TEST_F(FileStoreTest, LeavesNothingBehind) {
  {
    FileStore store(options(3));
    fill(store);
    EXPECT_FALSE(fs::is_empty(disk(2)));
  }
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(fs::is_empty(disk(i)));
  }
  EXPECT_EQ(ledger_.current_bytes(Tier::kNvme), 0U);
}

TEST_F(FileStoreTest, TwoRunsShareADirectory) {
  FileStoreOptions first = options();
  FileStoreOptions second = options();
  second.name.run = "other";
  FileStore one(first);
  const Blocks all = fill(one);
  {
    FileStore two(second);
    fill(two);
    write(two, 0, Blocks(9, 7));
    EXPECT_EQ(read(one, 0, 9), all);
  }
  EXPECT_EQ(read(one, 0, 9), all);
  EXPECT_TRUE(fs::exists(one.file(0).path()));
}

TEST_F(FileStoreTest, ADiskThatIsFullAtTheStartIsSaidThenAndNoFileIsLeft) {
  FileStoreOptions large = options(2);
  struct statvfs info {};
  ASSERT_EQ(::statvfs(directory_.path().c_str(), &info), 0);
  large.reserved_bytes = 3 * static_cast<std::uint64_t>(info.f_blocks) * info.f_frsize;
  expect_words(message_of<IoError>([&] { FileStore store(large); }),
               {"disk0/tessera-run-rank0-states.scratch", "are free", "make room"});
  EXPECT_TRUE(fs::is_empty(disk(0)));
  EXPECT_TRUE(fs::is_empty(disk(1)));
  EXPECT_EQ(ledger_.current_bytes(Tier::kNvme), 0U);
}

TEST_F(FileStoreTest, ADiskThatIsFullLaterKeepsWhatIsThere) {
  FileStore store(options(2));
  const Blocks all = fill(store);
  EXPECT_THROW(store.allocate(std::size_t{1} << 55, "too much"), IoError);
  EXPECT_EQ(store.extents().size(), 3U);
  EXPECT_EQ(ledger_.current_bytes(Tier::kNvme), 9 * kBlockBytes);
  EXPECT_EQ(read(store, 0, 9), all);
  EXPECT_EQ(store.allocate(1, "little"), 9 * kBlockBytes);
}

TEST_F(FileStoreTest, ADirectoryThatIsMissingOrNamedTwiceLeavesNoFileInTheOthers) {
  FileStoreOptions missing = options(2);
  fs::remove(disk(1));
  expect_words(message_of<IoError>([&] { FileStore store(missing); }), {disk(1).string()});
  EXPECT_TRUE(fs::is_empty(disk(0)));
  missing.directories[1] = missing.directories[0];
  expect_words(message_of<IoError>([&] { FileStore store(missing); }), {"named twice"});
  EXPECT_TRUE(fs::is_empty(disk(0)));
}

TEST_F(FileStoreTest, FailuresNamePathOffsetAndExtent) {
  FileStore store(options(3));
  fill(store);
  const Blocks memory(9);
  struct Case {
    IoCall call;
    IoFault fault;
  };
  for (const Case& fault : {Case{IoCall::kWrite, IoFault::kFail},
                            {IoCall::kRead, IoFault::kFail},
                            {IoCall::kWrite, IoFault::kShort},
                            {IoCall::kRead, IoFault::kShort}}) {
    // Block 5 is in extent c, and the second of file 2.
    engine_.set_at(fault.call, kHeader + kBlockBytes, fault.fault, "disk2");
    const Pending pending = fault.call == IoCall::kRead
                                ? store.start_read(0, memory.data(), memory.bytes())
                                : store.start_write(0, memory.data(), memory.bytes());
    expect_words(message_of<IoError>([&] { pending.wait(); }),
                 {store.file(2).path(), "offset 4096", "parameter 'b' to", "parameter 'c'"});
    EXPECT_TRUE(pending.done());
    EXPECT_THROW(pending.wait(), IoError);  // and again
  }
  EXPECT_EQ(engine_.num_faults(), 4U);
}

TEST_F(FileStoreTest, AFileCutFromOutsideIsAReadError) {
  FileStore store(options());
  fill(store);
  ASSERT_EQ(::truncate(store.file(0).path().c_str(), kHeader + 4 * kBlockBytes), 0);
  EXPECT_EQ(read(store, 0, 4).bytes(), 4 * kBlockBytes);
  expect_words(message_of<IoError>([&] { read(store, 3 * kBlockBytes, 3); }),
               {store.file(0).path(), "parameter 'b' to exp_avg of parameter 'c'"});
}

TEST_F(FileStoreTest, ADeletedDirectoryTakesNothingFromARunThatIsUnderWay) {
  FileStore store(options());
  const Blocks all = fill(store);
  fs::remove_all(disk(0));
  EXPECT_EQ(read(store, 0, 9), all);
  const std::uint64_t offset = store.allocate(kBlockBytes, "more");
  write(store, offset, Blocks(1, 3));
  EXPECT_EQ(read(store, offset, 1), Blocks(1, 3));
}

TEST_F(FileStoreTest, LostPermissionsTakeNothingFromARunThatIsUnderWay) {
  FileStore store(options());
  const Blocks all = fill(store);
  fs::permissions(store.file(0).path(), fs::perms::none);
  EXPECT_EQ(read(store, 0, 9), all);
  write(store, 0, Blocks(9, 2));
  EXPECT_EQ(read(store, 0, 9), Blocks(9, 2));
}

TEST_F(FileStoreTest, WaitsForWhatIsInFlightBeforeItCloses) {
  auto store = std::make_unique<FileStore>(options());
  const Blocks all = fill(*store);
  const Blocks memory(9);
  engine_.set_where_named(IoCall::kRead, "exp_avg", IoFault::kHold);
  const Pending pending = store->start_read(0, memory.data(), memory.bytes());
  std::atomic<bool> is_closing = false;
  std::thread releaser([&] {
    while (!is_closing) {
      std::this_thread::yield();
    }
    engine_.release();
  });
  is_closing = true;
  store.reset();
  EXPECT_TRUE(pending.done());
  releaser.join();
  EXPECT_EQ(memory, all);
}

class VerifiedFileStore : public FileStoreTest {
 protected:
  FileStoreOptions verified(std::size_t num_directories = 1) {
    FileStoreOptions options = this->options(num_directories);
    options.verify = true;
    return options;
  }
};

TEST_F(VerifiedFileStore, AByteChangedFromOutsideIsFoundWhereverItIs) {
  FileStore store(verified(3));
  fill(store);
  for (std::size_t block = 0; block < 9; ++block) {
    const Stripes::Piece piece =
        Stripes(3, 2 * kBlockBytes).cut(block * kBlockBytes, kBlockBytes).front();
    const std::uint64_t in_file = kHeader + piece.offset_in_file;
    const std::string& path = store.file(piece.file).path();
    flip(path, in_file + 17 * block);
    const Blocks memory(9);
    const Pending pending = store.start_read(0, memory.data(), memory.bytes());
    const char* const name = block < 2 ? "'a'" : block < 5 ? "'b'" : "'c'";
    expect_words(message_of<CorruptError>([&] { pending.wait(); }),
                 {path, "offset " + std::to_string(in_file) + " ",
                  std::string("exp_avg of parameter ") + name});
    EXPECT_THROW(pending.wait(), CorruptError);  // and again
    flip(path, in_file + 17 * block);
    read(store, 0, 9);
  }
}

TEST_F(VerifiedFileStore, OnlyWhatIsReadIsCompared) {
  FileStore store(verified());
  fill(store);
  flip(store.file(0).path(), kHeader + 5 * kBlockBytes);
  read(store, 0, 5);
  read(store, 6 * kBlockBytes, 3);
  EXPECT_THROW(read(store, 5 * kBlockBytes, 1), CorruptError);
  write(store, 5 * kBlockBytes, Blocks(1, 9));  // written again, it is right again
  EXPECT_EQ(read(store, 5 * kBlockBytes, 1), Blocks(1, 9));
}

TEST_F(VerifiedFileStore, BlocksThatWereNeverWrittenMustBeZero) {
  FileStore store(verified());
  store.allocate(2 * kBlockBytes, "parameter 'x'");
  EXPECT_EQ(read(store, 0, 2), Blocks(2));
  flip(store.file(0).path(), kHeader + kBlockBytes);
  expect_words(message_of<CorruptError>([&] { read(store, 0, 2); }), {"parameter 'x'"});
}

TEST_F(VerifiedFileStore, BitsThatChangeOnTheWayAreFoundInEitherDirection) {
  FileStore store(verified());
  fill(store);
  engine_.set_nth(IoCall::kRead, 0, IoFault::kCorrupt);
  EXPECT_THROW(read(store, 0, 4), CorruptError);
  read(store, 0, 4);
  engine_.set_nth(IoCall::kWrite, 1, IoFault::kCorrupt);
  write(store, 0, Blocks(4, 1));  // nobody knows yet
  EXPECT_THROW(read(store, 0, 4), CorruptError);
}

TEST_F(VerifiedFileStore, WithoutTheFlagNobodyLooks) {
  FileStore store(options());
  fill(store);
  flip(store.file(0).path(), kHeader);
  read(store, 0, 9);
  EXPECT_EQ(ledger_.current_bytes(Tier::kHost), 0U);
}

TEST_F(VerifiedFileStore, ChecksumsAreChargedEightBytesABlock) {
  {
    FileStore store(verified());
    fill(store);
    EXPECT_EQ(ledger_.current_bytes(Tier::kHost, Role::kOther), 9 * sizeof(std::uint64_t));
  }
  EXPECT_EQ(ledger_.current_bytes(Tier::kHost), 0U);
}

TEST_F(VerifiedFileStore, AReadIsDoneOnlyWhenItHasBeenCompared) {
  FileStore store(verified());
  const Blocks all = fill(store);
  engine_.set_where_named(IoCall::kRead, "exp_avg", IoFault::kHold);
  const Blocks memory(9);
  const Pending pending = store.start_read(0, memory.data(), memory.bytes());
  EXPECT_FALSE(pending.done());
  EXPECT_FALSE(pending.wait_for(std::chrono::nanoseconds(0)));
  engine_.release();
  while (!pending.done()) {
    std::this_thread::yield();
  }
  EXPECT_EQ(memory, all);
  // What is done stays done: the memory is the caller's again.
  memory.number(5);
  pending.wait();
  EXPECT_TRUE(pending.wait_for(std::chrono::nanoseconds(0)));
}

TEST_F(VerifiedFileStore, AReadMayBeAskedAboutWhenTheStoreIsGone) {
  auto store = std::make_unique<FileStore>(verified());
  fill(*store);
  flip(store->file(0).path(), kHeader);
  const Blocks memory(9);
  const Pending pending = store->start_read(0, memory.data(), memory.bytes());
  store.reset();
  EXPECT_THROW(pending.wait(), CorruptError);
}

TEST_F(VerifiedFileStore, AFailedReadIsAnIoErrorAndNotCorrupt) {
  FileStore store(verified());
  fill(store);
  engine_.set_nth(IoCall::kRead, 0, IoFault::kFail);
  EXPECT_THROW(read(store, 0, 9), IoError);
  engine_.set_nth(IoCall::kRead, 1, IoFault::kFail);
  const Blocks memory(1);
  const Pending pending = store.start_read(0, memory.data(), memory.bytes());
  EXPECT_TRUE(pending.done());
  EXPECT_THROW(static_cast<void>(pending.wait_for(std::chrono::seconds(1))), IoError);
}

// Before anything of this process has threads: the child is a copy of it.
TEST(FileStoreAfterAKill, TheNextStartIsCleanAndNothingElseIsTouched) {
  const TemporaryDirectory directory;
  FileStoreOptions options;
  options.directories = {directory.path().string()};
  options.name = {"killed", 3, "parameters"};
  testing::ProcessOptions child_options;
  child_options.body = [&] {
    const auto engine = make_threads();
    options.engine = engine.get();
    FileStore store(options);
    store.allocate(1 << 20, "parameter 'x'");
    const Blocks ones(4, 1);
    store.start_write(0, ones.data(), ones.bytes()).wait();
    std::cout << "ready" << std::endl;
    ::pause();
    return 0;
  };
  testing::Process child({"child"}, child_options);
  ASSERT_TRUE(child.wait_for_output("ready"));
  ::kill(child.pid(), SIGKILL);
  child.wait();
  const fs::path stale = directory.path() / "tessera-killed-rank3-parameters.scratch";
  const fs::path decoy = directory.path() / "tessera-killed-rank3-parameters.scratch.txt";
  ASSERT_TRUE(fs::exists(stale));
  fs::copy_file(stale, decoy);

  const auto engine = make_threads();
  options.engine = engine.get();
  FileStore store(options);  // the same name: it is free again
  store.allocate(1 << 20, "parameter 'x'");
  Blocks first(1, 9);
  store.start_read(0, first.data(), first.bytes()).wait();
  EXPECT_EQ(first, Blocks(1));
  EXPECT_TRUE(fs::exists(decoy));
}

}  // namespace
}  // namespace tessera::tier
