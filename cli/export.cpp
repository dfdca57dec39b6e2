// `tessera export`: a checkpoint's model for other programs. What it does is models/gpt_export.h's.
#include <cstdint>
#include <iostream>
#include <memory>
#include <optional>
#include <string>

#include <CLI/CLI.hpp>

#include "cli/command.h"
#include "cli/flag_values.h"
#include "models/gpt_export.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/core/units.h"

namespace tessera::cli {
namespace {

struct ExportFlags {
  std::string checkpoint;
  std::string to;
  std::string names;
  std::string adapters;
  std::string precision;
  std::string shard_bytes;
};

models::ExportOptions checked_export(const ExportFlags& flags) {
  models::ExportOptions options;
  options.checkpoint = flags.checkpoint;
  options.to = flags.to;
  TESSERA_CHECK(!flags.to.empty(), ConfigError, "--to names no directory");
  TESSERA_CHECK(flags.names.empty() || flags.names == "gpt2" || flags.names == "tessera",
                ConfigError, "--names ", tessera::in_quotes(flags.names),
                " is neither gpt2 nor tessera");
  options.naming =
      flags.names == "tessera" ? models::GptNaming::kTessera : models::GptNaming::kGpt2;
  TESSERA_CHECK(flags.adapters.empty() || flags.adapters == "merged" || flags.adapters == "alone",
                ConfigError, "--adapters ", tessera::in_quotes(flags.adapters),
                " is neither merged nor alone");
  if (flags.adapters == "alone") {
    TESSERA_CHECK(options.naming == models::GptNaming::kGpt2, ConfigError,
                  "--adapters alone writes the names of PEFT, and --names tessera others; leave "
                  "one of them out");
    options.adapters = models::ExportAdapters::kAlone;
  }
  if (!flags.precision.empty()) {
    options.dtype = parse_precision("--precision", flags.precision);
  }
  if (!flags.shard_bytes.empty()) {
    const std::optional<std::int64_t> bytes = parse_bytes(flags.shard_bytes);
    TESSERA_CHECK(bytes && *bytes > 0, ConfigError, "--shard-bytes ",
                  tessera::in_quotes(flags.shard_bytes), " is not a size; write for example 5GB");
    options.shard_bytes = static_cast<std::uint64_t>(*bytes);
  }
  return options;
}

int run_export(const ExportFlags& flags) {
  const models::ExportResult result = models::export_weights(checked_export(flags));
  std::cout << "exported " << tessera::printable(result.save, 400) << " (step " << result.step
            << ") to " << tessera::printable(flags.to, 400) << ": " << result.num_tensors
            << " tensors in " << to_string(result.dtype) << ", " << approximate_bytes(result.bytes)
            << " in " << result.num_files << " file" << plural(result.num_files);
  if (result.num_merged > 0) {
    std::cout << "; adapters are merged into " << result.num_merged << " of them";
  }
  std::cout << "\n";
  return kExitOk;
}

}  // namespace

Action add_export(CLI::App& app) {
  auto flags = std::make_shared<ExportFlags>();
  app.add_option("--checkpoint", flags->checkpoint,
                 "A directory of `tessera train --checkpoint`, of which the newest save is taken, "
                 "or one save in it")
      ->required()
      ->type_name("DIR");
  app.add_option("--to", flags->to, "The directory to make")->required()->type_name("DIR");
  app.add_option("--names", flags->names,
                 "gpt2 (default): names and layouts of transformers' GPT2LMHeadModel; or tessera")
      ->type_name("NAME");
  app.add_option("--adapters", flags->adapters,
                 "merged (default): added to the weights beside them; or alone: they and no base, "
                 "as PEFT's adapter_model.safetensors")
      ->type_name("WHAT");
  app.add_option("--precision", flags->precision,
                 "fp32, bf16 or fp16 (default: the run's); fp32 is made of the master weights")
      ->type_name("NAME");
  app.add_option("--shard-bytes", flags->shard_bytes,
                 "Most bytes of tensors in one file (default 5GB)")
      ->type_name("SIZE");
  return [flags](const Arguments&) { return run_export(*flags); };
}

}  // namespace tessera::cli
