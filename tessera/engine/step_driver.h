// Internal to engine: one step after the other: what happens when a unit's backward begins, a
// gradient is complete, a backward or a step ends.
//
//   backward()   autograd runs; each complete gradient goes to the reducer
//   step()       norm, clip factor, update of every shard
//
// On NVMe, and on a device with memory of its own, the update runs on beside the next forward, and
// reads gradients until finish_reading_gradients().
//
// What fixes the order of collectives: see engine.h.
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

// Of a save beside training (checkpoint_saver.h): ranks that are done with their parts, and ranks
// whose part has failed.
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

  // The model is complete, and the shards are where they stay: makes optimizer and reducer.
  void finalize();
  // The optimizer's states, before anything but a load needs them. Nothing if they are made.
  void make_states();

  // --- Engine's calls; a pass has begun (EngineObjects::begin_pass()) ---
  static void check_losses(const std::vector<at::Tensor>& losses, double weight);
  void backward(const std::vector<at::Tensor>& losses, double weight);
  StepResult step();
  std::optional<StepResult> join();
  void zero_grad();
  void request_stop() { stop_ = true; }
  void set_trainable(const at::Tensor& tensor, bool trainable);

  // --- events of units and autograd ---
  // A backward that was not ours and failed has not run its callbacks: abandons it.
  void end_failed_backward();
  // Adapts to what the user did to requires_grad since the last step.
  void notice_trainable();
  // A unit's backward begins. Outside of Engine::backward() (torch::autograd::grad) this also sees
  // to it that uses are closed when autograd is done.
  void enter_backward();
  void on_gradient(int id, const at::Tensor& tensor);
  // A forward of the unit is enqueued, behind the update of its parameters: activations may have
  // the memory of their gradients now, and of copies on the device (shard::DeviceCopy), which lie
  // there.
  void free_behind_forward(coordinator::UnitId unit);
  // See [Note: abandoning a pass] in lifecycle.h. Waits for no rank that needs this one.
  void abandon() noexcept;
  // The shard has new values: its version counts, and the master weights follow.
  void shard_was_written(int id);
  // Before gradients change: the update of the last step may still read them. What it has made may
  // still be on its way to NVMe.
  void finish_reading_gradients();
  // Before anybody else than training sees or changes anything: the same, and all is written.
  void finish_update();

  // --- saves ---
  // Throws ConfigError where gradients of micro-batches wait for their step().
  void check_no_gradients_pending(const char* what) const;
  StepState state() const;
  // Goes on behind this step; what the optimizer counts is its own. Scales of fp16 begin anew where
  // the state is of another type.
  void set_state(std::int64_t num_steps, const StepState& state);
  // Asks `votes` of this rank in every step; save_votes() are the sums over ranks, of the last.
  void set_save_votes(std::function<SaveVotes()> votes) { ask_votes_ = std::move(votes); }
  const SaveVotes& save_votes() const { return save_votes_; }
  // From the end of the last step but one to the update of the last, of the first step about that;
  // null: there was none.
  std::optional<double> last_seconds_before_update() const { return seconds_before_update_; }

  BackwardWatch& backward_watch() { return *watch_; }
  optim::Optimizer& optimizer() { return *optimizer_; }  // once finalized; see make_states()
  std::int64_t num_steps() const { return num_steps_; }
  std::int64_t num_updated_steps() const { return num_updated_steps_; }  // that were not skipped
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
  void find_weight_scale(double weight);  // where all ranks are
  void close_backward();
  // In a handler: keeps the text for step(), and rethrows; torch's advice that does not apply here
  // is replaced.
  [[noreturn]] void rethrow_backward_error();
  void drop_gradients() noexcept;
  // What abandon() has left of a backward: where that may wait for other ranks, which all come here
  // if they go on. Before anybody asks the reducer for anything.
  void drop_failed_gradients() noexcept;
  // Enqueues norm, sums over ranks, factor and updates, where the device can do without the host,
  // or finds the sums first. Makes stop_ the same on all ranks.
  optim::StepSums sum_over_ranks(double lr, bool& is_started);
  // Behind the first step, where memory was planned for that one only (engine_tiers.h). Collective.
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
  bool trainable_is_known_ = false;    // nobody can have changed requires_grad since we looked
  bool stop_ = false;                  // this rank was asked to stop; behind a step: any rank was
  bool update_runs_ = false;           // since the last step; its gradients are still there
  bool writes_run_ = false;            // of it, perhaps
  bool closing_is_queued_ = false;     // for a backward that is not ours
  bool has_failed_gradients_ = false;  // see drop_failed_gradients()
  // Divides loss weights: a power of two that keeps gradients in the range of fp16, agreed at the
  // first backward; 0: not yet. 1 for all other types, which have fp32's range.
  double weight_scale_ = 0;
  double weight_sum_ = 0;     // of this rank and step, in units of weight_scale_
  at::Tensor weighted_loss_;  // fp64 on the device, of this rank and step
  std::function<SaveVotes()> ask_votes_;
  SaveVotes save_votes_;          // of the last step, of all ranks
  std::int64_t step_end_ns_ = 0;  // of the last step; 0: there was none
  std::int64_t first_backward_ns_ = 0;
  std::optional<double> seconds_before_update_;
  double exposed_wait_s_ = 0;
  int steps_told_ = 0;  // see tell_sent_bytes()
  SentBytes sent_in_first_;
  // That take_stats() has told.
  SentBytes sent_;
  std::uint64_t sent_to_replicas_ = 0;
  grad::ReducerStats replaced_reductions_;  // of a reducer that is no more, since take_stats()
  std::optional<EngineStats> first_stats_;  // of the first step, before its objects were replaced
};

}  // namespace tessera::engine
