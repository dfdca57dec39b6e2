#include "tessera/engine/engine_tiers.h"

#include <algorithm>
#include <exception>
#include <random>
#include <sstream>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/option_table.h"
#include "tessera/engine/host_tier_device.h"
#include "tessera/engine/memory_lender.h"
#include "tessera/tier/io_measure.h"

namespace tessera::engine {
namespace {

// For a model that is still being built: tiles of initial values.
constexpr std::int64_t kBuildBufferBytes = std::int64_t{2} << 20;

tier::DirectIo direct_io(const Config& config) {
  const std::string& mode = config.get_string("nvme.direct_io");
  return mode == "on"    ? tier::DirectIo::kOn
         : mode == "off" ? tier::DirectIo::kOff
                         : tier::DirectIo::kAuto;
}

tier::IoKind io_kind(const Config& config) {
  const std::string& kind = config.get_string("nvme.engine");
  return kind == "uring"     ? tier::IoKind::kUring
         : kind == "threads" ? tier::IoKind::kThreads
                             : tier::IoKind::kAuto;
}

// What is not given was measured once per directory; the first one speaks for all.
tier::IoOptions io_options(const Config& config) {
  const auto block_bytes = static_cast<std::size_t>(config.get_bytes("nvme.block_bytes"));
  const auto queue_depth = static_cast<int>(config.get_int("nvme.queue_depth"));
  const auto num_threads = static_cast<int>(config.get_int("nvme.threads"));
  tier::IoOptions options;
  options.kind = io_kind(config);
  if (block_bytes == 0 || queue_depth == 0 || num_threads == 0) {
    tier::MeasureOptions measure;
    measure.kind = options.kind;
    measure.direct = direct_io(config);
    options = tier::measure_directory(config.get_list("nvme.paths").front(), measure).best;
    options.kind = io_kind(config);
  }
  options.block_bytes = block_bytes > 0 ? block_bytes : options.block_bytes;
  options.queue_depth = queue_depth > 0 ? queue_depth : options.queue_depth;
  options.num_threads = num_threads > 0 ? num_threads : options.num_threads;
  return options;
}

void check_same(const planner::ModelShapes& planned, const planner::ModelShapes& built) {
  for (std::size_t i = 0; i < std::max(planned.params.size(), built.params.size()); ++i) {
    TESSERA_CHECK(i < planned.params.size() && i < built.params.size(), ConfigError,
                  "the model has ", built.params.size(), " parameters, memory was planned for ",
                  planned.params.size(), "; give the shapes of the model that is built, or none");
    TESSERA_CHECK(planned.params[i].numel == built.params[i].numel &&
                      planned.params[i].trainable == built.params[i].trainable,
                  ConfigError, "parameter '", built.params[i].name, "' has ", built.params[i].numel,
                  " elements", built.params[i].trainable ? "" : ", frozen",
                  "; memory was planned for '", planned.params[i].name, "' with ",
                  planned.params[i].numel, planned.params[i].trainable ? "" : ", frozen",
                  "; give the shapes of the model that is built, or none");
  }
}

}  // namespace

bool asks_for_plan(const Config& config) {
  const auto is_limited = [&](const char* name) {
    return config.get_bytes(name) != kUnlimitedBytes;
  };
  return is_limited("memory.device") || is_limited("memory.host") || is_limited("memory.nvme") ||
         config.get_string("place.parameters") != "auto" ||
         config.get_string("place.optimizer") != "auto" || !config.get_list("nvme.paths").empty();
}

EngineTiers::EngineTiers(Runtime& runtime, comm::Group& group, shard::ParamTable& params,
                         const std::optional<planner::ModelShapes>& shapes)
    : runtime_(runtime),
      group_(group),
      params_(params),
      is_planned_(asks_for_plan(runtime.config())),
      shapes_(shapes) {
  if (!is_planned_) {
    return;
  }
  options_ = planner::PlacementOptions::from(runtime.config(), group.size(),
                                             runtime.device().is_discrete());
  options_.call_memory = group.call_memory();
  for (const std::string& directory : runtime.config().get_list("nvme.paths")) {
    tier::check_scratch_directory(directory);
  }
  if (shapes_) {
    plan(*shapes_);
  }
  if (options_.has_nvme && (!placement_ || placement_->uses_nvme)) {
    make_io();
  }
}

EngineTiers::~EngineTiers() = default;

void EngineTiers::plan(const planner::ModelShapes& model) {
  if (runtime_.on_cuda() && planner::splits_update(options_)) {
    options_.cpu_share = planner::choose_cpu_share(runtime_.update_rates(), model, options_);
    runtime_.logger().info("the processor gets ", options_.cpu_share,
                           " of the update of states in host memory, by measured rates; "
                           "optim.cpu_share sets it");
  }
  placement_ =
      planner::make_placement(model, options_, runtime_.config().get_int("batch.accumulate"));
}

// Rank 0 chooses: a run has one name on all ranks. What it measures first, others find.
std::string EngineTiers::agree_on_run() {
  std::uint64_t number = 0;
  if (group_.rank() == 0) {
    std::random_device device;
    number = (static_cast<std::uint64_t>(device()) << 32) | device();
  }
  comm::CallOptions call;
  call.label.unit = "name of the run's scratch files";
  group_.broadcast_host(&number, sizeof(number), 0, call);
  std::ostringstream name;
  name << std::hex << number;
  return name.str();
}

void EngineTiers::make_io() {
  const Config& config = runtime_.config();
  tier::IoOptions options;
  if (group_.rank() == 0) {
    options = io_options(config);
  }
  run_ = agree_on_run();
  if (group_.rank() != 0) {
    options = io_options(config);
  }
  io_ = runtime_.make_io_engine(options);
  for (const std::string& directory : config.get_list("nvme.paths")) {
    for (const std::string& name : tier::remove_stale(directory)) {
      runtime_.logger().info("removed '", name, "', which a run that is no more has left");
    }
  }
  // Another rank may wait for the room that was freed.
  comm::CallOptions call;
  call.label.unit = "scratch files of earlier runs are removed";
  group_.start_barrier(call).wait();
  parameter_store_ = make_store(
      "parameters", Role::kShard,
      placement_ ? static_cast<std::uint64_t>(placement_->bytes(Tier::kNvme, Role::kShard)) : 0);
  shards_ = std::make_unique<shard::ShardStore>(*parameter_store_);
  make_feed(placement_ ? placement_->parameter_pool_bytes
                       : std::min(kBuildBufferBytes, options_.memory_bytes() / 8));
}

void EngineTiers::make_feed(std::int64_t buffer_bytes) {
  feed_.reset();  // before another takes memory
  feed_ = std::make_unique<coordinator::ShardFeed>(
      params_, *shards_, runtime_.device(), io_memory(),
      std::max(static_cast<std::size_t>(buffer_bytes), coordinator::kSmallestFeedBytes));
}

std::unique_ptr<tier::FileStore> EngineTiers::make_store(const std::string& name, Role role,
                                                         std::uint64_t bytes) {
  const Config& config = runtime_.config();
  tier::FileStoreOptions options;
  options.directories = config.get_list("nvme.paths");
  options.name = {run_, runtime_.rank(), name};
  options.role = role;
  options.verify = config.get_bool("nvme.verify");
  options.direct_io = direct_io(config);
  options.reserved_bytes = bytes;
  options.engine = io_.get();
  options.ledger = &runtime_.ledger();
  return std::make_unique<tier::FileStore>(std::move(options));
}

Tier EngineTiers::planned_tier(int id) const {
  switch (placement_->params[static_cast<std::size_t>(id)].parameter) {
    case planner::Place::kNvme:
      return Tier::kNvme;
    case planner::Place::kHost:
      // Where there is one memory, it is the device's; the ledger knows it as the host's.
      return options_.on_cuda ? Tier::kHost : Tier::kDevice;
    case planner::Place::kDevice:
      break;
  }
  return Tier::kDevice;
}

Tier EngineTiers::tier_of_next(const shard::Layout& layout) const {
  if (!is_planned_) {
    return Tier::kDevice;
  }
  if (placement_) {
    const int id = params_.num_params();
    return id < static_cast<int>(placement_->params.size()) ? planned_tier(id) : Tier::kDevice;
  }
  const bool is_over =
      shard_bytes_ + static_cast<std::int64_t>(layout.shard_bytes()) > options_.memory_bytes() / 2;
  if (io_ && (options_.parameters == planner::Wish::kNvme || (is_over && !options_.on_cuda))) {
    return Tier::kNvme;
  }
  const bool goes_to_host =
      options_.on_cuda && (options_.parameters == planner::Wish::kHost || is_over);
  return goes_to_host ? Tier::kHost : Tier::kDevice;
}

void EngineTiers::add(const shard::Param& param) {
  if (param.is_on_nvme()) {
    shards_->add(param);
  } else {
    shard_bytes_ += static_cast<std::int64_t>(param.layout().shard_bytes());
  }
}

void EngineTiers::write(const shard::Param& param, std::int64_t begin, std::int64_t numel,
                        const void* elements) {
  feed_->write(param, begin, numel, elements);
}

void EngineTiers::settle(const planner::ModelShapes& model) {
  if (!is_planned_) {
    return;
  }
  const bool was_planned = placement_.has_value();
  if (was_planned) {
    check_same(*shapes_, model);
  } else {
    plan(model);
  }
  move_shards();
  set_placements();
  if (!placement_->uses_nvme) {
    feed_.reset();
    shards_.reset();
    parameter_store_.reset();
    return;
  }
  if (!was_planned) {
    make_feed(placement_->parameter_pool_bytes);
  }
  make_gradient_tier();
}

void EngineTiers::move_shards() {
  for (int id = 0; id < params_.num_params(); ++id) {
    move_shard(params_[id], planned_tier(id));
  }
}

void EngineTiers::move_shard(shard::Param& param, Tier tier) {
  if (param.tier() == tier) {
    return;
  }
  if (tier == Tier::kNvme) {
    if (options_.on_cuda) {
      param.move_to(Tier::kHost);  // where the feed reads it
    }
    shards_->add(param);
    feed_->write(param, 0, param.range().numel, param.shard());
    param.set_tier(tier);
  } else if (param.is_on_nvme()) {
    param.set_tier(options_.on_cuda ? Tier::kHost : tier);
    feed_->read(param, param.shard());
    shards_->forget(param.id());
    move_shard(param, tier);
  } else {
    param.move_to(tier);
  }
}

void EngineTiers::set_placements() {
  const auto tier_of = [this](planner::Place place) {
    return place == planner::Place::kNvme                       ? Tier::kNvme
           : place == planner::Place::kHost && options_.on_cuda ? Tier::kHost
                                                                : Tier::kDevice;
  };
  for (int id = 0; id < params_.num_params(); ++id) {
    const planner::ShardPlaces& places = placement_->params[static_cast<std::size_t>(id)];
    Placement placement{tier_of(places.parameter), Tier::kDevice, tier_of(places.states),
                        places.device_update ? Updater::kDevice : Updater::kCpu};
    if (places.gradient == planner::Place::kNvme) {
      placement.gradient = Tier::kNvme;
    } else if (options_.on_cuda && placement_->gradients_leave_early && !places.device_update) {
      placement.gradient = Tier::kHost;
    }
    params_[id].set_placement(placement);
  }
}

void EngineTiers::make_gradient_tier() {
  std::uint64_t bytes = 0;
  for (int id = 0; id < params_.num_params(); ++id) {
    if (params_[id].placement().gradient == Tier::kNvme) {
      bytes += tier::whole_blocks(static_cast<std::size_t>(params_[id].layout().shard_numel()) *
                                  sizeof(float));
    }
  }
  if (bytes == 0) {
    return;
  }
  gradient_store_ = make_store("gradients", Role::kGradient, bytes);
  gradient_pool_ = std::make_unique<tier::BufferPool>(
      runtime_.device(), Tier::kHost, static_cast<std::size_t>(placement_->gradient_pool_bytes),
      "gradient buffers");
}

coordinator::TierOptions EngineTiers::coordinator_options() const {
  coordinator::TierOptions options;
  options.feed = feed_.get();
  options.live_limit_bytes = placement_->live_limit_bytes;
  options.arena_bytes = static_cast<std::size_t>(placement_->arena_bytes);
  if (options_.on_cuda && group_.size() == 1) {
    options.max_inflight = coordinator::kHostCopiesInFlight;
    options.reuse_distance_bytes = planner::kUnlimited;
  }
  return options;
}

// A device with memory of its own reads and writes pinned memory only without holding up the host.
Tier EngineTiers::io_memory() const { return options_.on_cuda ? Tier::kPinned : Tier::kHost; }

void EngineTiers::reserve_staging(comm::Group& reductions) {
  if (placement_ && !reserves_staging_ && placement_->comm_bytes > 0) {
    group_.reserve_staging(static_cast<std::size_t>(placement_->gather_staging_bytes));
    reductions.reserve_staging(static_cast<std::size_t>(placement_->reduction_staging_bytes));
    reserves_staging_ = true;
  }
}

void EngineTiers::release_staging(comm::Group& reductions) noexcept {
  // While an exception is on its way, calls may never come to their end: groups see to that.
  if (!reserves_staging_ || std::uncaught_exceptions() > 0) {
    return;
  }
  reserves_staging_ = false;
  try {
    group_.reserve_staging(0);
    reductions.reserve_staging(0);
  } catch (const std::exception& error) {
    runtime_.logger().warn("scratch of collectives stays reserved: ", error.what());
  }
}

std::unique_ptr<optim::Optimizer> EngineTiers::make_optimizer(const optim::RuleOptions& rule) {
  device::Device* device = &runtime_.device();
  if (is_planned_ && !device->is_discrete() && options_.optimizer == planner::Wish::kHost) {
    host_device_ = std::make_unique<HostTierDevice>(*device);
    device = host_device_.get();
  }
  optim::OptimizerOptions options{*device, runtime_.kernels(), runtime_.clock(), runtime_.spans()};
  if (device->is_discrete()) {
    options.host = &runtime_.host_device();
    options.host_kernels = &runtime_.host_kernels();
  }
  if (is_planned_) {
    bool on_nvme = false;
    for (int id = 0; id < params_.num_params(); ++id) {
      on_nvme = on_nvme || params_[id].placement().states == Tier::kNvme;
    }
    if (on_nvme) {
      state_store_ =
          make_store("states", Role::kOptimizer,
                     static_cast<std::uint64_t>(placement_->bytes(Tier::kNvme, Role::kOptimizer)));
      options.states = state_store_.get();
    }
    options.parameters = shards_.get();
    if (placement_->optimizer_pool_bytes > 0) {
      optimizer_pool_ = std::make_unique<tier::BufferPool>(
          runtime_.device(), io_memory(),
          static_cast<std::size_t>(placement_->optimizer_pool_bytes), "optimizer buffers");
      options.buffers = optimizer_pool_.get();
    }
    options.sub_group_numel = placement_->sub_group_numel;
    options.num_slots = placement_->num_update_slots;
    options.slot_bytes = static_cast<std::size_t>(placement_->update_slot_bytes);
    options.reads_ahead = runtime_.config().get_bool("nvme.pipeline_read");
    options.writes_behind = runtime_.config().get_bool("nvme.pipeline_write");
    options.on_updated = [this](int id, std::int64_t begin, std::int64_t numel,
                                const void* values) {
      return feed_ && feed_->offer(id, begin, numel, values);
    };
  }
  auto optimizer = std::make_unique<optim::Optimizer>(params_, rule, std::move(options));
  optimizer_ = optimizer.get();
  lender_.reset();
  if (is_planned_ && placement_->num_update_slots > 0) {
    lender_ = std::make_unique<MemoryLender>(runtime_, optimizer_->device_executor());
  }
  return optimizer;
}

void EngineTiers::begin_backward(bool is_last) {
  if (lender_) {
    lender_->begin_backward(is_last);
  }
}

void EngineTiers::end_backward_of(coordinator::UnitId unit) {
  if (lender_) {
    lender_->end_backward_of(unit);
  }
}

void EngineTiers::begin_forward_of(coordinator::UnitId unit) {
  if (lender_) {
    lender_->begin_forward_of(unit);
  }
}

const tier::Store* EngineTiers::store(Role role) const {
  switch (role) {
    case Role::kShard:
      return parameter_store_.get();
    case Role::kGradient:
      return gradient_store_.get();
    case Role::kOptimizer:
      return state_store_.get();
    default:
      return nullptr;
  }
}

TierIo EngineTiers::take_io() {
  const auto since = [](const tier::FileStore* store, RoleIo& taken) {
    if (store == nullptr) {
      return RoleIo();
    }
    const tier::StoreStats stats = store->stats();
    const RoleIo now{stats.read_bytes, stats.written_bytes};
    const RoleIo before = std::exchange(taken, now);
    return RoleIo{now.read_bytes - before.read_bytes, now.written_bytes - before.written_bytes};
  };
  TierIo io;
  io.parameters = since(parameter_store_.get(), taken_.parameters);
  io.gradients = since(gradient_store_.get(), taken_.gradients);
  io.states = since(state_store_.get(), taken_.states);
  if (feed_) {
    io.feed = feed_->take_stats();
  }
  if (lender_) {
    io.lent_wait_s = lender_->take_wait_s();
  }
  if (optimizer_ != nullptr) {
    const optim::OptimizerStats stats = optimizer_->take_stats();
    io.update_read_wait_s = stats.read_wait_s;
    io.update_lease_wait_s = stats.lease_wait_s;
    io.update_s = stats.update_s;
    io.link_up_bytes = stats.states_h2d_bytes + stats.parameters_h2d_bytes;
    io.link_down_bytes =
        stats.states_d2h_bytes + stats.parameters_d2h_bytes + stats.gradients_d2h_bytes;
  }
  return io;
}

}  // namespace tessera::engine
