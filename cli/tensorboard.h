// Scalars of a run as TensorBoard reads them: an event file in a directory.
//
// An event file is a row of TFRecords, each
//     uint64 length, uint32 masked CRC-32C of the length, the bytes, uint32 masked CRC-32C of them
// in little-endian order; the bytes are a protocol buffer of type Event, of which we write
//     1: double wall_time   2: int64 step   3: string file_version   5: Summary   7: SessionLog
//     Summary 1 (repeated): Value 1: string tag   2: float simple_value
//     SessionLog 1: enum status, of which 1 is START
// The first record of a file has the version and nothing else. Behind it, where the run goes on
// from a checkpoint, a START: readers drop what earlier files have from its step on.
//
// Threads: one caller at a time; the encoders are pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/metrics.h"
#include "cli/record_file.h"

namespace tessera::cli {

// Castagnoli's polynomial, as in iSCSI (RFC 3720).
std::uint32_t crc32c(std::string_view bytes);
// What TFRecords hold in place of a CRC: one that may itself be part of what a CRC is taken of.
std::uint32_t masked_crc32c(std::string_view bytes);

struct Scalar {
  std::string_view tag;
  double value = 0;
};

std::string encode_version_event(double wall_time_s);
std::string encode_start_event(double wall_time_s, std::int64_t step);
std::string encode_scalars_event(double wall_time_s, std::int64_t step,
                                 const std::vector<Scalar>& scalars);
// With its frame.
std::string encode_record(std::string_view bytes);

// What of a step is shown; values that are not known are left out.
std::vector<Scalar> tensorboard_scalars(const StepMetrics& metrics);

class TensorBoardFile {
 public:
  // Creates the directory and a file of a new name in it: IoError if that fails. A failure later
  // is one `warn`. `num_done`: steps before the run goes on; 0: it begins.
  TensorBoardFile(const std::string& directory, std::int64_t num_done,
                  std::function<void(const std::string& text)> warn);

  // False: the step is not in the file.
  bool append(const StepMetrics& metrics);
  const std::string& path() const { return file_.path(); }

 private:
  // Behind version and start, if they are not in the file yet: no reader takes a file without.
  bool append(std::string records);

  RecordFile file_;
  const std::int64_t num_done_;
  bool has_head_ = false;
};

}  // namespace tessera::cli
