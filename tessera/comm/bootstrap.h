// Makes the world group of a process: finds its rank, joins the store and the status store, and
// chooses the backend.
//
// join_world() is collective over all processes of the run. A world of one needs no store and no
// network. Each group, also one that is split off, chooses its own backend; whether ranks share
// memory is found out by trying. A process may join several worlds, also at the same time: its n-th
// call belongs to the n-th call of every other rank. Gloo listens on the interface
// GLOO_SOCKET_IFNAME if that is set; else on loopback if all ranks are on one host; else on the
// address from which this rank reaches the store.
//
// Order: the store, the rank's claim of its number, the status store, the backend. A rank that
// fails in between posts its failure, so that ranks that wait for it end, too.
//
// Threads: call it once, from the main thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "tessera/comm/group.h"
#include "tessera/comm/rendezvous.h"
#include "tessera/comm/status_store.h"

namespace tessera::comm {

enum class BackendKind : std::uint8_t { kAuto, kShm, kIpc, kGloo, kNccl };

struct WorldOptions {
  // kAuto: memory that the ranks of a group share, that of GPUs (kIpc) or of the host (kShm); where
  // they share none, NCCL for CUDA devices, else Gloo.
  BackendKind backend = BackendKind::kAuto;
  int cuda_device = -1;  // this rank's GPU; -1: CPU
  // Above 0: kAuto takes ranks with different rank / ranks_per_host as being on different hosts,
  // wherever they are. Divides the world. 0: hosts are what is found.
  int ranks_per_host = 0;
  GroupOptions group;  // `status` is filled in
};

struct World {
  Rendezvous rendezvous;
  std::shared_ptr<StatusStore> status;  // null in a world of one
  std::unique_ptr<Group> group;
};

World join_world(const Rendezvous& rendezvous, const WorldOptions& options);

// For a rank that fails before it joins, in a world that no launcher of ours watches: tells those
// that wait for it, if it reaches the store within a second. Not collective; whatever goes wrong
// here is dropped. A rank that would hold the store itself can tell nobody.
void tell_before_joining(const Rendezvous& rendezvous, const std::string& failure) noexcept;

}  // namespace tessera::comm
