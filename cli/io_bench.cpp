#include "cli/io_bench.h"

#include <sys/statvfs.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <system_error>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/core/units.h"

namespace tessera::cli {
namespace {

constexpr std::size_t kMinRangeBytes = std::size_t{4} << 20;
constexpr double kFillSeconds = 3600;  // the whole file, however slow the disk

void check_room(const IoBenchOptions& options) {
  struct statvfs info {};
  std::error_code ignored;
  TESSERA_CHECK(std::filesystem::is_directory(options.directory, ignored) &&
                    ::statvfs(options.directory.c_str(), &info) == 0,
                ConfigError, in_quotes(options.directory),
                " is not a directory; name one on the disk to measure");
  const std::uint64_t free_bytes = static_cast<std::uint64_t>(info.f_bavail) * info.f_frsize;
  TESSERA_CHECK(options.file_bytes <= free_bytes / 2, ConfigError, "a file of ",
                approximate_bytes(options.file_bytes), " is more than half of the ",
                approximate_bytes(free_bytes), " that are free in ", in_quotes(options.directory),
                "; give a smaller one with --bytes");
}

double total(const tier::IoRates& rates) {
  return rates.read_bytes_per_s + rates.write_bytes_per_s;
}

tier::IoRates median(std::vector<tier::IoRates> rounds) {
  const auto middle = rounds.begin() + static_cast<std::ptrdiff_t>(rounds.size() / 2);
  std::nth_element(
      rounds.begin(), middle, rounds.end(),
      [](const tier::IoRates& a, const tier::IoRates& b) { return total(a) < total(b); });
  return *middle;
}

constexpr const char* kIoRow = "{:<8}{:>14}{:>14}{:>10}\n";

std::string rate_text(const tier::IoRates& rates) {
  return fmt::format("{:.3f} GB/s", (rates.read_bytes_per_s + rates.write_bytes_per_s) * 1e-9);
}

nlohmann::ordered_json rates_json(const tier::IoRates& rates) {
  return {{"read_bytes_per_s", rates.read_bytes_per_s},
          {"write_bytes_per_s", rates.write_bytes_per_s}};
}

}  // namespace

const char* to_string(tier::IoMix mix) {
  switch (mix) {
    case tier::IoMix::kRead:
      return "read";
    case tier::IoMix::kWrite:
      return "write";
    case tier::IoMix::kMixed:
      break;
  }
  return "mixed";
}

std::optional<double> IoBenchRow::ratio() const {
  if (!fio || total(*fio) <= 0) {
    return std::nullopt;
  }
  return total(ours) / total(*fio);
}

std::vector<IoBenchRow> measure_io(const IoBenchOptions& options, const std::optional<Fio>& fio,
                                   const std::function<void(const std::string&)>& notice,
                                   const std::function<void(const IoBenchRun&)>& begin,
                                   const std::function<void(const IoBenchRow&)>& row) {
  check_room(options);
  tier::MeasureOptions measure;
  measure.kind = options.kind;
  measure.notice = notice;
  measure.needs_rates = true;
  measure.budget_s = options.measure_seconds;
  const tier::DiskRates measured = tier::measure_directory(options.directory, measure);
  const std::unique_ptr<tier::IoFile> file = tier::open_nameless(
      options.directory, measured.is_direct ? tier::DirectIo::kOn : tier::DirectIo::kOff);
  const std::unique_ptr<tier::IoEngine> engine = tier::make_io_engine(measured.best, notice);

  tier::IoLoad load;
  load.file = file.get();
  load.range_bytes = std::max(kMinRangeBytes, measured.best.block_bytes);
  // Several times what is in flight: the engine must not wait for this thread to be scheduled.
  const std::size_t in_flight_bytes = measured.best.block_bytes *
                                      static_cast<std::size_t>(measured.best.queue_depth) *
                                      static_cast<std::size_t>(measured.best.num_threads);
  const std::size_t num_ranges = 2 + 4 * in_flight_bytes / load.range_bytes;
  const tier::IoMemory memory(num_ranges * load.range_bytes);
  load.memory = memory.bytes();
  load.file_bytes = tier::fill_file(*engine, load, options.file_bytes, kFillSeconds);

  begin({options.directory, measured.engine, measured.best, measured.is_direct, load.file_bytes,
         options.num_rounds, fio ? fio->version() : std::string()});
  std::vector<IoBenchRow> rows;
  bool compares = fio.has_value();
  const double seconds = options.seconds / options.num_rounds;
  for (const tier::IoMix mix : {tier::IoMix::kRead, tier::IoMix::kWrite, tier::IoMix::kMixed}) {
    std::vector<tier::IoRates> ours;
    std::vector<tier::IoRates> others;
    for (int round = 0; round < options.num_rounds; ++round) {
      ours.push_back(tier::run_load(*engine, load, mix, seconds));
      if (compares) {
        try {
          others.push_back(fio->run({file.get(), load.file_bytes, measured.best, mix, seconds}));
        } catch (const IoError& error) {
          notice(std::string("our rates stand alone: ") + error.what());
          compares = false;
        }
      }
    }
    rows.push_back({mix, median(ours),
                    compares ? std::optional<tier::IoRates>(median(others)) : std::nullopt});
    row(rows.back());
  }
  return rows;
}

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
