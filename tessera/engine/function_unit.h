// A callable as the module of a unit: what uses weights and is no module.
//
//   auto loss = engine.function("loss", {head->weight}, [&](const at::Tensor& x) {
//     return at::linear(x, head->weight).logsumexp(1).mean();
//   });
//   engine.backward(loss(x));
//
// Threads: as Engine.
#pragma once

#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera {

template <typename Callable>
class FunctionModule {
 public:
  FunctionModule(Callable callable, std::vector<at::Tensor> params)
      : callable_(std::move(callable)), params_(std::move(params)) {}

  template <typename... Args>
  auto forward(Args&&... args) {
    return callable_(std::forward<Args>(args)...);
  }
  const std::vector<at::Tensor>& parameters() const { return params_; }

 private:
  Callable callable_;
  std::vector<at::Tensor> params_;
};

}  // namespace tessera
