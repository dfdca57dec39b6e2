// Internal to engine: whether all copies of the model are the same (mics.check_replicas).
//
// What fixes the order of collectives: the caller, step().
//
// Threads: as Engine.
#pragma once

#include "tessera/engine/engine_context.h"
#include "tessera/engine/rank_agreement.h"

namespace tessera::engine {

// Collective: reads every shard, and compares hashes of those that are the same one. CorruptError
// on every rank, with the first parameter that differs and the ranks that hold it. Blocks.
// REQUIRES: no update runs.
void check_replicas(EngineContext& context, RankAgreement& ranks);

}  // namespace tessera::engine
