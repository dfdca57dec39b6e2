// How ranks agree where some of them may use a unit and others not.
//
// Units of a model with mixture of experts or optional towers are declared dynamic. A rank that is
// about to use a unit announces it to all; so does a rank that is at a point where all must meet
// (the end of backward, a step). Each round, every rank announces one thing:
//
//   - Some announce dynamic units: all ranks gather those, in the order of their ids, each to the
//     ranks that want it. Who asked for one runs it; the others announce the same thing again.
//   - All announce the same static unit or point: it is agreed. Gradients of dynamic parameters
//     that any rank has by then are reduced, in the order of ids, and all go on.
//   - A rank without data announces that it follows: it agrees with whatever the others agree on,
//     and takes part in it. If all follow, all are done.
//   - Anything else is a mistake, and an error on every rank that says who is where.
//
// So no rank computes anything for the others' sake, and what nobody uses is not gathered. Only
// what was agreed enters the trace: static uses.
//
// What fixes the order of collectives: these rounds. Each is one all-gather of a few words on the
// group of the gathers.
//
// Threads: as Param.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/coordinator/access_trace.h"
#include "tessera/device/device.h"

namespace tessera::coordinator {

enum class MeetingPoint : std::uint8_t {
  kNone,
  kWeights,      // the first backward agrees on the scale of weights
  kBackwardEnd,  // of the outermost backward
  kStep,
  kHold,  // parameters for somebody who is no unit
  kAllDone,
};

// What a rank announces.
struct Intent {
  enum class Kind : std::uint8_t { kStatic, kDynamic, kPoint, kFollow };
  Kind kind = Kind::kFollow;
  Use use;                                   // of kStatic, kDynamic
  MeetingPoint point = MeetingPoint::kNone;  // of kPoint
  std::uint32_t detail = 0;                  // of kPoint: what for
  bool operator==(const Intent&) const = default;
};

class Meeting {
 public:
  // All of it outlives the meeting. `num_flags` is the same on all ranks.
  Meeting(comm::Group& group, device::Device& device, std::size_t num_flags);

  struct Round {
    std::vector<Intent> intents;  // by rank
    std::vector<bool> flags;      // set by at least one rank
  };
  // Blocks until all ranks have come.
  Round exchange(const Intent& own, std::span<const int> own_flags);

 private:
  comm::Group& group_;
  device::Device& device_;
  const std::size_t num_flags_;
  const std::size_t num_words_;  // per rank
  std::vector<std::int64_t> host_;
  device::Memory words_;
};

}  // namespace tessera::coordinator
