// Ranks of one host, as processes, whose GPUs read each other's memory: on one GPU, or on several
// with peer access.
//
// Order, agreement and failures are peer_backend.h's. Who takes part is found out on the CPU, by a
// worker; bytes are moved by the GPU. For a round that all ranks have posted, the worker enqueues
// on a stream of its own: wait for the caller's stream; tell the peers that the sources are ready;
// wait until theirs are; copies from the peers' memory straight to where they belong, or a kernel
// that adds in rank order; tell the peers that they are read; wait until all have. A call is done
// behind that, in the order of the device's streams: nobody's CPU waits for a GPU.
//
// Told is told through flags in the control blocks, which the GPUs write and wait for in stream
// order. Each flag has one writer and one reader, and lies in the control block of the reader: a
// rank that gives up a peer that has failed satisfies its own waits, and nobody else's.
//
// [Note: what a stream may wait for]
// Much of CUDA waits for all streams of the process, and may hold up its other threads meanwhile:
// freeing, unpinning or unmapping memory, ours, torch's, or that of an exception on its way; a
// stream that has taken all it can. So whatever a thread does must end without this process's next
// call into CUDA, and without what its threads would do then:
//  (1) A stream is given a wait only once the peer has given its own stream what ends it: told by
//      CPUs, beside the flags (Flags::enqueued). So all streams of all ranks come to their ends by
//      themselves, in whatever order groups and ranks are held up.
//  (2) Only an end or an abort leaves a wait without its end. A thread of its own, the watch, which
//      never calls CUDA and takes no lock that is held around such a call, sees that, fails the
//      calls, and releases the waits.
//  (3) So does abort(), on the thread that aborts: before a failing rank frees anything.
//
// What lies in the shared heap of its process and GPU (cuda_shared_heap.h: shards, gradients) is
// read in place; other memory, also pinned memory of the host, passes through chunks. Each rank
// lists the regions of its heap in its control block; peers open a region when it is first used,
// and close it when it is off the list, or in the end.
//
// A Pending of a call blocks Stream::wait() until all ranks have started the call, not until it is
// done. If a peer ends or aborts, calls in flight that need it fail by its name, all later ones
// with them, and no stream stays blocked.
//
// Threads: as peer_backend.h; and the watch.
#pragma once

#include <memory>
#include <string>

#include "tessera/comm/peer_backend.h"
#include "tessera/comm/staging.h"
#include "tessera/comm/store.h"

namespace tessera::comm {

// What a rank holds on its GPU in each group, for memory that peers cannot read in place: two
// chunks, large against the time that flags take from one process to another, and room for a small
// all-reduce.
inline constexpr HeldMemory kIpcChunks{Tier::kDevice,
                                       (std::size_t{8} << 20) + kSmallAllReduceBytes};

// Regions of its heap that a rank can list for its peers; what lies in others passes through
// chunks.
inline constexpr std::size_t kMaxListedRegions = 4096;

struct IpcOptions : PeerBackendOptions {
  std::size_t max_listed_regions = kMaxListedRegions;  // at most that; fewer for tests
};

// Is it in this build?
bool ipc_built();

// Collective over the `size` ranks of the group `name`, of which this one has the GPU
// `cuda_device`. Null on every rank if one of them cannot map another's memory; `why_not` says then
// which, and why.
std::unique_ptr<Backend> make_ipc_backend(std::shared_ptr<Store> store, int rank, int size,
                                          int cuda_device, const std::string& name,
                                          const IpcOptions& options, std::string& why_not);

}  // namespace tessera::comm
