// `--verify`: the unsharded reference of a run, trained beside it on the same batches, on rank 0
// alone.
//
// Includes models, hence torch: for train_*.cpp only.
//
// Threads: one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cli/train_compare.h"
#include "cli/train_plan.h"
#include "cli/train_trainer.h"

namespace tessera::cli {

class Twin {
 public:
  // Builds the model in full, with the initial values of `plan`, and keeps a copy of them.
  Twin(const TrainPlan& plan, Runtime& runtime);

  // The same step on the sequences of all ranks; see [Note: what is compared].
  void step(Batches& batches, std::int64_t step, const StepResult& sharded);
  // `sharded`: parameter `id` after the last step.
  void compare_param(int id, const Trainer::ParamInfo& info, const at::Tensor& sharded);

  const Comparison& comparison() const { return comparison_; }

 private:
  const BatchShape batch_;
  const models::GptOptions model_;
  std::unique_ptr<Trainer> trainer_;
  const std::vector<Trainer::ParamInfo> infos_;
  std::vector<at::Tensor> initial_;
  double sum_lr_ = 0;  // of all steps that updated
  Comparison comparison_;
};

}  // namespace tessera::cli
