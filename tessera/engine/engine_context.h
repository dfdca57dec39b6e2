// Internal to engine: what the objects of one engine share: its ranks, parameters, tiers and
// coordinator, and which calls are legal now. It outlives the objects.
//
// Threads: as Engine.
#pragma once

#include <memory>

#include "tessera/comm/codec.h"
#include "tessera/comm/group.h"
#include "tessera/coordinator/coordinator.h"
#include "tessera/engine/engine.h"
#include "tessera/engine/engine_tiers.h"
#include "tessera/engine/lifecycle.h"
#include "tessera/engine/mesh_groups.h"
#include "tessera/engine/runtime.h"
#include "tessera/engine/stored_report.h"
#include "tessera/shard/param.h"

namespace tessera::engine {

struct EngineContext {
  // Collective, with NVMe or a group that is not the runtime's.
  EngineContext(Runtime& runtime, const EngineOptions& options);
  ~EngineContext();
  EngineContext(const EngineContext&) = delete;
  EngineContext& operator=(const EngineContext&) = delete;

  // In the order of dependence.
  Runtime& runtime;
  const std::unique_ptr<device::Device> shard_device;  // where shards live; null: the runtime's
  // Of gradients, for memory of the runtime's device; null: they are reduced exactly.
  const std::unique_ptr<const comm::Codec> gradient_codec;
  comm::Group& group;  // all ranks that train the model
  MeshGroups mesh;
  shard::ParamTable params;
  EngineTiers tiers;
  const std::unique_ptr<comm::Codec> weight_codec;  // of gathers; null: they are not quantised
  coordinator::Coordinator coordinator;
  StoredReport stored_report;
  Lifecycle lifecycle;
};

}  // namespace tessera::engine
