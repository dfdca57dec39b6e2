// What an engine asks of its optimizer, wherever masters and states live: sharded_optimizer.h keeps
// them in memory, tiered_optimizer.h on NVMe.
//
// Threads: as Param.
#pragma once

#include <cstdint>
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
  virtual void start_update(grad::Reducer& gradients, double lr, double gradient_scale) = 0;

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

  // For all updates so far; throws the failure of the first in registration order.
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
