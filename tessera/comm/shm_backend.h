// Processes of one host that read each other's memory. Host memory only.
//
// A call is one or more rounds. In a round each rank posts where its sources lie, waits until all
// have, reads what it needs from the others' memory straight to where it belongs (a copy, or a sum
// in rank order), says that it has read, and waits until all have: only then is a source free. So
// an all-gather copies each byte once, and a reduce-scatter adds the peers' pieces where they lie.
//
// What lies in the shared heap of its process (shared_heap.h: shards, gradients) is read in place.
// Other memory passes through a small shared region of each rank, in chunks: two, so that one is
// filled while the other is read.
//
// A posting carries the call's tag and words: they are compared in the first round of a call,
// before anything is read.
//
// Order: rounds are numbered, and a rank takes part in them in the order of its calls.
//
// Failures: a rank that aborts says so in its control block, one that ends closes its connection;
// whoever waits for it sees that within SharedCounter::kLookInterval. What a rank has posted and
// the heap itself stay readable after its end, so a call that needs nothing more from it succeeds.
//
// Threads: a worker of its own takes part in the rounds; the caller never waits.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "tessera/comm/backend.h"
#include "tessera/comm/status_store.h"
#include "tessera/comm/store.h"

namespace tessera::comm {

// Where a rank is in a round.
enum class ShmPhase : std::uint8_t { kPosting, kPosted, kReading, kRead };

struct ShmOptions {
  std::chrono::milliseconds timeout{std::chrono::minutes(10)};  // for ranks that do not join
  std::shared_ptr<StatusStore> status;                          // may be null
  // Called by the worker when it comes to a phase, and by those of groups that are split off: for
  // tests that hold a rank up there, or end it.
  std::function<void(ShmPhase)> on_phase;
};

// Collective over the `size` ranks of the group `name`. Null on every rank if one of them cannot
// map another's memory; `why_not` says then which, and why.
std::unique_ptr<Backend> make_shm_backend(std::shared_ptr<Store> store, int rank, int size,
                                          const std::string& name, const ShmOptions& options,
                                          std::string& why_not);

}  // namespace tessera::comm
