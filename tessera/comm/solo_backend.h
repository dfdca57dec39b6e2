// A world of one: no network, no threads. Every collective is a copy, or nothing.
//
// Threads: as Backend.
#pragma once

#include <memory>

#include "tessera/comm/backend.h"

namespace tessera::comm {

std::unique_ptr<Backend> make_solo_backend();

}  // namespace tessera::comm
