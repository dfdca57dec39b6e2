// A foreign checkpoint as a save of ours: one file, as of one rank, and its manifest.
//
// Bytes go from the reader to the file in pieces; memory does not grow with the model.
//
// Threads: one.
#pragma once

#include <functional>
#include <string>

#include "cli/import_header.h"

namespace tessera::cli {

struct ImportTarget {
  std::string root;    // of the directory of saves
  std::string source;  // what the save says that it comes from
};

// Reads what `header` announces. `finish` is called when all of it is in the file, and throws if it
// must not become a save. Returns the save's path; no save of before is removed.
std::string save_imported(const ImportHeader& header, const ReadBytes& read,
                          const std::function<void()>& finish, const ImportTarget& target);

}  // namespace tessera::cli
