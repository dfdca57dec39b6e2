#include "cli/inspect.h"

#include <iostream>
#include <memory>
#include <utility>

#include <CLI/CLI.hpp>

#include "cli/command.h"
#include "cli/flag_values.h"
#include "cli/inspect_report.h"

namespace tessera::cli {
namespace {

// Nothing is started: as many as anybody could have.
constexpr std::int64_t kMaxPlannedRanks = std::int64_t{1} << 20;

int run_inspect(const InspectFlags& flags) {
  const std::string& ranks = flags.train.ranks;
  const std::int64_t num_ranks =
      ranks.empty() ? 1 : parse_count("--ranks", ranks, 1, kMaxPlannedRanks);
  InspectResult result;
  result.preset = model_name(flags.train);
  result.input = checked_step_input(flags.train, static_cast<int>(num_ranks));
  result.plan = plan_step(result.input);
  result.meshes =
      compare_meshes(result.input, result.plan,
                     parse_link_rates(flags.link_inside, flags.link_across, result.input.mesh));
  std::cout << (flags.json ? inspect_json(result) : inspect_screen(result));
  return kExitOk;
}

}  // namespace

Action add_inspect(CLI::App& app) {
  auto flags = std::make_shared<InspectFlags>();
  add_model_flags(app, flags->train);
  app.add_option("--ranks", flags->train.ranks, "Ranks to plan for; none is started (default 1)")
      ->type_name("N");
  app.add_option("--precision", flags->train.precision, "Sets option precision: fp32, bf16 or fp16")
      ->type_name("NAME");
  app.add_option("--batch", flags->train.batch,
                 "Sequences per step of all ranks together; sets option batch.total")
      ->type_name("N");
  app.add_option("--accumulate", flags->train.accumulate, "Sets option batch.accumulate")
      ->type_name("N");
  app.add_option("--device", flags->train.device, "cpu (default) or cuda; a GPU need not be here")
      ->type_name("NAME");
  add_memory_flags(app, flags->train);
  add_mesh_flags(app, flags->train);
  app.add_option("--link-inside", flags->link_inside,
                 "Bytes per second that a rank sends to others of its host, for the time that each "
                 "mesh takes: 300GB")
      ->type_name("RATE");
  app.add_option("--link-across", flags->link_across,
                 "Bytes per second that a host sends to the others: 50GB")
      ->type_name("RATE");
  app.add_flag("--json", flags->json, "Prints JSON instead of a screen")->disable_flag_override();
  add_config_flags(app, flags->train.config);
  return [flags](const Arguments&) { return run_inspect(*flags); };
}

}  // namespace tessera::cli
