#include "tessera/engine/runtime.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <filesystem>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>

#include "tessera/comm/bootstrap.h"
#include "tessera/comm/mesh.h"
#include "tessera/comm/rendezvous.h"
#include "tessera/comm/tag.h"
#include "tessera/core/error.h"
#include "tessera/core/unread_options.h"
#include "tessera/device/device_cuda.h"
#include "tessera/device/host_info.h"
#include "tessera/device/nvtx.h"
#include "tessera/engine/gather_host.h"
#include "tessera/engine/host_tier_device.h"
#include "tessera/engine/update_rates.h"
#include "tessera/optim/core_binding.h"

namespace tessera {
namespace {

// Ranks of one machine share its cores, whatever torch would use in each.
int num_update_threads(const RuntimeOptions& options, const optim::CoreShare& share) {
  if (options.num_update_threads > 0) {
    return options.num_update_threads;
  }
  const int num_cores = device::read_host_cores().usable() / share.num_ranks;
  return std::max(
      1, share.num_ranks == 1 ? at::get_num_threads() : std::min(at::get_num_threads(), num_cores));
}

// Of the update on the host beside a device with memory of its own. Ranks of one machine share its
// cores; two of each rank's feed its device: the step's thread and autograd's.
int num_host_threads(const RuntimeOptions& options, const optim::CoreShare& share) {
  const int num_cores = device::read_host_cores().usable() / share.num_ranks;
  return options.num_update_threads > 0 ? options.num_update_threads : std::max(1, num_cores - 2);
}

planner::UpdateRates least_rates(std::span<const planner::UpdateRates> ranks) {
  planner::UpdateRates least = ranks.front();
  for (const planner::UpdateRates& each : ranks) {
    for (const auto rate :
         {&planner::UpdateRates::cpu_bytes_per_s, &planner::UpdateRates::h2d_bytes_per_s,
          &planner::UpdateRates::d2h_bytes_per_s, &planner::UpdateRates::h2d_alone_bytes_per_s,
          &planner::UpdateRates::host_bytes_per_s}) {
      least.*rate = std::min(least.*rate, each.*rate);
    }
  }
  return least;
}

comm::BackendKind backend_kind(const Config& config) {
  const std::string& name = config.get_string("comm.backend");
  if (name == "shm") {
    return comm::BackendKind::kShm;
  }
  if (name == "ipc") {
    return comm::BackendKind::kIpc;
  }
  if (name == "gloo") {
    return comm::BackendKind::kGloo;
  }
  if (name == "nccl") {
    return comm::BackendKind::kNccl;
  }
  TESSERA_CHECK(name == "auto", ConfigError, "comm.backend=", name,
                " is for groups that a program makes itself; use auto, shm, ipc, gloo or nccl");
  return comm::BackendKind::kAuto;
}

}  // namespace

std::string file_of_rank(const std::string& path, int rank) {
  if (rank == 0) {
    return path;
  }
  const std::filesystem::path whole(path);
  const std::string name =
      whole.stem().string() + ".rank" + std::to_string(rank) + whole.extension().string();
  return (whole.parent_path() / name).string();
}

struct Runtime::Impl {
  Impl(Config given, const RuntimeOptions& options, int rank, int num_ranks)
      : config(std::move(given)),
        spans(clock, config.get_string("trace.path").empty()
                         ? 0
                         : static_cast<std::size_t>(config.get_int("trace.ring_spans"))),
        logger(LogOptions::from(config), LogContext{rank, num_ranks}),
        wrap_io(options.wrap_io),
        options(options),
        on_cuda(options.cuda_device >= 0) {
    device::install_nvtx(spans);
    if (on_cuda) {
      device::CudaDeviceOptions cuda;
      cuda.index = options.cuda_device;
      cuda.ledger = &ledger;
      cuda.spans = &spans;
      device = device::make_cuda_device(cuda);
      kernels = optim::make_cuda_kernels(*device);
    } else {
      device::CpuDeviceOptions cpu;
      cpu.ledger = &ledger;
      cpu.spans = &spans;
      cpu.notice = [this](const std::string& notice) { logger.warn(notice); };
      device = options.make_device ? options.make_device(std::move(cpu))
                                   : device::make_cpu_device(std::move(cpu));
    }
    if (spans.enabled()) {
      spans.name_this_thread("main");
    }
    if (device->is_discrete()) {
      device::CpuDeviceOptions cpu;
      cpu.ledger = &ledger;
      cpu_device = device::make_cpu_device(std::move(cpu));
      host_device = std::make_unique<engine::HostTierDevice>(*cpu_device);
    }
    if (rank == 0) {
      for (const std::string& notice : config.notices()) {
        logger.info(notice);
      }
      warn_of_unread_options();
    }
  }

  // Somebody asked for something that will not happen; a run must not look as if it did.
  void warn_of_unread_options() const {
    if (const std::string warning = unread_warning(config); !warning.empty()) {
      logger.warn(warning);
    }
  }

  // In the order of dependence: whatever is destroyed later is used by what is destroyed earlier.
  Config config;
  SteadyClock clock;
  Ledger ledger;
  Spans spans;
  bool trace_is_written = false;
  Logger logger;
  std::function<std::unique_ptr<tier::IoEngine>(std::unique_ptr<tier::IoEngine>)> wrap_io;
  const RuntimeOptions options;
  bool on_cuda;
  std::unique_ptr<device::Device> device;
  std::unique_ptr<optim::Kernels> kernels;
  // Beside a device with memory of its own.
  std::unique_ptr<device::Device> cpu_device;
  std::unique_ptr<device::Device> host_device;
  std::unique_ptr<optim::Kernels> host_kernels;
  optim::CoreShare local;  // this rank among those of its host
  std::vector<std::uint64_t> hosts;
  std::optional<planner::UpdateRates> update_rates;  // of this rank
  comm::World world;                                 // joined; empty where the group is borrowed
  comm::Group* borrowed = nullptr;
  std::unique_ptr<comm::Group> reductions;  // null in a group of one
  std::atomic<int> num_backwards{0};
};

Runtime::Runtime(Config config, const RuntimeOptions& options) {
  config.check();
  const comm::Rendezvous rendezvous = comm::find_rendezvous(comm::process_environment());
  impl_ =
      std::make_unique<Impl>(std::move(config), options, rendezvous.rank, rendezvous.world_size);
  comm::WorldOptions world;
  world.backend = backend_kind(impl_->config);
  world.cuda_device = options.cuda_device;
  world.ranks_per_host = static_cast<int>(impl_->config.get_int("comm.ranks_per_host"));
  world.group.timeout = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::duration<double>(impl_->config.get_seconds("comm.timeout_s")));
  world.group.pack_below_bytes =
      static_cast<std::size_t>(impl_->config.get_bytes("comm.pack_below_bytes"));
  world.group.ledger = &impl_->ledger;
  world.group.device = impl_->device.get();
  world.group.spans = &impl_->spans;
  if (rendezvous.rank == 0) {
    const std::string warning = comm::trust_warning(rendezvous);
    if (!warning.empty()) {
      impl_->logger.warn(warning);
    }
  }
  impl_->world = comm::join_world(rendezvous, world);
  set_up_ranks();
}

Runtime::Runtime(Config config, comm::Group& world, const RuntimeOptions& options) {
  config.check();
  impl_ = std::make_unique<Impl>(std::move(config), options, world.rank(), world.size());
  impl_->borrowed = &world;
  if (world.is_stream_ordered() && world.owner().device != nullptr) {
    // It is another runtime's, and works on the streams of that one's device.
    impl_->world.group =
        world.split(0, "runtime", {impl_->device.get(), &impl_->ledger, &impl_->spans});
    impl_->borrowed = impl_->world.group.get();
  }
  set_up_ranks();
}

void Runtime::set_up_ranks() {
  if (num_ranks() > 1) {
    impl_->reductions = group().split(0, group().name() + ".reduce");
  }
  find_local_ranks();
  if (!impl_->on_cuda) {
    impl_->kernels = optim::make_cpu_kernels(num_update_threads(impl_->options, impl_->local));
  }
  if (impl_->device->is_discrete()) {
    const int num_threads = num_host_threads(impl_->options, impl_->local);
    impl_->host_kernels =
        optim::make_cpu_kernels(num_threads, optim::cores_for_threads(num_threads, impl_->local));
  }
}

void Runtime::find_local_ranks() {
  // The group may be a part of the launcher's world.
  const comm::Rendezvous rendezvous = comm::find_rendezvous(comm::process_environment());
  const bool is_launched = rendezvous.world_size > 1 && rendezvous.world_size >= num_ranks();
  const int world_size = is_launched ? rendezvous.world_size : num_ranks();
  const auto per_host = static_cast<int>(impl_->config.get_int("comm.ranks_per_host"));
  TESSERA_CHECK(per_host == 0 || world_size % per_host == 0, ConfigError,
                "comm.ranks_per_host = ", per_host, " (--ranks-per-host) does not divide the ",
                world_size, " ranks; every host needs as many as the others");
  const std::string id = device::read_host_id();
  struct Hosts {
    std::uint64_t found;
    std::uint64_t of_mesh;
  };
  Hosts own{};
  own.found = comm::hash_bytes(id.data(), id.size(), 0);
  own.of_mesh =
      per_host == 0
          ? own.found
          : static_cast<std::uint64_t>((is_launched ? rendezvous.rank : rank()) / per_host);
  const std::vector<Hosts> all = engine::gather_host(group(), own, "which ranks share a host");
  impl_->local = {};
  impl_->local.num_ranks = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const bool is_local = all[i].found == own.found;
    impl_->local.rank += is_local && i < static_cast<std::size_t>(rank()) ? 1 : 0;
    impl_->local.num_ranks += is_local ? 1 : 0;
    impl_->hosts.push_back(all[i].of_mesh);
  }
  if (rendezvous.local_world_size > impl_->local.num_ranks) {
    impl_->local = {rendezvous.local_rank, rendezvous.local_world_size};
  }
}

Runtime::~Runtime() { write_trace(); }

void Runtime::write_trace() noexcept {
  if (!impl_->spans.enabled() || std::exchange(impl_->trace_is_written, true)) {
    return;
  }
  try {
    impl_->device->collect_spans();
    impl_->spans.write_chrome_trace(file_of_rank(impl_->config.get_string("trace.path"), rank()),
                                    rank());
  } catch (const std::exception& error) {
    impl_->logger.warn("the trace is lost: ", error.what());
  }
}

int Runtime::rank() const { return group().rank(); }
int Runtime::num_ranks() const { return group().size(); }
const Config& Runtime::config() const { return impl_->config; }
comm::Group& Runtime::group() const {
  return impl_->borrowed != nullptr ? *impl_->borrowed : *impl_->world.group;
}
comm::Group& Runtime::reduce_group() const {
  return impl_->reductions ? *impl_->reductions : group();
}
device::Device& Runtime::device() const { return *impl_->device; }
int Runtime::cuda_device() const { return impl_->options.cuda_device; }
optim::Kernels& Runtime::kernels() const { return *impl_->kernels; }
device::Device& Runtime::host_device() const {
  return impl_->host_device ? *impl_->host_device : *impl_->device;
}
optim::Kernels& Runtime::host_kernels() const {
  return impl_->host_kernels ? *impl_->host_kernels : *impl_->kernels;
}
int Runtime::local_rank() const { return impl_->local.rank; }
int Runtime::num_local_ranks() const { return impl_->local.num_ranks; }
const std::vector<std::uint64_t>& Runtime::hosts() const { return impl_->hosts; }
planner::UpdateRates Runtime::update_rates(comm::Group& group, std::int64_t free_host_bytes) {
  const std::vector<std::uint8_t> known = engine::gather_host<std::uint8_t>(
      group, impl_->update_rates ? 1 : 0, "whether update rates are measured");
  if (std::count(known.begin(), known.end(), 0) > 0) {
    // From here on all ranks are at it: the exchange above is the barrier.
    impl_->update_rates = measure_update_rates(impl_->options.cuda_device,
                                               num_host_threads(impl_->options, impl_->local),
                                               impl_->local, update_rate_sizes(free_host_bytes));
  }
  return least_rates(engine::gather_host(group, *impl_->update_rates, "update rates"));
}
Ledger& Runtime::ledger() const { return impl_->ledger; }
Spans& Runtime::spans() const { return impl_->spans; }
const Clock& Runtime::clock() const { return impl_->clock; }
const Logger& Runtime::logger() const { return impl_->logger; }
std::unique_ptr<tier::IoEngine> Runtime::make_io_engine(tier::IoOptions options) const {
  options.spans = &impl_->spans;
  std::unique_ptr<tier::IoEngine> io =
      tier::make_io_engine(options, [this](const std::string& reason) {
        impl_->logger.once("io engine", LogLevel::kInfo, reason);
      });
  return impl_->wrap_io ? impl_->wrap_io(std::move(io)) : std::move(io);
}
std::atomic<int>& Runtime::num_backwards() const { return impl_->num_backwards; }
const std::shared_ptr<comm::StatusStore>& Runtime::status() const { return impl_->world.status; }

}  // namespace tessera
