#include "tessera/optim/gradient_norms.h"

#include <cstddef>
#include <optional>
#include <tuple>
#include <vector>

namespace tessera::optim {

GradientNorms::GradientNorms(device::Device& device, Kernels& kernels, int num_params)
    : kernels_(kernels), host_results_(static_cast<std::size_t>(num_params)) {
  if (device.is_discrete()) {
    pinned_results_ =
        device.allocate(Tier::kPinned, host_results_.size() * sizeof(double), Role::kOther);
  }
}

double* GradientNorms::results() {
  return pinned_results_.data() == nullptr ? host_results_.data()
                                           : reinterpret_cast<double*>(pinned_results_.data());
}

double GradientNorms::sum(const shard::ParamTable& params, grad::Reducer& gradients,
                          device::Stream& stream) {
  std::vector<double> sums(static_cast<std::size_t>(params.num_params()));
  std::vector<int> ids;  // of spans
  std::vector<NormSpan> spans;
  for (int id = 0; id < params.num_params(); ++id) {
    if (!params[id].trainable() || !gradients.has_gradient(id)) {
      continue;
    }
    if (const std::optional<double> known = gradients.sum_of_squares(id)) {
      sums[static_cast<std::size_t>(id)] = *known;
      continue;
    }
    const grad::ShardGradient gradient = gradients.shard_gradient(id);
    spans.push_back({gradient.values, gradient.dtype, gradient.numel});
    ids.push_back(id);
  }
  if (!spans.empty()) {
    // The stream keeps a failure until it is synchronized.
    std::ignore = kernels_.start_sums_of_squares(spans, results(), stream);
    stream.synchronize();
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    sums[static_cast<std::size_t>(ids[i])] = results()[i];
  }
  double total = 0;
  for (const double sum : sums) {
    total += sum;
  }
  return total;
}

std::vector<const double*> GradientNorms::start(const shard::ParamTable& params,
                                                grad::Reducer& gradients, device::Stream& stream) {
  std::vector<const double*> sums;
  std::vector<NormSpan> spans;
  for (int id = 0; id < params.num_params(); ++id) {
    if (!params[id].trainable() || !gradients.has_gradient(id)) {
      continue;
    }
    const grad::ShardGradient gradient = gradients.ordered_gradient(id);
    if (gradient.squares != nullptr) {
      sums.push_back(gradient.squares);
      continue;
    }
    sums.push_back(results() + spans.size());
    spans.push_back({gradient.values, gradient.dtype, gradient.numel});
  }
  if (!spans.empty()) {
    std::ignore = kernels_.start_sums_of_squares(spans, results(), stream);  // see sum()
  }
  return sums;
}

}  // namespace tessera::optim
