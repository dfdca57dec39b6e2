#include "tessera/checkpoint/save_directory.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <exception>
#include <filesystem>
#include <optional>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>

#include "tessera/checkpoint/posix_file.h"
#include "tessera/core/error.h"
#include "tessera/core/link_target.h"
#include "tessera/core/printable.h"
#include "tessera/core/system_call.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSavePrefix = "save-";
constexpr std::string_view kUnfinishedPrefix = ".unfinished-";
constexpr std::string_view kStepWord = "-step-";
constexpr std::string_view kLockName = ".lock";
constexpr std::int64_t kMaxCount = 1'000'000'000'000'000;
constexpr int kMaxAttempts = 1000;
constexpr std::chrono::milliseconds kBetweenLooks(50);  // at a lock that another process has

// "00007-step-60": the save's number has five digits or more, so that names sort.
std::string save_numbers(std::int64_t sequence, std::int64_t step) {
  std::string digits = std::to_string(sequence);
  digits.insert(0, 5 - std::min<std::size_t>(5, digits.size()), '0');
  return detail::concat(digits, kStepWord, step);
}

// Takes digits off the front; nothing if there are none, or more than a number of ours has.
std::optional<std::int64_t> take_number(std::string_view& text) {
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number < 0 || number > kMaxCount) {
    return std::nullopt;
  }
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return number;
}

struct Numbers {
  std::int64_t sequence = 0;
  std::int64_t step = 0;
};

// Of a name such as save_numbers() makes behind a prefix; `rest`: what may follow.
std::optional<Numbers> parse_numbers(std::string_view name, std::string_view prefix,
                                     std::string_view& rest) {
  if (!name.starts_with(prefix)) {
    return std::nullopt;
  }
  name.remove_prefix(prefix.size());
  const auto sequence = take_number(name);
  if (!sequence.has_value() || !name.starts_with(kStepWord)) {
    return std::nullopt;
  }
  name.remove_prefix(kStepWord.size());
  const auto step = take_number(name);
  if (!step.has_value()) {
    return std::nullopt;
  }
  rest = name;
  return Numbers{*sequence, *step};
}

bool has_manifest(const fs::path& directory) {
  std::error_code ignored;
  return fs::is_regular_file(directory / kManifestName, ignored);
}

// Names in a directory, sorted; none if there is no such directory.
std::vector<std::string> names_in(const std::string& directory) {
  std::error_code error;
  fs::directory_iterator entries(directory, error);
  std::vector<std::string> names;
  while (!error && entries != fs::directory_iterator()) {
    names.push_back(entries->path().filename().string());
    entries.increment(error);
  }
  if (error && error.value() != ENOENT) {
    throw_io_error(directory, "list the directory", error.value());
  }
  std::sort(names.begin(), names.end());
  return names;
}

void sync_directory(const std::string& path) {
  PosixFile(path, O_RDONLY | O_DIRECTORY, "open the directory").sync();
}

std::string parent_of(const std::string& path) {
  const std::string parent = fs::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

// What stands where a checkpoint was looked for.
std::string what_is_there(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found) {
    return "there is no such directory";
  }
  if (status.type() != fs::file_type::directory) {
    return error ? "it cannot be looked at (" + error.message() + ")" : "it is not a directory";
  }
  const std::vector<std::string> names = names_in(path);
  std::string shown;
  std::int64_t num_unfinished = 0;
  std::int64_t num_others = 0;
  for (const std::string& name : names) {
    if (name.starts_with(kUnfinishedPrefix)) {
      ++num_unfinished;
    } else if (name != kLockName && ++num_others <= 5) {
      shown += (shown.empty() ? "" : ", ") + printable(name, 60);
    }
  }
  if (num_unfinished > 0 && num_others == 0) {
    return detail::concat("it holds ", num_unfinished, " save", plural(num_unfinished),
                          " that a run did not finish, and no complete one");
  }
  return num_others == 0
             ? "the directory is empty"
             : detail::concat("the directory holds ", shown, num_others > 5 ? ", ..." : "");
}

// What others remove meanwhile is removed as well.
void remove_tree(const std::string& directory,
                 const std::function<void(std::string_view what)>& on_disk_step) {
  const auto done = [&](std::string_view what) {
    if (on_disk_step) {
      on_disk_step(what);
    }
  };
  std::error_code error;
  if (!fs::is_directory(fs::symlink_status(directory, error))) {
    fs::remove(directory, error);  // of a link nothing but the link is ours
    if (error) {
      throw_io_error(directory, "remove", error.value());
    }
    return;
  }
  for (const std::string& name : names_in(directory)) {
    fs::remove_all(fs::path(directory) / name, error);
    if (error) {
      throw_io_error(directory + "/" + name, "remove", error.value());
    }
    done("removed a file");
  }
  if (::rmdir(directory.c_str()) != 0 && errno != ENOENT) {
    throw_io_error(directory, "remove the directory", errno);
  }
  done("removed a directory");
}

// With the directories above it, each on disk before the next. Returns it without slashes at its
// end.
std::string make_root(std::string root,
                      const std::function<void(std::string_view what)>& on_disk_step) {
  while (root.size() > 1 && root.ends_with('/')) {
    root.pop_back();
  }
  struct stat status {};
  if (::stat(root.c_str(), &status) == 0) {
    TESSERA_CHECK(S_ISDIR(status.st_mode), ConfigError, printable(root, 400),
                  ": is not a directory; name one that checkpoints can be written to");
    return root;
  }
  if (errno != ENOENT) {
    throw_io_error(root, "look at", errno);
  }
  if (const std::string parent = parent_of(root); parent != root) {
    make_root(parent, on_disk_step);
  }
  if (::mkdir(root.c_str(), 0777) != 0 && errno != EEXIST) {
    throw_io_error(root, "make the directory", errno);
  }
  sync_directory(parent_of(root));
  if (on_disk_step) {
    on_disk_step("made the root");
  }
  return root;
}

std::string lock_path(const std::string& root) { return root + "/" + std::string(kLockName); }

}  // namespace

// Given back explicitly: a child that was forked meanwhile has the descriptor, too.
struct DirectoryLock::Impl {
  Impl(const std::string& root, std::chrono::milliseconds patience)
      : file(lock_path(root), O_RDWR | O_CREAT, "open the lock") {
    std::chrono::milliseconds waited(0);
    while (!try_lock()) {
      TESSERA_CHECK(waited < patience, ConfigError, printable(root, 400), ": ", holder(),
                    " uses this directory of checkpoints; wait until it has ended, end it, or "
                    "choose another directory");
      std::this_thread::sleep_for(kBetweenLooks);
      waited += kBetweenLooks;
    }
    std::array<char, 256> host{};
    ::gethostname(host.data(), host.size() - 1);
    const std::string text = detail::concat("process ", ::getpid(), " on ", host.data(), "\n");
    if (::ftruncate(file.descriptor(), 0) != 0) {
      throw_io_error(file.path(), "empty the lock", errno);
    }
    file.write(text.data(), text.size());
  }

  bool try_lock() const {
    const int result = retried([this] { return ::flock(file.descriptor(), LOCK_EX | LOCK_NB); });
    if (result != 0 && errno != EWOULDBLOCK) {
      const int error = errno;
      throw IoError(detail::concat(printable(file.path(), 400),
                                   ": cannot lock: ", std::generic_category().message(error),
                                   "; choose a directory on a file system that has locks (flock)"));
    }
    return result == 0;
  }

  std::string holder() const {
    std::string text(200, '\0');
    text.resize(file.read_at(0, text.data(), text.size()));
    text.resize(std::min(text.size(), text.find('\n')));
    return text.starts_with("process ") ? printable(text) : "another process";
  }

  PosixFile file;
};

DirectoryLock::DirectoryLock(const std::string& root, std::chrono::milliseconds patience)
    : impl_(std::make_unique<Impl>(make_root(link_target(root), {}), patience)) {}

DirectoryLock::~DirectoryLock() { ::flock(impl_->file.descriptor(), LOCK_UN); }

bool DirectoryLock::is_of(const std::string& root) const {
  struct stat held {};
  struct stat found {};
  return ::fstat(impl_->file.descriptor(), &held) == 0 &&
         ::stat(lock_path(root).c_str(), &found) == 0 && held.st_dev == found.st_dev &&
         held.st_ino == found.st_ino;
}

std::vector<SavedName> list_saves(const std::string& root) {
  std::vector<SavedName> saves;
  for (const std::string& name : names_in(root)) {
    std::string_view rest;
    const auto numbers = parse_numbers(name, kSavePrefix, rest);
    const fs::path path = fs::path(root) / name;
    if (numbers.has_value() && rest.empty() && has_manifest(path)) {
      saves.push_back({path.string(), numbers->sequence, numbers->step});
    }
  }
  std::sort(saves.begin(), saves.end(), [](const SavedName& a, const SavedName& b) {
    return std::tie(a.sequence, a.step) < std::tie(b.sequence, b.step);
  });
  return saves;
}

std::string find_save(const std::string& path) {
  const std::string name = fs::path(path + "/").parent_path().filename().string();
  TESSERA_CHECK(!name.starts_with(kUnfinishedPrefix), ConfigError, printable(path, 400),
                ": a save that is being written, or that a run did not finish; name the directory "
                "that it is in");
  if (has_manifest(path)) {
    return path;
  }
  std::error_code ignored;
  const bool is_directory = fs::is_directory(path, ignored);
  const std::vector<SavedName> saves = is_directory ? list_saves(path) : std::vector<SavedName>();
  TESSERA_CHECK(!saves.empty(), ConfigError, printable(path, 400),
                ": neither a checkpoint nor a directory of checkpoints: ", what_is_there(path),
                "; name what --checkpoint named when it was saved");
  return saves.back().path;
}

Manifest read_manifest(const std::string& save) {
  const std::string path = (fs::path(save) / kManifestName).string();
  // Without blocking: the name may be that of a pipe, and opening one waits for its other end.
  const PosixFile file(path, O_RDONLY | O_NONBLOCK, "open");
  struct stat status {};
  if (::fstat(file.descriptor(), &status) != 0) {
    throw_io_error(path, "look at", errno);
  }
  TESSERA_CHECK(S_ISREG(status.st_mode), IoError, printable(path, 400), ": not a regular file");
  const auto bytes = static_cast<std::uint64_t>(status.st_size);
  TESSERA_CHECK(bytes <= kMaxManifestBytes, CorruptError, printable(path, 400), ": ", bytes,
                " bytes; a manifest has at most ", kMaxManifestBytes);
  std::string text(static_cast<std::size_t>(bytes), '\0');
  text.resize(file.read_at(0, text.data(), text.size()));
  return parse_manifest(text, path);
}

struct NewSave::Impl {
  Impl(const std::string& target, std::int64_t new_step, NewSaveOptions new_options)
      : root(checked_root(target, new_options)), step(new_step), options(std::move(new_options)) {
    if (!options.lock || !options.lock->is_of(root)) {
      lock = std::make_unique<DirectoryLock>(root);
      done("took the lock");
    }
    remove_unfinished();
    make_directory();
  }

  ~Impl() {
    if (path.empty() || is_complete) {
      return;
    }
    std::error_code ignored;  // what cannot be removed now, the next save removes
    fs::remove_all(path, ignored);
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  static std::string checked_root(const std::string& target, const NewSaveOptions& options) {
    TESSERA_CHECK(options.keep >= 1, ConfigError, "keep ", options.keep,
                  " checkpoints? The new one is one of them: at least 1");
    return make_root(link_target(target), options.on_disk_step);
  }

  void done(std::string_view what) const {
    if (options.on_disk_step) {
      options.on_disk_step(what);
    }
  }

  std::string in_root(const std::string& name) const { return root + "/" + name; }

  // What its owner can no longer be writing, since the lock is ours.
  void remove_unfinished() {
    for (const std::string& name : names_in(root)) {
      std::string_view rest;
      if (const auto numbers = parse_numbers(name, kUnfinishedPrefix, rest)) {
        highest = std::max(highest, numbers->sequence);
        remove_leftover(in_root(name));
      }
    }
  }

  void remove_leftover(const std::string& directory) const {
    try {
      remove_tree(directory, options.on_disk_step);
    } catch (const IoError& error) {
      if (options.warn) {
        options.warn(
            detail::concat("what a run left unfinished stays, and takes room; each save "
                           "tries to remove it: ",
                           error.what()));
      }
    }
  }

  void make_directory() {
    for (const SavedName& save : list_saves(root)) {
      highest = std::max(highest, save.sequence);
    }
    sequence = highest + 1;
    for (int number = 0; number < kMaxAttempts; ++number) {
      std::string name = in_root(detail::concat(kUnfinishedPrefix, save_numbers(sequence, step),
                                                "-", ::getpid(), "-", number));
      if (::mkdir(name.c_str(), 0777) == 0) {
        path = std::move(name);
        done("made the directory");
        return;
      }
      if (errno != EEXIST) {
        throw_io_error(name, "make the directory", errno);
      }
    }
    throw IoError(detail::concat(printable(root, 400), ": cannot save: ", kMaxAttempts,
                                 " unfinished saves lie there; remove ", kUnfinishedPrefix, "*"));
  }

  // Opened, not only looked at: a network file system learns the size of another host's file then.
  void check_files(const Manifest& manifest) const {
    for (const StoredFile& stored : manifest.files) {
      const PosixFile file(path + "/" + stored.name, O_RDONLY | O_NONBLOCK, "open");
      struct stat status {};
      if (::fstat(file.descriptor(), &status) != 0) {
        throw_io_error(file.path(), "look at", errno);
      }
      const auto bytes = static_cast<std::uint64_t>(status.st_size);
      TESSERA_CHECK(S_ISREG(status.st_mode) && bytes == stored.bytes, IoError,
                    printable(file.path(), 400), ": has ", bytes, " bytes after ", stored.bytes,
                    " were written; the save is not used");
    }
  }

  void write_manifest(const Manifest& manifest) const {
    const std::string text = format(manifest);
    const std::string final_name = path + "/" + std::string(kManifestName);
    TESSERA_CHECK(text.size() <= options.max_manifest_bytes, IoError, printable(final_name, 400),
                  ": would have ", text.size(), " bytes, and readers take at most ",
                  options.max_manifest_bytes,
                  "; it names each rank's part of each tensor: save with fewer ranks or fewer "
                  "parameters, or give the save less text of your own (SaveOptions::user)");
    auto file = PosixFile::make(final_name + ".partial", final_name);
    TESSERA_INVARIANT(file.has_value(), final_name, ".partial is there already");
    done("made the manifest's file");
    file->write(text.data(), text.size());
    done("wrote the manifest");
    file->sync();
    file->close();
    done("synced the manifest");
    if (::rename(file->path().c_str(), final_name.c_str()) != 0) {
      throw_io_error(final_name, "put the manifest in its place", errno);
    }
    done("renamed the manifest");
    sync_directory(path);
    done("synced the save's directory");
  }

  // While it is called save-*, it is whole.
  void rename_oldest() {
    const std::vector<SavedName> saves = list_saves(root);
    const auto keep = static_cast<std::size_t>(options.keep);
    for (std::size_t i = 0; i + keep < saves.size(); ++i) {
      const std::string going =
          in_root(detail::concat(kUnfinishedPrefix, save_numbers(saves[i].sequence, saves[i].step),
                                 "-", ::getpid(), "-old"));
      if (::rename(saves[i].path.c_str(), going.c_str()) != 0) {
        throw_io_error(saves[i].path, "rename", errno);
      }
      replaced.push_back(going);
      done("renamed an old save");
    }
    if (!replaced.empty()) {
      sync_directory(root);
      done("synced the root");
    }
  }

  const std::string root;
  const std::int64_t step;
  const NewSaveOptions options;
  std::unique_ptr<const DirectoryLock> lock;  // null: the caller has it
  std::int64_t highest = 0;                   // number of a save so far
  std::int64_t sequence = 0;
  std::string path;
  bool is_complete = false;
  std::vector<std::string> replaced;
};

NewSave::NewSave(const std::string& root, std::int64_t step, NewSaveOptions options)
    : impl_(std::make_unique<Impl>(root, step, std::move(options))) {}

NewSave::~NewSave() = default;

const std::string& NewSave::path() const { return impl_->path; }

std::int64_t NewSave::sequence() const { return impl_->sequence; }

std::string NewSave::commit(const Manifest& manifest) {
  Impl& impl = *impl_;
  TESSERA_INVARIANT(!impl.is_complete, impl.path, ": committed twice");
  TESSERA_INVARIANT(manifest.step == impl.step && manifest.sequence == impl.sequence,
                    "the manifest of save ", manifest.sequence, " at step ", manifest.step,
                    " for save ", impl.sequence, " at step ", impl.step);
  impl.check_files(manifest);
  impl.write_manifest(manifest);
  const std::string complete =
      impl.in_root(std::string(kSavePrefix) + save_numbers(impl.sequence, impl.step));
  if (::rename(impl.path.c_str(), complete.c_str()) != 0) {
    throw_io_error(complete, "put the new save in its place", errno);
  }
  impl.is_complete = true;
  impl.path = complete;
  impl.done("renamed the save");
  try {
    sync_directory(impl.root);
    impl.done("synced the root");
    impl.rename_oldest();
  } catch (const IoError& e) {
    throw IoError(
        detail::concat(e.what(), " (the new save is complete: ", printable(complete, 400), ")"));
  }
  return complete;
}

const std::vector<std::string>& NewSave::replaced() const { return impl_->replaced; }

void remove_replaced(const std::vector<std::string>& directories,
                     const std::function<void(std::string_view what)>& on_disk_step) {
  std::exception_ptr failure;
  for (const std::string& directory : directories) {
    try {
      remove_tree(directory, on_disk_step);
    } catch (const IoError&) {
      failure = failure ? failure : std::current_exception();
    }
  }
  if (failure) {
    std::rethrow_exception(failure);
  }
}

}  // namespace tessera::checkpoint
