#include "tessera/engine/engine_impl.h"

#include <cmath>
#include <exception>
#include <string>
#include <string_view>
#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "tessera/comm/rendezvous.h"
#include "tessera/core/error.h"
#include "tessera/engine/build_scope.h"
#include "tessera/engine/host_tier_device.h"

namespace tessera {
namespace {

// At or above `value`, which is positive.
double power_of_two_above(double value) {
  int exponent = 0;
  const double fraction = std::frexp(value, &exponent);  // in [0.5, 1)
  return std::ldexp(1.0, fraction == 0.5 ? exponent - 1 : exponent);
}

// The memory order of its parameter, without holes: what a bucket copies.
at::Tensor in_memory_order_of(const at::Tensor& tensor, at::Tensor gradient) {
  if (gradient.strides() == tensor.strides() || gradient.numel() <= 1) {
    return gradient;
  }
  return at::empty_strided(tensor.sizes(), tensor.strides(), gradient.options()).copy_(gradient);
}

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

}  // namespace

Engine::Impl::Impl(Runtime& given, const EngineOptions& options)
    : runtime(given),
      shard_device(choose_shard_device(given)),
      params(choose_group(given).rank(), choose_group(given).size(),
             shard_device ? *shard_device : given.device()),
      tiers(given, choose_group(given), params, options.shapes),
      group_(choose_group(given)),
      coordinator_(std::make_unique<coordinator::Coordinator>(
          coordinator::CoordinatorParts{group_, given.device(), params, given.clock(),
                                        given.spans(), given.logger()},
          coordinator::CoordinatorOptions::from(given.config()))),
      watch_(std::make_shared<engine::BackwardWatch>(*this)),
      gathered_(*this),
      schedule_(optim::ScheduleOptions::from(given.config(), options.run_steps)),
      clip_norm_(given.config().get_double("grad.clip_norm")),
      skip_nonfinite_(given.config().get_bool("grad.skip_nonfinite")),
      num_micro_batches_(given.config().get_int("batch.accumulate")),
      seed_(static_cast<std::uint64_t>(given.config().get_int("seed"))) {
  if (&group_ != &runtime.group()) {
    // Reductions must not stand in one order with gathers: see Runtime::reduce_group().
    reductions_ = group_.split(0, group_.name() + ".reduce");
  }
  tiers.reserve_staging(reduce_group());  // if the plan is made already
  if (!schedule_.notice.empty()) {
    runtime.logger().info(schedule_.notice);
  }
}

Engine::Impl::~Impl() {
  try {
    finish_update();  // it reads gradients that go before it does
  } catch (const std::exception& error) {
    runtime.logger().warn("the last update failed: ", error.what());
  }
  tiers.release_staging(reduce_group());
  if (resident_) {
    resident_->engine = nullptr;
  }
  watch_->detach();
  for (const auto& unit : units_) {
    unit->detach();
  }
  for (const at::Tensor& tensor : tensors) {
    torch::autograd::impl::set_post_acc_grad_hooks(tensor, nullptr);
  }
}

void Engine::Impl::agree_on_weight_scale(double weight) {
  if (weight_scale_ == 0) {
    coordinator_->meet(coordinator::MeetingPoint::kWeights);
    find_weight_scale(weight);
  }
}

void Engine::Impl::find_weight_scale(double weight) {
  // Gradients keep their usual size, which matters in fp16, and since it is a power of two no bit
  // of the result depends on it.
  const auto host = runtime.device().allocate(Tier::kDevice, sizeof(double), Role::kStaging);
  device::Stream& stream = runtime.device().stream(device::StreamKind::kReduce);
  double largest = weight;
  runtime.device().start_copy(host.data(), &largest, sizeof(double), stream).wait();
  comm::CallOptions call;
  call.label.unit = "weight of the first backward";
  call.stream = &stream;
  group().start_all_reduce(host.data(), 1, DType::kFloat64, comm::Reduction::kMax, call).wait();
  runtime.device().start_copy(&largest, host.data(), sizeof(double), stream).wait();
  TESSERA_CHECK(largest > 0, ConfigError,
                "the weights of all ranks are zero in the first backward; give at least one "
                "rank's micro-batch a weight");
  weight_scale_ = power_of_two_above(largest);
}

void Engine::Impl::backward(const std::vector<at::Tensor>& losses, double weight) {
  TESSERA_CHECK(!losses.empty(), ConfigError, "backward: no loss was given");
  TESSERA_CHECK(std::isfinite(weight) && weight >= 0, ConfigError, "backward: weight=", weight,
                "; a weight is a number of tokens or samples: finite, and not negative");
  for (const at::Tensor& loss : losses) {
    TESSERA_CHECK(loss.defined() && loss.numel() == 1, ConfigError,
                  "backward: the loss must be one number, it has ",
                  loss.defined() ? loss.numel() : 0, " elements; take its mean or sum");
    TESSERA_CHECK(loss.requires_grad(), ConfigError,
                  "backward: the loss does not depend on any trainable parameter");
  }
  begin_pass();
  check_not_resident("backward()");
  finish_update();
  if (reducer_->num_backwards() == 0) {
    optimizer->prepare();
  }
  tiers.begin_backward(reducer_->num_backwards() + 1 == num_micro_batches_);
  agree_on_weight_scale(weight);
  const double factor = weight / weight_scale_ * loss_scale_->value();
  std::vector<at::Tensor> gradients;
  gradients.reserve(losses.size());
  for (const at::Tensor& loss : losses) {
    gradients.push_back(at::full_like(loss, factor));
  }
  ++backward_depth_;
  ++runtime.num_backwards();
  const std::shared_ptr<void> counted(nullptr, [this](void*) { --runtime.num_backwards(); });
  try {
    {
      const device::StreamSpan span(runtime.device().stream(device::StreamKind::kCompute),
                                    "backward");
      torch::autograd::backward(losses, gradients);
    }
    if (backward_depth_ == 1) {
      close_backward();
      coordinator_->meet(coordinator::MeetingPoint::kBackwardEnd);
      reducer_->finish_backward();
    }
    --backward_depth_;
  } catch (...) {
    abandon();
    rethrow_backward_error();
  }
  trainable_is_known_ = false;
  const at::NoGradGuard no_grad;
  weight_sum_ += weight / weight_scale_;
  for (const at::Tensor& loss : losses) {
    const at::Tensor term = loss.detach().to(at::kDouble).reshape({}) * (weight / weight_scale_);
    weighted_loss_ = weighted_loss_.defined() ? weighted_loss_ + term : term;
  }
}

void Engine::Impl::check_usable() {
  gathered_.check_failure();
  TESSERA_CHECK(!is_plain_, ConfigError,
                "the engine has given its parameters back (to_plain()) and cannot train them; make "
                "a new engine and its units to go on");
}

void Engine::Impl::begin_pass() {
  check_usable();
  seal();
  if (!trainable_is_known_) {
    notice_trainable();
  }
  // A backward that was not ours and failed has not run its callbacks.
  if (closing_is_queued_ && torch::autograd::get_current_graph_task_id() < 0) {
    abandon();
  }
}

void Engine::Impl::enter_backward() {
  check_not_resident("a backward");
  TESSERA_CHECK(!at::GradMode::is_enabled(), ConfigError,
                "create_graph is set: a second derivative would read weights after their release; "
                "sharded parameters do not support it");
  if (backward_depth_ == 0 && !closing_is_queued_) {
    closing_is_queued_ = true;
    torch::autograd::Engine::get_default_engine().queue_callback([this, epoch = epoch_] {
      if (epoch == epoch_) {
        close_backward();
      }
      closing_is_queued_ = false;
    });
  }
}

void Engine::Impl::on_gradient(int id, const at::Tensor& tensor) {
  shard::Param& param = params[id];
  if (backward_depth_ == 0) {
    abandon();
  }
  TESSERA_CHECK(backward_depth_ > 0 || runtime.num_backwards() == 0, ConfigError,
                "a gradient of parameter '", param.name(),
                "' came in the backward() of another engine: the loss depends on both. Freeze what "
                "the other engine shall not train (set_trainable(param, false)), detach the tensor "
                "between them, or make one engine of both");
  TESSERA_CHECK(backward_depth_ > 0, ConfigError, "a gradient of parameter '", param.name(),
                "' came outside of Engine::backward(); call engine.backward(loss) in place of "
                "loss.backward(), so that ranks and micro-batches are averaged");
  TESSERA_CHECK(!at::GradMode::is_enabled(), ConfigError, "parameter '", param.name(),
                "': create_graph is set, which sharded parameters do not support");
  at::Tensor gradient = std::exchange(tensor.mutable_grad(), at::Tensor());
  // A recomputed unit hands over nothing for what it did not use.
  if (gradient.defined()) {
    reduce_gradient(param, std::move(gradient));
  }
  for (engine::UnitCore* unit : units_of_param_[static_cast<std::size_t>(id)]) {
    watch_->param_gradient_came(*unit);
  }
}

void Engine::Impl::reduce_gradient(const shard::Param& param, at::Tensor gradient) {
  const at::Tensor& tensor = tensors[static_cast<std::size_t>(param.id())];
  TESSERA_CHECK(gradient.layout() == at::kStrided, ConfigError, "parameter '", param.name(),
                "' got a sparse gradient; make the embedding with sparse=false");
  gradient = in_memory_order_of(tensor, std::move(gradient));
  grad::FullGradient full;
  full.dtype = param.layout().dtype();
  full.data = gradient.numel() > 0 ? gradient.data_ptr() : nullptr;
  full.owner = std::make_shared<at::Tensor>(std::move(gradient));
  reducer_->add(param, std::move(full));
}

void Engine::Impl::close_backward() {
  watch_->close();
  for (const auto& unit : units_) {
    unit->forget_gradients();
  }
}

optim::StepSums Engine::Impl::sum_over_ranks(bool is_started) {
  optim::StepSums sums;
  if (is_started) {
    const SpanScope span(runtime.spans(), "wait for norm");
    const std::int64_t begin_ns = runtime.clock().now_ns();
    sums.gradient_squares = optimizer->finish_step();
    exposed_wait_s_ += static_cast<double>(runtime.clock().now_ns() - begin_ns) * 1e-9;
  } else {
    sums.gradient_squares = optimizer->sum_of_squares(*reducer_);
  }
  sums.weight = weight_sum_;
  sums.weighted_loss = weighted_loss_.defined() ? weighted_loss_.item<double>() : 0.0;
  if (group().size() == 1) {
    return sums;
  }
  double values[4] = {sums.gradient_squares, sums.weight, sums.weighted_loss, stop_ ? 1.0 : 0.0};
  device::Device& device = runtime.device();
  device::Stream& stream = device.stream(device::StreamKind::kReduce);
  const auto memory = device.allocate(Tier::kDevice, sizeof(values), Role::kStaging);
  device.start_copy(memory.data(), values, sizeof(values), stream).wait();
  comm::CallOptions call;
  call.label.unit = "norm";
  call.stream = &stream;
  const std::int64_t begin_ns = runtime.clock().now_ns();
  group().start_all_reduce(memory.data(), 4, DType::kFloat64, comm::Reduction::kSum, call).wait();
  exposed_wait_s_ += static_cast<double>(runtime.clock().now_ns() - begin_ns) * 1e-9;
  device.start_copy(values, memory.data(), sizeof(values), stream).wait();
  stop_ = values[3] > 0;
  return {values[0], values[1], values[2]};
}

StepResult Engine::Impl::step() {
  check_usable();
  TESSERA_CHECK(failed_backward_.empty(), ConfigError,
                "step() after a backward that failed: gradients of this step are incomplete. Call "
                "zero_grad(), and run the micro-batches of the step again. The failure was: ",
                failed_backward_);
  TESSERA_CHECK(reducer_ != nullptr && !update_runs_ && reducer_->num_backwards() > 0, ConfigError,
                "step() without a backward since the last step; call engine.backward(loss) first");
  TESSERA_CHECK(forward_depth_ == 0 && backward_depth_ == 0, ConfigError,
                "step() inside of a forward or backward");
  check_not_resident("step()");
  coordinator_->meet(coordinator::MeetingPoint::kStep);
  return finish_step();
}

StepResult Engine::Impl::finish_step() {
  const SpanScope span(runtime.spans(), "optimizer step");
  // Gathered copies are stale after the update, and nobody needs them before it.
  coordinator_->end_step();
  const double lr = optim::learning_rate(schedule_, num_steps);
  // Where the sums of this rank are all there are, the device may find the factors below by itself.
  const bool is_started =
      group().size() == 1 &&
      optimizer->start_step(*reducer_, lr,
                            {weight_sum_, loss_scale_->value(), clip_norm_, skip_nonfinite_});
  const optim::StepSums sums = sum_over_ranks(is_started);
  const optim::StepFactors factors = optim::step_factors(sums, loss_scale_->value(), clip_norm_);
  StepResult result;
  result.step = num_steps + 1;
  result.loss = factors.loss;
  result.grad_norm = factors.grad_norm;
  result.loss_scale = loss_scale_->value();
  result.weight = sums.weight * weight_scale_;
  result.lr = lr;
  result.stop = std::exchange(stop_, false);
  result.skipped = !factors.finite && skip_nonfinite_;
  if (result.skipped) {
    runtime.logger()
        .with_step(result.step)
        .warn("a gradient is infinite or NaN: the step is skipped on all ranks");
  } else {
    if (!is_started) {
      optimizer->start_update(*reducer_, lr, factors.gradient_scale);
    }
    ++num_updated_steps_;
    // A graph from before knows by this that it is one.
    for (int id = 0; id < params.num_params(); ++id) {
      if (params[id].trainable() && reducer_->has_gradient(id)) {
        torch::autograd::impl::bump_version(tensors[static_cast<std::size_t>(id)]);
      }
    }
    // From NVMe, and on a device with memory of its own, the update runs on beside the next
    // forward, which waits for each parameter's own.
    update_runs_ = tiers.uses_nvme() || runtime.device().is_discrete();
    if (!update_runs_) {
      optimizer->wait();
    }
  }
  loss_scale_->update(factors.finite);
  if (!update_runs_) {
    reducer_->clear();
  }
  trainable_is_known_ = false;
  weight_sum_ = 0;
  weighted_loss_ = at::Tensor();
  ++num_steps;
  coordinator_->start_ahead();
  return result;
}

void Engine::Impl::finish_update() {
  if (!std::exchange(update_runs_, false)) {
    return;
  }
  const SpanScope span(runtime.spans(), "wait for update");
  const std::int64_t begin_ns = runtime.clock().now_ns();
  optimizer->wait();
  exposed_wait_s_ += static_cast<double>(runtime.clock().now_ns() - begin_ns) * 1e-9;
  coordinator_->forget_device_copies();
  reducer_->clear();
}

EngineStats Engine::Impl::take_stats() {
  EngineStats stats;
  stats.io = tiers.take_io();
  stats.gathers = coordinator_->take_stats();
  if (reducer_) {
    stats.reductions = reducer_->take_stats();
    add_stats(stats.reductions, std::exchange(replaced_reductions_, {}));
  }
  const auto ranks = static_cast<std::uint64_t>(group().size());
  // A rank sends its piece of what is gathered, and the others' pieces of what is reduced.
  stats.gathered_wire_bytes = stats.gathers.gathered_bytes / ranks * (ranks - 1);
  stats.reduced_wire_bytes = stats.reductions.reduced_bytes / ranks * (ranks - 1);
  stats.link_up_bytes += stats.gathers.brought_bytes + stats.io.link_up_bytes;
  stats.link_down_bytes += stats.reductions.host_bytes + stats.io.link_down_bytes;
  stats.exposed_wait_s = stats.gathers.exposed_wait_s + stats.reductions.exposed_wait_s +
                         stats.io.lent_wait_s + std::exchange(exposed_wait_s_, 0.0);
  return stats;
}

}  // namespace tessera
