// The parameters of a finished run must not be lost to a full disk or a directory that is gone:
// what cannot be written where the user wants it is written somewhere else, under a name that says
// so.
//
// Threads: main thread only.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace tessera::cli {

struct SaveOutcome {
  std::string path;     // of the file; empty: nowhere
  std::string failure;  // what to tell the user; empty: it is where it was wanted
};

// Where a file that cannot be written to `path` is tried next: <name>.rescued-<pid> in the current
// directory, then in the directory for temporary files.
std::vector<std::string> rescue_paths(const std::string& path);

// Saves to `path`, or to the first of rescue_paths() that takes it. `save` is collective where
// there are several ranks: then it throws IoError or ConfigError on all of them alike, or on none,
// and all ranks try the same paths in the same order. What else it throws is thrown.
SaveOutcome save_or_rescue(const std::string& path,
                           const std::function<void(const std::string&)>& save);

}  // namespace tessera::cli
