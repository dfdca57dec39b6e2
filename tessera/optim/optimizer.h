// What an engine asks of its optimizer, wherever masters and states live: sharded_optimizer.h keeps
// them in memory, tiered_optimizer.h on NVMe.
//
// Threads: as Param.
#pragma once

#include <cstdint>
#include <exception>
#include <span>
#include <string_view>

#include "tessera/core/error.h"
#include "tessera/grad/reducer.h"
#include "tessera/optim/clip.h"

namespace tessera::optim {

class Optimizer {
 public:
  virtual ~Optimizer() = default;

  // A step has begun whose gradients are still to come: whatever does not depend on them may start.
  virtual void prepare() {}
  // This rank's part, over trainable parameters in registration order.
  virtual double sum_of_squares(grad::Reducer& gradients) = 0;
  // Starts the update of every trainable parameter that has a gradient (Reducer::has_gradient()),
  // in registration order, as torch's optimizers do: others stay as they are, with their states and
  // the step that bias corrections count. Gives each the
  // Pending of its own (Param::set_updated). Gradients must stay until all are done: wait() before
  // the next backward adds to them.
  void start_update(grad::Reducer& gradients, double lr, double gradient_scale) {
    begin_update(gradients, lr, gradient_scale);
    end_update();
  }

  // Both as one piece of work of the device, with the factor between them (clip.h): the host does
  // not wait for the norm before it starts the update. Gradients of this rank are all there are.
  // False: that cannot be here, and nothing was started.
  virtual bool start_step(grad::Reducer& /*gradients*/, double /*lr*/,
                          const StepInputs& /*inputs*/) {
    return false;
  }
  // What sum_of_squares() is, of the step that was started: waits for that, not for the updates.
  // From here on the step counts, and parameters have the Pendings of their updates; unless it was
  // skipped: then nothing has changed.
  virtual double finish_step() { throw InternalError("a step ends that was not started"); }

  // The same in parts, where some gradients are complete before the others have come: between the
  // two, update() starts what it is given, each at most once; end_update() starts the rest. Bits do
  // not depend on what is started when.
  virtual void begin_update(grad::Reducer& gradients, double lr, double gradient_scale) = 0;
  // Of trainable parameters that may_update_early(), in a group of one, inside the last backward of
  // a step. Nobody reads their shards any more but what the compute and gather streams have been
  // given; their gradients are the optimizer's now, and go (Reducer::let_go()) when it is done.
  virtual void update(std::span<const int> ids) = 0;
  virtual void end_update() = 0;
  // After begin_update(), in place of end_update(): nothing more comes, since `error` was thrown.
  // What was started ends, or fails with it. Throws nothing.
  virtual void give_up_update(std::exception_ptr error) noexcept = 0;
  // False: only end_update() can start it.
  virtual bool may_update_early(int /*param*/) const { return true; }
  // Tells that updates will be started by update(), in the order of gradients: what prepare() does
  // follows that. Between updates.
  virtual void expect_early_updates() {}

  // For all updates so far; throws the failure of the first in registration order. REQUIRES: not
  // between begin_update() and its end.
  virtual void wait() = 0;
  virtual std::int64_t num_updates() const = 0;
  // The parameter has been frozen or unfrozen: takes what it needs now. Between updates.
  virtual void follow_trainable(int param) = 0;
  // fp32, shard_numel() elements; "master" or one of state_names(). Empty for parameters that were
  // never trainable. Waits for the parameter's update. Valid until the next call of any method.
  // ConfigError for a name that the rule does not have.
  virtual std::span<float> state(int param, std::string_view name) = 0;
  // After the shard was written from outside: the master follows it.
  virtual void reset_master(int param) = 0;
};

}  // namespace tessera::optim
