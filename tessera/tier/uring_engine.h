// The engine on io_uring: one thread fills the ring, sleeps in the kernel and reaps completions; a
// whole batch costs one system call. At most queue_depth * num_threads requests are in flight.
//
// Internal to tier: others call make_io_engine(). Without liburing at configure time the unit
// no_uring.cpp stands for it.
#pragma once

#include <memory>
#include <string>

#include "tessera/tier/io_engine.h"

namespace tessera::tier {

// Null where io_uring cannot be had; then `reason` says why, as half a sentence.
std::unique_ptr<IoEngine> try_make_uring_engine(const IoOptions& options, std::string& reason);

}  // namespace tessera::tier
