// What the saves of a run were like: printed by rank 0 before the first asynchronous one, and at
// the end of the run.
//
// Threads: plain data.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tessera::cli {

// A save that has ended, well or not.
struct SaveRecord {
  std::int64_t step = 0;
  std::string path;     // of the complete save; empty: it failed
  std::string failure;  // why
  double seconds = 0;   // from its begin to the commit
  // Of one that was made beside training, on this rank.
  bool is_async = false;
  std::uint64_t bytes = 0;
  double stall_s = 0;  // that updates waited for it
};

class SaveTotals {
 public:
  void add(const SaveRecord& record);
  // Empty: there was none.
  std::string text() const;

 private:
  std::int64_t num_saved_ = 0;
  std::int64_t num_failed_ = 0;
  std::int64_t num_async_ = 0;  // of those saved
  double longest_s_ = 0;
  std::uint64_t async_bytes_ = 0;  // of the last one
  double stall_s_ = 0;             // of all of them
  double longest_stall_s_ = 0;
  SaveRecord last_;    // that was saved
  SaveRecord failed_;  // the last that was not
};

// Of one rank.
struct ExpectedSave {
  std::int64_t bytes = 0;
  std::int64_t buffer_bytes = 0;
  std::optional<double> stall_s;  // null: not known
};
// Of a load, at the end of a line that says what was loaded.
std::string load_time_text(double seconds, double read_s);

// "save of 2.10 GiB beside training, 1.00 GiB of buffer: updates wait about 0.40 s"
std::string expected_save_text(const ExpectedSave& save);

// The one warning of a save that failed while training goes on.
std::string failed_save_text(const SaveRecord& record);

}  // namespace tessera::cli
