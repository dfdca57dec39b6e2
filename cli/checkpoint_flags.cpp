#include "cli/checkpoint_flags.h"

#include <utility>

#include <CLI/CLI.hpp>

#include "cli/flag_values.h"
#include "cli/output_file.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/core/units.h"

namespace tessera::cli {
namespace {

constexpr std::int64_t kMaxSaveEvery = std::int64_t{1} << 40;
constexpr std::int64_t kMaxKeep = 1'000'000;

void check_needs(const char* flag, bool is_given, const char* needed, bool is_needed_given) {
  TESSERA_CHECK(!is_given || is_needed_given, ConfigError, flag, " is nothing without ", needed,
                "; give that, too");
}

}  // namespace

void add_checkpoint_flags(CLI::App& app, CheckpointFlags& flags) {
  constexpr const char* kGroup = "Checkpoints (docs/features.md says what may change between runs)";
  const auto add_value = [&app](const char* name, std::string& value, const std::string& text,
                                const char* type) {
    app.add_option(name, value, text)->type_name(type)->group(kGroup);
  };
  const auto add_switch = [&app](const char* name, bool& value, const char* text) {
    app.add_flag(name, value, text)->disable_flag_override()->group(kGroup);
  };
  add_value("--checkpoint", flags.root,
            "Directory of saves, from which training can go on: one is made after the last step, "
            "or after the one that a signal or --stop-after stops",
            "DIR");
  add_value("--save-every", flags.save_every, "Saves after every N steps, too", "N");
  add_value("--keep", flags.keep,
            "Of the newest saves; older ones are removed when a new one is complete (default " +
                std::to_string(kDefaultKeep) + ")",
            "N");
  add_switch("--resume", flags.resume,
             "Goes on from the newest save of --checkpoint, on any number of ranks; where there "
             "is none, starts anew");
  add_switch("--partial", flags.partial,
             "With --resume: parameters and states that the save lacks keep their initial values, "
             "and what the model lacks is left out");
  add_switch("--save-async", flags.save_async, "Makes the saves of --save-every beside training");
  add_value("--save-memory", flags.save_memory,
            "Of each rank, for --save-async: so much of what an update overwrites need not wait "
            "for the disk (default: what the host budget leaves)",
            "SIZE");
}

std::optional<CheckpointPlan> checked_checkpoint_plan(const CheckpointFlags& flags) {
  const bool has_root = !flags.root.empty();
  check_needs("--save-every", !flags.save_every.empty(), "--checkpoint DIR", has_root);
  check_needs("--keep", !flags.keep.empty(), "--checkpoint DIR", has_root);
  check_needs("--resume", flags.resume, "--checkpoint DIR", has_root);
  check_needs("--partial", flags.partial, "--resume", flags.resume);
  check_needs("--save-async", flags.save_async, "--save-every N", !flags.save_every.empty());
  check_needs("--save-memory", !flags.save_memory.empty(), "--save-async", flags.save_async);
  if (!has_root) {
    return std::nullopt;
  }
  check_output_directory("--checkpoint", flags.root);
  CheckpointPlan plan;
  plan.root = flags.root;
  if (!flags.save_every.empty()) {
    plan.save_every = parse_count("--save-every", flags.save_every, 1, kMaxSaveEvery);
  }
  if (!flags.keep.empty()) {
    plan.keep = static_cast<int>(parse_count("--keep", flags.keep, 1, kMaxKeep));
  }
  plan.resume = flags.resume;
  plan.partial = flags.partial;
  plan.is_async = flags.save_async;
  if (!flags.save_memory.empty()) {
    plan.memory_bytes = parse_bytes(flags.save_memory);
    TESSERA_CHECK(plan.memory_bytes, ConfigError, "--save-memory ",
                  tessera::in_quotes(flags.save_memory), " is not a size; write for example 2GiB");
  }
  return plan;
}

}  // namespace tessera::cli
