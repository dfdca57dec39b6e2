// The optimizer of this rank's shards: fp32 master weights, named states (optimizer_states.h), and
// their update.
//
// A parameter's placement says where its shard, gradient and states live, and who updates it. Two
// executors share the work, each in the order of registration; no bit depends on who does it.
//
//   DeviceExecutor   on the streams of the device, behind the reductions that made the gradients.
//                    On a CPU without NVMe that is everything, on the calling thread.
//   CpuPipeline      on a thread of its own: all parameters of a CPU with something on NVMe, and
//                    the CPU's share beside a discrete device.
//
// For fp32 parameters the shard is the master. Frozen parameters have neither master nor states;
// those of a parameter that is frozen later stay, and go on where they were when it is unfrozen.
// Padding is never updated: it stays zero.
//
// [Note: a failed update] A sub-group that cannot be read or written leaves parameters of two ages
// behind. The parameter concerned and all that are not done yet fail, and so do wait() and every
// later start_update(), with the first cause: there is nothing to go on with but a checkpoint.
// Writes are slow to fail: parameters behind the one concerned may be done by then, and stay so.
//
// Threads: as Param, besides those of the executors, which call kernels until wait_updated():
// nobody else does meanwhile.
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

// What a rank adds to the sums of a step, besides its squares.
struct OwnSums {
  StepSums sums;
  // The weighted loss in memory of the device, as the compute stream makes it; null: it is in
  // `sums`.
  std::shared_ptr<const double> weighted_loss;
  // Ranks over which the squares are summed first, where their order is not that of shards in the
  // group of the other sums; null: all sums are made together.
  comm::Group* squares_group = nullptr;
  // False: another rank adds the same squares.
  bool adds_squares = true;
  // Blocks until all ranks mean the collectives of the step that nobody here knows of, as gathers,
  // and throws what went wrong. Waits for no device. Empty: there are none.
  std::function<void()> wait_agreed;
};

class Optimizer {
 public:
  // All parameters of the table are known now, with their placements and initial values. Masters
  // and states are those that an optimizer of before had (take_states()), or are made by
  // make_states(). ConfigError if buffers do not hold one sub-group or slots not one piece.
  Optimizer(shard::ParamTable& params, const RuleOptions& rule, OptimizerOptions options,
            CarriedStates carried = {});
  // Ends updates that still run; their failures are the waiters' business.
  ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // Masters from the shards, moments of zero, for those that have none yet: before the first step.
  // IoError if they cannot be written.
  void make_states();

  // A step has begun whose gradients are still to come: states of the first sub-groups are read, as
  // far as there are leases, and those that the device updates are sent there, as far as there are
  // slots.
  void prepare();
  // This rank's part, over trainable parameters in registration order. Blocks.
  double sum_of_squares(grad::Reducer& gradients);
  // Starts the update of every trainable parameter that has a gradient (Reducer::has_gradient()),
  // as torch's optimizers do: others stay as they are, with their states and the step that bias
  // corrections count. Gives each the Pending of its own (Param::set_updated). Gradients must stay
  // until all are done: wait_updated() before the next backward adds to them. On the device's
  // streams reductions of the next backward are behind the updates: there they must only be alive.
  void start_update(grad::Reducer& gradients, double lr, double gradient_scale);

  // Both as one piece of work of a discrete device, with the sums over the ranks of `group` and the
  // factor between them (clip.h): before the updates are enqueued the host waits until all ranks
  // mean the same collectives, which is up to their threads, and never for the norm. Collective.
  // False: that cannot be here, and nothing was started. Where it throws, no update was.
  bool start_step(grad::Reducer& gradients, double lr, const StepInputs& inputs, const OwnSums& own,
                  comm::Group& group);
  // The sums over all ranks, of the step that was started: waits for them, not for the updates.
  // From here on the step counts, and parameters have the Pendings of their updates; unless it was
  // skipped, as where the weights give no mean: then nothing has changed.
  StepSums finish_step();

  // For all updates so far; throws what went wrong. Gradients may go, and parameters are what they
  // will be; what the CPU has updated may still be on its way to NVMe.
  void wait_updated();
  // The same, and nothing is on its way.
  void wait();
  std::int64_t num_updates() const { return num_updates_; }
  // The parameter has been frozen or unfrozen: takes what it needs now. Between updates.
  void follow_trainable(int param);
  // fp32, shard_numel() elements; "master" or one of state_names(). Empty for parameters that were
  // never trainable. Waits for the parameter's update. In place where the host can reach it, else a
  // copy that is valid until the next call of any method. ConfigError for a name that the rule does
  // not have.
  std::span<float> state(int param, std::string_view name);

  // What a save reads and a load writes, tile by tile, wherever it is. Tensors of a parameter are
  // counted in the order of their names: "master", unless the parameter is its own, then the rule's
  // states; none if it was never trainable. The shard itself: shard::start_read_shard().
  std::vector<std::string_view> tensor_names(int param) const;
  std::int64_t num_updates(int param) const { return states_.num_updates(param); }
  // Elements [begin, begin + numel) of this rank's shard, in fp32; padding is zero. `begin` is a
  // multiple of shard::kShardStep; `to` is aligned to tier::kBlockBytes and has room for numel
  // rounded up to kShardStep. From any thread, also several at once. REQUIRES: wait() has returned
  // since the parameter's last update was started, and whatever changes its tensors is ordered
  // behind the read (ParamTable::before_overwrite()).
  device::Pending start_read(int param, std::size_t tensor, std::int64_t begin, std::int64_t numel,
                             std::byte* to) const;

  // Between the two, tensors are written and nothing else is called but what follows. The first
  // waits for everything. The second: as if updates had made them, `num_updates` so far. If a call
  // in between throws, tensors are of two origins, and have to be written anew.
  void begin_writes();
  void end_writes(std::int64_t num_updates);
  // Before the first write() of a parameter's tensors, all of which are written then. One caller at
  // a time, while others write those of other parameters.
  void prepare_writes(int param);
  // Blocks; on NVMe not until it is there. `numel` is a multiple of shard::kShardStep but at the
  // end; padding stays zero whatever is given for it. From several threads at once.
  void write(int param, std::size_t tensor, std::int64_t begin, std::int64_t numel,
             const std::byte* from);
  // When all have been written.
  void set_num_updates(int param, std::int64_t updates);
  // Of a parameter that is frozen, and was not when they were saved: before prepare_writes().
  // Nothing if it has them.
  void add_states(int param);

  // Waits for all updates, and gives masters and states away, parameter by parameter: placements
  // may change then. Of the optimizer nothing but its destructor is called afterwards.
  CarriedStates take_states();
  // After the shard was written from outside: the master follows it.
  void reset_master(int param);

  // Of the CPU's sub-groups. REQUIRES: there are some.
  const SubGroupPlan& plan() const { return pipeline_->plan(); }
  DeviceExecutor& device_executor() { return *executor_; }
  // Since the last call.
  OptimizerStats take_stats();

 private:
  void add(int id);
  // With its master.
  void make_states(int id);
  void make_master(int id);
  // CpuPipeline::refresh_copy(), of what it updates.
  const std::byte* refresh_copy(int id);
  void set_plan();
  std::vector<int> trainable(bool on_cpu) const;
  // Waits for everything, and gives all leases back.
  void finish();
  // The one place where parameters are told of their updates.
  void publish(std::vector<StartedUpdate> started);
  double* norm_results();
  // Where the sums of squares will be that the norm adds, in its order, once the reduce stream has
  // made them. `is_ordered`: gradients are, too (Reducer::ordered_gradient()); nothing waits.
  std::vector<const double*> start_norm(grad::Reducer& gradients, bool is_ordered);

  shard::ParamTable& params_;
  const RuleOptions rule_;
  const OptimizerOptions options_;
  device::Stream& reduce_;
  OptimizerStates states_;
  std::vector<bool> are_set_;  // by id: masters and moments have their values
  std::vector<float> copy_;    // of what state() has read
  std::int64_t num_updates_ = 0;

  // One number per parameter. Kernels of a discrete device write to pinned memory only.
  std::vector<double> host_norms_;
  device::Memory pinned_norms_;
  std::vector<double> known_norms_;  // that the reducer has made on the way
  // Of start_step(), on a discrete device.
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
  std::shared_ptr<const double> step_loss_;  // that the reduce stream reads
  grad::Reducer* step_gradients_ = nullptr;
  device::Pending sums_reduced_;
  device::Pending step_found_;
  std::optional<std::vector<StartedUpdate>> held_;  // started, and not known yet to count

  // Last: their work uses the above.
  std::unique_ptr<DeviceExecutor> executor_;
  std::unique_ptr<CpuPipeline> pipeline_;  // null: the CPU updates nothing
};

}  // namespace tessera::optim
