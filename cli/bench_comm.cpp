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
#include "tessera/comm/peer_memory.h"
#include "tessera/comm/rank_process.h"
#include "tessera/comm/rendezvous.h"
#include "tessera/comm/store.h"
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
  int num_ranks = 0;       // 0: as many as a launcher has started
  int ranks_per_host = 0;  // 0: hosts are what is found
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
  plan.ranks_per_host = static_cast<int>(config.get_int("comm.ranks_per_host"));
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

bool has_gpu_each(int num_local_ranks) { return num_local_ranks <= device::num_cuda_devices(); }

std::string no_gpu_each(int num_local_ranks) {
  const int num_gpus = device::num_cuda_devices();
  return num_gpus == 0 ? device::cuda_description()
                       : detail::concat(num_local_ranks, " ranks on this machine, and ", num_gpus,
                                        num_gpus == 1 ? " GPU" : " GPUs");
}

// Two NCCL ranks cannot share one GPU.
void check_gpus(const BenchCommPlan& plan, int num_local_ranks) {
  TESSERA_CHECK(plan.backend != "ipc" || device::num_cuda_devices() > 0, ConfigError,
                "backend ipc needs a GPU: ", device::cuda_description());
  TESSERA_CHECK(plan.backend != "nccl" || has_gpu_each(num_local_ranks), ConfigError,
                "backend nccl needs a GPU for every rank: ", num_local_ranks,
                " ranks on this machine, ", device::num_cuda_devices(),
                " GPUs; use fewer ranks, or --backend gloo");
}

// A backend's world, and the device whose memory it works on.
struct BenchWorld {
  std::shared_ptr<device::Device> device;
  comm::World world;
};

// The worlds of one rank: those of all backends that these ranks can have, or of the one that was
// asked for. Each rank joins them in the same order; which they are follows from what all ranks of
// a world have found.
class BenchWorlds {
 public:
  BenchWorlds(const BenchCommPlan& plan, const comm::Rendezvous& rendezvous,
              comm::RankProcess& process, Spans& spans)
      : plan_(plan), rendezvous_(rendezvous), process_(process), spans_(spans) {
    if (plan.backend == "auto" && rendezvous.world_size > 1) {
      join_all();
    } else {
      join_one();
    }
  }

  CommBenchRun run() const {
    return {.backends = names_,
            .num_ranks = rendezvous_.world_size,
            .num_rounds = plan_.bench.num_rounds,
            .gaps = gaps_};
  }

  std::vector<CommBenchWorld> measured() const {
    std::vector<CommBenchWorld> list;
    for (const BenchWorld& joined : worlds_) {
      const bool is_shm = joined.world.group->backend_name() == "shm";
      list.push_back(
          {joined.world.group.get(), joined.device.get(), is_shm ? peers_.get() : nullptr});
    }
    return list;
  }

  // Whichever world the others wait in, they hear of it.
  void post_failure(const std::exception& error) const {
    for (const BenchWorld& joined : worlds_) {
      if (joined.world.status) {
        joined.world.status->post_failure(rendezvous_.rank, error);
      }
    }
  }

 private:
  void join_one() {
    check_gpus(plan_, rendezvous_.local_world_size);
    if (plan_.backend == "nccl" ||
        (plan_.backend == "auto" && has_gpu_each(rendezvous_.local_world_size))) {
      join(comm::BackendKind::kNccl, make_gpu());
    } else if (plan_.backend == "ipc") {
      join(comm::BackendKind::kIpc, make_gpu());
    } else {
      join(plan_.backend == "shm" ? comm::BackendKind::kShm : comm::BackendKind::kGloo,
           device::make_cpu_device());
    }
  }

  void join_all() {
    const std::shared_ptr<device::Device> cpu = device::make_cpu_device();
    // Shared memory if the ranks have it: whether they do is found out by trying.
    const comm::Group& best = join(comm::BackendKind::kAuto, cpu);
    if (best.backend_name() == "gloo") {
      gaps_.push_back({"shm", best.backend_note()});
    } else {
      connect_memory();
      join(comm::BackendKind::kGloo, cpu);
    }
    if (device::num_cuda_devices() > 0) {
      try {
        join(comm::BackendKind::kIpc, make_gpu());
      } catch (const CommError& error) {  // on every rank
        gaps_.push_back({"ipc", error.what()});
      }
    } else {
      gaps_.push_back({"ipc", device::cuda_description()});
    }
    if (has_gpu_each(rendezvous_.local_world_size)) {
      join(comm::BackendKind::kNccl, make_gpu());
    } else {
      gaps_.push_back({"nccl", no_gpu_each(rendezvous_.local_world_size)});
    }
  }

  comm::Group& join(comm::BackendKind kind, std::shared_ptr<device::Device> device) {
    comm::WorldOptions options;
    options.group = plan_.group;
    options.group.device = device.get();
    options.group.spans = &spans_;
    options.backend = kind;
    options.ranks_per_host = plan_.ranks_per_host;
    options.cuda_device = device->is_discrete() ? gpu_index() : -1;
    comm::World world = comm::join_world(rendezvous_, options);
    process_.set_status(world.status);
    names_.emplace_back(world.group->backend_name());
    worlds_.push_back({std::move(device), std::move(world)});
    return *worlds_.back().world.group;
  }

  // For plain copies out of the other ranks' memory, beside the backend's own connections.
  void connect_memory() {
    comm::PeerOptions options;
    options.rank = rendezvous_.rank;
    options.size = rendezvous_.world_size;
    options.group = "bench-comm.memcpy";
    options.control_bytes = 1;  // nothing is said in it
    options.timeout = plan_.group.timeout;
    options.status = worlds_.back().world.status;
    std::string why_not;
    peers_ = comm::connect_peers(*comm::join_store(rendezvous_, options.timeout), options, why_not);
    if (!peers_) {
      gaps_.push_back({"memcpy", why_not});
    }
  }

  // Its own, or, where there are more ranks than GPUs, the next one in turn.
  int gpu_index() const { return rendezvous_.local_rank % std::max(1, device::num_cuda_devices()); }

  std::shared_ptr<device::Device> make_gpu() const {
    device::CudaDeviceOptions options;
    options.index = gpu_index();
    return device::make_cuda_device(options);
  }

  const BenchCommPlan& plan_;
  const comm::Rendezvous& rendezvous_;
  comm::RankProcess& process_;
  Spans& spans_;
  std::vector<BenchWorld> worlds_;
  std::vector<std::string> names_;
  std::unique_ptr<comm::PeerMemory> peers_;  // null: no memcpy
  std::vector<CommBenchGap> gaps_;
};

// Collective. Rank 0 prints each line as it comes and writes the file.
void measure_and_print(const BenchCommPlan& plan, const BenchWorlds& worlds, bool speaks) {
  const CommBenchRun run = worlds.run();
  if (speaks) {
    std::cout << comm_bench_head(run) << std::flush;
  }
  const auto lines = measure_collectives(worlds.measured(), SteadyClock(), plan.bench,
                                         [&](const CommBenchLine& line) {
                                           if (speaks) {
                                             std::cout << comm_bench_text(run, line) << std::flush;
                                           }
                                         });
  if (speaks && !plan.json.empty()) {
    write_output_file(plan.json, comm_bench_json(run, lines));
  }
}

void run_this_rank(const BenchCommPlan& plan, const comm::Rendezvous& rendezvous,
                   comm::RankProcess& process) {
  log_notices(plan, rendezvous.rank, rendezvous.world_size);
  const SteadyClock clock;
  Spans spans(clock, rendezvous.rank == 0 ? plan.num_spans : 0);
  const BenchWorlds worlds(plan, rendezvous, process, spans);
  try {
    measure_and_print(plan, worlds, rendezvous.rank == 0);
  } catch (const PeerError&) {
    throw;  // a consequence: the others know better
  } catch (const std::exception& error) {
    worlds.post_failure(error);
    throw;
  }
  write_trace(plan, spans);
}

int run_bench_comm(const BenchCommFlags& flags, const Arguments& arguments) {
  const BenchCommPlan plan = checked_plan(flags);
  const comm::Environment env = comm::process_environment();
  if (plan.num_ranks > 0) {
    check_no_rendezvous(env);
  }
  if (plan.num_ranks > 1) {
    check_gpus(plan, plan.num_ranks);  // once, here, instead of by every rank
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
                 allowed_text(*find_option("comm.backend")) +
                     " (default: option comm.backend); auto measures all that these ranks can have")
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
