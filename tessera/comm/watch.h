// Turns a wait into an explanation: waits for a part of a call, with a limit, and says what went
// wrong in words that name the call, the unit, the parameter and the ranks.
//
// While it waits it posts this rank's line on the board about once per beat and looks whether
// another rank has failed, so one failure ends all ranks within a beat and not one by one at their
// time limits. Three ends: the work's own failure (another call, an injected fault), a lost peer
// (PeerError: the cause is looked for on the board), the time limit.
//
// Threads: every method may be called from any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/comm/board.h"
#include "tessera/comm/tag.h"
#include "tessera/device/pending.h"

namespace tessera::comm {

struct WatchOptions {
  std::string group;
  int rank = 0;
  std::vector<int> world_ranks;
  std::chrono::milliseconds timeout{0};
  std::chrono::milliseconds beat{0};
  std::shared_ptr<Board> board;  // may be null
};

class Watch {
 public:
  explicit Watch(WatchOptions options);

  // The last call that this rank started, and the last that came to its end.
  void started(const CallTag& tag, const std::string& text);
  void completed(std::uint64_t sequence);

  // Blocks until `pending` is done. `tag` and `text` say for which call. Throws CommError.
  void await(const device::Pending& pending, const CallTag& tag, const std::string& text) {
    await_any({&pending, 1}, tag, text);
  }
  // The same for the first of several that is done; gives back which one.
  std::size_t await_any(std::span<const device::Pending> parts, const CallTag& tag,
                        const std::string& text);

  // A sign of life, if one is due.
  void idle();
  // The last sign of life: this rank needs the group no more.
  void end();

  // Ends every await() soon: the group is out of use.
  void stop() { stopped_ = true; }

  // Tells the other ranks why this one ends.
  void post_failure(const std::string& text);

  bool has_board() const { return options_.board != nullptr; }
  std::chrono::milliseconds beat_interval() const { return options_.beat; }

 private:
  using TimePoint = std::chrono::steady_clock::time_point;

  void post();
  std::string failures_text();
  std::string explain_loss(const std::string& text, const std::string& reason);
  std::vector<std::uint64_t> read_beats();
  std::vector<std::optional<BoardEntry>> read_fresh(const CallTag& tag,
                                                    const std::vector<std::uint64_t>& beats);
  // `beats`: read_beats() of two beats ago.
  std::string explain_timeout(const CallTag& tag, const std::string& text,
                              const std::vector<std::uint64_t>& beats);

  const WatchOptions options_;
  std::atomic<bool> stopped_{false};

  // Guarded by mutex_.
  std::mutex mutex_;
  BoardEntry entry_;
  TimePoint next_post_;
};

}  // namespace tessera::comm
