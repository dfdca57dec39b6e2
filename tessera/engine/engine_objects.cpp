#include "tessera/engine/engine_objects.h"

#include "tessera/core/error.h"
#include "tessera/engine/checkpoint_loader.h"

namespace tessera::engine {

void EngineObjects::begin_pass() {
  begin_call();
  driver.make_states();
}

void EngineObjects::begin_call() {
  context.lifecycle.check_usable();
  finalize();
  driver.notice_trainable();
  driver.end_failed_backward();
}

LoadResult EngineObjects::load(const std::string& path, const LoadOptions& options) {
  const std::string before = context.lifecycle.half_loaded();
  context.lifecycle.set_half_loaded({});
  try {
    begin_call();
    saver.wait();
    return CheckpointLoader(context, ranks, model, driver, access).load(path, options, before);
  } catch (...) {
    if (context.lifecycle.half_loaded().empty()) {
      context.lifecycle.set_half_loaded(before);  // it has read nothing
    }
    throw;
  }
}

void EngineObjects::finalize() {
  if (context.lifecycle.is_finalized()) {
    return;
  }
  TESSERA_CHECK(context.params.num_params() > 0, ConfigError,
                "the engine has no parameters; make units of modules with parameters first");
  driver.notice_trainable();  // plan and optimizer are made for what is trained
  access.check_no_early_scope();
  model.finalize_leaves();
  context.tiers.finalize(model.shapes());
  if (context.tiers.is_planned()) {
    context.tiers.reserve_staging();
    context.coordinator.set_tier(context.tiers.coordinator_options());
  }
  model.finalize_units();
  model.tell_stored();
  driver.finalize();
  context.lifecycle.set_finalized();
}

}  // namespace tessera::engine
