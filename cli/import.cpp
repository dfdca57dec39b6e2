// `tessera import`: a checkpoint of DeepSpeed ZeRO-3 becomes a save, with its moments.
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>

#include <CLI/CLI.hpp>

#include "cli/command.h"
#include "cli/import_header.h"
#include "cli/import_reader.h"
#include "cli/import_save.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/core/units.h"

namespace tessera::cli {
namespace {

struct ImportFlags {
  std::string source;
  std::string directory;
  std::string tag;
  std::string python = "python3";
};

void print_header(const ImportHeader& header) {
  const auto num_params = static_cast<std::int64_t>(header.params.size());
  std::cout << "DeepSpeed " << printable(header.deepspeed, 40) << ", ZeRO-3 on " << header.num_ranks
            << " rank" << plural(header.num_ranks) << ": step " << header.step << ", "
            << to_string(header.precision) << ", " << num_params << " parameter"
            << plural(num_params) << " of " << header.num_elements << " elements\n";
  if (!header.groups.empty()) {
    const ImportedGroup& group = header.groups.front();
    std::cout << "optimizer: " << header.optimizer << ", lr " << exact_number(group.lr)
              << ", betas " << exact_number(group.beta1) << " and " << exact_number(group.beta2)
              << ", eps " << exact_number(group.eps) << ", weight decay "
              << exact_number(group.weight_decay) << "\n";
  }
  for (const std::string& note : header.notes) {
    std::cout << "note: " << printable(note, 400) << "\n";
  }
  std::cout << std::flush;
}

int run_import(const ImportFlags& flags) {
  std::error_code ignored;
  TESSERA_CHECK(std::filesystem::is_directory(flags.source, ignored), ConfigError,
                "import: ", tessera::in_quotes(flags.source),
                " is no directory; name the one that DeepSpeed's save_checkpoint() was given");
  TESSERA_CHECK(!flags.directory.empty(), ConfigError, "import: DIR is empty; name the directory ",
                "for the save");
  ImportReader reader(flags.python, {flags.source, flags.tag});
  const ReadBytes read = [&reader](std::span<std::byte> out) { reader.read(out); };
  const ImportHeader header = read_import_header(read);
  print_header(header);
  const std::string save = save_imported(
      header, read, [&reader] { reader.finish(); },
      {flags.directory,
       printable(std::filesystem::absolute(flags.source).lexically_normal().string(), 4096)});
  std::cout << "wrote " << printable(save, 400) << "; `tessera train --checkpoint "
            << printable(flags.directory, 400)
            << " --resume` with the same model and options goes on from it\n";
  return kExitOk;
}

}  // namespace

Action add_import(CLI::App& app) {
  auto flags = std::make_shared<ImportFlags>();
  app.add_option("SRC", flags->source, "The directory that save_checkpoint() was given, or a tag's")
      ->required()
      ->type_name("");
  app.add_option("DIR", flags->directory, "Directory of saves that gets one more")
      ->required()
      ->type_name("");
  app.add_option("--tag", flags->tag, "The save of DeepSpeed's; without it the one in `latest`")
      ->type_name("TAG");
  app.add_option("--python", flags->python, "A Python with torch; DeepSpeed is not needed")
      ->type_name("PROGRAM")
      ->capture_default_str();
  return [flags](const Arguments&) { return run_import(*flags); };
}

}  // namespace tessera::cli
