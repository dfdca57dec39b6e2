// GPUs that talk through c10d's NCCL. Device memory only; stream-ordered. Tags and words travel
// over sockets of the host (tag_channel.h): ranks agree beside the work, and a call on which they
// do not, or that is stuck, is named and aborted.
//
// One implementation is compiled: nccl_backend.cpp on CUDA builds, no_nccl.cpp elsewhere, whose
// make_nccl_backend() is an error that says how to get it.
#pragma once

#include <memory>
#include <string>

#include "tessera/comm/backend.h"
#include "tessera/comm/gloo_backend.h"
#include "tessera/comm/store.h"

namespace tessera::comm {

bool nccl_built();
std::string nccl_description();  // "2.28.9", or why there is none

// Blocks until all ranks have joined. `side`: how tags travel, and the time limit of all waits.
// REQUIRES: one rank per GPU; `device_index` is this rank's.
std::unique_ptr<Backend> make_nccl_backend(std::shared_ptr<Store> store, int rank, int size,
                                           int device_index, const std::string& name,
                                           const GlooOptions& side);

}  // namespace tessera::comm
