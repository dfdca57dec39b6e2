// The numbers of bench-comm as a table for people or as JSON for programs.
//
// Threads: pure functions.
#pragma once

#include <span>
#include <string>

#include "cli/comm_bench.h"

namespace tessera::cli {

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
