#include "tessera/optim/sharded_optimizer.h"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <tuple>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/optim/update_batch.h"

namespace tessera::optim {
namespace {

bool is_fp32(const shard::Param& param) { return param.layout().dtype() == DType::kFloat32; }

}  // namespace

ShardedOptimizer::ShardedOptimizer(shard::ParamTable& params, device::Device& device,
                                   Kernels& kernels, const RuleOptions& rule)
    : params_(params),
      device_(device),
      kernels_(kernels),
      rule_(rule),
      norms_(device, kernels, params.num_params()) {
  slots_.reserve(static_cast<std::size_t>(params.num_params()));
  for (int id = 0; id < params.num_params(); ++id) {
    slots_.push_back(make_slot(params[id]));
    start_master(params[id]);
  }
  if (device.is_discrete()) {
    step_ = device.allocate(Tier::kDevice, sizeof(StepOnDevice), Role::kOther);
    step_for_host_ = device.allocate(Tier::kPinned, sizeof(StepOnDevice), Role::kOther);
  }
  update_stream().synchronize();
}

ShardedOptimizer::~ShardedOptimizer() {
  try {
    if (!held_.empty()) {
      held_.back().updated.wait();
    }
    wait();
  } catch (const std::exception&) {  // here only the end of what uses our memory matters
  }
}

ShardedOptimizer::Slot ShardedOptimizer::make_slot(const shard::Param& param) {
  Slot slot;
  if (!param.trainable()) {
    return slot;
  }
  const std::size_t num_states = state_names(rule_).size();
  const auto numel = static_cast<std::size_t>(param.layout().shard_numel());
  const std::size_t num_tensors = num_states + (is_fp32(param) ? 0 : 1);
  const std::size_t bytes = num_tensors * numel * sizeof(float);
  slot.memory = device_.allocate(Tier::kDevice, bytes, Role::kOptimizer);
  auto* next = reinterpret_cast<float*>(slot.memory.data());
  if (is_fp32(param)) {
    slot.master = reinterpret_cast<float*>(param.shard());
  } else {
    slot.master = next;
    next += numel;
  }
  for (std::size_t i = 0; i < num_states; ++i, next += numel) {
    slot.states[i] = next;
  }
  if (bytes > 0) {
    // The stream keeps a failure until it is synchronized; so in all that is ignored below.
    std::ignore = device_.start_fill(slot.memory.data(), 0, bytes, update_stream());
  }
  return slot;
}

void ShardedOptimizer::start_master(const shard::Param& param) {
  const Slot& slot = slots_[static_cast<std::size_t>(param.id())];
  if (slot.master == nullptr || is_fp32(param)) {
    return;
  }
  device::Stream& stream = update_stream();
  stream.wait(param.updated());
  if (param.first_master() != nullptr) {
    std::ignore = device_.start_copy(
        slot.master, param.first_master(),
        static_cast<std::size_t>(param.layout().shard_numel()) * sizeof(float), stream);
    return;
  }
  std::ignore = kernels_.start_widen(slot.master, param.shard(), param.layout().dtype(),
                                     param.layout().shard_numel(), stream);
}

device::Stream& ShardedOptimizer::update_stream() {
  return device_.stream(device::StreamKind::kReduce);
}

double ShardedOptimizer::sum_of_squares(grad::Reducer& gradients) {
  return norms_.sum(params_, gradients, update_stream());
}

void ShardedOptimizer::start_update(grad::Reducer& gradients, double lr, double gradient_scale) {
  UpdateScalars scalars;
  scalars.lr = lr;
  scalars.gradient_scale = gradient_scale;
  ++num_updates_;
  order_behind_readers();
  UpdateBatch batch(params_, kernels_, rule_, update_stream());
  for (int id = 0; id < params_.num_params(); ++id) {
    if (params_[id].trainable() && gradients.has_gradient(id)) {
      batch.add(id, make_task(params_[id], gradients.shard_gradient(id), scalars));
      ++slots_[static_cast<std::size_t>(id)].num_updates;
    }
  }
  const device::StreamSpan span(update_stream(), "update");
  batch.launch();
}

void ShardedOptimizer::order_behind_readers() {
  device::Stream& stream = update_stream();
  stream.wait(device_.stream(device::StreamKind::kCompute).record());
  stream.wait(device_.stream(device::StreamKind::kGather).record());
}

UpdateTask ShardedOptimizer::make_task(const shard::Param& param,
                                       const grad::ShardGradient& gradient,
                                       const UpdateScalars& scalars) const {
  TESSERA_INVARIANT(gradient.numel == param.range().numel, "gradient of ", param.name(), " has ",
                    gradient.numel, " elements on this rank, its shard ", param.range().numel);
  const Slot& slot = slots_[static_cast<std::size_t>(param.id())];
  UpdateTask task;
  task.scalars = scalars;
  task.scalars.step = slot.num_updates + 1;
  task.scalars.weight_decay_scale = param.spec().weight_decay_scale;
  task.span.master = slot.master;
  task.span.gradient = gradient.values;
  task.span.gradient_dtype = gradient.dtype;
  task.span.states = slot.states;
  task.span.numel = gradient.numel;
  if (!is_fp32(param)) {
    task.span.parameter = param.shard();
    task.span.parameter_dtype = param.layout().dtype();
  }
  return task;
}

bool ShardedOptimizer::start_step(grad::Reducer& gradients, double lr, const StepInputs& inputs) {
  if (step_.data() == nullptr || !gradients.is_ordered()) {
    return false;
  }
  device::Stream& stream = update_stream();
  auto* const step = reinterpret_cast<StepOnDevice*>(step_.data());
  step_found_ =
      kernels_.start_step_factors(norms_.start(params_, gradients, stream), inputs, step,
                                  reinterpret_cast<StepOnDevice*>(step_for_host_.data()), stream);
  order_behind_readers();
  UpdateScalars scalars;
  scalars.lr = lr;
  scalars.on_device = step;
  held_.clear();
  UpdateBatch batch(params_, kernels_, rule_, stream, &held_);
  for (int id = 0; id < params_.num_params(); ++id) {
    if (params_[id].trainable() && gradients.has_gradient(id)) {
      batch.add(id, make_task(params_[id], gradients.ordered_gradient(id), scalars));
    }
  }
  const device::StreamSpan span(stream, "update");
  batch.launch();
  return true;
}

double ShardedOptimizer::finish_step() {
  step_found_.wait();
  const StepOnDevice& step = *reinterpret_cast<const StepOnDevice*>(step_for_host_.data());
  std::vector<HeldUpdate> started = std::exchange(held_, {});
  if (step.skips != 0) {
    if (!started.empty()) {
      started.back().updated.wait();  // it does nothing, but it was given gradients that go now
    }
    return step.gradient_squares;
  }
  ++num_updates_;
  for (HeldUpdate& update : started) {
    params_[update.id].set_updated(std::move(update.updated));
    ++slots_[static_cast<std::size_t>(update.id)].num_updates;
  }
  return step.gradient_squares;
}

void ShardedOptimizer::wait() {
  std::vector<device::Pending> updates;
  updates.reserve(slots_.size());
  for (int id = 0; id < params_.num_params(); ++id) {
    updates.push_back(params_[id].updated());
  }
  device::Pending::all(std::move(updates)).wait();
}

std::span<float> ShardedOptimizer::state(int param, std::string_view name) {
  const shard::Param& owner = params_[param];
  const Slot& slot = slots_[static_cast<std::size_t>(param)];
  if (slot.master == nullptr) {
    return {};
  }
  owner.updated().wait();
  const auto numel = static_cast<std::size_t>(owner.layout().shard_numel());
  if (name == "master") {
    return {slot.master, numel};
  }
  const auto names = state_names(rule_);
  const auto found = std::find(names.begin(), names.end(), name);
  TESSERA_CHECK(found != names.end(), ConfigError, owner.name(), " has no state \"", name,
                "\" under ", to_string(rule_.kind), "; it has ", list_states(rule_));
  return {slot.states[static_cast<std::size_t>(found - names.begin())], numel};
}

void ShardedOptimizer::follow_trainable(int param) {
  Slot& slot = slots_[static_cast<std::size_t>(param)];
  if (slot.master == nullptr) {
    slot = make_slot(params_[param]);
    reset_master(param);
  }
}

void ShardedOptimizer::reset_master(int param) {
  start_master(params_[param]);
  update_stream().synchronize();
}

}  // namespace tessera::optim
