// A unit without its module's type: what happens around a block's forward, and around its backward
// twin. unit.h wraps it for a module; Python's hooks will call the same four events.
//
// Backward is watched by tensor hooks on outputs and by the hooks of parameter gradients: see
// backward_watch.h. Inside a unit autocast keeps no casts of weights.
//
// Threads: hooks run on the caller's thread on CPU and on autograd's device thread on CUDA, while
// the caller waits in backward(). Never both at once.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/coordinator/access_trace.h"
#include "tessera/device/device.h"
#include "tessera/engine/node_mark.h"

namespace tessera {

class Engine;

namespace engine {

class UnitCore;

std::shared_ptr<UnitCore> share(UnitCore* unit);  // null stays null
// The unit's parameters are ordinary tensors again: nothing is to be done around its forward.
bool is_plain(const UnitCore& unit);

// Around one forward. Destroyed without finish(), because the forward threw, it lets the engine
// abandon the step: the engine can be used again afterwards.
class ForwardScope {
 public:
  // For training or inference, as grad mode says.
  explicit ForwardScope(UnitCore& unit);
  ForwardScope(UnitCore& unit, coordinator::Phase phase);
  ~ForwardScope();
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;
  void finish(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs);

 private:
  void give_up() noexcept;

  UnitCore& unit_;
  const coordinator::Phase phase_;
  const NodeMark begun_;
  std::uint64_t epoch_;
  const bool autocast_cache_;
  bool finished_ = false;
  std::optional<device::StreamSpan> span_;  // of the device's time
};

// A forward as autograd's Function needs it: tensors in, tensors out.
using TensorsFn = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

// Runs `forward` without keeping activations; backward gathers, restores the random generator, runs
// it again and differentiates. `unit` null: for a plain model. `params`: all that forward uses.
std::vector<at::Tensor> run_recomputed(UnitCore* unit, const std::vector<at::Tensor>& params,
                                       const std::vector<at::Tensor>& inputs, TensorsFn forward);

}  // namespace engine
}  // namespace tessera
