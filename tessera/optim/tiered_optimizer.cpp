#include "tessera/optim/tiered_optimizer.h"

#include <algorithm>
#include <cstddef>
#include <tuple>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::optim {
namespace {

void check_parts(const shard::ParamTable& params, const TieredParts& parts) {
  TESSERA_INVARIANT(static_cast<int>(parts.stored.size()) == params.num_params(), "places of ",
                    parts.stored.size(), " parameters are known, there are ", params.num_params());
  for (int id = 0; id < params.num_params(); ++id) {
    const StoredParts& stored = parts.stored[static_cast<std::size_t>(id)];
    const std::string& name = params[id].name();
    TESSERA_INVARIANT(
        !stored.parameter || (parts.parameters != nullptr && parts.parameters->has(id)),
        "parameter '", name, "' is to be stored, and has no room in a store");
    TESSERA_INVARIANT(!stored.states || parts.states != nullptr, "states of parameter '", name,
                      "' are to be stored, and there is no store");
    TESSERA_INVARIANT(
        parts.buffers != nullptr || !(stored.parameter || stored.gradient || stored.states),
        "parameter '", name, "' is stored, and there are no buffers to update it in");
  }
}

}  // namespace

TieredOptimizer::TieredOptimizer(shard::ParamTable& params, device::Device& device,
                                 Kernels& kernels, const RuleOptions& rule, TieredParts parts)
    : params_(params),
      device_(device),
      rule_(rule),
      parts_(std::move(parts)),
      norms_(compute_device(), parts_.own.device ? *parts_.own.kernels : kernels,
             params.num_params()),
      copies_(static_cast<std::size_t>(params.num_params())),
      states_(params, device, kernels, rule, parts_) {
  check_parts(params, parts_);
  if (parts_.own.device != nullptr) {
    device_update_ = std::make_unique<DeviceUpdate>(params, rule, parts_.own, parts_.stored);
  }
  // All room first: what is stored lies in one piece, in the order of registration.
  for (int id = 0; id < params.num_params(); ++id) {
    if (params[id].trainable()) {
      add(id);
    }
  }
  pipeline_ = std::make_unique<UpdatePipeline>(
      StageWork::Parts{params, device, kernels, rule, parts_, states_});
  set_plan();
  for (int id = 0; id < params.num_params(); ++id) {
    if (params[id].trainable()) {
      make_master(id);
    }
  }
}

TieredOptimizer::~TieredOptimizer() = default;

device::Device& TieredOptimizer::compute_device() const {
  return parts_.own.device != nullptr ? *parts_.own.device : device_;
}

bool TieredOptimizer::is_on_device(int id) const {
  return device_update_ && device_update_->is_ours(id);
}

void TieredOptimizer::add(int id) {
  if (is_on_device(id)) {
    device_update_->add(id);
    return;
  }
  states_.add(id);
  const shard::Param& param = params_[id];
  if (parts_.own.device != nullptr && param.tier() == Tier::kDevice) {
    copies_[static_cast<std::size_t>(id)].mirror =
        parts_.own.device->allocate(Tier::kPinned, param.layout().shard_bytes(), Role::kStaging);
  }
}

void TieredOptimizer::make_master(int id) {
  if (is_on_device(id)) {
    device_update_->make_master(id);
    return;
  }
  const device::Memory& mirror = copies_[static_cast<std::size_t>(id)].mirror;
  if (mirror.data() != nullptr) {
    const shard::Param& param = params_[id];
    param.updated().wait();
    compute_device()
        .start_copy(mirror.data(), param.shard(), param.layout().shard_bytes(),
                    compute_device().stream(device::StreamKind::kWrite))
        .wait();
  }
  states_.make_master(id, mirror.data());
}

void TieredOptimizer::set_plan() {
  pipeline_->set_plan(states_.plan());
  if (device_update_) {
    device_update_->plan();
  }
}

void TieredOptimizer::prepare() {
  pipeline_->prepare();
  if (device_update_) {
    device_update_->prepare();
  }
}

double TieredOptimizer::sum_of_squares(grad::Reducer& gradients) {
  return norms_.sum(params_, gradients, compute_device().stream(device::StreamKind::kReduce));
}

// Where the processor can read it.
void TieredOptimizer::bring_gradient(int id, const grad::ShardGradient& gradient,
                                     UpdateJob::Item& item) {
  item.gradient = gradient.values;
  item.gradient_dtype = gradient.dtype;
  item.gradient_came = gradient.came;
  if (parts_.own.device == nullptr || gradient.is_on_host || gradient.numel == 0) {
    return;
  }
  device::Device& device = *parts_.own.device;
  device::Memory& copy = copies_[static_cast<std::size_t>(id)].gradient;
  const std::size_t bytes = static_cast<std::size_t>(gradient.numel) * bytes_of(gradient.dtype);
  const std::size_t room =
      static_cast<std::size_t>(params_[id].layout().shard_numel()) * sizeof(float);
  if (copy.data() == nullptr) {
    copy = device.allocate(Tier::kPinned, room, Role::kGradient);
  }
  device::Stream& down = device.stream(device::StreamKind::kWrite);
  down.wait(device.stream(device::StreamKind::kReduce).record());
  item.gradient = copy.data();
  item.gradient_came = device.start_copy(copy.data(), gradient.values, bytes, down);
  gradients_down_bytes_ += bytes;
}

UpdateJob::Item TieredOptimizer::make_item(int id, grad::Reducer& gradients,
                                             const UpdateScalars& scalars,
                                             const device::Pending& may_start) {
  const shard::Param& param = params_[id];
  const auto index = static_cast<std::size_t>(id);
  const StoredParts& stored = parts_.stored[index];
  TESSERA_INVARIANT(gradients.is_stored(id) == stored.gradient, "the gradient of parameter '",
                    param.name(), "' is not where it was planned");
  UpdateJob::Item item;
  item.keeps = !gradients.has_gradient(id);
  item.scalars = scalars;
  item.scalars.step = states_.num_updates(id) + 1;
  item.scalars.weight_decay_scale = param.spec().weight_decay_scale;
  item.may_start = may_start;
  if (!item.keeps) {
    const grad::ShardGradient gradient = gradients.shard_gradient(id);
    TESSERA_INVARIANT(gradient.numel == param.range().numel, "gradient of ", param.name(), " has ",
                      gradient.numel, " elements on this rank, its shard ", param.range().numel);
    bring_gradient(id, gradient, item);
  }
  const device::Memory& mirror = copies_[index].mirror;
  item.shard = stored.parameter ? nullptr : param.shard();
  if (mirror.data() != nullptr) {
    item.shard = mirror.data();
    item.deliver = [this, &param, from = mirror.data()] {
      device::Device& device = *parts_.own.device;
      return device.start_copy(param.shard(), from, param.layout().shard_bytes(),
                               device.stream(device::StreamKind::kRead));
    };
    parameters_up_bytes_ += param.layout().shard_bytes();
  }
  item.done = std::make_shared<device::HandedOver>();
  item.num_pieces_left = pipeline_->num_pieces(id);
  return item;
}

device::Pending TieredOptimizer::record_users() {
  std::vector<device::Pending> users;
  for (const device::StreamKind kind :
       {device::StreamKind::kCompute, device::StreamKind::kGather, device::StreamKind::kReduce}) {
    users.push_back(compute_device().stream(kind).record());
  }
  return device::Pending::all(std::move(users));
}

void TieredOptimizer::start_update(grad::Reducer& gradients, double lr, double gradient_scale) {
  pipeline_->check();
  UpdateScalars scalars;
  scalars.lr = lr;
  scalars.gradient_scale = gradient_scale;
  ++num_updates_;
  gradients.wait();  // stored ones are read on another thread
  const device::Pending may_start = record_users();
  UpdateJob job;
  job.gradients = &gradients;
  job.items.resize(static_cast<std::size_t>(params_.num_params()));
  std::vector<int> on_device;
  for (int id = 0; id < params_.num_params(); ++id) {
    if (!params_[id].trainable()) {
      continue;
    }
    if (is_on_device(id)) {
      on_device.push_back(id);
      continue;
    }
    UpdateJob::Item item = make_item(id, gradients, scalars, may_start);
    params_[id].set_updated(device::Pending(item.done));
    if (!item.keeps) {
      states_.count_update(id);
    }
    if (item.num_pieces_left == 0) {
      item.done->hand_over({});  // a shard without elements
    } else {
      job.items[static_cast<std::size_t>(id)] = std::move(item);
    }
  }
  // The CPU begins while the device's share is handed over.
  pipeline_->start(std::move(job));
  if (!on_device.empty()) {
    device_update_->start(on_device, gradients, scalars);
  }
}

void TieredOptimizer::wait() {
  pipeline_->wait();
  if (device_update_) {
    device_update_->wait();
  }
}

TieredStats TieredOptimizer::take_stats() {
  TieredStats stats = pipeline_->take_stats();
  if (device_update_) {
    const TieredStats own = device_update_->take_stats();
    stats.states_up_bytes += own.states_up_bytes;
    stats.states_down_bytes += own.states_down_bytes;
    stats.parameters_up_bytes += own.parameters_up_bytes;
    stats.parameters_down_bytes += own.parameters_down_bytes;
  }
  stats.gradients_down_bytes += std::exchange(gradients_down_bytes_, 0);
  stats.parameters_up_bytes += std::exchange(parameters_up_bytes_, 0);
  return stats;
}

void TieredOptimizer::settle() {
  pipeline_->wait();
  pipeline_->drop_leases();
  if (device_update_) {
    device_update_->wait_all();
  }
}

void TieredOptimizer::follow_trainable(int param) {
  settle();
  if (params_[param].trainable() && !has(param)) {
    add(param);
    make_master(param);
  }
  set_plan();
}

void TieredOptimizer::reset_master(int param) {
  settle();
  if (has(param)) {
    make_master(param);
  }
}

bool TieredOptimizer::has(int id) const {
  return is_on_device(id) ? device_update_->has(id) : states_.has(id);
}

template <typename Read>
std::span<float> TieredOptimizer::copy_of(int param, const Read& read) {
  settle();
  copy_.assign(static_cast<std::size_t>(params_[param].layout().shard_numel()), 0);
  read(copy_.data());
  return copy_;
}

std::span<float> TieredOptimizer::state(int param, std::string_view name) {
  const shard::Param& owner = params_[param];
  if (!has(param)) {
    return {};
  }
  owner.updated().wait();
  const auto numel = static_cast<std::size_t>(owner.layout().shard_numel());
  const bool own_master = is_own_master(owner.layout().dtype());
  const StoredParts& stored = parts_.stored[static_cast<std::size_t>(param)];
  std::size_t tensor = 0;
  if (name == "master") {
    if (own_master && stored.parameter) {
      return copy_of(param, [&](float* to) { states_.read_parameter(param, to); });
    }
    if (own_master && owner.tier() == Tier::kDevice && parts_.own.device != nullptr) {
      return copy_of(param, [&](float* to) {
        device::Device& device = *parts_.own.device;
        device
            .start_copy(to, owner.shard(), numel * sizeof(float),
                        device.stream(device::StreamKind::kWrite))
            .wait();
      });
    }
    if (own_master) {
      return {reinterpret_cast<float*>(owner.shard()), numel};
    }
  } else {
    const auto names = state_names(rule_);
    const auto found = std::find(names.begin(), names.end(), name);
    TESSERA_CHECK(found != names.end(), ConfigError, owner.name(), " has no state \"", name,
                  "\" under ", to_string(rule_.kind), "; it has ", list_states(rule_));
    tensor = static_cast<std::size_t>(found - names.begin()) + (own_master ? 0 : 1);
  }
  if (is_on_device(param)) {
    copy_ = device_update_->read(param, tensor);
    return copy_;
  }
  if (stored.states) {
    return copy_of(param, [&](float* to) { states_.read(param, tensor, to); });
  }
  return {states_.in_memory(param, tensor), numel};
}

}  // namespace tessera::optim
