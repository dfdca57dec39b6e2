#include "tessera/optim/optimizer.h"

#include <algorithm>
#include <cstddef>
#include <tuple>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::optim {

using device::StreamKind;

OptimizerStats& OptimizerStats::operator+=(const OptimizerStats& other) {
  states_h2d_bytes += other.states_h2d_bytes;
  states_d2h_bytes += other.states_d2h_bytes;
  parameters_h2d_bytes += other.parameters_h2d_bytes;
  parameters_d2h_bytes += other.parameters_d2h_bytes;
  gradients_h2d_bytes += other.gradients_h2d_bytes;
  states_read_bytes += other.states_read_bytes;
  states_written_bytes += other.states_written_bytes;
  parameters_read_bytes += other.parameters_read_bytes;
  parameters_written_bytes += other.parameters_written_bytes;
  gradients_read_bytes += other.gradients_read_bytes;
  read_wait_s += other.read_wait_s;
  lease_wait_s += other.lease_wait_s;
  update_s += other.update_s;
  return *this;
}

Optimizer::Optimizer(shard::ParamTable& params, const RuleOptions& rule, OptimizerOptions options,
                     CarriedStates carried)
    : params_(params),
      rule_(rule),
      options_(options),
      reduce_(options_.device.stream(StreamKind::kReduce)),
      states_(params, rule, options_),
      are_set_(static_cast<std::size_t>(params.num_params())),
      host_norms_(static_cast<std::size_t>(params.num_params())),
      executor_(std::make_unique<DeviceExecutor>(params, rule, options_, states_)) {
  if (options_.device.is_discrete()) {
    pinned_norms_ =
        options_.device.allocate(Tier::kPinned, host_norms_.size() * sizeof(double), Role::kOther);
    step_ = options_.device.allocate(Tier::kDevice, sizeof(StepMemory), Role::kOther);
    step_pinned_ = options_.device.allocate(Tier::kPinned, sizeof(HostStepMemory), Role::kOther);
  }
  carried.params.resize(host_norms_.size());
  num_updates_ = carried.num_updates;
  // All space first: what is on NVMe lies in one piece, in the order of registration. What was
  // carried is given back as it goes in: both are never there at once.
  for (int id = 0; id < params.num_params(); ++id) {
    CarriedStates::Each& states = carried.params[static_cast<std::size_t>(id)];
    if (params[id].trainable() || states.exists) {
      add(id);
    }
    if (states.exists) {
      states_.take_memory(id);
      states_.put(id, states);
      states.tensors = {};
      are_set_[static_cast<std::size_t>(id)] = true;
    }
  }
  set_plan();
  for (int id = 0; id < params.num_params(); ++id) {
    if (are_set_[static_cast<std::size_t>(id)]) {
      refresh_copy(id);
    }
  }
}

Optimizer::~Optimizer() = default;

void Optimizer::add(int id) {
  states_.add(id);
  if (!states_.is_on_cpu(id)) {
    return;
  }
  if (!pipeline_) {
    pipeline_ = std::make_unique<CpuPipeline>(params_, rule_, options_, states_);
  }
  pipeline_->add(id);
}

void Optimizer::make_states() {
  finish();
  for (int id = 0; id < params_.num_params(); ++id) {
    if (states_.has(id) && !are_set_[static_cast<std::size_t>(id)]) {
      make_states(id);
    }
  }
}

void Optimizer::make_states(int id) {
  states_.take_memory(id);
  make_master(id);
  params_[id].set_first_master({});  // one by one: all would be there twice
  are_set_[static_cast<std::size_t>(id)] = true;
}

void Optimizer::make_master(int id) { states_.make_master(id, refresh_copy(id)); }

const std::byte* Optimizer::refresh_copy(int id) {
  return states_.is_on_cpu(id) ? pipeline_->refresh_copy(id) : nullptr;
}

void Optimizer::set_plan() {
  if (pipeline_) {
    pipeline_->set_plan(states_.plan());
  }
  executor_->plan();
}

void Optimizer::prepare() {
  if (pipeline_) {
    pipeline_->prepare();
  }
  executor_->prepare();
}

double* Optimizer::norm_results() {
  return pinned_norms_.data() == nullptr ? host_norms_.data()
                                         : reinterpret_cast<double*>(pinned_norms_.data());
}

std::vector<const double*> Optimizer::start_norm(grad::Reducer& gradients, bool is_ordered) {
  std::vector<const double*> sums;
  std::vector<NormSpan> spans;
  std::vector<NormSpan> host_spans;          // of gradients beside a discrete device
  std::vector<grad::ShardGradient> on_host;  // whose lists they name
  on_host.reserve(host_norms_.size());
  known_norms_.clear();
  known_norms_.reserve(host_norms_.size());  // addresses stay
  for (int id = 0; id < params_.num_params(); ++id) {
    if (!params_[id].trainable() || !gradients.has_gradient(id)) {
      continue;
    }
    if (const auto known = is_ordered ? std::nullopt : gradients.sum_of_squares(id)) {
      sums.push_back(&known_norms_.emplace_back(*known));
      continue;
    }
    const grad::ShardGradient gradient =
        is_ordered ? gradients.ordered_gradient(id) : gradients.shard_gradient(id);
    if (is_ordered && gradient.squares != nullptr) {
      sums.push_back(gradient.squares);
      continue;
    }
    if (gradient.is_on_host) {
      sums.push_back(host_norms_.data() + host_spans.size());
      on_host.push_back(gradient);
      host_spans.push_back({gradient.values, gradient.dtype, gradient.numel, false, gradient.low,
                            on_host.back().later});
      continue;
    }
    sums.push_back(norm_results() + spans.size());
    spans.push_back({gradient.values, gradient.dtype, gradient.numel});
  }
  if (!spans.empty()) {
    // The stream keeps a failure until it is synchronized.
    std::ignore = options_.kernels.start_sums_of_squares(spans, norm_results(), reduce_);
  }
  if (!host_spans.empty()) {
    for (const grad::ShardGradient& gradient : on_host) {
      gradient.ready.wait();
    }
    options_.cpu_kernels()
        .start_sums_of_squares(host_spans, host_norms_.data(),
                               options_.cpu().stream(StreamKind::kReduce))
        .wait();
  }
  return sums;
}

double Optimizer::sum_of_squares(grad::Reducer& gradients) {
  const std::vector<const double*> sums = start_norm(gradients, /*is_ordered=*/false);
  reduce_.synchronize();
  double total = 0;
  for (const double* const sum : sums) {
    total += *sum;
  }
  return total;
}

std::vector<int> Optimizer::trainable(bool on_cpu) const {
  std::vector<int> ids;
  for (int id = 0; id < params_.num_params(); ++id) {
    if (params_[id].trainable() && states_.is_on_cpu(id) == on_cpu) {
      ids.push_back(id);
    }
  }
  return ids;
}

void Optimizer::start_update(grad::Reducer& gradients, double lr, double gradient_scale) {
  if (pipeline_) {
    pipeline_->check();
  }
  UpdateScalars scalars;
  scalars.lr = lr;
  scalars.gradient_scale = gradient_scale;
  ++num_updates_;
  // The CPU begins while the device's share is handed over.
  if (pipeline_) {
    publish(pipeline_->start(trainable(/*on_cpu=*/true), gradients, scalars));
  }
  publish(executor_->start(trainable(/*on_cpu=*/false), gradients, scalars));
}

bool Optimizer::start_step(grad::Reducer& gradients, double lr, const StepInputs& inputs,
                           const OwnSums& own, comm::Group& group) {
  if (step_.data() == nullptr || pipeline_ || executor_->streams() || !gradients.is_ordered() ||
      !group.is_stream_ordered() ||
      (own.squares_group != nullptr && !own.squares_group->is_stream_ordered())) {
    return false;
  }
  auto& step = *reinterpret_cast<StepMemory*>(step_.data());
  auto& pinned = *reinterpret_cast<HostStepMemory*>(step_pinned_.data());
  device::Device& device = options_.device;
  pinned.own = own.sums;
  std::ignore = device.start_copy(&step.sums, &pinned.own, sizeof(StepSums), reduce_);
  if (own.weighted_loss) {
    step_loss_ = own.weighted_loss;
    reduce_.wait(device.stream(StreamKind::kCompute).record());
    std::ignore =
        device.start_copy(&step.sums.weighted_loss, step_loss_.get(), sizeof(double), reduce_);
  }
  std::ignore = options_.kernels.start_total(start_norm(gradients, /*is_ordered=*/true),
                                             &step.sums.gradient_squares, reduce_);
  comm::CallOptions call;
  call.label.unit = kStepSumsLabel;
  call.stream = &reduce_;
  if (own.squares_group != nullptr) {
    reduce_.wait(own.squares_group->start_all_reduce(&step.sums.gradient_squares, 1,
                                                     DType::kFloat64, comm::Reduction::kSum, call));
  }
  if (!own.adds_squares) {
    std::ignore = device.start_fill(&step.sums.gradient_squares, 0, sizeof(double), reduce_);
  }
  sums_reduced_ = group.start_all_reduce(&step.sums, kNumStepSums, DType::kFloat64,
                                         comm::Reduction::kSum, call);
  reduce_.wait(sums_reduced_);
  step_found_ =
      options_.kernels.start_step_factors(&step.sums, inputs, &step.step, &pinned.found, reduce_);
  gradients.wait_agreed();
  if (own.squares_group != nullptr) {
    own.squares_group->wait_agreed();
  }
  group.wait_agreed();
  if (own.wait_agreed) {
    own.wait_agreed();
  }
  UpdateScalars scalars;
  scalars.lr = lr;
  scalars.on_device = &step.step;
  held_ = executor_->start(trainable(/*on_cpu=*/false), gradients, scalars);
  step_gradients_ = &gradients;
  return true;
}

StepSums Optimizer::finish_step() {
  TESSERA_INVARIANT(held_, "a step ends that was not started");
  std::vector<StartedUpdate> started = std::move(*std::exchange(held_, std::nullopt));
  // What a network leaves behind that failed is no number.
  step_gradients_->wait_reduced();
  sums_reduced_.wait();
  step_found_.wait();
  step_loss_.reset();
  const FoundStep& found = reinterpret_cast<const HostStepMemory*>(step_pinned_.data())->found;
  if (found.step.skips != 0) {
    executor_->wait();  // it does nothing, but it was given gradients that go now
  } else {
    ++num_updates_;
    publish(std::move(started));
  }
  return found.sums;
}

void Optimizer::publish(std::vector<StartedUpdate> started) {
  for (StartedUpdate& update : started) {
    params_[update.id].set_updated(std::move(update.done), std::move(update.copy));
    if (update.has_gradient) {
      states_.count_update(update.id);
    }
  }
}

void Optimizer::wait_updated() {
  if (pipeline_) {
    pipeline_->wait_updated();
  }
  executor_->wait();
}

void Optimizer::wait() {
  if (pipeline_) {
    pipeline_->wait();
  }
  executor_->wait();
}

void Optimizer::finish() {
  if (pipeline_) {
    pipeline_->wait();
    pipeline_->drop_leases();
  }
  executor_->wait_all();
}

void Optimizer::follow_trainable(int param) {
  finish();
  if (params_[param].trainable() && !states_.has(param)) {
    add(param);
    make_states(param);
  }
  set_plan();
}

CarriedStates Optimizer::take_states() {
  finish();
  CarriedStates carried;
  carried.num_updates = num_updates_;
  carried.params.resize(host_norms_.size());
  for (int id = 0; id < params_.num_params(); ++id) {
    params_[id].updated().wait();
    if (states_.has(id)) {
      carried.params[static_cast<std::size_t>(id)] = states_.take(id);
    }
  }
  return carried;
}

void Optimizer::reset_master(int param) {
  finish();
  if (are_set_[static_cast<std::size_t>(param)]) {
    make_master(param);
    executor_->plan();  // what was sent to the device is of before
  }
}

std::span<float> Optimizer::state(int param, std::string_view name) {
  const shard::Param& owner = params_[param];
  if (!states_.has(param)) {
    return {};
  }
  owner.updated().wait();
  const auto numel = static_cast<std::size_t>(owner.layout().shard_numel());
  const std::vector<std::string_view> names = states_.tensor_names(param);
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) {
    TESSERA_CHECK(name == "master", ConfigError, owner.name(), " has no state \"", name,
                  "\" under ", to_string(rule_.kind), "; it has ", list_states(rule_));
    const bool on_host = owner.is_on_host() || !options_.device.is_discrete();
    if (!owner.is_on_nvme() && on_host) {
      return {reinterpret_cast<float*>(owner.shard()), numel};
    }
    finish();
    copy_ = states_.read_parameter(param);
    return copy_;
  }
  const auto tensor = static_cast<std::size_t>(found - names.begin());
  finish();  // the device's states come back behind the parameter
  if (float* const values = states_.host_tensor(param, tensor)) {
    return {values, numel};
  }
  copy_ = states_.read(param, tensor);
  return copy_;
}

std::vector<std::string_view> Optimizer::tensor_names(int param) const {
  return states_.has(param) ? states_.tensor_names(param) : std::vector<std::string_view>();
}

// wait() does not wait for states on their way from the device to the host.
device::Pending Optimizer::start_read(int param, std::size_t tensor, std::int64_t begin,
                                      std::int64_t numel, std::byte* to) const {
  executor_->states_written(param).wait();
  return states_.start_read(param, tensor, begin, numel, to);
}

void Optimizer::begin_writes() {
  finish();
  states_.drop_writes();
}

void Optimizer::write(int param, std::size_t tensor, std::int64_t begin, std::int64_t numel,
                      const std::byte* from) {
  states_.write(param, tensor, begin, numel, from);
}

void Optimizer::set_num_updates(int param, std::int64_t updates) {
  states_.set_num_updates(param, updates);
  are_set_[static_cast<std::size_t>(param)] = true;
}

void Optimizer::add_states(int param) {
  if (!states_.has(param)) {
    add(param);
  }
}

void Optimizer::prepare_writes(int param) {
  if (states_.has(param)) {
    are_set_[static_cast<std::size_t>(param)] = false;
    params_[param].set_first_master({});
    states_.take_memory(param);
  }
}

void Optimizer::end_writes(std::int64_t num_updates) {
  states_.finish_writes();
  num_updates_ = num_updates;
  set_plan();
  for (int id = 0; id < params_.num_params(); ++id) {
    if (states_.has(id)) {
      refresh_copy(id);
    }
  }
}

OptimizerStats Optimizer::take_stats() {
  OptimizerStats stats = executor_->take_stats();
  if (pipeline_) {
    stats += pipeline_->take_stats();
  }
  return stats;
}

}  // namespace tessera::optim
