// Internal to optim: updates of parameters on a device, gathered until they are worth a launch, and
// each parameter's Pending, which it gets at once, or later if it is not known yet whether the
// update will count.
//
// Threads: as Param.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/device/device.h"
#include "tessera/optim/kernels.h"
#include "tessera/optim/rule.h"
#include "tessera/shard/param.h"

namespace tessera::optim {

struct HeldUpdate {
  int id = 0;
  device::Pending updated;
};

class UpdateBatch {
 public:
  // All of it outlives the batch. `held`: gets the Pendings in place of the parameters.
  UpdateBatch(shard::ParamTable& params, Kernels& kernels, const RuleOptions& rule,
              device::Stream& stream, std::vector<HeldUpdate>* held = nullptr)
      : params_(params), kernels_(kernels), rule_(rule), stream_(stream), held_(held) {}

  void add(int id, const UpdateTask& task) {
    tasks_.push_back(task);
    ids_.push_back(id);
    numel_ += task.span.numel;
    if (numel_ >= kLaunchNumel) {
      launch();
    }
  }

  // What was added and is not launched yet.
  void launch() {
    if (tasks_.empty()) {
      return;
    }
    const device::Pending updated = kernels_.start_updates(rule_, tasks_, stream_);
    for (const int id : ids_) {
      if (held_ != nullptr) {
        held_->push_back({id, updated});
      } else {
        params_[id].set_updated(updated);
      }
    }
    tasks_.clear();
    ids_.clear();
    numel_ = 0;
  }

 private:
  // Few launches, and the first layers of the next forward do not wait for the last ones.
  static constexpr std::int64_t kLaunchNumel = std::int64_t{1} << 25;

  shard::ParamTable& params_;
  Kernels& kernels_;
  const RuleOptions& rule_;
  device::Stream& stream_;
  std::vector<HeldUpdate>* const held_;
  std::vector<UpdateTask> tasks_;
  std::vector<int> ids_;
  std::int64_t numel_ = 0;
};

}  // namespace tessera::optim
