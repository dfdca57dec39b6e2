// Processes that talk TCP through c10d's Gloo. Host memory only.
//
// Of Gloo's collectives only those are used that move the closed form of bytes and copy nothing
// twice: all-gather into given memory, all-to-all and broadcast. Its reduce-scatter is an
// all-reduce of a copy and adds in an order that depends on the position; we never call it.
//
// A call that was aborted stays inside Gloo until Gloo's own time limit; its memory is held by
// `keep_alive`, and the process group is left to the end of the process.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "tessera/comm/backend.h"
#include "tessera/comm/status_store.h"
#include "tessera/comm/store.h"

namespace tessera::comm {

struct GlooOptions {
  std::chrono::milliseconds timeout{std::chrono::minutes(10)};
  // Where to listen: a network interface, or a host name or address of this machine (loopback for
  // ranks of one machine), or, if both are empty, what this machine's host name stands for.
  std::string interface;
  std::string bind_host;
  // Operations in flight, and connections per pair of ranks that they are spread over; the same on
  // all ranks.
  int num_threads = 4;
  int num_devices = 2;
  // Looked at while ranks are waited for, so that the failure of one ends the wait. May be null.
  std::shared_ptr<StatusStore> status;
  // A group that is split off shares memory instead, if its ranks can: that of their GPUs
  // (ipc_backend.h; this is this rank's), or, where that is -1, of the host (shm_backend.h).
  bool tries_sharing_in_splits = false;
  int cuda_device = -1;
  int pretended_host = 0;  // PeerOptions::pretended_host
};

// What tries_sharing_in_splits asks for, collective over the ranks of the split; null: it does not,
// or they cannot.
std::unique_ptr<Backend> share_in_split(const std::shared_ptr<Store>& store, int rank, int size,
                                        const std::string& name, const GlooOptions& options);

// Blocks until all `size` ranks have joined at `store` under the prefix `name`.
std::unique_ptr<Backend> make_gloo_backend(std::shared_ptr<Store> store, int rank, int size,
                                           const std::string& name, const GlooOptions& options);

}  // namespace tessera::comm
