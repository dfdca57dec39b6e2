// A model and what trains it, sharded or plain, behind one face: the loop of `tessera train` does
// not know which it runs.
//
// Includes models, hence torch: for train_*.cpp only.
//
// Threads: one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cli/train_batch.h"
#include "cli/train_plan.h"
#include "models/data.h"
#include "tessera/engine/engine.h"
#include "tessera/engine/runtime.h"

namespace tessera::cli {

// [sequences, tokens] int64, on the device.
struct MicroBatch {
  at::Tensor ids;
  at::Tensor targets;
};

class Batches {
 public:
  // `data` outlives this object.
  Batches(models::TokenSource& data, const TrainPlan& plan);
  MicroBatch read(std::int64_t step, SequenceRange sequences);

 private:
  models::TokenSource& data_;
  const std::int64_t sequence_;
  const at::Device device_;
  std::vector<std::int64_t> tokens_;
};

class Trainer {
 public:
  struct ParamInfo {
    std::string name;
    std::int64_t numel = 0;
    bool trainable = true;
  };

  virtual ~Trainer() = default;
  virtual at::Tensor forward(const MicroBatch& micro_batch) = 0;
  // The micro-batch weighs as much as it has tokens.
  virtual void backward(const at::Tensor& loss, const MicroBatch& micro_batch) = 0;
  virtual StepResult step() = 0;
  // Collective: the mean loss of a forward without gradients. Not between run() and step().
  virtual double evaluate(const MicroBatch& micro_batch) = 0;
  // See Engine::request_stop().
  virtual void request_stop() = 0;
  // Zeros where there is nothing to gather or reduce.
  virtual EngineStats take_stats() = 0;
  // In registration order.
  virtual std::vector<ParamInfo> params() const = 0;
  // Collective: a copy on the host.
  virtual at::Tensor value(int param) = 0;
  // Collective: rank 0 writes all parameters as safetensors.
  virtual void save(const std::string& path) = 0;
  // For what is sharded alone, such as checkpoints; null: plain training.
  virtual Engine* engine() = 0;
};

std::unique_ptr<Trainer> make_sharded_trainer(const TrainPlan& plan, Runtime& runtime);
// Of this process alone; same initial values.
std::unique_ptr<Trainer> make_plain_trainer(const TrainPlan& plan, Runtime& runtime);

}  // namespace tessera::cli
