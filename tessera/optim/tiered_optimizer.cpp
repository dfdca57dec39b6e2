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
      kernels_(kernels),
      rule_(rule),
      parts_(std::move(parts)),
      states_(params, device, kernels, rule, parts_) {
  check_parts(params, parts_);
  // All room first: what is stored lies in one piece, in the order of registration.
  for (int id = 0; id < params.num_params(); ++id) {
    if (params[id].trainable()) {
      states_.add(id);
    }
  }
  pipeline_ = std::make_unique<UpdatePipeline>(
      StageWork::Parts{params, device, kernels, rule, parts_, states_});
  pipeline_->set_plan(states_.plan());
  for (int id = 0; id < params.num_params(); ++id) {
    if (params[id].trainable()) {
      states_.make_master(id);
    }
  }
}

TieredOptimizer::~TieredOptimizer() = default;

double TieredOptimizer::sum_of_squares(grad::Reducer& gradients) {
  std::vector<double> sums(static_cast<std::size_t>(params_.num_params()));
  device::Stream& stream = device_.stream(device::StreamKind::kReduce);
  for (int id = 0; id < params_.num_params(); ++id) {
    if (!params_[id].trainable()) {
      continue;
    }
    double& sum = sums[static_cast<std::size_t>(id)];
    if (gradients.is_stored(id)) {
      sum = gradients.sum_of_squares(id);
    } else {
      const grad::ShardGradient gradient = gradients.shard_gradient(id);
      // The stream keeps a failure until it is synchronized.
      std::ignore = kernels_.start_sum_of_squares(gradient.data, gradient.numel, &sum, stream);
    }
  }
  stream.synchronize();
  double total = 0;
  for (const double sum : sums) {
    total += sum;
  }
  return total;
}

UpdateJob TieredOptimizer::make_job(grad::Reducer& gradients, double lr,
                                    double gradient_scale) const {
  gradients.wait();  // stored ones are read on another thread
  UpdateJob job;
  job.gradients = &gradients;
  job.items.resize(static_cast<std::size_t>(params_.num_params()));
  for (int id = 0; id < params_.num_params(); ++id) {
    const shard::Param& param = params_[id];
    if (!param.trainable()) {
      continue;
    }
    const auto index = static_cast<std::size_t>(id);
    const StoredParts& stored = parts_.stored[index];
    TESSERA_INVARIANT(gradients.is_stored(id) == stored.gradient, "the gradient of parameter '",
                      param.name(), "' is not where it was planned");
    const grad::ShardGradient gradient = gradients.shard_gradient(id);
    TESSERA_INVARIANT(gradient.numel == param.range().numel, "gradient of ", param.name(), " has ",
                      gradient.numel, " elements on this rank, its shard ", param.range().numel);
    UpdateJob::Item& item = job.items[index];
    item.scalars.step = states_.num_updates(id) + 1;
    item.scalars.lr = lr;
    item.scalars.weight_decay_scale = param.spec().weight_decay_scale;
    item.scalars.gradient_scale = gradient_scale;
    item.gradient = gradient.data;
    item.shard = stored.parameter ? nullptr : param.shard();
    item.done = std::make_shared<ParamUpdate>();
  }
  for (const SubGroup& group : plan().groups) {
    for (const SubGroupPiece& piece : group.pieces) {
      ++job.items[static_cast<std::size_t>(piece.param)].num_pieces_left;
    }
  }
  std::vector<device::Pending> before;
  for (const device::StreamKind kind :
       {device::StreamKind::kCompute, device::StreamKind::kGather, device::StreamKind::kReduce}) {
    before.push_back(device_.stream(kind).record());
  }
  job.may_start = device::Pending::all(std::move(before));
  return job;
}

void TieredOptimizer::start_update(grad::Reducer& gradients, double lr, double gradient_scale) {
  pipeline_->check();
  UpdateJob job = make_job(gradients, lr, gradient_scale);
  ++num_updates_;
  for (int id = 0; id < params_.num_params(); ++id) {
    const UpdateJob::Item& item = job.items[static_cast<std::size_t>(id)];
    if (!item.done) {
      continue;
    }
    if (item.num_pieces_left == 0) {
      item.done->finish({});  // a shard without elements
    }
    params_[id].set_updated(device::Pending(item.done));
    states_.count_update(id);
  }
  pipeline_->start(std::move(job));
}

void TieredOptimizer::settle() {
  pipeline_->wait();
  pipeline_->drop_leases();
}

void TieredOptimizer::follow_trainable(int param) {
  settle();
  if (params_[param].trainable() && !states_.has(param)) {
    states_.add(param);
    states_.make_master(param);
  }
  pipeline_->set_plan(states_.plan());
}

void TieredOptimizer::reset_master(int param) {
  settle();
  if (states_.has(param)) {
    states_.make_master(param);
  }
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
  if (!states_.has(param)) {
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
    if (own_master) {
      return {reinterpret_cast<float*>(owner.shard()), numel};
    }
  } else {
    const auto names = state_names(rule_);
    const auto found = std::find(names.begin(), names.end(), name);
    TESSERA_INVARIANT(found != names.end(), owner.name(), " has no state \"", name, "\" under ",
                      to_string(rule_.kind));
    tensor = static_cast<std::size_t>(found - names.begin()) + (own_master ? 0 : 1);
  }
  if (stored.states) {
    return copy_of(param, [&](float* to) { states_.read(param, tensor, to); });
  }
  return {states_.in_memory(param, tensor), numel};
}

}  // namespace tessera::optim
