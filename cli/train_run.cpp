#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iomanip>
#include <iostream>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include "cli/command.h"
#include "cli/device_peak.h"
#include "cli/divergence.h"
#include "cli/final_save.h"
#include "cli/launch/rank_end.h"
#include "cli/observers.h"
#include "cli/out_of_memory.h"
#include "cli/train_checkpoint.h"
#include "cli/train_evaluate.h"
#include "cli/train_memory.h"
#include "cli/train_phases.h"
#include "cli/train_plan.h"
#include "cli/train_summary.h"
#include "cli/train_trainer.h"
#include "cli/train_verify.h"
#include "cli/train_warnings.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/core/resource_limits.h"
#include "tessera/engine/tensor_memory.h"
#include "tessera/optim/rule.h"

namespace tessera::cli {
namespace {

// Beside a GPU two cores feed it: the step's thread and autograd's.
int num_update_threads(const TrainPlan& plan) {
  return plan.cuda_device < 0 ? plan.num_threads : std::max(1, plan.num_threads - 2);
}

RuntimeOptions runtime_options(const TrainPlan& plan) {
  RuntimeOptions options;
  options.cuda_device = plan.cuda_device;
  options.num_update_threads = num_update_threads(plan);
  return options;
}

// Of device memory that the engine has taken itself. Adopted gradients are torch's.
std::int64_t ledger_peak_bytes(const Ledger& ledger) {
  std::uint64_t bytes = 0;
  for (std::size_t role = 0; role < kNumRoles; ++role) {
    if (static_cast<Role>(role) != Role::kGradient) {
      bytes += ledger.peak_bytes(Tier::kDevice, static_cast<Role>(role));
    }
  }
  return static_cast<std::int64_t>(bytes);
}

// `signal`: 0 where no signal has stopped it.
std::string stopped_text(int signal, std::int64_t num_done, const TrainPlan& plan) {
  return "stopped by " + (signal == 0 ? "--stop-after" : signal_name(signal)) + " after " +
         std::to_string(num_done) + " of " + std::to_string(plan.num_steps) + " steps" +
         (plan.verify ? ", not verified\n" : "\n");
}

FlopRate flop_rate(const TrainPlan& plan, Runtime& runtime) {
  FlopRate rate;
  rate.flops_per_token = models::gpt_flops_per_token(plan.model);
  if (plan.peak_flops) {
    rate.peak_flops = *plan.peak_flops * runtime.num_ranks();
  } else if (plan.cuda_device >= 0) {
    rate.peak_flops = gpu_peak_flops(runtime.device().name(), plan.model.dtype);
    if (rate.peak_flops) {
      *rate.peak_flops *= static_cast<double>(runtime.num_ranks()) / plan.ranks_per_gpu;
    }
  }
  return rate;
}

class Run {
 public:
  Run(const TrainPlan& plan, models::TokenSource& data, Runtime& runtime, StopSignals& signals)
      : plan_(plan),
        data_(data),
        runtime_(runtime),
        signals_(signals),
        speaks_(runtime.rank() == 0),
        start_ns_(runtime.clock().now_ns()),
        flops_(flop_rate(plan, runtime)),
        phases_(plan.cuda_device, runtime.clock()),
        batches_(data, plan),
        trainer_(plan.unsharded ? make_plain_trainer(plan, runtime)
                                : make_sharded_trainer(plan, runtime)) {
    size_ = model_bytes();
    if (speaks_ && plan.verify) {
      twin_.emplace(plan, runtime);
    }
    if (plan.evaluation) {
      evaluation_.emplace(plan, runtime);
    }
    if (plan.checkpoint) {
      checkpoints_.emplace(plan, *trainer_->engine(), data, tellers());
    }
  }

  // 0, or the signal that stopped it.
  int train() {
    signals_.defer();
    if (!plan_.save_init.empty()) {
      trainer_->save(plan_.save_init);
    }
    if (speaks_) {
      std::cout << head_text(head()) << std::flush;
    }
    if (checkpoints_) {
      num_done_ = checkpoints_->resume();
    }
    run_steps();
    const int signal = stop_ ? agreed_signal() : 0;
    // The model first: nothing that only watched the run may cost it.
    const std::string save_failure = save_all();
    runtime_.write_trace();
    if (plan_.verify && !stop_) {
      compare_params();
    }
    if (speaks_) {
      if (stop_) {
        std::cout << stopped_text(signal, num_done_, plan_);
      }
      if (totals_.num_steps() > 0) {
        std::cout << totals_.text() << std::flush;
      }
      if (checkpoints_) {
        std::cout << checkpoints_->summary() << std::flush;
      }
      if (!plan_.verify || stop_) {
        print_memory();
      }
    }
    if (stop_) {
      end_together();
    }
    TESSERA_CHECK(!speaks_ || save_failure.empty(), IoError, save_failure);
    if (speaks_ && plan_.verify && !stop_) {
      pronounce();
    }
    if (speaks_ && signal == 0) {
      check_converged();
    }
    return stop_ ? signal : signals_.pending();
  }

 private:
  void run_steps() {
    if (speaks_) {
      observers_.emplace(observer_options(), runtime_.clock());
    }
    // Alone there is nobody to agree with: then it stops here already.
    const auto is_stopped = [this] {
      return stop_ || (runtime_.num_ranks() == 1 && signals_.pending() != 0);
    };
    while (num_done_ < plan_.num_steps && !(stop_ = is_stopped())) {
      const std::int64_t step = num_done_;
      StepMetrics metrics = run_step(step);
      num_done_ = step + 1;
      if (evaluation_ && plan_.evaluation->is_due_after(step, plan_.num_steps)) {
        metrics.eval_loss = evaluation_->run(*trainer_);
      }
      totals_.add(metrics);
      divergence_.add(metrics);
      if (observers_) {
        tell_quant_error(metrics);
        observers_->show(metrics);
      }
      // All ranks come to the same answer: it depends on what they know alike.
      const bool is_given_up = plan_.stop_on_divergence && divergence_.is_going_on();
      if (checkpoints_ && !divergence_.has_spoilt_parameters()) {
        checkpoints_->after_step(num_done_, stop_ || is_given_up || num_done_ == plan_.num_steps);
      }
      if (is_given_up) {
        break;
      }
    }
    observers_.reset();
  }

  // Once: how far what units compute with is from the parameters.
  void tell_quant_error(const StepMetrics& metrics) {
    if (!has_told_quant_error_ && !metrics.weight_quant_error_param.empty()) {
      has_told_quant_error_ = true;
      std::ostringstream text;
      text << "quantised gathers: step " << metrics.step
           << " computed with parameters that are off by " << std::setprecision(3)
           << metrics.weight_quant_error
           << " of their size (root of the sum of squares, rank 0's shards), most in '"
           << metrics.weight_quant_error_param << "'";
      observers_->say(text.str());
    }
  }

  // Collective: a checkpoint, and --save. Parameters that are no numbers take no good save's place.
  // What went wrong; empty: nothing.
  std::string save_all() {
    const bool is_good = !divergence_.has_spoilt_parameters();
    std::string failure = checkpoints_ ? checkpoints_->finish(num_done_, is_good) : "";
    if (!plan_.save.empty() && is_good) {
      const RescuedSave saved =
          save_or_rescue({"--save", "the parameters are", plan_.save},
                         [this](const std::string& to) { trainer_->save(to); });
      failure += (failure.empty() || saved.failure.empty() ? "" : "; ") + saved.failure;
    }
    return failure;
  }

  // Lines that are not the observers' own, on the screen that is theirs while steps run.
  Tellers tellers() {
    if (!speaks_) {
      return {[](const std::string&) {}, [](const std::string&) {}};
    }
    return {[this](const std::string& text) {
              if (observers_) {
                observers_->say(text);
              } else {
                std::cout << text << "\n" << std::flush;
              }
            },
            [this](const std::string& text) {
              if (observers_) {
                observers_->warn(text);
              } else {
                runtime_.logger().warn(text);
              }
            }};
  }

  bool is_time_over() const {
    return plan_.stop_after_s &&
           static_cast<double>(runtime_.clock().now_ns() - start_ns_) * 1e-9 >= *plan_.stop_after_s;
  }

  ObserverOptions observer_options() const {
    ObserverOptions options;
    options.progress = stdout_progress(plan_.num_steps, plan_.log_every);
    options.progress.num_done = num_done_;
    options.metrics = plan_.metrics;
    options.tensorboard = plan_.tensorboard;
    options.warn = [this](const std::string& text) { runtime_.logger().warn(text); };
    return options;
  }

  StepMetrics run_step(std::int64_t step) {
    const std::int64_t start_ns = runtime_.clock().now_ns();
    StepResult result;
    StepMetrics metrics;
    {
      const SpanScope span(runtime_.spans(), "step", {.sequence = step + 1});
      phases_.begin_step();
      for (std::int64_t i = 0; i < plan_.batch.accumulate; ++i) {
        run_micro_batch(batches_.read(step, micro_batch_of(plan_.batch, runtime_.rank(), i)));
      }
      phases_.begin_update();
      if (signals_.pending() != 0 || is_time_over()) {
        trainer_->request_stop();
      }
      result = trainer_->step();
      stop_ = result.stop;
      const StepPhases::Times times = phases_.end_step();
      metrics.forward_s = times.forward_s;
      metrics.backward_s = times.backward_s;
      metrics.update_s = times.update_s;
    }
    metrics.step_s = static_cast<double>(runtime_.clock().now_ns() - start_ns) * 1e-9;
    metrics.tokens_per_s =
        static_cast<double>(plan_.tokens_per_step()) / std::max(metrics.step_s, 1e-9);
    metrics.mfu = flops_.mfu(metrics.tokens_per_s);
    metrics.step = step + 1;
    metrics.tokens = metrics.step * plan_.tokens_per_step();
    metrics.loss = result.loss;
    metrics.grad_norm = result.grad_norm;
    metrics.lr = result.lr;
    metrics.skipped = result.skipped;
    metrics.loss_scale = result.loss_scale;
    metrics.rss_peak_bytes = rss_peak_bytes();
    const EngineStats stats = trainer_->take_stats();
    metrics.full_bytes_peak = stats.gathers.full_bytes_peak;
    metrics.gathered_bytes = stats.gathered_wire_bytes;
    metrics.reduced_bytes = stats.reduced_wire_bytes;
    if (!stats.worst_quantised_gradient.empty()) {
      metrics.grad_quant_error = stats.grad_quant_error;
      metrics.grad_quant_worst = stats.worst_quantised_gradient;
    }
    metrics.sent_inside_bytes = stats.sent_inside_bytes;
    metrics.sent_across_bytes = stats.sent_across_bytes;
    metrics.weight_quant_error = stats.weight_quant_error;
    metrics.weight_quant_error_param = stats.weight_quant_error_param;
    metrics.prefetch_hits = stats.gathers.prefetch_hits;
    metrics.prefetch_misses = stats.gathers.prefetch_misses;
    metrics.exposed_wait_s = stats.exposed_wait_s;
    nvme_.add(Role::kShard, stats.io.parameters.read_bytes, stats.io.parameters.written_bytes);
    nvme_.add(Role::kGradient, stats.io.gradients.read_bytes, stats.io.gradients.written_bytes);
    nvme_.add(Role::kOptimizer, stats.io.states.read_bytes, stats.io.states.written_bytes);
    metrics.nvme_read_bytes = nvme_.step_read_bytes();
    metrics.nvme_written_bytes = nvme_.step_written_bytes();
    nvme_.end_step();
    metrics.device_peak_bytes = device_peak_bytes();
    metrics.h2d_bytes = stats.h2d_bytes;
    metrics.d2h_bytes = stats.d2h_bytes;
    metrics.held = held_bytes(runtime_.ledger());
    metrics.num_trainable = size_.num_trainable;
    metrics.num_frozen = size_.num_params - size_.num_trainable;
    if (twin_) {
      twin_->step(batches_, step, result);
    }
    return metrics;
  }

  void run_micro_batch(const MicroBatch& micro_batch) {
    phases_.begin_forward();
    const at::Tensor loss = trainer_->forward(micro_batch);
    phases_.begin_backward();
    trainer_->backward(loss, micro_batch);
    phases_.end_backward();
  }

  // Collective: the signal that a rank got, the same on all.
  int agreed_signal() {
    const std::int32_t mine = signals_.pending();
    const auto bytes = std::as_bytes(std::span(&mine, 1));
    comm::CallOptions call;
    call.label.unit = "stop signal";
    const comm::HostGather all = runtime_.group().start_gather_host(bytes, call);
    all.done.wait();
    std::int32_t signal = mine;
    for (int rank = 0; rank < runtime_.num_ranks(); ++rank) {
      std::int32_t other = 0;
      std::memcpy(&other, all.bytes.get() + static_cast<std::size_t>(rank) * sizeof(other),
                  sizeof(other));
      signal = std::max(signal, other);
    }
    return signal;
  }

  // Collective: who watches the ranks (torchrun, a launcher of the user's) ends all of them when
  // the first has ended; by then each has written what is its own.
  void end_together() {
    comm::CallOptions call;
    call.label.unit = "end of a stopped run";
    runtime_.group().start_barrier(call).wait();
    if (runtime_.num_ranks() > 1) {
      signals_.close();
    }
  }

  // Two peaks need not have been at the same time: at most this.
  std::int64_t device_peak_bytes() const {
    return plan_.cuda_device < 0
               ? 0
               : torch_memory(plan_.cuda_device).peak_bytes + ledger_peak_bytes(runtime_.ledger());
  }

  // Collective: rank 0 needs whole parameters.
  void compare_params() {
    const std::vector<Trainer::ParamInfo> infos = trainer_->params();
    for (int id = 0; id < static_cast<int>(infos.size()); ++id) {
      const at::Tensor value = trainer_->value(id);
      if (twin_) {
        twin_->compare_param(id, infos[static_cast<std::size_t>(id)], value);
      }
    }
  }

  void pronounce() const {
    const Comparison& comparison = twin_->comparison();
    std::cout << Comparison::explanation(plan_.verify_against, runtime_.num_ranks(),
                                         plan_.config.get_string("precision"))
              << comparison.table() << std::flush;
    TESSERA_CHECK(comparison.failure().empty(), Error,
                  "verification failed: ", comparison.failure());
    std::cout << verified_text(head(), plan_.verify_against, comparison.equal()) << std::flush;
  }

  void check_converged() const {
    if (divergence_.has_diverged()) {
      const bool is_spoilt = divergence_.has_spoilt_parameters();
      const std::string kept =
          (plan_.save.empty() ? ""
           : is_spoilt        ? "; --save was not written"
                              : "; --save was written") +
          std::string(plan_.checkpoint && is_spoilt ? "; no checkpoint was made since then" : "");
      throw comm::ExitCodeError(divergence_.text(plan_.model.dtype) + kept, kExitDiverged);
    }
  }

  ModelBytes model_bytes() const {
    ModelBytes bytes;
    for (const Trainer::ParamInfo& info : trainer_->params()) {
      bytes.num_params += info.numel;
      bytes.num_trainable += info.trainable ? info.numel : 0;
    }
    bytes.dtype = plan_.model.dtype;
    bytes.num_states =
        static_cast<int>(optim::state_names(optim::RuleOptions::from(plan_.config)).size());
    return bytes;
  }

  // Plain training takes its memory from torch, whose books are not ours.
  void print_memory() const {
    if (!plan_.unsharded) {
      std::cout << "memory of rank 0 of " << runtime_.num_ranks() << "\n"
                << memory_text(size_, runtime_.ledger());
      if (plan_.memory) {
        std::cout << places_text(plan_.memory->plan, runtime_.ledger(), nvme_)
                  << pinned_text(runtime_.device().pin_stats());
      }
      std::cout << std::flush;
    }
  }

  RunHead head() const {
    RunHead head;
    head.preset = plan_.preset;
    head.precision = plan_.config.get_string("precision");
    head.num_params = size_.num_params;
    head.num_frozen = size_.num_params - size_.num_trainable;
    head.frozen_bits = plan_.frozen_bits;
    head.unsharded = plan_.unsharded;
    head.num_ranks = runtime_.num_ranks();
    const comm::Group& group = runtime_.group();
    head.backend = group.backend_name();
    if (!group.backend_note().empty()) {
      head.backend += "; " + group.backend_note();
    }
    head.device = runtime_.device().name();
    head.num_threads = plan_.num_threads;
    head.num_steps = plan_.num_steps;
    head.num_epochs = plan_.verify ? 0 : plan_.num_epochs;
    head.sequences_per_epoch = plan_.sequences_per_epoch;
    if (evaluation_) {
      head.num_evaluated = plan_.evaluation->data.batch;
      head.eval_data = evaluation_->data_name();
    }
    head.batch = plan_.batch.total;
    head.accumulate = plan_.batch.accumulate;
    head.sequence = plan_.model.sequence;
    head.data = data_.name();
    return head;
  }

  const TrainPlan& plan_;
  models::TokenSource& data_;
  Runtime& runtime_;
  StopSignals& signals_;
  const bool speaks_;
  const std::int64_t start_ns_;
  const FlopRate flops_;
  StepPhases phases_;
  Batches batches_;
  std::unique_ptr<Trainer> trainer_;
  ModelBytes size_;
  std::optional<Twin> twin_;  // rank 0, with --verify
  std::optional<Evaluation> evaluation_;
  std::optional<Checkpoints> checkpoints_;
  std::optional<Observers> observers_;  // rank 0, while steps run
  Divergence divergence_;
  RunTotals totals_;
  NvmeTotals nvme_;
  std::int64_t num_done_ = 0;  // steps, those before the run went on included
  bool has_told_quant_error_ = false;
  bool stop_ = false;  // the same on all ranks
};

int train_rank(const TrainFlags& flags, const comm::Rendezvous& rendezvous,
               comm::RankProcess& process, StopSignals& signals) {
  TrainPlan plan = checked_plan(flags, rendezvous);
  const TorchWarnings torch_warnings(
      rendezvous.world_size == 1 ? "tessera: "
                                 : "tessera: rank " + std::to_string(rendezvous.rank) + ": ");
  if (rendezvous.rank == 0) {
    print_warnings(plan);
  }
  at::globalContext().setDeterministicAlgorithms(plan.deterministic, /*warn_only=*/false);
  // Of torch's own generators, whose states are part of a checkpoint; each rank has other numbers.
  at::manual_seed(plan.seed * std::uint64_t{0x9e3779b97f4a7c15} +
                  static_cast<std::uint64_t>(rendezvous.rank));
  const std::unique_ptr<models::TokenSource> data = models::open_data(plan.data);
  check_resume(plan, *data);
  plan.weights = open_initial_weights(plan);
  if (plan.checkpoint && rendezvous.rank == 0) {
    plan.root_lock = lock_root(*plan.checkpoint, plan.resume);
  }
  at::set_num_threads(plan.num_threads);
  if (plan.cuda_device < 0) {
    keep_tensor_memory();
  }
  Runtime runtime(plan.config, runtime_options(plan));
  process.set_status(runtime.status());
  const std::string found = plan_run_memory(plan, runtime);
  if (rendezvous.rank == 0) {
    std::cout << found << (plan.memory ? memory_plan_text(plan, rendezvous.local_world_size) : "")
              << (plan.weights ? "initial parameters: " + printable(plan.init) + " (" +
                                     plan.weights->summary() + ")\n"
                               : "")
              << std::flush;
  }
  try {
    return Run(plan, *data, runtime, signals).train();
  } catch (const c10::OutOfMemoryError& error) {
    throw DeviceError(out_of_memory_text(error.what_without_backtrace(), runtime.ledger(),
                                         runtime.device().memory_info()));
  }
}

// As train_rank(), with failures of memory in words.
int train_in_words(const TrainFlags& flags, const comm::Rendezvous& rendezvous,
                   comm::RankProcess& process, StopSignals& signals) {
  try {
    return train_rank(flags, rendezvous, process, signals);
  } catch (const std::bad_alloc&) {
    throw Error(no_memory_text(0));
  } catch (const std::system_error& error) {
    // A thread that finds no memory for its stack.
    TESSERA_CHECK(error.code().value() != EAGAIN && error.code().value() != ENOMEM, Error,
                  no_memory_text(0), "; the system says: ", error.what());
    throw;
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    TESSERA_CHECK(!is_host_allocation_failure(text), Error, no_memory_text(host_asked_bytes(text)));
    // Torch's words, without the stack trace behind them.
    throw Error(text);
  }
}

}  // namespace

int train_this_rank(const TrainFlags& flags, const comm::Rendezvous& rendezvous,
                    comm::RankProcess& process, StopSignals& signals) {
  try {
    return train_in_words(flags, rendezvous, process, signals);
  } catch (const PeerError&) {
    throw;
  } catch (const std::exception& error) {
    if (!process.has_status() && !process.launched_by_us()) {
      comm::tell_before_joining(rendezvous, error.what());
    }
    throw;
  }
}

}  // namespace tessera::cli
