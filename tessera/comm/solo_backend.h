// A world of one: no network, no threads. Every collective is a copy, or nothing.
//
// With a device, copies go through it in the order of the call's stream; without one the memory is
// the host's. Stream-ordered either way.
//
// Threads: as Backend.
#pragma once

#include <memory>

#include "tessera/comm/backend.h"

namespace tessera::comm {

std::unique_ptr<Backend> make_solo_backend(device::Device* device = nullptr);

}  // namespace tessera::comm
