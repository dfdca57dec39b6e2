// Internal to engine: exchanges in which ranks agree before or after what one of them can refuse.
//
// Order of collectives: the caller's.
//
// Threads: as Engine.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "tessera/engine/engine_context.h"

namespace tessera::engine {

class RankAgreement {
 public:
  explicit RankAgreement(EngineContext& context) : ctx_(context) {}

  // Before a collective that is no unit's: see coordinator/consensus.h.
  void join_outside_of_units(const std::string& what);
  // Collective: every rank's numbers, in rank order.
  std::vector<std::int64_t> gather_numbers(const std::vector<std::int64_t>& mine,
                                           const std::string& what);
  // Collective: each number becomes the sum, or the maximum, over all ranks, or over those of
  // `group`.
  void reduce_numbers(std::span<double> numbers, comm::Reduction reduction, const char* what,
                      comm::Group* group = nullptr);
  // Collective: rank 0's text.
  std::string broadcast_text(std::string text, const char* what);
  // Collective: `check` throws on a rank that cannot take part in what comes next, and then no rank
  // does: that rank throws its own error, the others a ConfigError with its words. Before the first
  // collective of whatever one rank can refuse.
  void agree(const std::string& what, const std::function<void()>& check);

 private:
  EngineContext& ctx_;
  // Where they are reduced, kept: giving memory back to a device waits for all of its work.
  device::Memory numbers_;
};

}  // namespace tessera::engine
