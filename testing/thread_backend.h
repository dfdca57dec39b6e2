// Ranks as threads of one process: the backend of tests.
//
// A ThreadWorld is what a cluster is for processes; each rank's thread takes its own Backend from
// it. Collectives are really asynchronous: a worker per rank and group waits for its peers and
// copies from their memory into its own, so nothing happens on the calling thread and ordering
// mistakes show. Delays make ranks run late and out of step; faults make the n-th call of a rank
// fail or never arrive. Tags are compared in shared memory, at no cost.
//
// Order: calls of one rank and group are executed in the order in which they were started.
// Threads: a Backend belongs to its rank's thread; the world is shared and locks itself.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/backend.h"
#include "tessera/comm/group.h"
#include "tessera/comm/status_store.h"

namespace tessera::comm {

struct ThreadFault {
  enum class Kind : std::uint8_t {
    kThrow,  // the call fails on this rank, as if its network card had
    kNever,  // the rank does not take part in this call, nor in any later one
  };
  int rank = 0;
  std::uint64_t call = 1;  // the n-th call of this rank in its first group, from 1
  Kind kind = Kind::kThrow;
};

struct ThreadWorldOptions {
  int num_ranks = 1;
  // Each step of each call is held up by a random time below this. 0: no delays.
  std::uint32_t max_delay_us = 0;
  std::uint64_t seed = 0;
  std::optional<ThreadFault> fault;
  // Calls are work of the streams that they are given, late ones, as NCCL's are: a call that waits
  // for a peer holds up its stream. Tags and words travel beside them. Calls of different sizes
  // stand still until they are aborted; those that differ in names alone give wrong numbers.
  bool on_streams = false;
  // With on_streams: however early they were sent. Of groups with this in their names.
  device::Pending tags_arrive_after = {};
  std::string late_group = {};
};

class ThreadWorld {
 public:
  explicit ThreadWorld(const ThreadWorldOptions& options);
  ~ThreadWorld();

  int num_ranks() const;
  std::unique_ptr<Backend> make_backend(int rank);
  // Shared by all ranks, as the launcher's is by processes.
  const std::shared_ptr<StatusStore>& status() const;

  struct Shared;  // opaque: what the ranks' backends have in common

 private:
  std::shared_ptr<Shared> shared_;
};

// Runs `body` as `num_ranks` threads, each with the world group of its rank. A rank that throws
// is posted in the status store, so that the others can name it. Rethrows the failure of the lowest
// rank whose failure is a cause of its own (not PeerError), else the lowest rank's.
void run_ranks(const ThreadWorldOptions& world, const GroupOptions& group,
               const std::function<void(Group&)>& body);
inline void run_ranks(int num_ranks, const std::function<void(Group&)>& body) {
  ThreadWorldOptions options;
  options.num_ranks = num_ranks;
  run_ranks(options, {}, body);
}

// The same, but gives back what each rank threw (null: nothing) instead of throwing.
std::vector<std::exception_ptr> run_ranks_collecting(const ThreadWorldOptions& world,
                                                     const GroupOptions& group,
                                                     const std::function<void(Group&)>& body);

}  // namespace tessera::comm
