#include <iostream>
#include <limits>
#include <memory>

#include <CLI/CLI.hpp>

#include "cli/command.h"
#include "cli/io_bench.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/core/units.h"

namespace tessera::cli {
namespace {

constexpr double kMaxSeconds = 3600;
constexpr std::int64_t kMinFileBytes = std::int64_t{16} << 20;

struct BenchIoFlags {
  std::string directory;
  std::string engine = "auto";
  std::string seconds = "3";
  std::string bytes = "1GiB";
  bool json = false;
};

tier::IoKind parse_engine(const std::string& name) {
  if (name == "auto") {
    return tier::IoKind::kAuto;
  }
  if (name == "uring") {
    return tier::IoKind::kUring;
  }
  TESSERA_CHECK(name == "threads", ConfigError, "--engine ", tessera::in_quotes(name),
                " is none of auto, uring, threads");
  return tier::IoKind::kThreads;
}

IoBenchOptions checked_options(const BenchIoFlags& flags) {
  IoBenchOptions options;
  options.directory = flags.directory;
  options.kind = parse_engine(flags.engine);
  const auto seconds = parse_seconds(flags.seconds);
  TESSERA_CHECK(seconds && *seconds > 0 && *seconds <= kMaxSeconds, ConfigError, "--seconds ",
                tessera::in_quotes(flags.seconds), " is not a time above 0 s, up to ", kMaxSeconds,
                " s");
  options.seconds = *seconds;
  const auto bytes = parse_bytes(flags.bytes);
  TESSERA_CHECK(bytes && *bytes >= kMinFileBytes, ConfigError, "--bytes ",
                tessera::in_quotes(flags.bytes), " is not a size from ", exact_bytes(kMinFileBytes),
                " to ", exact_bytes(std::numeric_limits<std::int64_t>::max()));
  options.file_bytes = static_cast<std::uint64_t>(*bytes);
  return options;
}

int run_bench_io(const BenchIoFlags& flags) {
  const IoBenchOptions options = checked_options(flags);
  IoBenchRun run;
  const auto rows = measure_io(
      options, Fio::find(),
      [](const std::string& notice) { std::cerr << "tessera: " + notice + "\n"
                                                << std::flush; },
      [&](const IoBenchRun& begun) {
        run = begun;
        if (!flags.json) {
          std::cout << io_bench_head(run) << std::flush;
        }
      },
      [&](const IoBenchRow& row) {
        if (!flags.json) {
          std::cout << io_bench_line(row) << std::flush;
        }
      });
  if (flags.json) {
    std::cout << io_bench_json(run, rows);
  }
  return kExitOk;
}

}  // namespace

Action add_bench_io(CLI::App& app) {
  auto flags = std::make_shared<BenchIoFlags>();
  app.add_option("DIR", flags->directory, "Directory on the disk to measure")->required();
  app.add_option("--engine", flags->engine, "auto, uring or threads (default auto)")
      ->type_name("NAME");
  app.add_option("--seconds", flags->seconds,
                 "For each load and program (default " + flags->seconds + ")")
      ->type_name("N");
  app.add_option("--bytes", flags->bytes,
                 "Size of the file, which is removed afterwards (default " + flags->bytes + ")")
      ->type_name("SIZE");
  app.add_flag("--json", flags->json, "Prints JSON instead of a table")->disable_flag_override();
  return [flags](const Arguments&) { return run_bench_io(*flags); };
}

}  // namespace tessera::cli
