// The engine that works everywhere: a pool of threads that call pread and pwrite. Each has one
// request in flight, so num_threads is the depth of its queue and queue_depth is not used.
//
// Internal to tier: others call make_io_engine().
#pragma once

#include <memory>

#include "tessera/tier/io_engine.h"

namespace tessera::tier {

std::unique_ptr<IoEngine> make_thread_engine(const IoOptions& options);

}  // namespace tessera::tier
