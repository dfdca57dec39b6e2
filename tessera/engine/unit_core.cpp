#include "tessera/engine/unit_core.h"

#include <algorithm>
#include <exception>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include "tessera/core/error.h"
#include "tessera/engine/engine_impl.h"
#include "tessera/engine/unit_state.h"

// [Note: release in backward]
// In backward a unit is needed from the moment that the gradient of one of its outputs is complete
// (a hook on that output) until nothing of it can still read a weight: until the gradients of its
// inputs and of all its trainable parameters have come. If no input needs a gradient, the
// parameters decide; what is still open then is closed when the outermost backward is over. A
// parameter that is used twice gets its gradient once, with the sum, so its units stay until then.
//
// The output of one unit is usually the input of the next. A hook on it for each of the two would
// run in the order of registration: the earlier unit would be gathered before the later one is
// released, and two units would be full at once. So there is one hook per tensor, a Gate, which
// first tells the units that took it as input, and then the one that made it. Where the input of
// a unit is not the very output of another (a sum in between), it gets a hook of its own.

namespace tessera::engine {
namespace {

using coordinator::Phase;

GateKey key_of(const at::Tensor& tensor) {
  return {tensor.grad_fn().get(), static_cast<std::size_t>(tensor.output_nr())};
}

}  // namespace

void UnitCore::watch_backward(const std::vector<at::Tensor>& inputs,
                              const std::vector<at::Tensor>& outputs) {
  if (!at::GradMode::is_enabled() ||
      std::none_of(outputs.begin(), outputs.end(),
                   [](const at::Tensor& output) { return output.requires_grad(); })) {
    return;
  }
  auto use = std::make_shared<BackwardUse>();
  use->unit = this;
  use->epoch = engine_.epoch();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor& input = inputs[i];
    const bool again = std::any_of(inputs.begin(), inputs.begin() + static_cast<std::ptrdiff_t>(i),
                                   [&](const at::Tensor& other) { return other.is_same(input); });
    if (!input.requires_grad() || again) {
      continue;
    }
    ++use->num_inputs;
    const auto known = engine_.gates().find(key_of(input));
    if (const auto gate = known == engine_.gates().end() ? nullptr : known->second.lock()) {
      gate->consumers.push_back(use);
    } else {
      input.register_hook([use](const at::TensorBase&) { use->unit->input_gradient_came(*use); });
    }
  }
  use->inputs_left = use->num_inputs;
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad()) {
      continue;
    }
    auto gate = std::make_shared<Gate>();
    gate->producer = use;
    output.register_hook([gate](const at::TensorBase&) {
      for (const auto& consumer : gate->consumers) {
        consumer->unit->input_gradient_came(*consumer);
      }
      gate->producer->unit->begin_backward(gate->producer);
    });
    engine_.gates()[key_of(output)] = gate;
  }
}

void UnitCore::begin_backward(const std::shared_ptr<BackwardUse>& use) {
  engine_.enter_backward();
  if (use->open && use->epoch == engine_.epoch()) {
    return;  // another output of the same forward
  }
  use->epoch = engine_.epoch();
  use->inputs_left = use->num_inputs;
  use->open = true;
  open_.push_back(use);
  engine_.coordinator().begin_use(id_, Phase::kBackward);
}

void UnitCore::input_gradient_came(BackwardUse& use) {
  if (!use.open || use.epoch != engine_.epoch()) {
    return;  // the output of that forward had no part in this backward
  }
  --use.inputs_left;
  end_if_complete(use);
}

void UnitCore::param_gradient_came() {
  ++gradients_come_;
  // Ending removes from open_.
  for (std::size_t i = open_.size(); i-- > 0;) {
    end_if_complete(*open_[i]);
  }
}

void UnitCore::end_if_complete(BackwardUse& use) {
  if (use.inputs_left <= 0 && gradients_come_ >= num_trainable_ &&
      use.num_inputs + num_trainable_ > 0) {
    end(use);
  }
}

void UnitCore::end(BackwardUse& use) {
  use.open = false;
  const auto found = std::find_if(open_.begin(), open_.end(),
                                  [&](const auto& each) { return each.get() == &use; });
  const std::shared_ptr<BackwardUse> keep = *found;
  open_.erase(found);
  engine_.coordinator().end_use(id_, Phase::kBackward);
}

void UnitCore::close_backward() {
  while (!open_.empty()) {
    end(*open_.back());
  }
  gradients_come_ = 0;
}

void UnitCore::forget() {
  for (const auto& use : open_) {
    use->open = false;
  }
  open_.clear();
  gradients_come_ = 0;
}

ForwardScope::ForwardScope(UnitCore& unit)
    : unit_(unit), epoch_(0), autocast_cache_(at::autocast::is_autocast_cache_enabled()) {
  Engine::Impl& engine = unit.engine();
  engine.begin_pass();
  // A cached cast of a weight would outlive the weight's memory.
  at::autocast::set_autocast_cache_enabled(false);
  ++engine.forward_depth();
  epoch_ = engine.epoch();
  try {
    engine.coordinator().begin_use(unit.id(), coordinator::Phase::kForward);
  } catch (...) {
    give_up();
    throw;
  }
}

ForwardScope::~ForwardScope() {
  if (!finished_) {
    give_up();
  }
}

// The innermost scope of an exception only ends its own use: a caller further out may catch it and
// go on. The outermost one abandons the step.
void ForwardScope::give_up() noexcept {
  Engine::Impl& engine = unit_.engine();
  finished_ = true;
  at::autocast::set_autocast_cache_enabled(autocast_cache_);
  const int depth = --engine.forward_depth();
  if (engine.epoch() != epoch_) {
    return;
  }
  if (depth > 0) {
    try {
      engine.coordinator().end_use(unit_.id(), coordinator::Phase::kForward);
      return;
    } catch (const std::exception&) {
      // The use never began, or releasing failed: then nothing but a fresh start is safe.
    }
  }
  engine.abandon();
}

void ForwardScope::finish(const std::vector<at::Tensor>& inputs,
                          const std::vector<at::Tensor>& outputs) {
  Engine::Impl& engine = unit_.engine();
  unit_.watch_backward(inputs, outputs);
  finished_ = true;
  at::autocast::set_autocast_cache_enabled(autocast_cache_);
  --engine.forward_depth();
  TESSERA_CHECK(engine.epoch() == epoch_, ConfigError, "the step was abandoned while unit '",
                unit_.name(), "' was running; run the forward again");
  engine.coordinator().end_use(unit_.id(), coordinator::Phase::kForward);
}

}  // namespace tessera::engine
