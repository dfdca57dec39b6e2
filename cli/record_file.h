// A file of records that observes a run: metrics, TensorBoard events.
//
// Losing an observer must not lose the model. A file that cannot be opened is refused before
// training; from then on nothing throws. The first write that fails (a full disk, a reader that is
// gone) is a warning; later records are tried again in silence.
//
// Invariant: the file holds whole records only. What was written of a record that did not fit is
// cut off again; where that is impossible, nothing more is written.
//
// Threads: one caller at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace tessera::cli {

struct RecordFileOptions {
  std::string flag;  // that asked for the file: "--metrics"
  std::string path;
  // Of a file that is there, what stays: whole records of an earlier part of the run.
  std::int64_t keep_bytes = 0;
  // Receives the one warning. Empty: nobody is told.
  std::function<void(const std::string& text)> warn;
};

class RecordFile {
 public:
  // Creates the file, or cuts off all but what stays. IoError if that fails.
  explicit RecordFile(RecordFileOptions options);
  ~RecordFile();
  RecordFile(const RecordFile&) = delete;
  RecordFile& operator=(const RecordFile&) = delete;

  // The record is in the file when this returns true, for whoever reads it now.
  bool append(std::string_view record);
  const std::string& path() const { return options_.path; }

 private:
  // False with errno set; `written` says how much of it is in the file.
  bool write_all(std::string_view bytes, std::size_t& written) const;
  void give_up_record(std::size_t written, int error);

  const RecordFileOptions options_;
  const int fd_;
  std::int64_t end_ = 0;  // of the last whole record
  bool usable_ = true;    // false: a torn record could not be cut off
  bool warned_ = false;
};

}  // namespace tessera::cli
