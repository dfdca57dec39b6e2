// The rates of our engine beside fio's: the same file, options and mix, in rounds that alternate,
// since a disk that others use is seldom the same for long.
//
// Threads: one caller at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cli/fio.h"
#include "tessera/tier/io_load.h"
#include "tessera/tier/io_measure.h"

namespace tessera::cli {

struct IoBenchOptions {
  std::string directory;
  tier::IoKind kind = tier::IoKind::kAuto;
  double seconds = 3;  // for each load and program, over all rounds
  std::uint64_t file_bytes = std::uint64_t{1} << 30;
  int num_rounds = 9;
  double measure_seconds = 2;  // to find the options, where they are not known
};

// What was measured with.
struct IoBenchRun {
  std::string directory;
  std::string engine;
  tier::IoOptions options;
  bool is_direct = false;
  std::uint64_t file_bytes = 0;
  int num_rounds = 0;
  std::string fio_version;  // empty: no fio
};

struct IoBenchRow {
  tier::IoMix mix = tier::IoMix::kRead;
  tier::IoRates ours;  // medians of the rounds
  std::optional<tier::IoRates> fio;

  // Ours against fio's, reads and writes together; nothing without fio.
  std::optional<double> ratio() const;
};

const char* to_string(tier::IoMix mix);

// Throws ConfigError if the directory has not twice the space, IoError if a transfer fails. `begin`
// is called before the first row.
std::vector<IoBenchRow> measure_io(const IoBenchOptions& options, const std::optional<Fio>& fio,
                                   const std::function<void(const std::string&)>& notice,
                                   const std::function<void(const IoBenchRun&)>& begin,
                                   const std::function<void(const IoBenchRow&)>& row);

// What `tessera bench-io` prints.
std::string io_bench_head(const IoBenchRun& run);
std::string io_bench_line(const IoBenchRow& row);
std::string io_bench_json(const IoBenchRun& run, std::span<const IoBenchRow> rows);

}  // namespace tessera::cli
