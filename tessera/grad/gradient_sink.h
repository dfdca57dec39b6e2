// Internal to grad: where a Reducer's gradients go. One way for groups of several ranks
// (bucket_sink.h), one for a group of one (solo_sink.h). Reducer has checked the order of calls.
//
// Threads: as Reducer.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/grad/reducer.h"

namespace tessera::grad {

class GradientSink {
 public:
  virtual ~GradientSink() = default;
  // `is_first`: of its step; what earlier steps left is not added to.
  virtual void begin_backward(bool is_first) = 0;
  // Throws ConfigError for a gradient that take() could not take.
  virtual void check(const shard::Param& param, const FullGradient& gradient) const = 0;
  virtual void take(const shard::Param& param, FullGradient gradient) = 0;
  virtual std::vector<int> pending_dynamic() const = 0;
  virtual void reduce_dynamic(std::span<const int> ids) = 0;
  virtual void drop_dynamic() noexcept = 0;
  virtual void finish_backward() = 0;
  // Blocks until the sums of all finished backwards are there; throws what went wrong.
  virtual void wait() = 0;
  // `is_zero`: no backward has been finished since clear().
  virtual ShardGradient shard_gradient(const shard::Param& param, bool is_zero) = 0;
  // See Reducer::ordered_gradient().
  virtual ShardGradient ordered_gradient(const shard::Param& param) {
    throw InternalError(
        detail::concat("several ranks make the gradient of parameter '", param.name(), "'"));
  }
  // Nothing: it was not made on the way.
  virtual std::optional<double> sum_of_squares(const shard::Param& /*param*/) { return {}; }
  virtual void free_gradient(const shard::Param& /*param*/) {}
  // Waits for what is in flight, whatever becomes of it.
  virtual void clear() noexcept = 0;
};

}  // namespace tessera::grad
