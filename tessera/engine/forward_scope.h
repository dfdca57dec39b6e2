// What happens around one forward of a unit: gather, run, release, watch its backward. unit.h calls
// it for a module.
//
// Threads: as Engine. (A recomputed forward runs on autograd's thread.)
#pragma once

#include <cstdint>
#include <optional>
#include <typeinfo>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "tessera/coordinator/access_trace.h"
#include "tessera/device/device.h"

namespace tessera::engine {

class UnitCore;

// A position in the order in which a thread makes nodes of autograd's graphs.
struct NodeMark {
  std::uint64_t sequence = 0;  // autograd's own number, counted per thread
  std::uint64_t thread = 0;
  // Of the next node that the calling thread makes.
  static NodeMark next();
};

// Autocast keeps no casts: a cast of a weight would outlive the weight's memory, and be a node of a
// graph that only one of two recomputed forwards has.
class NoAutocastCache {
 public:
  NoAutocastCache();
  ~NoAutocastCache();
  NoAutocastCache(const NoAutocastCache&) = delete;
  NoAutocastCache& operator=(const NoAutocastCache&) = delete;

 private:
  const bool before_;
};

// Destroyed without finish(), because the forward threw, it lets the engine abandon the step: the
// engine can be used again afterwards.
class ForwardScope {
 public:
  // For training or inference, as grad mode says.
  explicit ForwardScope(UnitCore& unit);
  ~ForwardScope();
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;
  // Calls it. A read of a released parameter becomes a StateError, without torch's stack trace.
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
  std::optional<NoAutocastCache> no_cache_;
  bool finished_ = false;
  std::optional<device::StreamSpan> span_;  // of the device's time
};

}  // namespace tessera::engine
