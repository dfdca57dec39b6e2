// Updates that start while the backward of their step still runs.
//
// [Note: updates during backward]
// Clipping and the non-finite guard need the norm of all gradients before the first update. Where
// both are off, and the loss scale cannot change, the factor of an update does not depend on
// gradients. Then, in the last backward of a step (number batch.accumulate), a parameter is updated
// as soon as
//   (a) its gradient is complete: the hook behind its accumulation has fired, and
//   (b) nobody reads it any more in this backward: no unit uses it or gathers it, and every forward
//       that used it and whose graph is still there has had its backward. That of a recomputed unit
//       needs no proof of its own: it hands over gradients of all its parameters at its end, so (a)
//       waits for it.
// Gradients go as soon as they were used, which lowers the peak of memory; and the update, from
// host memory or NVMe, has the time of the backward. What is left when backward is over follows at
// once; what did not get a gradient, or is stored (Optimizer::may_update_early()), is started by
// step(). Losses, norms and results are those of late updates, bit for bit: the same factor, and
// sums of squares are made before a gradient goes.
//
// Only in a group of one: over several ranks a gradient is complete when its bucket is reduced, in
// an order that depends on registration alone, and the sum of weights would need a call of its own.
//
// After the first update the step cannot be taken back. Until step() has been called, everything
// else is a ConfigError that says so. If that backward throws, some parameters are updated and some
// are not: as after [Note: a failed update] in tiered_optimizer.h there is nothing to go on with
// but a checkpoint; backward() and every later call throw an Error that says so.
//
// Threads: as Engine.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "tessera/coordinator/access_trace.h"
#include "tessera/grad/reducer.h"
#include "tessera/optim/optimizer.h"
#include "tessera/shard/param.h"

namespace tessera::engine {

class EarlyUpdates {
 public:
  // `is_on`: the factor does not depend on gradients, and nobody has switched this off.
  EarlyUpdates(bool is_on, shard::ParamTable& params) : is_on_(is_on), params_(params) {}
  EarlyUpdates(const EarlyUpdates&) = delete;
  EarlyUpdates& operator=(const EarlyUpdates&) = delete;

  bool is_on() const { return is_on_; }
  // The loss scale changes with gradients. Before seal().
  void switch_off() { is_on_ = false; }
  // The model is complete. By unit: all parameters that it reads.
  void seal(std::vector<std::vector<int>> params_of_unit);

  // A forward of the unit has run whose backward may come, as long as the token is held. It may
  // outlive this.
  [[nodiscard]] std::shared_ptr<void> expect_backward(coordinator::UnitId unit);

  // The last backward of a step begins; all of it outlives that step.
  void begin_backward(optim::Optimizer& optimizer, grad::Reducer& gradients, double lr,
                      double gradient_scale);
  void gradient_came(int id);
  // Before a unit's backward uses its parameters. StateError if one of them was updated already:
  // then a use was not foreseen.
  void begin_unit(coordinator::UnitId unit, const std::string& name);
  void end_unit(coordinator::UnitId unit);
  // Nothing is read any more. Before Reducer::finish_backward().
  void end_backward();

  // Some updates have been started, and step() has not been called yet.
  bool has_started() const { return num_started_ > 0; }
  // The rest of the updates. REQUIRES: has_started().
  void end_step(double gradient_scale);
  // ConfigError if an update has been started: `what` is not step().
  void check_not_started(const char* what) const;

  // The backward has failed, or the engine goes: waits for what was started.
  void give_up() noexcept;
  // After give_up(): throws an Error, with `cause` if that is given, and the same every time.
  void check_not_torn(const std::exception_ptr& cause = nullptr);

  // Parameters that were started during backward, since the last call.
  std::uint64_t take_count();

 private:
  bool is_ready(int id) const;
  void note(int id);
  void start_noted();
  void forget();

  bool is_on_;
  shard::ParamTable& params_;
  std::vector<std::vector<int>> params_of_unit_;
  std::vector<std::vector<coordinator::UnitId>> units_of_param_;
  std::vector<std::shared_ptr<int>> num_expected_;  // forwards without their backward, by unit

  // Of the step.
  optim::Optimizer* optimizer_ = nullptr;
  grad::Reducer* gradients_ = nullptr;
  double lr_ = 0;
  double gradient_scale_ = 0;
  bool is_in_backward_ = false;
  std::vector<bool> is_noted_;  // by id: started, or about to be
  std::vector<int> noted_;      // not started yet
  int num_started_ = 0;

  std::string torn_;  // why nothing goes on; empty: it does
  std::uint64_t count_ = 0;
};

}  // namespace tessera::engine
