#include "tessera/engine/engine_tiers.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/option_table.h"
#include "tessera/core/units.h"
#include "tessera/engine/host_tier_device.h"
#include "tessera/engine/memory_lender.h"
#include "tessera/planner/memory_planner.h"
#include "tessera/planner/update_split.h"

namespace tessera::engine {
namespace {

// For a model that is still being built: tiles of initial values.
constexpr std::int64_t kBuildBufferBytes = std::int64_t{2} << 20;

void check_same(const planner::ModelShapes& planned, const planner::ModelShapes& built,
                const planner::MemoryPlanOptions& options) {
  const auto is_stored_as = [&options](const planner::ParamShape& param,
                                       shard::StoredFormat format) {
    return format == param.format.value_or(options.stored.format_of(param.name, param.trainable,
                                                                    param.numel, param.num_dims));
  };
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
    TESSERA_CHECK(is_stored_as(planned.params[i], *built.params[i].format), ConfigError,
                  "parameter '", built.params[i].name, "' is stored as ",
                  shard::describe(*built.params[i].format),
                  ", and memory was planned for it otherwise; give the dims of the model that is "
                  "built, and the same names");
  }
}

}  // namespace

EngineTiers::EngineTiers(Runtime& runtime, MeshGroups& mesh, shard::ParamTable& params,
                         const EngineMemory& memory)
    : runtime_(runtime),
      mesh_(mesh),
      group_(mesh.all()),
      params_(params),
      is_planned_(asks_for_plan(runtime.config())),
      options_(planner::MemoryPlanOptions::from(runtime.config(), mesh.mesh(),
                                                runtime.device().is_discrete())),
      memory_(memory) {
  for (const std::string& directory : runtime.config().get_list("nvme.paths")) {
    tier::check_scratch_directory(directory);
  }
  if (memory_.shapes) {
    make_plan(*memory_.shapes);
  }
  if (options_.has_nvme && (!plan_ || plan_->uses_nvme)) {
    nvme_ = std::make_unique<NvmeStores>(runtime, group_);
    shards_ = std::make_unique<shard::ShardStore>(
        nvme_->make_store(Role::kShard, plan_ ? plan_->bytes(Tier::kNvme, Role::kShard) : 0));
    make_loader(plan_ ? plan_->parameter_pool_bytes
                      : std::min(kBuildBufferBytes, options_.memory_bytes() / 8));
  }
}

EngineTiers::~EngineTiers() = default;

HeldMemory EngineTiers::held_memory() const {
  HeldMemory held;
  for (int id = 0; id < params_.num_params(); ++id) {
    const shard::Param& param = params_[id];
    const auto bytes = static_cast<std::int64_t>(param.layout().shard_bytes());
    const bool on_device = options_.is_discrete && param.tier() == Tier::kDevice;
    (on_device ? held.device_bytes : held.host_bytes) += param.is_on_nvme() ? 0 : bytes;
    held.host_bytes += param.first_master() == nullptr
                           ? 0
                           : param.layout().shard_numel() * std::int64_t{sizeof(float)};
  }
  return held;
}

void EngineTiers::make_plan(const planner::ModelShapes& model) {
  planning_ = memory_.planning ? *memory_.planning
                               : plan_memory(runtime_, group_, model, memory_.step, held_memory());
  TESSERA_CHECK(
      planning_.mesh == mesh_.mesh() && planning_.mesh.two_hops() == mesh_.mesh().two_hops(),
      ConfigError, "memory was planned for another mesh (", planning_.mesh.describe(),
      ") than the engine's (", mesh_.mesh().describe(),
      "); plan with the config and the group of the engine");
  tell_copies_of_host();
  if (!memory_.planning && group_.rank() == 0) {
    if (!planning_.note.empty()) {
      runtime_.logger().info(planning_.note);
    }
    if (planning_.rates) {
      runtime_.logger().info("the CPU gets ", planning_.options.cpu_share,
                             " of the update of states in host memory, by measured rates; "
                             "optim.cpu_share sets it");
    }
  }
  plan_ = planning_.plan;
  options_ = planning_.options;
  is_planned_ = plan_.has_value();
}

// What ranks of one host hold in its memory is there once for each copy.
void EngineTiers::tell_copies_of_host() const {
  const comm::Mesh& mesh = mesh_.mesh();
  if (mesh.has_uneven_hosts()) {
    return;
  }
  const int num_copies = std::max(1, mesh.ranks_per_host() / mesh.shard_size());
  const std::int64_t bytes = planning_.plan ? planning_.plan->host_memory_bytes() : 0;
  if (group_.rank() == 0 && num_copies > 1 && bytes > 0) {
    runtime_.logger().info("host memory: ", num_copies, " copies of the model on each host, ",
                           approximate_bytes(bytes * mesh.shard_size()), " for each, ",
                           approximate_bytes(bytes * mesh.ranks_per_host()), " in all");
  }
}

void EngineTiers::make_loader(std::int64_t buffer_bytes) {
  loader_.reset();  // before another takes memory
  loader_ = std::make_unique<coordinator::ShardLoader>(
      params_, *shards_, runtime_.device(), io_tier(),
      std::max(static_cast<std::size_t>(buffer_bytes), coordinator::kSmallestLoaderBytes));
}

Placement EngineTiers::placement_of_next(const shard::Layout& layout) const {
  Placement placement;
  placement.updater = runtime_.device().is_discrete() ? Updater::kDevice : Updater::kCpu;
  if (plan_) {
    const auto id = static_cast<std::size_t>(params_.num_params());
    return id < plan_->params.size() ? plan_->params[id] : placement;
  }
  if (memory_.shapes || (!is_planned_ && !options_.is_discrete)) {
    return placement;
  }
  const bool is_over =
      shard_bytes_ + static_cast<std::int64_t>(layout.shard_bytes()) > building_bytes();
  if (nvme_ && (options_.parameters == Tier::kNvme || (is_over && !options_.is_discrete))) {
    placement.parameter = Tier::kNvme;
  } else if (options_.is_discrete && (options_.parameters == Tier::kHost || is_over)) {
    placement.parameter = Tier::kHost;
  }
  return placement;
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
  loader_->write(param, begin, numel, elements);
}

void EngineTiers::finalize(const planner::ModelShapes& model) {
  const bool was_planned = memory_.shapes.has_value();
  if (was_planned) {
    check_same(*memory_.shapes, model, options_);
  } else {
    make_plan(model);
  }
  if (!is_planned_) {
    for (int id = 0; id < params_.num_params(); ++id) {
      move_shard(params_[id], Tier::kDevice);
    }
    return;
  }
  place_shards();
  if (!plan_->uses_nvme) {
    loader_.reset();
    shards_.reset();
    nvme_.reset();
    return;
  }
  if (!was_planned) {
    make_loader(plan_->parameter_pool_bytes);
  }
  make_gradient_tier();
}

void EngineTiers::place_shards() {
  for (int id = 0; id < params_.num_params(); ++id) {
    const Placement& placement = plan_->params[static_cast<std::size_t>(id)];
    move_shard(params_[id], placement.parameter);
    params_[id].set_placement(placement);
  }
}

bool EngineTiers::refine(const planner::ModelShapes& model) {
  const planner::MemoryPlan before = *plan_;
  planning_ = refined(planning_, runtime_, group_, model);
  plan_ = planning_.plan;
  options_ = planning_.options;
  if (group_.rank() == 0) {
    runtime_.logger().info(planning_.note);
  }
  TESSERA_INVARIANT(!plan_->uses_nvme, "placement is fixed with shards on NVMe");
  return plan_->params != before.params || plan_->arena_bytes != before.arena_bytes ||
         plan_->num_update_slots != before.num_update_slots ||
         plan_->bucket_bytes != before.bucket_bytes;
}

void EngineTiers::release_optimizer() {
  lender_.reset();
  optimizer_ = nullptr;
}

void EngineTiers::fix_placement() {
  // Those that leave the device make room for those that come.
  for (const bool leaves : {true, false}) {
    for (int id = 0; id < params_.num_params(); ++id) {
      const Tier tier = plan_->params[static_cast<std::size_t>(id)].parameter;
      if ((tier != Tier::kDevice) == leaves) {
        move_shard(params_[id], tier);
      }
    }
  }
  place_shards();
  reserves_staging_ = false;  // it may be another size now
}

std::int64_t EngineTiers::building_bytes() const {
  if (options_.memory_bytes() != planner::kUnlimited || !options_.is_discrete) {
    return options_.memory_bytes() / 2;
  }
  // Beside everything else that may have to be there, or else have room elsewhere.
  return static_cast<std::int64_t>(runtime_.device().memory_info().total_bytes / 8);
}

void EngineTiers::move_shard(shard::Param& param, Tier tier) {
  if (param.tier() == tier) {
    return;
  }
  if (tier == Tier::kNvme) {
    if (options_.is_discrete) {
      param.move_to(Tier::kHost);  // where the loader reads it
    }
    shards_->add(param);
    loader_->write(param, 0, param.layout().stored_numel(), param.shard());
    param.set_tier(tier);
  } else if (param.is_on_nvme()) {
    param.set_tier(options_.is_discrete ? Tier::kHost : tier);
    loader_->read(param, param.shard());
    shards_->forget(param.id());
    move_shard(param, tier);
  } else {
    param.move_to(tier);
  }
}

void EngineTiers::make_gradient_tier() {
  const std::int64_t bytes = plan_->bytes(Tier::kNvme, Role::kGradient);
  if (bytes > 0) {
    gradients_ = {&nvme_->make_store(Role::kGradient, bytes),
                  &nvme_->make_buffers(Role::kGradient, io_tier(), plan_->gradient_pool_bytes)};
  }
}

coordinator::TierOptions EngineTiers::coordinator_options() const {
  coordinator::TierOptions options;
  options.loader = loader_.get();
  options.live_limit_bytes = plan_->live_limit_bytes;
  options.arena_bytes = static_cast<std::size_t>(plan_->arena_bytes);
  options.max_inflight = plan_->max_inflight;
  options.reuse_distance_bytes = plan_->reuse_distance_bytes;
  return options;
}

void EngineTiers::reserve_staging() {
  if (plan_ && !reserves_staging_ && plan_->comm_bytes > 0) {
    reserve(plan_->staging);
    reserves_staging_ = true;
  }
}

void EngineTiers::reserve(const planner::GroupStaging& staging) {
  const auto give = [](comm::Group* group, std::int64_t bytes) {
    if (group != nullptr) {
      group->reserve_staging(static_cast<std::size_t>(bytes));
    }
  };
  const grad::ReductionHops hops = mesh_.hops();
  const grad::ReductionHops agreed = mesh_.agreed_hops();
  if (&mesh_.all() != &mesh_.gathers()) {
    give(&mesh_.all(), staging.all);
  }
  give(&mesh_.gathers(), staging.gathers);
  give(mesh_.phases().across, staging.phase_across);
  give(mesh_.phases().inside, staging.phase_inside);
  give(mesh_.secondary(), staging.secondary);
  give(hops.inside != nullptr ? hops.inside : &mesh_.reductions(), staging.reductions);
  give(hops.across, staging.reductions_across);
  if (hops.inside != nullptr || &mesh_.all_reductions() != &mesh_.reductions()) {
    give(&mesh_.all_reductions(), staging.all_reductions);
  }
  if (agreed.inside != nullptr) {
    give(agreed.inside, staging.agreed);
    give(agreed.across, staging.agreed_across);
  } else if (&mesh_.agreed_reductions() != &mesh_.gathers()) {
    give(&mesh_.agreed_reductions(), staging.agreed);
  }
  give(mesh_.replicas(), staging.replicas);
}

void EngineTiers::release_staging() noexcept {
  // While an exception is thrown, calls may never end: groups see to that.
  if (!reserves_staging_ || std::uncaught_exceptions() > 0) {
    return;
  }
  reserves_staging_ = false;
  try {
    reserve({});
  } catch (const std::exception& error) {
    runtime_.logger().warn("scratch of collectives stays reserved: ", error.what());
  }
}

std::unique_ptr<optim::Optimizer> EngineTiers::make_optimizer(const optim::RuleOptions& rule,
                                                              optim::CarriedStates carried) {
  device::Device* device = &runtime_.device();
  if (is_planned_ && !device->is_discrete() && options_.optimizer == Tier::kHost) {
    host_device_ = std::make_unique<HostTierDevice>(*device);
    device = host_device_.get();
  }
  optim::OptimizerOptions options{*device, runtime_.kernels(), runtime_.clock(), runtime_.spans()};
  if (device->is_discrete()) {
    options.host = &runtime_.host_device();
    options.host_kernels = &runtime_.host_kernels();
  }
  if (is_planned_) {
    if (const std::int64_t bytes = plan_->bytes(Tier::kNvme, Role::kOptimizer); bytes > 0) {
      options.states = &nvme_->make_store(Role::kOptimizer, bytes);
    }
    options.parameters = shards_.get();
    if (plan_->optimizer_pool_bytes > 0) {
      options.buffers =
          &nvme_->make_buffers(Role::kOptimizer, io_tier(), plan_->optimizer_pool_bytes);
    }
    options.sub_group_numel = plan_->sub_group_numel;
    options.num_slots = plan_->num_update_slots;
    options.slot_bytes = static_cast<std::size_t>(plan_->update_slot_bytes);
    options.slot_gradient_bytes = static_cast<std::size_t>(plan_->slot_gradient_bytes);
    options.reads_ahead = runtime_.config().get_bool("nvme.pipeline_read");
    options.writes_behind = runtime_.config().get_bool("nvme.pipeline_write");
  }
  auto optimizer = std::make_unique<optim::Optimizer>(params_, rule, options, std::move(carried));
  optimizer_ = optimizer.get();
  lender_.reset();
  if (is_planned_ && plan_->num_update_slots > 0) {
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

TierIo EngineTiers::take_io() {
  TierIo io;
  if (nvme_) {
    io.parameters = nvme_->take_io(Role::kShard);
    io.gradients = nvme_->take_io(Role::kGradient);
    io.states = nvme_->take_io(Role::kOptimizer);
  }
  if (loader_) {
    io.loader = loader_->take_stats(Tier::kNvme);
  }
  if (lender_) {
    io.lent_wait_s = lender_->take_wait_s();
  }
  if (optimizer_ != nullptr) {
    const optim::OptimizerStats stats = optimizer_->take_stats();
    io.update_read_wait_s = stats.read_wait_s;
    io.update_lease_wait_s = stats.lease_wait_s;
    io.update_s = stats.update_s;
    io.h2d_bytes = stats.states_h2d_bytes + stats.parameters_h2d_bytes + stats.gradients_h2d_bytes;
    io.d2h_bytes = stats.states_d2h_bytes + stats.parameters_d2h_bytes;
  }
  return io;
}

}  // namespace tessera::engine
