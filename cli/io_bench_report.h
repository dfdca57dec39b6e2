// What `tessera bench-io` prints. Pure.
#pragma once

#include <span>
#include <string>

#include "cli/io_bench.h"

namespace tessera::cli {

std::string io_bench_head(const IoBenchRun& run);
std::string io_bench_line(const IoBenchRow& row);
std::string io_bench_json(const IoBenchRun& run, std::span<const IoBenchRow> rows);

}  // namespace tessera::cli
