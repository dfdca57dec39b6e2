// The reference: the same model trained unsharded, by plain LibTorch autograd, with our norm and
// update kernels. What a sharded run is compared with, by users (--unsharded, --verify) and by
// tests.
//
// It shares no code with the engine above the kernels: gradients stay in .grad, micro-batches are
// summed by autograd (fp32) or here (low precision, in fp32), there is no bucket, hook or shard.
//
// Threads: one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "models/gpt.h"
#include "tessera/core/config.h"
#include "tessera/engine/engine.h"
#include "tessera/optim/kernels.h"

namespace tessera::models {

class PlainTrainer {
 public:
  // `params` of a plain model, in order.
  PlainTrainer(const std::vector<NamedParam>& params, const Config& config, optim::Kernels& kernels,
               device::Device& device, const EngineOptions& options);
  ~PlainTrainer();

  void backward(const at::Tensor& loss, double weight = 1);
  StepResult step();
  // fp32 weights in the order of the model's parameters: masters of low precision, the parameters
  // themselves otherwise; frozen ones widened.
  std::vector<at::Tensor> masters() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::models
