// What a directory's disk can do, and the options with which an engine gets it: found by a
// measurement of two seconds, once, and kept beside the data.
//
// The measurement works on a file that has no name once it is open, so that nothing stays behind
// however the process ends. Its result is kept in the directory in .tessera-io.json, for each kind
// of engine and of file; whatever else that file holds is ignored, and what cannot be believed
// (another device, another version, damage, values out of range) is measured again.
//
// Threads: stateless. Several processes may measure one directory at once, but then each sees only
// its share of the disk: let one rank of a machine do it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "tessera/tier/io_engine.h"

namespace tessera::tier {

inline constexpr const char* kMeasuredFileName = ".tessera-io.json";

struct DiskRates {
  double read_bytes_per_s = 0;  // alone
  double write_bytes_per_s = 0;
  double mixed_read_bytes_per_s = 0;  // as much read as written, both at once
  double mixed_write_bytes_per_s = 0;
  IoOptions best;      // `kind` is what was measured, never kAuto
  std::string engine;  // its name
  bool is_direct = false;
  std::string assumed;  // why the rates are not measured; empty: they are
};

struct MeasureOptions {
  IoKind kind = IoKind::kAuto;
  DirectIo direct = DirectIo::kAuto;
  double budget_s = 2.0;
  std::size_t max_file_bytes = std::size_t{256} << 20;  // and no more than 5 % of the free space
  bool force = false;                                   // measure, whatever was kept
  bool needs_rates = false;                             // assumed ones will not do
  std::function<void(const std::string&)> notice = {};  // as for make_io_engine()
};

// What was kept if it is believable, else a measurement; where there is too little room for one,
// assumed rates. Throws IoError if the directory
// cannot be written to, or has too little room and `needs_rates`; ConfigError if `kind` or `direct`
// cannot be had there.
DiskRates measure_directory(const std::string& directory, const MeasureOptions& options);

// Of what one process needs, the part of each of so many that use the disk at once: together they
// queue about as much, at least one request each.
IoOptions part_of(const IoOptions& best, int num_processes);

// Only what was kept.
std::optional<DiskRates> read_measured(const std::string& directory, const MeasureOptions& options);

}  // namespace tessera::tier
