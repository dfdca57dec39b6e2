// Internal to engine: the objects of one engine, wired.
//
//   lifecycle   which calls are legal now
//   ranks       what ranks agree on outside of steps
//   model       parameters, units, buffers; building
//   driver      backward() and step(): gradients, reductions, updates
//   access      whole parameters between steps: gathered(), resident(), full values, to_plain()
//
// Hooks in autograd's graphs and units find the objects here.
//
// Threads: as Engine.
#pragma once

#include <memory>

#include "tessera/coordinator/coordinator.h"
#include "tessera/engine/engine.h"
#include "tessera/engine/engine_parts.h"
#include "tessera/engine/engine_tiers.h"
#include "tessera/engine/lifecycle.h"
#include "tessera/engine/model.h"
#include "tessera/engine/param_access.h"
#include "tessera/engine/rank_agreement.h"
#include "tessera/engine/step_driver.h"
#include "tessera/shard/param.h"

namespace tessera {

struct Engine::Impl {
  Impl(Runtime& runtime, const EngineOptions& options);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  // Before a forward or backward: the model is complete, and nothing of a failed pass is left.
  void begin_pass();
  // No unit can be added from here on.
  void finalize();

  // In the order of dependence.
  Runtime& runtime;
  const std::unique_ptr<device::Device> shard_device;  // where shards live; null: the runtime's
  comm::Group& group;
  shard::ParamTable params;
  engine::EngineTiers tiers;
  const std::unique_ptr<comm::Group> reductions;  // of a given group; null: the runtime's
  coordinator::Coordinator coordinator;
  engine::Lifecycle lifecycle;
  const engine::EngineParts parts;
  engine::RankAgreement ranks;
  engine::Model model;
  engine::StepDriver driver;
  engine::ParamAccess access;
};

}  // namespace tessera
