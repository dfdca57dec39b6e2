#include "tessera/engine/step_driver.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <exception>
#include <string>
#include <string_view>
#include <utility>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/engine/replica_check.h"
#include "tessera/optim/reducer_kernels.h"
#include "tessera/optim/update_loops.h"
#include "tessera/shard/tensor_storage.h"

namespace tessera::engine {
namespace {

// A model smaller than the buckets of a large one would be reduced in one piece, after backward;
// many small calls would cost more than they hide. Bits do not depend on it.
constexpr std::int64_t kSmallestBucketBytes = std::int64_t{4} << 20;
// More buckets than this in one backward, each below this size, take longer in calls than in bytes.
constexpr std::size_t kManyBuckets = 512;
constexpr std::int64_t kSlowBucketBytes = std::int64_t{1} << 20;

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

// Of two reducers, one after the other.
void add_stats(grad::ReducerStats& to, const grad::ReducerStats& stats) {
  to.num_reductions += stats.num_reductions;
  to.reduced_bytes += stats.reduced_bytes;
  to.sent_bytes += stats.sent_bytes;
  to.quant_error += stats.quant_error;
  to.num_replica_sums += stats.num_replica_sums;
  to.replica_bytes += stats.replica_bytes;
  to.held_bytes_peak = std::max(to.held_bytes_peak, stats.held_bytes_peak);
  to.exposed_wait_s += stats.exposed_wait_s;
  to.host_bytes += stats.host_bytes;
  to.loaded_bytes += stats.loaded_bytes;
  to.nvme_read_bytes += stats.nvme_read_bytes;
  to.nvme_written_bytes += stats.nvme_written_bytes;
}

}  // namespace

StepDriver::StepDriver(EngineContext& context, RankAgreement& ranks, Model& model,
                       std::int64_t run_steps)
    : ctx_(context),
      ranks_(ranks),
      model_(model),
      schedule_(optim::ScheduleOptions::from(ctx_.runtime.config(), run_steps)),
      clip_norm_(ctx_.runtime.config().get_double("grad.clip_norm")),
      skip_nonfinite_(ctx_.runtime.config().get_bool("grad.skip_nonfinite")),
      num_micro_batches_(ctx_.runtime.config().get_int("batch.accumulate")),
      checks_replicas_(ctx_.mesh.mesh().num_replicas() > 1 &&
                       ctx_.runtime.config().get_bool("mics.check_replicas")),
      watch_(std::make_shared<BackwardWatch>(context, model, *this)) {
  if (!schedule_.notice.empty()) {
    ctx_.runtime.logger().info(schedule_.notice);
  }
}

StepDriver::~StepDriver() {
  try {
    finish_update();  // it reads gradients that go before it does
  } catch (const std::exception& error) {
    ctx_.runtime.logger().warn("the last update failed: ", error.what());
  }
  watch_->detach();
  if (has_failed_gradients_) {  // caught, and nobody went on
    reducer_->leave();
  }
}

void StepDriver::finalize() {
  begin_scales();
  optimizer_ = ctx_.tiers.make_optimizer(optim::RuleOptions::from(ctx_.runtime.config()));
  make_reducer();
  ctx_.coordinator.set_dynamic_gradients({[this] { return reducer_->pending_dynamic(); },
                                          [this](std::span<const int> ids) {
                                            finish_reading_gradients();
                                            reducer_->reduce_dynamic(ids);
                                          }});
}

void StepDriver::begin_scales() {
  loss_scale_.emplace(
      optim::LossScaleOptions::from(ctx_.runtime.config(), ctx_.params[0].layout().dtype()));
  weight_scale_ = is_fp16() ? 0 : 1;
}

bool StepDriver::is_fp16() const { return ctx_.params[0].layout().dtype() == DType::kFloat16; }

void StepDriver::make_states() {
  if (states_are_made_) {
    return;
  }
  optimizer_->make_states();
  for (int id = 0; id < ctx_.params.num_params(); ++id) {
    ctx_.params[id].set_first_master({});
  }
  states_are_made_ = true;
}

void StepDriver::end_failed_backward() {
  if (closing_is_queued_ && torch::autograd::get_current_graph_task_id() < 0) {
    abandon();
  }
}

void StepDriver::make_reducer() {
  grad::ReducerParts parts{ctx_.mesh.reductions(), ctx_.runtime.device(), ctx_.params,
                           ctx_.runtime.clock(), ctx_.runtime.spans()};
  if (ctx_.runtime.device().is_discrete()) {
    optim::set_reducer_kernels(parts, ctx_.runtime.kernels());
    optim::set_host_kernels(parts, ctx_.runtime.host_kernels(),
                            ctx_.runtime.host_device().stream(device::StreamKind::kGather));
  }
  if (ctx_.coordinator.needs_consensus()) {
    // Every call of this group is at a moment on which ranks have agreed.
    parts.dynamic_group = &ctx_.mesh.agreed_reductions();
    parts.dynamic_hops = ctx_.mesh.agreed_hops();
  }
  parts.codec = ctx_.gradient_codec.get();
  parts.hops = ctx_.mesh.hops();
  parts.replicas = ctx_.mesh.replicas();
  parts.all_ranks = &ctx_.mesh.all_reductions();
  parts.shard_of_rank = ctx_.mesh.mesh().shard_of_group_rank();
  grad::ReducerOptions reductions =
      grad::ReducerOptions::from(ctx_.runtime.config(), ctx_.params[0].layout().dtype());
  reductions.num_hosts = parts.hops.across != nullptr ? parts.hops.across->size() : 1;
  if (!ctx_.runtime.config().is_set("grad.bucket_bytes")) {
    reductions.bucket_bytes =
        std::clamp(model_.trainable_bytes() / 4, kSmallestBucketBytes, reductions.bucket_bytes);
  }
  if (const planner::MemoryPlan* plan = ctx_.tiers.plan()) {
    reductions.bucket_bytes = plan->bucket_bytes;
    parts.num_host_buffers = plan->num_gradient_copies;
    if (plan->kept_gradient_bytes > 0) {
      parts.most_kept_bytes = plan->kept_gradient_bytes;
    }
  }
  parts.num_micro_batches = static_cast<int>(num_micro_batches_);
  parts.is_planned = ctx_.tiers.is_planned();
  parts.nvme = ctx_.tiers.gradient_tier();
  parts.ledger = ctx_.tiers.is_planned() ? &ctx_.runtime.ledger() : nullptr;
  parts.block_sum_of_squares = [](const float* values, std::int64_t numel) {
    return optim::best_loops().block_sum_of_squares(values, numel);
  };
  reducer_.reset();  // before another works with the same group and memory
  reducer_ = std::make_unique<grad::Reducer>(parts, reductions);
  const std::size_t num_buckets = reducer_->layout().buckets.size();
  if (ctx_.group.size() > 1 && num_buckets > kManyBuckets &&
      reductions.bucket_bytes < kSlowBucketBytes) {
    ctx_.runtime.logger().once("many buckets", LogLevel::kInfo,
                               ctx_.runtime.config().shown("grad.bucket_bytes"),
                               " cuts the gradients into ", num_buckets,
                               " reductions per backward; a larger one is faster");
  }
}

void StepDriver::agree_on_weight_scale(double weight) {
  if (weight_scale_ == 0) {
    ctx_.coordinator.reach_consensus(coordinator::ConsensusPoint::kWeights);
    find_weight_scale(weight);
  }
}

void StepDriver::find_weight_scale(double weight) {
  // Gradients keep their usual size, which matters in fp16, and since it is a power of two no bit
  // of the result depends on it.
  double largest = weight;
  ranks_.reduce_numbers({&largest, 1}, comm::Reduction::kMax, "loss weight of the first backward");
  TESSERA_CHECK(largest > 0, ConfigError,
                "the loss weights of all ranks are zero in the first backward; give at least one "
                "rank's micro-batch a weight");
  weight_scale_ = power_of_two_above(largest);
}

void StepDriver::check_losses(const std::vector<at::Tensor>& losses, double weight) {
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
}

void StepDriver::backward(const std::vector<at::Tensor>& losses, double weight) {
  ctx_.lifecycle.check_not_resident("backward()");
  finish_reading_gradients();
  if (reducer_->num_backwards() == 0) {
    optimizer_->prepare();
    if (step_end_ns_ == 0) {
      first_backward_ns_ = ctx_.runtime.clock().now_ns();
    }
  }
  ctx_.tiers.begin_backward(reducer_->num_backwards() + 1 == num_micro_batches_);
  agree_on_weight_scale(weight);
  const double factor = weight / weight_scale_ * loss_scale_->value();
  std::vector<at::Tensor> gradients;
  gradients.reserve(losses.size());
  for (const at::Tensor& loss : losses) {
    gradients.push_back(at::full_like(loss, factor));
  }
  ctx_.lifecycle.enter_backward();
  ++ctx_.runtime.num_backwards();
  const std::shared_ptr<void> counted(nullptr, [this](void*) { --ctx_.runtime.num_backwards(); });
  try {
    {
      const device::StreamSpan span(ctx_.runtime.device().stream(device::StreamKind::kCompute),
                                    "backward");
      torch::autograd::backward(losses, gradients);
    }
    if (ctx_.lifecycle.backward_depth() == 1) {
      close_backward();
      ctx_.coordinator.reach_consensus(coordinator::ConsensusPoint::kBackwardEnd);
      reducer_->finish_backward();
    }
    ctx_.lifecycle.leave_backward();
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

void StepDriver::enter_backward() {
  ctx_.lifecycle.check_not_resident("a backward");
  TESSERA_CHECK(!at::GradMode::is_enabled(), ConfigError,
                "create_graph is set: a second derivative would read weights after their release; "
                "sharded parameters do not support it");
  if (ctx_.lifecycle.backward_depth() == 0 && !closing_is_queued_) {
    closing_is_queued_ = true;
    torch::autograd::Engine::get_default_engine().queue_callback(
        [this, epoch = ctx_.lifecycle.epoch()] {
          if (epoch == ctx_.lifecycle.epoch()) {
            close_backward();
          }
          closing_is_queued_ = false;
        });
  }
}

void StepDriver::on_gradient(int id, const at::Tensor& tensor) {
  shard::Param& param = ctx_.params[id];
  const bool is_ours = ctx_.lifecycle.backward_depth() > 0;
  if (!is_ours) {
    abandon();
  }
  TESSERA_CHECK(
      is_ours || ctx_.runtime.num_backwards() == 0, ConfigError, "a gradient of parameter '",
      param.name(),
      "' arrived in the backward() of another engine: the loss depends on both. Freeze what "
      "the other engine shall not train (set_trainable(param, false)), detach the tensor "
      "between them, or make one engine of both");
  TESSERA_CHECK(is_ours, ConfigError, "a gradient of parameter '", param.name(),
                "' arrived outside of Engine::backward(); call engine.backward(loss) in place of "
                "loss.backward(), so that ranks and micro-batches are averaged");
  TESSERA_CHECK(!at::GradMode::is_enabled(), ConfigError, "parameter '", param.name(),
                "': create_graph is set, which sharded parameters do not support");
  at::Tensor gradient = std::exchange(tensor.mutable_grad(), at::Tensor());
  // A recomputed unit hands over nothing for what it did not use.
  if (gradient.defined()) {
    reduce_gradient(param, std::move(gradient));
  }
  for (UnitCore* unit : model_.users_of(id)) {
    watch_->on_param_gradient(*unit);
  }
}

void StepDriver::reduce_gradient(const shard::Param& param, at::Tensor gradient) {
  const at::Tensor& tensor = model_.tensor(param.id());
  TESSERA_CHECK(gradient.layout() == at::kStrided, ConfigError, "parameter '", param.name(),
                "' got a sparse gradient; make the embedding with sparse=false");
  gradient = in_memory_order_of(tensor, std::move(gradient));
  grad::FullGradient full;
  full.dtype = param.layout().dtype();
  full.data = gradient.numel() > 0 ? gradient.data_ptr() : nullptr;
  full.owner = std::make_shared<at::Tensor>(std::move(gradient));
  reducer_->add(param, std::move(full));
}

void StepDriver::close_backward() {
  watch_->close();
  for (const auto& unit : model_.units()) {
    unit->reset_gradients();
  }
}

StepResult StepDriver::step() {
  ctx_.lifecycle.check_usable();
  ctx_.lifecycle.check_gradients_complete();
  TESSERA_CHECK(reducer_ != nullptr && !update_runs_ && reducer_->num_backwards() > 0, ConfigError,
                "step() without a backward since the last step; call engine.backward(loss) first");
  ctx_.lifecycle.check_idle("step()");
  ctx_.lifecycle.check_not_resident("step()");
  ctx_.coordinator.reach_consensus(coordinator::ConsensusPoint::kStep);
  return finish_step();
}

StepResult StepDriver::finish_step() {
  const SpanScope span(ctx_.runtime.spans(), "optimizer step");
  if (step_end_ns_ != 0) {
    seconds_before_update_ =
        static_cast<double>(ctx_.runtime.clock().now_ns() - step_end_ns_) * 1e-9;
  } else if (reducer_->num_backwards() > 0) {
    // From the first backward on; a forward takes about half as long as a backward.
    const auto thirds = static_cast<double>(3 * reducer_->num_backwards());
    seconds_before_update_ =
        static_cast<double>(ctx_.runtime.clock().now_ns() - first_backward_ns_) * 1e-9 * thirds /
        (thirds - 1);
  }
  // Gathered copies are stale after the update, and nobody needs them before it.
  ctx_.coordinator.end_step();
  if (checks_replicas_) {
    check_replicas(ctx_, ranks_);
  }
  reducer_->finish_replica_sums();
  const double lr = optim::learning_rate(schedule_, num_steps_);
  bool is_started = false;
  const optim::StepSums sums = sum_over_ranks(lr, is_started);
  const optim::StepFactors factors = optim::step_factors(sums, loss_scale_->value(), clip_norm_);
  StepResult result;
  result.step = num_steps_ + 1;
  result.loss = factors.loss;
  result.grad_norm = factors.grad_norm;
  result.loss_scale = loss_scale_->value();
  result.weight = sums.weight * weight_scale_;
  result.lr = lr;
  result.stop = std::exchange(stop_, false);
  result.skipped = !factors.finite && skip_nonfinite_;
  if (result.skipped) {
    ctx_.runtime.logger()
        .with_step(result.step)
        .warn("a gradient is infinite or NaN: the step is skipped on all ranks");
  } else {
    if (!is_started) {
      ctx_.mesh.wait_agreed();
      optimizer_->start_update(*reducer_, lr, factors.gradient_scale);
    }
    ++num_updated_steps_;
    // A graph from before knows by this that it is one.
    for (int id = 0; id < ctx_.params.num_params(); ++id) {
      if (ctx_.params[id].trainable() && reducer_->has_gradient(id)) {
        torch::autograd::impl::bump_version(model_.tensor(id));
      }
    }
    // From NVMe, and on a device with memory of its own, the update runs on beside the next
    // forward, which waits for each parameter's own.
    update_runs_ = ctx_.tiers.uses_nvme() || ctx_.runtime.device().is_discrete();
    writes_run_ = update_runs_;
    if (!update_runs_) {
      optimizer_->wait();
    }
  }
  loss_scale_->update(factors.finite);
  if (!update_runs_) {
    reducer_->clear();
  }
  trainable_is_known_ = false;
  weight_sum_ = 0;
  weighted_loss_ = at::Tensor();
  ++num_steps_;
  tell_sent_bytes();
  if (ctx_.tiers.is_for_first_step()) {
    fix_placement();
  }
  ctx_.coordinator.start_ahead();
  step_end_ns_ = ctx_.runtime.clock().now_ns();
  return result;
}

// Once, of a step that follows the plan of the first.
void StepDriver::tell_sent_bytes() {
  if (steps_told_ >= 2 || ctx_.group.size() == 1) {
    return;
  }
  const SentBytes sent = ctx_.mesh.sent();
  if (++steps_told_ == 2 && ctx_.group.rank() == 0) {
    ctx_.runtime.logger().info(
        ctx_.mesh.mesh().has_uneven_hosts() ? "rank 0 sends " : "a rank sends ",
        approximate_bytes(sent.inside - sent_in_first_.inside), " to ranks of its host and ",
        approximate_bytes(sent.across - sent_in_first_.across), " to other hosts in a step");
  }
  sent_in_first_ = sent;
}

void StepDriver::fix_placement() {
  if (!ctx_.tiers.refine(model_.shapes())) {
    return;
  }
  finish_update();
  for (int id = 0; id < ctx_.params.num_params(); ++id) {
    ctx_.params.before_overwrite(id).wait();
  }
  first_stats_ = take_stats();
  reducer_.reset();
  optim::CarriedStates states = optimizer_->take_states();
  ctx_.tiers.release_optimizer();
  optimizer_.reset();
  ctx_.coordinator.drop_gathers();
  ctx_.tiers.fix_placement();
  ctx_.tiers.reserve_staging();
  ctx_.coordinator.change_tier(ctx_.tiers.coordinator_options());
  optimizer_ =
      ctx_.tiers.make_optimizer(optim::RuleOptions::from(ctx_.runtime.config()), std::move(states));
  optimizer_->make_states();
  make_reducer();
}

optim::StepSums StepDriver::sum_over_ranks(double lr, bool& is_started) {
  save_votes_ = ask_votes_ ? ask_votes_() : SaveVotes();
  optim::OwnSums own;
  own.sums.weight = weight_sum_;
  // Every copy has the same gradients: one copy's squares are those of all. They are added in the
  // order of shards, so that no bit depends on which ranks hold them.
  const bool is_by_rank = !ctx_.mesh.mesh().numbers_by_local_rank();
  own.squares_group = is_by_rank ? nullptr : &ctx_.mesh.gathers();
  own.adds_squares = is_by_rank ? ctx_.mesh.replica() == 0 : ctx_.group.rank() == 0;
  own.sums.votes[0] = stop_ ? 1 : 0;
  own.sums.votes[1] = save_votes_.num_done;
  own.sums.votes[2] = save_votes_.num_failed;
  own.wait_agreed = [this] { ctx_.mesh.wait_agreed(); };
  if (weighted_loss_.defined()) {
    const auto kept = std::make_shared<const at::Tensor>(weighted_loss_);
    own.weighted_loss = {kept, kept->const_data_ptr<double>()};
  }
  is_started = optimizer_->start_step(
      *reducer_, lr, {loss_scale_->value(), clip_norm_, skip_nonfinite_}, own, ctx_.group);
  optim::StepSums sums = own.sums;
  if (!is_started) {
    double squares = optimizer_->sum_of_squares(*reducer_);
    if (own.squares_group != nullptr) {
      ranks_.reduce_numbers({&squares, 1}, comm::Reduction::kSum, optim::kStepSumsLabel,
                            own.squares_group);
    }
    sums.gradient_squares = own.adds_squares ? squares : 0;
    sums.weighted_loss = weighted_loss_.defined() ? weighted_loss_.item<double>() : 0.0;
  }
  {
    const SpanScope span(ctx_.runtime.spans(), "wait for norm");
    const std::int64_t begin_ns = ctx_.runtime.clock().now_ns();
    if (is_started) {
      sums = optimizer_->finish_step();
    } else {
      auto numbers = std::bit_cast<std::array<double, optim::kNumStepSums>>(sums);
      ranks_.reduce_numbers(numbers, comm::Reduction::kSum, optim::kStepSumsLabel);
      sums = std::bit_cast<optim::StepSums>(numbers);
    }
    exposed_wait_s_ += static_cast<double>(ctx_.runtime.clock().now_ns() - begin_ns) * 1e-9;
  }
  stop_ = sums.votes[0] > 0;
  save_votes_ = {sums.votes[1], sums.votes[2]};
  return sums;
}

void StepDriver::finish_update() {
  const bool is_written = !std::exchange(writes_run_, false);
  finish_reading_gradients();
  if (!is_written) {
    optimizer_->wait();
  }
}

void StepDriver::finish_reading_gradients() {
  if (!std::exchange(update_runs_, false)) {
    return;
  }
  const SpanScope span(ctx_.runtime.spans(), "wait for update");
  const std::int64_t begin_ns = ctx_.runtime.clock().now_ns();
  optimizer_->wait_updated();
  exposed_wait_s_ += static_cast<double>(ctx_.runtime.clock().now_ns() - begin_ns) * 1e-9;
  ctx_.coordinator.forget_device_copies();
  reducer_->clear();
}

std::optional<StepResult> StepDriver::join() {
  ctx_.lifecycle.check_not_resident("join()");
  for (;;) {
    switch (ctx_.coordinator.join()) {
      case coordinator::ConsensusPoint::kWeights:
        find_weight_scale(0);
        break;
      case coordinator::ConsensusPoint::kBackwardEnd:
        finish_reading_gradients();
        reducer_->finish_backward();
        break;
      case coordinator::ConsensusPoint::kStep:
        return finish_step();
      case coordinator::ConsensusPoint::kHold:
        throw ConfigError(
            "the other ranks open a gathered scope, and this one only follows their steps; "
            "do it before or after the steps, on all ranks");
      case coordinator::ConsensusPoint::kAllDone:
      case coordinator::ConsensusPoint::kNone:
        return std::nullopt;
    }
  }
}

void StepDriver::abandon() noexcept {
  const bool was_in_backward = ctx_.lifecycle.abandon();
  closing_is_queued_ = false;
  watch_->forget();
  for (const auto& unit : model_.units()) {
    unit->reset_gradients();
  }
  try {
    ctx_.coordinator.release_all();
    for (const at::Tensor& tensor : model_.tensors()) {
      tensor.mutable_grad() = at::Tensor();
    }
    if (was_in_backward) {
      finish_update();
      // The exception must reach those who wait for this rank before this rank waits for them.
      has_failed_gradients_ = true;
    }
  } catch (const std::exception& error) {
    ctx_.runtime.logger().warn("while a pass was abandoned: ", error.what());
  }
}

void StepDriver::drop_failed_gradients() noexcept {
  if (!std::exchange(has_failed_gradients_, false)) {
    return;
  }
  try {
    if (reducer_->in_backward() && ctx_.coordinator.needs_consensus()) {
      // Ranks may have stopped at different gradients: now all have started all.
      reducer_->drop_dynamic();
      reducer_->finish_backward();
    }
  } catch (const std::exception& error) {
    ctx_.runtime.logger().warn("while gradients of a failed backward were dropped: ", error.what());
  }
  drop_gradients();
}

void StepDriver::drop_gradients() noexcept {
  if (reducer_) {
    reducer_->clear();
  }
  weight_sum_ = 0;
  weighted_loss_ = at::Tensor();
}

void StepDriver::rethrow_backward_error() {
  ctx_.lifecycle.fail_backward("an exception without a text");
  try {
    throw;
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    ctx_.lifecycle.fail_backward(text);
    const auto says = [&](std::string_view part) { return text.find(part) != std::string::npos; };
    TESSERA_CHECK(
        !says("modified by an inplace operation") || num_updated_steps_ == 0, ConfigError,
        "backward through a graph from before an update: step() has changed parameters "
        "that it needs, or something else did so in place; call backward() before step(), "
        "or run the forward again. Torch says: ",
        text);
    TESSERA_CHECK(!says("backward through the graph a second time"), ConfigError,
                  "a second backward through the graph of one forward; the first frees what it "
                  "needs. Add the losses and call backward() once, or run the forward again");
    if (says(shard::kReleasedText)) {
      throw StateError(text, {}, {});
    }
    throw;
  } catch (const std::exception& error) {
    ctx_.lifecycle.fail_backward(error.what());
    throw;
  }
}

void StepDriver::zero_grad() {
  TESSERA_CHECK(ctx_.lifecycle.backward_depth() == 0, ConfigError,
                "zero_grad() inside of a backward");
  finish_update();
  drop_failed_gradients();
  drop_gradients();
  ctx_.lifecycle.forget_failed_backward();
  trainable_is_known_ = false;
}

void StepDriver::set_trainable(const at::Tensor& tensor, bool trainable) {
  ctx_.lifecycle.check_usable();
  drop_failed_gradients();
  const int id = model_.id_of(tensor);
  if (ctx_.params[id].trainable() == trainable && tensor.requires_grad() == trainable) {
    return;
  }
  ctx_.params[id].check_trainable(trainable);
  check_no_gradients_pending(id);
  tensor.set_requires_grad(trainable);
  if (ctx_.params[id].trainable() != trainable) {
    change_trainable({id});
  }
}

void StepDriver::check_no_gradients_pending(const char* what) const {
  TESSERA_CHECK(reducer_ == nullptr || update_runs_ || reducer_->num_backwards() == 0, ConfigError,
                what, " in the middle of a step: gradients of ", reducer_->num_backwards(),
                " micro-batches are pending, and are no part of a checkpoint; call step() or "
                "zero_grad() first");
}

StepState StepDriver::state() const {
  StepState state;
  state.num_updated_steps = num_updated_steps_;
  if (is_fp16()) {
    state.fp16 = Fp16State{weight_scale_, loss_scale_->state()};
  }
  state.optimizer_kind = to_string(optim::RuleOptions::from(ctx_.runtime.config()).kind);
  state.num_optimizer_updates = optimizer_->num_updates();
  return state;
}

void StepDriver::set_state(std::int64_t num_steps, const StepState& state) {
  num_steps_ = num_steps;
  num_updated_steps_ = state.num_updated_steps;
  begin_scales();
  if (is_fp16() && state.fp16) {
    weight_scale_ = state.fp16->weight_scale;
    loss_scale_->set_state(state.fp16->loss_scale);
  }
  drop_gradients();
  trainable_is_known_ = false;
}

void StepDriver::check_no_gradients_pending(int id) const {
  TESSERA_CHECK(ctx_.lifecycle.is_idle() &&
                    (reducer_ == nullptr || update_runs_ || reducer_->num_backwards() == 0),
                ConfigError, "parameter '", ctx_.params[id].name(), "' is ",
                ctx_.params[id].trainable() ? "frozen" : "unfrozen",
                " in the middle of a step: gradients of it are pending; call step() or zero_grad() "
                "first");
}

void StepDriver::notice_trainable() {
  drop_failed_gradients();
  if (trainable_is_known_) {
    return;
  }
  std::vector<int> changed;
  for (int id = 0; id < ctx_.params.num_params(); ++id) {
    if (model_.tensor(id).requires_grad() != ctx_.params[id].trainable()) {
      ctx_.params[id].check_trainable(model_.tensor(id).requires_grad());
      check_no_gradients_pending(id);
      changed.push_back(id);
    }
  }
  trainable_is_known_ = true;
  if (!changed.empty()) {
    change_trainable(changed);
  }
}

void StepDriver::change_trainable(const std::vector<int>& ids) {
  finish_update();
  for (const int id : ids) {
    model_.flip_trainable(id);
    if (optimizer_) {
      optimizer_->follow_trainable(id);
    }
  }
  if (reducer_) {
    reducer_->clear();
    add_stats(replaced_reductions_, reducer_->take_stats());
    make_reducer();
  }
}

void StepDriver::free_behind_forward(coordinator::UnitId unit) {
  for (shard::Param* const param : ctx_.coordinator.unit(unit).params) {
    const bool has_copy = param->device_copy().values != nullptr;
    if (has_copy) {
      param->forget_device_copy();
    }
    if (has_copy || (update_runs_ && param->trainable() && param->tier() == Tier::kDevice)) {
      reducer_->free_gradient(param->id());
    }
  }
}

void StepDriver::shard_was_written(int id) {
  finish_update();
  ctx_.params[id].set_updated(device::Pending());
  ctx_.params[id].set_first_master({});
  if (optimizer_) {
    optimizer_->reset_master(id);
  }
}

EngineStats StepDriver::take_stats() {
  if (first_stats_) {
    return *std::exchange(first_stats_, std::nullopt);
  }
  EngineStats stats;
  stats.io = ctx_.tiers.take_io();
  stats.gathers = ctx_.coordinator.take_stats();
  if (reducer_) {
    stats.reductions = reducer_->take_stats();
    add_stats(stats.reductions, std::exchange(replaced_reductions_, {}));
  }
  const auto ranks = static_cast<std::uint64_t>(ctx_.params.num_ranks());
  // A rank sends its piece of what is gathered, and the others' pieces of what is reduced.
  stats.gathered_wire_bytes = (stats.gathers.gathered_bytes - stats.gathers.secondary_bytes -
                               stats.gathers.encoded_bytes + stats.gathers.wire_bytes) /
                              ranks * (ranks - 1);
  stats.weight_quant_error = stats.gathers.quant_error.relative;
  stats.weight_quant_error_param = stats.gathers.quant_error.param;
  if (const comm::Group* const second = ctx_.mesh.secondary()) {
    const auto near = static_cast<std::uint64_t>(second->size());
    stats.gathered_wire_bytes += stats.gathers.secondary_wire_bytes / near * (near - 1);
  }
  stats.reduced_wire_bytes = stats.reductions.sent_bytes;
  stats.grad_quant_error = stats.reductions.quant_error.relative();
  if (const int worst = stats.reductions.quant_error.worst_param; worst >= 0) {
    stats.worst_quantised_gradient = ctx_.params[worst].name();
  }
  if (const comm::Group* const replicas = ctx_.mesh.replicas()) {
    const std::uint64_t sent = replicas->wire_bytes().payload;
    stats.reduced_wire_bytes += sent - std::exchange(sent_to_replicas_, sent);
  }
  const SentBytes sent = ctx_.mesh.sent();
  stats.sent_inside_bytes = sent.inside - std::exchange(sent_.inside, sent.inside);
  stats.sent_across_bytes = sent.across - std::exchange(sent_.across, sent.across);
  stats.h2d_bytes +=
      stats.reductions.loaded_bytes + stats.gathers.brought_bytes + stats.io.h2d_bytes;
  stats.d2h_bytes += stats.reductions.host_bytes + stats.gathers.kept_bytes + stats.io.d2h_bytes;
  stats.exposed_wait_s = stats.gathers.exposed_wait_s + stats.reductions.exposed_wait_s +
                         stats.io.lent_wait_s + std::exchange(exposed_wait_s_, 0.0);
  return stats;
}

}  // namespace tessera::engine
