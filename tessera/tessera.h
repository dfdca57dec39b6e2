// Everything a program that trains needs: include this one.
#pragma once

#include "tessera/comm/rank_process.h"
#include "tessera/comm/rendezvous.h"
#include "tessera/core/config.h"
#include "tessera/core/error.h"
#include "tessera/engine/build_scope.h"
#include "tessera/engine/engine.h"
#include "tessera/engine/inspection.h"
#include "tessera/engine/runtime.h"
#include "tessera/engine/unit.h"

namespace tessera {

using comm::process_environment;
using comm::RankProcess;

}  // namespace tessera
