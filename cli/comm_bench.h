// Times the collectives of one group: what `tessera bench-comm` measures and prints.
//
// Every collective is checked before it is timed: each element of its result must be the one that
// the inputs of all ranks give, else CommError. A round starts behind a barrier, and counts as long
// as its slowest rank took; the numbers are the same on every rank.
//
// Threads: collective; call it on every rank of the group with the same arguments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/core/clock.h"
#include "tessera/device/device.h"

namespace tessera::cli {

struct CommBenchOptions {
  // Bytes of the larger side of a collective, rounded down to whole elements for every rank.
  std::vector<std::size_t> sizes_bytes;
  int num_rounds = 10;
};

struct CommBenchRow {
  std::string collective;
  std::size_t bytes = 0;  // 0: the collective carries no data
  double median_us = 0;
  double min_us = 0;
  std::uint64_t wire_bytes = 0;  // payload sent for one call by the rank that sends most

  // Data per second at the median time, in 1e9 bytes.
  double gigabytes_per_s() const {
    return median_us > 0 ? static_cast<double>(bytes) / median_us * 1e-3 : 0;
  }
};

// `device` gives the memory that the group's backend works on; `on_row` is called on every rank
// with each row as soon as it is known.
std::vector<CommBenchRow> measure_collectives(
    comm::Group& group, device::Device& device, const Clock& clock, const CommBenchOptions& options,
    const std::function<void(const CommBenchRow&)>& on_row = {});

// Lower median: one of the values.
double median_of(std::vector<double> values);

struct CommBenchRun {
  std::string backend;
  int num_ranks = 1;
  int num_rounds = 0;
};

// The table's head, and one of its lines: it is printed as it grows.
std::string comm_bench_head(const CommBenchRun& run);
std::string comm_bench_line(const CommBenchRow& row);
std::string comm_bench_json(const CommBenchRun& run, std::span<const CommBenchRow> rows);

}  // namespace tessera::cli
