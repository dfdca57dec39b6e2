// Internal to engine: what the objects of one engine share. All of it outlives them.
//
// Threads: plain data.
#pragma once

#include "tessera/comm/group.h"
#include "tessera/coordinator/coordinator.h"
#include "tessera/engine/engine.h"
#include "tessera/engine/engine_tiers.h"
#include "tessera/engine/lifecycle.h"
#include "tessera/engine/runtime.h"
#include "tessera/shard/param.h"

namespace tessera::engine {

struct EngineParts {
  Engine::Impl& engine;  // for hooks and units, which find the objects there
  Runtime& runtime;
  comm::Group& group;         // the ranks that the parameters are cut over
  comm::Group& reduce_group;  // the same: see Runtime::reduce_group()
  shard::ParamTable& params;
  EngineTiers& tiers;
  coordinator::Coordinator& coordinator;
  Lifecycle& lifecycle;
};

}  // namespace tessera::engine
