#include "tessera/engine/engine.h"

#include <utility>

#include "tessera/core/error.h"
#include "tessera/engine/engine_impl.h"

namespace tessera {

Engine::Engine(Runtime& runtime, const EngineOptions& options)
    : impl_(std::make_unique<Impl>(runtime, options)) {}
Engine::~Engine() = default;

engine::UnitCore* Engine::add_unit(const std::string& name, const std::vector<NamedTensor>& params,
                                   const UnitOptions& options, const std::string& module_type) {
  return impl_->add_unit(name, params, options, module_type);
}
void Engine::add_external_param(engine::UnitCore& unit, const at::Tensor& param) {
  impl_->add_external(unit, param);
}
void Engine::send_buffers(const std::string& unit, const std::vector<NamedTensor>& buffers) {
  impl_->send_buffers(unit, buffers);
}

void Engine::backward(const at::Tensor& loss, double weight) { impl_->backward({loss}, weight); }
void Engine::backward(const std::vector<at::Tensor>& losses, double weight) {
  impl_->backward(losses, weight);
}
StepResult Engine::step() { return impl_->step(); }
void Engine::request_stop() { impl_->request_stop(); }
std::optional<StepResult> Engine::follow() { return impl_->follow(); }
ResidentScope Engine::resident() { return ResidentScope(impl_->begin_resident()); }
void Engine::zero_grad() { impl_->zero_grad(); }

void Engine::set_leaf(const std::string& name) { impl_->set_leaf(name, true); }
void Engine::set_leaf(const coordinator::LeafRule& rule) { impl_->set_leaf(rule, true); }
void Engine::clear_leaf(const std::string& name) { impl_->set_leaf(name, false); }
void Engine::clear_leaf(const coordinator::LeafRule& rule) { impl_->set_leaf(rule, false); }
std::vector<std::string> Engine::leaf_units() { return impl_->leaf_units(); }

GatheredScope Engine::gathered(const std::vector<at::Tensor>& params, int modifier_rank) {
  return gathered_ids(impl_->ids_of(params), modifier_rank);
}
GatheredScope Engine::gathered_ids(const std::vector<int>& ids, int modifier_rank) {
  impl_->check_usable("gathered()");
  return GatheredScope(impl_->gathered().open(ids, modifier_rank));
}
void Engine::set_trainable(const at::Tensor& param, bool trainable) {
  impl_->set_trainable(param, trainable);
}
void Engine::to_plain() { impl_->to_plain(); }

std::int64_t Engine::num_steps() const { return impl_->num_steps; }
int Engine::num_params() const { return impl_->params.num_params(); }
const shard::Param& Engine::param(int id) const { return impl_->params[id]; }
shard::ParamTable& Engine::params() { return impl_->params; }
optim::Optimizer& Engine::optimizer() {
  impl_->seal();
  return *impl_->optimizer;
}
const at::Tensor& Engine::tensor(int id) const {
  return impl_->tensors[static_cast<std::size_t>(id)];
}
at::Tensor Engine::full_value(int id) { return impl_->full_value(id); }
void Engine::save_parameters(const std::string& path) { impl_->save_parameters(path); }

EngineStats Engine::take_stats() { return impl_->take_stats(); }
Runtime& Engine::runtime() const { return impl_->runtime; }
const coordinator::Coordinator& Engine::coordinator() const { return impl_->coordinator(); }
const comm::Group& Engine::group() const { return impl_->group(); }
const planner::MemoryPlan* Engine::memory_plan() const { return impl_->tiers.plan(); }
const tier::Store* Engine::store(Role role) const { return impl_->tiers.store(role); }

}  // namespace tessera
