#include <exception>
#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>

#include <CLI/CLI.hpp>

#include "cli/command.h"
#include "cli/doctor_report.h"
#include "cli/probe.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/device/host_info.h"

namespace tessera::cli {
namespace {

// A probe that throws all the same becomes a row that says so: the others must still be seen.
ProbeResult guarded(const char* name, const std::function<ProbeResult()>& probe) {
  try {
    return probe();
  } catch (const std::exception& error) {
    return {name, ProbeState::kMissing, std::string("the probe failed: ") + error.what(),
            "it is not known whether this works here", false};
  }
}

struct DoctorFlags {
  std::string directory = ".";
  bool json = false;
};

int run_doctor(const DoctorFlags& flags) {
  std::error_code error;
  TESSERA_CHECK(std::filesystem::is_directory(flags.directory, error), ConfigError, "--dir ",
                tessera::in_quotes(flags.directory), " is not a directory; give one that exists");
  const std::vector<ProbeResult> results = run_probes(flags.directory);
  std::cout << (flags.json ? doctor_json(results) : doctor_screen(results));
  return can_train(results) ? kExitOk : kExitFailure;
}

}  // namespace

std::vector<ProbeResult> run_probes(const std::filesystem::path& directory) {
  const std::filesystem::path root = "/";
  return {
      guarded("torch", probe_torch),
      guarded("compiler", probe_compiler),
      guarded("CUDA", probe_cuda),
      guarded("NCCL", probe_nccl),
      guarded("Gloo", probe_gloo),
      guarded("io_uring", [&] { return probe_io_uring(setup_io_uring, root); }),
      guarded("directory", [&] { return probe_directory(directory); }),
      guarded("O_DIRECT", [&] { return probe_direct_io(directory, open_direct); }),
      guarded("locked memory",
              [] { return probe_locked_memory(device::locked_memory_limit_bytes()); }),
      guarded("host memory", [&] { return probe_memory(root); }),
      guarded("cores", [&] { return probe_cores(root); }),
      guarded("CPU bf16", [&] { return probe_low_precision(root); }),
      guarded("huge pages", [&] { return probe_huge_pages(root); }),
      guarded("NUMA", [&] { return probe_numa(root); }),
      guarded("open files", [] { return probe_open_files(read_open_file_limit()); }),
  };
}

Action add_doctor(CLI::App& app) {
  auto flags = std::make_shared<DoctorFlags>();
  app.add_option("--dir", flags->directory, "Directory that offloaded data would go to (default .)")
      ->type_name("DIR");
  app.add_flag("--json", flags->json, "Prints JSON instead of a screen")->disable_flag_override();
  return [flags](const Arguments&) { return run_doctor(*flags); };
}

}  // namespace tessera::cli
