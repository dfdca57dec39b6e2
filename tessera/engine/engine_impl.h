// The inside of Engine: who is told what when a unit runs, a gradient comes or a step ends.
//
// Life: units are added; the first use seals the engine (buckets, optimizer states and the arena
// depend on all parameters); then forward, backward and step in turn.
//
// [Note: abandoning a pass] An exception in a forward leaves gathers and open uses behind.
// abandon() puts all of them back and counts an epoch; whatever the old graph still holds (scopes,
// hooks) sees that its epoch is over and does nothing more than it must. Gradients of micro-batches
// that are complete stay. An exception in a backward leaves some gradients of its micro-batch and
// not others: then those of the step are forgotten, and step() refuses until zero_grad() has been
// called.
//
// Threads: as Engine.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/coordinator/coordinator.h"
#include "tessera/engine/backward_watch.h"
#include "tessera/engine/early_updates.h"
#include "tessera/engine/engine.h"
#include "tessera/engine/gathered_book.h"
#include "tessera/engine/unit_state.h"
#include "tessera/grad/reducer.h"
#include "tessera/optim/clip.h"
#include "tessera/optim/loss_scale.h"
#include "tessera/optim/optimizer.h"
#include "tessera/optim/schedule.h"
#include "tessera/shard/param.h"

namespace tessera {

namespace engine {
struct ResidentState {
  Engine::Impl* engine = nullptr;  // null: closed
  bool is_resident = false;
};
}  // namespace engine

// Of two reducers, one after the other.
inline void add_stats(grad::ReducerStats& to, const grad::ReducerStats& stats) {
  to.num_reductions += stats.num_reductions;
  to.reduced_bytes += stats.reduced_bytes;
  to.held_bytes_peak = std::max(to.held_bytes_peak, stats.held_bytes_peak);
  to.exposed_wait_s += stats.exposed_wait_s;
  to.host_bytes += stats.host_bytes;
  to.nvme_read_bytes += stats.nvme_read_bytes;
  to.nvme_written_bytes += stats.nvme_written_bytes;
}

class Engine::Impl {
 public:
  Impl(Runtime& runtime, const EngineOptions& options);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  // --- building (engine_build.cpp) ---
  engine::UnitCore* add_unit(const std::string& name, const std::vector<NamedTensor>& params,
                             const UnitOptions& options, const std::string& module_type);
  void add_external(engine::UnitCore& unit, const at::Tensor& tensor);
  // Collective: rank 0's values count, so that no rank can differ.
  void send_buffers(const std::string& unit, const std::vector<NamedTensor>& buffers);
  // (engine_traits.cpp)
  void set_leaf(const coordinator::LeafRule& rule, bool is_leaf);
  void set_leaf(const std::string& name, bool is_leaf);
  std::vector<std::string> leaf_units();
  // No unit can be added from here on.
  void seal();
  bool is_sealed() const { return reducer_ != nullptr; }

  // --- one step ---
  void backward(const std::vector<at::Tensor>& losses, double weight);
  StepResult step();
  void request_stop() { stop_ = true; }
  // (engine_failures.cpp)
  void zero_grad();
  // (engine_inference.cpp)
  std::optional<StepResult> follow();
  std::shared_ptr<engine::ResidentState> begin_resident();
  void end_resident(engine::ResidentState& state);
  void check_not_resident(const char* what) const;
  // See [Note: abandoning a pass]. Never throws.
  void abandon() noexcept;
  std::uint64_t epoch() const { return epoch_; }

  // --- events of units and autograd ---
  // Before a forward or backward: everything is in place, and nothing of a failed pass is left.
  void begin_pass();
  coordinator::Coordinator& coordinator() { return *coordinator_; }
  int& forward_depth() { return forward_depth_; }
  // Registered ones of all modules.
  const std::vector<at::Tensor>& buffers() const { return buffers_; }
  // Steps that were not skipped.
  std::int64_t num_updated_steps() const { return num_updated_steps_; }
  // A unit's backward begins. Outside of Engine::backward() (torch::autograd::grad) this also sees
  // to it that uses are closed when autograd is done.
  void enter_backward(const engine::UnitCore& unit);
  void on_gradient(int id, const at::Tensor& tensor);
  engine::BackwardWatch& backward_watch() { return *watch_; }
  engine::EarlyUpdates& early_updates() { return early_; }

  // --- parameters between steps (engine_params.cpp) ---
  int id_of(const at::Tensor& tensor) const;
  // Null: it is no parameter of this engine.
  const std::string* name_of(const at::Tensor& tensor) const;
  bool is_used_by(const at::Tensor& param, const engine::UnitCore& unit) const;
  std::vector<int> ids_of(const std::vector<at::Tensor>& wanted) const;
  void set_trainable(const at::Tensor& tensor, bool trainable);
  void to_plain();
  engine::GatheredBook& gathered() { return gathered_; }
  // This rank's elements of the parameter, which begin at `elements`, on the host or the device.
  void copy_to_shard(const shard::Param& param, const void* elements);
  // Elements [begin, begin + numel) of the shard; begin is a multiple of shard::kShardStep.
  void copy_to_shard(const shard::Param& param, std::int64_t begin, std::int64_t numel,
                     const void* elements);
  // The shard has new values: its version counts, and the master weights follow.
  void shard_was_written(int id);
  // A forward of the unit has been given to the compute stream: what it has copied on the device
  // (shard::DeviceCopy) lies in memory of gradients, which activations may have now.
  void let_go_of_copies(coordinator::UnitId unit);
  // Before a collective that is no unit's: see coordinator/meeting.h.
  void meet_outside_of_units(const std::string& what);
  // Collective: every rank's numbers, in rank order.
  std::vector<std::int64_t> gather_numbers(const std::vector<std::int64_t>& mine,
                                           const std::string& what);

  // Collective: `check` throws on a rank that cannot take part in what comes next, and then no rank
  // does: that rank throws its own error, the others a ConfigError with its words. Before the first
  // collective of whatever one rank can refuse.
  void agree(const std::string& what, const std::function<void()>& check);

  // --- values (engine_values.cpp) ---
  // Collective: the whole parameter in memory of its own, waited for.
  device::Memory gather_full(int id, const std::string& what);
  at::Tensor full_value(int id);
  void save_parameters(const std::string& path);

  EngineStats take_stats();

  // Throws what a scope's destructor could not, and refuses after to_plain(), after a step that was
  // torn apart, and between updates during backward and their step().
  void check_usable(const char* what = "this call");
  comm::Group& group() const { return group_; }

  Runtime& runtime;
  const std::unique_ptr<device::Device> shard_device;  // where shards live; null: the runtime's
  shard::ParamTable params;
  engine::EngineTiers tiers;
  std::vector<at::Tensor> tensors;              // by id
  std::unique_ptr<optim::Optimizer> optimizer;  // once sealed
  std::int64_t num_steps = 0;

 private:
  comm::Group& reduce_group() const { return reductions_ ? *reductions_ : runtime.reduce_group(); }
  // `before`: its values before it was converted to another type; undefined: it was not.
  int add_param(const NamedTensor& param, const at::Tensor& before, const Init& init,
                double weight_decay_scale);
  void check_param(const std::string& name, const at::Tensor& tensor) const;
  void warn_of_units_inside(const std::string& name, const std::vector<int>& ids) const;
  // What parameters and floating buffers become as a unit is made; null: what they are.
  std::optional<DType> wanted_dtype() const;
  coordinator::UnitTraits traits_of(const std::string& name, const std::string& type,
                                    bool dynamic) const;
  void apply_leaf_options();
  void settle_units();
  void seal_units();
  planner::ModelShapes shapes() const;
  void fill_shard(const shard::Param& param, const Init& init);
  std::int64_t trainable_bytes() const;
  void make_reducer();
  void watch_gradient(int id);
  // Adapts to what the user did to requires_grad since the last step.
  void notice_trainable();
  void check_no_gradients_pending(int id) const;
  void change_trainable(const std::vector<int>& ids);
  void reduce_gradient(const shard::Param& param, at::Tensor gradient);
  void agree_on_weight_scale(double weight);
  void find_weight_scale(double weight);  // where all ranks are
  StepResult finish_step();
  void close_backward();
  // In a handler: keeps what was said for step(), and rethrows, in the user's words where torch's
  // are about something that ours does not have.
  [[noreturn]] void rethrow_backward_error();
  void forget_gradients() noexcept;
  // The next backward is the last of its step, and updates may start in it.
  void begin_early_updates(double weight);
  // Before gradients change: the update of the last step may still read them.
  void finish_update();
  // `is_started`: by Optimizer::start_step(). Makes stop_ the same on all ranks.
  optim::StepSums sum_over_ranks(bool is_started);

  comm::Group& group_;
  std::unique_ptr<comm::Group> reductions_;  // of a given group; null: the runtime's
  std::unique_ptr<coordinator::Coordinator> coordinator_;
  std::unique_ptr<grad::Reducer> reducer_;  // once sealed
  std::vector<std::shared_ptr<engine::UnitCore>> units_;
  std::vector<std::vector<engine::UnitCore*>> units_of_param_;  // by id
  std::unordered_map<const c10::TensorImpl*, int> id_of_tensor_;
  std::vector<at::Tensor> buffers_;
  const std::shared_ptr<engine::BackwardWatch> watch_;
  engine::GatheredBook gathered_;
  engine::EarlyUpdates early_;
  std::shared_ptr<engine::ResidentState> resident_;  // null: no scope is open

  const optim::ScheduleOptions schedule_;
  std::optional<optim::LossScale> loss_scale_;  // once sealed
  const double clip_norm_;
  const bool skip_nonfinite_;
  const std::int64_t num_micro_batches_;  // of a step
  const std::uint64_t seed_;
  std::uint64_t epoch_ = 0;
  std::int64_t num_updated_steps_ = 0;
  int forward_depth_ = 0;
  int backward_depth_ = 0;           // of Engine::backward()
  bool trainable_is_known_ = false;  // nobody can have changed requires_grad since we looked
  bool leaf_options_applied_ = false;
  bool is_plain_ = false;           // after to_plain()
  bool stop_ = false;               // this rank was asked to stop; behind a step: any rank was
  bool update_runs_ = false;        // since the last step; its gradients are still there
  bool closing_is_queued_ = false;  // for a backward that is not ours
  std::string failed_backward_;  // why gradients of this step are incomplete; empty: they are not
  // Divides weights: a power of two that keeps gradients in the range of fp16, agreed at the first
  // backward; 0: not yet. 1 for all other types, which have fp32's range.
  double weight_scale_ = 0;
  double weight_sum_ = 0;     // of this rank and step, in units of weight_scale_
  at::Tensor weighted_loss_;  // fp64 on the device, of this rank and step
  double exposed_wait_s_ = 0;
  grad::ReducerStats replaced_reductions_;  // of a reducer that is no more, since take_stats()
};

}  // namespace tessera
