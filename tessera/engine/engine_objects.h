// Internal to engine: the objects of one engine, wired.
//
//   context     ranks, parameters, tiers, coordinator; lifecycle: which calls are legal now
//   ranks       what ranks agree on outside of steps
//   model       parameters, units, buffers; building
//   driver      backward() and step(): gradients, reductions, updates
//   access      whole parameters between steps: gathered(), resident(), full values, to_plain()
//   saver       saves, also beside training
//
// Hooks in autograd's graphs and units find the objects here.
//
// Threads: as Engine.
#pragma once

#include <string>

#include "tessera/engine/checkpoint_saver.h"
#include "tessera/engine/engine_context.h"
#include "tessera/engine/model.h"
#include "tessera/engine/param_access.h"
#include "tessera/engine/rank_agreement.h"
#include "tessera/engine/save_options.h"
#include "tessera/engine/step_driver.h"

namespace tessera::engine {

struct EngineObjects {
  EngineObjects(Runtime& runtime, const EngineOptions& options)
      : context(runtime, options),
        ranks(context),
        model(*this, context, ranks),
        driver(context, ranks, model, options.run_steps),
        access(context, ranks, model, driver),
        saver(context, ranks, model, driver, access) {}

  // Before a forward or backward: the model is complete, it has its states, and nothing of a failed
  // pass is left.
  void begin_pass();
  // The same without the states.
  void begin_call();
  // No unit can be added from here on.
  void finalize();
  LoadResult load(const std::string& path, const LoadOptions& options);

  EngineContext context;
  RankAgreement ranks;
  Model model;
  StepDriver driver;
  ParamAccess access;
  CheckpointSaver saver;
};

}  // namespace tessera::engine
