// The loss of data that is not trained on: forwards without gradients, on all ranks.
//
// The sequences are the same every time and on every number of ranks. A rank that has none left
// runs a forward all the same, and counts nothing of it: gathers are collective. Nothing of the
// training changes: no gradient, no random number, no step.
//
// Includes models, hence torch: for train_*.cpp only.
//
// Threads: one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "cli/train_plan.h"
#include "cli/train_trainer.h"
#include "models/data.h"
#include "tessera/engine/runtime.h"

namespace tessera::cli {

class Evaluation {
 public:
  // REQUIRES: plan.evaluation. `plan` and `runtime` outlive this object.
  Evaluation(const TrainPlan& plan, Runtime& runtime);

  // Collective, between steps: the mean over all tokens of all ranks, the same number on each.
  double run(Trainer& trainer);
  std::string data_name() const { return data_->name(); }

 private:
  const TrainPlan& plan_;
  Runtime& runtime_;
  const std::unique_ptr<models::TokenSource> data_;
  Batches batches_;
};

}  // namespace tessera::cli
