#include "tests/property/leavings.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

namespace tessera::testing {

at::Tensor SegmentAliases::alias(Segment& segment, const at::Tensor& tensor) {
  if (!tensor.requires_grad()) {
    return tensor;
  }
  at::Tensor& alias = segment[tensor.unsafeGetTensorImpl()];
  if (!alias.defined()) {
    alias = at::alias(tensor);  // with its strides: kernels look at them
  }
  return alias;
}

at::Tensor SegmentAliases::of(at::Tensor param) {
  for (Segment& segment : segments_) {
    param = alias(segment, param);
  }
  return param;
}

std::vector<at::Tensor> values_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> values;
  for (const at::Tensor& tensor : tensors) {
    values.push_back(tensor.detach().clone());
  }
  return values;
}

void assign(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& values) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    tensors[i].copy_(values[i]);
  }
}

}  // namespace tessera::testing
