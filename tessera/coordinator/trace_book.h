// The traces that were seen, and which of them is likely to come next.
//
// A pass is what a trace describes: all micro-batches of a step, or one evaluation. It ends with
// step(), or where a root forward begins. A forward is a root forward if no use is open and
//   - it is an inference and the pass is none, or the other way round, or
//   - it is an inference of the unit that the pass began with, after another unit's.
// A training forward of the first unit is none: a shared block may run many times in a row, two
// forwards may come before one backward, and what the next micro-batch needs may stay.
//
// Finished passes are kept, up to a number; the least recently seen goes first. A pass follows one
// of them as long as it repeats it; at a trace miss, another one with the same beginning takes
// over. What follows a pass is remembered by its trace and its number within the step: so training
// and evaluation in turn and branches in turn are foreseen.
//
// Nothing here depends on time or on anything but the uses: ranks that run the same program have
// the same book.
//
// Threads: plain data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <vector>

#include "tessera/coordinator/access_trace.h"

namespace tessera::coordinator {

using TraceId = int;
inline constexpr TraceId kNoTrace = -1;

class TraceBook {
 public:
  explicit TraceBook(std::size_t max_traces = 32) : max_traces_(max_traces) {}

  TraceMode mode() const { return mode_; }
  std::size_t position() const { return position_; }  // uses of this pass so far
  TraceId following() const { return following_; }    // kNoTrace unless kComplete
  const Trace& trace(TraceId id) const;
  bool knows(TraceId id) const { return find(id) != nullptr; }
  std::size_t num_traces() const { return kept_.size(); }

  // REQUIRES: no use is open.
  bool is_root(const Use& use) const;

  enum class Move : std::uint8_t {
    kRecorded,  // written down; nothing is known
    kFollowed,  // as expected
    kSwitched,  // another trace is followed from here on
    kMissed,    // nothing known fits any more
  };
  Move advance(const Use& use);
  // The use at `index` of this pass has ended, a forward or an inference.
  void note_end(std::size_t index);

  // The whole of what is followed has been seen, and what came after it the last time is known:
  // the trace of the next pass, or a step.
  struct Next {
    bool is_step = false;
    TraceId trace = kNoTrace;
  };
  std::optional<Next> expected_next() const;

  // The uses of this pass so far.
  Trace seen() const;

  // The pass is over; by step(), or because a root forward begins. Returns its trace; kNoTrace if
  // nothing was used. What is expected next is followed from here on.
  TraceId end_pass(bool by_step);
  // The pass is forgotten: an exception ended it.
  void forget_pass();

  // What was expected at the moment of the last trace miss or switch; nothing: the pass was over,
  // or had not been foreseen at all.
  const std::optional<Use>& expected_use() const { return expected_use_; }

 private:
  struct Kept {
    TraceId id = kNoTrace;
    Trace trace;
    std::uint64_t last_seen = 0;
  };
  // A finished pass, by its trace and its number in the step, and whether a step came after it.
  using Context = std::tuple<TraceId, int, bool>;

  const Kept* find(TraceId id) const;
  const Kept* most_recent_with(const std::vector<Use>& beginning, std::size_t length,
                               const Use& next) const;
  void follow(const Kept* kept);
  void expect_next_pass();
  TraceId keep(Trace trace);
  void evict_one();

  const std::size_t max_traces_;
  std::vector<Kept> kept_;
  TraceId next_id_ = 0;
  std::uint64_t num_seen_ = 0;
  std::map<Context, Next> next_;

  TraceMode mode_ = TraceMode::kRecord;
  TraceId following_ = kNoTrace;
  const Kept* followed_ = nullptr;  // of kept_, which changes only between passes
  Trace recorded_;                  // this pass, unless it follows a trace
  std::size_t position_ = 0;
  Use first_;
  Use last_;
  int number_in_step_ = 0;
  TraceId first_in_step_ = kNoTrace;
  std::optional<Context> before_;  // the pass before this one
  std::optional<Use> expected_use_;
};

}  // namespace tessera::coordinator
