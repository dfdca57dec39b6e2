// How ranks agree where some of them may use a unit and others not, or run out of data.
//
// Units of a model with mixture of experts or optional towers are declared dynamic. A rank that is
// about to use a unit announces it to all; so does a rank at a point that all must reach (the end
// of backward, a step). In each consensus round every rank announces one thing:
//
//   - Some announce dynamic units: all ranks gather those, in the order of their ids, each to the
//     ranks that want it. Who asked for one runs it; the others announce the same thing again.
//   - All announce the same static unit or point: it is agreed. Gradients of dynamic parameters
//     that any rank has by then are reduced, in the order of ids, and all go on.
//   - A rank without data joins: it agrees with whatever the others agree on, and takes part in it.
//     If all join, all are done.
//   - Anything else is a mistake, and an error on every rank that says who is where.
//
// So no rank computes anything only for other ranks, and unused parameters are not gathered. Only
// agreed uses enter the trace: static ones.
//
// Order of collectives: these rounds. Each is one all-gather of a few words on the group of the
// gathers.
//
// Threads: as Param.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/coordinator/access_trace.h"
#include "tessera/device/device.h"
#include "tessera/shard/param.h"

namespace tessera::coordinator {

class Gatherer;
class Prefetcher;
class UnitTable;

enum class ConsensusPoint : std::uint8_t {
  kNone,
  kWeights,      // the first backward agrees on the scale of loss weights
  kBackwardEnd,  // of the outermost backward
  kStep,
  kHold,  // parameters for a caller that is not a unit
  kAllDone,
};

// What a rank announces.
struct Intent {
  enum class Kind : std::uint8_t { kStatic, kDynamic, kPoint, kJoin };
  Kind kind = Kind::kJoin;
  Use use;                                       // of kStatic, kDynamic
  ConsensusPoint point = ConsensusPoint::kNone;  // of kPoint
  std::uint32_t detail = 0;                      // of kPoint: what for
  bool operator==(const Intent&) const = default;
};

// Gradients of dynamic parameters, which are reduced where all ranks have agreed.
struct DynamicGradients {
  std::function<std::vector<int>()> pending;  // ids that this rank has one of
  std::function<void(std::span<const int> ids)> reduce;
};

class Consensus {
 public:
  // Everything here outlives the consensus.
  struct Parts {
    comm::Group& all_ranks;
    device::Device& device;
    shard::ParamTable& params;
    const UnitTable& units;
    Gatherer& gatherer;
    Prefetcher& prefetcher;
    const DynamicGradients& gradients;
    std::vector<int> ranks_of_copy;  // among all, by rank of those that gather together
  };
  explicit Consensus(const Parts& parts);

  // Rounds, until what this rank announces is agreed, or the dynamic unit that it announces is
  // gathering. Returns what was agreed; kJoin: all ranks have joined.
  Intent agree(const Intent& own);
  std::uint64_t take_num_rounds();

 private:
  struct Round {
    std::vector<Intent> intents;     // by rank
    std::vector<int> with_gradient;  // dynamic parameters that at least one rank has a gradient of
  };
  // Blocks until all ranks have announced something.
  Round exchange(const Intent& own);
  void gather_announced(const Round& round);
  void check_same(const Round& round) const;
  std::string text_of(const Intent& intent) const;
  void reduce_gradients(const Round& round) const;

  const Parts parts_;
  std::vector<int> dynamic_params_;  // ids, ascending; their positions are the flags of a round
  const std::size_t num_words_;      // per rank
  std::vector<std::int64_t> host_;
  device::Memory words_;
  std::uint64_t num_rounds_ = 0;
};

}  // namespace tessera::coordinator
