// Where the kernel refuses io_uring: from the start, or in the middle of the work. Each test is a
// process of its own, since a system call that was forbidden stays so.
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/tier/io_engine.h"
#include "tests/support/aligned_bytes.h"
#include "tests/support/process.h"
#include "tests/support/temporary_directory.h"

namespace tessera::tier {
namespace {

// For all threads of this process.
bool forbid_system_call(unsigned number) {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{static_cast<unsigned short>(std::size(program)), program};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &filter) == 0;
}

constexpr int kAsPromised = 0;
constexpr int kNotAsPromised = 1;
constexpr int kCannotForbid = 77;

int fall_back_to_threads() {
  if (!forbid_system_call(SYS_io_uring_setup)) {
    return kCannotForbid;
  }
  std::vector<std::string> notices;
  const auto engine =
      make_io_engine({}, [&notices](const std::string& text) { notices.push_back(text); });
  if (engine->name() != "threads" || notices.size() != 1 ||
      notices[0].find("files are read and written by threads: ") != 0) {
    return kNotAsPromised;
  }
  IoOptions options;
  options.kind = IoKind::kUring;
  try {
    make_io_engine(options, nullptr);
  } catch (const ConfigError& error) {
    const std::string message = error.what();
    return message.find("io_uring was asked for, but ") == 0 &&
                   message.find("choose the engine auto or threads") != std::string::npos
               ? kAsPromised
               : kNotAsPromised;
  }
  return kNotAsPromised;
}

int fail_what_a_broken_ring_cannot_take(const std::string& path) {
  IoOptions options;
  options.kind = IoKind::kUring;
  options.block_bytes = kBlockBytes;
  options.queue_depth = 4;
  options.num_threads = 1;
  auto engine = make_io_engine(options, nullptr);
  const auto file = open_io_file(path, O_RDWR | O_CREAT, DirectIo::kOff);
  testing::AlignedBytes data(20 * kBlockBytes);
  engine->start_write(*file, 0, data.data(), data.bytes(), "before").wait();
  if (!forbid_system_call(SYS_io_uring_enter)) {
    return kCannotForbid;
  }
  std::vector<Pending> writes;
  for (int i = 0; i < 6; ++i) {
    writes.push_back(engine->start_write(*file, 0, data.data(), data.bytes(), "after"));
  }
  int num_failed = 0;
  for (const Pending& write : writes) {
    try {
      write.wait();
    } catch (const IoError& error) {
      num_failed += std::string(error.what()).find("(1); after;") != std::string::npos ? 1 : 0;
    }
  }
  engine.reset();
  return num_failed == 6 ? kAsPromised : kNotAsPromised;
}

int outcome_in_a_process(std::function<int()> body) {
  testing::ProcessOptions options;
  options.body = std::move(body);
  const testing::ProcessResult result = testing::run_process({"body"}, options);
  EXPECT_FALSE(result.timed_out);
  EXPECT_EQ(result.err, "");
  return result.exit_code;
}

TEST(UringEngine, WhereItIsForbiddenThreadsDoTheWorkAndOneSentenceSaysWhy) {
  const int outcome = outcome_in_a_process(fall_back_to_threads);
  if (outcome == kCannotForbid) {
    GTEST_SKIP() << "this kernel cannot forbid system calls (seccomp)";
  }
  EXPECT_EQ(outcome, kAsPromised);
}

TEST(UringEngine, WhatABrokenRingCannotTakeFailsInsteadOfWaitingForEver) {
  const testing::TemporaryDirectory directory;
  try {
    IoOptions options;
    options.kind = IoKind::kUring;
    make_io_engine(options, nullptr);
  } catch (const ConfigError& error) {
    GTEST_SKIP() << error.what();
  }
  const std::string path = (directory.path() / "data").string();
  const int outcome =
      outcome_in_a_process([&path] { return fail_what_a_broken_ring_cannot_take(path); });
  if (outcome == kCannotForbid) {
    GTEST_SKIP() << "this kernel cannot forbid system calls (seccomp)";
  }
  EXPECT_EQ(outcome, kAsPromised);
}

TEST(MakeIoEngine, RefusesOptionsThatNoDiskTakes) {
  const auto make = [](std::size_t block_bytes, int depth, int threads) {
    IoOptions options;
    options.block_bytes = block_bytes;
    options.queue_depth = depth;
    options.num_threads = threads;
    make_io_engine(options, nullptr);
  };
  EXPECT_THROW(make(0, 1, 1), ConfigError);
  EXPECT_THROW(make(5000, 1, 1), ConfigError);
  EXPECT_THROW(make(std::size_t{1} << 31, 1, 1), ConfigError);
  EXPECT_THROW(make(4096, 0, 1), ConfigError);
  EXPECT_THROW(make(4096, 1, 0), ConfigError);
  EXPECT_NO_THROW(make(4096, 65536, 2));  // more than a ring has entries: as many as it has
}

TEST(OpenIoFile, SaysWhatCouldNotBeOpenedAndWhatHelps) {
  const testing::TemporaryDirectory directory;
  try {
    open_io_file((directory.path() / "none" / "file").string(), O_RDWR | O_CREAT, DirectIo::kAuto);
    FAIL() << "expected IoError";
  } catch (const IoError& error) {
    EXPECT_NE(std::string(error.what()).find("none/file: No such file or directory (2); create"),
              std::string::npos)
        << error.what();
  }
}

TEST(OpenIoFile, WhereDirectIoCannotBeHadItIsAnErrorOnlyIfItWasAskedFor) {
  EXPECT_FALSE(open_io_file("/proc/self/status", O_RDONLY, DirectIo::kAuto)->is_direct());
  EXPECT_THROW(open_io_file("/proc/self/status", O_RDONLY, DirectIo::kOn), ConfigError);
}

}  // namespace
}  // namespace tessera::tier
