#include "cli/io_bench_report.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tessera/core/units.h"

namespace tessera::cli {
namespace {

constexpr const char* kIoRow = "{:<8}{:>14}{:>14}{:>10}\n";

std::string rate_text(const tier::IoRates& rates) {
  return fmt::format("{:.3f} GB/s", (rates.read_bytes_per_s + rates.write_bytes_per_s) * 1e-9);
}

nlohmann::ordered_json rates_json(const tier::IoRates& rates) {
  return {{"read_bytes_per_s", rates.read_bytes_per_s},
          {"write_bytes_per_s", rates.write_bytes_per_s}};
}

}  // namespace

std::string io_bench_head(const IoBenchRun& run) {
  const std::uint64_t num_in_flight = static_cast<std::uint64_t>(run.options.queue_depth) *
                                      static_cast<std::uint64_t>(run.options.num_threads);
  std::string text = fmt::format(
      "{} on {}: requests of {}, {} in flight, {}, a file of {}; medians of {} rounds\n",
      run.engine, run.directory, approximate_bytes(run.options.block_bytes), num_in_flight,
      run.is_direct ? "direct" : "through the page cache", approximate_bytes(run.file_bytes),
      run.num_rounds);
  if (run.fio_version.empty()) {
    text += "fio is not installed, so there is nothing to compare with (apt-get install fio)\n";
  }
  return text + fmt::format(kIoRow, "load", "tessera",
                            run.fio_version.empty() ? "fio" : run.fio_version, "ratio");
}

std::string io_bench_line(const IoBenchRow& row) {
  const std::optional<double> ratio = row.ratio();
  return fmt::format(kIoRow, to_string(row.mix), rate_text(row.ours),
                     row.fio ? rate_text(*row.fio) : "-",
                     ratio ? fmt::format("{:.2f}", *ratio) : "-");
}

std::string io_bench_json(const IoBenchRun& run, std::span<const IoBenchRow> rows) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const IoBenchRow& row : rows) {
    nlohmann::ordered_json entry{{"load", to_string(row.mix)}, {"tessera", rates_json(row.ours)}};
    entry["fio"] = row.fio ? rates_json(*row.fio) : nlohmann::ordered_json();
    const std::optional<double> ratio = row.ratio();
    entry["ratio"] = ratio ? nlohmann::ordered_json(*ratio) : nlohmann::ordered_json();
    list.push_back(std::move(entry));
  }
  nlohmann::ordered_json document{{"directory", run.directory},
                                  {"engine", run.engine},
                                  {"block_bytes", run.options.block_bytes},
                                  {"queue_depth", run.options.queue_depth},
                                  {"threads", run.options.num_threads},
                                  {"direct", run.is_direct},
                                  {"file_bytes", run.file_bytes},
                                  {"num_rounds", run.num_rounds}};
  document["fio_version"] =
      run.fio_version.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(run.fio_version);
  document["rows"] = list;
  // A directory may have any name; what is no UTF-8 in it is replaced.
  return document.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace tessera::cli
