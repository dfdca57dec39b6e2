#include "tessera/checkpoint/save_directory.h"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/checkpoint/file_size_limit.h"
#include "tests/checkpoint/safetensors_file.h"
#include "tests/support/contains.h"
#include "tests/support/temporary_directory.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using testing::FileSizeLimit;
using testing::read_text;
using testing::TemporaryDirectory;
using testing::write_text;

constexpr const char* kDataFile = "rank-0.safetensors";

// Writes a save whose one file says which step it is of.
std::string write_save(const fs::path& root, std::int64_t step,
                       const NewSaveOptions& options = {}) {
  NewSave save(root, step, options);
  const std::string text = "step " + std::to_string(step);
  write_text(fs::path(save.path()) / kDataFile, text);
  Manifest manifest;
  manifest.step = step;
  manifest.sequence = save.sequence();
  manifest.files = {{kDataFile, text.size()}};
  std::string path = save.commit(manifest);
  remove_replaced(save.replaced(), options.on_disk_step);
  return path;
}

std::set<std::string> entries_of(const fs::path& directory) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory)) {
    names.insert(entry.path().filename().string());
  }
  return names;
}

using Names = std::set<std::string>;

template <typename Exception, typename Work>
std::string refusal_of(Work work) {
  try {
    work();
  } catch (const Exception& e) {
    EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos) << "one line";
    return e.what();
  }
  return "nothing was thrown";
}

TEST(SaveDirectory, ASaveIsThereOnceItIsComplete) {
  const TemporaryDirectory folder;
  const std::string root = folder.path() / "runs" / "a";
  EXPECT_TRUE(list_saves(root).empty());
  {
    NewSave save(root, 60, {});
    EXPECT_EQ(save.sequence(), 1);
    EXPECT_TRUE(fs::is_directory(save.path()));
    EXPECT_EQ(fs::path(save.path()).parent_path(), root);
    EXPECT_TRUE(list_saves(root).empty());
  }
  EXPECT_EQ(entries_of(root), Names{".lock"}) << "one that was given up leaves nothing";
  const std::string path = write_save(root, 60);
  EXPECT_EQ(path, root + "/save-00001-step-60");
  EXPECT_EQ(entries_of(root), (Names{".lock", "save-00001-step-60"}));
  EXPECT_EQ(entries_of(path), (Names{"manifest.json", kDataFile}));
  ASSERT_EQ(list_saves(root).size(), 1U);
  EXPECT_EQ(list_saves(root)[0].path, path);
  EXPECT_EQ(list_saves(root)[0].sequence, 1);
  EXPECT_EQ(list_saves(root)[0].step, 60);
  EXPECT_EQ(find_save(root), path);
  EXPECT_EQ(find_save(path), path);
  EXPECT_EQ(find_save(path + "/"), path + "/");
  EXPECT_EQ(read_manifest(path).step, 60);
}

TEST(SaveDirectory, KeepsTheNewestAndRemovesTheOldest) {
  const TemporaryDirectory folder;
  write_save(folder.path(), 10, {.keep = 2});
  write_save(folder.path(), 20, {.keep = 2});
  write_save(folder.path(), 30, {.keep = 2});
  EXPECT_EQ(entries_of(folder.path()),
            (Names{".lock", "save-00002-step-20", "save-00003-step-30"}));
  // Training went on from step 20: what is saved last is the newest, whatever its step.
  write_save(folder.path(), 25, {.keep = 2});
  EXPECT_EQ(entries_of(folder.path()),
            (Names{".lock", "save-00003-step-30", "save-00004-step-25"}));
  EXPECT_EQ(find_save(folder.path()), folder.path() / "save-00004-step-25");
  write_save(folder.path(), 25);
  EXPECT_EQ(entries_of(folder.path()), (Names{".lock", "save-00005-step-25"}));
  EXPECT_EQ(refusal_of<ConfigError>([&] { write_save(folder.path(), 1, {.keep = 0}); }),
            "keep 0 checkpoints? The new one is one of them: at least 1");
}

TEST(SaveDirectory, WhatWasReplacedMayBeRemovedByTheNextSaveFirst) {
  const TemporaryDirectory folder;
  write_save(folder.path(), 1);
  NewSave save(folder.path(), 2, {});
  Manifest manifest;
  manifest.step = 2;
  manifest.sequence = save.sequence();
  save.commit(manifest);
  ASSERT_EQ(save.replaced().size(), 1U);
  EXPECT_TRUE(fs::exists(save.replaced()[0]));
  ASSERT_EQ(list_saves(folder.path()).size(), 1U);
  EXPECT_EQ(list_saves(folder.path())[0].step, 2);
  fs::remove_all(save.replaced()[0]);
  remove_replaced(save.replaced());
}

TEST(SaveDirectory, TheNewestIsThatOfTheHighestNumberAlsoBeyondFiveDigits) {
  const TemporaryDirectory folder;
  const std::string last = folder.path() / "save-99999-step-1";
  fs::rename(write_save(folder.path(), 1), last);
  EXPECT_EQ(write_save(folder.path(), 2, {.keep = 9}), folder.path() / "save-100000-step-2");
  ASSERT_EQ(list_saves(folder.path()).size(), 2U);
  EXPECT_EQ(list_saves(folder.path())[0].path, last);
  EXPECT_EQ(find_save(folder.path()), folder.path() / "save-100000-step-2");
}

TEST(SaveDirectory, OnlyWhatIsOursIsListedOrRemoved) {
  const TemporaryDirectory folder;
  const Names others = {"save-",
                        "save-1",
                        "save-x-step-1",
                        "save-00001-step-",
                        "save-00001-step-1-copy",
                        "save--1-step-1",
                        "save-99999999999999999999-step-1",
                        "my-save-00001-step-1",
                        "notes.txt",
                        ".unfinished",
                        ".unfinished-mine"};
  for (const std::string& name : others) {
    fs::create_directory(folder.path() / name);
    write_text(folder.path() / name / "manifest.json", "x");
  }
  fs::create_directory(folder.path() / "save-00003-step-7");  // without a manifest
  fs::create_directory_symlink(folder.path() / "notes.txt",
                               folder.path() / ".unfinished-00001-step-1-a");
  EXPECT_TRUE(list_saves(folder.path()).empty());
  write_save(folder.path(), 1);
  write_save(folder.path(), 2);
  Names left = others;
  left.insert({".lock", "save-00003-step-7", "save-00003-step-2"});
  EXPECT_EQ(entries_of(folder.path()), left);
  EXPECT_EQ(read_text(folder.path() / "notes.txt" / "manifest.json"), "x") << "behind a link";
}

TEST(SaveDirectory, WhatAKilledRunLeftIsRemovedByTheNextSave) {
  const TemporaryDirectory folder;
  const fs::path left = folder.path() / ".unfinished-00041-step-70-123-0";
  fs::create_directories(left / "deeper");
  write_text(left / "manifest.json", "{");
  write_text(left / "deeper" / "file", "x");
  EXPECT_TRUE(list_saves(folder.path()).empty());
  EXPECT_EQ(write_save(folder.path(), 80), folder.path() / "save-00042-step-80")
      << "its number is not used again";
  EXPECT_EQ(entries_of(folder.path()), (Names{".lock", "save-00042-step-80"}));
}

TEST(SaveDirectory, ASecondRunIsRefusedWithTheProcessOfTheFirst) {
  const TemporaryDirectory folder;
  auto first = std::make_unique<NewSave>(folder.path(), 1, NewSaveOptions());
  const std::string message = refusal_of<ConfigError>([&] { NewSave(folder.path(), 1, {}); });
  EXPECT_PRED2(contains, message,
               folder.path().string() + ": process " + std::to_string(::getpid()) + " on ");
  EXPECT_PRED2(contains, message,
               " uses this directory of checkpoints; wait until it has ended, end it, or choose");
  EXPECT_TRUE(fs::exists(first->path())) << "the other's work is left alone";
  first.reset();
  write_save(folder.path(), 2);
}

TEST(SaveDirectory, ALockThatIsHeldForARunLetsItsOwnSavesInAndNobodyElse) {
  const TemporaryDirectory folder;
  const std::string root = folder.path() / "runs" / "a";
  auto lock = std::make_shared<const DirectoryLock>(root);
  EXPECT_TRUE(lock->is_of(root));
  EXPECT_FALSE(lock->is_of(folder.path()));
  const std::string message = refusal_of<ConfigError>([&] { write_save(root, 1); });
  EXPECT_PRED2(contains, message, root + ": process " + std::to_string(::getpid()) + " on ");
  EXPECT_THROW(const DirectoryLock second(root), ConfigError);
  write_save(root, 1, {.lock = lock});
  write_save(root, 2, {.lock = lock});
  EXPECT_THROW(const DirectoryLock second(root), ConfigError) << "saves do not give it back";
  write_save(folder.path() / "other", 1, {.lock = lock});
  EXPECT_FALSE(lock->is_of(folder.path() / "other")) << "which has taken its own for that save";
  // Somebody has removed the directory: the lock is of another one.
  fs::remove_all(root);
  EXPECT_FALSE(lock->is_of(root));
  write_save(root, 3, {.lock = lock});
  EXPECT_EQ(entries_of(root), (Names{".lock", "save-00001-step-3"}));
  lock.reset();
  write_save(root, 4);
}

TEST(SaveDirectory, ARunThatWasKilledHoldsNoLock) {
  const TemporaryDirectory folder;
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const DirectoryLock lock(folder.path());
    ::kill(::getpid(), SIGKILL);
    ::_exit(1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_TRUE(fs::exists(folder.path() / ".lock"));
  const DirectoryLock lock(folder.path());
}

TEST(SaveDirectory, WhatCannotBeRemovedIsToldAndCostsNoSave) {
  const TemporaryDirectory folder;
  const fs::path left = folder.path() / ".unfinished-00041-step-70-123-0";
  fs::create_directories(left);
  write_text(left / "first", "x");
  std::vector<std::string> warnings;
  NewSaveOptions options;
  options.warn = [&warnings](const std::string& text) { warnings.push_back(text); };
  // Somebody writes to it again and again.
  options.on_disk_step = [&left](std::string_view what) {
    if (what == "removed a file" && fs::exists(left)) {
      write_text(left / "again", "x");
    }
  };
  EXPECT_EQ(write_save(folder.path(), 80, options), folder.path() / "save-00042-step-80");
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_PRED2(contains, warnings[0], "what a run left unfinished stays, and takes room");
  EXPECT_PRED2(contains, warnings[0], left.string() + ": cannot remove the directory: ");
  EXPECT_EQ(entries_of(folder.path()),
            (Names{".lock", left.filename().string(), "save-00042-step-80"}));
  options.warn = {};
  EXPECT_EQ(write_save(folder.path(), 81, options), folder.path() / "save-00043-step-81");
  write_save(folder.path(), 82);
  EXPECT_EQ(entries_of(folder.path()), (Names{".lock", "save-00044-step-82"}));
}

TEST(SaveDirectory, AManifestThatNoReaderWouldTakeIsNotWritten) {
  const TemporaryDirectory folder;
  const std::string old = write_save(folder.path(), 1);
  const std::uint64_t bytes = fs::file_size(fs::path(old) / "manifest.json");
  write_save(folder.path(), 2, {.keep = 2, .max_manifest_bytes = bytes});
  const std::string message =
      refusal_of<IoError>([&] { write_save(folder.path(), 3, {.max_manifest_bytes = bytes - 1}); });
  EXPECT_PRED2(contains, message,
               "manifest.json: would have " + std::to_string(bytes) +
                   " bytes, and readers take at most " + std::to_string(bytes - 1));
  EXPECT_PRED2(contains, message, "save with fewer ranks");
  EXPECT_EQ(entries_of(folder.path()), (Names{".lock", "save-00001-step-1", "save-00002-step-2"}));
}

TEST(SaveDirectory, LinksAreFollowedAlsoWhereTheyLeadToNothingYet) {
  const TemporaryDirectory folder;
  fs::create_directory_symlink("disk", folder.path() / "link");
  const std::string path = write_save(folder.path() / "link", 1);
  EXPECT_TRUE(fs::is_symlink(folder.path() / "link"));
  EXPECT_EQ(fs::path(path), folder.path() / "disk" / "save-00001-step-1");
  EXPECT_EQ(find_save(folder.path() / "link"), folder.path() / "link" / "save-00001-step-1");
  write_save(folder.path() / "link", 2);
  EXPECT_EQ(entries_of(folder.path() / "disk"), (Names{".lock", "save-00002-step-2"}));
}

TEST(SaveDirectory, FindSaysWhatIsThereInstead) {
  const TemporaryDirectory folder;
  const auto found = [](const fs::path& path) {
    return refusal_of<ConfigError>([&] { find_save(path); });
  };
  EXPECT_EQ(found(folder.path() / "none"),
            (folder.path() / "none").string() +
                ": neither a checkpoint nor a directory of checkpoints: there is no such "
                "directory; name what --checkpoint named when it was saved");
  EXPECT_PRED2(contains, found(folder.path()), "the directory is empty");
  write_text(folder.path() / "file", "x");
  EXPECT_PRED2(contains, found(folder.path() / "file"), "it is not a directory");
  for (const char* const name : {"a", "b", "c", "d", "e"}) {
    write_text(folder.path() / name, "x");
  }
  EXPECT_PRED2(contains, found(folder.path()), "the directory holds a, b, c, d, e, ...");
  const fs::path root = folder.path() / "root";
  fs::create_directories(root / ".unfinished-00001-step-1-2-3");
  EXPECT_PRED2(contains, found(root),
               "it holds 1 save that a run did not finish, and no complete one");
  EXPECT_PRED2(contains, found(root / ".unfinished-00001-step-1-2-3/"),
               "a save that is being written, or that a run did not finish");
}

TEST(SaveDirectory, ThatCannotBeOneIsNamed) {
  const TemporaryDirectory folder;
  write_text(folder.path() / "file", "x");
  EXPECT_EQ(refusal_of<ConfigError>([&] { NewSave(folder.path() / "file", 1, {}); }),
            (folder.path() / "file").string() +
                ": is not a directory; name one that checkpoints can be written to");
  EXPECT_PRED2(contains, refusal_of<IoError>([&] { NewSave(folder.path() / "file" / "a", 1, {}); }),
               "Not a directory; check the name");
  EXPECT_PRED2(contains, refusal_of<IoError>([] { NewSave("/proc/checkpoints", 1, {}); }),
               "/proc/checkpoints: cannot make the directory: ");
  if (::geteuid() != 0) {  // root may write anywhere
    fs::create_directory(folder.path() / "locked");
    ::chmod((folder.path() / "locked").c_str(), 0500);
    EXPECT_PRED2(contains, refusal_of<IoError>([&] { NewSave(folder.path() / "locked", 1, {}); }),
                 "cannot open the lock: Permission denied; check the permissions");
  }
}

TEST(SaveDirectory, ASaveWhoseFilesAreNotThoseOfItsManifestIsNotUsed) {
  const TemporaryDirectory folder;
  write_save(folder.path(), 1);
  NewSave save(folder.path(), 2, {});
  Manifest manifest;
  manifest.step = 2;
  manifest.sequence = save.sequence();
  manifest.files = {{kDataFile, 8}};
  EXPECT_PRED2(contains, refusal_of<IoError>([&] { save.commit(manifest); }),
               std::string(kDataFile) + ": cannot open: No such file or directory");
  write_text(fs::path(save.path()) / kDataFile, "short");
  EXPECT_PRED2(contains, refusal_of<IoError>([&] { save.commit(manifest); }),
               "has 5 bytes after 8 were written; the save is not used");
  manifest.step = 3;
  EXPECT_THROW(save.commit(manifest), InternalError);
  EXPECT_EQ(find_save(folder.path()), folder.path() / "save-00001-step-1");
}

TEST(SaveDirectory, AFullDiskLeavesTheOldSaveAndNothingElse) {
  const TemporaryDirectory folder;
  write_save(folder.path(), 1);
  const std::string message = refusal_of<IoError>([&] {
    const FileSizeLimit limit(100);
    write_save(folder.path(), 2);
  });
  EXPECT_PRED2(contains, message, "manifest.json: cannot write the next ");
  EXPECT_PRED2(contains, message, "free some space, or choose a folder on another disk");
  EXPECT_EQ(entries_of(folder.path()), (Names{".lock", "save-00001-step-1"}));
}

TEST(SaveDirectory, AManifestThatIsNoFileOrTooLongIsNamed) {
  const TemporaryDirectory folder;
  EXPECT_PRED2(contains, refusal_of<IoError>([&] { read_manifest(folder.path()); }),
               "manifest.json: cannot open: No such file");
  ASSERT_EQ(::mkfifo((folder.path() / "manifest.json").c_str(), 0600), 0);
  EXPECT_PRED2(contains, refusal_of<IoError>([&] { read_manifest(folder.path()); }),
               "not a regular file");
  fs::remove(folder.path() / "manifest.json");
  write_text(folder.path() / "manifest.json", "");
  fs::resize_file(folder.path() / "manifest.json", std::uintmax_t{3} << 30);  // a hole
  EXPECT_PRED2(contains, refusal_of<CorruptError>([&] { read_manifest(folder.path()); }),
               "a manifest has at most 1073741824");
}

// The steps that a save makes, in their order.
std::vector<std::string> disk_steps(const fs::path& root, std::int64_t step) {
  std::vector<std::string> steps;
  write_save(root, step,
             {.on_disk_step = [&steps](std::string_view what) { steps.emplace_back(what); }});
  return steps;
}

// Saves in a process of its own, which ends like one that is killed after its n-th step.
void save_and_be_killed(const fs::path& root, std::int64_t step, std::size_t after) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    std::size_t num_done = 0;
    const auto count = [&num_done, after](std::string_view) {
      if (++num_done == after) {
        ::kill(::getpid(), SIGKILL);
      }
    };
    write_save(root, step, {.on_disk_step = count});
    ::_exit(1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << "it was not killed";
}

TEST(SaveDirectoryCrash, AfterEachStepTheOldOrTheNewSaveIsThereWhole) {
  const TemporaryDirectory folder;
  const fs::path like = folder.path() / "like";
  write_save(like, 10);
  const std::vector<std::string> steps = disk_steps(like, 20);
  EXPECT_EQ(steps, (std::vector<std::string>{
                       "took the lock", "made the directory", "made the manifest's file",
                       "wrote the manifest", "synced the manifest", "renamed the manifest",
                       "synced the save's directory", "renamed the save", "synced the root",
                       "renamed an old save", "synced the root", "removed a file", "removed a file",
                       "removed a directory"}));
  const std::size_t complete_after = 8;
  for (std::size_t after = 1; after <= steps.size(); ++after) {
    SCOPED_TRACE("killed when it had " + steps[after - 1]);
    const fs::path root = folder.path() / std::to_string(after);
    write_save(root, 10);
    save_and_be_killed(root, 20, after);

    const std::int64_t step = after < complete_after ? 10 : 20;
    const std::string found = find_save(root);
    EXPECT_EQ(read_manifest(found).step, step);
    EXPECT_EQ(read_text(fs::path(found) / kDataFile), "step " + std::to_string(step));
    for (const SavedName& save : list_saves(root)) {
      EXPECT_EQ(read_text(fs::path(save.path) / kDataFile), "step " + std::to_string(save.step));
      EXPECT_EQ(read_manifest(save.path).step, save.step) << "whatever is listed is whole";
    }
    const std::string next = write_save(root, 30);
    EXPECT_EQ(entries_of(root), (Names{".lock", fs::path(next).filename().string()}));
  }
}

TEST(SaveDirectoryCrash, TheFirstSaveIsThereWholeOrNotAtAll) {
  const TemporaryDirectory folder;
  const std::size_t num_steps = disk_steps(folder.path() / "like" / "deeper", 20).size();
  EXPECT_EQ(num_steps, 11U) << "two directories are made";
  for (std::size_t after = 1; after <= num_steps; ++after) {
    const fs::path root = folder.path() / std::to_string(after) / "deeper";
    save_and_be_killed(root, 20, after);
    const std::vector<SavedName> saves = list_saves(root);
    EXPECT_EQ(saves.size(), after < 10 ? 0U : 1U) << after;
    for (const SavedName& save : saves) {
      EXPECT_EQ(read_text(fs::path(save.path) / kDataFile), "step 20");
      EXPECT_EQ(read_manifest(save.path).step, 20);
    }
    write_save(root, 30);
  }
}

}  // namespace
}  // namespace tessera::checkpoint
