// What each rank is doing and why a rank has failed, so that a wait can be explained.
//
// It is not on the path of any collective. A group's watchdog posts its rank's status about once
// per heartbeat, and a failure at once; a rank that has waited too long, or lost a peer, reads what
// the others posted. It lies in the rendezvous store, which the launcher holds, so that it outlives
// the rank that died:
//
//   status/rank/<group>/<rank>  RankStatus, the newest
//   status/failure/<rank>       RankFailure of a world rank; the first post stays
//   status/claim/<rank>         counts who wants to post that; the first may
//   status/num_failures         counts posts, so that looking for failures costs one question
//
// It has a connection of its own: a Store that blocks in get() does not hold it up. A post is not
// answered: another rank may still read the status before it for a moment.
//
// Reading and posting never throw. After a failed call the store counts as unreachable for good (a
// connection in the middle of a broken exchange cannot be trusted again) and reads as empty.
//
// Threads: every method may be called from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "tessera/comm/store.h"

namespace tessera::comm {

struct RankStatus {
  std::uint64_t launched = 0;   // sequence number of the last call that this rank started
  std::uint64_t completed = 0;  // ... that ended here
  std::uint64_t heartbeat = 0;  // counts posts: one that stands still belongs to a dead rank
  std::string text;             // describe(tag, unit, parameter) of the last call started

  bool operator==(const RankStatus&) const = default;
};

struct RankFailure {
  std::string text;
  bool is_mismatch = false;  // the text is that of a MismatchError

  bool operator==(const RankFailure&) const = default;
};

class StatusStore {
 public:
  StatusStore(std::unique_ptr<Store> store, int world_size)
      : store_(std::move(store)), world_size_(world_size) {}

  // `group` names a group; `rank` is the rank inside it.
  void post(const std::string& group, int rank, const RankStatus& status) noexcept;
  std::optional<RankStatus> read(const std::string& group, int rank) noexcept;

  // The root cause of one rank's end, by its rank in the world. The first post of a rank stays.
  void post_failure(int world_rank, const RankFailure& failure) noexcept;
  void post_failure(int world_rank, const std::exception& error) noexcept;
  std::map<int, RankFailure> failures() noexcept;
  // Throws if a rank has failed. Ranks whose calls differ fail with one sentence, and so does
  // everybody who hears of it: MismatchError with that sentence alone. Any other failure is a
  // PeerError: `what`, who failed, and why.
  void check_no_failure(const std::string& what);

  // Asks rather than remembers: the process that holds the store may have died.
  bool is_reachable() noexcept;

 private:
  template <typename Body>
  void attempt(const Body& body) noexcept;

  const std::unique_ptr<Store> store_;
  const int world_size_;
  std::atomic<bool> is_broken_{false};
};

}  // namespace tessera::comm
