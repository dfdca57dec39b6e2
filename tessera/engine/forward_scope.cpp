#include "tessera/engine/forward_scope.h"

#include <algorithm>
#include <exception>

#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/util/Type.h>

#include "tessera/core/error.h"
#include "tessera/engine/engine_objects.h"
#include "tessera/engine/unit_core.h"
#include "tessera/shard/tensor_storage.h"

namespace tessera::engine {
namespace {

using coordinator::Phase;

EngineObjects& engine_of(const UnitCore& unit) {
  TESSERA_CHECK(unit.engine() != nullptr, ConfigError, "unit '", unit.name(),
                "' runs after its engine is gone; keep the engine as long as the model, or call "
                "engine.to_plain() first");
  return *unit.engine();
}

}  // namespace

NoAutocastCache::NoAutocastCache() : before_(at::autocast::is_autocast_cache_enabled()) {
  at::autocast::set_autocast_cache_enabled(false);
}
NoAutocastCache::~NoAutocastCache() { at::autocast::set_autocast_cache_enabled(before_); }

NodeMark NodeMark::next() {
  return {at::sequence_number::peek(), at::RecordFunction::currentThreadId()};
}

ForwardScope::ForwardScope(UnitCore& unit)
    : unit_(unit),
      phase_(at::GradMode::is_enabled() ? Phase::kForward : Phase::kInference),
      begun_(NodeMark::next()),
      epoch_(0) {
  EngineObjects& engine = engine_of(unit);
  engine.begin_pass();
  no_cache_.emplace();
  engine.context.lifecycle.enter_forward();
  epoch_ = engine.context.lifecycle.epoch();
  try {
    engine.context.coordinator.begin_use(unit.id(), phase_);
    engine.context.tiers.begin_forward_of(unit.id());
  } catch (...) {
    give_up();
    throw;
  }
  SpanArgs args;
  args.unit = engine.context.coordinator.unit(unit.id()).label;
  span_.emplace(engine.context.runtime.device().stream(device::StreamKind::kCompute), "forward",
                args);
}

ForwardScope::~ForwardScope() {
  if (!finished_) {
    give_up();
  }
}

// The innermost scope of an exception only ends its own use: a caller further out may catch it and
// go on. The outermost one abandons the step.
void ForwardScope::give_up() noexcept {
  EngineObjects& engine = *unit_.engine();
  span_.reset();
  finished_ = true;
  no_cache_.reset();
  engine.context.lifecycle.leave_forward();
  if (engine.context.lifecycle.epoch() != epoch_) {
    return;
  }
  if (engine.context.lifecycle.forward_depth() > 0) {
    try {
      engine.context.coordinator.end_use(unit_.id(), phase_);
      return;
    } catch (const std::exception&) {
      // The use never began, or releasing failed: then nothing but a fresh start is safe.
    }
  }
  engine.driver.abandon();
}

void ForwardScope::rethrow(const c10::Error& error) const {
  const std::string text = error.what_without_backtrace();
  if (text.find(shard::kReleasedText) != std::string::npos) {
    throw StateError(text, {}, unit_.name());
  }
  throw;  // as it is: run() has caught it
}

void ForwardScope::check_seen(const std::vector<at::Tensor>& outputs,
                              const std::type_info& result) const {
  const bool has_made_nodes =
      at::GradMode::is_enabled() && NodeMark::next().sequence > begun_.sequence;
  const bool is_seen = std::any_of(outputs.begin(), outputs.end(),
                                   [](const at::Tensor& output) { return output.requires_grad(); });
  TESSERA_CHECK(is_seen || !has_made_nodes, ConfigError, "unit '", unit_.name(), "' returns ",
                c10::demangle(result.name()),
                ", a type in which tensors cannot be seen, so its backward would go unnoticed; "
                "return tensors, or vectors, maps, tuples and optionals of them, or write "
                "for_each_tensor() for the type (tessera/engine/tensor_pack.h)");
}

void ForwardScope::finish(const std::vector<at::Tensor>& inputs,
                          const std::vector<at::Tensor>& outputs) {
  EngineObjects& engine = *unit_.engine();
  span_.reset();
  // The backward of a leaf is that of all inside it: ranks may go different ways there.
  if (!engine.context.coordinator.is_inside_open_leaf(unit_.id())) {
    engine.driver.backward_watch().add(unit_, begun_, inputs, outputs);
  }
  finished_ = true;
  no_cache_.reset();
  engine.context.lifecycle.leave_forward();
  TESSERA_CHECK(engine.context.lifecycle.epoch() == epoch_, ConfigError,
                "the step was abandoned while unit '", unit_.name(),
                "' was running; run the forward again");
  engine.context.coordinator.end_use(unit_.id(), phase_);
  engine.driver.free_behind_forward(unit_.id());
}

}  // namespace tessera::engine
