// The optimizer of this rank's shards: fp32 master weights, named states, and their update.
//
// For fp32 parameters the shard is the master; nothing is held twice. For bf16 and fp16 the master
// is made from the shard at construction and the update writes the shard from it.
//
// Frozen parameters have neither master nor states; those of a parameter that is frozen later stay,
// and go on where they were when it is unfrozen. Master and states are charged as
// Role::kOptimizer; their bytes are 4 * (states + (low precision ? 1 : 0)) per shard element.
//
// Padding is never updated: it stays zero in the shard, the master and the states.
//
// Updates run on the reduce stream, behind the reductions that made the gradients and ahead of
// those of the next step; they start after everything that the compute and gather streams have been
// given, since that may still read the shards.
//
// Threads: as Param.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "tessera/device/device.h"
#include "tessera/grad/reducer.h"
#include "tessera/optim/gradient_norms.h"
#include "tessera/optim/kernels.h"
#include "tessera/optim/optimizer.h"
#include "tessera/optim/rule.h"
#include "tessera/optim/update_batch.h"
#include "tessera/shard/param.h"

namespace tessera::optim {

class ShardedOptimizer final : public Optimizer {
 public:
  // All parameters of the table are known now, and their shards have their initial values.
  ShardedOptimizer(shard::ParamTable& params, device::Device& device, Kernels& kernels,
                   const RuleOptions& rule);
  // Waits for updates that still run; their failures are the waiters' business.
  ~ShardedOptimizer() override;
  ShardedOptimizer(const ShardedOptimizer&) = delete;
  ShardedOptimizer& operator=(const ShardedOptimizer&) = delete;

  double sum_of_squares(grad::Reducer& gradients) override;
  // The gradients must only be alive until all are done; the next backward may come before: its
  // reductions are behind the updates on the same stream.
  void start_update(grad::Reducer& gradients, double lr, double gradient_scale) override;
  // On a device with memory of its own, where the reduce stream alone orders gradients.
  bool start_step(grad::Reducer& gradients, double lr, const StepInputs& inputs) override;
  double finish_step() override;
  void wait() override;
  std::int64_t num_updates() const override { return num_updates_; }
  void follow_trainable(int param) override;
  // Valid as long as the optimizer.
  std::span<float> state(int param, std::string_view name) override;
  void reset_master(int param) override;

 private:
  struct Slot {
    device::Memory memory;    // master if there is one of its own, then the states
    float* master = nullptr;  // null: frozen
    std::array<float*, kMaxStates> states{};
    std::int64_t num_updates = 0;  // of this parameter: the step that corrects its moments
  };
  Slot make_slot(const shard::Param& param);
  void start_master(const shard::Param& param);
  void order_behind_readers();
  UpdateTask make_task(const shard::Param& param, const grad::ShardGradient& gradient,
                       const UpdateScalars& scalars) const;
  device::Stream& update_stream();

  shard::ParamTable& params_;
  device::Device& device_;
  Kernels& kernels_;
  const RuleOptions rule_;
  GradientNorms norms_;
  std::vector<Slot> slots_;  // by id
  std::int64_t num_updates_ = 0;

  // Of start_step(). Both memories hold one StepOnDevice; none: the device's memory is the host's.
  device::Memory step_;  // for kernels
  device::Memory step_for_host_;
  device::Pending step_found_;
  std::vector<HeldUpdate> held_;  // started, and not known yet to count
};

}  // namespace tessera::optim
