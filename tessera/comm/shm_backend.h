// Processes of one host that read each other's memory. Host memory only.
//
// Order, agreement and failures are peer_backend.h's; here bytes are moved by the CPU. What lies in
// the shared heap of its process (shared_heap.h: shards, gradients) is read in place; other memory
// passes through chunks that are small enough for the cache.
//
// Threads: as peer_backend.h.
#pragma once

#include <memory>
#include <string>

#include "tessera/comm/peer_backend.h"
#include "tessera/comm/store.h"

namespace tessera::comm {

// What a rank holds in each group, for memory that peers cannot read in place: two chunks, which
// stay in the cache.
inline constexpr HeldMemory kShmChunks{Tier::kHost, std::size_t{512} << 10};

using ShmPhase = RoundPhase;
using ShmOptions = PeerBackendOptions;

// Collective over the `size` ranks of the group `name`. Null on every rank if one of them cannot
// map another's memory; `why_not` says then which, and why.
std::unique_ptr<Backend> make_shm_backend(std::shared_ptr<Store> store, int rank, int size,
                                          const std::string& name, const ShmOptions& options,
                                          std::string& why_not);

}  // namespace tessera::comm
