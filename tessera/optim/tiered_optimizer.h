// The optimizer of shards that do not all live in memory: parameters, gradients, masters and states
// each have their place. Its results are those of sharded_optimizer.h, to the bit.
//
// What is stored streams through leases, sub-group by sub-group (sub_group.h), on a thread of its
// own (update_pipeline.h); nothing is ever held as a whole. start_update() returns at once; each
// parameter's Pending is done as soon as its own update is, in the order of registration.
//
// Beside a device with memory of its own (TieredParts::own) `device` and `kernels` are the host's:
// there the pipeline updates what the processor is given, while the device updates the rest
// (device_update.h), each in the order of registration. The bits do not depend on who does.
//
// States in memory are charged as Role::kOptimizer, as tiered_states.h lays them out. Stored
// parameters are read and written by ShardStore; whoever reads one waits for Param::updated()
// first.
//
// [Note: a failed update]
// A sub-group that cannot be read or written leaves parameters of two ages behind. The parameter
// concerned and all that are not done yet fail, and so do wait() and every later start_update(),
// with the first cause: there is nothing to go on with but a checkpoint. Writes are slow to fail:
// parameters behind the one concerned may be done by then, and stay so.
//
// Threads: as Param, besides its own. Kernels are called from its thread during an update: nobody
// else calls them until wait().
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "tessera/device/device.h"
#include "tessera/grad/reducer.h"
#include "tessera/optim/device_update.h"
#include "tessera/optim/gradient_norms.h"
#include "tessera/optim/kernels.h"
#include "tessera/optim/optimizer.h"
#include "tessera/optim/rule.h"
#include "tessera/optim/tiered_parts.h"
#include "tessera/optim/tiered_states.h"
#include "tessera/optim/update_pipeline.h"
#include "tessera/shard/param.h"

namespace tessera::optim {

class TieredOptimizer final : public Optimizer {
 public:
  // All parameters of the table are known now, and their shards have their initial values, in
  // memory or in the store. Makes masters and states; throws IoError if they cannot be written and
  // ConfigError if the buffers do not hold one sub-group.
  TieredOptimizer(shard::ParamTable& params, device::Device& device, Kernels& kernels,
                  const RuleOptions& rule, TieredParts parts);
  // Ends updates that still run; their failures are the waiters' business.
  ~TieredOptimizer() override;
  TieredOptimizer(const TieredOptimizer&) = delete;
  TieredOptimizer& operator=(const TieredOptimizer&) = delete;

  // Reads states of the first sub-groups, as far as there are leases, and sends those that the
  // device updates up, as far as there are slots.
  void prepare() override;
  // Stored gradients have kept theirs on their way.
  double sum_of_squares(grad::Reducer& gradients) override;
  void start_update(grad::Reducer& gradients, double lr, double gradient_scale) override;
  void wait() override;
  std::int64_t num_updates() const override { return num_updates_; }
  void follow_trainable(int param) override;
  // Stored ones are read into a copy: for tests and checkpoints, one parameter at a time. What is
  // written to the copy is lost.
  std::span<float> state(int param, std::string_view name) override;
  void reset_master(int param) override;

  const SubGroupPlan& plan() const { return pipeline_->plan(); }
  // Null: the processor updates everything.
  DeviceUpdate* device_update() { return device_update_.get(); }
  // Since the last call.
  TieredStats take_stats();

 private:
  // Of a parameter that the processor updates beside a device with memory of its own.
  struct HostCopies {
    device::Memory mirror;    // of a shard on the device: new values are made there
    device::Memory gradient;  // fp32, of one that does not go to the host by itself
  };
  device::Device& compute_device() const;
  bool is_on_device(int id) const;
  bool has(int id) const;
  void add(int id);
  void make_master(int id);
  void set_plan();
  void bring_gradient(int id, const grad::ShardGradient& gradient, UpdateJob::Item& item);
  UpdateJob::Item make_item(int id, grad::Reducer& gradients, const UpdateScalars& scalars,
                            const device::Pending& may_start);
  // Everything that may read shards or make gradients now.
  device::Pending record_users();
  // Waits, and gives all leases back.
  void settle();
  // A tensor that is stored, in the copy.
  template <typename Read>
  std::span<float> copy_of(int param, const Read& read);

  shard::ParamTable& params_;
  device::Device& device_;
  const RuleOptions rule_;
  const TieredParts parts_;
  GradientNorms norms_;
  std::vector<HostCopies> copies_;  // by id
  TieredStates states_;
  std::unique_ptr<DeviceUpdate> device_update_;  // null: the processor updates everything
  std::vector<float> copy_;                      // of what state() has read
  std::uint64_t gradients_down_bytes_ = 0;
  std::uint64_t parameters_up_bytes_ = 0;
  std::int64_t num_updates_ = 0;
  std::unique_ptr<UpdatePipeline> pipeline_;  // last: its thread uses the above
};

}  // namespace tessera::optim
