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
#include <memory>
#include <optional>
#include <string>
#include <typeinfo>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

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
  ~ForwardScope();
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;
  // Calls it. An error of torch's that says what is wrong in our words comes without torch's stack
  // trace.
  template <typename Forward>
  auto run(const Forward& forward) {
    try {
      return forward();
    } catch (const c10::Error& error) {
      rethrow(error);
    }
  }
  // ConfigError if gradients could leave the forward only by a result of a type in which tensors
  // cannot be seen.
  void check_seen(const std::vector<at::Tensor>& outputs, const std::type_info& result) const;
  void finish(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs);

 private:
  void give_up() noexcept;
  [[noreturn]] void rethrow(const c10::Error& error) const;

  UnitCore& unit_;
  const coordinator::Phase phase_;
  const NodeMark begun_;
  std::uint64_t epoch_;
  const bool autocast_cache_;
  bool finished_ = false;
  std::optional<device::StreamSpan> span_;  // of the device's time
};

}  // namespace engine
}  // namespace tessera
