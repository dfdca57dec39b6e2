// What a run has come to must not be lost to a full disk or a directory that is gone: what cannot
// be written where the user wants it is written somewhere else, under a name that says so.
//
// Threads: main thread only.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace tessera::cli {

// What is saved, and where the user wants it: a file, or a directory.
struct SaveTarget {
  std::string flag;  // "--save"
  std::string what;  // "the parameters are"
  std::string path;
};

struct RescuedSave {
  std::string path;     // where it is; empty: nowhere
  std::string failure;  // what to tell the user; empty: it is where it was wanted
};

// Where what cannot be written to `path` is tried next: <name>.rescued-<pid> in the current
// directory, then in the directory for temporary files.
std::vector<std::string> rescue_paths(const std::string& path);

// Saves to the target, or to the first of its rescue_paths() that takes it. `save` is collective
// where there are several ranks: then it throws IoError or ConfigError on all of them alike, or on
// none, and all ranks try the same paths in the same order. What else it throws is thrown.
RescuedSave save_or_rescue(const SaveTarget& target,
                           const std::function<void(const std::string& path)>& save);

}  // namespace tessera::cli
