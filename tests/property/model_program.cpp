#include "tests/property/model_program.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/module.h>

#include "tessera/shard/tensor_storage.h"

namespace tessera::testing {
namespace {

constexpr double kInitDeviation = 0.3;

// What all units do; the signatures of their modules differ.
class Block : public torch::nn::Module {
 public:
  // `tensors`: by slot. `inner`: by unit of the model.
  Block(const UnitPlan& plan, std::vector<at::Tensor> tensors,
        const std::vector<ModelProgram::Call>& inner, std::shared_ptr<Interrupter> interrupter,
        std::shared_ptr<SideEffects> side_effects, bool groups_gradients, const at::Tensor& start)
      : plan_(plan),
        tensors_(std::move(tensors)),
        inner_(inner),
        interrupter_(std::move(interrupter)),
        side_effects_(std::move(side_effects)),
        groups_gradients_(groups_gradients && plan.recompute) {
    if (has_running()) {
      running_ = register_buffer("running", start);
      side_effects_->buffers.push_back(running_);
    }
    for (std::size_t i = 0; i < plan_.slots.size(); ++i) {
      if (plan_.slots[i].link != Link::kExternal) {
        register_parameter("p" + std::to_string(i), tensors_[i], tensors_[i].requires_grad());
      }
    }
  }

 protected:
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& arguments, const at::Tensor& ids) {
    const bool is_segment = groups_gradients_ && at::GradMode::is_enabled();
    if (!is_segment) {
      return run_inside(arguments, ids, plan_.keeps);
    }
    // What a recomputed forward keeps has a graph of its own, beside that of the second forward.
    if (plan_.keeps && !plan_.ops.empty()) {
      const std::vector<at::Tensor> before = values_of(side_effects_->buffers);
      keep(apply(plan_.ops[0], sum_of(arguments), ids));
      assign(side_effects_->buffers, before);
    }
    SegmentAliases& aliases = side_effects_->aliases;
    aliases.begin();
    std::vector<at::Tensor> inside;
    for (const at::Tensor& argument : arguments) {
      inside.push_back(aliases.of_argument(argument));
    }
    std::vector<at::Tensor> results = run_inside(inside, ids, /*keeps=*/false);
    for (at::Tensor& result : results) {
      for (std::size_t i = 0; i < arguments.size(); ++i) {
        if (result.is_same(inside[i])) {
          result = arguments[i];  // what came in is handed back as it is
        }
      }
    }
    aliases.end();
    return results;
  }

 private:
  bool has_running() const {
    return std::any_of(plan_.ops.begin(), plan_.ops.end(),
                       [](const OpPlan& op) { return op.kind == OpKind::kRunning; });
  }

  static at::Tensor sum_of(const std::vector<at::Tensor>& arguments) {
    at::Tensor h = arguments[0];
    for (std::size_t i = 1; i < arguments.size(); ++i) {
      h = h + arguments[i] * 0.5;
    }
    return h;
  }

  void keep(const at::Tensor& h) { side_effects_->kept.push_back(at::tanh(h).mean()); }

  std::vector<at::Tensor> run_inside(const std::vector<at::Tensor>& arguments,
                                     const at::Tensor& ids, bool keeps) {
    at::Tensor h = sum_of(arguments);
    const bool interrupts = interrupter_->runs_left == 1;
    if (interrupter_->runs_left > 0) {
      --interrupter_->runs_left;
    }
    if (interrupts && !interrupter_->in_backward) {
      throw Interruption();
    }
    for (std::size_t i = 0; i < plan_.ops.size(); ++i) {
      h = apply(plan_.ops[i], h, ids);
      if (i == 0 && keeps) {
        keep(h);
      }
    }
    if (interrupter_->is_armed && interrupter_->in_backward) {
      h = h * 1;  // not somebody else's tensor; in every run, since two of them must be alike
    }
    if (interrupts && h.requires_grad()) {
      h.register_hook([](const at::Tensor&) -> void { throw Interruption(); });
    }
    std::vector<at::Tensor> results{h};
    if (plan_.num_results() > 1) {
      results.push_back(at::tanh(h));
    }
    if (plan_.hands_input_back) {
      results.push_back(arguments[0]);
    }
    return results;
  }

  at::Tensor tensor(const OpPlan& op, std::size_t i) const {
    return side_effects_->aliases.of(tensors_[static_cast<std::size_t>(op.slots[i])]);
  }

  at::Tensor apply(const OpPlan& op, const at::Tensor& h, const at::Tensor& ids) const {
    switch (op.kind) {
      case OpKind::kLinear:
        return op.slots.size() > 1 ? at::linear(h, tensor(op, 0), tensor(op, 1))
                                   : at::linear(h, tensor(op, 0));
      case OpKind::kScale:
        return h * tensor(op, 0);
      case OpKind::kShift:
        return h + tensor(op, 0);
      case OpKind::kLookup:
        return h + at::embedding(tensor(op, 0), ids.remainder(tensor(op, 0).size(0)));
      case OpKind::kNorm:
        return at::layer_norm(h, {h.size(1)}, tensor(op, 0), tensor(op, 1));
      case OpKind::kEmptySum:
        return h + tensor(op, 0).sum();
      case OpKind::kTwice:
        return at::linear(at::tanh(at::linear(h, tensor(op, 0))), tensor(op, 0));
      case OpKind::kNarrow:
        return at::linear(h, tensor(op, 0).narrow(0, 1, tensor(op, 0).size(0) - 2));
      case OpKind::kActivation:
        return at::gelu(h);
      case OpKind::kInner:
        return inner_[static_cast<std::size_t>(op.unit)]({h}, ids)[0];
      case OpKind::kRunning:
        if (at::GradMode::is_enabled()) {
          const at::NoGradGuard no_grad;
          running_.mul_(0.5).add_(h.detach().mean(), 0.5);
        }
        return h + running_;
    }
    return h;
  }

  const UnitPlan plan_;
  const std::vector<at::Tensor> tensors_;
  at::Tensor running_;
  const std::vector<ModelProgram::Call> inner_;
  const std::shared_ptr<Interrupter> interrupter_;
  const std::shared_ptr<SideEffects> side_effects_;
  const bool groups_gradients_;
};

struct TensorBlock : Block {
  using Block::Block;
  at::Tensor forward(const at::Tensor& x, const at::Tensor& ids) { return run({x}, ids)[0]; }
};

struct TupleBlock : Block {
  using Block::Block;
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x,
                                             const std::optional<at::Tensor>& y,
                                             const at::Tensor& ids) {
    const auto results = run(y ? std::vector<at::Tensor>{x, *y} : std::vector<at::Tensor>{x}, ids);
    return {results[0], results[1]};
  }
};

struct VectorBlock : Block {
  using Block::Block;
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& arguments, const at::Tensor& ids) {
    return run(arguments, ids);
  }
};

struct MapBlock : Block {
  using Block::Block;
  std::map<std::string, at::Tensor> forward(const std::map<std::string, at::Tensor>& named,
                                            const at::Tensor& ids) {
    std::vector<at::Tensor> arguments;
    for (const auto& [name, tensor] : named) {
      arguments.push_back(tensor);
    }
    const auto results = run(arguments, ids);
    return {{"first", results[0]}, {"second", results[1]}};
  }
};

// Nobody can look into it.
struct Parcel {
  at::Tensor first;
  std::vector<at::Tensor> rest;
};
struct StructBlock : Block {
  using Block::Block;
  at::Tensor forward(const Parcel& parcel, const at::Tensor& ids) {
    std::vector<at::Tensor> arguments{parcel.first};
    arguments.insert(arguments.end(), parcel.rest.begin(), parcel.rest.end());
    return run(arguments, ids)[0];
  }
};

ModelProgram::Call call_of(const Unit<MapBlock>& unit) {
  return [unit](const std::vector<at::Tensor>& arguments, const at::Tensor& ids) {
    std::map<std::string, at::Tensor> named;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      named.emplace(std::string(1, static_cast<char>('a' + i)), arguments[i]);
    }
    const auto results = unit(named, ids);
    return std::vector<at::Tensor>{results.at("first"), results.at("second")};
  };
}
ModelProgram::Call call_of(const Unit<StructBlock>& unit) {
  return [unit](const std::vector<at::Tensor>& arguments, const at::Tensor& ids) {
    return std::vector<at::Tensor>{
        unit(Parcel{arguments[0], {arguments.begin() + 1, arguments.end()}}, ids)};
  };
}
ModelProgram::Call call_of(const Unit<TensorBlock>& unit) {
  return [unit](const std::vector<at::Tensor>& arguments, const at::Tensor& ids) {
    return std::vector<at::Tensor>{unit(arguments[0], ids)};
  };
}
ModelProgram::Call call_of(const Unit<TupleBlock>& unit) {
  return [unit](const std::vector<at::Tensor>& arguments, const at::Tensor& ids) {
    std::optional<at::Tensor> second;
    if (arguments.size() > 1) {
      second = arguments[1];
    }
    auto [first_result, second_result] = unit(arguments[0], second, ids);
    return std::vector<at::Tensor>{first_result, second_result};
  };
}
ModelProgram::Call call_of(const Unit<VectorBlock>& unit) {
  return [unit](const std::vector<at::Tensor>& arguments, const at::Tensor& ids) {
    return unit(arguments, ids);
  };
}

// Autocast for the calling thread. Without its cache, which would have one cast for all uses of a
// weight where the engine has one for each.
class AutocastGuard {
 public:
  explicit AutocastGuard(bool enabled) : enabled_(enabled) {
    if (enabled_) {
      at::autocast::set_autocast_enabled(at::kCPU, true);
      at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
      at::autocast::set_autocast_cache_enabled(false);
    }
  }
  ~AutocastGuard() {
    if (enabled_) {
      at::autocast::set_autocast_enabled(at::kCPU, false);
      at::autocast::set_autocast_cache_enabled(cache_);
    }
  }
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  const bool enabled_;
  const bool cache_ = at::autocast::is_autocast_cache_enabled();
};

at::Tensor loss_of(const at::Tensor& value, int form) {
  switch (form) {
    case 0:
      return value.pow(2).mean();
    case 1:
      return (value * at::arange(value.numel(), value.options()).cos().reshape(value.sizes()))
          .sum();
    default:
      return value.mean();
  }
}

}  // namespace

ModelProgram::ModelProgram(const ModelPlan& plan, const BuildOptions& options)
    : plan_(plan), options_(options), params_(plan.params.size()) {
  for (const UnitPlan& unit : plan_.units) {
    add_unit(unit);
  }
  for (const WeightLossPlan& loss : plan_.weight_losses) {
    add_weight_loss(loss);
  }
}

void ModelProgram::to(at::ScalarType type) const {
  const at::NoGradGuard no_grad;
  for (const std::vector<at::Tensor>* tensors : {&params(), &buffers()}) {
    for (const at::Tensor& tensor : *tensors) {
      at::Tensor(tensor).set_data(tensor.detach().to(type));
    }
  }
}

at::Tensor ModelProgram::make_value(std::size_t index, const UnitPlan& unit) const {
  const ParamPlan& param = plan_.params[index];
  std::int64_t numel = 1;
  for (const std::int64_t size : param.shape) {
    numel *= size;
  }
  at::Tensor elements =
      (at::arange(numel, at::kFloat) * 0.37 + static_cast<double>(index)).sin() * 0.5;
  elements.add_(options_.shift);
  if (unit.init_by_rule && options_.engine == nullptr && numel > 0) {
    fill_initial(Init::normal(kInitDeviation), plan_.seed, param.name, {0, numel}, DType::kFloat32,
                 elements.data_ptr());
  }
  // Elements are numbered as they lie in memory.
  at::Tensor value = param.transposed ? elements.reshape({param.shape[1], param.shape[0]}).t()
                                      : elements.reshape(param.shape);
  return value.to(value_type());
}

template <typename Module>
ModelProgram::Call ModelProgram::wrap(const UnitPlan& plan) {
  std::vector<at::Tensor> tensors;
  for (const SlotPlan& slot : plan.slots) {
    tensors.push_back(params_[static_cast<std::size_t>(slot.param)]);
  }
  auto module = std::make_shared<Module>(plan, std::move(tensors), units_, interrupter_,
                                         side_effects_, options_.groups_gradients,
                                         at::full({1}, 0.25 + options_.shift, value_type()));
  std::vector<at::Tensor> elsewhere;  // used, and not registered
  for (const SlotPlan& slot : plan.slots) {
    if (slot.link == Link::kExternal) {
      elsewhere.push_back(params_[static_cast<std::size_t>(slot.param)]);
    }
  }
  if (options_.engine == nullptr) {
    return call_of(Unit<Module>(module, plan.recompute && options_.recompute));
  }
  UnitOptions unit_options;
  unit_options.recompute = plan.recompute;
  if (plan.init_by_rule) {
    unit_options.init = [](const std::string&) { return Init::normal(kInitDeviation); };
  }
  Unit<Module> unit = options_.engine->unit(plan.name, module, unit_options);
  for (const at::Tensor& param : elsewhere) {
    options_.engine->add_external(unit, param);
  }
  return call_of(unit);
}

void ModelProgram::add_unit(const UnitPlan& unit) {
  for (const SlotPlan& slot : unit.slots) {
    const auto index = static_cast<std::size_t>(slot.param);
    if (slot.link == Link::kOwn) {
      params_[index] = make_value(index, unit);
      params_[index].set_requires_grad(plan_.params[index].trainable);
    }
  }
  switch (unit.signature) {
    case Signature::kTensor:
      units_.push_back(wrap<TensorBlock>(unit));
      return;
    case Signature::kTuple:
      units_.push_back(wrap<TupleBlock>(unit));
      return;
    case Signature::kVector:
      units_.push_back(wrap<VectorBlock>(unit));
      return;
    case Signature::kMap:
      units_.push_back(wrap<MapBlock>(unit));
      return;
    case Signature::kStruct:
      units_.push_back(wrap<StructBlock>(unit));
      return;
  }
}

void ModelProgram::add_weight_loss(const WeightLossPlan& loss) {
  const at::Tensor param = params_[static_cast<std::size_t>(loss.param)];
  const auto decay = [param] { return param.pow(2).sum() * 0.125; };
  using Function = FunctionModule<std::decay_t<decltype(decay)>>;
  UnitOptions unit_options;
  unit_options.recompute = loss.recompute;
  Unit<Function> unit(std::make_shared<Function>(decay, std::vector<at::Tensor>{param}),
                      loss.recompute && options_.recompute);
  if (options_.engine != nullptr) {
    unit = options_.engine->function("weight" + std::to_string(weight_losses_.size()), {param},
                                     decay, unit_options);
  }
  weight_losses_.push_back([unit] { return unit(); });
}

std::vector<at::Tensor> ModelProgram::call(int unit, std::vector<at::Tensor> arguments,
                                           const at::Tensor& ids) const {
  const UnitPlan& plan = plan_.units[static_cast<std::size_t>(unit)];
  arguments.resize(std::min(arguments.size(), plan.most_arguments()));
  return units_[static_cast<std::size_t>(unit)](arguments, ids);
}

at::Tensor ModelProgram::input_of(const Batch& batch) const {
  at::Tensor input = batch.values.clone().to(params_[0].scalar_type());
  input.set_requires_grad(plan_.input_needs_gradient);
  if (plan_.input_needs_gradient) {
    inputs_.push_back(input);
  }
  return input;
}

std::vector<at::Tensor> ModelProgram::take_input_gradients() const {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& input : std::exchange(inputs_, {})) {
    gradients.push_back(input.grad());
  }
  return gradients;
}

at::Tensor ModelProgram::input_gradient(const Batch& batch, const Moment& moment) const {
  const at::Tensor input =
      batch.values.clone().to(params_[0].scalar_type()).set_requires_grad(true);
  at::Tensor sum;
  for (const at::Tensor& loss : losses(input, batch.ids, moment)) {
    sum = sum.defined() ? sum + loss : loss;
  }
  return torch::autograd::grad({sum}, {input}, {}, /*retain_graph=*/false, /*create_graph=*/false,
                               /*allow_unused=*/true)[0];
}

std::vector<at::Tensor> ModelProgram::losses(const at::Tensor& input, const at::Tensor& ids,
                                             const Moment& moment) const {
  const AutocastGuard autocast(plan_.autocast);
  side_effects_->kept.clear();
  std::vector<at::Tensor> more;  // losses beside those of the plan
  std::vector<at::Tensor> values{input};
  for (std::size_t i = 0; i < plan_.calls.size(); ++i) {
    const CallPlan& plan = plan_.calls[i];
    std::vector<at::Tensor> arguments;
    for (const int argument : plan.arguments) {
      arguments.push_back(values[static_cast<std::size_t>(argument)]);
    }
    std::vector<at::Tensor> results{arguments[0]};
    if (happens(plan_, i, moment)) {
      results = call(plan.unit, std::move(arguments), ids);
    } else if (plan.otherwise >= 0) {
      results = call(plan.otherwise, std::move(arguments), ids);
    }
    // What a unit keeps can be differentiated while the unit is there for its results' sake.
    if (plan_.units[static_cast<std::size_t>(plan.unit)].keeps ||
        (plan.otherwise >= 0 && plan_.units[static_cast<std::size_t>(plan.otherwise)].keeps)) {
      more.push_back(loss_of(results[0], 2));
    }
    const auto wanted =
        static_cast<std::size_t>(plan_.units[static_cast<std::size_t>(plan.unit)].num_results());
    for (std::size_t r = 0; r < wanted; ++r) {
      values.push_back(results[r < results.size() ? r : 0]);
    }
  }
  const auto head = static_cast<int>(plan_.units.size()) - 1;
  std::vector<at::Tensor> found{
      loss_of(call(head, {values[static_cast<std::size_t>(plan_.head_argument)]}, ids)[0], 0)};
  for (const LossPlan& loss : plan_.losses) {
    const at::Tensor value = loss_of(values[static_cast<std::size_t>(loss.value)], loss.form);
    if (value.requires_grad() || !at::GradMode::is_enabled()) {
      found.push_back(value);
    }
  }
  more.insert(more.end(), side_effects_->kept.begin(), side_effects_->kept.end());
  for (const at::Tensor& value : more) {
    if (value.requires_grad() || !at::GradMode::is_enabled()) {
      found.push_back(value);
    }
  }
  for (const auto& weight_loss : weight_losses_) {
    const at::Tensor value = weight_loss();
    if (value.requires_grad() || !at::GradMode::is_enabled()) {
      found.push_back(value);
    }
  }
  return found;
}

at::Tensor SegmentAliases::alias(Segment& segment, const at::Tensor& tensor) {
  if (!tensor.requires_grad()) {
    return tensor;
  }
  at::Tensor& alias = segment[tensor.unsafeGetTensorImpl()];
  if (!alias.defined()) {
    alias = at::alias(tensor);  // with its strides: kernels look at them
  }
  return alias;
}

at::Tensor SegmentAliases::of(at::Tensor param) {
  for (Segment& segment : segments_) {
    param = alias(segment, param);
  }
  return param;
}

std::vector<at::Tensor> values_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> values;
  for (const at::Tensor& tensor : tensors) {
    values.push_back(tensor.detach().clone());
  }
  return values;
}

void assign(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& values) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    tensors[i].copy_(values[i]);
  }
}

}  // namespace tessera::testing
