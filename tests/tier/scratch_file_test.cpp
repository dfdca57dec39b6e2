// Scratch files: what is made, what is refused, and what may be removed.
#include "tessera/tier/scratch_file.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/support/process.h"
#include "tests/support/temporary_directory.h"
#include "tests/tier/disk_support.h"

namespace tessera::tier {
namespace {

namespace fs = std::filesystem;
using testing::contents;
using testing::expect_words;
using testing::message_of;
using testing::Process;
using testing::ProcessOptions;
using testing::ProcessResult;
using testing::TemporaryDirectory;

constexpr std::uint64_t kHeader = ScratchFile::kDataOffset;

std::set<std::string> names_in_directory(const fs::path& directory) {
  std::set<std::string> names;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
    names.insert(entry.path().filename().string());
  }
  return names;
}

void put(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

// Runs as a user whom permissions concern, in a process of its own.
ProcessResult run_unprivileged(const std::function<int()>& body) {
  ProcessOptions options;
  options.body = [&body] {
    constexpr uid_t kNobody = 65534;
    if (::geteuid() == 0 && (::setgid(kNobody) != 0 || ::setuid(kNobody) != 0)) {
      std::cerr << "cannot become another user\n";
      return 2;
    }
    const int code = body();
    std::cout.flush();
    return code;
  };
  return testing::run_process({"unprivileged"}, options);
}

class ScratchFileTest : public ::testing::Test {
 protected:
  std::unique_ptr<ScratchFile> make(const std::string& run = "run1", int rank = 0,
                                    const std::string& role = "states") {
    return std::make_unique<ScratchFile>(path().string(), ScratchName{run, rank, role},
                                         DirectIo::kOff);
  }
  const fs::path& path() const { return directory_.path(); }

  TemporaryDirectory directory_;
};

TEST_F(ScratchFileTest, IsNamedByRunRankAndRoleAndNobodyElseMayReadIt) {
  {
    const auto file = make("2026-11-15.a_b", 12, "gradients");
    const std::string name = "tessera-2026-11-15.a_b-rank12-gradients.scratch";
    EXPECT_EQ(file->path(), (path() / name).string());
    EXPECT_EQ(names_in_directory(path()), std::set<std::string>{name});
    struct stat info {};
    ASSERT_EQ(::stat(file->path().c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 07777, 0600U);
    EXPECT_EQ(info.st_size, static_cast<off_t>(kHeader));
  }
  EXPECT_TRUE(names_in_directory(path()).empty());
}

TEST_F(ScratchFileTest, TakesTheBlocksWhenItIsExtended) {
  const auto file = make();
  const auto taken = [&] {
    struct stat info {};
    EXPECT_EQ(::stat(file->path().c_str(), &info), 0);
    EXPECT_EQ(static_cast<std::uint64_t>(info.st_size), kHeader + file->bytes());
    return static_cast<std::uint64_t>(info.st_blocks) * 512;
  };
  EXPECT_EQ(file->bytes(), 0U);
  file->extend(1 << 20);
  EXPECT_EQ(file->bytes(), 1U << 20);
  EXPECT_GE(taken(), 1U << 20);
  file->extend(4096);  // never less
  EXPECT_EQ(file->bytes(), 1U << 20);
  file->extend(3 << 20);
  EXPECT_GE(taken(), 3U << 20);
  EXPECT_EQ(contents(file->path()).find_first_not_of('\0', kHeader), std::string::npos);
}

TEST_F(ScratchFileTest, RefusesMoreThanIsFreeAndStaysAsItWas) {
  const auto file = make();
  file->extend(8192);
  struct statvfs info {};
  ASSERT_EQ(::statvfs(path().c_str(), &info), 0);
  const std::uint64_t all = static_cast<std::uint64_t>(info.f_blocks) * info.f_frsize;
  const std::string text = message_of<IoError>([&] { file->extend(8192 + all); });
  expect_words(text, {file->path(), std::to_string(all) + " bytes", "are free", "which has 8192",
                      "another disk"});
  EXPECT_EQ(file->bytes(), 8192U);
  EXPECT_EQ(fs::file_size(file->path()), kHeader + 8192);
}

TEST_F(ScratchFileTest, RefusesMoreThanThisProcessMayWrite) {
  const auto file = make();
  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  struct rlimit small = before;
  small.rlim_cur = 64 << 10;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string text = message_of<IoError>([&] { file->extend(1 << 20); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  expect_words(text, {file->path(), "1048576", "65536", "ulimit -f"});
  EXPECT_EQ(fs::file_size(file->path()), kHeader);
}

TEST_F(ScratchFileTest, RefusesAFileThatExists) {
  const auto file = make();
  expect_words(message_of<IoError>([&] { make(); }), {"tessera-run1-rank0-states.scratch", "id"});
  EXPECT_TRUE(fs::exists(file->path()));
}

TEST_F(ScratchFileTest, RefusesRunsThatCannotBeNames) {
  for (const std::string& run : {std::string(), std::string("a/b"), std::string("a b"),
                                 std::string("a\n"), std::string(400, 'a')}) {
    EXPECT_THROW(make(run), ConfigError) << run;
  }
  EXPECT_THROW(make("run", -1), InternalError);
  EXPECT_THROW(make("run", 0, "a-b"), InternalError);
  EXPECT_TRUE(names_in_directory(path()).empty());
}

TEST_F(ScratchFileTest, NamesThePathAndTheRemedyOfADirectoryThatIsNotThere) {
  const fs::path missing = path() / "missing";
  const std::string text = message_of<IoError>(
      [&] { ScratchFile(missing.string(), {"run", 0, "states"}, DirectIo::kOff); });
  expect_words(text, {missing.string(), "No such file"});
}

TEST_F(ScratchFileTest, WhenClosedLeavesAFileAloneThatTookItsName) {
  auto file = make();
  fs::rename(file->path(), path() / "moved away");
  put(file->path(), "somebody's");
  const fs::path name = file->path();
  file.reset();
  EXPECT_EQ(contents(name), "somebody's");
  EXPECT_TRUE(fs::exists(path() / "moved away"));
}

TEST_F(ScratchFileTest, OutlivesItsDirectory) {
  const fs::path inner = path() / "inner";
  fs::create_directory(inner);
  ScratchFile file(inner.string(), {"run", 0, "states"}, DirectIo::kOff);
  fs::remove_all(inner);
  file.extend(8192);
  EXPECT_EQ(::pwrite(file.io_file().fd(), "x", 1, kHeader), 1);
}

TEST(CheckScratchDirectory, TakesADirectoryOnADiskAndLeavesNothingInIt) {
  const TemporaryDirectory directory;
  struct statfs info {};
  ASSERT_EQ(::statfs(directory.path().c_str(), &info), 0);
  if (info.f_type == 0x01021994) {
    GTEST_SKIP() << directory.path() << " is on tmpfs; set TMPDIR to a directory on a disk";
  }
  check_scratch_directory(directory.path().string());
  EXPECT_TRUE(fs::is_empty(directory.path()));
}

TEST(CheckScratchDirectory, RefusesWhatIsMissingOrNoDirectory) {
  const TemporaryDirectory directory;
  const std::string missing = (directory.path() / "missing").string();
  expect_words(message_of<ConfigError>([&] { check_scratch_directory(missing); }),
               {missing, "No such file", "create it"});
  const std::string file = (directory.path() / "file").string();
  put(file, "");
  expect_words(message_of<ConfigError>([&] { check_scratch_directory(file); }),
               {file, "not a directory"});
  EXPECT_THROW(check_scratch_directory(""), ConfigError);
}

TEST(CheckScratchDirectory, RefusesMemory) {
  struct statfs info {};
  if (::statfs("/dev/shm", &info) != 0 || info.f_type != 0x01021994) {
    GTEST_SKIP() << "/dev/shm is not tmpfs here";
  }
  expect_words(message_of<ConfigError>([] { check_scratch_directory("/dev/shm"); }),
               {"/dev/shm", "tmpfs", "not a disk"});
}

TEST(CheckScratchDirectory, RefusesWhatThisUserCannotWriteTo) {
  const ProcessResult result = run_unprivileged([] {
    const TemporaryDirectory directory;
    fs::permissions(directory.path(), fs::perms::owner_read | fs::perms::owner_exec);
    int code = 1;
    try {
      check_scratch_directory(directory.path().string());
    } catch (const ConfigError& error) {
      std::cout << error.what();
      code = 0;
    }
    fs::permissions(directory.path(), fs::perms::owner_all);
    return code;
  });
  EXPECT_EQ(result.exit_code, 0) << result.err;
  expect_words(result.out, {"cannot be written to", "Permission denied"});
}

TEST_F(ScratchFileTest, LeavesNoNameWhenItsProcessSaysThatItEnds) {
  const auto file = make();
  ASSERT_TRUE(fs::exists(file->path()));
  unlink_scratch_files();
  EXPECT_FALSE(fs::exists(file->path()));
  file->extend(8192);  // the file itself is there until it is closed
}

class RemoveStale : public ScratchFileTest {
 protected:
  // A file as kill -9 leaves it: the child is gone, and with it the lock.
  std::string leave_stale(const std::string& run = "dead") {
    ProcessOptions options;
    options.body = [&] {
      const auto file = make(run);
      file->extend(8192);
      std::cout << "ready" << std::endl;
      ::pause();
      return 0;
    };
    Process child({"child"}, options);
    EXPECT_TRUE(child.wait_for_output("ready"));
    ::kill(child.pid(), SIGKILL);
    EXPECT_EQ(child.wait().exit_code, 128 + SIGKILL);
    return "tessera-" + run + "-rank0-states.scratch";
  }
};

TEST_F(RemoveStale, FilesOfARunThatWasKilledGo) {
  const std::string name = leave_stale();
  ASSERT_EQ(names_in_directory(path()), std::set<std::string>{name});
  EXPECT_EQ(remove_stale(path().string()), std::vector<std::string>{name});
  EXPECT_TRUE(names_in_directory(path()).empty());
  EXPECT_TRUE(remove_stale(path().string()).empty());
}

TEST_F(RemoveStale, FilesOfRunsThatLiveStay) {
  ProcessOptions options;
  options.body = [&] {
    const auto file = make("other");
    std::cout << "ready" << std::endl;
    ::pause();
    return 0;
  };
  Process child({"child"}, options);
  ASSERT_TRUE(child.wait_for_output("ready"));
  const auto own = make("own");
  EXPECT_TRUE(remove_stale(path().string()).empty());
  EXPECT_EQ(names_in_directory(path()).size(), 2U);
  ::kill(child.pid(), SIGKILL);
  child.wait();
  EXPECT_EQ(remove_stale(path().string()),
            std::vector<std::string>{"tessera-other-rank0-states.scratch"});
  EXPECT_TRUE(fs::exists(own->path()));
}

// The file that would be ours if it had this name: its header says so.
std::string renamed(std::string image, const std::string& name) {
  constexpr std::size_t kLength = 20;  // behind magic and version
  const auto length = static_cast<std::uint32_t>(name.size());
  std::memcpy(image.data() + kLength, &length, sizeof(length));
  image.replace(kLength + sizeof(length), name.size(), name);
  return image;
}

TEST_F(RemoveStale, ACopyUnderItsOwnTrueNameIsOurs) {
  const std::string stale = leave_stale();
  const std::string name = "tessera-copy-rank10-gradients.scratch";
  put(path() / name, renamed(contents(path() / stale), name));
  EXPECT_EQ(remove_stale(path().string()), (std::vector<std::string>{name, stale}));
}

// Near names with a true header, true names with a near header, and things that are no files.
TEST_F(RemoveStale, NothingElseIsEverTouched) {
  const std::string stale = leave_stale();
  const std::string image = contents(path() / stale);
  for (const char* const name :
       {"tessera-dead-rank0-states.scratch.bak", "tessera-dead-rank0-states.Scratch",
        "tessera-dead-rank00-states.scratch", "tessera-dead-rankx-states.scratch",
        "tessera-dead-rank-states.scratch", "tessera-dead-rank0-.scratch",
        "tessera-dead-rank0-States.scratch", "tessera-dead-rank0.scratch",
        "tessera--rank0-states.scratch", "tessera-rank0-states.scratch",
        "tessera-de ad-rank0-states.scratch", "xtessera-dead-rank0-states.scratch",
        "tessera-.scratch", "tessera-dead-rank0-states.scratch~", ".scratch", "tessera-",
        "notes.txt"}) {
    put(path() / name, renamed(image, name));
  }
  // The header of another file, none, a short one, a wrong magic.
  put(path() / "tessera-copy-rank0-states.scratch", image);
  put(path() / "tessera-empty-rank0-states.scratch", "");
  put(path() / "tessera-text-rank0-states.scratch", std::string(10000, 'a'));
  put(path() / "tessera-short-rank0-states.scratch", image.substr(0, 24));
  std::string wrong = image;
  wrong[3] ^= 1;
  const fs::path keep = path() / "keep";
  fs::create_directory(keep);
  put(keep / stale, wrong);
  // A folder, a link to a stale file elsewhere, a pipe.
  fs::create_directory(path() / "tessera-folder-rank0-states.scratch");
  fs::create_directory(path() / "elsewhere");
  fs::copy_file(path() / stale, path() / "elsewhere" / stale);
  fs::create_symlink("elsewhere/" + stale, path() / "tessera-link-rank0-states.scratch");
  ASSERT_EQ(::mkfifo((path() / "tessera-pipe-rank0-states.scratch").c_str(), 0600), 0);

  std::set<std::string> expected = names_in_directory(path());
  expected.erase(stale);
  EXPECT_EQ(remove_stale(path().string()), std::vector<std::string>{stale});
  EXPECT_EQ(names_in_directory(path()), expected);
  EXPECT_EQ(contents(path() / "tessera-copy-rank0-states.scratch"), image);
  EXPECT_TRUE(remove_stale(keep.string()).empty());
  EXPECT_EQ(contents(keep / stale), wrong);
  EXPECT_EQ(contents(path() / "elsewhere" / stale), image);
}

TEST_F(RemoveStale, ALinkWithATrueNameIsNotFollowed) {
  const std::string stale = leave_stale();
  const fs::path elsewhere = path() / "elsewhere";
  fs::create_directory(elsewhere);
  fs::rename(path() / stale, elsewhere / stale);
  fs::create_symlink(elsewhere / stale, path() / stale);
  EXPECT_TRUE(remove_stale(path().string()).empty());
  EXPECT_TRUE(fs::is_symlink(path() / stale));
  EXPECT_TRUE(fs::exists(elsewhere / stale));
}

TEST_F(RemoveStale, SaysWhichDirectoryItCannotLookInto) {
  const std::string missing = (path() / "missing").string();
  expect_words(message_of<IoError>([&] { remove_stale(missing); }), {missing, "stale"});
}

// What could not be removed when it was closed is removed when it can be.
TEST_F(RemoveStale, AFileWhoseDirectoryWasClosedToUsGoesWithTheNextRun) {
  const ProcessResult result = run_unprivileged([] {
    const TemporaryDirectory directory;
    auto file = std::make_unique<ScratchFile>(directory.path().string(),
                                              ScratchName{"run", 0, "states"}, DirectIo::kOff);
    fs::permissions(directory.path(), fs::perms::owner_read | fs::perms::owner_exec);
    file->extend(8192);  // what is open stays usable
    file.reset();
    std::cout << "left " << names_in_directory(directory.path()).size();
    fs::permissions(directory.path(), fs::perms::owner_all);
    std::cout << ", removed " << remove_stale(directory.path().string()).size();
    return 0;
  });
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, "left 1, removed 1");
}

}  // namespace
}  // namespace tessera::tier
