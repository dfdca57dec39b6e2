#include "cli/comm_bench_report.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tessera/core/units.h"

namespace tessera::cli {
namespace {

std::string duration_text(double us) {
  if (us < 1e3) {
    return fmt::format("{:.1f} us", us);
  }
  return us < 1e6 ? fmt::format("{:.2f} ms", us * 1e-3) : fmt::format("{:.2f} s", us * 1e-6);
}

constexpr const char* kCommRow = "{:<15}{:>12}{:>13}{:>13}{:>14}{:>9}\n";

}  // namespace

std::string comm_bench_head(const CommBenchRun& run) {
  return fmt::format("{} rank{} over {}, {} rounds; times are the slowest rank's\n", run.num_ranks,
                     run.num_ranks == 1 ? "" : "s", run.backend, run.num_rounds) +
         fmt::format(kCommRow, "collective", "size", "median", "min", "sent/rank", "GB/s");
}

std::string comm_bench_line(const CommBenchRow& row) {
  const std::string none = "-";
  const bool carries_data = row.bytes > 0;
  return fmt::format(kCommRow, row.collective, carries_data ? approximate_bytes(row.bytes) : none,
                     duration_text(row.median_us), duration_text(row.min_us),
                     carries_data ? approximate_bytes(row.wire_bytes) : none,
                     carries_data ? fmt::format("{:.3f}", row.gigabytes_per_s()) : none);
}

std::string comm_bench_json(const CommBenchRun& run, std::span<const CommBenchRow> rows) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const CommBenchRow& row : rows) {
    list.push_back({{"collective", row.collective},
                    {"bytes", row.bytes},
                    {"median_us", row.median_us},
                    {"min_us", row.min_us},
                    {"wire_bytes", row.wire_bytes},
                    {"gigabytes_per_s", row.gigabytes_per_s()}});
  }
  const nlohmann::ordered_json document{{"backend", run.backend},
                                        {"num_ranks", run.num_ranks},
                                        {"num_rounds", run.num_rounds},
                                        {"rows", list}};
  return document.dump(2) + "\n";
}

}  // namespace tessera::cli
