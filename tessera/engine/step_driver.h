// Internal to engine: drives the steps. It acts when a unit's backward begins, when a gradient is
// complete, and when a backward or a step ends.
//
//   backward()   autograd runs; each complete gradient goes to the reducer
//   step()       norm, clip factor, update of every shard
//
// With states on NVMe or on a discrete device the update continues concurrently with the next
// forward, and reads gradients until finish_reading_gradients().
//
// Order of collectives: see engine.h.
//
// Threads: as Engine; hooks run on autograd's threads while backward() waits.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/engine/backward_watch.h"
#include "tessera/engine/engine_context.h"
#include "tessera/engine/model.h"
#include "tessera/engine/step_state.h"
#include "tessera/grad/reducer.h"
#include "tessera/optim/clip.h"
#include "tessera/optim/loss_scale.h"
#include "tessera/optim/optimizer.h"
#include "tessera/optim/schedule.h"

namespace tessera::engine {

// For a save that runs while training goes on (checkpoint_saver.h): how many ranks have written
// their parts, and how many have failed.
struct SaveVotes {
  double num_done = 0;
  double num_failed = 0;
};

class StepDriver {
 public:
  StepDriver(EngineContext& context, RankAgreement& ranks, Model& model, std::int64_t run_steps);
  ~StepDriver();
  StepDriver(const StepDriver&) = delete;
  StepDriver& operator=(const StepDriver&) = delete;

  // Makes optimizer and reducer. REQUIRES: the model is complete, and every shard is in its tier.
  void finalize();
  // Makes the optimizer's states before their first use; a load writes them instead. Does nothing
  // if they are made.
  void make_states();

  // --- calls of Engine; REQUIRES: EngineObjects::begin_pass() has run ---
  static void check_losses(const std::vector<at::Tensor>& losses, double weight);
  void backward(const std::vector<at::Tensor>& losses, double weight);
  StepResult step();
  std::optional<StepResult> join();
  void zero_grad();
  void request_stop() { stop_ = true; }
  void set_trainable(const at::Tensor& tensor, bool trainable);

  // --- events of units and autograd --- Abandons a failed backward that was not started by
  // Engine::backward(): its callbacks have not run.
  void end_failed_backward();
  // Adapts to changes of requires_grad since the last step.
  void notice_trainable();
  // A unit's backward begins. In a backward that Engine::backward() did not start
  // (torch::autograd::grad) it also queues a callback that closes uses when autograd is done.
  void enter_backward();
  void on_gradient(int id, const at::Tensor& tensor);
  // A forward of the unit is enqueued, ordered after the update of its parameters. Frees the memory
  // of their gradients, and of device copies that lie in it (shard::DeviceCopy), for activations.
  void free_behind_forward(coordinator::UnitId unit);
  // See [Note: abandoning a pass] in lifecycle.h. Waits for no rank that needs this one.
  void abandon() noexcept;
  // The shard was written from outside: increments its version and makes the master weights follow.
  void shard_was_written(int id);
  // Waits until the update of the last step has read its gradients; call it before they change. Its
  // results may still be on the way to NVMe.
  void finish_reading_gradients();
  // The same, and waits until all results are written; call it before anything outside of training
  // reads or changes parameters and states.
  void finish_update();

  // --- saves ---
  // Throws ConfigError where gradients of micro-batches wait for their step().
  void check_no_gradients_pending(const char* what) const;
  StepState state() const;
  // Continues after step `num_steps`; the optimizer's own counts are not part of it. Scales of fp16
  // start anew if the state is of another type.
  void set_state(std::int64_t num_steps, const StepState& state);
  // `votes` gives this rank's numbers in every step; save_votes() has their sums over ranks, from
  // the last step.
  void set_save_votes(std::function<SaveVotes()> votes) { ask_votes_ = std::move(votes); }
  const SaveVotes& save_votes() const { return save_votes_; }
  // Seconds from the end of the previous step to the last step's update (forward and backward); an
  // estimate after the first step; null before it.
  std::optional<double> last_seconds_before_update() const { return seconds_before_update_; }

  BackwardWatch& backward_watch() { return *watch_; }
  optim::Optimizer& optimizer() { return *optimizer_; }  // once finalized; states: make_states()
  std::int64_t num_steps() const { return num_steps_; }
  std::int64_t num_updated_steps() const { return num_updated_steps_; }  // without skipped steps
  EngineStats take_stats();

 private:
  void make_reducer();
  void check_no_gradients_pending(int id) const;
  void change_trainable(const std::vector<int>& ids);
  void reduce_gradient(const shard::Param& param, at::Tensor gradient);
  bool is_fp16() const;
  // As before the first step.
  void begin_scales();
  void agree_on_weight_scale(double weight);
  void find_weight_scale(double weight);  // REQUIRES: all ranks call it
  void close_backward();
  // Called in a catch block: keeps the text for step() and rethrows, with advice of torch that does
  // not apply here replaced.
  [[noreturn]] void rethrow_backward_error();
  void drop_gradients() noexcept;
  // Drains the reductions that abandon() left in flight. May block on other ranks; every rank that
  // continues reaches this call. Call it before any other use of the reducer.
  void drop_failed_gradients() noexcept;
  // Enqueues norm, sums over ranks, factor and updates where the device needs nothing from the host
  // in between (`is_started`); otherwise computes the sums and waits for them. Makes stop_ the same
  // on all ranks.
  optim::StepSums sum_over_ranks(double lr, bool& is_started);
  // Collective, after the first step, if memory was planned for that step only (engine_tiers.h).
  void fix_placement();
  void tell_sent_bytes();
  StepResult finish_step();

  EngineContext& ctx_;
  RankAgreement& ranks_;
  Model& model_;
  const optim::ScheduleOptions schedule_;
  const double clip_norm_;
  const bool skip_nonfinite_;
  const std::int64_t num_micro_batches_;  // of a step
  const bool checks_replicas_;
  const std::shared_ptr<BackwardWatch> watch_;

  // Once finalized.
  std::optional<optim::LossScale> loss_scale_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  bool states_are_made_ = false;
  std::unique_ptr<grad::Reducer> reducer_;

  std::int64_t num_steps_ = 0;
  std::int64_t num_updated_steps_ = 0;
  bool trainable_is_known_ = false;    // requires_grad cannot have changed since the last check
  bool stop_ = false;                  // this rank was asked to stop; after a step: any rank was
  bool update_runs_ = false;           // since the last step; its gradients are still held
  bool writes_run_ = false;            // the update's writes may still run
  bool closing_is_queued_ = false;     // for a backward of torch::autograd
  bool has_failed_gradients_ = false;  // see drop_failed_gradients()
  // Divisor of loss weights: a power of two that keeps gradients in the range of fp16, agreed on at
  // the first backward; 0 before that. 1 for all other types, which have the range of fp32.
  double weight_scale_ = 0;
  double weight_sum_ = 0;     // this rank's, of this step, in units of weight_scale_
  at::Tensor weighted_loss_;  // fp64 on the device; this rank's, of this step
  std::function<SaveVotes()> ask_votes_;
  SaveVotes save_votes_;          // sums over ranks, from the last step
  std::int64_t step_end_ns_ = 0;  // end of the last step; 0: there was none
  std::int64_t first_backward_ns_ = 0;
  std::optional<double> seconds_before_update_;
  double exposed_wait_s_ = 0;
  int steps_told_ = 0;  // see tell_sent_bytes()
  SentBytes sent_in_first_;
  // Already reported by take_stats().
  SentBytes sent_;
  std::uint64_t sent_to_replicas_ = 0;
  grad::ReducerStats replaced_reductions_;  // of replaced reducers, since take_stats()
  std::optional<EngineStats> first_stats_;  // of a step that fix_placement() ended
};

}  // namespace tessera::engine
