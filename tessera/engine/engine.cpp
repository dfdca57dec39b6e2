#include "tessera/engine/engine.h"

#include <utility>

#include "tessera/comm/rendezvous.h"
#include "tessera/core/error.h"
#include "tessera/engine/build_scope.h"
#include "tessera/engine/engine_impl.h"
#include "tessera/engine/host_tier_device.h"

namespace tessera {
namespace {

// The group of the outermost BuildScope, else the runtime's.
comm::Group& choose_group(Runtime& runtime) {
  if (comm::Group* given = BuildScope::current().group) {
    return *given;
  }
  if (runtime.num_ranks() == 1) {
    const int world = comm::find_rendezvous(comm::process_environment()).world_size;
    TESSERA_CHECK(world == 1, ConfigError, "the engine has a group of one rank in a world of ",
                  world,
                  ": every rank would hold the whole model and train it alone. Give the "
                  "runtime the world's group; if one rank is meant, say so with "
                  "BuildScope({.group = &group})");
  }
  return runtime.group();
}

std::unique_ptr<device::Device> choose_shard_device(Runtime& runtime) {
  if (BuildScope::has_overruled()) {
    runtime.logger().warn(
        "an inner build scope names a group or tier; the outermost scope decides both");
  }
  const bool is_asked_for = BuildScope::current().tier == "host";
  const bool is_discrete = runtime.device().is_discrete();
  TESSERA_CHECK(!is_asked_for || !is_discrete, ConfigError,
                "build scope: tier='host' says nothing of where gradients and states of an engine "
                "on ",
                runtime.device().name(), " go; set place.parameters = host in its config");
  if (is_discrete || (!is_asked_for && runtime.config().get_string("place.parameters") != "host")) {
    return nullptr;  // a device with memory of its own has homes for shards
  }
  return std::make_unique<engine::HostTierDevice>(runtime.device());
}

// Reductions must not stand in one order with gathers: see Runtime::reduce_group().
std::unique_ptr<comm::Group> split_for_reductions(Runtime& runtime, comm::Group& group) {
  return &group == &runtime.group() ? nullptr : group.split(0, group.name() + ".reduce");
}

}  // namespace

Engine::Impl::Impl(Runtime& given, const EngineOptions& options)
    : runtime(given),
      shard_device(choose_shard_device(given)),
      group(choose_group(given)),
      params(group.rank(), group.size(), shard_device ? *shard_device : given.device()),
      tiers(given, group, params, options.shapes),
      reductions(split_for_reductions(given, group)),
      coordinator({group, given.device(), params, given.clock(), given.spans(), given.logger()},
                  coordinator::CoordinatorOptions::from(given.config())),
      parts{*this,  runtime, group,       reductions ? *reductions : given.reduce_group(),
            params, tiers,   coordinator, lifecycle},
      ranks(parts),
      model(parts, ranks),
      driver(parts, model, options.run_steps),
      access(parts, model, driver, ranks) {
  tiers.reserve_staging(parts.reduce_group);  // if the plan is made already
}

Engine::Impl::~Impl() {
  driver.end();
  tiers.release_staging(parts.reduce_group);
}

void Engine::Impl::begin_pass() {
  lifecycle.check_usable();
  finalize();
  driver.notice_trainable();
  driver.end_failed_backward();
}

void Engine::Impl::finalize() {
  if (lifecycle.is_finalized()) {
    return;
  }
  TESSERA_CHECK(params.num_params() > 0, ConfigError,
                "the engine has no parameters; make units of modules with parameters first");
  driver.notice_trainable();  // plan and optimizer are made for what is trained
  access.check_no_early_scope();
  model.finalize_leaves();
  if (tiers.is_planned()) {
    tiers.finalize(model.shapes());
    tiers.reserve_staging(parts.reduce_group);
    coordinator.set_tier(tiers.coordinator_options());
  }
  model.finalize_units();
  driver.finalize();
  lifecycle.set_finalized();
}

Engine::Engine(Runtime& runtime, const EngineOptions& options)
    : impl_(std::make_unique<Impl>(runtime, options)) {}
Engine::~Engine() = default;

engine::UnitCore* Engine::add_unit(const std::string& name, const std::vector<NamedTensor>& params,
                                   const UnitOptions& options, const std::string& module_type) {
  return impl_->model.add_unit(name, params, options, module_type);
}
void Engine::add_external_param(engine::UnitCore& unit, const at::Tensor& param) {
  impl_->model.add_external(unit, param);
}
void Engine::send_buffers(const std::string& unit, const std::vector<NamedTensor>& buffers) {
  impl_->model.send_buffers(unit, buffers);
}
void Engine::set_leaf(const std::string& name) { impl_->model.set_leaf(name, true); }
void Engine::set_leaf(const coordinator::LeafRule& rule) { impl_->model.set_leaf(rule, true); }
void Engine::clear_leaf(const std::string& name) { impl_->model.set_leaf(name, false); }
void Engine::clear_leaf(const coordinator::LeafRule& rule) { impl_->model.set_leaf(rule, false); }
std::vector<std::string> Engine::leaf_units() { return impl_->model.leaf_units(); }

void Engine::backward(const at::Tensor& loss, double weight) {
  backward(std::vector{loss}, weight);
}
void Engine::backward(const std::vector<at::Tensor>& losses, double weight) {
  engine::StepDriver::check_losses(losses, weight);
  impl_->begin_pass();
  impl_->driver.backward(losses, weight);
}
StepResult Engine::step() { return impl_->driver.step(); }
void Engine::request_stop() { impl_->driver.request_stop(); }
std::optional<StepResult> Engine::follow() {
  impl_->begin_pass();
  return impl_->driver.follow();
}
void Engine::zero_grad() { impl_->driver.zero_grad(); }

ResidentScope Engine::resident() {
  impl_->begin_pass();
  return ResidentScope(impl_->access.open_resident());
}
GatheredScope Engine::gathered(const std::vector<at::Tensor>& params, int modifier_rank) {
  return gathered_ids(impl_->model.ids_of(params), modifier_rank);
}
GatheredScope Engine::gathered_ids(const std::vector<int>& ids, int modifier_rank) {
  impl_->lifecycle.check_usable();
  return GatheredScope(impl_->access.open(ids, modifier_rank));
}
void Engine::set_trainable(const at::Tensor& param, bool trainable) {
  impl_->driver.set_trainable(param, trainable);
}
void Engine::to_plain() { impl_->access.to_plain(); }

std::int64_t Engine::num_steps() const { return impl_->driver.num_steps(); }
int Engine::num_params() const { return impl_->params.num_params(); }
const shard::Param& Engine::param(int id) const { return impl_->params[id]; }
shard::ParamTable& Engine::params() { return impl_->params; }
optim::Optimizer& Engine::optimizer() {
  impl_->finalize();
  return impl_->driver.optimizer();
}
const at::Tensor& Engine::tensor(int id) const { return impl_->model.tensor(id); }
at::Tensor Engine::full_value(int id) { return impl_->access.full_value(id); }
void Engine::save_parameters(const std::string& path) { impl_->access.save_parameters(path); }

EngineStats Engine::take_stats() { return impl_->driver.take_stats(); }
Runtime& Engine::runtime() const { return impl_->runtime; }
const coordinator::Coordinator& Engine::coordinator() const { return impl_->coordinator; }
const comm::Group& Engine::group() const { return impl_->group; }
const planner::MemoryPlan* Engine::placement() const { return impl_->tiers.plan(); }
const tier::Store* Engine::store(Role role) const { return impl_->tiers.store(role); }
Tier Engine::shard_tier() const { return impl_->shard_device ? Tier::kHost : Tier::kDevice; }

}  // namespace tessera
