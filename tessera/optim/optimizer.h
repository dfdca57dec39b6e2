// The optimizer of this rank's shards: fp32 master weights, named states (optimizer_states.h), and
// their update.
//
// A parameter's placement gives the tiers of its shard, gradient and states, and its updater. Two
// executors share the work, each in the order of registration; no bit depends on which one updates.
//
//   DeviceExecutor   on the streams of the device, ordered after the reductions that make the
//                    gradients. On a CPU without NVMe it updates everything, on the calling thread.
//   CpuPipeline      on a separate thread: all parameters of a CPU where anything is on NVMe, and
//                    the CPU's share of the update where there is a discrete device.
//
// Invariants:
//  (1) For fp32 parameters the shard is the master.
//  (2) A parameter that was never trainable has neither master nor states. Those of a parameter
//      that is frozen later are kept, and continue when it is unfrozen.
//  (3) Padding is never updated: it stays zero.
//
// [Note: a failed update] If a sub-group cannot be read or written, some parameters are updated and
// others are not. The parameter concerned and all that are not updated yet fail, and so do wait()
// and every later start_update(), with the first cause: training can resume only from a checkpoint.
// A write may fail late: later parameters may be updated by then, and stay so.
//
// Threads: as Param, in addition to those of the executors, which call kernels until
// wait_updated(); no other thread may call kernels meanwhile.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/device/device.h"
#include "tessera/grad/reducer.h"
#include "tessera/optim/clip.h"
#include "tessera/optim/cpu_pipeline.h"
#include "tessera/optim/device_executor.h"
#include "tessera/optim/optimizer_options.h"
#include "tessera/optim/optimizer_states.h"
#include "tessera/optim/rule.h"
#include "tessera/shard/param.h"

namespace tessera::optim {

// What a rank adds to the sums of a step, in addition to its squares.
struct OwnSums {
  StepSums sums;
  // The weighted loss in device memory, computed by the compute stream; null: it is in `sums`.
  std::shared_ptr<const double> weighted_loss;
  // Ranks over which the squares are summed first, where the group of the other sums does not have
  // the order of shards; null: all sums are made together.
  comm::Group* squares_group = nullptr;
  // False: another rank adds the same squares.
  bool adds_squares = true;
  // Blocks until all ranks mean the collectives of the step that nobody here knows of, as gathers,
  // and throws what went wrong. Waits for no device. Empty: there are none.
  std::function<void()> wait_agreed;
};

class Optimizer {
 public:
  // REQUIRES: the table is complete, with placements and initial values. Masters and states are
  // `carried` from an earlier optimizer (take_states()), or made by make_states(). ConfigError if
  // the buffers cannot hold one sub-group or a slot cannot hold one piece.
  Optimizer(shard::ParamTable& params, const RuleOptions& rule, OptimizerOptions options,
            CarriedStates carried = {});
  // Waits for running updates. Failures are reported through their Pendings.
  ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // Before the first step: makes missing masters from the shards, and missing moments as zero.
  // IoError if they cannot be written.
  void make_states();

  // Call it when a step begins, before its gradients exist: reads states of the first sub-groups,
  // as far as leases are free, and copies states to the device that it will update, as far as slots
  // are free.
  void prepare();
  // This rank's sum over trainable parameters, in registration order. Blocks.
  double sum_of_squares(grad::Reducer& gradients);
  // Starts the update of every trainable parameter that has a gradient (Reducer::has_gradient()).
  // As in torch's optimizers, other parameters are unchanged, with their states and the step count
  // of their bias corrections. Sets each parameter's Pending (Param::set_updated). Gradients must
  // not change until all updates are done: call wait_updated() before the next backward adds to
  // them. Updates on the device's streams only need the gradients to stay allocated, because
  // reductions of the next backward are ordered after them.
  void start_update(grad::Reducer& gradients, double lr, double gradient_scale);

  // Enqueues norm, all-reduce over `group`, step factor (clip.h) and updates as work of a discrete
  // device. Before the updates the host waits until ranks have agreed on the collectives
  // (Group::wait_agreed), never for the norm. Collective. Returns false, and enqueues nothing, if
  // an update does not run on the device with resident states, or a group is not stream-ordered. If
  // it throws, no update was started.
  bool start_step(grad::Reducer& gradients, double lr, const StepInputs& inputs, const OwnSums& own,
                  comm::Group& group);
  // The sums over all ranks, of the step that was started: waits for them, not for the updates. The
  // step then counts, and parameters have the Pendings of their updates, unless the step is skipped
  // (a non-finite gradient, or weights that give no mean): then nothing has changed.
  StepSums finish_step();

  // Blocks until all started updates are computed; throws their first failure. Gradients may then
  // be freed. Writes to NVMe may still be in flight.
  void wait_updated();
  // The same, and waits for writes to NVMe.
  void wait();
  std::int64_t num_updates() const { return num_updates_; }
  // Call it between updates after a parameter was frozen or unfrozen: makes the states that it
  // needs.
  void follow_trainable(int param);
  // fp32, shard_numel() elements; "master" or one of state_names(). Empty for parameters that were
  // never trainable. Waits for the parameter's update. The span is in place if the host can read
  // it, else a copy that is valid until the next call of any method. ConfigError for a name that
  // the rule does not have.
  std::span<float> state(int param, std::string_view name);

  // The tensors of a parameter that a save reads and a load writes, tile by tile, from any tier:
  // "master", unless the shard is the master, then the rule's states; none if the parameter was
  // never trainable. A tensor's index is its position here. For the shard itself see
  // shard::start_read_shard().
  std::vector<std::string_view> tensor_names(int param) const;
  std::int64_t num_updates(int param) const { return states_.num_updates(param); }
  // Reads elements [begin, begin + numel) of this rank's part of a tensor, in fp32; padding is
  // zero. `begin` is a multiple of shard::kShardStep; `to` is aligned to tier::kBlockBytes and has
  // room for numel rounded up to kShardStep. From any thread, also several at once. REQUIRES:
  // wait() has returned since the parameter's last update was started, and whatever changes its
  // tensors is ordered behind the read (ParamTable::before_overwrite()).
  device::Pending start_read(int param, std::size_t tensor, std::int64_t begin, std::int64_t numel,
                             std::byte* to) const;

  // A load: between begin_writes() and end_writes() tensors are written, and only the methods below
  // are called. begin_writes() waits for all updates and writes. After end_writes() the tensors
  // count as the result of `num_updates` updates. If a call in between throws, only some tensors
  // are written, and all must be written again.
  void begin_writes();
  void end_writes(std::int64_t num_updates);
  // Call it before the first write() of a parameter's tensors, all of which must then be written.
  // One caller at a time; other threads may write tensors of other parameters meanwhile.
  void prepare_writes(int param);
  // Blocks, except for writes to NVMe, which may still be in flight on return. `numel` is a
  // multiple of shard::kShardStep, except at the end; padding stays zero whatever `from` has there.
  // From several threads at once.
  void write(int param, std::size_t tensor, std::int64_t begin, std::int64_t numel,
             const std::byte* from);
  // Call it when all tensors of the parameter are written.
  void set_num_updates(int param, std::int64_t updates);
  // Makes states of a frozen parameter that was trainable when it was saved; before
  // prepare_writes(). Does nothing if it has states.
  void add_states(int param);

  // Waits for all updates, and moves masters and states out, by parameter, so that placements may
  // change. Afterwards only the destructor may be called.
  CarriedStates take_states();
  // Call it after the shard was written from outside: the master follows it.
  void reset_master(int param);

  // The CPU's sub-groups. REQUIRES: the CPU updates something.
  const SubGroupPlan& plan() const { return pipeline_->plan(); }
  DeviceExecutor& device_executor() { return *executor_; }
  // Counts since the last call.
  OptimizerStats take_stats();

 private:
  void add(int id);
  // Makes the states and the master.
  void make_states(int id);
  void make_master(int id);
  // CpuPipeline::refresh_copy(), for parameters that it updates.
  const std::byte* refresh_copy(int id);
  void set_plan();
  std::vector<int> trainable(bool on_cpu) const;
  // Waits for everything, and releases all leases.
  void finish();
  // The only place that sets the Pendings of updates on parameters.
  void publish(std::vector<StartedUpdate> started);
  double* norm_results();
  // Addresses of the sums of squares that the norm adds, in its order, valid once the reduce stream
  // has written them. `is_ordered`: uses Reducer::ordered_gradient(), so nothing waits.
  std::vector<const double*> start_norm(grad::Reducer& gradients, bool is_ordered);

  shard::ParamTable& params_;
  const RuleOptions rule_;
  const OptimizerOptions options_;
  device::Stream& reduce_;
  OptimizerStates states_;
  std::vector<bool> are_set_;  // by id: masters and moments have their values
  std::vector<float> copy_;    // what state() has read
  std::int64_t num_updates_ = 0;

  // Sums of squares, one per parameter. Kernels of a discrete device write to pinned memory only.
  std::vector<double> host_norms_;
  device::Memory pinned_norms_;
  std::vector<double> known_norms_;  // sums that the reducer has computed on the way
  // Memory of start_step(), on a discrete device.
  struct StepMemory {
    StepSums sums;
    StepOnDevice step;
  };
  struct HostStepMemory {
    StepSums own;
    FoundStep found;
  };
  device::Memory step_;                      // one StepMemory, for kernels
  device::Memory step_pinned_;               // one HostStepMemory
  std::shared_ptr<const double> step_loss_;  // read by the reduce stream
  grad::Reducer* step_gradients_ = nullptr;
  device::Pending sums_reduced_;
  device::Pending step_found_;
  std::optional<std::vector<StartedUpdate>> held_;  // started; see finish_step()

  // Last: their work uses the above.
  std::unique_ptr<DeviceExecutor> executor_;
  std::unique_ptr<CpuPipeline> pipeline_;  // null: the CPU updates nothing
};

}  // namespace tessera::optim
