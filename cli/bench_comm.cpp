#include <algorithm>
#include <iostream>
#include <memory>

#include <CLI/CLI.hpp>

#include "cli/comm_bench.h"
#include "cli/command.h"
#include "cli/config_flags.h"
#include "cli/flag_values.h"
#include "cli/launch/launcher.h"
#include "cli/local_ranks.h"
#include "cli/output_file.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/rank_process.h"
#include "tessera/comm/rendezvous.h"
#include "tessera/core/config.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"
#include "tessera/core/option_table.h"
#include "tessera/core/option_value.h"
#include "tessera/device/device_cpu.h"
#include "tessera/device/device_cuda.h"

namespace tessera::cli {
namespace {

constexpr std::int64_t kMaxRounds = 1000000;

struct BenchCommFlags {
  ConfigFlags config;
  std::string ranks;
  std::string backend;
  std::string sizes = "4KiB,1MiB,64MiB";
  std::string rounds = "10";
  std::string json;
};

// The flags, checked.
struct BenchCommPlan {
  CommBenchOptions bench;
  comm::GroupOptions group;
  std::string backend;
  std::string json;
  LogOptions log;
  std::string trace_path;
  std::size_t num_spans = 0;  // 0: no tracing
  std::vector<std::string> notices;
  int num_ranks = 0;  // 0: as many as a launcher has started
};

BenchCommPlan checked_plan(const BenchCommFlags& flags) {
  Config config = load_config(flags.config);
  if (!flags.backend.empty()) {
    config.set("comm.backend",
               parse_value(*find_option("comm.backend"), flags.backend, "--backend"));
  }
  config.check();
  BenchCommPlan plan;
  plan.log = LogOptions::from(config);
  plan.notices = config.notices();
  plan.backend = config.get_string("comm.backend");
  plan.trace_path = config.get_string("trace.path");
  if (!plan.trace_path.empty()) {
    check_output_file("trace.path", plan.trace_path);
    plan.num_spans = static_cast<std::size_t>(config.get_int("trace.ring_spans"));
  }
  plan.group = group_options(config);
  plan.bench.sizes_bytes = parse_sizes("--sizes", flags.sizes);
  plan.bench.num_rounds = static_cast<int>(parse_count("--rounds", flags.rounds, 1, kMaxRounds));
  if (!flags.ranks.empty()) {
    plan.num_ranks = parse_ranks(flags.ranks);
  }
  if (!flags.json.empty()) {
    plan.json = flags.json;
    check_output_file("--json", plan.json);
  }
  return plan;
}

void log_notices(const BenchCommPlan& plan, int rank, int world) {
  LogContext context;
  context.rank = rank;
  context.world = world;
  const Logger logger(plan.log, context);
  for (const std::string& notice : plan.notices) {
    logger.info(notice);
  }
}

// Rank 0's spans tell of all: a collective takes as long as its slowest rank.
void write_trace(const BenchCommPlan& plan, const Spans& spans) {
  if (spans.enabled()) {
    spans.write_chrome_trace(plan.trace_path, 0);
  }
}

// Collective. Rank 0 prints each line as it comes and writes the file.
void measure_and_print(const BenchCommPlan& plan, comm::Group& group, device::Device& device) {
  const CommBenchRun run{std::string(group.backend_name()), group.size(), plan.bench.num_rounds};
  const bool speaks = group.rank() == 0;
  if (speaks) {
    std::cout << comm_bench_head(run) << std::flush;
  }
  const auto rows = measure_collectives(group, device, SteadyClock(), plan.bench,
                                        [speaks](const CommBenchRow& row) {
                                          if (speaks) {
                                            std::cout << comm_bench_line(row) << std::flush;
                                          }
                                        });
  if (speaks && !plan.json.empty()) {
    write_output_file(plan.json, comm_bench_json(run, rows));
  }
}

// Two NCCL ranks cannot share one GPU, so "auto" takes NCCL only where each rank has its own.
bool takes_nccl(const BenchCommPlan& plan, int num_local_ranks) {
  const int num_gpus = device::num_cuda_devices();
  TESSERA_CHECK(plan.backend != "nccl" || num_local_ranks <= num_gpus, ConfigError,
                "backend nccl needs a GPU for every rank: ", num_local_ranks,
                " ranks on this machine, ", num_gpus, " GPUs; use fewer ranks, or --backend gloo");
  return plan.backend == "nccl" || (plan.backend == "auto" && num_local_ranks <= num_gpus);
}

void run_this_rank(const BenchCommPlan& plan, const comm::Rendezvous& rendezvous,
                   comm::RankProcess& process) {
  log_notices(plan, rendezvous.rank, rendezvous.world_size);
  comm::WorldOptions options;
  options.group = plan.group;
  options.backend = comm::BackendKind::kGloo;
  std::unique_ptr<device::Device> device;
  if (takes_nccl(plan, rendezvous.local_world_size)) {
    options.backend = comm::BackendKind::kNccl;
    options.cuda_device = rendezvous.local_rank;
    device::CudaDeviceOptions device_options;
    device_options.index = rendezvous.local_rank;
    device = device::make_cuda_device(device_options);
  } else {
    device = device::make_cpu_device();
  }
  options.group.device = device.get();
  const SteadyClock clock;
  Spans spans(clock, rendezvous.rank == 0 ? plan.num_spans : 0);
  options.group.spans = &spans;
  const comm::World world = comm::join_world(rendezvous, options);
  process.set_status(world.status);
  measure_and_print(plan, *world.group, *device);
  write_trace(plan, spans);
}

int run_bench_comm(const BenchCommFlags& flags, const Arguments& arguments) {
  const BenchCommPlan plan = checked_plan(flags);
  const comm::Environment env = comm::process_environment();
  if (plan.num_ranks > 0) {
    check_no_rendezvous(env);
  }
  if (plan.num_ranks > 1) {
    takes_nccl(plan, plan.num_ranks);  // once, here, instead of by every rank
    return start_local_ranks(plan.num_ranks, arguments);
  }
  const comm::Rendezvous rendezvous =
      plan.num_ranks == 1 ? comm::Rendezvous() : comm::find_rendezvous(env);
  comm::RankProcess process(env);
  if (rendezvous.world_size == 1) {
    run_this_rank(plan, rendezvous, process);
    return kExitOk;
  }
  return process.run([&] {
    run_this_rank(plan, rendezvous, process);
    return kExitOk;
  });
}

}  // namespace

Action add_bench_comm(CLI::App& app) {
  auto flags = std::make_shared<BenchCommFlags>();
  add_ranks_flag(app, flags->ranks);
  app.add_option("--backend", flags->backend,
                 allowed_text(*find_option("comm.backend")) + " (default: option comm.backend)")
      ->type_name("NAME");
  app.add_option("--sizes", flags->sizes, "Bytes per collective (default " + flags->sizes + ")")
      ->type_name("LIST");
  app.add_option("--rounds", flags->rounds, "Timed calls of each (default " + flags->rounds + ")")
      ->type_name("N");
  app.add_option("--json", flags->json, "Writes the numbers to a file, too")->type_name("FILE");
  add_config_flags(app, flags->config);
  return [flags](const Arguments& arguments) { return run_bench_comm(*flags, arguments); };
}

}  // namespace tessera::cli
