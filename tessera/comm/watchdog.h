// Turns a wait into an explanation: waits for a part of a call, with a limit, and says what went
// wrong in words that name the call, the unit, the parameter and the ranks.
//
// While it waits it posts this rank's status about once per heartbeat and looks whether another
// rank has failed, so one failure ends all ranks within a heartbeat and not one by one at their
// time limits. A wait ends by the work's own failure, by a lost peer (PeerError: the cause is
// looked for in the status store), by another rank's failure (StatusStore::check_no_failure), or at
// the limit.
//
// Threads: every method may be called from any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/comm/status_store.h"
#include "tessera/comm/tag.h"
#include "tessera/device/pending.h"

namespace tessera::comm {

struct WatchdogOptions {
  std::string group;
  int rank = 0;
  std::vector<int> world_ranks;
  std::chrono::milliseconds timeout{0};
  std::chrono::milliseconds heartbeat{0};
  std::shared_ptr<StatusStore> status;  // may be null
};

class Watchdog {
 public:
  explicit Watchdog(WatchdogOptions options) : options_(std::move(options)) {}

  // The last call that this rank started, and the last that ended.
  void started(const CallTag& tag, const std::string& text);
  void completed(std::uint64_t sequence);

  // Blocks until `pending` is done; for as long as the options say, unless there is a limit of its
  // own. `tag` and `text` say for which call. Throws CommError.
  void await(const device::Pending& pending, const CallTag& tag, const std::string& text,
             std::optional<std::chrono::milliseconds> limit = {}) {
    await_any({&pending, 1}, tag, text, limit);
  }
  // The same for the first of several that is done; gives back which one.
  std::size_t await_any(std::span<const device::Pending> parts, const CallTag& tag,
                        const std::string& text,
                        std::optional<std::chrono::milliseconds> limit = {});

  // A heartbeat, if one is due.
  void idle();
  // The last heartbeat: this rank needs the group no more.
  void end();

  // Ends every await() soon: the group is out of use.
  void stop() { stopped_ = true; }

  // Tells the other ranks why this one ends.
  void post_failure(const std::exception& error);

  bool has_status_store() const { return options_.status != nullptr; }
  std::chrono::milliseconds heartbeat() const { return options_.heartbeat; }

 private:
  using TimePoint = std::chrono::steady_clock::time_point;

  void post();
  void check_no_failure(const std::string& what);
  std::optional<RankStatus> read(std::size_t rank);
  std::vector<std::uint64_t> read_heartbeats();
  std::vector<std::optional<RankStatus>> read_fresh(const CallTag& tag,
                                                    const std::vector<std::uint64_t>& heartbeats);
  // `what`: the call and its group.
  [[noreturn]] void throw_loss(const std::string& what, const std::string& reason);
  // `heartbeats`: those of two heartbeats ago.
  [[noreturn]] void throw_timeout(const CallTag& tag, const std::string& what,
                                  std::chrono::milliseconds limit,
                                  const std::vector<std::uint64_t>& heartbeats);

  const WatchdogOptions options_;
  std::atomic<bool> stopped_{false};

  // Guarded by mutex_.
  std::mutex mutex_;
  RankStatus own_;
  TimePoint next_post_;
};

}  // namespace tessera::comm
