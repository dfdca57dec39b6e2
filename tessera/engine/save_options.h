// Options and results of Engine::save() and load().
//
// Threads: plain data.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

namespace checkpoint {
class DirectoryLock;
}

struct SaveOptions {
  int keep = 2;  // of the newest saves in the directory, this one included
  // Data of the user, such as the position in the data; load() returns it. The same on all ranks.
  std::map<std::string, std::string> user = {};
  // For start_save(): host memory of this rank for copies of what updates overwrite before it is
  // written. Null: what the host budget leaves, or half of this rank's part of free memory.
  std::optional<std::int64_t> memory_bytes = {};
  // Of the directory, where rank 0 holds it for longer than a save (checkpoint/save_directory.h).
  // Null: each save takes it.
  std::shared_ptr<const checkpoint::DirectoryLock> lock = {};
};

struct SaveOutcome {
  std::int64_t step = 0;
  std::string path;         // of the complete save; empty: it failed
  std::string failure;      // why, in the words of a rank concerned; empty: it did not
  double seconds = 0;       // from the call until it was complete
  std::uint64_t bytes = 0;  // of this rank
  double stall_s = 0;       // that updates of this rank have waited for it
};

// The prediction of start_save().
struct SavePrediction {
  std::int64_t bytes = 0;         // of this rank
  std::int64_t buffer_bytes = 0;  // the part that can be copied aside
  // Seconds that updates will wait; null: not known, because no step was made yet or no disk rate
  // could be measured.
  std::optional<double> stall_s = {};
};

struct LoadOptions {
  // True: tensors that the save lacks keep their initial values, and tensors that the model lacks
  // are ignored; false: both are errors that list them.
  bool partial = false;
};

struct LoadResult {
  std::string path;  // of the save
  std::int64_t step = 0;
  int num_ranks = 0;  // that wrote it
  std::map<std::string, std::string> user;
  std::vector<std::string> notes;  // for people: what `partial` accepted, what begins anew
  double read_s = 0;               // of this rank, once memory for what is read was made
};

}  // namespace tessera
