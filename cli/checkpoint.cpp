// `tessera checkpoint`: what saves hold, whether every byte of them is as it was written, and in
// what two of them differ.
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "cli/checkpoint_report.h"
#include "cli/command.h"
#include "tessera/checkpoint/checkpoint_reader.h"
#include "tessera/checkpoint/comparison.h"
#include "tessera/checkpoint/save_directory.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera::cli {
namespace {

using checkpoint::CheckpointReader;

struct CheckpointCommandFlags {
  std::string directory;
  std::string other;
  bool verify = false;
};

std::int64_t made_time_s(const std::string& save) {
  const std::string manifest =
      (std::filesystem::path(save) / std::string(checkpoint::kManifestName)).string();
  struct stat status {};
  TESSERA_CHECK(::stat(manifest.c_str(), &status) == 0, IoError, "cannot read ",
                tessera::in_quotes(manifest), ": ", std::strerror(errno));
  return std::int64_t{status.st_mtime};
}

SaveView view_of(const std::string& save) {
  const std::filesystem::path path(save);
  const std::filesystem::path named = path.has_filename() ? path : path.parent_path();
  return {named.filename().string(), checkpoint::read_manifest(save), made_time_s(save)};
}

// The saves of a root, the newest last, or the one that the path is.
std::vector<std::string> saves_of(const std::string& directory) {
  std::vector<std::string> paths;
  for (const checkpoint::SavedName& save : checkpoint::list_saves(directory)) {
    paths.push_back(save.path);
  }
  if (paths.empty()) {
    paths.push_back(checkpoint::find_save(directory));
  }
  return paths;
}

int show_saves(const std::vector<std::string>& paths) {
  const auto now_s = static_cast<std::int64_t>(std::time(nullptr));
  std::vector<SaveView> saves;
  for (const std::string& path : paths) {
    saves.push_back(view_of(path));
  }
  if (saves.size() > 1) {
    std::cout << saves_table(saves, now_s) << "\n";
  }
  std::cout << save_screen(saves.back(), now_s);
  return kExitOk;
}

// What is wrong with a save, one line each; one that cannot be opened has that line alone.
std::vector<std::string> problems_of(const std::string& path) {
  std::vector<std::string> problems;
  try {
    for (const checkpoint::VerifyProblem& problem : checkpoint::verify(CheckpointReader(path))) {
      problems.push_back(problem.file + ": " + problem.text);
    }
  } catch (const CorruptError& error) {
    problems.emplace_back(error.what());
  }
  return problems;
}

int verify_all(const std::vector<std::string>& paths) {
  std::size_t num_problems = 0;
  for (const std::string& path : paths) {
    const std::vector<std::string> problems = problems_of(path);
    for (const std::string& problem : problems) {
      std::cout << printable(problem, 600) << "\n";
    }
    std::cout << printable(path, 400) << ": "
              << (problems.empty() ? "every byte is as it was written\n"
                                   : "not as it was written\n")
              << std::flush;
    num_problems += problems.size();
  }
  TESSERA_CHECK(num_problems == 0, CorruptError, "checkpoint --verify: ", num_problems, " problem",
                plural(static_cast<std::int64_t>(num_problems)));
  return kExitOk;
}

int compare_two(const std::string& left, const std::string& right) {
  const CheckpointReader one(left);
  const CheckpointReader two(right);
  const checkpoint::CheckpointDifferences differences = checkpoint::compare(one, two);
  std::cout << differences_table(differences) << printable(one.path(), 400) << " and "
            << printable(two.path(), 400) << (differences.empty() ? " are equal\n" : " differ\n");
  return differences.empty() ? kExitOk : kExitFailure;
}

int run_checkpoint(const CheckpointCommandFlags& flags) {
  TESSERA_CHECK(!flags.verify || flags.other.empty(), ConfigError,
                "--verify and --diff are two questions; ask one at a time");
  if (!flags.other.empty()) {
    return compare_two(flags.directory, flags.other);
  }
  const std::vector<std::string> paths = saves_of(flags.directory);
  return flags.verify ? verify_all(paths) : show_saves(paths);
}

}  // namespace

Action add_checkpoint(CLI::App& app) {
  auto flags = std::make_shared<CheckpointCommandFlags>();
  app.add_option("DIR", flags->directory, "A directory of saves (--checkpoint), or one save")
      ->required()
      ->type_name("");
  app.add_flag("--verify", flags->verify,
               "Reads every byte and compares checksums; exit code 1 if "
               "one is not as it was written")
      ->disable_flag_override();
  app.add_option("--diff", flags->other,
                 "Compares with this one, tensor by tensor, whatever number of ranks wrote them "
                 "(of directories of saves the newest); exit code 1 if they differ")
      ->type_name("DIR");
  return [flags](const Arguments&) { return run_checkpoint(*flags); };
}

}  // namespace tessera::cli
