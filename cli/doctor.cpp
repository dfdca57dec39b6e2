#include <algorithm>
#include <exception>
#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/probe.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/device/host_info.h"

namespace tessera::cli {
namespace {

constexpr std::size_t kColumns = 80;
constexpr std::size_t kStateColumns = 9;
constexpr std::size_t kNameColumns = 15;
constexpr std::size_t kTextColumns = kColumns - kStateColumns - kNameColumns;

std::string padded(std::string text, std::size_t columns) {
  text.resize(std::max(columns, text.size()), ' ');
  return text;
}

// Breaks at spaces; a word longer than a line is broken anywhere.
std::vector<std::string> wrapped(const std::string& text, std::size_t columns) {
  std::vector<std::string> lines;
  std::size_t begin = 0;
  while (begin < text.size()) {
    std::size_t end = std::min(text.size(), begin + columns);
    if (end < text.size() && text[end] != ' ') {
      const std::size_t space = text.rfind(' ', end);
      if (space != std::string::npos && space > begin) {
        end = space;
      }
    }
    lines.push_back(text.substr(begin, end - begin));
    begin = end;
    while (begin < text.size() && text[begin] == ' ') {
      ++begin;
    }
  }
  return lines;
}

// Costs start two columns further left than findings: they are the sentences.
void append_cost(std::string& screen, const std::string& cost) {
  const std::string indent(kStateColumns + 2, ' ');
  for (const std::string& line : wrapped("-> " + cost, kColumns - indent.size())) {
    screen += indent + line + "\n";
  }
}

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

std::string to_string(ProbeState state) {
  switch (state) {
    case ProbeState::kOk:
      return "ok";
    case ProbeState::kLimited:
      return "limited";
    case ProbeState::kMissing:
      return "missing";
  }
  return "unknown";
}

bool can_train(std::span<const ProbeResult> results) {
  return std::none_of(results.begin(), results.end(), [](const ProbeResult& result) {
    return result.required && result.state == ProbeState::kMissing;
  });
}

std::string doctor_screen(std::span<const ProbeResult> results) {
  std::string screen;
  std::string needed;
  int num_limits = 0;
  for (const ProbeResult& result : results) {
    const std::vector<std::string> found = wrapped(printable(result.found, 400), kTextColumns);
    screen += padded(to_string(result.state), kStateColumns) + padded(result.name, kNameColumns) +
              (found.empty() ? std::string() : found.front()) + "\n";
    for (std::size_t i = 1; i < found.size(); ++i) {
      screen += std::string(kStateColumns + kNameColumns, ' ') + found[i] + "\n";
    }
    if (result.state != ProbeState::kOk) {
      ++num_limits;
      append_cost(screen, result.cost);
      if (result.required && result.state == ProbeState::kMissing) {
        needed += (needed.empty() ? "" : ", ") + result.name;
      }
    }
  }
  if (!needed.empty()) {
    screen += "Training cannot run: it needs " + needed + ".\n";
  } else if (num_limits > 0) {
    screen += "Training can run; see the arrows for what would make it faster or larger.\n";
  } else {
    screen += "Training can run; nothing is missing.\n";
  }
  return screen;
}

std::string doctor_json(std::span<const ProbeResult> results) {
  nlohmann::ordered_json probes = nlohmann::ordered_json::array();
  for (const ProbeResult& result : results) {
    probes.push_back({{"name", result.name},
                      {"state", to_string(result.state)},
                      {"found", result.found},
                      {"cost", result.cost},
                      {"required", result.required}});
  }
  const nlohmann::ordered_json document{{"can_train", can_train(results)}, {"probes", probes}};
  // Paths need not be UTF-8; JSON must be.
  return document.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

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
