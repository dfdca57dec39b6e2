// A directory of checkpoints: which are complete, and how a new one becomes so.
//
//   DIR/.lock                           held (flock) by whoever changes the directory, for one save
//                                       or for a whole run: DirectoryLock
//   DIR/save-00007-step-60/             complete: its manifest was in it before it got this name
//   DIR/.unfinished-00008-step-70-X/    being written, left by a run that was killed, or replaced
//                                       and being removed
//
// A save has a number of its own, one above the highest so far: "the newest" is the one with the
// highest number, also after training went on from an older one. So no save is written over
// another; the oldest lose their names when a new one is complete, and are removed afterwards.
//
// Invariants:
//  (1) A directory called save-* is complete, and on disk, as long as it has that name.
//  (2) Nothing is removed before the save that takes its place is complete and on disk.
//  (3) Only what has our names, and a manifest or the unfinished prefix, is ever removed.
//  (4) What cannot be removed stays: it costs room, never a save.
//
// Threads: one caller at a time. A DirectoryLock may be used by saves on any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/manifest.h"

namespace tessera::checkpoint {

struct SavedName {
  std::string path;  // of its directory
  std::int64_t sequence = 0;
  std::int64_t step = 0;
};

// Complete saves, the newest last. None where there is no such directory. IoError if it cannot be
// read.
std::vector<SavedName> list_saves(const std::string& root);

// `path` is a save itself, or a root with saves: its newest. ConfigError, with what is there, if it
// is neither.
std::string find_save(const std::string& path);

// Of the save in this directory. IoError, CorruptError.
Manifest read_manifest(const std::string& save);

// That nobody else changes a directory of checkpoints, while this object is there. The kernel gives
// it back when the process ends, however it does: a run that is killed blocks nobody.
class DirectoryLock {
 public:
  // Makes the root, if it is not there. ConfigError that names the directory and the holder's
  // process if it is held for longer than `patience`: a run that was killed just now may still have
  // it. IoError.
  explicit DirectoryLock(const std::string& root,
                         std::chrono::milliseconds patience = std::chrono::milliseconds(0));
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

  // Whether this is the lock that the directory has now.
  bool is_of(const std::string& root) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The longest manifest that a reader takes.
inline constexpr std::uint64_t kMaxManifestBytes = std::uint64_t{1} << 30;

struct NewSaveOptions {
  int keep = 1;  // complete saves that stay, the new one among them
  // Held by the caller; null, or of another directory: the save takes the lock for itself.
  std::shared_ptr<const DirectoryLock> lock = {};
  // Is told what stays because it cannot be removed. Null: nobody is.
  std::function<void(const std::string& text)> warn = {};
  std::uint64_t max_manifest_bytes = kMaxManifestBytes;  // tests: less
  // Called after each step that changes the disk: tests end the process there. Null: nothing.
  std::function<void(std::string_view what)> on_disk_step = {};
};

// A save that is being written. Only rank 0 has one; the others write into its path(). Destroyed
// before commit(), it removes what was written.
class NewSave {
 public:
  // Makes the root, if it is not there, and takes its lock: ConfigError that names the holder's
  // process if another run has it. Removes what killed runs left unfinished, which may take as long
  // as remove_replaced(). IoError.
  NewSave(const std::string& root, std::int64_t step, NewSaveOptions options);
  ~NewSave();
  NewSave(const NewSave&) = delete;
  NewSave& operator=(const NewSave&) = delete;

  const std::string& path() const;  // where files go
  std::int64_t sequence() const;
  // Compares the files with the manifest; writes and syncs it; renames, syncs; then takes their
  // names from all but the newest saves. Returns the path of the complete save. An IoError says
  // whether it became complete; one that no reader would take does not. REQUIRES: the files are on
  // disk; `manifest` has this step and sequence.
  std::string commit(const Manifest& manifest);
  // Directories that commit() took the names from: for remove_replaced(), which nobody else has to
  // wait for.
  const std::vector<std::string>& replaced() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Takes as long as the file system needs to free their blocks: on some as long as writing them. The
// next save removes what this leaves, and may do so at the same time. All are tried; IoError of the
// first that cannot be removed.
void remove_replaced(const std::vector<std::string>& directories,
                     const std::function<void(std::string_view what)>& on_disk_step = {});

}  // namespace tessera::checkpoint
