// `tessera plot`: a page with the curves of one or several runs.
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "cli/command.h"
#include "cli/output_file.h"
#include "cli/plot_page.h"
#include "cli/plot_runs.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera::cli {
namespace {

struct PlotFlags {
  std::vector<std::string> files;
  std::string out;
};

PlotRun read_run(const std::string& path) {
  std::error_code ignored;
  TESSERA_CHECK(!std::filesystem::is_directory(path, ignored), ConfigError,
                "plot: ", tessera::in_quotes(path),
                " is a directory; name files that --metrics has written");
  std::ifstream in(path, std::ios::binary);
  TESSERA_CHECK(in.is_open(), ConfigError, "plot: cannot open ", tessera::in_quotes(path), ": ",
                std::strerror(errno));
  PlotRun run = read_plot_run(path, in);
  TESSERA_CHECK(!in.bad(), IoError, "plot: cannot read ", tessera::in_quotes(path), ": ",
                std::strerror(errno));
  TESSERA_CHECK(!run.steps.empty() || run.num_unreadable == 0, ConfigError,
                "plot: ", tessera::in_quotes(path),
                " has no line that describes a step; name a file that ",
                "`tessera train --metrics` has written");
  return run;
}

std::string title_of(const std::vector<PlotRun>& runs) {
  std::string title;
  for (std::size_t i = 0; i < runs.size() && i < 3; ++i) {
    title += (i == 0 ? "" : ", ") + runs[i].name;
  }
  return runs.size() > 3 ? title + ", ..." : title;
}

int run_plot(const PlotFlags& flags) {
  const std::filesystem::path out =
      flags.out.empty() ? std::filesystem::path(flags.files.front()).replace_extension(".html")
                        : std::filesystem::path(flags.out);
  check_output_file("--out", out);
  std::set<std::string> names;
  for (const std::string& path : flags.files) {
    std::error_code ignored;
    TESSERA_CHECK(!std::filesystem::equivalent(path, out, ignored), ConfigError, "--out ",
                  tessera::in_quotes(out.string()),
                  " is one of the files to read; give another name");
    TESSERA_CHECK(names.insert(path).second, ConfigError, "plot: ", tessera::in_quotes(path),
                  " is named twice");
  }
  std::vector<PlotRun> runs;
  for (const std::string& path : flags.files) {
    runs.push_back(read_run(path));
  }
  write_output_file(out, plot_page(title_of(runs), plot_json(runs)));
  for (const PlotRun& run : runs) {
    std::cout << run.name << ": " << run.steps.size() << " step"
              << plural(static_cast<std::int64_t>(run.steps.size()));
    if (run.num_unreadable > 0) {
      std::cout << ", " << run.num_unreadable << " unreadable line"
                << plural(static_cast<std::int64_t>(run.num_unreadable)) << " left out";
    }
    std::cout << (run.is_torn ? ", last line not complete" : "") << "\n";
  }
  std::cout << "wrote " << out.string() << "; open it in a browser\n";
  return kExitOk;
}

}  // namespace

Action add_plot(CLI::App& app) {
  auto flags = std::make_shared<PlotFlags>();
  app.add_option("FILES", flags->files, "Files of `tessera train --metrics`, one per run")
      ->required()
      ->type_name("");
  app.add_option("--out", flags->out, "The page (default: the first file's name with .html)")
      ->type_name("FILE");
  return [flags](const Arguments&) { return run_plot(*flags); };
}

}  // namespace tessera::cli
