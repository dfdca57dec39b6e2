#include "models/plain_trainer.h"

#include <array>
#include <cmath>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "tessera/core/error.h"
#include "tessera/optim/clip.h"
#include "tessera/optim/loss_scale.h"
#include "tessera/optim/rule.h"
#include "tessera/optim/schedule.h"
#include "tessera/shard/tensor_storage.h"

namespace tessera::models {
namespace {

// A trained parameter.
struct Slot {
  std::string name;
  at::Tensor param;
  DType dtype = DType::kFloat32;
  at::Tensor master;    // the parameter itself where that is fp32
  at::Tensor gradient;  // of all micro-batches, fp32; undefined: none came
  std::array<at::Tensor, optim::kMaxStates> states;
  std::int64_t num_updates = 0;
};

// In fp16 weights are used in units of it. A power of two changes no bit of a gradient, and brings
// token counts, which gradients would have to carry, near one.
double power_of_two_from(double weight) {
  int exponent = 0;
  const double fraction = std::frexp(weight, &exponent);  // in [0.5, 1)
  return std::ldexp(1.0, fraction == 0.5 ? exponent - 1 : exponent);
}

// Of the parameters, which have one type.
DType dtype_of(const std::vector<NamedParam>& params) {
  return params.empty() ? DType::kFloat32
                        : shard::dtype_of(params.front().tensor, params.front().name);
}

}  // namespace

struct PlainTrainer::Impl {
  Impl(const Config& config, optim::Kernels& update_kernels, device::Device& on_device,
       const EngineOptions& options, DType dtype)
      : kernels(update_kernels),
        compute(on_device.stream(device::StreamKind::kCompute)),
        rule(optim::RuleOptions::from(config)),
        schedule(optim::ScheduleOptions::from(config, options.run_steps)),
        loss_scale(optim::LossScaleOptions::from(config, dtype)),
        clip_norm(config.get_double("grad.clip_norm")),
        skip_nonfinite(config.get_bool("grad.skip_nonfinite")) {}

  void add(const NamedParam& param);
  void take_gradients();
  void forget_gradients();
  double sum_of_squares();
  void update(double lr, double gradient_scale);

  optim::Kernels& kernels;
  device::Stream& compute;
  const optim::RuleOptions rule;
  const optim::ScheduleOptions schedule;
  optim::LossScale loss_scale;
  const double clip_norm;
  const bool skip_nonfinite;

  std::vector<at::Tensor> params;  // of the model
  std::vector<Slot> slots;         // of those that are trained, in the same order
  double weight_scale = 0;         // 0: before the first backward
  std::int64_t num_steps = 0;

  // Of this step, in units of weight_scale.
  double weight_sum = 0;
  at::Tensor weighted_loss;  // fp64, on the device: reading it would hold up the host
};

void PlainTrainer::Impl::add(const NamedParam& param) {
  params.push_back(param.tensor);
  if (!param.tensor.requires_grad()) {
    return;
  }
  TESSERA_CHECK(param.tensor.is_contiguous(), ConfigError, param.name,
                " is not contiguous: plain training reads parameters as they lie in memory");
  Slot slot;
  slot.name = param.name;
  slot.param = param.tensor;
  slot.dtype = shard::dtype_of(param.tensor, param.name);
  slot.master = param.tensor.detach().to(at::kFloat);
  for (std::size_t i = 0; i < optim::state_names(rule).size(); ++i) {
    slot.states[i] = at::zeros_like(slot.master);
  }
  slots.push_back(std::move(slot));
}

// Low precision is widened after every micro-batch, so that sums over them are made in fp32. An
// fp32 gradient stays with autograd, which adds the next one to it.
void PlainTrainer::Impl::take_gradients() {
  const at::NoGradGuard no_grad;
  for (Slot& slot : slots) {
    at::Tensor& grad = slot.param.mutable_grad();
    if (!grad.defined() || slot.dtype == DType::kFloat32) {
      continue;
    }
    if (slot.gradient.defined()) {
      slot.gradient.add_(grad.to(at::kFloat));
    } else {
      slot.gradient = grad.to(at::kFloat);
    }
    grad.reset();
  }
}

// Undefined, not zero: autograd then hands the next gradient over in place of copying it.
void PlainTrainer::Impl::forget_gradients() {
  for (Slot& slot : slots) {
    slot.gradient.reset();
    slot.param.mutable_grad().reset();
  }
  weight_sum = 0;
  weighted_loss.reset();
}

double PlainTrainer::Impl::sum_of_squares() {
  std::vector<double> squares(slots.size());
  std::vector<device::Pending> pending;
  pending.reserve(slots.size());
  for (std::size_t i = 0; i < slots.size(); ++i) {
    Slot& slot = slots[i];
    if (slot.dtype == DType::kFloat32) {
      slot.gradient = slot.param.mutable_grad();
    }
    if (!slot.gradient.defined()) {
      continue;  // not used in this step
    }
    TESSERA_INVARIANT(slot.gradient.is_contiguous(), slot.name, " has a gradient with strides ",
                      slot.gradient.strides());
    pending.push_back(kernels.start_sum_of_squares(slot.gradient.const_data_ptr<float>(),
                                                   slot.gradient.numel(), &squares[i], compute));
  }
  device::Pending::all(std::move(pending)).wait();
  double sum = 0;
  for (const double square : squares) {
    sum += square;
  }
  return sum;
}

void PlainTrainer::Impl::update(double lr, double gradient_scale) {
  optim::UpdateScalars scalars;
  scalars.lr = lr;
  scalars.gradient_scale = gradient_scale;
  std::vector<device::Pending> pending;
  pending.reserve(slots.size());
  for (Slot& slot : slots) {
    if (!slot.gradient.defined()) {
      continue;  // as torch's optimizers do: no decay, no momentum, no step
    }
    scalars.step = ++slot.num_updates;
    optim::UpdateSpan span;
    span.master = static_cast<float*>(slot.master.mutable_data_ptr());
    span.gradient = slot.gradient.const_data_ptr();
    for (std::size_t i = 0; i < slot.states.size() && slot.states[i].defined(); ++i) {
      span.states[i] = static_cast<float*>(slot.states[i].mutable_data_ptr());
    }
    if (slot.dtype != DType::kFloat32) {
      span.parameter = slot.param.mutable_data_ptr();
      span.parameter_dtype = slot.dtype;
    }
    span.numel = slot.master.numel();
    pending.push_back(kernels.start_update(rule, scalars, span, compute));
  }
  // Gradients are given back next: their memory is used again in the order of this stream.
  compute.wait(device::Pending::all(std::move(pending)));
}

PlainTrainer::PlainTrainer(const std::vector<NamedParam>& params, const Config& config,
                           optim::Kernels& kernels, device::Device& device,
                           const EngineOptions& options)
    : impl_(std::make_unique<Impl>(config, kernels, device, options, dtype_of(params))) {
  for (const NamedParam& param : params) {
    impl_->add(param);
  }
}

PlainTrainer::~PlainTrainer() = default;

std::vector<at::Tensor> PlainTrainer::masters() const {
  std::vector<at::Tensor> result;
  auto slot = impl_->slots.begin();
  for (const at::Tensor& param : impl_->params) {
    const bool trained = slot != impl_->slots.end() && slot->param.is_same(param);
    result.push_back(trained ? (slot++)->master.detach() : param.detach().to(at::kFloat));
  }
  return result;
}

void PlainTrainer::backward(const at::Tensor& loss, double weight) {
  TESSERA_CHECK(loss.defined() && loss.numel() == 1 && loss.requires_grad(), ConfigError,
                "backward() needs a loss of one number that depends on a trained parameter");
  TESSERA_CHECK(std::isfinite(weight) && weight >= 0, ConfigError, "backward(): weight ", weight,
                " is not a finite number from 0 up");
  Impl& impl = *impl_;
  if (impl.weight_scale == 0) {
    TESSERA_CHECK(weight > 0, ConfigError, "backward(): the first weight is zero; give the first ",
                  "micro-batch a weight");
    const bool is_fp16 = !impl.slots.empty() && impl.slots.front().dtype == DType::kFloat16;
    impl.weight_scale = is_fp16 ? power_of_two_from(weight) : 1;
  }
  const double scaled_weight = weight / impl.weight_scale;
  try {
    const double factor = scaled_weight * impl.loss_scale.value();
    loss.backward(factor == 1 ? at::Tensor() : at::full_like(loss.detach(), factor));
    impl.take_gradients();
  } catch (...) {
    impl.forget_gradients();  // half a micro-batch is none
    throw;
  }
  impl.weight_sum += scaled_weight;
  const at::Tensor weighted = loss.detach().to(at::kDouble) * scaled_weight;
  impl.weighted_loss = impl.weighted_loss.defined() ? impl.weighted_loss + weighted : weighted;
}

StepResult PlainTrainer::step() {
  Impl& impl = *impl_;
  TESSERA_CHECK(impl.weighted_loss.defined(), ConfigError,
                "step() without a backward since the last step; call backward(loss) first");
  optim::StepSums sums;
  sums.gradient_squares = impl.sum_of_squares();
  sums.weight = impl.weight_sum;
  sums.weighted_loss = impl.weighted_loss.item<double>();
  const optim::StepFactors factors =
      optim::step_factors(sums, impl.loss_scale.value(), impl.clip_norm);

  StepResult result;
  const std::int64_t num_before = impl.num_steps++;
  result.step = num_before + 1;
  result.skipped = !factors.finite && impl.skip_nonfinite;
  result.loss = factors.loss;
  result.grad_norm = factors.grad_norm;
  result.lr = optim::learning_rate(impl.schedule, num_before);
  result.loss_scale = impl.loss_scale.value();
  result.weight = sums.weight * impl.weight_scale;
  if (!result.skipped) {
    impl.update(result.lr, factors.gradient_scale);
  }
  impl.forget_gradients();
  impl.loss_scale.update(factors.finite);
  return result;
}

}  // namespace tessera::models
