#include "tessera/engine/engine.h"

#include "tessera/engine/engine_objects.h"

namespace tessera {

Engine::Engine(Runtime& runtime, const EngineOptions& options)
    : objects_(std::make_unique<engine::EngineObjects>(runtime, options)) {}
Engine::~Engine() = default;

engine::UnitCore* Engine::add_unit(const std::string& name, const std::vector<NamedTensor>& params,
                                   const UnitOptions& options, const std::string& module_type) {
  return objects_->model.add_unit(name, params, options, module_type);
}
void Engine::add_external_param(engine::UnitCore& unit, const at::Tensor& param) {
  objects_->model.add_external(unit, param);
}
void Engine::send_buffers(const std::string& unit, const std::vector<NamedTensor>& buffers) {
  objects_->model.send_buffers(unit, buffers);
}
void Engine::set_leaf(const std::string& name) { objects_->model.set_leaf(name, true); }
void Engine::set_leaf(const coordinator::LeafRule& rule) { objects_->model.set_leaf(rule, true); }
void Engine::clear_leaf(const std::string& name) { objects_->model.set_leaf(name, false); }
void Engine::clear_leaf(const coordinator::LeafRule& rule) {
  objects_->model.set_leaf(rule, false);
}
std::vector<std::string> Engine::leaf_units() { return objects_->model.leaf_units(); }

void Engine::backward(const at::Tensor& loss, double weight) {
  backward(std::vector{loss}, weight);
}
void Engine::backward(const std::vector<at::Tensor>& losses, double weight) {
  engine::StepDriver::check_losses(losses, weight);
  objects_->begin_pass();
  objects_->driver.backward(losses, weight);
}
StepResult Engine::step() {
  StepResult result = objects_->driver.step();
  objects_->saver.after_step();
  return result;
}
void Engine::request_stop() { objects_->driver.request_stop(); }
std::optional<StepResult> Engine::join() {
  objects_->begin_pass();
  std::optional<StepResult> result = objects_->driver.join();
  if (result) {
    objects_->saver.after_step();
  }
  return result;
}
void Engine::zero_grad() { objects_->driver.zero_grad(); }

ResidentScope Engine::resident() {
  objects_->begin_pass();
  return ResidentScope(objects_->access.open_resident());
}
GatheredScope Engine::gathered(const std::vector<at::Tensor>& params, int modifier_rank) {
  return gathered_ids(objects_->model.ids_of(params), modifier_rank);
}
GatheredScope Engine::gathered_ids(const std::vector<int>& ids, int modifier_rank) {
  objects_->context.lifecycle.check_usable();
  return GatheredScope(objects_->access.open(ids, modifier_rank));
}
void Engine::set_trainable(const at::Tensor& param, bool trainable) {
  objects_->driver.set_trainable(param, trainable);
}
void Engine::to_plain() { objects_->access.to_plain(); }

std::int64_t Engine::num_steps() const { return objects_->driver.num_steps(); }
int Engine::num_params() const { return objects_->context.params.num_params(); }
const shard::Param& Engine::param(int id) const { return objects_->context.params[id]; }
shard::ParamTable& Engine::params() { return objects_->context.params; }
optim::Optimizer& Engine::optimizer() {
  objects_->finalize();
  objects_->driver.make_states();
  return objects_->driver.optimizer();
}
const at::Tensor& Engine::tensor(int id) const { return objects_->model.tensor(id); }
at::Tensor Engine::full_value(int id) { return objects_->access.full_value(id); }
void Engine::save_parameters(const std::string& path) { objects_->access.save_parameters(path); }

std::string Engine::save(const std::string& root, const SaveOptions& options) {
  objects_->begin_pass();
  return objects_->saver.save(root, options);
}
SavePrediction Engine::start_save(const std::string& root, const SaveOptions& options) {
  objects_->begin_pass();
  return objects_->saver.start_save(root, options);
}
std::optional<SaveOutcome> Engine::take_save_outcome() { return objects_->saver.take_outcome(); }
std::optional<SaveOutcome> Engine::finish_save() { return objects_->saver.finish(); }
LoadResult Engine::load(const std::string& path, const LoadOptions& options) {
  return objects_->load(path, options);
}

EngineStats Engine::take_stats() { return objects_->driver.take_stats(); }
Runtime& Engine::runtime() const { return objects_->context.runtime; }
const coordinator::Coordinator& Engine::coordinator() const {
  return objects_->context.coordinator;
}
const comm::Group& Engine::group() const { return objects_->context.group; }
const comm::Mesh& Engine::mesh() const { return objects_->context.mesh.mesh(); }
const comm::Group& Engine::shard_group() const { return objects_->context.mesh.gathers(); }
const comm::Group* Engine::replica_group() const { return objects_->context.mesh.replicas(); }
const planner::MemoryPlan* Engine::memory_plan() const { return objects_->context.tiers.plan(); }
const tier::Store* Engine::store(Role role) const { return objects_->context.tiers.store(role); }

}  // namespace tessera
