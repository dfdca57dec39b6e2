// Internal to optim: this rank's part of the squared norm, over trainable parameters in
// registration order. What was summed as gradients came is taken from there; the rest is one
// launch.
//
// Threads: one caller at a time.
#pragma once

#include <vector>

#include "tessera/device/device.h"
#include "tessera/grad/reducer.h"
#include "tessera/optim/kernels.h"
#include "tessera/shard/param.h"

namespace tessera::optim {

class GradientNorms {
 public:
  // Both outlive it. Memory for one number per parameter, which kernels of `device` can write.
  GradientNorms(device::Device& device, Kernels& kernels, int num_params);

  // Blocks until `stream` is done.
  double sum(const shard::ParamTable& params, grad::Reducer& gradients, device::Stream& stream);
  // Where the numbers will be that sum() adds, in its order, for kernels behind them on `stream`,
  // the reduce stream: nothing waits. REQUIRES: gradients.is_ordered().
  std::vector<const double*> start(const shard::ParamTable& params, grad::Reducer& gradients,
                                   device::Stream& stream);

 private:
  double* results();

  Kernels& kernels_;
  // One of the two: kernels of a device with memory of its own write to pinned memory only.
  std::vector<double> host_results_;
  device::Memory pinned_results_;
};

}  // namespace tessera::optim
